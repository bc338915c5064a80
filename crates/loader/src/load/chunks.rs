//! Chunks on their way into the arena: loaded, computed instead, given up, or brought in early.

use std::sync::Arc;

use matkv_store::Tier;
use matkv_sys::{CrashPoint, crash_point};
use matkv_telemetry::names;
use matkv_types::{ChunkId, KvLayout};

use super::{Load, Loading, Pending, Reading, Waiting, count, exclusive};
use crate::arena::{ChunkSlot, FillingSlot};
use crate::cache::Arrival;
use crate::compile::{CompileJob, Compiled};
use crate::error::RequestError;
use crate::flash::Unusable;
use crate::growing::Growing;
use crate::request::{ChunkSource, Lease, Materialized, NearChunk, Planned};
use crate::world::{LOADS_MAX, LoadJob, Loaded, World};

impl<W: World> Load<W> {
    /// Starts loading a chunk, or computing it; false if there is no slot or too much is under way.
    pub(super) fn start_load(&mut self, id: ChunkId, tokens: Arc<[u32]>, prefetch: bool) -> bool {
        if self.loading.len() >= LOADS_MAX {
            return false;
        }
        let rows = tokens.len();
        let located = if self.compute_only.contains(&id) {
            Err(Unusable::Asked)
        } else if self.loading.len() + self.abandoned.len() >= LOADS_MAX {
            Err(Unusable::Paused("too many reads that were given up are under way".into()))
        } else {
            self.world.locate(&id, tokens.len())
        };
        if prefetch && located.is_err() {
            // What has to be computed is computed when it is asked for.
            return true;
        }
        let form = located.as_ref().map_or(self.spec.form(), |f| f.encoding.in_arena().dtype);
        let len = self.spec.slot_len(tokens.len(), form);
        let Some(extent) = self.cache.allocate(&self.arena, len) else { return false };
        if !prefetch {
            // A chunk is asked of flash first, and of the cold tier if it is there alone.
            count("flash", &["requested"], rows);
            match &located {
                Ok(found) if found.tier == Tier::Flash => count("flash", &["hit"], rows),
                Ok(_) => count("cold", &["requested", "hit"], rows),
                Err(_) => {}
            }
        }
        let found = match located {
            Ok(found) => found,
            Err(reason) => {
                let growing = None;
                self.loading.insert(id, Loading { tokens, extent: None, prefetch, growing });
                let slot = exclusive(&extent);
                self.compute_instead(id, FillingSlot { slot, extent }, &reason);
                return true;
            }
        };
        self.next_read += 1;
        let (tag, target) = (self.next_read, exclusive(&extent));
        // A file of the cold tier comes whole.
        let layout = KvLayout::new(self.spec.shape, form, rows);
        let growing = (found.tier == Tier::Flash).then(|| Growing::new(layout));
        let (tokens_, growing_) = (Arc::clone(&tokens), growing.clone());
        let job = LoadJob { tag, id, tokens: tokens_, found, target, growing: growing_ };
        match self.world.load(job) {
            Ok(()) => {
                let started_ms = self.world.now_ms();
                self.reads.insert(tag, Reading { id, found, started_ms });
                let extent = Some(extent);
                self.loading.insert(id, Loading { tokens, extent, prefetch, growing });
                crash_point(CrashPoint::LoadSubmitted);
            }
            Err((slot, _)) if prefetch => drop(FillingSlot { slot, extent }),
            Err((slot, reason)) => {
                let growing = None;
                self.loading.insert(id, Loading { tokens, extent: None, prefetch, growing });
                self.fill_instead(id, FillingSlot { slot, extent }, &reason);
            }
        }
        true
    }

