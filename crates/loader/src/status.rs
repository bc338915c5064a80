//! What `GetStatus` and the health service say.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use matkv_api::v1::GetStatusResponse;
use matkv_kernels::Isa;

use crate::core::Core;
use crate::error::RequestError;
use crate::request::RequestState;
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
    /// Answers whose client has not been told the end.
    pub streams: Arc<AtomicU64>,
    /// Requests that may not have ended.
    pub live: Mutex<Vec<Weak<RequestState>>>,
    /// A stop has been asked for: running requests finish, no new ones are taken.
    pub draining: AtomicBool,
    /// Outcome of the self-test, by epoch.
    pub self_test: Mutex<(u64, Result<(), String>)>,
    pub testing: Mutex<Testing>,
    /// A thread that makes no progress.
    pub stuck: Mutex<Option<&'static str>>,
}

/// The self-test that has been started last, and when to try again.
#[derive(Default)]
pub(crate) struct Testing {
    pub epoch: u64,
    pub again: Option<Instant>,
}

/// Why requests are not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unready {
    pub state: &'static str,
    pub reason: String,
}

impl Observer {
    pub fn new(core: Arc<Core>, sessions: Arc<Sessions>, engine: String) -> Self {
        Self {
            core,
            sessions,
            engine,
            resident: Arc::default(),
            admitted: Arc::default(),
            streams: Arc::default(),
            live: Mutex::default(),
            draining: AtomicBool::new(false),
            self_test: Mutex::new((0, Ok(()))),
            testing: Mutex::default(),
            stuck: Mutex::new(None),
        }
    }

    /// Keeps sight of a request, and forgets those that are gone.
    pub fn watch(&self, state: &Arc<RequestState>) {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|s| s.strong_count() > 0);
        live.push(Arc::downgrade(state));
    }

    /// Tells every request that has not ended, wherever it was, that it will not.
    pub fn end_all(&self) {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        for state in live.iter().filter_map(Weak::upgrade) {
            state.end(Err(RequestError::Unavailable("the loader is stopping".into())));
        }
    }

    /// Why requests are not taken; nothing if they are.
    pub fn unready(&self) -> Option<Unready> {
        let no = |state, reason: String| Some(Unready { state, reason });
        if self.draining.load(Ordering::SeqCst) {
            return no("draining", "the loader is stopping".into());
        }
        if let Some(thread) = *self.stuck.lock().unwrap_or_else(PoisonError::into_inner) {
            return no("degraded", format!("thread {thread} makes no progress"));
        }
        let session = self.sessions.status();
        if session.decoder == 0 {
            return match session.refusal.as_str() {
                "" => no("waiting-for-decoder", "no decoder is connected".into()),
                why => no("waiting-for-decoder", format!("the decoder was refused: {why}")),
            };
        }
        match &*self.self_test.lock().unwrap_or_else(PoisonError::into_inner) {
            (epoch, _) if *epoch != session.epoch => {
                no("testing", "the self-test of this session is not done".into())
            }
            (_, Ok(())) => None,
            (_, Err(e)) => no("degraded", format!("the self-test failed: {e}")),
        }
    }

    pub fn status(&self) -> Result<GetStatusResponse, String> {
        let core = &self.core;
        let session = self.sessions.status();
        let totals = core.store.read().and_then(|r| r.totals()).map_err(|e| e.to_string())?;
        let (arena_bytes, used) = core.arena.usage();
        let (flash_used, flash_capacity) = core.store.flash_usage();
        let running = session.running as u64;
        let ready = Unready { state: "ready", reason: String::new() };
        let Unready { state, reason } = self.unready().unwrap_or(ready);
        Ok(GetStatusResponse {
            state: state.into(),
            reason,
            version: env!("CARGO_PKG_VERSION").into(),
            model: core.config.model.clone(),
            fingerprint: core.spec.fingerprint.to_string(),
            epoch: session.epoch,
            loader_pid: std::process::id(),
            decoder_pid: session.decoder,
            io_engine: self.engine.clone(),
            isa: Isa::detect().name().into(),
            documents: totals.documents,
            chunks: totals.chunks,
            chunk_tokens: totals.tokens,
            chunk_bytes: totals.flash_bytes,
            arena_bytes: arena_bytes as u64,
            arena_used_bytes: used as u64,
            arena_chunks: self.resident.load(Ordering::Relaxed),
            held_slots: core.arena.held() as u64,
            requests_running: running,
            requests_waiting: self.admitted.load(Ordering::Relaxed).saturating_sub(running),
            quarantined: core.store.files().quarantined().map_or(0, |q| q.0) as u64,
            other_fingerprints: core.store.other_identities(),
            storage_degraded: core.store.degraded().unwrap_or_default(),
            flash_used_bytes: flash_used,
            flash_capacity: flash_capacity.unwrap_or(0),
            flash_chunks: totals.flash_chunks,
            cold_chunks: totals.cold_chunks,
            cold_bytes: totals.cold_bytes,
            cold_url: core.config.cold_url.clone(),
            encoding: core.spec.encoding.to_string(),
            metrics: matkv_telemetry::render(),
            store_dir: core.config.store_dir.display().to_string(),
        })
    }
}
