//! Capacity of flash, what leaves it, and what is known of it afterwards.

mod common;

use std::time::{Duration, SystemTime};

use common::{
    FP, LEN, bytes, document, du, file, id, identity, listed, new_chunk, open, open_with, options,
    put, put_all, readable, scrub, try_put, used, write,
};
use matkv_store::policy::PolicyKind;
use matkv_store::{Store, StoreError, Tier, unix_seconds};
use matkv_types::{Digest, Encoding, Fingerprint};

fn other(n: u8) -> matkv_store::Identity {
    identity(Fingerprint(Digest([n; 32])))
}

/// What `explain` says of a chunk, in one string.
fn explain(store: &Store, n: u32) -> String {
    store.explain(&id(n)).unwrap().join("\n")
}

/// Sustained unique traffic: `du` never shows more than the capacity, with any policy.
#[test]
fn the_capacity_holds_at_every_step() {
    for policy in PolicyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let capacity = 10 * LEN + 100;
        let store = open_with(dir.path(), |o| {
            (o.flash.capacity, o.policy) = (Some(capacity), policy);
        });
        for n in 0..50 {
            try_put(&store, n).unwrap();
            store.touch(&[id(n / 2)], &[id(n)]);
            assert_eq!(used(&store), du(dir.path()), "{policy:?}");
            assert!(used(&store) <= capacity, "{policy:?}");
        }
        let there = (0..50).filter(|n| listed(&store, *n, Tier::Flash));
        assert_eq!(there.filter(|n| readable(&store, *n)).count(), 10, "{policy:?}");
        assert_eq!(store.read().unwrap().totals().unwrap().flash_chunks, 10);
    }
}

/// Indexed, quarantined and half-ingested files are all counted, before and after a restart.
#[test]
fn usage_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 1..4);
    store.quarantine(&id(2), 0, "test").unwrap();
    write(&store, 9);
    assert_eq!((used(&store), du(dir.path())), (4 * LEN, 4 * LEN));
    drop(store);
    assert_eq!(used(&open(dir.path())), 4 * LEN);
}

/// A file that is written again, or quarantined before the index names it, counts once.
#[test]
fn a_file_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    write(&store, 1);
    assert_eq!(used(&store), LEN);
    write(&store, 2);
    store.quarantine(&id(2), 0, "test").unwrap();
    assert_eq!(used(&store), du(dir.path()));
}

#[test]
fn a_lowered_capacity_is_kept_before_open_returns() {
    let dir = tempfile::tempdir().unwrap();
    put_all(&open(dir.path()), 0..8);
    let store = open_with(dir.path(), |o| o.flash.capacity = Some(3 * LEN));
    assert_eq!((used(&store), du(dir.path())), (3 * LEN, 3 * LEN));
    let (there, gone): (Vec<u32>, _) = (0..8).partition(|n| listed(&store, *n, Tier::Flash));
    assert!(there.iter().all(|n| readable(&store, *n)) && there.len() == 3);
    assert!(gone.iter().all(|n| explain(&store, *n).contains("storage.capacity was lowered")));
    assert_eq!(store.read().unwrap().documents().unwrap().len(), 8);
}

/// Files that somebody has deleted do not keep the room they took.
#[test]
fn what_has_vanished_takes_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| o.flash.capacity = Some(2 * LEN));
    put_all(&store, 1..3);
    (1..3).for_each(|n| std::fs::remove_file(store.files().path(&id(n))).unwrap());
    for n in 3..8 {
        try_put(&store, n).unwrap();
        assert!(readable(&store, n) && du(dir.path()) <= 2 * LEN);
    }
}

