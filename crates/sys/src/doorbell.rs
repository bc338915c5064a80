//! A futex word in shared memory: how one process wakes a thread of the other.
//!
//! A ring producer rings after publishing if the consumer says it is parked; a consumer reads
//! the count, announces that it parks, looks once more, and waits for the count to change.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::Result;
use crate::region::Region;

/// A doorbell at a fixed place in a region.
#[derive(Clone)]
pub struct Doorbell {
    region: Arc<Region>,
    offset: usize,
}

impl Doorbell {
    /// The doorbell at `offset`.
    ///
    /// # Errors
    /// If the offset is outside the region or misaligned.
    pub fn new(region: &Arc<Region>, offset: usize) -> Result<Self> {
        region.futex_word(offset)?;
        Ok(Self { region: Arc::clone(region), offset })
    }

    fn word(&self) -> &std::sync::atomic::AtomicU32 {
        match self.region.futex_word(self.offset) {
            Ok(word) => word,
            Err(_) => unreachable!("checked by the constructor"),
        }
    }

    /// The count to hand to [`Self::wait`].
    pub fn count(&self) -> u32 {
        self.word().load(Ordering::SeqCst)
    }

    /// Changes the count and wakes whoever waits.
    pub fn ring(&self) {
        let word = self.word();
        word.fetch_add(1, Ordering::SeqCst);
        // SAFETY: a valid futex word, process-shared (no PRIVATE flag).
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Blocks until the count differs from `seen` or the time is over.
    pub fn wait(&self, seen: u32, timeout: Duration) {
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
        };
        // SAFETY: a valid futex word and a valid timespec. EAGAIN, EINTR and ETIMEDOUT all mean
        // that the caller looks at its ring again.
        unsafe {
            let (word, op) = (self.word().as_ptr(), libc::FUTEX_WAIT);
            libc::syscall(libc::SYS_futex, word, op, seen, &raw const time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_count_and_wait_is_not_lost() {
        let region = Region::anonymous(4096);
        let bell = Doorbell::new(&region, 64).unwrap();
        let seen = bell.count();
        bell.ring();
        bell.wait(seen, Duration::from_secs(3600));
        let waiter = bell.clone();
        let seen = bell.count();
        let thread = std::thread::spawn(move || {
            while waiter.count() == seen {
                waiter.wait(seen, Duration::from_secs(3600));
            }
        });
        bell.ring();
        thread.join().unwrap();
    }
}
