//! A flag that asks threads to return, and wakes those that wait elsewhere.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

type Waker = Box<dyn Fn() + Send>;

/// Shared by a supervisor and its threads.
#[derive(Clone, Default)]
pub struct StopFlag {
    raised: Arc<AtomicBool>,
    next: Arc<AtomicU64>,
    wakers: Arc<Mutex<Vec<(u64, Waker)>>>,
}

/// A registered waker, for [`StopFlag::forget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakerId(u64);

impl StopFlag {
    /// Whether the thread should return.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Asks the threads to return and runs every waker.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        let wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.iter().for_each(|(_, wake)| wake());
    }

    /// Registers what unblocks a thread; runs at once if the flag is up already.
    pub fn on_raise(&self, wake: impl Fn() + Send + 'static) -> WakerId {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner).push((id, Box::new(wake)));
        if self.is_raised() {
            self.raise();
        }
        WakerId(id)
    }

    /// Drops a waker and what it holds: for threads that outlive what they wait for.
    pub fn forget(&self, id: WakerId) {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner).retain(|w| w.0 != id.0);
    }
}
