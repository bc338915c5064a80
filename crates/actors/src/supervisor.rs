//! The supervisor of a process: starts its threads in order, restarts or stops by policy.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::pulse::{Pulse, Watch};
use crate::stop::StopFlag;
use crate::worker::{Policy, ThreadSpec, Threads, Worker};

/// How long threads may take to return after a stop.
const JOIN: Duration = Duration::from_secs(10);

/// How the tree ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Still running.
    Running,
    /// Stopped on request.
    Stopped,
    /// A child had nothing left to do, and the tree has ended with it.
    Returned {
        /// Its name.
        child: String,
    },
    /// A child that the process cannot do without has failed.
    Failed {
        /// Its name.
        child: String,
        /// Why it ended.
        reason: String,
    },
}

/// A running tree.
pub struct Supervision {
    pulses: Vec<(&'static str, Arc<Pulse>)>,
    stop: StopFlag,
    actor: ActorRef<()>,
    join: JoinHandle<()>,
    outcome: watch::Receiver<Outcome>,
    threads: Threads,
}

struct Supervisor;

struct State {
    specs: Vec<ThreadSpec>,
    stop: StopFlag,
    children: HashMap<ActorId, usize>,
    restarts: Vec<u32>,
    outcome: watch::Sender<Outcome>,
    threads: Threads,
}

/// Starts the threads under one supervisor.
///
/// # Errors
/// If a thread cannot be started.
pub async fn supervise(specs: Vec<ThreadSpec>, stop: StopFlag) -> Result<Supervision, String> {
    let (sender, outcome) = watch::channel(Outcome::Running);
    let threads = Threads::default();
    let pulses = specs.iter().map(|s| (s.name, Arc::clone(&s.pulse))).collect();
    let state = State {
        restarts: vec![0; specs.len()],
        specs,
        stop: stop.clone(),
        children: HashMap::new(),
        outcome: sender,
        threads: Arc::clone(&threads),
    };
    let (actor, join) = Actor::spawn(None, Supervisor, state).await.map_err(|e| e.to_string())?;
    Ok(Supervision { pulses, stop, actor, join, outcome, threads })
}

impl Supervision {
    /// A watch over the threads: one is stuck when it is busy and makes no step for this long.
    pub fn watch(&self, limit: Duration) -> Watch {
        Watch::new(limit, self.pulses.clone())
    }

    /// Waits until the tree has failed or the flag has been raised by someone.
    pub async fn ended(&mut self) -> Outcome {
        let _ = self.outcome.wait_for(|o| *o != Outcome::Running).await;
        self.outcome.borrow().clone()
    }

    /// Raises the flag and waits for every thread.
    pub async fn stop(self) -> Outcome {
        self.stop.raise();
        self.actor.stop(None);
        let _ = self.join.await;
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let joined = tokio::task::spawn_blocking(|| {
            // A panic has been reported by the thread itself.
            threads.into_iter().for_each(|t| drop(t.join()));
        });
        // A thread that waits for someone else must not keep the process.
        let _ = tokio::time::timeout(JOIN, joined).await;
        match self.outcome.borrow().clone() {
            Outcome::Running => Outcome::Stopped,
            other => other,
        }
    }
}

impl State {
    async fn start(&mut self, i: usize, me: &ActorRef<()>) -> Result<(), ActorProcessingErr> {
        let arguments = (self.specs[i].clone(), self.stop.clone(), Arc::clone(&self.threads));
        let (child, _) = Actor::spawn_linked(None, Worker, arguments, me.get_cell()).await?;
        self.children.insert(child.get_id(), i);
        Ok(())
    }

    async fn ended(
        &mut self,
        id: ActorId,
        failure: Option<String>,
        me: &ActorRef<()>,
    ) -> Result<(), ActorProcessingErr> {
        let Some(i) = self.children.remove(&id) else { return Ok(()) };
        let name = self.specs[i].name;
        if self.stop.is_raised() {
            return Ok(());
        }
        let child = name.to_owned();
        let outcome = match (self.specs[i].policy, failure) {
            (Policy::Restart { times }, Some(reason)) if self.restarts[i] < times => {
                self.restarts[i] += 1;
                tracing::warn!("{name} ended ({reason}); restart {}", self.restarts[i]);
                return self.start(i, me).await;
            }
            (_, Some(reason)) => {
                tracing::error!("{name} failed ({reason}); stopping");
                Outcome::Failed { child, reason }
            }
            (_, None) => {
                tracing::info!("{name} has nothing left to do; stopping");
                Outcome::Returned { child }
            }
        };
        self.outcome.send_replace(outcome);
        self.stop.raise();
        me.stop(None);
        Ok(())
    }
}

impl Actor for Supervisor {
    type Msg = ();
    type State = State;
    type Arguments = State;

    async fn pre_start(
        &self,
        myself: ActorRef<()>,
        mut state: State,
    ) -> Result<State, ActorProcessingErr> {
        for i in 0..state.specs.len() {
            state.start(i, &myself).await?;
        }
        Ok(state)
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<()>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorTerminated(who, _, _) => {
                state.ended(who.get_id(), None, &myself).await
            }
            SupervisionEvent::ActorFailed(who, error) => {
                state.ended(who.get_id(), Some(error.to_string()), &myself).await
            }
            _ => Ok(()),
        }
    }

    async fn post_stop(
        &self,
        _: ActorRef<()>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.stop.raise();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn wait_for_stop(stop: &StopFlag) {
        let (tx, rx) = std::sync::mpsc::channel();
        stop.on_raise(move || tx.send(()).unwrap_or(()));
        let _ = rx.recv();
    }

    #[tokio::test]
    async fn a_panic_restarts_up_to_the_limit_and_then_fails_the_tree() {
        let runs = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&runs);
        let shaky = ThreadSpec::new("shaky", Policy::Restart { times: 2 }, move |_, _| {
            counter.fetch_add(1, Ordering::SeqCst);
            panic!("on purpose")
        });
        let steady = ThreadSpec::new("steady", Policy::Fatal, |stop, _| {
            wait_for_stop(&stop);
            Ok(())
        });
        let mut tree = supervise(vec![steady, shaky], StopFlag::default()).await.unwrap();
        let outcome = tree.ended().await;
        assert!(
            matches!(&outcome, Outcome::Failed { child, reason } if child == "shaky" && reason.contains("on purpose")),
            "{outcome:?}"
        );
        assert_eq!(runs.load(Ordering::SeqCst), 3);
        assert_eq!(tree.stop().await, outcome);
    }

    #[tokio::test]
    async fn stopping_waits_for_the_threads() {
        let done = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&done);
        let spec = ThreadSpec::new("steady", Policy::Fatal, move |stop, _| {
            wait_for_stop(&stop);
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        let tree = supervise(vec![spec], StopFlag::default()).await.unwrap();
        assert_eq!(tree.stop().await, Outcome::Stopped);
        assert_eq!(done.load(Ordering::SeqCst), 1);
    }
}
