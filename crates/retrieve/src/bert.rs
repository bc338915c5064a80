//! A BERT encoder (MiniLM: 6 layers, 384 wide, 12 heads) on candle, one window at a time.

use std::path::Path;

use candle_core::safetensors::SliceSafetensors;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::{layer_norm_slow, softmax_last_dim};

use crate::words::WordTable;

const HEADS: usize = 12;
const EPSILON: f32 = 1e-12;

struct Linear {
    /// Transposed: `[in][out]`.
    weight: Tensor,
    bias: Tensor,
}

struct Norm {
    weight: Tensor,
    bias: Tensor,
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: Norm,
    intermediate: Linear,
    output: Linear,
    output_norm: Norm,
}

/// The encoder.
pub(crate) struct Bert {
    words: WordTable,
    positions: Tensor,
    types: Tensor,
    norm: Norm,
    layers: Vec<Layer>,
}

struct Weights<'a>(SliceSafetensors<'a>);

impl Weights<'_> {
    /// The name a tensor has in this file.
    fn name(&self, name: &str) -> String {
        let long = format!("bert.{name}");
        if self.0.get(&long).is_ok() { long } else { name.to_owned() }
    }

    fn get(&self, name: &str) -> Result<Tensor> {
        self.0.load(&self.name(name), &Device::Cpu)?.to_dtype(DType::F32)
    }

    fn linear(&self, name: &str) -> Result<Linear> {
        let weight = self.get(&format!("{name}.weight"))?.t()?.contiguous()?;
        Ok(Linear { weight, bias: self.get(&format!("{name}.bias"))? })
    }

    fn norm(&self, name: &str) -> Result<Norm> {
        Ok(Norm {
            weight: self.get(&format!("{name}.weight"))?,
            bias: self.get(&format!("{name}.bias"))?,
        })
    }
}

impl Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight)?.broadcast_add(&self.bias)
    }
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm_slow(x, &self.weight, &self.bias, EPSILON)
    }
}

impl Bert {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        let w = Weights(SliceSafetensors::new(&bytes)?);
        let mut layers = Vec::new();
        while w.get(&format!("encoder.layer.{}.output.dense.weight", layers.len())).is_ok() {
            let at = |name: &str| format!("encoder.layer.{}.{name}", layers.len());
            layers.push(Layer {
                query: w.linear(&at("attention.self.query"))?,
                key: w.linear(&at("attention.self.key"))?,
                value: w.linear(&at("attention.self.value"))?,
                attention_output: w.linear(&at("attention.output.dense"))?,
                attention_norm: w.norm(&at("attention.output.LayerNorm"))?,
                intermediate: w.linear(&at("intermediate.dense"))?,
                output: w.linear(&at("output.dense"))?,
                output_norm: w.norm(&at("output.LayerNorm"))?,
            });
        }
        Ok(Self {
            words: WordTable::find(
                path,
                &bytes,
                &w.0,
                &w.name("embeddings.word_embeddings.weight"),
            )?,
            positions: w.get("embeddings.position_embeddings.weight")?,
            types: w.get("embeddings.token_type_embeddings.weight")?,
            norm: w.norm("embeddings.LayerNorm")?,
            layers,
        })
    }

    /// Mean of the last hidden states of one window, `[hidden]`.
    pub(crate) fn mean(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let n = ids.len();
        let x = self.words.select(ids)?;
        let x = x.add(&self.positions.narrow(0, 0, n)?)?;
        let mut x = self.norm.forward(&x.broadcast_add(&self.types.get(0)?)?)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        x.mean(0)?.to_vec1()
    }
}

impl Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (n, hidden) = x.dims2()?;
        let heads =
            |t: Tensor| t.reshape((n, HEADS, hidden / HEADS))?.transpose(0, 1)?.contiguous();
        let q = heads(self.query.forward(x)?)?;
        let k = heads(self.key.forward(x)?)?;
        let v = heads(self.value.forward(x)?)?;
        let scale = 1.0 / ((hidden / HEADS) as f64).sqrt();
        let scores = (q.matmul(&k.transpose(D::Minus2, D::Minus1)?)? * scale)?;
        let context = softmax_last_dim(&scores)?.matmul(&v)?;
        let context = context.transpose(0, 1)?.reshape((n, hidden))?;
        let x = self.attention_norm.forward(&self.attention_output.forward(&context)?.add(x)?)?;
        let y = self.output.forward(&self.intermediate.forward(&x)?.gelu_erf()?)?;
        self.output_norm.forward(&y.add(&x)?)
    }
}
