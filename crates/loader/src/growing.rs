//! A chunk on its way into the arena, as those see it who compute with its first layers while the
//! others are still being read.
//!
//! Whoever loads the chunk publishes layers in order, each verified and in its arena form. A reader
//! waits for one layer after the other. If the load fails, layers are let go and readers leave
//! before the memory is written again.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use matkv_model::Layers;
use matkv_sys::SlotRef;
use matkv_types::KvLayout;

use crate::arena::ChunkSlot;
use crate::request::ChunkSource;

/// Bytes of a layer in what is there of a slot.
type Published = (SlotRef, Range<usize>);

#[derive(Default)]
struct State {
    layers: Vec<Published>,
    completed: Option<Completed>,
    failed: bool,
    readers: usize,
}

/// A chunk that has become resident, and how.
#[derive(Clone)]
pub struct Completed {
    pub chunk: Arc<ChunkSlot>,
    pub at: Instant,
    /// Computed if its file could not be used.
    pub source: ChunkSource,
}

/// What loader and readers share.
pub struct Growing {
    layout: KvLayout,
    state: Mutex<State>,
    changed: Condvar,
}

/// What waiting for a layer has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It is there.
    Ready,
    /// It is still on its way.
    NotYet,
    /// It will not come.
    Failed,
}

impl Growing {
    /// A chunk none of whose layers is there.
    pub fn new(layout: KvLayout) -> Arc<Self> {
        Arc::new(Self { layout, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Arithmetic of its arena form.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next layer: these bytes of a slot.
    pub fn publish(&self, slot: SlotRef, range: Range<usize>) {
        let mut state = self.state();
        if !state.failed {
            state.layers.push((slot, range));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// All of it is there, in a slot that may be kept; also after it has failed, if it was computed
    /// instead.
    pub fn complete(&self, chunk: Arc<ChunkSlot>, source: ChunkSource) {
        let mut state = self.state();
        state.completed = Some(Completed { chunk, at: Instant::now(), source });
        // The chunk holds the same bytes.
        state.layers.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// It will not come, at least not this way.
    pub fn fail(&self) {
        let mut state = self.state();
        state.failed = true;
        state.layers.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until nobody reads what has failed: readers look before every layer.
    pub fn drained(&self) {
        let mut state = self.state();
        while state.readers > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether it can still come.
    pub fn has_failed(&self) -> bool {
        self.state().failed
    }

    /// The chunk, once it is resident.
    pub fn completed(&self) -> Option<Completed> {
        self.state().completed.clone()
    }

    /// Waits until the chunk is resident; none if it will not be, or not within this time.
    pub fn wait_for_chunk(&self, most: Duration) -> Wait {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.state(), most, |s| s.completed.is_none() && !s.failed)
            .unwrap_or_else(PoisonError::into_inner);
        match (&state.completed, state.failed) {
            (Some(_), _) => Wait::Ready,
            (None, true) => Wait::Failed,
            (None, false) => Wait::NotYet,
        }
    }

    /// Somebody who computes with it; none if it will not come.
    pub fn reader(self: &Arc<Self>) -> Option<GrowingReader> {
        let mut state = self.state();
        if state.failed {
            return None;
        }
        state.readers += 1;
        drop(state);
        let layers = (0..self.layout.shape.layers).map(|_| OnceLock::new()).collect();
        Some(GrowingReader { layers, growing: Arc::clone(self) })
    }
}

/// Where a reader found a layer.
enum Place {
    Published(Published),
    Resident(Arc<ChunkSlot>),
}

/// One pass over the layers of a chunk.
pub struct GrowingReader {
    /// Dropped before the reader is counted out.
    layers: Box<[OnceLock<Place>]>,
    growing: Arc<Growing>,
}

impl GrowingReader {
    /// Waits for a layer, this long at most.
    pub fn wait(&self, layer: usize, most: Duration) -> Wait {
        if self.layers[layer].get().is_some() {
            return Wait::Ready;
        }
        let waits = |s: &mut State| s.layers.len() <= layer && s.completed.is_none() && !s.failed;
        let (state, _) = self
            .growing
            .changed
            .wait_timeout_while(self.growing.state(), most, waits)
            .unwrap_or_else(PoisonError::into_inner);
        let place = match (&state.completed, state.layers.get(layer)) {
            (Some(completed), _) => Place::Resident(Arc::clone(&completed.chunk)),
            (None, Some(published)) => Place::Published(published.clone()),
            (None, None) if state.failed => return Wait::Failed,
            (None, None) => return Wait::NotYet,
        };
        drop(state);
        let _ = self.layers[layer].set(place);
        Wait::Ready
    }
}

impl Layers for GrowingReader {
    /// Nothing if it has not been waited for.
    fn layer(&self, layer: usize) -> &[u8] {
        let stride = self.growing.layout.layer_stride();
        match self.layers[layer].get() {
            Some(Place::Published((slot, range))) => &slot[range.clone()],
            Some(Place::Resident(chunk)) => &chunk.section()[layer * stride..][..stride],
            None => &[],
        }
    }
}

impl Drop for GrowingReader {
    fn drop(&mut self) {
        self.layers = Box::default();
        self.growing.state().readers -= 1;
        self.growing.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use matkv_sys::Region;
    use matkv_types::{KvDtype, KvShape};

    use super::*;

    fn layout() -> KvLayout {
        KvLayout::new(KvShape { layers: 3, kv_heads: 1, head_dim: 32 }, KvDtype::Bf16, 16)
    }

    #[test]
    fn layers_are_read_while_others_are_written() {
        let stride = layout().layer_stride();
        let region = Region::anonymous(3 * stride);
        let growing = Growing::new(layout());
        let reader = growing.reader().unwrap();
        assert_eq!(reader.wait(0, Duration::ZERO), Wait::NotYet);
        let writer = {
            let growing = Arc::clone(&growing);
            let mut rest = region.exclusive(0..3 * stride).unwrap();
            std::thread::spawn(move || {
                for layer in 0..2u8 {
                    rest[..stride].fill(layer + 1);
                    let (front, back) = rest.freeze_front(stride);
                    growing.publish(front, 0..stride);
                    rest = back;
                }
                drop(rest);
                growing.fail();
                growing.drained();
            })
        };
        let mut seen = 0;
        for layer in 0..3u8 {
            match reader.wait(layer.into(), Duration::from_secs(60)) {
                Wait::Ready => {
                    assert!(reader.layer(layer.into()).iter().all(|b| *b == layer + 1));
                    seen += 1;
                }
                Wait::Failed => break,
                Wait::NotYet => panic!("neither came nor failed"),
            }
        }
        assert!(seen < 3);
        // Whoever fails waits for the reader, and then nobody holds anything.
        drop(reader);
        writer.join().unwrap();
        assert_eq!(region.handles(), 0);
        assert!(growing.reader().is_none());
    }
}
