//! Products with 4- and 8-bit weights against plain f64 over the weights the file means.

use matkv_kernels::{
    Isa, QUANT_BLOCK, QuantKind, QuantMatrix, QuantRows, quant_gemm, reference, team,
};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const KINDS: [QuantKind; 3] = [QuantKind::Q4_0, QuantKind::Q4_1, QuantKind::Q8_0];

fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

fn vector(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

fn half(bits: u16) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3ff));
    let size = match exponent {
        0 => mantissa * 2f32.powi(-24),
        e => (1.0 + mantissa / 1024.0) * 2f32.powi(e - 15),
    };
    if bits & 0x8000 == 0 { size } else { -size }
}

/// Bytes of a file's rows, and what GGUF says they mean.
fn weights(r: &mut StdRng, kind: QuantKind, n: usize, k: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut dense) = (Vec::new(), Vec::new());
    for _ in 0..n * k / QUANT_BLOCK {
        // Scales between 2⁻²⁴ and 2, subnormal ones too, of either sign.
        let mut scale = || (r.random_range(0u16..16 << 10)) | r.random_range(0u16..2) << 15;
        let (d, m) = (scale(), scale());
        bytes.extend(d.to_le_bytes());
        if kind == QuantKind::Q4_1 {
            bytes.extend(m.to_le_bytes());
        }
        let codes: Vec<u8> =
            (0..if kind == QuantKind::Q8_0 { 32 } else { 16 }).map(|_| r.random()).collect();
        dense.extend((0..QUANT_BLOCK).map(|i| match kind {
            QuantKind::Q8_0 => half(d) * f32::from(codes[i] as i8),
            QuantKind::Q4_1 => half(d) * f32::from(codes[i % 16] >> (i / 16 * 4) & 15) + half(m),
            QuantKind::Q4_0 => half(d) * (f32::from(codes[i % 16] >> (i / 16 * 4) & 15) - 8.0),
        }));
        bytes.extend(codes);
    }
    (bytes, dense)
}

fn product(isa: Isa, x: &[f32], w: &QuantMatrix) -> Vec<f32> {
    let mut rows = QuantRows::default();
    rows.quantize(isa, x, w.k());
    let mut c = vec![f32::NAN; rows.rows() * w.padded_n()];
    quant_gemm(isa, &rows, w, &mut c);
    c
}

fn most(v: &[f32]) -> f64 {
    v.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn products_match_f64_on_every_isa(
        seed in any::<u64>(), kind in 0usize..3, m in 1usize..12, n in 1usize..90,
        blocks in 1usize..9,
    ) {
        let (mut r, k) = (rng(seed), blocks * QUANT_BLOCK);
        let (bytes, dense) = weights(&mut r, KINDS[kind], n, k);
        // One large value a row: what shares a block with it keeps fifteen bits of it.
        let mut x = vector(&mut r, m * k);
        for row in x.chunks_exact_mut(k) {
            row[r.random_range(0..k)] *= 300.0;
        }
        let w = QuantMatrix::pack_stacked(&[(&bytes, n)], KINDS[kind], k);
        let exact = reference::matmul(&x, &dense, k);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let c = product(isa, &x, &w);
            for i in 0..m {
                for j in 0..n {
                    // Each x is off by half a step, 1/65,278 of its block's largest; f32 rounds the
                    // scaled sums of blocks, 2⁻²³ of what they may be, and minimums cancel.
                    let bound: f64 = (0..blocks).map(|b| {
                        let x = &x[i * k + b * QUANT_BLOCK..][..QUANT_BLOCK];
                        let w = &dense[j * k + b * QUANT_BLOCK..][..QUANT_BLOCK];
                        let size: f64 = w.iter().map(|w| f64::from(w.abs())).sum();
                        let codes = 32.0 * 4.0 * most(x) * most(w).max(4.0);
                        most(x) * size / 65_278.0 + codes * 2f64.powi(-23) * blocks as f64
                    }).sum();
                    let d = (f64::from(c[i * w.padded_n() + j]) - exact[i * n + j]).abs();
                    prop_assert!(d <= bound, "{} at {i},{j}: {d} > {bound}", isa.name());
                }
                let padding = &c[i * w.padded_n() + n..(i + 1) * w.padded_n()];
                prop_assert!(padding.iter().all(|x| *x == 0.0));
            }
            let got = bits(&c);
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    #[test]
    fn rows_unpack_to_what_the_file_means(seed in any::<u64>(), kind in 0usize..3) {
        let mut r = rng(seed);
        let (n, k) = (37, 96);
        let (bytes, dense) = weights(&mut r, KINDS[kind], n, k);
        let (top, bottom) = bytes.split_at(bytes.len() / n * 20);
        let w = QuantMatrix::pack_stacked(&[(top, 20), (bottom, n - 20)], KINDS[kind], k);
        let mut row = vec![f32::NAN; k];
        for i in 0..n {
            w.unpack_row(i, &mut row);
            // Zeros may differ in sign.
            prop_assert_eq!(&row[..], &dense[i * k..(i + 1) * k], "row {}", i);
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours(seed in any::<u64>(), kind in 0usize..3) {
        let mut r = rng(seed);
        let (n, k, m) = (2100, 192, 11);
        let (bytes, _) = weights(&mut r, KINDS[kind], n, k);
        let w = QuantMatrix::pack_stacked(&[(&bytes, n)], KINDS[kind], k);
        let x = vector(&mut r, m * k);
        let isa = Isa::detect();
        let together = product(isa, &x, &w);
        let one = team::Team::new(1, "one").unwrap();
        prop_assert_eq!(bits(&together), bits(&one.install(|| product(isa, &x, &w))));
        for i in 0..m {
            let alone = product(isa, &x[i * k..(i + 1) * k], &w);
            let width = w.padded_n();
            prop_assert_eq!(bits(&alone), bits(&together[i * width..(i + 1) * width]), "{}", i);
        }
    }
}

#[test]
fn zeros_are_zeros() {
    let mut r = rng(1);
    let (bytes, _) = weights(&mut r, QuantKind::Q4_1, 32, 64);
    let w = QuantMatrix::pack_stacked(&[(&bytes, 32)], QuantKind::Q4_1, 64);
    for isa in Isa::available() {
        assert!(product(isa, &[0.0; 64], &w).iter().all(|x| *x == 0.0));
    }
}
