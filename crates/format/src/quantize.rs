//! Narrower row types: from bf16 rows, as computed, to the form at rest, and back to bf16.
//!
//! One layer at a time. Source and target have the same tiles and indexes; only the element type
//! differs, so every conversion is a walk over equal blocks. All scales are bf16, and are rounded
//! before they are used, so that a decoder sees the scale the encoder divided by.
//!
//! int8 and int4 after KIVI (Liu et al. 2024, "KIVI: a tuning-free asymmetric 2bit quantization
//! for KV cache"): outliers of K live in channels, those of V do not.

use half::f16;
use matkv_types::{GROUP_ROWS, KvDtype, KvLayout, TILE_ROWS, bf16_to_f32, f32_to_bf16};

use crate::fp8;

/// Largest value of an fp8 e4m3 number.
const FP8_MAX: f32 = 448.0;

/// One head's block in f32 and how its rows and channels lie.
struct Block<'a> {
    values: &'a [f32],
    dim: usize,
    /// Rows that are not padding.
    rows: usize,
}

fn widen(bytes: &[u8], out: &mut Vec<f32>) {
    out.clear();
    out.extend(bytes.chunks_exact(2).map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))));
}

/// Writes one layer of bf16 rows, whose padding is zero, in `to`'s element type.
///
/// # Panics
/// If the slices are not one layer of their layouts.
pub(crate) fn encode_layer(source: &[u8], target: &mut [u8], to: &KvLayout) {
    let from = KvLayout::new(to.shape, KvDtype::Bf16, to.rows);
    assert!(source.len() >= from.layer_bytes() && target.len() == to.layer_stride());
    let mut values = Vec::with_capacity(from.block_elems());
    for head in 0..to.shape.kv_heads {
        for (v, offset) in [(false, from.k_offset(0, head)), (true, from.v_offset(0, head))] {
            widen(&source[offset..offset + from.block_bytes()], &mut values);
            let block = Block { values: &values, dim: to.shape.head_dim, rows: to.rows };
            let (at, scales_at, scale_bytes) = if v {
                (to.v_offset(0, head), to.v_scale_offset(0, head), to.v_scale_bytes())
            } else {
                (to.k_offset(0, head), to.k_scale_offset(0, head), to.k_scale_bytes())
            };
            let (blocks, scales) = target.split_at_mut(to.rows_bytes());
            let out = &mut blocks[at..at + to.block_bytes()];
            let scales = &mut scales[scales_at - to.rows_bytes()..][..scale_bytes];
            encode_block(&block, to.dtype, v, out, scales);
        }
    }
    zero_gaps(target, to);
}

/// Bytes no row and no scale owns.
fn zero_gaps(target: &mut [u8], to: &KvLayout) {
    for head in 0..to.shape.kv_heads {
        let end = to.v_scale_offset(0, head) + to.v_scale_bytes();
        let next = if head + 1 == to.shape.kv_heads {
            to.layer_stride()
        } else {
            to.k_scale_offset(0, head + 1)
        };
        target[end..next].fill(0);
    }
}

fn encode_block(block: &Block<'_>, dtype: KvDtype, v: bool, out: &mut [u8], scales: &mut [u8]) {
    match dtype {
        KvDtype::F32 | KvDtype::Bf16 => unreachable!("bf16 rows are copied, f32 rows never stored"),
        KvDtype::Fp16 => {
            for (bytes, x) in out.chunks_exact_mut(2).zip(block.values) {
                // Larger numbers than fp16 has become its largest.
                let x = x.clamp(-f16::MAX.to_f32(), f16::MAX.to_f32());
                bytes.copy_from_slice(&f16::from_f32(x).to_le_bytes());
            }
        }
        KvDtype::Fp8 => {
            let top = block.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let scale = round_up(top / FP8_MAX);
            scales.copy_from_slice(&scale.to_le_bytes());
            let inverse = inverse(bf16_to_f32(scale));
            for (byte, x) in out.iter_mut().zip(block.values) {
                *byte = fp8::encode(x * inverse);
            }
        }
        KvDtype::Int8 | KvDtype::Int4 => {
            let mut codes = vec![0u8; block.values.len()];
            if v {
                encode_v(block, dtype, &mut codes, scales);
            } else {
                encode_k(block, dtype, &mut codes, scales);
            }
            if dtype == KvDtype::Int8 {
                out.copy_from_slice(&codes);
            } else {
                for (byte, pair) in out.iter_mut().zip(codes.chunks_exact(2)) {
                    *byte = pair[0] | pair[1] << 4;
                }
            }
        }
    }
}

/// The smallest bf16 that is not below `x`, for `x ≥ 0`.
fn round_up(x: f32) -> u16 {
    let bits = x.to_bits();
    (bits >> 16) as u16 + u16::from(bits & 0xffff != 0)
}

