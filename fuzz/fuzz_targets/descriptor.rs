//! Descriptors as a peer may write them: what is accepted says exactly what was written, lies in
//! the arena, and can be acted on; what a loader could have written is accepted.
#![no_main]

use std::ops::Range;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use matkv_ring::{
    AllegedDescriptor, Completion, DESCRIPTOR_WORDS, DescriptorError, SequenceControl, Submission,
    control_words,
};
use matkv_sys::Words;
use matkv_types::{FinishReason, PAGE_BYTES};

type Descriptor = [u64; DESCRIPTOR_WORDS];

/// Words of the smallest record: four counts, the own segment, five words of sampling.
const RECORD_MIN: usize = 14;
/// Largest control part that is made, to keep a run short.
const CONTROL_MAX: usize = 1 << 12;

#[derive(Arbitrary, Debug)]
struct Input {
    words: Alleged,
    arena: Arena,
    epoch: u64,
    /// The descriptor is of this epoch, whatever its word said.
    current: bool,
}

#[derive(Arbitrary, Debug)]
enum Alleged {
    Any(Descriptor),
    Kind {
        kind: u8,
        words: Descriptor,
    },
    /// Offsets in pages, nearly always plausible.
    Pages {
        sequence: u64,
        start: u8,
        own: u8,
        end: u8,
        control: u16,
        odd: Option<(u8, u16)>,
    },
    Finished {
        sequence: u64,
        code: u8,
        rest: [u64; 4],
    },
}

#[derive(Arbitrary, Debug)]
enum Arena {
    Any(usize, usize),
    Pages(u8, u8),
}

fn submission(epoch: u64) -> Submission {
    let (slot_start, slot_end, kv_start) = (0, 0, 0);
    Submission { epoch, sequence: 0, slot_start, slot_end, control_words: 0, kv_start }
}

fn kinds() -> [u64; 3] {
    let reason = FinishReason::Stop;
    [
        submission(0).encode()[0],
        Completion::Tokens { sequence: 0 }.encode(0)[0],
        Completion::Finished { sequence: 0, reason }.encode(0)[0],
    ]
}

fn words(input: &Input) -> Descriptor {
    let page = |n: u8| usize::from(n) * PAGE_BYTES;
    let mut words = match input.words {
        Alleged::Any(words) => words,
        Alleged::Kind { kind, mut words } => {
            words[0] = kinds()[usize::from(kind) % 3];
            words
        }
        Alleged::Pages { sequence, start, own, end, control, odd } => {
            let kv_start = page(start) + page(own);
            let mut words = Submission {
                epoch: input.epoch,
                sequence,
                slot_start: page(start),
                slot_end: kv_start + page(end),
                control_words: usize::from(control),
                kv_start,
            }
            .encode();
            if let Some((at, by)) = odd {
                let word = &mut words[usize::from(at) % DESCRIPTOR_WORDS];
                *word = word.wrapping_add(u64::from(by));
            }
            words
        }
        Alleged::Finished { sequence, code, rest } => {
            let [a, b, c, d] = rest;
            [kinds()[2], input.epoch, sequence, u64::from(code), a, b, c, d]
        }
    };
    if input.current {
        words[1] = input.epoch;
    }
    words
}

/// Kind first, then the epoch: a descriptor of another epoch is ignored, not an error.
fn refusal(error: &DescriptorError, words: &Descriptor, epoch: u64, kinds: &[u64]) {
    match *error {
        DescriptorError::Stale { expected, found } => {
            assert_eq!((expected, found), (epoch, words[1]));
            assert!(found != expected && kinds.contains(&words[0]));
        }
        DescriptorError::Invalid { found, .. } => {
            assert!(words.contains(&found), "{error} names a value that is not there");
            assert!(words[1] == epoch || !kinds.contains(&words[0]), "{error} hides a stale one");
        }
    }
}

/// What a loader that keeps the contract may publish.
fn honest(words: &Descriptor, arena: &Range<usize>) -> bool {
    let [_, _, _, start, end, control, kv, _] = words.map(|word| word as usize);
    let aligned = [start, end, kv].iter().all(|at| at.is_multiple_of(PAGE_BYTES));
    let ordered = arena.start <= start && start < kv && kv < end && end <= arena.end;
    let least = control_words(RECORD_MIN, 1);
    aligned && ordered && control >= least && control <= (kv - start) / 8
}

fn check_submission(words: Descriptor, epoch: u64, arena: &Range<usize>) {
    let ours = words[0] == kinds()[0] && words[1] == epoch;
    match AllegedDescriptor(words).submission(epoch, arena) {
        Ok(found) => {
            assert!(ours);
            let mut expected = words;
            expected[7] = 0;
            assert_eq!(found.encode(), expected);
            let Submission { slot_start, slot_end, kv_start, control_words, .. } = found;
            assert!(arena.start <= slot_start && slot_end <= arena.end, "{found:?} in {arena:?}");
            assert!(slot_start < kv_start && kv_start < slot_end, "{found:?}");
            for at in [slot_start, slot_end, kv_start] {
                assert!(at.is_multiple_of(PAGE_BYTES), "{found:?}");
            }
            let control = control_words.checked_mul(8).and_then(|n| n.checked_add(slot_start));
            assert!(control.is_some_and(|end| end <= kv_start), "{found:?}");
            // The decoder's next step, over words that say nothing yet.
            let control = SequenceControl::new(Words::private(control_words.min(CONTROL_MAX)));
            assert!(control.record(found.sequence).is_err(), "zeros are no record");
        }
        Err(e) => {
            assert!(!(ours && honest(&words, arena)), "{words:x?} in {arena:x?}: {e}");
            refusal(&e, &words, epoch, &kinds()[..1]);
        }
    }
}

fn check_completion(words: Descriptor, epoch: u64) {
    let [_, tokens, finished] = kinds();
    let reason = u32::try_from(words[3]).ok().and_then(FinishReason::from_code);
    let valid = words[0] == tokens || (words[0] == finished && reason.is_some());
    match AllegedDescriptor(words).completion(epoch) {
        Ok(found) => {
            assert!(valid && words[1] == epoch);
            let used = if words[0] == tokens { 3 } else { 4 };
            let mut expected = words;
            expected[used..].fill(0);
            assert_eq!(found.encode(epoch), expected);
        }
        Err(e) => {
            assert!(!valid || words[1] != epoch, "{words:x?}: {e}");
            refusal(&e, &words, epoch, &[tokens, finished]);
        }
    }
}

fuzz_target!(|input: Input| {
    let arena = match input.arena {
        Arena::Any(start, end) => start..end,
        Arena::Pages(start, pages) => {
            let start = usize::from(start) * PAGE_BYTES;
            start..start + usize::from(pages) * PAGE_BYTES
        }
    };
    let words = words(&input);
    check_submission(words, input.epoch, &arena);
    check_completion(words, input.epoch);
});
