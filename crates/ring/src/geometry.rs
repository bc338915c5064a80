//! The segment's header page and where everything else lies.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use matkv_sys::{Doorbell, Region, SysError, Words};
use matkv_types::{Fingerprint, LengthPrefixedHasher, PAGE_BYTES, align_up};
use serde::{Deserialize, Serialize};

use crate::queue::{Consumer, Producer, reset, ring_words};

/// Raised with any change of what the two processes read from each other.
pub const ABI_VERSION: u64 = 2;

const MAGIC: u64 = u64::from_le_bytes(*b"MatKVseg");
/// Sequences that can be published and not yet finished: the 64 of `pipeline.queue`, and a
/// self-test. The submission ring holds one descriptor for each; the completion ring two (a
/// coalesced "tokens" and the final "finished").
const SEQUENCES_MAX: usize = 128;
const COMPLETIONS_MAX: usize = 2 * SEQUENCES_MAX;

/// Words of the header page.
#[derive(Clone, Copy)]
enum Word {
    Magic = 0,
    Abi = 1,
    Layout = 2,
    ArenaStart = 3,
    ArenaBytes = 4,
    Epoch = 5,
    Fingerprint = 8,
    Ready = 16,
    LoaderBeats = 32,
    DecoderBeats = 48,
    Trace = 64,
}

/// One of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Process A.
    Loader,
    /// Process B.
    Decoder,
}

impl Side {
    const fn beats(self) -> usize {
        match self {
            Self::Loader => Word::LoaderBeats as usize,
            Self::Decoder => Word::DecoderBeats as usize,
        }
    }
}

/// Byte offsets of the two doorbells in the header page, each on a line of its own.
const SUBMISSION_BELL: usize = 1024;
const COMPLETION_BELL: usize = 1152;

/// Where the parts of a segment lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// First byte of the arena.
    pub arena_start: usize,
    /// Bytes of the arena.
    pub arena_bytes: usize,
}

/// What two processes disagree on.
#[derive(Debug, thiserror::Error)]
pub enum GeometryError {
    /// The header says something else than expected.
    #[error("{what}: this process has {expected}, the segment {found}")]
    Mismatch {
        /// Which part.
        what: &'static str,
        /// Our value.
        expected: String,
        /// The segment's value.
        found: String,
    },
    /// The memory does not fit.
    #[error(transparent)]
    Sys(#[from] SysError),
}

impl Geometry {
    /// A segment with an arena of at least `arena_bytes`.
    pub fn new(arena_bytes: usize) -> Self {
        let start =
            PAGE_BYTES + Self::ring_bytes(SEQUENCES_MAX) + Self::ring_bytes(COMPLETIONS_MAX);
        Self { arena_start: start, arena_bytes: align_up(arena_bytes.max(1), PAGE_BYTES) }
    }

    const fn ring_bytes(capacity: usize) -> usize {
        align_up(ring_words(capacity) * 8, PAGE_BYTES)
    }

    /// The same, if it is a segment's: what a peer says is not believed before.
    ///
    /// # Errors
    /// If the arena does not lie behind the rings, or is larger than any memory.
    pub fn checked(self) -> Result<Self, GeometryError> {
        const ARENA_MAX: usize = 1 << 46;
        let differs = |what, expected: usize, found: usize| GeometryError::Mismatch {
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        };
        if self.arena_bytes > ARENA_MAX {
            return Err(differs("arena bytes (at most)", ARENA_MAX, self.arena_bytes));
        }
        let expected = Self::new(self.arena_bytes);
        if self.arena_start != expected.arena_start {
            return Err(differs("arena start", expected.arena_start, self.arena_start));
        }
        if self.arena_bytes != expected.arena_bytes {
            return Err(differs("arena bytes", expected.arena_bytes, self.arena_bytes));
        }
        Ok(self)
    }

    /// Bytes of the whole segment.
    pub fn segment_bytes(&self) -> usize {
        self.arena_start + self.arena_bytes
    }

    /// The arena.
    pub fn arena(&self) -> Range<usize> {
        self.arena_start..self.arena_start + self.arena_bytes
    }

