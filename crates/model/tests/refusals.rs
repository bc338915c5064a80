//! Models that cannot be served exactly, and files that are not models: an error that names the
//! reason, never a panic and never a model that answers wrongly.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use common::written;
use matkv_model::{LanguageModel, PromptTexts};
use matkv_testkit::{TinyModel, Value};

fn tiny() -> TinyModel {
    TinyModel::default()
}

fn arch(name: &str) -> TinyModel {
    TinyModel { arch: name.into(), ..tiny() }
}

fn with_tensor(name: &str, len: usize) -> TinyModel {
    TinyModel { extra_tensors: vec![(name.into(), len)], ..tiny() }
}

fn open(path: &Path) -> Result<LanguageModel, String> {
    catch_unwind(AssertUnwindSafe(|| LanguageModel::open(path, None)))
        .unwrap_or_else(|_| panic!("opening {} panicked", path.display()))
        .map_err(|e| e.to_string())
}

/// Opens a model and returns what is wrong with the outcome, if anything.
fn wrong(model: &TinyModel, words: &[&str]) -> Option<String> {
    let (_dir, path) = written(model);
    let outcome = catch_unwind(AssertUnwindSafe(|| LanguageModel::open(&path, None)));
    let what = match outcome {
        Ok(Err(e)) => {
            let text = e.to_string();
            let missing: Vec<_> = words.iter().filter(|w| !text.contains(**w)).collect();
            if missing.is_empty() {
                return None;
            }
            format!("{text:?} does not say {missing:?}")
        }
        Ok(Ok(_)) => "it opens".into(),
        Err(_) => "it panics".into(),
    };
    Some(format!("{what} (expected {words:?})"))
}

/// Every one of these must be refused with its words in the text.
fn all_refused(cases: &[(&str, TinyModel, &[&str])]) {
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|(name, model, words)| Some(format!("{name}: {}", wrong(model, words)?)))
        .collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn the_default_opens() {
    let (_dir, path) = written(&tiny());
    open(&path).unwrap();
    // Zero is how some converters say that there is no such thing.
    let none = tiny()
        .with("llama.attention.sliding_window", Value::U32(0))
        .with("llama.expert_count", Value::U32(0))
        .with("llama.rope.scaling.type", Value::String("none".into()));
    let (_dir, path) = written(&none);
    open(&path).unwrap();
}

#[test]
fn layers_that_shifts_break_are_refused() {
    let window = |value| tiny().with("llama.attention.sliding_window", value);
    all_refused(&[
        ("window", window(Value::U32(4096)), &["sliding window", "llama"]),
        ("window u64", window(Value::U64(1)), &["sliding window"]),
        ("window i32", window(Value::I32(512)), &["sliding window"]),
        ("window of no integer", window(Value::F32(512.0)), &["sliding_window"]),
        ("gemma3", arch("gemma3"), &["gemma3", "sliding window"]),
        ("gemma2", arch("gemma2"), &["gemma2", "sliding window"]),
        ("phi3", arch("phi3"), &["phi3", "sliding window"]),
        ("mamba", arch("mamba"), &["mamba", "recurrent"]),
        ("jamba", arch("jamba"), &["jamba", "recurrent"]),
        ("rwkv7", arch("rwkv7"), &["rwkv7", "recurrent"]),
        ("ssm key", tiny().with("llama.ssm.conv_kernel", Value::U32(4)), &["recurrent"]),
        ("unknown hybrid", arch("new").with("new.ssm.state_size", Value::U32(16)), &["recurrent"]),
    ]);
}

#[test]
fn positions_that_are_not_linear_are_refused() {
    let scaling = |kind: &str| {
        tiny()
            .with("llama.rope.scaling.type", Value::String(kind.into()))
            .with("llama.rope.scaling.factor", Value::F32(4.0))
    };
    all_refused(&[
        ("longrope", scaling("longrope"), &["longrope", "length"]),
        ("dynamic", scaling("dynamic"), &["dynamic", "length"]),
        ("unknown", scaling("spiral"), &["spiral", "RoPE"]),
        ("long factors", with_tensor("rope_factors_long.weight", 16), &["longrope", "length"]),
        (
            "partial",
            tiny().with("llama.rope.dimension_count", Value::U32(16)),
            &["16 of 32", "partial RoPE"],
        ),
    ]);
}

