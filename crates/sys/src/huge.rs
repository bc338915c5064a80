//! Shared mappings in huge pages, where the kernel has them.
//!
//! Rows and weights are read from end to end: with pages of 4 KiB a core of Zen 4 has read 17 … 24
//! GB/s of them, with pages of 2 MiB 28 … 33. Nothing here is needed for more than speed, so that
//! what the kernel refuses is no error.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;

/// What such a page must be aligned to, in the file and in memory.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// The smallest page.
const PAGE: usize = 4096;
/// Linux 6.1: not in every libc.
const MADV_COLLAPSE: i32 = 25;

/// What the system says of huge pages for shared memory, as it writes it, and whether those that
/// ask for them get them; empty where it says nothing.
pub fn shared_memory_pages() -> (String, bool) {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let text = text.unwrap_or_default().trim().to_owned();
    let given = ["[always]", "[within_size]", "[advise]"].iter().any(|word| text.contains(word));
    (text, given)
}

/// A shared mapping of the first bytes of a file.
pub(crate) struct SharedMapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: an address and a length; what is done through the address is its user's contract.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `len` bytes with a protection of `mmap(2)`, and asks for huge pages.
    pub fn new(file: &File, len: usize, prot: i32) -> std::io::Result<Self> {
        let failed = |p: *mut c_void| p == libc::MAP_FAILED;
        let none = std::ptr::null_mut();
        // SAFETY: fresh addresses chosen by the kernel, of which only those just reserved are
        // mapped again or given back; the descriptor may close afterwards.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let reserved = libc::mmap(none, len + HUGE_PAGE, libc::PROT_NONE, flags, -1, 0);
            if failed(reserved) {
                return Err(std::io::Error::last_os_error());
            }
            let before = reserved.cast::<u8>().align_offset(HUGE_PAGE);
            let at = reserved.byte_add(before);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let base = libc::mmap(at, len, prot, flags, file.as_raw_fd(), 0);
            if failed(base) {
                let error = std::io::Error::last_os_error();
                libc::munmap(reserved, len + HUGE_PAGE);
                return Err(error);
            }
            let end = len.next_multiple_of(PAGE);
            if before > 0 {
                libc::munmap(reserved, before);
            }
            libc::munmap(base.byte_add(end), len + HUGE_PAGE - before - end);
            libc::madvise(base, len, libc::MADV_HUGEPAGE);
            Ok(Self { base, len })
        }
    }

    pub fn base(&self) -> *mut u8 {
        self.base.cast()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Makes huge pages of pages that are there already.
    pub fn collapse(&self) {
        // SAFETY: our own mapping; the bytes stay what they are.
        unsafe { libc::madvise(self.base, self.len, MADV_COLLAPSE) };
    }

    /// Brings all pages in, to be read or to be written. Whether that could be asked for: it can
    /// from Linux 5.14 on; before, pages come at their first use.
    pub fn populate(&self, advice: i32) -> bool {
        // SAFETY: our own mapping, which is populated and not changed.
        unsafe { libc::madvise(self.base, self.len, advice) == 0 }
    }

    /// Bytes of it that are mapped by huge pages now.
    pub fn huge_bytes(&self) -> usize {
        let start = format!("{:x}-", self.base.addr());
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let ours = smaps.lines().skip_while(|l| !l.starts_with(&start)).skip(1);
        // Up to the next mapping, whose line begins with an address.
        let ours = ours.take_while(|l| l.starts_with(|c: char| c.is_ascii_uppercase()));
        let kilobytes = |line: &str| {
            let (name, value) = line.split_once(':')?;
            let huge = name.ends_with("PmdMapped");
            huge.then(|| value.trim().strip_suffix(" kB")?.parse::<usize>().ok())?
        };
        ours.filter_map(kilobytes).sum::<usize>() << 10
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and nobody borrows from it any more.
        unsafe { libc::munmap(self.base, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_mapped_where_huge_pages_fit() {
        let file = tempfile::tempfile().unwrap();
        for len in [1, 4096, 5000, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE - 4096] {
            file.set_len(len as u64).unwrap();
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let mapping = SharedMapping::new(&file, len, prot).unwrap();
            assert!(mapping.base.addr().is_multiple_of(HUGE_PAGE));
            assert_eq!(mapping.len(), len);
            // SAFETY: the last byte of the file, and of the mapping.
            unsafe {
                mapping.base().add(len - 1).write(7);
                assert_eq!(mapping.base().add(len - 1).read(), 7);
            }
        }
    }

    #[test]
    fn a_file_that_is_not_open_for_writing_is_not_mapped_for_it() {
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), [1; 10]).unwrap();
        let file = File::open(named.path()).unwrap();
        assert!(SharedMapping::new(&file, 10, libc::PROT_READ | libc::PROT_WRITE).is_err());
        assert!(SharedMapping::new(&file, 10, libc::PROT_READ).is_ok());
    }
}
