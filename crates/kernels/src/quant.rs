//! Linear layers over a model file's own 4- and 8-bit weights, for few rows.
//!
//! With few rows a product costs what its weights take to be read, so they stay as small as they
//! are in the file, and exact. Rows are quantized to 16 bits in blocks of 32 with a scale each, and
//! multiplied as high and low bytes: products and their sums over a block are exact integers, and
//! what rounding adds is 1/65,278 of a block's largest value.

use half::f16;

use crate::activations::resize_unread;
use crate::ahead::ahead;
use crate::isa::{Isa, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::pointwise::silu_mul;
use crate::quantize::quantize;
use crate::storage::{SharedBytes, Storage};
use crate::team;

/// Elements that share a scale.
pub const QUANT_BLOCK: usize = 32;
/// Columns of a tile.
const TILE: usize = LANES;
/// Rows that share the weights in registers.
const ROWS: usize = 8;
/// Scales, and minimums, of one block of a tile.
const SCALE_BYTES: usize = 2 * TILE;
/// How many blocks ahead of those that are multiplied weights are asked for.
const AHEAD_BLOCKS: usize = 16;
/// Four times 128.
const OFFSETS: u32 = 0x8080_8080;
/// Bytes of weights one task reads at most: threads that are late leave less to wait for.
const TASK_BYTES: usize = 256 << 10;

/// How weights are written in blocks of 32 of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantKind {
    /// `x = d · q`, q of 4 bits less 8 (GGUF Q4_0).
    Q4_0,
    /// `x = d · q + m`, q of 4 bits (GGUF Q4_1).
    Q4_1,
    /// `x = d · q`, q of 8 bits with sign (GGUF Q8_0).
    Q8_0,
}

impl QuantKind {
    /// Bytes of a block in a file.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// Whether it is kept as four bits and a minimum.
    const fn is_four(self) -> bool {
        !matches!(self, Self::Q8_0)
    }

    /// Bytes of a block of a tile: scales, and what they scale.
    const fn tile_bytes(self) -> usize {
        if self.is_four() { 2 * SCALE_BYTES + TILE * 16 } else { SCALE_BYTES + TILE * 32 }
    }
}

/// A weight matrix `[n][k]`, sixteen rows to a tile `[n / 16][k / 32]`.
///
/// A block of a tile has sixteen f16 scales; with 4 bits sixteen f16 minimums and four groups of
/// eight k: byte `4 · column + k % 4` holds k, and k + 4 in its high bits; with 8 bits fours of k
/// `[8][16][4]`.
pub struct QuantMatrix {
    n: usize,
    k: usize,
    four: bool,
    data: Storage<u8>,
}

impl QuantMatrix {
    /// Names the packing: files of another one are not read.
    pub const LAYOUT: u32 = 2;

    /// Packs matrices of equal kind and `k`, one below the other, from the bytes of a file.
    ///
    /// # Panics
    /// If a part does not hold `n` rows of whole blocks.
    pub fn pack_stacked(parts: &[(&[u8], usize)], kind: QuantKind, k: usize) -> Self {
        assert!(k.is_multiple_of(QUANT_BLOCK), "k = {k} must be whole blocks");
        let n: usize = parts.iter().map(|p| p.1).sum();
        let (blocks, bytes) = (k / QUANT_BLOCK, kind.block_bytes());
        let tile = blocks * kind.tile_bytes();
        let mut data = vec![0; n.div_ceil(TILE) * tile];
        let mut row = 0;
        for (source, rows) in parts {
            assert_eq!(source.len(), rows * blocks * bytes, "a weight part has the wrong size");
            for source in source.chunks_exact(blocks * bytes) {
                let target = &mut data[row / TILE * tile..][..tile];
                let blocks = source.chunks_exact(bytes);
                for (block, target) in blocks.zip(target.chunks_exact_mut(kind.tile_bytes())) {
                    put_block(kind, block, row % TILE, target);
                }
                row += 1;
            }
        }
        Self { n, k, four: kind.is_four(), data: Storage::Owned(data) }
    }

    /// A matrix that was packed before, from its [`Self::as_bytes`]; none if `n` and `k` need
    /// another number of them.
    pub fn shared(bytes: SharedBytes, n: usize, kind: QuantKind, k: usize) -> Option<Self> {
        let len = n.div_ceil(TILE) * (k / QUANT_BLOCK) * kind.tile_bytes();
        let data = Storage::shared(bytes, len)?;
        k.is_multiple_of(QUANT_BLOCK).then_some(Self { n, k, four: kind.is_four(), data })
    }

