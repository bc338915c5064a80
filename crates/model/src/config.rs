//! Shape of a Llama model, and the refusals that keep answers exact.

use matkv_kernels::{HEAD_DIM_MAX, RopeStyle, RotaryEmbedding};
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
        let mut config = Self {
            layers: gguf.require_uint(&key("block_count"))?,
            hidden,
            ffn: gguf.require_uint(&key("feed_forward_length"))?,
            heads,
            kv_heads: gguf.uint(&key("attention.head_count_kv"))?.unwrap_or(heads),
            head_dim,
            vocab,
            context_length: gguf.require_uint(&key("context_length"))?,
            epsilon: epsilon as f32,
            rope: RotaryEmbedding::plain(0, 1.0, RopeStyle::Interleaved),
        };
        // Sizes are believed only after this.
        config.check()?;
        config.rope = rope::read(gguf, head_dim)?;
        check_tensors(gguf, &config)?;
        Ok(config)
    }

    /// Sizes the kernels rely on.
    fn check(&self) -> Result<()> {
        let fail = |what: String| Err(ModelError::refused(what));
        let sizes = [
            ("block_count", self.layers, 1 << 12),
            ("embedding_length", self.hidden, 1 << 20),
            ("feed_forward_length", self.ffn, 1 << 22),
            ("attention.head_count", self.heads, 1 << 12),
            ("attention.head_count_kv", self.kv_heads, 1 << 12),
            ("head dimension", self.head_dim, 1 << 12),
            ("vocabulary size", self.vocab, 1 << 24),
            ("context_length", self.context_length, 1 << 32),
        ];
        for (name, size, max) in sizes {
            if size == 0 || size > max {
                return fail(format!("its {name} is {size}; between 1 and {max} is possible"));
            }
        }
        if !self.head_dim.is_multiple_of(32) || self.head_dim > HEAD_DIM_MAX {
            return fail(format!(
                "head dimension {} is not a multiple of 32 up to {HEAD_DIM_MAX}",
                self.head_dim
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!("{} heads over {} KV heads", self.heads, self.kv_heads));
        }
        if !self.hidden.is_multiple_of(16) || !self.ffn.is_multiple_of(16) {
            return fail(format!(
                "widths {} and {} must be multiples of 16",
                self.hidden, self.ffn
            ));
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
    if gguf.keys().any(|k| k.ends_with(".expert_count"))
        && gguf.uint(&format!("{arch}.expert_count"))?.unwrap_or(0) > 0
    {
        return Err(ModelError::refused("mixture-of-experts layers are not implemented"));
    }
    Ok(())
}

/// A tensor the forward pass does not read would be ignored silently, and answers be wrong.
fn check_tensors(gguf: &Gguf, config: &LlamaConfig) -> Result<()> {
    const GLOBAL: [&str; 4] =
        ["token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"];
    const LAYER: [&str; 9] = [
        "attn_norm.weight",
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_output.weight",
        "ffn_norm.weight",
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_down.weight",
    ];
    let is_known = |name: &str| {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let of_layer = |(i, part): (&str, &str)| {
            i.parse::<usize>().is_ok_and(|i| i < config.layers) && LAYER.contains(&part)
        };
        GLOBAL.contains(&name) || layer.is_some_and(of_layer)
    };
    let mut unknown: Vec<&str> = gguf.tensor_names().filter(|n| !is_known(n)).collect();
    unknown.sort_unstable();
    match unknown.first() {
        None => Ok(()),
        Some(first) => Err(ModelError::refused(format!(
            "it has {} tensors this implementation would ignore, {first:?} among them",
            unknown.len()
        ))),
    }
}

fn sliding(arch: &str) -> ModelError {
    ModelError::refused(format!(
        "{arch} uses a sliding window: which rows a token sees depends on its distance in the \
         prompt, so a chunk's rows computed once are not the rows of a full prefill"
    ))
}
