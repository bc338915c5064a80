//! Chunks whose bytes follow from their ids, and what an undisturbed request answers.

use std::sync::Arc;

use matkv_format::ChunkFile;
use matkv_loader_core::machine::{ChunkSpec, Plan, Planned, PlannedSource, focused};
use matkv_model::{ForwardRow, Sampler, Segment, Source, Step};
use matkv_sys::SlotMut;
use matkv_types::{
    ChunkId, ContentId, Digest, Encoding, Fingerprint, KvLayout, Mode, Sampling, Share,
};

use crate::engine::{END, HashEngine, SHAPE};
use crate::random::{Random, mix};

/// Tokens before every prompt.
pub(crate) const PREFIX: [u32; 5] = [1, 2, 3, 4, 5];

pub(crate) fn spec() -> ChunkSpec {
    ChunkSpec {
        fingerprint: Fingerprint(Digest([7; 32])),
        shape: SHAPE,
        encoding: Encoding::EXACT,
        level: 1,
        base_position: PREFIX.len(),
    }
}

/// A chunk and its file as it should be.
pub(crate) struct Chunk {
    pub id: ChunkId,
    pub tokens: Arc<[u32]>,
    pub file: Vec<u8>,
}

/// The KV rows of a chunk, whoever computes them.
fn fill(bytes: &mut [u8], tokens: &[u32]) {
    let mut state = tokens.iter().fold(17, |h, &t| mix(h ^ u64::from(t)));
    for word in bytes.chunks_mut(8) {
        state = mix(state);
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

/// Computes a chunk into a slot.
pub(crate) fn compute(
    slot: &mut [u8],
    id: ChunkId,
    tokens: &[u32],
) -> Result<matkv_format::Superblock, String> {
    let spec = spec();
    let kv = ChunkFile::kv_range(spec.shape, spec.form(), tokens.len());
    fill(&mut slot[kv], tokens);
    ChunkFile::seal(slot, &spec.expectation(id, tokens)).map_err(|e| e.to_string())
}

impl Chunk {
    pub fn new(number: u64, random: &mut Random) -> Result<Self, String> {
        let rows = random.between(1, 48) as usize;
        let tokens: Arc<[u32]> =
            (0..rows).map(|i| (mix(number << 32 | i as u64) % 50) as u32 + 6).collect();
        let spec = spec();
        let id = ChunkId::new(spec.fingerprint, "simulation", ContentId::of_tokens(&tokens));
        let mut file = vec![0; spec.slot_len(rows, spec.form())];
        compute(&mut file, id, &tokens)?;
        Ok(Self { id, tokens, file })
    }

    fn section(&self) -> (&[u8], KvLayout) {
        let spec = spec();
        let kv = ChunkFile::kv_range(spec.shape, spec.form(), self.tokens.len());
        (&self.file[kv], KvLayout::new(spec.shape, spec.encoding.dtype, self.tokens.len()))
    }
}

/// The prefix's section and layout.
pub(crate) fn prefix() -> (Vec<u8>, KvLayout) {
    let layout = spec().own_layout(PREFIX.len());
    let mut bytes = vec![0; layout.total_bytes()];
    fill(&mut bytes, &PREFIX);
    (bytes, layout)
}

/// Where a planned segment's rows lie, given sections for prefix and chunks.
pub(crate) fn segments<'a>(
    plan: &Plan,
    prefix: (&'a [u8], KvLayout),
    chunk: impl Fn(usize) -> (&'a [u8], KvLayout),
) -> Vec<Segment<'a>> {
    let source = |source| match source {
        PlannedSource::Prefix => Source::Slot(prefix.0, prefix.1),
        PlannedSource::Chunk(i) => {
            let (bytes, layout) = chunk(i);
            Source::Slot(bytes, layout)
        }
        PlannedSource::Own => Source::Own,
    };
    let segment = |s: &matkv_loader_core::machine::PlannedSegment| Segment {
        source: source(s.source),
        first_row: s.first_row,
        rows: s.rows,
        position: s.position,
        shift: s.shift,
    };
    plan.segments.iter().map(segment).collect()
}

/// The first token of a request, and its own rows after the first `done`, in a slot of its own.
pub(crate) fn prefill(
    plan: &Plan,
    sampling: &Sampling,
    segments: &[Segment<'_>],
    own: &mut [u8],
    done: usize,
) -> u32 {
    let own_layout = spec().own_layout(plan.own_rows);
    let step = Step { rows: &plan.rows[done..], segments, own, own_layout, logits: true };
    Sampler::new(sampling).sample(&HashEngine.step(step), 0)
}

/// Any mode.
pub(crate) fn mode(random: &mut Random) -> Mode {
    let share = Share::new(random.below(101) as f64 / 100.0);
    match (random.below(5), share) {
        (0, _) => Mode::Vanilla,
        (1, _) => Mode::Exact,
        (2, Some(share)) => Mode::Focused { share, link: random.below(20) as u32 },
        (3, _) => Mode::Linked(0),
        _ => Mode::Linked(4),
    }
}

/// A plan with rows chosen as an engine of hashes would: by their tokens.
fn chosen(plan: &Plan, mode: Mode, chunks: &[impl AsRef<[u32]>]) -> Plan {
    let Mode::Focused { link, .. } = mode else { return plan.clone() };
    let weight = |&t: &u32| (mix(u64::from(t)) % 100) as f32;
    let weights: Vec<Vec<f32>> =
        chunks.iter().map(|c| c.as_ref().iter().map(weight).collect()).collect();
    focused(plan, link, &PREFIX, chunks, &weights)
}

/// What the compute thread does first with a focused request.
pub(crate) fn choose(planned: &mut Planned) {
    if planned.plan.choose > 0 {
        planned.plan = chosen(&planned.plan, planned.mode, &planned.chunks);
    }
}

/// A request.
#[derive(Clone)]
pub(crate) struct Question {
    pub chunks: Vec<usize>,
    pub mode: Mode,
    pub rest: Vec<u32>,
    pub sampling: Sampling,
}

impl Question {
    pub fn plan(&self, chunks: &[Chunk]) -> Plan {
        let tokens: Vec<Arc<[u32]>> =
            self.chunks.iter().map(|&i| Arc::clone(&chunks[i].tokens)).collect();
        let answer = self.sampling.max_new_tokens as usize;
        Plan::new(self.mode, &PREFIX, &tokens, &self.rest, answer)
    }

    /// What it answers when it is alone, nothing fails and nothing is shared.
    pub fn answer(&self, chunks: &[Chunk]) -> Vec<u32> {
        let tokens: Vec<_> = self.chunks.iter().map(|&i| Arc::clone(&chunks[i].tokens)).collect();
        let plan = chosen(&self.plan(chunks), self.mode, &tokens);
        let (bytes, layout) = prefix();
        let mut segments = segments(&plan, (&bytes, layout), |i| chunks[self.chunks[i]].section());
        let own_layout = spec().own_layout(plan.own_rows);
        let mut own = vec![0; own_layout.total_bytes()];
        let mut token = prefill(&plan, &self.sampling, &segments, &mut own, 0);
        let mut out = Vec::new();
        let last = segments.len() - 1;
        let mut row = segments[last].first_row + segments[last].rows;
        let mut position = plan.position;
        while token != END {
            out.push(token);
            if out.len() == self.sampling.max_new_tokens as usize {
                break;
            }
            segments[last].rows += 1;
            let rows = [ForwardRow { token, position, row }];
            let step =
                Step { rows: &rows, segments: &segments, own: &mut own, own_layout, logits: true };
            let logits = HashEngine.step(step);
            token = Sampler::new(&self.sampling).sample(&logits, out.len() as u64);
            (row, position) = (row + 1, position + 1);
        }
        out
    }
}

/// Copies the prefix into its slot.
pub(crate) fn write_prefix(slot: &mut SlotMut) {
    let (bytes, _) = prefix();
    slot[..bytes.len()].copy_from_slice(&bytes);
}
