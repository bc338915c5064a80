//! The `compute` thread: sub-prefills of requests, slice by slice in turn, and chunks of an ingest
//! in between.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, select_biased};
use matkv_actors::{Pulse, StopFlag};
use matkv_telemetry::trace;
use matkv_types::FinishReason;

use crate::arena::ChunkSlot;
use crate::compile::{Compilation, CompileJob, Compiled};
use crate::core::Core;
use crate::error::RequestError;
use crate::groups::Stage;
use crate::prefill::{Prefill, Slice, Watch};
use crate::request::Resident;
use crate::session::Sessions;
use crate::world::LoadMessage;

/// Requests prepared and waiting for the compute thread.
pub const WORK_MAX: usize = 2;
/// Requests computed in turn. A new one waits for at most a slice of each.
const ACTIVE_MAX: usize = 4;
/// Slices of requests for one of an ingest, when both have work: an ingest gets on however many
/// clients never pause.
const SHARE: u32 = 8;

/// The thread's state.
pub struct Compute {
    pub core: Arc<Core>,
    pub prefix: Arc<ChunkSlot>,
    pub sessions: Arc<Sessions>,
    /// Requests whose chunks are there.
    pub requests: Receiver<Box<Resident>>,
    /// Requests whose group was not prefilled may go on now.
    pub regrouped: Receiver<()>,
    /// Chunks that requests wait for, whose files could not be used.
    pub chunks: Receiver<CompileJob>,
    pub background: Receiver<CompileJob>,
    /// Where a request goes back to if a chunk does not come.
    pub load: Sender<LoadMessage>,
    /// Has room for every chunk that can be under way, so that sending never blocks.
    pub compiled: Sender<Compiled>,
}

/// Something computed slice by slice.
enum Job {
    Prefill(Box<Prefill>),
    Compile(Box<Compilation>),
}

/// What is left of a job after a slice.
enum After {
    More(Job),
    /// A request whose rows are all there.
    Prefilled(Box<Prefill>),
    Nothing,
}

/// One run of the thread.
struct Run<'a> {
    compute: &'a Compute,
    stop: &'a StopFlag,
    pulse: &'a Pulse,
    /// In turn.
    active: VecDeque<Job>,
    /// Those whose group is not.
    prefilled: Vec<Prefill>,
    background: Option<Job>,
    /// Slices of requests since the last one of an ingest.
    since: u32,
}

impl Compute {
    /// Runs until the flag is raised.
    pub fn run(&self, stop: &StopFlag, stopped: &Receiver<()>, pulse: &Pulse) {
        let mut run = Run {
            compute: self,
            stop,
            pulse,
            active: VecDeque::new(),
            prefilled: Vec::new(),
            background: None,
            since: 0,
        };
        while !stop.is_raised() {
            if run.active.is_empty() && run.background.is_none() {
                pulse.rest();
                select_biased! {
                    recv(stopped) -> _ => break,
                    recv(self.chunks) -> job => match job {
                        Ok(job) => run.active.push_back(Job::compile(job)),
                        Err(_) => return,
                    },
                    recv(self.requests) -> resident => match resident {
                        Ok(resident) => run.begin(*resident),
                        Err(_) => return,
                    },
                    recv(self.regrouped) -> signal => if signal.is_err() {
                        return;
                    },
                    recv(self.background) -> job => match job {
                        Ok(job) => run.background = Some(Job::compile(job)),
                        Err(_) => return,
                    },
                }
            }
            run.take_in();
            run.turn();
        }
        // Nobody computes what is left.
        let left = run.active.drain(..).chain(run.background.take());
        let left = left.filter_map(|job| match job {
            Job::Prefill(prefill) => Some(*prefill),
            Job::Compile(_) => None,
        });
        for prefill in left.chain(run.prefilled.drain(..)) {
            let state = Arc::clone(prefill.state());
            drop(prefill);
            state.end(Err(RequestError::Unavailable("the loader is stopping".into())));
        }
    }
}

impl Job {
    /// Whether it waits for something that is being read.
    fn is_waiting(&mut self) -> bool {
        match self {
            Self::Prefill(prefill) => prefill.is_waiting(),
            Self::Compile(_) => false,
        }
    }

    fn compile(job: CompileJob) -> Self {
        Self::Compile(Box::new(Compilation::new(job)))
    }
}

