//! Rows of f32 as 16-bit integers and one factor.

use crate::lanes::{LANES, Lanes};

/// Largest integer.
const MAX: f32 = 32_767.0;
/// Rows whose largest magnitude is below this become zeros: `MAX` divided by it is still finite.
const AMAX_MIN: f32 = 1e-30;

/// What integers are multiplied with, and what makes integers of values whose largest magnitude is
/// `top`.
#[inline(always)]
pub(crate) fn factors(top: f32) -> (f32, f32) {
    if top < AMAX_MIN { (0.0, 0.0) } else { (top / MAX, MAX / top) }
}

/// Writes `n` integers `q` and returns `f` with `f · q[i]` nearest to `x[i]`: the error is at
/// most `max |x| / 65,534`, and f32 rounding.
///
/// # Safety
/// `x` has `n` readable and `out` `n` writable elements, `n` a multiple of 16; the CPU has the
/// features of `L`.
#[inline(always)]
pub(crate) unsafe fn quantize<L: Lanes>(x: *const f32, n: usize, out: *mut i16) -> f32 {
    // SAFETY: same contract.
    unsafe {
        let zero = L::splat(0.0);
        let mut top = zero;
        for i in (0..n).step_by(LANES) {
            let v = L::load(x.add(i));
            top = L::max(L::max(v, L::sub(zero, v)), top);
        }
        let (factor, inverse) = factors(L::max_lane(top));
        let inverse = L::splat(inverse);
        for i in (0..n).step_by(LANES) {
            L::store_i16(out.add(i), L::mul(L::load(x.add(i)), inverse));
        }
        factor
    }
}
