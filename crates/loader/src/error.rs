//! Errors of the loader: what ends the process, and what fails one request.

use matkv_format::FormatError;
use matkv_model::ModelError;
use matkv_retrieve::RetrieveError;
use matkv_ring::GeometryError;
use matkv_store::StoreError;
use matkv_sys::SysError;

/// What keeps the loader from running.
#[derive(Debug, thiserror::Error)]
pub enum LoaderError {
    /// The model cannot be opened.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Retrieval cannot be set up.
    #[error(transparent)]
    Retrieve(#[from] RetrieveError),
    /// The operating system refused something.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// The segment cannot be laid out.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A chunk cannot be sealed.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The configuration does not fit the machine or the model.
    #[error("{0}")]
    Setup(String),
}

/// Why one request failed; each kind is one gRPC status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// It names something that does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Too many requests, or one that can never fit.
    #[error("{0}")]
    Exhausted(String),
    /// The decoder is not there, or died.
    #[error("{0}")]
    Unavailable(String),
    /// It took longer than its client, or `pipeline.deadline`, allows.
    #[error("no complete answer within {}", matkv_config::format_duration(*.0))]
    Deadline(std::time::Duration),
    /// Something broke that should not.
    #[error("{0}")]
    Internal(String),
}
