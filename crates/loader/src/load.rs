//! The load machine: owns the chunk cache, brings chunks from flash into the arena, and hands
//! requests on when everything they need is there.
//!
//! Memory is given out in order of arrival, to requests and to chunks of an ingest alike: whoever
//! cannot get a slot stops those behind from taking one, so nobody starves. "No free slot" here is
//! the only back-pressure point.
//!
//! No threads, channels or files here: what happens comes in by method calls, what is wanted goes
//! out through [`World`]. The same machine runs in the loader's `load` thread and in the
//! simulation.

mod chunks;
mod earlier;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use matkv_ring::size_class;
use matkv_store::policy::PolicyKind;
use matkv_sys::{CrashPoint, SlotMut, crash_point};
use matkv_telemetry::{names, trace};
use matkv_types::{ChunkId, FinishReason};

use crate::arena::{Arena, ChunkSlot, Extent, FillingSlot};
use crate::cache::ChunkCache;
use crate::chunk_spec::ChunkSpec;
use crate::compile::CompileJob;
use crate::error::RequestError;
use crate::groups::Stage;
use crate::growing::Growing;
use crate::hand_over::own_slot_bytes;
use crate::request::{
    ChunkSource, Coming, Lease, Leased, NearChunk, OwnSlot, Planned, RequestState, Resident,
};
use crate::world::{ChunkReply, Found, LOADS_MAX, LoadMessage, Materialize, World};

struct Pending {
    planned: Planned,
    started: Instant,
    leases: Vec<Option<Lease>>,
    own: Option<OwnSlot>,
    /// Its chunks have been moved together, so that its own slot fits.
    compacted: bool,
    /// It has been passed on before, with a chunk that did not come.
    again: bool,
    /// Its turn has come: what it wants from flash has left the arena.
    begun: bool,
    /// When everything was there, or on its way.
    ready: Option<Instant>,
    /// Until everything is there.
    span: Option<trace::Timer>,
}

impl Pending {
    fn holds(&self) -> bool {
        self.own.is_some() || self.leases.iter().any(Option::is_some)
    }

    /// What it holds comes back before its client is told.
    fn end(self: Box<Self>, outcome: Result<FinishReason, RequestError>) {
        let state = Arc::clone(&self.planned.state);
        drop(self);
        state.end(outcome);
    }
}

/// Who waits for memory, in order of arrival.
enum Waiting {
    Request(Box<Pending>),
    /// With the number of requests that have passed it.
    Materialize(Materialize, u32),
}

impl Waiting {
    fn is_passed(&mut self) {
        if let Self::Materialize(_, passed) = self {
            *passed += 1;
        }
    }

    fn request(&mut self) -> Option<&mut Pending> {
        match self {
            Self::Request(pending) => Some(pending),
            Self::Materialize(..) => None,
        }
    }
}

/// Requests that may pass a chunk of an ingest while there is no memory for it. Then it has its
/// turn: an ingest gets on however many clients never pause.
const PASSES_MAX: u32 = 8;

struct Loading {
    tokens: Arc<[u32]>,
    /// None once the chunk is being computed instead.
    extent: Option<Extent>,
    /// Nobody has asked for it yet.
    prefetch: bool,
    /// Its layers, as they come.
    growing: Option<Arc<Growing>>,
}

/// A load under way.
struct Reading {
    id: ChunkId,
    found: Found,
    started_ms: u64,
}

/// The machine's state.
pub struct Load<W> {
    spec: ChunkSpec,
    arena: Arc<Arena>,
    prefix: Arc<ChunkSlot>,
    world: W,
    cache: ChunkCache,
    waiting: VecDeque<Waiting>,
    loading: HashMap<ChunkId, Loading>,
    reads: HashMap<u64, Reading>,
    /// Memory of loads that took too long: a device may still write to it.
    abandoned: HashMap<u64, Extent>,
    /// Chunks to be computed although they are stored.
    compute_only: HashSet<ChunkId>,
    /// What may be asked for next, likeliest first.
    expected: VecDeque<NearChunk>,
    next_read: u64,
    /// Computations under way: each has memory that will come free.
    computing: usize,
    /// Replies owed for chunks being materialized.
    replies: HashMap<ChunkId, Vec<ChunkReply>>,
}

