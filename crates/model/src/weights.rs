//! Weights in the kernels' packing. Dense f32: every product is exact to the model's own
//! quantization, and prefill runs at the speed of f32 FMA.

use matkv_kernels::PackedMatrix;

use crate::config::LlamaConfig;
use crate::error::Result;
use crate::gguf::Gguf;

pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Query, key and value projections, stacked.
    pub qkv: PackedMatrix,
    pub output: PackedMatrix,
    pub ffn_norm: Vec<f32>,
    /// Gate and up projections, stacked.
    pub gate_up: PackedMatrix,
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
    pub(crate) fn read(gguf: &mut Gguf, c: &LlamaConfig) -> Result<Self> {
        let layers = (0..c.layers).map(|i| read_layer(gguf, c, i)).collect::<Result<_>>()?;
        let mut matrix = |name: &str| -> Result<PackedMatrix> {
            let dense = gguf.tensor(name, &[c.vocab, c.hidden])?;
            Ok(PackedMatrix::pack(&dense, c.vocab, c.hidden))
        };
        let embedding = matrix("token_embd.weight")?;
        let head = if gguf.has_tensor("output.weight") {
            let dense = gguf.tensor("output.weight", &[c.vocab, c.hidden])?;
            Some(PackedMatrix::pack(&dense, c.vocab, c.hidden))
        } else {
            None
        };
        let norm = gguf.tensor("output_norm.weight", &[c.hidden])?;
        Ok(Self { layers, norm, embedding, head })
    }

    /// Bytes of packed matrices.
    pub fn bytes(&self) -> usize {
        let layer =
            |l: &Layer| l.qkv.bytes() + l.output.bytes() + l.gate_up.bytes() + l.down.bytes();
        self.layers.iter().map(layer).sum::<usize>()
            + self.embedding.bytes()
            + self.head.as_ref().map_or(0, PackedMatrix::bytes)
    }
}

fn read_layer(gguf: &mut Gguf, c: &LlamaConfig, i: usize) -> Result<Layer> {
    let (h, q, kv) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let mut get = |name: &str, dims: &[usize]| gguf.tensor(&format!("blk.{i}.{name}.weight"), dims);
    let (wq, wk, wv) =
        (get("attn_q", &[q, h])?, get("attn_k", &[kv, h])?, get("attn_v", &[kv, h])?);
    let (gate, up) = (get("ffn_gate", &[c.ffn, h])?, get("ffn_up", &[c.ffn, h])?);
    Ok(Layer {
        attention_norm: get("attn_norm", &[h])?,
        qkv: PackedMatrix::pack_stacked(&[(&wq, q), (&wk, kv), (&wv, kv)], h),
        output: PackedMatrix::pack(&get("attn_output", &[h, q])?, h, q),
        ffn_norm: get("ffn_norm", &[h])?,
        gate_up: PackedMatrix::pack_stacked(&[(&gate, c.ffn), (&up, c.ffn)], h),
        down: PackedMatrix::pack(&get("ffn_down", &[h, c.ffn])?, h, c.ffn),
    })
}
