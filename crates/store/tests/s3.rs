//! The cold tier on real S3 services: Ceph and SeaweedFS on loopback.
//!
//! `scripts/ceph.sh install` and `scripts/seaweedfs.sh install` get them; what is not installed is
//! skipped, unless `MATKV_REQUIRE_S3` is set.

mod common;
#[path = "common/s3.rs"]
mod s3;

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use common::{
    FP, LEN, bytes, file, id, identity, listed, open_with, put_all, readable, tokens, try_put,
};
use matkv_format::{ChunkFile, Superblock};
use matkv_store::{ColdTier, RebuildReport, Store, StoreError, Tier};
use matkv_types::{ChunkId, Codec, Encoding, KvDtype};
use s3::{Keys, Part, Peer, Place, completed, full, is_missing, large, reason, until};

/// In this order: what stops the gateway comes last.
const PARTS: [Part; 12] = [
    ("round_trip", Keys::Good, round_trip),
    ("missing", Keys::Good, missing),
    ("one_winner", Keys::Good, one_winner),
    ("one_large_winner", Keys::Good, one_large_winner),
    ("many_chunks", Keys::Good, many_chunks),
    ("wrong_secret", Keys::WrongSecret, denied),
    ("unknown_key", Keys::Unknown, denied),
    ("no_bucket", Keys::Good, no_bucket),
    ("rebuild", Keys::Good, rebuild),
    ("deletion", Keys::Good, deletion),
    ("outage", Keys::Good, outage),
    ("cut_off", Keys::Good, cut_off),
];

fn on(test: &str, script: &str) {
    if s3::is_part(&PARTS) {
        return;
    }
    let Some(peer) = Peer::start(script) else { return };
    peer.place().run(test, &PARTS);
}

#[test]
fn ceph() {
    on("ceph", "ceph.sh");
}

#[test]
fn seaweedfs() {
    on("seaweedfs", "seaweedfs.sh");
}

/// Who takes connections and says nothing is down.
#[test]
fn a_silent_peer() {
    const PARTS: [Part; 2] = [("silence", Keys::Good, silence), ("no_keys", Keys::None, no_keys)];
    if s3::is_part(&PARTS) {
        return;
    }
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    Place::at(endpoint).run("a_silent_peer", &PARTS);
}

fn round_trip(place: &Place) {
    let tier = Arc::new(place.tier("round-trip"));
    let small = Codec::ALL.map(|c| Encoding::new(KvDtype::Bf16, c));
    let mut files: Vec<(ChunkId, Vec<u8>)> =
        (0..).zip(small).map(|(n, e)| (id(n), file(n, e))).collect();
    let count = files.len();
    files.extend([large(9, 2048, 1), full()]);
    let again = |tier: &ColdTier| {
        for (id, file) in &files {
            let put = tier.put(id, file.clone()).unwrap();
            assert_eq!(put, Superblock::decode(file).unwrap());
            assert!(tier.get(id).unwrap() == *file);
            // Once more changes nothing.
            assert_eq!(tier.put(id, file.clone()).unwrap(), put);
        }
        let sizes = place.objects("round-trip").into_iter().map(|(_, size)| size);
        assert!(sizes.clone().all(|s| s <= 32 << 20));
        assert_eq!(sizes.clone().count(), count + 3 + 1);
        assert_eq!(sizes.sum::<u64>(), files.iter().map(|(_, f)| f.len() as u64).sum::<u64>());
        let listed: BTreeSet<ChunkId> = tier.scan().unwrap().into_iter().collect();
        assert_eq!(listed, files.iter().map(|(id, _)| *id).collect());
    };
    again(&tier);
    let (send, receive) = mpsc::channel();
    for (i, (id, _)) in files.iter().enumerate() {
        let send = send.clone();
        tier.get_then(id, move |outcome| send.send((i, outcome.unwrap())).unwrap());
    }
    for (i, got) in receive.iter().take(files.len()) {
        assert!(got == files[i].1);
    }
    for (id, _) in &files {
        tier.remove(id).unwrap();
        assert!(is_missing(tier.get(id)));
        tier.remove(id).unwrap();
    }
    assert_eq!((tier.scan().unwrap(), place.objects("round-trip")), (vec![], vec![]));
    again(&tier);
    // Whoever comes later finds the same.
    assert!(place.tier("round-trip").get(&files[count].0).unwrap() == files[count].1);
}

