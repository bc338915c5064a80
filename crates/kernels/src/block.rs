//! Attention of some query rows over one block of at most [`BLOCK_ROWS`] KV rows.
//!
//! The result is a *partial*: unnormalized output, largest score and sum of exponentials, merged
//! with others by [`merge`] in block order. Blocks are the unit of bit-exactness: where they
//! start is decided by row numbers in the slot, never by threads or neighbours.

use std::ops::Range;

use matkv_types::{GROUP_ROWS, KvDtype, bf16_to_f32};

use crate::elem::Elem;
use crate::isa::dispatch;
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Strides};

/// KV rows of a block: 256 bf16 rows of 64 dimensions are 32 KiB of K and of V.
pub(crate) const BLOCK_ROWS: usize = 256;

/// One block of one head.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// K of the block's first row; the first row is a multiple of 16.
    pub k: *const u8,
    /// V of the block's first row.
    pub v: *const u8,
    /// Element type: f32, bf16 or int8.
    pub dtype: KvDtype,
    /// int8: K scales `[group][dim]`, the block's first row being in the first group.
    pub k_scales: *const u16,
    /// int8: V scales, one a row, from the block's first row on.
    pub v_scales: *const u16,
    /// int8: rows of the first group that lie before the block.
    pub phase: usize,
    /// Rows before `lo` do not belong to the segment.
    pub lo: usize,
    /// Rows from `hi` on do not belong to the segment.
    pub hi: usize,
}

/// What a block contributes to some query rows.
pub(crate) struct Partial {
    /// Unnormalized output `[m][head_dim]`.
    pub out: Vec<f32>,
    /// Largest score of each row; −∞ if the row sees nothing of the block.
    pub max: Vec<f32>,
    /// Sum of `e^(score − max)`.
    pub sum: Vec<f32>,
    scores: Vec<f32>,
    /// int8: queries times the K scales of one group, `[m][head_dim]`.
    scaled: Vec<f32>,
}

impl Partial {
    pub(crate) fn new(m: usize, dim: usize) -> Self {
        Self {
            out: vec![0.0; m * dim],
            max: vec![f32::NEG_INFINITY; m],
            sum: vec![0.0; m],
            scores: vec![0.0; m * BLOCK_ROWS],
            scaled: vec![0.0; m * dim],
        }
    }
}

/// Query rows of one head: `[m][dim]`, rotated for the segment and scaled.
#[derive(Clone, Copy)]
pub(crate) struct Queries<'a> {
    pub q: &'a [f32],
    pub dim: usize,
    /// For each query row, rows of the block it may see: those below this.
    pub visible: &'a [usize],
}

dispatch! {
    /// Computes the partial of one block.
    ///
    /// # Safety
    /// `block.k` and `block.v` point to whole tiles covering `block.hi ≤ BLOCK_ROWS` rows of
    /// `queries.dim` dimensions (a multiple of 32), aligned to their element type, and the scales
    /// of int8 rows to every group and row below `block.hi`; nobody writes
    /// them meanwhile. `queries.q` is `[visible.len()][dim]` and `partial` has that size.
    pub(crate) unsafe fn attend_block => attend_block_body(
        queries: Queries<'_>, block: Block, partial: &mut Partial,
    )
}

#[inline(always)]
unsafe fn attend_block_body<L: Lanes>(queries: Queries<'_>, block: Block, partial: &mut Partial) {
    // SAFETY: same contract; the cast is to the element type the slot's encoding names.
    unsafe {
        match block.dtype {
            KvDtype::F32 => typed::<L, f32>(queries, block, partial),
            KvDtype::Int8 => typed::<L, i8>(queries, block, partial),
            _ => typed::<L, u16>(queries, block, partial),
        }
    }
}

#[inline(always)]
unsafe fn typed<L: Lanes, E: Elem>(queries: Queries<'_>, block: Block, partial: &mut Partial) {
    let hi = queries.visible.iter().copied().max().unwrap_or(0).min(block.hi);
    if hi <= block.lo {
        partial.max.fill(f32::NEG_INFINITY);
        partial.sum.fill(0.0);
        partial.out.fill(0.0);
        return;
    }
    // SAFETY: `hi ≤ block.hi`; same contract.
    unsafe {
        if block.dtype == KvDtype::Int8 {
            scaled_scores::<L, E>(queries, block, hi, partial);
        } else {
            let tiles = 0..hi.div_ceil(LANES);
            scores::<L, E>(queries.q, queries, block.k.cast(), tiles, &mut partial.scores);
        }
        let v_scales = scales_of_rows(block, hi);
        softmax::<L>(queries, block.lo, hi, v_scales.as_ref(), partial);
        weighted_sum::<L, E>(queries, block, block.v.cast(), hi, partial);
    }
}

