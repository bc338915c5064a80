//! The tokenizer a GGUF file carries, rebuilt on the `tokenizers` crate.
//!
//! Two families: byte-level BPE (`gpt2`), whose pre-tokenizer is chosen by `tokenizer.ggml.pre`,
//! and SentencePiece BPE with byte fallback (`llama`), whose merges follow from its scores.
//! Text is always encoded without a BOS; special tokens are recognized only where the template
//! itself is encoded, so a document or a question cannot forge a turn.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::error::{ModelError, Result};
use crate::gguf::{Gguf, metadata};

/// Token types of `tokenizer.ggml.token_type` (GGUF specification).
const TYPE_CONTROL: i64 = 3;
const TYPE_USER_DEFINED: i64 = 4;

/// One definition, built twice.
struct Encoders {
    /// Recognizes control tokens.
    template: Tokenizer,
    /// Takes control tokens for ordinary text.
    text: Tokenizer,
}

impl Encoders {
    fn build(definition: &Value) -> Result<Self> {
        let mut text = build(definition)?;
        text.set_encode_special_tokens(true);
        Ok(Self { template: build(definition)?, text })
    }
}

/// Text to ids and ids to bytes.
pub struct TextTokenizer {
    head: Encoders,
    /// For text that continues a prompt, where SentencePiece adds no space; absent where that
    /// makes no difference.
    inner: Option<Encoders>,
    bytes: Vec<Box<[u8]>>,
    control: Vec<bool>,
    bos: Option<u32>,
    add_bos: bool,
    strips_first_space: bool,
    end: Vec<u32>,
}

