//! Attention of some query rows over one block of at most [`BLOCK_ROWS`] KV rows.
//!
//! The result is a *partial*: unnormalized output, largest score and sum of exponentials, merged
//! with others in block order. Blocks are the unit of bit-exactness: where they start is decided
//! by row numbers in the slot, never by threads or neighbours.
//!
//! Twelve query rows go through scores, softmax and weighted sum before the next twelve, so that
//! their scores stay in L1; K and V of the block come from L2.

use matkv_types::{KvDtype, Precision};

use crate::ahead::ahead;
use crate::isa::dispatch;
use crate::lanes::{LANES, Lanes};
use crate::micro;
use crate::product::{Affine, DotBf16, DotInt, Exact};
use crate::quantize::factors;
use crate::scores::{plain_scores, quantized_scores, scaled_scores};
use crate::softmax::softmax;
use crate::values::{next_keys, pv, weighted_sum};

/// KV rows of a block: 256 bf16 rows of 64 dimensions are 32 KiB of K and of V.
pub(crate) const BLOCK_ROWS: usize = 256;
/// What is asked for of the next block's K while softmax leaves memory idle; the weighted sum asks
/// for all of it.
const NEXT_BYTES: usize = 8192;
/// Largest head dimension. Sums over dimensions of products of bytes fit the 24 bits of an f32,
/// sums over a block's rows of products of 16-bit weights and bytes fit 31 bits.
pub const HEAD_DIM_MAX: usize = 256;
/// Largest weight of 16 bits.
const WEIGHT_MAX: f32 = 32_767.0;
const _: () = assert!(HEAD_DIM_MAX * 255 * 128 < 1 << 24 && BLOCK_ROWS * 32_767 * 128 < 1 << 31);

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
    /// Whether rows are asked for before they are needed: with few queries, what they cost is to
    /// come from memory.
    pub ahead: bool,
    /// K of the block the thread takes next; null if there is none.
    pub next: *const u8,
}

/// What a block, or many, contribute to some query rows.
pub(crate) struct Partial<'a> {
    /// Unnormalized output `[m][head_dim]`.
    pub out: &'a mut [f32],
    /// Largest score of each row, as a power of 2; −∞ if the row sees nothing of the block.
    pub max: &'a mut [f32],
    /// Sum of `2^(score − max)`.
    pub sum: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// f32 that a partial of `m` rows takes.
    pub(crate) fn len(m: usize, dim: usize) -> usize {
        m * (dim + 2)
    }

    /// A partial kept in `Self::len(m, dim)` f32.
    pub(crate) fn new(memory: &'a mut [f32], m: usize) -> Self {
        let (out, rest) = memory.split_at_mut(memory.len() - 2 * m);
        let (max, sum) = rest.split_at_mut(m);
        Self { out, max, sum }
    }
}

/// Working memory of one thread: what twelve query rows need.
pub(crate) struct Scratch {
    /// Scores, then weights, `[row][BLOCK_ROWS]`.
    pub scores: [f32; micro::ROWS * BLOCK_ROWS],
    /// Weights of 16 bits, bf16 or integers.
    pub weights: [u16; micro::ROWS * BLOCK_ROWS],
    /// Queries, times the K scales of one group if there are scales, `[row][HEAD_DIM_MAX]`.
    pub queries: [f32; micro::ROWS * HEAD_DIM_MAX],
    /// The same as bf16, or as bytes.
    pub queries_16: [u16; micro::ROWS * HEAD_DIM_MAX],
    /// int8: queries times the block's largest K scales, as integers.
    pub queries_int: [i16; micro::ROWS * HEAD_DIM_MAX],
    /// int8: what the integers of a row of weights are multiplied with, the same for all.
    pub factors: [f32; micro::ROWS],
    /// int8: what bytes of a row of queries stand for.
    pub affine: [Affine; micro::ROWS],
    /// int8: V scales of the block; as weights become integers, shares of the largest one, which
    /// is the largest integer.
    pub v_scales: [f32; BLOCK_ROWS],
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            scores: [0.0; _],
            weights: [0; _],
            queries: [0.0; _],
            queries_16: [0; _],
            queries_int: [0; _],
            factors: [0.0; _],
            affine: [Affine::default(); _],
            v_scales: [0.0; _],
        }
    }
}

