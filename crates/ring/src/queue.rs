//! A single-producer single-consumer ring of 64-byte descriptors in shared words.
//!
//! Word layout: `[0]` tail (producer), `[16]` head (consumer), `[32]` parked flag (consumer),
//! each on its own 128 bytes, then `capacity` descriptors of eight words. Indexes run freely;
//! their difference is the fill. The peer's index is cached and always validated: a peer that
//! writes nonsense is an error, never an access outside the ring.
//!
//! SYNC POINTS: tail store (Release) pairs with tail load (Acquire): descriptors are visible
//! before the tail that covers them. Head store (Release) pairs with head load (Acquire): a
//! descriptor has been copied out before its place is reused. Parking: the consumer stores
//! `parked` (SeqCst) and then looks at the tail; the producer stores the tail, fences (SeqCst)
//! and then looks at `parked`. One of the two sees the other.

use std::sync::atomic::Ordering;
use std::time::Duration;

use matkv_sys::{CrashPoint, Doorbell, Words, crash_point};

use crate::memory::{Bell, Memory};

/// Words of a descriptor.
pub const DESCRIPTOR_WORDS: usize = 8;
/// Word of the producer's index.
pub const TAIL: usize = 0;
/// Word of the consumer's index.
pub const HEAD: usize = 16;
/// Word that says that the consumer sleeps, or is about to.
pub const PARKED: usize = 32;
/// First word of the descriptors.
pub const FIRST: usize = 48;

/// Words a ring of this capacity takes.
pub const fn ring_words(capacity: usize) -> usize {
    FIRST + capacity * DESCRIPTOR_WORDS
}

/// Why a ring operation failed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum QueueError {
    /// No room.
    #[error("ring is full ({capacity} descriptors)")]
    Full {
        /// Descriptors the ring holds.
        capacity: usize,
    },
    /// The peer's index cannot be: the session must end.
    #[error("peer index {found} is not within {capacity} of {own}")]
    Corrupt {
        /// The peer's index.
        found: u64,
        /// Our own index.
        own: u64,
        /// Descriptors the ring holds.
        capacity: usize,
    },
}

/// The writing end.
pub struct Producer<M = Words, B = Doorbell> {
    words: M,
    capacity: usize,
    tail: u64,
    head_seen: u64,
    bell: Option<B>,
}

/// The reading end.
pub struct Consumer<M = Words, B = Doorbell> {
    words: M,
    capacity: usize,
    head: u64,
    tail_seen: u64,
    bell: Option<B>,
}

fn check_size(words: &impl Memory, capacity: usize) {
    assert!(capacity.is_power_of_two() && words.count() >= ring_words(capacity), "ring size");
}

impl<M: Memory, B: Bell> Producer<M, B> {
    /// The producer of a ring whose words are zero or were left by a finished epoch.
    ///
    /// # Panics
    /// If the capacity is not a power of two or the words do not suffice.
    pub fn new(words: M, capacity: usize, bell: Option<B>) -> Self {
        check_size(&words, capacity);
        let tail = words.load(TAIL, Ordering::Relaxed);
        let head_seen = words.load(HEAD, Ordering::Acquire);
        Self { words, capacity, tail, head_seen, bell }
    }

    /// Descriptors that surely fit now.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`] if the consumer's index is impossible.
    pub fn room(&mut self) -> Result<usize, QueueError> {
        let found = self.words.load(HEAD, Ordering::Acquire);
        let (own, capacity) = (self.tail, self.capacity);
        let fill = own.wrapping_sub(found);
        if fill > capacity as u64 {
            return Err(QueueError::Corrupt { found, own, capacity });
        }
        // Believed only now: an index that was refused is refused again.
        self.head_seen = found;
        Ok(capacity - fill as usize)
    }

    /// Publishes descriptors with one release store and rings if the consumer is parked.
    ///
    /// # Errors
    /// [`QueueError::Full`] if they do not all fit (none is published then), or
    /// [`QueueError::Corrupt`].
    pub fn publish(&mut self, batch: &[[u64; DESCRIPTOR_WORDS]]) -> Result<(), QueueError> {
        let fill = self.tail.wrapping_sub(self.head_seen) as usize;
        let fits = self.capacity.checked_sub(fill).is_some_and(|room| batch.len() <= room);
        if !fits && self.room()? < batch.len() {
            return Err(QueueError::Full { capacity: self.capacity });
        }
        for descriptor in batch {
            let at = FIRST + (self.tail as usize & (self.capacity - 1)) * DESCRIPTOR_WORDS;
            for (i, value) in descriptor.iter().enumerate() {
                self.words.store(at + i, *value, Ordering::Relaxed);
            }
            self.tail = self.tail.wrapping_add(1);
        }
        crash_point(CrashPoint::RingWritten);
        self.words.store(TAIL, self.tail, Ordering::Release);
        crash_point(CrashPoint::RingStored);
        self.words.fence(Ordering::SeqCst);
        if self.words.load(PARKED, Ordering::Relaxed) != 0
            && let Some(bell) = &self.bell
        {
            bell.ring();
        }
        Ok(())
    }
}

impl<M: Memory, B: Bell> Consumer<M, B> {
    /// The consumer of a ring.
    ///
    /// # Panics
    /// If the capacity is not a power of two or the words do not suffice.
    pub fn new(words: M, capacity: usize, bell: Option<B>) -> Self {
        check_size(&words, capacity);
        let head = words.load(HEAD, Ordering::Relaxed);
        Self { tail_seen: head, words, capacity, head, bell }
    }

