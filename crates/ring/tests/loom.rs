//! Every interleaving of the ring's protocol, within a bound of preemptions, on the code that
//! runs: only the memory under it is simulated.
//!
//! Descriptor words, log entries and slots are plain cells here: loom fails a run in which two
//! threads touch one without an order between them. That is stricter than the real memory, whose
//! words are atomic so that a peer that breaks the rules is harmless.
//!
//! A model that cannot fail proves nothing. Each has negative controls: the same model over
//! memory in which one ordering is missing must fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use matkv_ring::layout::{CANCEL, COUNT, HEAD, NOTIFIED, PARKED, TAIL};
use matkv_ring::{
    Bell, Consumer, DESCRIPTOR_WORDS, Memory, Producer, QueueError, SequenceControl, control_words,
    ring_words,
};

/// Descriptors of the rings here: the smallest capacity that wraps and fills.
const CAPACITY: usize = 2;
/// Times a thread is interrupted where it need not be.
const PREEMPTIONS: usize = 6;

/// What a negative control leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The release or acquire of accesses to this word.
    Order(usize),
    /// The fence.
    Fence,
}

enum Cell {
    Atomic(AtomicU64),
    Plain(UnsafeCell<u64>),
}

// SAFETY: plain cells are shared on purpose; loom checks every access for an order.
unsafe impl Sync for Cell {}

/// One thread's view of memory that all of them share.
#[derive(Clone)]
struct Simulated {
    cells: Arc<Vec<Cell>>,
    missing: Missing,
}

impl Simulated {
    fn new(count: usize, atomic: &[usize]) -> Self {
        let cell = |at| match atomic.contains(&at) {
            true => Cell::Atomic(AtomicU64::new(0)),
            false => Cell::Plain(UnsafeCell::new(0)),
        };
        Self { cells: Arc::new((0..count).map(cell).collect()), missing: Missing::Nothing }
    }

    fn ring() -> Self {
        Self::new(ring_words(CAPACITY), &[TAIL, HEAD, PARKED])
    }

    /// The control part of a sequence with a record of one word and room for eight tokens.
    fn control() -> Self {
        Self::new(control_words(1, 8), &[CANCEL, NOTIFIED, COUNT])
    }

    fn without(&self, missing: Missing) -> Self {
        Self { cells: Arc::clone(&self.cells), missing }
    }

    fn order(&self, at: usize, order: Ordering) -> Ordering {
        if self.missing == Missing::Order(at) { Ordering::Relaxed } else { order }
    }
}

impl Memory for Simulated {
    fn count(&self) -> usize {
        self.cells.len()
    }

    fn load(&self, at: usize, order: Ordering) -> u64 {
        match &self.cells[at] {
            Cell::Atomic(word) => word.load(self.order(at, order)),
            // SAFETY: loom fails the run if a write is not ordered before or after this.
            Cell::Plain(cell) => cell.with(|p| unsafe { *p }),
        }
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        match &self.cells[at] {
            Cell::Atomic(word) => word.store(value, self.order(at, order)),
            // SAFETY: loom fails the run if any access is not ordered before or after this.
            Cell::Plain(cell) => cell.with_mut(|p| unsafe { *p = value }),
        }
    }

    fn swap(&self, at: usize, value: u64, order: Ordering) -> u64 {
        match &self.cells[at] {
            Cell::Atomic(word) => word.swap(value, self.order(at, order)),
            Cell::Plain(_) => unreachable!("word {at} is not swapped"),
        }
    }

    fn fence(&self, order: Ordering) {
        if self.missing != Missing::Fence {
            fence(order);
        }
    }
}

/// A futex: the kernel compares and sleeps under the lock of its bucket, and wakes under it.
#[derive(Clone)]
struct Futex {
    shared: Arc<(AtomicU32, Mutex<()>, Condvar)>,
    /// A negative control: the waker does not change the count.
    counts: bool,
}

impl Futex {
    fn new(counts: bool) -> Self {
        let shared = Arc::new((AtomicU32::new(0), Mutex::new(()), Condvar::new()));
        Self { shared, counts }
    }
}

impl Bell for Futex {
    fn count(&self) -> u32 {
        self.shared.0.load(Ordering::SeqCst)
    }

    fn ring(&self) {
        if self.counts {
            self.shared.0.fetch_add(1, Ordering::SeqCst);
        }
        drop(self.shared.1.lock().unwrap());
        self.shared.2.notify_all();
    }

