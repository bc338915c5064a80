//! The one micro-kernel: `C[m][16·NR] (+)= A[m][k] · B`, B packed in pairs of k.
//!
//! Linear layers, Q·Kᵀ and P·V all run on it; they differ in strides and in the [`Product`]. Each
//! element of C is one accumulator that takes k in order, so its bits do not depend on how rows
//! are grouped.

use crate::ahead::ahead;
use crate::lanes::{LANES, Lanes};
use crate::product::Product;

/// Rows the largest tile takes: with two column tiles 24 of 32 registers are accumulators.
pub(crate) const ROWS: usize = 12;

/// Rows by one column tile at once at most. Such a tile is the last of a row of tiles, and not
/// worth the code of a large one.
const ROWS_NARROW: usize = 3;

/// Operand strides of one call, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Strides {
    /// Between rows of A.
    pub a: usize,
    /// Between steps of B.
    pub step: usize,
    /// Between column tiles of B.
    pub tile: usize,
    /// Between rows of C.
    pub c: usize,
}

/// One product.
pub(crate) struct Operands<P: Product> {
    /// `m` rows of `steps · P::STEP` elements.
    pub a: *const P::A,
    pub m: usize,
    /// `steps` steps in each column tile.
    pub b: *const P::B,
    pub steps: usize,
    /// `m` rows of `16·NR` elements.
    pub c: *mut f32,
    pub strides: Strides,
    /// Add the product to what C holds.
    pub accumulate: bool,
    /// What makes values of each row's sums.
    pub rows: *const P::Row,
    /// What is asked for meanwhile, if anything is.
    pub ahead: *const u8,
}

/// What is asked for while a product is computed: little with every step, so that memory and
/// arithmetic have something to do at the same time. A burst of as many would hold up both.
pub(crate) trait Meanwhile {
    /// Cache lines with every step.
    fn lines<P: Product>() -> usize;
}

/// Nothing is.
pub(crate) struct Nothing;

impl Meanwhile for Nothing {
    fn lines<P: Product>() -> usize {
        0
    }
}

/// `MR` rows, from row `first` on, by `NR` tiles of sixteen columns.
#[inline(always)]
unsafe fn tile<L: Lanes, P: Product, W: Meanwhile, const MR: usize, const NR: usize>(
    o: &Operands<P>,
    first: usize,
) {
    let s = o.strides;
    // SAFETY: the contract of `rows`; rows `first..first + MR` exist.
    unsafe {
        let (a, c) = (o.a.add(first * s.a), o.c.add(first * s.c));
        let mut sums = [[P::zero::<L>(); NR]; MR];
        let mut columns = [P::zero::<L>(); NR];
        for p in 0..o.steps {
            let lines = W::lines::<P>();
            ahead(o.ahead.wrapping_add(p * lines * 64), lines * 64);
            let b: [_; NR] =
                std::array::from_fn(|j| P::load::<L>(o.b.add(p * s.step + j * s.tile)));
            columns = std::array::from_fn(|j| P::add_columns::<L>(columns[j], b[j]));
            for (i, row) in sums.iter_mut().enumerate() {
                let x = a.add(i * s.a + P::STEP * p);
                for (j, sum) in row.iter_mut().enumerate() {
                    *sum = P::step::<L>(*sum, x, b[j]);
                }
            }
        }
        for (i, row) in sums.iter().enumerate() {
            let of_row = *o.rows.add(first + i);
            for (j, &sum) in row.iter().enumerate() {
                let at = c.add(i * s.c + j * LANES);
                let mut v = P::finish::<L>(sum, columns[j], of_row);
                if o.accumulate {
                    v = L::add(L::load(at), v);
                }
                L::store(at, v);
            }
        }
    }
}

/// Any number of rows by `NR` column tiles, in groups of 12, 6, 3, 2 and 1 rows, as many as the
/// registers hold.
///
/// # Safety
/// The operands have the sizes [`Operands`] gives, at the given strides; C is readable too when
/// `accumulate`, and overlaps neither A nor B; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn rows<L: Lanes, P: Product, W: Meanwhile, const NR: usize>(o: &Operands<P>) {
    let mut i = 0;
    macro_rules! groups_of {
        ($mr:expr) => {
            while $mr <= L::ROWS && $mr <= ROWS_NARROW * NR * NR && o.m - i >= $mr {
                // SAFETY: rows `i..i + $mr` exist; the rest is this function's contract.
                unsafe { tile::<L, P, W, { $mr }, NR>(o, i) };
                i += $mr;
            }
        };
    }
    groups_of!(ROWS);
    groups_of!(6);
    groups_of!(3);
    groups_of!(2);
    groups_of!(1);
}