/// The largest bf16 that is not above `x`.
fn round_down(x: f32) -> u16 {
    let bits = x.to_bits();
    (bits >> 16) as u16 + u16::from(x < 0.0 && bits & 0xffff != 0)
}

fn inverse(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { 0.0 }
}

/// The nearest integer, ties to even, of numbers below 2²²; larger ones stay as large. Adding
/// 1.5 · 2²³ leaves no bit behind the point; a call of the C library for each number costs more
/// than everything else that is done with it.
fn nearest(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    if x.abs() < 4_194_304.0 { (x + SHIFT) - SHIFT } else { x }
}

/// What a group of values is encoded with.
#[derive(Clone, Copy)]
struct Grid {
    scale: f32,
    inverse: f32,
    /// 0 for int8.
    minimum: f32,
}

impl Grid {
    /// The grid of values between `low` and `high`; writes its numbers.
    fn new(dtype: KvDtype, low: f32, high: f32, numbers: &mut [u8]) -> Self {
        let (scale, minimum) = if dtype == KvDtype::Int8 {
            (round_up(high.max(-low) / 127.0), 0)
        } else {
            let minimum = round_down(low);
            (round_up((high - bf16_to_f32(minimum)) / 15.0), minimum)
        };
        numbers[..2].copy_from_slice(&scale.to_le_bytes());
        if dtype == KvDtype::Int4 {
            numbers[2..4].copy_from_slice(&minimum.to_le_bytes());
        }
        Self::of(bf16_to_f32(scale), bf16_to_f32(minimum))
    }

    fn of(scale: f32, minimum: f32) -> Self {
        Self { scale, inverse: inverse(scale), minimum }
    }

    fn read(dtype: KvDtype, numbers: &[u8]) -> Self {
        let number = |at: usize| bf16_to_f32(u16::from_le_bytes([numbers[at], numbers[at + 1]]));
        Self::of(number(0), if dtype == KvDtype::Int4 { number(2) } else { 0.0 })
    }

    fn int8(&self, x: f32) -> u8 {
        nearest(x * self.inverse).clamp(-127.0, 127.0) as i8 as u8
    }

    fn int4(&self, x: f32) -> u8 {
        nearest((x - self.minimum) * self.inverse).clamp(0.0, 15.0) as u8
    }
}

/// Bytes of the numbers of one grid.
const fn number_bytes(dtype: KvDtype) -> usize {
    if matches!(dtype, KvDtype::Int4) { 4 } else { 2 }
}

fn encode_k(block: &Block<'_>, dtype: KvDtype, codes: &mut [u8], scales: &mut [u8]) {
    let (dim, bytes) = (block.dim, number_bytes(dtype));
    let tile = TILE_ROWS * dim;
    scales.fill(0);
    for (g, scales) in scales.chunks_exact_mut(dim * bytes).enumerate() {
        let first = g * GROUP_ROWS;
        let rows = GROUP_ROWS.min(block.rows - first);
        let tiles = rows.div_ceil(TILE_ROWS);
        let start = first * dim;
        let (mut low, mut high) = (vec![f32::INFINITY; dim], vec![f32::NEG_INFINITY; dim]);
        for (t, values) in block.values[start..start + tiles * tile].chunks_exact(tile).enumerate()
        {
            let valid = TILE_ROWS.min(rows - t * TILE_ROWS);
            for (j, line) in values.chunks_exact(2 * TILE_ROWS).enumerate() {
                for pair in line[..2 * valid].chunks_exact(2) {
                    for o in 0..2 {
                        low[2 * j + o] = low[2 * j + o].min(pair[o]);
                        high[2 * j + o] = high[2 * j + o].max(pair[o]);
                    }
                }
            }
        }
        let grids: Vec<Grid> = scales
            .chunks_exact_mut(bytes)
            .enumerate()
            .map(|(d, numbers)| Grid::new(dtype, low[d], high[d], numbers))
            .collect();
        for (t, values) in block.values[start..start + tiles * tile].chunks_exact(tile).enumerate()
        {
            let valid = TILE_ROWS.min(rows - t * TILE_ROWS);
            let codes = &mut codes[start + t * tile..][..tile];
            for (j, line) in values.chunks_exact(2 * TILE_ROWS).enumerate() {
                for r in 0..valid {
                    for o in 0..2 {
                        let (x, grid) = (line[2 * r + o], &grids[2 * j + o]);
                        codes[j * 2 * TILE_ROWS + 2 * r + o] =
                            if dtype == KvDtype::Int8 { grid.int8(x) } else { grid.int4(x) };
                    }
                }
            }
        }
    }
}

