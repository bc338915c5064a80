//! What query rows attend to: the softmax weights of attention, against plain f64.

mod common;

use common::{Case, Seg, rng, section, vector};
use matkv_kernels::{Isa, RopeStyle, RotaryEmbedding, team};
use matkv_types::{KvDtype, KvShape, Precision};

const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 64 };
const HEADS: usize = 6;

/// Two segments elsewhere, at odd rows of their slots, and one with the query rows themselves.
fn case(dtype: KvDtype, queries: usize) -> Case {
    let mut r = rng(queries as u64);
    let mut position = 0;
    let mut segs = Vec::new();
    for (first_row, rows) in [(3, 300), (33, 70), (0, queries)] {
        let (bytes, layout) = section(&mut r, SHAPE, dtype, first_row + rows + 5);
        segs.push(Seg { bytes, layout, first_row, rows, position, shift: 7 * (position as i64) });
        position += rows;
    }
    Case {
        heads: HEADS,
        layer: 1,
        rope: RotaryEmbedding::plain(64, 10_000.0, RopeStyle::Interleaved),
        positions: (position - queries..position).collect(),
        q: vector(&mut r, queries * HEADS * 64).iter().map(|x| 6.0 * x).collect(),
        segs,
    }
}

#[test]
fn weights_are_those_of_softmax() {
    for (dtype, precision) in [
        (KvDtype::F32, Precision::Exact),
        (KvDtype::Bf16, Precision::Bf16),
        (KvDtype::Int8, Precision::Exact),
        (KvDtype::Int8, Precision::Bf16),
    ] {
        let case = case(dtype, 21);
        let (got, want) = (case.attended(Isa::detect(), precision), case.weights(precision));
        let total: f32 = got.iter().flatten().sum();
        assert!((total - (21 * HEADS) as f32).abs() < 0.01, "{total}");
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.len(), want.len());
            for (row, (got, want)) in got.iter().zip(want).enumerate() {
                // Queries are six times those the bounds of `tolerance` are made for: where they
                // are rounded to bytes, four deviations of a score are 6 · 7.3e-3.
                let rounded = dtype == KvDtype::Int8 && precision == Precision::Bf16;
                let bound = if rounded { 4.4e-2 } else { 5e-3 } * want + 1e-5;
                let error = (f64::from(*got) - want).abs();
                assert!(error < bound, "{dtype:?} {precision} {i}/{row}: {got}, not {want}");
            }
        }
    }
}

/// On every instruction set, with one thread or many.
#[test]
fn the_same_bits_everywhere() {
    for dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8] {
        for precision in Precision::ALL {
            let case = case(dtype, 70);
            let bits = |isa, threads| -> Vec<u32> {
                let team = team::Team::new(threads, "test").unwrap();
                let weights = team.install(|| case.attended(isa, precision));
                weights.iter().flatten().map(|w| w.to_bits()).collect()
            };
            let want = bits(Isa::detect(), 1);
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let what = format!("{} {dtype:?} {precision} {threads}", isa.name());
                    assert!(bits(isa, threads) == want, "{what}");
                }
            }
        }
    }
}
