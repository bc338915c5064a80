//! One commit of an ingest: chunks, vectors and documents together, or nothing.

use std::collections::HashMap;
use std::sync::Arc;

use matkv_api::v1::DocumentDone;
use matkv_store::{NewChunk, Placement, StoreError};
use matkv_types::ChunkId;

use crate::core::Core;
use crate::ingest::OpenDocument;

/// A chunk whose file is on the device.
pub(crate) struct DurableChunk {
    pub id: ChunkId,
    pub tokens: Arc<[u32]>,
    pub placement: Placement,
    pub compute_ms: u32,
    pub vector: Option<Vec<f32>>,
}

/// Durable chunks the index does not know yet.
#[derive(Default)]
pub(crate) struct Batch {
    chunks: HashMap<ChunkId, DurableChunk>,
}

/// A document's outcome, and chunks that are gone with its old version.
type Done = (DocumentDone, Vec<ChunkId>);

impl Batch {
    pub fn add(&mut self, chunk: DurableChunk) {
        self.chunks.insert(chunk.id, chunk);
    }

    pub fn contains(&self, id: &ChunkId) -> bool {
        self.chunks.contains_key(id)
    }

    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Commits documents all of whose chunks are durable or failed.
    pub fn commit(
        &mut self,
        core: &Core,
        documents: Vec<OpenDocument>,
        failed: &HashMap<ChunkId, String>,
    ) -> Vec<Done> {
        let mut out = Vec::new();
        let mut good = Vec::new();
        for document in documents {
            let reason = document.record.chunks.iter().find_map(|id| failed.get(id));
            match reason {
                Some(reason) => out.push((done(&document, reason.clone(), false), Vec::new())),
                None => good.push(document),
            }
        }
        let (good, lost) = self.split_lost(core, good);
        let gone = "a chunk it shares was deleted meanwhile; ingest it again";
        out.extend(lost.iter().map(|d| (done(d, gone.into(), false), Vec::new())));
        if good.is_empty() {
            return out;
        }
        match self.try_commit(core, &good) {
            Ok((unchanged, mut removed)) => {
                for (document, unchanged) in good.iter().zip(unchanged) {
                    out.push((
                        done(document, String::new(), unchanged),
                        std::mem::take(&mut removed),
                    ));
                }
            }
            Err(e) => {
                tracing::error!("commit failed: {e}");
                out.extend(good.iter().map(|d| (done(d, e.clone(), false), Vec::new())));
            }
        }
        out
    }

    /// Documents that count on a chunk somebody has deleted since they were planned.
    fn split_lost(
        &self,
        core: &Core,
        documents: Vec<OpenDocument>,
    ) -> (Vec<OpenDocument>, Vec<OpenDocument>) {
        let Ok(read) = core.store.read() else { return (documents, Vec::new()) };
        let there = |id: &ChunkId| {
            self.chunks.contains_key(id) || read.chunk(id).is_ok_and(|c| c.is_some())
        };
        documents.into_iter().partition(|d| d.record.chunks.iter().all(there))
    }

    fn try_commit(
        &mut self,
        core: &Core,
        documents: &[OpenDocument],
    ) -> Result<(Vec<bool>, Vec<ChunkId>), String> {
        let text = |e: StoreError| e.to_string();
        let read = core.store.read().map_err(text)?;
        let mut unchanged = Vec::new();
        for document in documents {
            let old = read.document(&document.record.id).map_err(text)?;
            unchanged.push(old.is_some_and(|o| o.chunks == document.record.chunks));
        }
        drop(read);
        let changed = documents.iter().zip(&unchanged).filter(|(_, same)| !**same);
        let changed: Vec<&OpenDocument> = changed.map(|(d, _)| d).collect();
        let mut new = documents.iter().flat_map(|d| &d.record.chunks);
        if changed.is_empty() && !new.any(|id| self.chunks.contains_key(id)) {
            return Ok((unchanged, Vec::new()));
        }
        let mut txn = core.store.write().map_err(text)?;
        let mut vectors = Vec::new();
        let mut taken = Vec::new();
        for id in documents.iter().flat_map(|d| &d.record.chunks) {
            let Some(chunk) = self.chunks.get(id) else { continue };
            if taken.contains(id) {
                continue;
            }
            taken.push(*id);
            if let Some(mut known) = txn.chunk(id).map_err(text)? {
                // It had left every tier, and is back.
                known.flash = Some(chunk.placement);
                txn.save_chunk(id, &known).map_err(text)?;
                continue;
            }
            let number = match &chunk.vector {
                Some(vector) => {
                    let number = txn.next_vector().map_err(text)?;
                    vectors.push((number, vector.clone()));
                    Some(number)
                }
                None => None,
            };
            let tokens = chunk.tokens.to_vec();
            let (id, compute_ms, flash) = (*id, chunk.compute_ms, Some(chunk.placement));
            let new = NewChunk { id, tokens, flash, cold: None, vector: number, compute_ms };
            txn.put_chunk(&new).map_err(text)?;
        }
        let records: Vec<_> = changed.iter().map(|d| &d.record).collect();
        let gone = txn.put_documents(&records).map_err(text)?;
        core.index.update(&mut txn, &vectors, &gone).map_err(|e| e.to_string())?;
        let removed = txn.commit().map_err(text)?;
        taken.iter().for_each(|id| {
            self.chunks.remove(id);
        });
        Ok((unchanged, removed))
    }
}

fn done(document: &OpenDocument, error: String, unchanged: bool) -> DocumentDone {
    DocumentDone {
        document_id: document.record.id.clone(),
        chunks: document.record.chunks.len() as u32,
        chunks_computed: document.computed,
        tokens: document.record.tokens,
        error,
        unchanged,
    }
}
