//! Where a row's elements live inside a slot's KV section.
//!
//! The same arithmetic serves flash, arena and kernels, so that a load is one read and attention
//! reads what was read. A KV section is `layers` blocks, each page-aligned; inside a layer:
//! `[head 0 K][head 0 V][head 1 K][head 1 V]…`. Rows are padded to whole tiles of [`TILE_ROWS`];
//! kernels mask by row number and never rely on what the padding holds. Scales of the integer
//! types and of fp8 follow the blocks of their layer.

use serde::{Deserialize, Serialize};

use crate::encoding::KvDtype;

/// Rows of one K tile: 16 rows × 2 bf16 dimensions are one 64-byte cache line.
pub const TILE_ROWS: usize = 16;

/// Rows that share the K scales of a channel in the integer types. A multiple of [`TILE_ROWS`],
/// anchored at the slot's row 0.
pub const GROUP_ROWS: usize = 64;

/// Alignment of extents on flash and of layers in the arena: the O_DIRECT block.
pub const PAGE_BYTES: usize = 4096;

/// `value` rounded up to a multiple of `to`.
pub const fn align_up(value: usize, to: usize) -> usize {
    value.div_ceil(to) * to
}

/// What of a model decides the size of its KV rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShape {
    /// Transformer layers.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Dimensions per head; a multiple of 32.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes one token's K and V rows take over all layers, without scales and padding.
    pub const fn bytes_per_row(&self, dtype: KvDtype) -> usize {
        dtype.bytes_of(self.layers * self.kv_heads * 2 * self.head_dim)
    }
}

/// Arithmetic of one KV section: a shape, an element type and a row capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Shape of the model's KV.
    pub shape: KvShape,
    /// Element type.
    pub dtype: KvDtype,
    /// Rows the section has room for, before padding.
    pub rows: usize,
}

impl KvLayout {
    /// The layout of `rows` rows.
    pub const fn new(shape: KvShape, dtype: KvDtype, rows: usize) -> Self {
        Self { shape, dtype, rows }
    }

    /// Rows rounded up to whole tiles.
    pub const fn padded_rows(&self) -> usize {
        align_up(self.rows, TILE_ROWS)
    }

    /// Elements of one head's K (or V) block.
    pub const fn block_elems(&self) -> usize {
        self.padded_rows() * self.shape.head_dim
    }

    /// Bytes of one head's K (or V) block; a multiple of 64.
    pub const fn block_bytes(&self) -> usize {
        self.dtype.bytes_of(self.block_elems())
    }

    /// Bytes of one layer's K and V blocks, without scales.
    pub const fn rows_bytes(&self) -> usize {
        self.shape.kv_heads * 2 * self.block_bytes()
    }

    /// Bytes of one layer that carry rows and scales.
    pub const fn layer_bytes(&self) -> usize {
        self.rows_bytes() + self.shape.kv_heads * self.head_scale_bytes()
    }

    /// Numbers, bf16 each, that scale one group of one K channel.
    const fn numbers(&self) -> usize {
        match self.dtype {
            KvDtype::Int8 => 1,
            KvDtype::Int4 => 2,
            KvDtype::F32 | KvDtype::Bf16 | KvDtype::Fp16 | KvDtype::Fp8 => 0,
        }
    }

    /// Groups of rows that share K scales.
    pub const fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// Bytes of one head's K scales: bf16 `[group][dim]` (int8), `[group][dim][scale, minimum]`
    /// (int4), one (fp8).
    pub const fn k_scale_bytes(&self) -> usize {
        match self.dtype {
            KvDtype::Fp8 => 2,
            _ => 2 * self.numbers() * self.groups() * self.shape.head_dim,
        }
    }

    /// Bytes of one head's V scales: bf16 `[row]` (int8), `[row][scale, minimum]` (int4), one
    /// (fp8).
    pub const fn v_scale_bytes(&self) -> usize {
        match self.dtype {
            KvDtype::Fp8 => 2,
            _ => 2 * self.numbers() * self.padded_rows(),
        }
    }

