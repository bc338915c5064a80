//! A BERT encoder (MiniLM: 6 layers, 384 wide, 12 heads) on the kernels the language model runs on,
//! one window at a time. Products are of the precision asked for; all else is f32.

use std::path::Path;

use candle_core::safetensors::SliceSafetensors;
use candle_core::{DType, Device, Error, Result};
use matkv_kernels::{
    Activations, ActivationsMut, Attention, AttentionJob, Isa, LayerInput, NewRows, PackedMatrix,
    Section, SegmentView, append_rows, gelu, gemm, gemm_add, layer_norm, query_scale,
};
use matkv_types::{KvDtype, KvLayout, KvShape, Precision};

use crate::words::WordTable;

const HEADS: usize = 12;
const EPSILON: f32 = 1e-12;

/// How numbers are multiplied.
#[derive(Clone, Copy)]
struct Arithmetic {
    isa: Isa,
    precision: Precision,
}

struct Linear {
    weight: PackedMatrix,
    bias: Vec<f32>,
}

struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

struct Layer {
    qkv: Linear,
    attention_output: Linear,
    attention_norm: Norm,
    intermediate: Linear,
    output: Linear,
    output_norm: Norm,
}

/// The encoder.
pub(crate) struct Bert {
    on: Arithmetic,
    words: WordTable,
    /// `[position][hidden]`, the embedding of the first type of token added.
    positions: Vec<f32>,
    norm: Norm,
    layers: Vec<Layer>,
}

struct Weights<'a> {
    tensors: SliceSafetensors<'a>,
    precision: Precision,
}

impl Weights<'_> {
    /// The name a tensor has in this file.
    fn name(&self, name: &str) -> String {
        let long = format!("bert.{name}");
        if self.tensors.get(&long).is_ok() { long } else { name.to_owned() }
    }

    fn get(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.tensors.load(&self.name(name), &Device::Cpu)?;
        tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    }

    /// Layers with the same input as one, their outputs side by side.
    fn linear(&self, names: &[String]) -> Result<Linear> {
        let all = |kind: &str| -> Result<Vec<Vec<f32>>> {
            names.iter().map(|name| self.get(&format!("{name}.{kind}"))).collect()
        };
        let (weights, biases) = (all("weight")?, all("bias")?);
        let bias: Vec<f32> = biases.iter().flatten().copied().collect();
        let numbers: usize = weights.iter().map(Vec::len).sum();
        let k = numbers.checked_div(bias.len()).unwrap_or(0);
        let parts = weights.iter().zip(&biases).map(|(w, b)| (w.as_slice(), b.len()));
        let parts: Vec<(&[f32], usize)> = parts.collect();
        let fits = k.is_multiple_of(2) && bias.len().is_multiple_of(16);
        if !fits || parts.iter().any(|(w, n)| w.len() != n * k) {
            return Err(Error::Msg(format!("{names:?}: weights of another shape")));
        }
        Ok(Linear { weight: PackedMatrix::pack_stacked(&parts, k, self.precision), bias })
    }

    fn norm(&self, name: &str) -> Result<Norm> {
        Ok(Norm {
            weight: self.get(&format!("{name}.weight"))?,
            bias: self.get(&format!("{name}.bias"))?,
        })
    }
}

impl Linear {
    /// `x · wᵀ + bias`.
    fn forward(&self, on: Arithmetic, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.weight.k();
        let mut out = vec![0.0; rows * self.bias.len()];
        gemm(on.isa, &Activations::rounded(on.precision, x), &self.weight, &mut out);
        add_to_rows(&mut out, &self.bias);
        out
    }

    /// `to += x · wᵀ + bias`.
    fn add(&self, on: Arithmetic, x: &[f32], to: &mut [f32]) {
        add_to_rows(to, &self.bias);
        gemm_add(on.isa, &Activations::rounded(on.precision, x), &self.weight, to);
    }
}

fn add_to_rows(rows: &mut [f32], bias: &[f32]) {
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
    }
}

impl Norm {
    fn forward(&self, isa: Isa, x: &mut [f32]) {
        layer_norm(isa, x, &self.weight, &self.bias, EPSILON);
    }
}

