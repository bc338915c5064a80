//! Files mapped read-only: processes that map one file hold one copy of it.
//!
//! Only for files that appear by a rename and are never written again: a file that shrinks under
//! its mapping is a SIGBUS, one that changes breaks what `&[u8]` promises.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{Result, SysError};

/// A whole file, mapped read-only and shared.
pub struct FileMapping {
    base: *const u8,
    len: usize,
}

// SAFETY: the pages are only read, and unmapped when the last owner drops them.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps `path` and brings its pages in, so that the first use waits for nothing.
    ///
    /// # Errors
    /// If it cannot be opened or mapped, or is empty.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| SysError::file("open", path, e))?;
        let meta = file.metadata().map_err(|e| SysError::file("stat", path, e))?;
        let len = meta.len() as usize;
        // SAFETY: a fresh mapping chosen by the kernel; the descriptor may close afterwards.
        let base = unsafe {
            let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            libc::mmap(std::ptr::null_mut(), len, prot, flags, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(SysError::file("map", path, std::io::Error::last_os_error()));
        }
        // SAFETY: the mapping just made.
        unsafe {
            // Where the file system has large folios, what is read now comes in huge pages; a hint.
            libc::madvise(base, len, libc::MADV_HUGEPAGE);
            // Before Linux 5.14 pages are read ahead instead, and come in at first use.
            if libc::madvise(base, len, libc::MADV_POPULATE_READ) != 0 {
                libc::madvise(base, len, libc::MADV_WILLNEED);
            }
        }
        Ok(Self { base: base.cast(), len })
    }
}

impl AsRef<[u8]> for FileMapping {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` mapped bytes as long as this lives; nobody writes the file any more.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and nobody borrows from it any more.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.len) };
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
