//! A linear layer, however its weights are kept, and what is multiplied with it.

use matkv_kernels::{
    Activations, ActivationsMut, Isa, PackedMatrix, QuantMatrix, QuantRows, SharedBytes, gate_rows,
    gemm, gemm_add, gemm_gated, quant_gemm, quant_gemm_add, resize_unread,
};
use matkv_types::Precision;

use crate::error::{ModelError, Result};
use crate::gguf::Gguf;
use crate::weights_file::Sections;

/// Weights of a linear layer.
pub(crate) enum Linear {
    /// Dense: for many rows.
    Packed(PackedMatrix),
    /// As they are in the file: for few rows, which cost what their weights take to be read.
    Quant(QuantMatrix),
}

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Dense, rounded to a precision.
    Packed(Precision),
    /// As they are in the file.
    Quant,
}

/// Names and rows of tensors that lie one below the other.
type Parts<'a> = &'a [(&'a str, usize)];

/// Where weights are read from.
pub(crate) struct Source<'a> {
    /// The model file.
    pub gguf: &'a mut Gguf,
    /// Matrices packed before, in the order in which they are read.
    pub packed: Option<Sections>,
}

impl Source<'_> {
    /// The next matrix, if they have been packed before.
    fn shared<M>(
        &mut self,
        name: &str,
        matrix: impl FnOnce(SharedBytes) -> Option<M>,
    ) -> Result<Option<M>> {
        let Some(sections) = &mut self.packed else { return Ok(None) };
        match sections.next().and_then(matrix) {
            Some(matrix) => Ok(Some(matrix)),
            None => Err(ModelError::Tensor {
                name: name.to_owned(),
                reason: "its packed weights have another size".to_owned(),
            }),
        }
    }
}

fn read_packed(
    source: &mut Source<'_>,
    parts: Parts<'_>,
    k: usize,
    to: Precision,
) -> Result<PackedMatrix> {
    let n = parts.iter().map(|p| p.1).sum();
    let shared = |bytes| PackedMatrix::shared(bytes, n, k, to);
    if let Some(matrix) = source.shared(parts[0].0, shared)? {
        return Ok(matrix);
    }
    let read = |(name, n): &(&str, usize)| Ok((source.gguf.tensor(name, &[*n, k])?, *n));
    let dense: Vec<_> = parts.iter().map(read).collect::<Result<_>>()?;
    let parts: Vec<_> = dense.iter().map(|(w, n)| (w.as_slice(), *n)).collect();
    Ok(PackedMatrix::pack_stacked(&parts, k, to))
}

fn read_quant(source: &mut Source<'_>, parts: Parts<'_>, k: usize) -> Result<QuantMatrix> {
    let name = parts[0].0;
    let kind = source.gguf.quant_kind(name).ok_or_else(|| ModelError::Tensor {
        name: name.to_owned(),
        reason: "its type is not one that is multiplied as it is".to_owned(),
    })?;
    let n = parts.iter().map(|p| p.1).sum();
    if let Some(matrix) = source.shared(name, |bytes| QuantMatrix::shared(bytes, n, kind, k))? {
        return Ok(matrix);
    }
    let read = |(name, n): &(&str, usize)| Ok((source.gguf.blocks(name, &[*n, k])?, *n));
    let blocks: Vec<_> = parts.iter().map(read).collect::<Result<_>>()?;
    let parts: Vec<_> = blocks.iter().map(|(w, n)| (w.as_slice(), *n)).collect();
    Ok(QuantMatrix::pack_stacked(&parts, kind, k))
}

impl Linear {
    /// Reads tensors of equal width, one below the other.
    pub fn read(source: &mut Source<'_>, parts: Parts<'_>, k: usize, kept: Kept) -> Result<Self> {
        match kept {
            Kept::Packed(precision) => read_packed(source, parts, k, precision).map(Self::Packed),
            Kept::Quant => read_quant(source, parts, k).map(Self::Quant),
        }
    }

    /// Whether tensors may be kept as they are: all are of one kind the kernels know.
    pub fn may_be_quant(gguf: &Gguf, names: &[&str]) -> bool {
        let kinds: Vec<_> = names.iter().map(|n| gguf.quant_kind(n)).collect();
        kinds.iter().all(|k| k.is_some() && *k == kinds[0])
    }

