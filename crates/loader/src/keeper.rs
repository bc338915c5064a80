//! The `keeper` thread: what the store needs while requests are served.
//!
//! It heals copies, follows up what loads have found out, keeps heat, promotes and demotes at a
//! bounded rate, and verifies everything at a bounded rate, one chunk at a time. All of it can be
//! stopped between two chunks.

use std::io::Write;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use matkv_store::{StoreError, Tier, unix_seconds};
use matkv_telemetry::names;
use matkv_types::ChunkId;

use crate::core::Core;
use crate::world::LoadMessage;

/// What the keeper is told.
#[derive(Debug)]
pub(crate) enum KeeperMessage {
    /// A copy has to be written again from a good one.
    Heal { id: ChunkId, copy: usize },
    /// Chunks have been used; others are near them.
    Used { ids: Vec<ChunkId>, near: Vec<ChunkId> },
    /// A chunk has been loaded.
    Loaded { id: ChunkId, tier: Tier, ms: f32 },
}

/// Messages waiting; more are dropped.
pub(crate) const NOTES_MAX: usize = 1024;
/// How often it looks around.
const ROUND: Duration = Duration::from_secs(1);
/// How often heat is written.
const FLUSH: Duration = Duration::from_secs(10);
/// Between two passes over all chunks; less where chunks have to leave in time.
const REST: Duration = Duration::from_secs(600);

/// [`REST`] for this `tenant.ttl`: what is over leaves a tenth of that later at most.
fn rest(ttl: Duration) -> Duration {
    if ttl.is_zero() { REST } else { (ttl / 10).clamp(ROUND, REST) }
}

/// A rate of bytes that is kept over time.
struct Budget {
    per_second: u64,
    /// When the next byte may move.
    free: Instant,
}

impl Budget {
    fn new(per_second: u64) -> Self {
        Self { per_second, free: Instant::now() }
    }

    fn allows(&self) -> bool {
        self.per_second > 0 && Instant::now() >= self.free
    }

    fn spend(&mut self, bytes: u64) {
        if self.per_second > 0 {
            let spent = Duration::from_secs_f64(bytes as f64 / self.per_second as f64);
            self.free = self.free.max(Instant::now()) + spent;
        }
    }
}

struct Keeper<'a> {
    core: &'a Core,
    load: &'a Sender<LoadMessage>,
    stopped: &'a Receiver<()>,
    migrate: Budget,
    scrub: Budget,
    cursor: Option<ChunkId>,
    next_pass: Instant,
    next_flush: Instant,
    /// Cold chunks that have become warm.
    promotions: Vec<ChunkId>,
    /// Chunks that have outlived their time and may still be in the arena.
    expired: Vec<ChunkId>,
}