    /// Copies the next descriptor out and frees its place.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`] if the producer's index is impossible.
    pub fn take(&mut self) -> Result<Option<[u64; DESCRIPTOR_WORDS]>, QueueError> {
        if self.head == self.tail_seen {
            let found = self.words.load(TAIL, Ordering::Acquire);
            let (own, capacity) = (self.head, self.capacity);
            if found.wrapping_sub(own) > capacity as u64 {
                return Err(QueueError::Corrupt { found, own, capacity });
            }
            self.tail_seen = found;
            if self.head == self.tail_seen {
                return Ok(None);
            }
        }
        let at = FIRST + (self.head as usize & (self.capacity - 1)) * DESCRIPTOR_WORDS;
        let descriptor = std::array::from_fn(|i| self.words.load(at + i, Ordering::Relaxed));
        crash_point(CrashPoint::RingCopied);
        self.head = self.head.wrapping_add(1);
        self.words.store(HEAD, self.head, Ordering::Release);
        crash_point(CrashPoint::RingFreed);
        Ok(Some(descriptor))
    }

    /// Blocks until something is published or the time is over. A wake-up without a descriptor is
    /// possible; the caller takes and parks again.
    pub fn park(&self, timeout: Duration) {
        let Some(bell) = &self.bell else { return };
        let seen = bell.count();
        self.words.store(PARKED, 1, Ordering::SeqCst);
        self.words.fence(Ordering::SeqCst);
        if self.words.load(TAIL, Ordering::Acquire) == self.head {
            bell.wait(seen, timeout);
        }
        self.words.store(PARKED, 0, Ordering::SeqCst);
    }

    /// Whether a descriptor is waiting.
    pub fn has_next(&self) -> bool {
        self.words.load(TAIL, Ordering::Acquire) != self.head
    }
}

/// Empties a ring between epochs; both ends are gone.
pub(crate) fn reset(words: &impl Memory) {
    for index in [TAIL, HEAD, PARKED] {
        words.store(index, 0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn pair(capacity: usize, start: u64) -> (Producer, Consumer) {
        let words = Words::private(ring_words(capacity));
        words[TAIL].store(start, Ordering::SeqCst);
        words[HEAD].store(start, Ordering::SeqCst);
        (Producer::new(words.clone(), capacity, None), Consumer::new(words, capacity, None))
    }

    fn descriptor(n: u64) -> [u64; DESCRIPTOR_WORDS] {
        std::array::from_fn(|i| n * 8 + i as u64)
    }

    proptest! {
        /// The ring behaves as a bounded queue, across the wrap of its indexes.
        #[test]
        fn like_a_queue(ops in proptest::collection::vec((any::<bool>(), 1usize..5), 1..200)) {
            let (mut producer, mut consumer) = pair(8, u64::MAX - 5);
            let mut model: VecDeque<u64> = VecDeque::new();
            let mut next = 0;
            for (push, count) in ops {
                if push {
                    let batch: Vec<_> = (0..count as u64).map(|i| descriptor(next + i)).collect();
                    let fits = model.len() + count <= 8;
                    prop_assert_eq!(producer.publish(&batch).is_ok(), fits);
                    if fits {
                        model.extend(next..next + count as u64);
                        next += count as u64;
                    }
                } else {
                    prop_assert_eq!(consumer.has_next(), !model.is_empty());
                    let got = consumer.take().unwrap();
                    prop_assert_eq!(got, model.pop_front().map(descriptor));
                }
                prop_assert_eq!(producer.room().unwrap(), 8 - model.len());
            }
        }
    }

    #[test]
    fn impossible_indexes_are_refused() {
        let (mut producer, mut consumer) = pair(4, 0);
        producer.publish(&[descriptor(1)]).unwrap();
        consumer.words[TAIL].store(6, Ordering::SeqCst);
        for _ in 0..2 {
            let taken = consumer.take();
            assert!(matches!(taken, Err(QueueError::Corrupt { found: 6, .. })), "{taken:?}");
        }
        consumer.words[HEAD].store(9, Ordering::SeqCst);
        assert!(matches!(producer.room(), Err(QueueError::Corrupt { found: 9, .. })));
        // From the beginning: what an earlier epoch left is no excuse.
        let mut late = Producer::<_, Doorbell>::new(consumer.words.clone(), 4, None);
        assert!(matches!(late.publish(&[descriptor(1)]), Err(QueueError::Corrupt { .. })));
    }

    #[test]
    fn two_threads_with_parking() {
        const COUNT: u64 = 20_000;
        let region = matkv_sys::Region::anonymous(1 << 16);
        let words = region.words(4096..4096 + ring_words(4) * 8).unwrap();
        let bell = Doorbell::new(&region, 0).unwrap();
        let mut producer = Producer::new(words.clone(), 4, Some(bell.clone()));
        let mut consumer = Consumer::new(words, 4, Some(bell));
        let reader = std::thread::spawn(move || {
            for n in 0..COUNT {
                loop {
                    if let Some(got) = consumer.take().unwrap() {
                        assert_eq!(got, descriptor(n));
                        break;
                    }
                    // A lost wake-up would hang here for an hour: the test would not pass.
                    consumer.park(Duration::from_secs(3600));
                }
            }
        });
        for n in 0..COUNT {
            while producer.publish(&[descriptor(n)]).is_err() {
                std::thread::yield_now();
            }
        }
        reader.join().unwrap();
    }
}
