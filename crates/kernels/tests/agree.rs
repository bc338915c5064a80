//! Every instruction set gives the same bits, and those are close to plain f64.

mod common;

use common::{Case, Seg, poison, rng, section, vector};
use matkv_kernels::{
    Isa, PackedMatrix, RopeStyle, RotaryEmbedding, gemm, reference, rms_norm, silu_mul,
};
use matkv_types::{KvDtype, KvShape};
use proptest::prelude::*;
use rand::Rng;

/// f32 accumulation over at most a few thousand terms of magnitude ≤ 1, averaged by softmax:
/// 64-term dot products err by about 64 · 2⁻²⁴ = 4e-6, exp by 2e-7, and the average keeps that.
const TOLERANCE: f64 = 1e-5;

fn rope(dim: usize) -> RotaryEmbedding {
    RotaryEmbedding::plain(dim, 10_000.0, RopeStyle::Interleaved)
}

const DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8];

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Segments of random length at random tile phase, the last one holding the query rows.
fn random_case(seed: u64, dtype: KvDtype, group: usize, kv_heads: usize, dim: usize) -> Case {
    let mut r = rng(seed);
    let shape = KvShape { layers: 2, kv_heads, head_dim: dim };
    let mut position = 0;
    let mut segs = Vec::new();
    let count = r.random_range(1..5);
    for i in 0..=count {
        let rows = r.random_range(1..400);
        let (before, after) = (r.random_range(0..70), r.random_range(0..20));
        let (mut bytes, layout) = section(&mut r, shape, dtype, before + rows + after);
        poison(&mut bytes, &layout, before..before + rows);
        let shift = if i == count { 0 } else { r.random_range(0..3000) };
        segs.push(Seg { bytes, layout, first_row: before, rows, position, shift });
        position += rows;
    }
    let rows = r.random_range(1..=segs[count].rows.min(50));
    let positions = (position - rows..position).collect::<Vec<_>>();
    let heads = group * kv_heads;
    let q = vector(&mut r, rows * heads * dim);
    Case { heads, layer: 1, rope: rope(dim), segs, positions, q }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn attention_matches_f64_on_every_isa(
        seed in any::<u64>(), dtype in 0usize..3, group in 1usize..5, kv in 1usize..3,
        half in 1usize..4,
    ) {
        let case = random_case(seed, DTYPES[dtype], group, kv, half * 32);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let error = case.error(isa);
            prop_assert!(error < TOLERANCE, "{}: error {error}", isa.name());
            let got = bits(&case.run(isa));
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    #[test]
    fn gemm_matches_f64_on_every_isa(
        seed in any::<u64>(), m in 1usize..40, n in 1usize..90, half_k in 1usize..100,
    ) {
        let mut r = rng(seed);
        let k = 2 * half_k;
        let (a, w) = (vector(&mut r, m * k), vector(&mut r, n * k));
        let packed = PackedMatrix::pack(&w, n, k);
        let exact = reference::matmul(&a, &w, k);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut c = vec![f32::NAN; m * packed.padded_n()];
            gemm(isa, &a, &packed, &mut c);
            for i in 0..m {
                for j in 0..n {
                    let d = (f64::from(c[i * packed.padded_n() + j]) - exact[i * n + j]).abs();
                    // k terms of magnitude ≤ 1, each rounding within 2⁻²⁴ of a partial sum ≤ k.
                    prop_assert!(d <= (k * k) as f64 * 6e-8, "{} at {i},{j}: {d}", isa.name());
                }
            }
            let got = bits(&c);
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    #[test]
    fn pointwise_matches_f64_on_every_isa(seed in any::<u64>(), rows in 1usize..40) {
        let mut r = rng(seed);
        let width = 48;
        let x: Vec<f32> = vector(&mut r, rows * width).iter().map(|v| v * 100.0).collect();
        let weight = vector(&mut r, width);
        let gate_up: Vec<f32> =
            vector(&mut r, rows * 2 * width).iter().map(|v| v * 120.0).collect();
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let (mut norm, mut act) = (vec![f32::NAN; rows * width], vec![f32::NAN; rows * width]);
            rms_norm(isa, &x, &weight, 1e-5, &mut norm);
            silu_mul(isa, &gate_up, width, &mut act);
            for i in 0..rows * width {
                let row = &x[i / width * width..][..width];
                let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                let want = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i % width]);
                prop_assert!((f64::from(norm[i]) - want).abs() <= 1e-5 * want.abs().max(1e-3));
                let gate = f64::from(gate_up[i / width * 2 * width + i % width]);
                let up = f64::from(gate_up[i / width * 2 * width + width + i % width]);
                let want = gate / (1.0 + (-gate).exp()) * up;
                prop_assert!((f64::from(act[i]) - want).abs() <= 2e-6 * want.abs().max(1.0));
            }
            let got = [bits(&norm), bits(&act)].concat();
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    /// A row alone, in a batch, and on one thread: the same bits.
    #[test]
    fn a_row_does_not_depend_on_its_neighbours(seed in any::<u64>(), dtype in 0usize..3) {
        let isa = Isa::detect();
        let mut case = random_case(seed, DTYPES[dtype], 3, 2, 64);
        let together = case.run(isa);
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        prop_assert_eq!(bits(&together), bits(&one.install(|| case.run(isa))));
        let width = case.heads * 64;
        let (positions, q) = (case.positions.clone(), case.q.clone());
        for (i, &position) in positions.iter().enumerate() {
            case.positions = vec![position];
            case.q = q[i * width..(i + 1) * width].to_vec();
            let alone = case.run(isa);
            prop_assert_eq!(bits(&alone), bits(&together[i * width..(i + 1) * width]));
        }
    }
}

#[test]
fn gemm_rows_do_not_depend_on_m() {
    let mut r = rng(3);
    let (n, k) = (100, 576);
    let packed = PackedMatrix::pack(&vector(&mut r, n * k), n, k);
    let a = vector(&mut r, 300 * k);
    let isa = Isa::detect();
    let width = packed.padded_n();
    let mut all = vec![0.0; 300 * width];
    gemm(isa, &a, &packed, &mut all);
    for m in [1, 2, 5, 16, 97] {
        let mut part = vec![0.0; m * width];
        gemm(isa, &a[7 * k..(7 + m) * k], &packed, &mut part);
        assert_eq!(bits(&part), bits(&all[7 * width..(7 + m) * width]), "m = {m}");
    }
}
