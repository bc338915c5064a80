//! Linear layers: `C (+)= A · Wᵀ`.

use crate::activations::{Activations, ActivationsMut, Stored};
use crate::isa::{Isa, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Nothing, Operands, Strides};
use crate::packed::{PANEL, Packed, PackedMatrix};
use crate::pointwise::silu_mul;
use crate::product::{DotBf16, Exact, NO_ROWS, Product};
use crate::team;

/// Rows a task takes at once; 96 rows of 1,536 f32 are 576 KiB, inside a 1 MiB L2.
const ROW_BLOCK: usize = 96;
/// Bytes of weights a task reads at least, so that few rows do not make many small tasks.
const TASK_BYTES: usize = 256 << 10;

/// Some rows by some columns of one product.
struct Task<P: Product<Row = ()>> {
    a: *const P::A,
    m: usize,
    k: usize,
    /// First panel of W.
    b: *const P::B,
    c: *mut f32,
    columns: usize,
    ldc: usize,
    accumulate: bool,
}

// SAFETY: a task's pointers are used by one thread at a time: A and B are only read, and tasks
// write disjoint parts of C.
unsafe impl<P: Product<Row = ()>> Send for Task<P> {}
// SAFETY: as above.
unsafe impl<P: Product<Row = ()>> Sync for Task<P> {}

#[inline(always)]
unsafe fn run_body<L: Lanes, P: Product<Row = ()>>(t: &Task<P>) {
    for column in (0..t.columns).step_by(PANEL) {
        // SAFETY: tasks lie inside the bounds of A, W and C; a panel starts every `PANEL` columns.
        unsafe {
            let operands = Operands::<P> {
                a: t.a,
                m: t.m,
                b: t.b.add(column * t.k),
                steps: t.k / 2,
                c: t.c.add(column),
                strides: Strides { a: t.k, step: 2 * PANEL, tile: PANEL, c: t.ldc },
                accumulate: t.accumulate,
                rows: NO_ROWS,
                ahead: std::ptr::null(),
            };
            if t.columns - column > LANES {
                micro::rows::<L, P, Nothing, 2>(&operands);
            } else {
                micro::rows::<L, P, Nothing, 1>(&operands);
            }
        }
    }
}

dispatch! {
    /// Runs one task.
    ///
    /// # Safety
    /// A has `m` rows of `k`, W whole panels for `columns` columns, C `m` rows of `columns` at
    /// stride `ldc`, nobody else's.
    unsafe fn run<P: Product<Row = ()>> => run_body(t: &Task<P>)
}

/// Row blocks and column ranges that cover `m` rows by `columns`: first row, rows, first column,
/// columns.
fn tiles(m: usize, columns: usize, panel_bytes: usize) -> Vec<(usize, usize, usize, usize)> {
    let panels = columns.div_ceil(PANEL);
    let per_task = (TASK_BYTES / panel_bytes).clamp(1, panels.div_ceil(4).max(1)) * PANEL;
    let mut list = Vec::new();
    for row in (0..m).step_by(ROW_BLOCK) {
        for column in (0..columns).step_by(per_task) {
            list.push((row, ROW_BLOCK.min(m - row), column, per_task.min(columns - column)));
        }
    }
    list
}

fn product<P: Product<Row = ()>>(
    isa: Isa,
    a: &[P::A],
    w: (&PackedMatrix, &[P::B]),
    c: &mut [f32],
    accumulate: bool,
) {
    let (k, ldc) = (w.0.k(), w.0.padded_n());
    assert!(a.len().is_multiple_of(k), "A must be whole rows of {k}");
    let m = a.len() / k;
    assert_eq!(c.len(), m * ldc, "C must be {m} rows of {ldc}");
    let tasks: Vec<Task<P>> = tiles(m, ldc, PANEL * k * size_of::<P::B>())
        .into_iter()
        .map(|(row, m, column, columns)| Task {
            a: a[row * k..].as_ptr(),
            m,
            k,
            b: w.1[column * k..].as_ptr(),
            c: c[row * ldc + column..].as_mut_ptr(),
            columns,
            ldc,
            accumulate,
        })
        .collect();
    // SAFETY: tasks cover disjoint row and column ranges of C, all inside the checked slices.
    team::for_each(tasks.len(), |i| unsafe { run(isa, &tasks[i]) });
}

fn either(isa: Isa, a: &Activations, w: &PackedMatrix, c: &mut [f32], accumulate: bool) {
    match (a, &w.data) {
        (Activations::F32(a), Packed::F32(data)) => {
            product::<Exact<f32>>(isa, a, (w, data), c, accumulate);
        }
        (Activations::Bf16(a), Packed::Bf16(data)) => {
            product::<DotBf16>(isa, a, (w, data), c, accumulate);
        }
        _ => panic!("activations and weights of different precisions"),
    }
}

/// `c[m][padded_n] = a[m][k] · wᵀ`; columns past `n` are zero.
///
/// # Panics
/// If the sizes are not exactly these or the precisions differ.
pub fn gemm(isa: Isa, a: &Activations, w: &PackedMatrix, c: &mut [f32]) {
    either(isa, a, w, c, false);
}