/// Runs until stopped.
pub(crate) fn run(
    core: &Core,
    notes: &Receiver<KeeperMessage>,
    load: &Sender<LoadMessage>,
    stopped: &Receiver<()>,
) {
    let now = Instant::now();
    let mut keeper = Keeper {
        core,
        load,
        stopped,
        migrate: Budget::new(core.config.migrate_rate),
        scrub: Budget::new(core.config.scrub_rate),
        cursor: None,
        next_pass: now,
        next_flush: now + FLUSH,
        promotions: Vec::new(),
        expired: Vec::new(),
    };
    keeper.report(core.store.load_residents(&|| !keeper.is_stopped()));
    let mut next_round = now + ROUND;
    loop {
        let wait = next_round.saturating_duration_since(Instant::now());
        match notes.recv_timeout(wait) {
            Ok(note) => keeper.hear(note),
            Err(RecvTimeoutError::Timeout) => {
                keeper.round();
                next_round = Instant::now() + ROUND;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if keeper.is_stopped() {
            break;
        }
        if Instant::now() >= next_round {
            keeper.round();
            next_round = Instant::now() + ROUND;
        }
    }
    keeper.report(core.store.flush_heat());
}

impl Keeper<'_> {
    fn is_stopped(&self) -> bool {
        matches!(self.stopped.try_recv(), Err(TryRecvError::Disconnected))
    }

    fn report(&self, outcome: Result<(), StoreError>) {
        if let Err(e) = outcome {
            tracing::warn!("keeper: {e}");
        }
    }

    fn hear(&mut self, note: KeeperMessage) {
        let store = &self.core.store;
        let outcome = match note {
            KeeperMessage::Heal { id, copy } => store.heal(&id, copy).inspect(|()| {
                metrics::counter!(names::HEALED).increment(1);
            }),
            KeeperMessage::Used { ids, near } => {
                store.touch(&ids, &near);
                self.record(&ids);
                Ok(())
            }
            KeeperMessage::Loaded { id, tier, ms } => {
                store.measured_load(&id, ms);
                let known = self.promotions.contains(&id) || self.promotions.len() >= NOTES_MAX;
                if tier == Tier::Cold && !known {
                    self.promotions.push(id);
                }
                Ok(())
            }
        };
        self.report(outcome);
    }

    /// Appends uses to the recorded trace, if one is wanted.
    fn record(&self, ids: &[ChunkId]) {
        let path = &self.core.config.heat_record;
        if path.is_empty() {
            return;
        }
        let Ok(read) = self.core.store.read() else { return };
        let mut lines = String::new();
        for id in ids {
            let tokens = read.chunk(id).ok().flatten().map_or(0, |c| c.rows);
            let chunk = id.as_bytes().iter().take(8).fold(0u64, |n, b| n << 8 | u64::from(*b));
            // Chunks of one document are its topic.
            let users = read.users(id, 1).unwrap_or_default();
            let name = users.first().map_or("", |u| u.as_str());
            let topic = crc32c::crc32c(name.as_bytes());
            lines.push_str(&format!(
                "{{\"chunk\":{chunk},\"tokens\":{tokens},\"topic\":{topic}}}\n"
            ));
        }
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        if let Err(e) = file.and_then(|mut f| f.write_all(lines.as_bytes())) {
            tracing::warn!("heat.record {path}: {e}");
        }
    }

    fn round(&mut self) {
        let now = Instant::now();
        if now >= self.next_flush {
            self.report(self.core.store.flush_heat());
            // What deletions have left on the list.
            self.report(self.core.store.forget_gone());
            self.next_flush = now + FLUSH;
        }
        self.core.store.sweep_cold();
        self.promote();
        self.demote();
        self.verify();
        self.forget();
        let (used, _) = self.core.store.flash_usage();
        metrics::gauge!("matkv_flash_bytes").set(used as f64);
    }

    /// `access_count > threshold && since_last_access < time_window`.
    fn promote(&mut self) {
        let store = &self.core.store;
        while self.migrate.allows()
            && !self.is_stopped()
            && let Some(id) = self.promotions.pop()
        {
            let Ok(read) = store.read() else { return };
            let heat = read.heat(&id);
            drop(read);
            if !store.options().promotion.promotes(&heat, unix_seconds()) {
                continue;
            }
            match store.promote(&id) {
                Ok(bytes) => {
                    self.migrate.spend(bytes);
                    count_move("promoted", 1, bytes);
                }
                Err(e) => tracing::debug!("chunk {id}: not promoted: {e}"),
            }
        }
    }

    fn demote(&mut self) {
        if !self.migrate.allows() {
            return;
        }
        let most = self.migrate.per_second;
        let go_on = |moved: u64| moved < most && !self.is_stopped();
        match self.core.store.balance(&go_on) {
            Ok((chunks, bytes)) => {
                self.migrate.spend(bytes);
                count_move("demoted", chunks, bytes);
            }
            Err(e) => tracing::debug!("not demoted: {e}"),
        }
    }

    /// What has outlived its time leaves the arena, too.
    fn forget(&mut self) {
        if !self.expired.is_empty() {
            let message = LoadMessage::Forget(std::mem::take(&mut self.expired));
            // Whoever is that far behind hears it in the next round.
            if let Err(e) = self.load.try_send(message)
                && let LoadMessage::Forget(ids) = e.into_inner()
            {
                self.expired = ids;
            }
        }
    }

    fn verify(&mut self) {
        if Instant::now() < self.next_pass {
            return;
        }
        let end = Instant::now() + ROUND;
        while self.scrub.allows() && !self.is_stopped() && Instant::now() < end {
            // One chunk, or some that are nowhere.
            match self.core.store.scrub(self.cursor, 1) {
                Ok((next, report)) => {
                    self.scrub.spend(report.bytes.max(4096));
                    metrics::counter!(names::SCRUBBED).increment(report.chunks);
                    metrics::counter!(names::HEALED).increment(report.healed);
                    self.expired.extend(report.expired);
                    self.cursor = next;
                    if next.is_none() {
                        self.next_pass = Instant::now() + rest(self.core.config.tenant_ttl);
                        return;
                    }
                }
                Err(e) => {
                    tracing::warn!("scrub: {e}");
                    self.next_pass = Instant::now() + rest(self.core.config.tenant_ttl);
                    return;
                }
            }
        }
    }
}

fn count_move(direction: &'static str, chunks: u64, bytes: u64) {
    if chunks > 0 {
        metrics::counter!(names::MIGRATED, "direction" => direction).increment(chunks);
        metrics::counter!(names::MIGRATED_BYTES, "direction" => direction).increment(bytes);
    }
}
