//! Sub-prefill: the rows of a request that are not stored, its first token, and its hand-over to
//! the decoder. Full prefill is the same with nothing stored.

use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_model::{Detokenizer, Sampler, Segment, Source, Step, StopFilter};
use matkv_sys::{CrashPoint, SlotMut, crash_point};
use matkv_telemetry::trace;
use matkv_types::{FinishReason, KvLayout, Mode};

use crate::arena::ChunkSlot;
use crate::core::Core;
use crate::earlier::Keeping;
use crate::error::RequestError;
use crate::focus;
use crate::growing::{GrowingReader, Wait};
use crate::hand_over::hand_over;
use crate::plan::PlannedSource;
use crate::request::{Leased, Planned, RequestState, Resident, Started, ms_since};
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
    /// Rows of an earlier prompt, which are not computed.
    earlier: usize,
    started: Option<Instant>,
    /// What it took, in milliseconds.
    took: f64,
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
    /// A chunk is still on its way, and others can use the time.
    Later,
    /// A chunk will not come.
    Again,
}

/// How often a wait for a chunk is interrupted to see whether it is still wanted, and whether
/// others could use the time.
const LOOK: Duration = Duration::from_millis(5);

/// What computing goes on for.
pub struct Watch<'a> {
    /// Whether to go on at all; counts progress.
    pub go_on: &'a mut dyn FnMut() -> bool,
    /// Whether others could use the time of a wait.
    pub others: &'a dyn Fn() -> bool,
}

impl Watch<'_> {
    fn goes_on(&mut self, state: &RequestState) -> bool {
        (self.go_on)() && !state.is_cancelled()
    }

    /// Waits for something of a chunk.
    fn wait(&mut self, state: &RequestState, wait: impl Fn(Duration) -> Wait) -> Result<(), Slice> {
        if wait(Duration::ZERO) == Wait::Ready {
            return Ok(());
        }
        let _span = trace::span("compute", "wait for a chunk", state.number);
        loop {
            match wait(LOOK) {
                Wait::Ready => return Ok(()),
                Wait::Failed => return Err(Slice::Again),
                Wait::NotYet if !self.goes_on(state) => return Err(Slice::Abandoned),
                Wait::NotYet if (self.others)() => return Err(Slice::Later),
                Wait::NotYet => {}
            }
        }
    }
}

/// Rows of a chunk, as far as they are there.
enum Rows<'a> {
    Here(&'a ChunkSlot),
    Coming(GrowingReader, KvLayout),
}

impl<'a> Rows<'a> {
    /// None if the chunk will not come.
    fn of(chunk: &'a Leased) -> Option<Self> {
        match chunk {
            Leased::Here(lease) => Some(Self::Here(lease.chunk())),
            Leased::Coming(coming) => {
                let growing = coming.growing();
                growing.reader().map(|reader| Self::Coming(reader, growing.layout()))
            }
        }
    }

    fn source(&self) -> Source<'_> {
        match self {
            Self::Here(chunk) => Source::Slot(chunk.section(), chunk.layout()),
            Self::Coming(reader, layout) => Source::Layers(reader, *layout),
        }
    }
}

fn internal(e: impl std::fmt::Display) -> RequestError {
    RequestError::Internal(e.to_string())
}

impl Prefill {
    pub fn new(resident: Resident) -> Result<Self, RequestError> {
        let kv = resident.own_rows().map_err(internal)?;
        let (started, logits) = (None, Vec::new());
        Ok(Self { kv, resident, done: 0, earlier: 0, started, took: 0.0, logits })
    }

    pub fn state(&self) -> &Arc<RequestState> {
        &self.resident.planned.state
    }

    /// Whether a chunk is still on its way.
    pub fn is_waiting(&mut self) -> bool {
        !self.resident.settle()
    }

    /// The request, to be given what has not come.
    pub fn into_resident(self) -> Resident {
        self.resident
    }

    /// Computes the next rows; complete when the chunks are there to stay, too.
    pub fn slice(&mut self, core: &Core, prefix: &ChunkSlot, mut watch: Watch<'_>) -> Slice {
        let started = *self.started.get_or_insert_with(Instant::now);
        self.resident.settle();
        if self.logits.is_empty() {
            match self.compute(core, prefix, &mut watch) {
                Slice::Complete => {}
                other => return other,
            }
        }
        let state = Arc::clone(self.state());
        for chunk in &self.resident.chunks {
            if let Leased::Coming(coming) = chunk
                && let Err(slice) = watch.wait(&state, |most| coming.growing().wait_for_chunk(most))
            {
                return slice;
            }
        }
        self.resident.settle();
        self.took = ms_since(started);
        Slice::Complete
    }