    /// Hash of everything about the segment that is fixed in code.
    pub fn layout_hash() -> u64 {
        let numbers = [
            ABI_VERSION,
            SEQUENCES_MAX as u64,
            COMPLETIONS_MAX as u64,
            ring_words(SEQUENCES_MAX) as u64,
            crate::sequence::control_words(0, 0) as u64,
            SUBMISSION_BELL as u64,
            COMPLETION_BELL as u64,
            Side::Loader.beats() as u64,
            Side::Decoder.beats() as u64,
            Word::Trace as u64,
            PAGE_BYTES as u64,
        ];
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let digest = LengthPrefixedHasher::default().part(&bytes).finish();
        u64::from_le_bytes(digest.0[..8].try_into().unwrap_or_default())
    }
}

/// The header of a mapped segment.
pub struct Header {
    region: Arc<Region>,
    words: Words,
    geometry: Geometry,
}

impl Header {
    /// A's side: writes the header of a new segment, `ready` last.
    ///
    /// # Errors
    /// If the region is too small.
    pub fn initialize(
        region: &Arc<Region>,
        geometry: Geometry,
        fingerprint: Fingerprint,
        epoch: u64,
    ) -> Result<Self, GeometryError> {
        let header = Self::over(region, geometry)?;
        let put = |at: usize, value: u64| header.words[at].store(value, Ordering::Relaxed);
        put(Word::Magic as usize, MAGIC);
        put(Word::Abi as usize, ABI_VERSION);
        put(Word::Layout as usize, Geometry::layout_hash());
        put(Word::ArenaStart as usize, geometry.arena_start as u64);
        put(Word::ArenaBytes as usize, geometry.arena_bytes as u64);
        for (i, word) in fingerprint_words(&fingerprint).into_iter().enumerate() {
            put(Word::Fingerprint as usize + i, word);
        }
        header.begin_epoch(epoch)?;
        Ok(header)
    }

    /// A's side: starts an epoch once the previous decoder is confirmed dead.
    ///
    /// # Errors
    /// If the rings do not fit the region.
    pub fn begin_epoch(&self, epoch: u64) -> Result<(), GeometryError> {
        self.words[Word::Ready as usize].store(0, Ordering::SeqCst);
        reset(&self.ring(PAGE_BYTES, SEQUENCES_MAX)?);
        reset(&self.ring(self.completion_start(), COMPLETIONS_MAX)?);
        self.words[Word::Epoch as usize].store(epoch, Ordering::Relaxed);
        // SYNC POINT: pairs with the Acquire load in `verify`.
        self.words[Word::Ready as usize].store(1, Ordering::Release);
        Ok(())
    }

    /// B's side: checks every word of the header against what this build expects.
    ///
    /// # Errors
    /// The first difference, with both values.
    pub fn verify(
        region: &Arc<Region>,
        geometry: Geometry,
        fingerprint: Fingerprint,
        epoch: u64,
    ) -> Result<Self, GeometryError> {
        let header = Self::over(region, geometry)?;
        let get = |at: Word| header.words[at as usize].load(Ordering::Relaxed);
        let ready = header.words[Word::Ready as usize].load(Ordering::Acquire);
        let checks = [
            ("ready flag", 1, ready),
            ("magic", MAGIC, get(Word::Magic)),
            ("ABI version", ABI_VERSION, get(Word::Abi)),
            ("layout hash", Geometry::layout_hash(), get(Word::Layout)),
            ("arena start", geometry.arena_start as u64, get(Word::ArenaStart)),
            ("arena bytes", geometry.arena_bytes as u64, get(Word::ArenaBytes)),
            ("epoch", epoch, get(Word::Epoch)),
        ];
        for (what, expected, found) in checks {
            if expected != found {
                let (expected, found) = (expected.to_string(), found.to_string());
                return Err(GeometryError::Mismatch { what, expected, found });
            }
        }
        let first = Word::Fingerprint as usize;
        let found: Vec<u64> =
            header.words[first..first + 4].iter().map(|w| w.load(Ordering::Relaxed)).collect();
        if found != fingerprint_words(&fingerprint) {
            return Err(GeometryError::Mismatch {
                what: "fingerprint",
                expected: fingerprint.to_string(),
                found: format!("{found:x?}"),
            });
        }
        Ok(header)
    }

    fn over(region: &Arc<Region>, geometry: Geometry) -> Result<Self, GeometryError> {
        let geometry = geometry.checked()?;
        if region.len() < geometry.segment_bytes() {
            return Err(GeometryError::Mismatch {
                what: "segment bytes",
                expected: geometry.segment_bytes().to_string(),
                found: region.len().to_string(),
            });
        }
        let words = region.words(0..SUBMISSION_BELL)?;
        Ok(Self { region: Arc::clone(region), words, geometry })
    }

    fn completion_start(&self) -> usize {
        PAGE_BYTES + Geometry::ring_bytes(SEQUENCES_MAX)
    }

    fn ring(&self, start: usize, capacity: usize) -> Result<Words, SysError> {
        self.region.words(start..start + ring_words(capacity) * 8)
    }

    /// A sign of life, while every thread of this process gets on.
    pub fn beat(&self, side: Side) {
        // Each process alone writes its own.
        let beats = self.beats(side).wrapping_add(1);
        self.words[side.beats()].store(beats, Ordering::Relaxed);
    }

    /// A's side: whether both record what they do.
    pub fn set_trace(&self, on: bool) {
        self.words[Word::Trace as usize].store(u64::from(on), Ordering::Relaxed);
    }

    /// B's side: whether to record.
    pub fn trace(&self) -> bool {
        self.words[Word::Trace as usize].load(Ordering::Relaxed) != 0
    }

    /// Signs of life of a process so far.
    pub fn beats(&self, side: Side) -> u64 {
        self.words[side.beats()].load(Ordering::Relaxed)
    }