    /// A load has ended, well or not.
    pub fn loaded(&mut self, done: Loaded) {
        let Some(Reading { id, found, .. }) = self.reads.remove(&done.tag) else {
            // It took too long; only now is its memory let go, and it comes back when nobody reads
            // what had come of it.
            drop(done.result);
            self.expire();
            return;
        };
        let Some(loading) = self.loading.get_mut(&id) else { return };
        let Some(extent) = loading.extent.take() else { return };
        crash_point(CrashPoint::LoadRead);
        let prefetch = loading.prefetch;
        match done.result {
            Ok((file, slot)) => {
                metrics::counter!(names::LOADS).increment(1);
                metrics::counter!(names::LOAD_BYTES).increment(file.file_len() as u64);
                let source = match found.tier {
                    Tier::Flash => ChunkSource::Flash,
                    Tier::Cold => ChunkSource::Cold,
                };
                self.world.in_time(found);
                if !prefetch {
                    count(found.tier.as_str(), &["served"], file.rows);
                }
                let arrival = if prefetch { Arrival::Prefetched } else { Arrival::Demanded };
                let chunk = ChunkSlot::of_file(id, &file, slot, extent);
                self.settle(Arc::new(chunk), source, arrival);
            }
            Err(_) if prefetch => {
                self.loading.remove(&id);
            }
            Err(reason) => match extent.exclusive() {
                Ok(slot) => self.fill_instead(id, FillingSlot { slot, extent }, &reason),
                Err(_) => {
                    // Somebody still reads what had come of it.
                    self.abandoned.insert(done.tag, extent);
                    self.loading.remove(&id);
                    self.compute_only.insert(id);
                }
            },
        }
    }

    /// Loads that take too long are given up: the chunk is computed. A device may still write, so
    /// the memory waits for it.
    pub(super) fn expire(&mut self) {
        // Memory that nobody can write to any more: its read was lost with whoever ran it.
        self.abandoned.retain(|_, extent| extent.exclusive().is_err());
        let (now, most) = (self.world.now_ms(), self.world.deadline_ms());
        let late = |r: &Reading| now.saturating_sub(r.started_ms) >= most;
        let tags: Vec<u64> = self.reads.iter().filter(|(_, r)| late(r)).map(|(t, _)| *t).collect();
        for tag in tags {
            let Some(Reading { id, found, .. }) = self.reads.remove(&tag) else { continue };
            let Some(loading) = self.loading.remove(&id) else { continue };
            metrics::counter!(names::LOADS_LATE).increment(1);
            tracing::warn!("chunk {id}: {}; computing it", Unusable::Late(most));
            if let Some(growing) = &loading.growing {
                growing.fail();
            }
            self.abandoned.extend(loading.extent.map(|extent| (tag, extent)));
            self.world.late(&id, found);
            if !loading.prefetch {
                // Whoever waits for it asks again, and finds this.
                self.compute_only.insert(id);
            }
        }
    }

    /// Brings in what may be asked for next, as long as nobody waits.
    pub(super) fn prefetch(&mut self) {
        while self.waiting.is_empty() && self.loading.is_empty() && self.replies.is_empty() {
            let Some(NearChunk { id, tokens }) = self.expected.pop_front() else { return };
            if !self.cache.contains(&id) && !self.start_load(id, tokens, true) {
                return;
            }
        }
    }

    /// A slot of the form a file was to have is filled by computing; another form needs another
    /// slot.
    fn fill_instead(&mut self, id: ChunkId, filling: FillingSlot, reason: &Unusable) {
        let rows = self.loading.get(&id).map_or(0, |l| l.tokens.len());
        if filling.slot.len() >= self.spec.slot_len(rows, self.spec.form()) {
            return self.compute_instead(id, filling, reason);
        }
        drop(filling);
        self.loading.remove(&id);
        self.compute_only.insert(id);
    }

    fn compute_instead(&mut self, id: ChunkId, filling: FillingSlot, reason: &Unusable) {
        if reason.is_fault() {
            tracing::warn!("chunk {id}: {reason}; computing it again");
        }
        match reason.skipped() {
            Some(label) => metrics::counter!(names::LOAD_SKIPPED, "reason" => label).increment(1),
            None => metrics::counter!(names::RECOMPUTED).increment(1),
        }
        let Some(loading) = self.loading.get(&id) else { return };
        let tokens = Arc::clone(&loading.tokens);
        let store = reason.should_be_stored();
        let job = CompileJob { id, tokens, filling, for_request: true, store };
        self.computing += 1;
        self.world.compile(job);
    }

