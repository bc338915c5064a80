//! Scores of one block turned into the weights of V.

use crate::activations::Stored;
use crate::block::{BLOCK_ROWS, Partial, Queries};
use crate::lanes::{LANES, Lanes};
use crate::quantize::factors;

/// Writes `2^(score − max)` into rows of [`BLOCK_ROWS`] weights; 0 outside `lo..visible`. `weights`
/// may be `scores`.
///
/// # Safety
/// `scores` and `weights` have a row for each query row, `scores` with values up to the last tile
/// below `hi`; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn softmax<L: Lanes, T: Stored>(
    queries: Queries<'_>,
    lo: usize,
    hi: usize,
    scores: *mut f32,
    weights: *mut T,
    partial: &mut Partial<'_>,
) {
    for (i, &visible) in queries.visible.iter().enumerate() {
        // SAFETY: row `i` exists in both.
        let row = unsafe {
            let (row, out) = (scores.add(i * BLOCK_ROWS), weights.add(i * BLOCK_ROWS));
            softmax_row::<L, T>(row, out, (lo, visible.min(hi), hi), None)
        };
        (partial.max[i], partial.sum[i]) = (row.max, row.sum);
    }
}

/// The same in place, times the scale of each row of V.
///
/// # Safety
/// As for [`softmax`].
#[inline(always)]
pub(crate) unsafe fn softmax_scaled<L: Lanes>(
    queries: Queries<'_>,
    lo: usize,
    hi: usize,
    v_scales: &[f32; BLOCK_ROWS],
    scores: *mut f32,
    partial: &mut Partial<'_>,
) {
    for (i, &visible) in queries.visible.iter().enumerate() {
        // SAFETY: row `i` exists.
        let row = unsafe {
            let row = scores.add(i * BLOCK_ROWS);
            softmax_row::<L, f32>(row, row, (lo, visible.min(hi), hi), Some(v_scales))
        };
        (partial.max[i], partial.sum[i]) = (row.max, row.sum);
    }
}

/// The same as integers and one factor a row.
///
/// # Safety
/// As for [`softmax`]; there is a factor for each query row.
#[inline(always)]
pub(crate) unsafe fn softmax_integers<L: Lanes>(
    queries: Queries<'_>,
    lo: usize,
    hi: usize,
    v_scales: &[f32; BLOCK_ROWS],
    scores: *mut f32,
    (weights, row_factors): (*mut i16, *mut f32),
    partial: &mut Partial<'_>,
) {
    for (i, &visible) in queries.visible.iter().enumerate() {
        // SAFETY: row `i` exists in all of them.
        unsafe {
            let (row, out) = (scores.add(i * BLOCK_ROWS), weights.add(i * BLOCK_ROWS));
            let found = softmax_row::<L, f32>(row, row, (lo, visible.min(hi), hi), Some(v_scales));
            (partial.max[i], partial.sum[i]) = (found.max, found.sum);
            let (factor, inverse) = factors(found.largest);
            *row_factors.add(i) = factor;
            let inverse = L::splat(inverse);
            for t in 0..hi.div_ceil(LANES) {
                L::store_i16(out.add(t * LANES), L::mul(L::load(row.add(t * LANES)), inverse));
            }
        }
    }
}

struct Row {
    /// Largest score.
    max: f32,
    /// Sum of the exponentials.
    sum: f32,
    /// With scales: the largest weight.
    largest: f32,
}

#[inline(always)]
unsafe fn softmax_row<L: Lanes, T: Stored>(
    scores: *const f32,
    weights: *mut T,
    (lo, visible, hi): (usize, usize, usize),
    v_scales: Option<&[f32; BLOCK_ROWS]>,
) -> Row {
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
        let (mut sum, mut largest) = (L::splat(0.0), L::splat(0.0));
        for t in 0..first {
            T::store::<L>(weights.add(t * LANES), L::splat(0.0));
        }
        for t in first..last {
            let e = L::exp2(L::sub(L::load(scores.add(t * LANES)), L::splat(max)));
            let mut weight = masked(t, e, 0.0);
            sum = L::add(sum, weight);
            if let Some(scales) = v_scales {
                // Scales of rows outside the segment may be anything.
                weight = masked(t, L::mul(e, L::load(scales.as_ptr().add(t * LANES))), 0.0);
                largest = L::max(weight, largest);
            }
            T::store::<L>(weights.add(t * LANES), weight);
        }
        for t in last..tiles {
            T::store::<L>(weights.add(t * LANES), L::splat(0.0));
        }
        let largest = if v_scales.is_some() { L::max_lane(largest) } else { 0.0 };
        Row { max, sum: L::sum(sum), largest }
    }
}
