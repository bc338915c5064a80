//! What the load machine is asked, and what it asks of the process around it.

use std::sync::Arc;

use crossbeam::channel::Sender;
use matkv_sys::SlotMut;
use matkv_types::ChunkId;

use crate::compile::CompileJob;
use crate::flash::Unusable;
use crate::request::{Lease, Planned, Resident};

/// Where a materialized chunk is sent.
pub type ChunkReply = Sender<Result<Lease, String>>;

/// What the load machine is asked to do.
pub enum LoadMessage {
    /// Bring a request's chunks in and pass it on.
    Request(Box<Planned>),
    /// Compute a chunk that is not stored yet; the slot comes back filled and sealed.
    Materialize(Materialize),
    /// Chunks that have been deleted from the store.
    Forget(Vec<ChunkId>),
}

/// A chunk of an ingest.
pub struct Materialize {
    /// Its id.
    pub id: ChunkId,
    /// Its tokens.
    pub tokens: Arc<[u32]>,
    /// Who waits for it.
    pub reply: ChunkReply,
}

/// What the load machine wants of the process around it.
pub trait World {
    /// Starts reading a chunk's file; the completion comes back with the tag. Gives the slot back
    /// if the file cannot be used.
    fn read(
        &mut self,
        tag: u64,
        id: &ChunkId,
        len: usize,
        target: SlotMut,
    ) -> Result<(), (SlotMut, Unusable)>;

    /// Starts computing a chunk that a request waits for.
    fn compile(&mut self, job: CompileJob);

    /// Starts computing a chunk of an ingest; gives it back if enough are under way.
    fn compile_in_background(&mut self, job: CompileJob) -> Result<(), CompileJob>;

    /// Whether [`Self::compile_in_background`] would take one.
    fn background_has_room(&self) -> bool;

    /// Sub-prefills a request; false if the process is stopping.
    fn prefill(&mut self, resident: Resident) -> bool;

    /// Whether [`Self::prefill`] would take one without waiting. When that changes, the arena
    /// signals.
    fn prefill_has_room(&self) -> bool;

    /// Keeps a chunk's file aside.
    fn quarantine(&mut self, id: &ChunkId);

    /// Puts a recomputed chunk back on flash, if it is still wanted there. Does not wait for the
    /// device.
    fn store_again(&mut self, chunk: Lease);
}

/// Chunks being read or computed for requests; the completion channels have room for all.
pub const LOADS_MAX: usize = 64;
