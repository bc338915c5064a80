//! Errors of the store.

use std::path::PathBuf;

use matkv_sys::SysError;
use matkv_types::ChunkId;

use crate::records::Tier;

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
    /// The directories do not suit the kind of volume.
    #[error("storage.type {0}")]
    Volume(String),
    /// The tier has reached its capacity and nothing in it may leave.
    #[error(
        "{tier} is full: {used} of {capacity} bytes, and nothing more may be evicted; raise {key}"
    )]
    Full {
        /// Which tier.
        tier: Tier,
        /// Bytes in it.
        used: u64,
        /// Bytes allowed.
        capacity: u64,
        /// The setting.
        key: &'static str,
    },
    /// The cold tier.
    #[error("cold tier: {what}: {reason}")]
    Cold {
        /// The operation.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// The cold tier does not have it.
    #[error("cold tier: no such chunk")]
    ColdMissing,
    /// A chunk file is not what it should be.
    #[error(transparent)]
    Format(#[from] matkv_format::FormatError),
    /// The index does not know the chunk.
    #[error("no chunk {0}")]
    Unknown(ChunkId),
    /// Something that was asked for cannot be done.
    #[error("{0}")]
    Refused(String),
}

impl StoreError {
    /// Whether it says that a file is wrong or gone, and not that it could not be looked at.
    pub fn is_damage(&self) -> bool {
        use std::io::ErrorKind;
        match self {
            Self::Format(_) | Self::ColdMissing => true,
            Self::File { source, .. } => matches!(
                source.kind(),
                ErrorKind::NotFound
                    | ErrorKind::UnexpectedEof
                    | ErrorKind::InvalidData
                    | ErrorKind::InvalidInput
            ),
            _ => false,
        }
    }
}