/// Query rows of one KV head, rotated for the segment and scaled: `group` of `dim` side by side, as
/// many as share the head.
#[derive(Clone, Copy)]
pub(crate) struct Queries<'a> {
    q: &'a [f32],
    pub dim: usize,
    group: usize,
    /// From one group to the next.
    stride: usize,
    /// The first of the rows, counted from where `q` begins.
    first: usize,
    /// For each query row, rows of the block it may see: those below this.
    pub visible: &'a [usize],
}

impl<'a> Queries<'a> {
    /// A row for each of `visible`, the first where `q` begins.
    ///
    /// # Panics
    /// If `q` does not have them.
    pub(crate) fn new(
        q: &'a [f32],
        (group, dim): (usize, usize),
        stride: usize,
        visible: &'a [usize],
    ) -> Self {
        let queries = Self { q, dim, group, stride, first: 0, visible };
        let end = visible.len().checked_sub(1).map_or(0, |last| queries.place(last) + dim);
        assert!(end <= q.len(), "query rows past the end");
        queries
    }

    pub(crate) fn rows(&self, first: usize, count: usize) -> Self {
        let visible = &self.visible[first..first + count];
        Self { first: self.first + first, visible, ..*self }
    }

    fn place(&self, i: usize) -> usize {
        let row = self.first + i;
        row / self.group * self.stride + row % self.group * self.dim
    }

    /// The row's `dim` elements.
    pub(crate) fn row(&self, i: usize) -> *const f32 {
        self.q[self.place(i)..].as_ptr()
    }

    /// Some query row sees rows of the block below this, and none sees another.
    fn see_below(&self, block: Block) -> usize {
        self.visible.iter().copied().max().unwrap_or(0).min(block.hi)
    }
}

dispatch! {
    /// Computes the partial of one block.
    ///
    /// # Safety
    /// `block.k` and `block.v` point to whole tiles covering `block.hi ≤ BLOCK_ROWS` rows of
    /// `queries.dim ≤ HEAD_DIM_MAX` dimensions (a multiple of 32), aligned to their element
    /// type, and the scales of int8 rows to every group and row below `block.hi`; nobody writes
    /// them meanwhile. `partial` has room for the queries.
    pub(crate) unsafe fn attend_block => attend_block_body(
        precision: Precision,
        queries: Queries<'_>,
        block: Block,
        scratch: &mut Scratch,
        partial: &mut Partial<'_>,
    )
}

#[inline(always)]
unsafe fn attend_block_body<L: Lanes>(
    precision: Precision,
    queries: Queries<'_>,
    block: Block,
    scratch: &mut Scratch,
    partial: &mut Partial<'_>,
) {
    if block.dtype == KvDtype::Int8 {
        // SAFETY: same contract.
        unsafe { place_v_scales::<L>(precision, block, scratch) };
    }
    let (m, dim) = (queries.visible.len(), queries.dim);
    for first in (0..m).step_by(micro::ROWS) {
        let count = micro::ROWS.min(m - first);
        let mut part = Partial {
            out: &mut partial.out[first * dim..(first + count) * dim],
            max: &mut partial.max[first..first + count],
            sum: &mut partial.sum[first..first + count],
        };
        // SAFETY: same contract.
        unsafe {
            few_rows::<L>(precision, queries.rows(first, count), block, scratch, &mut part);
        }
    }
}

/// Widens the V scales, and makes shares of them where weights become integers.
#[inline(always)]
unsafe fn place_v_scales<L: Lanes>(precision: Precision, block: Block, scratch: &mut Scratch) {
    let to = scratch.v_scales.as_mut_ptr();
    let tiles = || (0..block.hi).step_by(LANES);
    // SAFETY: every row of a tile has a scale, and `scratch` room for it.
    unsafe {
        let mut top = L::splat(0.0);
        for row in tiles() {
            let scales = L::load_bf16(block.v_scales.add(row));
            // Those of rows outside the segment may be anything.
            let (lo, hi) = (block.lo.saturating_sub(row), (block.hi - row).min(LANES));
            top = L::max(L::select_range(scales, lo, hi, 0.0), top);
            L::store(to.add(row), scales);
        }
        if precision == Precision::Bf16 {
            // Of all rows, whether these queries see them or not: a row's bits must not depend on
            // how far others see.
            let (factor, inverse) = factors(L::max_lane(top), WEIGHT_MAX);
            scratch.factors.fill(factor);
            let inverse = L::splat(inverse);
            for row in tiles() {
                L::store(to.add(row), L::mul(L::load(to.add(row)), inverse));
            }
        }
    }
}

