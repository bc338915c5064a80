//! What every eviction policy must do, and what tells them apart.

use std::collections::BTreeSet;

use matkv_store::policy::{Item, Policy, PolicyKind};
use proptest::prelude::*;

const USED: Item = Item { bytes: 100, cost: 1.0, frequency: 1.0 };
const UNUSED: Item = Item { frequency: 0.0, ..USED };

fn evict(policy: &mut dyn Policy<u32>) -> Option<u32> {
    policy.evict(&mut |_| true)
}

fn drain(policy: &mut dyn Policy<u32>) -> Vec<u32> {
    std::iter::from_fn(|| evict(policy)).collect()
}

fn filled(kind: PolicyKind, keys: impl IntoIterator<Item = u32>) -> Box<dyn Policy<u32>> {
    let mut policy = kind.build();
    keys.into_iter().for_each(|k| policy.insert(k, USED));
    policy
}

/// Everything leaves exactly once, and nothing that is not there.
#[test]
fn every_resident_leaves_once() {
    for kind in PolicyKind::ALL {
        let mut policy = filled(kind, 0..50);
        (0..50).step_by(3).for_each(|k| policy.access(&k));
        policy.remove(&7);
        assert_eq!(policy.len(), 49, "{kind:?}");
        let gone = drain(&mut *policy);
        let set: BTreeSet<u32> = gone.iter().copied().collect();
        assert_eq!(set, (0..50).filter(|k| *k != 7).collect(), "{kind:?}");
        assert_eq!((gone.len(), policy.is_empty()), (49, true), "{kind:?}");
    }
}

/// A key has one entry, however often it is inserted, and a removed one is gone.
#[test]
fn inserting_again_replaces_and_removing_twice_does_nothing() {
    for kind in PolicyKind::ALL {
        let mut policy = filled(kind, [1, 2, 1, 1]);
        policy.insert(1, Item { bytes: 7, ..USED });
        assert_eq!(policy.len(), 2, "{kind:?}");
        policy.remove(&2);
        policy.remove(&2);
        policy.remove(&99);
        policy.access(&99);
        policy.warm(&99);
        assert_eq!((policy.len(), drain(&mut *policy)), (1, vec![1]), "{kind:?}");
    }
}

/// With everything pinned it gives up, and nothing is lost by that.
#[test]
fn what_may_not_leave_stays() {
    for kind in PolicyKind::ALL {
        let mut policy = filled(kind, 0..30);
        (0..30).for_each(|k| (0..k % 5).for_each(|_| policy.access(&k)));
        assert_eq!(policy.evict(&mut |_| false), None, "{kind:?}");
        assert_eq!(policy.len(), 30, "{kind:?}");
        assert_eq!(policy.evict(&mut |k| *k == 17), Some(17), "{kind:?}");
        assert_eq!(policy.evict(&mut |k| *k == 17), None, "{kind:?}");
        assert_eq!(drain(&mut *policy).len(), 29, "{kind:?}");
    }
}

/// Whichever single resident may leave is found, wherever the policy keeps it.
#[test]
fn the_only_one_that_may_leave_is_found() {
    for kind in PolicyKind::ALL {
        // Some of these come back, and some are used, so that every queue has something.
        let mut policy = filled(kind, 0..40);
        (0..10).for_each(|k| (0..2).for_each(|_| policy.access(&k)));
        let gone: Vec<u32> = (0..20).filter_map(|_| evict(&mut *policy)).collect();
        gone.iter().for_each(|k| policy.insert(*k, USED));
        (40..50).for_each(|k| policy.insert(k, USED));
        for k in 0..50 {
            assert_eq!(policy.evict(&mut |c| *c == k), Some(k), "{kind:?}");
            policy.insert(k, USED);
        }
    }
}

#[test]
fn lru_lets_the_one_go_whose_use_is_longest_ago() {
    let mut policy = filled(PolicyKind::Lru, [1, 2, 3]);
    policy.access(&1);
    policy.insert(2, USED);
    assert_eq!(drain(&mut *policy), [3, 1, 2]);
}

/// What nobody has asked for yet makes room for what somebody has, in order of arrival.
#[test]
fn unused_ones_leave_before_used_ones() {
    for kind in [PolicyKind::Lru, PolicyKind::Gdsf, PolicyKind::SemanticLru] {
        let mut policy = filled(kind, [1, 2]);
        (3..6).for_each(|k| policy.insert(k, UNUSED));
        policy.access(&4);
        assert_eq!(drain(&mut *policy)[..2], [3, 5], "{kind:?}");
    }
}

/// Value per byte: cost and use keep, bytes do not; and no value is for ever.
#[test]
fn gdsf_keeps_what_is_costly_and_small() {
    let mut policy: Box<dyn Policy<u32>> = PolicyKind::Gdsf.build();
    policy.insert(1, Item { bytes: 100, cost: 10.0, frequency: 1.0 });
    policy.insert(2, Item { bytes: 10, cost: 10.0, frequency: 1.0 });
    policy.insert(3, Item { bytes: 100, cost: 1.0, frequency: 1.0 });
    policy.insert(4, Item { bytes: 100, cost: 1.0, frequency: 3.0 });
    assert_eq!(drain(&mut *policy), [3, 4, 1, 2]);
    // An insert of the same key counts with its new size.
    policy.insert(1, Item { bytes: 10, ..USED });
    policy.insert(2, Item { bytes: 20, ..USED });
    policy.insert(1, Item { bytes: 40, ..USED });
    assert_eq!(evict(&mut *policy), Some(1));
    // Ten times as valuable as the rest, but never used: it is overtaken.
    policy.insert(0, Item { cost: 10.0, ..USED });
    let leaves = (10..100).find(|k| {
        policy.insert(*k, USED);
        evict(&mut *policy) == Some(0)
    });
    assert!(leaves.is_some_and(|k| k > 15), "{leaves:?}");
}

