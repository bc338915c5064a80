//! What every thread of the loader shares: immutable after start.

use std::sync::Arc;

use matkv_config::Config;
use matkv_model::LanguageModel;
use matkv_retrieve::{Chunker, Embedder, VectorIndex};
use matkv_ring::Geometry;
use matkv_store::Store;
use matkv_types::{ChunkId, ContentId, Encoding, Fingerprint};

use crate::arena::Arena;

/// The tenant scope of this node until requests are authenticated.
pub(crate) const SCOPE: &str = "default";

/// Model, store, retrieval and arena.
pub(crate) struct Core {
    pub config: Config,
    pub model: Arc<LanguageModel>,
    pub store: Store,
    pub index: Box<dyn VectorIndex>,
    pub embedder: Embedder,
    pub chunker: Chunker,
    /// Ids that precede the documents in every prompt.
    pub prefix: Vec<u32>,
    pub fingerprint: Fingerprint,
    pub encoding: Encoding,
    pub arena: Arc<Arena>,
    pub geometry: Geometry,
}

impl Core {
    pub fn chunk_id(&self, tokens: &[u32]) -> ChunkId {
        ChunkId::new(self.fingerprint, SCOPE, ContentId::of_tokens(tokens))
    }
}
