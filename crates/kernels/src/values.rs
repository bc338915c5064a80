//! P · V of at most twelve query rows over one block.

use std::ops::Range;

use crate::block::{BLOCK_ROWS, Block, HEAD_DIM_MAX, Partial, Queries};
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Meanwhile, Operands, Strides};
use crate::product::{Elem, NO_ROWS, Product};

/// `out[m][dim] = P · V` over rows `lo..hi`; rows outside the segment are not even multiplied:
/// they may be NaN, and 0 times NaN is not 0.
///
/// # Safety
/// `weights` is `[m][BLOCK_ROWS]`, 0 outside `lo..hi`; `block.v` has the rows below `hi`, its
/// elements are `P::B`; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn weighted_sum<L: Lanes, P: Product<Row = ()>>(
    queries: Queries<'_>,
    block: Block,
    hi: usize,
    weights: *const P::A,
    partial: &mut Partial<'_>,
) {
    let (dim, mut clean) = (queries.dim, [P::B::default(); 2 * HEAD_DIM_MAX]);
    // The first and the last pair may have one row that is not the segment's. A pair whose second
    // row is merely masked for these queries is whole: its weight is 0 and its value finite.
    let first_whole = block.lo.div_ceil(2);
    let whole_end = if hi == block.hi { hi / 2 } else { hi.div_ceil(2) };
    let head = (block.lo % 2 == 1).then_some((block.lo / 2, block.lo));
    let tail = (hi == block.hi && hi % 2 == 1 && hi / 2 >= first_whole).then_some((hi / 2, hi - 1));
    let whole = (first_whole < whole_end).then_some(first_whole..whole_end);
    let mut accumulate = false;
    let next = next_keys(block);
    // One call of `pv` for all three, as it is inlined.
    for (edge, pairs) in [(head, None), (None, whole), (tail, None)] {
        let (pairs, v) = match (edge, pairs) {
            (Some((pair, row)), _) => {
                // SAFETY: row `row` of pair `pair` lies inside the block.
                unsafe { copy_row::<P::B>(block, dim, pair, row, &mut clean) };
                // The copy is a block of its own, which begins at this pair.
                (pair..pair + 1, clean.as_ptr())
            }
            // SAFETY: the pair lies inside the block.
            (None, Some(pairs)) => unsafe {
                let v = block.v.cast::<P::B>().add(pairs.start * 2 * dim);
                (pairs, v)
            },
            (None, None) => continue,
        };
        let weights = (weights, NO_ROWS);
        // SAFETY: `v` begins with the first of the pairs, all of them rows of the segment.
        unsafe { pv::<L, P>(queries, v, pairs, weights, (accumulate, next), partial) };
        accumulate = true;
    }
}

/// The one valid row of a pair whose other row is not the segment's; the other one is zeros.
#[inline(always)]
unsafe fn copy_row<E: Elem>(
    block: Block,
    dim: usize,
    pair: usize,
    row: usize,
    clean: &mut [E; 2 * HEAD_DIM_MAX],
) {
    clean.fill(E::default());
    for d in 0..dim {
        let at = d / LANES * 2 * LANES + E::index(d % LANES, row % 2);
        // SAFETY: the pair lies inside the block.
        clean[at] = unsafe { *block.v.cast::<E>().add(pair * 2 * dim + at) };
    }
}

/// The K of the next block, as much as the V that is read, with every pair of rows of two vectors.
struct NextKeys;

impl Meanwhile for NextKeys {
    fn lines<P: Product>() -> usize {
        (4 * LANES * size_of::<P::B>()).div_ceil(64)
    }
}

/// Where it lies, or what is in cache if there is none.
pub(crate) fn next_keys(block: Block) -> *const u8 {
    if block.ahead && !block.next.is_null() { block.next } else { block.v }
}

/// `out (+)= P[pairs] · V[pairs]`, 32 dimensions at a time; `v` begins with the first of the
/// pairs, and weights come with what makes values of their sums.
///
/// # Safety
/// As for [`weighted_sum`] over the given pairs; there is a `P::Row` for each query row.
#[inline(always)]
pub(crate) unsafe fn pv<L: Lanes, P: Product>(
    queries: Queries<'_>,
    v: *const P::B,
    pairs: Range<usize>,
    (weights, rows): (*const P::A, *const P::Row),
    (accumulate, next): (bool, *const u8),
    partial: &mut Partial<'_>,
) {
    let (m, dim) = (queries.visible.len(), queries.dim);
    for d in (0..dim).step_by(2 * LANES) {
        // One stripe behind the other; as much as this block has itself.
        let at = 2 * d * pairs.len() * size_of::<P::B>();
        // SAFETY: V has the pairs, of `dim` columns each; weights and out have `m` rows.
        unsafe {
            micro::rows::<L, P, NextKeys, 2>(&Operands {
                a: weights.add(2 * pairs.start),
                m,
                b: v.add(2 * d),
                steps: pairs.len(),
                c: partial.out.as_mut_ptr().add(d),
                strides: Strides { a: BLOCK_ROWS, step: 2 * dim, tile: 2 * LANES, c: dim },
                accumulate,
                rows,
                ahead: next.wrapping_add(at),
            });
        }
    }
}