/// V scales of the block's rows below `hi`, widened; none if the rows have none.
#[inline(always)]
unsafe fn scales_of_rows(block: Block, hi: usize) -> Option<[f32; BLOCK_ROWS]> {
    if block.dtype != KvDtype::Int8 {
        return None;
    }
    let mut out = [0.0; BLOCK_ROWS];
    for (i, scale) in out.iter_mut().enumerate().take(hi) {
        // SAFETY: every row below `hi` has a scale.
        *scale = bf16_to_f32(unsafe { block.v_scales.add(i).read_unaligned() });
    }
    Some(out)
}

/// Scores of int8 rows: `(q · s) · k` is `q · (s · k)`, and `q · s` is made once a group.
#[inline(always)]
unsafe fn scaled_scores<L: Lanes, E: Elem>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    partial: &mut Partial,
) {
    const GROUP_TILES: usize = GROUP_ROWS / LANES;
    let (dim, tiles) = (queries.dim, hi.div_ceil(LANES));
    let mut first = 0;
    while first < tiles {
        let group = (first + block.phase / LANES) / GROUP_TILES;
        let end = ((group + 1) * GROUP_TILES - block.phase / LANES).min(tiles);
        for d in 0..dim {
            // SAFETY: every group that has a row below `hi` has `dim` scales.
            let scale =
                bf16_to_f32(unsafe { block.k_scales.add(group * dim + d).read_unaligned() });
            for i in 0..queries.visible.len() {
                partial.scaled[i * dim + d] = queries.q[i * dim + d] * scale;
            }
        }
        // SAFETY: tiles below `hi`; `scaled` is `[m][dim]`.
        unsafe {
            let scores_out = &mut partial.scores;
            scores::<L, E>(&partial.scaled, queries, block.k.cast(), first..end, scores_out);
        }
        first = end;
    }
}

/// `scores[m][BLOCK_ROWS] = Q · Kᵀ` for some tiles; `q` is `[m][dim]`.
#[inline(always)]
unsafe fn scores<L: Lanes, E: Elem>(
    q: &[f32],
    queries: Queries<'_>,
    k: *const E,
    tiles: Range<usize>,
    scores: &mut [f32],
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    let s = Strides { a: dim, pair: 2 * LANES, tile: LANES * dim, c: BLOCK_ROWS };
    let mut t = tiles.start;
    while t < tiles.end {
        // SAFETY: the tiles exist in the block; `scores` has a row of BLOCK_ROWS for each query
        // row.
        unsafe {
            let (b, c) = (k.add(t * LANES * dim), scores.as_mut_ptr().add(t * LANES));
            if t + 2 <= tiles.end {
                micro::rows::<L, E, 2>(q.as_ptr(), m, b, c, dim / 2, s, false);
            } else {
                micro::rows::<L, E, 1>(q.as_ptr(), m, b, c, dim / 2, s, false);
            }
        }
        t += 2;
    }
}

/// Turns scores into the weights of V, `e^(score − max)` times the row's scale if it has one, 0
/// outside `lo..visible`.
#[inline(always)]
unsafe fn softmax<L: Lanes>(
    queries: Queries<'_>,
    lo: usize,
    hi: usize,
    v_scales: Option<&[f32; BLOCK_ROWS]>,
    partial: &mut Partial,
) {
    let tiles = hi.div_ceil(LANES);
    for (i, &visible) in queries.visible.iter().enumerate() {
        let visible = visible.min(hi);
        let row = &mut partial.scores[i * BLOCK_ROWS..(i + 1) * BLOCK_ROWS];
        if visible <= lo {
            row[..tiles * LANES].fill(0.0);
            (partial.max[i], partial.sum[i]) = (f32::NEG_INFINITY, 0.0);
            continue;
        }
        // SAFETY: `tiles · 16 ≤ BLOCK_ROWS`, the length of `row`.
        unsafe {
            let mut top = L::splat(f32::NEG_INFINITY);
            let bounds = |t: usize| {
                (lo.saturating_sub(t * LANES), visible.saturating_sub(t * LANES).min(LANES))
            };
            for t in 0..tiles {
                let (from, to) = bounds(t);
                let p = row.as_mut_ptr().add(t * LANES);
                let v = L::select_range(L::load(p), from, to, f32::NEG_INFINITY);
                L::store(p, v);
                top = L::max(v, top);
            }
            let max = L::max_lane(top);
            let mut sum = L::splat(0.0);
            for t in 0..tiles {
                let (from, to) = bounds(t);
                let p = row.as_mut_ptr().add(t * LANES);
                let e = L::exp(L::sub(L::load(p), L::splat(max)));
                let e = L::select_range(e, from, to, 0.0);
                sum = L::add(sum, e);
                let weight = match v_scales {
                    // Scales of rows outside the segment may be anything.
                    Some(scales) => {
                        let scale = L::load(scales.as_ptr().add(t * LANES));
                        L::select_range(L::mul(e, scale), from, to, 0.0)
                    }
                    None => e,
                };
                L::store(p, weight);
            }
            (partial.max[i], partial.sum[i]) = (max, L::sum(sum));
        }
    }
}

