//! Products of few rows with 4- and 8-bit weights of SmolLM2-135M, every layer's in turn:
//! `cargo bench --bench quant`.

use std::time::Instant;

use matkv_kernels::{Isa, QuantKind, QuantMatrix, QuantRows, quant_gemm, team};

/// (n, k): query, key and value; output; gate and up; down.
const SHAPES: [(usize, usize); 4] = [(960, 576), (576, 576), (3072, 576), (576, 1536)];
const LAYERS: usize = 30;

fn matrix(kind: QuantKind, n: usize, k: usize) -> QuantMatrix {
    let mut state = 0x9e37_79b9u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let blocks = (0..n * k / 32).flat_map(|_| {
        // A scale of 0.01 or so, whatever the codes are.
        let mut block: Vec<u8> = (0..kind.block_bytes()).map(|_| next()).collect();
        block[..2].copy_from_slice(&[0x1f, 0x21]);
        block[2..4].copy_from_slice(&[0x1f, 0xa1]);
        block
    });
    let bytes: Vec<u8> = blocks.collect();
    QuantMatrix::pack_stacked(&[(&bytes, n)], kind, k)
}

fn main() {
    let isa = Isa::detect();
    println!("{}, {} threads", isa.name(), team::threads());
    for kind in [QuantKind::Q4_1, QuantKind::Q8_0] {
        let layers: Vec<Vec<QuantMatrix>> = (0..LAYERS)
            .map(|_| SHAPES.iter().map(|&(n, k)| matrix(kind, n, k)).collect())
            .collect();
        let bytes: usize = layers.iter().flatten().map(|w| w.as_bytes().len()).sum();
        for m in [1, 2, 4, 8, 16] {
            let mut inputs = Vec::new();
            for &(n, k) in &SHAPES {
                let x: Vec<f32> =
                    (0..m * k).map(|i| (i * 7919 % 1009) as f32 / 504.0 - 1.0).collect();
                let mut rows = QuantRows::default();
                rows.quantize(isa, &x, k);
                inputs.push((rows, vec![0.0; m * n]));
            }
            let mut all = Vec::new();
            for _ in 0..30 {
                let started = Instant::now();
                for layer in &layers {
                    for (w, (rows, out)) in layer.iter().zip(&mut inputs) {
                        quant_gemm(isa, rows, w, out);
                    }
                }
                all.push(started.elapsed().as_secs_f64());
            }
            all.sort_by(f64::total_cmp);
            let median = all[all.len() / 2];
            println!(
                "  {kind:?}, {m} rows: {:.2} ms a pass, {:.1} GB/s, {:.0} GOP/s",
                median * 1e3,
                bytes as f64 / median / 1e9,
                (m * LAYERS * SHAPES.iter().map(|(n, k)| 2 * n * k).sum::<usize>()) as f64
                    / median
                    / 1e9
            );
        }
    }
}
