//! Which chunks are in the arena: a cache whose policy says who leaves first.
//!
//! A resident chunk is pinned while anyone but this table holds its slot, so a pin cannot be
//! forgotten: it ends when the lease is dropped.

use std::collections::HashMap;
use std::sync::Arc;

use matkv_store::policy::{Item, Policy, PolicyKind};
use matkv_telemetry::names;
use matkv_types::ChunkId;

use crate::arena::{Arena, ChunkSlot, Extent};
use crate::earlier::Beginning;

/// How a chunk came to be in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A request asked for it.
    Demanded,
    /// It was expected that one would.
    Prefetched,
    /// An ingest computed it; nobody has asked for it.
    Ingested,
}

struct Entry {
    chunk: Arc<ChunkSlot>,
    /// Prefetched and not used yet.
    expected: bool,
}

/// Resident chunks, and rows of earlier prompts; owned by the load thread.
pub struct ChunkCache {
    entries: HashMap<ChunkId, Entry>,
    /// Which of the entries are rows of earlier prompts.
    beginnings: HashMap<ChunkId, Beginning>,
    policy: Box<dyn Policy<ChunkId>>,
}

impl ChunkCache {
    pub fn new(policy: PolicyKind) -> Self {
        Self { entries: HashMap::new(), beginnings: HashMap::new(), policy: policy.build() }
    }

    /// Chunks.
    pub fn len(&self) -> usize {
        self.entries.len() - self.beginnings.len()
    }

    /// Earlier prompts.
    pub fn earlier(&self) -> usize {
        self.beginnings.len()
    }

    pub fn contains(&self, id: &ChunkId) -> bool {
        self.entries.contains_key(id)
    }

    /// A resident chunk, which is used by this.
    pub fn get(&mut self, id: &ChunkId) -> Option<Arc<ChunkSlot>> {
        let entry = self.entries.get_mut(id)?;
        if std::mem::take(&mut entry.expected) {
            metrics::counter!(names::PREFETCHED, "outcome" => "used").increment(1);
        }
        self.policy.access(id);
        Some(Arc::clone(&entry.chunk))
    }

