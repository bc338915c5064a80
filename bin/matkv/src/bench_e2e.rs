//! `matkv bench e2e`: a corpus ingested, questions asked in every mode, alternated; once for every
//! combination of encoding, chunk size, overlap, tier, chunks, answer length and requests at once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use matkv_api::Client;
use matkv_api::v1::{
    GenerateRequest, GetStatusRequest, GetStatusResponse, IngestSummary, MoveChunkRequest,
};
use matkv_config::{Config, Resolved};
use matkv_loader_core::process::evict_page_cache;
use matkv_types::{Codec, KvDtype};

use crate::args::{CorpusOptions, QuestionOptions};
use crate::ask::{Answer, generate};
use crate::bench::{ingest_all, lines, questions};
use crate::bench_store::place;
use crate::chunks::said;
use crate::energy::{self, Meter};
use crate::figures::{Figure, Outcome, percentiles};
use crate::pair::with_private;
use crate::stop::Stop;

/// Requests that `pipeline.queue` and `pipeline.batch_size` take at most.
const BATCH_MAX: usize = 64;

#[derive(clap::Args, Clone)]
pub struct E2eOptions {
    #[command(flatten)]
    pub ingest: CorpusOptions,
    #[command(flatten)]
    pub asked: QuestionOptions,
    /// Modes to compare with vanilla
    #[arg(long, default_values_t = ["linked(32)".to_owned(), "independent".to_owned()])]
    pub mode: Vec<String>,
    /// Requests at once
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub batch: Vec<usize>,
    /// Chunks retrieved for a question
    #[arg(long, value_delimiter = ',', default_values_t = [4])]
    pub top_k: Vec<u32>,
    /// Tokens of an answer
    #[arg(long, value_delimiter = ',', default_values_t = [32])]
    pub max_new_tokens: Vec<u32>,
    /// Where chunks are when they are asked for
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Tier::Flash])]
    pub tier: Vec<Tier>,
    /// How chunks are written: a row type, or one with a codec, as bf16+split-zstd; as configured
    /// if absent
    #[arg(long, value_delimiter = ',')]
    pub encoding: Vec<String>,
    /// Tokens of a chunk; as configured if absent
    #[arg(long, value_delimiter = ',')]
    pub chunk_size: Vec<usize>,
    /// Prepare requests while others decode: on, off; as configured if absent
    #[arg(long, value_enum, value_delimiter = ',')]
    pub overlap: Vec<Overlap>,
    /// All questions are there from the beginning, and as many as --batch says decoded together;
    /// without this as many are asked at once, the next when all of them have been answered
    #[arg(long)]
    pub stream: bool,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
}

/// Where chunks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tier {
    /// In memory.
    Arena,
    /// On flash, read with O_DIRECT.
    Flash,
    /// In a cold tier in a directory, its page cache evicted; in the encoding asked for, or
    /// cold.dtype and cold.codec.
    Cold,
}

