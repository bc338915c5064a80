//! Chunk files on flash: atomic writes, quarantine, removal.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use matkv_sys::{CrashPoint, DirectFile, crash_point, sync_directory};
use matkv_types::ChunkId;

use crate::error::{Result, StoreError};

/// The directory of chunk files; 256 subdirectories by the first byte of the id.
#[derive(Clone, Debug)]
pub struct ChunkFiles {
    root: PathBuf,
    quarantine: PathBuf,
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { what, path, source }
}

impl ChunkFiles {
    /// Opens the directory and removes temporary files of a killed writer.
    pub(crate) fn open(store: &Path) -> Result<Self> {
        let this = Self { root: store.join("chunks"), quarantine: store.join("quarantine") };
        for dir in [&this.root, &this.quarantine] {
            std::fs::create_dir_all(dir).map_err(file_error("create", dir))?;
        }
        this.sweep()?;
        Ok(this)
    }

    fn sweep(&self) -> Result<()> {
        for dir in entries(&self.root)? {
            for file in entries(&dir)? {
                if file.extension().is_some_and(|e| e == "tmp") {
                    // Another store of the same root cannot be open: the lock is ours.
                    std::fs::remove_file(&file).map_err(file_error("remove", &file))?;
                }
            }
        }
        Ok(())
    }

    /// Where a chunk's file is, or would be.
    pub fn path(&self, id: &ChunkId) -> PathBuf {
        let name = id.to_string();
        self.root.join(&name[..2]).join(format!("{name}.kv"))
    }

    /// Writes a chunk file: temporary file, data to the device, rename, directory to the device.
    ///
    /// `bytes` is the sealed file, in page-aligned memory.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`] or the system's reason; nothing is left behind.
    pub fn write(&self, id: &ChunkId, bytes: &[u8]) -> Result<()> {
        let path = self.path(id);
        let Some(dir) = path.parent() else { return Ok(()) };
        if !dir.exists() {
            std::fs::create_dir_all(dir).map_err(file_error("create", dir))?;
            sync_directory(&self.root)?;
        }
        // Threads of this process may write the same chunk at once; what a killed one left has
        // been swept when the store was opened.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let temp = path.with_extension(format!("{}.tmp", NEXT.fetch_add(1, Ordering::Relaxed)));
        let outcome = Self::write_temp(&temp, bytes)
            .and_then(|()| {
                crash_point(CrashPoint::IngestSynced);
                std::fs::rename(&temp, &path).map_err(file_error("rename", &path))
            })
            .and_then(|()| {
                crash_point(CrashPoint::IngestRenamed);
                Ok(sync_directory(dir)?)
            });
        outcome.map_err(|e| {
            let _ = std::fs::remove_file(&temp);
            match e {
                StoreError::File { source, .. } if is_full(&source) => {
                    StoreError::NoSpace { chunk: *id, bytes: bytes.len(), path: self.root.clone() }
                }
                other => other,
            }
        })
    }

    fn write_temp(temp: &Path, bytes: &[u8]) -> Result<()> {
        let file = DirectFile::create(temp)?;
        file.write_all(bytes).map_err(file_error("write", temp))?;
        file.file.sync_data().map_err(file_error("sync", temp))
    }

    /// Moves a file that must not be used out of the way; it is kept for inspection. False if
    /// there is none.
    ///
    /// # Errors
    /// If it can be neither moved nor removed.
    pub fn quarantine(&self, id: &ChunkId) -> Result<bool> {
        let path = self.path(id);
        let target = self.quarantine.join(format!("{id}.kv"));
        match std::fs::rename(&path, &target) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(_) => self.remove(id).map(|()| true),
        }
    }

    /// Files in quarantine.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn quarantined(&self) -> Result<usize> {
        Ok(entries(&self.quarantine)?.len())
    }

    /// Removes a chunk's file; a missing one is no error.
    ///
    /// # Errors
    /// The system's reason.
    pub fn remove(&self, id: &ChunkId) -> Result<()> {
        let path = self.path(id);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(file_error("remove", &path)(e)),
            _ => Ok(()),
        }
    }
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let list = std::fs::read_dir(dir).map_err(file_error("list", dir))?;
    list.map(|e| e.map(|e| e.path()).map_err(file_error("list", dir))).collect()
}
