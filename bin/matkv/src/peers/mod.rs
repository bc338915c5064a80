//! `matkv bench peers`: against llama.cpp on the same machine in the same run, and against what
//! the machine allows.
//!
//! Ours and theirs take turns and have the same token ids and as many threads; while one works the
//! other waits. A figure that cannot be measured is named in the notes with the reason, and the
//! others are still printed; so are those measured before a Ctrl-C.

mod hf;
mod llama;
mod model;
mod overlap;
mod serving;
mod targets;
mod workload;

use std::cell::OnceCell;
use std::path::PathBuf;

use anyhow::{anyhow, ensure};
use matkv_config::{Config, Resolved};
use matkv_loader_core::measure::machine;
use matkv_loader_core::measure::speed::Speed;

use crate::args::PeersOptions;
use crate::bench_store::own;
use crate::figures::{Figure, Outcome};
use crate::stop::Stop;
use llama::Llama;

/// One run.
struct Bench<'a> {
    resolved: &'a Resolved,
    options: &'a PeersOptions,
    threads: usize,
    llama: Llama,
    stop: Stop,
    figures: Vec<Figure>,
    notes: Vec<String>,
    speed: OnceCell<Speed>,
    bf16_peak: OnceCell<f64>,
    /// Weight types of llama.cpp by their prefill of 1,024 tokens, the fastest first.
    types: OnceCell<Vec<&'static str>>,
}

/// Figures that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    Gemm,
    Prefill,
    Ingest,
    Decode,
    Batch,
    Serving,
    Hf,
    Overlap,
}

const GROUPS: [(Group, &[&str]); 8] = [
    (Group::Gemm, &["bf16_gemm_over_peak"]),
    (Group::Prefill, &["prefill4096_over_llama"]),
    (Group::Ingest, &["ingest_over_llama_prefill"]),
    (
        Group::Decode,
        &[
            "decode64_over_llama",
            "decode2048_over_llama",
            "decode4096_over_llama",
            "decode4096_over_floor",
        ],
    ),
    (Group::Batch, &["batch8_shared_over_llama"]),
    (
        Group::Serving,
        &[
            "ttft_llama_over_ours_linked32",
            "ttft_llama_over_ours_independent",
            "ttft_vanilla_over_ours_linked32",
            "restore_llama_over_ours_linked32",
            "restore_llama_over_ours_independent",
            "ttft_over_floor",
            "ingest_with_embedding_over_llama_prefill",
            "pss_extra_mb",
            "miss_cost",
        ],
    ),
    (Group::Hf, &["ttft_hf_matkv_over_ours_linked32"]),
    (
        Group::Overlap,
        &[
            "overlap_on_over_off",
            "overlap_over_bound",
            "overlap_throttled_on_over_off",
            "overlap_throttled_over_bound",
        ],
    ),
];

pub async fn run(
    resolved: &Resolved,
    options: &PeersOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let known = |name: &String| GROUPS.iter().any(|(_, names)| names.contains(&name.as_str()));
    for name in &options.only {
        ensure!(known(name), "there is no figure {name:?}; docs/figures.md lists them");
    }
    ensure!(options.rounds > 0, "--rounds must be at least 1");
    let threads = Config::threads(resolved.config.loader_threads);
    let dir = options.peers.clone().unwrap_or_else(|| resolved.config.cache_dir.join("peers"));
    let mut bench = Bench {
        resolved,
        options,
        threads,
        llama: Llama::find(dir, threads, stop.clone())?,
        stop: stop.clone(),
        figures: Vec::new(),
        notes: Vec::new(),
        speed: OnceCell::new(),
        bf16_peak: OnceCell::new(),
        types: OnceCell::new(),
    };
    let complete = bench.all().await;
    notes.append(&mut bench.notes);
    let only = &options.only;
    let mut figures = bench.figures;
    // A name with brackets is what a ratio was made of.
    figures.retain(|f| only.is_empty() || f.name.contains('[') || only.contains(&f.name));
    figures.iter_mut().for_each(|f| f.target = targets::of(&f.name));
    Ok(Outcome { figures, complete })
}

