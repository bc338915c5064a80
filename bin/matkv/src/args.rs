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
    /// vanilla, matkv, independent or linked(N)
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
    E2e(E2eOptions),
    /// Time to first token from a cold arena and flash, against full prefill and fio
    Cold(ColdOptions),
}

#[derive(clap::Args, Clone)]
pub struct E2eOptions {
    /// Documents: files, directories or glob patterns
    #[arg(long, required = true)]
    pub corpus: Vec<String>,
    /// Ingest only this many documents, in order of their numbers
    #[arg(long)]
    pub documents: Option<usize>,
    /// Questions: one a line, or JSON lines with "query"
    #[arg(long)]
    pub questions: PathBuf,
    /// Gold answers: one a line, or JSON lines with "answer"
    #[arg(long)]
    pub answers: Option<PathBuf>,
    /// Ask only this many questions
    #[arg(long, default_value_t = 20)]
    pub count: usize,
    /// Modes to compare with vanilla
    #[arg(long, default_values_t = ["linked(32)".to_owned(), "independent".to_owned()])]
    pub mode: Vec<String>,
    #[arg(long, default_value_t = 4)]
    pub top_k: u32,
    #[arg(long, default_value_t = 32)]
    pub max_new_tokens: u32,
    /// Keep the store here instead of in a temporary directory
    #[arg(long)]
    pub store: Option<PathBuf>,
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
