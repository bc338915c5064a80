//! What the tests of several crates share: a tiny random Llama, pseudo-English, and the models
//! and vocabularies of the cache.
//!
//! Everything is deterministic: equal options give equal bytes. Only tests use this crate, so a
//! failure here is a panic that says what is wrong.
#![forbid(unsafe_code)]

mod cache;
mod text;
mod tiny;
mod vocabulary;

pub use cache::{cached_model, cached_vocabs};
pub use candle_core::quantized::gguf_file::Value;
pub use text::text;
pub use tiny::TinyModel;
