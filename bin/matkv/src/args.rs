//! Arguments of every command.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use matkv_config::Sources;

/// Answers questions from documents whose KV was computed once.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
pub struct Args {
    /// Configuration file
    #[arg(long, global = true, env = "MATKV_CONFIG")]
    pub config: Option<PathBuf>,
    /// Preset: small or large
    #[arg(long, global = true, env = "MATKV_PRESET")]
    pub preset: Option<String>,
    /// Set a configuration key, e.g. --set retrieval.top_k=6
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Where models are cached
    #[arg(long, global = true, env = "MATKV_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// How results are printed
    #[arg(long, global = true, value_enum, default_value = "text")]
    pub format: Format,
    #[command(subcommand)]
    pub command: Command,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

#[derive(Subcommand)]
pub enum Command {
    /// Start the loader and the decoder, and keep them alive until Ctrl-C
    Up,
    /// Ingest documents: compute and store the KV of their chunks
    Ingest(IngestOptions),
    /// Ask a question
    Ask(AskOptions),
    /// List or remove documents
    Docs {
        #[command(subcommand)]
        command: DocsCommand,
    },
    /// Show the state of the running system
    Status,
    /// Look at chunks, move, pin, verify and remove them
    Chunks {
        #[command(subcommand)]
        command: ChunksCommand,
    },
    /// Export or import the KV of documents as one file
    Store {
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Check this machine: device, io_uring, memory, limits, and what to change
    Doctor(crate::doctor::DoctorOptions),
    /// At which interval of re-use storing KV costs less than computing it again
    Cost(crate::cost::CostOptions),
    /// Record a timeline of both processes
    Trace(crate::trace::TraceOptions),
    /// Fetch or list models
    Model {
        #[command(subcommand)]
        command: ModelCommand,
    },
    /// Show every configuration key, its value and where it comes from
    Config,
    /// Ingest an example corpus and answer questions in both modes, with timings
    Demo(DemoOptions),
    /// Measure
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
}

#[derive(clap::Args)]
pub struct IngestOptions {
    /// Files, directories, glob patterns, or - for standard input
    #[arg(required = true)]
    pub sources: Vec<String>,
    /// Name of the document read from standard input
    #[arg(long, default_value = "stdin")]
    pub name: String,
}

#[derive(clap::Args)]
pub struct AskOptions {
    /// The question
    pub question: String,
    /// matkv (as configured), vanilla, exact, independent, linked(N), focused(R) or focused(R,N)
    #[arg(long, default_value = "matkv")]
    pub mode: String,
    /// Run both modes and compare the logits of the first answer token
    #[arg(long)]
    pub verify: bool,
    /// Chunks to retrieve
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Use these documents instead of retrieval
    #[arg(long)]
    pub document: Vec<String>,
    /// Use these chunks instead of retrieval
    #[arg(long)]
    pub chunk: Vec<String>,
    /// Instructions for this request
    #[arg(long)]
    pub system: Option<String>,
    #[arg(long)]
    pub max_new_tokens: Option<u32>,
    /// 0 is greedy
    #[arg(long)]
    pub temperature: Option<f32>,
    #[arg(long)]
    pub top_p: Option<f32>,
    #[arg(long)]
    pub seed: Option<u64>,
    /// End the answer before this text
    #[arg(long)]
    pub stop: Vec<String>,
    /// Load chunks from their tier even where they are in memory: to measure
    #[arg(long)]
    pub cold: bool,
}

#[derive(Subcommand)]
pub enum DocsCommand {
    /// List documents
    Ls,
    /// Remove a document
    Rm {
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Subcommand)]
pub enum ChunksCommand {
    /// List chunks
    Ls {
        /// Only those in flash, cold, or none
        #[arg(long, default_value = "")]
        tier: String,
        /// At most so many
        #[arg(long, default_value_t = 1000)]
        limit: usize,
    },
    /// Show chunks; ids may be shortened to what makes them unique
    Stat {
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Read and verify every copy; heal what has a good one
    Verify {
        /// None: all chunks
        ids: Vec<String>,
    },
    /// Keep chunks from being evicted
    Pin {
        #[arg(required = true)]
        ids: Vec<String>,
        /// For so long, e.g. 2h; until unpinned if absent
        #[arg(long, value_name = "TIME")]
        ttl: Option<String>,
    },
    /// Let pinned chunks go again
    Unpin {
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Move chunks to flash or cold
    Move {
        /// flash or cold
        tier: String,
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Remove chunks' bytes; they are computed again when they are asked for
    Rm {
        #[arg(required = true)]
        ids: Vec<String>,
        /// Only from flash, or cold
        #[arg(long, default_value = "")]
        tier: String,
    },
    /// Remove files that nothing refers to
    Gc {
        /// Empty the quarantine, too
        #[arg(long)]
        quarantine: bool,
        /// Remove data of other models, prompts and tokenizers, too
        #[arg(long)]
        stale: bool,
    },
    /// Say why a chunk is or is not where one would expect it
    Explain { id: String },
    /// Build the index anew from the files; the system must be stopped
    RebuildIndex {
        /// Which store, if there are several
        #[arg(long)]
        fingerprint: Option<String>,
    },
}

#[derive(Subcommand)]
pub enum StoreCommand {
    /// Write documents and their chunks to one file
    Export {
        /// The file to write; - for standard output
        file: String,
        /// Only these documents
        #[arg(long)]
        document: Vec<String>,
    },
    /// Take a bundle in; the system must be running
    Import {
        /// The file to read; - for standard input
        file: String,
    },
}

#[derive(Subcommand)]
pub enum ModelCommand {
    /// Fetch a model, checked by SHA-256
    Pull {
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// List models
    Ls,
}

#[derive(clap::Args)]
pub struct DemoOptions {
    /// Directory of documents
    #[arg(long, default_value = "examples/corpus")]
    pub corpus: String,
    /// File with one question per line
    #[arg(long, default_value = "examples/questions.txt")]
    pub questions: PathBuf,
    /// Chunks in each prompt
    #[arg(long, default_value_t = 2)]
    pub top_k: u32,
    #[arg(long, default_value_t = 32)]
    pub max_new_tokens: u32,
}

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Ingest a corpus, ask questions in every mode, alternated, and compare
    E2e(crate::bench_e2e::E2eOptions),
    /// Time to first token from a cold arena and flash, against full prefill and fio
    Cold(ColdOptions),
    /// Conversations over the same chunks, with rows of earlier turns and without
    Turns(crate::bench_turns::TurnsOptions),
    /// Cold flash to arena, per encoding, against fio on the same files
    Load(LoadOptions),
    /// Ratio, speed and fidelity of every encoding, on real KV
    Codec(CodecOptions),
    /// How far answers move by each way of reusing chunks, and how many rows it computes anew
    Fidelity(crate::bench_fidelity::FidelityOptions),
    /// Full prefills in this process, against the processor's peak
    Prefill(crate::bench_model::PrefillOptions),
    /// Steps of batches in this process, against reading what they need from memory
    Decode(crate::bench_model::DecodeOptions),
    /// Hit rates of every eviction policy on synthetic and recorded traces
    Trace(TraceBenchOptions),
    /// Seconds until a loader with many chunks is ready
    Start(StartOptions),
    /// Against llama.cpp and what the machine allows, alternated in one run
    Peers(PeersOptions),
    /// Requests a second, percentiles and energy: many clients, or arrivals that wait for nobody
    Throughput(ThroughputOptions),
    /// Joules per 1,000 requests and requests per kWh, if the machine has a meter
    Energy(ThroughputOptions),
    /// Show results of benchmarks as a page with plots, or latency by phase beside published ones
    Report(ReportOptions),
}

#[derive(clap::Args, Clone)]
pub struct ReportOptions {
    /// What benchmarks have printed with --format json
    #[arg(conflicts_with = "paper")]
    pub files: Vec<PathBuf>,
    /// Write a page with plots here instead of printing a table
    #[arg(long)]
    pub html: Option<PathBuf>,
    /// Measure a corpus and print latency by phase beside the published figures
    #[arg(long, requires_all = ["corpus", "questions"])]
    pub paper: bool,
    /// With --paper: documents, such as TurboRAG's
    #[arg(long)]
    pub corpus: Vec<String>,
    /// With --paper: ingest only this many documents, in order of their numbers
    #[arg(long)]
    pub documents: Option<usize>,
    /// With --paper: questions, one a line or JSON lines with "query"
    #[arg(long)]
    pub questions: Option<PathBuf>,
    /// With --paper: ask only this many questions
    #[arg(long, default_value_t = 20)]
    pub count: usize,
    /// With --paper: requests at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8])]
    pub batch: Vec<usize>,
}

/// What a benchmark ingests.
#[derive(clap::Args, Clone)]
#[group(skip)]
pub struct CorpusOptions {
    /// Documents: files, directories or glob patterns
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Ingest only this many documents, in order of their numbers
    #[arg(long)]
    pub documents: Option<usize>,
}

/// Questions whose answers are compared.
#[derive(clap::Args, Clone)]
#[group(skip)]
pub struct QuestionOptions {
    /// Questions: one a line, or JSON lines with "query"
    #[arg(long)]
    pub questions: PathBuf,
    /// Gold answers: one a line, or JSON lines with "answer"
    #[arg(long)]
    pub answers: Option<PathBuf>,
    /// Ask only this many questions
    #[arg(long, default_value_t = 20)]
    pub count: usize,
}

#[derive(clap::Args, Clone)]
pub struct ThroughputOptions {
    #[command(flatten)]
    pub ingest: CorpusOptions,
    /// Questions, the most popular first: one a line, or JSON lines with "query"
    #[arg(long)]
    pub questions: PathBuf,
    /// Modes to compare, one after the other
    #[arg(long, default_values_t = ["vanilla".to_owned(), "matkv".to_owned()])]
    pub mode: Vec<String>,
    /// Clients that ask again when they have their answer
    #[arg(long, default_value_t = 8, conflicts_with = "rate")]
    pub clients: usize,
    /// Arrivals a second, which wait for nobody, in place of clients
    #[arg(long)]
    pub rate: Option<f64>,
    /// Requests of each mode
    #[arg(long, default_value_t = 64)]
    pub requests: usize,
    /// Exponent of Zipf's law over the questions; 0 asks all equally often
    #[arg(long, default_value_t = 1.0)]
    pub zipf: f64,
    /// Time to first token that counts as good
    #[arg(long, default_value_t = 1000.0)]
    pub limit_ms: f64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[arg(long, default_value_t = 4)]
    pub top_k: u32,
    #[arg(long, default_value_t = 32)]
    pub max_new_tokens: u32,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
}

#[derive(clap::Args, Clone)]
pub struct PeersOptions {
    /// Documents to take chunks of exactly 1,024 tokens from
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Where benches/peers/install.sh has put the peers; peers of the cache if absent
    #[arg(long)]
    pub peers: Option<PathBuf>,
    /// Alternated rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Only these figures
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Requests at once, with and without overlap; at most 64
    #[arg(long, default_value_t = 64)]
    pub requests: usize,
}

#[derive(clap::Args, Clone)]
pub struct LoadOptions {
    /// Documents to take whole chunks from
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Ingest only this many documents, in order of their numbers
    #[arg(long)]
    pub documents: Option<usize>,
    /// Chunks loaded at once
    #[arg(long, default_value_t = 64)]
    pub chunks: usize,
    /// Alternated rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
}

#[derive(clap::Args, Clone)]
pub struct CodecOptions {
    /// Documents to take whole chunks from
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Ingest only this many documents, in order of their numbers
    #[arg(long)]
    pub documents: Option<usize>,
    /// Questions: one a line, or JSON lines with "query"
    #[arg(long)]
    pub questions: PathBuf,
    /// Chunks encoded
    #[arg(long, default_value_t = 16)]
    pub chunks: usize,
    /// Questions asked
    #[arg(long, default_value_t = 20)]
    pub count: usize,
    /// Answer tokens compared of each
    #[arg(long, default_value_t = 16)]
    pub answer: usize,
    /// Level of Zstandard
    #[arg(long, default_value_t = 3)]
    pub level: i32,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
}

#[derive(clap::Args, Clone)]
pub struct TraceBenchOptions {
    /// Recorded traces: a JSON object a line with chunk, tokens and topic
    pub trace: Vec<PathBuf>,
    /// Shares of the trace's tokens there is room for
    #[arg(long, default_values_t = [0.1, 0.3])]
    pub capacity: Vec<f64>,
}

#[derive(clap::Args, Clone)]
pub struct StartOptions {
    #[arg(long, default_value_t = 1_000_000)]
    pub chunks: u64,
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
}

#[derive(clap::Args, Clone)]
pub struct ColdOptions {
    /// Documents to take whole chunks from
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Chunks in the prompt
    #[arg(long, default_value_t = 4)]
    pub chunks: usize,
    /// Alternated rounds
    #[arg(long, default_value_t = 7)]
    pub rounds: usize,
    #[arg(long, default_value = "linked(32)")]
    pub mode: String,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
}

impl Args {
    /// Configuration sources of these arguments.
    pub fn sources(&self) -> anyhow::Result<Sources> {
        let mut flags = Vec::new();
        for set in &self.set {
            let (key, value) = set
                .split_once('=')
                .ok_or_else(|| anyhow::anyhow!("--set {set:?}: write KEY=VALUE"))?;
            flags.push((key.to_owned(), value.to_owned()));
        }
        if let Some(dir) = &self.cache_dir {
            flags.push(("paths.cache_dir".into(), dir.display().to_string()));
        }
        Ok(Sources {
            file: self.config.clone(),
            preset: self.preset.clone(),
            flags,
            ..Sources::from_environment()
        })
    }
}
