//! The `load` thread: the load machine between its channels and the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, TrySendError, select_biased};
use matkv_actors::{Pulse, StopFlag};
use matkv_store::{Breaker, StoreError, Tier};
use matkv_sys::{SlotMut, monotonic_ns};
use matkv_types::ChunkId;

use crate::compile::{CompileJob, Compiled};
use crate::core::Core;
use crate::flash::Unusable;
use crate::groups::Groups;
use crate::keeper::KeeperMessage;
use crate::load::Load;
use crate::onboard::Onboarding;
use crate::rates::Kind;
use crate::request::{Materialized, Resident};
use crate::session::Sessions;
use crate::world::{Found, LoadJob, LoadMessage, Loaded, World};

/// How soon a request whose client has gone stops waiting for memory.
const SWEEP: Duration = Duration::from_millis(100);
/// With nothing waiting there is nothing to sweep.
const NOTHING_TO_SWEEP: Duration = Duration::from_secs(3600);

/// The devices, the compute thread and the store.
pub(crate) struct Process {
    pub core: Arc<Core>,
    pub onboarding: Arc<Onboarding>,
    pub sessions: Arc<Sessions>,
    /// Without overlap: what requests wait for each other in.
    pub groups: Option<Arc<Groups>>,
    /// Whether loads of a tier are tried.
    pub flash_breaker: Breaker,
    pub prefill: Sender<Box<Resident>>,
    pub compile: Sender<CompileJob>,
    pub background: Sender<CompileJob>,
    pub store: Sender<Materialized>,
}

impl Process {
    /// The self-test's chunk is in no index: its file says what it is.
    fn locate_self_test(&self) -> Result<Found, Unusable> {
        let id = self.core.self_test.id;
        let found = self.core.files_of(&id).superblock(&id, 0).map_err(|e| match e {
            StoreError::Format(e) => Unusable::Damaged(e.to_string()),
            _ => Unusable::Missing,
        })?;
        let (encoding, bytes) = (found.encoding, found.file_len() as u64);
        Ok(Found { tier: Tier::Flash, encoding, bytes })
    }
}

impl World for Process {
    fn now_ms(&self) -> u64 {
        monotonic_ns() / 1_000_000
    }

    fn deadline_ms(&self) -> u64 {
        u64::try_from(self.core.config.io_deadline.as_millis()).unwrap_or(u64::MAX)
    }

    fn locate(&mut self, id: &ChunkId, rows: usize) -> Result<Found, Unusable> {
        if *id == self.core.self_test.id {
            return self.locate_self_test();
        }
        let unreadable = |e: StoreError| Unusable::Unreadable(e.to_string());
        let record = self.core.store.read().and_then(|r| r.chunk(id)).map_err(unreadable)?;
        let Some(record) = record else { return Err(Unusable::Missing) };
        let (tier, placement, breaker, kind) = match (&record.flash, &record.cold) {
            (Some(p), _) => (Tier::Flash, p, &self.flash_breaker, Kind::Flash),
            (None, Some(p)) => {
                let Some(cold) = self.core.store.cold() else { return Err(Unusable::Missing) };
                (Tier::Cold, p, cold.breaker(), Kind::Cold)
            }
            (None, None) => return Err(Unusable::Evicted),
        };
        if let Some(reason) = breaker.reason(Instant::now()) {
            return Err(Unusable::Paused(reason));
        }
        match self.core.rates.prefer_computing(kind, placement.bytes, rows) {
            Some((load_ms, compute_ms)) => Err(Unusable::Slower { load_ms, compute_ms }),
            None => Ok(Found { tier, encoding: placement.encoding, bytes: placement.bytes }),
        }
    }

    fn load(&mut self, job: LoadJob) -> Result<(), (SlotMut, Unusable)> {
        self.onboarding.start(job)
    }

    fn in_time(&mut self, found: Found) {
        if found.tier == Tier::Flash {
            self.flash_breaker.succeeded();
        }
    }

    fn late(&mut self, id: &ChunkId, found: Found) {
        let reason = format!("loads of {} take longer than io.deadline", found.tier);
        let now = Instant::now();
        let opened = match (found.tier, self.core.store.cold()) {
            (Tier::Cold, Some(cold)) => cold.breaker().failed(now, &reason),
            _ => self.flash_breaker.failed(now, &reason),
        };
        if opened {
            tracing::warn!("chunk {id}: {reason}: chunks are computed for a while");
        }
    }

    fn used(&mut self, ids: Vec<ChunkId>, near: Vec<ChunkId>) {
        self.onboarding.tell(KeeperMessage::Used { ids, near });
    }

    fn cost(&self, _id: &ChunkId, rows: usize) -> f64 {
        let encoding = self.core.spec.encoding;
        let bytes = self.core.spec.slot_len(rows, encoding.dtype.in_arena()) as u64;
        // Before anything is measured all chunks cost the same per byte.
        self.core.rates.seconds(Kind::Flash, bytes).unwrap_or(bytes as f64 / 1e9)
    }

