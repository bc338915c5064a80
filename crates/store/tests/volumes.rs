//! Stripes, mirrors and full devices.

mod common;

use std::path::{Path, PathBuf};

use common::{
    LEN, du, file, flip, id, listed, open, open_with, put_all, readable, scrub, try_put, used,
};
use matkv_store::{Store, StoreError, Tier, VolumeKind};
use matkv_types::{Codec, Encoding, KvDtype};

/// A store over directories `0`, `1`, … of `dir`.
fn over(dir: &Path, kind: VolumeKind, width: usize, capacity: Option<u64>) -> Store {
    open_with(dir, |o| {
        o.directories = (0..width).map(|n| dir.join(n.to_string())).collect();
        (o.kind, o.stripe_unit, o.flash.capacity) = (kind, 4096, capacity);
    })
}

fn parts(store: &Store, n: u32) -> Vec<PathBuf> {
    store.files().paths(&id(n)).collect()
}

/// Puts a file where a directory's subdirectory for chunk `n` would be.
fn block(store: &Store, n: u32, directory: usize) -> PathBuf {
    let sub = parts(store, n)[directory].parent().unwrap().to_owned();
    assert!(!sub.exists());
    std::fs::write(&sub, b"in the way").unwrap();
    sub
}

/// Every file under `incoming`.
fn incoming(dir: &Path) -> usize {
    let list = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let dirs = list.filter(|p| p.is_dir());
    dirs.map(|p| match p.ends_with("incoming") {
        true => std::fs::read_dir(p).unwrap().count(),
        false => incoming(&p),
    })
    .sum()
}

#[test]
fn a_kind_wants_its_number_of_directories() {
    use VolumeKind::{Mirror, Single, Stripe};
    let fits =
        |kind: VolumeKind| -> Vec<usize> { (0..7).filter(|n| kind.check(*n).is_ok()).collect() };
    assert_eq!((fits(Single), fits(Stripe)), (vec![1], vec![2, 3, 4, 5, 6]));
    assert_eq!(fits(Mirror), [2, 4, 6]);
    assert!(Mirror.check(3).unwrap_err().contains("even number"));
    let dir = tempfile::tempdir().unwrap();
    let mut options = common::options(dir.path());
    options.kind = Stripe;
    let outcome = Store::open(options, common::identity(common::FP)).map(drop);
    assert!(matches!(outcome, Err(StoreError::Volume(_))), "{outcome:?}");
}

/// Each way to damage one part of a stripe is found, and nothing else is lost with it.
#[test]
fn a_stripe_notices_any_bad_part() {
    let damages: [fn(&Path); 5] = [
        |p| std::fs::remove_file(p).unwrap(),
        |p| std::fs::File::options().write(true).open(p).unwrap().set_len(4096).unwrap(),
        |p| std::fs::File::options().write(true).open(p).unwrap().set_len(1 << 15).unwrap(),
        |p| std::fs::write(p, b"").unwrap(),
        flip,
    ];
    for (i, damage) in damages.into_iter().enumerate() {
        for part in 0..3 {
            let dir = tempfile::tempdir().unwrap();
            let store = over(dir.path(), VolumeKind::Stripe, 3, None);
            put_all(&store, 1..3);
            let lengths: Vec<u64> =
                parts(&store, 1).iter().map(|p| p.metadata().unwrap().len()).collect();
            assert_eq!(lengths, [8192; 3]);
            assert_eq!(common::bytes(&store, 1, Tier::Flash).unwrap(), file(1, Encoding::EXACT));
            damage(&parts(&store, 1)[part]);
            assert!(!readable(&store, 1), "{i} {part}");
            let report = scrub(&store);
            assert_eq!((report.chunks, report.bad, report.healed), (2, 1, 0), "{i} {part}");
            assert!(!listed(&store, 1, Tier::Flash) && readable(&store, 2));
            assert!(!store.files().exists(&id(1)));
            assert_eq!(used(&store), du(dir.path()), "{i} {part}");
        }
    }
}

/// A part of an earlier write of the same chunk does not go with the others.
#[test]
fn parts_of_two_writes_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let store = over(dir.path(), VolumeKind::Stripe, 3, None);
    put_all(&store, [1]);
    for part in 0..3 {
        let old = std::fs::read(&parts(&store, 1)[part]).unwrap();
        // The same rows rounded: another write with files of the same length.
        let fp16 = file(1, Encoding::new(KvDtype::Fp16, Codec::None));
        let write = |bytes: &[u8]| {
            let file = matkv_store::page_aligned(bytes).unwrap();
            store.put_on_flash(&id(1), &file).unwrap();
        };
        write(&fp16);
        assert!(readable(&store, 1));
        std::fs::write(&parts(&store, 1)[part], old).unwrap();
        assert!(!readable(&store, 1), "{part}");
        write(&file(1, Encoding::EXACT));
    }
}

