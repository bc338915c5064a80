//! Chunk files over one or several directories: atomic writes, quarantine, removal.
//!
//! A *copy* of a chunk is striped over `width` directories, unit by unit; a mirror keeps two
//! copies on different directories. One directory is one copy of width one, a mirror of four is
//! a stripe of two kept twice. A part that is missing, short or of another write makes its copy
//! unusable; the checksums of the chunk file decide that, not the file system.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use matkv_format::{FormatError, Superblock};
use matkv_sys::{
    CrashPoint, DirectFile, Fault, ReadPart, Region, SlotMut, crash_point, fault, sync_directory,
};
use matkv_types::{ChunkId, PAGE_BYTES};

use crate::error::{Result, StoreError};

/// How directories are used together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeKind {
    /// One directory.
    Single,
    /// Every chunk spread over all directories.
    Stripe,
    /// Every chunk twice, each copy striped over half of the directories.
    Mirror,
}

impl VolumeKind {
    /// Name in the configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Stripe => "stripe",
            Self::Mirror => "mirror",
        }
    }

    /// Whether so many directories can be used like this.
    ///
    /// # Errors
    /// What would be needed.
    pub fn check(self, directories: usize) -> std::result::Result<(), String> {
        let fine = match self {
            Self::Single => directories == 1,
            Self::Stripe => directories >= 2,
            Self::Mirror => directories >= 2 && directories.is_multiple_of(2),
        };
        let needs = match self {
            Self::Single => "one directory",
            Self::Stripe => "at least two directories",
            Self::Mirror => "an even number of directories",
        };
        if fine {
            Ok(())
        } else {
            Err(format!("{} needs {needs}, not {directories}", self.as_str()))
        }
    }
}

/// Directories that hold chunk files.
#[derive(Clone, Debug)]
pub struct Volume {
    copies: Vec<Vec<Directory>>,
    unit: usize,
}

#[derive(Clone, Debug)]
struct Directory {
    chunks: PathBuf,
    /// Files being written, on the same file system; small, and emptied at every start.
    incoming: PathBuf,
    quarantine: PathBuf,
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { what, path, source }
}

/// One copy of a chunk, opened.
pub struct OpenCopy {
    /// One for each directory.
    files: Vec<Arc<File>>,
    unit: usize,
    /// Bytes of the whole.
    pub len: usize,
}

impl OpenCopy {
    /// What to read for these bytes of the file, in no particular order; offsets are from the
    /// range's beginning.
    pub fn parts(&self, range: Range<usize>) -> Vec<ReadPart> {
        let width = self.files.len();
        let unit = if width == 1 { self.len.max(1) } else { self.unit };
        let part = |i: usize| {
            let (start, end) = ((i * unit).max(range.start), ((i + 1) * unit).min(range.end));
            ReadPart {
                file: Arc::clone(&self.files[i % width]),
                file_offset: (i / width * unit + start - i * unit) as u64,
                offset: start - range.start,
                len: end - start,
            }
        };
        (range.start / unit..range.end.div_ceil(unit)).map(part).collect()
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// The system's reason, or what is wrong with it.
    pub fn superblock(&self) -> Result<Superblock> {
        let mut page = Region::anonymous(PAGE_BYTES).exclusive(0..PAGE_BYTES)?;
        if self.len < PAGE_BYTES {
            return Err(FormatError::Length { expected: PAGE_BYTES, found: self.len }.into());
        }
        let failed = file_error("read the superblock of", Path::new("a chunk file"));
        // No unit is smaller than a page.
        self.files[0].read_exact_at(&mut page, 0).map_err(failed)?;
        Ok(Superblock::decode(&page)?)
    }
}

impl Volume {
    /// Opens (and creates) the directories, and removes files of a killed writer.
    ///
    /// # Errors
    /// If a directory cannot be used, or there are too few for the kind.
    pub fn open(roots: &[PathBuf], kind: VolumeKind, unit: usize) -> Result<Self> {
        kind.check(roots.len()).map_err(StoreError::Volume)?;
        let mut directories = Vec::new();
        for root in roots {
            let directory = Directory {
                chunks: root.join("chunks"),
                incoming: root.join("incoming"),
                quarantine: root.join("quarantine"),
            };
            for dir in [&directory.chunks, &directory.incoming, &directory.quarantine] {
                std::fs::create_dir_all(dir).map_err(file_error("create", dir))?;
            }
            for file in entries(&directory.incoming)? {
                // Another store of the same root cannot be open: the lock is ours.
                std::fs::remove_file(&file).map_err(file_error("remove", &file))?;
            }
            directories.push(directory);
        }
        let width = if kind == VolumeKind::Mirror { roots.len() / 2 } else { roots.len() };
        let copies = directories.chunks(width).map(<[Directory]>::to_vec).collect();
        Ok(Self { copies, unit: unit.next_multiple_of(4096).max(4096) })
    }