    /// Never times out: a lost wake-up is a deadlock, which loom reports.
    fn wait(&self, seen: u32, _: Duration) {
        let bucket = self.shared.1.lock().unwrap();
        if self.shared.0.load(Ordering::SeqCst) == seen {
            drop(self.shared.2.wait(bucket).unwrap());
        }
    }
}

type Writer = Producer<Simulated, Futex>;
type Reader = Consumer<Simulated, Futex>;

fn writer(words: Simulated) -> Writer {
    Producer::new(words, CAPACITY, None)
}

fn reader(words: Simulated) -> Reader {
    Consumer::new(words, CAPACITY, None)
}

fn publish(writer: &mut Writer, n: u64) {
    while let Err(e) = writer.publish(&[[n; DESCRIPTOR_WORDS]]) {
        assert_eq!(e, QueueError::Full { capacity: CAPACITY });
        thread::yield_now();
    }
}

fn poll(reader: &mut Reader) -> Option<u64> {
    let words = reader.take().expect("a possible index")?;
    assert_eq!(words, [words[0]; DESCRIPTOR_WORDS], "a torn descriptor");
    Some(words[0])
}

fn take(reader: &mut Reader) -> u64 {
    loop {
        if let Some(n) = poll(reader) {
            return n;
        }
        thread::yield_now();
    }
}

/// Runs a model in every interleaving, and says how many there were.
fn check(what: &str, model: impl Fn() + Sync + Send + 'static) {
    let runs = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counter = Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{what}: {} interleavings", runs.load(Ordering::Relaxed));
}

/// How loom says that a model is wrong.
const RACE: &str = "Causality violation";
const LOST_WAKE_UP: &str = "deadlock";
const NO_END: &str = "exceeded maximum number of branches";

/// The negative control of a model: it must fail, and in the way that the missing part causes.
fn must_fail(what: &str, how: &str, model: impl Fn() + Sync + Send + 'static) {
    let outcome = catch_unwind(AssertUnwindSafe(|| check(what, model)));
    let panic = outcome.expect_err("a model that does not notice proves nothing");
    let text = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| {
        panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).unwrap_or_default()
    });
    assert!(text.contains(how), "{what}: failed with {text:?}, not with {how:?}");
}

/// Publish, take, and publish over what was taken: all arrive whole and in order.
fn publish_and_take(producer: Missing, consumer: Missing) {
    const LAST: u64 = CAPACITY as u64 + 1;
    let words = Simulated::ring();
    let mut writer = writer(words.without(producer));
    let mut reader = reader(words.without(consumer));
    let peer = thread::spawn(move || (1..=LAST).for_each(|n| publish(&mut writer, n)));
    (1..=LAST).for_each(|n| assert_eq!(take(&mut reader), n));
    peer.join().unwrap();
    assert_eq!(poll(&mut reader), None);
}

#[test]
fn descriptors_arrive_whole_and_in_order() {
    check("publish, take", || publish_and_take(Missing::Nothing, Missing::Nothing));
    let cases = [
        ("tail stored without release", Missing::Order(TAIL), Missing::Nothing),
        ("tail loaded without acquire", Missing::Nothing, Missing::Order(TAIL)),
        ("head stored without release", Missing::Nothing, Missing::Order(HEAD)),
        ("head loaded without acquire", Missing::Order(HEAD), Missing::Nothing),
    ];
    for (what, producer, consumer) in cases {
        must_fail(what, RACE, move || publish_and_take(producer, consumer));
    }
}

/// A consumer that sleeps when there is nothing is woken by the next descriptor.
fn park_and_wake(producer: Missing, consumer: Missing, counts: bool) {
    let (words, bell) = (Simulated::ring(), Futex::new(counts));
    let mut writer = Producer::new(words.without(producer), CAPACITY, Some(bell.clone()));
    let mut reader = Consumer::new(words.without(consumer), CAPACITY, Some(bell));
    let peer = thread::spawn(move || (1..=2).for_each(|n| publish(&mut writer, n)));
    for n in 1..=2 {
        loop {
            match poll(&mut reader) {
                Some(got) => break assert_eq!(got, n),
                None => reader.park(Duration::MAX),
            }
        }
    }
    peer.join().unwrap();
}

