//! What a crash leaves, garbage, and an index that is lost.

mod common;

use std::path::Path;

use common::{
    LEN, cold, document, du, file, flip, id, identity, listed, new_chunk, open, open_with, put,
    put_all, readable, scrub, tokens, try_put, used, write,
};
use matkv_store::{DocumentRecord, RebuildReport, Store, StoreOptions, Tier};
use matkv_types::Encoding;

fn pending(store: &Store, n: u32) -> bool {
    store.read().unwrap().pending().unwrap().contains(&id(n))
}

fn rebuild(store: &Store) -> RebuildReport {
    store.rebuild(&mut |txn, _| txn.next_vector().map(Some)).unwrap()
}

/// The same store with its index gone.
fn without_index(dir: &Path, change: impl FnOnce(&mut StoreOptions)) -> Store {
    let own = dir.join(identity(common::FP).directory());
    std::fs::remove_dir_all(own.join("index")).unwrap();
    let store = open_with(dir, change);
    assert_eq!(store.read().unwrap().documents().unwrap(), []);
    store
}

/// Garbage is what no ingest that still runs has announced.
#[test]
fn garbage_is_what_nobody_waits_for() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    write(&store, 2);
    let file = matkv_store::page_aligned(&file(3, Encoding::EXACT)).unwrap();
    let announced = store.announce(&[id(3)]).unwrap();
    store.write_file(&id(3), &file).unwrap();
    assert_eq!((used(&store), du(dir.path())), (3 * LEN, 3 * LEN));
    assert!(store.explain(&id(2)).unwrap().join("\n").contains("not committed"));
    assert_eq!(store.collect_garbage(false, false).unwrap().orphans, (1, LEN));
    assert!(readable(&store, 1) && !store.files().exists(&id(2)) && store.files().exists(&id(3)));
    assert_eq!((used(&store), du(dir.path())), (2 * LEN, 2 * LEN));
    drop(announced);
    assert_eq!(store.collect_garbage(false, false).unwrap().orphans, (1, LEN));
    assert_eq!(store.collect_garbage(false, false).unwrap().orphans, (0, 0));
    assert_eq!((used(&store), du(dir.path())), (LEN, LEN));
}

/// Two ingests have announced a chunk: the end of one does not give up the other's file.
#[test]
fn each_announcement_counts() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let announced = store.announce(&[id(1)]).unwrap();
    write(&store, 1);
    store.collect_garbage(false, false).unwrap();
    assert!(store.files().exists(&id(1)));
    drop(announced);
    assert_eq!(store.collect_garbage(false, false).unwrap().orphans, (1, LEN));
}

/// What a killed ingest has left is counted from the start, and goes when room is needed.
#[test]
fn a_killed_ingest_leaves_nothing_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    let file = matkv_store::page_aligned(&file(2, Encoding::EXACT)).unwrap();
    // 3 was announced only.
    drop(store.announce(&[id(2), id(3)]).unwrap());
    store.write_file(&id(2), &file).unwrap();
    drop(store);
    let store = open_with(dir.path(), |o| o.flash.capacity = Some(2 * LEN));
    assert_eq!(used(&store), 2 * LEN);
    assert_eq!([2, 3].map(|n| pending(&store, n)), [true, false]);
    put_all(&store, [4]);
    assert!(readable(&store, 1) && readable(&store, 4) && !store.files().exists(&id(2)));
    assert_eq!((used(&store), du(dir.path())), (2 * LEN, 2 * LEN));
}

/// A crash between a commit and the removal of files: they are counted, and go.
#[test]
fn an_interrupted_deletion_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 1..3);
    let path = store.files().path(&id(1));
    let bytes = std::fs::read(&path).unwrap();
    let mut txn = store.write().unwrap();
    txn.delete_document("1").unwrap();
    txn.commit().unwrap();
    store.remove_from(&id(2), &[Tier::Flash], "test").unwrap();
    drop(store);
    std::fs::write(&path, bytes).unwrap();
    let store = open(dir.path());
    assert_eq!(used(&store), LEN);
    assert_eq!(store.collect_garbage(false, false).unwrap().orphans, (1, LEN));
    assert_eq!((used(&store), du(dir.path()), path.exists()), (0, 0, false));
}

