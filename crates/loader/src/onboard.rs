//! From a tier into a slot: read, verify, decode.
//!
//! A file in its arena form is read straight into the slot; another one into memory of its own,
//! from where each layer is decoded into the slot. Verifying and decoding is done by a few threads
//! while the device goes on with the next chunk. With a mirror, a bad copy is set aside and the
//! other one read; the request does not notice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, TrySendError, select_biased};
use matkv_format::{ChunkFile, Superblock};
use matkv_store::{Store, StoreError, Tier, Volume};
use matkv_sys::{ReadDone, ReadEngine, ReadRequest, Region, SlotMut};
use matkv_telemetry::names;
use matkv_types::{ChunkId, PAGE_BYTES};

use crate::chunk_spec::ChunkSpec;
use crate::compile::restore_in;
use crate::core::Core;
use crate::error::LoaderError;
use crate::flash::Unusable;
use crate::keeper::KeeperMessage;
use crate::rates::{Kind, Rates};
use crate::world::{Found, LoadJob, Loaded};

/// A load between its beginning and its end, without its slot.
struct Task {
    tag: u64,
    id: ChunkId,
    tokens: Arc<[u32]>,
    found: Found,
    started: Instant,
    /// Bytes of the file that is being read.
    len: usize,
    /// Which copy is being read.
    copy: usize,
    /// Copies that were bad.
    bad: Vec<usize>,
}

/// A load whose bytes are on their way. The slot is here if they do not go straight into it.
struct Pending {
    task: Task,
    slot: Option<SlotMut>,
}

/// Tag of a load that could not be started, its slot, and why.
type NotStarted = (u64, SlotMut, Unusable);

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

/// Loads under way, and the ways into and out of the worker threads.
pub(crate) struct Onboarding {
    shelf: Arc<dyn Shelf>,
    engine: Arc<dyn ReadEngine>,
    pending: Mutex<HashMap<u64, Pending>>,
    fetched: Sender<Fetched>,
    loaded: Sender<Loaded>,
    keeper: Sender<KeeperMessage>,
    /// Where layers are decoded.
    pool: rayon::ThreadPool,
}

/// What the worker threads hear.
#[derive(Clone)]
pub(crate) struct OnboardInlets {
    pub reads: Receiver<ReadDone>,
    pub fetched: Receiver<Fetched>,
}

impl Onboarding {
    pub fn new(
        shelf: Arc<dyn Shelf>,
        engine: Arc<dyn ReadEngine>,
        fetched: Sender<Fetched>,
        loaded: Sender<Loaded>,
        keeper: Sender<KeeperMessage>,
        threads: usize,
    ) -> Result<Self, LoaderError> {
        let pending = Mutex::default();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("decode-{i}"))
            .build()
            .map_err(|e| LoaderError::Setup(e.to_string()))?;
        Ok(Self { shelf, engine, pending, fetched, loaded, keeper, pool })
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a load.
    pub fn start(&self, job: LoadJob) -> Result<(), (SlotMut, Unusable)> {
        let LoadJob { tag, id, tokens, found, target } = job;
        let (started, len, copy, bad) = (Instant::now(), 0, 0, Vec::new());
        let task = Task { tag, id, tokens, found, started, len, copy, bad };
        let begun = match found.tier {
            Tier::Flash => self.read(task, target),
            Tier::Cold => self.fetch(task, target),
        };
        begun.map_err(|(_, slot, reason)| (slot, reason))
    }

    /// Reads the copy whose turn it is, or the next one that can be opened.
    fn read(&self, mut task: Task, slot: SlotMut) -> Result<(), NotStarted> {
        let files = self.shelf.files_of(&task.id);
        let opened = loop {
            let reason = match files.open_copy(&task.id, task.copy) {
                Ok(opened) if opened.len > 0 && opened.len.is_multiple_of(PAGE_BYTES) => {
                    break opened;
                }
                Ok(opened) => {
                    Unusable::Damaged(format!("file of {} bytes, not whole pages", opened.len))
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Unusable::Missing,
                Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                    Unusable::Damaged(e.to_string())
                }
                Err(e) => Unusable::Unreadable(e.to_string()),
            };
            if let Err(reason) = self.next_copy(&mut task, reason) {
                return Err((task.tag, slot, reason));
            }
        };
        let tag = task.tag;
        task.len = opened.len;
        let direct = task.found.encoding.is_arena_form() && opened.len <= slot.len();
        let (target, slot) = if direct {
            (slot, None)
        } else {
            match Region::anonymous(opened.len).exclusive(0..opened.len) {
                Ok(memory) => (memory, Some(slot)),
                Err(e) => return Err((task.tag, slot, Unusable::Unreadable(e.to_string()))),
            }
        };
        self.pending().insert(tag, Pending { task, slot });
        self.engine.submit(ReadRequest { tag, parts: opened.parts, target });
        Ok(())
    }

