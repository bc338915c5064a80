//! Random KV sections and a slow, exact attention over segments.
#![allow(dead_code, reason = "each test binary uses its own part")]

use matkv_kernels::reference::{Row, attention, rotate};
use matkv_kernels::{
    ActivationsMut, Attention, AttentionJob, Isa, LayerInput, RotaryEmbedding, Section,
    SegmentView, query_scale, read_k, read_v, rotate_heads, write_rows,
};
use matkv_types::{GROUP_ROWS, KvDtype, KvLayout, KvShape, Precision, bf16_to_f32, f32_to_bf16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

pub fn vector(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

/// A KV section whose first `rows` rows are random and the rest of which is NaN.
pub fn section(
    rng: &mut StdRng,
    shape: KvShape,
    dtype: KvDtype,
    rows: usize,
) -> (Vec<u8>, KvLayout) {
    let layout = KvLayout::new(shape, dtype, rows);
    let mut bytes = aligned(layout.total_bytes());
    if dtype == KvDtype::Int8 {
        fill_int8(rng, &mut bytes, &layout);
        return (bytes, layout);
    }
    let width = shape.kv_heads * shape.head_dim;
    for layer in 0..shape.layers {
        for row in 0..rows {
            let (k, v) = (vector(rng, width), vector(rng, width));
            write_rows(&mut bytes, &layout, layer, row, &k, &v);
        }
    }
    (bytes, layout)
}

/// Any integers, and scales that make them values in −1…1.
fn fill_int8(rng: &mut StdRng, bytes: &mut [u8], layout: &KvLayout) {
    for layer in bytes.chunks_exact_mut(layout.layer_stride()) {
        let (rows, scales) = layer.split_at_mut(layout.rows_bytes());
        rows.fill_with(|| rng.random_range(-127i8..=127) as u8);
        for scale in scales.chunks_exact_mut(2) {
            let value = rng.random_range(0.001f32..1.0 / 128.0);
            scale.copy_from_slice(&f32_to_bf16(value).to_le_bytes());
        }
    }
}

/// NaN scales for rows, and for groups of rows, of which none is kept.
fn poison_int8(bytes: &mut [u8], layout: &KvLayout, keep: std::ops::Range<usize>) {
    let dim = layout.shape.head_dim;
    let nan = f32_to_bf16(f32::NAN).to_le_bytes();
    for (layer, head) in
        (0..layout.shape.layers).flat_map(|l| (0..layout.shape.kv_heads).map(move |h| (l, h)))
    {
        for row in (0..layout.padded_rows()).filter(|r| !keep.contains(r)) {
            let at = layout.v_scale_offset(layer, head) + 2 * row;
            bytes[at..at + 2].copy_from_slice(&nan);
        }
        for group in 0..layout.groups() {
            let rows = group * GROUP_ROWS..(group + 1) * GROUP_ROWS;
            if rows.end > keep.start && rows.start < keep.end {
                continue;
            }
            let at = layout.k_scale_offset(layer, head) + 2 * dim * group;
            bytes[at..at + 2 * dim].chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&nan));
        }
    }
}

/// Poison: every element reads as NaN in both element types.
pub fn aligned(len: usize) -> Vec<u8> {
    vec![0xff; len]
}

/// Overwrites rows outside `keep` with NaN.
pub fn poison(bytes: &mut [u8], layout: &KvLayout, keep: std::ops::Range<usize>) {
    if layout.dtype == KvDtype::Int8 {
        return poison_int8(bytes, layout, keep);
    }
    let width = layout.shape.kv_heads * layout.shape.head_dim;
    let nan = vec![f32::NAN; width];
    for layer in 0..layout.shape.layers {
        for row in (0..layout.rows).filter(|r| !keep.contains(r)) {
            write_rows(bytes, layout, layer, row, &nan, &nan);
        }
    }
}

