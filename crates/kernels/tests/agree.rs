//! Every instruction set gives the same bits, and those are close to plain f64.

mod common;

use common::{Case, Seg, poison, rng, section, tolerance, vector};
use matkv_kernels::{
    Activations, ActivationsMut, Isa, PackedMatrix, RopeStyle, RotaryEmbedding, gelu, gemm,
    gemm_add, gemm_gated, layer_norm, reference, rms_norm, team,
};
use matkv_types::{KvDtype, KvShape, Precision, bf16_to_f32, f32_to_bf16};
use proptest::prelude::*;
use rand::Rng;

fn rope(dim: usize) -> RotaryEmbedding {
    RotaryEmbedding::plain(dim, 10_000.0, RopeStyle::Interleaved)
}

const DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8];

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// What a product sees of a vector.
fn seen(precision: Precision, x: &[f32]) -> Vec<f32> {
    match precision {
        Precision::Exact => x.to_vec(),
        Precision::Bf16 => x.iter().map(|&x| bf16_to_f32(f32_to_bf16(x))).collect(),
    }
}

fn widened(x: &Activations) -> Vec<f32> {
    match x {
        Activations::F32(x) => x.clone(),
        Activations::Bf16(x) => x.iter().map(|&x| bf16_to_f32(x)).collect(),
    }
}

/// Half a unit in the last place of stored activations, relative.
fn unit(precision: Precision) -> f64 {
    match precision {
        Precision::Exact => 2f64.powi(-24),
        Precision::Bf16 => 2f64.powi(-8),
    }
}

fn precision(i: usize) -> Precision {
    Precision::ALL[i]
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
        seed in any::<u64>(), dtype in 0usize..3, p in 0usize..2, group in 1usize..5,
        kv in 1usize..3, half in 1usize..4,
    ) {
        let (dtype, p) = (DTYPES[dtype], precision(p));
        let case = random_case(seed, dtype, group, kv, half * 32);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let error = case.error(isa, p);
            prop_assert!(error < tolerance(p, dtype), "{}: error {error}", isa.name());
            let got = bits(&case.run(isa, p));
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
            // Output rounded to bf16 is the same output, rounded.
            let mut rounded = vec![0u16; got.len()];
            case.run_into(isa, p, ActivationsMut::Bf16(&mut rounded));
            let want = got.iter().map(|&x| f32_to_bf16(f32::from_bits(x)));
            prop_assert!(want.eq(rounded), "{}", isa.name());
        }
    }

    #[test]
    fn gemm_matches_f64_on_every_isa(
        seed in any::<u64>(), p in 0usize..2, m in 1usize..40, n in 1usize..90,
        half_k in 1usize..100,
    ) {
        let p = precision(p);
        let mut r = rng(seed);
        let k = 2 * half_k;
        let (a, w) = (vector(&mut r, m * k), vector(&mut r, n * k));
        let (packed, rows) = (PackedMatrix::pack(&w, n, k, p), Activations::rounded(p, &a));
        // Of the rounded operands: their products are exact, in f64 as in f32.
        let exact = reference::matmul(&seen(p, &a), &seen(p, &w), k);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut c = vec![f32::NAN; m * packed.padded_n()];
            gemm(isa, &rows, &packed, &mut c);
            for i in 0..m {
                for j in 0..n {
                    let d = (f64::from(c[i * packed.padded_n() + j]) - exact[i * n + j]).abs();
                    // k terms of magnitude ≤ 1, each rounding within 2⁻²⁴ of a partial sum ≤ k.
                    prop_assert!(d <= (k * k) as f64 * 6e-8, "{} at {i},{j}: {d}", isa.name());
                }
            }
            let got = bits(&c);
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
            if n % 16 == 0 {
                let mut sum = vec![1.5f32; c.len()];
                gemm_add(isa, &rows, &packed, &mut sum);
                prop_assert!(c.iter().zip(&sum).all(|(x, y)| 1.5 + x == *y), "{}", isa.name());
            }
        }
    }

    #[test]
    fn gated_product_matches_f64_on_every_isa(
        seed in any::<u64>(), p in 0usize..2, m in 1usize..120, tiles in 1usize..6,
        half_k in 1usize..50,
    ) {
        let p = precision(p);
        let mut r = rng(seed);
        let (n, k) = (16 * tiles, 2 * half_k);
        // Gates up to ±120, where the exponential function ends.
        let a = vector(&mut r, m * k);
        let scale = r.random_range(0.1f32..120.0) / k as f32;
        let w = [0, 1].map(|_| vector(&mut r, n * k));
        let gate: Vec<f32> = w[0].iter().map(|x| x * scale * k as f32).collect();
        let [g, u] = [&gate, &w[1]].map(|w| reference::matmul(&seen(p, &a), &seen(p, w), k));
        let [gate, up] = [&gate, &w[1]].map(|w| PackedMatrix::pack(w, n, k, p));
        let rows = Activations::rounded(p, &a);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut out = Activations::zeros(p, m * n);
            gemm_gated(isa, &rows, &gate, &up, &mut out);
            let out = widened(&out);
            for (i, got) in out.iter().enumerate() {
                let want = g[i] / (1.0 + (-g[i]).exp()) * u[i];
                // Sums of k terms ≤ 120 and ≤ 1 (see above), both times the other factor, which
                // k bounds as well; silu changes by at most 1.1 times what its argument does.
                let sums = (k * k * k) as f64 * 120.0 * 2.2 * 6e-8;
                let bound = sums + want.abs() * (unit(p) + 4e-6) + 1e-30;
                let d = (f64::from(*got) - want).abs();
                prop_assert!(d <= bound, "{} at {i}: {d} > {bound}", isa.name());
            }
            let got = bits(&out);
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    #[test]
    fn normalization_matches_f64_on_every_isa(
        seed in any::<u64>(), p in 0usize..2, rows in 1usize..40,
    ) {
        let p = precision(p);
        let mut r = rng(seed);
        let width = 48;
        let x: Vec<f32> = vector(&mut r, rows * width).iter().map(|v| v * 100.0).collect();
        let weight = vector(&mut r, width);
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut norm = Activations::zeros(p, rows * width);
            rms_norm(isa, &x, &weight, 1e-5, &mut norm);
            let norm = widened(&norm);
            for i in 0..rows * width {
                let row = &x[i / width * width..][..width];
                let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                let want = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i % width]);
                let bound = (1e-5 + unit(p)) * want.abs().max(1e-3);
                prop_assert!((f64::from(norm[i]) - want).abs() <= bound);
            }
            let got = bits(&norm);
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    #[test]
    fn steps_of_an_encoder_match_f64_on_every_isa(seed in any::<u64>(), rows in 1usize..40) {
        let mut r = rng(seed);
        let width = 48;
        let x: Vec<f32> = vector(&mut r, rows * width).iter().map(|v| v * 12.0).collect();
        let [weight, bias] = [0, 1].map(|_| vector(&mut r, width));
        let mut first: Option<[Vec<u32>; 2]> = None;
        for isa in Isa::available() {
            let (mut normal, mut unit) = (x.clone(), x.clone());
            layer_norm(isa, &mut normal, &weight, &bias, 1e-5);
            gelu(isa, &mut unit, width);
            for i in 0..rows * width {
                let row = &x[i / width * width..][..width];
                let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / width as f64;
                let square = |v: &f32| (f64::from(*v) - mean).powi(2);
                let variance = row.iter().map(square).sum::<f64>() / width as f64;
                let scaled = (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt();
                let want = scaled * f64::from(weight[i % width]) + f64::from(bias[i % width]);
                prop_assert!((f64::from(normal[i]) - want).abs() <= 1e-5 * want.abs().max(1.0));
                let v = f64::from(x[i]);
                let want = v * 0.5 * (1.0 + libm::erf(v / std::f64::consts::SQRT_2));
                let d = (f64::from(unit[i]) - want).abs();
                prop_assert!(d <= 3e-7 * v.abs().max(1.0), "{}: gelu({v}) is off by {d}", isa.name());
            }
            let got = [bits(&normal), bits(&unit)];
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{}", isa.name());
        }
    }

    /// A row alone, in a batch, and on one thread: the same bits.
    #[test]
    fn a_row_does_not_depend_on_its_neighbours(
        seed in any::<u64>(), dtype in 0usize..3, p in 0usize..2,
    ) {
        let (isa, p) = (Isa::detect(), precision(p));
        let mut case = random_case(seed, DTYPES[dtype], 3, 2, 64);
        let together = case.run(isa, p);
        let one = team::Team::new(1, "one").unwrap();
        prop_assert_eq!(bits(&together), bits(&one.install(|| case.run(isa, p))));
        let width = case.heads * 64;
        let (positions, q) = (case.positions.clone(), case.q.clone());
        for (i, &position) in positions.iter().enumerate() {
            case.positions = vec![position];
            case.q = q[i * width..(i + 1) * width].to_vec();
            let alone = case.run(isa, p);
            prop_assert_eq!(bits(&alone), bits(&together[i * width..(i + 1) * width]));
        }
    }
}

