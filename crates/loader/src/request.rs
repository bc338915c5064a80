//! A request on its way, and the state its client's stream reads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use matkv_model::Message;
use matkv_ring::SequenceControl;
use matkv_sys::{SlotMut, SysError};
use matkv_types::{ChunkId, FinishReason, KvLayout, Mode, Sampling};
use tokio::sync::Notify;

use crate::arena::{Arena, ChunkSlot, Extent, Held};
use crate::earlier::Earlier;
use crate::error::RequestError;
use crate::groups::{Member, Stage};
use crate::growing::Growing;
use crate::hand_over::own_kv_offset;
use crate::plan::{Plan, PlannedSource};

/// What a client asked for, validated.
#[derive(Clone, Debug)]
pub struct Ask {
    pub messages: Vec<Message>,
    pub chunk_ids: Vec<ChunkId>,
    pub document_ids: Vec<String>,
    pub mode: Mode,
    pub top_k: usize,
    pub sampling: Sampling,
    pub return_logits: bool,
    pub cold: bool,
}

/// Where a chunk's rows came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSource {
    Arena,
    Flash,
    Cold,
    Computed,
    Vanilla,
}

impl ChunkSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Arena => "arena",
            Self::Flash => "flash",
            Self::Cold => "cold",
            Self::Computed => "computed",
            Self::Vanilla => "vanilla",
        }
    }
}

/// A chunk of the prompt.
#[derive(Clone, Debug)]
pub struct ChunkUse {
    pub id: ChunkId,
    pub document: String,
    pub ordinal: u32,
    pub tokens: Arc<[u32]>,
    pub score: f32,
    pub source: ChunkSource,
}

impl AsRef<[u32]> for ChunkUse {
    fn as_ref(&self) -> &[u32] {
        &self.tokens
    }
}

/// Milliseconds of each phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    pub queue_ms: f64,
    pub retrieve_ms: f64,
    pub load_ms: f64,
    pub prefill_ms: f64,
    pub first_token_ms: f64,
    pub decode_ms: f64,
    pub total_ms: f64,
}

/// Milliseconds since an instant.
pub fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// What has happened so far, as the client's stream sees it.
#[derive(Default)]
pub struct Progress {
    /// The prompt, once the first token is there.
    pub started: Option<Started>,
    /// Tokens so far.
    pub tokens: Vec<u32>,
    /// How it ended.
    pub ended: Option<Result<FinishReason, RequestError>>,
    pub phases: Phases,
}

/// What is known when the first token is there.
#[derive(Clone, Default)]
pub struct Started {
    pub chunks: Vec<ChunkUse>,
    pub dropped: Vec<ChunkId>,
    pub mode: Option<Mode>,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub recomputed_rows: usize,
    pub earlier_rows: usize,
    pub logits: Vec<f32>,
}

/// Shared by the threads that serve a request and the stream that tells its client.
pub struct RequestState {
    /// Unique in the process's life.
    pub number: u64,
    pub received: Instant,
    progress: Mutex<Progress>,
    changed: Notify,
    cancelled: AtomicBool,
    control: Mutex<Option<SequenceControl>>,
    /// What an admitted request occupies in the gateway, until it has ended everywhere.
    admission: Mutex<Option<Box<dyn Send>>>,
    /// Its place in a group, where requests go through in groups.
    member: OnceLock<Member>,
}

