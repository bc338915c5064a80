//! Metric names, and the recorder and log subscriber of a process.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

pub mod service;
pub mod trace;

/// Metric names, in one place.
pub mod names {
    /// Chunk lookups that found the chunk in the arena.
    pub const ARENA_HITS: &str = "matkv_arena_hits_total";
    /// Chunks loaded from flash.
    pub const LOADS: &str = "matkv_chunk_loads_total";
    /// Bytes loaded from flash.
    pub const LOAD_BYTES: &str = "matkv_chunk_load_bytes_total";
    /// Chunks whose file was missing or refused, computed instead.
    pub const RECOMPUTED: &str = "matkv_chunks_recomputed_total";
    /// Chunk files refused and quarantined.
    pub const QUARANTINED: &str = "matkv_chunks_quarantined_total";
    /// Loads that were not made although the chunk is stored, by reason.
    pub const LOAD_SKIPPED: &str = "matkv_load_skipped_total";
    /// Loads that took longer than their deadline.
    pub const LOADS_LATE: &str = "matkv_loads_late_total";
    /// Chunks brought into the arena before they were asked for, by what became of them.
    pub const PREFETCHED: &str = "matkv_chunks_prefetched_total";
    /// Prompt tokens of chunks, by tier: asked of it, found in it, served from it.
    pub const TIER_TOKENS: &str = "matkv_tier_tokens_total";
    /// Chunks moved between tiers, by direction.
    pub const MIGRATED: &str = "matkv_chunks_migrated_total";
    /// Bytes moved between tiers, by direction.
    pub const MIGRATED_BYTES: &str = "matkv_migrated_bytes_total";
    /// Chunks verified in the background.
    pub const SCRUBBED: &str = "matkv_chunks_scrubbed_total";
    /// Copies written again from a good one.
    pub const HEALED: &str = "matkv_chunks_healed_total";
    /// Chunks evicted from the arena.
    pub const EVICTIONS: &str = "matkv_arena_evictions_total";
    /// Requests whose chunks were moved together because their own slot fitted no hole.
    pub const COMPACTIONS: &str = "matkv_arena_compactions_total";
    /// Chunks materialized by ingest.
    pub const MATERIALIZED: &str = "matkv_chunks_materialized_total";
    /// Slots held by requests; 0 at rest.
    pub const HELD_SLOTS: &str = "matkv_held_slots";
    /// Requests by outcome.
    pub const REQUESTS: &str = "matkv_requests_total";
    /// Prompt tokens.
    pub const PROMPT_TOKENS: &str = "matkv_prompt_tokens_total";
    /// Prompt tokens whose rows were reused.
    pub const CACHED_TOKENS: &str = "matkv_cached_tokens_total";
    /// Of these, tokens whose rows an earlier prompt had computed.
    pub const EARLIER_TOKENS: &str = "matkv_earlier_tokens_total";
    /// Tokens generated.
    pub const COMPLETION_TOKENS: &str = "matkv_completion_tokens_total";
    /// Descriptors of an epoch that has ended.
    pub const STALE_COMPLETIONS: &str = "matkv_stale_completions_total";
    /// Times a process was seen to make no step.
    pub const STALLS: &str = "matkv_peer_stalls_total";
    /// Sessions with a decoder.
    pub const EPOCHS: &str = "matkv_epochs_total";
}

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

/// Installs log output (to standard error) and the metrics recorder. Later calls do nothing.
pub fn init(level: &str) {
    let filter = EnvFilter::try_new(format!("{level},h2=warn,hyper=warn,tower=warn,ractor=warn"))
        .unwrap_or_else(|_| EnvFilter::new("info"));
    // A process that runs loader and decoder in one (tests) initializes twice.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
    if HANDLE.get().is_none()
        && let Ok(handle) = PrometheusBuilder::new().install_recorder()
    {
        let _ = HANDLE.set(handle);
    }
}

/// All metrics in Prometheus text form.
pub fn render() -> String {
    HANDLE.get().map(PrometheusHandle::render).unwrap_or_default()
}
