//! Shape of a Llama model, and the refusals that keep answers exact.

use matkv_kernels::RotaryEmbedding;
use matkv_types::KvShape;

use crate::error::{ModelError, Result};
use crate::gguf::Gguf;
use crate::rope;

/// Hyper-parameters read from GGUF metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Dimensions per head.
    pub head_dim: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest context the model was trained for.
    pub context_length: usize,
    /// Epsilon of the norms.
    pub epsilon: f32,
    /// Rotary frequencies.
    pub rope: RotaryEmbedding,
}

/// Architectures whose layers do not all attend to the whole context.
const SLIDING_WINDOW: [&str; 8] =
    ["gemma2", "gemma3", "gemma3n", "cohere2", "gpt-oss", "phi3", "exaone4", "llama4"];
/// Architectures with recurrent state besides, or instead of, attention.
const RECURRENT: [&str; 12] = [
    "mamba",
    "mamba2",
    "jamba",
    "rwkv6",
    "rwkv7",
    "falcon-h1",
    "granitehybrid",
    "nemotron_h",
    "plamo2",
    "lfm2",
    "arwkv7",
    "qwen3next",
];

impl LlamaConfig {
    pub(crate) fn read(gguf: &mut Gguf) -> Result<Self> {
        let arch = gguf.text("general.architecture").unwrap_or("").to_owned();
        refuse_what_shifts_break(gguf, &arch)?;
        if arch != "llama" {
            return Err(ModelError::refused(format!(
                "architecture {arch:?} is not implemented; the Llama family (\"llama\") is"
            )));
        }
        let key = |name: &str| format!("llama.{name}");
        let heads = gguf.require_uint(&key("attention.head_count"))?;
        let hidden = gguf.require_uint(&key("embedding_length"))?;
        let head_dim = match gguf.uint(&key("attention.key_length"))? {
            Some(n) => n,
            None => hidden / heads.max(1),
        };
        let vocab = match gguf.uint(&key("vocab_size"))? {
            Some(n) => n,
            None => gguf.texts("tokenizer.ggml.tokens")?.len(),
        };
        let epsilon = gguf.float(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-5);
        let config = Self {
            layers: gguf.require_uint(&key("block_count"))?,
            hidden,
            ffn: gguf.require_uint(&key("feed_forward_length"))?,
            heads,
            kv_heads: gguf.uint(&key("attention.head_count_kv"))?.unwrap_or(heads),
            head_dim,
            vocab,
            context_length: gguf.require_uint(&key("context_length"))?,
            epsilon: epsilon as f32,
            rope: rope::read(gguf, head_dim)?,
        };
        config.check()?;
        Ok(config)
    }

    /// Sizes the kernels rely on.
    fn check(&self) -> Result<()> {
        let fail = |what: String| Err(ModelError::refused(what));
        if !self.head_dim.is_multiple_of(32) || self.head_dim == 0 {
            return fail(format!("head dimension {} is not a multiple of 32", self.head_dim));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!("{} heads over {} KV heads", self.heads, self.kv_heads));
        }
        if !self.hidden.is_multiple_of(16) || !self.ffn.is_multiple_of(16) {
            return fail(format!(
                "widths {} and {} must be multiples of 16",
                self.hidden, self.ffn
            ));
        }
        if self.layers == 0 || self.vocab == 0 || self.hidden == 0 || self.ffn == 0 {
            return fail("a size in its metadata is zero".into());
        }
        Ok(())
    }

    /// What decides the size of this model's KV.
    pub fn kv_shape(&self) -> KvShape {
        KvShape { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }
}

fn refuse_what_shifts_break(gguf: &Gguf, arch: &str) -> Result<()> {
    for key in gguf.keys().filter(|k| k.ends_with(".attention.sliding_window")) {
        if gguf.uint(key)?.unwrap_or(0) > 0 {
            return Err(sliding(arch));
        }
    }
    if SLIDING_WINDOW.contains(&arch) {
        return Err(sliding(arch));
    }
    if RECURRENT.contains(&arch) || gguf.keys().any(|k| k.contains(".ssm.") || k.contains(".wkv."))
    {
        return Err(ModelError::refused(format!(
            "{arch} has recurrent layers: their state depends on everything before a chunk, so a \
             chunk's state cannot be computed once and moved"
        )));
    }
    if gguf.tensor_names().any(|n| n.ends_with(".attn_q.bias") || n.ends_with(".attn_norm.bias")) {
        return Err(ModelError::refused(format!("{arch} with biases is not implemented")));
    }
    if gguf.keys().any(|k| k.ends_with(".expert_count"))
        && gguf.uint(&format!("{arch}.expert_count"))?.unwrap_or(0) > 0
    {
        return Err(ModelError::refused("mixture-of-experts layers are not implemented"));
    }
    Ok(())
}

fn sliding(arch: &str) -> ModelError {
    ModelError::refused(format!(
        "{arch} uses a sliding window: which rows a token sees depends on its distance in the \
         prompt, so a chunk's rows computed once are not the rows of a full prefill"
    ))
}