impl<W: World> Load<W> {
    /// With an empty cache.
    pub fn new(
        spec: ChunkSpec,
        arena: &Arc<Arena>,
        prefix: Arc<ChunkSlot>,
        policy: PolicyKind,
        world: W,
    ) -> Self {
        Self {
            spec,
            arena: Arc::clone(arena),
            prefix,
            world,
            cache: ChunkCache::new(policy),
            waiting: VecDeque::new(),
            loading: HashMap::new(),
            reads: HashMap::new(),
            abandoned: HashMap::new(),
            compute_only: HashSet::new(),
            expected: VecDeque::new(),
            next_read: 0,
            computing: 0,
            replies: HashMap::new(),
        }
    }

    /// Chunks in the arena.
    pub fn resident(&self) -> usize {
        self.cache.len()
    }

    /// Earlier prompts whose rows are in the arena.
    pub fn earlier(&self) -> usize {
        self.cache.earlier()
    }

    /// Whether nobody waits for memory and nothing is under way.
    pub fn is_at_rest(&self) -> bool {
        let under_way = self.loading.len() + self.abandoned.len() + self.computing;
        self.waiting.is_empty() && under_way == 0 && self.replies.is_empty()
    }

    /// Whether it must be looked at now and then: somebody waits for memory, and may have gone
    /// away meanwhile, or a load may take too long.
    pub fn needs_looks(&self) -> bool {
        !self.waiting.is_empty() || !self.reads.is_empty() || !self.abandoned.is_empty()
    }

    /// What is around it.
    pub fn world(&mut self) -> &mut W {
        &mut self.world
    }