impl Tier {
    /// As answers name it.
    fn name(self) -> &'static str {
        match self {
            Self::Arena => "arena",
            Self::Flash => "flash",
            Self::Cold => "cold",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Overlap {
    On,
    Off,
}

/// What a pair of processes is started with.
#[derive(Clone)]
pub struct Setup {
    pub overlap: Option<Overlap>,
    label: Vec<String>,
    settings: Vec<(&'static str, String)>,
    /// Name of its directory in the store's; other encodings and sizes have other chunks.
    store: String,
}

/// What is asked of it.
#[derive(Clone)]
pub struct Case {
    pub tier: Tier,
    pub batch: usize,
    top_k: u32,
    answer: u32,
    label: Vec<String>,
}

/// What requests of one mode gave.
#[derive(Default)]
pub struct Run {
    pub answers: Vec<Answer>,
    /// Of all groups, each from its start to the last answer's end.
    pub seconds: f64,
    /// Of the same time, where the machine can say.
    pub joules: Option<f64>,
}

/// A case of a setup.
pub struct Measured {
    pub setup: Setup,
    pub case: Case,
    /// Of each mode; after an interruption of fewer questions.
    pub runs: Vec<Run>,
    /// What was ingested; of the first case of a setup.
    corpus: Vec<Figure>,
    /// Every question has been asked in every mode.
    pub is_whole: bool,
}

/// The part of a name that says which value this is, if it is one of several or not the default.
fn label<T: PartialEq>(all: &[T], default: T, name: String) -> Option<String> {
    (all != [default]).then_some(name)
}

/// What every pair is started with: nothing of it is kept where the configured one's is.
fn settings(o: &E2eOptions, store: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
    let most = o.batch.iter().copied().max().unwrap_or(1);
    let mut out = vec![("pipeline.queue", BATCH_MAX.to_string())];
    if most > 1 || o.stream {
        out.push(("pipeline.batch_size", most.to_string()));
        // As many rows as they may have.
        out.push(("pipeline.batch_tokens", (1 << 30).to_string()));
    }
    if o.tier.contains(&Tier::Cold) {
        let cold = std::path::absolute(store.join("cold"))?;
        std::fs::create_dir_all(&cold)?;
        out.push(("cold.url", format!("file://{}", cold.display())));
        // What is used again and again would be brought back to flash meanwhile.
        out.push(("heat.threshold", "1e9".to_owned()));
    }
    Ok(out)
}

fn setups(o: &E2eOptions) -> anyhow::Result<Vec<Setup>> {
    fn or_absent<T: Copy>(all: &[T]) -> Vec<Option<T>> {
        if all.is_empty() { vec![None] } else { all.iter().copied().map(Some).collect() }
    }
    let encodings: Vec<&str> = o.encoding.iter().map(String::as_str).collect();
    let mut out = Vec::new();
    for encoding in or_absent(&encodings) {
        for size in or_absent(&o.chunk_size) {
            for overlap in or_absent(&o.overlap) {
                let (mut names, mut store) = (Vec::new(), Vec::new());
                let mut settings = Vec::new();
                if let Some(encoding) = encoding {
                    let (dtype, codec) = encoding.split_once('+').unwrap_or((encoding, "none"));
                    let dtype: KvDtype = dtype.parse()?;
                    let codec: Codec = codec.parse()?;
                    settings.push(("storage.dtype", dtype.to_string()));
                    settings.push(("storage.codec", codec.to_string()));
                    settings.push(("cold.dtype", dtype.to_string()));
                    settings.push(("cold.codec", codec.to_string()));
                    store.push(encoding.to_owned());
                    names.push(encoding.to_owned());
                }
                if let Some(size) = size {
                    settings.push(("chunker.chunk_size", size.to_string()));
                    store.push(size.to_string());
                    names.push(format!("chunks of {size}"));
                }
                if let Some(overlap) = overlap {
                    let on = overlap == Overlap::On;
                    settings.push(("pipeline.overlap", on.to_string()));
                    names.push(if on { "overlap" } else { "no overlap" }.to_owned());
                }
                out.push(Setup { overlap, label: names, settings, store: store.join("-") });
            }
        }
    }
    Ok(out)
}

fn cases(o: &E2eOptions) -> Vec<Case> {
    let mut out = Vec::new();
    for &tier in &o.tier {
        for &top_k in &o.top_k {
            for &answer in &o.max_new_tokens {
                for &batch in &o.batch {
                    let label = [
                        label(&o.tier, Tier::Flash, tier.name().to_owned()),
                        label(&o.top_k, 4, format!("top {top_k}")),
                        label(&o.max_new_tokens, 32, format!("{answer} tokens")),
                        label(&o.batch, 1, format!("batch {batch}")),
                    ];
                    let label = label.into_iter().flatten().collect();
                    out.push(Case { label, tier, top_k, answer, batch });
                }
            }
        }
    }
    out
}

/// What has been measured, and how that ended.
pub type Ended = (Vec<Measured>, anyhow::Result<()>);

/// `vanilla`, and what it is compared with.
pub async fn run(
    resolved: &Resolved,
    o: &E2eOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    ensure!(o.mode.iter().all(|m| m != "vanilla"), "--mode: vanilla is always measured");
    let answers = o.asked.answers.as_deref().map(|p| lines(p, "answer")).transpose()?;
    let modes: Vec<String> =
        std::iter::once("vanilla".to_owned()).chain(o.mode.iter().cloned()).collect();
    let meter = Meter::find();
    let (measured, ended) = measure(resolved, o, &modes, meter.as_ref().ok(), stop).await?;
    let mut out = Vec::new();
    for Measured { setup, case, runs, corpus, .. } in measured {
        let label: Vec<_> = setup.label.into_iter().chain(case.label).collect();
        out.extend(corpus);
        out.extend(case_figures((&modes, &runs), case.tier, &label, answers.as_deref()));
    }
    notes.push(
        "a request of each mode first, to warm up; modes alternated per question, or per group of \
         requests at once; encodings, sizes and overlap one after the other; flash read with \
         O_DIRECT, cold files evicted from the page cache"
            .into(),
    );
    notes.push(energy::note(&meter));
    Outcome::until(ended, out, notes)
}

/// Questions in groups that are asked at once.
fn checked(o: &E2eOptions) -> anyhow::Result<Vec<String>> {
    let most = o.batch.iter().copied().max().unwrap_or(1);
    ensure!(
        o.batch.iter().all(|b| (1..=BATCH_MAX).contains(b)),
        "--batch must be 1 to {BATCH_MAX}"
    );
    ensure!(o.asked.count > 0, "--count must be at least 1");
    ensure!(!o.top_k.contains(&0), "--top-k must be at least 1");
    if o.stream {
        ensure!(o.batch.len() == 1, "with --stream, --batch is one number");
        let most = "questions can be there at once: lower --count";
        ensure!(o.asked.count <= BATCH_MAX, "no more than {BATCH_MAX} {most}");
    }
    let questions = questions(&o.asked.questions, o.asked.count)?;
    ensure!(
        questions.len() >= most,
        "{} questions are too few for --batch {most}",
        questions.len()
    );
    Ok(questions)
}

/// Every setup and case, in these modes, until something ends it.
pub async fn measure(
    resolved: &Resolved,
    o: &E2eOptions,
    modes: &[String],
    meter: Option<&Meter>,
    stop: &Stop,
) -> anyhow::Result<Ended> {
    let questions = &checked(o)?[..];
    // Beside the store, on the device that serves it; /tmp may be memory.
    let (root, _temporary) = place(resolved, o.store.as_deref())?;
    let (setups, cases) = (setups(o)?, cases(o));
    let mut out = Vec::new();
    for (i, setup) in setups.iter().enumerate() {
        let store = root.join(&setup.store);
        let mut settings = settings(o, &store)?;
        settings.extend(setup.settings.iter().cloned());
        let measured = with_private(resolved, &store, &settings, stop, async |client, config| {
            let summary = ingest_all(&client, &o.ingest.corpus, o.ingest.documents).await?;
            let status = client.clone().get_status(GetStatusRequest {}).await?.into_inner();
            let mut corpus = corpus_figures(&status, &summary, &setup.label);
            let bench = Bench { client, config, questions, modes, meter, stream: o.stream };
            for (j, case) in cases.iter().enumerate() {
                let (n, of) = (i * cases.len() + j + 1, setups.len() * cases.len());
                let label: Vec<_> = setup.label.iter().chain(&case.label).cloned().collect();
                eprintln!("{n}/{of} {}", label.join(", "));
                let runs = modes.iter().map(|_| Run::default()).collect();
                let (setup, corpus) = (setup.clone(), std::mem::take(&mut corpus));
                let at = out.len();
                out.push(Measured { setup, case: case.clone(), runs, corpus, is_whole: false });
                bench.case(case, &mut out[at].runs).await?;
                out[at].is_whole = true;
            }
            Ok(())
        });
        if let Err(e) = measured.await {
            out.retain(|m| m.runs.iter().all(|r| !r.answers.is_empty()));
            return Ok((out, Err(e)));
        }
    }
    Ok((out, Ok(())))
}

/// `name[mode,label]`.
fn named(name: &str, mode: &str, label: &[String]) -> String {
    let all: Vec<&str> = std::iter::once(mode)
        .chain(label.iter().map(String::as_str))
        .filter(|s| !s.is_empty())
        .collect();
    if all.is_empty() { name.to_owned() } else { format!("{name}[{}]", all.join(",")) }
}

fn corpus_figures(
    status: &GetStatusResponse,
    summary: &IngestSummary,
    label: &[String],
) -> Vec<Figure> {
    let exact = |name, value, unit| Figure::exact(named(name, "", label), value, unit);
    let mut figures = vec![
        exact("documents", status.documents as f64, "documents"),
        exact("chunks", status.chunks as f64, "chunks"),
        exact("corpus_tokens", status.chunk_tokens as f64, "tokens"),
        exact("chunk_file_bytes", status.chunk_bytes as f64, "bytes"),
    ];
    if summary.tokens_computed > 0 {
        let rate = summary.tokens_computed as f64 / summary.seconds;
        figures.push(exact("ingest_tokens_per_s", rate, "tokens/s"));
    }
    figures
}

/// A pair of processes, and what it is asked.
struct Bench<'a> {
    client: Client,
    config: &'a Config,
    questions: &'a [String],
    modes: &'a [String],
    meter: Option<&'a Meter>,
    /// All questions at once.
    stream: bool,
}

impl Bench<'_> {
    /// Every mode on every question, as many at once as the case says.
    async fn case(&self, case: &Case, runs: &mut [Run]) -> anyhow::Result<()> {
        let asked = self.questions;
        // Whole groups: fewer at once would be something else.
        let size = if self.stream { asked.len() } else { case.batch };
        let groups: Vec<&[String]> = asked.chunks_exact(size).collect();
        // Warm-up: code pages, allocator, thread pools.
        for mode in self.modes {
            generate(self.client.clone(), request(case, &asked[0], mode), |_| Ok(())).await?;
        }
        let mut moved = BTreeSet::new();
        for (i, group) in groups.iter().enumerate() {
            for step in 0..self.modes.len() {
                // Each round begins with another mode, so that none is always first.
                let m = (step + i) % self.modes.len();
                self.bring(case, group, &mut moved).await?;
                self.group(case, group, &self.modes[m], &mut runs[m]).await?;
            }
            eprintln!("question {}/{}", (i + 1) * size, asked.len());
        }
        // Where the next case expects them.
        for chunk in &moved {
            self.move_to("flash", chunk).await?;
        }
        Ok(())
    }

    /// Brings the chunks of these questions to where the case has them; on flash they are already,
    /// and the request itself empties the arena of them.
    async fn bring(
        &self,
        case: &Case,
        group: &[String],
        moved: &mut BTreeSet<String>,
    ) -> anyhow::Result<()> {
        if case.tier == Tier::Flash {
            return Ok(());
        }
        let mut chunks = Vec::new();
        for question in group {
            let short = GenerateRequest {
                max_new_tokens: Some(1),
                cold: false,
                ..request(case, question, "independent")
            };
            let answer = generate(self.client.clone(), short, |_| Ok(())).await?;
            chunks.extend(answer.started.chunks.into_iter().map(|c| c.chunk_id));
        }
        if case.tier == Tier::Arena {
            return Ok(());
        }
        for chunk in chunks {
            if !moved.contains(&chunk) {
                self.move_to("cold", &chunk).await?;
                moved.insert(chunk);
            }
        }
        let dir = self.config.cold_url.strip_prefix("file://").context("a directory")?;
        evict_files(Path::new(dir))
    }

    async fn move_to(&self, tier: &str, chunk: &str) -> anyhow::Result<()> {
        let mut admin = matkv_api::connect_admin(&self.config.socket()).await?;
        let request = MoveChunkRequest { chunk_id: chunk.to_owned(), tier: tier.to_owned() };
        admin.move_chunk(request).await.map_err(said)?;
        Ok(())
    }

    /// Requests that are all there at once.
    async fn group(
        &self,
        case: &Case,
        group: &[String],
        mode: &str,
        run: &mut Run,
    ) -> anyhow::Result<()> {
        let joules = self.meter.map(Meter::start);
        let started = Instant::now();
        let ask = |q: &String| generate(self.client.clone(), request(case, q, mode), |_| Ok(()));
        // Not spawned: if one fails, or somebody presses Ctrl-C, the others are cancelled.
        run.answers.extend(futures_util::future::try_join_all(group.iter().map(ask)).await?);
        run.seconds += started.elapsed().as_secs_f64();
        if let Some(joules) = joules {
            *run.joules.get_or_insert(0.0) += joules.stop();
        }
        Ok(())
    }
}

fn request(case: &Case, question: &str, mode: &str) -> GenerateRequest {
    GenerateRequest {
        question: question.to_owned(),
        mode: mode.to_owned(),
        top_k: Some(case.top_k),
        max_new_tokens: Some(case.answer),
        cold: case.tier != Tier::Arena,
        ..GenerateRequest::default()
    }
}

/// Evicts every file below a directory from the page cache.
fn evict_files(dir: &Path) -> anyhow::Result<()> {
    for entry in walkdir::WalkDir::new(dir) {
        let entry = entry?;
        if entry.file_type().is_file() {
            evict_page_cache(entry.path())?;
        }
    }
    Ok(())
}

fn case_figures(
    (modes, runs): (&[String], &[Run]),
    tier: Tier,
    label: &[String],
    gold: Option<&[String]>,
) -> Vec<Figure> {
    let mut out = Vec::new();
    for (mode, run) in modes.iter().zip(runs) {
        out.extend(mode_figures(mode, run, label, gold));
        if mode != "vanilla" {
            // Those that a mode has computed with the prompt come from nowhere.
            let chunks = run.answers.iter().flat_map(|a| &a.started.chunks);
            let used = chunks.filter(|c| c.source != "vanilla");
            let all = used.clone().count();
            let there = used.filter(|c| c.source == tier.name()).count();
            if all > 0 {
                let name = named("from_tier_share", mode, label);
                out.push(Figure::exact(name, there as f64 / all as f64, "share"));
            }
        }
    }
    let first = |m: usize| runs[m].answers.iter().map(|a| a.timings.first_token_ms);
    for (m, mode) in modes.iter().enumerate().skip(1) {
        let ratios: Vec<f64> = first(0).zip(first(m)).map(|(v, ours)| v / ours).collect();
        let name = named("ttft_vanilla_over_matkv", mode, label);
        out.push(Figure::median(name, &ratios, "ratio"));
        let name = named("seconds_vanilla_over_matkv", mode, label);
        let each = |m: usize| runs[m].seconds / runs[m].answers.len() as f64;
        out.push(Figure::exact(name, each(0) / each(m), "ratio"));
    }
    out
}

fn mode_figures(mode: &str, run: &Run, label: &[String], gold: Option<&[String]>) -> Vec<Figure> {
    let answers = &run.answers;
    let of = |f: fn(&Answer) -> f64| answers.iter().map(f).collect::<Vec<f64>>();
    let named = |name: &str| named(name, mode, label);
    type Value = fn(&Answer) -> f64;
    let phases: [(&str, Value, &'static str); 9] = [
        ("ttft_ms", |a| a.timings.first_token_ms, "ms"),
        ("retrieve_ms", |a| a.timings.retrieve_ms, "ms"),
        ("load_ms", |a| a.timings.load_ms, "ms"),
        ("prefill_ms", |a| a.timings.prefill_ms, "ms"),
        ("decode_ms", |a| a.timings.decode_ms, "ms"),
        ("total_ms", |a| a.timings.total_ms, "ms"),
        ("prompt_tokens", |a| f64::from(a.usage.prompt_tokens), "tokens"),
        ("cached_tokens", |a| f64::from(a.usage.cached_tokens()), "tokens"),
        ("answer_tokens", |a| f64::from(a.usage.completion_tokens), "tokens"),
    ];
    let mut out: Vec<Figure> =
        phases.iter().map(|(name, f, unit)| Figure::median(named(name), &of(*f), unit)).collect();
    for (name, f, _) in [phases[0], phases[5]] {
        let shares = [("p90", 0.9), ("p99", 0.99)];
        out.extend(percentiles(of(f), &shares, |p| named(&format!("{name}_{p}"))));
    }
    let rate = answers.len() as f64 / run.seconds;
    out.push(Figure::exact(named("requests_per_s"), rate, "requests/s"));
    if let Some(joules) = run.joules {
        let each = joules / answers.len() as f64;
        out.push(Figure::exact(named("joules_per_1000_requests"), each * 1e3, "J"));
    }
    if let Some(gold) = gold {
        let hit = |(a, g): &(&Answer, &String)| a.text.to_lowercase().contains(&g.to_lowercase());
        let hits = answers.iter().zip(gold).filter(hit).count();
        out.push(Figure::exact(named("answers_with_gold"), hits as f64, "answers"));
    }
    out
}
