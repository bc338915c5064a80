//! A Llama of random weights, small enough to compute thousands of rows in a debug build.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::vocabulary::{CONTROL, MERGES, tokens};

/// The ChatML conversation format, with a default system turn as SmolLM2 has one.
const CHAT_TEMPLATE: &str = "\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou answer from the documents.<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// GGUF's token types (`tokenizer.ggml.token_type`).
const TYPE_NORMAL: i32 = 1;
const TYPE_CONTROL: i32 = 3;

/// Options of a tiny model; the defaults make one that opens.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// `general.architecture`, and what the keys of the shape begin with.
    pub arch: String,
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Dimensions per head.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// `context_length`.
    pub context_length: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// How matrices are written; norms are f32.
    pub matrices: GgmlDType,
    /// Seed of the weights.
    pub seed: u64,
    /// Keys added, or given another value.
    pub extra_metadata: Vec<(String, Value)>,
    /// Keys and tensors left out.
    pub without: Vec<String>,
    /// Vectors of ones added under these names, with their lengths.
    pub extra_tensors: Vec<(String, usize)>,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            arch: "llama".into(),
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            hidden: 128,
            ffn: 256,
            context_length: 4096,
            rope_base: 10_000.0,
            matrices: GgmlDType::F32,
            seed: 1,
            extra_metadata: Vec::new(),
            without: Vec::new(),
            extra_tensors: Vec::new(),
        }
    }
}

