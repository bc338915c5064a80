//! Computing a chunk's KV: after the prefix, at position P, into a slot that becomes its file.

use std::sync::Arc;

use matkv_format::ChunkFile;
use matkv_model::{ForwardRow, LanguageModel, Segment, Source, Step};
use matkv_types::{ChunkId, Digest, KvDtype, KvLayout};

use crate::arena::{Arena, ChunkSlot, FillingSlot};
use crate::core::Core;
use crate::error::LoaderError;

/// Rows of one forward call. Between calls the compute thread looks for requests, so this bounds
/// how long an ingest delays one: 256 rows take about half a second on two cores.
const ROWS_PER_STEP: usize = 256;

/// A chunk to compute.
pub struct CompileJob {
    pub id: ChunkId,
    pub tokens: Arc<[u32]>,
    pub filling: FillingSlot,
    /// A request waits for it; else an ingest does.
    pub for_request: bool,
    /// Its file is gone: write it again.
    pub store: bool,
}

/// A computed chunk, or why it could not be.
pub struct Compiled {
    pub id: ChunkId,
    pub for_request: bool,
    pub store: bool,
    pub outcome: Result<ChunkSlot, String>,
}

/// A chunk being computed, a few rows at a time.
pub struct Compilation {
    job: CompileJob,
    done: usize,
}

impl Compilation {
    pub fn new(job: CompileJob) -> Self {
        Self { job, done: 0 }
    }

    /// The outcome if computing panics.
    pub fn panicked(&self) -> Compiled {
        let outcome = Err("computing the chunk panicked".into());
        Compiled { id: self.job.id, for_request: self.job.for_request, store: false, outcome }
    }

    /// Computes the next rows; true when all are there, or when nobody wants them any more.
    pub fn step(
        &mut self,
        core: &Core,
        prefix: &ChunkSlot,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let rows = self.job.tokens.len();
        let layout = KvLayout::new(core.spec.shape, core.spec.encoding.dtype, rows);
        let kv = ChunkFile::kv_range(core.spec.shape, core.spec.encoding, rows);
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
        let step = Step {
            rows: &new,
            segments: if base == 0 { &segments[1..] } else { &segments },
            own: &mut self.job.filling.slot[kv],
            own_layout: layout,
            logits: false,
        };
        if core.model.forward_while(&mut [step], go_on).is_none() {
            return true;
        }
        self.done = end;
        end == rows
    }

    /// Seals the slot into a chunk file.
    pub fn finish(self, core: &Core) -> Compiled {
        let CompileJob { id, tokens, mut filling, for_request, store } = self.job;
        let expect = core.spec.expectation(id, &tokens);
        let outcome = ChunkFile::seal(&mut filling.slot, &expect, core.spec.encoding)
            .map(|found| filling.freeze_file(id, &found))
            .map_err(|e| e.to_string());
        Compiled { id, for_request, store, outcome }
    }
}

/// Computes the prefix into a slot of its own; it stays for the process's life.
pub fn compile_prefix(
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