#[test]
fn what_is_not_implemented_is_refused() {
    let text = |t: &str| Value::String(t.into());
    all_refused(&[
        ("experts", tiny().with("llama.expert_count", Value::U32(8)), &["mixture-of-experts"]),
        ("qwen2", arch("qwen2"), &["qwen2", "not implemented"]),
        ("no architecture", tiny().without("general.architecture"), &["architecture"]),
        ("query bias", with_tensor("blk.0.attn_q.bias", 128), &["bias"]),
        ("head of 48", TinyModel { head_dim: 48, ..tiny() }, &["48", "multiple of 32"]),
        ("hidden of 136", TinyModel { hidden: 136, ..tiny() }, &["136", "multiples of 16"]),
        ("4 heads over 3", TinyModel { kv_heads: 3, ..tiny() }, &["4 heads over 3 KV heads"]),
        ("tokenizer", tiny().with("tokenizer.ggml.model", text("bert")), &["tokenizer", "bert"]),
        ("pre", tiny().with("tokenizer.ggml.pre", text("odd")), &["pre-tokenizer", "odd"]),
        ("template", tiny().with("tokenizer.chat_template", text("{% if %}")), &["chat template"]),
    ]);
}

/// A tensor of a layer that the forward pass leaves out is an answer of another model.
#[test]
fn weights_that_would_be_ignored_are_refused() {
    let named = |name: &'static str, len| (name, with_tensor(name, len), [name]);
    let cases = [
        named("blk.0.attn_k.bias", 64),
        named("blk.0.attn_v.bias", 64),
        named("blk.1.attn_q.bias", 128),
        named("blk.0.attn_output.bias", 128),
        named("blk.0.ffn_gate.bias", 256),
        named("blk.1.ffn_down.bias", 128),
        named("blk.0.attn_q_norm.weight", 32),
        named("blk.0.post_attention_norm.weight", 128),
        named("output.bias", 291),
    ];
    // The text must name the tensor, or say "bias" as it does for the query's.
    let failures: Vec<String> = cases
        .iter()
        .filter(|(_, model, name)| {
            wrong(model, name).is_some() && wrong(model, &["bias"]).is_some()
        })
        .map(|(name, ..)| (*name).to_owned())
        .collect();
    assert!(failures.is_empty(), "these open, or panic: {failures:?}");
}

#[test]
fn missing_keys_and_tensors_are_named() {
    let names = [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.attn_q.weight",
        "blk.1.ffn_down.weight",
    ];
    let words = names.map(|name| [name]);
    let cases: Vec<(&str, TinyModel, &[&str])> = names
        .iter()
        .zip(&words)
        .map(|(name, words)| (*name, tiny().without(name), words.as_slice()))
        .collect();
    all_refused(&cases);
    all_refused(&[
        ("tokenizer.ggml.model", tiny().without("tokenizer.ggml.model"), &["tokenizer"]),
        (
            "a text for a number",
            tiny().with("llama.block_count", Value::String("2".into())),
            &["llama.block_count", "integer"],
        ),
        (
            "a number for a list",
            tiny().with("tokenizer.ggml.tokens", Value::U32(2)),
            &["tokenizer.ggml.tokens"],
        ),
    ]);
}

/// Sizes no file of this size can have: an error, in reasonable time and memory.
#[test]
fn absurd_sizes_are_refused() {
    let mut cases: Vec<(String, TinyModel)> = Vec::new();
    let keys = [
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "vocab_size",
    ];
    for key in keys {
        for value in [Value::U32(0), Value::U64(1 << 62), Value::U64(u64::MAX)] {
            let mut model = tiny().with(&format!("llama.{key}"), value.clone());
            if key == "attention.key_length" {
                // Or it would be refused as partial RoPE.
                model = model.with("llama.rope.dimension_count", value.clone());
            }
            cases.push((format!("{key} = {value:?}"), model));
        }
    }
    let zero = tiny().with("llama.context_length", Value::U32(0));
    cases.push(("context_length = 0".into(), zero));
    let alignment = tiny().with("general.alignment", Value::U32(0));
    cases.push(("general.alignment = 0".into(), alignment));
    let cases: Vec<(&str, TinyModel, &[&str])> =
        cases.iter().map(|(name, model)| (name.as_str(), model.clone(), &[] as &[&str])).collect();
    all_refused(&cases);
}