/// A file that cannot be removed is not forgotten.
#[test]
fn what_cannot_be_removed_stays_on_the_list() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    let path = store.files().path(&id(1));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let mut txn = store.write().unwrap();
    txn.delete_document("1").unwrap();
    txn.commit().unwrap();
    store.collect_garbage(false, false).unwrap();
    assert!(pending(&store, 1), "it is still there");
}

/// What `explain` says `chunks gc` does, it does.
#[test]
fn a_file_nobody_names_is_garbage() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let path = store.files().path(&id(7));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, file(7, Encoding::EXACT)).unwrap();
    let said = store.explain(&id(7)).unwrap().join("\n");
    store.collect_garbage(false, false).unwrap();
    assert!(!said.contains("gc` removes it") || !path.exists(), "{said}");
}

#[test]
fn quarantine_and_other_identities_are_emptied_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    put_all(&open(dir.path()), 1..3);
    let other = matkv_types::Fingerprint(matkv_types::Digest([2; 32]));
    let store = Store::open(common::options(dir.path()), identity(other)).unwrap();
    put_all(&store, 3..6);
    store.quarantine(&id(3), 0, "test").unwrap();
    assert_eq!((used(&store), du(dir.path())), (5 * LEN, 5 * LEN));
    let report = store.collect_garbage(true, true).unwrap();
    assert_eq!((report.quarantined, report.stale_bytes), ((1, LEN), 2 * LEN));
    assert_eq!((used(&store), du(dir.path())), (2 * LEN, 2 * LEN));
    drop(store);
    let store = open(dir.path());
    assert_eq!(store.read().unwrap().totals().unwrap().flash_chunks, 0);
}

/// Documents, chunks, tokens and placements of a store.
#[allow(clippy::type_complexity, reason = "only compared")]
fn contents(store: &Store) -> (Vec<DocumentRecord>, Vec<(Vec<u32>, u32, [bool; 2])>) {
    let read = store.read().unwrap();
    let chunks = read.chunks_after(None, 100).unwrap();
    let chunk = |(id, record): &(_, matkv_store::ChunkRecord)| {
        let there = [record.flash.is_some(), record.cold.is_some()];
        (read.tokens(id).unwrap().unwrap(), record.references, there)
    };
    (read.documents().unwrap(), chunks.iter().map(chunk).collect())
}

/// From the files alone: the same documents, chunks, tokens and placements.
#[test]
fn a_lost_index_is_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let slow = format!("file://{}", dir.path().join("slow").display());
    let change = |o: &mut StoreOptions| o.cold = cold(&slow);
    let store = open_with(dir.path(), change);
    put_all(&store, 1..6);
    put(&store, &document("two", &[2, 3, 2]), &[]);
    put(&store, &document("5", &[1]), &[]);
    let mut txn = store.write().unwrap();
    txn.delete_document("4").unwrap();
    txn.commit().unwrap();
    store.demote(&id(1), "").unwrap();
    store.demote(&id(2), "").unwrap();
    store.promote(&id(2)).unwrap();
    let (before, totals) = (contents(&store), store.read().unwrap().totals().unwrap());
    assert_eq!((totals.chunks, totals.documents, totals.flash_chunks), (3, 5, 2));
    drop(store);
    let store = without_index(dir.path(), change);
    let report = rebuild(&store);
    assert_eq!((report.chunks, report.documents, report.quarantined), (3, 5, 0));
    assert_eq!(contents(&store), before);
    assert_eq!(store.read().unwrap().totals().unwrap(), totals);
    assert_eq!(used(&store), du(dir.path()));
    for n in [1, 2, 3] {
        let vector = store.read().unwrap().chunk(&id(n)).unwrap().unwrap().vector.unwrap();
        assert_eq!(store.read().unwrap().chunk_of_vector(vector).unwrap(), Some(id(n)));
    }
    store.promote(&id(1)).unwrap();
    assert!((1..4).all(|n| readable(&store, n)));
}

