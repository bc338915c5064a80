//! A fixed team of threads that work through regions of tasks, one region after another.
//!
//! A decoded token is some hundred and fifty regions of a few microseconds each, so what a region
//! costs beside its tasks decides. Between regions the members look at one word for a moment before
//! they sleep; a task is claimed by one compare-and-swap on that word; and a region ends when its
//! tasks are done, whoever has done them: a member that the kernel keeps off its core delays nobody
//! unless it has claimed a task. Idle members sleep.
//!
//! Which member runs a task must not matter to its result. A task that calls [`for_each`] itself
//! runs those tasks one after the other. A panic of a task is raised again by the caller, when all
//! other tasks of the region are done.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};

use crossbeam::utils::CachePadded;

/// Bits of a task number in [`Shared::word`].
const BITS: u32 = 20;
const MASK: u64 = (1 << BITS) - 1;
/// Tasks of a region at most.
const TASKS_MAX: usize = MASK as usize;
/// Looks at the word before a thread sleeps: some 50 µs. Longer than what lies between two
/// products, shorter than what would be missed by another process on the same core.
const LOOKS: u32 = 2_000;

type Tasks<'a> = dyn Fn(usize) + Sync + 'a;

/// What the members share.
struct Shared {
    /// The open region: its number, how many tasks it has and how many are claimed. Claiming is
    /// adding one; whoever succeeds knows that the region is open until this task is done.
    word: CachePadded<AtomicU64>,
    /// Tasks done.
    done: CachePadded<AtomicU32>,
    /// The region's tasks. Written by the leader while no region is open, read after a claim.
    tasks: UnsafeCell<Option<*const Tasks<'static>>>,
    /// Members that sleep, or are about to.
    sleeping: AtomicU32,
    /// The leader, while it sleeps or is about to.
    waiting: AtomicBool,
    leader: Mutex<Option<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `tasks` is written while no region is open and read while one is; see `claim`.
unsafe impl Send for Shared {}
// SAFETY: as above; what it points to is `Sync`.
unsafe impl Sync for Shared {}

/// Threads that compute together, and whoever asks them to.
pub struct Team {
    shared: Arc<Shared>,
    members: Vec<JoinHandle<()>>,
    /// Regions of two callers would get in each other's way.
    region: Mutex<()>,
}

thread_local! {
    /// The team this thread has installed.
    static INSTALLED: Cell<Option<*const Team>> = const { Cell::new(None) };
    /// This thread runs a task.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Puts a thread-local value back, also in a panic.
struct Restore<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy + 'static> Restore<T> {
    fn replace(key: &'static std::thread::LocalKey<Cell<T>>, value: T) -> Self {
        Self(key, key.replace(value))
    }
}

impl<T: Copy + 'static> Drop for Restore<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

impl Team {
    /// A team of `threads`, the calling one included: it starts one thread less.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn new(threads: usize, name: &str) -> std::io::Result<Self> {
        Self::with_start(threads, name, |_| {})
    }

    /// The same; each thread it starts, the first being 1, calls `start` with its number.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn with_start(
        threads: usize,
        name: &str,
        start: impl Fn(usize) + Clone + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            word: CachePadded::new(AtomicU64::new(0)),
            done: CachePadded::new(AtomicU32::new(0)),
            tasks: UnsafeCell::new(None),
            sleeping: AtomicU32::new(0),
            waiting: AtomicBool::new(false),
            leader: Mutex::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut team = Self { shared, members: Vec::new(), region: Mutex::new(()) };
        for i in 1..threads {
            let (shared, start) = (Arc::clone(&team.shared), start.clone());
            let member = std::thread::Builder::new().name(format!("{name}-{i}"));
            team.members.push(member.spawn(move || {
                start(i);
                shared.work();
            })?);
        }
        Ok(team)
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Runs `f`; regions it opens on this thread are this team's.
    pub fn install<R>(&self, f: impl FnOnce() -> R) -> R {
        let _restore = Restore::replace(&INSTALLED, Some(&raw const *self));
        f()
    }

