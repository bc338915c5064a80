//! What can go wrong with a model, and what to do next.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Errors of opening and running a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is not a GGUF file candle can read.
    #[error("{path} is not a readable GGUF file: {reason}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// candle's reason.
        reason: String,
    },
    /// A metadata key is absent or of another type.
    #[error("GGUF metadata {key:?}: {reason}")]
    Metadata {
        /// The key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The model cannot be served exactly.
    #[error("this model is refused: {reason}")]
    Refused {
        /// Why, in a sentence.
        reason: String,
    },
    /// A tensor is absent or has another shape.
    #[error("tensor {name:?}: {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The tokenizer could not be built or failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template cannot be used.
    #[error("chat template: {0}")]
    Template(String),
    /// Fetching a model failed.
    #[error("cannot fetch model {name}: {reason}")]
    Pull {
        /// The model.
        name: String,
        /// What went wrong and what to do.
        reason: String,
    },
    /// No such model.
    #[error("unknown model {name:?}: use one of {known}, or the path of a .gguf file")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names that exist.
        known: String,
    },
}

impl ModelError {
    pub(crate) fn refused(reason: impl Into<String>) -> Self {
        Self::Refused { reason: reason.into() }
    }
}
