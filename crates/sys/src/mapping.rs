//! Files mapped read-only: processes that map one file hold one copy of it.
//!
//! Only for files that appear by a rename and are never written again: a file that shrinks under
//! its mapping is a SIGBUS, one that changes breaks what `&[u8]` promises.

use std::fs::File;
use std::path::Path;

use crate::error::{Result, SysError};
use crate::files::evict_page_cache;
use crate::huge::{HUGE_PAGE, SharedMapping};

/// A whole file, mapped read-only and shared.
pub struct FileMapping(SharedMapping);

impl FileMapping {
    /// Maps `path` and brings its pages in, so that the first use waits for nothing.
    ///
    /// # Errors
    /// If it cannot be opened or mapped, or is empty.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| SysError::file("open", path, e))?;
        let len = file.metadata().map_err(|e| SysError::file("stat", path, e))?.len() as usize;
        let mapped = || {
            let mapping = SharedMapping::new(&file, len, libc::PROT_READ)?;
            if !mapping.populate(libc::MADV_POPULATE_READ) {
                mapping.populate(libc::MADV_WILLNEED);
            }
            Ok(mapping)
        };
        let err = |e| SysError::file("map", path, e);
        let mut mapping = mapped().map_err(err)?;
        if mapping.huge_bytes() < len / HUGE_PAGE * HUGE_PAGE / 8 * 7 {
            // What the cache has in small pages, such as from when the file was written, stays so.
            // Read through a mapping that asks for huge pages it comes in them, where the file
            // system has large folios. Pages that others map are not evicted.
            drop(mapping);
            let _ = evict_page_cache(path);
            mapping = mapped().map_err(err)?;
        }
        Ok(Self(mapping))
    }
}

impl AsRef<[u8]> for FileMapping {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: mapped bytes as long as this lives; nobody writes the file any more.
        unsafe { std::slice::from_raw_parts(self.0.base(), self.0.len()) }
    }
}

/// Gives memory that is free inside the allocator back to the system: what opening a model has
/// used for a moment.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches free memory of the allocator only.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_outlives_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 5000]).unwrap();
        let mapping = FileMapping::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mapping.as_ref(), [7; 5000]);
        assert!(FileMapping::open(&path).is_err());
    }

    #[test]
    fn an_empty_file_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(FileMapping::open(file.path()).is_err());
    }
}
