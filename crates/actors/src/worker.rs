//! The actor of one thread.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ractor::{Actor, ActorProcessingErr, ActorRef};

use crate::pulse::Pulse;
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

/// What a child's thread does.
pub type Run = dyn Fn(StopFlag, &Arc<Pulse>) -> Result<(), String> + Send + Sync;

/// A child: its name, its policy, and the function its thread runs.
#[derive(Clone)]
pub struct ThreadSpec {
    /// Name of the thread and of the actor in logs.
    pub name: &'static str,
    /// What happens when it ends without being asked to.
    pub policy: Policy,
    /// Returns when the flag is raised.
    pub run: Arc<Run>,
    /// How its thread gets on; a thread that says nothing is taken to be idle.
    pub pulse: Arc<Pulse>,
}

impl ThreadSpec {
    /// A child.
    pub fn new(
        name: &'static str,
        policy: Policy,
        run: impl Fn(StopFlag, &Arc<Pulse>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { name, policy, run: Arc::new(run), pulse: Arc::default() }
    }
}

pub(crate) struct Worker;

/// Threads of a tree. ractor kills the children of a supervisor that ends, without their
/// `post_stop`; so the handles are kept here and joined by whoever stops the tree.
pub(crate) type Threads = Arc<Mutex<Vec<JoinHandle<()>>>>;

/// The thread has ended.
pub(crate) struct Ended(Result<(), String>);

impl Actor for Worker {
    type Msg = Ended;
    type State = ();
    type Arguments = (ThreadSpec, StopFlag, Threads);

    async fn pre_start(
        &self,
        myself: ActorRef<Ended>,
        (spec, stop, threads): Self::Arguments,
    ) -> Result<(), ActorProcessingErr> {
        let thread = std::thread::Builder::new().name(spec.name.into()).spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| (spec.run)(stop, &spec.pulse)));
            // What has ended is its supervisor's business, no longer the watchdog's.
            spec.pulse.rest();
            let outcome = outcome.unwrap_or_else(|panic| Err(describe(panic.as_ref())));
            // The actor may be gone already, when the tree is being stopped.
            let _ = myself.cast(Ended(outcome));
        })?;
        threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    async fn handle(
        &self,
        myself: ActorRef<Ended>,
        Ended(outcome): Ended,
        (): &mut (),
    ) -> Result<(), ActorProcessingErr> {
        match outcome {
            Ok(()) => {
                myself.stop(None);
                Ok(())
            }
            Err(reason) => Err(reason.into()),
        }
    }
}

fn describe(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_else(|| "no message".into()))
}
