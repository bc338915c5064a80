//! Which chunks are in the arena: a cache, least recently used first out.
//!
//! A resident chunk is pinned while anyone but this table holds its slot, so a pin cannot be
//! forgotten: it ends when the lease is dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use matkv_telemetry::names;
use matkv_types::ChunkId;

use crate::arena::{Arena, ChunkSlot, Extent};

struct Entry {
    chunk: Arc<ChunkSlot>,
    used: u64,
}

/// Resident chunks; owned by the load thread.
#[derive(Default)]
pub struct ChunkCache {
    entries: HashMap<ChunkId, Entry>,
    /// Ids by last use.
    order: BTreeMap<u64, ChunkId>,
    clock: u64,
    cold_clock: u64,
}

/// Half of all ticks lie below, for chunks inserted at the cold end.
const FIRST_TICK: u64 = 1 << 62;

impl ChunkCache {
    pub fn new() -> Self {
        Self { clock: FIRST_TICK, cold_clock: 0, ..Self::default() }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// A resident chunk, now the most recently used.
    pub fn get(&mut self, id: &ChunkId) -> Option<Arc<ChunkSlot>> {
        let entry = self.entries.get_mut(id)?;
        self.order.remove(&entry.used);
        self.clock += 1;
        entry.used = self.clock;
        self.order.insert(entry.used, *id);
        Some(Arc::clone(&entry.chunk))
    }

    /// Adds a chunk; a cold one is evicted before any that a request has used.
    pub fn insert(&mut self, chunk: Arc<ChunkSlot>, cold: bool) {
        let clock = if cold { &mut self.cold_clock } else { &mut self.clock };
        *clock += 1;
        let (used, id) = (*clock, chunk.id());
        if let Some(old) = self.entries.insert(id, Entry { chunk, used }) {
            self.order.remove(&old.used);
        }
        self.order.insert(used, id);
    }

    /// Forgets a chunk; its slot is freed when the last lease ends.
    pub fn remove(&mut self, id: &ChunkId) {
        if let Some(entry) = self.entries.remove(id) {
            self.order.remove(&entry.used);
        }
    }

    /// Forgets every chunk that nobody holds.
    pub fn evict_unpinned(&mut self) {
        let unpinned = |e: &Entry| Arc::strong_count(&e.chunk) == 1;
        let gone: Vec<ChunkId> =
            self.entries.iter().filter(|(_, e)| unpinned(e)).map(|(id, _)| *id).collect();
        metrics::counter!(names::EVICTIONS).increment(gone.len() as u64);
        gone.iter().for_each(|id| self.remove(id));
    }

    /// Bytes of the arena, evicting unpinned chunks from the coldest on until a hole fits.
    pub fn allocate(&mut self, arena: &Arc<Arena>, len: usize) -> Option<Extent> {
        loop {
            if let Some(extent) = arena.allocate(len) {
                return Some(extent);
            }
            let unpinned = |id: &&ChunkId| {
                self.entries.get(*id).is_some_and(|e| Arc::strong_count(&e.chunk) == 1)
            };
            let victim = *self.order.values().find(unpinned)?;
            self.remove(&victim);
            metrics::counter!(names::EVICTIONS).increment(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use matkv_sys::Region;
    use matkv_types::{Digest, KvDtype, KvLayout, KvShape};

    use super::*;
    use crate::arena::FillingSlot;

    const SLOT: usize = 64 << 10;

    fn id(n: u8) -> ChunkId {
        ChunkId(Digest([n; 32]))
    }

    fn add(cache: &mut ChunkCache, arena: &Arc<Arena>, n: u8, cold: bool) -> bool {
        let Some(extent) = cache.allocate(arena, SLOT) else { return false };
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 32 };
        let layout = KvLayout::new(shape, KvDtype::Bf16, 16);
        let slot = extent.exclusive().unwrap();
        let chunk = FillingSlot { slot, extent }.freeze(id(n), 4096..8192, layout, 8192);
        cache.insert(Arc::new(chunk), cold);
        true
    }

    #[test]
    fn evicts_the_least_recently_used_and_never_the_pinned() {
        let region = Region::anonymous(4 * SLOT);
        let arena = Arena::new(&region, 0..4 * SLOT);
        let mut cache = ChunkCache::new();
        for n in 0..4 {
            assert!(add(&mut cache, &arena, n, false));
        }
        let pinned = cache.get(&id(0)).unwrap();
        cache.get(&id(1));
        // Order of use: 2, 3, 0 (pinned), 1.
        assert!(add(&mut cache, &arena, 4, false));
        assert!(cache.get(&id(2)).is_none());
        assert!(add(&mut cache, &arena, 5, true));
        assert!(cache.get(&id(3)).is_none());
        // The cold one goes first although it came last.
        assert!(add(&mut cache, &arena, 6, false));
        assert!(cache.get(&id(5)).is_none() && cache.get(&id(1)).is_some());
        let held: Vec<_> = [1, 4, 6].iter().filter_map(|&n| cache.get(&id(n))).collect();
        assert_eq!(held.len(), 3);
        assert!(!add(&mut cache, &arena, 7, false), "everything is pinned");
        drop(pinned);
        assert!(add(&mut cache, &arena, 7, false));
        assert!(cache.get(&id(0)).is_none());
    }

    #[test]
    fn a_removed_chunk_lives_as_long_as_its_lease() {
        let region = Region::anonymous(2 * SLOT);
        let arena = Arena::new(&region, 0..2 * SLOT);
        let mut cache = ChunkCache::new();
        assert!(add(&mut cache, &arena, 0, false));
        let lease = cache.get(&id(0)).unwrap();
        cache.remove(&id(0));
        assert!(arena.usage().1 > 0);
        drop(lease);
        assert_eq!(arena.usage().1, 0);
    }
}