    fn prefetch_window(&self) -> usize {
        let config = &self.core.config;
        if !config.prefetch || !config.overlap {
            return 0;
        }
        let running = self.sessions.status().running as f64;
        let utilization = (running / self.core.config.batch_size as f64).min(1.0);
        ((2.0 * utilization) as usize).clamp(1, self.core.config.prefetch_max)
    }

    fn compile(&mut self, job: CompileJob) {
        // The channel has a place for every load that can be under way.
        let _ = self.compile.send(job);
    }

    fn compile_in_background(&mut self, job: CompileJob) -> Result<(), CompileJob> {
        self.background.try_send(job).map_err(TrySendError::into_inner)
    }

    fn background_has_room(&self) -> bool {
        !self.background.is_full()
    }

    fn overlap(&self) -> bool {
        self.core.config.overlap
    }

    fn lacks_memory(&mut self) {
        if let Some(groups) = &self.groups {
            groups.part();
        }
    }

    fn prefill(&mut self, resident: Resident) -> bool {
        self.prefill.send(Box::new(resident)).is_ok()
    }

    fn prefill_has_room(&self) -> bool {
        !self.prefill.is_full()
    }

    fn store_again(&mut self, chunk: Materialized) {
        if let Err(TrySendError::Full(chunk)) = self.store.try_send(chunk) {
            // It is recomputed, and stored, another time.
            tracing::debug!("chunk {}: recomputed, not stored: the device is busy", chunk.id());
        }
    }
}

/// Recomputed chunks waiting for the device; each holds its slot.
pub(crate) const STORES_MAX: usize = 8;

/// The `store` thread: puts recomputed chunks back on flash, so that nobody waits for the device.
pub(crate) fn store(core: &Core, chunks: &Receiver<Materialized>, stopped: &Receiver<()>) {
    loop {
        let chunk = select_biased! {
            recv(stopped) -> _ => return,
            recv(chunks) -> chunk => match chunk {
                Ok(chunk) => chunk,
                Err(_) => return,
            },
        };
        let id = chunk.id();
        let stored = if id == core.self_test.id {
            core.on_flash(&chunk).and_then(|file| core.files_of(&id).write(&id, &file))
        } else {
            // Its document may have been deleted meanwhile; then nothing is kept.
            core.on_flash(&chunk).and_then(|file| core.store.put_on_flash(&id, &file).map(|_| ()))
        };
        if let Err(e) = stored {
            tracing::warn!("chunk {id}: recomputed, but not stored: {e}");
        }
    }
}

/// What the thread hears.
pub(crate) struct LoadChannels {
    pub messages: Receiver<LoadMessage>,
    pub loaded: Receiver<Loaded>,
    pub compiled: Receiver<Compiled>,
}

/// What has woken the thread.
enum Event {
    Loaded(Loaded),
    Compiled(Compiled),
    Message(LoadMessage),
    /// Memory has been freed, a waiting client may have gone, or the flag is up.
    Look,
}

/// Runs until the flag is raised.
///
/// # Errors
/// If a thread it cannot do without is gone.
pub(crate) fn run(
    load: &mut Load<Process>,
    channels: &LoadChannels,
    resident: &AtomicU64,
    stop: &StopFlag,
    stopped: &Receiver<()>,
    pulse: &Pulse,
) -> Result<(), String> {
    let freed = load.world().core.arena.signals().clone();
    while !stop.is_raised() {
        let sweep = if load.needs_looks() { SWEEP } else { NOTHING_TO_SWEEP };
        pulse.rest();
        let event = select_biased! {
            recv(stopped) -> _ => Event::Look,
            recv(channels.loaded) -> l => Event::Loaded(l.map_err(|_| "nobody reads any more")?),
            recv(channels.compiled) -> c => {
                Event::Compiled(c.map_err(|_| "nobody computes any more")?)
            }
            recv(freed) -> _ => Event::Look,
            recv(channels.messages) -> message => match message {
                Ok(message) => Event::Message(message),
                Err(_) => return Ok(()),
            },
            default(sweep) => Event::Look,
        };
        // Everything from here on is work: a device that hangs in it is seen by the watch.
        pulse.step();
        match event {
            Event::Loaded(done) => load.loaded(done),
            Event::Compiled(compiled) => {
                if let Ok(chunk) = &compiled.outcome {
                    let (rows, ms) = (chunk.layout().rows as u64, compiled.compute_ms);
                    let rates = &load.world().core.rates;
                    rates.measured(Kind::Compute, rows, Duration::from_millis(ms.into()));
                }
                load.compiled(compiled);
            }
            Event::Message(message) => load.message(message),
            Event::Look => {}
        }
        load.pump();
        resident.store(load.resident() as u64, Ordering::Relaxed);
    }
    load.stop();
    Ok(())
}
