//! One small file for every document: what the index knows of it, should the index be lost.

use std::path::{Path, PathBuf};

use matkv_sys::sync_directory;
use matkv_types::LengthPrefixedHasher;

use crate::error::{Result, StoreError};
use crate::records::DocumentRecord;
use crate::volume::entries;

/// The directory of manifests.
pub(crate) struct Manifests {
    dir: PathBuf,
}

impl Manifests {
    pub fn open(store: &Path) -> Result<Self> {
        let dir = store.join("documents");
        std::fs::create_dir_all(&dir).map_err(|source| StoreError::File {
            what: "create",
            path: dir.clone(),
            source,
        })?;
        Ok(Self { dir })
    }

    fn path(&self, document: &str) -> PathBuf {
        let name = LengthPrefixedHasher::default().part(document.as_bytes()).finish();
        self.dir.join(format!("{name}.json"))
    }

    /// Writes manifests so that each is whole or absent after a crash.
    pub fn write(&self, documents: &[DocumentRecord]) -> Result<()> {
        if documents.is_empty() {
            return Ok(());
        }
        for document in documents {
            let bytes = crate::store::encode(&document.id, document)?;
            let path = self.path(&document.id);
            let temp = path.with_extension("tmp");
            let failed = |source| StoreError::File { what: "write", path: temp.clone(), source };
            let written = std::fs::write(&temp, bytes)
                .and_then(|()| std::fs::File::open(&temp)?.sync_data())
                .and_then(|()| std::fs::rename(&temp, &path));
            if let Err(e) = written {
                let _ = std::fs::remove_file(&temp);
                return Err(failed(e));
            }
        }
        Ok(sync_directory(&self.dir)?)
    }

    /// Removes manifests; missing ones are no error.
    pub fn remove(&self, documents: &[String]) -> Result<()> {
        for document in documents {
            let path = self.path(document);
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(StoreError::File { what: "remove", path, source });
                }
                _ => {}
            }
        }
        if documents.is_empty() { Ok(()) } else { Ok(sync_directory(&self.dir)?) }
    }

    /// Every document there is; what cannot be read is reported and left.
    pub fn all(&self) -> Result<Vec<DocumentRecord>> {
        let mut out = Vec::new();
        for path in entries(&self.dir)? {
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            let bytes = std::fs::read(&path).map_err(|source| StoreError::File {
                what: "read",
                path: path.clone(),
                source,
            })?;
            match crate::store::decode(&path.display().to_string(), &bytes) {
                Ok(record) => out.push(record),
                Err(e) => tracing::warn!("{e}"),
            }
        }
        Ok(out)
    }
}
