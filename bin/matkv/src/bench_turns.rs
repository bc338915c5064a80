//! `matkv bench turns`: conversations over the same chunks, with the rows of earlier turns and
//! without, alternated, and the answers compared.

use std::path::PathBuf;

use anyhow::ensure;
use matkv_api::Client;
use matkv_api::v1::{GenerateRequest, Message};
use matkv_config::Resolved;

use crate::ask::{Answer, generate};
use crate::bench::{ingest_all, whole_chunks};
use crate::bench_store::place;
use crate::figures::{Figure, Outcome};
use crate::pair::with_private;
use crate::stop::Stop;

#[derive(clap::Args, Clone)]
pub struct TurnsOptions {
    /// Documents to take whole chunks from
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Chunks in the prompt
    #[arg(long, default_value_t = 4)]
    pub chunks: usize,
    /// Questions of a conversation
    #[arg(long, default_value_t = 4)]
    pub turns: usize,
    /// Conversations of each mode
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    #[arg(long, value_delimiter = ',', default_value = "linked(32),exact")]
    pub mode: Vec<String>,
    /// Tokens of an answer
    #[arg(long, default_value_t = 32)]
    pub max_new_tokens: u32,
    /// Keep the stores beside this directory instead of in temporary ones
    #[arg(long)]
    pub store: Option<PathBuf>,
}

/// A turn of a conversation, answered with the rows of earlier ones and without.
struct Turn<'a> {
    mode: &'a str,
    number: usize,
    kept: Answer,
    computed: Answer,
}

pub async fn run(
    resolved: &Resolved,
    o: &TurnsOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    ensure!(o.turns > 0 && o.rounds > 0, "--turns and --rounds must be at least 1");
    let (store, _temporary) = place(resolved, o.store.as_deref())?;
    let keeps = |keeps: bool| [("reuse.earlier_prompts", keeps.to_string())];
    let (kept_in, computed_in) = (store.join("kept"), store.join("computed"));
    let (with, without) = (keeps(true), keeps(false));
    let mut turns = Vec::new();
    let mut both = async |kept: Client| {
        let measure = async |computed, _: &_| measure(&kept, &computed, o, &mut turns).await;
        with_private(resolved, &computed_in, &without, stop, measure).await
    };
    let with = with_private(resolved, &kept_in, &with, stop, async |kept, _| both(kept).await);
    let ended = with.await;
    notes.push(
        "a pair of processes that keeps rows of earlier prompts and one that does not, asked in \
         turn, chunks in the arena; every answer was compared; a conversation of each mode first, \
         to warm up"
            .into(),
    );
    Outcome::until(ended, figures(o, &turns), notes)
}

async fn measure<'o>(
    kept: &Client,
    computed: &Client,
    o: &'o TurnsOptions,
    turns: &mut Vec<Turn<'o>>,
) -> anyhow::Result<()> {
    ingest_all(kept, &o.corpus, None).await?;
    ingest_all(computed, &o.corpus, None).await?;
    let (ids, _) = whole_chunks(kept, o.chunks).await?;
    for round in 0..=o.rounds {
        for mode in &o.mode {
            let mut messages: Vec<Message> = Vec::new();
            let say = |role: &str, content: String| Message { role: role.into(), content };
            for number in 1..=o.turns {
                // Conversations share no words but these.
                let asked = format!("{round}.{number}: what is said about number {number}?");
                messages.push(say("user", asked));
                let request = GenerateRequest {
                    messages: messages.clone(),
                    chunk_ids: ids.clone(),
                    mode: mode.clone(),
                    max_new_tokens: Some(o.max_new_tokens),
                    ..GenerateRequest::default()
                };
                let one = generate(kept.clone(), request.clone(), |_| Ok(())).await?;
                let other = generate(computed.clone(), request, |_| Ok(())).await?;
                ensure!(
                    one.tokens == other.tokens,
                    "turn {number} in {mode} was answered {:?} with rows of earlier turns, and \
                     {:?} without",
                    one.text,
                    other.text
                );
                messages.push(say("assistant", one.text.clone()));
                if round > 0 {
                    turns.push(Turn { mode, number, kept: one, computed: other });
                }
            }
        }
        eprintln!("round {round}/{}", o.rounds);
    }
    Ok(())
}

fn figures(o: &TurnsOptions, turns: &[Turn<'_>]) -> Vec<Figure> {
    let mut out = Vec::new();
    for mode in &o.mode {
        for number in 1..=o.turns {
            let of: Vec<_> =
                turns.iter().filter(|t| t.mode == mode && t.number == number).collect();
            let named = |name: &str| format!("{name}[{mode},{number}]");
            let median = |name: &str, unit, value: &dyn Fn(&Turn<'_>) -> f64| {
                let values: Vec<f64> = of.iter().map(|t| value(t)).collect();
                Figure::median(named(name), &values, unit)
            };
            let ttft = |a: &Answer| a.timings.first_token_ms;
            out.extend([
                median("prompt_tokens", "tokens", &|t| f64::from(t.kept.usage.prompt_tokens)),
                median("earlier_tokens", "tokens", &|t| f64::from(t.kept.usage.earlier_tokens)),
                median("ttft_ms", "ms", &|t| ttft(&t.kept)),
                median("ttft_computed_ms", "ms", &|t| ttft(&t.computed)),
                median("ttft_computed_over_earlier", "ratio", &|t| {
                    ttft(&t.computed) / ttft(&t.kept)
                }),
            ]);
        }
    }
    out
}
