//! The values themselves.

use std::path::PathBuf;
use std::time::Duration;

use matkv_types::Mode;

/// Which read engine the loader uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring if the kernel allows it, else pread.
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads that call pread.
    Pread,
}

/// Every value of a running system.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Name of a fetched model, or a path of a GGUF file.
    pub model: String,
    /// Where models and digests are cached.
    pub cache_dir: PathBuf,
    /// Where chunk files and the index live.
    pub store_dir: PathBuf,
    /// Where sockets and the control channel live.
    pub runtime_dir: PathBuf,
    /// TCP address to serve on besides the Unix socket; empty for none.
    pub tcp: String,
    /// System text of the corpus.
    pub system: String,
    /// The line that introduces the documents.
    pub introduction: String,
    /// Tokens per chunk.
    pub chunk_size: usize,
    /// Tokens a chunk shares with the one before.
    pub chunk_overlap: usize,
    /// Chunks retrieved for a question.
    pub top_k: usize,
    /// Rows recomputed at the start of every chunk after the first.
    pub link_tokens: u32,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Read engine.
    pub io_engine: IoEngine,
    /// Reads in flight.
    pub io_depth: u32,
    /// Sequences the decoder advances together.
    pub batch_size: usize,
    /// Requests that may be waiting or running; one more is refused.
    pub queue: usize,
    /// Load and sub-prefill the next requests while others decode.
    pub overlap: bool,
    /// Rows that all sequences of a decode step may attend to together.
    pub batch_tokens: usize,
    /// Longest a request may take.
    pub deadline: Duration,
    /// A thread or process that makes no step for this long is stuck.
    pub stall: Duration,
    /// How long running requests may go on after a stop.
    pub drain: Duration,
    /// Tokens generated when a request does not say.
    pub max_new_tokens: u32,
    /// Compute threads of the loader; 0 for one per core.
    pub loader_threads: usize,
    /// Compute threads of the decoder; 0 for one per core.
    pub decoder_threads: usize,
    /// What is logged: error, warn, info, debug, trace.
    pub log: String,
}

impl Default for Config {
    fn default() -> Self {
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/tmp".into()));
        let dir = |variable: &str, fallback: &str| {
            std::env::var_os(variable)
                .filter(|v| !v.is_empty())
                .map_or_else(|| home.join(fallback), PathBuf::from)
        };
        let data = dir("XDG_DATA_HOME", ".local/share").join("matkv");
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|v| !v.is_empty());
        Self {
            model: "smollm2-135m".into(),
            cache_dir: dir("XDG_CACHE_HOME", ".cache").join("matkv"),
            store_dir: data.join("store"),
            runtime_dir: runtime
                .map_or_else(|| data.join("run"), |r| PathBuf::from(r).join("matkv")),
            tcp: String::new(),
            system: "You are a helpful assistant. Answer the question from the documents.".into(),
            introduction: "Documents:\n".into(),
            chunk_size: 1024,
            chunk_overlap: 0,
            top_k: 4,
            link_tokens: 32,
            arena_bytes: 1 << 30,
            io_engine: IoEngine::Auto,
            io_depth: 32,
            batch_size: 8,
            queue: 64,
            overlap: true,
            batch_tokens: 65_536,
            deadline: Duration::from_secs(600),
            stall: Duration::from_secs(10),
            drain: Duration::from_secs(30),
            max_new_tokens: 128,
            loader_threads: 0,
            decoder_threads: 0,
            log: "info".into(),
        }
    }
}

impl Config {
    /// The Unix socket clients connect to.
    pub fn socket(&self) -> PathBuf {
        self.runtime_dir.join("matkv.sock")
    }

    /// The reuse mode of a request that asks for `matkv`.
    pub fn reuse(&self) -> Mode {
        Mode::Linked(self.link_tokens)
    }

    /// Compute threads a setting stands for.
    pub fn threads(setting: usize) -> usize {
        if setting > 0 {
            return setting;
        }
        std::thread::available_parallelism().map_or(1, usize::from)
    }
}