    /// Output columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Width of an output row: n rounded up to whole tiles.
    pub fn padded_n(&self) -> usize {
        self.n.next_multiple_of(TILE)
    }

    /// The packed blocks.
    pub fn as_bytes(&self) -> &[u8] {
        &self.data
    }

    fn tile_bytes(&self) -> usize {
        let kind = if self.four { QuantKind::Q4_1 } else { QuantKind::Q8_0 };
        kind.tile_bytes()
    }

    /// Copies row `row` of the original matrix into `out` (`k` elements).
    ///
    /// # Panics
    /// If the row does not exist or `out` is not `k` long.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k);
        let (bytes, column) = (self.tile_bytes(), row % TILE);
        let tile = &self.data[row / TILE * (self.k / QUANT_BLOCK) * bytes..];
        for (block, out) in tile.chunks_exact(bytes).zip(out.chunks_exact_mut(QUANT_BLOCK)) {
            let scale = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
            let d = scale(2 * column);
            if self.four {
                let m = scale(SCALE_BYTES + 2 * column);
                for (i, x) in out.iter_mut().enumerate() {
                    let (byte, shift) = nibble_at(column, i);
                    *x = d * f32::from(block[byte] >> shift & 15) + m;
                }
            } else {
                for (i, x) in out.iter_mut().enumerate() {
                    *x = d * f32::from(block[byte_at(column, i)] as i8);
                }
            }
        }
    }
}

/// Byte of a block of a tile, and bit in it, where the four bits of `(column, k)` begin.
const fn nibble_at(column: usize, k: usize) -> (usize, usize) {
    (2 * SCALE_BYTES + k / 8 * 4 * TILE + 4 * column + k % 4, k % 8 / 4 * 4)
}

/// Byte of a block of a tile that `(column, k)` has.
const fn byte_at(column: usize, k: usize) -> usize {
    SCALE_BYTES + k / 4 * 4 * TILE + 4 * column + k % 4
}

/// Puts one block of one row into its tile.
fn put_block(kind: QuantKind, block: &[u8], column: usize, target: &mut [u8]) {
    target[2 * column..2 * column + 2].copy_from_slice(&block[..2]);
    if kind == QuantKind::Q8_0 {
        for (k, &q) in block[2..].iter().enumerate() {
            target[byte_at(column, k)] = q;
        }
        return;
    }
    let minimum = match kind {
        QuantKind::Q4_1 => [block[2], block[3]],
        // `d · (q − 8)` is `d · q − 8 d`; eight times an f16 is exact unless it overflows.
        _ => times_minus_8(u16::from_le_bytes([block[0], block[1]])).to_le_bytes(),
    };
    target[SCALE_BYTES + 2 * column..][..2].copy_from_slice(&minimum);
    let codes = &block[if kind == QuantKind::Q4_1 { 4 } else { 2 }..];
    for k in 0..QUANT_BLOCK {
        // GGUF keeps k and k + 16 in one byte.
        let code = codes[k % 16] >> (k / 16 * 4) & 15;
        let (byte, shift) = nibble_at(column, k);
        target[byte] |= code << shift;
    }
}

/// An f16 times −8; infinite where f16 ends.
fn times_minus_8(bits: u16) -> u16 {
    f16::from_f32(-8.0 * f16::from_bits(bits).to_f32()).to_bits()
}

/// Rows of activations as 16-bit integers, a scale for each block of 32.
#[derive(Debug, Default)]
pub struct QuantRows {
    k: usize,
    /// `[m][k / 4][high, low][4]`.
    codes: Vec<i8>,
    /// `[m][k / 32]`.
    scales: Vec<f32>,
    /// Sums of the blocks, scaled: what minimums are multiplied with.
    sums: Vec<f32>,
}

impl QuantRows {
    /// Takes rows of `k` in; memory is used again.
    ///
    /// # Panics
    /// If `x` is not whole rows of whole blocks.
    pub fn quantize(&mut self, isa: Isa, x: &[f32], k: usize) {
        assert!(k.is_multiple_of(QUANT_BLOCK) && x.len().is_multiple_of(k));
        self.k = k;
        resize_unread(&mut self.codes, 2 * x.len(), i8::MIN);
        resize_unread(&mut self.scales, x.len() / QUANT_BLOCK, f32::NAN);
        resize_unread(&mut self.sums, x.len() / QUANT_BLOCK, f32::NAN);
        let (codes, scales, sums) = (&mut self.codes, &mut self.scales, &mut self.sums);
        // SAFETY: `codes` has twice the length of `x`, the others one element for each block of it.
        unsafe { quantize_blocks(isa, x, codes, scales, sums) };
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.codes.len().checked_div(2 * self.k).unwrap_or(0)
    }
}

