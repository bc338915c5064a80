//! RoPE variants from GGUF metadata. Those whose angle is linear in position qualify for the
//! exact shift; those whose frequencies depend on the total length are refused.

use matkv_kernels::{RopeStyle, RotaryEmbedding};

use crate::error::{ModelError, Result};
use crate::gguf::Gguf;

pub(crate) fn read(gguf: &mut Gguf, head_dim: usize) -> Result<RotaryEmbedding> {
    let rotated = gguf.uint("llama.rope.dimension_count")?.unwrap_or(head_dim);
    if rotated != head_dim {
        return Err(ModelError::refused(format!(
            "only {rotated} of {head_dim} head dimensions are rotated (partial RoPE)"
        )));
    }
    if gguf.tensor_names().any(|n| n.starts_with("rope_factors_long")) {
        return Err(length_dependent("longrope"));
    }
    let base = gguf.float("llama.rope.freq_base")?.unwrap_or(10_000.0);
    // GGUF stores llama's query and key weights permuted for interleaved pairs.
    let mut rope = RotaryEmbedding::plain(head_dim, base, RopeStyle::Interleaved);
    if gguf.has_tensor("rope_freqs.weight") {
        let factors = gguf.tensor("rope_freqs.weight", &[head_dim / 2])?;
        rope.inv_freq.iter_mut().zip(factors).for_each(|(f, by)| *f /= f64::from(by));
    }
    let factor = match gguf.float("llama.rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The name before scaling had types.
        None => gguf.float("llama.rope.scale_linear")?,
    };
    // A factor without a type is linear, as in llama.cpp.
    let untyped = if factor.is_some() { "linear" } else { "none" };
    let factor = factor.unwrap_or(1.0);
    match gguf.text("llama.rope.scaling.type").unwrap_or(untyped) {
        "none" => {}
        "linear" => linear(&mut rope, factor),
        "yarn" => {
            let original = gguf.uint("llama.rope.scaling.original_context_length")?;
            let original = original.unwrap_or(gguf.require_uint("llama.context_length")?);
            let attention = gguf.float("llama.rope.scaling.attn_factor")?.unwrap_or(1.0);
            yarn(&mut rope, base, factor, original, attention);
        }
        other @ ("longrope" | "dynamic" | "su") => return Err(length_dependent(other)),
        other => return Err(ModelError::refused(format!("RoPE scaling {other:?} is unknown"))),
    }
    let sound = |x: f64| x.is_finite() && x > 0.0;
    if !rope.inv_freq.iter().all(|f| sound(*f)) || !sound(rope.magnitude) {
        return Err(ModelError::refused(format!(
            "its RoPE parameters (base {base}, factor {factor}) give frequencies that are not \
             positive numbers"
        )));
    }
    Ok(rope)
}

fn length_dependent(kind: &str) -> ModelError {
    ModelError::refused(format!(
        "{kind} RoPE depends on the total length of the prompt, so a chunk's keys cannot be \
         computed once"
    ))
}

fn linear(rope: &mut RotaryEmbedding, factor: f64) {
    rope.inv_freq.iter_mut().for_each(|f| *f /= factor);
}

/// YaRN (Peng et al. 2023): frequencies between the two corrections are interpolated by a ramp;
/// cosine and sine carry `attention · (1 + 0.1 ln factor)`, on queries and keys alike.
fn yarn(rope: &mut RotaryEmbedding, base: f64, factor: f64, original: usize, attention: f64) {
    const BETA_FAST: f64 = 32.0;
    const BETA_SLOW: f64 = 1.0;
    let pairs = rope.inv_freq.len();
    let dim = 2.0 * pairs as f64;
    // The pair that turns `rotations` times over the original context.
    let correction = |rotations: f64| {
        dim * (original as f64 / (rotations * std::f64::consts::TAU)).ln() / (2.0 * base.ln())
    };
    let low = correction(BETA_FAST).floor().max(0.0);
    let high = correction(BETA_SLOW).ceil().min(dim - 1.0);
    let width = if high > low { high - low } else { 0.001 };
    for (i, f) in rope.inv_freq.iter_mut().enumerate() {
        let ramp = ((i as f64 - low) / width).clamp(0.0, 1.0);
        *f = *f / factor * ramp + *f * (1.0 - ramp);
    }
    rope.magnitude = attention * (1.0 + 0.1 * factor.ln());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with vectors another implementation computed; see `tests/fixtures/scripts`.
    #[test]
    fn frequencies_match_the_fixture() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/rope.json");
        let text = std::fs::read_to_string(path).unwrap();
        let fixture: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut compared = 0;
        for case in fixture["cases"].as_array().unwrap() {
            let base = case["base"].as_f64().unwrap();
            let dim = case["head_dim"].as_u64().unwrap() as usize;
            let parameters = &case["parameters"];
            let mut rope = RotaryEmbedding::plain(dim, base, RopeStyle::HalfSplit);
            match case["kind"].as_str().unwrap() {
                "plain" => {}
                "linear" => linear(&mut rope, parameters["factor"].as_f64().unwrap()),
                "yarn" => {
                    let original = parameters["original_max_position_embeddings"].as_u64();
                    let factor = parameters["factor"].as_f64().unwrap();
                    yarn(&mut rope, base, factor, original.unwrap() as usize, 1.0);
                }
                // A GGUF brings llama3's scaling as the factors of `rope_freqs.weight`, which the
                // converter computed; there is no formula here to compare.
                "llama3" => continue,
                other => panic!("unknown kind {other}"),
            }
            let want = case["inv_freq"].as_array().unwrap();
            assert_eq!(rope.inv_freq.len(), want.len());
            for (got, want) in rope.inv_freq.iter().zip(want) {
                let want = want.as_f64().unwrap();
                // Both are f64; powers and logarithms of two libraries differ in the last bits.
                assert!((got - want).abs() <= want * 1e-12, "{case}: {got} {want}");
            }
            let scale = case["attention_scaling"].as_f64().unwrap();
            assert!((rope.magnitude - scale).abs() < 1e-12);
            compared += 1;
        }
        assert_eq!(compared, 6, "plain, linear and yarn of two bases");
    }
}