    fn bell(&self, offset: usize) -> Result<Doorbell, SysError> {
        Doorbell::new(&self.region, offset)
    }

    /// The geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// A's ends: submission producer, completion consumer.
    ///
    /// # Errors
    /// If the rings do not fit the region.
    pub fn loader_ends(&self) -> Result<(Producer, Consumer), SysError> {
        let submissions = self.ring(PAGE_BYTES, SEQUENCES_MAX)?;
        let completions = self.ring(self.completion_start(), COMPLETIONS_MAX)?;
        Ok((
            Producer::new(submissions, SEQUENCES_MAX, Some(self.bell(SUBMISSION_BELL)?)),
            Consumer::new(completions, COMPLETIONS_MAX, Some(self.bell(COMPLETION_BELL)?)),
        ))
    }

    /// B's ends: submission consumer, completion producer.
    ///
    /// # Errors
    /// If the rings do not fit the region.
    pub fn decoder_ends(&self) -> Result<(Consumer, Producer), SysError> {
        let submissions = self.ring(PAGE_BYTES, SEQUENCES_MAX)?;
        let completions = self.ring(self.completion_start(), COMPLETIONS_MAX)?;
        Ok((
            Consumer::new(submissions, SEQUENCES_MAX, Some(self.bell(SUBMISSION_BELL)?)),
            Producer::new(completions, COMPLETIONS_MAX, Some(self.bell(COMPLETION_BELL)?)),
        ))
    }

    /// The doorbell B's decode thread waits at: anyone in B may ring it to stop the thread.
    ///
    /// # Errors
    /// If the offset does not fit the region.
    pub fn submission_bell(&self) -> Result<Doorbell, SysError> {
        self.bell(SUBMISSION_BELL)
    }

    /// The doorbell A's completion thread waits at.
    ///
    /// # Errors
    /// If the offset does not fit the region.
    pub fn completion_bell(&self) -> Result<Doorbell, SysError> {
        self.bell(COMPLETION_BELL)
    }
}

fn fingerprint_words(fingerprint: &Fingerprint) -> [u64; 4] {
    let bytes = fingerprint.as_bytes();
    std::array::from_fn(|i| {
        u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use matkv_types::Digest;

    use super::*;

    #[test]
    fn both_sides_agree_or_say_what_differs() {
        let geometry = Geometry::new(1 << 20);
        let region = Region::anonymous(geometry.segment_bytes());
        let fp = Fingerprint(Digest([3; 32]));
        let header = Header::initialize(&region, geometry, fp, 7).unwrap();
        assert!(Header::verify(&region, geometry, fp, 7).is_ok());
        let what = |r: Result<Header, GeometryError>| match r.map(|_| ()) {
            Err(GeometryError::Mismatch { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(what(Header::verify(&region, geometry, fp, 8)), "epoch");
        let other = Fingerprint(Digest([4; 32]));
        assert_eq!(what(Header::verify(&region, geometry, other, 7)), "fingerprint");
        let small = Geometry::new(1 << 19);
        assert_eq!(what(Header::verify(&region, small, fp, 7)), "arena bytes");
        for word in 0..24 {
            let saved = header.words[word].load(Ordering::SeqCst);
            header.words[word].store(saved ^ 1, Ordering::SeqCst);
            let matters = word < 6 || (8..12).contains(&word) || word == 16;
            assert_eq!(Header::verify(&region, geometry, fp, 7).is_err(), matters, "word {word}");
            header.words[word].store(saved, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_peers_geometry_is_checked_before_it_is_used() {
        let good = Geometry::new(1 << 20);
        assert!(good.checked().is_ok());
        let bad = [
            Geometry { arena_bytes: usize::MAX - 5, ..good },
            Geometry { arena_bytes: 0, ..good },
            Geometry { arena_bytes: 5000, ..good },
            Geometry { arena_start: 4096, ..good },
        ];
        assert!(bad.iter().all(|g| g.checked().is_err()));
    }

    #[test]
    fn rings_connect_the_two_sides() {
        let geometry = Geometry::new(1 << 16);
        let region = Region::anonymous(geometry.segment_bytes());
        let header =
            Header::initialize(&region, geometry, Fingerprint(Digest([0; 32])), 1).unwrap();
        header.beat(Side::Decoder);
        header.beat(Side::Decoder);
        assert_eq!((header.beats(Side::Loader), header.beats(Side::Decoder)), (0, 2));
        let (mut submit, mut completed) = header.loader_ends().unwrap();
        let (mut submitted, mut complete) = header.decoder_ends().unwrap();
        submit.publish(&[[1; 8]]).unwrap();
        complete.publish(&[[2; 8], [3; 8]]).unwrap();
        assert_eq!(submitted.take().unwrap(), Some([1; 8]));
        assert_eq!(completed.take().unwrap(), Some([2; 8]));
        header.begin_epoch(2).unwrap();
        let (_, mut completed) = header.loader_ends().unwrap();
        assert_eq!(completed.take().unwrap(), None, "an epoch begins empty");
    }
}
