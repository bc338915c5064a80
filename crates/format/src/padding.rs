//! Zeroing what no row owns, so that the same chunk is the same bytes.

use matkv_types::{KvDtype, KvLayout, TILE_ROWS};

/// In a bf16 section, zeroes the rows that pad the last tile of every head, and the end of every
/// layer.
pub(crate) fn zero(section: &mut [u8], layout: &KvLayout) {
    debug_assert!(layout.dtype == KvDtype::Bf16);
    let (dim, bytes) = (layout.shape.head_dim, 2);
    for layer in 0..layout.shape.layers {
        let start = layout.k_offset(layer, 0);
        section[start + layout.layer_bytes()..start + layout.layer_stride()].fill(0);
        for head in 0..layout.shape.kv_heads {
            for row in layout.rows..layout.padded_rows() {
                debug_assert!(row / TILE_ROWS == (layout.padded_rows() - 1) / TILE_ROWS);
                for d in 0..dim {
                    let k = layout.k_offset(layer, head) + KvLayout::k_index(dim, row, d) * bytes;
                    let v = layout.v_offset(layer, head) + KvLayout::v_index(dim, row, d) * bytes;
                    section[k..k + bytes].fill(0);
                    section[v..v + bytes].fill(0);
                }
            }
        }
    }
}
