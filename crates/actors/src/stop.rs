//! A flag that asks threads to return, and wakes those that wait elsewhere.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

type Waker = Box<dyn Fn() + Send>;

/// Shared by a supervisor and its threads.
#[derive(Clone, Default)]
pub struct StopFlag {
    raised: Arc<AtomicBool>,
    wakers: Arc<Mutex<Vec<Waker>>>,
}

impl StopFlag {
    /// Whether the thread should return.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Asks the threads to return and runs every waker.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        let wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.iter().for_each(|wake| wake());
    }

    /// Registers what unblocks a thread; runs at once if the flag is up already.
    pub fn on_raise(&self, wake: impl Fn() + Send + 'static) {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(wake));
        if self.is_raised() {
            self.raise();
        }
    }
}