/// Either copy of a mirror is written again from the other; usage is what `du` shows throughout.
#[test]
fn a_mirror_heals_from_the_good_copy() {
    for (width, per_copy) in [(2, 1), (4, 2)] {
        for (bad, damage) in
            [(0, flip as fn(&Path)), (1, flip), (0, remove as fn(&Path)), (1, remove)]
        {
            let dir = tempfile::tempdir().unwrap();
            let store = over(dir.path(), VolumeKind::Mirror, width, None);
            put_all(&store, 1..3);
            assert_eq!((used(&store), du(dir.path())), (4 * LEN, 4 * LEN));
            damage(&parts(&store, 1)[bad * per_copy]);
            assert!(readable(&store, 1));
            let report = scrub(&store);
            assert_eq!((report.bad, report.healed), (1, 1), "{width} {bad}");
            for copy in 0..2 {
                store.read_verified(&id(1), Tier::Flash, copy).unwrap();
            }
            assert_eq!(scrub(&store).bad, 0);
            assert_eq!(used(&store), du(dir.path()), "{width} {bad}");
            store.collect_garbage(true, false).unwrap();
            assert_eq!((used(&store), du(dir.path())), (4 * LEN, 4 * LEN), "{width} {bad}");
        }
    }
}

fn remove(path: &Path) {
    std::fs::remove_file(path).unwrap();
}

/// With both copies bad the chunk is not on flash any more, and both are kept and counted.
#[test]
fn two_bad_copies_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let store = over(dir.path(), VolumeKind::Mirror, 2, None);
    put_all(&store, 1..3);
    parts(&store, 1).iter().for_each(|p| flip(p));
    let report = scrub(&store);
    assert_eq!((report.bad, report.healed), (2, 0));
    assert!(!listed(&store, 1, Tier::Flash) && listed(&store, 2, Tier::Flash));
    assert_eq!(store.files().quarantined().unwrap(), (2, 2 * LEN));
    assert_eq!((used(&store), du(dir.path())), (4 * LEN, 4 * LEN));
    drop(store);
    let store = over(dir.path(), VolumeKind::Mirror, 2, None);
    assert_eq!(used(&store), 4 * LEN);
    store.collect_garbage(true, false).unwrap();
    assert_eq!((used(&store), du(dir.path())), (2 * LEN, 2 * LEN));
}

/// A copy in quarantine is counted like any other byte, healed or not, evicted or not.
#[test]
fn a_copy_in_quarantine_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let open = || over(dir.path(), VolumeKind::Mirror, 2, None);
    let store = open();
    put_all(&store, 1..4);
    (1..4).for_each(|n| assert!(store.quarantine(&id(n), 0, "test").unwrap()));
    assert!((1..4).all(|n| listed(&store, n, Tier::Flash)));
    assert_eq!(used(&store), du(dir.path()));
    store.heal(&id(1), 0).unwrap();
    assert_eq!((used(&store), du(dir.path())), (7 * LEN, 7 * LEN));
    store.remove_from(&id(2), &[Tier::Flash], "test").unwrap();
    assert_eq!((used(&store), du(dir.path())), (6 * LEN, 6 * LEN));
    drop(store);
    assert_eq!(used(&open()), 6 * LEN);
}

/// Healing keeps the capacity as well.
#[test]
fn healing_makes_room_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = over(dir.path(), VolumeKind::Mirror, 2, Some(6 * LEN));
    put_all(&store, 1..4);
    flip(&parts(&store, 2)[1]);
    scrub(&store);
    assert!(du(dir.path()) <= 6 * LEN, "{} of {}", du(dir.path()), 6 * LEN);
    assert_eq!(used(&store), du(dir.path()));
}

/// With one device out of order a mirror goes on, and what it misses there is written later.
#[test]
fn a_mirror_writes_with_one_device() {
    let dir = tempfile::tempdir().unwrap();
    let open = || over(dir.path(), VolumeKind::Mirror, 2, None);
    let store = open();
    let blocked = block(&store, 1, 1);
    put_all(&store, [1]);
    assert_eq!((used(&store), du(&dir.path().join("0"))), (LEN, LEN));
    std::fs::remove_file(blocked).unwrap();
    let report = scrub(&store);
    assert_eq!((report.bad, report.healed), (1, 1));
    assert_eq!((used(&store), du(dir.path())), (2 * LEN, 2 * LEN));
    drop(store);
    assert_eq!(used(&open()), 2 * LEN);
}

