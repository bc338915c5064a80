//! The sequence record and the control part around it, as a peer may write them: nothing panics,
//! no more is allocated than the words there are account for, and what is accepted means the same
//! when it is written again.
#![no_main]

use std::alloc::System;
use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use matkv_ring::layout::COUNT;
use matkv_ring::{
    SegmentRecord, SequenceControl, SequenceRecord, SlotRecord, TokenLog, control_words,
};
use matkv_sys::Words;
use matkv_types::{KvDtype, Sampling};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

/// Counts what decoding asks for, failed attempts included.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Sizes and positions, and rows, a record may hold.
const SIZE_MAX: usize = 1 << 48;
const ROWS_MAX: usize = 1 << 32;
const LIST_MAX: usize = 4096;
/// Text of one stop string, allocated before its words have been seen.
const STOP_MAX: usize = 1 << 16;
/// Words before the record in the control part, and the places of some, as `docs/ring.md` says.
const RECORD: usize = 8;
const SEQUENCE: usize = 0;
const RECORD_LEN: usize = 4;
/// Tokens a control part has room for here.
const TOKENS_MAX: usize = 64;

#[derive(Arbitrary, Debug)]
enum Input {
    Any(Vec<u64>),
    Edited { record: Record, edits: Vec<(u16, Value)>, cut: Option<u16> },
    Control(Control),
}

#[derive(Arbitrary, Debug)]
enum Value {
    Any(u64),
    /// Limits are powers of two: just below, at, and just above.
    Near {
        bit: u8,
        by: i8,
        negative: bool,
    },
}

/// A record whose every part is brought into the range it may have.
#[derive(Arbitrary, Debug)]
struct Record {
    slots: Vec<Slot>,
    segments: Vec<Segment>,
    last: Segment,
    own_rows: usize,
    position: usize,
    temperature: f32,
    top_p: f32,
    seed: u64,
    max_new_tokens: u32,
    stop: Vec<String>,
}

#[derive(Arbitrary, Debug)]
struct Slot {
    start: usize,
    end: usize,
    kv_offset: usize,
    rows: usize,
    bf16: bool,
}

#[derive(Arbitrary, Debug)]
struct Segment {
    slot: Option<u16>,
    first_row: usize,
    rows: usize,
    position: usize,
    shift: i64,
}

#[derive(Arbitrary, Debug)]
struct Control {
    /// What lies in the slot before anyone writes.
    words: Vec<u64>,
    sequence: u64,
    filled: Option<(Record, u32)>,
    room: u8,
    ops: Vec<Op>,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Append(u32),
    ReadNew,
    Get(usize),
    Record(u64),
    OwnRecord,
    /// Both ends look at the control part anew.
    Reopen,
    Notify,
    Acknowledge,
    Cancel,
    Decoded(u64),
    Write {
        at: u16,
        value: u64,
    },
    /// One of the fixed words.
    WriteFixed {
        at: u8,
        value: u64,
    },
}

fn finite(x: f32) -> f32 {
    if x.is_finite() { x } else { 0.5 }
}

impl Record {
    fn valid(&self) -> SequenceRecord {
        let size = |n: usize| n % (SIZE_MAX + 1);
        let own_rows = self.own_rows % (ROWS_MAX + 1);
        let slots: Vec<SlotRecord> = self.slots.iter().take(LIST_MAX).map(Slot::valid).collect();
        let mut segments: Vec<SegmentRecord> =
            self.segments.iter().take(LIST_MAX - 1).map(|s| s.valid(&slots, own_rows)).collect();
        segments.push(self.last.valid(&[], own_rows));
        SequenceRecord {
            slots,
            segments,
            own_rows,
            position: size(self.position),
            sampling: Sampling {
                temperature: finite(self.temperature),
                top_p: finite(self.top_p),
                seed: self.seed,
                max_new_tokens: self.max_new_tokens,
                stop: self.stop.iter().filter(|s| s.len() <= STOP_MAX).cloned().collect(),
            },
        }
    }
}

impl Slot {
    fn valid(&self) -> SlotRecord {
        SlotRecord {
            start: self.start % (SIZE_MAX + 1),
            end: self.end % (SIZE_MAX + 1),
            kv_offset: self.kv_offset % (SIZE_MAX + 1),
            rows: self.rows % (ROWS_MAX + 1),
            dtype: if self.bf16 { KvDtype::Bf16 } else { KvDtype::F32 },
        }
    }
}

