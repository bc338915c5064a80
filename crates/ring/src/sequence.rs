//! The control part of a sequence's own slot: flags, the record, and the token log.
//!
//! Words: `[0]` sequence number, `[1]` cancel (A), `[2]` notified (B sets, A clears), `[3]` token
//! count (B, stored after the tokens), `[4]` record length, `[5]` nanoseconds of decoding (B),
//! then the record, then one word per token. Everything is atomic: nothing here is ever a
//! reference into memory the peer writes.

use std::sync::atomic::Ordering;

use matkv_sys::Words;

use crate::memory::Memory;
use crate::record::{RecordError, SequenceRecord};

const SEQUENCE: usize = 0;
/// Word A sets to stop the sequence.
pub const CANCEL: usize = 1;
/// Word that says that a "tokens" descriptor is under way.
pub const NOTIFIED: usize = 2;
/// Word of the number of tokens.
pub const COUNT: usize = 3;
const RECORD_LEN: usize = 4;
const DECODE_NS: usize = 5;
const RECORD: usize = 8;

/// Words the control part takes for a record of `record_len` words and `tokens` tokens.
pub const fn control_words(record_len: usize, tokens: usize) -> usize {
    RECORD + record_len + tokens
}

/// The control part of one sequence.
#[derive(Clone)]
pub struct SequenceControl<M = Words> {
    words: M,
}

/// Tokens a sequence has produced.
pub struct TokenLog<M = Words> {
    control: SequenceControl<M>,
    first: usize,
    read: usize,
}

impl<M: Memory> SequenceControl<M> {
    /// Over the words at the start of the slot.
    ///
    /// # Panics
    /// If there are fewer words than the fixed part.
    pub fn new(words: M) -> Self {
        assert!(words.count() >= RECORD, "control part of {} words", words.count());
        Self { words }
    }

    /// A, before publishing: fills the control part. The ring's release store makes it visible.
    ///
    /// # Panics
    /// If the record and the tokens do not fit.
    pub fn fill(&self, sequence: u64, record: &[u64], first_token: u32) {
        let tokens = self.words.count() - RECORD;
        assert!(record.len() < tokens, "record of {} words in {tokens}", record.len());
        let put = |at: usize, value: u64| self.words.store(at, value, Ordering::Relaxed);
        put(SEQUENCE, sequence);
        put(CANCEL, 0);
        put(NOTIFIED, 0);
        put(RECORD_LEN, record.len() as u64);
        put(DECODE_NS, 0);
        record.iter().enumerate().for_each(|(i, &w)| put(RECORD + i, w));
        put(RECORD + record.len(), u64::from(first_token));
        put(COUNT, 1);
    }

    /// B, once: copies the record out and decodes the copy.
    ///
    /// # Errors
    /// If it is not the record of `sequence`.
    pub fn record(&self, sequence: u64) -> Result<SequenceRecord, RecordError> {
        let found = self.words.load(SEQUENCE, Ordering::Relaxed);
        if found != sequence {
            return Err(RecordError::Invalid { field: "sequence number", found });
        }
        let len = self.words.load(RECORD_LEN, Ordering::Relaxed);
        if len >= (self.words.count() - RECORD) as u64 {
            return Err(RecordError::Invalid { field: "record length", found: len });
        }
        let copy: Vec<u64> =
            (0..len as usize).map(|i| self.words.load(RECORD + i, Ordering::Relaxed)).collect();
        SequenceRecord::decode(&copy)
    }

    /// The token log.
    pub fn log(&self) -> TokenLog<M> {
        let len = self.words.load(RECORD_LEN, Ordering::Relaxed) as usize;
        let first = RECORD + len.min(self.words.count() - RECORD);
        TokenLog { control: self.clone(), first, read: 0 }
    }

    /// A: asks B to stop at the next token.
    pub fn cancel(&self) {
        self.words.store(CANCEL, 1, Ordering::Release);
    }

    /// B: whether to stop.
    pub fn cancelled(&self) -> bool {
        self.words.load(CANCEL, Ordering::Acquire) != 0
    }

    /// B, after appending: true if a `Tokens` descriptor must be sent, because none is under way.
    pub fn notify(&self) -> bool {
        self.words.swap(NOTIFIED, 1, Ordering::AcqRel) == 0
    }

    /// A, on receiving `Tokens`, before reading the log.
    pub fn acknowledge(&self) {
        self.words.swap(NOTIFIED, 0, Ordering::AcqRel);
    }

    /// B: adds to the time spent decoding.
    pub fn add_decode_ns(&self, ns: u64) {
        // B alone writes it.
        let so_far = self.words.load(DECODE_NS, Ordering::Relaxed);
        self.words.store(DECODE_NS, so_far.wrapping_add(ns), Ordering::Relaxed);
    }

    /// A, after the end: nanoseconds B spent decoding.
    pub fn decode_ns(&self) -> u64 {
        self.words.load(DECODE_NS, Ordering::Relaxed)
    }
}

impl<M: Memory> TokenLog<M> {
    /// Tokens the log has room for.
    pub fn capacity(&self) -> usize {
        self.control.words.count() - self.first
    }

    /// Tokens there are; at most the capacity, whatever the peer says.
    pub fn len(&self) -> usize {
        // SYNC POINT: pairs with the Release store in `append`.
        let count = self.control.words.load(COUNT, Ordering::Acquire);
        (count as usize).min(self.capacity())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The token at `i`, if it is there.
    pub fn get(&self, i: usize) -> Option<u32> {
        (i < self.len()).then(|| self.control.words.load(self.first + i, Ordering::Relaxed) as u32)
    }

    /// B: appends a token; false if the log is full.
    pub fn append(&mut self, token: u32) -> bool {
        let len = self.len();
        if len >= self.capacity() {
            return false;
        }
        self.control.words.store(self.first + len, u64::from(token), Ordering::Relaxed);
        self.control.words.store(COUNT, len as u64 + 1, Ordering::Release);
        true
    }

    /// A: tokens that have come since the last call.
    pub fn read_new(&mut self) -> Vec<u32> {
        let new: Vec<u32> = (self.read..self.len()).filter_map(|i| self.get(i)).collect();
        self.read += new.len();
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded_by_its_own_size() {
        let record = [1, 2, 3];
        let control = SequenceControl::new(Words::private(control_words(3, 4)));
        control.fill(7, &record, 50);
        let (mut writer, mut reader) = (control.log(), control.log());
        assert_eq!(reader.read_new(), [50]);
        assert!(writer.append(51) && writer.append(52));
        assert_eq!(reader.read_new(), [51, 52]);
        assert!(writer.append(53) && !writer.append(54));
        assert_eq!(reader.read_new(), [53]);
        control.words.store(COUNT, u64::MAX, Ordering::SeqCst);
        control.words.store(RECORD_LEN, u64::MAX, Ordering::SeqCst);
        assert!(control.log().read_new().is_empty());
        assert!(control.record(7).is_err());
    }

    #[test]
    fn one_notification_at_a_time() {
        let control = SequenceControl::new(Words::private(control_words(1, 4)));
        control.fill(1, &[0], 5);
        assert!(control.notify());
        assert!(!control.notify());
        control.acknowledge();
        assert!(control.notify());
        assert!(!control.cancelled());
        control.cancel();
        assert!(control.cancelled());
    }
}
