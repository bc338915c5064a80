//! Sub-prefill: the rows of a request that are not stored, its first token, and its hand-over to
//! the decoder. Full prefill is the same with nothing stored.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use matkv_model::{Detokenizer, Sampler, Segment, Source, Step, StopFilter};
use matkv_ring::{SegmentRecord, SequenceControl, SequenceRecord, SlotRecord, control_words};
use matkv_sys::{CrashPoint, crash_point};
use matkv_types::{FinishReason, Mode, PAGE_BYTES, align_up};

use crate::arena::ChunkSlot;
use crate::core::Core;
use crate::error::RequestError;
use crate::load::own_layout;
use crate::plan::{PlannedSegment, PlannedSource};
use crate::request::{Lease, Planned, Resident, Started, ms_since, next_sequence};
use crate::session::{Running, Sessions};

/// Rows of one forward call; bounds the memory of activations.
const ROWS_PER_STEP: usize = 512;

/// Runs a request up to its first token and publishes it.
pub(crate) fn run(core: &Core, prefix: &Arc<ChunkSlot>, sessions: &Sessions, resident: Resident) {
    let state = Arc::clone(&resident.planned.state);
    // What the request held has come back before its client is told.
    match prefill(core, prefix, sessions, resident) {
        Ok(None) => {}
        Ok(Some(reason)) => state.end(Ok(reason)),
        Err(e) => state.end(Err(e)),
    }
}

fn internal(e: impl std::fmt::Display) -> RequestError {
    RequestError::Internal(e.to_string())
}

/// The record B will read, with slots as they are now.
fn record(planned: &Planned, prefix: &ChunkSlot, leases: &[Lease]) -> SequenceRecord {
    let slot = |chunk: &ChunkSlot| SlotRecord {
        start: chunk.range().start,
        end: chunk.range().end,
        kv_offset: chunk.kv_offset(),
        rows: chunk.layout().rows,
        dtype: chunk.layout().dtype,
    };
    let mut slots = Vec::new();
    if planned.mode != Mode::Vanilla {
        slots.push(slot(prefix));
        slots.extend(leases.iter().map(|l| slot(l.chunk())));
    }
    let segment = |s: &PlannedSegment| SegmentRecord {
        slot: match s.source {
            PlannedSource::Prefix => Some(0),
            PlannedSource::Chunk(i) => Some(i + 1),
            PlannedSource::Own => None,
        },
        first_row: s.first_row,
        rows: s.rows,
        position: s.position,
        shift: s.shift,
    };
    SequenceRecord {
        slots,
        segments: planned.plan.segments.iter().map(segment).collect(),
        own_rows: planned.plan.own_rows,
        position: planned.plan.position,
        sampling: planned.sampling.clone(),
    }
}

/// Words of the record of a planned request, whatever its slots will be.
fn record_len(planned: &Planned) -> usize {
    let slots = if planned.mode == Mode::Vanilla { 0 } else { planned.chunks.len() + 1 };
    let stops = &planned.sampling.stop;
    let stop_words: usize = stops.iter().map(|s| 1 + s.len().div_ceil(8)).sum();
    4 + 5 * slots + 5 * planned.plan.segments.len() + 5 + stop_words
}

/// Where the KV section of a sequence's own slot begins.
fn own_kv_offset(planned: &Planned) -> usize {
    let tokens = planned.sampling.max_new_tokens as usize + 1;
    align_up(control_words(record_len(planned), tokens) * 8, PAGE_BYTES)
}

/// Bytes of a sequence's own slot: control part, record, token log, KV section.
pub(crate) fn own_slot_bytes(core: &Core, planned: &Planned) -> usize {
    own_kv_offset(planned) + own_layout(core, planned.plan.own_rows).total_bytes()
}

