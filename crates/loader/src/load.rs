//! The `load` thread: owns the chunk cache, brings chunks from flash into the arena, and hands
//! requests on when everything they need is there.
//!
//! Memory is given out in order of arrival: a request that cannot get a slot stops those behind
//! it from taking one, so it cannot starve. "No free slot" here is the only back-pressure point.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, select_biased};
use matkv_actors::StopFlag;
use matkv_format::{ChunkFile, Expectation};
use matkv_ring::size_class;
use matkv_sys::{CrashPoint, ReadDone, ReadEngine, ReadRequest, crash_point};
use matkv_telemetry::names;
use matkv_types::{ChunkId, FinishReason, KvDtype, KvLayout, Mode};

use crate::arena::{ChunkSlot, FillingSlot};
use crate::cache::ChunkCache;
use crate::compile::{CompileJob, Compiled};
use crate::compute::Work;
use crate::core::Core;
use crate::error::RequestError;
use crate::flash::{Unusable, open_chunk};
use crate::prefill::own_slot_bytes;
use crate::request::{
    ChunkSource, Lease, OwnSlot, Planned, RequestState, Resident, held_slots, ms_since,
};

/// Where a materialized chunk is sent.
pub(crate) type ChunkReply = Sender<Result<Lease, String>>;

/// What the load thread is asked to do.
pub(crate) enum LoadMessage {
    /// Bring a request's chunks in and pass it on.
    Request(Box<Planned>),
    /// Compute a chunk that is not stored yet; the slot comes back filled and sealed.
    Materialize { id: ChunkId, tokens: Arc<[u32]>, reply: ChunkReply },
    /// Chunks that have been deleted from the store.
    Forget(Vec<ChunkId>),
}

/// Chunks being read or computed for requests; the completion channels have room for all.
pub(crate) const LOADS_MAX: usize = 64;
/// How soon a request whose client has gone stops waiting for memory.
const SWEEP: Duration = Duration::from_millis(100);
/// With nothing waiting there is nothing to sweep.
const NOTHING_TO_SWEEP: Duration = Duration::from_secs(3600);

struct Pending {
    planned: Planned,
    started: Instant,
    leases: Vec<Option<Lease>>,
    own: Option<OwnSlot>,
}

impl Pending {
    fn holds(&self) -> bool {
        self.own.is_some() || self.leases.iter().any(Option::is_some)
    }
}

struct Loading {
    tokens: Arc<[u32]>,
    /// None once the chunk is being computed instead.
    extent: Option<crate::arena::Extent>,
    source: ChunkSource,
}

struct Materialize {
    id: ChunkId,
    tokens: Arc<[u32]>,
    reply: ChunkReply,
}

/// Channels of the load thread.
pub(crate) struct LoadChannels {
    pub messages: Receiver<LoadMessage>,
    pub reads: Receiver<ReadDone>,
    pub compiled: Receiver<Compiled>,
    pub compute: Sender<Work>,
    pub background: Sender<CompileJob>,
}

/// The thread's state.
pub(crate) struct Load {
    core: Arc<Core>,
    prefix: Arc<ChunkSlot>,
    engine: Arc<dyn ReadEngine>,
    channels: LoadChannels,
    cache: ChunkCache,
    pending: VecDeque<Pending>,
    materialize: VecDeque<Materialize>,
    loading: HashMap<ChunkId, Loading>,
    reads: HashMap<u64, ChunkId>,
    next_read: u64,
    /// Replies owed for chunks being materialized.
    replies: HashMap<ChunkId, Vec<ChunkReply>>,
    resident: Arc<std::sync::atomic::AtomicU64>,
}

impl Load {
    pub fn new(
        core: Arc<Core>,
        prefix: Arc<ChunkSlot>,
        engine: Arc<dyn ReadEngine>,
        channels: LoadChannels,
        resident: Arc<std::sync::atomic::AtomicU64>,
    ) -> Self {
        Self {
            core,
            prefix,
            engine,
            channels,
            cache: ChunkCache::new(),
            pending: VecDeque::new(),
            materialize: VecDeque::new(),
            loading: HashMap::new(),
            reads: HashMap::new(),
            next_read: 0,
            replies: HashMap::new(),
            resident,
        }
    }

