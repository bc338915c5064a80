//! What the load machine is asked, and what it asks of the process around it.

use std::sync::Arc;

use crossbeam::channel::Sender;
use matkv_format::Superblock;
use matkv_store::Tier;
use matkv_sys::{SlotMut, SlotRef};
use matkv_types::{ChunkId, Encoding};

use crate::compile::CompileJob;
use crate::earlier::Kept;
use crate::flash::Unusable;
use crate::growing::Growing;
use crate::request::{Materialized, Planned, Resident};

/// Where a materialized chunk is sent.
pub type ChunkReply = Sender<Result<Materialized, String>>;

/// What the load machine is asked to do.
pub enum LoadMessage {
    /// Bring a request's chunks in and pass it on.
    Request(Box<Planned>),
    /// A request that was passed on while its chunks were on their way: one will not come.
    Again(Box<Resident>),
    /// Compute a chunk that is not stored yet; the slot comes back filled and sealed.
    Materialize(Materialize),
    /// Chunks that have been deleted from the store.
    Forget(Vec<ChunkId>),
    /// Rows of a prompt whose sequence has ended.
    Keep(Box<Kept>),
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

/// Where a chunk is, and how it is written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The tier it would be loaded from.
    pub tier: Tier,
    /// How.
    pub encoding: Encoding,
    /// Bytes of its file, as far as the index knows.
    pub bytes: u64,
}

/// Starts a load.
pub struct LoadJob {
    /// Comes back with the outcome.
    pub tag: u64,
    /// Which chunk.
    pub id: ChunkId,
    /// Its tokens.
    pub tokens: Arc<[u32]>,
    /// Where it is.
    pub found: Found,
    /// A slot for its arena form.
    pub target: SlotMut,
    /// Where layers are published as they come, if somebody may want them.
    pub growing: Option<Arc<Growing>>,
}

/// A load that has ended: read, verified and in its arena form, or not to be used.
pub struct Loaded {
    /// Of its job.
    pub tag: u64,
    /// What the file says of itself, and its slot, final. A slot that is not to be used has been
    /// let go.
    pub result: Result<(Superblock, SlotRef), Unusable>,
}

/// What the load machine wants of the process around it.
pub trait World {
    /// Milliseconds on a clock that does not go back.
    fn now_ms(&self) -> u64;

    /// Longest a load may take, in milliseconds.
    fn deadline_ms(&self) -> u64;

    /// Where to load a chunk from, or why it should be computed instead.
    fn locate(&mut self, id: &ChunkId, rows: usize) -> Result<Found, Unusable>;

    /// Starts a load; its outcome comes back with the tag. Gives the slot back if too much is under
    /// way. Never waits for a device.
    fn load(&mut self, job: LoadJob) -> Result<(), (SlotMut, Unusable)>;

    /// A load ended well.
    fn in_time(&mut self, found: Found);

    /// A load took too long: the next ones of this tier may be worth less.
    fn late(&mut self, id: &ChunkId, found: Found);

    /// A chunk has become resident, or has been used where it was; `near` are close to it.
    fn used(&mut self, ids: Vec<ChunkId>, near: Vec<ChunkId>);

    /// Seconds it takes to bring a chunk back that leaves the arena.
    fn cost(&self, id: &ChunkId, rows: usize) -> f64;

    /// Chunks that may be brought in for the future now.
    fn prefetch_window(&self) -> usize;

    /// Starts computing a chunk that a request waits for.
    fn compile(&mut self, job: CompileJob);

    /// Starts computing a chunk of an ingest; gives it back if enough are under way.
    fn compile_in_background(&mut self, job: CompileJob) -> Result<(), CompileJob>;

    /// Whether [`Self::compile_in_background`] would take one.
    fn background_has_room(&self) -> bool;

    /// Whether a request may be computed while its chunks are on their way.
    fn overlap(&self) -> bool;

    /// Somebody has to wait for memory that others hold.
    fn lacks_memory(&mut self);

    /// Sub-prefills a request; false if the process is stopping.
    fn prefill(&mut self, resident: Resident) -> bool;

    /// Whether [`Self::prefill`] would take one without waiting. When that changes, the arena
    /// signals.
    fn prefill_has_room(&self) -> bool;

    /// Puts a recomputed chunk back on flash, if it is still wanted there. Does not wait for the
    /// device.
    fn store_again(&mut self, chunk: Materialized);
}

/// Chunks being read or computed for requests; the completion channels have room for all.
pub const LOADS_MAX: usize = 64;
