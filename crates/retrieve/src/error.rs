//! Errors of retrieval.

use std::path::PathBuf;

use matkv_store::StoreError;

/// Result of this crate.
pub type Result<T, E = RetrieveError> = std::result::Result<T, E>;

/// What can go wrong while finding chunks.
#[derive(Debug, thiserror::Error)]
pub enum RetrieveError {
    /// The embedding model cannot be opened.
    #[error("embedding model {path}: {reason}")]
    Open {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Computing an embedding failed.
    #[error("embedding: {0}")]
    Embed(String),
    /// The vector index failed.
    #[error("vector index: {0}")]
    Index(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}