#[inline(always)]
unsafe fn quantize_blocks_body<L: Lanes>(
    x: &[f32],
    codes: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    for (b, x) in x.chunks_exact(QUANT_BLOCK).enumerate() {
        let codes = &mut codes[2 * b * QUANT_BLOCK..2 * (b + 1) * QUANT_BLOCK];
        // SAFETY: two groups of lanes in each block of `x`, twice as many in one of `codes`.
        unsafe {
            scales[b] = quantize::<L>(x.as_ptr(), QUANT_BLOCK, codes.as_mut_ptr());
            let (mut high, mut low) = (0, 0);
            for eight in codes.chunks_exact(8) {
                high += eight[..4].iter().map(|c| i32::from(*c)).sum::<i32>();
                low += eight[4..].iter().map(|c| i32::from(*c)).sum::<i32>();
            }
            sums[b] = (256 * high + low) as f32 * scales[b];
        }
    }
}

dispatch! {
    /// Codes, scales and sums of blocks.
    ///
    /// # Safety
    /// `x` is whole blocks, `codes` twice as long as `x`, the others have one element a block.
    unsafe fn quantize_blocks => quantize_blocks_body(
        x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [f32],
    )
}

#[derive(Clone, Copy)]
struct Task<'a> {
    rows: &'a QuantRows,
    w: &'a QuantMatrix,
    data: *const u8,
    first: usize,
    tiles: usize,
    c: *mut f32,
    accumulate: bool,
}

// SAFETY: `data` is read only; `c` is written through by tasks for disjoint columns only.
unsafe impl Send for Task<'_> {}
// SAFETY: as above.
unsafe impl Sync for Task<'_> {}

impl Task<'_> {
    /// The tiles from `first` on, at most `tiles`.
    fn part(&self, first: usize, tiles: usize) -> Self {
        Self { first, tiles: tiles.min(self.tiles - first), ..*self }
    }
}

/// What `M` rows and `N` tiles make of a block.
struct BlockSums<L: Lanes, const M: usize, const N: usize> {
    /// Sums of products, of high bytes and of low ones.
    products: [[[L::I; 2]; N]; M],
    /// What the offset of unsigned rows adds to either, where weights have 8 bits.
    offsets: [L::I; N],
}

/// `M` rows `stride` apart by a block of `N` tiles.
#[inline(always)]
unsafe fn block_sums<L: Lanes, const M: usize, const N: usize, const FOUR: bool>(
    a: *const i8,
    stride: usize,
    w: [*const u8; N],
) -> BlockSums<L, M, N> {
    // SAFETY: the caller's rows and tiles have a whole block.
    unsafe {
        let mut sums = [[[L::zero_i(); 2]; N]; M];
        let mut offsets = [L::zero_i(); N];
        let four = |row: usize, k0: usize, half: usize| {
            a.add(row * stride + 2 * k0 + 4 * half).cast::<u32>().read_unaligned()
        };
        if FOUR {
            for g in 0..4 {
                let at = 2 * SCALE_BYTES + g * 4 * TILE;
                // No closure: it would be compiled without the instruction set.
                let mut codes = [L::nibble_quads(w[0].add(at)); N];
                if N == 2 {
                    codes[1] = L::nibble_quads(w[1].add(at));
                }
                for s in 0..2 {
                    for (i, sums) in sums.iter_mut().enumerate() {
                        for half in 0..2 {
                            let a = four(i, g * 8 + 4 * s, half);
                            for (sums, codes) in sums.iter_mut().zip(&codes) {
                                sums[half] = L::dot_i8(sums[half], a, codes[s]);
                            }
                        }
                    }
                }
            }
            return BlockSums { products: sums, offsets };
        }
        for q in 0..QUANT_BLOCK / 4 {
            let at = SCALE_BYTES + q * 4 * TILE;
            let mut codes = [L::i8_quads(w[0].add(at).cast()); N];
            if N == 2 {
                codes[1] = L::i8_quads(w[1].add(at).cast());
            }
            for (offset, codes) in offsets.iter_mut().zip(codes) {
                *offset = L::dot_u8(*offset, OFFSETS, codes);
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                for half in 0..2 {
                    // With the sign bit turned, a number has 128 more and no sign.
                    let a = four(i, 4 * q, half) ^ OFFSETS;
                    for (sums, codes) in sums.iter_mut().zip(codes) {
                        sums[half] = L::dot_u8(sums[half], a, codes);
                    }
                }
            }
        }
        BlockSums { products: sums, offsets }
    }
}