    /// Input columns.
    pub fn k(&self) -> usize {
        match self {
            Self::Packed(w) => w.k(),
            Self::Quant(w) => w.k(),
        }
    }

    /// Width of an output row.
    pub fn padded_n(&self) -> usize {
        match self {
            Self::Packed(w) => w.padded_n(),
            Self::Quant(w) => w.padded_n(),
        }
    }

    /// The packed weights.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Packed(w) => w.as_bytes(),
            Self::Quant(w) => w.as_bytes(),
        }
    }

    /// Copies one row of the matrix.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Packed(w) => w.unpack_row(row, out),
            Self::Quant(w) => w.unpack_row(row, out),
        }
    }

    /// `c = a · wᵀ`.
    pub fn product(&self, isa: Isa, a: &mut Input, c: &mut [f32]) {
        match (self, a) {
            (Self::Packed(w), Input { values, .. }) => gemm(isa, values, w, c),
            (Self::Quant(w), a) => quant_gemm(isa, a.quantized(isa, w.k()), w, c),
        }
    }

    /// `c += a · wᵀ`.
    pub fn add_product(&self, isa: Isa, a: &mut Input, c: &mut [f32]) {
        match (self, a) {
            (Self::Packed(w), Input { values, .. }) => gemm_add(isa, values, w, c),
            (Self::Quant(w), a) => quant_gemm_add(isa, a.quantized(isa, w.k()), w, c),
        }
    }
}

/// Gate and up projections of a feed-forward layer.
pub(crate) enum GateUp {
    /// Gate and up.
    Packed(PackedMatrix, PackedMatrix),
    /// One above the other.
    Quant(QuantMatrix),
}

impl GateUp {
    /// Reads both, `ffn` rows each.
    pub fn read(
        source: &mut Source<'_>,
        names: [&str; 2],
        (ffn, k): (usize, usize),
        kept: Kept,
    ) -> Result<Self> {
        let [gate, up] = names.map(|name| (name, ffn));
        match kept {
            Kept::Packed(precision) => Ok(Self::Packed(
                read_packed(source, &[gate], k, precision)?,
                read_packed(source, &[up], k, precision)?,
            )),
            Kept::Quant => read_quant(source, &[gate, up], k).map(Self::Quant),
        }
    }

    /// The packed weights, in the order in which they are read.
    pub fn matrices(&self) -> Vec<&[u8]> {
        match self {
            Self::Packed(gate, up) => vec![gate.as_bytes(), up.as_bytes()],
            Self::Quant(w) => vec![w.as_bytes()],
        }
    }

    /// `out = silu(gate · a) · (up · a)`; `scratch` is memory that is used again.
    pub fn product(&self, isa: Isa, a: &mut Input, scratch: &mut Vec<f32>, out: &mut Input) {
        match self {
            Self::Packed(gate, up) => gemm_gated(isa, &a.values, gate, up, &mut out.values),
            Self::Quant(w) => {
                let rows = a.quantized(isa, w.k());
                resize_unread(scratch, rows.rows() * w.padded_n(), f32::NAN);
                quant_gemm(isa, rows, w, scratch);
                if let ActivationsMut::F32(out) = out.values.as_mut() {
                    gate_rows(isa, scratch, w.n() / 2, out);
                }
            }
        }
    }
}

/// Rows that are multiplied with weights: written by whoever computes them in the type the
/// product takes, or as f32 that are quantized when they are needed.
pub(crate) struct Input {
    /// What is written.
    pub values: Activations,
    rows: QuantRows,
}

impl Input {
    /// `len` zeros for weights that are kept like this.
    pub fn zeros(kept: Kept, len: usize) -> Self {
        let precision = match kept {
            Kept::Packed(precision) => precision,
            Kept::Quant => Precision::Exact,
        };
        Self { values: Activations::zeros(precision, len), rows: QuantRows::default() }
    }

    /// `len` elements of any value, to be written; memory is used again.
    pub fn resize(&mut self, len: usize) {
        self.values.resize(len);
    }

    fn quantized(&mut self, isa: Isa, k: usize) -> &QuantRows {
        if let Activations::F32(values) = &self.values {
            self.rows.quantize(isa, values, k);
        }
        &self.rows
    }
}
