//! The arena: extents of shared memory that give themselves back.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::channel::{Receiver, Sender, bounded};
use matkv_format::Superblock;
use matkv_ring::ExtentAllocator;
use matkv_sys::{Region, SlotMut, SlotRef, SysError};
use matkv_telemetry::names;
use matkv_types::{ChunkId, KvLayout};

/// Extents of one segment.
pub struct Arena {
    region: Arc<Region>,
    allocator: Mutex<ExtentAllocator>,
    freed: Sender<()>,
    freed_receiver: Receiver<()>,
    /// Slots held by requests.
    held: AtomicUsize,
    /// Slots on their way to be kept.
    returning: AtomicUsize,
}

/// A slot counted as held by a request; the last field of whatever holds one, so that it is
/// dropped last: whoever sees the count or the signal finds the memory free.
pub struct Held(Arc<Arena>);

impl Held {
    pub fn new(arena: &Arc<Arena>) -> Self {
        arena.held.fetch_add(1, Ordering::SeqCst);
        metrics::gauge!(names::HELD_SLOTS).increment(1.0);
        Self(Arc::clone(arena))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        metrics::gauge!(names::HELD_SLOTS).decrement(1.0);
        self.0.held.fetch_sub(1, Ordering::SeqCst);
        self.0.signal();
    }
}

/// A slot that no request holds any more and that is not in the table yet; the last field of what
/// carries it.
pub struct Returning(Arc<Arena>);

impl Returning {
    pub fn new(arena: &Arc<Arena>) -> Self {
        arena.returning.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(arena))
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        self.0.returning.fetch_sub(1, Ordering::SeqCst);
        self.0.signal();
    }
}

/// Bytes of the arena; freed when dropped.
pub struct Extent {
    arena: Arc<Arena>,
    range: Range<usize>,
}

impl Arena {
    pub fn new(region: &Arc<Region>, range: Range<usize>) -> Arc<Self> {
        // One pending signal is enough: the load thread looks at everything when it wakes.
        let (freed, freed_receiver) = bounded(1);
        Arc::new(Self {
            region: Arc::clone(region),
            allocator: Mutex::new(ExtentAllocator::new(range)),
            freed,
            freed_receiver,
            held: AtomicUsize::new(0),
            returning: AtomicUsize::new(0),
        })
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, ExtentAllocator> {
        self.allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes, or nothing if no hole fits now.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<Extent> {
        let range = self.locked().allocate(len)?;
        Some(Extent { arena: Arc::clone(self), range })
    }

    /// Bytes managed and bytes in use.
    pub fn usage(&self) -> (usize, usize) {
        let allocator = self.locked();
        (allocator.capacity(), allocator.used())
    }

    /// Slots held by requests now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Slots on their way to be kept. Whoever reads this after [`Self::held`] misses none.
    pub fn returning(&self) -> usize {
        self.returning.load(Ordering::SeqCst)
    }

    /// Signals that something was freed or unpinned.
    pub fn signal(&self) {
        let _ = self.freed.try_send(());
    }

    /// Where the signals arrive.
    pub fn signals(&self) -> &Receiver<()> {
        &self.freed_receiver
    }
}

impl Extent {
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    pub fn region(&self) -> &Arc<Region> {
        &self.arena.region
    }

    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The whole extent, to write.
    pub fn exclusive(&self) -> Result<SlotMut, SysError> {
        self.arena.region.exclusive(self.range.clone())
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.arena.locked().free(self.range.start);
        self.arena.signal();
    }
}

/// A slot that is being filled.
pub struct FillingSlot {
    /// Dropped before the extent: the bytes are let go before they can be allocated again.
    pub slot: SlotMut,
    pub extent: Extent,
}

impl FillingSlot {
    /// The bytes are final: the arena form of a chunk file, or that file itself.
    pub fn freeze_chunk(self, id: ChunkId, file: &Superblock) -> ChunkSlot {
        ChunkSlot::of_file(id, file, self.slot.freeze(), self.extent)
    }

    /// The bytes are final.
    pub fn freeze(
        self,
        id: ChunkId,
        kv: Range<usize>,
        layout: KvLayout,
        bytes: usize,
    ) -> ChunkSlot {
        ChunkSlot { slot: self.slot.freeze(), kv, layout, id, bytes, extent: self.extent }
    }
}

/// A chunk (or the prefix) in the arena, immutable.
pub struct ChunkSlot {
    slot: SlotRef,
    kv: Range<usize>,
    layout: KvLayout,
    id: ChunkId,
    bytes: usize,
    extent: Extent,
}

impl ChunkSlot {
    /// A slot that holds the arena form of a chunk file, or that file itself.
    pub fn of_file(id: ChunkId, file: &Superblock, slot: SlotRef, extent: Extent) -> Self {
        let form = file.encoding.in_arena();
        let layout = KvLayout::new(file.shape, form.dtype, file.rows);
        let start = Superblock::kv_offset(file.rows);
        let end = start + layout.total_bytes();
        let bytes = if file.encoding == form { end } else { 0 };
        Self { slot, kv: start..end, layout, id, bytes, extent }
    }

    /// The KV section.
    pub fn section(&self) -> &[u8] {
        &self.slot[self.kv.clone()]
    }

    /// The chunk file, whole; empty if the slot holds only what attention reads of it.
    pub fn file(&self) -> &[u8] {
        &self.slot[..self.bytes]
    }

    /// Bytes of the arena.
    pub fn slot_bytes(&self) -> u64 {
        self.extent.range().len() as u64
    }

    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    pub fn kv_offset(&self) -> usize {
        self.kv.start
    }

    pub fn range(&self) -> Range<usize> {
        self.extent.range()
    }

    pub fn id(&self) -> ChunkId {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_comes_back_with_its_last_owner() {
        let region = Region::anonymous(1 << 20);
        let arena = Arena::new(&region, 4096..1 << 20);
        let extent = arena.allocate(10_000).unwrap();
        let slot = extent.exclusive().unwrap();
        let filling = FillingSlot { slot, extent };
        assert!(arena.usage().1 >= 10_000);
        let shape = matkv_types::KvShape { layers: 1, kv_heads: 1, head_dim: 32 };
        let layout = KvLayout::new(shape, matkv_types::KvDtype::Bf16, 16);
        let id = ChunkId(matkv_types::Digest([0; 32]));
        let chunk = Arc::new(filling.freeze(id, 4096..8192, layout, 8192));
        let lease = Arc::clone(&chunk);
        drop(chunk);
        assert!(arena.usage().1 > 0 && arena.signals().is_empty());
        drop(lease);
        assert_eq!((arena.usage().1, region.handles()), (0, 0));
        assert_eq!(arena.signals().len(), 1);
    }
}