impl RequestState {
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            received: Instant::now(),
            progress: Mutex::default(),
            changed: Notify::new(),
            cancelled: AtomicBool::new(false),
            control: Mutex::default(),
            admission: Mutex::default(),
            member: OnceLock::new(),
        })
    }

    /// Keeps what was admitted until the request ends.
    pub fn hold(&self, admission: impl Send + 'static) {
        *self.admission.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(admission));
    }

    /// Goes through in a group from now on.
    pub fn join(&self, member: Member) {
        let _ = self.member.set(member);
    }

    /// It is through a stage.
    pub fn through(&self, stage: Stage) {
        if let Some(member) = self.member.get() {
            member.through(stage);
        }
    }

    /// Whether all who must be are through a stage: this request, or its group.
    pub fn may_go_on_after(&self, stage: Stage) -> bool {
        self.member.get().is_none_or(|m| m.all_through(stage))
    }

    /// Changes the progress and tells the stream.
    pub fn update<R>(&self, change: impl FnOnce(&mut Progress) -> R) -> R {
        let result = change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_one();
        result
    }

    /// Looks at the progress without telling anyone.
    pub fn look<R>(&self, look: impl FnOnce(&Progress) -> R) -> R {
        look(&self.progress.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the request, unless it has ended.
    pub fn end(&self, outcome: Result<FinishReason, RequestError>) {
        drop(self.admission.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(member) = self.member.get() {
            member.leave();
        }
        self.update(|p| {
            if p.ended.is_none() {
                p.phases.total_ms = ms_since(self.received);
                p.ended = Some(outcome);
            }
        });
    }

    /// Waits until something has changed since the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The client has gone: stop as soon as possible, wherever the request is.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        if let Some(control) = &*self.control.lock().unwrap_or_else(PoisonError::into_inner) {
            control.cancel();
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// The sequence has been filled: from now on a cancellation reaches the decoder.
    pub fn attach(&self, control: Option<SequenceControl>) {
        let mut slot = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = control;
        if self.is_cancelled()
            && let Some(control) = &*slot
        {
            control.cancel();
        }
    }
}

/// A chunk close to those of a request.
#[derive(Clone, Debug)]
pub struct NearChunk {
    pub id: ChunkId,
    pub tokens: Arc<[u32]>,
}

/// A request after retrieval.
pub struct Planned {
    pub state: Arc<RequestState>,
    pub chunks: Vec<ChunkUse>,
    pub dropped: Vec<ChunkId>,
    pub mode: Mode,
    pub plan: Plan,
    pub sampling: Sampling,
    pub return_logits: bool,
    pub cold: bool,
    /// Its chunks are computed even if they are stored: the self-test's second answer.
    pub recompute: bool,
    /// What the next requests may ask for, likeliest first.
    pub near: Vec<NearChunk>,
    /// Before everyone who waits: the self-test, on which readiness depends.
    pub urgent: bool,
    /// Rows of earlier prompts may serve it, and its own may serve later ones.
    pub earlier: bool,
}

impl Planned {
    /// Chunks whose files could not be used were computed for this request: their rows are not
    /// cached ones.
    pub fn count_computed_chunks(&mut self) {
        for segment in &self.plan.segments {
            if let PlannedSource::Chunk(i) = segment.source
                && self.chunks[i].source == ChunkSource::Computed
            {
                self.plan.cached_tokens -= segment.rows;
                self.plan.recomputed_rows += segment.rows;
            }
        }
    }
}

/// A chunk on loan: the arena cannot evict it.
pub struct Lease {
    chunk: Arc<ChunkSlot>,
    _held: Held,
}

impl Lease {
    pub fn new(chunk: Arc<ChunkSlot>, arena: &Arc<Arena>) -> Self {
        Self { chunk, _held: Held::new(arena) }
    }

    pub fn chunk(&self) -> &ChunkSlot {
        &self.chunk
    }
}

/// A chunk that a request has been passed on with: there, or on its way.
pub enum Leased {
    /// In the arena.
    Here(Lease),
    /// Being read.
    Coming(Coming),
}

/// A chunk on its way, whose memory a request counts as held.
pub struct Coming {
    growing: Arc<Growing>,
    held: Held,
}

impl Coming {
    /// Counts the chunk's memory as held.
    pub fn new(growing: Arc<Growing>, arena: &Arc<Arena>) -> Self {
        Self { growing, held: Held::new(arena) }
    }

    /// What is there of it.
    pub fn growing(&self) -> &Arc<Growing> {
        &self.growing
    }
}

impl Leased {
    /// A chunk that has come is a chunk on loan.
    pub fn settled(self) -> Self {
        match self {
            Self::Coming(Coming { growing, held }) => match growing.completed() {
                Some(completed) => Self::Here(Lease { chunk: completed.chunk, _held: held }),
                None => Self::Coming(Coming { growing, held }),
            },
            here => here,
        }
    }

    /// The chunk on loan, if it is there.
    pub fn lease(self) -> Option<Lease> {
        match self {
            Self::Here(lease) => Some(lease),
            Self::Coming(_) => None,
        }
    }
}

/// A chunk that has been computed, on its way to flash.
pub struct Materialized {
    pub lease: Lease,
    /// Its file in the row type of flash, where the arena has another.
    pub image: Option<SlotMut>,
    pub compute_ms: u32,
}

impl Materialized {
    pub fn id(&self) -> ChunkId {
        self.lease.chunk().id()
    }

    /// The sealed file, not compressed yet.
    pub fn file(&self) -> &[u8] {
        self.image.as_deref().unwrap_or_else(|| self.lease.chunk().file())
    }
}

/// A sequence's own slot.
pub struct OwnSlot {
    extent: Extent,
    _held: Held,
}

impl OwnSlot {
    pub fn new(extent: Extent) -> Self {
        let _held = Held::new(extent.arena());
        Self { extent, _held }
    }

    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Its memory, held by no request.
    pub fn into_extent(self) -> Extent {
        self.extent
    }
}

/// A request whose chunks are in the arena, or on their way there.
pub struct Resident {
    pub planned: Planned,
    pub chunks: Vec<Leased>,
    pub own: OwnSlot,
    /// Rows of an earlier prompt that it begins with.
    pub earlier: Option<Earlier>,
    /// When its chunks were asked for.
    pub started: Instant,
    /// How long the last chunk that is there has taken.
    pub load_ms: f64,
}

impl Resident {
    /// Whether all chunks are there; takes those on loan that have come.
    pub fn settle(&mut self) -> bool {
        for (use_, chunk) in self.planned.chunks.iter_mut().zip(&self.chunks) {
            if let Leased::Coming(coming) = chunk
                && let Some(completed) = coming.growing.completed()
            {
                let taken = completed.at.saturating_duration_since(self.started);
                self.load_ms = self.load_ms.max(taken.as_secs_f64() * 1e3);
                use_.source = completed.source;
            }
        }
        self.chunks = std::mem::take(&mut self.chunks).into_iter().map(Leased::settled).collect();
        self.chunks.iter().all(|c| matches!(c, Leased::Here(_)))
    }

    /// Takes the rows it shares with an earlier prompt into its own section; returns how many.
    pub fn take_earlier(&mut self, own: &mut [u8], layout: KvLayout) -> usize {
        let Some(earlier) = self.earlier.take() else { return 0 };
        let rows = &self.planned.plan.rows[..earlier.rows()];
        rows.last().map_or(0, |last| earlier.copy_to(last.row + 1, own, layout))
    }

    /// The KV section of its own slot, to write.
    pub fn own_rows(&self) -> Result<SlotMut, SysError> {
        let range = self.own.extent().range();
        let kv = range.start + own_kv_offset(&self.planned)..range.end;
        self.own.extent().region().exclusive(kv)
    }
}
