//! Weights in the kernels' packing: f32, exact to the model's own quantization, or rounded to
//! bf16.

use matkv_kernels::PackedMatrix;
use matkv_types::Precision;

use crate::config::LlamaConfig;
use crate::error::Result;
use crate::gguf::Gguf;

pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Query, key and value projections, stacked.
    pub qkv: PackedMatrix,
    pub output: PackedMatrix,
    pub ffn_norm: Vec<f32>,
    pub gate: PackedMatrix,
    pub up: PackedMatrix,
    pub down: PackedMatrix,
}

/// All weights of a model.
pub struct LlamaWeights {
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) embedding: PackedMatrix,
    /// Absent when the output projection is the embedding itself.
    pub(crate) head: Option<PackedMatrix>,
}

impl LlamaWeights {
    pub(crate) fn read(gguf: &mut Gguf, c: &LlamaConfig, precision: Precision) -> Result<Self> {
        let layers =
            (0..c.layers).map(|i| read_layer(gguf, c, i, precision)).collect::<Result<_>>()?;
        let mut matrix = |name: &str| -> Result<PackedMatrix> {
            let dense = gguf.tensor(name, &[c.vocab, c.hidden])?;
            Ok(PackedMatrix::pack(&dense, c.vocab, c.hidden, precision))
        };
        let embedding = matrix("token_embd.weight")?;
        let head = if gguf.has_tensor("output.weight") {
            let dense = gguf.tensor("output.weight", &[c.vocab, c.hidden])?;
            Some(PackedMatrix::pack(&dense, c.vocab, c.hidden, precision))
        } else {
            None
        };
        let norm = gguf.tensor("output_norm.weight", &[c.hidden])?;
        Ok(Self { layers, norm, embedding, head })
    }

    /// Bytes of packed matrices.
    pub fn bytes(&self) -> usize {
        let matrices = |l: &Layer| -> usize {
            [&l.qkv, &l.output, &l.gate, &l.up, &l.down].map(PackedMatrix::bytes).iter().sum()
        };
        self.layers.iter().map(matrices).sum::<usize>()
            + self.embedding.bytes()
            + self.head.as_ref().map_or(0, PackedMatrix::bytes)
    }
}

fn read_layer(gguf: &mut Gguf, c: &LlamaConfig, i: usize, precision: Precision) -> Result<Layer> {
    let (h, q, kv) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let mut get = |name: &str, dims: &[usize]| gguf.tensor(&format!("blk.{i}.{name}.weight"), dims);
    let (wq, wk, wv) =
        (get("attn_q", &[q, h])?, get("attn_k", &[kv, h])?, get("attn_v", &[kv, h])?);
    let (attention_norm, ffn_norm) = (get("attn_norm", &[h])?, get("ffn_norm", &[h])?);
    let mut pack = |name: &str, n: usize, k: usize| -> Result<PackedMatrix> {
        Ok(PackedMatrix::pack(&get(name, &[n, k])?, n, k, precision))
    };
    Ok(Layer {
        attention_norm,
        qkv: PackedMatrix::pack_stacked(&[(&wq, q), (&wk, kv), (&wv, kv)], h, precision),
        output: pack("attn_output", h, q)?,
        ffn_norm,
        gate: pack("ffn_gate", c.ffn, h)?,
        up: pack("ffn_up", c.ffn, h)?,
        down: pack("ffn_down", h, c.ffn)?,
    })
}