impl TextTokenizer {
    /// A tokenizer alone, from a GGUF file.
    ///
    /// # Errors
    /// If the file cannot be read or its tokenizer is not supported.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(&Gguf::open(path)?)
    }

    pub(crate) fn read(gguf: &Gguf) -> Result<Self> {
        let tokens = gguf.texts("tokenizer.ggml.tokens")?;
        let types = gguf.ints("tokenizer.ggml.token_type").unwrap_or_default();
        let kind = gguf.text("tokenizer.ggml.model").unwrap_or("").to_owned();
        let is = |id: usize, wanted: i64| types.get(id) == Some(&wanted);
        let added: Vec<Value> = (0..tokens.len())
            .filter(|&id| is(id, TYPE_CONTROL) || is(id, TYPE_USER_DEFINED))
            .map(|id| added_token(id, &tokens[id], is(id, TYPE_CONTROL)))
            .collect();
        let spaced = gguf.flag("tokenizer.ggml.add_space_prefix").unwrap_or(kind == "llama");
        let (head, inner, bytes) = match kind.as_str() {
            "gpt2" => {
                let head = Encoders::build(&byte_level(gguf, &tokens, &added)?)?;
                (head, None, byte_level_bytes(&tokens, &types))
            }
            "llama" => {
                let piece = |space| Encoders::build(&sentence_piece(gguf, &tokens, &added, space)?);
                let inner = spaced.then(|| piece(false)).transpose()?;
                (piece(spaced)?, inner, sentence_piece_bytes(&tokens, &types))
            }
            other => {
                return Err(ModelError::Tokenizer(format!(
                    "model {other:?} is not supported; \"gpt2\" and \"llama\" are"
                )));
            }
        };
        let id = |name: &str| token_id(gguf, name, tokens.len());
        let bos = id("bos_token_id")?;
        let add_bos = gguf.flag("tokenizer.ggml.add_bos_token").unwrap_or(kind == "llama");
        let mut end: Vec<u32> = Vec::new();
        for key in ["eos_token_id", "eot_token_id"] {
            end.extend(id(key)?);
        }
        for name in ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"] {
            end.extend(head.template.token_to_id(name).filter(|&t| is(t as usize, TYPE_CONTROL)));
        }
        end.sort_unstable();
        end.dedup();
        let control = (0..tokens.len()).map(|i| is(i, TYPE_CONTROL)).collect();
        let strips_first_space = inner.is_some();
        Ok(Self { head, inner, bytes, control, bos, add_bos, strips_first_space, end })
    }

    /// Ids of ordinary text that stands alone: no BOS, control tokens taken as text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        encode(&self.head.text, text)
    }

    /// Ids of template text at the head of a prompt: control tokens recognized, no BOS.
    pub fn encode_template(&self, text: &str) -> Result<Vec<u32>> {
        encode(&self.head.template, text)
    }

    /// Ids of ordinary text that continues a prompt: a document, a question.
    pub fn encode_inner(&self, text: &str) -> Result<Vec<u32>> {
        encode(&self.inner.as_ref().unwrap_or(&self.head).text, text)
    }

    /// Appends template text to a prompt: control tokens recognized. As in llama.cpp, a
    /// SentencePiece space is added where text begins the prompt or follows a control token.
    pub(crate) fn append_template(&self, ids: &mut Vec<u32>, text: &str) -> Result<()> {
        let Some(inner) = self.inner.as_ref().filter(|_| !self.after_control(ids)) else {
            ids.extend(self.encode_template(text)?);
            return Ok(());
        };
        let controls = self.control.iter().enumerate().filter(|(_, is)| **is);
        let texts = controls.filter_map(|(id, _)| self.token_text(id as u32));
        let at = texts.filter_map(|t| text.find(&t)).min().unwrap_or(text.len());
        ids.extend(encode(&inner.template, &text[..at])?);
        ids.extend(self.encode_template(&text[at..])?);
        Ok(())
    }

    /// Appends ordinary text to a prompt: control tokens taken as text.
    pub(crate) fn append_text(&self, ids: &mut Vec<u32>, text: &str) -> Result<()> {
        let more =
            if self.after_control(ids) { self.encode(text)? } else { self.encode_inner(text)? };
        ids.extend(more);
        Ok(())
    }

    fn after_control(&self, ids: &[u32]) -> bool {
        ids.last().is_none_or(|&id| self.control.get(id as usize).copied().unwrap_or(true))
    }

    /// The BOS that must head a prompt, unless the model wants none.
    pub fn leading_bos(&self) -> Option<u32> {
        self.bos.filter(|_| self.add_bos)
    }

    /// Text of a token as it stands in the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.head.template.id_to_token(id)
    }

    /// The text of BOS, for templates.
    pub(crate) fn bos_text(&self) -> String {
        self.bos.and_then(|id| self.token_text(id)).unwrap_or_default()
    }

    /// Tokens that end an answer.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end
    }

    /// Bytes a token stands for in text; control tokens stand for none.
    pub fn bytes_of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        if self.control.get(id).copied().unwrap_or(true) {
            return &[];
        }
        self.bytes.get(id).map_or(&[], |b| b)
    }

    /// Ids a vocabulary has.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// A decoded text starts with a space the encoder added.
    pub(crate) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// The id under `tokenizer.ggml.{name}`, which must be in the vocabulary.
fn token_id(gguf: &Gguf, name: &str, tokens: usize) -> Result<Option<u32>> {
    let key = format!("tokenizer.ggml.{name}");
    match gguf.uint(&key)? {
        Some(id) if id >= tokens => {
            Err(metadata(&key, format!("is {id}, the vocabulary has {tokens} tokens")))
        }
        id => Ok(id.map(|id| id as u32)),
    }
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let encoding = tokenizer.encode_fast(text, false);
    Ok(encoding.map_err(|e| ModelError::Tokenizer(e.to_string()))?.get_ids().to_vec())
}

fn build(definition: &Value) -> Result<Tokenizer> {
    Tokenizer::from_bytes(definition.to_string().as_bytes())
        .map_err(|e| ModelError::Tokenizer(e.to_string()))
}

fn added_token(id: usize, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special
    })
}

fn vocabulary(tokens: &[String]) -> HashMap<&str, usize> {
    // The first id wins where a vocabulary repeats a text.
    let mut vocab = HashMap::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        vocab.entry(token.as_str()).or_insert(id);
    }
    vocab
}

fn tokenizer_json(added: &[Value], normalizer: Value, pre: Value, model: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": null,
        "decoder": null, "model": model
    })
}