/// `out[m][dim] = P · V` over rows `lo..hi`; rows outside the segment are not even multiplied.
#[inline(always)]
unsafe fn weighted_sum<L: Lanes, E: Elem>(
    queries: Queries<'_>,
    block: Block,
    v: *const E,
    hi: usize,
    partial: &mut Partial,
) {
    let dim = queries.dim;
    let mut next = block.lo / 2;
    let mut started = false;
    if block.lo % 2 == 1 {
        // SAFETY: pair `next` holds row `lo`, which is inside the block.
        unsafe {
            edge_pair::<L, E>(queries, v, next, block.lo..hi.min(block.lo + 1), false, partial);
        }
        (next, started) = (next + 1, true);
    }
    // A pair whose second row lies past the segment's end is an edge; one whose second row is
    // merely masked for these queries is not: its weight is 0 and its value is finite.
    let whole = if hi == block.hi { hi / 2 } else { hi.div_ceil(2) };
    if next < whole || !started {
        let pairs = whole.saturating_sub(next);
        // SAFETY: pairs `next..whole` lie inside the segment's rows of the block.
        unsafe {
            pv::<L, E>(queries, v.add(next * 2 * dim), next, pairs, started, partial);
        }
    }
    if hi == block.hi && hi % 2 == 1 && hi > block.lo + block.lo % 2 {
        // SAFETY: pair `hi / 2` holds row `hi − 1`.
        unsafe { edge_pair::<L, E>(queries, v, hi / 2, hi - 1..hi, true, partial) };
    }
}

/// Adds the one valid row of a pair whose other row is not the segment's.
#[inline(always)]
unsafe fn edge_pair<L: Lanes, E: Elem>(
    queries: Queries<'_>,
    v: *const E,
    pair: usize,
    valid: std::ops::Range<usize>,
    accumulate: bool,
    partial: &mut Partial,
) {
    let dim = queries.dim;
    let mut clean = vec![E::default(); 2 * dim];
    for row in valid {
        for d in 0..dim {
            let at = d / LANES * 2 * LANES + E::index(d % LANES, row % 2);
            // SAFETY: the pair lies inside the block.
            clean[at] = unsafe { *v.add(pair * 2 * dim + at) };
        }
    }
    // SAFETY: `clean` is one pair of `dim` columns.
    unsafe { pv::<L, E>(queries, clean.as_ptr(), pair, 1, accumulate, partial) }
}

/// `out (+)= P[pairs] · V[pairs]`, 32 dimensions at a time.
#[inline(always)]
unsafe fn pv<L: Lanes, E: Elem>(
    queries: Queries<'_>,
    v: *const E,
    first_pair: usize,
    pairs: usize,
    accumulate: bool,
    partial: &mut Partial,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    let s = Strides { a: BLOCK_ROWS, pair: 2 * dim, tile: 2 * LANES, c: dim };
    for d in (0..dim).step_by(2 * LANES) {
        // SAFETY: `v` has `pairs` pairs of `dim` columns; scores and out have `m` rows.
        unsafe {
            let a = partial.scores.as_ptr().add(2 * first_pair);
            let c = partial.out.as_mut_ptr().add(d);
            micro::rows::<L, E, 2>(a, m, v.add(2 * d), c, pairs, s, accumulate);
        }
    }
}

/// Adds a later partial to a running one, row by row.
///
/// `m' = max(m, mᵖ)`, and both sides are scaled by `e^(their max − m')` (Milakov and Gimelshein
/// 2018, online normalizer calculation for softmax).
pub(crate) fn merge(out: &mut [f32], max: &mut f32, sum: &mut f32, other: (&[f32], f32, f32)) {
    let (other_out, other_max, other_sum) = other;
    if other_max == f32::NEG_INFINITY {
        return;
    }
    let top = if other_max > *max { other_max } else { *max };
    let (mine, theirs) = (scale(*max - top), scale(other_max - top));
    for (o, p) in out.iter_mut().zip(other_out) {
        *o = p.mul_add(theirs, *o * mine);
    }
    *sum = other_sum.mul_add(theirs, *sum * mine);
    *max = top;
}

/// `e^x` for `x ≤ 0`, the same bits on every machine; 0 for −∞.
fn scale(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    // SAFETY: the portable lanes need no CPU feature.
    unsafe { crate::lanes::Portable::exp([x; LANES])[0] }
}