/// `M` rows from `row` on by `N` tiles from `tile` on, one or two.
#[inline(always)]
unsafe fn some_tiles<L: Lanes, const M: usize, const N: usize, const FOUR: bool>(
    t: &Task<'_>,
    row: usize,
    tile: usize,
) {
    let kind = if FOUR { QuantKind::Q4_1 } else { QuantKind::Q8_0 };
    let (k, blocks) = (t.w.k, t.w.k / QUANT_BLOCK);
    let stride = blocks * kind.tile_bytes();
    // SAFETY: `product` makes tasks of tiles of W and rows that exist; C has `padded_n` columns for
    // each.
    unsafe {
        let mut c = [[L::splat(0.0); N]; M];
        let mut w = [t.data.add(tile * stride); N];
        if N == 2 {
            w[1] = w[1].add(stride);
        }
        for b in 0..blocks {
            // Behind the end of a tile lies the other one of these, or the next.
            let skip = if b + AHEAD_BLOCKS < blocks { 0 } else { (N - 1) * stride };
            for w in w {
                let there = w.wrapping_add(AHEAD_BLOCKS * kind.tile_bytes() + skip);
                ahead(there, kind.tile_bytes());
            }
            let a = t.rows.codes.as_ptr().add(2 * (row * k + b * QUANT_BLOCK));
            let sums = block_sums::<L, M, N, FOUR>(a, 2 * k, w);
            for (j, w) in w.iter_mut().enumerate() {
                let d = L::load_f16(w.cast());
                for (i, (c, products)) in c.iter_mut().zip(&sums.products).enumerate() {
                    let at = (row + i) * blocks + b;
                    let scale = L::mul(d, L::splat(*t.rows.scales.get_unchecked(at)));
                    let [high, low] = products[j];
                    let (mut high, mut low) = (L::from_i(high), L::from_i(low));
                    if !FOUR {
                        let offset = L::from_i(sums.offsets[j]);
                        (high, low) = (L::sub(high, offset), L::sub(low, offset));
                    }
                    let sum = L::fma(high, L::splat(256.0), low);
                    c[j] = L::fma(scale, sum, c[j]);
                }
                if FOUR {
                    let m = L::load_f16(w.add(SCALE_BYTES).cast());
                    for (i, c) in c.iter_mut().enumerate() {
                        let sum = *t.rows.sums.get_unchecked((row + i) * blocks + b);
                        c[j] = L::fma(m, L::splat(sum), c[j]);
                    }
                }
                *w = w.add(kind.tile_bytes());
            }
        }
        for (i, c) in c.iter().enumerate() {
            let out = t.c.add((row + i) * t.w.padded_n() + tile * TILE);
            for (j, c) in c.iter().enumerate() {
                let out = out.add(j * TILE);
                let c = if t.accumulate { L::add(L::load(out), *c) } else { *c };
                L::store(out, c);
            }
        }
    }
}

#[inline(always)]
unsafe fn run_body<L: Lanes>(t: &Task<'_>) {
    // SAFETY: forwarded.
    unsafe {
        if t.w.four {
            all_rows::<L, true>(t);
        } else {
            all_rows::<L, false>(t);
        }
    }
}

#[inline(always)]
unsafe fn all_rows<L: Lanes, const FOUR: bool>(t: &Task<'_>) {
    let end = t.first + t.tiles;
    for tile in (t.first..end).step_by(2) {
        // SAFETY: rows and tiles exist.
        unsafe {
            if tile + 2 <= end {
                rows_of::<L, 2, FOUR>(t, tile);
            } else {
                rows_of::<L, 1, FOUR>(t, tile);
            }
        }
    }
}