    /// Chunks near one that is used.
    pub fn warm<'a>(&mut self, ids: impl Iterator<Item = &'a ChunkId>) {
        ids.for_each(|id| self.policy.warm(id));
    }

    /// Adds a chunk; `cost` is what it takes to get it back, in seconds.
    pub fn insert(&mut self, chunk: Arc<ChunkSlot>, arrival: Arrival, cost: f64) {
        let id = chunk.id();
        // What nobody has asked for leaves before anything that somebody has.
        let frequency = if arrival == Arrival::Demanded { 1.0 } else { 0.0 };
        let item = Item { bytes: chunk.slot_bytes(), cost, frequency };
        let expected = arrival == Arrival::Prefetched;
        self.forget(&id);
        self.entries.insert(id, Entry { chunk, expected });
        self.policy.insert(id, item);
    }

    /// Keeps the rows of a prompt, unless another one has them all, and no longer those of prompts
    /// that it goes on with.
    pub fn keep(&mut self, slot: Arc<ChunkSlot>, beginning: Beginning, cost: f64) {
        let mut others = self.beginnings.iter();
        if let Some((id, _)) = others.find(|(_, b)| b.common(&beginning) == beginning.rows()) {
            return self.policy.access(id);
        }
        let id = slot.id();
        let whole = |b: &Beginning| b.common(&beginning) == b.rows();
        let contained = self.beginnings.iter().filter(|(_, b)| whole(b));
        let contained: Vec<ChunkId> = contained.map(|(id, _)| *id).collect();
        contained.iter().for_each(|id| self.remove(id));
        self.insert(slot, Arrival::Demanded, cost);
        self.beginnings.insert(id, beginning);
    }

    /// The earlier prompt that shares the most rows with this one, and how many.
    pub fn longest(&self, beginning: &Beginning) -> Option<(ChunkId, usize)> {
        let common = self.beginnings.iter().map(|(id, b)| (*id, b.common(beginning)));
        common.filter(|(_, rows)| *rows > 0).max_by_key(|(id, rows)| (*rows, *id))
    }

    /// A resident chunk, which nobody uses by this.
    pub fn peek(&self, id: &ChunkId) -> Option<Arc<ChunkSlot>> {
        Some(Arc::clone(&self.entries.get(id)?.chunk))
    }

    /// Forgets a chunk; its slot is freed when the last lease ends.
    pub fn remove(&mut self, id: &ChunkId) {
        self.forget(id);
        self.policy.remove(id);
    }

    fn forget(&mut self, id: &ChunkId) {
        self.beginnings.remove(id);
        if self.entries.remove(id).is_some_and(|e| e.expected) {
            metrics::counter!(names::PREFETCHED, "outcome" => "wasted").increment(1);
        }
    }

    /// Forgets every chunk that nobody holds.
    pub fn evict_unpinned(&mut self) {
        while self.evict().is_some() {}
    }

    fn evict(&mut self) -> Option<ChunkId> {
        let entries = &self.entries;
        let mut unpinned =
            |id: &ChunkId| entries.get(id).is_some_and(|e| Arc::strong_count(&e.chunk) == 1);
        let victim = self.policy.evict(&mut unpinned)?;
        self.forget(&victim);
        metrics::counter!(names::EVICTIONS).increment(1);
        Some(victim)
    }

    /// Bytes of the arena, evicting unpinned chunks until a hole fits.
    pub fn allocate(&mut self, arena: &Arc<Arena>, len: usize) -> Option<Extent> {
        loop {
            if let Some(extent) = arena.allocate(len) {
                return Some(extent);
            }
            self.evict()?;
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
        let arrival = if cold { Arrival::Ingested } else { Arrival::Demanded };
        cache.insert(Arc::new(chunk), arrival, 1.0);
        true
    }

    #[test]
    fn evicts_the_least_recently_used_and_never_the_pinned() {
        let region = Region::anonymous(4 * SLOT);
        let arena = Arena::new(&region, 0..4 * SLOT);
        let mut cache = ChunkCache::new(PolicyKind::Lru);
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
    fn a_conversation_has_one_slot() {
        let region = Region::anonymous(8 * SLOT);
        let arena = Arena::new(&region, 0..8 * SLOT);
        let mut cache = ChunkCache::new(PolicyKind::Lru);
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 32 };
        let layout = KvLayout::new(shape, KvDtype::Bf16, 16);
        let mut keep = |tokens: &[u32]| {
            let extent = cache.allocate(&arena, SLOT).unwrap();
            let slot = extent.exclusive().unwrap();
            let beginning = Beginning::of_tokens(tokens);
            let slot = FillingSlot { slot, extent }.freeze(beginning.id(), 0..4096, layout, 0);
            cache.keep(Arc::new(slot), beginning, 1.0);
            let longest = cache.longest(&Beginning::of_tokens(&[1, 2, 3, 4, 5]));
            (cache.earlier(), longest.map(|(_, rows)| rows), arena.usage().1 / SLOT)
        };
        assert_eq!(keep(&[1, 2]), (1, Some(2), 1));
        assert_eq!(keep(&[1, 2, 3]), (1, Some(3), 1), "the next turn");
        assert_eq!(keep(&[1, 2]), (1, Some(3), 1), "the first one again");
        assert_eq!(keep(&[1, 2, 4]), (2, Some(3), 2), "another one that began alike");
        assert_eq!(keep(&[1, 2, 3, 4]), (2, Some(4), 2));
        assert_eq!(keep(&[7]), (3, Some(4), 3));
        assert_eq!(cache.len(), 0, "none of them is a chunk");
    }

    #[test]
    fn a_removed_chunk_lives_as_long_as_its_lease() {
        let region = Region::anonymous(2 * SLOT);
        let arena = Arena::new(&region, 0..2 * SLOT);
        let mut cache = ChunkCache::new(PolicyKind::Lru);
        assert!(add(&mut cache, &arena, 0, false));
        let lease = cache.get(&id(0)).unwrap();
        cache.remove(&id(0));
        assert!(arena.usage().1 > 0);
        drop(lease);
        assert_eq!(arena.usage().1, 0);
    }
}
