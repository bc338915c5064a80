//! Position shifts, and segments that start and end anywhere in their tiles.

mod common;

use common::{Case, Seg, aligned, poison, rng, section, tolerance, vector};
use matkv_kernels::{
    Isa, NewRows, RopeStyle, RotaryEmbedding, append_rows, read_k, read_v, reference, write_rows,
};
use matkv_types::{KvDtype, KvLayout, KvShape, Precision};
use rand::rngs::StdRng;

const DIM: usize = 64;
const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 1, head_dim: DIM };

/// Unrotated keys and values of a chunk, the source of truth of the shift tests.
struct Chunk {
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

fn chunk(r: &mut StdRng, rows: usize) -> Chunk {
    let many = |r: &mut StdRng| (0..rows).map(|_| vector(r, DIM)).collect();
    Chunk { k: many(r), v: many(r) }
}

/// Keys rotated in f64 as if compiled with the first row at `base`.
fn compile(c: &Chunk, rope: &RotaryEmbedding, base: i64, dtype: KvDtype) -> (Vec<u8>, KvLayout) {
    let layout = KvLayout::new(SHAPE, dtype, c.k.len());
    let mut bytes = aligned(layout.total_bytes());
    for (row, (k, v)) in c.k.iter().zip(&c.v).enumerate() {
        let k: Vec<f64> = k.iter().map(|&x| x.into()).collect();
        let k = reference::rotate(rope, base + row as i64, &k);
        let k: Vec<f32> = k.iter().map(|&x| x as f32).collect();
        write_rows(&mut bytes, &layout, 0, row, &k, v);
    }
    (bytes, layout)
}

fn seg(c: &Chunk, rope: &RotaryEmbedding, at: usize, base: i64, dtype: KvDtype) -> Seg {
    let (bytes, layout) = compile(c, rope, base, dtype);
    let (rows, shift) = (c.k.len(), at as i64 - base);
    Seg { bytes, layout, first_row: 0, rows, position: at, shift }
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

/// A chunk compiled after a prefix of P rows and read at offset o equals (1) its keys rotated for
/// o, and (2) prefix and chunk together computed with the prefix at o − P.
///
/// With f32 rows only rounding remains: keys and queries rotated in f32 err by 2⁻²⁴ of their
/// magnitude per product, 64 products a score; 2e-5 leaves a factor of four. With bf16 rows each
/// key element is rounded to 2⁻⁹ of itself, in another place after another rotation: a score of
/// 64 products of magnitude ≤ 1, scaled by 1/8, moves by at most 64 · 2⁻⁹ / 8 = 0.016, and by
/// √64 · 2⁻⁹ / 8 = 0.002 if the roundings are independent; an output (values ≤ 1) moves by twice
/// the largest score change at worst. The bound taken is 0.016. bf16 products round the queries
/// the same way, and in two places as well: twice that.
#[test]
fn shifted_read_equals_rotation_of_the_keys() {
    const PREFIX: usize = 31;
    for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
        for base in [10_000.0, 500_000.0] {
            let rope = RotaryEmbedding::plain(DIM, base, style);
            for offset in [1usize << 10, 1 << 13, 1 << 15, 1 << 17] {
                for (dtype, precision, bound) in [
                    (KvDtype::F32, Precision::Exact, 2e-5),
                    (KvDtype::Bf16, Precision::Exact, 0.016),
                    (KvDtype::Bf16, Precision::Bf16, 0.032),
                ] {
                    check_shift(&rope, PREFIX, offset, (dtype, precision), bound);
                }
            }
        }
    }
}

fn check_shift(
    rope: &RotaryEmbedding,
    p: usize,
    offset: usize,
    (dtype, precision): (KvDtype, Precision),
    bound: f32,
) {
    let mut r = rng(offset as u64);
    let (prefix, body, own) = (chunk(&mut r, p), chunk(&mut r, 300), chunk(&mut r, 5));
    let q = vector(&mut r, 5 * 3 * DIM);
    let end = offset + 300;
    let positions: Vec<usize> = (end..end + 5).collect();
    let case = |segs| Case {
        heads: 3,
        layer: 0,
        rope: rope.clone(),
        segs,
        positions: positions.clone(),
        q: q.clone(),
    };
    let own_seg = || seg(&own, rope, end, end as i64, dtype);
    let in_place = case(vec![
        seg(&prefix, rope, offset - p, 0, dtype),
        seg(&body, rope, offset, p as i64, dtype),
        own_seg(),
    ]);
    let moved = case(vec![
        seg(&prefix, rope, offset - p, (offset - p) as i64, dtype),
        seg(&body, rope, offset, offset as i64, dtype),
        own_seg(),
    ]);
    let isa = Isa::detect();
    let d = difference(&in_place.run(isa, precision), &moved.run(isa, precision));
    assert!(d <= bound, "{:?} {dtype:?} offset {offset}: {d} > {bound}", rope.style);
    // A wrong shift is seen: the test can fail.
    let mut wrong = in_place;
    wrong.segs[1].shift += 3;
    assert!(
        difference(&wrong.run(isa, precision), &moved.run(isa, precision)) > 2e-5,
        "offset {offset}"
    );
}

/// Segments that start and end at every row modulo 64, everything else in the slot NaN.
#[test]
fn every_tile_phase_with_poisoned_neighbours() {
    let mut r = rng(11);
    let rope = RotaryEmbedding::plain(DIM, 10_000.0, RopeStyle::Interleaved);
    for dtype in [KvDtype::Bf16, KvDtype::F32, KvDtype::Int8] {
        let (clean, layout) = section(&mut r, SHAPE, dtype, 400);
        let q = vector(&mut r, 3 * DIM);
        for start in 0..64 {
            for end in [start + 1, start + 2, 64 + start % 63, 128 + (start * 7) % 64, 321 + start]
            {
                let mut bytes = clean.clone();
                poison(&mut bytes, &layout, start..end);
                let rows = end - start;
                let s = Seg { bytes, layout, first_row: start, rows, position: 5, shift: 2 };
                let case = Case {
                    heads: 3,
                    layer: 0,
                    rope: rope.clone(),
                    segs: vec![s],
                    positions: vec![5 + rows],
                    q: q.clone(),
                };
                for precision in Precision::ALL {
                    let error = case.error(Isa::detect(), precision);
                    let what = format!("{precision} {dtype:?} rows {start}..{end}");
                    assert!(error < tolerance(precision, dtype), "{what}: {error}");
                }
            }
        }
    }
}

/// Where a query stands inside the segment decides what it sees, row by row.
#[test]
fn causal_at_every_row() {
    let mut r = rng(12);
    let rope = RotaryEmbedding::plain(DIM, 10_000.0, RopeStyle::HalfSplit);
    for (dtype, precision) in [
        (KvDtype::Bf16, Precision::Exact),
        (KvDtype::Bf16, Precision::Bf16),
        (KvDtype::Int8, Precision::Bf16),
    ] {
        let (bytes, layout) = section(&mut r, SHAPE, dtype, 300);
        let positions: Vec<usize> = (100..400).collect();
        let q = vector(&mut r, 300 * DIM);
        let s = Seg { bytes, layout, first_row: 0, rows: 300, position: 100, shift: 0 };
        let rope = rope.clone();
        let case = Case { heads: 1, layer: 0, rope, segs: vec![s], positions, q };
        let error = case.error(Isa::detect(), precision);
        assert!(error < tolerance(precision, dtype), "{precision} {dtype:?}: {error}");
    }
}

#[test]
fn elements_read_back_as_written() {
    let mut r = rng(13);
    for dtype in [KvDtype::F32, KvDtype::Bf16] {
        let shape = KvShape { layers: 2, kv_heads: 2, head_dim: 96 };
        let layout = KvLayout::new(shape, dtype, 37);
        let mut bytes = aligned(layout.total_bytes());
        let (k, v) = (vector(&mut r, 192), vector(&mut r, 192));
        write_rows(&mut bytes, &layout, 1, 36, &k, &v);
        for head in 0..2 {
            for d in 0..96 {
                let (want_k, want_v) = (k[head * 96 + d], v[head * 96 + d]);
                let tolerance = if dtype == KvDtype::F32 { 0.0 } else { 0.004 };
                assert!((read_k(&bytes, &layout, (1, head), 36, d) - want_k).abs() <= tolerance);
                assert!((read_v(&bytes, &layout, (1, head), 36, d) - want_v).abs() <= tolerance);
            }
        }
        assert!(read_k(&bytes, &layout, (0, 0), 0, 0).is_nan(), "only that row was written");
    }
}

/// Rows appended together, on one thread or many, are those written one by one.
#[test]
fn appended_rows_are_written_rows() {
    let mut r = rng(14);
    let shape = KvShape { layers: 2, kv_heads: 3, head_dim: 64 };
    for dtype in [KvDtype::F32, KvDtype::Bf16] {
        for count in [1, 16, 17, 50] {
            let layout = KvLayout::new(shape, dtype, 70);
            let at: Vec<usize> = (7..7 + count).collect();
            let rows = vector(&mut r, count * 500);
            let (mut one_by_one, mut together) =
                (aligned(layout.total_bytes()), aligned(layout.total_bytes()));
            for (row, x) in at.iter().zip(rows.chunks_exact(500)) {
                write_rows(&mut one_by_one, &layout, 1, *row, &x[10..202], &x[300..492]);
            }
            let [k, v] = [10, 300].map(|from| NewRows { values: &rows[from..], stride: 500 });
            append_rows(&mut together, &layout, 1, &at, k, v);
            assert!(one_by_one == together, "{dtype:?}, {count} rows");
        }
    }
}
