//! The table of settings: key, what it means, how it is read and written.

use std::path::PathBuf;
use std::time::Duration;

use matkv_types::{Codec, KvDtype, Precision};

use crate::config::Config;
use crate::forms::*;
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
        "compute.precision",
        "bf16 (fast), exact (f32; half the speed): part of every chunk's identity",
        precision,
        parse::<Precision>,
        Precision::to_string
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
        "reuse.mode",
        "linked, linked(N), independent, focused(R), focused(R,N), exact or vanilla",
        reuse_mode,
        mode,
        String::clone
    ),
    setting!(
        "reuse.link_tokens",
        "rows recomputed at the start of every chunk after the first; 0 is independent",
        link_tokens,
        parse,
        u32::to_string
    ),
    setting!(
        "reuse.earlier_prompts",
        "rows of earlier prompts serve those that begin the same: a conversation's next turn",
        earlier_prompts,
        parse,
        bool::to_string
    ),
    setting!("arena.size", "shared memory for KV", arena_bytes, arena, |n: &u64| exact_bytes(*n)),
    setting!(
        "arena.policy",
        "what leaves the arena first; as storage.policy",
        arena_policy,
        policy,
        String::clone
    ),
    setting!("io.engine", "auto, uring or pread", io_engine, engine, show_engine),
    setting!(
        "io.depth",
        "reads in flight",
        io_depth,
        |t: &str| between(t, 1, 1024).map(|n| n as u32),
        u32::to_string
    ),
    setting!("io.block", "bytes of one read", io_block, block, show_bytes),
    setting!(
        "io.sqpoll",
        "a kernel thread takes io_uring submissions: for machines with a core to spare",
        io_sqpoll,
        parse,
        bool::to_string
    ),
    setting!(
        "io.throttle",
        "bytes a second that files are read at, to measure a slower device; 0: as fast as it is",
        io_throttle,
        parse_bytes,
        show_bytes
    ),
    setting!(
        "io.deadline",
        "longest a load may take; then the chunk is computed instead",
        io_deadline,
        time,
        show_time
    ),
    setting!(
        "io.patience",
        "a chunk is computed if loading it takes so many times as long; 0: only at the deadline",
        io_patience,
        parse,
        u32::to_string
    ),
    setting!(
        "io.threads",
        "threads that verify and decode what was read; 0 for one per core",
        io_threads,
        parse,
        usize::to_string
    ),
    setting!(
        "storage.type",
        "single, stripe (every chunk over all directories) or mirror (every chunk twice)",
        storage_type,
        storage_type,
        show_storage_type
    ),
    setting!(
        "storage.dirs",
        "directories for chunk files, one per device; paths.store_dir if there are none",
        storage_dirs,
        paths,
        |p: &Vec<PathBuf>| show_paths(p)
    ),
    setting!(
        "storage.stripe_unit",
        "bytes on one device before the next",
        stripe_unit,
        block,
        show_bytes
    ),
    setting!(
        "storage.dtype",
        "row type: bf16 (exact), int8 (half the bytes), fp16, fp8, int4",
        storage_dtype,
        parse::<KvDtype>,
        KvDtype::to_string
    ),
    setting!(
        "storage.codec",
        "none, lz4, zstd, split-lz4 or split-zstd",
        storage_codec,
        parse::<Codec>,
        Codec::to_string
    ),
    setting!("storage.level", "level of Zstandard", storage_level, level, u32::to_string),
    setting!(
        "storage.capacity",
        "bytes on the devices at most, over all models; 0 for no limit",
        storage_capacity,
        parse_bytes,
        show_bytes
    ),
    setting!(
        "storage.reserve",
        "bytes of the file system left to others",
        storage_reserve,
        parse_bytes,
        show_bytes
    ),
    setting!(
        "storage.policy",
        "what leaves first: gdsf (value per byte), lru, s3fifo or semantic-lru",
        storage_policy,
        policy,
        String::clone
    ),
    setting!(
        "storage.high_watermark",
        "share of the capacity above which chunks go to the cold tier",
        high_watermark,
        share,
        f64::to_string
    ),
    setting!(
        "storage.low_watermark",
        "share of the capacity at which that stops",
        low_watermark,
        share,
        f64::to_string
    ),
    setting!(
        "storage.migrate_rate",
        "bytes a second moved between tiers in the background",
        migrate_rate,
        parse_bytes,
        show_bytes
    ),
    setting!(
        "storage.scrub_rate",
        "bytes a second verified in the background; 0 for none",
        scrub_rate,
        parse_bytes,
        show_bytes
    ),
    setting!(
        "heat.threshold",
        "a cold chunk used more often than this is promoted, …",
        promote_threshold,
        parse,
        f64::to_string
    ),
    setting!("heat.window", "… if its last use is not longer ago", promote_window, time, show_time),
    setting!("heat.half_life", "time in which uses fade to half", heat_half_life, time, show_time),
    setting!(
        "heat.record",
        "file to which every use of a chunk is appended, for matkv bench trace",
        heat_record,
        text,
        String::clone
    ),
    setting!(
        "cold.url",
        "file:///directory or s3://bucket/prefix; empty for no cold tier",
        cold_url,
        cold_url,
        String::clone
    ),
    setting!(
        "cold.endpoint",
        "of an S3 service that is not Amazon's; keys come from AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY",
        cold_endpoint,
        endpoint,
        String::clone
    ),
    setting!(
        "cold.dtype",
        "row type; int4 is the smallest. A chunk whose rows are narrower stays as it is",
        cold_dtype,
        parse::<KvDtype>,
        KvDtype::to_string
    ),
    setting!("cold.codec", "as storage.codec", cold_codec, parse::<Codec>, Codec::to_string),
    setting!("cold.level", "level of Zstandard", cold_level, level, u32::to_string),
    setting!(
        "cold.capacity",
        "bytes at most; 0 for no limit",
        cold_capacity,
        parse_bytes,
        show_bytes
    ),
    setting!("cold.deadline", "longest a transfer may take", cold_deadline, time, show_time),
    setting!(
        "tenant.quota",
        "bytes a tenant may keep in all tiers; 0 for no limit",
        tenant_quota,
        parse_bytes,
        show_bytes
    ),
    setting!(
        "tenant.ttl",
        "chunks unused for so long leave all tiers; 0s for never",
        tenant_ttl,
        parse_duration,
        show_time
    ),
    setting!(
        "prefetch.enabled",
        "bring chunks into the arena before they are asked for",
        prefetch,
        parse,
        bool::to_string
    ),
    setting!(
        "prefetch.max",
        "chunks prefetched for one request at most",
        prefetch_max,
        |t: &str| between(t, 1, 64),
        usize::to_string
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
    setting!(
        "threads.loader_cores",
        "cores the loader's compute threads are bound to in turn, as 0,2; any if none are named",
        loader_cores,
        cores,
        |c: &Vec<usize>| show_cores(c)
    ),
    setting!(
        "threads.decoder_cores",
        "cores the decoder's compute threads are bound to",
        decoder_cores,
        cores,
        |c: &Vec<usize>| show_cores(c)
    ),
    setting!(
        "threads.decoder_nice",
        "how much nicer the decoder is than the loader: what waits for prefills is decoded together",
        decoder_nice,
        |t: &str| between(t, 0, 19).map(|n| n as u8),
        u8::to_string
    ),
    setting!("log.level", "error, warn, info, debug or trace", log, log_level, String::clone),
];