    /// Copies kept of every chunk.
    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// Where the first part of a chunk's first copy is, or would be.
    pub fn path(&self, id: &ChunkId) -> PathBuf {
        self.copies[0][0].file(id)
    }

    /// Every file a chunk may have.
    pub fn paths<'a>(&'a self, id: &'a ChunkId) -> impl Iterator<Item = PathBuf> + 'a {
        self.copies.iter().flatten().map(|d| d.file(id))
    }

    /// Whether any part of the chunk is there.
    pub fn exists(&self, id: &ChunkId) -> bool {
        self.paths(id).any(|p| p.exists())
    }

    /// Bytes its files take on the devices, all copies together.
    pub fn physical_bytes(&self, id: &ChunkId) -> u64 {
        self.paths(id).map(|p| blocks(&p)).sum()
    }

    /// Directories and the bytes free on the file system of each.
    ///
    /// # Errors
    /// The system's reason.
    pub fn free_bytes(&self) -> Result<u64> {
        let mut least = u64::MAX;
        for directory in self.copies.iter().flatten() {
            least = least.min(matkv_sys::free_bytes(&directory.chunks)?);
        }
        Ok(least)
    }

    /// Opens one copy for reading. Its length is whatever its parts add up to.
    ///
    /// # Errors
    /// The system's reason; [`ErrorKind::NotFound`] if a part is missing,
    /// [`ErrorKind::InvalidData`] if it is not a file.
    pub fn open_copy(&self, id: &ChunkId, copy: usize) -> std::io::Result<OpenCopy> {
        let directories = &self.copies[copy];
        let mut files: Vec<Arc<File>> = Vec::with_capacity(directories.len());
        let mut len = 0;
        for directory in directories {
            let file = DirectFile::open(&directory.file(id)).map_err(io_error)?.file;
            let found = file.metadata()?;
            if !found.is_file() {
                return Err(std::io::Error::new(ErrorKind::InvalidData, "not a file"));
            }
            len += usize::try_from(found.len()).unwrap_or(usize::MAX);
            files.push(Arc::new(file));
        }
        Ok(OpenCopy { files, unit: self.unit, len })
    }

    /// Reads one copy whole, unless its superblock says that it has another length. Its bytes are
    /// not verified.
    ///
    /// # Errors
    /// The system's reason, or what is wrong with the superblock.
    pub fn read_copy(&self, id: &ChunkId, copy: usize) -> Result<SlotMut> {
        let failed = |source| file_error("read", &self.path(id))(source);
        let open = self.open_copy(id, copy).map_err(failed)?;
        // Before anything is allocated: a file may have any length.
        let expected = open.superblock()?.file_len();
        if open.len != expected {
            return Err(FormatError::Length { expected, found: open.len }.into());
        }
        let mut bytes = Region::anonymous(open.len).exclusive(0..open.len)?;
        for part in &open.parts(0..open.len) {
            let target = &mut bytes[part.offset..part.offset + part.len];
            part.file.read_exact_at(target, part.file_offset).map_err(failed)?;
        }
        Ok(bytes)
    }