impl TinyModel {
    /// Adds a metadata key, or replaces its value.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.extra_metadata.push((key.to_owned(), value));
        self
    }

    /// Leaves out a metadata key or a tensor.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.without.push(name.to_owned());
        self
    }

    /// Writes the model as a GGUF file.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) {
        let metadata = self.metadata();
        let tensors = self.tensors();
        let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (&**k, v)).collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, t)| (&**k, t)).collect();
        let file = File::create(path).expect("the model file can be created");
        let mut out = BufWriter::new(file);
        gguf_file::write(&mut out, &metadata, &tensors).expect("the model can be written");
        out.into_inner().expect("the model can be written");
    }

    fn metadata(&self) -> Vec<(String, Value)> {
        let count = |n: usize| Value::U32(u32::try_from(n).expect("sizes are small"));
        let shape = [
            ("block_count", count(self.layers)),
            ("context_length", count(self.context_length)),
            ("embedding_length", count(self.hidden)),
            ("feed_forward_length", count(self.ffn)),
            ("attention.head_count", count(self.heads)),
            ("attention.head_count_kv", count(self.kv_heads)),
            ("attention.key_length", count(self.head_dim)),
            ("attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("rope.dimension_count", count(self.head_dim)),
            ("rope.freq_base", Value::F32(self.rope_base)),
            ("vocab_size", count(tokens().len())),
        ];
        let mut list = vec![("general.architecture".into(), Value::String(self.arch.clone()))];
        list.extend(shape.map(|(key, value)| (format!("{}.{key}", self.arch), value)));
        list.extend(tokenizer().map(|(key, value)| (format!("tokenizer.{key}"), value)));
        for (key, value) in &self.extra_metadata {
            list.retain(|(k, _)| k != key);
            list.push((key.clone(), value.clone()));
        }
        list.retain(|(k, _)| !self.without.contains(k));
        list
    }

    /// Standard deviations keep logits and attention scores lively: with inputs of unit variance
    /// a score has deviation 1.5² and a logit 3, so no token wins always and no key is ignored.
    fn tensors(&self) -> Vec<(String, QTensor)> {
        let (h, q, kv) = (self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut list = Vec::new();
        let mut matrix = |name: String, n: usize, k: usize, deviation: f32| {
            // A uniform distribution over ±a has deviation a/√3; k products add up.
            let a = deviation * (3.0 / k as f32).sqrt();
            list.push((name, tensor(&[n, k], self.matrices, || rng.random_range(-a..a))));
        };
        let vocab = tokens().len();
        matrix("token_embd.weight".into(), vocab, h, (h as f32).sqrt());
        matrix("output.weight".into(), vocab, h, 3.0);
        for i in 0..self.layers {
            matrix(format!("blk.{i}.attn_q.weight"), q, h, 1.5);
            matrix(format!("blk.{i}.attn_k.weight"), kv, h, 1.5);
            matrix(format!("blk.{i}.attn_v.weight"), kv, h, 1.0);
            matrix(format!("blk.{i}.attn_output.weight"), h, q, 1.0);
            matrix(format!("blk.{i}.ffn_gate.weight"), self.ffn, h, 1.0);
            matrix(format!("blk.{i}.ffn_up.weight"), self.ffn, h, 1.0);
            matrix(format!("blk.{i}.ffn_down.weight"), h, self.ffn, 1.0);
        }
        let norms = (0..self.layers)
            .flat_map(|i| ["attn_norm", "ffn_norm"].map(|norm| format!("blk.{i}.{norm}.weight")));
        for name in norms.chain(["output_norm.weight".to_owned()]) {
            list.push((name, tensor(&[h], GgmlDType::F32, || rng.random_range(0.8..1.2))));
        }
        for (name, len) in &self.extra_tensors {
            list.push((name.clone(), tensor(&[*len], GgmlDType::F32, || 1.0)));
        }
        list.retain(|(name, _)| !self.without.contains(name));
        list
    }
}

fn tensor(dims: &[usize], dtype: GgmlDType, mut next: impl FnMut() -> f32) -> QTensor {
    let data: Vec<f32> = (0..dims.iter().product()).map(|_| next()).collect();
    let dense = Tensor::from_vec(data, dims, &Device::Cpu).expect("the data fill the shape");
    QTensor::quantize(&dense, dtype).expect("rows are whole blocks")
}

fn tokenizer() -> [(&'static str, Value); 10] {
    let texts = |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
    let types = (0..tokens().len())
        .map(|id| Value::I32(if id < CONTROL.len() { TYPE_CONTROL } else { TYPE_NORMAL }));
    let merges = MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect();
    [
        ("ggml.model", Value::String("gpt2".into())),
        ("ggml.pre", Value::String("smollm".into())),
        ("ggml.tokens", texts(tokens())),
        ("ggml.token_type", Value::Array(types.collect())),
        ("ggml.merges", texts(merges)),
        ("ggml.bos_token_id", Value::U32(1)),
        ("ggml.eos_token_id", Value::U32(2)),
        ("ggml.unknown_token_id", Value::U32(0)),
        ("ggml.add_bos_token", Value::Bool(false)),
        ("chat_template", Value::String(CHAT_TEMPLATE.into())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use matkv_model::LanguageModel;

    #[test]
    fn equal_options_give_equal_bytes_and_a_model_that_opens() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b", "c"].map(|name| dir.path().join(name).with_extension("gguf"));
        TinyModel::default().write(&paths[0]);
        TinyModel::default().write(&paths[1]);
        TinyModel { seed: 2, ..TinyModel::default() }.write(&paths[2]);
        let bytes = paths.each_ref().map(|path| std::fs::read(path).unwrap());
        assert!(bytes[0] == bytes[1] && bytes[0] != bytes[2]);

        let model = LanguageModel::open(&paths[0], None).unwrap();
        let text = "The 256 bytes \u{0} é 😀\n\nand the merges with them";
        let ids = model.tokenizer.encode(text).unwrap();
        let back: Vec<u8> =
            ids.iter().flat_map(|&id| model.tokenizer.bytes_of(id).to_vec()).collect();
        assert_eq!(String::from_utf8(back).unwrap(), text);
        assert!(ids.len() < text.len() - 10, "merges are used: {} ids", ids.len());
        assert_eq!(model.tokenizer.encode_template("<|im_end|>").unwrap(), [2]);
        assert_eq!(model.tokenizer.end_tokens(), [0, 2]);
    }
}