impl Bench<'_> {
    /// Whether everything was measured.
    async fn all(&mut self) -> bool {
        self.notes.push(format!(
            "{} threads on both sides; ours and theirs alternated {} times; llama.cpp's Q8_0 and \
             BF16 are made from the Q4_1 file, so their speed counts and their answers do not",
            self.threads, self.options.rounds
        ));
        for done in ["llama.done", "torch.done"] {
            let installed = std::fs::read_to_string(self.llama.dir().join(done));
            self.notes.extend(installed.map(|what| format!("installed: {}", what.trim())));
        }
        let mut complete = true;
        for (group, names) in GROUPS {
            if !names.iter().any(|n| self.wants(n)) {
                continue;
            }
            eprintln!("{}", names.join(", "));
            let outcome = match group {
                Group::Gemm => self.gemm(),
                Group::Prefill => self.prefill(),
                Group::Ingest => self.ingest(),
                Group::Decode => self.decode(),
                Group::Batch => self.batch(),
                Group::Serving => self.serving().await,
                Group::Hf => self.hf().await,
                Group::Overlap => self.overlap().await,
            };
            if self.stop.is_raised() {
                self.notes.push("interrupted: figures that are missing were not measured".into());
                return false;
            }
            if let Err(e) = outcome {
                complete = false;
                let measured = |n: &&&str| !self.figures.iter().any(|f| f.name == **n);
                let missing: Vec<&str> = names.iter().filter(measured).copied().collect();
                self.notes.push(format!("not measured: {}: {e:#}", missing.join(", ")));
            }
        }
        complete
    }

    fn wants(&self, name: &str) -> bool {
        let only = &self.options.only;
        only.is_empty() || only.iter().any(|n| n == name)
    }

    /// A step of a group, on standard error.
    fn progress(&self, what: std::fmt::Arguments<'_>) -> anyhow::Result<()> {
        eprintln!("  {what}");
        self.stop.check()
    }

    /// The model in this process, opened once.
    fn speed(&self) -> anyhow::Result<&Speed> {
        if self.speed.get().is_none() {
            let speed = own(Speed::open(&self.resolved.config, self.threads))?;
            let _ = self.speed.set(speed);
        }
        self.speed.get().ok_or_else(|| anyhow!("the model was not opened"))
    }

    fn bf16_peak(&self) -> anyhow::Result<f64> {
        let team = self.speed()?.team();
        Ok(*self.bf16_peak.get_or_init(|| machine::bf16_peak(team)))
    }

    /// llama.cpp's weight types, the fastest in prefill first; measured once in a run.
    fn types(&mut self) -> anyhow::Result<Vec<&'static str>> {
        if self.types.get().is_none() {
            let mut rates = Vec::new();
            for kind in llama::TYPES {
                self.progress(format_args!("llama.cpp {kind}, prefill of 1,024 tokens"))?;
                let samples = self.llama.bench(kind, [1024, 0, 0], 2)?;
                let name = format!("prefill1024_tokens_per_s[llama {kind}]");
                let figure = Figure::median(name, &samples, "tokens/s");
                rates.push((kind, figure.value));
                self.figures.push(figure);
            }
            rates.sort_by(|a, b| b.1.total_cmp(&a.1));
            let _ = self.types.set(rates.into_iter().map(|r| r.0).collect());
        }
        Ok(self.types.get().cloned().unwrap_or_default())
    }

    /// llama.cpp's fastest weight type in prefill.
    fn fastest(&mut self) -> anyhow::Result<&'static str> {
        self.types()?.first().copied().ok_or_else(|| anyhow!("no weight type was measured"))
    }

    /// A place for files on the device that serves the store.
    fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        let store = &self.resolved.config.store_dir;
        let beside = store.parent().map_or_else(|| PathBuf::from("."), PathBuf::from);
        std::fs::create_dir_all(&beside)?;
        Ok(tempfile::Builder::new().prefix("peers-").tempdir_in(beside)?)
    }

    /// The median of ratios of the same rounds.
    fn ratio(&mut self, name: &str, over: &[f64], under: &[f64]) {
        let ratios: Vec<f64> = over.iter().zip(under).map(|(a, b)| a / b).collect();
        self.figures.push(Figure::median(name, &ratios, "ratio"));
    }
}
