//! The one micro-kernel: `C[m][16·NR] (+)= A[m][2·pairs] · B`, B packed by [`Elem`] pairs.
//!
//! Linear layers, Q·Kᵀ and P·V all run on it; they differ only in strides. Each element of C is
//! one accumulator that takes k in order, so its bits do not depend on how rows are grouped.

use crate::elem::Elem;
use crate::lanes::{LANES, Lanes};

/// Operand strides of one call, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Strides {
    /// Between rows of A.
    pub a: usize,
    /// Between k pairs of B.
    pub pair: usize,
    /// Between column tiles of B.
    pub tile: usize,
    /// Between rows of C.
    pub c: usize,
}

/// `MR` rows by `NR` tiles of sixteen columns.
#[inline(always)]
unsafe fn tile<L: Lanes, E: Elem, const MR: usize, const NR: usize>(
    a: *const f32,
    b: *const E,
    c: *mut f32,
    pairs: usize,
    s: Strides,
    accumulate: bool,
) {
    // SAFETY: the caller of `rows` gives A with `MR` rows of `2·pairs` elements, B with `pairs`
    // pairs in each of `NR` tiles, and C with `MR` rows of `16·NR` elements.
    unsafe {
        let mut acc = [[L::splat(0.0); NR]; MR];
        if accumulate {
            for (i, row) in acc.iter_mut().enumerate() {
                for (j, v) in row.iter_mut().enumerate() {
                    *v = L::load(c.add(i * s.c + j * LANES));
                }
            }
        }
        for p in 0..pairs {
            let mut even = [L::splat(0.0); NR];
            let mut odd = [L::splat(0.0); NR];
            for j in 0..NR {
                (even[j], odd[j]) = E::load_pair::<L>(b.add(p * s.pair + j * s.tile));
            }
            for (i, row) in acc.iter_mut().enumerate() {
                let at = a.add(i * s.a + 2 * p);
                let (x0, x1) = (L::splat(*at), L::splat(*at.add(1)));
                for (j, v) in row.iter_mut().enumerate() {
                    *v = L::fma(x0, even[j], *v);
                    *v = L::fma(x1, odd[j], *v);
                }
            }
        }
        for (i, row) in acc.iter().enumerate() {
            for (j, v) in row.iter().enumerate() {
                L::store(c.add(i * s.c + j * LANES), *v);
            }
        }
    }
}

/// Any number of rows by `NR` column tiles, in groups of 12, 6, 3, 2 and 1 rows.
///
/// # Safety
/// A has `m` rows of `2·pairs` readable elements, B has `pairs` pairs in each of `NR` tiles, C
/// has `m` rows of `16·NR` writable elements (readable too when `accumulate`), all at the given
/// strides; C overlaps neither A nor B; the CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn rows<L: Lanes, E: Elem, const NR: usize>(
    a: *const f32,
    m: usize,
    b: *const E,
    c: *mut f32,
    pairs: usize,
    s: Strides,
    accumulate: bool,
) {
    let mut i = 0;
    macro_rules! groups_of {
        ($mr:literal) => {
            while m - i >= $mr {
                // SAFETY: rows `i..i + $mr` exist; the rest is this function's contract.
                unsafe {
                    let (a, c) = (a.add(i * s.a), c.add(i * s.c));
                    tile::<L, E, $mr, NR>(a, b, c, pairs, s, accumulate);
                }
                i += $mr;
            }
        };
    }
    groups_of!(12);
    groups_of!(6);
    groups_of!(3);
    groups_of!(2);
    groups_of!(1);
}