    fn fetch(&self, task: Task, slot: SlotMut) -> Result<(), NotStarted> {
        let (tag, id) = (task.tag, task.id);
        let Some(cold) = self.shelf.store().cold() else {
            return Err((tag, slot, Unusable::Missing));
        };
        self.pending().insert(tag, Pending { task, slot: Some(slot) });
        let fetched = self.fetched.clone();
        cold.get_then(&id, move |file| {
            let file = file.map_err(|e| match e {
                StoreError::ColdMissing => Unusable::Missing,
                other => Unusable::Unreadable(other.to_string()),
            });
            // Nobody listens while the process stops.
            let _ = fetched.send(Fetched { tag, file });
        });
        Ok(())
    }

    fn read_done(&self, done: ReadDone) {
        let Some(Pending { task, slot }) = self.pending().remove(&done.tag) else { return };
        let read = done.result.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Unusable::Damaged(e.to_string()),
            _ => Unusable::Unreadable(e.to_string()),
        });
        match slot {
            None => {
                let outcome = read.and_then(|()| self.verify(&task, &done.target)).and_then(|f| {
                    // Straight into the slot: only the arena form may be used as it is.
                    if f.encoding.is_arena_form() {
                        return Ok(f);
                    }
                    Err(Unusable::Unreadable(format!("it is {} by now", f.encoding)))
                });
                self.finish(task, done.target, outcome);
            }
            Some(mut slot) => {
                let outcome = read.and_then(|()| self.decode(&task, &done.target, &mut slot));
                self.finish(task, slot, outcome);
            }
        }
    }

    fn fetch_done(&self, fetched: Fetched) {
        let Some(Pending { mut task, slot }) = self.pending().remove(&fetched.tag) else { return };
        let Some(mut slot) = slot else { return };
        let outcome = fetched.file.and_then(|file| {
            task.len = file.len();
            self.decode(&task, &file, &mut slot)
        });
        self.finish(task, slot, outcome);
    }

    fn verify(&self, task: &Task, file: &[u8]) -> Result<Superblock, Unusable> {
        let expect = self.shelf.spec().expectation(task.id, &task.tokens);
        let found =
            ChunkFile::verify(file, &expect).map_err(|e| Unusable::Damaged(e.to_string()))?;
        if found.file_len() != task.len {
            let (found, len) = (task.len, found.file_len());
            return Err(Unusable::Damaged(format!("file of {found} bytes, expected {len}")));
        }
        // The index may be older than the file: another write has replaced it.
        if found.encoding.in_arena() == task.found.encoding.in_arena() {
            return Ok(found);
        }
        Err(Unusable::Unreadable(format!("it is {} by now", found.encoding)))
    }

    /// Verifies a file and writes its arena form into the slot.
    fn decode(&self, task: &Task, file: &[u8], slot: &mut [u8]) -> Result<Superblock, Unusable> {
        let found = self.verify(task, file)?;
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
        if let Err(TrySendError::Full(_)) = self.keeper.try_send(message) {
            // The scrub finds what is forgotten here.
            tracing::debug!("the keeper is busy; a note is dropped");
        }
    }

    fn finish(&self, mut task: Task, slot: SlotMut, outcome: Result<Superblock, Unusable>) {
        let reason = match outcome {
            Ok(found) => {
                let id = task.id;
                let heal = |copy| self.tell(KeeperMessage::Heal { id, copy });
                task.bad.iter().copied().for_each(heal);
                self.measured(&task, &found);
                return self.deliver(task.tag, slot, Ok(found));
            }
            Err(reason) => reason,
        };
        match self.next_copy(&mut task, reason) {
            Ok(()) => {
                if let Err((tag, slot, reason)) = self.read(task, slot) {
                    self.deliver(tag, slot, Err(reason));
                }
            }
            Err(reason) => self.deliver(task.tag, slot, Err(reason)),
        }
    }

    fn deliver(&self, tag: u64, target: SlotMut, result: Result<Superblock, Unusable>) {
        // Nobody listens while the process stops.
        let _ = self.loaded.send(Loaded { tag, target, result });
    }

    fn measured(&self, task: &Task, found: &Superblock) {
        let (bytes, spent) = (found.file_len() as u64, task.started.elapsed());
        let (id, tier, ms) = (task.id, task.found.tier, spent.as_secs_f32() * 1e3);
        let kind = if tier == Tier::Flash { Kind::Flash } else { Kind::Cold };
        self.shelf.rates().measured(kind, bytes, spent);
        self.tell(KeeperMessage::Loaded { id, tier, ms });
    }
}

/// A worker thread: runs until stopped, or until nobody reads any more.
pub(crate) fn run(onboarding: &Onboarding, inlets: &OnboardInlets, stopped: &Receiver<()>) {
    loop {
        select_biased! {
            recv(stopped) -> _ => return,
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
