//! Scores of one block turned into the weights of V.

use crate::activations::Stored;
use crate::block::{BLOCK_ROWS, Partial, Queries};
use crate::lanes::{LANES, Lanes};

/// Writes `e^(score − max)`, times the V row's scale if there are scales, into rows of
/// [`BLOCK_ROWS`] weights; 0 outside `lo..visible`. `weights` may be `scores`.
///
/// # Safety
/// `scores` and `weights` have a row for each query row, `scores` with values up to the last tile
/// below `hi`; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn softmax<L: Lanes, T: Stored>(
    queries: Queries<'_>,
    lo: usize,
    hi: usize,
    v_scales: Option<&[f32; BLOCK_ROWS]>,
    scores: *mut f32,
    weights: *mut T,
    partial: &mut Partial<'_>,
) {
    for (i, &visible) in queries.visible.iter().enumerate() {
        // SAFETY: row `i` exists in both.
        (partial.max[i], partial.sum[i]) = unsafe {
            let (row, out) = (scores.add(i * BLOCK_ROWS), weights.add(i * BLOCK_ROWS));
            softmax_row::<L, T>(row, out, (lo, visible.min(hi), hi), v_scales)
        };
    }
}

/// One row; returns its largest score and the sum of its exponentials.
#[inline(always)]
unsafe fn softmax_row<L: Lanes, T: Stored>(
    scores: *const f32,
    weights: *mut T,
    (lo, visible, hi): (usize, usize, usize),
    v_scales: Option<&[f32; BLOCK_ROWS]>,
) -> (f32, f32) {
    let tiles = hi.div_ceil(LANES);
    let (first, last) =
        if visible > lo { (lo / LANES, visible.div_ceil(LANES)) } else { (tiles, tiles) };
    // Tiles all of whose rows are seen.
    let whole = lo.div_ceil(LANES)..visible / LANES;
    // SAFETY: `tiles · 16 ≤ BLOCK_ROWS`, the length of both rows.
    unsafe {
        let masked = |t: usize, v: L::V, other: f32| {
            if whole.contains(&t) {
                return v;
            }
            let from = lo.saturating_sub(t * LANES);
            L::select_range(v, from, (visible - t * LANES).min(LANES), other)
        };
        let mut top = L::splat(f32::NEG_INFINITY);
        for t in first..last {
            top = L::max(masked(t, L::load(scores.add(t * LANES)), f32::NEG_INFINITY), top);
        }
        let max = L::max_lane(top);
        let mut sum = L::splat(0.0);
        for t in 0..first {
            T::store::<L>(weights.add(t * LANES), L::splat(0.0));
        }
        for t in first..last {
            let e = L::exp(L::sub(L::load(scores.add(t * LANES)), L::splat(max)));
            let e = masked(t, e, 0.0);
            sum = L::add(sum, e);
            let weight = match v_scales {
                // Scales of rows outside the segment may be anything.
                Some(scales) => masked(t, L::mul(e, L::load(scales.as_ptr().add(t * LANES))), 0.0),
                None => e,
            };
            T::store::<L>(weights.add(t * LANES), weight);
        }
        for t in last..tiles {
            T::store::<L>(weights.add(t * LANES), L::splat(0.0));
        }
        (max, L::sum(sum))
    }
}