/// Largest error of attention over rows of one type, outputs being averages of values in −1…1.
///
/// Exact: f32 accumulation over at most a few thousand terms of magnitude ≤ 1, averaged by
/// softmax: 64-term dot products err by about 64 · 2⁻²⁴ = 4e-6, exp by 2e-7, and the average
/// keeps that.
///
/// bf16: every softmax weight is off by at most 2⁻⁸ of itself (eight significant bits), and so is
/// their average of values ≤ 1. The queries' rounding is in the reference too.
///
/// int8: an element of `q · s` is off by half a step at most, and a step is 2/253 of the largest
/// one at most, which is about √2 / √dim / 128. Over dim roundings, independent and uniform, times
/// K of 73 on average (uniform in ±127), a score has a standard deviation of
/// 73 · 2/253/√12 · √2/128 = 1.8e-3. Two rows of equal weight and values ±1 make the most of it:
/// an output is off by √2/2 of that. A weight is off by 2⁻¹⁶ of the largest; 256 of them make
/// √(256 / 3) · 2⁻¹⁶ = 1.4e-4 at worst. Four deviations of both are 5.3e-3.
pub fn tolerance(precision: Precision, dtype: KvDtype) -> f64 {
    match (precision, dtype) {
        (Precision::Bf16, KvDtype::Bf16) => 1.0 / 256.0 + 1e-5,
        (Precision::Bf16, KvDtype::Int8) => 5.3e-3,
        _ => 1e-5,
    }
}

/// A segment of a test sequence.
pub struct Seg {
    pub bytes: Vec<u8>,
    pub layout: KvLayout,
    pub first_row: usize,
    pub rows: usize,
    pub position: usize,
    /// Added to where the rows were compiled to reach where they are read.
    pub shift: i64,
}

pub struct Case {
    pub heads: usize,
    pub layer: usize,
    pub rope: RotaryEmbedding,
    pub segs: Vec<Seg>,
    pub positions: Vec<usize>,
    /// Unrotated queries `[row][heads · dim]`.
    pub q: Vec<f32>,
}

impl Case {
    fn dim(&self) -> usize {
        self.segs[0].layout.shape.head_dim
    }