    /// What a copy says of itself.
    ///
    /// # Errors
    /// The system's reason, or what is wrong with it.
    pub fn superblock(&self, id: &ChunkId, copy: usize) -> Result<Superblock> {
        self.open_copy(id, copy).map_err(file_error("read", &self.path(id)))?.superblock()
    }

    /// Writes a chunk, all copies: temporary files, data to the devices, renames, directories to
    /// the devices. With a mirror one copy is enough; the other is healed when it is missed.
    ///
    /// `bytes` is the sealed file, in page-aligned memory.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`] or the system's reason; nothing is left behind.
    pub fn write(&self, id: &ChunkId, bytes: &[u8]) -> Result<()> {
        let mut written = 0;
        let mut last = Ok(());
        for copy in 0..self.copies.len() {
            match self.write_copy(id, copy, bytes) {
                Ok(()) => written += 1,
                Err(e) => last = Err(e),
            }
        }
        if written == 0 {
            return last;
        }
        if let Err(e) = last {
            tracing::warn!("chunk {id}: one copy of two: {e}");
        }
        Ok(())
    }

    /// Writes one copy.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_copy(&self, id: &ChunkId, copy: usize, bytes: &[u8]) -> Result<()> {
        // Threads of this process may write the same chunk at once; what a killed one left has
        // been removed when the store was opened.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directories = &self.copies[copy];
        let temps: Vec<PathBuf> = directories
            .iter()
            .map(|d| d.incoming.join(format!("{id}.{copy}.{number}.tmp")))
            .collect();
        let mut published = 0;
        let outcome = self
            .write_temps(&temps, bytes)
            .and_then(|()| {
                crash_point(CrashPoint::IngestSynced);
                directories.iter().zip(&temps).try_for_each(|(d, temp)| {
                    d.publish(id, temp)?;
                    published += 1;
                    Ok(())
                })
            })
            .and_then(|()| {
                crash_point(CrashPoint::IngestRenamed);
                for directory in directories {
                    sync_directory(&directory.of(id))?;
                }
                Ok(())
            });
        outcome.map_err(|e| {
            for temp in &temps {
                let _ = std::fs::remove_file(temp);
            }
            for directory in &directories[..published] {
                let _ = std::fs::remove_file(directory.file(id));
            }
            match e {
                StoreError::File { source, .. } if is_full(&source) => StoreError::NoSpace {
                    chunk: *id,
                    bytes: bytes.len(),
                    path: directories[0].chunks.clone(),
                },
                other => other,
            }
        })
    }

    fn write_temps(&self, temps: &[PathBuf], bytes: &[u8]) -> Result<()> {
        let width = temps.len();
        for (i, temp) in temps.iter().enumerate() {
            let file = DirectFile::create(temp)?;
            if let Some(error) = fault(Fault::Write) {
                return Err(file_error("write", temp)(error));
            }
            if width == 1 {
                file.write_at(bytes, 0).map_err(file_error("write", temp))?;
            } else {
                let units = bytes.chunks(self.unit).skip(i).step_by(width);
                for (n, unit) in units.enumerate() {
                    let at = (n * self.unit) as u64;
                    file.write_at(unit, at).map_err(file_error("write", temp))?;
                }
            }
            file.file.sync_data().map_err(file_error("sync", temp))?;
        }
        Ok(())
    }

    /// Moves a copy that must not be used out of the way; it is kept for inspection. False if
    /// there is none.
    ///
    /// # Errors
    /// If it can be neither moved nor removed.
    pub fn quarantine_copy(&self, id: &ChunkId, copy: usize) -> Result<bool> {
        let mut any = false;
        for directory in &self.copies[copy] {
            let path = directory.file(id);
            match std::fs::rename(&path, directory.in_quarantine(id)) {
                Ok(()) => any = true,
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(_) => {
                    std::fs::remove_file(&path).map_err(file_error("remove", &path))?;
                    any = true;
                }
            }
        }
        Ok(any)
    }

