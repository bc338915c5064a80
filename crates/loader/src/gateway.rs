//! The gateway: gRPC on a Unix socket, and on loopback TCP by option.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::Sender;
use matkv_api::v1::mat_kv_server::MatKv;
use matkv_api::v1::*;
use matkv_ring::Header;
use matkv_telemetry::trace;
use tokio::sync::{Mutex, Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use crate::error::RequestError;
use crate::generate;
use crate::groups::Groups;
use crate::ingest::{IncomingDocument, IngestSession};
use crate::request::RequestState;
use crate::retrieve::Incoming;
use crate::status::Observer;
use crate::wire;
use crate::world::LoadMessage;

/// Bytes of one document; what does not fit in memory a few times over is refused.
const DOCUMENT_BYTES_MAX: usize = 256 << 20;
/// An LMDB key has 511 bytes, and one key is a chunk id and a document id.
const DOCUMENT_ID_BYTES_MAX: usize = 511 - 32;
/// Longest trace.
const TRACE_SECONDS_MAX: f64 = 600.0;
/// How long the decoder's last spans may be under way.
const TRACE_TAIL: Duration = Duration::from_millis(500);
/// Events waiting for a slow client before its own stream waits.
const EVENTS_MAX: usize = 64;

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service.
pub(crate) struct Gateway {
    pub observer: Arc<Observer>,
    pub retrieve: Sender<Incoming>,
    pub ingest: Sender<IngestSession>,
    pub load: Sender<LoadMessage>,
    pub queue: Arc<Semaphore>,
    pub header: Arc<Header>,
    pub tracing: Tracing,
    /// With overlap off: requests go through in groups.
    pub groups: Option<Arc<Groups>>,
}

/// One more, until it is dropped.
struct Count(Arc<AtomicU64>);

impl Count {
    fn up(counter: &Arc<AtomicU64>) -> Self {
        counter.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(counter))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What an admitted request holds in the gateway.
struct Admission {
    _admitted: Count,
    _permit: OwnedSemaphorePermit,
}

fn internal(e: impl std::fmt::Display) -> Status {
    Status::internal(e.to_string())
}

impl Gateway {
    /// Lets a request in, if there is a place for one more, and where requests go in groups, when
    /// it is the next one's turn.
    async fn admit(&self, state: &RequestState) -> Result<(), Status> {
        let queue = Arc::clone(&self.queue);
        let permit = queue.try_acquire_owned().map_err(|_| {
            Status::from(RequestError::Exhausted(format!(
                "{} requests are running or waiting, which is pipeline.queue",
                self.observer.core.config.queue
            )))
        })?;
        let _admitted = Count::up(&self.observer.admitted);
        state.hold(Admission { _admitted, _permit: permit });
        if let Some(groups) = &self.groups {
            state.join(groups.join().await);
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl MatKv for Gateway {
    type GenerateStream = EventStream<GenerateEvent>;
    type IngestStream = EventStream<IngestEvent>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let core = Arc::clone(&self.observer.core);
        let deadline = wire::deadline(request.metadata());
        let ask = wire::ask(request.into_inner(), &core.config).map_err(Status::from)?;
        if let Some(unready) = self.observer.unready() {
            return Err(RequestError::Unavailable(unready.reason).into());
        }
        let state = RequestState::new();
        let limit = deadline.unwrap_or(core.config.deadline).min(core.config.deadline);
        let ends = state.received + limit;
        let admitted = tokio::time::timeout_at(ends.into(), self.admit(&state)).await;
        admitted.map_err(|_| Status::from(RequestError::Deadline(limit)))??;
        let sampling = ask.sampling.clone();
        let incoming = Incoming { ask, state: Arc::clone(&state) };
        // The channel has a place for every admitted request.
        if self.retrieve.try_send(incoming).is_err() {
            return Err(Status::unavailable("the loader is stopping"));
        }
        // One more, for the last word.
        let (sender, receiver) = mpsc::channel(EVENTS_MAX + 1);
        self.observer.watch(&state);
        let told = Count::up(&self.observer.streams);
        tokio::spawn(async move {
            generate::follow(core, state, sampling, sender, limit).await;
            drop(told);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn ingest(
        &self,
        request: Request<Streaming<IngestPart>>,
    ) -> Result<Response<Self::IngestStream>, Status> {
        if self.observer.draining.load(Ordering::SeqCst) {
            return Err(RequestError::Unavailable("the loader is stopping".into()).into());
        }
        // A document at the ingest thread and one waiting: clients are read no faster.
        let (documents, queue) = crossbeam::channel::bounded(1);
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let session = IngestSession { documents: queue, events: events.clone() };
        let ingest = self.ingest.clone();
        tokio::task::spawn_blocking(move || ingest.send(session))
            .await
            .map_err(internal)?
            .map_err(|_| Status::unavailable("the loader is stopping"))?;
        tokio::spawn(receive(request.into_inner(), documents));
        let stream = ReceiverStream::new(receiver).map(Ok);
        Ok(Response::new(Box::pin(stream)))
    }

    async fn delete_document(
        &self,
        request: Request<DeleteDocumentRequest>,
    ) -> Result<Response<DeleteDocumentResponse>, Status> {
        let id = request.into_inner().document_id;
        let core = Arc::clone(&self.observer.core);
        let deleted = tokio::task::spawn_blocking(move || -> Result<_, String> {
            let text = |e: matkv_store::StoreError| e.to_string();
            let mut txn = core.store.write().map_err(text)?;
            let Some(vectors) = txn.delete_document(&id).map_err(text)? else { return Ok(None) };
            core.index.update(&mut txn, &[], &vectors).map_err(|e| e.to_string())?;
            txn.commit().map(Some).map_err(text)
        });
        let removed = deleted.await.map_err(internal)?.map_err(internal)?;
        let found = removed.is_some();
        let removed = removed.unwrap_or_default();
        let chunks_removed = removed.len() as u32;
        let load = self.load.clone();
        let told = tokio::task::spawn_blocking(move || load.send(LoadMessage::Forget(removed)));
        told.await.map_err(internal)?.map_err(|_| Status::unavailable("stopping"))?;
        Ok(Response::new(DeleteDocumentResponse { found, chunks_removed }))
    }

    async fn list_documents(
        &self,
        _: Request<ListDocumentsRequest>,
    ) -> Result<Response<ListDocumentsResponse>, Status> {
        let core = Arc::clone(&self.observer.core);
        let list =
            tokio::task::spawn_blocking(move || core.store.read().and_then(|r| r.documents()));
        let documents = list.await.map_err(internal)?.map_err(internal)?;
        let documents = documents.into_iter().map(|d| Document {
            document_id: d.id,
            bytes: d.bytes,
            tokens: d.tokens,
            chunk_ids: d.chunks.iter().map(ToString::to_string).collect(),
            ingested_at: d.ingested_at,
        });
        Ok(Response::new(ListDocumentsResponse { documents: documents.collect() }))
    }

    async fn trace(
        &self,
        request: Request<TraceRequest>,
    ) -> Result<Response<TraceResponse>, Status> {
        let seconds = request.into_inner().seconds;
        if seconds == 0.0 {
            self.tracing.ended.notify_waiters();
            return Ok(Response::new(TraceResponse::default()));
        }
        if !(seconds > 0.0 && seconds <= TRACE_SECONDS_MAX) {
            return Err(Status::invalid_argument(format!(
                "seconds is {seconds}, not in 0…{TRACE_SECONDS_MAX}"
            )));
        }
        let Ok(_one) = self.tracing.one.try_lock() else {
            return Err(RequestError::Exhausted("another trace is being recorded".into()).into());
        };
        let sessions = &self.observer.sessions;
        drop((trace::take(), sessions.take_spans()));
        let recording = Recording::start(&self.header);
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs_f64(seconds)) => {}
            () = self.tracing.ended.notified() => {}
        }
        drop(recording);
        // The decoder sees the end, and sends the rest, within a look of its watch.
        tokio::time::sleep(TRACE_TAIL).await;
        let (own, decoder) = (std::process::id(), sessions.status().decoder);
        let ours = trace::take().into_iter().map(|s| wire::span("loader", own, s));
        let theirs = sessions.take_spans().into_iter();
        let theirs = theirs.map(|s| wire::span("decoder", decoder, s));
        Ok(Response::new(TraceResponse { spans: ours.chain(theirs).collect() }))
    }

    async fn get_status(
        &self,
        _: Request<GetStatusRequest>,
    ) -> Result<Response<GetStatusResponse>, Status> {
        let observer = Arc::clone(&self.observer);
        let status = tokio::task::spawn_blocking(move || observer.status());
        Ok(Response::new(status.await.map_err(internal)?.map_err(internal)?))
    }
}

/// One trace at a time, and how it is ended early.
#[derive(Default)]
pub(crate) struct Tracing {
    one: Mutex<()>,
    ended: Notify,
}

/// Both processes record while this lives; a client that goes away ends it.
struct Recording(Arc<Header>);

impl Recording {
    fn start(header: &Arc<Header>) -> Self {
        header.set_trace(true);
        trace::set(true);
        Self(Arc::clone(header))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        trace::set(false);
        self.0.set_trace(false);
    }
}

/// Puts documents together from parts.
async fn receive(
    mut parts: Streaming<IngestPart>,
    documents: crossbeam::channel::Sender<IncomingDocument>,
) {
    let mut id = String::new();
    let mut bytes: Vec<u8> = Vec::new();
    let mut too_long = false;
    while let Some(Ok(part)) = parts.next().await {
        if !part.document_id.is_empty() && id.is_empty() {
            id = part.document_id;
        }
        if bytes.len() + part.text.len() > DOCUMENT_BYTES_MAX {
            too_long = true;
        } else {
            bytes.extend_from_slice(&part.text);
        }
        if !part.last {
            continue;
        }
        let text = document_text(&id, std::mem::take(&mut bytes), std::mem::take(&mut too_long));
        let document = IncomingDocument { id: std::mem::take(&mut id), text };
        let documents = documents.clone();
        let sent = tokio::task::spawn_blocking(move || documents.send(document)).await;
        if !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

fn document_text(id: &str, bytes: Vec<u8>, too_long: bool) -> Result<String, String> {
    if id.is_empty() {
        return Err("the document has no id".into());
    }
    if id.len() > DOCUMENT_ID_BYTES_MAX {
        let found = id.len();
        return Err(format!(
            "its id has {found} bytes, at most {DOCUMENT_ID_BYTES_MAX} are possible"
        ));
    }
    if too_long {
        return Err(format!("it is longer than {DOCUMENT_BYTES_MAX} bytes; split it"));
    }
    String::from_utf8(bytes)
        .map_err(|e| format!("not UTF-8: byte {} is invalid", e.utf8_error().valid_up_to()))
}
