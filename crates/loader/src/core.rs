//! What every thread of the loader shares: immutable after start.

use std::sync::Arc;

use matkv_config::Config;
use matkv_format::{ChunkFile, Superblock};
use matkv_model::{Detokenizer, LanguageModel, Team};
use matkv_retrieve::{Chunker, Embedder, VectorIndex};
use matkv_ring::Geometry;
use matkv_store::{Store, StoreError, Volume, page_aligned};
use matkv_sys::SlotMut;
use matkv_types::{ChunkId, Codec, ContentId};

use crate::arena::Arena;
use crate::chunk_spec::ChunkSpec;
use crate::rates::Rates;
use crate::request::Materialized;
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
    /// Threads that compute.
    pub team: Team,
    pub chunker: Chunker,
    /// Ids that precede the documents in every prompt.
    pub prefix: Vec<u32>,
    pub spec: ChunkSpec,
    pub arena: Arc<Arena>,
    pub geometry: Geometry,
    pub self_test: SelfTest,
    pub rates: Rates,
}

impl Core {
    /// The directory a chunk's file is in; the self-test's chunk has one of its own.
    pub fn files_of(&self, id: &ChunkId) -> &Volume {
        if *id == self.self_test.id { self.store.self_test_files() } else { self.store.files() }
    }

    /// The vector of a text, by all compute threads if they have nothing else to do.
    pub fn embed(&self, text: &str) -> matkv_retrieve::Result<Option<Vec<f32>>> {
        self.team.install(|| self.embedder.embed(text))
    }

    /// The text of token ids.
    pub fn text(&self, tokens: &[u32]) -> String {
        Detokenizer::text(&self.model.tokenizer, tokens)
    }

    /// A computed chunk's file as it is written to flash.
    pub fn on_flash(&self, chunk: &Materialized) -> Result<SlotMut, StoreError> {
        let file = chunk.file();
        let codec = self.spec.encoding.codec;
        if codec == Codec::None {
            return page_aligned(file);
        }
        let found = Superblock::decode(file)?;
        page_aligned(&ChunkFile::compress(file, &found, codec, self.spec.level)?)
    }

    pub fn chunk_id(&self, tokens: &[u32]) -> ChunkId {
        ChunkId::new(self.spec.fingerprint, SCOPE, ContentId::of_tokens(tokens))
    }
}
