//! Without overlap, requests go through in groups: all of a group are retrieved, then all are
//! loaded, then all are prefilled, then they are decoded; then comes the next group.
//!
//! That is what overlap is measured against (ADR 0021): the decoder forms its batches by the same
//! rule, and as large, in both.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// How long a group waits for more requests. The first one is being retrieved meanwhile.
const WINDOW: Duration = Duration::from_millis(5);

/// What a request goes through before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Retrieve,
    Load,
    Prefill,
}

const STAGES: usize = 3;

/// The door that groups are formed at.
pub struct Groups {
    /// Requests of a group at most.
    limit: usize,
    /// Whoever waits for a place, in order of arrival.
    door: tokio::sync::Mutex<()>,
    group: Mutex<Group>,
    /// The group has ended.
    ended: Notify,
    /// Wakes whoever keeps requests until all of their group are there.
    wake: Box<dyn Fn() + Send + Sync>,
}

/// The group that is on its way.
#[derive(Default)]
struct Group {
    number: u64,
    /// Nobody joins it any more.
    closed: bool,
    joined: usize,
    /// Those that have not ended.
    members: usize,
    /// Of these, those that are not through each stage.
    before: [usize; STAGES],
    /// The arena is too small for all of them at once: each goes on as it can.
    apart: bool,
}

/// A request's place in its group, until it ends.
pub struct Member {
    groups: Arc<Groups>,
    /// Stages it is through; nothing once it has left.
    through: Mutex<Option<usize>>,
}

impl Groups {
    pub fn new(limit: usize, wake: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            limit,
            door: tokio::sync::Mutex::default(),
            group: Mutex::default(),
            ended: Notify::new(),
            wake: Box::new(wake),
        })
    }

    /// Waits for a place, in order of arrival.
    pub async fn join(self: &Arc<Self>) -> Member {
        let _first = self.door.lock().await;
        loop {
            if let Some(member) = self.seat() {
                return member;
            }
            self.ended.notified().await;
        }
    }

    /// Somebody waits for memory that the group's requests hold: if these waited for each other,
    /// and one of them for that memory, it would be for ever.
    pub fn part(&self) {
        let mut group = self.group();
        if !group.apart {
            group.apart = true;
            drop(group);
            (self.wake)();
        }
    }

    fn group(&self) -> MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place in the group that is being formed, or in a new one; none while one is on its way.
    fn seat(self: &Arc<Self>) -> Option<Member> {
        let mut group = self.group();
        if group.members == 0 {
            *group = Group { number: group.number + 1, ..Group::default() };
            let (groups, number) = (Arc::clone(self), group.number);
            tokio::spawn(async move {
                tokio::time::sleep(WINDOW).await;
                groups.close(number);
            });
        }
        if group.closed {
            return None;
        }
        group.joined += 1;
        group.members += 1;
        group.before.iter_mut().for_each(|n| *n += 1);
        group.closed = group.joined == self.limit;
        Some(Member { groups: Arc::clone(self), through: Mutex::new(Some(0)) })
    }

    fn close(&self, number: u64) {
        let mut group = self.group();
        if group.number == number {
            group.closed = true;
            drop(group);
            (self.wake)();
        }
    }
}

impl Member {
    /// The request is through a stage, and those before it.
    pub fn through(&self, stage: Stage) {
        self.advance(Some(stage as usize + 1));
    }

    /// The request has ended.
    pub fn leave(&self) {
        self.advance(None);
    }

    fn advance(&self, to: Option<usize>) {
        let mut through = self.through.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(from) = *through else { return };
        let until = to.unwrap_or(STAGES);
        if to.is_some() && until <= from {
            return;
        }
        *through = to;
        let mut group = self.groups.group();
        group.before[from..until].iter_mut().for_each(|n| *n -= 1);
        if to.is_none() {
            group.members -= 1;
            if group.members == 0 {
                self.groups.ended.notify_one();
            }
        }
        drop(group);
        (self.groups.wake)();
    }

    /// Whether all of the group are through a stage.
    pub fn all_through(&self, stage: Stage) -> bool {
        let group = self.groups.group();
        group.closed && group.before[stage as usize] == 0 || group.apart && stage != Stage::Retrieve
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_group_closes_when_it_is_full_or_has_waited() {
        let groups = Groups::new(2, || {});
        let (a, b) = (groups.join().await, groups.join().await);
        assert!(groups.join().now_or_never().is_none(), "two are all");
        [&a, &b].iter().for_each(|m| assert!(!m.all_through(Stage::Retrieve)));
        a.through(Stage::Retrieve);
        assert!(!a.all_through(Stage::Retrieve));
        b.through(Stage::Load);
        assert!(a.all_through(Stage::Retrieve) && !a.all_through(Stage::Load));
        a.leave();
        assert!(b.all_through(Stage::Load), "who has left is waited for no longer");
        assert!(groups.join().now_or_never().is_none(), "one is on its way");
        drop(b);

        let c = groups.join().await;
        c.through(Stage::Prefill);
        assert!(!c.all_through(Stage::Retrieve), "others may join");
        while !c.all_through(Stage::Prefill) {
            tokio::time::sleep(WINDOW).await;
        }
        assert!(groups.join().now_or_never().is_none(), "it is too late");
    }

    #[tokio::test]
    async fn whoever_waits_is_next() {
        let groups = Groups::new(1, || {});
        let first = groups.join().await;
        let order = Mutex::new(Vec::new());
        let wait = async |i: usize| {
            let _member = groups.join().await;
            order.lock().unwrap().push(i);
        };
        let mut waiting = futures_util::future::join_all((0..3).map(wait)).boxed_local();
        assert!((&mut waiting).now_or_never().is_none());
        first.leave();
        waiting.await;
        assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
    }

    #[tokio::test]
    async fn what_does_not_fit_together_goes_apart() {
        static WOKEN: AtomicUsize = AtomicUsize::new(0);
        let groups = Groups::new(2, || {
            WOKEN.fetch_add(1, Ordering::SeqCst);
        });
        let (a, b) = (groups.join().await, groups.join().await);
        [&a, &b].iter().for_each(|m| m.through(Stage::Retrieve));
        a.through(Stage::Load);
        let before = WOKEN.load(Ordering::SeqCst);
        groups.part();
        groups.part();
        assert_eq!(WOKEN.load(Ordering::SeqCst), before + 1);
        assert!(a.all_through(Stage::Load) && a.all_through(Stage::Prefill));
        drop((a, b));
        let next = groups.join().await;
        next.through(Stage::Load);
        assert!(!next.all_through(Stage::Load), "the next group is another one");
    }
}