#[test]
fn gemm_rows_do_not_depend_on_m() {
    let mut r = rng(3);
    let (n, k) = (100, 576);
    let (w, a) = (vector(&mut r, n * k), vector(&mut r, 300 * k));
    let isa = Isa::detect();
    for p in Precision::ALL {
        let packed = PackedMatrix::pack(&w, n, k, p);
        let width = packed.padded_n();
        let mut all = vec![0.0; 300 * width];
        gemm(isa, &Activations::rounded(p, &a), &packed, &mut all);
        for m in [1, 2, 5, 16, 97] {
            let mut part = vec![0.0; m * width];
            let rows = Activations::rounded(p, &a[7 * k..(7 + m) * k]);
            gemm(isa, &rows, &packed, &mut part);
            assert_eq!(bits(&part), bits(&all[7 * width..(7 + m) * width]), "{p}, m = {m}");
        }
    }
}

/// Ties, signs, the smallest normal number and what lies below it: rounding is one function.
#[test]
fn rounding_to_bf16_is_the_same_on_every_isa() {
    let special = [0.0, -0.0, f32::MIN_POSITIVE, 1e-39, -1e-39, 3e-45, 1.0, 1.5e30, -3e38];
    let mut weight: Vec<f32> = special.to_vec();
    weight.extend((0..4096u32).map(|i| f32::from_bits(0x3f80_0000 + i * 0x1000 + i % 2)));
    weight.resize(weight.len().next_multiple_of(16), 1.0);
    // A row of ones stays ones, so the weights come out as they are.
    let ones = vec![1.0; weight.len()];
    let want = Activations::rounded(Precision::Bf16, &weight);
    match &want {
        Activations::Bf16(w) => assert_eq!(w[1..5], [0x8000, 0x0080, 0, 0x8000]),
        Activations::F32(_) => unreachable!(),
    }
    for isa in Isa::available() {
        let mut f32s = Activations::zeros(Precision::Exact, weight.len());
        rms_norm(isa, &ones, &weight, 0.0, &mut f32s);
        assert_eq!(bits(&widened(&f32s)), bits(&weight), "{}", isa.name());
        let mut got = Activations::zeros(Precision::Bf16, weight.len());
        rms_norm(isa, &ones, &weight, 0.0, &mut got);
        assert_eq!(got, want, "{}", isa.name());
    }
}
