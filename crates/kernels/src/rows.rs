//! Writing rows into a KV section, and reading single elements back (for tests and encoders).

use matkv_types::{KvDtype, KvLayout};

/// Rounds to bfloat16, ties to even; NaN stays NaN.
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Widens a bfloat16.
pub fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

fn put(block: &mut [u8], dtype: KvDtype, index: usize, value: f32) {
    match dtype {
        KvDtype::Bf16 => {
            block[2 * index..2 * index + 2].copy_from_slice(&f32_to_bf16(value).to_le_bytes());
        }
        KvDtype::F32 => block[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes()),
    }
}

fn get(block: &[u8], dtype: KvDtype, index: usize) -> f32 {
    match dtype {
        KvDtype::Bf16 => bf16_to_f32(u16::from_le_bytes([block[2 * index], block[2 * index + 1]])),
        KvDtype::F32 => {
            let at = 4 * index;
            f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        }
    }
}

/// Element index of `(row, dim)` in a K block of this element type.
fn k_index(dtype: KvDtype, head_dim: usize, row: usize, dim: usize) -> usize {
    let index = KvLayout::k_index(head_dim, row, dim);
    match dtype {
        KvDtype::Bf16 => index,
        KvDtype::F32 => index / 32 * 32 + (index % 2) * 16 + index % 32 / 2,
    }
}

/// Element index of `(row, dim)` in a V block of this element type.
fn v_index(dtype: KvDtype, head_dim: usize, row: usize, dim: usize) -> usize {
    let index = KvLayout::v_index(head_dim, row, dim);
    match dtype {
        KvDtype::Bf16 => index,
        KvDtype::F32 => index / 32 * 32 + (index % 2) * 16 + index % 32 / 2,
    }
}

/// Writes the K and V of one row (`[kv_heads · head_dim]` each) into a KV section.
///
/// # Panics
/// If `section` is shorter than the layout, or the row or the vectors do not fit it.
pub fn write_rows(
    section: &mut [u8],
    layout: &KvLayout,
    layer: usize,
    row: usize,
    k: &[f32],
    v: &[f32],
) {
    let dim = layout.shape.head_dim;
    assert!(row < layout.rows && k.len() == layout.shape.kv_heads * dim && v.len() == k.len());
    for head in 0..layout.shape.kv_heads {
        let at = layout.k_offset(layer, head);
        let (k_block, v_block) =
            section[at..at + 2 * layout.block_bytes()].split_at_mut(layout.block_bytes());
        for d in 0..dim {
            put(k_block, layout.dtype, k_index(layout.dtype, dim, row, d), k[head * dim + d]);
            put(v_block, layout.dtype, v_index(layout.dtype, dim, row, d), v[head * dim + d]);
        }
    }
}

/// One element of a K row.
pub fn read_k(s: &[u8], layout: &KvLayout, at: (usize, usize), row: usize, dim: usize) -> f32 {
    let block = &s[layout.k_offset(at.0, at.1)..][..layout.block_bytes()];
    get(block, layout.dtype, k_index(layout.dtype, layout.shape.head_dim, row, dim))
}

/// One element of a V row.
pub fn read_v(s: &[u8], layout: &KvLayout, at: (usize, usize), row: usize, dim: usize) -> f32 {
    let block = &s[layout.v_offset(at.0, at.1)..][..layout.block_bytes()];
    get(block, layout.dtype, v_index(layout.dtype, layout.shape.head_dim, row, dim))
}
