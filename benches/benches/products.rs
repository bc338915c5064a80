//! Speed of the matrix products against the peak: `cargo bench --bench products`.

use std::time::Instant;

use matkv_kernels::{Activations, Isa, PackedMatrix, gemm, peak_flops, team};
use matkv_types::Precision;

/// (n, k) of SmolLM2-135M: query, key and value; output; gate and up; down.
const SHAPES: [(usize, usize); 4] = [(960, 576), (576, 576), (3072, 576), (576, 1536)];

/// Values in −1…1 without a pattern that sums could profit from.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect()
}

fn main() {
    let isa = Isa::detect();
    println!("{}, {} threads", isa.name(), team::threads());
    for precision in Precision::ALL {
        let peak = peak_flops(isa, precision);
        println!("{precision}: peak {:.0} GFLOP/s", peak / 1e9);
        for m in [1, 64, 512, 1024, 4096] {
            for (n, k) in SHAPES {
                let a = Activations::rounded(precision, &values(m * k));
                let w = PackedMatrix::pack(&values(n * k), n, k, precision);
                let mut c = vec![0.0; m * w.padded_n()];
                let work = (2 * m * n * k) as f64;
                let runs = (2e10 / work).clamp(3.0, 200.0) as usize;
                let mut best = f64::INFINITY;
                for _ in 0..runs {
                    let started = Instant::now();
                    gemm(isa, &a, &w, &mut c);
                    best = best.min(started.elapsed().as_secs_f64());
                }
                let share = 100.0 * work / best / peak;
                println!("  m {m} n {n} k {k}: {:.0} GFLOP/s, {share:.0} %", work / best / 1e9);
            }
        }
    }
}
