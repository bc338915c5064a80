//! Packed weights as files that every process maps: `CACHE/packed/KEY.weights`.
//!
//! A file is a header (magic, version, key, the model's digest and path, offset, length and
//! CRC-32C of every section, CRC-32C of itself) and sections at page boundaries: matrices as the
//! kernels hold them, in the order in which they are read. The key is a hash of the model file,
//! the version and what is packed, so a file never has to change: it appears by one rename, is
//! read-only, and is verified whole whenever it is mapped.
//!
//! It is only a shortcut. A file that is damaged is written again; where none can be written,
//! weights lie in the process's own memory, and the log says why.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_kernels::{PackedMatrix, QuantMatrix, SharedBytes};
use matkv_sys::{FileLock, FileMapping, SysError, evict_page_cache, sync_directory};
use matkv_types::{Digest, LengthPrefixedHasher, align_up};

use crate::error::Result;
use crate::gguf::Gguf;
use crate::linear::Source;

const MAGIC: &[u8; 8] = b"MATKVPKW";
/// Of this file and of both packings.
const VERSION: u32 = 1 << 16 | PackedMatrix::LAYOUT << 8 | QuantMatrix::LAYOUT;
/// Sections begin at pages.
const PAGE: usize = 4096;
/// Bytes of a header before its sections.
const FIXED: usize = 112;
/// Bytes a header has for each section.
const ENTRY: usize = 24;
/// Headers are longer for more sections, but not for strange files.
const HEADER_MAX: usize = 16 << 20;
/// As long as another process may take to write the same file.
const PATIENCE: Duration = Duration::from_secs(60);

/// Matrices of a mapped file, one after the other.
pub(crate) struct Sections(std::vec::IntoIter<SharedBytes>);

impl Sections {
    pub fn next(&mut self) -> Option<SharedBytes> {
        self.0.next()
    }
}

/// The directory of packed weights, for one model file.
pub(crate) struct WeightsDir<'p> {
    dir: PathBuf,
    model: &'p Path,
    digest: Digest,
}

/// Why a file cannot be mapped.
enum Unusable {
    Absent,
    /// It is not what was written.
    Damaged(String),
}

fn damaged(reason: impl Into<String>) -> Unusable {
    Unusable::Damaged(reason.into())
}

/// What the beginning of a file says.
struct Header {
    version: u32,
    key: [u8; 32],
    digest: [u8; 32],
    model: PathBuf,
    /// Offset, length, CRC-32C.
    sections: Vec<(usize, usize, u32)>,
    file_len: u64,
}

impl<'p> WeightsDir<'p> {
    pub fn new(cache: &Path, model: &'p Path, digest: Digest) -> Self {
        Self { dir: cache.join("packed"), model, digest }
    }