/// `c[m][n] += a[m][k] · wᵀ`, each product summed up before it is added; n is a multiple of 16.
///
/// # Panics
/// If the sizes are not exactly these or the precisions differ.
pub fn gemm_add(isa: Isa, a: &Activations, w: &PackedMatrix, c: &mut [f32]) {
    assert_eq!(w.n(), w.padded_n(), "columns must be whole tiles");
    either(isa, a, w, c, true);
}

/// The same rows and columns of two products, and where their gated product goes.
struct GatedTask<P: Product<Row = ()>, T> {
    gate: Task<P>,
    up: *const P::B,
    out: *mut T,
    width: usize,
}

// SAFETY: as for `Task`; tasks write disjoint parts of the output.
unsafe impl<P: Product<Row = ()>, T> Send for GatedTask<P, T> {}
// SAFETY: as above.
unsafe impl<P: Product<Row = ()>, T> Sync for GatedTask<P, T> {}

/// A product whose output has the type of its input.
trait Gated: Product<A: Stored, Row = ()> {}
impl Gated for Exact<f32> {}
impl Gated for DotBf16 {}

#[inline(always)]
unsafe fn run_gated_body<L: Lanes, P: Gated>(t: &GatedTask<P, P::A>) {
    let mut both = [0.0f32; ROW_BLOCK * 2 * PANEL];
    let g = &t.gate;
    for column in (0..g.columns).step_by(PANEL) {
        let columns = PANEL.min(g.columns - column);
        for (weights, at) in [(g.b, 0), (t.up, PANEL)] {
            // SAFETY: the panel at `column` exists in both matrices, and `both` has a row of two
            // panels for each of at most `ROW_BLOCK` rows.
            unsafe {
                run_body::<L, P>(&Task {
                    a: g.a,
                    m: g.m,
                    k: g.k,
                    b: weights.add(column * g.k),
                    c: both.as_mut_ptr().add(at),
                    columns,
                    ldc: 2 * PANEL,
                    accumulate: false,
                });
            }
        }
        for row in 0..g.m {
            // SAFETY: `columns` is a multiple of 16, and `out` has rows of `width`.
            unsafe {
                let both = both.as_ptr().add(row * 2 * PANEL);
                let out = t.out.add(row * t.width + column);
                for i in (0..columns).step_by(LANES) {
                    let (gate, up) = (L::load(both.add(i)), L::load(both.add(PANEL + i)));
                    P::A::store::<L>(out.add(i), silu_mul::<L>(gate, up));
                }
            }
        }
    }
}

dispatch! {
    /// Runs one gated task.
    ///
    /// # Safety
    /// As for [`run`], with W twice, and `out` in the place of C.
    unsafe fn run_gated<P: Gated> => run_gated_body(t: &GatedTask<P, P::A>)
}

fn gated_product<P: Gated>(
    isa: Isa,
    a: &[P::A],
    (k, n): (usize, usize),
    (gate, up): (&[P::B], &[P::B]),
    out: &mut [P::A],
) {
    assert!(a.len().is_multiple_of(k), "A must be whole rows of {k}");
    let m = a.len() / k;
    assert_eq!(out.len(), m * n, "the output must be {m} rows of {n}");
    let tasks: Vec<GatedTask<P, P::A>> = tiles(m, n, 2 * PANEL * k * size_of::<P::B>())
        .into_iter()
        .map(|(row, m, column, columns)| GatedTask {
            gate: Task {
                a: a[row * k..].as_ptr(),
                m,
                k,
                b: gate[column * k..].as_ptr(),
                c: std::ptr::null_mut(),
                columns,
                ldc: 0,
                accumulate: false,
            },
            up: up[column * k..].as_ptr(),
            out: out[row * n + column..].as_mut_ptr(),
            width: n,
        })
        .collect();
    // SAFETY: tasks cover disjoint row and column ranges of the output, all inside the checked
    // slices.
    team::for_each(tasks.len(), |i| unsafe { run_gated(isa, &tasks[i]) });
}

/// `out[m][n] = silu(a · gateᵀ) · (a · upᵀ)`, element by element, without either product ever
/// being written as a whole; n is a multiple of 16.
///
/// # Panics
/// If the sizes are not exactly these or the precisions differ.
pub fn gemm_gated(
    isa: Isa,
    a: &Activations,
    gate: &PackedMatrix,
    up: &PackedMatrix,
    out: &mut Activations,
) {
    let (k, n) = (gate.k(), gate.n());
    assert!((up.k(), up.n()) == (k, n) && n == gate.padded_n(), "gate and up must be alike");
    match (a, &gate.data, &up.data, out.as_mut()) {
        (Activations::F32(a), Packed::F32(gate), Packed::F32(up), ActivationsMut::F32(out)) => {
            gated_product::<Exact<f32>>(isa, a, (k, n), (gate, up), out)
        }
        (Activations::Bf16(a), Packed::Bf16(gate), Packed::Bf16(up), ActivationsMut::Bf16(out)) => {
            gated_product::<DotBf16>(isa, a, (k, n), (gate, up), out)
        }
        _ => panic!("activations and weights of different precisions"),
    }
}