    /// What an earlier prompt has computed is taken from it before anything else.
    fn take_earlier(&mut self, core: &Core) {
        if self.resident.earlier.is_none() {
            return;
        }
        let _span = trace::span("compute", "earlier rows", self.state().number);
        let layout = core.spec.own_layout(self.resident.planned.plan.own_rows);
        self.earlier = self.resident.take_earlier(&mut self.kv, layout);
        self.done = self.earlier;
    }

    fn compute(&mut self, core: &Core, prefix: &ChunkSlot, watch: &mut Watch<'_>) -> Slice {
        self.take_earlier(core);
        let Resident { planned, chunks, .. } = &mut self.resident;
        let state = &Arc::clone(&planned.state);
        let readers: Option<Vec<_>> = chunks.iter().map(Rows::of).collect();
        let Some(readers) = readers else { return Slice::Again };
        let source = |s: PlannedSource| match s {
            PlannedSource::Prefix => Source::Slot(prefix.section(), prefix.layout()),
            PlannedSource::Chunk(i) => readers[i].source(),
            PlannedSource::Own => Source::Own,
        };
        let mut stopped = Slice::Abandoned;
        let mut wanted = |layer: usize| {
            let there = readers.iter().try_for_each(|rows| match rows {
                Rows::Coming(reader, _) => watch.wait(state, |most| reader.wait(layer, most)),
                Rows::Here(_) => Ok(()),
            });
            stopped = there.err().unwrap_or(Slice::Abandoned);
            there.is_ok() && watch.goes_on(state)
        };
        if planned.plan.choose > 0 {
            let chosen = choose(core, planned, source, &mut self.kv, &mut wanted);
            return chosen.map_or(stopped, |()| Slice::More);
        }
        let _span = trace::span("compute", "sub-prefill", state.number);
        let total = planned.plan.rows.len();
        let end = (self.done + ROWS_PER_SLICE).min(total);
        let segments: Vec<Segment<'_>> = planned
            .plan
            .segments_after(end)
            .iter()
            .map(|s| Segment {
                source: source(s.source),
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
        let Some(mut logits) = core.model.forward_while(&mut [step], &mut wanted) else {
            return stopped;
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
        let Self { mut resident, kv, earlier, took, logits, .. } = self;
        // The rows are the decoder's from now on.
        drop(kv);
        resident.planned.count_computed_chunks();
        resident.planned.plan.count_earlier(earlier);
        let (planned, load_ms) = (&resident.planned, resident.load_ms);
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
            p.phases.load_ms = load_ms;
            p.phases.prefill_ms = took;
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
                earlier_rows: earlier,
                logits: if planned.return_logits { logits } else { Vec::new() },
            });
        });
        let keeping = Keeping::of(planned, &core.spec);
        if ended.is_some() {
            sessions.keep(keeping, resident.own);
            return Ok(ended);
        }
        hand_over(prefix, sessions, resident, first, keeping).map(|()| None)
    }
}

/// Ranks the stored rows by the question, and plans anew with the chosen ones.
fn choose<'a>(
    core: &Core,
    planned: &mut Planned,
    source: impl Fn(PlannedSource) -> Source<'a>,
    own: &mut [u8],
    wanted: &mut dyn FnMut(usize) -> bool,
) -> Option<()> {
    let _span = trace::span("compute", "focus", planned.state.number);
    let Mode::Focused { link, .. } = planned.mode else { return None };
    let rest: Vec<u32> = planned.plan.rest().iter().map(|r| r.token).collect();
    let prompt = (&core.prefix[..], &planned.chunks[..], &rest[..]);
    let own = (own, core.spec.own_layout(planned.plan.own_rows));
    let weights = focus::weights(&core.model, prompt, source, own, wanted)?;
    planned.plan = focus::focused(&planned.plan, link, &core.prefix, &planned.chunks, &weights);
    Some(())
}

/// The first token already holds a stop string.
fn stops_at_once(core: &Core, planned: &Planned, first: u32) -> bool {
    let mut stops = StopFilter::new(&planned.sampling.stop);
    stops.push(&Detokenizer::default().push(&core.model.tokenizer, first));
    stops.stopped()
}
