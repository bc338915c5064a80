//! The values themselves.

use std::path::PathBuf;
use std::time::Duration;

use matkv_types::{Codec, KvDtype, Mode, Precision};

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

/// How several directories are used together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageType {
    /// One directory.
    Single,
    /// Every chunk spread over all.
    Stripe,
    /// Every chunk twice.
    Mirror,
}

/// Every value of a running system.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Name of a fetched model, or a path of a GGUF file.
    pub model: String,
    /// What its rows are computed with.
    pub precision: Precision,
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
    /// How stored chunks are reused, as a mode is written.
    pub reuse_mode: String,
    /// Rows recomputed at the start of every chunk after the first.
    pub link_tokens: u32,
    /// Whether rows of earlier prompts are kept in the arena for those that begin as they did.
    pub earlier_prompts: bool,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Read engine.
    pub io_engine: IoEngine,
    /// Reads in flight.
    pub io_depth: u32,
    /// Bytes of one read.
    pub io_block: u64,
    /// A kernel thread takes io_uring submissions.
    pub io_sqpoll: bool,
    /// Bytes a second that files are read at, to measure a slower device; 0 for as fast as it is.
    pub io_throttle: u64,
    /// Longest a load may take; then the chunk is computed.
    pub io_deadline: Duration,
    /// How many times as long as computing a chunk loading it may take; 0 for any.
    pub io_patience: u32,
    /// Threads that verify and decode what has been read; 0 for one per core.
    pub io_threads: usize,
    /// How the directories of flash are used together.
    pub storage_type: StorageType,
    /// Directories of flash; the store's own if there are none.
    pub storage_dirs: Vec<PathBuf>,
    /// Bytes of a stripe's unit.
    pub stripe_unit: u64,
    /// Row type on flash, and in the arena if attention reads it.
    pub storage_dtype: KvDtype,
    /// Lossless stage on flash.
    pub storage_codec: Codec,
    /// Level of Zstandard on flash.
    pub storage_level: u32,
    /// Physical bytes on flash at most; 0 for no limit.
    pub storage_capacity: u64,
    /// Bytes of the file system left to others.
    pub storage_reserve: u64,
    /// What leaves flash and the cold tier first.
    pub storage_policy: String,
    /// Share of the capacity above which chunks are demoted.
    pub high_watermark: f64,
    /// Share of the capacity at which demotion stops.
    pub low_watermark: f64,
    /// Uses a cold chunk must have more than to be promoted.
    pub promote_threshold: f64,
    /// How recent its last use must be.
    pub promote_window: Duration,
    /// Time in which uses fade to half.
    pub heat_half_life: Duration,
    /// File to which every use of a chunk is appended, for `bench trace`; empty for none.
    pub heat_record: String,
    /// Bytes a second moved between tiers in the background.
    pub migrate_rate: u64,
    /// Bytes a second verified in the background; 0 for none.
    pub scrub_rate: u64,
    /// What leaves the arena first.
    pub arena_policy: String,
    /// Bring chunks into the arena before they are asked for.
    pub prefetch: bool,
    /// Chunks prefetched for one request at most.
    pub prefetch_max: usize,
    /// Where the cold tier is; empty for none.
    pub cold_url: String,
    /// Endpoint of an S3 service that is not Amazon's.
    pub cold_endpoint: String,
    /// Row type in the cold tier; a wider one than a chunk has is not used.
    pub cold_dtype: KvDtype,
    /// Lossless stage in the cold tier.
    pub cold_codec: Codec,
    /// Level of Zstandard in the cold tier.
    pub cold_level: u32,
    /// Bytes in the cold tier at most; 0 for no limit.
    pub cold_capacity: u64,
    /// Longest a transfer to or from the cold tier may take.
    pub cold_deadline: Duration,
    /// Bytes a tenant may keep in all tiers; 0 for no limit.
    pub tenant_quota: u64,
    /// Chunks unused for so long leave all tiers; 0 for never.
    pub tenant_ttl: Duration,
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
    /// Cores the loader's compute threads are bound to, in turn; none for any.
    pub loader_cores: Vec<usize>,
    /// Cores the decoder's compute threads are bound to, in turn; none for any.
    pub decoder_cores: Vec<usize>,
    /// How much nicer the decoder is than the loader.
    pub decoder_nice: u8,
    /// What is logged: error, warn, info, debug, trace.
    pub log: String,
}

