//! Opening a chunk file, and the reasons not to use one.

use std::fs::File;
use std::path::Path;

use matkv_sys::{DirectFile, SysError};

/// Why a chunk file is not used.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error("its file is missing")]
    Missing,
    /// The file is wrong: kept aside, replaced.
    #[error("{0}")]
    Damaged(String),
    /// The system would not read it; it may be whole.
    #[error("cannot be read: {0}")]
    Unreadable(String),
}

/// Opens a chunk file of exactly this length.
pub fn open_chunk(path: &Path, len: usize) -> Result<File, Unusable> {
    let unreadable = |e: &dyn std::fmt::Display| Unusable::Unreadable(e.to_string());
    let file = match DirectFile::open(path) {
        Ok(opened) => opened.file,
        Err(SysError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(Unusable::Missing);
        }
        Err(e) => return Err(unreadable(&e)),
    };
    let found = file.metadata().map_err(|e| unreadable(&e))?.len();
    if found != len as u64 {
        return Err(Unusable::Damaged(format!("file of {found} bytes, expected {len}")));
    }
    Ok(file)
}
