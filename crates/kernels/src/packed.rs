//! Weight matrices, packed once at load for the micro-kernel.

use matkv_types::{Precision, bf16_to_f32};

use crate::lanes::{LANES, to_bf16};
use crate::product::Elem;
use crate::storage::{SharedBytes, Storage};

/// Columns of a packed panel: two column tiles, which the micro-kernel takes together.
pub(crate) const PANEL: usize = 2 * LANES;

/// A weight matrix `[n][k]` packed as `[n / 32][k / 2][2 tiles]` of pairs: f32 `[2][16]` or bf16
/// `[16][2]`. A panel is one stream of memory. n is padded with zeros.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    pub(crate) data: Packed,
}

pub(crate) enum Packed {
    F32(Storage<f32>),
    Bf16(Storage<u16>),
}

/// Index of `(row, i)` in a packed matrix.
#[inline(always)]
fn index<E: Elem>(k: usize, row: usize, i: usize) -> usize {
    let tile = (i / 2 * 2 + row % PANEL / LANES) * PANEL;
    row / PANEL * PANEL * k + tile + E::index(row % LANES, i % 2)
}

fn pack<E: Elem>(parts: &[(&[f32], usize)], k: usize, convert: impl Fn(f32) -> E) -> Vec<E> {
    let n: usize = parts.iter().map(|p| p.1).sum();
    let mut data = vec![E::default(); n.next_multiple_of(PANEL) * k];
    let mut row = 0;
    for (weights, rows) in parts {
        assert_eq!(weights.len(), rows * k, "a weight part has the wrong size");
        for source in weights.chunks_exact(k) {
            for (i, &w) in source.iter().enumerate() {
                data[index::<E>(k, row, i)] = convert(w);
            }
            row += 1;
        }
    }
    data
}

impl PackedMatrix {
    /// Names the packing: files of another one are not read.
    pub const LAYOUT: u32 = 1;

    /// Packs a row-major `[n][k]` matrix, rounded to what `precision` multiplies.
    ///
    /// # Panics
    /// If `weights` does not hold `n · k` elements or `k` is odd.
    pub fn pack(weights: &[f32], n: usize, k: usize, precision: Precision) -> Self {
        Self::pack_stacked(&[(weights, n)], k, precision)
    }

    /// Packs matrices of equal `k`, one below the other.
    ///
    /// # Panics
    /// If a part does not hold `n · k` elements or `k` is odd.
    pub fn pack_stacked(parts: &[(&[f32], usize)], k: usize, precision: Precision) -> Self {
        assert!(k.is_multiple_of(2), "k = {k} must be even");
        let data = match precision {
            Precision::Exact => Packed::F32(Storage::Owned(pack(parts, k, |w| w))),
            Precision::Bf16 => Packed::Bf16(Storage::Owned(pack(parts, k, to_bf16))),
        };
        Self { n: parts.iter().map(|p| p.1).sum(), k, data }
    }

    /// A matrix that was packed before, from its [`Self::as_bytes`]; none if `n` and `k` need
    /// another number of them.
    pub fn shared(bytes: SharedBytes, n: usize, k: usize, precision: Precision) -> Option<Self> {
        let len = n.next_multiple_of(PANEL) * k;
        let data = match precision {
            Precision::Exact => Packed::F32(Storage::shared(bytes, len)?),
            Precision::Bf16 => Packed::Bf16(Storage::shared(bytes, len)?),
        };
        k.is_multiple_of(2).then_some(Self { n, k, data })
    }

    /// Output columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Copies row `row` of the matrix, as it is multiplied, into `out` (`k` elements).
    ///
    /// # Panics
    /// If the row does not exist or `out` is not `k` long.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k);
        let k = self.k;
        for (i, x) in out.iter_mut().enumerate() {
            *x = match &self.data {
                Packed::F32(data) => data[index::<f32>(k, row, i)],
                Packed::Bf16(data) => bf16_to_f32(data[index::<u16>(k, row, i)]),
            };
        }
    }

    /// The packed elements.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.data {
            Packed::F32(data) => data.as_bytes(),
            Packed::Bf16(data) => data.as_bytes(),
        }
    }

    /// Width of an output row: n rounded up to whole column tiles.
    pub fn padded_n(&self) -> usize {
        self.n.next_multiple_of(LANES)
    }
}
