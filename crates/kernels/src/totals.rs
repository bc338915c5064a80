//! Partials merged in block order, and the end of attention.

use crate::activations::Stored;
use crate::block::Partial;
use crate::isa::dispatch;
use crate::lanes::{LANES, Lanes};

dispatch! {
    /// Adds a later partial to a running total, row by row.
    ///
    /// `m' = max(m, mᵖ)`, and both sides are scaled by `2^(their max − m')` (Milakov and
    /// Gimelshein 2018, online normalizer calculation for softmax).
    ///
    /// # Safety
    /// Both have the same size, rows of a multiple of 16.
    pub(crate) unsafe fn merge => merge_body(total: &mut Partial<'_>, other: &Partial<'_>)
}

#[inline(always)]
unsafe fn merge_body<L: Lanes>(total: &mut Partial<'_>, other: &Partial<'_>) {
    let dim = total.out.len() / total.max.len();
    for i in 0..total.max.len() {
        let (mine, theirs) = (total.max[i], other.max[i]);
        if theirs == f32::NEG_INFINITY {
            continue;
        }
        let top = if theirs > mine { theirs } else { mine };
        // SAFETY: row `i` of both has `dim` elements.
        unsafe {
            let (mine, theirs) = (scale::<L>(mine - top), scale::<L>(theirs - top));
            let (out, part) = (total.out.as_mut_ptr(), other.out.as_ptr());
            for d in (i * dim..(i + 1) * dim).step_by(LANES) {
                let scaled = L::mul(L::load(out.add(d)), L::splat(mine));
                L::store(out.add(d), L::fma(L::load(part.add(d)), L::splat(theirs), scaled));
            }
            total.sum[i] = other.sum[i] * theirs + total.sum[i] * mine;
        }
        total.max[i] = top;
    }
}

/// `2^x` for `x ≤ 0`; 0 below −125, where [`Lanes::exp2`] ends.
#[inline(always)]
unsafe fn scale<L: Lanes>(x: f32) -> f32 {
    if x < -125.0 {
        return 0.0;
    }
    // SAFETY: lane arithmetic only.
    unsafe { L::to_array(L::exp2(L::splat(x)))[0] }
}

dispatch! {
    /// Writes `out · 1/sum` of row `i`.
    ///
    /// # Safety
    /// `to` has as many writable elements as a row of `total`, a multiple of 16.
    pub(crate) unsafe fn store_row<T: Stored> => store_row_body(
        total: &Partial<'_>, i: usize, to: *mut T,
    )
}

#[inline(always)]
unsafe fn store_row_body<L: Lanes, T: Stored>(total: &Partial<'_>, i: usize, to: *mut T) {
    let dim = total.out.len() / total.max.len();
    // SAFETY: row `i` and `to` have `dim` elements.
    unsafe {
        let inverse = L::splat(1.0 / total.sum[i]);
        for d in (0..dim).step_by(LANES) {
            let v = L::load(total.out.as_ptr().add(i * dim + d));
            T::store::<L>(to.add(d), L::mul(v, inverse));
        }
    }
}
