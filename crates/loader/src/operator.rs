//! The `Admin` service of a running loader.

use std::io::{Read, Write};
use std::pin::Pin;
use std::sync::Arc;

use crossbeam::channel::Sender;
use matkv_api::v1::admin_server::Admin;
use matkv_api::v1::{
    BundlePart, Chunk, ChunkRequest, CollectGarbageRequest, CollectGarbageResponse,
    ExplainChunkResponse, ExportRequest, ImportResponse, ListChunksRequest, ListChunksResponse,
    MoveChunkRequest, PinChunkRequest, RemoveChunkRequest, RemoveChunkResponse,
    VerifyChunkResponse,
};
use matkv_store::Store;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use crate::core::Core;
use crate::world::LoadMessage;
use crate::{admin, bundle};

/// Bytes of a part of a bundle.
const PART_BYTES: usize = 1 << 20;
/// Parts on their way: what a slow client makes wait.
const PARTS_MAX: usize = 4;

/// The service.
pub(crate) struct Operator {
    pub core: Arc<Core>,
    pub load: Sender<LoadMessage>,
}

impl Operator {
    /// Runs something that waits for devices.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> admin::Result<T> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let core = Arc::clone(&self.core);
        let done = tokio::task::spawn_blocking(move || work(&core.store)).await;
        Ok(Response::new(done.map_err(|e| Status::internal(e.to_string()))??))
    }
}

type Parts = Pin<Box<dyn Stream<Item = Result<BundlePart, Status>> + Send>>;

#[tonic::async_trait]
impl Admin for Operator {
    type ExportStream = Parts;

    async fn list_chunks(
        &self,
        request: Request<ListChunksRequest>,
    ) -> Result<Response<ListChunksResponse>, Status> {
        let request = request.into_inner();
        self.run(move |store| admin::list(store, &request)).await
    }

    async fn get_chunk(&self, request: Request<ChunkRequest>) -> Result<Response<Chunk>, Status> {
        let id = request.into_inner().chunk_id;
        self.run(move |store| admin::stat(store, &id)).await
    }

    async fn verify_chunk(
        &self,
        request: Request<ChunkRequest>,
    ) -> Result<Response<VerifyChunkResponse>, Status> {
        let id = request.into_inner().chunk_id;
        self.run(move |store| admin::verify(store, &id)).await
    }

    async fn pin_chunk(
        &self,
        request: Request<PinChunkRequest>,
    ) -> Result<Response<Chunk>, Status> {
        let PinChunkRequest { chunk_id, seconds } = request.into_inner();
        self.run(move |store| admin::pin(store, &chunk_id, seconds)).await
    }

    async fn move_chunk(
        &self,
        request: Request<MoveChunkRequest>,
    ) -> Result<Response<Chunk>, Status> {
        let MoveChunkRequest { chunk_id, tier } = request.into_inner();
        self.run(move |store| admin::move_to(store, &chunk_id, &tier)).await
    }

    async fn remove_chunk(
        &self,
        request: Request<RemoveChunkRequest>,
    ) -> Result<Response<RemoveChunkResponse>, Status> {
        let RemoveChunkRequest { chunk_id, tier } = request.into_inner();
        let load = self.load.clone();
        self.run(move |store| {
            let (id, removed) = admin::remove(store, &chunk_id, &tier)?;
            // Gone means gone from the arena, too.
            let _ = load.send(LoadMessage::Forget(vec![id]));
            Ok(removed)
        })
        .await
    }

    async fn collect_garbage(
        &self,
        request: Request<CollectGarbageRequest>,
    ) -> Result<Response<CollectGarbageResponse>, Status> {
        let request = request.into_inner();
        self.run(move |store| admin::collect_garbage(store, request)).await
    }

    async fn explain_chunk(
        &self,
        request: Request<ChunkRequest>,
    ) -> Result<Response<ExplainChunkResponse>, Status> {
        let id = request.into_inner().chunk_id;
        self.run(move |store| admin::explain(store, &id)).await
    }

    async fn export(
        &self,
        request: Request<ExportRequest>,
    ) -> Result<Response<Self::ExportStream>, Status> {
        let names = request.into_inner().document_ids;
        let (sender, receiver) = mpsc::channel(PARTS_MAX);
        let core = Arc::clone(&self.core);
        tokio::task::spawn_blocking(move || {
            let mut parts = PartWriter { sender: sender.clone(), part: Vec::new() };
            if let Err(e) = bundle::export(&core.store, &names, &mut parts) {
                let _ = sender.blocking_send(Err(Status::failed_precondition(e)));
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn import(
        &self,
        request: Request<Streaming<BundlePart>>,
    ) -> Result<Response<ImportResponse>, Status> {
        let mut stream = request.into_inner();
        let (sender, receiver) = mpsc::channel(PARTS_MAX);
        tokio::spawn(async move {
            while let Some(Ok(part)) = stream.next().await {
                if sender.send(part.data).await.is_err() {
                    return;
                }
            }
        });
        let core = Arc::clone(&self.core);
        let done = tokio::task::spawn_blocking(move || {
            bundle::import(&core, PartReader { receiver, part: Vec::new(), at: 0 })
        });
        let done = done.await.map_err(|e| Status::internal(e.to_string()))?;
        let done = done.map_err(Status::failed_precondition)?;
        Ok(Response::new(ImportResponse {
            documents: done.documents,
            chunks: done.chunks,
            chunks_known: done.known,
            bytes: done.bytes,
        }))
    }
}

/// Cuts what is written into messages.
struct PartWriter {
    sender: mpsc::Sender<Result<BundlePart, Status>>,
    part: Vec<u8>,
}

impl PartWriter {
    fn send(&mut self) -> std::io::Result<()> {
        let data = std::mem::take(&mut self.part);
        let gone = |_| std::io::Error::other("the client has gone");
        self.sender.blocking_send(Ok(BundlePart { data })).map_err(gone)
    }
}

impl Write for PartWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let room = PART_BYTES - self.part.len();
        let n = room.min(bytes.len());
        self.part.extend_from_slice(&bytes[..n]);
        if self.part.len() == PART_BYTES {
            self.send()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        if self.part.is_empty() { Ok(()) } else { self.send() }
    }
}

/// Reads messages as one stream of bytes.
struct PartReader {
    receiver: mpsc::Receiver<Vec<u8>>,
    part: Vec<u8>,
    at: usize,
}

impl Read for PartReader {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        while self.at == self.part.len() {
            match self.receiver.blocking_recv() {
                Some(part) => (self.part, self.at) = (part, 0),
                None => return Ok(0),
            }
        }
        let n = bytes.len().min(self.part.len() - self.at);
        bytes[..n].copy_from_slice(&self.part[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}
