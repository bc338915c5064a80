//! From a tier into a slot: read, verify, decode.
//!
//! A file in its arena form is read straight into the slot; another one into memory of its own,
//! from where each layer is decoded into the slot. Both arrive in pieces: verifying and decoding is
//! done by a few threads while the device goes on with the next piece. With a mirror, a bad copy is
//! set aside and the other one read; the request does not notice.

mod stream;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, TrySendError, select_biased};
use matkv_format::{ChunkFile, Superblock};
use matkv_store::{OpenCopy, Store, StoreError, Tier, Volume};
use matkv_sys::{ReadDone, ReadEngine, ReadRequest, Region, SlotMut, SlotRef};
use matkv_telemetry::names;
use matkv_types::{ChunkId, PAGE_BYTES};

use crate::chunk_spec::ChunkSpec;
use crate::compile::restore_in;
use crate::core::Core;
use crate::error::LoaderError;
use crate::flash::Unusable;
use crate::growing::Growing;
use crate::keeper::KeeperMessage;
use crate::onboard::stream::{Stream, usable};
use crate::rates::{Kind, Rates};
use crate::staging::Staging;
use crate::world::{Found, LoadJob, Loaded};

/// How many files that are begun one after the other are read side by side.
const FILES_SIDE_BY_SIDE: u64 = 4;

/// A load between its beginning and its end, without its slot.
struct Task {
    tag: u64,
    id: ChunkId,
    tokens: Arc<[u32]>,
    found: Found,
    started: Instant,
    /// Which copy is being read.
    copy: usize,
    /// Copies that were bad.
    bad: Vec<usize>,
    /// The slot, while nobody has it to write.
    region: Arc<Region>,
    range: Range<usize>,
    /// Where layers are published; none once it has failed.
    growing: Option<Arc<Growing>>,
}

/// A load whose bytes are on their way.
enum Pending {
    /// From flash, in pieces.
    Read(Reading),
    /// From the cold tier, whole; the slot waits.
    Fetch(Task, SlotMut),
}

/// A file that is being read.
struct Reading {
    /// Pieces nobody has looked at.
    inbox: Vec<ReadDone>,
    /// None while a worker is at it.
    body: Option<Box<(Task, Stream)>>,
}

/// A load that is over, or that was lost with the worker that had it.
struct Forget<'a> {
    onboarding: &'a Onboarding,
    tag: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        let pending = self.onboarding.pending().remove(&self.tag);
        drop(pending);
    }
}

/// Files that are decoded on their way, and loads that wait for memory for theirs.
#[derive(Default)]
struct Staged {
    memory: Staging,
    waiting: VecDeque<(Task, OpenCopy, SlotMut)>,
}

/// A cold file that has been fetched.
pub(crate) struct Fetched {
    tag: u64,
    file: Result<Vec<u8>, Unusable>,
}

/// What a load needs to know.
pub(crate) trait Shelf: Send + Sync {
    /// Documents' chunks.
    fn store(&self) -> &Store;
    /// The directories a chunk's file is in.
    fn files_of(&self, id: &ChunkId) -> &Volume;
    /// Whether the index has the chunk.
    fn is_indexed(&self, id: &ChunkId) -> bool;
    /// What its file must say.
    fn spec(&self) -> &ChunkSpec;
    /// Where to note how long things take.
    fn rates(&self) -> &Rates;
}

impl Shelf for Core {
    fn store(&self) -> &Store {
        &self.store
    }

    fn files_of(&self, id: &ChunkId) -> &Volume {
        Core::files_of(self, id)
    }

    fn is_indexed(&self, id: &ChunkId) -> bool {
        *id != self.self_test.id
    }

    fn spec(&self) -> &ChunkSpec {
        &self.spec
    }

    fn rates(&self) -> &Rates {
        &self.rates
    }
}

/// The ways into the worker threads, and out of them.
pub(crate) struct OnboardOutlets {
    /// Loads to begin.
    pub starts: Sender<LoadJob>,
    /// Cold files that have been fetched.
    pub fetched: Sender<Fetched>,
    /// Loads that have ended.
    pub loaded: Sender<Loaded>,
    /// News for the keeper.
    pub keeper: Sender<KeeperMessage>,
}

