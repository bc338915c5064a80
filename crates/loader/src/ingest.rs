//! The `ingest` thread: documents to chunks to durable files to one commit.
//!
//! While the compute thread works on one chunk, this thread writes the one before to the device
//! and embeds it. A document is acknowledged only after the commit that names it; chunk files of
//! a killed ingest are found again by their ids and verified instead of computed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, select_biased};
use matkv_api::v1::{DocumentDone, IngestEvent, IngestSummary, Progress, ingest_event::Event};
use matkv_format::ChunkFile;
use matkv_store::{Announced, DocumentRecord, Placement, StoreError, unix_seconds};
use matkv_sys::{CrashPoint, crash_point};
use matkv_telemetry::names;
use matkv_types::{ChunkId, ContentId};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::core::Core;
use crate::ingest_commit::{Batch, DurableChunk};
use crate::request::Materialized;
use crate::world::{LoadMessage, Materialize};

/// A document as it arrived.
pub(crate) struct IncomingDocument {
    pub id: String,
    pub text: Result<String, String>,
}

/// One client's stream of documents.
pub(crate) struct IngestSession {
    pub documents: Receiver<IncomingDocument>,
    pub events: mpsc::Sender<IngestEvent>,
}

/// Chunks at the compute thread: one computing, one waiting, so that it never idles.
const LOOKAHEAD: usize = 2;
/// A commit costs a rebuild of the vector index's touched part and a sync: batch that many new
/// chunks, or this much time.
const COMMIT_CHUNKS: usize = 32;
const COMMIT_AFTER: Duration = Duration::from_secs(5);
/// How long a client may leave an event unread.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a client may send nothing while nothing is being worked on.
const SILENCE: Duration = Duration::from_secs(300);

/// A document whose chunks are not all durable yet.
pub(crate) struct OpenDocument {
    pub record: DocumentRecord,
    pub missing: HashSet<ChunkId>,
    pub computed: u32,
}

struct InFlight {
    id: ChunkId,
    tokens: Arc<[u32]>,
    reply: Receiver<Result<Materialized, String>>,
}

struct Session<'a> {
    core: &'a Core,
    stopped: &'a Receiver<()>,
    /// The client has gone, or does not read.
    gone: bool,
    load: &'a Sender<LoadMessage>,
    events: mpsc::Sender<IngestEvent>,
    todo: VecDeque<(ChunkId, Arc<[u32]>)>,
    in_flight: VecDeque<InFlight>,
    open: VecDeque<OpenDocument>,
    /// Durable, not yet committed.
    batch: Batch,
    /// Chunks that failed, and why.
    failed: HashMap<ChunkId, String>,
    /// Chunks whose files may be there before the index names them.
    announced: Announced<'a>,
    progress: Progress,
    summary: IngestSummary,
    last_commit: Instant,
}

/// Runs sessions one after another until stopped, or until the gateway is gone. If one panics its
/// client sees the stream end without a summary, and the thread is restarted.
pub(crate) fn run(
    core: &Core,
    sessions: &Receiver<IngestSession>,
    load: &Sender<LoadMessage>,
    stopped: &Receiver<()>,
) {
    loop {
        let session = select_biased! {
            recv(stopped) -> _ => return,
            recv(sessions) -> session => match session {
                Ok(session) => session,
                Err(_) => return,
            },
        };
        let IngestSession { documents, events } = session;
        let started = Instant::now();
        let mut s = Session {
            core,
            stopped,
            gone: false,
            load,
            events,
            todo: VecDeque::new(),
            in_flight: VecDeque::new(),
            open: VecDeque::new(),
            batch: Batch::default(),
            failed: HashMap::new(),
            announced: Announced::none(&core.store),
            progress: Progress::default(),
            summary: IngestSummary::default(),
            last_commit: Instant::now(),
        };
        s.work(&documents);
        s.summary.seconds = started.elapsed().as_secs_f64();
        let summary = s.summary;
        s.send(Event::Summary(summary));
    }
}

/// Whether a chunk waits for the compute thread or is there.
fn is_under_way(
    todo: &VecDeque<(ChunkId, Arc<[u32]>)>,
    in_flight: &VecDeque<InFlight>,
    id: &ChunkId,
) -> bool {
    todo.iter().any(|t| t.0 == *id) || in_flight.iter().any(|f| f.id == *id)
}

