//! The cold tier: moving chunks there and back.

mod common;

use std::path::Path;

use common::{
    FP, LEN, bytes, cold, du, file, flip, id, identity, listed, open, open_with, put_all, readable,
    tokens, try_put, used,
};
use matkv_format::ChunkFile;
use matkv_store::{ColdTier, Store, StoreError, Tier};
use matkv_types::{ChunkId, Codec, ContentId, Encoding, KvDtype, KvLayout, KvShape};

fn totals(store: &Store) -> (u64, u64) {
    let totals = store.read().unwrap().totals().unwrap();
    (totals.flash_chunks, totals.cold_chunks)
}

fn url(dir: &Path) -> String {
    format!("file://{}", dir.join("slow").display())
}

/// Objects a directory holds.
fn objects(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() { out.extend(objects(&path)) } else { out.push(path) }
    }
    out
}

/// Down and up again: the same bytes, in the tiers the index says.
#[test]
fn a_chunk_goes_down_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    for url in ["memory:".to_owned(), url(dir.path())] {
        let dir = tempfile::tempdir().unwrap();
        let store = open_with(dir.path(), |o| o.cold = cold(&url));
        put_all(&store, 1..3);
        assert_eq!(store.demote(&id(1), "for a test").unwrap(), LEN);
        assert_eq!((totals(&store), used(&store), du(dir.path())), ((1, 1), LEN, LEN));
        assert_eq!(bytes(&store, 1, Tier::Cold).unwrap(), file(1, Encoding::EXACT));
        assert!(store.explain(&id(1)).unwrap().join("\n").contains("for a test"));
        assert!(matches!(store.demote(&id(1), ""), Err(StoreError::Refused(_))));
        assert_eq!(store.promote(&id(1)).unwrap(), LEN);
        assert_eq!((store.promote(&id(1)).unwrap(), totals(&store)), (0, (2, 1)));
        assert_eq!(bytes(&store, 1, Tier::Flash).unwrap(), file(1, Encoding::EXACT));
        assert!(matches!(store.promote(&id(9)), Err(StoreError::Refused(_))));
        // An operator's move leaves it in one tier.
        store.move_to(&id(1), Tier::Cold).unwrap();
        assert!(!listed(&store, 1, Tier::Flash) && listed(&store, 1, Tier::Cold));
        store.move_to(&id(1), Tier::Flash).unwrap();
        assert!(readable(&store, 1) && !listed(&store, 1, Tier::Cold));
        assert_eq!(store.cold().unwrap().scan().unwrap(), []);
    }
}

/// A file tier keeps its chunks over a restart of the store.
#[test]
fn a_directory_outlives_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let open = || open_with(dir.path(), |o| o.cold = cold(&url(dir.path())));
    let store = open();
    put_all(&store, [1]);
    store.demote(&id(1), "").unwrap();
    drop(store);
    let store = open();
    store.promote(&id(1)).unwrap();
    assert_eq!(bytes(&store, 1, Tier::Flash).unwrap(), file(1, Encoding::EXACT));
}

#[test]
fn without_a_cold_tier_nothing_goes_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    assert!(matches!(store.demote(&id(1), ""), Err(StoreError::Refused(_))));
    assert!(readable(&store, 1));
    assert_eq!(store.balance(&|_| true).unwrap(), (0, 0));
}

/// Rows that have lost something are never called better ones, whatever the tiers are set to;
/// codecs are the tier's own.
#[test]
fn a_row_type_only_gets_narrower() {
    let dtypes = [KvDtype::Bf16, KvDtype::Int8, KvDtype::Int4];
    let codecs = [Codec::None, Codec::Lz4, Codec::SplitZstd];
    let all = dtypes.map(|d| codecs.map(|c| Encoding::new(d, c)));
    for (flash, there) in
        all.iter().flatten().flat_map(|f| all.iter().flatten().map(move |c| (*f, *c)))
    {
        let dir = tempfile::tempdir().unwrap();
        let store = open_with(dir.path(), |o| {
            o.flash.encoding = flash;
            o.cold = cold("memory:");
            o.cold.as_mut().unwrap().tier.encoding = there;
        });
        put_all(&store, [1]);
        store.demote(&id(1), "").unwrap();
        let (_, down) = store.read_verified(&id(1), Tier::Cold, 0).unwrap();
        assert_eq!(down.encoding, there);
        store.promote(&id(1)).unwrap();
        let (_, up) = store.read_verified(&id(1), Tier::Flash, 0).unwrap();
        let bits = flash.dtype.bits().min(there.dtype.bits());
        assert_eq!((up.encoding.dtype.bits(), up.encoding.codec), (bits, flash.codec));
        let record = store.read().unwrap().chunk(&id(1)).unwrap().unwrap();
        assert_eq!(record.flash.map(|p| p.encoding), Some(up.encoding));
        assert_eq!(used(&store), du(dir.path()));
    }
}