    fn run(&self, count: usize, tasks: &Tasks<'_>) {
        // Nobody waits for another caller's region: it could be the one this is called from.
        let Ok(_region) = self.region.try_lock() else {
            return (0..count).for_each(tasks);
        };
        let s = &*self.shared;
        // SAFETY: no region is open, so no member reads `tasks`; they are done with it before this
        // function returns, which is before `tasks` goes away.
        unsafe {
            let tasks = std::mem::transmute::<*const Tasks<'_>, *const Tasks<'static>>(tasks);
            *s.tasks.get() = Some(tasks);
        }
        s.done.store(0, Ordering::Relaxed);
        let region = (s.word.load(Ordering::Relaxed) >> (2 * BITS)) + 1;
        s.word.store(region << (2 * BITS) | (count as u64) << BITS, Ordering::SeqCst);
        if s.sleeping.load(Ordering::SeqCst) > 0 {
            self.members.iter().for_each(|m| m.thread().unpark());
        }
        while s.claim_and_run() {}
        s.wait_until_done(count as u32);
        let panic = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(_region);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for member in self.members.drain(..) {
            member.thread().unpark();
            // A member ends in no other way than by returning.
            let _ = member.join();
        }
    }
}

impl Shared {
    /// Whether a task is left.
    fn has_tasks(&self) -> bool {
        let word = self.word.load(Ordering::SeqCst);
        word & MASK < word >> BITS & MASK
    }

    /// Runs one task if there is one left.
    fn claim_and_run(&self) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let (count, next) = (word >> BITS & MASK, word & MASK);
            if next >= count {
                return false;
            }
            let claim = self.word.compare_exchange_weak(
                word,
                word + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match claim {
                // Were the word of a later region that looks the same, the task would be that
                // one's, and as good.
                Ok(_) => {
                    self.run_task(next as usize, count as u32);
                    return true;
                }
                Err(now) => word = now,
            }
        }
    }

    fn run_task(&self, i: usize, count: u32) {
        // SAFETY: the task has been claimed and is not done, so the region is open: `tasks` is its
        // own, and alive.
        let tasks = unsafe { &*(*self.tasks.get()).unwrap_unchecked() };
        let busy = Restore::replace(&BUSY, true);
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| tasks(i))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
        drop(busy);
        // The last access to the region, unless it is the last task: then the leader may sleep.
        if self.done.fetch_add(1, Ordering::SeqCst) + 1 == count
            && self.waiting.load(Ordering::SeqCst)
            && let Some(leader) = &*self.leader.lock().unwrap_or_else(PoisonError::into_inner)
        {
            leader.unpark();
        }
    }

    fn wait_until_done(&self, count: u32) {
        for _ in 0..LOOKS {
            if self.done.load(Ordering::Acquire) == count {
                return;
            }
            std::hint::spin_loop();
        }
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        self.waiting.store(true, Ordering::SeqCst);
        while self.done.load(Ordering::SeqCst) != count {
            std::thread::park();
        }
        self.waiting.store(false, Ordering::SeqCst);
    }

    /// A member's life.
    fn work(&self) {
        let mut looks = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.claim_and_run() {
                looks = 0;
            } else if looks < LOOKS {
                looks += 1;
                std::hint::spin_loop();
            } else {
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                while !self.has_tasks() && !self.stop.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
                looks = 0;
            }
        }
    }
}

/// As many threads as the machine gives this process, for callers that have installed no team.
fn everyone() -> &'static Team {
    static TEAM: OnceLock<Team> = OnceLock::new();
    TEAM.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let alone = || Team::new(1, "compute");
        match Team::new(threads, "compute").or_else(|_| alone()) {
            Ok(team) => team,
            // A team of one starts no thread.
            Err(e) => unreachable!("{e}"),
        }
    })
}

fn with_current<R>(f: impl FnOnce(&Team) -> R) -> R {
    match INSTALLED.get() {
        // SAFETY: `install` keeps the team borrowed until it takes the pointer away again.
        Some(team) => f(unsafe { &*team }),
        None => f(everyone()),
    }
}

