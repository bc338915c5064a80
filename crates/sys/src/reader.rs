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

/// Bytes of one read operation.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Fill `target` from the beginning of `file`.
pub struct ReadRequest {
    /// The caller's name for it.
    pub tag: u64,
    /// Opened with O_DIRECT where possible.
    pub file: Arc<File>,
    /// Bytes to read; at most the target's length, a multiple of the page size.
    pub len: usize,
    /// Where to.
    pub target: SlotMut,
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
    /// Starts a request; its completion arrives on the channel the engine was made with. Blocks
    /// while the engine's queue is full.
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

/// Opens an engine; the note says why a fallback was taken.
///
/// # Errors
/// If io_uring was demanded and is not available.
pub fn open_engine(
    kind: EngineKind,
    depth: u32,
    region: &Arc<Region>,
    done: Sender<ReadDone>,
) -> crate::Result<(Arc<dyn ReadEngine>, Option<String>)> {
    if kind == EngineKind::Pread {
        return Ok((Arc::new(PreadPool::new(depth.min(8), done)), None));
    }
    match UringReader::new(depth, region, done.clone()) {
        Ok(engine) => Ok((Arc::new(engine), None)),
        Err(e) if kind == EngineKind::Auto => {
            let note = format!("io_uring is not available ({e}); reading with pread threads");
            Ok((Arc::new(PreadPool::new(depth.min(8), done)), Some(note)))
        }
        Err(e) => Err(e),
    }
}