/// A cold tier that does not answer: chunks stay on flash, and status says so.
#[test]
fn a_broken_cold_tier_takes_nothing_away() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| {
        o.cold = cold(&url(dir.path()));
        o.flash.capacity = Some(4 * LEN);
    });
    put_all(&store, 1..5);
    let slow = dir.path().join("slow");
    std::fs::remove_dir_all(&slow).unwrap();
    std::fs::write(&slow, b"in the way").unwrap();
    for _ in 0..4 {
        assert!(matches!(store.balance(&|_| true), Err(StoreError::Cold { .. })));
    }
    assert!((1..5).all(|n| readable(&store, n)));
    assert!(store.degraded().is_some_and(|why| why.contains("cold tier")));
    // Room is made all the same.
    try_put(&store, 5).unwrap();
    assert_eq!(totals(&store), (4, 0));
}

/// Above the high watermark chunks go down until the low one, the least valued first.
#[test]
fn balance_works_between_the_watermarks() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| {
        (o.cold, o.flash.capacity) = (cold("memory:"), Some(10 * LEN));
        (o.high_watermark, o.low_watermark) = (0.8, 0.5);
    });
    put_all(&store, 0..8);
    assert_eq!(store.balance(&|_| true).unwrap(), (0, 0));
    put_all(&store, [8]);
    store.touch(&[id(0)], &[]);
    store.pin(&id(1), u64::MAX).unwrap();
    assert_eq!(store.balance(&|_| false).unwrap(), (0, 0));
    assert_eq!(store.balance(&|_| true).unwrap(), (4, 4 * LEN));
    assert_eq!((totals(&store), used(&store)), ((5, 4), 5 * LEN));
    assert!(listed(&store, 0, Tier::Flash) && listed(&store, 1, Tier::Flash));
    assert!((2..6).all(|n| listed(&store, n, Tier::Cold)));
    assert_eq!(du(dir.path()), 5 * LEN);
}

/// The cold tier has a capacity too; what balance itself sends down counts.
#[test]
fn the_cold_tier_has_a_capacity() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| {
        (o.cold, o.flash.capacity) = (cold("memory:"), Some(8 * LEN));
        (o.high_watermark, o.low_watermark) = (0.9, 0.5);
        o.cold.as_mut().unwrap().tier.capacity = Some(2 * LEN);
    });
    put_all(&store, 0..5);
    (0..5).for_each(|n| assert_eq!(store.demote(&id(n), "").unwrap(), LEN));
    store.balance(&|_| true).unwrap();
    assert_eq!((totals(&store), store.cold().unwrap().scan().unwrap().len()), ((0, 2), 2));
    let gone = (0..5).find(|n| !listed(&store, *n, Tier::Cold)).unwrap();
    assert!(store.explain(&id(gone)).unwrap().join("\n").contains("left cold"));
    put_all(&store, 10..18);
    store.balance(&|_| true).unwrap();
    assert_eq!((totals(&store), store.cold().unwrap().scan().unwrap().len()), ((4, 2), 2));
}

/// What no document uses any more is not kept for ever in a bucket.
#[test]
fn a_deleted_document_leaves_no_object() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| o.cold = cold(&url(dir.path())));
    put_all(&store, 1..3);
    (1..3).for_each(|n| assert_eq!(store.demote(&id(n), "").unwrap(), LEN));
    let mut txn = store.write().unwrap();
    txn.delete_document("1").unwrap();
    txn.commit().unwrap();
    assert_eq!(totals(&store), (0, 1));
    store.sweep_cold();
    assert_eq!(store.cold().unwrap().scan().unwrap(), [id(2)]);
}

/// A sweep that has seen a chunk in the tier does not forget that it has left since.
#[test]
fn a_sweep_beside_a_move_leaves_no_object() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| o.cold = cold(&url(dir.path())));
    put_all(&store, [1]);
    for round in 0..50 {
        store.move_to(&id(1), Tier::Cold).unwrap();
        store.promote(&id(1)).unwrap();
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                together.wait();
                store.sweep_cold();
            });
            together.wait();
            store.remove_from(&id(1), &[Tier::Cold], "for a test").unwrap();
        });
        assert_eq!(store.cold().unwrap().scan().unwrap(), [], "{round}");
    }
}

