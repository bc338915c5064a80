//! Errors of the store.

use std::path::PathBuf;

use matkv_sys::SysError;
use matkv_types::ChunkId;

/// Result of this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// What can go wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused something.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// A file operation failed.
    #[error("{what} {path}: {source}")]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// No room for a chunk file; what was written of it has been removed.
    #[error(
        "no room on the device for chunk {chunk} ({bytes} bytes) in {path}; free space or move paths.store_dir"
    )]
    NoSpace {
        /// The chunk.
        chunk: ChunkId,
        /// Bytes of its file.
        bytes: usize,
        /// The chunk directory.
        path: PathBuf,
    },
    /// LMDB failed.
    #[error("index: {0}")]
    Index(#[from] heed::Error),
    /// A record in the index cannot be read.
    #[error("index record {key}: {reason}")]
    Record {
        /// Which one.
        key: String,
        /// What is wrong.
        reason: String,
    },
}
