//! Documents, references and files of a store.

mod common;

use common::{document, id, identity, new_chunk, open, options, put, tokens, write};
use matkv_store::{Store, StoreError};
use matkv_sys::SysError;
use matkv_types::{Digest, Fingerprint};

#[test]
fn shared_chunks_live_as_long_as_a_document_uses_them() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, &document("a", &[1, 2, 2]), &[1, 2]);
    put(&store, &document("b", &[2, 3]), &[3]);
    let read = |n| store.read().unwrap().chunk(&id(n)).unwrap().map(|c| c.references);
    assert_eq!((read(1), read(2), read(3)), (Some(1), Some(3), Some(1)));
    // Replacing a document releases what only the old one used.
    assert_eq!(put(&store, &document("a", &[2]), &[]), [1]);
    assert_eq!((read(1), read(2)), (None, Some(2)));
    assert!(!store.files().path(&id(1)).exists());
    let mut txn = store.write().unwrap();
    assert_eq!(txn.delete_document("b").unwrap(), Some(vec![3]));
    assert_eq!(txn.delete_document("b").unwrap(), None);
    txn.commit().unwrap();
    assert_eq!((read(2), read(3)), (Some(1), None));
    let totals = store.read().unwrap().totals().unwrap();
    assert_eq!((totals.documents, totals.chunks, totals.tokens), (1, 1, 40));
}

/// One commit in which a document loses a chunk and another one gains it.
#[test]
fn a_chunk_may_move_between_documents() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, &document("a", &[1]), &[1]);
    let mut txn = store.write().unwrap();
    txn.put_chunk(&new_chunk(5, None)).unwrap();
    let gone = txn.put_documents(&[&document("a", &[5]), &document("c", &[1])]).unwrap();
    assert!(gone.is_empty() && txn.commit().unwrap().is_empty());
    assert!(store.files().path(&id(1)).exists());
}

/// An answer names a document that is there.
#[test]
fn the_place_of_a_chunk_is_in_a_document_that_exists() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, &document("b", &[1, 2]), &[1, 2]);
    put(&store, &document("a", &[2]), &[]);
    let place = |n| store.read().unwrap().place(&id(n), &[]).unwrap();
    assert_eq!((place(1), place(2)), (Some(("b".into(), 0)), Some(("a".into(), 0))));
    let named = store.read().unwrap().place(&id(2), &["x".into(), "b".into()]).unwrap();
    assert_eq!(named, Some(("b".into(), 1)), "the one that was asked for, not the first");
    let mut txn = store.write().unwrap();
    txn.delete_document("a").unwrap();
    txn.commit().unwrap();
    assert_eq!(place(2), Some(("b".into(), 1)));
    put(&store, &document("b", &[2, 1]), &[]);
    assert_eq!((place(1), place(2)), (Some(("b".into(), 1)), Some(("b".into(), 0))));
}

#[test]
fn a_change_that_is_not_committed_has_not_happened() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, &document("a", &[1]), &[1]);
    let mut txn = store.write().unwrap();
    txn.delete_document("a").unwrap();
    drop(txn);
    assert!(store.read().unwrap().document("a").unwrap().is_some());
    assert!(store.files().path(&id(1)).exists());
    let mut txn = store.write().unwrap();
    assert!(txn.put_documents(&[&document("x", &[9])]).is_err(), "unknown chunk");
}

#[test]
fn reopened_it_is_the_same_and_sweeps_temporary_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = {
        let store = open(dir.path());
        put(&store, &document("a", &[1, 2]), &[1, 2]);
        store.files().path(&id(1))
    };
    let store_dir = path.ancestors().nth(3).unwrap();
    let temp = store_dir.join("incoming").join("x.tmp");
    std::fs::write(&temp, b"half").unwrap();
    let store = open(dir.path());
    assert!(!temp.exists());
    let read = store.read().unwrap();
    assert_eq!(read.documents().unwrap(), [document("a", &[1, 2])]);
    assert_eq!(read.tokens(&id(2)).unwrap(), Some(tokens(2)));
    assert_eq!(read.chunk_of_vector(2).unwrap(), Some(id(2)));
    assert_eq!(read.chunk_of_vector(7).unwrap(), None);
}

#[test]
fn one_process_at_a_time_and_one_fingerprint() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    match Store::open(options(dir.path()), identity(common::FP)).map(|_| ()) {
        Err(StoreError::Sys(SysError::Locked { owner, .. })) => {
            assert_eq!(owner, std::process::id().to_string());
        }
        other => panic!("{other:?}"),
    }
    put(&store, &document("a", &[1]), &[1]);
    drop(store);
    let other = Store::open(options(dir.path()), identity(Fingerprint(Digest([2; 32])))).unwrap();
    assert!(other.read().unwrap().document("a").unwrap().is_none());
    assert_eq!(other.other_identities().len(), 1);
}

#[test]
fn quarantine_keeps_the_file_aside() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, &document("a", &[1]), &[1]);
    assert!(store.quarantine(&id(1), 0, "test").unwrap());
    assert!(!store.quarantine(&id(1), 0, "test").unwrap());
    assert!(!store.files().path(&id(1)).exists());
    assert_eq!(store.files().quarantined().unwrap().0, 1);
    // A second bad file does not replace the first.
    write(&store, 1);
    assert!(store.quarantine(&id(1), 0, "test").unwrap());
    assert_eq!(store.files().quarantined().unwrap().0, 2);
}
