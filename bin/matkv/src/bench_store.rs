//! `matkv bench load|codec|trace|start`: parts of the store, with the code that serves.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use matkv_config::{Config, Resolved};
use matkv_loader_core::measure::{codec, load, policies};
use matkv_loader_core::offline::{self, Store};
use matkv_types::{Codec, Encoding, KvDtype};

use crate::args::{CodecOptions, LoadOptions, StartOptions, TraceBenchOptions};
use crate::bench::{ingest_all, questions};
use crate::figures::{Figure, Outcome};
use crate::fio;
use crate::pair::with_private;
use crate::render::table;
use crate::stop::Stop;

pub fn own<T>(result: Result<T, String>) -> anyhow::Result<T> {
    result.map_err(|e| anyhow!("{e}"))
}

/// Settings of a store with exact rows.
fn exact() -> [(&'static str, String); 2] {
    [("storage.dtype", "bf16".to_owned()), ("storage.codec", "none".to_owned())]
}

/// Ingests whole chunks of a corpus with exact rows, unless they are there, and opens the store.
async fn corpus(
    resolved: &Resolved,
    (corpus, documents): (&[String], Option<usize>),
    store: &Path,
    stop: &Stop,
) -> anyhow::Result<Store> {
    let ingest = async |client, config: &Config| {
        ingest_all(&client, corpus, documents).await?;
        Ok(config.clone())
    };
    let config = with_private(resolved, store, &exact(), stop, ingest).await?;
    Ok(offline::open(&config, None)?)
}

/// A directory for the store: the one asked for, or a temporary one on the configured device.
pub fn place(
    resolved: &Resolved,
    asked: Option<&Path>,
) -> anyhow::Result<(PathBuf, Option<tempfile::TempDir>)> {
    if let Some(dir) = asked {
        return Ok((dir.to_owned(), None));
    }
    let beside = resolved.config.store_dir.parent().unwrap_or(Path::new(".")).to_owned();
    std::fs::create_dir_all(&beside)?;
    let temporary = tempfile::Builder::new().prefix("bench-").tempdir_in(&beside)?;
    Ok((temporary.path().to_owned(), Some(temporary)))
}

/// Cold flash to arena, per encoding, against fio on the same files in the same run.
pub async fn load(
    resolved: &Resolved,
    o: &LoadOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    ensure!(fio::is_installed(), "fio is not installed; `apt-get install fio`");
    let (dir, _temporary) = place(resolved, o.store.as_deref())?;
    let store = corpus(resolved, (&o.corpus, o.documents), &dir, stop).await?;
    let encodings = [
        ("none", Encoding::EXACT),
        ("int8", Encoding::new(KvDtype::Int8, Codec::None)),
        ("lz4", Encoding::new(KvDtype::Bf16, Codec::SplitLz4)),
        ("zstd", Encoding::new(KvDtype::Bf16, Codec::SplitZstd)),
    ];
    let work = tempfile::Builder::new().prefix("load-").tempdir_in(&dir)?;
    let mut benches = Vec::new();
    for (name, encoding) in encodings {
        stop.check()?;
        let sub = work.path().join(name);
        let bench = load::Bench::prepare(&store, &sub, Vec::new(), encoding, (o.chunks, 1024));
        benches.push((name, own(bench)?));
    }
    let threads = Config::threads(resolved.config.io_threads);
    let options = offline::engine_options(&resolved.config);
    let mut figures = Vec::new();
    let mut all = || {
        for (label, count) in [("4x1024_", 4), ("", o.chunks)] {
            let mut rounds: Vec<Vec<Round>> = benches.iter().map(|_| Vec::new()).collect();
            let each = |round| {
                for ((_, bench), rounds) in benches.iter().zip(&mut rounds) {
                    stop.check()?;
                    let measured = Round::measure(bench, round, count, options, threads)?;
                    // The first round warms up.
                    if round > 0 {
                        rounds.push(measured);
                    }
                }
                eprintln!("{count} chunks, round {round}/{}", o.rounds);
                anyhow::Ok(())
            };
            let ended = (0..=o.rounds).try_for_each(each);
            for ((name, _), rounds) in benches.iter().zip(&rounds) {
                figures.extend(of_rounds(&format!("load_{label}{name}"), name, rounds));
            }
            ended?;
        }
        figures.push(own(stripe(&store, work.path(), threads, options))?);
        Ok(())
    };
    let ended = all();
    Outcome::until(ended, figures, notes)
}

/// One load, and what bounds it.
struct Round {
    /// fio's rates on the same files, one for each way of reading.
    fio: Vec<f64>,
    spent: f64,
    decode: f64,
    bytes: f64,
}

impl Round {
    /// In turn first and second: a device may know what was read before.
    fn measure(
        bench: &load::Bench,
        round: usize,
        count: usize,
        options: load::EngineOptions,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let files = bench.files(count);
        let load = || own(bench.load(count, options, threads, None));
        let (fio, spent) = if round.is_multiple_of(2) {
            let fio = fio::read_rates(&files)?;
            (fio, load()?)
        } else {
            let spent = load()?;
            (fio::read_rates(&files)?, spent)
        };
        let decode = own(bench.decode(count, threads))?;
        Ok(Self { fio, spent, decode, bytes: bench.stored_bytes(count) as f64 })
    }
}

/// Rate, and ratio to what bounds it. fio's way of reading is the one with the best median.
fn of_rounds(prefix: &str, name: &str, rounds: &[Round]) -> Vec<Figure> {
    let ways = rounds.first().map_or(0, |r| r.fio.len());
    let median = |way: usize| {
        let rates: Vec<f64> = rounds.iter().map(|r| r.fio[way]).collect();
        crate::demo::median(rates)
    };
    let best = (0..ways).max_by(|a, b| median(*a).total_cmp(&median(*b))).unwrap_or(0);
    let each = |f: &dyn Fn(&Round) -> f64| rounds.iter().map(f).collect::<Vec<f64>>();
    let rate = each(&|r| r.bytes / r.spent / 1e9);
    let (label, ratio) = match name {
        "none" | "int8" => ("over_fio", each(&|r| r.bytes / r.spent / r.fio[best])),
        _ => ("over_bound", each(&|r| (r.bytes / r.fio[best]).max(r.decode) / r.spent)),
    };
    vec![
        Figure::median(prefix, &rate, "GB/s"),
        Figure::median(format!("{prefix}_{label}"), &ratio, "ratio"),
    ]
}

/// One, and two devices of a tenth of a GB/s each, as slow ones are made of this one.
fn stripe(
    store: &Store,
    dir: &Path,
    threads: usize,
    options: load::EngineOptions,
) -> Result<Figure, String> {
    const RATE: u64 = 100 << 20;
    let int8 = Encoding::new(KvDtype::Int8, Codec::None);
    let one = load::Bench::prepare(store, &dir.join("one"), Vec::new(), int8, (8, 1024))?;
    let two = [dir.join("a"), dir.join("b")].to_vec();
    let two = load::Bench::prepare(store, &dir.join("two"), two, int8, (8, 1024))?;
    let mut ratios = Vec::new();
    for _ in 0..3 {
        let single = one.load(8, options, threads, Some(RATE))?;
        ratios.push(single / two.load(8, options, threads, Some(RATE))?);
    }
    Ok(Figure::median("stripe2_over_single_throttled", &ratios, "ratio"))
}

/// Ratio, speed and fidelity of every encoding, on real KV.
pub async fn codec(
    resolved: &Resolved,
    o: &CodecOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let (dir, _temporary) = place(resolved, o.store.as_deref())?;
    let store = corpus(resolved, (&o.corpus, o.documents), &dir, stop).await?;
    let chunks = own(codec::exact(&store, o.chunks, 1024))?;
    let mut costs = Vec::new();
    let mut next = stop.counting("encoding", encodings().count());
    for to in encodings().take_while(|_| next()) {
        costs.push(own(codec::cost(&store, &chunks, to, o.level))?);
    }
    if stop.is_raised() {
        return Outcome::until(stop.check(), codec_figures(&costs, &[]), notes);
    }
    let (model, prefix) = offline::model(&resolved.config)?;
    let questions = questions(&o.questions, o.count)?;
    let rests: Vec<Vec<u32>> =
        questions.iter().map(|q| offline::rest(&model, q)).collect::<Result<_, _>>()?;
    let asked: Vec<codec::Question<'_>> = rests
        .iter()
        .enumerate()
        .map(|(i, rest)| codec::Question {
            chunks: (0..4).map(|k| (i * 3 + k * 5) % chunks.len()).collect(),
            rest,
        })
        .collect();
    let dtypes = &KvDtype::AT_REST;
    let next = stop.counting("question", asked.len());
    let with = (&model, &prefix[..]);
    let fidelity = own(codec::fidelity(&store, with, &chunks, &asked, dtypes, o.answer, next))?;
    notes.push(codec_table(&costs, &fidelity));
    notes.push(format!(
        "{} chunks of 1,024 tokens, at most {} questions over 4 of them, {} answer tokens; one \
         thread; ratio against fp16",
        chunks.len(),
        asked.len(),
        fidelity.first().map_or(0, |f| f.tokens)
    ));
    Outcome::until(stop.check(), codec_figures(&costs, &fidelity), notes)
}

/// Every row type with every codec; halves of bytes are split only where there are two.
fn encodings() -> impl Iterator<Item = Encoding> {
    let splits = |codec| matches!(codec, Codec::SplitLz4 | Codec::SplitZstd);
    KvDtype::AT_REST.into_iter().flat_map(move |dtype| {
        let codecs = Codec::ALL.into_iter();
        let codecs = codecs.filter(move |codec| dtype.bits() == 16 || !splits(*codec));
        codecs.map(move |codec| Encoding::new(dtype, codec))
    })
}

fn codec_figures(costs: &[codec::Cost], fidelity: &[codec::Fidelity]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (dtype, f) in KvDtype::AT_REST.iter().zip(fidelity) {
        let (name, unit) = (format!("kl_{dtype}"), "nats/token");
        let (low, high) = (f.kl - f.kl_interval, f.kl + f.kl_interval);
        figures.push(Figure { name, value: f.kl, unit, low, high, target: None });
        figures.push(Figure::exact(format!("top1_{dtype}"), f.top1, "share"));
    }
    for c in costs {
        figures.push(Figure::exact(format!("ratio_{}", c.encoding), c.ratio, "ratio"));
    }
    let cold = Encoding::new(KvDtype::Int4, Codec::Zstd);
    if let Some(cost) = costs.iter().find(|c| c.encoding == cold) {
        figures.push(Figure::exact("cold_ratio_over_fp16", cost.ratio, "ratio"));
    }
    figures
}

fn codec_table(costs: &[codec::Cost], fidelity: &[codec::Fidelity]) -> String {
    let row = |c: &codec::Cost| {
        let i = KvDtype::AT_REST.iter().position(|d| *d == c.encoding.dtype).unwrap_or(0);
        let f = &fidelity[i];
        vec![
            c.encoding.to_string(),
            format!("{:.2}", c.ratio),
            format!("{:.2}", c.encode / 1e9),
            format!("{:.2}", c.decode / 1e9),
            format!("{:.5} ± {:.5}", f.kl, f.kl_interval),
            format!("{:.3}", f.top1),
        ]
    };
    let rows: Vec<_> = costs.iter().map(row).collect();
    table(&["encoding", "ratio", "encode GB/s", "decode GB/s", "KL", "top-1"], &rows)
}

/// Hit rate by tokens of every policy on every trace.
pub fn trace(
    o: &TraceBenchOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let mut traces = policies::synthetic();
    for path in &o.trace {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        traces.push(own(policies::recorded(&name, &text))?);
    }
    let kinds = policies::PolicyKind::ALL;
    let mut figures = Vec::new();
    for capacity in &o.capacity {
        let mut rows = Vec::new();
        for trace in traces.iter().take_while(|_| !stop.is_raised()) {
            let mut row = vec![trace.name.clone()];
            for kind in kinds {
                let rate = policies::hit_rate(trace, kind, *capacity);
                row.push(format!("{rate:.3}"));
                let name = format!("hits_{}_{}_{capacity}", trace.name, kind.as_str());
                figures.push(Figure::exact(name, rate, "share"));
            }
            rows.push(row);
        }
        let head: Vec<&str> =
            std::iter::once("trace").chain(kinds.iter().map(|k| k.as_str())).collect();
        notes.push(format!("hit rate by tokens, room for {:.0} %", capacity * 100.0));
        notes.push(table(&head, &rows));
    }
    Outcome::until(stop.check(), figures, notes)
}

/// Seconds until a loader with so many chunks is ready, and with none.
pub async fn start(
    resolved: &Resolved,
    o: &StartOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let (dir, _temporary) = place(resolved, None)?;
    let (mut empty, mut full, mut open) = (Vec::new(), Vec::new(), f64::NAN);
    let mut all = async || {
        let once = async || {
            let started = Instant::now();
            let ready =
                async |_, config: &Config| Ok((started.elapsed().as_secs_f64(), config.clone()));
            with_private(resolved, &dir, &exact(), stop, ready).await
        };
        let (_, config) = once().await?;
        for _ in 0..o.rounds {
            empty.push(once().await?.0);
        }
        stop.check()?;
        let store = offline::open(&config, None)?;
        let filled = Instant::now();
        own(offline::fill_index(&store, o.chunks))?;
        eprintln!("{} chunks indexed in {:.0} s", o.chunks, filled.elapsed().as_secs_f64());
        let opened = Instant::now();
        drop(store);
        let store = offline::open(&config, None)?;
        open = opened.elapsed().as_secs_f64();
        drop(store);
        for _ in 0..o.rounds {
            full.push(once().await?.0);
        }
        Ok(())
    };
    let ended = all().await;
    let mut figures = vec![
        Figure::exact("start_open_store_s", open, "s"),
        Figure::median("start_empty_s", &empty, "s"),
        Figure::median("start_1m_chunks_s", &full, "s"),
    ];
    if !full.is_empty() {
        figures.push(Figure::exact("start_chunks", o.chunks as f64, "chunks"));
    }
    Outcome::until(ended, figures, notes)
}
