//! Values as integers and one factor.

use crate::lanes::{LANES, Lanes};

/// Values that reach less far become zeros: any largest integer divided by it is
/// still finite.
const AMAX_MIN: f32 = 1e-30;

/// What integers up to `max` are multiplied with, and what makes integers of values that reach as
/// far as `top`.
#[inline(always)]
pub(crate) fn factors(top: f32, max: f32) -> (f32, f32) {
    if top < AMAX_MIN { (0.0, 0.0) } else { (top / max, max / top) }
}

/// Largest integer that is `256 · high + low` of 8 bits with sign, and so is its opposite.
const HALVES_MAX: f32 = 127.0 * 256.0 + 127.0;

/// Writes `n` integers `q` and returns `f` with `f · q[i]` nearest to `x[i]`: the error is at most
/// `max |x| / 65,278`, and f32 rounding. They are halves of 8 bits, `[n / 4][high, low][4]`.
///
/// # Safety
/// `x` has `n` readable and `out` `2 · n` writable elements, `n` a multiple of 16; the CPU has the
/// features of `L`.
#[inline(always)]
pub(crate) unsafe fn quantize<L: Lanes>(x: *const f32, n: usize, out: *mut i8) -> f32 {
    // SAFETY: same contract.
    unsafe {
        let zero = L::splat(0.0);
        let mut top = zero;
        for i in (0..n).step_by(LANES) {
            let v = L::load(x.add(i));
            top = L::max(L::max(v, L::sub(zero, v)), top);
        }
        let (factor, inverse) = factors(L::max_lane(top), HALVES_MAX);
        let inverse = L::splat(inverse);
        for i in (0..n).step_by(LANES) {
            L::store_halves(out.add(2 * i), L::mul(L::load(x.add(i)), inverse));
        }
        factor
    }
}
