//! P · V of at most twelve query rows over one block.

use std::ops::Range;

use crate::block::{BLOCK_ROWS, Block, DIM_MAX, Partial, Queries};
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Operands, Strides};
use crate::product::{Elem, Product};

/// `out[m][dim] = P · V` over rows `lo..hi`; rows outside the segment are not even multiplied:
/// they may be NaN, and 0 times NaN is not 0.
///
/// # Safety
/// `weights` is `[m][BLOCK_ROWS]`, 0 outside `lo..hi`; `block.v` has the rows below `hi`, its
/// elements are `P::B`; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn weighted_sum<L: Lanes, P: Product>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    weights: *const P::A,
    partial: &mut Partial<'_>,
) {
    let mut next = block.lo / 2;
    let mut started = false;
    if block.lo % 2 == 1 {
        let valid = block.lo..hi.min(block.lo + 1);
        // SAFETY: pair `next` holds row `lo`, which is inside the block.
        unsafe { edge_pair::<L, P>(queries, block, next, valid, weights, false, partial) };
        (next, started) = (next + 1, true);
    }
    // A pair whose second row lies past the segment's end is an edge; one whose second row is
    // merely masked for these queries is not: its weight is 0 and its value is finite.
    let whole = if hi == block.hi { hi / 2 } else { hi.div_ceil(2) };
    if next < whole || !started {
        let pairs = next..whole.max(next);
        let weights = (weights, std::ptr::null());
        // SAFETY: pairs `next..whole` lie inside the segment's rows of the block.
        unsafe { pv::<L, P>(queries, block, pairs, weights, started, partial) };
    }
    if hi == block.hi && hi % 2 == 1 && hi > block.lo + block.lo % 2 {
        // SAFETY: pair `hi / 2` holds row `hi − 1`.
        unsafe { edge_pair::<L, P>(queries, block, hi / 2, hi - 1..hi, weights, true, partial) };
    }
}

/// Adds the one valid row of a pair whose other row is not the segment's.
#[inline(always)]
unsafe fn edge_pair<L: Lanes, P: Product>(
    queries: Queries<'_>,
    block: Block,
    pair: usize,
    valid: Range<usize>,
    weights: *const P::A,
    accumulate: bool,
    partial: &mut Partial<'_>,
) {
    let dim = queries.dim;
    let mut clean = [P::B::default(); 2 * DIM_MAX];
    for row in valid {
        for d in 0..dim {
            let at = d / LANES * 2 * LANES + P::B::index(d % LANES, row % 2);
            // SAFETY: the pair lies inside the block.
            clean[at] = unsafe { *block.v.cast::<P::B>().add(pair * 2 * dim + at) };
        }
    }
    // SAFETY: `clean` is one pair of `dim` columns, the first of a block of its own; the weights
    // of the pair are two of each row.
    unsafe {
        let own = Block { v: clean.as_ptr().cast(), ..block };
        let weights = (weights.add(2 * pair), std::ptr::null());
        pv::<L, P>(queries, own, 0..1, weights, accumulate, partial);
    }
}

/// `out (+)= P[pairs] · V[pairs]`, 32 dimensions at a time; weights come with their factors.
///
/// # Safety
/// As for [`weighted_sum`] over the given pairs; there is a factor for each query row if `P` is
/// scaled.
#[inline(always)]
pub(crate) unsafe fn pv<L: Lanes, P: Product>(
    queries: Queries<'_>,
    block: Block,
    pairs: Range<usize>,
    (weights, factors): (*const P::A, *const f32),
    accumulate: bool,
    partial: &mut Partial<'_>,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    for d in (0..dim).step_by(2 * LANES) {
        // SAFETY: V has the pairs, of `dim` columns each; weights and out have `m` rows.
        unsafe {
            micro::rows::<L, P, 2>(&Operands {
                a: weights.add(2 * pairs.start),
                m,
                b: block.v.cast::<P::B>().add(pairs.start * 2 * dim + 2 * d),
                pairs: pairs.len(),
                c: partial.out.as_mut_ptr().add(d),
                strides: Strides { a: BLOCK_ROWS, pair: 2 * dim, tile: 2 * LANES, c: dim },
                accumulate,
                factors,
            });
        }
    }
}
