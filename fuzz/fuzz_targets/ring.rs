//! A ring against a bounded queue, with a peer that may write anything into the indexes. Nobody
//! tampering, the two are the same; otherwise nothing is read or written outside of the ring, and
//! every answer follows from the index that was found.
#![no_main]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use matkv_ring::layout::{FIRST, HEAD, PARKED, TAIL};
use matkv_ring::{Consumer, DESCRIPTOR_WORDS, Producer, QueueError, ring_words};
use matkv_sys::{Doorbell, Region, Words};

type Descriptor = [u64; DESCRIPTOR_WORDS];

const CAPACITY_BITS_MAX: u8 = 6;
/// The ring lies between pages that are not its own.
const START: usize = 4096;
const OUTSIDE: u64 = 0xdead_dead_dead_dead;
const INSIDE: u64 = 0x4d4b << 48;

#[derive(Arbitrary, Debug)]
struct Input {
    capacity_bits: u8,
    start: u64,
    /// Index the consumer's side pretends to have come to before the ends are made.
    pretended: Option<u64>,
    bell: bool,
    /// Without it, tampering is left out: the model then holds for the whole run.
    hostile: bool,
    ops: Vec<Op>,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Publish(u8),
    Take,
    TakeAll,
    Room,
    HasNext,
    Park,
    /// Harmless: the consumer merely seems to sleep.
    Parked(u64),
    Write {
        head: bool,
        value: u64,
    },
    Move {
        head: bool,
        by: i16,
    },
}

struct Ring {
    region: Arc<Region>,
    words: Words,
    capacity: usize,
    producer: Producer,
    consumer: Consumer,
    model: VecDeque<u64>,
    /// Number of the next descriptor to publish.
    next: u64,
    /// What each end must hold as its own index, whatever the words say.
    tail: u64,
    head: u64,
    /// Places and descriptors that some possible index has granted and that are not used up.
    room: u64,
    promised: u64,
    tampered: bool,
}

fn descriptor(n: u64) -> Descriptor {
    std::array::from_fn(|i| INSIDE | (n << 3) | i as u64)
}

impl Ring {
    fn new(input: &Input) -> Self {
        let capacity = 1 << (input.capacity_bits % (CAPACITY_BITS_MAX + 1));
        let end = START + ring_words(capacity) * 8;
        let region = Region::anonymous(end + 4096);
        let all = region.words(0..region.len()).expect("the whole region");
        all.iter().for_each(|word| word.store(OUTSIDE, Ordering::SeqCst));
        let words = region.words(START..end).expect("the ring");
        words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        let pretended = input.pretended.filter(|_| input.hostile).unwrap_or(input.start);
        words[TAIL].store(input.start, Ordering::SeqCst);
        words[HEAD].store(pretended, Ordering::SeqCst);
        let bell = || input.bell.then(|| Doorbell::new(&region, 0).expect("a bell"));
        Self {
            producer: Producer::new(words.clone(), capacity, bell()),
            consumer: Consumer::new(words.clone(), capacity, bell()),
            words,
            capacity,
            model: VecDeque::new(),
            next: 0,
            tail: input.start,
            head: pretended,
            room: 0,
            promised: 0,
            tampered: pretended != input.start,
            region,
        }
    }