/// Ids the tokenizer can produce have a row in the embedding; another id is a panic at a request.
#[test]
fn ids_outside_the_embedding_are_refused() {
    let token = |i: usize| Value::String(format!("token{i}"));
    let bos = tiny()
        .with("tokenizer.ggml.bos_token_id", Value::U32(9999))
        .with("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let unknown = tiny().with("tokenizer.ggml.unknown_token_id", Value::U32(9999));
    let (_dir, path) = written(&tiny());
    let known = open(&path).unwrap().tokenizer;
    let mut tokens: Vec<Value> = (0..known.vocab_size() as u32)
        .map(|id| Value::String(known.token_text(id).unwrap()))
        .collect();
    tokens.extend((0..8).map(token));
    let more = tiny().with("tokenizer.ggml.tokens", Value::Array(tokens));
    all_refused(&[
        ("more tokens than rows", more, &[]),
        ("BOS", bos, &["bos_token_id"]),
        ("unknown token", unknown, &["unknown_token_id"]),
    ]);
}

/// Frequencies of a model that opens, or `None` if it is refused.
fn frequencies(model: &TinyModel) -> Option<Vec<f64>> {
    let (_dir, path) = written(model);
    open(&path).ok().map(|model| model.config.rope.inv_freq)
}

/// llama.cpp takes a factor without a type, and the older key `rope.scale_linear`, for linear
/// scaling: such a model is served that way or refused, not served without its scaling.
#[test]
fn scaling_factors_are_not_ignored() {
    let plain = frequencies(&tiny()).unwrap();
    let mut ignored = Vec::new();
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        match frequencies(&tiny().with(key, Value::F32(4.0))) {
            Some(got) if got == plain => ignored.push(key),
            Some(got) => assert_eq!(got[0], plain[0] / 4.0, "{key}"),
            None => {}
        }
    }
    assert!(ignored.is_empty(), "ignored: {ignored:?}");
}

#[test]
fn frequencies_are_finite_or_refused() {
    let scaled = |kind: &str, factor| {
        tiny()
            .with("llama.rope.scaling.type", Value::String(kind.into()))
            .with("llama.rope.scaling.factor", Value::F32(factor))
    };
    let cases = [
        ("linear 0", scaled("linear", 0.0)),
        ("yarn 0", scaled("yarn", 0.0)),
        ("yarn -1", scaled("yarn", -1.0)),
        ("linear NaN", scaled("linear", f32::NAN)),
        ("base 0", TinyModel { rope_base: 0.0, ..tiny() }),
        ("base -1", TinyModel { rope_base: -1.0, ..tiny() }),
    ];
    let mut infinite = Vec::new();
    for (name, model) in &cases {
        let (_dir, path) = written(model);
        if let Ok(model) = open(&path) {
            let rope = &model.config.rope;
            let finite = rope.inv_freq.iter().chain([&rope.magnitude]).all(|f| f.is_finite());
            if !finite {
                infinite.push(*name);
            }
        }
    }
    assert!(infinite.is_empty(), "open with frequencies that are not finite: {infinite:?}");
}

#[test]
fn templates_without_a_stable_prefix_are_refused() {
    let texts = PromptTexts { system: "s".into(), introduction: String::new() };
    for (template, words) in [
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "does not appear"),
        ("{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}", "template"),
        ("{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "depends"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
    ] {
        let model = tiny().with("tokenizer.chat_template", Value::String(template.into()));
        let (_dir, path) = written(&model);
        let error = open(&path).unwrap().prefix(&texts).unwrap_err().to_string();
        assert!(error.contains(words), "{template}: {error}");
    }
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let (dir, path) = written(&tiny());
    let whole = std::fs::read(&path).unwrap();
    let cut = dir.path().join("cut.gguf");
    // Every byte of the header, and places all over metadata, tensor list and tensors.
    let lengths = (0..64).chain((64..20_000).step_by(397)).chain((0..whole.len()).step_by(31_001));
    for length in lengths.chain([whole.len() - 1]) {
        std::fs::write(&cut, &whole[..length]).unwrap();
        let error = open(&cut).err().unwrap_or_else(|| panic!("{length} bytes open"));
        let named = error.contains("cut.gguf") && error.len() > "cut.gguf".len() + 20;
        assert!(named, "{length} bytes: {error}");
    }
}

#[test]
fn other_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let long = "plain text, not a model. ".repeat(1000);
    for bytes in [long.as_bytes(), &[0; 4096], &[0xff; 4096], b"PK\x03\x04", b"GGUF\x63\0\0\0"] {
        std::fs::write(&path, bytes).unwrap();
        let error = open(&path).err().unwrap();
        assert!(error.contains("model.gguf is not a readable GGUF file"), "{error}");
    }
    // A header that promises more than there is.
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    header.extend([0xff; 16]);
    std::fs::write(&path, header).unwrap();
    assert!(open(&path).is_err());
    let error = open(&dir.path().join("absent.gguf")).err().unwrap();
    assert!(error.contains("cannot read") && error.contains("absent.gguf"), "{error}");
    let error = open(dir.path()).err().unwrap();
    assert!(error.contains(&*dir.path().to_string_lossy()), "{error}");
}