    /// Runs until the flag is raised.
    pub fn run(&mut self, stop: &StopFlag, stopped: &Receiver<()>) {
        let freed = self.core.arena.signals().clone();
        while !stop.is_raised() {
            let sweep = if self.pending.is_empty() { NOTHING_TO_SWEEP } else { SWEEP };
            select_biased! {
                recv(stopped) -> _ => {}
                recv(self.channels.reads) -> r => r.into_iter().for_each(|r| self.read_done(r)),
                recv(self.channels.compiled) -> c => c.into_iter().for_each(|c| self.compiled(c)),
                recv(freed) -> _ => {}
                recv(self.channels.messages) -> message => match message {
                    Ok(message) => self.message(message),
                    Err(_) => return,
                },
                default(sweep) => {}
            }
            self.pump();
            let resident = self.cache.len() as u64;
            self.resident.store(resident, std::sync::atomic::Ordering::Relaxed);
        }
        for pending in self.pending.drain(..) {
            let reason = "the loader is stopping".into();
            pending.planned.state.end(Err(RequestError::Unavailable(reason)));
        }
        // Whoever waits for a chunk hears that none will come.
        self.replies.clear();
        self.materialize.clear();
    }

    fn message(&mut self, message: LoadMessage) {
        match message {
            LoadMessage::Request(planned) => self.arrive(*planned),
            LoadMessage::Materialize { id, tokens, reply } => {
                self.materialize.push_back(Materialize { id, tokens, reply });
            }
            LoadMessage::Forget(ids) => ids.iter().for_each(|id| self.cache.remove(id)),
        }
    }

    fn arrive(&mut self, planned: Planned) {
        if let Err(e) = self.fits(&planned) {
            return planned.state.end(Err(e));
        }
        if planned.cold {
            planned.chunks.iter().for_each(|c| self.cache.remove(&c.id));
        }
        crash_point(CrashPoint::LoadPlanned);
        let leases = planned.chunks.iter().map(|_| None).collect();
        self.pending.push_back(Pending { planned, started: Instant::now(), leases, own: None });
    }

    fn file_len(&self, rows: usize) -> usize {
        ChunkFile::len(self.core.model.kv_shape(), self.core.encoding, rows)
    }

    /// A request that could not run even alone is refused now.
    fn fits(&self, planned: &Planned) -> Result<(), RequestError> {
        let chunks = planned.chunks.iter().map(|c| size_class(self.file_len(c.tokens.len())));
        let chunks: usize = if planned.mode == Mode::Vanilla { 0 } else { chunks.sum() };
        let need =
            chunks + size_class(own_slot_bytes(&self.core, planned)) + self.prefix.range().len();
        let (have, _) = self.core.arena.usage();
        if need <= have {
            return Ok(());
        }
        Err(RequestError::Exhausted(format!(
            "the request needs {need} bytes of the arena, which has {have}; raise arena.size or \
             lower top_k"
        )))
    }

