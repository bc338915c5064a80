//! What `GetStatus` and the health service say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use matkv_api::v1::GetStatusResponse;
use matkv_kernels::Isa;

use crate::core::Core;
use crate::request::held_slots;
use crate::session::Sessions;

/// What the gateway can see of the loader.
pub(crate) struct Observer {
    pub core: Arc<Core>,
    pub sessions: Arc<Sessions>,
    pub engine: String,
    /// Chunks in the arena.
    pub resident: Arc<AtomicU64>,
    /// Requests admitted and not ended.
    pub admitted: Arc<AtomicU64>,
}

impl Observer {
    pub fn is_ready(&self) -> bool {
        self.sessions.is_connected()
    }

    pub fn status(&self) -> Result<GetStatusResponse, String> {
        let core = &self.core;
        let session = self.sessions.status();
        let totals = core.store.read().and_then(|r| r.totals()).map_err(|e| e.to_string())?;
        let (arena_bytes, used) = core.arena.usage();
        let ready = self.is_ready();
        let running = session.running as u64;
        let reason = if ready {
            String::new()
        } else if session.refusal.is_empty() {
            "no decoder is connected".into()
        } else {
            format!("the decoder was refused: {}", session.refusal)
        };
        Ok(GetStatusResponse {
            state: if ready { "ready" } else { "waiting-for-decoder" }.into(),
            reason,
            version: env!("CARGO_PKG_VERSION").into(),
            model: core.config.model.clone(),
            fingerprint: core.fingerprint.to_string(),
            epoch: session.epoch,
            loader_pid: std::process::id(),
            decoder_pid: session.decoder,
            io_engine: self.engine.clone(),
            isa: Isa::detect().name().into(),
            documents: totals.documents,
            chunks: totals.chunks,
            chunk_tokens: totals.tokens,
            chunk_bytes: totals.file_bytes,
            arena_bytes: arena_bytes as u64,
            arena_used_bytes: used as u64,
            arena_chunks: self.resident.load(Ordering::Relaxed),
            held_slots: held_slots(),
            requests_running: running,
            requests_waiting: self.admitted.load(Ordering::Relaxed).saturating_sub(running),
            quarantined: core.store.files().quarantined().unwrap_or(0) as u64,
            other_fingerprints: core.store.other_fingerprints().to_vec(),
            metrics: matkv_telemetry::render(),
            store_dir: core.config.store_dir.display().to_string(),
        })
    }
}
