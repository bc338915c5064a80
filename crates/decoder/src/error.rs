//! Errors of the decoder.

use matkv_model::ModelError;
use matkv_ring::{DescriptorError, GeometryError, QueueError, RecordError};
use matkv_sys::SysError;

/// What ends a session or the process.
#[derive(Debug, thiserror::Error)]
pub enum DecoderError {
    /// The model cannot be opened.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The operating system refused something.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// The segment is not what was agreed.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A ring's index is impossible.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A descriptor is impossible.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// A sequence record is impossible.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The loader refused this decoder.
    #[error("the loader refused this decoder: {0}")]
    Refused(String),
    /// A record is consistent but does not fit the arena.
    #[error("sequence {sequence}: {reason}")]
    Sequence {
        /// Request number.
        sequence: u64,
        /// What does not fit.
        reason: String,
    },
    /// A thread could not be started.
    #[error("cannot start threads: {0}")]
    Threads(String),
}