impl Bert {
    pub(crate) fn open(path: &Path, precision: Precision) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        let w = Weights { tensors: SliceSafetensors::new(&bytes)?, precision };
        let mut layers = Vec::new();
        while w.get(&format!("encoder.layer.{}.output.dense.weight", layers.len())).is_ok() {
            let at = |name: &str| format!("encoder.layer.{}.{name}", layers.len());
            layers.push(Layer {
                qkv: w.linear(
                    &["query", "key", "value"].map(|n| at(&format!("attention.self.{n}"))),
                )?,
                attention_output: w.linear(&[at("attention.output.dense")])?,
                attention_norm: w.norm(&at("attention.output.LayerNorm"))?,
                intermediate: w.linear(&[at("intermediate.dense")])?,
                output: w.linear(&[at("output.dense")])?,
                output_norm: w.norm(&at("output.LayerNorm"))?,
            });
        }
        let name = w.name("embeddings.word_embeddings.weight");
        let words = WordTable::find(path, &bytes, &w.tensors, &name)?;
        let types = w.get("embeddings.token_type_embeddings.weight")?;
        let mut positions = w.get("embeddings.position_embeddings.weight")?;
        let first_type = types.get(..words.width());
        add_to_rows(&mut positions, first_type.ok_or_else(|| Error::Msg("no types".into()))?);
        let norm = w.norm("embeddings.LayerNorm")?;
        Ok(Self {
            on: Arithmetic { isa: Isa::detect(), precision },
            words,
            positions,
            norm,
            layers,
        })
    }

    /// Mean of the last hidden states of one window, `[hidden]`.
    pub(crate) fn mean(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let width = self.words.width();
        let mut x = self.words.select(ids)?;
        if x.len() > self.positions.len() {
            return Err(Error::Msg(format!("{} tokens are too many", ids.len())));
        }
        x.iter_mut().zip(&self.positions).for_each(|(x, p)| *x += p);
        self.norm.forward(self.on.isa, &mut x);
        for layer in &self.layers {
            layer.forward(self.on, &mut x, width);
        }
        let mut mean = vec![0.0; width];
        let share = 1.0 / ids.len() as f32;
        for row in x.chunks_exact(width) {
            mean.iter_mut().zip(row).for_each(|(m, x)| *m += x * share);
        }
        Ok(mean)
    }
}

impl Layer {
    fn forward(&self, on: Arithmetic, x: &mut [f32], width: usize) {
        let context = attention(on.isa, &self.qkv.forward(on, x), width);
        self.attention_output.add(on, &context, x);
        self.attention_norm.forward(on.isa, x);
        let mut wide = self.intermediate.forward(on, x);
        gelu(on.isa, &mut wide, self.intermediate.bias.len());
        self.output.add(on, &wide, x);
        self.output_norm.forward(on.isa, x);
    }
}

/// Every row attends to all rows; `qkv` is `[row][q, k, v]`.
fn attention(isa: Isa, qkv: &[f32], width: usize) -> Vec<f32> {
    let (rows, head_dim) = (qkv.len() / (3 * width), width / HEADS);
    let shape = KvShape { layers: 1, kv_heads: HEADS, head_dim };
    let layout = KvLayout::new(shape, KvDtype::F32, rows);
    let mut section = vec![0; layout.total_bytes()];
    let of = |part: usize| NewRows { values: &qkv[part * width..], stride: 3 * width };
    append_rows(&mut section, &layout, 0, &(0..rows).collect::<Vec<_>>(), of(1), of(2));
    let scale = query_scale(head_dim);
    let queries = qkv.chunks_exact(3 * width).flat_map(|row| &row[..width]);
    let queries = [queries.map(|q| q * scale).collect::<Vec<f32>>()];
    let all = SegmentView {
        section: Section::Whole(&section),
        layout,
        first_row: 0,
        rows,
        position: 0,
        rotation: 0,
    };
    // No row is hidden from one that is at the last position.
    let job = AttentionJob { segments: vec![all], positions: vec![rows - 1; rows] };
    let mut out = vec![0.0; rows * width];
    let mut attention = Attention::new(isa, Precision::Exact, HEADS, [job]);
    let input = LayerInput { own: &[], queries: &queries };
    attention.run(0, |_| input, ActivationsMut::F32(&mut out));
    out
}
