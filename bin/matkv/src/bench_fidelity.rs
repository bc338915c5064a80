//! `matkv bench fidelity`: how far answers move by each way of reusing chunks.
//!
//! Documents are ingested, and chunks retrieved, by a private pair of processes; answers are then
//! compared in this one, over the chunks' files.

use std::path::PathBuf;

use matkv_api::Client;
use matkv_api::v1::GenerateRequest;
use matkv_config::{Config, Resolved};
use matkv_loader_core::measure::fidelity::{self, Method, Question, Sample};
use matkv_loader_core::offline;
use matkv_types::ChunkId;

use crate::args::{CorpusOptions, QuestionOptions};
use crate::ask::generate;
use crate::bench::{ingest_all, lines, questions};
use crate::bench_store::{own, place};
use crate::figures::{Figure, Outcome};
use crate::pair::with_private;
use crate::render::table;
use crate::stop::Stop;

#[derive(clap::Args, Clone)]
pub struct FidelityOptions {
    #[command(flatten)]
    pub ingest: CorpusOptions,
    #[command(flatten)]
    pub asked: QuestionOptions,
    /// Modes to compare with the full prefill; also focused(R,N,U), blend(R), blend(R,N) and
    /// blend(R,N,U): R a share of rows, N link tokens, U rows chosen together
    #[arg(long, default_values_t = DEFAULT_MODES.map(str::to_owned))]
    pub mode: Vec<String>,
    /// Chunks retrieved for a question
    #[arg(long, default_value_t = 4)]
    pub top_k: u32,
    /// Answer tokens compared of each question at most
    #[arg(long, default_value_t = 32)]
    pub answer: usize,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
}

const DEFAULT_MODES: [&str; 9] = [
    "exact",
    "independent",
    "linked(32)",
    "linked(128)",
    "focused(0.05)",
    "focused(0.1)",
    "focused(0.2)",
    "blend(0.1)",
    "blend(0.2)",
];

pub async fn run(
    resolved: &Resolved,
    o: &FidelityOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let link = resolved.config.link_tokens;
    let methods: Vec<Method> =
        own(o.mode.iter().map(|m| Method::parse(m, link)).collect::<Result<_, _>>())?;
    let asked = &questions(&o.asked.questions, o.asked.count)?[..];
    let gold = o.asked.answers.as_deref().map(|p| lines(p, "answer")).transpose()?;
    let (dir, _temporary) = place(resolved, o.store.as_deref())?;
    let prepare = async |client, config: &Config| {
        ingest_all(&client, &o.ingest.corpus, o.ingest.documents).await?;
        Ok((retrieve(&client, asked, o.top_k).await?, config.clone()))
    };
    let (retrieved, config) = with_private(resolved, &dir, &[], stop, prepare).await?;
    let store = offline::open(&config, None)?;
    let (model, prefix) = offline::model(&config)?;
    let mut questions = Vec::new();
    for (i, (text, chunks)) in asked.iter().zip(retrieved).enumerate() {
        let gold = gold.as_ref().and_then(|g| g.get(i).cloned());
        questions.push(Question { chunks, rest: offline::rest(&model, text)?, gold });
    }
    let next = stop.counting("question", questions.len());
    let compared =
        fidelity::compare(&store, (&model, &prefix), &questions, &methods, o.answer, next);
    let samples = own(compared)?;
    let with_gold = gold.is_some();
    let figures: Vec<Vec<Figure>> =
        o.mode.iter().zip(&samples).map(|(m, s)| of_mode(m, s, with_gold)).collect();
    notes.push(shown(&o.mode, &figures, with_gold));
    let first = samples.first().map_or(&[][..], Vec::as_slice);
    let tokens: f64 = first.iter().map(|s| s.tokens).sum();
    let rows: f64 = first.iter().map(|s| s.rows).sum();
    let chunks: usize = questions[..first.len()].iter().map(|q| q.chunks.len()).sum();
    notes.push(format!(
        "{} questions over {} chunks of {:.0} tokens each on average, rows at rest {}; {tokens} \
         answer tokens; 95 % intervals over questions",
        first.len(),
        o.top_k,
        rows / chunks as f64,
        config.storage_dtype
    ));
    Outcome::until(stop.check(), figures.into_iter().flatten().collect(), notes)
}

/// The chunks each question is answered from.
async fn retrieve(
    client: &Client,
    questions: &[String],
    top_k: u32,
) -> anyhow::Result<Vec<Vec<ChunkId>>> {
    let mut out = Vec::new();
    for question in questions {
        let request = GenerateRequest {
            question: question.clone(),
            mode: "independent".into(),
            top_k: Some(top_k),
            max_new_tokens: Some(1),
            ..GenerateRequest::default()
        };
        let answer = generate(client.clone(), request, |_| Ok(())).await?;
        let ids = answer.started.chunks.iter().map(|c| c.chunk_id.parse());
        out.push(ids.collect::<Result<Vec<ChunkId>, _>>()?);
    }
    Ok(out)
}

fn of_mode(mode: &str, samples: &[Sample], with_gold: bool) -> Vec<Figure> {
    let figure = |name: &str, unit, over: fn(&Sample) -> f64, under: fn(&Sample) -> f64| {
        let [value, low, high] = fidelity::ratio(samples, over, under);
        Figure { name: format!("{name}[{mode}]"), value, unit, low, high, target: None }
    };
    let mut out = vec![
        figure("kl", "nats/token", |s| s.kl, |s| s.tokens),
        figure("top1", "share", |s| s.same, |s| s.tokens),
        figure("loglikelihood", "nats/answer", |s| s.likelihood, |_| 1.0),
        figure("recomputed_rows", "rows", |s| s.recomputed, |_| 1.0),
        figure("recomputed_share", "share", |s| s.recomputed, |s| s.rows),
    ];
    if with_gold {
        out.push(figure("f1", "share", |s| s.f1, |_| 1.0));
        out.push(figure("em", "share", |s| s.em, |_| 1.0));
    }
    out
}

fn shown(modes: &[String], figures: &[Vec<Figure>], with_gold: bool) -> String {
    let mut header = vec!["mode", "KL", "top-1", "log-likelihood", "rows", "of rows"];
    if with_gold {
        header.extend(["F1", "EM"]);
    }
    let row = |(mode, figures): (&String, &Vec<Figure>)| {
        let cell = |(i, f): (usize, &Figure)| match i {
            3 => format!("{:.0}", f.value),
            _ => format!("{:.4} ± {:.4}", f.value, (f.high - f.low) / 2.0),
        };
        std::iter::once(mode.clone()).chain(figures.iter().enumerate().map(cell)).collect()
    };
    table(&header, &modes.iter().zip(figures).map(row).collect::<Vec<Vec<String>>>())
}