/// That something is not there is an answer.
fn missing(place: &Place) {
    let tier = Arc::new(place.tier("missing"));
    for n in 0..5 {
        assert!(is_missing(tier.get(&id(n))));
        tier.remove(&id(n)).unwrap();
        let (send, receive) = mpsc::channel();
        tier.get_then(&id(n), move |outcome| send.send(is_missing(outcome)).unwrap());
        assert!(receive.recv().unwrap());
    }
    assert_eq!(tier.scan().unwrap(), []);
    assert_eq!(tier.breaker().reason(Instant::now()), None);
}

/// Puts all files under one name at once. Returns the winner's place among them.
fn race(tiers: &[ColdTier], id: &ChunkId, files: &[Vec<u8>]) -> usize {
    let barrier = Barrier::new(files.len());
    let put = |(file, tier): (&Vec<u8>, &ColdTier)| {
        let file = file.clone();
        barrier.wait();
        tier.put(id, file).unwrap()
    };
    let put = &put;
    let told: Vec<Superblock> = std::thread::scope(|s| {
        let writers: Vec<_> =
            files.iter().zip(tiers.iter().cycle()).map(|w| s.spawn(move || put(w))).collect();
        writers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    let found = tiers[0].get(id).unwrap();
    let winners: Vec<usize> = (0..files.len()).filter(|i| files[*i] == found).collect();
    assert_eq!(winners.len(), 1, "what is there is one of them, whole");
    let winner = Superblock::decode(&found).unwrap();
    let told: Vec<usize> = (0..told.len()).filter(|i| told[*i] != winner).collect();
    assert_eq!(told, [0; 0], "these were told of another than {winners:?}");
    winners[0]
}

fn one_winner(place: &Place) {
    let tiers = [(); 4].map(|()| place.tier("one-winner"));
    let one = &|n: u32| {
        let encodings = KvDtype::AT_REST
            .into_iter()
            .flat_map(|d| [Codec::None, Codec::Zstd].map(|c| Encoding::new(d, c)));
        let files: Vec<Vec<u8>> = encodings.map(|e| file(n, e)).collect();
        let winner = &files[race(&tiers, &id(n), &files)];
        let tokens = tokens(n);
        ChunkFile::verify(winner, &identity(FP).expectation(id(n), &tokens)).unwrap();
        for (file, tier) in files.iter().zip(tiers.iter().cycle()) {
            let told = tier.put(&id(n), file.clone()).unwrap();
            assert_eq!(told, Superblock::decode(winner).unwrap());
        }
    };
    std::thread::scope(|s| (0..6).for_each(|n| drop(s.spawn(move || one(n)))));
    assert_eq!(place.objects("one-winner").len(), 6);
}

/// Losers' parts do not stay.
fn one_large_winner(place: &Place) {
    let tiers = [(); 3].map(|()| place.tier("one-large-winner"));
    let files = [1, 2, 3].map(|seed| large(5, 2048, seed).1);
    let (id, _) = large(5, 2048, 1);
    for _ in 0..2 {
        race(&tiers, &id, &files);
        assert_eq!(place.objects("one-large-winner").len(), 2);
        tiers[1].remove(&id).unwrap();
        assert_eq!(place.objects("one-large-winner"), []);
    }
}

/// More than a service lists at once, from several threads.
fn many_chunks(place: &Place) {
    let tier = place.tier("many");
    let at_once = |chunks: std::ops::Range<u32>, work: &(dyn Fn(u32) + Sync)| {
        std::thread::scope(|s| {
            for worker in 0..8 {
                let own = chunks.clone().skip(worker).step_by(8);
                s.spawn(move || own.for_each(work));
            }
        });
    };
    let scan = || {
        let list = tier.scan().unwrap();
        let set: BTreeSet<ChunkId> = list.iter().copied().collect();
        assert_eq!(set.len(), list.len(), "none is listed twice");
        set
    };
    at_once(0..1100, &|n| {
        let file = file(n, Encoding::EXACT);
        assert_eq!(tier.put(&id(n), file.clone()).unwrap(), Superblock::decode(&file).unwrap());
    });
    assert_eq!(scan(), (0..1100).map(id).collect());
    at_once(50..150, &|n| {
        assert!(tier.get(&id(n)).unwrap() == file(n, Encoding::EXACT));
        if n < 100 {
            tier.remove(&id(n)).unwrap();
            assert!(is_missing(tier.get(&id(n))));
        }
    });
    assert_eq!(scan(), (0..50).chain(100..1100).map(id).collect());
}

/// Wrong keys are an error that says so, wherever they are noticed.
fn denied(place: &Place) {
    let says_so = |why: &str| {
        let words = ["403", "SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied"];
        assert!(words.iter().any(|w| why.contains(w)), "{why}");
    };
    let tier = || place.tier("denied");
    says_so(&reason(tier().put(&id(1), file(1, Encoding::EXACT))));
    says_so(&reason(tier().get(&id(1))));
    says_so(&reason(tier().remove(&id(1))));
    says_so(&reason(tier().scan()));
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| o.cold = Some(place.cold("denied")));
    put_all(&store, [1]);
    let degraded = until("the tier is given up", || {
        says_so(&reason(store.demote(&id(1), "")));
        store.degraded()
    });
    says_so(&degraded);
    assert!(readable(&store, 1) && !listed(&store, 1, Tier::Cold));
}

/// A bucket that is not there is not a tier without chunks.
fn no_bucket(place: &Place) {
    let options = place.at_url("s3://no-such-bucket/x", Duration::from_secs(30));
    let tier = || ColdTier::open(&options.place, FP).unwrap();
    let says_so = |why: String| assert!(why.contains("no-such-bucket"), "{why}");
    says_so(reason(tier().put(&id(1), file(1, Encoding::EXACT))));
    says_so(reason(tier().get(&id(1))));
    says_so(reason(tier().remove(&id(1))));
    says_so(reason(tier().scan()));
}

/// The index is lost; what is in the bucket is found again.
fn rebuild(place: &Place) {
    let dir = tempfile::tempdir().unwrap();
    let open = || open_with(dir.path(), |o| o.cold = Some(place.cold("rebuild")));
    let store = open();
    put_all(&store, 1..5);
    (1..4).for_each(|n| assert_eq!(store.demote(&id(n), "").unwrap(), LEN));
    let documents = store.read().unwrap().documents().unwrap();
    drop(store);
    std::fs::remove_dir_all(dir.path().join(identity(FP).directory()).join("index")).unwrap();
    let store = open();
    assert_eq!(store.read().unwrap().documents().unwrap(), []);
    let report = store.rebuild(&mut |txn, _| txn.next_vector().map(Some)).unwrap();
    let RebuildReport { chunks, bytes: found, documents: entered, .. } = report;
    assert_eq!((chunks, found, entered, report.incomplete), (4, 4 * LEN, 4, vec![]));
    assert_eq!(store.read().unwrap().documents().unwrap(), documents);
    for n in 1..4 {
        assert!(listed(&store, n, Tier::Cold) && !listed(&store, n, Tier::Flash));
        assert!(bytes(&store, n, Tier::Cold).unwrap() == file(n, Encoding::EXACT));
        assert_eq!(store.promote(&id(n)).unwrap(), LEN);
        assert!(bytes(&store, n, Tier::Flash).unwrap() == file(n, Encoding::EXACT));
    }
    assert!(readable(&store, 4) && !listed(&store, 4, Tier::Cold));
}

fn delete(store: &Store, n: u32) {
    let mut txn = store.write().unwrap();
    txn.delete_document(&n.to_string()).unwrap().unwrap();
    txn.commit().unwrap();
}

fn deletion(place: &Place) {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| o.cold = Some(place.cold("deletion")));
    put_all(&store, 1..4);
    (1..3).for_each(|n| assert_eq!(store.demote(&id(n), "").unwrap(), LEN));
    assert_eq!(place.objects("deletion").len(), 2);
    delete(&store, 1);
    delete(&store, 3);
    store.sweep_cold();
    assert_eq!(store.cold().unwrap().scan().unwrap(), [id(2)]);
    assert_eq!(place.objects("deletion").len(), 1);
    assert!(bytes(&store, 2, Tier::Cold).unwrap() == file(2, Encoding::EXACT));
    // It may come again, and be somewhere else.
    put_all(&store, [1]);
    assert!(is_missing(bytes(&store, 1, Tier::Cold)));
    store.demote(&id(1), "").unwrap();
    assert!(bytes(&store, 1, Tier::Cold).unwrap() == file(1, Encoding::EXACT));
}