/// A damaged file is put aside; the document that needs it is named, the others are there.
#[test]
fn a_rebuild_reports_what_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 1..5);
    put(&store, &document("both", &[2, 3]), &[]);
    flip(&store.files().path(&id(2)));
    std::fs::remove_file(store.files().path(&id(4))).unwrap();
    drop(store);
    let store = without_index(dir.path(), |_| {});
    let mut report = rebuild(&store);
    report.incomplete.sort();
    assert_eq!(report.incomplete, ["2", "4", "both"]);
    assert_eq!((report.chunks, report.bytes, report.quarantined), (2, 2 * LEN, 1));
    let names: Vec<String> =
        store.read().unwrap().documents().unwrap().into_iter().map(|d| d.id).collect();
    assert_eq!(names, ["1", "3"]);
    assert_eq!((used(&store), du(dir.path())), (3 * LEN, 3 * LEN));
    // What is ingested again is whole again.
    put(&store, &document("2", &[2]), &[2]);
    assert!(readable(&store, 2));
}

/// A rebuilt store keeps its capacity as well.
#[test]
fn a_rebuild_keeps_the_capacity() {
    let dir = tempfile::tempdir().unwrap();
    put_all(&open(dir.path()), 0..8);
    let store = without_index(dir.path(), |o| o.flash.capacity = Some(3 * LEN));
    rebuild(&store);
    assert_eq!((used(&store), du(dir.path())), (3 * LEN, 3 * LEN));
    assert_eq!(store.read().unwrap().totals().unwrap().flash_chunks, 3);
}

/// Deleted documents do not come back, also when they came and went in one change.
#[test]
fn a_deleted_document_is_not_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 1..3);
    let mut txn = store.write().unwrap();
    txn.put_documents(&[&document("brief", &[1])]).unwrap();
    txn.delete_document("brief").unwrap();
    txn.delete_document("2").unwrap();
    txn.put_documents(&[&document("2", &[1])]).unwrap();
    txn.commit().unwrap();
    let before = contents(&store).0;
    assert_eq!(before, [document("1", &[1]), document("2", &[1])]);
    drop(store);
    let store = without_index(dir.path(), |_| {});
    rebuild(&store);
    assert_eq!(contents(&store).0, before);
}

/// A change that fails leaves documents as they were, in the index and beside it.
#[test]
fn a_failed_change_is_not_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, [1]);
    let mut txn = store.write().unwrap();
    txn.put_chunk(&new_chunk(5, None)).unwrap();
    txn.put_documents(&[&document("never", &[5])]).unwrap();
    drop(txn);
    let before = contents(&store);
    assert_eq!(before.1.len(), 1);
    drop(store);
    let store = without_index(dir.path(), |_| {});
    rebuild(&store);
    assert_eq!(contents(&store), before);
    assert_eq!(store.read().unwrap().tokens(&id(1)).unwrap(), Some(tokens(1)));
    try_put(&store, 2).unwrap();
}

/// Somebody removes an indexed file by hand: what is written in its place is counted once.
#[test]
fn a_file_removed_by_hand_is_not_counted_twice() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 1..3);
    for _ in 0..3 {
        std::fs::remove_file(store.files().path(&id(1))).unwrap();
        let file = matkv_store::page_aligned(&file(1, Encoding::EXACT)).unwrap();
        assert_eq!(store.put_on_flash(&id(1), &file).unwrap(), LEN);
        assert_eq!((used(&store), du(dir.path())), (2 * LEN, 2 * LEN));
    }
    // One that is not written again is counted until that is found out.
    std::fs::remove_file(store.files().path(&id(2))).unwrap();
    assert_eq!(scrub(&store).bad, 1);
    assert_eq!((used(&store), du(dir.path())), (LEN, LEN));
}

/// A file of an absurd length is refused before memory is given to it.
#[test]
fn a_huge_file_is_refused_unread() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put_all(&store, 1..3);
    let path = |n| store.files().path(&id(n));
    let grow = |path| std::fs::File::options().write(true).open(path).unwrap().set_len(1 << 43);
    grow(path(1)).unwrap();
    // Not even a superblock.
    std::fs::write(path(2), vec![0; 4096]).unwrap();
    grow(path(2)).unwrap();
    assert_eq!(scrub(&store).bad, 2);
    assert!(!listed(&store, 1, Tier::Flash) && !listed(&store, 2, Tier::Flash));
    // Nor when the index is gone.
    put_all(&store, 3..4);
    grow(path(3)).unwrap();
    drop(store);
    let index = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path().join("index"));
    index.filter(|p| p.exists()).for_each(|p| std::fs::remove_dir_all(p).unwrap());
    let store = open(dir.path());
    let report = store.rebuild(&mut |_, _| Ok(None)).unwrap();
    assert_eq!((report.chunks, report.quarantined), (0, 1));
}