/// At most twelve query rows.
#[inline(always)]
unsafe fn few_rows<L: Lanes>(
    precision: Precision,
    queries: Queries<'_>,
    block: Block,
    scratch: &mut Scratch,
    partial: &mut Partial<'_>,
) {
    let hi = queries.see_below(block);
    if hi <= block.lo {
        partial.max.fill(f32::NEG_INFINITY);
        partial.sum.fill(0.0);
        partial.out.fill(0.0);
        return;
    }
    let in_place = scratch.scores.as_mut_ptr();
    let apart = scratch.weights.as_mut_ptr();
    let seen = (block.lo, hi);
    // SAFETY: `hi ≤ block.hi`; same contract. The casts are to the element type the slot's
    // encoding names; `scratch` has room for twelve rows of scores and of weights, and factors for
    // as many.
    unsafe {
        block_scores::<L>(precision, queries, block, hi, scratch);
        if block.ahead && !block.next.is_null() {
            ahead(block.next, NEXT_BYTES);
        }
        match (block.dtype, precision) {
            (KvDtype::F32, _) => {
                softmax::<L, f32>(queries, seen, None, in_place, in_place, partial);
                weighted_sum::<L, Exact<f32>>(queries, block, hi, in_place, partial);
            }
            (KvDtype::Int8, Precision::Exact) => {
                let scales = &scratch.v_scales;
                softmax::<L, f32>(queries, seen, Some(scales), in_place, in_place, partial);
                weighted_sum::<L, Exact<i8>>(queries, block, hi, in_place, partial);
            }
            (KvDtype::Int8, Precision::Bf16) => {
                let scales = &scratch.v_scales;
                let codes = apart.cast::<i16>();
                softmax::<L, i16>(queries, seen, Some(scales), in_place, codes, partial);
                // Weights outside the segment are 0, and 0 times any integer is 0: no edges.
                let pairs = block.lo / 2..hi.div_ceil(2);
                let v = block.v.cast::<i8>().add(pairs.start * 2 * queries.dim);
                let weights = (codes.cast_const(), scratch.factors.as_ptr());
                let next = next_keys(block);
                pv::<L, DotInt>(queries, v, pairs, weights, (false, next), partial);
            }
            (_, Precision::Exact) => {
                softmax::<L, f32>(queries, seen, None, in_place, in_place, partial);
                weighted_sum::<L, Exact<u16>>(queries, block, hi, in_place, partial);
            }
            (_, Precision::Bf16) => {
                softmax::<L, u16>(queries, seen, None, in_place, apart, partial);
                weighted_sum::<L, DotBf16>(queries, block, hi, apart, partial);
            }
        }
    }
}

dispatch! {
    /// Fills `scratch.scores` with the scores of at most twelve query rows over the tiles that one
    /// of them sees.
    ///
    /// # Safety
    /// As for [`attend_block`].
    pub(crate) unsafe fn score_block => score_block_body(
        precision: Precision,
        queries: Queries<'_>,
        block: Block,
        scratch: &mut Scratch,
    )
}

#[inline(always)]
unsafe fn score_block_body<L: Lanes>(
    precision: Precision,
    queries: Queries<'_>,
    block: Block,
    scratch: &mut Scratch,
) {
    let hi = queries.see_below(block);
    if hi > block.lo {
        // SAFETY: same contract.
        unsafe { block_scores::<L>(precision, queries, block, hi, scratch) };
    }
}

/// Scores over the tiles below `hi`, as attention computes them.
#[inline(always)]
unsafe fn block_scores<L: Lanes>(
    precision: Precision,
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    scratch: &mut Scratch,
) {
    let (q, q_16) = (scratch.queries.as_mut_ptr(), scratch.queries_16.as_mut_ptr());
    // SAFETY: the caller's contract, `hi ≤ block.hi`.
    unsafe {
        match (block.dtype, precision) {
            (KvDtype::F32, _) => plain_scores::<L, Exact<f32>>(queries, block, hi, q, scratch),
            (KvDtype::Int8, Precision::Exact) => scaled_scores::<L>(queries, block, hi, scratch),
            (KvDtype::Int8, Precision::Bf16) => {
                quantized_scores::<L>(queries, block, hi, scratch);
            }
            (_, Precision::Exact) => {
                plain_scores::<L, Exact<u16>>(queries, block, hi, q, scratch);
            }
            (_, Precision::Bf16) => {
                plain_scores::<L, DotBf16>(queries, block, hi, q_16, scratch);
            }
        }
    }
}