/// A stripe that cannot be published whole leaves nothing, not even after garbage collection.
#[test]
fn a_failed_stripe_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = over(dir.path(), VolumeKind::Stripe, 3, None);
    put_all(&store, [1]);
    let blocked = block(&store, 2, 2);
    assert!(try_put(&store, 2).is_err());
    std::fs::remove_file(blocked).unwrap();
    assert_eq!((used(&store), incoming(dir.path())), (LEN, 0));
    assert!(parts(&store, 2).iter().all(|p| !p.exists()), "a part is left");
    store.collect_garbage(false, false).unwrap();
    assert_eq!((used(&store), du(dir.path())), (LEN, LEN));
    try_put(&store, 2).unwrap();
    assert!(readable(&store, 1) && readable(&store, 2));
}

/// A flipped bit and a missing file are found, and both are computed again when asked for.
#[test]
fn scrub_finds_what_is_bad() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 0..6);
    flip(&parts(&store, 2)[0]);
    remove(&parts(&store, 4)[0]);
    let (mut next, mut passes, mut bad) = (None, 0, 0);
    loop {
        // A budget of one byte is one chunk.
        let (after, report) = store.scrub(next, 1).unwrap();
        (passes, bad) = (passes + report.chunks, bad + report.bad);
        next = after;
        if next.is_none() {
            break;
        }
    }
    assert_eq!((passes, bad), (6, 2));
    let there: Vec<u32> = (0..6).filter(|n| listed(&store, *n, Tier::Flash)).collect();
    assert_eq!(there, [0, 1, 3, 5]);
    assert!(there.iter().all(|n| readable(&store, *n)));
    assert_eq!((used(&store), du(dir.path())), (5 * LEN, 5 * LEN));
    let why = store.explain(&id(2)).unwrap().join("\n");
    assert!(why.contains("quarantined") && why.contains("checksum"), "{why}");
    assert!(store.explain(&id(4)).unwrap().join("\n").contains("missing"));
}

/// A small file system of its own; none where mounting is not allowed.
struct Small(tempfile::TempDir);

impl Small {
    fn mount(kib: u32) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"]).arg(dir.path());
        if mount.output().is_ok_and(|o| o.status.success()) {
            return Some(Self(dir));
        }
        eprintln!("skipped: this needs a file system of its own, and mounting is not allowed");
        None
    }

    fn free(&self) -> u64 {
        matkv_sys::free_bytes(self.0.path()).unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

/// Somebody else fills the device: a write fails as such and leaves nothing, the rest stays
/// readable, status says so, and all is well again when there is room.
#[test]
fn a_full_device_is_survived() {
    let Some(small) = Small::mount(1024) else { return };
    let root = tempfile::tempdir().unwrap();
    let store = open_with(root.path(), |o| o.directories = vec![small.0.path().into()]);
    put_all(&store, 0..4);
    let hog = small.0.path().join("hog");
    std::fs::write(&hog, vec![1; small.free() as usize - 8192]).unwrap();
    match try_put(&store, 9) {
        Err(StoreError::NoSpace { chunk, bytes, .. }) => {
            assert_eq!((chunk, bytes as u64), (id(9), LEN));
        }
        other => panic!("{other:?}"),
    }
    assert!(store.degraded().is_some_and(|why| why.contains("no room")));
    assert_eq!((used(&store), du(small.0.path())), (4 * LEN, 4 * LEN));
    assert_eq!(incoming(small.0.path()), 0);
    assert!((0..4).all(|n| readable(&store, n)) && !listed(&store, 9, Tier::Flash));
    remove(&hog);
    try_put(&store, 9).unwrap();
    assert_eq!((store.degraded(), readable(&store, 9)), (None, true));
}

/// The reserve stays free, whoever takes the room.
#[test]
fn the_reserve_stays_free() {
    let Some(small) = Small::mount(1024) else { return };
    let root = tempfile::tempdir().unwrap();
    let reserve = 300 << 10;
    let store = open_with(root.path(), |o| {
        (o.directories, o.reserve) = (vec![small.0.path().into()], reserve);
    });
    for n in 0..60 {
        try_put(&store, n).unwrap();
        assert!(small.free() >= reserve, "{n}");
        assert_eq!(used(&store), du(small.0.path()));
    }
    std::fs::write(small.0.path().join("hog"), vec![1; 200 << 10]).unwrap();
    try_put(&store, 60).unwrap();
    assert!(small.free() >= reserve && readable(&store, 60));
    let there = (0..=60).filter(|n| listed(&store, *n, Tier::Flash));
    there.for_each(|n| store.pin(&id(n), u64::MAX).unwrap());
    assert!(matches!(try_put(&store, 61), Err(StoreError::NoSpace { .. })));
    assert!(small.free() >= reserve && readable(&store, 60));
    assert!(store.degraded().is_some());
}
