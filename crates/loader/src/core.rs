//! What every thread of the loader shares: immutable after start.

use std::sync::Arc;

use matkv_config::Config;
use matkv_model::LanguageModel;
use matkv_retrieve::{Chunker, Embedder, VectorIndex};
use matkv_ring::Geometry;
use matkv_store::{ChunkFiles, Store};
use matkv_telemetry::names;
use matkv_types::{ChunkId, ContentId};

use crate::arena::Arena;
use crate::chunk_spec::ChunkSpec;
use crate::self_test::SelfTest;

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
    pub spec: ChunkSpec,
    pub arena: Arc<Arena>,
    pub geometry: Geometry,
    pub self_test: SelfTest,
}

impl Core {
    /// The directory a chunk's file is in; the self-test's chunk has one of its own.
    pub fn files_of(&self, id: &ChunkId) -> &ChunkFiles {
        if *id == self.self_test.id { self.store.self_test_files() } else { self.store.files() }
    }

    /// Keeps a file that cannot be used aside; a missing one is no error.
    pub fn quarantine(&self, id: &ChunkId) {
        match self.files_of(id).quarantine(id) {
            Ok(true) => metrics::counter!(names::QUARANTINED).increment(1),
            Ok(false) => {}
            Err(e) => tracing::warn!("chunk {id}: {e}"),
        }
    }

    pub fn chunk_id(&self, tokens: &[u32]) -> ChunkId {
        ChunkId::new(self.spec.fingerprint, SCOPE, ContentId::of_tokens(tokens))
    }
}
