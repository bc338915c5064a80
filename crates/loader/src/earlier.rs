//! Rows of earlier prompts: what a conversation's next turn begins with is computed once.
//!
//! The own slot of a sequence that has ended stays in the arena, and leaves it as chunks do. A
//! prompt that begins as an earlier one did, stored runs and own ones alike, copies those rows into
//! the same places of its own slot, where computing goes on. Only rows of the prompt are taken, not
//! those of its answer: the decoder's arithmetic is another class (ADR 0011), and an answer must
//! not depend on what happens to be in the arena (ADR 0022).

use std::ops::Range;
use std::sync::Arc;

use matkv_types::{ChunkId, KvLayout, LengthPrefixedHasher, Mode, TILE_ROWS, align_up};

use crate::arena::{Arena, ChunkSlot, Extent, FillingSlot, Returning};
use crate::chunk_spec::ChunkSpec;
use crate::hand_over::own_kv_offset;
use crate::plan::{PlannedSegment, PlannedSource};
use crate::request::{Lease, OwnSlot, Planned};

/// A run of rows after the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Run {
    /// Rows of a stored chunk.
    Stored(ChunkId, Range<usize>),
    /// Tokens whose rows were computed with everything before them.
    Own(Vec<u32>),
}

/// What decides the own rows of a prompt: the runs it consists of. The prefix is everybody's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning(Vec<Run>);

impl Beginning {
    /// Of a prompt whose rows may serve others, or be served by others'.
    pub fn of(planned: &Planned) -> Option<Self> {
        if !planned.earlier {
            return None;
        }
        match planned.mode {
            // Full prefill is what others are compared with, and which rows a focused request
            // computes depends on how its question ends.
            Mode::Vanilla | Mode::Focused { .. } => return None,
            Mode::Exact | Mode::Linked(_) => {}
        }
        let mut rows = planned.plan.rows.iter();
        let run = |s: &PlannedSegment| match s.source {
            PlannedSource::Prefix => None,
            PlannedSource::Chunk(i) => {
                Some(Run::Stored(planned.chunks[i].id, s.first_row..s.first_row + s.rows))
            }
            PlannedSource::Own => {
                Some(Run::Own(rows.by_ref().take(s.rows).map(|r| r.token).collect()))
            }
        };
        Some(Self(planned.plan.segments.iter().filter_map(run).collect()))
    }

    /// Of a prompt that is computed whole.
    #[cfg(test)]
    pub fn of_tokens(tokens: &[u32]) -> Self {
        Self(vec![Run::Own(tokens.to_vec())])
    }

    /// Own rows.
    pub fn rows(&self) -> usize {
        let rows = |run: &Run| match run {
            Run::Stored(..) => 0,
            Run::Own(tokens) => tokens.len(),
        };
        self.0.iter().map(rows).sum()
    }

    /// How many of its first own rows are those of another prompt, in the same places.
    pub fn common(&self, other: &Self) -> usize {
        let mut rows = 0;
        for pair in self.0.iter().zip(&other.0) {
            match pair {
                (Run::Own(a), Run::Own(b)) => {
                    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
                    rows += same;
                    if same < a.len().max(b.len()) {
                        break;
                    }
                }
                (a, b) if a == b => {}
                _ => break,
            }
        }
        rows
    }

    /// A name for its rows in the arena: that of a chunk cannot be the same.
    pub fn id(&self) -> ChunkId {
        let add = |hasher: LengthPrefixedHasher, run: &Run| match run {
            Run::Stored(id, rows) => {
                let bounds = [rows.start as u32, rows.end as u32];
                hasher.part(b"stored").part(id.as_bytes()).tokens(&bounds)
            }
            Run::Own(tokens) => hasher.part(b"own").tokens(tokens),
        };
        ChunkId(self.0.iter().fold(LengthPrefixedHasher::default(), add).finish())
    }
}

/// What of a sequence's own slot is kept when it has ended.
pub struct Keeping {
    beginning: Beginning,
    /// The KV section in the slot.
    kv: Range<usize>,
    layout: KvLayout,
}

impl Keeping {
    /// Of a request whose prompt may serve others.
    pub fn of(planned: &Planned, spec: &ChunkSpec) -> Option<Self> {
        let beginning = Beginning::of(planned)?;
        let layout = spec.own_layout(planned.plan.own_rows);
        let start = own_kv_offset(planned);
        Some(Self { beginning, kv: start..start + layout.total_bytes(), layout })
    }

    /// The slot, on its way to the arena's table; nobody else may have a part of it.
    pub fn keep(self, own: OwnSlot) -> Kept {
        // Counted before it is no longer held: whoever waits for memory knows that some may come.
        let returning = Returning::new(own.extent().arena());
        Kept { keeping: self, extent: own.into_extent(), _returning: returning }
    }
}

/// The own slot of a sequence that has ended.
pub struct Kept {
    keeping: Keeping,
    extent: Extent,
    /// Dropped last: memory that is not kept after all is free by then.
    _returning: Returning,
}

impl Kept {
    /// As it lies in the arena from now on, unless a part of it is still in use.
    pub fn freeze(self) -> Option<(ChunkSlot, Beginning)> {
        let Self { keeping: Keeping { beginning, kv, layout }, extent, _returning } = self;
        let slot = extent.exclusive().ok()?;
        Some((FillingSlot { slot, extent }.freeze(beginning.id(), kv, layout, 0), beginning))
    }
}

/// Rows a request begins with, on loan.
pub struct Earlier {
    lease: Lease,
    rows: usize,
}

