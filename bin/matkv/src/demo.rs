//! `matkv demo`: what MatKV does, on an example corpus, in one command.

use std::process::ExitCode;

use anyhow::Context;
use matkv_api::v1::{GenerateRequest, Timings};
use matkv_config::{Origin, Resolved};

use crate::args::DemoOptions;
use crate::ask::{Answer, generate};
use crate::model::pull_one;
use crate::out::{say, say_part};
use crate::pair::Pair;
use crate::{ingest, render, sources};

pub async fn run(resolved: &Resolved, options: &DemoOptions) -> anyhow::Result<ExitCode> {
    let config = &resolved.config;
    for name in [config.model.as_str(), "minilm"] {
        if !name.ends_with(".gguf") {
            pull_one(config, name)?;
        }
    }
    let mut resolved = resolved.clone();
    if resolved.origin("log.level") == Origin::Default {
        resolved.override_with("log.level", "warn")?;
    }
    let questions = std::fs::read_to_string(&options.questions)
        .with_context(|| format!("cannot read {}", options.questions.display()))?;
    let mut pair = Pair::start(&resolved)?;
    let outcome = tokio::select! {
        outcome = show(&mut pair, &resolved, options, &questions) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let stopped = pair.stop()?;
    outcome?;
    anyhow::ensure!(stopped.success(), "the loader ended with {stopped}");
    say!("both processes stopped");
    Ok(ExitCode::SUCCESS)
}

async fn show(
    pair: &mut Pair,
    resolved: &Resolved,
    options: &DemoOptions,
    questions: &str,
) -> anyhow::Result<()> {
    let client = pair.ready(&resolved.config).await?;
    let (found, skipped) = sources::collect(std::slice::from_ref(&options.corpus))?;
    anyhow::ensure!(skipped.is_empty() && !found.is_empty(), "no documents in {}", options.corpus);
    let (summary, failed) = ingest::ingest(client.clone(), found, "stdin", true).await?;
    anyhow::ensure!(failed.is_empty(), "{}: {}", failed[0].name, failed[0].reason);
    say!(
        "{} documents: {} chunks computed, {} already there",
        summary.documents,
        summary.chunks_computed,
        summary.chunks_reused
    );
    let mut rows = Vec::new();
    for question in questions.lines().filter(|l| !l.trim().is_empty()) {
        say!("\n{question}");
        let mut answers = Vec::new();
        for mode in ["vanilla", "matkv"] {
            let request = GenerateRequest {
                question: question.into(),
                mode: mode.into(),
                top_k: Some(options.top_k),
                max_new_tokens: Some(options.max_new_tokens),
                // The arena keeps what the question before has loaded: ask flash each time.
                cold: true,
                ..GenerateRequest::default()
            };
            let answer = generate(client.clone(), request, |_| Ok(())).await?;
            say!("  {mode:<8} {}", answer.text.trim().replace('\n', " "));
            answers.push(answer);
        }
        let same = answers[0].tokens == answers[1].tokens;
        say!("  same answer: {}", render::yes_no(same));
        render::sources(&answers[1]);
        rows.push(answers);
    }
    say!("\nmilliseconds, median of {} questions", rows.len());
    say_part!("{}", phases(&rows));
    Ok(())
}

/// Phases of vanilla and matkv side by side.
fn phases(rows: &[Vec<Answer>]) -> String {
    type Phase = (&'static str, fn(&Timings) -> f64);
    let pick: [Phase; 6] = [
        ("retrieve", |t| t.retrieve_ms),
        ("load", |t| t.load_ms),
        ("prefill / sub-prefill", |t| t.prefill_ms),
        ("time to first token", |t| t.first_token_ms),
        ("decode", |t| t.decode_ms),
        ("end to end", |t| t.total_ms),
    ];
    let table = pick.iter().map(|(name, phase)| {
        let of = |i: usize| median(rows.iter().map(|r| phase(&r[i].timings)).collect());
        let (vanilla, matkv) = (of(0), of(1));
        let ratio = if matkv > 0.5 { format!("{:.1}×", vanilla / matkv) } else { "–".into() };
        vec![(*name).to_owned(), format!("{vanilla:.1}"), format!("{matkv:.1}"), ratio]
    });
    render::table(&["phase", "vanilla", "matkv", "ratio"], &table.collect::<Vec<_>>())
}

/// The middle value; the mean of the two middle ones.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}
