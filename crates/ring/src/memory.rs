//! What the protocol asks of shared memory: atomic words, a fence, and a doorbell.
//!
//! `sys` gives the real ones. The loom models in `tests/loom.rs` put simulated ones in their
//! place, so the code that is checked is the code that runs, not a copy of it.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use matkv_sys::{Doorbell, Words};

/// Words both processes see; handles are cheap to clone.
pub trait Memory: Clone {
    /// Number of words.
    fn count(&self) -> usize;
    /// Reads a word.
    fn load(&self, at: usize, order: Ordering) -> u64;
    /// Writes a word.
    fn store(&self, at: usize, value: u64, order: Ordering);
    /// Writes a word and returns what was there.
    fn swap(&self, at: usize, value: u64, order: Ordering) -> u64;
    /// Orders what comes before against what comes after.
    fn fence(&self, order: Ordering);
}

/// Wakes a thread of the peer.
pub trait Bell {
    /// Changes with every ring.
    fn count(&self) -> u32;
    /// Wakes whoever waits.
    fn ring(&self);
    /// Blocks until the count is not `seen`, or the time is over. May return early.
    fn wait(&self, seen: u32, timeout: Duration);
}

impl Memory for Words {
    fn count(&self) -> usize {
        self.len()
    }

    fn load(&self, at: usize, order: Ordering) -> u64 {
        self[at].load(order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self[at].store(value, order);
    }

    fn swap(&self, at: usize, value: u64, order: Ordering) -> u64 {
        self[at].swap(value, order)
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

impl Bell for Doorbell {
    fn count(&self) -> u32 {
        Self::count(self)
    }

    fn ring(&self) {
        Self::ring(self);
    }

    fn wait(&self, seen: u32, timeout: Duration) {
        Self::wait(self, seen, timeout);
    }
}
