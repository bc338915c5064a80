//! Q · Kᵀ of at most twelve query rows over one block.

use std::ops::Range;

use matkv_types::GROUP_ROWS;

use crate::activations::Stored;
use crate::ahead::ahead;
use crate::block::{BLOCK_ROWS, Block, HEAD_DIM_MAX, Queries, Scratch};
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Meanwhile, Operands, Strides};
use crate::product::{Affine, DotBytes, Exact, NO_ROWS, Product};
use crate::quantize::factors;

/// How far ahead of the one that is multiplied a tile is asked for.
const TILES_AHEAD: usize = 2;

/// The V of the rows whose K is read, with every step of a pair of tiles.
struct Values;

impl Meanwhile for Values {
    fn lines<P: Product>() -> usize {
        // A step reads two vectors of as many dimensions.
        (2 * LANES * P::STEP * size_of::<P::B>()).div_ceil(64)
    }
}

/// `scores[m][BLOCK_ROWS] = Q · Kᵀ` for some tiles; `q` is `[m][HEAD_DIM_MAX]`, a stride known when
/// this is compiled, which saves the loop an addition per row and step.
///
/// # Safety
/// The tiles exist in the block, whose elements are `P::B`; there are at most twelve query rows,
/// as many `rows`; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn scores<L: Lanes, P: Product>(
    (q, rows): (*const P::A, *const P::Row),
    queries: Queries<'_>,
    block: Block,
    tiles: Range<usize>,
    scratch: &mut Scratch,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    let from = if block.ahead { block.v } else { block.k };
    for t in tiles.clone().step_by(2) {
        if block.ahead {
            let tile = LANES * dim * size_of::<P::B>();
            ahead(block.k.wrapping_add((t + TILES_AHEAD) * tile), 2 * tile);
        }
        // SAFETY: same contract; `scores` has a row of BLOCK_ROWS for each query row.
        unsafe {
            let operands = Operands::<P> {
                a: q,
                m,
                b: block.k.cast::<P::B>().add(t * LANES * dim),
                steps: dim / P::STEP,
                c: scratch.scores.as_mut_ptr().add(t * LANES),
                strides: Strides {
                    a: HEAD_DIM_MAX,
                    step: P::STEP * LANES,
                    tile: LANES * dim,
                    c: BLOCK_ROWS,
                },
                accumulate: false,
                rows,
                ahead: from.wrapping_add(t * LANES * dim * size_of::<P::B>()),
            };
            if t + 2 <= tiles.end {
                micro::rows::<L, P, Values, 2>(&operands);
            } else {
                micro::rows::<L, P, Values, 1>(&operands);
            }
        }
    }
}

/// Scores of f32 or bf16 rows; queries are stored as `P` takes them.
///
/// # Safety
/// As for [`scores`] over the tiles below `hi`; `q` has twelve rows of `HEAD_DIM_MAX`.
#[inline(always)]
pub(crate) unsafe fn plain_scores<L: Lanes, P: Product<A: Stored, Row = ()>>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    q: *mut P::A,
    scratch: &mut Scratch,
) {
    // SAFETY: same contract.
    unsafe {
        place_queries::<L, P::A>(queries, None, q);
        scores::<L, P>((q, NO_ROWS), queries, block, 0..hi.div_ceil(LANES), scratch);
    }
}

/// Scores of int8 rows: `(q · s) · k` is `q · (s · k)`, and `q · s` is made once a group.
///
/// # Safety
/// As for [`scores`] over the tiles below `hi`; every group with a row below `hi` has scales.
#[inline(always)]
pub(crate) unsafe fn scaled_scores<L: Lanes>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    scratch: &mut Scratch,
) {
    let q = scratch.queries.as_mut_ptr();
    for (group, tiles) in groups(block, hi) {
        // SAFETY: same contract; `scratch` has room for twelve query rows.
        unsafe {
            let scales = group_scales::<L>(block, queries.dim, group);
            place_queries::<L, f32>(queries, Some(&scales), q);
            scores::<L, Exact<i8>>((q, NO_ROWS), queries, block, tiles, scratch);
        }
    }
}

