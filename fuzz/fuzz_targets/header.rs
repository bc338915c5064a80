//! The segment's header page, written over by anyone: the verifying side accepts it exactly if
//! every word it checks is what it expects, and what it accepts can be worked with.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use matkv_ring::{DESCRIPTOR_WORDS, Geometry, GeometryError, Header};
use matkv_sys::{Region, Words};
use matkv_types::{Digest, Fingerprint, PAGE_BYTES};

const ARENA_START: usize = 3;
const ARENA_BYTES: usize = 4;
const EPOCH: usize = 5;
const FINGERPRINT: usize = 8;
/// Words the verifying side looks at: magic, ABI, layout, arena, epoch, fingerprint, ready.
const CHECKED: [usize; 11] = [0, 1, 2, ARENA_START, ARENA_BYTES, EPOCH, 8, 9, 10, 11, 16];

#[derive(Arbitrary, Debug)]
struct Input {
    arena_bytes: u16,
    fingerprint: [u8; 32],
    epoch: u64,
    edits: Vec<Edit>,
    asked: Asked,
    descriptor: [u64; DESCRIPTOR_WORDS],
    other: Other,
}

/// What happens to the page.
#[derive(Arbitrary, Debug)]
enum Edit {
    Set {
        word: u16,
        value: u64,
    },
    /// One of the words that matter: chance alone rarely meets them among 512.
    SetChecked {
        pick: u8,
        value: u64,
    },
    Flip {
        pick: u8,
        bit: u8,
    },
    Restore {
        word: u16,
    },
    RestoreAll,
}

/// What the verifying side expects, against what was written.
#[derive(Arbitrary, Debug)]
enum Asked {
    Same,
    Epoch(u64),
    Fingerprint([u8; 32]),
    Geometry {
        arena_start: usize,
        arena_bytes: usize,
        /// The page says so too: the geometry comes from the peer, and so does the page.
        agreed: bool,
    },
}

/// A header over memory that was not made for its geometry.
#[derive(Arbitrary, Debug)]
struct Other {
    pages: u8,
    arena_start: usize,
    arena_bytes: usize,
}

fn load(page: &Words, at: usize) -> u64 {
    page[at].load(Ordering::SeqCst)
}

fn edit(page: &Words, written: &[u64], edits: &[Edit]) {
    let put = |at: usize, value: u64| page[at].store(value, Ordering::SeqCst);
    let checked = |pick: u8| CHECKED[usize::from(pick) % CHECKED.len()];
    for edit in edits {
        match *edit {
            Edit::Set { word, value } => put(usize::from(word) % written.len(), value),
            Edit::SetChecked { pick, value } => put(checked(pick), value),
            Edit::Flip { pick, bit } => {
                put(checked(pick), load(page, checked(pick)) ^ (1 << (bit % 64)));
            }
            Edit::Restore { word } => {
                let at = usize::from(word) % written.len();
                put(at, written[at]);
            }
            Edit::RestoreAll => (0..written.len()).for_each(|at| put(at, written[at])),
        }
    }
}

fn fits(geometry: Geometry, region: &Region) -> bool {
    let end = geometry.arena_start.checked_add(geometry.arena_bytes);
    end.is_some_and(|end| end <= region.len())
}

fn both_ways(loader: &Header, decoder: &Header, descriptor: [u64; DESCRIPTOR_WORDS]) {
    let (mut submit, mut completed) = loader.loader_ends().expect("the loader's ends");
    let (mut submitted, mut complete) = decoder.decoder_ends().expect("the decoder's ends");
    let back = descriptor.map(|word| !word);
    submit.publish(&[descriptor]).expect("an empty ring has room");
    complete.publish(&[back, descriptor]).expect("an empty ring has room");
    assert_eq!(submitted.take(), Ok(Some(descriptor)));
    assert_eq!(submitted.take(), Ok(None));
    assert_eq!(completed.take(), Ok(Some(back)));
    assert_eq!(completed.take(), Ok(Some(descriptor)));
    assert_eq!(completed.take(), Ok(None));
    decoder.submission_bell().expect("a bell").ring();
    loader.completion_bell().expect("a bell").ring();
}

