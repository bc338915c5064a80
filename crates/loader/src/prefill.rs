//! Sub-prefill: the rows of a request that are not stored, its first token, and its hand-over to
//! the decoder. Full prefill is the same with nothing stored.

use std::sync::Arc;
use std::time::Instant;

use matkv_model::{Detokenizer, Sampler, Segment, Source, Step, StopFilter};
use matkv_sys::{CrashPoint, SlotMut, crash_point};
use matkv_telemetry::trace;
use matkv_types::FinishReason;

use crate::arena::ChunkSlot;
use crate::core::Core;
use crate::error::RequestError;
use crate::hand_over::hand_over;
use crate::plan::{PlannedSegment, PlannedSource};
use crate::request::{Planned, RequestState, Resident, Started, ms_since};
use crate::session::Sessions;

/// Rows of one slice. Between slices other requests have theirs, so this bounds how long a long
/// prompt delays a short one: 256 rows take about half a second on two cores.
const ROWS_PER_SLICE: usize = 256;

/// A request being prefilled, a slice at a time.
pub struct Prefill {
    /// Dropped before the slot it is a part of can be allocated again.
    kv: SlotMut,
    resident: Resident,
    done: usize,
    started: Option<Instant>,
    logits: Vec<f32>,
}

/// How far a slice has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    More,
    /// All rows are there.
    Complete,
    /// Nobody waits for the answer any more.
    Abandoned,
}

fn internal(e: impl std::fmt::Display) -> RequestError {
    RequestError::Internal(e.to_string())
}

impl Prefill {
    pub fn new(resident: Resident) -> Result<Self, RequestError> {
        let kv = resident.own_rows().map_err(internal)?;
        Ok(Self { kv, resident, done: 0, started: None, logits: Vec::new() })
    }

    pub fn state(&self) -> &Arc<RequestState> {
        &self.resident.planned.state
    }

    /// Computes the next rows.
    pub fn slice(
        &mut self,
        core: &Core,
        prefix: &ChunkSlot,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Slice {
        self.started.get_or_insert_with(Instant::now);
        let Resident { planned, leases, .. } = &self.resident;
        let _span = trace::span("compute", "sub-prefill", planned.state.number);
        let source = |s: &PlannedSegment| match s.source {
            PlannedSource::Prefix => Source::Slot(prefix.section(), prefix.layout()),
            PlannedSource::Chunk(i) => {
                Source::Slot(leases[i].chunk().section(), leases[i].chunk().layout())
            }
            PlannedSource::Own => Source::Own,
        };
        let total = planned.plan.rows.len();
        let end = (self.done + ROWS_PER_SLICE).min(total);
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
        let step = Step {
            rows: &planned.plan.rows[self.done..end],
            segments: &segments,
            own: &mut self.kv,
            own_layout: core.spec.own_layout(planned.plan.own_rows),
            logits: end == total,
        };
        let state = Arc::clone(&planned.state);
        let mut wanted = || go_on() && !state.is_cancelled();
        let Some(mut logits) = core.model.forward_while(&mut [step], &mut wanted) else {
            return Slice::Abandoned;
        };
        self.done = end;
        if end < total {
            return Slice::More;
        }
        self.logits = logits.pop().unwrap_or_default();
        crash_point(CrashPoint::PrefillComputed);
        Slice::Complete
    }

    /// Draws the first token and publishes; says how the request has ended if it goes no further.
    /// What the request held has come back by then.
    pub fn finish(
        self,
        core: &Core,
        prefix: &ChunkSlot,
        sessions: &Sessions,
    ) -> Result<Option<FinishReason>, RequestError> {
        let Self { resident, kv, started, logits, .. } = self;
        // The rows are the decoder's from now on.
        drop(kv);
        let planned = &resident.planned;
        let state = Arc::clone(&planned.state);
        if logits.is_empty() {
            return Err(internal("the prompt has no rows"));
        }
        let first = Sampler::new(&planned.sampling).sample(&logits, 0);
        let is_end = core.model.tokenizer.end_tokens().contains(&first);
        let ended = if is_end || stops_at_once(core, planned, first) {
            Some(FinishReason::Stop)
        } else if planned.sampling.max_new_tokens == 1 {
            Some(FinishReason::Length)
        } else {
            None
        };
        state.update(|p| {
            p.phases.prefill_ms = started.map_or(0.0, ms_since);
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
        hand_over(prefix, sessions, resident, first).map(|()| None)
    }
}

/// The first token already holds a stop string.
fn stops_at_once(core: &Core, planned: &Planned, first: u32) -> bool {
    let mut stops = StopFilter::new(&planned.sampling.stop);
    stops.push(&Detokenizer::default().push(&core.model.tokenizer, first));
    stops.stopped()
}
