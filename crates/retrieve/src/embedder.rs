//! all-MiniLM-L6-v2: text to a unit vector.
//!
//! The model reads 256 tokens, [CLS] and [SEP] included. A longer text is cut into windows and
//! its vector is the normalized mean of theirs.

use std::path::Path;

use matkv_types::Precision;
use tokenizers::Tokenizer;

use crate::bert::Bert;
use crate::error::{Result, RetrieveError};

/// Dimensions of an embedding.
pub const EMBEDDING_DIM: usize = 384;
/// Tokens a window holds besides [CLS] and [SEP].
const WINDOW: usize = 254;

/// The embedding model.
pub struct Embedder {
    bert: Bert,
    tokenizer: Tokenizer,
    cls: u32,
    sep: u32,
}

impl Embedder {
    /// Opens the directory that holds `model.safetensors` and `tokenizer.json`.
    ///
    /// # Errors
    /// If one of them is missing or not what it should be.
    pub fn open(dir: &Path, precision: Precision) -> Result<Self> {
        let weights = dir.join("model.safetensors");
        let bert = Bert::open(&weights, precision)
            .map_err(|e| RetrieveError::Open { path: weights, reason: first_line(&e) })?;
        let path = dir.join("tokenizer.json");
        let err = |reason: String| RetrieveError::Open { path: path.clone(), reason };
        let mut tokenizer = Tokenizer::from_file(&path).map_err(|e| err(e.to_string()))?;
        // The file bakes in truncation at 128 and padding to 128; windows are cut here instead.
        tokenizer.with_truncation(None).map_err(|e| err(e.to_string()))?;
        tokenizer.with_padding(None);
        let special =
            |t: &str| tokenizer.token_to_id(t).ok_or_else(|| err(format!("no {t} token")));
        let (cls, sep) = (special("[CLS]")?, special("[SEP]")?);
        Ok(Self { bert, tokenizer, cls, sep })
    }

    /// The vector of a text; none for a text without tokens.
    ///
    /// # Errors
    /// If the model fails.
    pub fn embed(&self, text: &str) -> Result<Option<Vec<f32>>> {
        let failed = |e: &dyn std::fmt::Display| RetrieveError::Embed(first_line(e));
        let ids = self.tokenizer.encode_fast(text, false).map_err(|e| failed(&e))?;
        let windows: Vec<&[u32]> = ids.get_ids().chunks(WINDOW).collect();
        let mut sum = vec![0.0f32; EMBEDDING_DIM];
        for window in windows {
            let ids: Vec<u32> =
                std::iter::once(self.cls).chain(window.iter().copied()).chain([self.sep]).collect();
            let mut v = self.bert.mean(&ids).map_err(|e| failed(&e))?;
            normalize(&mut v);
            sum.iter_mut().zip(&v).for_each(|(s, x)| *s += x);
        }
        Ok(normalize(&mut sum).then_some(sum))
    }
}

/// An error's own words, without the backtrace candle appends when RUST_BACKTRACE is set.
fn first_line(e: &dyn std::fmt::Display) -> String {
    e.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Scales to length 1; false for a vector without direction.
fn normalize(v: &mut [f32]) -> bool {
    let norm = v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if norm < 1e-12 || !norm.is_finite() {
        return false;
    }
    v.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    true
}