/// Three failures, and then the reason without a trial.
fn gives_up(operations: &[&dyn Fn() -> String]) {
    let mut turns = operations.iter().cycle();
    let mut next = || turns.next().unwrap()();
    let tried = [(); 3].map(|()| next());
    assert!(tried.iter().all(|why| !why.contains("not tried")), "{tried:?}");
    until("it is not tried any more", || next().contains("not tried: ").then_some(()));
}

/// Nothing is lost while the gateway is down, and all is well by itself when it is back.
fn outage(place: &Place) {
    let dir = tempfile::tempdir().unwrap();
    let open = || open_with(dir.path(), |o| o.cold = Some(place.cold("outage")));
    let store = open();
    put_all(&store, 1..5);
    (1..3).for_each(|n| assert_eq!(store.demote(&id(n), "").unwrap(), LEN));
    let tier = place.tier("outage");
    place.stop_gateway();
    gives_up(&[
        &|| reason(tier.put(&id(9), file(9, Encoding::EXACT))),
        &|| reason(tier.get(&id(1))),
        &|| reason(tier.remove(&id(1))),
        &|| reason(tier.scan()),
    ]);
    gives_up(&[&|| reason(store.demote(&id(3), ""))]);
    let degraded = until("the store says so", || {
        reason(store.demote(&id(3), ""));
        store.degraded()
    });
    assert!(degraded.contains("cold tier s3://matkv/outage: "), "{degraded}");
    assert!(
        readable(&store, 3) && listed(&store, 3, Tier::Flash) && !listed(&store, 3, Tier::Cold)
    );
    assert!(bytes(&store, 4, Tier::Flash).unwrap() == file(4, Encoding::EXACT));
    reason(bytes(&store, 1, Tier::Cold));
    reason(store.promote(&id(1)));
    assert!(listed(&store, 1, Tier::Cold));
    // What is stored or deleted meanwhile is.
    try_put(&store, 5).unwrap();
    delete(&store, 2);
    store.sweep_cold();
    assert!(readable(&store, 5) && !listed(&store, 2, Tier::Cold));
    drop(store);
    let store = open();
    place.start_gateway();
    until("the tier answers", || tier.get(&id(1)).ok());
    assert_eq!(tier.breaker().reason(Instant::now()), None);
    until("the object is gone", || {
        store.sweep_cold();
        is_missing(tier.get(&id(2))).then_some(())
    });
    assert_eq!(until("a chunk goes down", || store.demote(&id(3), "").ok()), LEN);
    assert_eq!((store.degraded(), store.promote(&id(1)).unwrap()), (None, LEN));
    let there: BTreeSet<ChunkId> = tier.scan().unwrap().into_iter().collect();
    assert_eq!(there, [id(1), id(3)].into());
}

