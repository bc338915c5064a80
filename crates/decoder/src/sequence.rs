//! One sequence being decoded: its borrowed slots, its own section, its token log.

use std::sync::Arc;

use matkv_model::{Detokenizer, ForwardRow, Sampler, Segment, Source, Step, StopFilter};
use matkv_ring::{SequenceControl, SequenceRecord, SlotRecord, Submission, TokenLog};
use matkv_sys::{CrashPoint, Region, SlotMut, SlotRef, crash_point};
use matkv_types::{FinishReason, KvDtype, KvLayout, KvShape, emptied};

use crate::engine::Engine;
use crate::error::DecoderError;

/// Element type of a sequence's own rows.
const OWN_DTYPE: KvDtype = KvDtype::Bf16;

struct Borrowed {
    bytes: SlotRef,
    kv_offset: usize,
    layout: KvLayout,
}

/// A sequence in the batch.
pub(crate) struct Sequence {
    pub id: u64,
    pub control: SequenceControl,
    record: SequenceRecord,
    slots: Vec<Borrowed>,
    own: SlotMut,
    own_layout: KvLayout,
    log: TokenLog,
    sampler: Sampler,
    detokenizer: Detokenizer,
    stops: StopFilter,
    /// The row the next step computes.
    next: ForwardRow,
    /// Room for the segments of a step.
    memory: Vec<Segment<'static>>,
}

impl Sequence {
    /// Takes a submission over: copies the record, checks that everything it names lies in the
    /// arena, and borrows the slots.
    pub fn admit(
        region: &Arc<Region>,
        arena: &std::ops::Range<usize>,
        submission: &Submission,
        engine: &impl Engine,
    ) -> Result<Self, DecoderError> {
        let shape = engine.kv_shape();
        let control_end = submission.slot_start + submission.control_words * 8;
        let control = SequenceControl::new(region.words(submission.slot_start..control_end)?);
        let record = control.record(submission.sequence)?;
        let fail =
            |reason: String| DecoderError::Sequence { sequence: submission.sequence, reason };
        let own_layout = KvLayout::new(shape, OWN_DTYPE, record.own_rows);
        let own = region.exclusive(submission.kv_start..submission.slot_end)?;
        if own.len() < own_layout.total_bytes() {
            return Err(fail(format!("own section of {} bytes", own.len())));
        }
        let slots = record
            .slots
            .iter()
            .map(|s| borrow(region, arena, shape, s).map_err(&fail))
            .collect::<Result<_, _>>()?;
        let log = control.log();
        let (Some(first), Some(last)) = (log.get(0), record.segments.last()) else {
            return Err(fail("it has no first token".into()));
        };
        if first as usize >= engine.vocab() {
            return Err(fail(format!("token {first} is not in the vocabulary")));
        }
        let next =
            ForwardRow { token: first, position: record.position, row: last.first_row + last.rows };
        let room = record.own_rows.saturating_sub(next.row);
        if room < record.sampling.max_new_tokens.saturating_sub(1) as usize {
            return Err(fail(format!("room for {room} rows")));
        }
        let mut this = Self {
            id: submission.sequence,
            sampler: Sampler::new(&record.sampling),
            stops: StopFilter::new(&record.sampling.stop),
            detokenizer: Detokenizer::default(),
            control,
            record,
            slots,
            own,
            own_layout,
            log,
            next,
            memory: Vec::new(),
        };
        // The stop filter must have seen the first token's text.
        this.watch(engine, first);
        Ok(this)
    }

    /// Rows the next step attends to.
    pub fn rows(&self) -> usize {
        self.record.segments.iter().map(|s| s.rows).sum()
    }

    /// Steps taken since it joined: the first token is the loader's.
    pub fn steps(&self) -> usize {
        self.log.len().saturating_sub(1)
    }

    /// This sequence's part of the next step.
    pub fn step_parts(&mut self) -> StepParts<'_> {
        if let Some(last) = self.record.segments.last_mut() {
            last.rows = self.next.row + 1 - last.first_row;
        }
        let (slots, memory) = (&self.slots, &mut self.memory);
        let mut segments = std::mem::take(memory);
        segments.extend(self.record.segments.iter().map(|s| {
            let source = s.slot.map_or(Source::Own, |i| {
                let slot = &slots[i];
                Source::Slot(&slot.bytes[slot.kv_offset..], slot.layout)
            });
            Segment {
                source,
                first_row: s.first_row,
                rows: s.rows,
                position: s.position,
                shift: s.shift,
            }
        }));
        StepParts {
            segments,
            memory,
            row: [self.next],
            own: &mut self.own,
            own_layout: self.own_layout,
        }
    }

    /// Takes the step's logits; says why the sequence has ended, if it has.
    pub fn advance(&mut self, engine: &impl Engine, logits: &[f32]) -> Option<FinishReason> {
        let produced = self.log.len();
        let token = self.sampler.sample(logits, produced as u64);
        if engine.end_tokens().contains(&token) {
            return Some(FinishReason::Stop);
        }
        if !self.log.append(token) {
            return Some(FinishReason::Length);
        }
        crash_point(CrashPoint::DecodeAppended);
        self.watch(engine, token);
        if self.stops.stopped() {
            return Some(FinishReason::Stop);
        }
        if produced + 1 >= self.record.sampling.max_new_tokens as usize {
            return Some(FinishReason::Length);
        }
        self.next = ForwardRow { token, position: self.next.position + 1, row: self.next.row + 1 };
        None
    }

    fn watch(&mut self, engine: &impl Engine, token: u32) {
        if self.stops.is_empty() {
            return;
        }
        let text = engine.text(&mut self.detokenizer, token);
        self.stops.push(&text);
    }
}

/// What a [`Step`] borrows.
pub(crate) struct StepParts<'a> {
    segments: Vec<Segment<'a>>,
    memory: &'a mut Vec<Segment<'static>>,
    row: [ForwardRow; 1],
    own: &'a mut [u8],
    own_layout: KvLayout,
}

impl StepParts<'_> {
    pub fn step(&mut self) -> Step<'_> {
        Step {
            rows: &self.row,
            segments: &self.segments,
            own: self.own,
            own_layout: self.own_layout,
            logits: true,
        }
    }

    /// Gives the sequence its memory back.
    pub fn done(self) {
        *self.memory = emptied(self.segments);
    }
}

fn borrow(
    region: &Arc<Region>,
    arena: &std::ops::Range<usize>,
    shape: KvShape,
    slot: &SlotRecord,
) -> Result<Borrowed, String> {
    let layout = KvLayout::new(shape, slot.dtype, slot.rows);
    let inside = slot.start >= arena.start && slot.end <= arena.end && slot.start < slot.end;
    let fits = inside && slot.kv_offset + layout.total_bytes() <= slot.end - slot.start;
    if !fits {
        return Err(format!("slot {slot:?} does not lie in the arena {arena:?}"));
    }
    let bytes = region.shared(slot.start..slot.end).map_err(|e| e.to_string())?;
    Ok(Borrowed { bytes, kv_offset: slot.kv_offset, layout })
}
