//! What makes a chunk file one of this node's: the same for whoever reads, computes or checks one.

use matkv_format::{ChunkFile, Expectation};
use matkv_types::{ChunkId, Encoding, Fingerprint, KvDtype, KvLayout, KvShape};

/// Identity and shape of this node's chunks.
#[derive(Clone, Debug)]
pub struct ChunkSpec {
    /// Model, tokenizer, prefix, arithmetic.
    pub fingerprint: Fingerprint,
    /// KV rows of the model.
    pub shape: KvShape,
    /// How new chunks are written to flash. A chunk found there may be written otherwise.
    pub encoding: Encoding,
    /// Level of the lossless stage.
    pub level: i32,
    /// Position of a chunk's first row: the prefix's length.
    pub base_position: usize,
}

impl ChunkSpec {
    /// The form in the arena of a chunk that is computed.
    pub fn form(&self) -> KvDtype {
        self.encoding.dtype.in_arena()
    }

    /// Bytes of the slot of a chunk of `rows` tokens in this form.
    pub fn slot_len(&self, rows: usize, form: KvDtype) -> usize {
        ChunkFile::len(self.shape, form, rows)
    }

    /// What the file of a chunk must say.
    pub fn expectation<'t>(&self, chunk_id: ChunkId, tokens: &'t [u32]) -> Expectation<'t> {
        Expectation {
            fingerprint: self.fingerprint,
            chunk_id,
            tokens,
            shape: self.shape,
            base_position: self.base_position,
        }
    }

    /// The layout of a sequence's own rows.
    pub fn own_layout(&self, rows: usize) -> KvLayout {
        KvLayout::new(self.shape, KvDtype::Bf16, rows)
    }
}
