//! SHA-256 of a large file, remembered by path, size and time of change.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use matkv_types::Digest;
use sha2::{Digest as _, Sha256};

use crate::error::{ModelError, Result};

/// The SHA-256 of `path`. With a cache directory, an unchanged file is hashed once.
pub fn file_digest(path: &Path, cache: Option<&Path>) -> Result<Digest> {
    let read = |source| ModelError::Read { path: path.to_owned(), source };
    let path_of = path.canonicalize().map_err(read)?;
    let meta = std::fs::metadata(&path_of).map_err(read)?;
    let key = format!(
        "{} {} {} {}.{}",
        path_of.display(),
        meta.len(),
        meta.ino(),
        meta.mtime(),
        meta.mtime_nsec()
    );
    let entry = cache.map(|dir| {
        let name = Sha256::digest(path_of.as_os_str().as_encoded_bytes());
        dir.join("digests").join(Digest(name.into()).to_string())
    });
    if let Some(known) = entry.as_deref().and_then(|e| std::fs::read_to_string(e).ok())
        && let Some((digest, k)) = known.split_once(' ')
        && k == key
        && let Ok(digest) = digest.parse()
    {
        return Ok(digest);
    }
    let digest = hash(&path_of).map_err(read)?;
    if let Some(entry) = entry {
        // Only a shortcut: if it cannot be written, the file is hashed again next time.
        let _ = remember(&entry, &format!("{digest} {key}"));
    }
    Ok(digest)
}

fn hash(path: &Path) -> std::io::Result<Digest> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(Digest(hasher.finalize().into()));
        }
        hasher.update(&buffer[..n]);
    }
}

fn remember(entry: &Path, text: &str) -> std::io::Result<()> {
    if let Some(dir) = entry.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let temp = entry.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temp, text)?;
    std::fs::rename(&temp, entry)
}
