//! Weights in the kernels' packing: dense, f32 (exact to the model's own quantization) or rounded
//! to bf16, for prefill; as they are in the file for decoding, where that is possible.

use matkv_types::Precision;

use crate::config::LlamaConfig;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::linear::{GateUp, Kept, Linear};

/// What a process computes with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Many rows at a time.
    Prefill,
    /// One row of each sequence at a time.
    Decode,
}

pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Query, key and value projections, stacked.
    pub qkv: Linear,
    pub output: Linear,
    pub ffn_norm: Vec<f32>,
    pub gate_up: GateUp,
    pub down: Linear,
}

/// All weights of a model.
pub struct LlamaWeights {
    pub(crate) layers: Vec<Layer>,
    /// How those of the layers are kept.
    pub(crate) kept: Kept,
    pub(crate) norm: Vec<f32>,
    pub(crate) embedding: Linear,
    /// Absent when the output projection is the embedding itself.
    pub(crate) head: Option<Linear>,
    /// How the output projection is kept.
    pub(crate) head_kept: Kept,
}

const MATRICES: [&str; 7] =
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

fn in_layer(i: usize, name: &str) -> String {
    format!("blk.{i}.{name}.weight")
}

impl LlamaWeights {
    pub(crate) fn read(
        gguf: &mut Gguf,
        c: &LlamaConfig,
        precision: Precision,
        phase: Phase,
    ) -> Result<Self> {
        let exact = precision == Precision::Exact;
        let as_they_are = |gguf: &Gguf, names: &[&str]| -> Kept {
            if !exact && Linear::may_be_quant(gguf, names) {
                return Kept::Quant;
            }
            Kept::Packed(precision)
        };
        let of_layer = |i| {
            let names = MATRICES.map(|name| in_layer(i, name));
            as_they_are(gguf, &names.each_ref().map(String::as_str))
        };
        // One input buffer serves all layers: either all are kept as they are, or none.
        let quant = phase == Phase::Decode && (0..c.layers).all(|i| of_layer(i) == Kept::Quant);
        let kept = if quant { Kept::Quant } else { Kept::Packed(precision) };
        let layers = (0..c.layers).map(|i| read_layer(gguf, c, i, kept)).collect::<Result<_>>()?;
        // Of the output projection one row of a sequence is wanted in either phase.
        let embedding_name = "token_embd.weight";
        let tied = !gguf.has_tensor("output.weight");
        let head_name = if tied { embedding_name } else { "output.weight" };
        let head_kept = as_they_are(gguf, &[head_name]);
        let embedding_kept = as_they_are(gguf, &[embedding_name]);
        let embedding = Linear::read(gguf, &[(embedding_name, c.vocab)], c.hidden, embedding_kept)?;
        let head = if tied {
            None
        } else {
            Some(Linear::read(gguf, &[(head_name, c.vocab)], c.hidden, head_kept)?)
        };
        let norm = gguf.tensor("output_norm.weight", &[c.hidden])?;
        Ok(Self { layers, kept, norm, embedding, head, head_kept })
    }

    /// Bytes of packed matrices.
    pub fn bytes(&self) -> usize {
        let layer =
            |l: &Layer| l.qkv.bytes() + l.output.bytes() + l.gate_up.bytes() + l.down.bytes();
        self.layers.iter().map(layer).sum::<usize>()
            + self.embedding.bytes()
            + self.head.as_ref().map_or(0, Linear::bytes)
    }
}

fn read_layer(gguf: &mut Gguf, c: &LlamaConfig, i: usize, kept: Kept) -> Result<Layer> {
    let (h, q, kv) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let name = |name: &str| in_layer(i, name);
    let (wq, wk, wv) = (name("attn_q"), name("attn_k"), name("attn_v"));
    let (gate, up) = (name("ffn_gate"), name("ffn_up"));
    Ok(Layer {
        attention_norm: gguf.tensor(&name("attn_norm"), &[h])?,
        qkv: Linear::read(gguf, &[(&wq, q), (&wk, kv), (&wv, kv)], h, kept)?,
        output: Linear::read(gguf, &[(&name("attn_output"), h)], q, kept)?,
        ffn_norm: gguf.tensor(&name("ffn_norm"), &[h])?,
        gate_up: GateUp::read(gguf, [&gate, &up], (c.ffn, h), kept)?,
        down: Linear::read(gguf, &[(&name("ffn_down"), h)], c.ffn, kept)?,
    })
}