/// Memory of any size under any geometry: refused, or a header like every other.
fn elsewhere(other: &Other, fingerprint: Fingerprint, epoch: u64) {
    let region = Region::anonymous(usize::from(other.pages % 16) * PAGE_BYTES);
    let (arena_start, arena_bytes) = (other.arena_start, other.arena_bytes);
    let geometry = Geometry { arena_start, arena_bytes };
    let made = Header::initialize(&region, geometry, fingerprint, epoch);
    assert!(made.is_err() || fits(geometry, &region));
    if made.is_ok() {
        assert!(Header::verify(&region, geometry, fingerprint, epoch).is_ok());
    }
}

fn verify(region: &Arc<Region>, page: &Words, written: &[u64], input: &Input) -> Option<Header> {
    let mut geometry = Geometry::new(usize::from(input.arena_bytes));
    let (mut fingerprint, mut epoch) = (input.fingerprint, input.epoch);
    match input.asked {
        Asked::Same => {}
        Asked::Epoch(other) => epoch = other,
        Asked::Fingerprint(other) => fingerprint = other,
        Asked::Geometry { arena_start, arena_bytes, agreed } => {
            geometry = Geometry { arena_start, arena_bytes };
            if agreed {
                page[ARENA_START].store(arena_start as u64, Ordering::SeqCst);
                page[ARENA_BYTES].store(arena_bytes as u64, Ordering::SeqCst);
            }
        }
    }
    let mut expected = written.to_vec();
    expected[ARENA_START] = geometry.arena_start as u64;
    expected[ARENA_BYTES] = geometry.arena_bytes as u64;
    expected[EPOCH] = epoch;
    for (i, bytes) in fingerprint.chunks_exact(8).enumerate() {
        expected[FINGERPRINT + i] = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    let agrees = CHECKED.iter().all(|&at| load(page, at) == expected[at]);
    match Header::verify(region, geometry, Fingerprint(Digest(fingerprint)), epoch) {
        Ok(header) => {
            assert!(agrees, "accepted a page that differs");
            assert!(fits(geometry, region), "accepted {geometry:?} in {} bytes", region.len());
            Some(header)
        }
        Err(GeometryError::Mismatch { what, expected, found }) => {
            assert!(!agrees || !fits(geometry, region), "refused a page that is right: {what}");
            assert_ne!(expected, found, "{what}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fuzz_target!(|input: Input| {
    let geometry = Geometry::new(usize::from(input.arena_bytes));
    let region = Region::anonymous(geometry.segment_bytes());
    let fingerprint = Fingerprint(Digest(input.fingerprint));
    let loader = Header::initialize(&region, geometry, fingerprint, input.epoch)
        .expect("the region was made for it");
    let page = region.words(0..PAGE_BYTES).expect("the header page");
    let written: Vec<u64> = (0..page.len()).map(|at| load(&page, at)).collect();
    edit(&page, &written, &input.edits);
    if let Some(decoder) = verify(&region, &page, &written, &input) {
        both_ways(&loader, &decoder, input.descriptor);
        let (at, epoch) = (decoder.geometry(), load(&page, EPOCH));
        let next = epoch.wrapping_add(1);
        loader.begin_epoch(next).expect("the rings fit");
        let found = Fingerprint(Digest(match input.asked {
            Asked::Fingerprint(other) => other,
            _ => input.fingerprint,
        }));
        assert!(Header::verify(&region, at, found, epoch).is_err(), "the old epoch lives on");
        let decoder = Header::verify(&region, at, found, next).expect("the next epoch");
        both_ways(&loader, &decoder, input.descriptor);
    }
    elsewhere(&input.other, fingerprint, input.epoch);
});
