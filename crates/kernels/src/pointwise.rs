//! Row-wise steps between matrix products.

use crate::activations::{Activations, ActivationsMut, Stored};
use crate::isa::{Isa, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::team;

/// Rows one parallel task takes; fewer rows run on the calling thread.
const ROWS_PER_TASK: usize = 16;

fn for_each_row<T: Send>(out: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if out.len() <= width * ROWS_PER_TASK {
        out.chunks_exact_mut(width).enumerate().for_each(|(i, row)| f(i, row));
    } else {
        team::for_each_part(out, width * ROWS_PER_TASK, |task, rows| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                f(task * ROWS_PER_TASK + i, row);
            }
        });
    }
}

#[inline(always)]
unsafe fn rms_norm_body<L: Lanes, T: Stored>(
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [T],
) {
    // SAFETY: every access stays inside slices whose equal length `rms_norm` has checked to be a
    // multiple of the lane count.
    unsafe {
        let mut squares = L::splat(0.0);
        for i in (0..x.len()).step_by(LANES) {
            let v = L::load(x.as_ptr().add(i));
            squares = L::fma(v, v, squares);
        }
        let mean = L::sum(squares) / x.len() as f32;
        let scale = L::splat(1.0 / (mean + epsilon).sqrt());
        for i in (0..x.len()).step_by(LANES) {
            let v = L::mul(L::load(x.as_ptr().add(i)), scale);
            let v = L::mul(v, L::load(weight.as_ptr().add(i)));
            T::store::<L>(out.as_mut_ptr().add(i), v);
        }
    }
}

dispatch! {
    unsafe fn rms_norm_row<T: Stored> => rms_norm_body(
        x: &[f32], weight: &[f32], epsilon: f32, out: &mut [T],
    )
}

fn rms_norm_rows<T: Stored>(isa: Isa, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [T]) {
    let width = weight.len();
    assert!(width.is_multiple_of(LANES) && x.len().is_multiple_of(width) && x.len() == out.len());
    for_each_row(out, width, |i, row| {
        let source = &x[i * width..(i + 1) * width];
        // SAFETY: source, weight and row have the same length, a multiple of 16.
        unsafe { rms_norm_row(isa, source, weight, epsilon, row) }
    });
}

/// Root-mean-square normalization of each row: `x / sqrt(mean(x²) + ε) · weight`.
///
/// # Panics
/// If the slices are not whole rows of `weight.len()`, a multiple of 16.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], epsilon: f32, out: &mut Activations) {
    match out.as_mut() {
        ActivationsMut::F32(out) => rms_norm_rows(isa, x, weight, epsilon, out),
        ActivationsMut::Bf16(out) => rms_norm_rows(isa, x, weight, epsilon, out),
    }
}

#[inline(always)]
unsafe fn layer_norm_body<L: Lanes>(row: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32) {
    let (n, x) = (row.len() as f32, row.as_mut_ptr());
    // SAFETY: every access stays inside slices whose equal length `layer_norm` has checked to be a
    // multiple of the lane count.
    unsafe {
        let (mut sum, mut squares) = (L::splat(0.0), L::splat(0.0));
        for i in (0..row.len()).step_by(LANES) {
            sum = L::add(sum, L::load(x.add(i)));
        }
        let mean = L::splat(L::sum(sum) / n);
        for i in (0..row.len()).step_by(LANES) {
            let v = L::sub(L::load(x.add(i)), mean);
            squares = L::fma(v, v, squares);
        }
        let scale = L::splat(1.0 / (L::sum(squares) / n + epsilon).sqrt());
        for i in (0..row.len()).step_by(LANES) {
            let v = L::mul(L::sub(L::load(x.add(i)), mean), scale);
            let v = L::fma(v, L::load(weight.as_ptr().add(i)), L::load(bias.as_ptr().add(i)));
            L::store(x.add(i), v);
        }
    }
}

dispatch! {
    unsafe fn layer_norm_row => layer_norm_body(
        row: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32,
    )
}

/// Normalization of each row in place: `(x − mean) / sqrt(variance + ε) · weight + bias`.
///
/// # Panics
/// If the slices are not whole rows of `weight.len()`, a multiple of 16.
pub fn layer_norm(isa: Isa, x: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32) {
    let width = weight.len();
    assert!(width.is_multiple_of(LANES) && x.len().is_multiple_of(width) && bias.len() == width);
    // SAFETY: row, weight and bias have the same length, a multiple of 16.
    for_each_row(x, width, |_, row| unsafe { layer_norm_row(isa, row, weight, bias, epsilon) });
}

/// `x · Φ(x) = x/2 · (1 + erf(x/√2))`, erf as in Abramowitz and Stegun 7.1.26: off by at most
/// 1.5e-7, and f32 rounding.
#[inline(always)]
unsafe fn gelu_body<L: Lanes>(x: &mut [f32]) {
    // SAFETY: the length is a multiple of the lane count, as `gelu` has checked.
    unsafe {
        for i in (0..x.len()).step_by(LANES) {
            let at = x.as_mut_ptr().add(i);
            let v = L::load(at);
            let z = L::mul(v, L::splat(std::f32::consts::FRAC_1_SQRT_2));
            let z = L::max(z, L::sub(L::splat(0.0), z));
            let t = L::div(L::splat(1.0), L::fma(z, L::splat(0.327_591_1), L::splat(1.0)));
            let mut p = L::splat(1.061_405_4);
            for c in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
                p = L::fma(p, t, L::splat(c));
            }
            // 1 − erf |z|; beyond 86 the exponential function ends, long after this is 0.
            let e = L::exp(L::sub(L::splat(0.0), L::mul(z, z)));
            let tail = L::mul(L::mul(p, t), e);
            // Φ is tail/2 on the left and 1 − tail/2 on the right, so that x · Φ is
            // max(x, 0) − |x| · tail/2.
            let magnitude = L::max(v, L::sub(L::splat(0.0), v));
            let half = L::mul(magnitude, L::mul(tail, L::splat(-0.5)));
            L::store(at, L::add(L::max(v, L::splat(0.0)), half));
        }
    }
}

dispatch! {
    unsafe fn gelu_some => gelu_body(x: &mut [f32])
}

/// The Gaussian error linear unit of each element, in place.
///
/// # Panics
/// If there are not whole rows of `width`, a multiple of 16.
pub fn gelu(isa: Isa, x: &mut [f32], width: usize) {
    assert!(width.is_multiple_of(LANES) && x.len().is_multiple_of(width));
    // SAFETY: a row has a multiple of 16 elements.
    for_each_row(x, width, |_, row| unsafe { gelu_some(isa, row) });
}

/// `silu(gate) · up`, `silu(x) = x / (1 + e^−x)`.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn silu_mul<L: Lanes>(gate: L::V, up: L::V) -> L::V {
    // SAFETY: lane arithmetic only.
    unsafe {
        let one = L::splat(1.0);
        // Beyond 87 e^x nears the end of f32; the sigmoid is 0 there to every digit.
        let minus_gate = L::sub(L::splat(0.0), L::max(gate, L::splat(-87.0)));
        let sigmoid = L::div(one, L::add(one, L::exp(minus_gate)));
        L::mul(L::mul(gate, sigmoid), up)
    }
}