/// A damaged object is never used; once it is known to be lost, a good one takes its place.
#[test]
fn a_damaged_object_is_replaced() {
    for damage in [flip as fn(&Path), |p| std::fs::write(p, b"").unwrap()] {
        let dir = tempfile::tempdir().unwrap();
        let store = open_with(dir.path(), |o| o.cold = cold(&url(dir.path())));
        put_all(&store, [1]);
        store.demote(&id(1), "").unwrap();
        damage(&objects(&dir.path().join("slow"))[0]);
        assert!(store.promote(&id(1)).is_err());
        assert_eq!((used(&store), du(dir.path())), (0, 0));
        store.lost(&id(1), Tier::Cold, "damaged").unwrap();
        let again = matkv_store::page_aligned(&file(1, Encoding::EXACT)).unwrap();
        store.put_on_flash(&id(1), &again).unwrap();
        store.demote(&id(1), "").unwrap();
        assert_eq!(bytes(&store, 1, Tier::Cold).unwrap(), file(1, Encoding::EXACT));
    }
}

/// A chunk file of 72 MiB; `seed` makes it another write of the same chunk.
fn big_file(seed: u8) -> (ChunkId, Vec<u8>) {
    let shape = KvShape { layers: 9, kv_heads: 8, head_dim: 128 };
    let tokens: Vec<u32> = (0..2048).collect();
    let id = ChunkId::new(FP, "default", ContentId::of_tokens(&tokens));
    let identity = matkv_store::Identity { shape, ..identity(FP) };
    let layout = KvLayout::new(shape, KvDtype::Bf16, tokens.len());
    let mut rows = vec![seed; layout.total_bytes()];
    let mut out = vec![0; ChunkFile::len(shape, KvDtype::Bf16, tokens.len())];
    let expect = identity.expectation(id, &tokens);
    ChunkFile::encode(&mut rows, &mut out, &expect, KvDtype::Bf16).unwrap();
    (id, out)
}

/// Large chunks are several objects. Parts of another writer do not get between them, and none
/// is left when the chunk is removed.
#[test]
fn a_large_chunk_is_split() {
    let dir = tempfile::tempdir().unwrap();
    let tier = ColdTier::open(&cold(&url(dir.path())).unwrap().place, FP).unwrap();
    let ((id, first), (_, second)) = (big_file(1), big_file(2));
    let sum = tier.put(&id, first.clone()).unwrap().checksum();
    assert_eq!(objects(dir.path()).len(), 3);
    assert!(objects(dir.path()).iter().all(|p| p.metadata().unwrap().len() <= 32 << 20));
    assert_eq!(tier.put(&id, second).unwrap().checksum(), sum, "the first is there");
    assert!(tier.get(&id).unwrap() == first);
    assert_eq!(tier.scan().unwrap(), [id]);
    tier.remove(&id).unwrap();
    assert!(matches!(tier.get(&id), Err(StoreError::ColdMissing)));
    assert_eq!(objects(dir.path()), [] as [&Path; 0]);
}