/// Loads under way.
pub(crate) struct Onboarding {
    shelf: Arc<dyn Shelf>,
    engine: Arc<dyn ReadEngine>,
    pending: Mutex<HashMap<u64, Pending>>,
    staged: Mutex<Staged>,
    to: OnboardOutlets,
    /// Where layers are decoded.
    pool: rayon::ThreadPool,
    /// Files whose reading has begun.
    begun: AtomicU64,
}

/// What the worker threads hear.
#[derive(Clone)]
pub(crate) struct OnboardInlets {
    pub starts: Receiver<LoadJob>,
    pub reads: Receiver<ReadDone>,
    pub fetched: Receiver<Fetched>,
}

impl Onboarding {
    pub fn new(
        shelf: Arc<dyn Shelf>,
        engine: Arc<dyn ReadEngine>,
        to: OnboardOutlets,
        threads: usize,
    ) -> Result<Self, LoaderError> {
        let (pending, staged) = (Mutex::default(), Mutex::default());
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("decode-{i}"))
            .build()
            .map_err(|e| LoaderError::Setup(e.to_string()))?;
        Ok(Self { shelf, engine, pending, staged, to, pool, begun: AtomicU64::new(0) })
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staged(&self) -> std::sync::MutexGuard<'_, Staged> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a load begun by a worker: opening a file may take as long as the device likes. Gives the
    /// slot back if nobody would.
    pub fn start(&self, job: LoadJob) -> Result<(), (SlotMut, Unusable)> {
        self.to.starts.try_send(job).map_err(|e| {
            let why = "the threads that read are behind".to_owned();
            (e.into_inner().target, Unusable::Paused(why))
        })
    }

    fn begin(&self, job: LoadJob) {
        let LoadJob { tag, id, tokens, found, target, growing } = job;
        let (started, copy, bad) = (Instant::now(), 0, Vec::new());
        let (region, range) = (Arc::clone(target.region()), target.range());
        let task = Task { tag, id, tokens, found, started, copy, bad, region, range, growing };
        match found.tier {
            Tier::Flash => self.read(task, target),
            Tier::Cold => self.fetch(task, target),
        }
    }

