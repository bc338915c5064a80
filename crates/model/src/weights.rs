//! Weights in the kernels' packing: dense, f32 (exact to the model's own quantization) or rounded
//! to bf16, for prefill; as they are in the file for decoding, where that is possible.

use matkv_types::Precision;

use crate::config::LlamaConfig;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::linear::{GateUp, Kept, Linear, Source};
use crate::weights_file::WeightsDir;

/// What a process computes with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Many rows at a time.
    Prefill,
    /// One row of each sequence at a time.
    Decode,
}

/// One transformer layer.
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Query, key and value projections, stacked.
    pub qkv: Linear,
    pub output: Linear,
    pub ffn_norm: Vec<f32>,
    pub gate_up: GateUp,
    pub down: Linear,
}

/// What is before the first layer and behind the last: the same in either phase.
pub(crate) struct Ends {
    pub embedding: Linear,
    /// Absent when the output projection is the embedding itself.
    pub head: Option<Linear>,
}

impl Ends {
    fn matrices(&self) -> Vec<&[u8]> {
        std::iter::once(&self.embedding).chain(&self.head).map(Linear::as_bytes).collect()
    }

    /// The output projection.
    pub fn head(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// All weights of a model.
pub struct LlamaWeights {
    pub(crate) layers: Vec<Layer>,
    /// How those of the layers are kept.
    pub(crate) kept: Kept,
    pub(crate) norm: Vec<f32>,
    pub(crate) ends: Ends,
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
        dir: Option<&WeightsDir<'_>>,
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
        let layers = packed_once(
            dir,
            gguf,
            &format!("layers {kept:?}"),
            |source| (0..c.layers).map(|i| read_layer(source, c, i, kept)).collect(),
            |layers: &Vec<Layer>| layers.iter().flat_map(Layer::matrices).collect(),
        )?;
        // Of the output projection one row of a sequence is wanted in either phase.
        let embedding_name = "token_embd.weight";
        let tied = !gguf.has_tensor("output.weight");
        let head_name = if tied { embedding_name } else { "output.weight" };
        let head_kept = as_they_are(gguf, &[head_name]);
        let embedding_kept = as_they_are(gguf, &[embedding_name]);
        let read_ends = |source: &mut Source<'_>| {
            let mut read = |name, kept| Linear::read(source, &[(name, c.vocab)], c.hidden, kept);
            let embedding = read(embedding_name, embedding_kept)?;
            let head = if tied { None } else { Some(read(head_name, head_kept)?) };
            Ok(Ends { embedding, head })
        };
        let name = format!("ends {embedding_kept:?} {head_kept:?}");
        let ends = packed_once(dir, gguf, &name, read_ends, Ends::matrices)?;
        let norm = gguf.tensor("output_norm.weight", &[c.hidden])?;
        Ok(Self { layers, kept, norm, ends, head_kept })
    }

    /// Bytes of packed matrices.
    pub fn bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(Layer::matrices);
        layers.chain(self.ends.matrices()).map(<[u8]>::len).sum()
    }
}

/// Reads weights from the directory of packed ones, or from the model file if there is none.
fn packed_once<T>(
    dir: Option<&WeightsDir<'_>>,
    gguf: &mut Gguf,
    name: &str,
    read: impl Fn(&mut Source<'_>) -> Result<T>,
    matrices: impl Fn(&T) -> Vec<&[u8]>,
) -> Result<T> {
    match dir {
        Some(dir) => dir.open(gguf, name, read, matrices),
        None => read(&mut Source { gguf, packed: None }),
    }
}

impl Layer {
    fn matrices(&self) -> Vec<&[u8]> {
        let mut all = vec![self.qkv.as_bytes(), self.output.as_bytes()];
        all.extend(self.gate_up.matrices());
        all.push(self.down.as_bytes());
        all
    }
}

/// Matrices in the order of [`Layer::matrices`].
fn read_layer(source: &mut Source<'_>, c: &LlamaConfig, i: usize, kept: Kept) -> Result<Layer> {
    let (h, q, kv) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let name = |name: &str| in_layer(i, name);
    let (wq, wk, wv) = (name("attn_q"), name("attn_k"), name("attn_v"));
    let (gate, up) = (name("ffn_gate"), name("ffn_up"));
    Ok(Layer {
        attention_norm: source.gguf.tensor(&name("attn_norm"), &[h])?,
        qkv: Linear::read(source, &[(&wq, q), (&wk, kv), (&wv, kv)], h, kept)?,
        output: Linear::read(source, &[(&name("attn_output"), h)], q, kept)?,
        ffn_norm: source.gguf.tensor(&name("ffn_norm"), &[h])?,
        gate_up: GateUp::read(source, [&gate, &up], (c.ffn, h), kept)?,
        down: Linear::read(source, &[(&name("ffn_down"), h)], c.ffn, kept)?,
    })
}
