//! The table of settings: key, what it means, how it is read and written.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::config::{Config, IoEngine};
use crate::units::{exact_bytes, format_duration, parse_bytes, parse_duration};

/// One key of the configuration.
pub struct Setting {
    /// `section.name` in the file; `MATKV_SECTION_NAME` in the environment.
    pub key: &'static str,
    /// What it means.
    pub help: &'static str,
    /// Reads a value.
    pub set: fn(&mut Config, &str) -> Result<(), String>,
    /// Writes the value as it would stand in the file.
    pub get: fn(&Config) -> String,
}

impl Setting {
    /// Name of the environment variable.
    pub fn variable(&self) -> String {
        format!("MATKV_{}", self.key.replace('.', "_").to_uppercase())
    }
}

fn parse<T: FromStr>(text: &str) -> Result<T, String>
where
    T::Err: std::fmt::Display,
{
    text.trim().parse().map_err(|e: T::Err| e.to_string())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match parse(text)? {
        0 => Err("must be at least 1".into()),
        n => Ok(n),
    }
}

fn between(text: &str, low: usize, high: usize) -> Result<usize, String> {
    match parse(text)? {
        n if (low..=high).contains(&n) => Ok(n),
        _ => Err(format!("must be between {low} and {high}")),
    }
}

macro_rules! setting {
    ($key:literal, $help:literal, $field:ident, $read:expr, $write:expr) => {
        Setting {
            key: $key,
            help: $help,
            set: |c, text| {
                c.$field = ($read)(text)?;
                Ok(())
            },
            get: |c| ($write)(&c.$field),
        }
    };
}

fn text(value: &str) -> Result<String, String> {
    Ok(value.to_owned())
}

fn path(value: &str) -> Result<PathBuf, String> {
    if value.trim().is_empty() {
        return Err("must not be empty".into());
    }
    match (value.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => Ok(PathBuf::from(home).join(rest)),
        _ => Ok(PathBuf::from(value)),
    }
}

fn show_path(value: &std::path::Path) -> String {
    value.display().to_string()
}

fn engine(value: &str) -> Result<IoEngine, String> {
    match value {
        "auto" => Ok(IoEngine::Auto),
        "uring" => Ok(IoEngine::Uring),
        "pread" => Ok(IoEngine::Pread),
        _ => Err("must be auto, uring or pread".into()),
    }
}

fn show_engine(value: &IoEngine) -> String {
    match value {
        IoEngine::Auto => "auto",
        IoEngine::Uring => "uring",
        IoEngine::Pread => "pread",
    }
    .into()
}

fn tcp(value: &str) -> Result<String, String> {
    if value.is_empty() {
        return Ok(String::new());
    }
    let address: std::net::SocketAddr =
        value.parse().map_err(|_| "must be ADDRESS:PORT, or empty".to_owned())?;
    if !address.ip().is_loopback() {
        return Err("only loopback addresses are served: there is no authentication yet".into());
    }
    Ok(value.to_owned())
}

fn log_level(value: &str) -> Result<String, String> {
    match value {
        "error" | "warn" | "info" | "debug" | "trace" => Ok(value.to_owned()),
        _ => Err("must be error, warn, info, debug or trace".into()),
    }
}

fn time(value: &str) -> Result<Duration, String> {
    match parse_duration(value)? {
        t if t >= Duration::from_secs(1) => Ok(t),
        _ => Err("must be at least 1s".into()),
    }
}

fn arena(value: &str) -> Result<u64, String> {
    match parse_bytes(value)? {
        n if n >= 16 << 20 => Ok(n),
        _ => Err("must be at least 16MiB".into()),
    }
}

/// Every key, in the order of the example file.
pub static SETTINGS: &[Setting] = &[
    setting!(
        "model.path",
        "a fetched model's name, or the path of a .gguf file",
        model,
        text,
        String::clone
    ),
    setting!(
        "paths.cache_dir",
        "models fetched by name",
        cache_dir,
        path,
        |p: &PathBuf| show_path(p)
    ),
    setting!("paths.store_dir", "chunk files and index", store_dir, path, |p: &PathBuf| show_path(
        p
    )),
    setting!("paths.runtime_dir", "sockets", runtime_dir, path, |p: &PathBuf| show_path(p)),
    setting!(
        "server.tcp",
        "loopback address to serve besides the Unix socket",
        tcp,
        tcp,
        String::clone
    ),
    setting!(
        "prompt.system",
        "system text of the corpus; part of every chunk's identity",
        system,
        text,
        String::clone
    ),
    setting!(
        "prompt.introduction",
        "line before the documents; part of every chunk's identity",
        introduction,
        text,
        String::clone
    ),
    setting!("chunker.chunk_size", "tokens per chunk", chunk_size, at_least_one, usize::to_string),
    setting!(
        "chunker.chunk_overlap",
        "tokens a chunk shares with the one before",
        chunk_overlap,
        parse,
        usize::to_string
    ),
    setting!(
        "retrieval.top_k",
        "chunks retrieved for a question",
        top_k,
        |t: &str| between(t, 1, 1024),
        usize::to_string
    ),
    setting!(
        "reuse.link_tokens",
        "rows recomputed at the start of every chunk after the first; 0 is independent",
        link_tokens,
        parse,
        u32::to_string
    ),
    setting!("arena.size", "shared memory for KV", arena_bytes, arena, |n: &u64| exact_bytes(*n)),
    setting!("io.engine", "auto, uring or pread", io_engine, engine, show_engine),
    setting!(
        "io.depth",
        "reads in flight",
        io_depth,
        |t: &str| between(t, 1, 1024).map(|n| n as u32),
        u32::to_string
    ),
    setting!(
        "pipeline.batch_size",
        "sequences decoded together",
        batch_size,
        |t: &str| between(t, 1, 64),
        usize::to_string
    ),
    setting!(
        "pipeline.queue",
        "requests waiting or running; one more is refused",
        queue,
        |t: &str| between(t, 1, 64),
        usize::to_string
    ),
    setting!(
        "pipeline.overlap",
        "prepare the next requests while others decode",
        overlap,
        parse,
        bool::to_string
    ),
    setting!(
        "pipeline.max_new_tokens",
        "tokens generated when a request does not say",
        max_new_tokens,
        |t: &str| between(t, 1, 1 << 20).map(|n| n as u32),
        u32::to_string
    ),
    setting!(
        "pipeline.batch_tokens",
        "rows that the sequences decoded together may attend to; a longer one is decoded alone",
        batch_tokens,
        at_least_one,
        usize::to_string
    ),
    setting!(
        "pipeline.deadline",
        "longest a request may take; its client may ask for less",
        deadline,
        time,
        |t: &Duration| format_duration(*t)
    ),
    setting!(
        "supervision.stall",
        "a thread or process that makes no step for this long is stuck",
        stall,
        time,
        |t: &Duration| format_duration(*t)
    ),
    setting!(
        "supervision.drain",
        "running requests may finish for this long after a stop",
        drain,
        parse_duration,
        |t: &Duration| format_duration(*t)
    ),
    setting!(
        "threads.loader",
        "compute threads of the loader; 0 for one per core",
        loader_threads,
        parse,
        usize::to_string
    ),
    setting!(
        "threads.decoder",
        "compute threads of the decoder; 0 for one per core",
        decoder_threads,
        parse,
        usize::to_string
    ),
    setting!("log.level", "error, warn, info, debug or trace", log, log_level, String::clone),
];
