//! Read engines: whole files into slots, asynchronously, behind one trait.
//!
//! A request owns its slot until its completion hands it back; an engine never reports success
//! for fewer bytes than were asked for.

use std::fs::File;
use std::sync::Arc;

use crossbeam::channel::Sender;

use crate::pread::PreadPool;
use crate::region::{Region, SlotMut};
use crate::uring::UringReader;

/// Part of a file, and where in the target it goes.
#[derive(Clone)]
pub struct ReadPart {
    /// Opened with O_DIRECT where possible.
    pub file: Arc<File>,
    /// First byte in the file; a multiple of the page size.
    pub file_offset: u64,
    /// First byte in the target; a multiple of the page size.
    pub offset: usize,
    /// Bytes; a multiple of the page size.
    pub len: usize,
}

/// Fill `target` from parts of files.
pub struct ReadRequest {
    /// The caller's name for it.
    pub tag: u64,
    /// What to read; parts do not overlap in the target and lie inside it.
    pub parts: Vec<ReadPart>,
    /// Where to.
    pub target: SlotMut,
    /// Those with less come first, equals in order of arrival, where an engine has a choice.
    pub turn: u64,
}

impl ReadRequest {
    /// The first `len` bytes of one file.
    pub fn whole(tag: u64, file: Arc<File>, len: usize, target: SlotMut) -> Self {
        Self {
            tag,
            parts: vec![ReadPart { file, file_offset: 0, offset: 0, len }],
            target,
            turn: 0,
        }
    }

    /// Whether every part lies inside the target.
    pub(crate) fn fits(&self) -> bool {
        let inside =
            |p: &ReadPart| p.offset.checked_add(p.len).is_some_and(|e| e <= self.target.len());
        self.parts.iter().all(inside)
    }
}

/// A finished request.
pub struct ReadDone {
    /// The request's tag.
    pub tag: u64,
    /// The slot, handed back.
    pub target: SlotMut,
    /// An error, a short file included.
    pub result: std::io::Result<()>,
}

/// Something that reads files into slots.
pub trait ReadEngine: Send + Sync {
    /// Starts a request; its completion arrives on the channel the engine was made with. Does not
    /// wait for the device while at most [`REQUESTS_MAX`] requests are under way.
    fn submit(&self, request: ReadRequest);

    /// What the engine is, for logs and status.
    fn describe(&self) -> &str;
}

/// Which engine to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring if the kernel allows it, else pread.
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads that call pread.
    Pread,
}

/// Requests an engine takes without waiting, however slow the device is.
pub const REQUESTS_MAX: usize = 512;

/// How an engine works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Which one.
    pub kind: EngineKind,
    /// Reads in flight.
    pub depth: u32,
    /// Bytes of one read; rounded up to pages.
    pub block: usize,
    /// A kernel thread takes submissions: fewer system calls, one more busy core.
    pub sqpoll: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { kind: EngineKind::Auto, depth: 32, block: 1 << 20, sqpoll: false }
    }
}

/// Opens an engine; the note says why a fallback was taken.
///
/// # Errors
/// If io_uring was demanded and is not available.
pub fn open_engine(
    options: EngineOptions,
    region: &Arc<Region>,
    done: Sender<ReadDone>,
) -> crate::Result<(Arc<dyn ReadEngine>, Option<String>)> {
    let pread = || Arc::new(PreadPool::new(options.depth.min(8), options.block, done.clone()));
    if options.kind == EngineKind::Pread {
        return Ok((pread(), None));
    }
    match UringReader::new(options, region, done.clone()) {
        Ok(engine) => Ok((Arc::new(engine), None)),
        Err(e) if options.kind == EngineKind::Auto => {
            let note = format!("io_uring is not available ({e}); reading with pread threads");
            Ok((pread(), Some(note)))
        }
        Err(e) => Err(e),
    }
}
