//! Opening an LMDB environment, which heed marks unsafe.

use std::path::Path;

use heed::{Env, EnvOpenOptions, WithoutTls};

use crate::error::{Result, SysError};

/// Opens (or creates) the environment in `dir`.
///
/// The caller holds the store's lock file, so no other process of ours has it open.
///
/// # Errors
/// LMDB's reason.
pub fn open_environment(dir: &Path, map_bytes: usize, databases: u32) -> Result<Env<WithoutTls>> {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(map_bytes).max_dbs(databases).max_readers(126);
    // SAFETY: the file is ours alone (the store's lock), is opened once per process, and is
    // changed by LMDB only.
    unsafe { options.open(dir) }
        .map_err(|e| SysError::Lmdb { path: dir.to_owned(), reason: e.to_string() })
}
