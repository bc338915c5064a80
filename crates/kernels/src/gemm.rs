//! Linear layers: `C = A · Wᵀ` with W packed once at load.

use rayon::prelude::*;

use crate::isa::{Isa, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::micro::{self, Strides};

/// Columns a task takes at once: two column tiles.
const PANEL: usize = 2 * LANES;
/// Rows a task takes at once; 96 rows of 1,536 f32 are 576 KiB, inside a 1 MiB L2.
const ROW_BLOCK: usize = 96;

/// A weight matrix `[n][k]` packed as `[n / 16][k / 2][2][16]` f32; n and k are padded with zeros.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    data: Vec<f32>,
}

impl PackedMatrix {
    /// Packs a row-major `[n][k]` matrix.
    ///
    /// # Panics
    /// If `weights` does not hold `n · k` elements or `k` is odd.
    pub fn pack(weights: &[f32], n: usize, k: usize) -> Self {
        Self::pack_stacked(&[(weights, n)], k)
    }

    /// Packs matrices of equal `k`, one below the other.
    ///
    /// # Panics
    /// If a part does not hold `n · k` elements or `k` is odd.
    pub fn pack_stacked(parts: &[(&[f32], usize)], k: usize) -> Self {
        assert!(k.is_multiple_of(2), "k = {k} must be even");
        let n: usize = parts.iter().map(|p| p.1).sum();
        let mut data = vec![0.0f32; n.next_multiple_of(PANEL) * k];
        let mut row = 0;
        for (weights, rows) in parts {
            assert_eq!(weights.len(), rows * k, "a weight part has the wrong size");
            for source in weights.chunks_exact(k) {
                let tile = row / LANES * LANES * k + row % LANES;
                for (i, &w) in source.iter().enumerate() {
                    data[tile + i * LANES] = w;
                }
                row += 1;
            }
        }
        Self { n, k, data }
    }

    /// Output columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Copies row `row` of the original matrix into `out` (`k` elements).
    ///
    /// # Panics
    /// If the row does not exist or `out` is not `k` long.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k);
        let tile = row / LANES * LANES * self.k + row % LANES;
        out.iter_mut().enumerate().for_each(|(i, x)| *x = self.data[tile + i * LANES]);
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.data.len() * 4
    }

    /// Width of an output row: n rounded up to whole panels.
    pub fn padded_n(&self) -> usize {
        self.n.next_multiple_of(PANEL)
    }
}

struct Task {
    a: *const f32,
    m: usize,
    b: *const f32,
    c: *mut f32,
    panels: usize,
    k: usize,
    ldc: usize,
}

// SAFETY: a task's pointers are used by one thread at a time: A and B are only read, and tasks
// write disjoint parts of C.
unsafe impl Send for Task {}
// SAFETY: as above.
unsafe impl Sync for Task {}

#[inline(always)]
unsafe fn run_body<L: Lanes>(t: &Task) {
    let s = Strides { a: t.k, pair: PANEL, tile: LANES * t.k, c: t.ldc };
    for panel in 0..t.panels {
        // SAFETY: `gemm` builds tasks inside the bounds of A, W and C.
        unsafe {
            let b = t.b.add(panel * PANEL * t.k);
            let c = t.c.add(panel * PANEL);
            micro::rows::<L, f32, 2>(t.a, t.m, b, c, t.k / 2, s, false);
        }
    }
}

dispatch! {
    /// Runs one task.
    unsafe fn run => run_body(t: &Task)
}

/// `c[m][padded_n] = a[m][k] · wᵀ`; columns past `n` are zero.
///
/// # Panics
/// If the slices do not have exactly these sizes.
pub fn gemm(isa: Isa, a: &[f32], w: &PackedMatrix, c: &mut [f32]) {
    assert!(a.len().is_multiple_of(w.k), "A must be whole rows of {}", w.k);
    let (m, ldc) = (a.len() / w.k, w.padded_n());
    assert_eq!(c.len(), m * ldc, "C must be {m} rows of {ldc}");
    let panels = ldc / PANEL;
    // Few rows: many panels a task, so that a task reads at least 256 KiB of weights.
    let per_task = (65_536 / (PANEL * w.k)).clamp(1, panels.div_ceil(4).max(1));
    let mut tasks = Vec::new();
    for row in (0..m).step_by(ROW_BLOCK) {
        for panel in (0..panels).step_by(per_task) {
            tasks.push(Task {
                a: a[row * w.k..].as_ptr(),
                m: ROW_BLOCK.min(m - row),
                b: w.data[panel * PANEL * w.k..].as_ptr(),
                c: c[row * ldc + panel * PANEL..].as_mut_ptr(),
                panels: per_task.min(panels - panel),
                k: w.k,
                ldc,
            });
        }
    }
    // SAFETY: tasks cover disjoint row and column ranges of C, all inside the checked slices.
    tasks.par_iter().for_each(|task| unsafe { run(isa, task) });
}