    const fn head_scale_bytes(&self) -> usize {
        align_up(self.k_scale_bytes() + self.v_scale_bytes(), 64)
    }

    /// Byte offset of a head's K scales from the start of the section. They follow the blocks of
    /// the layer.
    pub const fn k_scale_offset(&self, layer: usize, head: usize) -> usize {
        layer * self.layer_stride() + self.rows_bytes() + head * self.head_scale_bytes()
    }

    /// Byte offset of a head's V scales from the start of the section.
    pub const fn v_scale_offset(&self, layer: usize, head: usize) -> usize {
        self.k_scale_offset(layer, head) + self.k_scale_bytes()
    }

    /// Distance from one layer to the next.
    pub const fn layer_stride(&self) -> usize {
        align_up(self.layer_bytes(), PAGE_BYTES)
    }

    /// Bytes of the whole section.
    pub const fn total_bytes(&self) -> usize {
        self.shape.layers * self.layer_stride()
    }

    /// Byte offset of a head's K block from the start of the section.
    pub const fn k_offset(&self, layer: usize, head: usize) -> usize {
        layer * self.layer_stride() + head * 2 * self.block_bytes()
    }

    /// Byte offset of a head's V block from the start of the section.
    pub const fn v_offset(&self, layer: usize, head: usize) -> usize {
        self.k_offset(layer, head) + self.block_bytes()
    }

    /// Element index of `(row, dim)` inside a head's K block.
    pub const fn k_index(head_dim: usize, row: usize, dim: usize) -> usize {
        (row / TILE_ROWS) * TILE_ROWS * head_dim
            + (dim / 2) * 2 * TILE_ROWS
            + (row % TILE_ROWS) * 2
            + dim % 2
    }

    /// Element index of `(row, dim)` inside a head's V block.
    pub const fn v_index(head_dim: usize, row: usize, dim: usize) -> usize {
        (row / 2) * 2 * head_dim + dim * 2 + row % 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn worked_sizes_of_smollm2() {
        let shape = KvShape { layers: 30, kv_heads: 3, head_dim: 64 };
        let layout = KvLayout::new(shape, KvDtype::Bf16, 1024);
        assert_eq!(layout.layer_bytes(), 786_432);
        assert_eq!(layout.total_bytes(), 23_592_960);
        assert_eq!(shape.bytes_per_row(KvDtype::Bf16), 23_040);
        // 393,216 bytes of rows; K scales 16 groups × 64 × 2, V scales 1,024 × 2, three heads.
        let layout = KvLayout::new(shape, KvDtype::Int8, 1024);
        assert_eq!(layout.layer_bytes(), 393_216 + 3 * (2048 + 2048));
        assert_eq!(
            layout.v_scale_offset(1, 2) + 2048,
            layout.layer_stride() + layout.layer_bytes()
        );
    }

    proptest! {
        /// Every (row, dim) has its own element, inside the block.
        #[test]
        fn indexes_are_a_bijection(rows in 1usize..80, half in 1usize..5) {
            let dim = half * 32;
            let shape = KvShape { layers: 1, kv_heads: 1, head_dim: dim };
            let layout = KvLayout::new(shape, KvDtype::Bf16, rows);
            let mut seen_k = vec![false; layout.block_elems()];
            let mut seen_v = vec![false; layout.block_elems()];
            for row in 0..layout.padded_rows() {
                for d in 0..dim {
                    let k = KvLayout::k_index(dim, row, d);
                    let v = KvLayout::v_index(dim, row, d);
                    prop_assert!(!std::mem::replace(&mut seen_k[k], true));
                    prop_assert!(!std::mem::replace(&mut seen_v[v], true));
                }
            }
            prop_assert!(seen_k.iter().chain(&seen_v).all(|&s| s));
        }
    }
}