/// Threads that [`for_each`] would use here.
pub fn threads() -> usize {
    if BUSY.get() { 1 } else { with_current(Team::threads) }
}

/// Runs tasks `0..count` on the installed team, or else on a team of all cores, and returns when
/// all are done.
///
/// # Panics
/// If a task panics.
pub fn for_each(count: usize, tasks: impl Fn(usize) + Sync) {
    if count <= 1 || BUSY.get() {
        return (0..count).for_each(tasks);
    }
    assert!(count <= TASKS_MAX, "{count} tasks in one region");
    with_current(|team| {
        if team.members.is_empty() { (0..count).for_each(tasks) } else { team.run(count, &tasks) }
    });
}

/// A pointer that tasks of one region use for parts that do not overlap.
struct Parts<T>(*mut T);

// SAFETY: each part goes to one task.
unsafe impl<T: Send> Sync for Parts<T> {}

/// Calls `f` with the number of every piece of `len` elements, and the piece; the last one may be
/// shorter.
///
/// # Panics
/// If `len` is 0 or a task panics.
pub fn for_each_part<T: Send>(all: &mut [T], len: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let (total, parts) = (all.len(), Parts(all.as_mut_ptr()));
    let parts = &parts;
    for_each(total.div_ceil(len), move |i| {
        let first = i * len;
        // SAFETY: inside the slice, which is borrowed for as long as the region is open; parts of
        // different tasks do not overlap.
        let part =
            unsafe { std::slice::from_raw_parts_mut(parts.0.add(first), len.min(total - first)) };
        f(i, part);
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn team(threads: usize) -> Team {
        Team::new(threads, "test").unwrap()
    }

    #[test]
    fn every_task_runs_once_in_every_region() {
        for threads in 1..=4 {
            team(threads).install(|| {
                for count in (0..3_000).map(|i| i % 37) {
                    let runs: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    for_each(count, |i| {
                        runs[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
                }
            });
        }
    }

    #[test]
    fn members_that_sleep_wake() {
        let team = team(3);
        team.install(|| {
            for _ in 0..20 {
                while team.shared.sleeping.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
                // Each waits for the other, so that both must have woken.
                let all = std::sync::Barrier::new(3);
                for_each(3, |_| {
                    all.wait();
                });
            }
        });
    }

    #[test]
    fn parts_cover_a_slice() {
        team(3).install(|| {
            let mut all = vec![0; 1_000];
            for_each_part(&mut all, 7, |i, part| {
                part.iter_mut().enumerate().for_each(|(j, x)| *x += 7 * i + j);
            });
            assert!(all.into_iter().eq(0..1_000));
        });
    }

    #[test]
    fn a_region_inside_a_task_runs_there() {
        let (total, team) = (AtomicUsize::new(0), team(3));
        team.install(|| {
            for_each(8, |_| {
                let me = std::thread::current().id();
                assert_eq!(threads(), 1);
                for_each(8, |_| {
                    assert_eq!(std::thread::current().id(), me);
                    total.fetch_add(1, Ordering::Relaxed);
                });
            });
        });
        assert_eq!(total.into_inner(), 64);
    }

    #[test]
    fn a_panic_is_the_callers_and_the_team_goes_on() {
        let team = team(3);
        for round in 0..50 {
            let ran = AtomicUsize::new(0);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                team.install(|| {
                    for_each(16, |i| {
                        ran.fetch_add(1, Ordering::Relaxed);
                        assert!(i != round % 16, "task {i}");
                    });
                });
            }));
            let payload = outcome.unwrap_err();
            let text = payload.downcast_ref::<String>().unwrap();
            assert_eq!(*text, format!("task {}", round % 16));
            assert_eq!(ran.into_inner(), 16);
        }
    }

    #[test]
    fn two_callers_do_not_wait_for_each_other() {
        let team = team(2);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    team.install(|| {
                        for _ in 0..2_000 {
                            let sum = AtomicUsize::new(0);
                            for_each(10, |i| {
                                sum.fetch_add(i, Ordering::Relaxed);
                            });
                            assert_eq!(sum.into_inner(), 45);
                        }
                    });
                });
            }
        });
    }
}
