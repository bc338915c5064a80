//! Bytes on the devices against what is allowed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::identity::Stale;
use crate::options::StoreOptions;

/// Physical use of the flash tier, over all identities.
pub(crate) struct Space {
    /// Ours: indexed, pending and quarantined files.
    used: AtomicU64,
    stale: Mutex<Vec<Stale>>,
    capacity: Option<u64>,
    degraded: Mutex<Option<String>>,
}

impl Space {
    pub fn new(options: &StoreOptions, stale: Vec<Stale>) -> Self {
        Self {
            used: AtomicU64::new(0),
            stale: Mutex::new(stale),
            capacity: options.flash.capacity,
            degraded: Mutex::new(None),
        }
    }

    pub fn set_used(&self, bytes: u64) {
        self.used.store(bytes, Ordering::SeqCst);
    }

    pub fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::SeqCst);
    }

    pub fn subtract(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        // The closure never refuses.
        let _ = self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }

    /// So many bytes instead of others, in one step: nobody sees both counted.
    pub fn replace(&self, less: u64, more: u64) {
        let changed = |used: u64| Some((used + more).saturating_sub(less));
        // The closure never refuses.
        let _ = self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, changed);
    }

    /// Bytes of ours.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Bytes of other identities.
    pub fn stale_bytes(&self) -> u64 {
        self.stale().iter().map(|s| s.bytes).sum()
    }

    pub fn stale(&self) -> std::sync::MutexGuard<'_, Vec<Stale>> {
        self.stale.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn capacity(&self) -> Option<u64> {
        self.capacity
    }

    /// Whether so many more bytes would be too many.
    pub fn exceeds(&self, more: u64) -> bool {
        self.capacity.is_some_and(|c| self.used() + self.stale_bytes() + more > c)
    }

    pub fn set_degraded(&self, reason: Option<String>) {
        *self.degraded.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }

    pub fn degraded(&self) -> Option<String> {
        self.degraded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