    /// What must hold whenever nothing is being done.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        let fail = |what: &str| Err(what.to_owned());
        if self.loading.len() > LOADS_MAX {
            return fail("more loads than completions have room for");
        }
        let reading = self.loading.values().filter(|l| l.extent.is_some()).count();
        if reading != self.reads.len()
            || self.reads.values().any(|r| !self.loading.contains_key(&r.id))
        {
            return fail("reads under way and chunks being loaded differ");
        }
        let requests = || {
            self.waiting.iter().filter_map(|w| match w {
                Waiting::Request(r) => Some(r),
                Waiting::Materialize(..) => None,
            })
        };
        let leases = requests().flat_map(|r| r.leases.iter().flatten()).count();
        let own = requests().filter(|r| r.own.is_some()).count();
        if leases + own > self.arena.held() {
            return fail("waiting requests hold more slots than are counted");
        }
        for request in requests() {
            for (i, (use_, lease)) in request.planned.chunks.iter().zip(&request.leases).enumerate()
            {
                let reads = request.planned.mode.reads(i);
                if lease.as_ref().is_some_and(|l| reads && l.chunk().id() != use_.id) {
                    return fail("a request holds another chunk than it asked for");
                }
            }
        }
        Ok(())
    }

    /// Ends everything that waits.
    pub fn stop(&mut self) {
        for pending in self.waiting.drain(..) {
            if let Waiting::Request(pending) = pending {
                pending.end(Err(RequestError::Unavailable("the loader is stopping".into())));
            }
        }
        // Whoever waits for a chunk hears that none will come.
        self.replies.clear();
    }

    /// Takes a message; [`Self::pump`] acts on it.
    pub fn message(&mut self, message: LoadMessage) {
        match message {
            LoadMessage::Request(planned) => self.arrive(*planned),
            LoadMessage::Again(resident) => self.arrive_again(*resident),
            LoadMessage::Materialize(m) => self.waiting.push_back(Waiting::Materialize(m, 0)),
            LoadMessage::Keep(kept) => self.keep(*kept),
            LoadMessage::Forget(ids) => ids.iter().for_each(|id| self.cache.remove(id)),
        }
    }

    fn arrive(&mut self, planned: Planned) {
        planned.state.through(Stage::Retrieve);
        if let Err(e) = self.fits(&planned) {
            return planned.state.end(Err(e));
        }
        if planned.recompute {
            self.compute_only.extend(planned.chunks.iter().map(|c| c.id));
        }
        crash_point(CrashPoint::LoadPlanned);
        let leases = planned.chunks.iter().map(|_| None).collect();
        let urgent = planned.urgent;
        let (started, own, span, ready) = (Instant::now(), None, None, None);
        let (compacted, again, begun) = (false, false, false);
        let pending =
            Pending { planned, started, leases, own, compacted, again, begun, ready, span };
        let waiting = Waiting::Request(Box::new(pending));
        if urgent {
            self.waiting.push_front(waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// A request comes back because one of its chunks has not come. It keeps what it holds.
    fn arrive_again(&mut self, mut resident: Resident) {
        resident.settle();
        let Resident { planned, chunks, own, started, .. } = resident;
        let leases = chunks.into_iter().map(Leased::lease).collect();
        let span = Some(trace::span("load", "load again", planned.state.number));
        let (own, compacted, again, begun, ready) = (Some(own), false, true, true, None);
        let pending =
            Pending { planned, started, leases, own, compacted, again, begun, ready, span };
        self.waiting.push_front(Waiting::Request(Box::new(pending)));
    }

    /// A request that could not run even alone is refused now.
    fn fits(&self, planned: &Planned) -> Result<(), RequestError> {
        // A chunk stored in another form takes more or less: that is seen when it is loaded.
        let form = self.spec.form();
        let slot = |rows| size_class(self.spec.slot_len(rows, form));
        let read = planned.chunks.iter().enumerate().filter(|(i, _)| planned.mode.reads(*i));
        let chunks: usize = read.map(|(_, c)| slot(c.tokens.len())).sum();
        let need =
            chunks + size_class(own_slot_bytes(&self.spec, planned)) + self.prefix.range().len();
        let (have, _) = self.arena.usage();
        if need <= have {
            return Ok(());
        }
        Err(RequestError::Exhausted(format!(
            "the request needs {need} bytes of the arena, which has {have}; raise arena.size or \
             lower top_k"
        )))
    }

    /// Moves everything that can move.
    pub fn pump(&mut self) {
        self.expire();
        self.drop_cancelled();
        let mut behind = std::mem::take(&mut self.waiting);
        let mut ahead = VecDeque::new();
        let mut blocked = false;
        // Ingests take their chunks in order: a later one must not hold memory the first one waits
        // for.
        let mut ingest_waits = false;
        while let Some(next) = behind.pop_front() {
            let kept = match next {
                Waiting::Request(request) => {
                    let kept = self.pump_request(request, &ahead, &mut behind, &mut blocked);
                    if kept.is_none() {
                        ahead.iter_mut().for_each(Waiting::is_passed);
                    }
                    kept
                }
                Waiting::Materialize(m, passed) if ingest_waits => {
                    Some(Waiting::Materialize(m, passed))
                }
                Waiting::Materialize(m, passed) => {
                    let kept = self.pump_materialize(m, passed, &mut behind, &mut blocked);
                    ingest_waits = kept.is_some();
                    kept
                }
            };
            ahead.extend(kept);
            if blocked {
                break;
            }
        }
        ahead.append(&mut behind);
        self.waiting = ahead;
        // Reads run out as well, and come back by themselves.
        if blocked && self.loading.len() < LOADS_MAX {
            self.world.lacks_memory();
        }
        self.prefetch();
        debug_assert_eq!(self.check(), Ok(()));
    }

    fn drop_cancelled(&mut self) {
        let is_gone = |w: &Waiting| match w {
            Waiting::Request(r) => r.planned.state.is_cancelled(),
            Waiting::Materialize(..) => false,
        };
        let (gone, stay): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(is_gone);
        self.waiting = stay;
        for waiting in gone {
            if let Waiting::Request(request) = waiting {
                request.end(Ok(FinishReason::Cancelled));
            }
        }
    }

    /// Gives a request what it needs and hands it on; gives it back if it must wait.
    fn pump_request(
        &mut self,
        mut request: Box<Pending>,
        ahead: &VecDeque<Waiting>,
        behind: &mut VecDeque<Waiting>,
        blocked: &mut bool,
    ) -> Option<Waiting> {
        if !request.planned.state.may_go_on_after(Stage::Retrieve) {
            return Some(Waiting::Request(request));
        }
        if !request.begun {
            self.begin(&mut request);
        }
        *blocked = !self.advance(&mut request);
        let mut stuck = false;
        if *blocked {
            take_back(behind);
            // Read before the attempt: what is freed after it brings a signal, and another try.
            let mine = request.leases.iter().flatten().count() + usize::from(request.own.is_some());
            let others = self.arena.held().saturating_sub(mine);
            let holds = |w: &Waiting| matches!(w, Waiting::Request(r) if r.holds());
            let under_way = self.loading.len() + self.abandoned.len() + self.computing;
            let idle = under_way + self.arena.returning() == 0;
            *blocked = !self.advance(&mut request);
            stuck = *blocked && idle && others == 0 && !ahead.iter().any(holds);
            if stuck && !request.compacted {
                *blocked = !self.compact(&mut request);
                stuck = *blocked;
            }
        }
        let ready = request.own.is_some() && self.can_begin(&request);
        let state = &request.planned.state;
        if ready && request.ready.is_none() {
            request.span = None;
            request.ready = Some(Instant::now());
            state.through(Stage::Load);
        }
        if ready && state.may_go_on_after(Stage::Load) && self.world.prefill_has_room() {
            self.hand_on(*request);
            None
        } else if stuck {
            // Nothing under way could ever free memory for it.
            let reason = "the arena is too fragmented for this request; raise arena.size";
            request.end(Err(RequestError::Exhausted(reason.into())));
            None
        } else {
            Some(Waiting::Request(request))
        }
    }

    /// Its turn has come. What it wants from flash leaves the arena now: what others have brought
    /// in before would be there.
    fn begin(&mut self, request: &mut Pending) {
        request.begun = true;
        let arrived = std::mem::replace(&mut request.started, Instant::now());
        let waited = (request.started - arrived).as_secs_f64() * 1e3;
        request.planned.state.update(|p| p.phases.queue_ms += waited);
        request.span = Some(trace::span("load", "load", request.planned.state.number));
        if request.planned.cold {
            request.leases.iter_mut().for_each(|l| *l = None);
            request.planned.chunks.iter().for_each(|c| self.cache.remove(&c.id));
        }
    }

    /// What holds the memory apart is the request's own chunks, lying where they happened to be:
    /// they are let go, its own slot is taken first, and they are loaded again beside it.
    fn compact(&mut self, request: &mut Pending) -> bool {
        metrics::counter!(names::COMPACTIONS).increment(1);
        request.compacted = true;
        request.leases.iter_mut().for_each(|l| *l = None);
        self.cache.evict_unpinned();
        self.take_own_slot(request);
        self.advance(request)
    }

    /// Gives a chunk of an ingest its slot; gives it back if it must wait.
    fn pump_materialize(
        &mut self,
        m: Materialize,
        passed: u32,
        behind: &mut VecDeque<Waiting>,
        blocked: &mut bool,
    ) -> Option<Waiting> {
        if !self.world.background_has_room() {
            // It waits for the compute thread, not for memory: nobody waits for it.
            return Some(Waiting::Materialize(m, passed));
        }
        let len = self.spec.slot_len(m.tokens.len(), self.spec.form());
        let its_turn = passed >= PASSES_MAX;
        let extent = self.cache.allocate(&self.arena, len).or_else(|| {
            if !its_turn {
                return None;
            }
            take_back(behind);
            self.cache.allocate(&self.arena, len)
        });
        let Some(extent) = extent else {
            let (capacity, _) = self.arena.usage();
            if size_class(len) + self.prefix.range().len() > capacity {
                let reason = format!(
                    "a chunk of {} tokens needs {len} bytes of the arena, which has {capacity}; \
                     raise arena.size or lower chunker.chunk_size",
                    m.tokens.len()
                );
                let _ = m.reply.send(Err(reason));
                return None;
            }
            *blocked = its_turn;
            return Some(Waiting::Materialize(m, passed));
        };
        let slot = exclusive(&extent);
        let filling = FillingSlot { slot, extent };
        let job =
            CompileJob { id: m.id, tokens: m.tokens, filling, for_request: false, store: false };
        match self.world.compile_in_background(job) {
            Ok(()) => {
                self.computing += 1;
                self.replies.entry(m.id).or_default().push(m.reply);
            }
            Err(_) => {
                let _ = m.reply.send(Err("the loader is stopping".into()));
            }
        }
        None
    }

    /// Takes what is there and starts what is not; false if memory or reads ran out.
    fn advance(&mut self, request: &mut Pending) -> bool {
        let mode = request.planned.mode;
        for i in 0..request.leases.len() {
            if request.leases[i].is_some() {
                continue;
            }
            if !mode.reads(i) {
                // Its stored rows are not read; the prefix stands in for the lease.
                request.leases[i] = Some(Lease::new(Arc::clone(&self.prefix), &self.arena));
                continue;
            }
            let (id, tokens) = {
                let chunk = &request.planned.chunks[i];
                (chunk.id, Arc::clone(&chunk.tokens))
            };
            if let Some(chunk) = self.cache.get(&id) {
                metrics::counter!(names::ARENA_HITS).increment(1);
                count("arena", &["requested", "hit", "served"], tokens.len());
                request.planned.chunks[i].source = ChunkSource::Arena;
                request.leases[i] = Some(Lease::new(chunk, &self.arena));
            } else if let Some(loading) = self.loading.get_mut(&id) {
                if std::mem::take(&mut loading.prefetch)
                    && let Some(reading) = self.reads.values().find(|r| r.id == id)
                {
                    // From now on somebody has asked for it.
                    count(reading.found.tier.as_str(), &["requested", "hit"], tokens.len());
                }
            } else if !self.start_load(id, tokens, false) {
                return false;
            }
        }
        if request.own.is_none() {
            self.take_own_slot(request);
        }
        request.own.is_some()
    }

    /// Layers of a chunk that is being read for somebody, unless they will not come.
    fn growing(&self, id: &ChunkId) -> Option<&Arc<Growing>> {
        let growing = self.loading.get(id)?.growing.as_ref()?;
        (self.world.overlap() && !growing.has_failed()).then_some(growing)
    }

    /// Whether every chunk is there, or on its way from flash: the first layers can be computed
    /// while the last ones are read.
    fn can_begin(&self, request: &Pending) -> bool {
        let mut chunks = request.planned.chunks.iter().zip(&request.leases);
        chunks.all(|(c, lease)| lease.is_some() || self.growing(&c.id).is_some())
    }

    fn hand_on(&mut self, request: Pending) {
        let Pending { mut planned, started, leases, own, again, ready, .. } = request;
        let Some(own) = own else { return };
        if !again {
            self.look_ahead(&mut planned);
        }
        let mut chunks = Vec::with_capacity(leases.len());
        for (chunk, lease) in planned.chunks.iter_mut().zip(leases) {
            chunks.push(match (lease, self.growing(&chunk.id)) {
                (Some(lease), _) => Leased::Here(lease),
                (None, Some(growing)) => {
                    count("arena", &["requested"], chunk.tokens.len());
                    chunk.source = ChunkSource::Flash;
                    Leased::Coming(Coming::new(Arc::clone(growing), &self.arena))
                }
                // `can_begin` has seen it.
                (None, None) => return,
            });
        }
        let state: Arc<RequestState> = Arc::clone(&planned.state);
        let until = ready.unwrap_or_else(Instant::now);
        let load_ms = until.saturating_duration_since(started).as_secs_f64() * 1e3;
        let earlier = self.earlier_rows(&planned);
        let resident = Resident { planned, chunks, own, earlier, started, load_ms };
        if !self.world.prefill(resident) {
            state.end(Err(RequestError::Unavailable("the loader is stopping".into())));
        }
        crash_point(CrashPoint::LoadHandedOn);
    }
}

/// Counts tokens of a chunk: asked of a tier, found in it, served from it.
fn count(tier: &'static str, stages: &[&'static str], tokens: usize) {
    for stage in stages {
        let counter = metrics::counter!(names::TIER_TOKENS, "tier" => tier, "stage" => *stage);
        counter.increment(tokens as u64);
    }
}

/// The bytes of an extent that has just been allocated.
///
/// # Panics
/// If somebody still has them: memory would be written under a reader.
fn exclusive(extent: &Extent) -> SlotMut {
    match extent.exclusive() {
        Ok(slot) => slot,
        Err(e) => panic!("an allocated extent is in use: {e}"),
    }
}

/// Whoever is first gets what those behind hold; they take it again later.
fn take_back(behind: &mut VecDeque<Waiting>) {
    for other in behind.iter_mut().filter_map(Waiting::request) {
        other.leases.iter_mut().for_each(|l| *l = None);
        other.own = None;
        other.compacted = false;
    }
}
