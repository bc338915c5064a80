//! Writing rows into a KV section, and reading single elements back (for tests and encoders).

use matkv_types::{GROUP_ROWS, KvDtype, KvLayout, bf16_to_f32, f32_to_bf16};

use crate::team;

/// Up to this many rows are written by the calling thread.
const SERIAL_ROWS: usize = 16;

/// Rows are written one by one in these types only; the others have scales over many rows.
fn put(block: &mut [u8], dtype: KvDtype, index: usize, value: f32) {
    match dtype {
        KvDtype::F32 => block[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes()),
        KvDtype::Bf16 => {
            block[2 * index..2 * index + 2].copy_from_slice(&f32_to_bf16(value).to_le_bytes());
        }
        other => panic!("rows of type {other} are not written one by one"),
    }
}

fn bf16_at(bytes: &[u8], index: usize) -> f32 {
    bf16_to_f32(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]))
}

fn get(block: &[u8], dtype: KvDtype, index: usize) -> f32 {
    match dtype {
        KvDtype::F32 => {
            let at = 4 * index;
            f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        }
        KvDtype::Bf16 => bf16_at(block, index),
        KvDtype::Int8 => f32::from(block[index] as i8),
        other => panic!("attention does not read rows of type {other}"),
    }
}

/// Index of an element of a block; f32 pairs are stored one after the other, not interleaved.
fn in_block(dtype: KvDtype, index: usize) -> usize {
    match dtype {
        KvDtype::F32 => index / 32 * 32 + (index % 2) * 16 + index % 32 / 2,
        _ => index,
    }
}

/// Element index of `(row, dim)` in a K block of this element type.
fn k_index(dtype: KvDtype, head_dim: usize, row: usize, dim: usize) -> usize {
    in_block(dtype, KvLayout::k_index(head_dim, row, dim))
}

/// Element index of `(row, dim)` in a V block of this element type.
fn v_index(dtype: KvDtype, head_dim: usize, row: usize, dim: usize) -> usize {
    in_block(dtype, KvLayout::v_index(head_dim, row, dim))
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

/// New K or V rows of all heads, `[row][heads · head_dim]` inside rows of `stride`.
#[derive(Clone, Copy)]
pub struct NewRows<'a> {
    /// First element of the first row.
    pub values: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// Writes K and V of rows `at` into a KV section, heads side by side on the caller's team.
///
/// # Panics
/// As [`write_rows`].
pub fn append_rows(
    section: &mut [u8],
    layout: &KvLayout,
    layer: usize,
    at: &[usize],
    k: NewRows<'_>,
    v: NewRows<'_>,
) {
    let (dim, heads) = (layout.shape.head_dim, layout.shape.kv_heads);
    assert!(at.iter().all(|&row| row < layout.rows), "a row past the section's end");
    let first = layout.k_offset(layer, 0);
    let blocks = &mut section[first..first + heads * 2 * layout.block_bytes()];
    let write = |i: usize, block: &mut [u8]| {
        let is_k = i.is_multiple_of(2);
        let rows = if is_k { k } else { v };
        let index = if is_k { k_index } else { v_index };
        for (n, &row) in at.iter().enumerate() {
            let values = &rows.values[n * rows.stride + i / 2 * dim..][..dim];
            for (d, &x) in values.iter().enumerate() {
                put(block, layout.dtype, index(layout.dtype, dim, row, d), x);
            }
        }
    };
    if at.len() > SERIAL_ROWS {
        team::for_each_part(blocks, layout.block_bytes(), write);
    } else {
        let blocks = blocks.chunks_exact_mut(layout.block_bytes()).enumerate();
        blocks.for_each(|(i, block)| write(i, block));
    }
}

/// One element of a K row.
pub fn read_k(s: &[u8], layout: &KvLayout, at: (usize, usize), row: usize, dim: usize) -> f32 {
    let block = &s[layout.k_offset(at.0, at.1)..][..layout.block_bytes()];
    let head_dim = layout.shape.head_dim;
    let x = get(block, layout.dtype, k_index(layout.dtype, head_dim, row, dim));
    if layout.dtype != KvDtype::Int8 {
        return x;
    }
    let scales = &s[layout.k_scale_offset(at.0, at.1)..][..layout.k_scale_bytes()];
    x * bf16_at(scales, row / GROUP_ROWS * head_dim + dim)
}

/// One element of a V row.
pub fn read_v(s: &[u8], layout: &KvLayout, at: (usize, usize), row: usize, dim: usize) -> f32 {
    let block = &s[layout.v_offset(at.0, at.1)..][..layout.block_bytes()];
    let x = get(block, layout.dtype, v_index(layout.dtype, layout.shape.head_dim, row, dim));
    if layout.dtype != KvDtype::Int8 {
        return x;
    }
    x * bf16_at(&s[layout.v_scale_offset(at.0, at.1)..][..layout.v_scale_bytes()], row)
}