#[inline(always)]
unsafe fn rows_of<L: Lanes, const N: usize, const FOUR: bool>(t: &Task<'_>, tile: usize) {
    let (mut row, rows) = (0, t.rows.rows());
    // SAFETY: rows and tiles exist.
    unsafe {
        while rows - row >= ROWS {
            // As many sums as two tiles of half as many rows, and weights are taken apart once.
            for i in 0..N {
                some_tiles::<L, ROWS, 1, FOUR>(t, row, tile + i);
            }
            row += ROWS;
        }
        if rows - row >= 4 {
            some_tiles::<L, 4, N, FOUR>(t, row, tile);
            row += 4;
        }
        match rows - row {
            3 => some_tiles::<L, 3, N, FOUR>(t, row, tile),
            2 => some_tiles::<L, 2, N, FOUR>(t, row, tile),
            1 => some_tiles::<L, 1, N, FOUR>(t, row, tile),
            _ => {}
        }
    }
}

dispatch! {
    /// Runs one task.
    ///
    /// # Safety
    /// The task's tiles and rows exist and nobody else uses its columns of C.
    unsafe fn run => run_body(t: &Task<'_>)
}

fn product(isa: Isa, a: &QuantRows, w: &QuantMatrix, c: &mut [f32], accumulate: bool) {
    assert_eq!(a.k, w.k, "rows of {} for weights of {}", a.k, w.k);
    assert_eq!(c.len(), a.rows() * w.padded_n(), "C has the wrong size");
    let tiles = w.padded_n() / TILE;
    let tile_bytes = w.k / QUANT_BLOCK * w.tile_bytes();
    // As many tasks for each thread: which columns a task has changes no bit of them.
    let threads = team::threads();
    let rounds = (tiles * tile_bytes).div_ceil(threads * TASK_BYTES).max(1);
    let per_task = tiles.div_ceil(threads * rounds).next_multiple_of(2);
    let (c, data) = (c.as_mut_ptr(), w.data.as_ptr());
    let all = Task { rows: a, w, data, first: 0, tiles, c, accumulate };
    team::for_each(tiles.div_ceil(per_task), |i| {
        let task = all.part(i * per_task, per_task);
        // SAFETY: tasks cover disjoint columns of C, all inside the checked slice.
        unsafe { run(isa, &task) }
    });
}

/// `c[m][padded_n] = a[m][k] · wᵀ`; columns past `n` are zero.
///
/// # Panics
/// If the sizes do not fit each other.
pub fn quant_gemm(isa: Isa, a: &QuantRows, w: &QuantMatrix, c: &mut [f32]) {
    product(isa, a, w, c, false);
}

/// `c[m][n] += a[m][k] · wᵀ`, each product summed up before it is added; n is a multiple of 16.
///
/// # Panics
/// If the sizes do not fit each other.
pub fn quant_gemm_add(isa: Isa, a: &QuantRows, w: &QuantMatrix, c: &mut [f32]) {
    assert_eq!(w.n(), w.padded_n(), "columns must be whole tiles");
    product(isa, a, w, c, true);
}

#[inline(always)]
unsafe fn gate_body<L: Lanes>(gate_up: &[f32], out: &mut [f32]) {
    let width = out.len();
    // SAFETY: `gate_up` is twice as long as `out`, a multiple of 16.
    unsafe {
        for i in (0..width).step_by(LANES) {
            let gate = L::load(gate_up.as_ptr().add(i));
            let up = L::load(gate_up.as_ptr().add(width + i));
            L::store(out.as_mut_ptr().add(i), silu_mul::<L>(gate, up));
        }
    }
}

dispatch! {
    /// One row.
    ///
    /// # Safety
    /// `gate_up` is twice as long as `out`, whose length is a multiple of 16.
    unsafe fn gate => gate_body(gate_up: &[f32], out: &mut [f32])
}

/// `out = silu(gate) · up` for rows laid out `[gate][up]`, `width` each.
///
/// # Panics
/// If the slices do not fit each other or `width` is not a multiple of 16.
pub fn gate_rows(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(width.is_multiple_of(LANES) && gate_up.len() == 2 * out.len());
    assert!(out.len().is_multiple_of(width));
    for (out, row) in out.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)) {
        // SAFETY: the row is twice as long as `out`, whose length is a multiple of 16.
        unsafe { gate(isa, row, out) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_times_every_half() {
        for bits in 0..=u16::MAX {
            if bits >> 10 & 31 == 31 {
                continue;
            }
            let widen = |bits| f16::from_bits(bits).to_f32();
            let (x, y) = (widen(bits), widen(times_minus_8(bits)));
            let wanted = -8.0 * x;
            let wanted = if wanted.abs() >= 65_520.0 { wanted * f32::INFINITY } else { wanted };
            assert_eq!((y, y.is_sign_negative()), (wanted, !x.is_sign_negative()), "{bits:04x}");
        }
    }
}