/// A gateway that ends amid transfers: a chunk is there whole or not at all.
fn cut_off(place: &Place) {
    let (id, file) = large(9, 2048, 4);
    let tier = place.tier("cut-off");
    for _ in 0..2 {
        std::thread::scope(|s| {
            let put = s.spawn(|| tier.put(&id, file.clone()));
            until("a part is there", || place.objects("cut-off").pop());
            place.stop_gateway();
            assert!(completed(put.join().unwrap()).is_none_or(|put| put.chunk_id == id));
        });
        place.start_gateway();
        match until("the tier answers", || match tier.get(&id) {
            Err(StoreError::Cold { .. }) => None,
            answer => Some(answer),
        }) {
            Ok(there) => assert!(there == file),
            Err(e) => assert!(matches!(e, StoreError::ColdMissing), "{e}"),
        }
        tier.put(&id, file.clone()).unwrap();
        std::thread::scope(|s| {
            let get = s.spawn(|| tier.get(&id));
            place.stop_gateway();
            assert!(completed(get.join().unwrap()).is_none_or(|there| there == file));
        });
        place.start_gateway();
        assert!(until("the tier answers", || tier.get(&id).ok()) == file);
        assert_eq!(place.objects("cut-off").len(), 3);
        tier.remove(&id).unwrap();
        assert_eq!(place.objects("cut-off"), []);
    }
}

fn silence(place: &Place) {
    let options = place.at_url("s3://matkv/silence", Duration::from_secs(1));
    let tier = ColdTier::open(&options.place, FP).unwrap();
    let put = || reason(tier.put(&id(1), file(1, Encoding::EXACT)));
    gives_up(&[&put, &|| reason(tier.get(&id(1)))]);
}

/// Nobody is asked for keys that were not given.
fn no_keys(place: &Place) {
    let options = place.at_url("s3://matkv/no-keys", Duration::from_secs(1));
    let tier = ColdTier::open(&options.place, FP);
    let why = reason(tier.and_then(|t| t.get(&id(1))));
    assert!(why.contains("AWS_ACCESS_KEY_ID"), "{why}");
}