/// Odd numbers do not upset the order.
#[test]
fn gdsf_takes_any_number() {
    let mut policy: Box<dyn Policy<u32>> = PolicyKind::Gdsf.build();
    policy.insert(1, Item { bytes: 0, cost: f64::NAN, frequency: 1.0 });
    policy.insert(2, Item { bytes: u64::MAX, cost: -1.0, frequency: 1.0 });
    policy.insert(3, Item { bytes: 1, cost: 1e9, frequency: 1e9 });
    (0..5).for_each(|_| policy.access(&1));
    assert_eq!(drain(&mut *policy).last(), Some(&3));
}

#[test]
fn only_semantic_lru_is_warmed_by_a_neighbour() {
    let first_out = |kind| {
        let mut policy = filled(kind, [1, 2]);
        policy.warm(&1);
        evict(&mut *policy)
    };
    assert_eq!(first_out(PolicyKind::SemanticLru), Some(2));
    for kind in [PolicyKind::Lru, PolicyKind::Gdsf, PolicyKind::S3Fifo] {
        assert_eq!(first_out(kind), Some(1), "{kind:?}");
    }
}

/// Of 20 hot keys, how many outlive a scan of 2,000 keys through room for 100.
fn hot_after_scan(kind: PolicyKind) -> usize {
    let mut policy = filled(kind, 0..20);
    (0..3).for_each(|_| (0..20).for_each(|k| policy.access(&k)));
    let mut resident: BTreeSet<u32> = (0..20).collect();
    for k in 1000..3000 {
        policy.insert(k, USED);
        resident.insert(k);
        while policy.len() > 100 {
            let gone = evict(&mut *policy);
            assert!(gone.is_some_and(|g| resident.remove(&g)));
        }
    }
    resident.range(..20).count()
}

#[test]
fn a_scan_does_not_flush_s3fifo() {
    assert_eq!(hot_after_scan(PolicyKind::Lru), 0);
    assert!(hot_after_scan(PolicyKind::S3Fifo) >= 18);
}

/// A key that comes back soon after the small queue has dropped it is kept by the main one.
#[test]
fn s3fifo_remembers_what_it_dropped() {
    let mut policy = filled(PolicyKind::S3Fifo, 0..20);
    assert_eq!(evict(&mut *policy), Some(0));
    policy.insert(0, USED);
    (100..110).for_each(|k| policy.insert(k, USED));
    let gone: Vec<u32> = (0..25).filter_map(|_| evict(&mut *policy)).collect();
    assert!(!gone.contains(&0), "{gone:?}");
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u32, u64, f64, f64),
    Access(u32),
    Warm(u32),
    Remove(u32),
    /// With these keys pinned.
    Evict(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let key = 0u32..24;
    let insert = (key.clone(), 1u64..1000, 0.0..10.0, 0.0..4.0);
    prop_oneof![
        4 => insert.prop_map(|(k, b, c, f)| Op::Insert(k, b, c, f)),
        3 => key.clone().prop_map(Op::Access),
        1 => key.clone().prop_map(Op::Warm),
        1 => key.prop_map(Op::Remove),
        3 => any::<u32>().prop_map(Op::Evict),
    ]
}

fn step(policy: &mut dyn Policy<u32>, model: &mut BTreeSet<u32>, op: &Op) {
    match *op {
        Op::Insert(key, bytes, cost, frequency) => {
            policy.insert(key, Item { bytes, cost, frequency });
            model.insert(key);
        }
        Op::Access(key) => policy.access(&key),
        Op::Warm(key) => policy.warm(&key),
        Op::Remove(key) => {
            policy.remove(&key);
            model.remove(&key);
        }
        Op::Evict(pinned) => {
            let is_pinned = |k: &u32| pinned >> k & 1 == 1;
            match policy.evict(&mut |k| !is_pinned(k)) {
                Some(key) => assert!(!is_pinned(&key) && model.remove(&key), "{key} left"),
                None => assert!(model.iter().all(is_pinned), "of {model:?} none left"),
            }
        }
    }
    assert_eq!(policy.len(), model.len());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any history: the same residents as a plain set, evictions only of what is there and may
    /// leave, and none refused while something may.
    #[test]
    fn any_history_agrees_with_a_set(ops in prop::collection::vec(op(), 0..200)) {
        for kind in PolicyKind::ALL {
            let (mut policy, mut model) = (kind.build(), BTreeSet::new());
            ops.iter().for_each(|op| step(&mut *policy, &mut model, op));
            let left: BTreeSet<u32> = drain(&mut *policy).into_iter().collect();
            prop_assert_eq!(left, model, "{:?}", kind);
        }
    }

    /// Without pins, LRU is the list it is defined as.
    #[test]
    fn lru_is_a_list(ops in prop::collection::vec((0u32..12, 0u8..3), 0..100)) {
        let mut policy = filled(PolicyKind::Lru, []);
        let mut list: Vec<u32> = Vec::new();
        for (key, what) in ops {
            let known = list.iter().position(|k| *k == key);
            match what {
                0 => policy.insert(key, USED),
                1 => policy.access(&key),
                _ => policy.remove(&key),
            }
            known.map(|at| list.remove(at));
            if what == 0 || (what == 1 && known.is_some()) {
                list.push(key);
            }
        }
        prop_assert_eq!(drain(&mut *policy), list);
    }
}
