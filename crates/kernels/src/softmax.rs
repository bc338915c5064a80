//! Scores of one block turned into the weights of V.
//!
//! Every step is done for all rows before the next one: a row's largest score is known only after a
//! chain of operations, and meanwhile there is work in other rows.

use std::ops::Range;

use crate::activations::Stored;
use crate::block::{BLOCK_ROWS, Partial, Queries};
use crate::lanes::{LANES, Lanes};

/// Writes `2^(score − max)`, times the V row's scale if there are scales, into rows of
/// [`BLOCK_ROWS`] weights; 0 outside `lo..visible`. `weights` may be `scores`.
///
/// # Safety
/// `scores` and `weights` have a row for each query row, at most twelve, `scores` with values up to
/// the last tile below `hi`; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn softmax<L: Lanes, T: Stored>(
    queries: Queries<'_>,
    (lo, hi): (usize, usize),
    v_scales: Option<&[f32; BLOCK_ROWS]>,
    scores: *mut f32,
    weights: *mut T,
    partial: &mut Partial<'_>,
) {
    // SAFETY: row `i` exists in both.
    unsafe {
        for (i, &visible) in queries.visible.iter().enumerate() {
            let seen = Seen::new(lo, visible.min(hi), hi);
            partial.max[i] = largest_score::<L>(scores.add(i * BLOCK_ROWS), &seen);
        }
        for (i, &visible) in queries.visible.iter().enumerate() {
            let (row, out) = (scores.add(i * BLOCK_ROWS), weights.add(i * BLOCK_ROWS));
            let seen = Seen::new(lo, visible.min(hi), hi);
            partial.sum[i] = exponentials::<L, T>(row, out, partial.max[i], &seen, v_scales);
        }
    }
}

/// Which rows of a block a query sees: `lo..visible`.
struct Seen {
    lo: usize,
    visible: usize,
    /// Tiles that have one of them.
    some: Range<usize>,
    /// Tiles that have no other.
    whole: Range<usize>,
    /// Tiles below `hi`.
    tiles: usize,
}

impl Seen {
    #[inline(always)]
    fn new(lo: usize, visible: usize, hi: usize) -> Self {
        let tiles = hi.div_ceil(LANES);
        let some = if visible > lo { lo / LANES..visible.div_ceil(LANES) } else { tiles..tiles };
        let first = lo.div_ceil(LANES).clamp(some.start, some.end);
        let whole = first..(visible / LANES).clamp(first, some.end);
        Self { lo, visible, some, whole, tiles }
    }

    /// Tiles before the whole ones.
    #[inline(always)]
    fn before(&self) -> Range<usize> {
        self.some.start..self.whole.start
    }

    /// Tiles behind them.
    #[inline(always)]
    fn after(&self) -> Range<usize> {
        self.whole.end..self.some.end
    }

    /// Lanes of a tile that are seen; the others become `other`.
    ///
    /// # Safety
    /// The CPU has the features of `L`.
    #[inline(always)]
    unsafe fn masked<L: Lanes>(&self, t: usize, v: L::V, other: f32) -> L::V {
        let from = self.lo.saturating_sub(t * LANES);
        // SAFETY: the caller's contract.
        unsafe { L::select_range(v, from, (self.visible - t * LANES).min(LANES), other) }
    }
}

#[inline(always)]
unsafe fn largest_score<L: Lanes>(scores: *const f32, seen: &Seen) -> f32 {
    // SAFETY: tiles lie inside the row.
    unsafe {
        let mut top = L::splat(f32::NEG_INFINITY);
        for t in seen.before().chain(seen.after()) {
            let score = L::load(scores.add(t * LANES));
            top = L::max(seen.masked::<L>(t, score, f32::NEG_INFINITY), top);
        }
        for t in seen.whole.clone() {
            top = L::max(L::load(scores.add(t * LANES)), top);
        }
        L::max_lane(top)
    }
}

/// Returns the sum of the exponentials.
#[inline(always)]
unsafe fn exponentials<L: Lanes, T: Stored>(
    scores: *const f32,
    weights: *mut T,
    max: f32,
    seen: &Seen,
    v_scales: Option<&[f32; BLOCK_ROWS]>,
) -> f32 {
    // SAFETY: `tiles · 16 ≤ BLOCK_ROWS`, the length of both rows.
    unsafe {
        let mut sum = L::splat(0.0);
        for t in 0..seen.some.start {
            T::store::<L>(weights.add(t * LANES), L::splat(0.0));
        }
        macro_rules! tiles {
            ($tiles:expr, $masked:expr) => {
                for t in $tiles {
                    let e = L::exp2(L::sub(L::load(scores.add(t * LANES)), L::splat(max)));
                    let mut weight = if $masked { seen.masked::<L>(t, e, 0.0) } else { e };
                    sum = L::add(sum, weight);
                    if let Some(scales) = v_scales {
                        // Scales of rows outside the segment may be anything.
                        let scaled = L::mul(e, L::load(scales.as_ptr().add(t * LANES)));
                        weight = if $masked { seen.masked::<L>(t, scaled, 0.0) } else { scaled };
                    }
                    T::store::<L>(weights.add(t * LANES), weight);
                }
            };
        }
        tiles!(seen.before(), true);
        tiles!(seen.whole.clone(), false);
        tiles!(seen.after(), true);
        for t in seen.some.end..seen.tiles {
            T::store::<L>(weights.add(t * LANES), L::splat(0.0));
        }
        L::sum(sum)
    }
}