    /// [`Self::quarantine_copy`] of every copy.
    ///
    /// # Errors
    /// As there.
    pub fn quarantine(&self, id: &ChunkId) -> Result<bool> {
        let mut any = false;
        for copy in 0..self.copies.len() {
            any |= self.quarantine_copy(id, copy)?;
        }
        Ok(any)
    }

    /// Files in quarantine, and the bytes they take.
    ///
    /// # Errors
    /// If a directory cannot be listed.
    pub fn quarantined(&self) -> Result<(usize, u64)> {
        let mut out = (0, 0);
        for directory in self.copies.iter().flatten() {
            for file in entries(&directory.quarantine)? {
                out = (out.0 + 1, out.1 + blocks(&file));
            }
        }
        Ok(out)
    }

    /// Removes what is in quarantine. Returns files and bytes.
    ///
    /// # Errors
    /// The system's reason.
    pub fn empty_quarantine(&self) -> Result<(usize, u64)> {
        let mut out = (0, 0);
        for directory in self.copies.iter().flatten() {
            for file in entries(&directory.quarantine)? {
                out = (out.0 + 1, out.1 + blocks(&file));
                std::fs::remove_file(&file).map_err(file_error("remove", &file))?;
            }
        }
        Ok(out)
    }

    /// Removes a chunk's files; missing ones are no error.
    ///
    /// # Errors
    /// The system's reason.
    pub fn remove(&self, id: &ChunkId) -> Result<()> {
        for path in self.paths(id) {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    return Err(file_error("remove", &path)(e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Ids of the chunk files that are there: a full scan, for repair only.
    ///
    /// # Errors
    /// If a directory cannot be listed.
    pub fn scan(&self) -> Result<Vec<ChunkId>> {
        let mut ids = std::collections::BTreeSet::new();
        for directory in self.copies.iter().flatten() {
            for sub in entries(&directory.chunks)? {
                for file in entries(&sub)? {
                    let stem = file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
                    if file.extension().is_some_and(|e| e == "kv")
                        && let Ok(id) = stem.parse()
                    {
                        ids.insert(id);
                    }
                }
            }
        }
        Ok(ids.into_iter().collect())
    }
}

impl Directory {
    /// 256 subdirectories by the first byte of the id.
    fn of(&self, id: &ChunkId) -> PathBuf {
        self.chunks.join(&id.to_string()[..2])
    }

    fn file(&self, id: &ChunkId) -> PathBuf {
        self.of(id).join(format!("{id}.kv"))
    }

    fn publish(&self, id: &ChunkId, temp: &Path) -> Result<()> {
        let dir = self.of(id);
        if !dir.exists() {
            std::fs::create_dir_all(&dir).map_err(file_error("create", &dir))?;
            sync_directory(&self.chunks)?;
        }
        let path = self.file(id);
        std::fs::rename(temp, &path).map_err(file_error("rename", &path))
    }

    /// A name nothing in quarantine has: the second bad file of a chunk is kept beside the first.
    fn in_quarantine(&self, id: &ChunkId) -> PathBuf {
        let name = |n: u32| self.quarantine.join(format!("{id}.{n}.kv"));
        (0..).map(name).find(|p| !p.exists()).unwrap_or_else(|| name(0))
    }
}

fn io_error(e: matkv_sys::SysError) -> std::io::Error {
    match e {
        matkv_sys::SysError::File { source, .. } => source,
        other => std::io::Error::other(other.to_string()),
    }
}

/// Bytes a file takes on the device; 0 if it is not there.
pub(crate) fn blocks(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |m| m.blocks() * 512)
}

pub(crate) fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let list = std::fs::read_dir(dir).map_err(file_error("list", dir))?;
    list.map(|e| e.map(|e| e.path()).map_err(file_error("list", dir))).collect()
}
