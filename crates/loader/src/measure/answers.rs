//! Prompts computed and answered in this process, over rows lent by the caller.

use matkv_model::{ForwardRow, LanguageModel, Segment, Source, Step, greedy};
use matkv_types::{KvDtype, KvLayout};

use crate::arena::ChunkSlot;
use crate::plan::{Plan, PlannedSource};

/// Rows of one forward pass.
const ROWS_PER_PASS: usize = 256;

/// Rows in the arena's form, with the layout attention reads them by.
pub(super) struct Rows {
    pub bytes: Vec<u8>,
    pub layout: KvLayout,
}

/// Where planned rows lie.
pub(super) fn source<'a>(
    prefix: &'a ChunkSlot,
    chunks: &'a [Rows],
    source: PlannedSource,
) -> Source<'a> {
    match source {
        PlannedSource::Prefix => Source::Slot(prefix.section(), prefix.layout()),
        PlannedSource::Chunk(i) => Source::Slot(&chunks[i].bytes, chunks[i].layout),
        PlannedSource::Own => Source::Own,
    }
}

/// A prompt whose rows are there. Answers are tried one after the other.
pub(super) struct Prefilled<'a> {
    model: &'a LanguageModel,
    segments: Vec<Segment<'a>>,
    pub own: Vec<u8>,
    pub layout: KvLayout,
    position: usize,
    logits: Vec<f32>,
}

impl<'a> Prefilled<'a> {
    pub fn new(
        model: &'a LanguageModel,
        plan: &Plan,
        prefix: &'a ChunkSlot,
        chunks: &'a [Rows],
    ) -> Self {
        let segments = |computed: usize| -> Vec<Segment<'a>> {
            let planned = plan.segments_after(computed);
            let segments = planned.iter().map(|s| Segment {
                source: source(prefix, chunks, s.source),
                first_row: s.first_row,
                rows: s.rows,
                position: s.position,
                shift: s.shift,
            });
            segments.collect()
        };
        let layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, plan.own_rows);
        let mut own = vec![0u8; layout.total_bytes()];
        let (mut logits, total) = (Vec::new(), plan.rows.len());
        for first in (0..total).step_by(ROWS_PER_PASS) {
            let end = (first + ROWS_PER_PASS).min(total);
            let step = Step {
                rows: &plan.rows[first..end],
                segments: &segments(end),
                own: &mut own,
                own_layout: layout,
                logits: end == total,
            };
            logits = model.forward(&mut [step]).pop().unwrap_or_default();
        }
        Self { model, segments: segments(total), own, layout, position: plan.position, logits }
    }

    /// Decodes at most `most` tokens, `next` choosing each from its logits until it has enough;
    /// returns the tokens and their logits.
    pub fn answer(
        &mut self,
        most: usize,
        mut next: impl FnMut(usize, &[f32]) -> Option<u32>,
    ) -> (Vec<u32>, Vec<Vec<f32>>) {
        let (mut tokens, mut all) = (Vec::new(), Vec::new());
        let (mut segments, mut logits) = (self.segments.clone(), self.logits.clone());
        let last = segments.len() - 1;
        while tokens.len() < most
            && let Some(token) = next(tokens.len(), &logits)
        {
            let position = self.position + tokens.len();
            all.push(logits);
            tokens.push(token);
            if tokens.len() == most {
                break;
            }
            let row = segments[last].first_row + segments[last].rows;
            segments[last].rows += 1;
            let step = Step {
                rows: &[ForwardRow { token, position, row }],
                segments: &segments,
                own: &mut self.own,
                own_layout: self.layout,
                logits: true,
            };
            logits = self.model.forward(&mut [step]).pop().unwrap_or_default();
        }
        (tokens, all)
    }

    /// The most probable tokens, end tokens taken for ordinary ones.
    pub fn greedy(&mut self, most: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
        self.answer(most, |_, logits| Some(greedy(logits)))
    }

    /// The most probable tokens up to the end of the answer; at least one.
    pub fn greedy_to_end(&mut self, most: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
        let ends = self.model.tokenizer.end_tokens();
        self.answer(most, |n, logits| {
            let token = greedy(logits);
            (n == 0 || !ends.contains(&token)).then_some(token)
        })
    }

    /// Given tokens; returns their logits.
    pub fn forced(&mut self, tokens: &[u32]) -> Vec<Vec<f32>> {
        self.answer(tokens.len(), |n, _| Some(tokens[n])).1
    }
}
