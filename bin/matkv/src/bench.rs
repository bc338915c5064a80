//! `matkv bench`: a private pair of processes, alternated measurements, named figures.
//!
//! Figures are documented in `docs/figures.md`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use matkv_api::Client;
use matkv_api::v1::{GenerateRequest, GetStatusRequest, IngestSummary, ListDocumentsRequest};
use matkv_config::{Config, Resolved};
use matkv_loader_core::process::evict_page_cache;

use crate::args::{BenchCommand, ColdOptions, Format};
use crate::ask::{Answer, generate};
use crate::figures::{self, Figure, Outcome};
use crate::ingest::ingest;
use crate::out::{say, say_part};
use crate::pair::with_private;
use crate::sources::{Source, collect};
use crate::stop::Stop;
use crate::{
    bench_e2e, bench_fidelity, bench_model, bench_store, bench_turns, demo, fio, paper, peers,
    report, throughput,
};

pub async fn run(
    resolved: &Resolved,
    command: &BenchCommand,
    format: Format,
) -> anyhow::Result<ExitCode> {
    let mut notes = Vec::new();
    let (stop, all) = (&Stop::on_ctrl_c(), &mut notes);
    let (name, outcome) = match command {
        BenchCommand::E2e(o) => ("e2e", bench_e2e::run(resolved, o, stop, all).await),
        BenchCommand::Cold(o) => ("cold", cold(resolved, o, stop, all).await),
        BenchCommand::Turns(o) => ("turns", bench_turns::run(resolved, o, stop, all).await),
        BenchCommand::Load(o) => ("load", bench_store::load(resolved, o, stop, all).await),
        BenchCommand::Codec(o) => ("codec", bench_store::codec(resolved, o, stop, all).await),
        BenchCommand::Fidelity(o) => {
            ("fidelity", bench_fidelity::run(resolved, o, stop, all).await)
        }
        BenchCommand::Prefill(o) => ("prefill", bench_model::prefill(resolved, o, stop, all)),
        BenchCommand::Decode(o) => ("decode", bench_model::decode(resolved, o, stop, all)),
        BenchCommand::Trace(o) => ("trace", bench_store::trace(o, stop, all)),
        BenchCommand::Start(o) => ("start", bench_store::start(resolved, o, stop, all).await),
        BenchCommand::Peers(o) => ("peers", peers::run(resolved, o, stop, all).await),
        BenchCommand::Throughput(o) => {
            ("throughput", throughput::run(resolved, o, stop, all).await)
        }
        BenchCommand::Energy(o) => ("energy", throughput::energy(resolved, o, stop, all).await),
        BenchCommand::Report(o) if o.paper => {
            let (tables, complete) = paper::measure(resolved, o, stop).await?;
            say_part!("{tables}");
            say!("{}", figures::origin(Config::threads(resolved.config.loader_threads)));
            return Ok(status(complete));
        }
        BenchCommand::Report(o) => return report::run(o),
    };
    let Outcome { figures, complete } = outcome?;
    show(resolved, name, &figures, &notes, format);
    Ok(status(complete))
}

fn status(complete: bool) -> ExitCode {
    if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Measures a pair of processes of its own.
pub async fn with_pair(
    resolved: &Resolved,
    store: Option<&Path>,
    stop: &Stop,
    measure: impl AsyncFnOnce(Client) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // Beside the store, on the device that serves it; /tmp may be memory.
    let (store, _temporary) = bench_store::place(resolved, store)?;
    with_private(resolved, &store, &[], stop, async |client, _| measure(client).await).await
}

fn show(resolved: &Resolved, name: &str, figures: &[Figure], notes: &[String], format: Format) {
    let threads = Config::threads(resolved.config.loader_threads);
    match format {
        Format::Json => {
            say!("{:#}", figures::report(name, threads, figures, notes));
        }
        Format::Text => {
            // Its tables say the same, and can be read.
            if !["trace", "fidelity"].contains(&name) && !figures.is_empty() {
                say_part!("{}", figures::text(figures));
            }
            notes.iter().for_each(|n| say!("{n}"));
            say!("{}", figures::origin(threads));
        }
    }
}

/// Documents by the number in their name, then by name.
fn by_number(mut sources: Vec<Source>, limit: Option<usize>) -> Vec<Source> {
    let key = |s: &Source| {
        let name = s.name("");
        let stem = Path::new(&name).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let digits: String = stem.chars().filter(char::is_ascii_digit).collect();
        (digits.parse::<u64>().unwrap_or(u64::MAX), name)
    };
    sources.sort_by_key(key);
    sources.truncate(limit.unwrap_or(usize::MAX));
    sources
}

/// One a line: JSON with this field, or the line itself.
pub fn lines(path: &Path, field: &str) -> anyhow::Result<Vec<String>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let value = |line: &str| match serde_json::from_str::<serde_json::Value>(line) {
        Ok(json) => json[field].as_str().map_or_else(|| line.to_owned(), str::to_owned),
        Err(_) => line.to_owned(),
    };
    Ok(text.lines().filter(|l| !l.trim().is_empty()).map(value).collect())
}

/// The first questions of a file, so many at most.
pub fn questions(path: &Path, most: usize) -> anyhow::Result<Vec<String>> {
    let mut all = lines(path, "query")?;
    ensure!(!all.is_empty(), "{} has no questions", path.display());
    all.truncate(most);
    Ok(all)
}

