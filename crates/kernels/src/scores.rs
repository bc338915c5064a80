//! Q · Kᵀ of at most twelve query rows over one block.

use std::ops::Range;

use matkv_types::{GROUP_ROWS, bf16_to_f32};

use crate::block::{BLOCK_ROWS, Block, DIM_MAX, Queries, Scratch};
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Operands, Strides};
use crate::product::{DotInt, Exact, Product};
use crate::quantize::quantize;

/// `scores[m][BLOCK_ROWS] = Q · Kᵀ` for some tiles; `q` is `[m][dim]`.
///
/// # Safety
/// The tiles exist in the block, whose elements are `P::B`; there are at most twelve query rows,
/// and `scratch` has their factors if `P` is scaled; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn scores<L: Lanes, P: Product>(
    q: *const P::A,
    queries: Queries<'_>,
    block: Block,
    tiles: Range<usize>,
    scratch: &mut Scratch,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    for t in tiles.clone().step_by(2) {
        // SAFETY: same contract; `scores` has a row of BLOCK_ROWS for each query row.
        unsafe {
            let operands = Operands::<P> {
                a: q,
                m,
                b: block.k.cast::<P::B>().add(t * LANES * dim),
                pairs: dim / 2,
                c: scratch.scores.as_mut_ptr().add(t * LANES),
                strides: Strides { a: dim, pair: 2 * LANES, tile: LANES * dim, c: BLOCK_ROWS },
                accumulate: false,
                factors: scratch.factors.as_ptr(),
            };
            if t + 2 <= tiles.end {
                micro::rows::<L, P, 2>(&operands);
            } else {
                micro::rows::<L, P, 1>(&operands);
            }
        }
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
    for (group, tiles) in groups(block, hi) {
        // SAFETY: same contract; `scaled` is `[m][dim]`.
        unsafe {
            scale_queries::<L>(queries, block, group, scratch);
            let q = scratch.scaled.as_ptr();
            scores::<L, Exact<i8>>(q, queries, block, tiles, scratch);
        }
    }
}

/// The same with `q · s` rounded to 16-bit integers.
///
/// # Safety
/// As for [`scaled_scores`].
#[inline(always)]
pub(crate) unsafe fn quantized_scores<L: Lanes>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    scratch: &mut Scratch,
) {
    let dim = queries.dim;
    for (group, tiles) in groups(block, hi) {
        // SAFETY: same contract; `scaled` and `quantized` are `[m][dim]`, dim a multiple of 16.
        unsafe {
            scale_queries::<L>(queries, block, group, scratch);
            for i in 0..queries.visible.len() {
                let scaled = scratch.scaled.as_ptr().add(i * dim);
                let quantized = scratch.quantized.as_mut_ptr().add(i * dim);
                scratch.factors[i] = quantize::<L>(scaled, dim, quantized);
            }
            let q = scratch.quantized.as_ptr();
            scores::<L, DotInt>(q, queries, block, tiles, scratch);
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

/// `scaled[m][dim] = q · s` for the scales of one group.
#[inline(always)]
unsafe fn scale_queries<L: Lanes>(
    queries: Queries<'_>,
    block: Block,
    group: usize,
    scratch: &mut Scratch,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    let mut scales = [0.0f32; DIM_MAX];
    for (d, scale) in scales[..dim].iter_mut().enumerate() {
        // SAFETY: the group has `dim` scales.
        *scale = bf16_to_f32(unsafe { block.k_scales.add(group * dim + d).read_unaligned() });
    }
    for i in 0..m {
        for d in (0..dim).step_by(LANES) {
            // SAFETY: row `i` of both has `dim` elements, a multiple of 16.
            unsafe {
                let scale = L::load(scales.as_ptr().add(d));
                let q = L::load(queries.q.as_ptr().add(i * dim + d));
                L::store(scratch.scaled.as_mut_ptr().add(i * dim + d), L::mul(q, scale));
            }
        }
    }
}
