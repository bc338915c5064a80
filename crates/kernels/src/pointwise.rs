//! Row-wise steps between matrix products.

use rayon::prelude::*;

use crate::isa::{Isa, dispatch};
use crate::lanes::{LANES, Lanes};

/// Rows one parallel task takes; fewer rows run on the calling thread.
const ROWS_PER_TASK: usize = 16;

fn for_each_row(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if out.len() <= width * ROWS_PER_TASK {
        out.chunks_exact_mut(width).enumerate().for_each(|(i, row)| f(i, row));
    } else {
        out.par_chunks_mut(width * ROWS_PER_TASK).enumerate().for_each(|(task, rows)| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                f(task * ROWS_PER_TASK + i, row);
            }
        });
    }
}

#[inline(always)]
unsafe fn rms_norm_body<L: Lanes>(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
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
            L::store(out.as_mut_ptr().add(i), L::mul(v, L::load(weight.as_ptr().add(i))));
        }
    }
}

dispatch! {
    unsafe fn rms_norm_row => rms_norm_body(
        x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32],
    )
}

/// Root-mean-square normalization of each row: `x / sqrt(mean(x²) + ε) · weight`.
///
/// # Panics
/// If the slices are not whole rows of `weight.len()`, a multiple of 16.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(width.is_multiple_of(LANES) && x.len().is_multiple_of(width) && x.len() == out.len());
    for_each_row(out, width, |i, row| {
        let source = &x[i * width..(i + 1) * width];
        // SAFETY: source, weight and row have the same length, a multiple of 16.
        unsafe { rms_norm_row(isa, source, weight, epsilon, row) }
    });
}

#[inline(always)]
unsafe fn silu_mul_body<L: Lanes>(gate_up: &[f32], out: &mut [f32]) {
    let width = out.len();
    // SAFETY: `silu_mul` checks that `gate_up` holds two rows of `width`, a multiple of 16.
    unsafe {
        let one = L::splat(1.0);
        for i in (0..width).step_by(LANES) {
            let gate = L::load(gate_up.as_ptr().add(i));
            let up = L::load(gate_up.as_ptr().add(width + i));
            // Beyond 87 e^x nears the end of f32; the sigmoid is 0 there to every digit.
            let minus_gate = L::sub(L::splat(0.0), L::max(gate, L::splat(-87.0)));
            let sigmoid = L::div(one, L::add(one, L::exp(minus_gate)));
            L::store(out.as_mut_ptr().add(i), L::mul(L::mul(gate, sigmoid), up));
        }
    }
}

dispatch! {
    unsafe fn silu_mul_row => silu_mul_body(gate_up: &[f32], out: &mut [f32])
}

/// `out = silu(gate) · up` for rows laid out `[gate][up]`, `width` each.
///
/// # Panics
/// If the slices do not fit each other or `width` is not a multiple of 16.
pub fn silu_mul(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(width.is_multiple_of(LANES) && gate_up.len() == 2 * out.len());
    assert!(out.len().is_multiple_of(width));
    for_each_row(out, width, |i, row| {
        let source = &gate_up[2 * i * width..2 * (i + 1) * width];
        // SAFETY: source is twice as long as row, whose length is a multiple of 16.
        unsafe { silu_mul_row(isa, source, row) }
    });
}

/// `x += y`.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    x.iter_mut().zip(y).for_each(|(a, b)| *a += b);
}
