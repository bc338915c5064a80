//! A prefilled request becomes a sequence of the decoder: its record, its own slot, its first
//! token.

use matkv_ring::{SegmentRecord, SequenceControl, SequenceRecord, SlotRecord, control_words};
use matkv_sys::{CrashPoint, crash_point};
use matkv_types::{Mode, PAGE_BYTES, align_up};

use crate::arena::ChunkSlot;
use crate::chunk_spec::ChunkSpec;
use crate::earlier::Keeping;
use crate::error::RequestError;
use crate::plan::{PlannedSegment, PlannedSource};
use crate::request::{Lease, Leased, Planned, Resident};
use crate::session::{Running, Sessions};

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

/// Words of the token log.
fn log_words(planned: &Planned) -> usize {
    planned.sampling.max_new_tokens as usize + 1
}

/// Where the KV section of a sequence's own slot begins.
pub fn own_kv_offset(planned: &Planned) -> usize {
    // The prefix, and one slot for each chunk.
    let slots = if planned.mode == Mode::Vanilla { 0 } else { planned.chunks.len() + 1 };
    let record =
        SequenceRecord::encoded_len(slots, planned.plan.segments_max, &planned.sampling.stop);
    align_up(control_words(record, log_words(planned)) * 8, PAGE_BYTES)
}

/// Bytes of a sequence's own slot: control part, record, token log, KV section.
pub fn own_slot_bytes(spec: &ChunkSpec, planned: &Planned) -> usize {
    own_kv_offset(planned) + spec.own_layout(planned.plan.own_rows).total_bytes()
}

/// Publishes a request whose rows and first token are there; what is kept of it when it has ended
/// is said now.
pub fn hand_over(
    prefix: &ChunkSlot,
    sessions: &Sessions,
    resident: Resident,
    first: u32,
    keeping: Option<Keeping>,
) -> Result<(), RequestError> {
    let Resident { planned, chunks, own, .. } = resident;
    let wanted = chunks.len();
    let leases: Vec<Lease> = chunks.into_iter().filter_map(Leased::lease).collect();
    if leases.len() < wanted {
        return Err(RequestError::Internal("a chunk has not come".into()));
    }
    let (range, state) = (own.extent().range(), planned.state.clone());
    let words = record(&planned, prefix, &leases).encode();
    let control_len = control_words(words.len(), log_words(&planned));
    let control = own.extent().region().words(range.start..range.start + control_len * 8);
    let control = control.map_err(|e| RequestError::Internal(e.to_string()))?;
    let control = SequenceControl::new(control);
    control.fill(state.number, &words, first);
    crash_point(CrashPoint::PublishFilled);
    state.attach(Some(control.clone()));
    let kv_start = range.start + own_kv_offset(&planned);
    let running = Running::new(state, control, own, leases, keeping);
    sessions.publish(running, control_len, kv_start)
}