    /// What `read` reads: from the file of this name, which is made if it has to be. `matrices` of
    /// it are in the order of reading.
    ///
    /// # Errors
    /// If the model file cannot be read.
    pub fn open<T>(
        &self,
        gguf: &mut Gguf,
        name: &str,
        read: impl Fn(&mut Source<'_>) -> Result<T>,
        matrices: impl Fn(&T) -> Vec<&[u8]>,
    ) -> Result<T> {
        let key = self.key(name);
        let path = self.dir.join(format!("{key}.weights"));
        let mapped = |gguf: &mut Gguf| {
            let packed = Some(map(&path, key)?);
            read(&mut Source { gguf, packed }).map_err(|e| damaged(e.to_string()))
        };
        if let Ok(found) = mapped(gguf) {
            return Ok(found);
        }
        let _lock = match self.lock(&path) {
            Ok(lock) => lock,
            Err(e) => {
                private(&path, &e);
                return read(&mut Source { gguf, packed: None });
            }
        };
        // Another process may have written it while this one waited.
        match mapped(gguf) {
            Ok(found) => return Ok(found),
            Err(Unusable::Absent) => {}
            Err(Unusable::Damaged(reason)) => {
                tracing::warn!("{}: {reason}; it is written again", path.display());
                let _ = std::fs::remove_file(&path);
            }
        }
        let fresh = read(&mut Source { gguf, packed: None })?;
        if let Err(e) = self.write(&path, key, &matrices(&fresh)) {
            let _ = std::fs::remove_file(path.with_extension("tmp"));
            private(&path, &e);
            return Ok(fresh);
        }
        self.remove_stale();
        match mapped(gguf) {
            Ok(found) => Ok(found),
            Err(Unusable::Absent) => Ok(fresh),
            Err(Unusable::Damaged(reason)) => {
                private(&path, &reason);
                Ok(fresh)
            }
        }
    }

    fn key(&self, name: &str) -> Digest {
        LengthPrefixedHasher::default()
            .part(b"matkv packed weights")
            .part(&VERSION.to_le_bytes())
            .part(&self.digest.0)
            .part(name.as_bytes())
            .finish()
    }

    /// Makes this process the only one that writes the file, at the latest when another has.
    fn lock(&self, path: &Path) -> Result<FileLock, SysError> {
        let created = std::fs::create_dir_all(&self.dir);
        let what = "create the directory of packed weights";
        created.map_err(|source| SysError::File { what, path: self.dir.clone(), source })?;
        let begun = Instant::now();
        loop {
            match FileLock::acquire(&path.with_extension("lock")) {
                Err(SysError::Locked { .. }) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                outcome => return outcome,
            }
        }
    }

    fn write(&self, path: &Path, key: Digest, matrices: &[&[u8]]) -> std::io::Result<()> {
        let model = self.model.canonicalize()?;
        let header = header(key, self.digest, &model, matrices);
        // The lock is held: this name is nobody else's, and what a killed process left under it
        // is of no use.
        let temp = path.with_extension("tmp");
        if let Err(e) = std::fs::remove_file(&temp)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(e);
        }
        let mut file = OpenOptions::new().write(true).create_new(true).open(&temp)?;
        file.write_all(&header)?;
        for matrix in matrices {
            file.write_all(matrix)?;
            file.write_all(&[0; PAGE][..align_up(matrix.len(), PAGE) - matrix.len()])?;
        }
        let mode = file.metadata()?.permissions().mode() & 0o444;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        file.sync_data()?;
        std::fs::rename(&temp, path)?;
        // As written it is cached in small pages: see `FileMapping::open`.
        let _ = evict_page_cache(path);
        sync_directory(&self.dir).map_err(std::io::Error::other)
    }

    /// Removes files nobody will map again: of a model file that is gone or has changed, or of
    /// another version of this one. Whoever has one mapped keeps it.
    fn remove_stale(&self) {
        let model = self.model.canonicalize().unwrap_or_default();
        for path in weights_in(&self.dir) {
            let stale = read_header(&path).is_none_or(|h| {
                let this = h.digest == self.digest.0;
                !h.model.exists() || (h.model == model && !this) || (this && h.version != VERSION)
            });
            if stale {
                tracing::info!("{} is of no model that is still there; removed", path.display());
                for extension in ["weights", "tmp", "lock"] {
                    let _ = std::fs::remove_file(path.with_extension(extension));
                }
            }
        }
    }
}

fn private(path: &Path, reason: &dyn std::fmt::Display) {
    tracing::warn!(
        "packed weights cannot be shared: {}: {reason}; this process keeps its own copy",
        path.display()
    );
}

