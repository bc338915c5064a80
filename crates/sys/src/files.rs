//! Files: O_DIRECT, locks, atomic writes, page-cache eviction.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Result, SysError};

/// A file opened past the page cache where the file system can.
pub struct DirectFile {
    /// The file.
    pub file: File,
    /// False where O_DIRECT is refused (tmpfs, some overlay file systems).
    pub direct: bool,
}

impl DirectFile {
    /// Opens for reading.
    ///
    /// # Errors
    /// If the file cannot be opened at all.
    pub fn open(path: &Path) -> Result<Self> {
        Self::with(path, OpenOptions::new().read(true))
    }

    /// Creates for writing; the file must not exist.
    ///
    /// # Errors
    /// If the file exists or cannot be created.
    pub fn create(path: &Path) -> Result<Self> {
        Self::with(path, OpenOptions::new().write(true).create_new(true))
    }

    fn with(path: &Path, options: &mut OpenOptions) -> Result<Self> {
        match options.custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => Ok(Self { file, direct: true }),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                let file = options.custom_flags(0).open(path);
                // A failed create with O_DIRECT may have left the name.
                let file = file.or_else(|e| match e.kind() {
                    std::io::ErrorKind::AlreadyExists => {
                        OpenOptions::new().write(true).truncate(true).open(path)
                    }
                    _ => Err(e),
                });
                let file = file.map_err(|e| SysError::file("open", path, e))?;
                Ok(Self { file, direct: false })
            }
            Err(e) => Err(SysError::file("open", path, e)),
        }
    }

    /// Writes all of `bytes` (page-aligned, whole pages) at `offset`.
    ///
    /// # Errors
    /// The system's error, e.g. a full disk.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        for (i, piece) in bytes.chunks(4 << 20).enumerate() {
            self.file.write_all_at(piece, offset + (i * (4 << 20)) as u64)?;
        }
        Ok(())
    }
}

/// An exclusive lock on a file that names its owner; released by the kernel at any death.
pub struct FileLock {
    file: File,
}

impl FileLock {
    /// Takes the lock at once or fails.
    ///
    /// # Errors
    /// [`SysError::Locked`] with the owner's process id, or the system's reason.
    pub fn acquire(path: &Path) -> Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| SysError::file("open lock", path, e))?;
        // SAFETY: a valid descriptor.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EWOULDBLOCK) {
                return Err(SysError::file("lock", path, error));
            }
            let mut owner = String::new();
            let _ = file.read_to_string(&mut owner);
            let owner =
                if owner.trim().is_empty() { "unknown".into() } else { owner.trim().into() };
            return Err(SysError::Locked { path: path.to_owned(), owner });
        }
        let name = |e| SysError::file("write lock", path, e);
        file.set_len(0).map_err(name)?;
        write!(file, "{}", std::process::id()).map_err(name)?;
        Ok(Self { file })
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // SAFETY: a valid descriptor; closing would release the lock as well.
        unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_UN) };
    }
}

/// Bytes an unprivileged process may still write to the file system of `path`.
///
/// # Errors
/// The system's reason.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|e| SysError::file("statvfs", path, e.into()))?;
    // SAFETY: statvfs is plain numbers, for which zero is a value.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated path, and room for the answer.
    if unsafe { libc::statvfs(name.as_ptr(), &raw mut found) } != 0 {
        return Err(SysError::file("statvfs", path, std::io::Error::last_os_error()));
    }
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Makes renames and unlinks in a directory durable.
///
/// # Errors
/// The system's reason.
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(|e| SysError::file("sync", path, e))
}

/// Writes a small file so that a reader sees all of it or the old one.
///
/// # Errors
/// The system's reason.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let temp = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temp, bytes).map_err(|e| SysError::file("write", &temp, e))?;
    std::fs::rename(&temp, path).map_err(|e| SysError::file("rename", path, e))
}

/// Drops a file's clean pages from the page cache.
///
/// # Errors
/// If the file cannot be opened or the kernel refuses.
pub fn evict_page_cache(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(|e| SysError::file("open", path, e))?;
    // SAFETY: a valid descriptor.
    let rc = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    if rc == 0 {
        return Ok(());
    }
    Err(SysError::file("fadvise", path, std::io::Error::from_raw_os_error(rc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_names_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("LOCK");
        let lock = FileLock::acquire(&path).unwrap();
        match FileLock::acquire(&path) {
            Err(SysError::Locked { owner, .. }) => {
                assert_eq!(owner, std::process::id().to_string())
            }
            other => panic!("{:?}", other.err()),
        }
        drop(lock);
        assert!(FileLock::acquire(&path).is_ok());
    }
}