/// Computes and publishes; says how the request has ended if it goes no further.
fn prefill(
    core: &Core,
    prefix: &Arc<ChunkSlot>,
    sessions: &Sessions,
    resident: Resident,
) -> Result<Option<FinishReason>, RequestError> {
    let Resident { planned, leases, own } = resident;
    let state = Arc::clone(&planned.state);
    let started = Instant::now();
    let range = own.extent().range();
    let kv = range.start + own_kv_offset(&planned)..range.end;
    let Some(logits) = compute(core, prefix, &planned, &leases, own.extent().region(), kv.clone())?
    else {
        return Ok(Some(FinishReason::Cancelled));
    };
    crash_point(CrashPoint::PrefillComputed);
    let first = Sampler::new(&planned.sampling).sample(&logits, 0);
    let is_end = core.model.tokenizer.end_tokens().contains(&first);
    let ended = if is_end || stops_at_once(core, &planned, first) {
        Some(FinishReason::Stop)
    } else if planned.sampling.max_new_tokens == 1 {
        Some(FinishReason::Length)
    } else {
        None
    };
    state.update(|p| {
        p.phases.prefill_ms = ms_since(started);
        p.phases.first_token_ms = ms_since(state.received);
        if !is_end {
            p.tokens.push(first);
        }
        p.started = Some(Started {
            chunks: planned.chunks.clone(),
            dropped: planned.dropped.clone(),
            mode: Some(planned.mode),
            prompt_tokens: planned.plan.prompt_tokens,
            cached_tokens: planned.plan.cached_tokens,
            recomputed_rows: planned.plan.recomputed_rows,
            logits: if planned.return_logits { logits } else { Vec::new() },
        });
    });
    if ended.is_some() {
        return Ok(ended);
    }
    let sequence = next_sequence();
    let words = record(&planned, prefix, &leases).encode();
    let log = planned.sampling.max_new_tokens as usize + 1;
    let control_len = control_words(words.len(), log);
    let control_range = range.start..range.start + control_len * 8;
    let control =
        SequenceControl::new(own.extent().region().words(control_range).map_err(internal)?);
    control.fill(sequence, &words, first);
    crash_point(CrashPoint::PublishFilled);
    state.attach(Some(control.clone()));
    let running = Running::new(state, control, own, leases);
    sessions.publish(sequence, running, control_len, kv.start).map(|()| None)
}

/// The first token already holds a stop string.
fn stops_at_once(core: &Core, planned: &Planned, first: u32) -> bool {
    let mut stops = StopFilter::new(&planned.sampling.stop);
    stops.push(&Detokenizer::default().push(&core.model.tokenizer, first));
    stops.stopped()
}

/// Computes the request's rows; logits of the last one, or nothing if it was cancelled.
fn compute(
    core: &Core,
    prefix: &ChunkSlot,
    planned: &Planned,
    leases: &[Lease],
    region: &Arc<matkv_sys::Region>,
    kv: Range<usize>,
) -> Result<Option<Vec<f32>>, RequestError> {
    let mut own = region.exclusive(kv).map_err(internal)?;
    let layout = own_layout(core, planned.plan.own_rows);
    let total = planned.plan.rows.len();
    let source = |s: &PlannedSegment| match s.source {
        PlannedSource::Prefix => Source::Slot(prefix.section(), prefix.layout()),
        PlannedSource::Chunk(i) => {
            Source::Slot(leases[i].chunk().section(), leases[i].chunk().layout())
        }
        PlannedSource::Own => Source::Own,
    };
    let mut logits = Vec::new();
    for first in (0..total).step_by(ROWS_PER_STEP) {
        if planned.state.is_cancelled() {
            return Ok(None);
        }
        let end = (first + ROWS_PER_STEP).min(total);
        let segments: Vec<Segment<'_>> = planned
            .plan
            .segments_after(end)
            .iter()
            .map(|s| Segment {
                source: source(s),
                first_row: s.first_row,
                rows: s.rows,
                position: s.position,
                shift: s.shift,
            })
            .collect();
        logits = core.model.forward(&mut [Step {
            rows: &planned.plan.rows[first..end],
            segments: &segments,
            own: &mut own,
            own_layout: layout,
            logits: end == total,
        }]);
    }
    logits.pop().map(Some).ok_or_else(|| internal("the prompt has no rows"))
}