    /// Reads the copy whose turn it is, or the next one that can be opened.
    fn read(&self, mut task: Task, slot: SlotMut) {
        let files = self.shelf.files_of(&task.id);
        let opened = loop {
            let reason = match files.open_copy(&task.id, task.copy) {
                // Before memory is given to it: a file may have any length.
                Ok(opened) => match self.plausible(&task, &opened) {
                    Ok(()) => break opened,
                    Err(reason) => reason,
                },
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Unusable::Missing,
                Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                    Unusable::Damaged(e.to_string())
                }
                Err(e) => Unusable::Unreadable(e.to_string()),
            };
            if let Err(reason) = self.next_copy(&mut task, reason) {
                drop(slot);
                return self.give_up(&mut task, reason);
            }
        };
        if task.found.encoding.is_arena_form() && opened.len <= slot.len() {
            return self.submit(task, &opened, slot, None);
        }
        let mut staged = self.staged();
        match staged.memory.take(opened.len) {
            Some(memory) => {
                drop(staged);
                self.submit(task, &opened, memory, Some(slot));
            }
            None => staged.waiting.push_back((task, opened, slot)),
        }
    }

    fn submit(&self, task: Task, opened: &OpenCopy, memory: SlotMut, slot: Option<SlotMut>) {
        let tag = task.tag;
        let file = (opened.len, task.found.encoding);
        let (stream, pieces) = Stream::new(file, memory, slot, task.growing.clone());
        let reading = Reading { inbox: Vec::new(), body: Some(Box::new((task, stream))) };
        self.pending().insert(tag, Pending::Read(reading));
        // Files that are begun together come side by side, so that all their first layers are
        // there soon; a piece lets a few dozen files pass, and no more.
        let mut turn = self.begun.fetch_add(1, Ordering::Relaxed);
        for (range, target) in pieces {
            self.engine.submit(ReadRequest { tag, parts: opened.parts(range), target, turn });
            turn += FILES_SIDE_BY_SIDE;
        }
    }

    /// Memory has come back: whoever waits for it goes on.
    fn resume(&self) {
        loop {
            let mut staged = self.staged();
            let Some((_, opened, _)) = staged.waiting.front() else { return };
            let len = opened.len;
            let Some(memory) = staged.memory.take(len) else { return };
            let Some((task, opened, slot)) = staged.waiting.pop_front() else { return };
            drop(staged);
            self.submit(task, &opened, memory, Some(slot));
        }
    }

    /// Whether a copy has the length the index says or, if it has been written again since, the
    /// one it says itself.
    fn plausible(&self, task: &Task, opened: &OpenCopy) -> Result<(), Unusable> {
        if opened.len as u64 == task.found.bytes && opened.len.is_multiple_of(PAGE_BYTES) {
            return Ok(());
        }
        match opened.superblock() {
            Ok(found) if found.file_len() == opened.len && found.rows == task.tokens.len() => {
                Ok(())
            }
            Ok(found) => {
                let (len, expected) = (opened.len, found.file_len());
                Err(Unusable::Damaged(format!("file of {len} bytes, expected {expected}")))
            }
            Err(e) if e.is_damage() => Err(Unusable::Damaged(e.to_string())),
            Err(e) => Err(Unusable::Unreadable(e.to_string())),
        }
    }

    fn fetch(&self, task: Task, slot: SlotMut) {
        let (tag, id) = (task.tag, task.id);
        let Some(cold) = self.shelf.store().cold() else {
            drop(slot);
            return self.deliver(tag, Err(Unusable::Missing));
        };
        self.pending().insert(tag, Pending::Fetch(task, slot));
        let fetched = self.to.fetched.clone();
        cold.get_then(&id, move |file| {
            let file = file.map_err(|e| match e {
                StoreError::ColdMissing => Unusable::Missing,
                other => Unusable::Unreadable(other.to_string()),
            });
            // Nobody listens while the process stops.
            let _ = fetched.send(Fetched { tag, file });
        });
    }

    /// A piece has arrived. Whoever works on its file takes it in; if nobody does, this thread.
    fn read_done(&self, piece: ReadDone) {
        let tag = piece.tag;
        let mut body = {
            let mut pending = self.pending();
            let Some(Pending::Read(reading)) = pending.get_mut(&tag) else { return };
            reading.inbox.push(piece);
            let Some(body) = reading.body.take() else { return };
            body
        };
        let forget = Forget { onboarding: self, tag };
        loop {
            let news = match self.pending().get_mut(&tag) {
                Some(Pending::Read(reading)) => std::mem::take(&mut reading.inbox),
                _ => return,
            };
            let (task, stream) = &mut *body;
            news.into_iter().for_each(|piece| stream.receive(piece));
            stream.advance(&self.pool, &self.shelf.spec().expectation(task.id, &task.tokens));
            if stream.is_over() {
                break;
            }
            let mut pending = self.pending();
            let Some(Pending::Read(reading)) = pending.get_mut(&tag) else { return };
            if reading.inbox.is_empty() {
                reading.body = Some(body);
                // The file is still on its way.
                std::mem::forget(forget);
                return;
            }
        }
        drop(forget);
        let (task, stream) = *body;
        // Always there: nothing of it is with the device.
        let Some(ended) = stream.end() else { return };
        self.resume();
        if let (Ok((found, _)), Some(spent)) = (&ended.outcome, ended.decoding) {
            self.shelf.rates().measured(Kind::Decode, found.file_len() as u64, spent);
        }
        self.finish(task, ended.outcome);
    }

    fn fetch_done(&self, fetched: Fetched) {
        let Some(Pending::Fetch(task, mut slot)) = self.pending().remove(&fetched.tag) else {
            return;
        };
        let outcome = fetched.file.and_then(|file| self.decode(&task, &file, &mut slot));
        // Let go if it is not to be used.
        self.finish(task, outcome.map(|found| (found, slot.freeze())));
    }

    /// Verifies a file that is there whole, and writes its arena form into the slot.
    fn decode(&self, task: &Task, file: &[u8], slot: &mut [u8]) -> Result<Superblock, Unusable> {
        let expect = self.shelf.spec().expectation(task.id, &task.tokens);
        let found =
            ChunkFile::verify(file, &expect).map_err(|e| Unusable::Damaged(e.to_string()))?;
        usable(&found, file.len(), task.found.encoding)?;
        if found.encoding.is_arena_form() {
            let len = found.file_len();
            slot[..len].copy_from_slice(&file[..len]);
            return Ok(found);
        }
        let started = Instant::now();
        let form = found.encoding.in_arena().dtype;
        let kv = ChunkFile::kv_range(found.shape, form, found.rows);
        restore_in(&self.pool, file, &found, &mut slot[kv]).map_err(Unusable::Damaged)?;
        self.shelf.rates().measured(Kind::Decode, found.file_len() as u64, started.elapsed());
        Ok(found)
    }

    /// Sets a bad copy aside and turns to the next; gives the reason back if there is none.
    fn next_copy(&self, task: &mut Task, reason: Unusable) -> Result<(), Unusable> {
        if matches!(reason, Unusable::Damaged(_)) {
            self.set_aside(task, &reason);
        }
        let copies = self.shelf.files_of(&task.id).copies();
        if task.found.tier != Tier::Flash || task.copy + 1 >= copies {
            return Err(reason);
        }
        tracing::warn!("chunk {}: {reason}; reading the other copy", task.id);
        task.bad.push(task.copy);
        task.copy += 1;
        Ok(())
    }

    fn set_aside(&self, task: &Task, reason: &Unusable) {
        let (id, tier) = (task.id, task.found.tier);
        metrics::counter!(names::QUARANTINED).increment(1);
        let why = reason.to_string();
        // Before the chunk is computed, and written, again.
        let outcome = match tier {
            _ if !self.shelf.is_indexed(&id) => {
                self.shelf.files_of(&id).quarantine_copy(&id, task.copy).map(|_| ())
            }
            Tier::Flash => self.shelf.store().quarantine(&id, task.copy, &why).map(|_| ()),
            Tier::Cold => self.shelf.store().lost(&id, tier, &format!("damaged: {why}")),
        };
        if let Err(e) = outcome {
            tracing::warn!("chunk {id}: {e}");
        }
    }

    /// Tells the keeper, who is not waited for.
    pub fn tell(&self, message: KeeperMessage) {
        if let Err(TrySendError::Full(_)) = self.to.keeper.try_send(message) {
            // The scrub finds what is forgotten here.
            tracing::debug!("the keeper is busy; a note is dropped");
        }
    }

    fn finish(&self, mut task: Task, outcome: Result<(Superblock, SlotRef), Unusable>) {
        let reason = match outcome {
            Ok((found, slot)) => {
                let id = task.id;
                let heal = |copy| self.tell(KeeperMessage::Heal { id, copy });
                task.bad.iter().copied().for_each(heal);
                self.measured(&task, &found);
                return self.deliver(task.tag, Ok((found, slot)));
            }
            Err(reason) => reason,
        };
        withdraw(&mut task);
        match self.next_copy(&mut task, reason) {
            Ok(()) => match task.region.exclusive(task.range.clone()) {
                Ok(slot) => self.read(task, slot),
                Err(e) => self.give_up(&mut task, Unusable::Unreadable(e.to_string())),
            },
            Err(reason) => self.give_up(&mut task, reason),
        }
    }

    fn give_up(&self, task: &mut Task, reason: Unusable) {
        withdraw(task);
        self.deliver(task.tag, Err(reason));
    }

    fn deliver(&self, tag: u64, result: Result<(Superblock, SlotRef), Unusable>) {
        // Nobody listens while the process stops.
        let _ = self.to.loaded.send(Loaded { tag, result });
    }

    fn measured(&self, task: &Task, found: &Superblock) {
        let (id, tier, bytes) = (task.id, task.found.tier, found.file_len() as u64);
        let kind = if tier == Tier::Flash { Kind::Flash } else { Kind::Cold };
        let spent = self.shelf.rates().measured_in_turn(kind, bytes, task.started);
        let ms = spent.as_secs_f32() * 1e3;
        self.tell(KeeperMessage::Loaded { id, tier, ms });
    }
}

/// What has been published is not to be used: whoever reads it stops, and then the slot may be
/// written again.
fn withdraw(task: &mut Task) {
    if let Some(growing) = task.growing.take() {
        growing.fail();
        growing.drained();
    }
}

/// A worker thread: runs until stopped, or until nobody reads any more.
pub(crate) fn run(onboarding: &Onboarding, inlets: &OnboardInlets, stopped: &Receiver<()>) {
    loop {
        select_biased! {
            recv(stopped) -> _ => return,
            // The device has something to do while what it has read is verified.
            recv(inlets.starts) -> job => match job {
                Ok(job) => onboarding.begin(job),
                Err(_) => return,
            },
            recv(inlets.reads) -> done => match done {
                Ok(done) => onboarding.read_done(done),
                Err(_) => return,
            },
            recv(inlets.fetched) -> fetched => match fetched {
                Ok(fetched) => onboarding.fetch_done(fetched),
                Err(_) => return,
            },
        }
    }
}