/// The same in bytes. A query row has one factor for the block, in which its products with the
/// block's largest scales, and 0, reach from 1 to 255 when what stands for 0 is added; a group's
/// `q · s` is such a product, in 16 bits, times the group's share of the largest scale, rounded to
/// 8 bits.
///
/// # Safety
/// As for [`scaled_scores`]; every group with a row below `block.hi` has scales.
#[inline(always)]
pub(crate) unsafe fn quantized_scores<L: Lanes>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    scratch: &mut Scratch,
) {
    let dim = queries.dim;
    let (mut largest, mut shares) = ([0.0f32; HEAD_DIM_MAX], [0i16; HEAD_DIM_MAX]);
    // SAFETY: same contract; `scratch` has room for twelve query rows of both types, and each
    // row of them for `dim` elements, a multiple of 32.
    unsafe {
        // Of all groups, whether these queries see them or not: a row's bits must not depend on
        // how far others see.
        for d in (0..dim).step_by(LANES) {
            let mut top = L::splat(0.0);
            for (group, _) in groups(block, block.hi) {
                top = L::max(L::load_bf16(block.k_scales.add(group * dim + d)), top);
            }
            L::store(largest.as_mut_ptr().add(d), top);
        }
        quantize_queries::<L>(queries, &largest, scratch);
        let whole = scratch.queries_int.as_ptr();
        let codes = scratch.queries_16.as_mut_ptr().cast::<u8>();
        for (group, tiles) in groups(block, hi) {
            for d in (0..dim).step_by(LANES) {
                // Where the largest is 0 all are.
                let top = L::max(L::load(largest.as_ptr().add(d)), L::splat(f32::MIN_POSITIVE));
                let share = L::div(L::load_bf16(block.k_scales.add(group * dim + d)), top);
                L::store_i16(shares.as_mut_ptr().add(d), L::mul(share, L::splat(SHARE_MAX)));
            }
            for i in 0..queries.visible.len() {
                // A half, so that it is rounded, and what stands for 0.
                let offset = PART / 2 + PART * scratch.affine[i].zero as i16;
                for d in (0..dim).step_by(2 * LANES) {
                    let at = i * HEAD_DIM_MAX + d;
                    L::mul_to_bytes(whole.add(at), shares.as_ptr().add(d), offset, codes.add(at));
                }
            }
            let rows = scratch.affine.as_ptr();
            scores::<L, DotBytes>((codes.cast_const(), rows), queries, block, tiles, scratch);
        }
    }
}

/// A whole share; with 15 bits behind the point 1 would be one more.
const SHARE_MAX: f32 = 32_767.0;
/// Parts of a byte's step that the products in 16 bits have.
const PART: i16 = 128;
/// Steps between the smallest product and the largest, 0 among them: two less than there are, for
/// what rounding adds to both ends.
const STEPS: f32 = 253.0;

/// Queries times the largest scales, as integers, and what their bytes stand for.
#[inline(always)]
unsafe fn quantize_queries<L: Lanes>(
    queries: Queries<'_>,
    largest: &[f32; HEAD_DIM_MAX],
    scratch: &mut Scratch,
) {
    let dim = queries.dim;
    for i in 0..queries.visible.len() {
        // SAFETY: row `i` of all of them has `dim` elements, a multiple of 16.
        unsafe {
            let (from, scaled) = (queries.row(i), scratch.queries.as_mut_ptr());
            let zero = L::splat(0.0);
            let (mut above, mut below) = (zero, zero);
            for d in (0..dim).step_by(LANES) {
                let v = L::mul(L::load(from.add(d)), L::load(largest.as_ptr().add(d)));
                above = L::max(v, above);
                below = L::max(L::sub(zero, v), below);
                L::store(scaled.add(d), v);
            }
            let (above, below) = (L::max_lane(above), L::max_lane(below));
            let (factor, steps) = factors(above + below, STEPS);
            let to = scratch.queries_int.as_mut_ptr().add(i * HEAD_DIM_MAX);
            for d in (0..dim).step_by(LANES) {
                let v = L::mul(L::load(scaled.add(d)), L::splat(steps * f32::from(PART)));
                L::store_i16(to.add(d), v);
            }
            scratch.affine[i] = Affine {
                factor: factor * (32_768.0 / SHARE_MAX),
                zero: 1.0 + (below * steps).round_ties_even(),
            };
        }
    }
}

/// Groups of rows that share K scales, counted from the block's first one, and their tiles.
fn groups(block: Block, hi: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    const GROUP_TILES: usize = GROUP_ROWS / LANES;
    let (before, tiles) = (block.phase / LANES, hi.div_ceil(LANES));
    (0..(before + tiles).div_ceil(GROUP_TILES)).map(move |group| {
        let first = (group * GROUP_TILES).saturating_sub(before);
        (group, first..((group + 1) * GROUP_TILES - before).min(tiles))
    })
}

/// The K scales of one group, widened.
#[inline(always)]
unsafe fn group_scales<L: Lanes>(block: Block, dim: usize, group: usize) -> [f32; HEAD_DIM_MAX] {
    let mut scales = [0.0f32; HEAD_DIM_MAX];
    for d in (0..dim).step_by(LANES) {
        // SAFETY: the group has `dim` scales.
        unsafe {
            let wide = L::load_bf16(block.k_scales.add(group * dim + d));
            L::store(scales.as_mut_ptr().add(d), wide);
        }
    }
    scales
}

/// Stores the queries, times scales if there are any, in rows of `HEAD_DIM_MAX`.
#[inline(always)]
unsafe fn place_queries<L: Lanes, T: Stored>(
    queries: Queries<'_>,
    scales: Option<&[f32; HEAD_DIM_MAX]>,
    out: *mut T,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    for i in 0..m {
        let from = queries.row(i);
        for d in (0..dim).step_by(LANES) {
            // SAFETY: row `i` of both has `dim` elements, a multiple of 16.
            unsafe {
                let mut q = L::load(from.add(d));
                if let Some(scales) = scales {
                    q = L::mul(q, L::load(scales.as_ptr().add(d)));
                }
                T::store::<L>(out.add(i * HEAD_DIM_MAX + d), q);
            }
        }
    }
}