    /// A computation has ended, well or not.
    pub fn compiled(&mut self, compiled: Compiled) {
        self.computing = self.computing.saturating_sub(1);
        match compiled.outcome {
            Ok(chunk) => {
                let chunk = Arc::new(chunk);
                let replies = self.replies.remove(&compiled.id);
                // A chunk that is being read has its own slot; only one being computed is this one.
                let waiting = self.loading.get(&compiled.id);
                let demanded = waiting.is_some_and(|l| l.extent.is_none());
                let mut image = compiled.image;
                let mut materialized = || Materialized {
                    lease: Lease::new(Arc::clone(&chunk), &self.arena),
                    image: image.take(),
                    compute_ms: compiled.compute_ms,
                };
                // One ingest asks for a chunk, and once.
                for reply in replies.into_iter().flatten() {
                    let _ = reply.send(Ok(materialized()));
                }
                if demanded {
                    self.compute_only.remove(&compiled.id);
                    if compiled.store {
                        self.world.store_again(materialized());
                    }
                    self.settle(chunk, ChunkSource::Computed, Arrival::Demanded);
                } else {
                    let cost = self.world.cost(&compiled.id, chunk.layout().rows);
                    self.cache.insert(chunk, Arrival::Ingested, cost);
                }
            }
            Err(reason) => {
                // The same chunk may be under way twice, for a request and for an ingest; each
                // fails alone.
                if compiled.for_request {
                    // The entry may by now be that of a read of the same chunk.
                    if self.loading.get(&compiled.id).is_some_and(|l| l.extent.is_none()) {
                        self.loading.remove(&compiled.id);
                        self.compute_only.remove(&compiled.id);
                        self.fail_waiters(&compiled.id, &reason);
                    }
                } else {
                    for reply in self.replies.remove(&compiled.id).into_iter().flatten() {
                        let _ = reply.send(Err(reason.clone()));
                    }
                }
            }
        }
    }

    fn fail_waiters(&mut self, id: &ChunkId, reason: &str) {
        let waits = |p: &Pending| {
            p.planned.chunks.iter().zip(&p.leases).any(|(c, l)| c.id == *id && l.is_none())
        };
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting {
                Waiting::Request(request) if waits(&request) => {
                    request.end(Err(RequestError::Internal(reason.to_owned())));
                }
                other => self.waiting.push_back(other),
            }
        }
    }

    /// What a request has used is warm, and what is near it may be asked for next.
    pub(super) fn look_ahead(&mut self, planned: &mut Planned) {
        let near = std::mem::take(&mut planned.near);
        if planned.urgent {
            return;
        }
        self.cache.warm(near.iter().map(|n| &n.id));
        let used = planned.chunks.iter().map(|c| c.id).collect();
        self.world.used(used, near.iter().map(|n| n.id).collect());
        let window = self.world.prefetch_window();
        // The newest guess is the best one.
        self.expected = near.into_iter().take(window).collect();
    }

    /// A chunk has become resident: everyone who waits for it gets a lease before anything else
    /// can evict it.
    fn settle(&mut self, chunk: Arc<ChunkSlot>, source: ChunkSource, arrival: Arrival) {
        let id = chunk.id();
        if let Some(growing) = self.loading.remove(&id).and_then(|l| l.growing) {
            growing.complete(Arc::clone(&chunk), source);
        }
        for request in self.waiting.iter_mut().filter_map(Waiting::request) {
            for (use_, lease) in request.planned.chunks.iter_mut().zip(&mut request.leases) {
                if use_.id == id && lease.is_none() {
                    count("arena", &["requested"], use_.tokens.len());
                    use_.source = source;
                    *lease = Some(Lease::new(Arc::clone(&chunk), &self.arena));
                }
            }
        }
        let cost = self.world.cost(&id, chunk.layout().rows);
        self.cache.insert(chunk, arrival, cost);
        crash_point(CrashPoint::LoadResident);
    }
}