    /// Queries rotated for a segment and scaled, as attention takes them.
    fn rotated(&self, s: &Seg) -> Vec<f32> {
        let width = self.heads * self.dim();
        let scale = query_scale(self.dim());
        let angles = self.rope.angles(self.positions.iter().map(|&p| p as i64 - s.shift));
        let mut out = vec![0.0; self.q.len()];
        for (i, (x, o)) in self.q.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
            rotate_heads(self.rope.style, &angles, i, x, scale, o);
        }
        out
    }

    pub fn run(&self, isa: Isa, precision: Precision) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        self.run_into(isa, precision, ActivationsMut::F32(&mut out));
        out
    }

    /// What attention takes, every segment with a rotation of its own.
    pub fn job(&self) -> AttentionJob<'_> {
        let segments = self.segs.iter().enumerate().map(|(rotation, s)| SegmentView {
            section: Section::Whole(&s.bytes),
            layout: s.layout,
            first_row: s.first_row,
            rows: s.rows,
            position: s.position,
            rotation,
        });
        AttentionJob { segments: segments.collect(), positions: self.positions.clone() }
    }

    pub fn queries(&self) -> Vec<Vec<f32>> {
        self.segs.iter().map(|s| self.rotated(s)).collect()
    }

    /// What every row of every segment is attended to.
    pub fn attended(&self, isa: Isa, precision: Precision) -> Vec<Vec<f32>> {
        let queries = self.queries();
        let input = LayerInput { own: &[], queries: &queries };
        let mut out: Vec<Vec<f32>> = self.segs.iter().map(|s| vec![0.0; s.rows]).collect();
        let attention = Attention::new(isa, precision, self.heads, [self.job()]);
        attention.attended(self.layer, |_| input, &mut out);
        out
    }

    /// The same in f64.
    pub fn weights(&self, precision: Precision) -> Vec<Vec<f64>> {
        let (dim, kv_heads) = (self.dim(), self.segs[0].layout.shape.kv_heads);
        let mut out: Vec<Vec<f64>> = self.segs.iter().map(|s| vec![0.0; s.rows]).collect();
        for (i, &position) in self.positions.iter().enumerate() {
            for head in 0..self.heads {
                let at = (self.layer, head / (self.heads / kv_heads));
                let mut scores = Vec::new();
                for (n, s) in self.segs.iter().enumerate() {
                    let query = self.query(s, precision, i, head);
                    for r in (0..s.rows).filter(|r| s.position + r <= position) {
                        let k = |d| f64::from(read_k(&s.bytes, &s.layout, at, s.first_row + r, d));
                        let score: f64 = (0..dim).map(|d| query[d] * k(d)).sum();
                        scores.push((n, r, score.exp()));
                    }
                }
                let sum: f64 = scores.iter().map(|s| s.2).sum();
                scores.iter().for_each(|&(n, r, e)| out[n][r] += e / sum);
            }
        }
        out
    }

    pub fn run_into(&self, isa: Isa, precision: Precision, out: ActivationsMut<'_>) {
        let queries = self.queries();
        let input = LayerInput { own: &[], queries: &queries };
        let mut attention = Attention::new(isa, precision, self.heads, [self.job()]);
        attention.run(self.layer, |_| input, out);
    }

    /// The query of one segment in f64. Where attention takes bf16 queries, their rounding is
    /// part of the input, so that what it does with them can be held to a tight bound.
    fn query(&self, s: &Seg, precision: Precision, row: usize, head: usize) -> Vec<f64> {
        let dim = self.dim();
        let at = (row * self.heads + head) * dim..(row * self.heads + head + 1) * dim;
        if precision == Precision::Bf16 && s.layout.dtype == KvDtype::Bf16 {
            let rounded =
                |x: &f32| f64::from(bf16_to_f32(f32_to_bf16(*x))) * std::f64::consts::LN_2;
            return self.rotated(s)[at].iter().map(rounded).collect();
        }
        let scaled = |x: &f32| f64::from(*x) / (dim as f64).sqrt();
        let q: Vec<f64> = self.q[at].iter().map(scaled).collect();
        rotate(&self.rope, self.positions[row] as i64 - s.shift, &q)
    }

    pub fn exact(&self, precision: Precision) -> Vec<f64> {
        let (dim, kv_heads) = (self.dim(), self.segs[0].layout.shape.kv_heads);
        let mut out = Vec::new();
        for (i, &position) in self.positions.iter().enumerate() {
            for head in 0..self.heads {
                let kv = head / (self.heads / kv_heads);
                let queries: Vec<Vec<f64>> =
                    self.segs.iter().map(|s| self.query(s, precision, i, head)).collect();
                let mut rows = Vec::new();
                for (s, query) in self.segs.iter().zip(&queries) {
                    for r in (0..s.rows).filter(|r| s.position + r <= position) {
                        let row = s.first_row + r;
                        let at = (self.layer, kv);
                        let k = (0..dim).map(|d| read_k(&s.bytes, &s.layout, at, row, d).into());
                        let v = (0..dim).map(|d| read_v(&s.bytes, &s.layout, at, row, d).into());
                        rows.push(Row { query, k: k.collect(), v: v.collect() });
                    }
                }
                out.extend(attention(&rows));
            }
        }
        out
    }

    /// Largest difference from the f64 reference. Outputs are averages of values in −1…1.
    pub fn error(&self, isa: Isa, precision: Precision) -> f64 {
        self.run(isa, precision)
            .iter()
            .zip(self.exact(precision))
            .map(|(a, b)| (f64::from(*a) - b).abs())
            .fold(0.0, |m, x| if x > m || x.is_nan() { x } else { m })
    }
}
