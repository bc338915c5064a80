//! Computing a chunk's KV: after the prefix, at position P, into a slot that becomes its file.

use std::sync::Arc;

use matkv_format::{ChunkFile, Expectation, Superblock};
use matkv_model::{ForwardRow, LanguageModel, Segment, Source, Step};
use matkv_types::{ChunkId, Digest, KvDtype, KvLayout};

use crate::arena::{Arena, ChunkSlot, FillingSlot};
use crate::core::Core;
use crate::error::LoaderError;

/// Rows of one forward call. Between calls the compute thread looks for requests, so this bounds
/// how long an ingest delays one: 256 rows take about half a second on two cores.
const ROWS_PER_STEP: usize = 256;

/// A chunk to compute.
pub(crate) struct CompileJob {
    pub id: ChunkId,
    pub tokens: Arc<[u32]>,
    pub filling: FillingSlot,
    /// Its file is gone: write it again.
    pub store: bool,
}

/// A computed chunk, or why it could not be.
pub(crate) struct Compiled {
    pub id: ChunkId,
    pub store: bool,
    pub outcome: Result<ChunkSlot, String>,
}

/// A chunk being computed, a few rows at a time.
pub(crate) struct Compilation {
    job: CompileJob,
    done: usize,
}

impl Compilation {
    pub fn new(job: CompileJob) -> Self {
        Self { job, done: 0 }
    }

    /// Computes the next rows; true when all are there.
    pub fn step(&mut self, core: &Core, prefix: &ChunkSlot) -> bool {
        let rows = self.job.tokens.len();
        let layout = KvLayout::new(core.model.kv_shape(), core.encoding.dtype, rows);
        let kv = ChunkFile::kv_range(core.model.kv_shape(), core.encoding, rows);
        let base = core.prefix.len();
        let end = (self.done + ROWS_PER_STEP).min(rows);
        let new: Vec<ForwardRow> = (self.done..end)
            .map(|i| ForwardRow { token: self.job.tokens[i], position: base + i, row: i })
            .collect();
        let before = Source::Slot(prefix.section(), prefix.layout());
        let segments = [
            Segment { source: before, first_row: 0, rows: base, position: 0, shift: 0 },
            Segment { source: Source::Own, first_row: 0, rows: end, position: base, shift: 0 },
        ];
        core.model.forward(&mut [Step {
            rows: &new,
            segments: if base == 0 { &segments[1..] } else { &segments },
            own: &mut self.job.filling.slot[kv],
            own_layout: layout,
            logits: false,
        }]);
        self.done = end;
        end == rows
    }

    /// Seals the slot into a chunk file.
    pub fn finish(self, core: &Core) -> Compiled {
        let CompileJob { id, tokens, mut filling, store } = self.job;
        let expect = Expectation {
            fingerprint: core.fingerprint,
            chunk_id: id,
            tokens: &tokens,
            shape: core.model.kv_shape(),
            base_position: core.prefix.len(),
        };
        let outcome = ChunkFile::seal(&mut filling.slot, &expect, core.encoding)
            .map(|found| {
                let kv = Superblock::kv_offset(found.rows)..found.file_len();
                filling.freeze(id, kv, found.layout(), found.file_len())
            })
            .map_err(|e| e.to_string());
        Compiled { id, store, outcome }
    }
}

/// Computes the prefix into a slot of its own; it stays for the process's life.
pub(crate) fn compile_prefix(
    model: &LanguageModel,
    prefix: &[u32],
    arena: &Arc<Arena>,
) -> Result<ChunkSlot, LoaderError> {
    let layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, prefix.len());
    let bytes = layout.total_bytes();
    let extent = arena.allocate(bytes).ok_or_else(|| {
        LoaderError::Setup(format!("the prefix needs {bytes} bytes; raise arena.size"))
    })?;
    let mut slot = extent.exclusive()?;
    for first in (0..prefix.len()).step_by(ROWS_PER_STEP) {
        let end = (first + ROWS_PER_STEP).min(prefix.len());
        let rows: Vec<ForwardRow> =
            (first..end).map(|i| ForwardRow { token: prefix[i], position: i, row: i }).collect();
        let own = Segment { source: Source::Own, first_row: 0, rows: end, position: 0, shift: 0 };
        model.forward(&mut [Step {
            rows: &rows,
            segments: &[own],
            own: &mut slot[..bytes],
            own_layout: layout,
            logits: false,
        }]);
    }
    // No chunk has this id: a SHA-256 of all zeros.
    let id = ChunkId(Digest([0; 32]));
    Ok(FillingSlot { slot, extent }.freeze(id, 0..bytes, layout, bytes))
}
