//! The control part of a sequence's own slot: flags, the record, and the token log.
//!
//! Words: `[0]` sequence number, `[1]` cancel (A), `[2]` notified (B sets, A clears), `[3]` token
//! count (B, stored after the tokens), `[4]` record length, `[5]` nanoseconds of decoding (B),
//! then the record, then one word per token. Everything is atomic: nothing here is ever a
//! reference into memory the peer writes.

use std::sync::atomic::{AtomicU64, Ordering};

use matkv_sys::Words;

use crate::record::{RecordError, SequenceRecord};

const SEQUENCE: usize = 0;
const CANCEL: usize = 1;
const NOTIFIED: usize = 2;
const COUNT: usize = 3;
const RECORD_LEN: usize = 4;
const DECODE_NS: usize = 5;
const RECORD: usize = 8;

/// Words the control part takes for a record of `record_len` words and `tokens` tokens.
pub const fn control_words(record_len: usize, tokens: usize) -> usize {
    RECORD + record_len + tokens
}

/// The control part of one sequence.
#[derive(Clone)]
pub struct SequenceControl {
    words: Words,
}

/// Tokens a sequence has produced.
pub struct TokenLog {
    control: SequenceControl,
    first: usize,
    read: usize,
}

impl SequenceControl {
    /// Over the words at the start of the slot.
    ///
    /// # Panics
    /// If there are fewer words than the fixed part.
    pub fn new(words: Words) -> Self {
        assert!(words.len() >= RECORD, "control part of {} words", words.len());
        Self { words }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words[at]
    }

    /// A, before publishing: fills the control part. The ring's release store makes it visible.
    ///
    /// # Panics
    /// If the record and the tokens do not fit.
    pub fn fill(&self, sequence: u64, record: &[u64], first_token: u32) {
        let tokens = self.words.len() - RECORD;
        assert!(record.len() < tokens, "record of {} words in {tokens}", record.len());
        let put = |at: usize, value: u64| self.word(at).store(value, Ordering::Relaxed);
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
        let found = self.word(SEQUENCE).load(Ordering::Relaxed);
        if found != sequence {
            return Err(RecordError::Invalid { field: "sequence number", found });
        }
        let len = self.word(RECORD_LEN).load(Ordering::Relaxed);
        if len >= (self.words.len() - RECORD) as u64 {
            return Err(RecordError::Invalid { field: "record length", found: len });
        }
        let copy: Vec<u64> = self.words[RECORD..RECORD + len as usize]
            .iter()
            .map(|w| w.load(Ordering::Relaxed))
            .collect();
        SequenceRecord::decode(&copy)
    }

    /// The token log.
    pub fn log(&self) -> TokenLog {
        let len = self.word(RECORD_LEN).load(Ordering::Relaxed) as usize;
        let first = RECORD + len.min(self.words.len() - RECORD);
        TokenLog { control: self.clone(), first, read: 0 }
    }

    /// A: asks B to stop at the next token.
    pub fn cancel(&self) {
        self.word(CANCEL).store(1, Ordering::Release);
    }

    /// B: whether to stop.
    pub fn cancelled(&self) -> bool {
        self.word(CANCEL).load(Ordering::Acquire) != 0
    }

    /// B, after appending: true if a `Tokens` descriptor must be sent, because none is under way.
    pub fn notify(&self) -> bool {
        self.word(NOTIFIED).swap(1, Ordering::AcqRel) == 0
    }

    /// A, on receiving `Tokens`, before reading the log.
    pub fn acknowledge(&self) {
        self.word(NOTIFIED).swap(0, Ordering::AcqRel);
    }

    /// B: adds to the time spent decoding.
    pub fn add_decode_ns(&self, ns: u64) {
        self.word(DECODE_NS).fetch_add(ns, Ordering::Relaxed);
    }

    /// A, after the end: nanoseconds B spent decoding.
    pub fn decode_ns(&self) -> u64 {
        self.word(DECODE_NS).load(Ordering::Relaxed)
    }
}

impl TokenLog {
    /// Tokens the log has room for.
    pub fn capacity(&self) -> usize {
        self.control.words.len() - self.first
    }

    /// Tokens there are; at most the capacity, whatever the peer says.
    pub fn len(&self) -> usize {
        // SYNC POINT: pairs with the Release store in `append`.
        let count = self.control.word(COUNT).load(Ordering::Acquire);
        (count as usize).min(self.capacity())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The token at `i`, if it is there.
    pub fn get(&self, i: usize) -> Option<u32> {
        (i < self.len()).then(|| self.control.word(self.first + i).load(Ordering::Relaxed) as u32)
    }

    /// B: appends a token; false if the log is full.
    pub fn append(&mut self, token: u32) -> bool {
        let len = self.len();
        if len >= self.capacity() {
            return false;
        }
        self.control.word(self.first + len).store(u64::from(token), Ordering::Relaxed);
        self.control.word(COUNT).store(len as u64 + 1, Ordering::Release);
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
        control.word(COUNT).store(u64::MAX, Ordering::SeqCst);
        control.word(RECORD_LEN).store(u64::MAX, Ordering::SeqCst);
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
