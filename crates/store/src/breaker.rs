//! A circuit breaker: after some failures in a row nothing is tried for a while, and for twice as
//! long each time, up to a bound.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Failures in a row that open it.
const FAILURES: u32 = 3;
/// First pause.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    failures: u32,
    pause: Duration,
    closed_again: Option<Instant>,
    reason: String,
}

/// Whether something that may be down should be tried.
#[derive(Debug, Default)]
pub struct Breaker {
    state: Mutex<State>,
}

impl Breaker {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to try now.
    pub fn allows(&self, now: Instant) -> bool {
        self.state().closed_again.is_none_or(|at| now >= at)
    }

    /// Why it is open; nothing if it is not.
    pub fn reason(&self, now: Instant) -> Option<String> {
        let state = self.state();
        state.closed_again.filter(|at| now < *at).map(|_| state.reason.clone())
    }

    /// What has gone wrong since it last worked, if that was enough to open it: also while it is
    /// being tried again.
    pub fn trouble(&self) -> Option<String> {
        let state = self.state();
        (!state.pause.is_zero()).then(|| state.reason.clone())
    }

    /// It worked.
    pub fn succeeded(&self) {
        *self.state() = State::default();
    }

    /// It did not. True if that has opened the breaker.
    pub fn failed(&self, now: Instant, reason: &str) -> bool {
        let mut state = self.state();
        state.failures += 1;
        // Once it has been open, one failed trial opens it again.
        if state.failures < FAILURES && state.pause.is_zero() {
            return false;
        }
        state.pause = if state.pause.is_zero() { PAUSE } else { (state.pause * 2).min(PAUSE_MAX) };
        state.closed_again = Some(now + state.pause);
        reason.clone_into(&mut state.reason);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_pauses_longer_and_recovers() {
        let (breaker, start) = (Breaker::default(), Instant::now());
        let at = |s: u64| start + Duration::from_secs(s);
        assert!(!breaker.failed(at(0), "x") && !breaker.failed(at(0), "x"));
        assert!(breaker.allows(at(0)));
        assert!(breaker.failed(at(0), "refused"));
        assert_eq!(breaker.reason(at(0)).as_deref(), Some("refused"));
        assert!(!breaker.allows(at(0)) && breaker.allows(at(1)));
        // A failed trial doubles the pause, up to a minute.
        let mut now = 1;
        for pause in [2, 4, 8, 16, 32, 60, 60] {
            assert!(breaker.failed(at(now), "still"));
            assert!(!breaker.allows(at(now + pause - 1)) && breaker.allows(at(now + pause)));
            now += pause;
        }
        breaker.succeeded();
        assert!(!breaker.failed(at(now), "y") && breaker.allows(at(now)));
    }
}