/// Other identities' files make room first, the one used longest ago before the others; what it
/// still lists when it is opened again is there.
#[test]
fn the_oldest_stale_identity_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    for (n, age) in [(2u8, 3000), (3, 2000), (4, 1000)] {
        let identity = other(n);
        let index = dir.path().join(identity.directory()).join("index/data.mdb");
        put_all(&Store::open(options(dir.path()), identity).unwrap(), [n.into()]);
        let at = SystemTime::now() - Duration::from_secs(age);
        std::fs::File::options().write(true).open(index).unwrap().set_modified(at).unwrap();
    }
    let store = open_with(dir.path(), |o| o.flash.capacity = Some(4 * LEN));
    assert_eq!((used(&store), du(dir.path())), (3 * LEN, 3 * LEN));
    put_all(&store, 10..12);
    let left = |n: u8| store.other_identities().contains(&other(n).directory());
    assert_eq!([left(2), left(3), left(4)], [false, true, true]);
    assert_eq!((used(&store), du(dir.path())), (4 * LEN, 4 * LEN));
    put_all(&store, 12..14);
    assert_eq!(store.other_identities(), [] as [String; 0]);
    assert_eq!((used(&store), du(dir.path())), (4 * LEN, 4 * LEN));
    assert!((10..14).all(|n| readable(&store, n)), "ours stay as long as there is something else");
    drop(store);
    let stale = Store::open(options(dir.path()), other(2)).unwrap();
    assert!(!listed(&stale, 2, Tier::Flash));
    assert!(explain(&stale, 2).contains("another model needed the room"));
    assert_eq!(stale.read().unwrap().totals().unwrap().documents, 1);
    assert_eq!(used(&stale), 4 * LEN, "theirs are the stale ones now");
}

/// Pinned chunks never leave. With nothing else there a write fails and says why; status is
/// degraded until one succeeds.
#[test]
fn all_pinned_is_full_and_said() {
    for policy in PolicyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let store = open_with(dir.path(), |o| {
            (o.flash.capacity, o.policy) = (Some(2 * LEN), policy);
        });
        put_all(&store, 1..3);
        (1..3).for_each(|n| store.pin(&id(n), u64::MAX).unwrap());
        match try_put(&store, 3) {
            Err(StoreError::Full { tier: Tier::Flash, used, capacity, key }) => {
                assert_eq!((used, capacity, key), (2 * LEN, 2 * LEN, "storage.capacity"));
            }
            other => panic!("{other:?}"),
        }
        assert!(store.degraded().is_some_and(|why| why.contains("flash is full")));
        assert_eq!(du(dir.path()), 2 * LEN);
        store.pin(&id(1), unix_seconds().saturating_sub(1)).unwrap();
        try_put(&store, 4).unwrap();
        assert_eq!((store.degraded(), listed(&store, 1, Tier::Flash)), (None, false));
        assert!(readable(&store, 2) && explain(&store, 2).contains("pinned"));
        assert!(explain(&store, 1).contains("left flash") && explain(&store, 1).contains("room"));
    }
}

/// Many are pinned, of any age and use: every other one can still make room.
#[test]
fn pins_do_not_hide_what_may_leave() {
    for policy in PolicyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let store = open_with(dir.path(), |o| {
            (o.flash.capacity, o.policy) = (Some(12 * LEN), policy);
        });
        for n in 0..40 {
            try_put(&store, n).unwrap_or_else(|e| panic!("{policy:?} {n}: {e}"));
            if n < 11 {
                store.pin(&id(n), u64::MAX).unwrap();
                (0..n % 4).for_each(|_| store.touch(&[id(n)], &[]));
            }
        }
        assert!((0..11).chain([39]).all(|n| readable(&store, n)), "{policy:?}");
    }
}

/// A pin outlives a restart.
#[test]
fn a_pin_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 0..4);
    store.pin(&id(2), u64::MAX).unwrap();
    drop(store);
    let store = open_with(dir.path(), |o| o.flash.capacity = Some(LEN));
    assert!(readable(&store, 2) && used(&store) == LEN);
}