    fn word(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::SeqCst)
    }

    /// An impossible index grants nothing, neither now nor to a later call.
    fn observe(&mut self) {
        let capacity = self.capacity as u64;
        let room = capacity.checked_sub(self.tail.wrapping_sub(self.word(HEAD)));
        self.room = self.room.max(room.unwrap_or(0));
        let ahead = self.word(TAIL).wrapping_sub(self.head);
        self.promised = self.promised.max(if ahead <= capacity { ahead } else { 0 });
    }

    fn tamper(&mut self, head: bool, value: impl Fn(u64) -> u64) {
        let at = if head { HEAD } else { TAIL };
        let (found, value) = (self.word(at), value(self.word(at)));
        self.words[at].store(value, Ordering::SeqCst);
        self.tampered |= value != found;
    }

    fn publish(&mut self, count: usize) {
        let batch: Vec<Descriptor> = (0..count as u64).map(|i| descriptor(self.next + i)).collect();
        let fits = self.model.len() + count <= self.capacity;
        match self.producer.publish(&batch) {
            Ok(()) => {
                assert!(self.tampered || fits, "{count} more than fit");
                let room = self.room.checked_sub(count as u64);
                self.room = room.expect("no possible index has left that much room");
                self.model.extend(self.next..self.next + count as u64);
                self.next += count as u64;
                self.tail = self.tail.wrapping_add(count as u64);
                assert_eq!(self.word(TAIL), self.tail);
            }
            Err(QueueError::Full { capacity }) => {
                assert_eq!(capacity, self.capacity);
                assert!(self.tampered || !fits, "full with {}", self.model.len());
            }
            Err(e) => {
                let head = self.word(HEAD);
                self.corrupt(&e, head, self.tail, self.tail.wrapping_sub(head));
            }
        }
    }

    fn take(&mut self) -> bool {
        // Every descriptor taken makes other indexes possible.
        self.observe();
        match self.consumer.take() {
            Ok(Some(found)) => {
                let expected = self.model.pop_front();
                let promised = self.promised.checked_sub(1);
                self.promised = promised.expect("no possible index has promised it");
                if self.tampered {
                    self.check_origin(&found);
                } else {
                    assert_eq!(Some(found), expected.map(descriptor));
                }
                self.head = self.head.wrapping_add(1);
                assert_eq!(self.word(HEAD), self.head);
                true
            }
            Ok(None) => {
                assert!(self.tampered || self.model.is_empty(), "{} are lost", self.model.len());
                assert_eq!(self.word(TAIL), self.head);
                false
            }
            Err(e) => {
                let tail = self.word(TAIL);
                self.corrupt(&e, tail, self.head, tail.wrapping_sub(self.head));
                false
            }
        }
    }

    fn room(&mut self) {
        let fill = self.tail.wrapping_sub(self.word(HEAD));
        match self.producer.room() {
            Ok(room) => {
                assert_eq!(Some(room as u64), (self.capacity as u64).checked_sub(fill));
                assert!(self.tampered || room == self.capacity - self.model.len());
            }
            Err(e) => {
                let head = self.word(HEAD);
                self.corrupt(&e, head, self.tail, self.tail.wrapping_sub(head));
            }
        }
    }

    /// `fill` is what the two indexes together say that the ring holds.
    fn corrupt(&self, error: &QueueError, peer: u64, own: u64, fill: u64) {
        assert!(self.tampered, "{error} though nobody has tampered");
        let expected = QueueError::Corrupt { found: peer, own, capacity: self.capacity };
        assert_eq!(*error, expected);
        assert!(fill > self.capacity as u64, "{error} is possible");
    }

    /// Once published, or a place never written: nothing else lies in the ring.
    fn check_origin(&self, found: &Descriptor) {
        let n = (found[0] & !INSIDE) >> 3;
        let published = n < self.next && *found == descriptor(n);
        assert!(published || *found == [0; DESCRIPTOR_WORDS], "{found:x?} is not of this ring");
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Publish(n) => self.publish(usize::from(n) % (self.capacity + 3)),
            Op::Take => drop(self.take()),
            // Bounded, because a tampered index can promise descriptors without end.
            Op::TakeAll => drop((0..self.capacity).all(|_| self.take())),
            Op::Room => self.room(),
            Op::HasNext => {
                let has = self.consumer.has_next();
                assert_eq!(has, self.word(TAIL) != self.head);
                assert!(self.tampered || has != self.model.is_empty());
            }
            Op::Park => {
                self.consumer.park(Duration::ZERO);
                let bell = Doorbell::new(&self.region, 0).expect("a bell");
                bell.ring();
            }
            Op::Parked(value) => self.words[PARKED].store(value, Ordering::SeqCst),
            Op::Write { head, value } => self.tamper(head, |_| value),
            Op::Move { head, by } => {
                self.tamper(head, |found| found.wrapping_add_signed(i64::from(by)));
            }
        }
    }

    fn nothing_outside(&self) {
        let all = self.region.words(0..self.region.len()).expect("the whole region");
        let own = self.words.range();
        for (at, word) in all.iter().enumerate() {
            // The first word is the bell.
            if at > 0 && !own.contains(&(at * 8)) {
                assert_eq!(word.load(Ordering::SeqCst), OUTSIDE, "word {at} was written");
            }
        }
        let gaps = (0..FIRST).filter(|at| ![TAIL, HEAD, PARKED].contains(at));
        gaps.for_each(|at| assert_eq!(self.word(at), 0, "word {at} of the ring was written"));
    }
}

fuzz_target!(|input: Input| {
    let mut ring = Ring::new(&input);
    ring.observe();
    for op in &input.ops {
        let tampers = matches!(op, Op::Write { .. } | Op::Move { .. });
        if input.hostile || !tampers {
            ring.run(op);
            ring.observe();
        }
    }
    ring.nothing_outside();
});