/// Ingests documents in order of their numbers, every one.
pub async fn ingest_all(
    client: &Client,
    corpus: &[String],
    limit: Option<usize>,
) -> anyhow::Result<IngestSummary> {
    let (found, skipped) = collect(corpus)?;
    ensure!(skipped.is_empty(), "{}: {}", skipped[0].name, skipped[0].reason);
    let sources = by_number(found, limit);
    ensure!(!sources.is_empty(), "no documents in {corpus:?}");
    let (summary, failed) = ingest(client.clone(), sources, "stdin", true).await?;
    ensure!(failed.is_empty(), "{}: {}", failed[0].name, failed[0].reason);
    Ok(summary)
}

/// Whole chunks of the corpus: ids, and where their files are.
pub async fn whole_chunks(
    client: &Client,
    count: usize,
) -> anyhow::Result<(Vec<String>, Vec<PathBuf>)> {
    let mut client = client.clone();
    let status = client.get_status(GetStatusRequest {}).await?.into_inner();
    let list = client.list_documents(ListDocumentsRequest {}).await?.into_inner();
    let mut ids = Vec::new();
    for document in list.documents {
        // Every chunk but the last of a document has the full size.
        let whole = document.chunk_ids.len().saturating_sub(1);
        ids.extend(document.chunk_ids.into_iter().take(whole));
    }
    ids.sort();
    ids.dedup();
    ids.truncate(count);
    ensure!(ids.len() == count, "the corpus has only {} whole chunks", ids.len());
    let root = Path::new(&status.store_dir).join(&status.fingerprint[..16]).join("chunks");
    let paths = ids.iter().map(|id| root.join(&id[..2]).join(format!("{id}.kv"))).collect();
    Ok((ids, paths))
}

/// What `bench cold` has measured.
#[derive(Default)]
struct Cold {
    /// Of the chunks' files.
    bytes: f64,
    matkv: Vec<Answer>,
    vanilla: Vec<Answer>,
    fio: Vec<f64>,
}

async fn cold(
    resolved: &Resolved,
    o: &ColdOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let mut measured = Cold::default();
    let measure = async |client| measured.measure(&client, o).await;
    let ended = with_pair(resolved, o.store.as_deref(), stop, measure).await;
    if !fio::is_installed() {
        notes.push("fio is not installed: load_over_fio is not measured".into());
    }
    Outcome::until(ended, measured.figures(), notes)
}

impl Cold {
    async fn measure(&mut self, client: &Client, o: &ColdOptions) -> anyhow::Result<()> {
        ingest_all(client, &o.corpus, None).await?;
        let (ids, files) = whole_chunks(client, o.chunks).await?;
        self.bytes = files.iter().map(|f| std::fs::metadata(f).map_or(0, |m| m.len()) as f64).sum();
        let with_fio = fio::is_installed();
        let ask = |mode: &str| {
            let request = GenerateRequest {
                question: "What is described here, in one sentence?".into(),
                chunk_ids: ids.clone(),
                mode: mode.to_owned(),
                max_new_tokens: Some(8),
                cold: true,
                ..GenerateRequest::default()
            };
            generate(client.clone(), request, |_| Ok(()))
        };
        ask(&o.mode).await?;
        for round in 0..o.rounds {
            files.iter().try_for_each(|f| evict_page_cache(f))?;
            self.matkv.push(ask(&o.mode).await?);
            if with_fio {
                files.iter().try_for_each(|f| evict_page_cache(f))?;
                self.fio.push(fio::read_rate(&files)?);
            }
            // A full prefill takes as long as many loads: three of them show its spread.
            if round < 3 {
                self.vanilla.push(ask("vanilla").await?);
            }
            eprintln!("round {}/{}", round + 1, o.rounds);
        }
        Ok(())
    }

    fn figures(&self) -> Vec<Figure> {
        let (matkv, vanilla) = (&self.matkv, &self.vanilla);
        if matkv.is_empty() {
            return Vec::new();
        }
        let ttft = |a: &[Answer]| a.iter().map(|a| a.timings.first_token_ms).collect::<Vec<_>>();
        let load_rates: Vec<f64> =
            matkv.iter().map(|a| self.bytes / (a.timings.load_ms / 1e3)).collect();
        let vanilla_ms = demo::median(ttft(vanilla));
        let ratios: Vec<f64> = ttft(matkv).iter().map(|t| vanilla_ms / t).collect();
        let prompts: Vec<f64> = matkv.iter().map(|a| f64::from(a.usage.prompt_tokens)).collect();
        let rate = |a: &Answer| f64::from(a.usage.prompt_tokens) / (a.timings.prefill_ms / 1e3);
        let rates: Vec<f64> = vanilla.iter().map(rate).collect();
        let of = |f: fn(&Answer) -> f64| matkv.iter().map(f).collect::<Vec<f64>>();
        let mut out = vec![
            Figure::median("prompt_tokens", &prompts, "tokens"),
            Figure::exact("chunk_bytes", self.bytes, "bytes"),
            Figure::median("cold_ttft_ms", &ttft(matkv), "ms"),
            Figure::median("cold_load_ms", &of(|a| a.timings.load_ms), "ms"),
            Figure::median("cold_prefill_ms", &of(|a| a.timings.prefill_ms), "ms"),
            Figure::median("vanilla_ttft_ms", &ttft(vanilla), "ms"),
            Figure::median("vanilla_prefill_tokens_per_s", &rates, "tokens/s"),
            Figure::median("cold_ttft_vanilla_over_matkv", &ratios, "ratio"),
            Figure::median("load_bytes_per_s", &load_rates, "bytes/s"),
        ];
        if !self.fio.is_empty() {
            let ratios: Vec<f64> = load_rates.iter().zip(&self.fio).map(|(a, b)| a / b).collect();
            out.push(Figure::median("fio_bytes_per_s", &self.fio, "bytes/s"));
            out.push(Figure::median("load_over_fio", &ratios, "ratio"));
        }
        out
    }
}