impl Session<'_> {
    /// Tells the client. One that does not read for [`PATIENCE`] counts as gone: its session must
    /// not keep others from ingesting.
    fn send(&mut self, event: Event) {
        let mut next = (!self.gone).then_some(IngestEvent { event: Some(event) });
        let end = Instant::now() + PATIENCE;
        while let Some(message) = next.take() {
            match self.events.try_send(message) {
                Ok(()) => {}
                Err(TrySendError::Full(back)) if Instant::now() < end => {
                    next = Some(back);
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(_) => self.gone = true,
            }
        }
    }

    /// The next document, or none when the client is done, gone, or silent for too long.
    fn next_document(&self, documents: &Receiver<IncomingDocument>) -> Option<IncomingDocument> {
        select_biased! {
            recv(self.stopped) -> _ => None,
            recv(documents) -> document => document.ok(),
            default(SILENCE) => None,
        }
    }

    fn work(&mut self, documents: &Receiver<IncomingDocument>) {
        let mut more = true;
        while more || !self.todo.is_empty() || !self.in_flight.is_empty() {
            // Take documents in only as fast as their chunks are worked off.
            while more && self.todo.len() < LOOKAHEAD {
                let idle = self.todo.is_empty() && self.in_flight.is_empty();
                let next = if idle {
                    self.commit_ready(true);
                    self.next_document(documents).ok_or(true)
                } else {
                    documents.try_recv().map_err(|e| e.is_disconnected())
                };
                match next {
                    Ok(document) => self.plan(document),
                    Err(gone) => {
                        more = !gone;
                        break;
                    }
                }
            }
            self.issue();
            self.finish_one();
            self.commit_ready(false);
            if self.gone || self.events.is_closed() || self.is_stopped() {
                break;
            }
        }
        self.drain();
        self.commit_ready(true);
    }

    /// The client is gone: chunks at the compute thread still become durable.
    fn drain(&mut self) {
        self.todo.clear();
        while !self.in_flight.is_empty() {
            self.finish_one();
        }
    }

    fn plan(&mut self, document: IncomingDocument) {
        let id = document.id.clone();
        if let Err(error) = self.try_plan(document) {
            self.summary.failed += 1;
            let done = DocumentDone { document_id: id, error, ..DocumentDone::default() };
            self.send(Event::Document(done));
        }
    }

    fn try_plan(&mut self, document: IncomingDocument) -> Result<(), String> {
        let text = document.text?;
        if text.trim().is_empty() {
            return Err("the document is empty".into());
        }
        let tokens = self.core.model.tokenizer.encode_inner(&text).map_err(|e| e.to_string())?;
        let windows = self.core.chunker.windows(tokens.len());
        let chunks: Vec<(ChunkId, Arc<[u32]>)> = windows
            .into_iter()
            .map(|w| (self.core.chunk_id(&tokens[w.clone()]), Arc::from(&tokens[w])))
            .collect();
        let record = DocumentRecord {
            id: document.id,
            content: ContentId::of_tokens(&tokens),
            bytes: text.len() as u64,
            tokens: tokens.len() as u64,
            chunks: chunks.iter().map(|c| c.0).collect(),
            ingested_at: unix_seconds(),
        };
        self.progress.chunks_known += chunks.len() as u64;
        self.progress.tokens_known += tokens.len() as u64;
        let mut missing = HashSet::new();
        // One that leaves now leaves as it would right after this document.
        let mut stored = HashSet::new();
        for (id, _) in &chunks {
            if self.is_stored(id)? {
                stored.insert(*id);
            }
        }
        let new = chunks.iter().map(|c| c.0);
        let new = new.filter(|id| !stored.contains(id) && !self.announced.contains(id));
        let new: Vec<ChunkId> = new.collect();
        self.announced.add(&new).map_err(|e| e.to_string())?;
        for (id, tokens) in chunks {
            if stored.contains(&id) || self.batch.contains(&id) {
                self.count_reused(&tokens);
            } else if is_under_way(&self.todo, &self.in_flight, &id) || missing.contains(&id) {
                missing.insert(id);
                self.count_reused(&tokens);
            } else if self.adopt(&id, &tokens)? {
                self.count_reused(&tokens);
            } else {
                missing.insert(id);
                self.todo.push_back((id, tokens));
            }
        }
        self.open.push_back(OpenDocument { record, missing, computed: 0 });
        self.report();
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        matches!(self.stopped.try_recv(), Err(TryRecvError::Disconnected))
    }

    /// Indexed, and in some tier.
    fn is_stored(&self, id: &ChunkId) -> Result<bool, String> {
        let known = self.core.store.read().and_then(|r| r.chunk(id)).map_err(|e| e.to_string())?;
        Ok(known.is_some_and(|c| {
            c.cold.is_some() || (c.flash.is_some() && self.core.store.files().exists(id))
        }))
    }

    fn count_reused(&mut self, tokens: &[u32]) {
        self.summary.chunks_reused += 1;
        self.progress.chunks_done += 1;
        self.progress.tokens_done += tokens.len() as u64;
    }

    /// A file that an interrupted ingest has left: used if every byte is right.
    fn adopt(&mut self, id: &ChunkId, tokens: &Arc<[u32]>) -> Result<bool, String> {
        let files = self.core.store.files();
        if !files.exists(id) {
            return Ok(false);
        }
        let verified = files.read_copy(id, 0).and_then(|bytes| {
            Ok(ChunkFile::verify(&bytes, &self.core.spec.expectation(*id, tokens))?)
        });
        match verified {
            Ok(found) => {
                let placement = Placement::of(&found, files.physical_bytes(id));
                self.durable(*id, Arc::clone(tokens), placement, 0)?;
                return Ok(true);
            }
            Err(reason) => {
                tracing::warn!("chunk {id}: {reason}; computing it anew");
                if reason.is_damage() {
                    metrics::counter!(names::QUARANTINED).increment(1);
                    let kept = self.core.store.quarantine(id, 0, &reason.to_string());
                    kept.map_err(|e| e.to_string())?;
                }
            }
        }
        Ok(false)
    }

    /// The chunk's file is on the device; what is left is its vector and the commit.
    fn durable(
        &mut self,
        id: ChunkId,
        tokens: Arc<[u32]>,
        placement: Placement,
        compute_ms: u32,
    ) -> Result<(), String> {
        let text = self.core.text(&tokens);
        let vector = self.core.embed(&text).map_err(|e| e.to_string())?;
        self.batch.add(DurableChunk { id, tokens, placement, compute_ms, vector });
        Ok(())
    }

    fn issue(&mut self) {
        while self.in_flight.len() < LOOKAHEAD {
            let Some((id, tokens)) = self.todo.pop_front() else { return };
            let (sender, reply) = bounded(1);
            let job = Materialize { id, tokens: Arc::clone(&tokens), reply: sender };
            if self.load.send(LoadMessage::Materialize(job)).is_err() {
                self.failed.insert(id, "the loader is stopping".into());
                return;
            }
            self.in_flight.push_back(InFlight { id, tokens, reply });
        }
    }

    /// Waits for the oldest chunk at the compute thread and makes it durable.
    fn finish_one(&mut self) {
        let Some(InFlight { id, tokens, reply }) = self.in_flight.pop_front() else { return };
        let computed = reply.recv().unwrap_or_else(|_| Err("the loader is stopping".into()));
        // The next chunk starts while this one goes to the device.
        self.issue();
        let count = tokens.len() as u64;
        let outcome = computed.and_then(|chunk| {
            let file = self.core.on_flash(&chunk).map_err(|e| e.to_string())?;
            let compute_ms = chunk.compute_ms;
            // Its memory is free while the file goes to the device.
            drop(chunk);
            let placement = self.place(&id, &file)?;
            crash_point(CrashPoint::IngestWritten);
            self.durable(id, Arc::clone(&tokens), placement, compute_ms)?;
            Ok(placement.physical)
        });
        match outcome {
            Ok(bytes) => {
                metrics::counter!(names::MATERIALIZED).increment(1);
                self.failed.remove(&id);
                self.summary.chunks_computed += 1;
                self.summary.tokens_computed += count;
                self.summary.bytes_written += bytes;
                self.progress.bytes_written += bytes;
            }
            Err(reason) => {
                tracing::error!("chunk {id}: {reason}");
                self.failed.insert(id, reason);
            }
        }
        self.progress.chunks_done += 1;
        self.progress.tokens_done += count;
        for document in &mut self.open {
            if document.missing.remove(&id) {
                document.computed += 1;
            }
        }
        self.report();
    }

    /// Writes a chunk's file. What has been committed may leave for it, what has not may not: so
    /// before a chunk is refused, what is ready is committed.
    fn place(&mut self, id: &ChunkId, file: &[u8]) -> Result<Placement, String> {
        let store = &self.core.store;
        let outcome = match store.write_file(id, file) {
            Err(StoreError::Full { .. } | StoreError::NoSpace { .. }) => {
                self.commit_ready(true);
                store.write_file(id, file)
            }
            outcome => outcome,
        };
        outcome.map_err(|e| e.to_string())
    }

    /// Progress is only news: where the client has not read the last, the next will do.
    fn report(&self) {
        let _ = self.events.try_send(IngestEvent { event: Some(Event::Progress(self.progress)) });
    }

    fn commit_ready(&mut self, now: bool) {
        let due = self.batch.len() >= COMMIT_CHUNKS || self.last_commit.elapsed() >= COMMIT_AFTER;
        if !(now || due) || self.open.iter().all(|d| !d.missing.is_empty()) {
            return;
        }
        let (ready, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.open).into_iter().partition(|d| d.missing.is_empty());
        self.open = rest.into();
        self.last_commit = Instant::now();
        let outcomes = self.batch.commit(self.core, ready, &self.failed);
        crash_point(CrashPoint::IngestCommitted);
        for (done, forget) in outcomes {
            if done.error.is_empty() {
                self.summary.documents += 1;
                self.summary.unchanged += u64::from(done.unchanged);
            } else {
                self.summary.failed += 1;
            }
            if !forget.is_empty() {
                let _ = self.load.send(LoadMessage::Forget(forget));
            }
            self.send(Event::Document(done));
        }
        // What the index names may leave again, while this client goes on sending.
        let Self { announced, open, batch, todo, in_flight, .. } = self;
        announced.retain(|id| {
            // Also the one that is being placed just now.
            let wanted = open.iter().any(|d| d.missing.contains(id));
            wanted || batch.contains(id) || is_under_way(todo, in_flight, id)
        });
    }
}