/// The header of a file of these sections, padded to whole pages.
fn header(key: Digest, digest: Digest, model: &Path, matrices: &[&[u8]]) -> Vec<u8> {
    let model = model.as_os_str().as_bytes();
    let len = align_up(FIXED + ENTRY * matrices.len() + model.len(), PAGE);
    let mut at = len;
    let mut entries = Vec::new();
    for matrix in matrices {
        entries.extend((at as u64).to_le_bytes());
        entries.extend((matrix.len() as u64).to_le_bytes());
        entries.extend(u64::from(crc32c::crc32c(matrix)).to_le_bytes());
        at += align_up(matrix.len(), PAGE);
    }
    let mut out = Vec::with_capacity(len);
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend((matrices.len() as u32).to_le_bytes());
    out.extend((len as u64).to_le_bytes());
    out.extend((at as u64).to_le_bytes());
    out.extend(key.0);
    out.extend(digest.0);
    out.extend((model.len() as u64).to_le_bytes());
    out.extend([0; 8]);
    out.extend(entries);
    out.extend(model);
    out.resize(len, 0);
    let sum = u64::from(crc32c::crc32c(&out));
    out[FIXED - 8..FIXED].copy_from_slice(&sum.to_le_bytes());
    out
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Length a header says it has, from its fixed part.
fn header_len(fixed: &[u8]) -> Option<usize> {
    let len = usize::try_from(u64_at(fixed, 16)?).ok()?;
    (fixed.starts_with(MAGIC) && len.is_multiple_of(PAGE) && (PAGE..=HEADER_MAX).contains(&len))
        .then_some(len)
}

/// A header whose checksum is right; nothing else can be believed.
fn parse(bytes: &[u8]) -> Option<Header> {
    let bytes = bytes.get(..header_len(bytes)?)?;
    let mut sum = crc32c::crc32c(&bytes[..FIXED - 8]);
    sum = crc32c::crc32c_append(sum, &[0; 8]);
    sum = crc32c::crc32c_append(sum, &bytes[FIXED..]);
    if u64_at(bytes, FIXED - 8)? != u64::from(sum) {
        return None;
    }
    let count = u32_at(bytes, 12)? as usize;
    let mut sections = Vec::new();
    for i in 0..count {
        let at = FIXED + ENTRY * i;
        let number = |at| u64_at(bytes, at).and_then(|n| usize::try_from(n).ok());
        sections.push((number(at)?, number(at + 8)?, u64_at(bytes, at + 16)? as u32));
    }
    let model = FIXED + ENTRY * count;
    let model = bytes.get(model..model + usize::try_from(u64_at(bytes, 96)?).ok()?)?;
    Some(Header {
        version: u32_at(bytes, 8)?,
        key: bytes[32..64].try_into().ok()?,
        digest: bytes[64..96].try_into().ok()?,
        model: PathBuf::from(std::ffi::OsStr::from_bytes(model)),
        sections,
        file_len: u64_at(bytes, 24)?,
    })
}

fn read_header(path: &Path) -> Option<Header> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path).ok()?;
    let mut fixed = [0; FIXED];
    file.read_exact_at(&mut fixed, 0).ok()?;
    let mut bytes = vec![0; header_len(&fixed)?];
    file.read_exact_at(&mut bytes, 0).ok()?;
    parse(&bytes)
}

/// Maps a file and verifies all of it.
fn map(path: &Path, key: Digest) -> Result<Sections, Unusable> {
    let mapping = match FileMapping::open(path) {
        Ok(mapping) => Arc::new(mapping),
        Err(SysError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(Unusable::Absent);
        }
        Err(e) => return Err(damaged(e.to_string())),
    };
    let bytes: &[u8] = (*mapping).as_ref();
    let header = parse(bytes).ok_or_else(|| damaged("its header is damaged"))?;
    if header.key != key.0 || header.version != VERSION {
        return Err(damaged("it holds other weights than its name says"));
    }
    if header.file_len != bytes.len() as u64 {
        let (found, len) = (bytes.len(), header.file_len);
        return Err(damaged(format!("it has {found} bytes instead of {len}")));
    }
    let mut sections = Vec::new();
    for (i, &(offset, len, sum)) in header.sections.iter().enumerate() {
        let shared = SharedBytes::new(mapping.clone(), offset..offset.saturating_add(len))
            .ok_or_else(|| damaged(format!("section {i} is outside the file")))?;
        if crc32c::crc32c(&shared) != sum {
            return Err(damaged(format!("the checksum of section {i} is wrong")));
        }
        sections.push(shared);
    }
    Ok(Sections(sections.into_iter()))
}

fn weights_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.flatten().map(|e| e.path());
    paths.filter(|p| p.extension().is_some_and(|x| x == "weights")).collect()
}

/// Packed weights in a cache directory, for whoever wants to know.
#[derive(Clone, Debug)]
pub struct PackedFiles {
    /// Where they are.
    pub dir: PathBuf,
    /// How many.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Looks at the packed weights in a cache directory.
pub fn packed_files(cache: &Path) -> PackedFiles {
    let dir = cache.join("packed");
    let files = weights_in(&dir);
    let bytes = files.iter().filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum();
    PackedFiles { dir, files: files.len(), bytes }
}