/// Directories by the XDG base directory rules.
struct Places {
    cache_dir: PathBuf,
    store_dir: PathBuf,
    runtime_dir: PathBuf,
}

impl Places {
    fn of_this_user() -> Self {
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/tmp".into()));
        let dir = |variable: &str, fallback: &str| {
            std::env::var_os(variable)
                .filter(|v| !v.is_empty())
                .map_or_else(|| home.join(fallback), PathBuf::from)
        };
        let data = dir("XDG_DATA_HOME", ".local/share").join("matkv");
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|v| !v.is_empty());
        Self {
            cache_dir: dir("XDG_CACHE_HOME", ".cache").join("matkv"),
            store_dir: data.join("store"),
            runtime_dir: runtime
                .map_or_else(|| data.join("run"), |r| PathBuf::from(r).join("matkv")),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::at(Places::of_this_user())
    }
}

impl Config {
    fn at(Places { cache_dir, store_dir, runtime_dir }: Places) -> Self {
        Self {
            model: "smollm2-135m".into(),
            precision: Precision::Bf16,
            cache_dir,
            store_dir,
            runtime_dir,
            tcp: String::new(),
            system: "You are a helpful assistant. Answer the question from the documents.".into(),
            introduction: "Documents:\n".into(),
            chunk_size: 1024,
            chunk_overlap: 0,
            top_k: 4,
            reuse_mode: "linked".into(),
            link_tokens: 32,
            earlier_prompts: true,
            arena_bytes: 1 << 30,
            io_engine: IoEngine::Auto,
            io_depth: 32,
            io_block: 1 << 20,
            io_sqpoll: false,
            io_throttle: 0,
            io_deadline: Duration::from_secs(10),
            io_patience: 2,
            io_threads: 0,
            storage_type: StorageType::Single,
            storage_dirs: Vec::new(),
            stripe_unit: 1 << 20,
            storage_dtype: KvDtype::Int8,
            storage_codec: Codec::None,
            storage_level: 3,
            storage_capacity: 0,
            storage_reserve: 256 << 20,
            storage_policy: "gdsf".into(),
            high_watermark: 0.95,
            low_watermark: 0.85,
            promote_threshold: 2.0,
            promote_window: Duration::from_secs(600),
            heat_half_life: Duration::from_secs(3600),
            heat_record: String::new(),
            migrate_rate: 64 << 20,
            scrub_rate: 8 << 20,
            arena_policy: "gdsf".into(),
            prefetch: true,
            prefetch_max: 4,
            cold_url: String::new(),
            cold_endpoint: String::new(),
            cold_dtype: KvDtype::Int8,
            cold_codec: Codec::Zstd,
            cold_level: 3,
            cold_capacity: 0,
            cold_deadline: Duration::from_secs(30),
            tenant_quota: 0,
            tenant_ttl: Duration::ZERO,
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
            loader_cores: Vec::new(),
            decoder_cores: Vec::new(),
            decoder_nice: 5,
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
        let linked = Mode::Linked(self.link_tokens);
        // What was set has been read once already.
        Mode::parse(&self.reuse_mode, self.link_tokens).unwrap_or(linked)
    }

    /// Compute threads a setting stands for.
    pub fn threads(setting: usize) -> usize {
        if setting > 0 {
            return setting;
        }
        std::thread::available_parallelism().map_or(1, usize::from)
    }
}