/// Regular expressions of the pre-tokenizers, as their models' tokenizer definitions give them.
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn byte_level(gguf: &Gguf, tokens: &[String], added: &[Value]) -> Result<Value> {
    let level = |use_regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": use_regex
        })
    };
    let split = |regex: &str| {
        json!({
            "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false
        })
    };
    let pre = gguf.text("tokenizer.ggml.pre").unwrap_or("default");
    let steps = match pre {
        "smollm" | "starcoder" | "refact" => {
            vec![json!({"type": "Digits", "individual_digits": true}), level(true)]
        }
        "llama-bpe" | "llama3" | "llama-v3" | "smaug-bpe" => {
            vec![split(LLAMA3_SPLIT), level(false)]
        }
        "qwen2" | "deepseek-r1-qwen" => vec![split(QWEN2_SPLIT), level(false)],
        "gpt-2" | "default" | "olmo" => vec![level(true)],
        other => {
            return Err(ModelError::Tokenizer(format!(
                "pre-tokenizer {other:?} is unknown; guessing would give wrong ids"
            )));
        }
    };
    let merges = gguf.texts("tokenizer.ggml.merges")?;
    // Byte symbols the vocabulary lacks would vanish without an unknown token.
    let unknown = gguf.uint("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let unknown = tokens.get(unknown).ok_or_else(|| metadata("unknown_token_id", "no such id"))?;
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "ignore_merges": pre.starts_with("llama"), "vocab": vocabulary(tokens), "merges": merges
    });
    let steps = json!({"type": "Sequence", "pretokenizers": steps});
    Ok(tokenizer_json(added, Value::Null, steps, model))
}

/// SentencePiece merges whichever neighbours form the piece of the best score; ranking every way
/// to split a piece by the piece's score gives the same merges to a BPE.
fn sentence_piece(gguf: &Gguf, tokens: &[String], added: &[Value], space: bool) -> Result<Value> {
    let scores = gguf.floats("tokenizer.ggml.scores")?;
    let vocab = vocabulary(tokens);
    let mut merges: Vec<(f32, usize, usize, &str, &str)> = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&l), Some(&r)) = (vocab.get(left), vocab.get(right)) {
                let score = scores.get(id).copied().unwrap_or(0.0);
                merges.push((score, l, r, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let merges: Vec<[&str; 2]> = merges.iter().map(|m| [m.3, m.4]).collect();
    let unknown = gguf.uint("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": tokens.get(unknown),
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
        "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges
    });
    let mut steps = Vec::new();
    if space {
        steps.push(json!({"type": "Prepend", "prepend": "\u{2581}"}));
    }
    steps.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}));
    let normalizer = json!({"type": "Sequence", "normalizers": steps});
    Ok(tokenizer_json(added, normalizer, Value::Null, model))
}

fn byte_level_bytes(tokens: &[String], types: &[i64]) -> Vec<Box<[u8]>> {
    let table = byte_symbols();
    let decode = |(id, token): (usize, &String)| -> Box<[u8]> {
        if types.get(id) == Some(&TYPE_USER_DEFINED) {
            return token.as_bytes().into();
        }
        token.chars().filter_map(|c| table.get(&c).copied()).collect()
    };
    tokens.iter().enumerate().map(decode).collect()
}

/// GPT-2's printable stand-ins for bytes.
fn byte_symbols() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256u32;
    (0..=255u8)
        .map(|b| {
            let code = if printable(b) {
                u32::from(b)
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), b)
        })
        .collect()
}

fn sentence_piece_bytes(tokens: &[String], types: &[i64]) -> Vec<Box<[u8]>> {
    const TYPE_BYTE: i64 = 6;
    let decode = |(id, token): (usize, &String)| -> Box<[u8]> {
        if types.get(id) == Some(&TYPE_BYTE) {
            let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
            if let Some(byte) = hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
                return [byte].into();
            }
        }
        token.replace('\u{2581}', " ").into_bytes().into()
    };
    tokens.iter().enumerate().map(decode).collect()
}
