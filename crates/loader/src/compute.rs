//! The `compute` thread: sub-prefills of requests first, chunks of an ingest in between.

use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, select_biased};
use matkv_actors::StopFlag;

use crate::arena::ChunkSlot;
use crate::compile::{Compilation, CompileJob, Compiled};
use crate::core::Core;
use crate::prefill;
use crate::request::Resident;
use crate::session::Sessions;

/// What a request needs computed.
pub(crate) enum Work {
    /// Its own rows and first token.
    Prefill(Box<Resident>),
    /// A chunk it waits for, whose file could not be used.
    Compile(Box<CompileJob>),
}

/// Requests waiting for the compute thread: one computing, two prepared, and every chunk that a
/// request may wait for.
pub(crate) const WORK_MAX: usize = 2;

/// The thread's state.
pub(crate) struct Compute {
    pub core: Arc<Core>,
    pub prefix: Arc<ChunkSlot>,
    pub sessions: Arc<Sessions>,
    pub work: Receiver<Work>,
    pub background: Receiver<CompileJob>,
    /// Has room for every chunk that can be under way, so that sending never blocks.
    pub compiled: Sender<Compiled>,
}

impl Compute {
    /// Runs until the flag is raised.
    pub fn run(&self, stop: &StopFlag, stopped: &Receiver<()>) {
        while !stop.is_raised() {
            select_biased! {
                recv(stopped) -> _ => {}
                recv(self.work) -> work => match work {
                    Ok(work) => self.handle(work, stop),
                    Err(_) => return,
                },
                recv(self.background) -> job => match job {
                    Ok(job) => self.compile(job, stop, true),
                    Err(_) => return,
                },
            }
        }
    }

    fn handle(&self, work: Work, stop: &StopFlag) {
        match work {
            Work::Prefill(resident) => {
                prefill::run(&self.core, &self.prefix, &self.sessions, *resident);
            }
            Work::Compile(job) => self.compile(*job, stop, false),
        }
    }

    /// Computes a chunk. In the background, requests go first between its steps.
    fn compile(&self, job: CompileJob, stop: &StopFlag, background: bool) {
        let mut compilation = Compilation::new(job);
        while !compilation.step(&self.core, &self.prefix) {
            if stop.is_raised() {
                return;
            }
            if background {
                self.work.try_iter().for_each(|work| self.handle(work, stop));
            }
        }
        let _ = self.compiled.send(compilation.finish(&self.core));
    }
}
