//! The actor of one thread.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use ractor::{Actor, ActorProcessingErr, ActorRef};

use crate::stop::StopFlag;

/// What a supervisor does when a child ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The process cannot go on: stop everything and exit with an error.
    Fatal,
    /// Start it again, at most this many times in a process's life.
    Restart {
        /// Upper bound.
        times: u32,
    },
}

/// A child: its name, its policy, and the function its thread runs.
#[derive(Clone)]
pub struct ThreadSpec {
    /// Name of the thread and of the actor in logs.
    pub name: &'static str,
    /// What happens when it ends without being asked to.
    pub policy: Policy,
    /// Returns when the flag is raised.
    pub run: Arc<dyn Fn(StopFlag) -> Result<(), String> + Send + Sync>,
}

impl ThreadSpec {
    /// A child.
    pub fn new(
        name: &'static str,
        policy: Policy,
        run: impl Fn(StopFlag) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { name, policy, run: Arc::new(run) }
    }
}

pub(crate) struct Worker;

pub(crate) struct WorkerState {
    thread: Option<JoinHandle<()>>,
}

/// The thread has ended.
pub(crate) struct Ended(Result<(), String>);

impl Actor for Worker {
    type Msg = Ended;
    type State = WorkerState;
    type Arguments = (ThreadSpec, StopFlag);

    async fn pre_start(
        &self,
        myself: ActorRef<Ended>,
        (spec, stop): Self::Arguments,
    ) -> Result<WorkerState, ActorProcessingErr> {
        let thread = std::thread::Builder::new().name(spec.name.into()).spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| (spec.run)(stop)));
            let outcome = outcome.unwrap_or_else(|panic| Err(describe(panic.as_ref())));
            // The actor may be stopping already; it then joins this thread.
            let _ = myself.cast(Ended(outcome));
        })?;
        Ok(WorkerState { thread: Some(thread) })
    }

    async fn handle(
        &self,
        myself: ActorRef<Ended>,
        Ended(outcome): Ended,
        _: &mut WorkerState,
    ) -> Result<(), ActorProcessingErr> {
        match outcome {
            Ok(()) => {
                myself.stop(None);
                Ok(())
            }
            Err(reason) => Err(reason.into()),
        }
    }

    async fn post_stop(
        &self,
        _: ActorRef<Ended>,
        state: &mut WorkerState,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(thread) = state.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
        Ok(())
    }
}

fn describe(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_else(|| "no message".into()))
}