impl Run<'_> {
    fn begin(&mut self, resident: Resident) {
        // The load thread may have another one for the place this has left.
        self.compute.core.arena.signal();
        let state = Arc::clone(&resident.planned.state);
        match Prefill::new(resident) {
            Ok(prefill) => self.active.push_back(Job::Prefill(Box::new(prefill))),
            Err(e) => state.end(Err(e)),
        }
    }

    fn take_in(&mut self) {
        self.pulse.step();
        self.active.extend(self.compute.chunks.try_iter().map(Job::compile));
        while self.active.len() < ACTIVE_MAX
            && let Ok(resident) = self.compute.requests.try_recv()
        {
            self.begin(*resident);
        }
        if self.background.is_none() {
            self.background = self.compute.background.try_recv().ok().map(Job::compile);
        }
    }

    /// One slice of whoever has its turn.
    fn turn(&mut self) {
        let for_ingest = self.active.is_empty() || self.since >= SHARE;
        if for_ingest && let Some(job) = self.background.take() {
            self.since = 0;
            if let After::More(job) = self.slice(job) {
                self.background = Some(job);
            }
        } else if let Some(job) = self.next_active() {
            self.since += 1;
            match self.slice(job) {
                After::More(job) => self.active.push_back(job),
                After::Prefilled(prefill) => {
                    prefill.state().through(Stage::Prefill);
                    self.prefilled.push(*prefill);
                }
                After::Nothing => {}
            }
        }
        self.finish();
    }

    /// Passes on what has been prefilled; without overlap when all of its group have been.
    fn finish(&mut self) {
        let ready = |p: &mut Prefill| p.state().may_go_on_after(Stage::Prefill);
        let ready: Vec<_> = self.prefilled.extract_if(.., ready).collect();
        ready.into_iter().for_each(|prefill| self.finish_one(prefill));
    }

    /// The next one in turn that waits for nothing; if all wait, the first.
    fn next_active(&mut self) -> Option<Job> {
        let ready = self.active.iter_mut().position(|job| !job.is_waiting());
        self.active.remove(ready.unwrap_or(0))
    }

    /// Whether there is something to compute beside a job that waits for a chunk.
    fn has_others(&self) -> bool {
        let Compute { requests, chunks, .. } = self.compute;
        // What waits already has been passed over for this one.
        !requests.is_empty() && self.active.len() < ACTIVE_MAX - 1 || !chunks.is_empty()
    }

    /// Computes a slice. A panic fails this job alone.
    fn slice(&self, job: Job) -> After {
        let core = &self.compute.core;
        let mut go_on = || {
            self.pulse.step();
            !self.stop.is_raised()
        };
        match job {
            Job::Compile(mut job) => {
                let _span = trace::span("compute", "materialize", 0);
                let prefix = &self.compute.prefix;
                let panicked = job.panicked();
                let stepped = AssertUnwindSafe(|| job.step(core, prefix, &mut go_on));
                let compiled = match catch_unwind(stepped) {
                    Ok(false) => return After::More(Job::Compile(job)),
                    Ok(true) if self.stop.is_raised() => return After::Nothing,
                    Ok(true) => {
                        catch_unwind(AssertUnwindSafe(|| job.finish(core))).unwrap_or(panicked)
                    }
                    Err(_) => panicked,
                };
                let _ = self.compute.compiled.send(compiled);
                After::Nothing
            }
            Job::Prefill(prefill) => {
                let others = || self.has_others();
                let watch = Watch { go_on: &mut go_on, others: &others };
                self.slice_of_request(*prefill, watch)
            }
        }
    }

    fn slice_of_request(&self, mut prefill: Prefill, watch: Watch<'_>) -> After {
        let Compute { core, prefix, load, .. } = self.compute;
        let state = Arc::clone(prefill.state());
        let sliced = catch_unwind(AssertUnwindSafe(|| prefill.slice(core, prefix, watch)));
        // What the request held has come back before its client is told.
        let outcome = match sliced {
            Ok(Slice::More | Slice::Later) => {
                return After::More(Job::Prefill(Box::new(prefill)));
            }
            Ok(Slice::Again) => {
                let resident = Box::new(prefill.into_resident());
                match load.send(LoadMessage::Again(resident)) {
                    Ok(()) => return After::Nothing,
                    Err(_) => Err(RequestError::Unavailable("the loader is stopping".into())),
                }
            }
            Ok(Slice::Complete) => return After::Prefilled(Box::new(prefill)),
            Ok(Slice::Abandoned) => {
                drop(prefill);
                if state.is_cancelled() {
                    Ok(FinishReason::Cancelled)
                } else {
                    Err(RequestError::Unavailable("the loader is stopping".into()))
                }
            }
            Err(_) => {
                drop(prefill);
                Err(panicked())
            }
        };
        state.end(outcome);
        After::Nothing
    }

    /// The first token, and what follows it.
    fn finish_one(&self, prefill: Prefill) {
        let Compute { core, prefix, sessions, .. } = self.compute;
        let state = Arc::clone(prefill.state());
        let finish = AssertUnwindSafe(|| prefill.finish(core, prefix, sessions));
        match catch_unwind(finish) {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(reason))) => state.end(Ok(reason)),
            Ok(Err(e)) => state.end(Err(e)),
            Err(_) => state.end(Err(panicked())),
        }
    }
}

fn panicked() -> RequestError {
    RequestError::Internal("computing the request panicked".into())
}