#[test]
fn a_parked_consumer_is_woken() {
    check("park, wake", || park_and_wake(Missing::Nothing, Missing::Nothing, true));
    must_fail("no fence between tail and parked flag", LOST_WAKE_UP, || {
        park_and_wake(Missing::Fence, Missing::Nothing, true);
    });
    must_fail("no fence between parked flag and tail", LOST_WAKE_UP, || {
        park_and_wake(Missing::Nothing, Missing::Fence, true);
    });
    must_fail("a bell that does not count", LOST_WAKE_UP, || {
        park_and_wake(Missing::Nothing, Missing::Nothing, false);
    });
}

/// A slot changes hands twice: A fills it and publishes, B claims it, reads, writes and releases
/// it, A reads the result and fills it again for the next sequence.
fn claim_and_release(submission: Missing, completion: Missing) {
    let (submissions, completions) = (Simulated::ring(), Simulated::ring());
    let slot = Simulated::new(1, &[]);
    let mut submit = writer(submissions.without(submission));
    let mut claim = reader(submissions);
    let mut release = writer(completions.without(completion));
    let mut done = reader(completions);
    let b_slot = slot.clone();
    let b = thread::spawn(move || {
        for sequence in 1..=2 {
            assert_eq!(take(&mut claim), sequence);
            assert_eq!(b_slot.load(0, Ordering::Relaxed), 10 * sequence);
            b_slot.store(0, 10 * sequence + 1, Ordering::Relaxed);
            publish(&mut release, sequence);
        }
    });
    for sequence in 1..=2 {
        slot.store(0, 10 * sequence, Ordering::Relaxed);
        publish(&mut submit, sequence);
        assert_eq!(take(&mut done), sequence);
        assert_eq!(slot.load(0, Ordering::Relaxed), 10 * sequence + 1);
    }
    b.join().unwrap();
}

#[test]
fn a_slot_belongs_to_one_side_at_a_time() {
    check("claim, release", || claim_and_release(Missing::Nothing, Missing::Nothing));
    must_fail("published without release", RACE, || {
        claim_and_release(Missing::Order(TAIL), Missing::Nothing);
    });
    must_fail("released without release", RACE, || {
        claim_and_release(Missing::Nothing, Missing::Order(TAIL));
    });
}

/// What A does when a "tokens" descriptor arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receipt {
    AcknowledgeThenRead,
    /// A negative control.
    ReadThenAcknowledge,
}

/// B appends tokens and notifies; A, told of one change at a time, misses none. Every descriptor
/// finds room without waiting, because at most one "tokens" is under way.
fn coalesced_tokens(decoder: Missing, receipt: Receipt) {
    const FIRST_TOKEN: u32 = 40;
    const TOKENS: u32 = 3;
    let (completions, words) = (Simulated::ring(), Simulated::control());
    SequenceControl::new(words.clone()).fill(1, &[0], FIRST_TOKEN);
    let mut post = writer(completions.clone());
    let mut posted = reader(completions);
    let b_words = words.without(decoder);
    let b = thread::spawn(move || {
        let control = SequenceControl::new(b_words);
        let mut log = control.log();
        for i in 1..=TOKENS {
            assert!(log.append(FIRST_TOKEN + i));
            if control.notify() {
                // A ring of two with one "tokens" under way is never full.
                post.publish(&[[7; DESCRIPTOR_WORDS]]).expect("room without waiting");
            }
        }
    });
    let control = SequenceControl::new(words);
    let mut log = control.log();
    let mut seen = Vec::new();
    while seen.len() <= TOKENS as usize {
        match poll(&mut posted) {
            Some(_) if receipt == Receipt::AcknowledgeThenRead => {
                control.acknowledge();
                seen.extend(log.read_new());
            }
            Some(_) => {
                seen.extend(log.read_new());
                control.acknowledge();
            }
            // With B silent and nothing in the ring, no token will ever come: loom sees a loop
            // without end and fails.
            None => thread::yield_now(),
        }
    }
    assert_eq!(seen, (0..=TOKENS).map(|i| FIRST_TOKEN + i).collect::<Vec<_>>());
    b.join().unwrap();
}

#[test]
fn no_token_is_missed() {
    check("append, notify", || {
        coalesced_tokens(Missing::Nothing, Receipt::AcknowledgeThenRead);
    });
    must_fail("tokens counted without release", RACE, || {
        coalesced_tokens(Missing::Order(COUNT), Receipt::AcknowledgeThenRead);
    });
    must_fail("notified without order", NO_END, || {
        coalesced_tokens(Missing::Order(NOTIFIED), Receipt::AcknowledgeThenRead);
    });
    must_fail("read before acknowledging", NO_END, || {
        coalesced_tokens(Missing::Nothing, Receipt::ReadThenAcknowledge);
    });
}
