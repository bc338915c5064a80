//! Ring descriptors. What a peer writes is *alleged*; one function per ring turns it into a
//! descriptor, or says why it cannot be one.

use std::ops::Range;

use matkv_types::{FinishReason, PAGE_BYTES};

use crate::queue::DESCRIPTOR_WORDS;
use crate::sequence::control_words;

/// Words as the peer wrote them.
#[derive(Clone, Copy, Debug)]
pub struct AllegedDescriptor(pub [u64; DESCRIPTOR_WORDS]);

/// Why a descriptor is not one.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DescriptorError {
    /// It belongs to another epoch: counted and ignored.
    #[error("descriptor of epoch {found} in epoch {expected}")]
    Stale {
        /// The current epoch.
        expected: u64,
        /// The descriptor's epoch.
        found: u64,
    },
    /// A field cannot be what it says: the session must end.
    #[error("descriptor field {field} is {found}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u64,
    },
}

/// Words without which a control part is none.
const CONTROL_WORDS_MIN: u64 = control_words(0, 0) as u64;
const SUBMIT: u64 = 0x5355_424d;
const TOKENS: u64 = 0x544f_4b45;
const FINISHED: u64 = 0x4649_4e49;

/// A → B: a sequence is ready to be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Session number.
    pub epoch: u64,
    /// Request number, unique in A's life.
    pub sequence: u64,
    /// First byte of the sequence's own slot.
    pub slot_start: usize,
    /// End of the slot.
    pub slot_end: usize,
    /// Words of the control part, at the slot's start.
    pub control_words: usize,
    /// First byte of the KV section in the segment; page-aligned.
    pub kv_start: usize,
}

impl Submission {
    /// To words.
    pub fn encode(&self) -> [u64; DESCRIPTOR_WORDS] {
        let n = |x: usize| x as u64;
        let (start, end) = (n(self.slot_start), n(self.slot_end));
        [SUBMIT, self.epoch, self.sequence, start, end, n(self.control_words), n(self.kv_start), 0]
    }
}

/// B → A: something about a sequence changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// New tokens are in its log; at most one outstanding per sequence.
    Tokens {
        /// Request number.
        sequence: u64,
    },
    /// The sequence has ended; its slots are released by this.
    Finished {
        /// Request number.
        sequence: u64,
        /// Why.
        reason: FinishReason,
    },
}

impl Completion {
    /// To words.
    pub fn encode(&self, epoch: u64) -> [u64; DESCRIPTOR_WORDS] {
        match *self {
            Self::Tokens { sequence } => [TOKENS, epoch, sequence, 0, 0, 0, 0, 0],
            Self::Finished { sequence, reason } => {
                [FINISHED, epoch, sequence, u64::from(reason.code()), 0, 0, 0, 0]
            }
        }
    }
}

fn invalid<T>(field: &'static str, found: u64) -> Result<T, DescriptorError> {
    Err(DescriptorError::Invalid { field, found })
}

impl AllegedDescriptor {
    fn check_epoch(&self, epoch: u64) -> Result<(), DescriptorError> {
        if self.0[1] == epoch {
            return Ok(());
        }
        Err(DescriptorError::Stale { expected: epoch, found: self.0[1] })
    }

    /// B's door: a submission whose slot lies in the arena.
    ///
    /// # Errors
    /// If it is stale or impossible.
    pub fn submission(
        &self,
        epoch: u64,
        arena: &Range<usize>,
    ) -> Result<Submission, DescriptorError> {
        let [kind, _, sequence, start, end, control, kv, _] = self.0;
        if kind != SUBMIT {
            return invalid("kind", kind);
        }
        self.check_epoch(epoch)?;
        let inside = |x: u64| x >= arena.start as u64 && x <= arena.end as u64;
        let aligned = |x: u64| x.is_multiple_of(PAGE_BYTES as u64);
        if !inside(start) || !aligned(start) {
            return invalid("slot_start", start);
        }
        if !inside(end) || !aligned(end) || end <= start {
            return invalid("slot_end", end);
        }
        if !inside(kv) || !aligned(kv) || kv <= start || kv >= end {
            return invalid("kv_start", kv);
        }
        if control < CONTROL_WORDS_MIN || control > (kv - start) / 8 {
            return invalid("control_words", control);
        }
        Ok(Submission {
            epoch,
            sequence,
            slot_start: start as usize,
            slot_end: end as usize,
            control_words: control as usize,
            kv_start: kv as usize,
        })
    }

    /// A's door.
    ///
    /// # Errors
    /// If it is stale or impossible.
    pub fn completion(&self, epoch: u64) -> Result<Completion, DescriptorError> {
        let [kind, _, sequence, code, ..] = self.0;
        if kind != TOKENS && kind != FINISHED {
            return invalid("kind", kind);
        }
        self.check_epoch(epoch)?;
        if kind == TOKENS {
            return Ok(Completion::Tokens { sequence });
        }
        match u32::try_from(code).ok().and_then(FinishReason::from_code) {
            Some(reason) => Ok(Completion::Finished { sequence, reason }),
            None => invalid("reason", code),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any words: a valid submission lies inside the arena, everything else is refused.
        #[test]
        fn nothing_outside_the_arena_gets_through(
            words in proptest::array::uniform8(0u64..100_000), kind in any::<bool>()
        ) {
            let mut words = words.map(|w| w / 7 * 4096 % 90_112);
            words[1] = 5;
            words[5] %= 600;
            if kind {
                words[0] = SUBMIT;
            }
            let arena = 8192..65536;
            if let Ok(s) = AllegedDescriptor(words).submission(5, &arena) {
                prop_assert!(s.slot_start >= arena.start && s.slot_end <= arena.end);
                prop_assert!(s.slot_start + s.control_words * 8 <= s.kv_start);
                prop_assert!(s.kv_start < s.slot_end);
                prop_assert!(s.control_words >= control_words(0, 0));
                prop_assert_eq!(s.encode(), { let mut w = words; w[7] = 0; w });
            }
        }
    }

    #[test]
    fn completions_round_trip() {
        let all = [
            Completion::Tokens { sequence: 9 },
            Completion::Finished { sequence: 9, reason: FinishReason::Length },
        ];
        for c in all {
            let alleged = AllegedDescriptor(c.encode(4));
            assert_eq!(alleged.completion(4), Ok(c));
            assert!(matches!(alleged.completion(5), Err(DescriptorError::Stale { .. })));
        }
        assert!(AllegedDescriptor([FINISHED, 4, 9, 77, 0, 0, 0, 0]).completion(4).is_err());
        assert!(AllegedDescriptor([0; 8]).completion(0).is_err());
    }
}