impl Earlier {
    /// The first own rows of a kept slot.
    pub fn new(slot: Arc<ChunkSlot>, rows: usize, arena: &Arc<Arena>) -> Self {
        Self { lease: Lease::new(slot, arena), rows }
    }

    /// Copies them into a request's own section; `end` is what lies behind the last in it. Returns
    /// how many there are.
    pub fn copy_to(self, end: usize, own: &mut [u8], layout: KvLayout) -> usize {
        let slot = self.lease.chunk();
        copy_rows((slot.section(), slot.layout()), (own, layout), end);
        self.rows
    }

    /// How many.
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Copies rows `0..end` from one section to another of the same shape and type. Tiles are copied
/// whole: what the last one holds behind the last row is written when it is computed.
fn copy_rows(from: (&[u8], KvLayout), to: (&mut [u8], KvLayout), end: usize) {
    let ((source, from), (target, to)) = (from, to);
    let shape = to.shape;
    let bytes = to.dtype.bytes_of(align_up(end, TILE_ROWS) * shape.head_dim);
    for layer in 0..shape.layers {
        for head in 0..shape.kv_heads {
            let k = (from.k_offset(layer, head), to.k_offset(layer, head));
            let v = (from.v_offset(layer, head), to.v_offset(layer, head));
            for (from, to) in [k, v] {
                target[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use matkv_sys::Region;
    use matkv_types::{Digest, KvDtype, KvShape};
    use proptest::prelude::*;

    use super::*;

    const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 32 };

    fn stored(n: u8, rows: Range<usize>) -> Run {
        Run::Stored(ChunkId(Digest([n; 32])), rows)
    }

    fn own(tokens: &[u32]) -> Run {
        Run::Own(tokens.to_vec())
    }

    #[test]
    fn rows_are_shared_up_to_the_first_difference() {
        let asked = |rest: &[u32]| {
            Beginning(vec![stored(1, 0..9), own(&[5, 6]), stored(2, 2..9), own(rest)])
        };
        let earlier = asked(&[7, 8, 9]);
        assert_eq!(earlier.rows(), 5);
        for (rest, common) in [(&[7, 8, 9, 10][..], 5), (&[7, 8], 4), (&[1], 2), (&[7, 1, 9], 3)] {
            assert_eq!(earlier.common(&asked(rest)), common, "{rest:?}");
            assert_eq!(asked(rest).common(&earlier), common, "{rest:?}");
        }
        // Another chunk, or other rows of it: what follows saw something else.
        let others = [stored(3, 2..9), stored(2, 3..9), own(&[6])];
        for other in others {
            let other = Beginning(vec![stored(1, 0..9), own(&[5, 6]), other, own(&[7, 8, 9])]);
            assert_eq!(earlier.common(&other), 2, "{other:?}");
        }
        // A run that goes on stands in the way of what follows it.
        let other = Beginning(vec![stored(1, 0..9), own(&[5, 6, 6]), stored(2, 2..9)]);
        assert_eq!((earlier.common(&other), other.common(&earlier)), (2, 2));
        let first = Beginning(vec![stored(9, 0..9), own(&[5, 6])]);
        assert_eq!(earlier.common(&first), 0);
    }

    #[test]
    fn what_is_kept_comes_back_whatever_becomes_of_it() {
        let region = Region::anonymous(1 << 20);
        let arena = Arena::new(&region, 0..1 << 20);
        let layout = KvLayout::new(SHAPE, KvDtype::Bf16, 20);
        let kept = |rest: &[u32]| {
            let slot = OwnSlot::new(arena.allocate(4096 + layout.total_bytes()).unwrap());
            let beginning = Beginning(vec![own(rest)]);
            let kv = 4096..4096 + layout.total_bytes();
            Keeping { beginning, kv, layout }.keep(slot)
        };
        let given_up = kept(&[1]);
        assert_eq!((arena.held(), arena.returning()), (0, 1));
        drop(given_up);
        assert_eq!((arena.returning(), arena.usage().1), (0, 0));

        let in_use = kept(&[2]);
        let part = region.exclusive(in_use.extent.range()).unwrap();
        assert!(in_use.freeze().is_none(), "somebody writes to it");
        drop(part);

        let (slot, beginning) = kept(&[3]).freeze().unwrap();
        assert_eq!((slot.id(), arena.returning()), (beginning.id(), 0));
        assert!(arena.usage().1 > 0);
        drop(slot);
        assert_eq!((arena.usage().1, region.handles()), (0, 0));
    }

    proptest! {
        /// Between sections of any size: every element of the rows arrives.
        #[test]
        fn rows_keep_their_places(from in 1usize..70, to in 1usize..70, end in 1usize..70) {
            let end = end.min(from).min(to);
            let layout = |rows| KvLayout::new(SHAPE, KvDtype::Bf16, rows);
            let (from, to) = (layout(from), layout(to));
            let source: Vec<u8> = (0..from.total_bytes()).map(|i| (i * 31 % 251) as u8).collect();
            let mut target = vec![0xEE; to.total_bytes()];
            copy_rows((&source, from), (&mut target, to), end);
            let dim = SHAPE.head_dim;
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for (row, d) in (0..end).flat_map(|row| (0..dim).map(move |d| (row, d))) {
                    let k = 2 * KvLayout::k_index(dim, row, d);
                    let v = 2 * KvLayout::v_index(dim, row, d);
                    for (a, b) in [
                        (from.k_offset(layer, head) + k, to.k_offset(layer, head) + k),
                        (from.v_offset(layer, head) + v, to.v_offset(layer, head) + v),
                    ] {
                        prop_assert_eq!(&source[a..a + 2], &target[b..b + 2]);
                    }
                }
            }
        }
    }
}
