//! Errors of the operating-system layer.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = SysError> = std::result::Result<T, E>;

/// What the system refused, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
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
    /// A system call failed.
    #[error("{what}: {source}")]
    Call {
        /// The call.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A thread cannot run on a core.
    #[error(
        "core {core}: {source}; `nproc --all` says how many there are, a container may have fewer"
    )]
    Core {
        /// Its number.
        core: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A shared-memory segment could not be made or opened.
    #[error("shared memory segment {name}: {reason}")]
    Segment {
        /// Its name in /dev/shm.
        name: String,
        /// Why.
        reason: String,
    },
    /// Another process holds a lock.
    #[error("{path} is in use by process {owner}; stop it, or use another directory")]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Process id the lock file names.
        owner: String,
    },
    /// A range of a region is outside it, misaligned, or already borrowed.
    #[error("range {offset}+{len} of a region of {region_len} bytes: {reason}")]
    Range {
        /// First byte.
        offset: usize,
        /// Length.
        len: usize,
        /// The region's size.
        region_len: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The control channel broke.
    #[error("control channel: {0}")]
    Control(String),
    /// LMDB refused.
    #[error("opening the index in {path}: {reason}")]
    Lmdb {
        /// Directory of the environment.
        path: PathBuf,
        /// LMDB's reason.
        reason: String,
    },
}

impl SysError {
    pub(crate) fn last(what: &'static str) -> Self {
        Self::Call { what, source: std::io::Error::last_os_error() }
    }

    pub(crate) fn file(what: &'static str, path: impl Into<PathBuf>, e: std::io::Error) -> Self {
        Self::File { what, path: path.into(), source: e }
    }
}