    /// Moves everything that can move.
    fn pump(&mut self) {
        let (gone, mut waiting): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|r: &Pending| r.planned.state.is_cancelled());
        for request in gone {
            let state = Arc::clone(&request.planned.state);
            drop(request);
            state.end(Ok(FinishReason::Cancelled));
        }
        let mut blocked = false;
        while let Some(mut request) = waiting.pop_front() {
            let mut stuck = false;
            blocked = !self.advance(&mut request);
            if blocked {
                (blocked, stuck) = self.advance_alone(&mut request, &mut waiting);
            }
            if request.own.is_some() && request.leases.iter().all(Option::is_some) {
                self.hand_on(request);
            } else if stuck {
                let reason = "the arena is too fragmented for this request; raise arena.size";
                let state = Arc::clone(&request.planned.state);
                drop(request);
                state.end(Err(RequestError::Exhausted(reason.into())));
            } else {
                self.pending.push_back(request);
            }
            if blocked {
                break;
            }
        }
        self.pending.append(&mut waiting);
        if !blocked {
            self.pump_materialize();
        }
    }

    /// The first request gets what those behind it hold; they take it again later. Returns
    /// whether it is still blocked, and whether nothing under way could ever free memory for it.
    fn advance_alone(
        &mut self,
        request: &mut Pending,
        behind: &mut VecDeque<Pending>,
    ) -> (bool, bool) {
        for other in behind.iter_mut() {
            other.leases.iter_mut().for_each(|l| *l = None);
            other.own = None;
        }
        let others = |r: &Pending| {
            let mine = r.leases.iter().flatten().count() as u64 + u64::from(r.own.is_some());
            held_slots() - mine
        };
        // Read before the attempt: what is freed after it brings a signal, and another attempt.
        let (held, earlier) = (others(request), self.pending.iter().any(Pending::holds));
        let idle = self.loading.is_empty() && self.replies.is_empty();
        let blocked = !self.advance(request);
        (blocked, blocked && idle && held == 0 && !earlier)
    }

    /// Takes what is there and starts what is not; false if memory or reads ran out.
    fn advance(&mut self, request: &mut Pending) -> bool {
        let vanilla = request.planned.mode == Mode::Vanilla;
        for i in 0..request.leases.len() {
            if request.leases[i].is_some() {
                continue;
            }
            if vanilla {
                // Full prefill reads no stored rows; the prefix stands in for the lease.
                request.leases[i] = Some(Lease::new(Arc::clone(&self.prefix), &self.core.arena));
                continue;
            }
            let (id, tokens) = {
                let chunk = &request.planned.chunks[i];
                (chunk.id, Arc::clone(&chunk.tokens))
            };
            if let Some(chunk) = self.cache.get(&id) {
                metrics::counter!(names::ARENA_HITS).increment(1);
                request.planned.chunks[i].source = ChunkSource::Arena;
                request.leases[i] = Some(Lease::new(chunk, &self.core.arena));
            } else if !self.loading.contains_key(&id) && !self.start_load(id, tokens) {
                return false;
            }
        }
        if request.own.is_none() {
            let bytes = own_slot_bytes(&self.core, &request.planned);
            request.own = self.cache.allocate(&self.core.arena, bytes).map(OwnSlot::new);
        }
        request.own.is_some()
    }

    /// Starts reading a chunk file; false if there is no slot or too much is under way.
    fn start_load(&mut self, id: ChunkId, tokens: Arc<[u32]>) -> bool {
        if self.loading.len() >= LOADS_MAX {
            return false;
        }
        let len = self.file_len(tokens.len());
        let Some(extent) = self.cache.allocate(&self.core.arena, len) else { return false };
        let Ok(target) = extent.exclusive() else { return false };
        let source = ChunkSource::Flash;
        match open_chunk(&self.core.store.files().path(&id), len) {
            Ok(file) => {
                self.next_read += 1;
                self.reads.insert(self.next_read, id);
                self.loading.insert(id, Loading { tokens, extent: Some(extent), source });
                let file = Arc::new(file);
                self.engine.submit(ReadRequest { tag: self.next_read, file, len, target });
                crash_point(CrashPoint::LoadSubmitted);
            }
            Err(reason) => {
                self.loading.insert(id, Loading { tokens, extent: None, source });
                self.compute_instead(id, FillingSlot { slot: target, extent }, reason);
            }
        }
        true
    }

    fn read_done(&mut self, done: ReadDone) {
        let Some(id) = self.reads.remove(&done.tag) else { return };
        let Some(loading) = self.loading.get_mut(&id) else { return };
        let Some(extent) = loading.extent.take() else { return };
        crash_point(CrashPoint::LoadRead);
        let tokens = Arc::clone(&loading.tokens);
        let filling = FillingSlot { slot: done.target, extent };
        let expect = self.expectation(id, &tokens);
        let verified = done.result.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Unusable::Damaged(e.to_string()),
            _ => Unusable::Unreadable(e.to_string()),
        });
        let verified = verified.and_then(|()| {
            ChunkFile::verify(&filling.slot, &expect).map_err(|e| Unusable::Damaged(e.to_string()))
        });
        match verified {
            Ok(found) => {
                metrics::counter!(names::LOADS).increment(1);
                metrics::counter!(names::LOAD_BYTES).increment(found.file_len() as u64);
                let kv = matkv_format::Superblock::kv_offset(found.rows)..found.file_len();
                let chunk = filling.freeze(id, kv, found.layout(), found.file_len());
                self.loaded(Arc::new(chunk), ChunkSource::Flash);
            }
            Err(reason) => self.compute_instead(id, filling, reason),
        }
    }

    /// Keeps a file that cannot be used aside; a missing one is no error.
    fn quarantine(&self, id: &ChunkId) {
        match self.core.store.files().quarantine(id) {
            Ok(true) => metrics::counter!(names::QUARANTINED).increment(1),
            Ok(false) => {}
            Err(e) => tracing::warn!("chunk {id}: {e}"),
        }
    }

    fn expectation<'a>(&self, id: ChunkId, tokens: &'a [u32]) -> Expectation<'a> {
        Expectation {
            fingerprint: self.core.fingerprint,
            chunk_id: id,
            tokens,
            shape: self.core.model.kv_shape(),
            base_position: self.core.prefix.len(),
        }
    }

    fn compute_instead(&mut self, id: ChunkId, filling: FillingSlot, reason: Unusable) {
        tracing::warn!("chunk {id}: {reason}; computing it again");
        if matches!(reason, Unusable::Damaged(_)) {
            self.quarantine(&id);
        }
        metrics::counter!(names::RECOMPUTED).increment(1);
        let Some(loading) = self.loading.get_mut(&id) else { return };
        loading.source = ChunkSource::Computed;
        let tokens = Arc::clone(&loading.tokens);
        // A file that could not be read may be whole: it is not written over.
        let store = !matches!(reason, Unusable::Unreadable(_));
        let job = CompileJob { id, tokens, filling, store };
        // The compute thread never waits for this one, so it always takes the job.
        let _ = self.channels.compute.send(Work::Compile(Box::new(job)));
    }

    fn compiled(&mut self, compiled: Compiled) {
        match compiled.outcome {
            Ok(chunk) => {
                let chunk = Arc::new(chunk);
                let replies = self.replies.remove(&compiled.id);
                // A chunk that is being read has its own slot; only one being computed is this one.
                let waiting = self.loading.get(&compiled.id);
                let demanded = waiting.is_some_and(|l| l.extent.is_none());
                for reply in replies.into_iter().flatten() {
                    let _ = reply.send(Ok(Lease::new(Arc::clone(&chunk), &self.core.arena)));
                }
                if demanded {
                    let source = ChunkSource::Computed;
                    if compiled.store {
                        self.store_again(&chunk);
                    }
                    self.loaded(chunk, source);
                } else {
                    self.cache.insert(chunk, true);
                }
            }
            Err(reason) => {
                self.loading.remove(&compiled.id);
                for reply in self.replies.remove(&compiled.id).into_iter().flatten() {
                    let _ = reply.send(Err(reason.clone()));
                }
                self.fail_waiters(&compiled.id, &reason);
            }
        }
    }

    /// Puts a recomputed chunk back on flash; serving does not depend on it.
    fn store_again(&self, chunk: &ChunkSlot) {
        let known = self.core.store.read().and_then(|r| r.chunk(&chunk.id()));
        if !known.is_ok_and(|c| c.is_some()) {
            // Its document has been deleted meanwhile.
            return;
        }
        if let Err(e) = self.core.store.files().write(&chunk.id(), chunk.file()) {
            tracing::warn!("chunk {}: recomputed, but not stored: {e}", chunk.id());
        }
    }

    fn fail_waiters(&mut self, id: &ChunkId, reason: &str) {
        let (failed, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.pending).into_iter().partition(|p| {
                p.planned.chunks.iter().zip(&p.leases).any(|(c, l)| c.id == *id && l.is_none())
            });
        self.pending = rest.into();
        for request in failed {
            request.planned.state.end(Err(RequestError::Internal(reason.to_owned())));
        }
    }

    /// A chunk has become resident: everyone who waits for it gets a lease before anything else
    /// can evict it.
    fn loaded(&mut self, chunk: Arc<ChunkSlot>, source: ChunkSource) {
        let id = chunk.id();
        self.loading.remove(&id);
        for request in &mut self.pending {
            for (use_, lease) in request.planned.chunks.iter_mut().zip(&mut request.leases) {
                if use_.id == id && lease.is_none() {
                    use_.source = source;
                    *lease = Some(Lease::new(Arc::clone(&chunk), &self.core.arena));
                }
            }
        }
        self.cache.insert(chunk, false);
        crash_point(CrashPoint::LoadResident);
    }

    fn hand_on(&mut self, request: Pending) {
        let Pending { planned, started, leases, own } = request;
        let Some(own) = own else { return };
        let mut planned = planned;
        planned.count_computed_chunks();
        let load_ms = ms_since(started);
        planned.state.update(|p| p.phases.load_ms = load_ms);
        let leases = leases.into_iter().flatten().collect();
        let state: Arc<RequestState> = Arc::clone(&planned.state);
        let resident = Resident { planned, leases, own };
        if self.channels.compute.send(Work::Prefill(Box::new(resident))).is_err() {
            state.end(Err(RequestError::Unavailable("the loader is stopping".into())));
        }
        crash_point(CrashPoint::LoadHandedOn);
    }

    /// Gives slots to chunks of an ingest, after every request has been served.
    fn pump_materialize(&mut self) {
        while let Some(next) = self.materialize.pop_front() {
            if self.channels.background.is_full() {
                self.materialize.push_front(next);
                return;
            }
            let len = self.file_len(next.tokens.len());
            let Some(extent) = self.cache.allocate(&self.core.arena, len) else {
                let (capacity, _) = self.core.arena.usage();
                if size_class(len) + self.prefix.range().len() > capacity {
                    let reason = format!(
                        "a chunk of {} tokens needs {len} bytes of the arena, which has \
                         {capacity}; raise arena.size or lower chunker.chunk_size",
                        next.tokens.len()
                    );
                    let _ = next.reply.send(Err(reason));
                    continue;
                }
                self.materialize.push_front(next);
                return;
            };
            let Ok(slot) = extent.exclusive() else { return };
            self.replies.entry(next.id).or_default().push(next.reply);
            let filling = FillingSlot { slot, extent };
            let job = CompileJob { id: next.id, tokens: next.tokens, filling, store: false };
            let _ = self.channels.background.send(job);
        }
    }
}

/// The layout of a sequence's own rows.
pub(crate) fn own_layout(core: &Core, rows: usize) -> KvLayout {
    KvLayout::new(core.model.kv_shape(), KvDtype::Bf16, rows)
}
