//! What the index says about documents and chunks.

use matkv_types::{ChunkId, ContentId};
use serde::{Deserialize, Serialize};

/// A document as it was ingested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentRecord {
    /// The caller's name for it, unique in the store.
    pub id: String,
    /// Hash of its token ids: the same content needs no work.
    pub content: ContentId,
    /// Bytes of its text.
    pub bytes: u64,
    /// Tokens.
    pub tokens: u64,
    /// Its chunks, in order.
    pub chunks: Vec<ChunkId>,
    /// Seconds since 1970 when it was committed.
    pub ingested_at: u64,
}

/// A chunk with a file on flash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRecord {
    /// Rows, one per token.
    pub rows: u32,
    /// Bytes of its file.
    pub file_bytes: u64,
    /// Documents that use it, counted with multiplicity.
    pub references: u32,
    /// Number of its vector in the vector index; none for text without an embedding.
    pub vector: Option<u32>,
}