/// Of several writers of one object exactly one creates it, and all are told whose is there.
#[test]
fn one_of_many_writers_creates_the_object() {
    let dir = tempfile::tempdir().unwrap();
    for url in ["memory:".to_owned(), url(dir.path())] {
        let tier = ColdTier::open(&cold(&url).unwrap().place, FP).unwrap();
        let files: Vec<Vec<u8>> =
            KvDtype::AT_REST.iter().map(|d| file(1, Encoding::new(*d, Codec::None))).collect();
        let barrier = std::sync::Barrier::new(files.len());
        let put = |file: &Vec<u8>| {
            barrier.wait();
            tier.put(&id(1), file.clone()).unwrap().checksum()
        };
        let put = &put;
        let sums: Vec<u32> = std::thread::scope(|s| {
            let writers: Vec<_> = files.iter().map(|f| s.spawn(move || put(f))).collect();
            writers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        let found = tier.get(&id(1)).unwrap();
        let tokens = tokens(1);
        let sealed = ChunkFile::verify(&found, &identity(FP).expectation(id(1), &tokens)).unwrap();
        assert!(files.contains(&found) && sums.iter().all(|s| *s == sealed.checksum()));
    }
}

/// Another model's objects have another name.
#[test]
fn identities_do_not_share_objects() {
    let dir = tempfile::tempdir().unwrap();
    let place = cold(&url(dir.path())).unwrap().place;
    let other = matkv_types::Fingerprint(matkv_types::Digest([2; 32]));
    ColdTier::open(&place, FP).unwrap().put(&id(1), file(1, Encoding::EXACT)).unwrap();
    let tier = ColdTier::open(&place, other).unwrap();
    assert!(matches!(tier.get(&id(1)), Err(StoreError::ColdMissing)));
    assert_eq!(tier.scan().unwrap(), []);
}

/// Reads in the background say the same as the others.
#[test]
fn a_background_read_answers() {
    let dir = tempfile::tempdir().unwrap();
    let tier = ColdTier::open(&cold(&url(dir.path())).unwrap().place, FP).unwrap();
    let tier = std::sync::Arc::new(tier);
    tier.put(&id(1), file(1, Encoding::EXACT)).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    for n in [1, 2] {
        let send = send.clone();
        tier.get_then(&id(n), move |outcome| send.send((n, outcome)).unwrap());
    }
    let mut got: Vec<_> = (0..2).map(|_| receive.recv().unwrap()).collect();
    got.sort_by_key(|(n, _)| *n);
    assert_eq!(got[0].1.as_ref().unwrap(), &file(1, Encoding::EXACT));
    assert!(matches!(got[1].1, Err(StoreError::ColdMissing)));
}

/// Parts of a large chunk whose writer was killed before the first object go with the chunk, and
/// nobody else's do.
#[test]
fn parts_without_a_chunk_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let options = cold(&url(dir.path())).unwrap().place;
    let tier = ColdTier::open(&options, FP).unwrap();
    tier.put(&id(1), file(1, Encoding::EXACT)).unwrap();
    let whole = objects(&dir.path().join("slow")).remove(0);
    let bucket = whole.parent().unwrap().parent().unwrap();
    let part = |n: u32, number: u32| {
        let name = id(n).to_string();
        let directory = bucket.join(&name[..2]);
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("{name}.0badcafe.{number}"));
        std::fs::write(&path, b"half of a chunk").unwrap();
        path
    };
    let (lost, kept) = ([part(2, 1), part(2, 2)], part(3, 1));
    tier.remove(&id(2)).unwrap();
    assert!(lost.iter().all(|p| !p.exists()) && kept.exists() && whole.exists());
    tier.remove(&id(4)).unwrap();
    // What it has written, but not given its name.
    let staged = |n: u32, i: u32| {
        let path = part(n, 1).parent().unwrap().join(format!("{}.kv#{i}", id(n)));
        std::fs::write(&path, b"half of a chunk").unwrap();
        path
    };
    let (lost, kept) = ([staged(1, 1), staged(1, 2)], staged(3, 1));
    tier.remove_staged(&id(1));
    assert!(lost.iter().all(|p| !p.exists()) && kept.exists() && whole.exists());
    assert!(tier.get(&id(1)).is_ok());
}

/// An operator's look at a chunk finds out a bad object, and leaves one alone that cannot be
/// reached.
#[test]
fn verifying_covers_the_cold_tier() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(dir.path(), |o| o.cold = cold(&url(dir.path())));
    put_all(&store, 1..4);
    for n in 1..4 {
        store.demote(&id(n), "for a test").unwrap();
    }
    let object = |n: u32| {
        let name = format!("{}.kv", id(n));
        objects(&dir.path().join("slow")).into_iter().find(|p| p.ends_with(&name)).unwrap()
    };
    flip(&object(2));
    std::fs::remove_file(object(3)).unwrap();
    let errors = [1, 2, 3].map(|n| {
        let checked = store.verify_chunk(&id(n), &Tier::ALL).unwrap();
        assert_eq!(checked.len(), 1);
        checked[0].error.as_ref().map(|e| e.to_string())
    });
    assert_eq!(errors[0], None);
    assert!(errors[1].as_ref().is_some_and(|e| e.contains("checksum")), "{errors:?}");
    assert!(errors[2].as_ref().is_some_and(|e| e.contains("no such chunk")), "{errors:?}");
    assert_eq!([1, 2, 3].map(|n| listed(&store, n, Tier::Cold)), [true, false, false]);
    drop(store);
    // Without a cold tier nothing is known about what is there.
    let store = open(dir.path());
    let checked = store.verify_chunk(&id(1), &Tier::ALL).unwrap();
    assert!(checked[0].error.is_some() && listed(&store, 1, Tier::Cold));
}
