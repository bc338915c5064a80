//! What lies in a store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everything in a directory, sorted; nothing if it does not exist.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(list) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = list.flatten().map(|e| e.path()).collect();
    paths.sort();
    paths
}

/// Chunk files of all fingerprints, by chunk id. Anything else beside them is a failure.
///
/// # Panics
/// If a file is there that is no chunk file.
pub fn chunk_files(store: &Path) -> BTreeMap<String, PathBuf> {
    let directories = entries(store).into_iter().flat_map(|f| entries(&f.join("chunks")));
    let mut found = BTreeMap::new();
    for path in directories.flat_map(|d| entries(&d)) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let id = name.strip_suffix(".kv").unwrap_or_else(|| panic!("{} is left", path.display()));
        found.insert(id.to_owned(), path.clone());
    }
    found
}

/// Where the file of a chunk lies, or would lie.
///
/// # Panics
/// If the store has more than one fingerprint.
pub fn chunk_file(store: &Path, id: &str) -> PathBuf {
    let with_chunks: Vec<PathBuf> =
        entries(store).into_iter().map(|f| f.join("chunks")).filter(|c| c.is_dir()).collect();
    let [chunks] = with_chunks.as_slice() else { panic!("one fingerprint in {with_chunks:?}") };
    chunks.join(&id[..2]).join(format!("{id}.kv"))
}
