//! Computing a chunk's KV: after the prefix, at position P, into a slot that becomes its file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_format::{ChunkFile, Expectation, FormatError, Superblock};
use matkv_kernels::team;
use matkv_model::{ForwardRow, LanguageModel, Segment, Source, Step};
use matkv_sys::{Region, SlotMut};
use matkv_types::{ChunkId, Digest, KvDtype, KvLayout};
use rayon::prelude::*;

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
    /// Its file, where the slot does not hold it.
    pub image: Option<SlotMut>,
    pub compute_ms: u32,
    pub outcome: Result<ChunkSlot, String>,
}

/// A chunk being computed, a few rows at a time.
pub struct Compilation {
    job: CompileJob,
    done: usize,
    /// bf16 rows, where the slot gets other ones: rows are computed from the exact rows before
    /// them, and encoded once all are there.
    rows: Option<SlotMut>,
    spent: Duration,
}

impl Compilation {
    pub fn new(job: CompileJob) -> Self {
        Self { job, done: 0, rows: None, spent: Duration::ZERO }
    }

    /// The outcome if computing panics.
    pub fn panicked(&self) -> Compiled {
        let outcome = Err("computing the chunk panicked".into());
        let CompileJob { id, for_request, .. } = self.job;
        Compiled { id, for_request, store: false, image: None, compute_ms: 0, outcome }
    }

    /// Computes the next rows; true when all are there, or when nobody wants them any more.
    pub fn step(
        &mut self,
        core: &Core,
        prefix: &ChunkSlot,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let started = Instant::now();
        let rows = self.job.tokens.len();
        let layout = KvLayout::new(core.spec.shape, KvDtype::Bf16, rows);
        if core.spec.encoding.dtype != KvDtype::Bf16 && self.rows.is_none() {
            let bytes = layout.total_bytes();
            match Region::anonymous(bytes).exclusive(0..bytes) {
                Ok(scratch) => self.rows = Some(scratch),
                Err(_) => return true,
            }
        }
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
            own: match &mut self.rows {
                Some(scratch) => scratch,
                None => {
                    let kv = ChunkFile::kv_range(core.spec.shape, KvDtype::Bf16, rows);
                    &mut self.job.filling.slot[kv]
                }
            },
            own_layout: layout,
            logits: false,
        };
        if core.model.forward_while(&mut [step], &mut |_| go_on()).is_none() {
            return true;
        }
        self.done = end;
        self.spent += started.elapsed();
        end == rows
    }

    /// Makes the slot what attention reads, through the same encoder as a stored chunk's.
    pub fn finish(mut self, core: &Core) -> Compiled {
        let encoded = self.encode(core);
        let CompileJob { id, mut filling, for_request, store, .. } = self.job;
        let compute_ms = u32::try_from(self.spent.as_millis()).unwrap_or(u32::MAX);
        let (outcome, image) = match encoded {
            Ok((found, Some(image))) => {
                let form = found.encoding.in_arena().dtype;
                let kv = ChunkFile::kv_range(found.shape, form, found.rows);
                let outcome = restore(&image, &found, &mut filling.slot[kv]);
                (outcome.map(|()| filling.freeze_chunk(id, &found)), Some(image))
            }
            Ok((found, None)) => (Ok(filling.freeze_chunk(id, &found)), None),
            Err(e) => (Err(e), None),
        };
        Compiled { id, for_request, store, image, compute_ms, outcome }
    }

    /// Writes the file: into the slot, or into memory of its own where the slot gets another form.
    fn encode(&mut self, core: &Core) -> Result<(Superblock, Option<SlotMut>), String> {
        let expect = core.spec.expectation(self.job.id, &self.job.tokens);
        let (dtype, slot) = (core.spec.encoding.dtype, &mut self.job.filling.slot);
        let text = |e: FormatError| e.to_string();
        let Some(rows) = &mut self.rows else {
            return ChunkFile::seal(slot, &expect).map(|found| (found, None)).map_err(text);
        };
        if dtype.in_arena() == dtype {
            let found = encode(rows, slot, &expect, dtype).map_err(text)?;
            return Ok((found, None));
        }
        let bytes = ChunkFile::len(core.spec.shape, dtype, self.job.tokens.len());
        let mut image = Region::anonymous(bytes).exclusive(0..bytes).map_err(|e| e.to_string())?;
        let found = encode(rows, &mut image, &expect, dtype).map_err(text)?;
        Ok((found, Some(image)))
    }
}

/// [`ChunkFile::encode`] with the layers shared out over the installed team.
pub(crate) fn encode(
    rows: &mut [u8],
    out: &mut [u8],
    expect: &Expectation<'_>,
    dtype: KvDtype,
) -> Result<Superblock, FormatError> {
    ChunkFile::encode_with(rows, out, expect, dtype, |kv, stride, encode_layer| {
        team::for_each_part(kv, stride, encode_layer);
    })
}

/// [`restore`] with the layers shared out over a pool: also one chunk uses all its threads.
pub(crate) fn restore_in(
    pool: &rayon::ThreadPool,
    file: &[u8],
    found: &Superblock,
    kv: &mut [u8],
) -> Result<(), String> {
    let form = found.encoding.in_arena().dtype;
    let stride = KvLayout::new(found.shape, form, found.rows).layer_stride();
    pool.install(|| {
        kv.par_chunks_exact_mut(stride).enumerate().try_for_each(|(i, layer)| {
            ChunkFile::restore_layer(file, found, i, layer).map_err(|e| e.to_string())
        })
    })
}

/// Writes all layers of a verified file in their arena form.
pub(crate) fn restore(file: &[u8], found: &Superblock, kv: &mut [u8]) -> Result<(), String> {
    let form = found.encoding.in_arena().dtype;
    let stride = KvLayout::new(found.shape, form, found.rows).layer_stride();
    for (i, layer) in kv.chunks_exact_mut(stride).enumerate() {
        ChunkFile::restore_layer(file, found, i, layer).map_err(|e| e.to_string())?;
    }
    Ok(())
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