fn encode_v(block: &Block<'_>, dtype: KvDtype, codes: &mut [u8], scales: &mut [u8]) {
    let (dim, bytes) = (block.dim, number_bytes(dtype));
    scales.fill(0);
    for (row, numbers) in scales.chunks_exact_mut(bytes).enumerate().take(block.rows) {
        let at = |d: usize| row / 2 * 2 * dim + 2 * d + row % 2;
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for d in 0..dim {
            let x = block.values[at(d)];
            (low, high) = (low.min(x), high.max(x));
        }
        let grid = Grid::new(dtype, low, high, numbers);
        for d in 0..dim {
            let x = block.values[at(d)];
            codes[at(d)] = if dtype == KvDtype::Int8 { grid.int8(x) } else { grid.int4(x) };
        }
    }
}

/// Widens one layer at rest to bf16.
///
/// # Panics
/// If the slices are not one layer of their layouts.
pub(crate) fn decode_layer(source: &[u8], from: &KvLayout, target: &mut [u8]) {
    let to = KvLayout::new(from.shape, KvDtype::Bf16, from.rows);
    assert!(source.len() == from.layer_stride() && target.len() == to.layer_stride());
    for head in 0..from.shape.kv_heads {
        for v in [false, true] {
            let (at, scales_at, scale_bytes, out) = if v {
                let out = to.v_offset(0, head);
                (from.v_offset(0, head), from.v_scale_offset(0, head), from.v_scale_bytes(), out)
            } else {
                let out = to.k_offset(0, head);
                (from.k_offset(0, head), from.k_scale_offset(0, head), from.k_scale_bytes(), out)
            };
            decode_block(
                &source[at..at + from.block_bytes()],
                &source[scales_at..scales_at + scale_bytes],
                from,
                v,
                &mut target[out..out + to.block_bytes()],
            );
        }
    }
    target[to.layer_bytes()..].fill(0);
}

fn put(out: &mut [u8], x: f32) {
    out.copy_from_slice(&f32_to_bf16(x).to_le_bytes());
}

fn decode_block(bytes: &[u8], scales: &[u8], from: &KvLayout, v: bool, out: &mut [u8]) {
    let out = out.chunks_exact_mut(2);
    match from.dtype {
        KvDtype::F32 | KvDtype::Bf16 => unreachable!("arena forms are not decoded"),
        KvDtype::Fp16 => {
            for (o, b) in out.zip(bytes.chunks_exact(2)) {
                put(o, f16::from_le_bytes([b[0], b[1]]).to_f32());
            }
        }
        KvDtype::Fp8 => {
            let scale = Grid::read(KvDtype::Fp8, scales).scale;
            for (o, b) in out.zip(bytes) {
                put(o, fp8::decode(*b) * scale);
            }
        }
        KvDtype::Int8 | KvDtype::Int4 => decode_integers(bytes, scales, from, v, out),
    }
}

fn decode_integers(
    bytes: &[u8],
    scales: &[u8],
    from: &KvLayout,
    v: bool,
    out: std::slice::ChunksExactMut<'_, u8>,
) {
    let (dim, dtype) = (from.shape.head_dim, from.dtype);
    let grids: Vec<Grid> =
        scales.chunks_exact(number_bytes(dtype)).map(|n| Grid::read(dtype, n)).collect();
    let code = |i: usize| match dtype {
        KvDtype::Int8 => f32::from(bytes[i] as i8),
        _ => f32::from(bytes[i / 2] >> (4 * (i % 2)) & 15),
    };
    for (i, o) in out.enumerate() {
        let (row, d) = if v {
            (i / (2 * dim) * 2 + i % 2, i % (2 * dim) / 2)
        } else {
            let (tile, inside) = (i / (TILE_ROWS * dim), i % (TILE_ROWS * dim));
            let (j, line) = (inside / (2 * TILE_ROWS), inside % (2 * TILE_ROWS));
            (tile * TILE_ROWS + line / 2, 2 * j + line % 2)
        };
        if row >= from.rows {
            put(o, 0.0);
            continue;
        }
        let grid = grids[if v { row } else { row / GROUP_ROWS * dim + d }];
        put(o, code(i).mul_add(grid.scale, grid.minimum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_is_round_ties_even() {
        let bits = (0..=u32::MAX).step_by(997);
        for x in bits.map(f32::from_bits).filter(|x| x.abs() < 4_194_304.0) {
            assert_eq!(nearest(x), x.round_ties_even(), "{x}");
        }
        for x in [4_194_304.0, -1e30, f32::INFINITY, -0.5, 0.5, 1.5, 2.5, -126.5] {
            assert_eq!(nearest(x), x.round_ties_even(), "{x}");
        }
    }
}
