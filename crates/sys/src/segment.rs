//! The named shared-memory segment: the one file that uses the `shared_memory` crate.
//!
//! That crate neither allocates pages nor knows that a name survives `kill -9`, so this file
//! does: pages are allocated and touched before the segment is used (a full tmpfs is an error
//! here, not a SIGBUS later), and a stale name is unlinked by the owner of the lock file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use shared_memory::{Shmem, ShmemConf};

use crate::error::{Result, SysError};
use crate::files::free_bytes;
use crate::huge::{SharedMapping, shared_memory_pages};
use crate::region::{Backing, Region};

/// Dropped before the segment's file is: mappings first, in order of the fields.
struct Mapping {
    _writable: SharedMapping,
    _read_only: SharedMapping,
    _shmem: Shmem,
}

// SAFETY: `Shmem` holds a pointer and a descriptor, both usable from any thread; it is only kept
// to be dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above; it has no methods called through `&self`.
unsafe impl Sync for Mapping {}

impl Backing for Mapping {}

/// A segment in /dev/shm. The creator removes the name when it drops it.
pub struct Segment {
    region: Arc<Region>,
    name: String,
    huge_bytes: usize,
}

impl Segment {
    /// Creates a segment, replacing a stale one of the same name. The caller holds the lock that
    /// makes it the only owner of the name.
    ///
    /// # Errors
    /// If the name cannot be used or the memory is not there.
    pub fn create(name: &str, len: usize) -> Result<Self> {
        let err = |reason: String| SysError::Segment { name: name.to_owned(), reason };
        let _ = std::fs::remove_file(shm_path(name));
        let shmem = ShmemConf::new()
            .os_id(format!("/{name}"))
            .size(len)
            .create()
            .map_err(|e| err(e.to_string()))?;
        let file = open_file(name)?;
        touch(&file, len);
        allocate(&file, len).map_err(|e| {
            err(format!(
                "{len} bytes cannot be allocated ({e}); lower arena.size or enlarge /dev/shm"
            ))
        })?;
        Self::finish(name, shmem, &file, len)
    }

    /// Opens an existing segment of at least `len` bytes.
    ///
    /// # Errors
    /// If it does not exist or is shorter.
    pub fn open(name: &str, len: usize) -> Result<Self> {
        let err = |reason: String| SysError::Segment { name: name.to_owned(), reason };
        let mut shmem = ShmemConf::new()
            .os_id(format!("/{name}"))
            .open()
            .map_err(|e| err(format!("{e}; is the loader running?")))?;
        shmem.set_owner(false);
        if shmem.len() < len {
            return Err(err(format!("expected {len} bytes, found {}", shmem.len())));
        }
        Self::finish(name, shmem, &open_file(name)?, len)
    }

    fn finish(name: &str, shmem: Shmem, file: &File, len: usize) -> Result<Self> {
        let err = |e| SysError::file("map", shm_path(name), e);
        // The crate maps the segment at an address where no huge page fits, and that mapping is
        // never touched.
        let writable =
            SharedMapping::new(file, len, libc::PROT_READ | libc::PROT_WRITE).map_err(err)?;
        let read_only = SharedMapping::new(file, len, libc::PROT_READ).map_err(err)?;
        writable.collapse();
        writable.populate(libc::MADV_POPULATE_WRITE);
        read_only.populate(libc::MADV_POPULATE_READ);
        let (base, shown) = (writable.base(), read_only.base().cast_const());
        let huge_bytes = read_only.huge_bytes();
        let backing = Mapping { _writable: writable, _read_only: read_only, _shmem: shmem };
        // SAFETY: both mappings cover `len` bytes and live as long as the backing.
        let region = unsafe { Region::new(base, shown, len, Box::new(backing)) };
        Ok(Self { region, name: name.to_owned(), huge_bytes })
    }

    /// The memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// How much of it is read through huge pages.
    pub fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }

    /// Removes the name; the memory goes with its last mapping. For an orderly end, where handles
    /// may outlive the owner.
    pub fn remove_name(name: &str) {
        let _ = std::fs::remove_file(shm_path(name));
    }

    /// Name in /dev/shm.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn shm_path(name: &str) -> std::path::PathBuf {
    Path::new("/dev/shm").join(name)
}

/// Where the system gives huge pages to shared memory, brings them in through a mapping that asks
/// for them: then they need not be collapsed from small ones.
fn touch(file: &File, len: usize) {
    let room = || free_bytes(Path::new("/dev/shm")).is_ok_and(|free| free >= len as u64);
    if !shared_memory_pages().1 || !room() {
        return;
    }
    if let Ok(mapping) = SharedMapping::new(file, len, libc::PROT_READ | libc::PROT_WRITE) {
        mapping.populate(libc::MADV_POPULATE_WRITE);
    }
}

fn open_file(name: &str) -> Result<File> {
    let path = shm_path(name);
    let file = File::options().read(true).write(true).open(&path);
    file.map_err(|e| SysError::file("open", path, e))
}

fn allocate(file: &File, len: usize) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: a valid descriptor; the call has no memory effects in this process.
    let rc = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len as libc::off_t) };
    if rc == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(rc)) }
}

/// Bytes the segments whose names start with `prefix` take in /dev/shm.
pub fn shared_memory_bytes(prefix: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir("/dev/shm") else { return 0 };
    entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .filter_map(|e| e.metadata().ok())
        .map(|m| m.blocks() * 512)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_segment() {
        let name = format!("matkv-test-{}", std::process::id());
        let owner = Segment::create(&name, 1 << 20).unwrap();
        let peer = Segment::open(&name, 1 << 20).unwrap();
        let mut slot = owner.region().exclusive(4096..8192).unwrap();
        slot[5] = 42;
        assert_eq!(peer.region().shared(4096..8192).unwrap()[5], 42);
        assert_eq!(slot.freeze()[5], 42, "the read-only mapping shows the same page");
        assert!(Segment::open(&name, 2 << 20).is_err());
        assert!(shared_memory_bytes(&name) >= 1 << 20);
        drop(peer);
        assert!(Segment::open(&name, 1 << 20).is_ok(), "the peer does not remove the name");
        drop(owner);
        assert!(Segment::open(&name, 1 << 20).is_err(), "the owner does");
    }

    #[test]
    fn both_sides_have_huge_pages_where_there_are_any() {
        let name = format!("matkv-test-pages-{}", std::process::id());
        let owner = Segment::create(&name, 8 << 20).unwrap();
        let peer = Segment::open(&name, 8 << 20).unwrap();
        if owner.huge_bytes() == 0 {
            return eprintln!("skipped: the kernel gives shared memory no huge pages");
        }
        assert_eq!([owner.huge_bytes(), peer.huge_bytes()], [8 << 20; 2]);
    }

    #[test]
    fn too_much_memory_is_an_error_not_a_signal() {
        let name = format!("matkv-test-huge-{}", std::process::id());
        let Err(e) = Segment::create(&name, 1 << 45) else { panic!("32 TiB were allocated") };
        assert!(e.to_string().contains("arena.size"), "{e}");
        assert!(!shm_path(&name).exists());
    }
}