impl Segment {
    fn valid(&self, slots: &[SlotRecord], own_rows: usize) -> SegmentRecord {
        let slot = self.slot.filter(|_| !slots.is_empty()).map(|n| usize::from(n) % slots.len());
        let room = slot.map_or(own_rows, |i| slots[i].rows);
        let first_row = self.first_row % (room + 1);
        SegmentRecord {
            slot,
            first_row,
            rows: self.rows % (room - first_row + 1),
            position: self.position % (SIZE_MAX + 1),
            shift: self.shift % (SIZE_MAX as i64 + 1),
        }
    }
}

fn same(a: &SequenceRecord, b: &SequenceRecord) {
    assert_eq!(a, b);
    // A zero and its negative are equal, and yet other bits.
    let bits = |s: &Sampling| (s.temperature.to_bits(), s.top_p.to_bits());
    assert_eq!(bits(&a.sampling), bits(&b.sampling));
}

fn bounded(record: &SequenceRecord) {
    assert!(record.slots.len() <= LIST_MAX && record.segments.len() <= LIST_MAX);
    assert!(record.sampling.stop.len() <= LIST_MAX);
    assert!(record.sampling.stop.iter().all(|s| s.len() <= STOP_MAX));
    assert!(record.own_rows <= ROWS_MAX && record.position <= SIZE_MAX);
    assert!(record.sampling.temperature.is_finite() && record.sampling.top_p.is_finite());
    for slot in &record.slots {
        assert!(slot.start.max(slot.end).max(slot.kv_offset) <= SIZE_MAX, "{slot:?}");
        assert!(slot.rows <= ROWS_MAX, "{slot:?}");
    }
    for segment in &record.segments {
        let room = segment.slot.map_or(record.own_rows, |i| record.slots[i].rows);
        assert!(segment.first_row + segment.rows <= room, "{segment:?} of {room} rows");
        assert!(segment.position <= SIZE_MAX, "{segment:?}");
        assert!(segment.shift.unsigned_abs() <= SIZE_MAX as u64, "{segment:?}");
    }
    assert_eq!(record.segments.last().map(|s| s.slot), Some(None), "the last run is its own");
}

fn decode(words: &[u64]) -> Option<SequenceRecord> {
    let before = Region::new(ALLOCATOR);
    let decoded = SequenceRecord::decode(words);
    let allocated = before.change().bytes_allocated;
    // An empty stop string takes one word and, the list being doubled, up to six in memory.
    let bound = size_of_val(words) * 8 + STOP_MAX + 4096;
    assert!(allocated <= bound, "{allocated} bytes for {} words", words.len());
    let record = decoded.ok()?;
    bounded(&record);
    let again = record.encode();
    assert!(again.len() <= words.len(), "it says more than was written");
    same(&SequenceRecord::decode(&again).expect("it was accepted before"), &record);
    Some(record)
}

impl Value {
    fn word(&self) -> u64 {
        match *self {
            Self::Any(word) => word,
            Self::Near { bit, by, negative } => {
                let near = (1u64 << (bit % 64)).wrapping_add_signed(i64::from(by));
                if negative { near.wrapping_neg() } else { near }
            }
        }
    }
}

fn edited(record: &Record, edits: &[(u16, Value)], cut: Option<u16>) {
    let record = record.valid();
    let mut words = record.encode();
    same(&decode(&words).expect("a valid record"), &record);
    if let Some(cut) = cut {
        let len = usize::from(cut) % words.len();
        assert!(decode(&words[..len]).is_none(), "{len} of {} words", words.len());
    }
    for (at, value) in edits {
        let at = usize::from(*at) % words.len();
        words[at] = value.word();
    }
    decode(&words);
}

/// Both ends of one control part, and what they must say if nobody else writes.
struct Ends {
    words: Words,
    control: SequenceControl,
    decoder: TokenLog,
    loader: TokenLog,
    tokens: Vec<u32>,
    unread: Vec<u32>,
    record: Option<SequenceRecord>,
    sequence: u64,
    honest: bool,
}

