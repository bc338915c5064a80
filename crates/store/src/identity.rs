//! Whose chunks a directory of the store holds.

use std::path::{Path, PathBuf};

use matkv_format::Expectation;
use matkv_types::{ChunkId, Fingerprint, KvShape};
use serde::{Deserialize, Serialize};

use crate::error::{Result, StoreError};
use crate::options::StoreOptions;
use crate::volume::{blocks, entries};

/// What all chunks of a store were compiled with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Model, tokenizer, prefix, arithmetic.
    pub fingerprint: Fingerprint,
    /// KV rows of the model.
    pub shape: KvShape,
    /// Position of a chunk's first row: the prefix's length.
    pub base_position: usize,
    /// The model's name, for people.
    pub model: String,
}

const FILE: &str = "identity.json";

impl Identity {
    /// Name of its directory.
    pub fn directory(&self) -> String {
        self.fingerprint.to_string()[..16].to_owned()
    }

    /// What the file of a chunk must say.
    pub fn expectation<'t>(&self, chunk_id: ChunkId, tokens: &'t [u32]) -> Expectation<'t> {
        Expectation {
            fingerprint: self.fingerprint,
            chunk_id,
            tokens,
            shape: self.shape,
            base_position: self.base_position,
        }
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let bytes = crate::store::encode(FILE, self)?;
        Ok(matkv_sys::write_atomically(&dir.join(FILE), &bytes)?)
    }

    /// Identities a store has directories of, for those who have no model at hand.
    ///
    /// # Errors
    /// If the directory cannot be listed or a file in it not read.
    pub fn list(root: &Path) -> Result<Vec<Self>> {
        let mut out = Vec::new();
        for dir in entries(root)? {
            let path = dir.join(FILE);
            let Ok(bytes) = std::fs::read(&path) else { continue };
            out.push(crate::store::decode(&path.display().to_string(), &bytes)?);
        }
        Ok(out)
    }
}

/// Data of another identity: misses, which go before anything of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stale {
    pub name: String,
    /// Its directories on every device.
    pub directories: Vec<PathBuf>,
    pub bytes: u64,
}

/// Says that chunk files have been taken away under the index.
pub(crate) const RECONCILE: &str = "RECONCILE";

/// Other identities' data, the one used longest ago last. Their files are counted once, here: a
/// store that nobody opens does not change.
pub(crate) fn others(options: &StoreOptions, own: &str) -> Vec<Stale> {
    let mut out: Vec<(std::time::SystemTime, Stale)> = Vec::new();
    for dir in entries(&options.root).unwrap_or_default() {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let index = dir.join("index").join("data.mdb");
        let Ok(used) = std::fs::metadata(&index).and_then(|m| m.modified()) else { continue };
        if name == own {
            continue;
        }
        let directories: Vec<PathBuf> =
            options.volume_roots().iter().map(|d| d.join(&name)).collect();
        let bytes = directories.iter().map(|d| chunk_bytes(d)).sum();
        out.push((used, Stale { name, directories, bytes }));
    }
    out.sort_by_key(|(used, _)| std::cmp::Reverse(*used));
    out.into_iter().map(|(_, stale)| stale).collect()
}

fn chunk_bytes(dir: &Path) -> u64 {
    let subs = entries(&dir.join("chunks")).unwrap_or_default();
    let files = subs.iter().flat_map(|s| entries(s).unwrap_or_default());
    let quarantine = entries(&dir.join("quarantine")).unwrap_or_default();
    files.chain(quarantine).map(|f| blocks(&f)).sum()
}

impl Stale {
    /// Removes its chunk files. Its index stays, and finds them missing.
    pub fn remove_files(&self, root: &Path) -> Result<()> {
        let marker = root.join(&self.name).join(RECONCILE);
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::File { what, path, source }
        };
        std::fs::write(&marker, b"").map_err(failed("write", &marker))?;
        for dir in &self.directories {
            for part in ["chunks", "quarantine"] {
                let path = dir.join(part);
                match std::fs::remove_dir_all(&path) {
                    Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                        return Err(failed("remove", &path)(e));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
