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