impl Ends {
    fn new(input: &Control) -> Self {
        let record = input.filled.as_ref().map(|(record, _)| record.valid());
        let encoded = record.as_ref().map(SequenceRecord::encode).unwrap_or_default();
        let room = usize::from(input.room) % TOKENS_MAX + 1;
        let words = Words::private(control_words(encoded.len(), room).max(input.words.len()));
        words.iter().zip(&input.words).for_each(|(word, &value)| {
            word.store(value, Ordering::SeqCst);
        });
        let control = SequenceControl::new(words.clone());
        let mut tokens = Vec::new();
        if let Some((_, first)) = input.filled {
            control.fill(input.sequence, &encoded, first);
            tokens.push(first);
        }
        let honest = record.is_some();
        Self {
            decoder: control.log(),
            loader: control.log(),
            unread: tokens.clone(),
            sequence: input.sequence,
            words,
            control,
            tokens,
            record,
            honest,
        }
    }

    fn write(&mut self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::SeqCst);
        self.honest = false;
    }

    fn append(&mut self, token: u32) {
        let (len, capacity) = (self.decoder.len(), self.decoder.capacity());
        let appended = self.decoder.append(token);
        assert_eq!(appended, len < capacity, "{len} of {capacity} tokens");
        if appended {
            assert_eq!(self.decoder.get(len), Some(token));
            assert_eq!(self.decoder.len(), len + 1);
            self.tokens.push(token);
            self.unread.push(token);
        }
    }

    fn record(&self, sequence: u64) {
        let found = self.control.record(sequence);
        let number = self.words[SEQUENCE].load(Ordering::SeqCst);
        let len = self.words[RECORD_LEN].load(Ordering::SeqCst);
        match &found {
            Ok(record) => {
                assert!(sequence == number && len < (self.words.len() - RECORD) as u64);
                bounded(record);
            }
            Err(e) => assert!(!self.honest || sequence != number, "{e}"),
        }
        if let (true, Ok(found), Some(record)) = (self.honest, &found, &self.record) {
            same(found, record);
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Append(token) => self.append(token),
            Op::ReadNew => {
                let new = self.loader.read_new();
                assert!(new.len() <= self.loader.capacity());
                assert!(!self.honest || new == self.unread, "{new:?} of {:?}", self.unread);
                self.unread.clear();
                assert!(self.loader.read_new().is_empty(), "tokens were read twice");
            }
            Op::Get(i) => {
                let got = self.loader.get(i);
                assert_eq!(got.is_some(), i < self.loader.len());
                assert!(!self.honest || got == self.tokens.get(i).copied());
            }
            Op::Record(sequence) => self.record(sequence),
            Op::OwnRecord => self.record(self.sequence),
            Op::Reopen => {
                (self.decoder, self.loader) = (self.control.log(), self.control.log());
                self.unread.clone_from(&self.tokens);
            }
            Op::Notify => {
                self.control.notify();
                assert!(!self.control.notify(), "two notifications at a time");
            }
            Op::Acknowledge => {
                self.control.acknowledge();
                assert!(self.control.notify(), "no notification after an answer");
            }
            Op::Cancel => {
                self.control.cancel();
                assert!(self.control.cancelled());
            }
            Op::Decoded(ns) => {
                let before = self.control.decode_ns();
                // A time that is no nonsense: what was there before may be.
                let ns = ns >> 16;
                self.control.add_decode_ns(ns);
                assert!(!self.honest || self.control.decode_ns() == before + ns);
            }
            Op::Write { at, value } => self.write(usize::from(at) % self.words.len(), value),
            Op::WriteFixed { at, value } => self.write(usize::from(at) % RECORD, value),
        }
        let room = self.words.len() - RECORD;
        for log in [&self.decoder, &self.loader] {
            assert!(log.capacity() <= room && log.len() <= log.capacity());
            assert_eq!(log.is_empty(), log.get(0).is_none());
        }
        assert!(
            !self.honest || self.words[COUNT].load(Ordering::SeqCst) as usize == self.tokens.len()
        );
    }
}

fuzz_target!(|input: Input| {
    match input {
        Input::Any(words) => drop(decode(&words)),
        Input::Edited { record, edits, cut } => edited(&record, &edits, cut),
        Input::Control(control) => {
            let mut ends = Ends::new(&control);
            control.ops.iter().for_each(|op| ends.run(op));
        }
    }
});
