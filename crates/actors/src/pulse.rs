//! Signs of progress, and the watch over them.
//!
//! A watchdog that is fed by a timer proves that the timer runs. Here a thread says when it has
//! nothing to do and counts its steps when it has; it is stuck when it has something to do and
//! the count stands still.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What a thread says of itself.
#[derive(Debug, Default)]
pub struct Pulse {
    busy: AtomicBool,
    steps: AtomicU64,
}

impl Pulse {
    /// The thread has got on with its work.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.busy.store(true, Ordering::Release);
    }

    /// The thread has nothing to do and waits.
    pub fn rest(&self) {
        self.busy.store(false, Ordering::Release);
    }
}

/// How long a count has stood still, in time the watcher itself was running: a machine that was
/// suspended, or a watcher that was stopped, does not make its peer look stuck.
#[derive(Debug, Default)]
pub struct Stillness {
    last: u64,
    still: Duration,
}

/// The longest a look may count for; a watcher looks more often than that unless it was stopped.
const LOOK_MAX: Duration = Duration::from_millis(500);

impl Stillness {
    /// How long the count has been `count`, when `passed` is the time since the last look.
    pub fn look(&mut self, count: u64, passed: Duration) -> Duration {
        if count == self.last {
            self.still += passed.min(LOOK_MAX);
        } else {
            self.last = count;
            self.still = Duration::ZERO;
        }
        self.still
    }
}

/// Watches the threads of a tree.
pub struct Watch {
    limit: Duration,
    threads: Vec<(&'static str, Arc<Pulse>, Stillness)>,
}

impl Watch {
    /// A thread is stuck when it has been busy without a step for longer than `limit`.
    pub fn new(limit: Duration, threads: Vec<(&'static str, Arc<Pulse>)>) -> Self {
        let threads = threads.into_iter().map(|(n, p)| (n, p, Stillness::default()));
        Self { limit, threads: threads.collect() }
    }

    /// The first thread that is stuck, when `passed` is the time since the last look.
    pub fn look(&mut self, passed: Duration) -> Option<&'static str> {
        let mut stuck = None;
        for (name, pulse, stillness) in &mut self.threads {
            let busy = pulse.busy.load(Ordering::Acquire);
            let steps = pulse.steps.load(Ordering::Relaxed);
            let still = stillness.look(steps, passed);
            if !busy {
                stillness.still = Duration::ZERO;
            } else if still > self.limit {
                stuck = stuck.or(Some(*name));
            }
        }
        stuck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(400);

    #[test]
    fn busy_without_a_step_is_stuck_and_idle_is_not() {
        let (idle, working) = (Arc::new(Pulse::default()), Arc::new(Pulse::default()));
        let threads = vec![("idle", Arc::clone(&idle)), ("working", Arc::clone(&working))];
        let mut watch = Watch::new(Duration::from_secs(1), threads);
        for _ in 0..10 {
            working.step();
            assert_eq!(watch.look(LOOK), None, "it gets on");
        }
        assert_eq!((watch.look(LOOK), watch.look(LOOK)), (None, None));
        assert_eq!(watch.look(LOOK), Some("working"), "1.2 s without a step");
        working.rest();
        assert_eq!(watch.look(LOOK), None);
        working.step();
        assert_eq!(watch.look(LOOK), None, "a new task starts a new count");
    }

    #[test]
    fn time_in_which_the_watcher_was_stopped_does_not_count() {
        let mut stillness = Stillness::default();
        stillness.look(7, LOOK);
        assert_eq!(stillness.look(7, Duration::from_secs(3600)), LOOK_MAX);
        assert_eq!(stillness.look(8, LOOK), Duration::ZERO);
    }
}
