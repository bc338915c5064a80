//! Language models of the Llama family: weights from GGUF through candle, tokenizer, chat
//! template, forward pass over KV segments, sampling.
//!
//! Not here: where KV rows live (the caller lends sections), retrieval, scheduling.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod config;
mod detokenize;
mod digest;
mod error;
mod forward;
mod gguf;
mod language_model;
mod linear;
mod prompt;
mod pull;
mod rope;
mod sampling;
mod template;
mod tokenizer;
mod weights;
mod weights_file;

pub use config::LlamaConfig;
pub use detokenize::{Detokenizer, StopFilter};
pub use digest::file_digest;
pub use error::{ModelError, Result};
pub use forward::{ForwardRow, Segment, Source, Step};
pub use language_model::{LanguageModel, ModelHeader, PromptTexts};
pub use matkv_kernels::Layers;
pub use matkv_kernels::team::Team;
pub use prompt::{Message, Role};
pub use pull::{PULLABLE, PullProgress, Pullable, model_path, pull, pulled};
pub use sampling::{Sampler, divergence, greedy, log_sum_exp};
pub use tokenizer::TextTokenizer;
pub use weights::{LlamaWeights, Phase};
pub use weights_file::{PackedFiles, packed_files};