/// What has been used stays after a restart, too, for what has not.
#[test]
fn warmth_survives_a_restart_and_decides() {
    for policy in [PolicyKind::Lru, PolicyKind::Gdsf, PolicyKind::SemanticLru] {
        let dir = tempfile::tempdir().unwrap();
        let store = open_with(dir.path(), |o| o.policy = policy);
        put_all(&store, 0..6);
        (0..3).for_each(|_| store.touch(&[id(4)], &[]));
        store.measured_load(&id(4), 2.5);
        store.flush_heat().unwrap();
        let before = store.read().unwrap().heat(&id(4));
        assert_eq!((before.count.round(), before.load_ms), (3.0, 2.5));
        drop(store);
        let store = open_with(dir.path(), |o| {
            (o.flash.capacity, o.policy) = (Some(LEN), policy);
        });
        assert_eq!(store.read().unwrap().heat(&id(4)), before);
        assert!(readable(&store, 4), "{policy:?}");
    }
}

/// Time to live counts from the last use, and for what was never used from its newest document.
#[test]
fn what_nobody_has_used_for_long_expires() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| {
        (o.ttl, o.cold) = (Some(1000), common::cold("memory:"));
    });
    put_all(&store, 1..6);
    store.touch(&[id(2)], &[]);
    store.pin(&id(3), u64::MAX).unwrap();
    store.demote(&id(5), "test").unwrap();
    // Nine old documents and a new one.
    for name in "abcdefghi".chars() {
        put(&store, &document(&format!(".{name}"), &[4]), &[]);
    }
    let mut new = document("new", &[4]);
    new.ingested_at = unix_seconds();
    put(&store, &new, &[]);
    assert_eq!(scrub(&store).expired.len(), 2);
    assert_eq!([1, 2, 3, 4].map(|n| listed(&store, n, Tier::Flash)), [false, true, true, true]);
    assert!(!listed(&store, 5, Tier::Cold) && store.cold().unwrap().scan().unwrap().is_empty());
    assert!(explain(&store, 1).contains("tenant.ttl"));
    assert_eq!(used(&store), du(dir.path()));
}

/// Two threads write different files of one chunk: one good copy, counted once.
#[test]
fn two_writers_leave_one_good_copy() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 0..8);
    let barrier = std::sync::Barrier::new(2);
    let files = [Encoding::EXACT, Encoding::new(matkv_types::KvDtype::Int8, EXACT_CODEC)];
    for n in 0..8 {
        store.remove_from(&id(n), &[Tier::Flash], "test").unwrap();
        std::thread::scope(|s| {
            for encoding in files {
                let (store, barrier) = (&store, &barrier);
                s.spawn(move || {
                    let file = matkv_store::page_aligned(&file(n, encoding)).unwrap();
                    barrier.wait();
                    assert!(store.put_on_flash(&id(n), &file).unwrap() > 0);
                });
            }
        });
        let found = bytes(&store, n, Tier::Flash).unwrap();
        assert!(files.iter().any(|e| file(n, *e) == found));
        assert_eq!(used(&store), du(dir.path()));
    }
    assert_eq!(store.collect_garbage(false, false).unwrap().orphans, (0, 0));
    assert_eq!(used(&store), store.read().unwrap().totals().unwrap().flash_bytes);
}

const EXACT_CODEC: matkv_types::Codec = Encoding::EXACT.codec;

/// An identity's directory is its own: a chunk of ours is not known there.
#[test]
fn explain_knows_about_other_identities() {
    let dir = tempfile::tempdir().unwrap();
    put_all(&open(dir.path()), [1]);
    let store = Store::open(options(dir.path()), other(2)).unwrap();
    let said = explain(&store, 1);
    assert!(said.contains("does not know") && said.contains(&identity(FP).directory()));
}

/// A chunk that is both released and entered in one change keeps its file.
#[test]
fn a_chunk_that_comes_back_in_the_same_change_keeps_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    let placement = store.read().unwrap().chunk(&id(1)).unwrap().unwrap().flash;
    let mut txn = store.write().unwrap();
    txn.delete_document("1").unwrap();
    txn.put_chunk(&new_chunk(1, placement)).unwrap();
    txn.put_documents(&[&document("again", &[1])]).unwrap();
    txn.commit().unwrap();
    assert!(listed(&store, 1, Tier::Flash) && readable(&store, 1));
    assert_eq!(used(&store), LEN);
}
