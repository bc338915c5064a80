//! Any sequence of operations, faults and restarts, against what must hold after each.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{LEN, cold, document, du, flip, id, listed, open_with, readable, scrub, used, write};
use matkv_store::policy::PolicyKind;
use matkv_store::{Store, StoreError, Tier, Totals, VolumeKind};
use proptest::prelude::*;

const CHUNKS: u32 = 8;
const CAPACITY: u64 = 10 * LEN + 5000;

#[derive(Clone, Debug)]
enum Op {
    Put(u8, Vec<u32>),
    Delete(u8),
    Touch(u32),
    Pin(u32, bool),
    Demote(u32),
    Promote(u32),
    Balance,
    Abandon(u32),
    Quarantine(u32, usize),
    Flip(u32, usize),
    Remove(u32, usize),
    Scrub,
    Collect(bool),
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    let chunk = 0..CHUNKS;
    prop_oneof![
        6 => (0u8..6, prop::collection::vec(chunk.clone(), 1..3)).prop_map(|(d, c)| Op::Put(d, c)),
        1 => (0u8..6).prop_map(Op::Delete),
        1 => chunk.clone().prop_map(Op::Touch),
        1 => (chunk.clone(), any::<bool>()).prop_map(|(c, on)| Op::Pin(c, on)),
        1 => chunk.clone().prop_map(Op::Demote),
        1 => chunk.clone().prop_map(Op::Promote),
        1 => Just(Op::Balance),
        1 => chunk.clone().prop_map(Op::Abandon),
        1 => (chunk.clone(), 0usize..2).prop_map(|(c, copy)| Op::Quarantine(c, copy)),
        1 => (chunk.clone(), 0usize..2).prop_map(|(c, part)| Op::Flip(c, part)),
        1 => (chunk, 0usize..2).prop_map(|(c, part)| Op::Remove(c, part)),
        1 => Just(Op::Scrub),
        1 => any::<bool>().prop_map(Op::Collect),
        1 => Just(Op::Reopen),
    ]
}

fn open(dir: &Path, kind: VolumeKind, policy: PolicyKind) -> Store {
    open_with(dir, |o| {
        let width = if kind == VolumeKind::Single { 1 } else { 2 };
        o.directories = (0..width).map(|n| dir.join(n.to_string())).collect();
        (o.kind, o.policy, o.stripe_unit) = (kind, policy, 4096);
        o.flash.capacity = Some(CAPACITY);
        o.cold = cold(&format!("file://{}", dir.join("slow").display()));
    })
}

/// What has been committed: documents and their chunks.
type Model = BTreeMap<String, Vec<u32>>;

/// Ingests a document as the loader does: chunks the index has are not written again.
fn ingest(store: &Store, name: &str, chunks: &[u32]) -> Result<(), StoreError> {
    let known = |n: &u32| store.read().unwrap().chunk(&id(*n)).unwrap().is_some();
    let mut new: Vec<u32> = chunks.iter().copied().filter(|n| !known(n)).collect();
    new.sort_unstable();
    new.dedup();
    let ids: Vec<_> = new.iter().map(|n| id(*n)).collect();
    let _announced = store.announce(&ids)?;
    let placed: Result<Vec<_>, _> = new
        .iter()
        .map(|n| {
            let file = common::file(*n, matkv_types::Encoding::EXACT);
            store.write_file(&id(*n), &matkv_store::page_aligned(&file)?)
        })
        .collect();
    placed.and_then(|placed| {
        let mut txn = store.write()?;
        for (n, placement) in new.iter().zip(placed) {
            txn.put_chunk(&common::new_chunk(*n, Some(placement)))?;
        }
        txn.put_documents(&[&document(name, chunks)])?;
        txn.commit().map(drop)
    })
}

/// One that may be refused, but not fail in another way.
fn may_refuse<T>(outcome: Result<T, StoreError>) {
    use StoreError::{ColdMissing, File, Format, Full, Refused, Unknown};
    match outcome.map(drop) {
        Ok(())
        | Err(Refused(_) | Unknown(_) | Full { .. } | Format(_) | File { .. } | ColdMissing) => {}
        Err(other) => panic!("{other:?}"),
    }
}

fn apply(store: &Store, model: &mut Model, op: &Op) {
    let part = |n: u32, part: usize| {
        let paths: Vec<_> = store.files().paths(&id(n)).collect();
        paths[part % paths.len()].clone()
    };
    match op {
        Op::Put(name, chunks) => {
            let name = name.to_string();
            match ingest(store, &name, chunks) {
                Ok(()) => drop(model.insert(name, chunks.clone())),
                Err(e) => assert!(matches!(e, StoreError::Full { .. }), "{e:?}"),
            }
        }
        Op::Delete(name) => {
            let name = name.to_string();
            let mut txn = store.write().unwrap();
            let there = txn.delete_document(&name).unwrap().is_some();
            txn.commit().unwrap();
            assert_eq!(there, model.remove(&name).is_some());
        }
        Op::Touch(n) => store.touch(&[id(*n)], &[id(n + 1)]),
        Op::Pin(n, on) => may_refuse(store.pin(&id(*n), if *on { u64::MAX } else { 0 })),
        Op::Demote(n) => may_refuse(store.demote(&id(*n), "test")),
        Op::Promote(n) => may_refuse(store.promote(&id(*n))),
        Op::Balance => may_refuse(store.balance(&|_| true)),
        Op::Abandon(n) => {
            // An ingest that is given up after its file has been written.
            if store.read().unwrap().chunk(&id(*n)).unwrap().is_none()
                && used(store) + 2 * LEN < CAPACITY
            {
                write(store, *n);
            }
        }
        Op::Quarantine(n, copy) => {
            store.quarantine(&id(*n), copy % store.files().copies(), "test").unwrap();
        }
        Op::Flip(n, p) if part(*n, *p).exists() => flip(&part(*n, *p)),
        Op::Remove(n, p) if part(*n, *p).exists() => std::fs::remove_file(part(*n, *p)).unwrap(),
        Op::Flip(..) | Op::Remove(..) | Op::Reopen => {}
        Op::Scrub => {
            scrub(store);
            for n in 0..CHUNKS {
                assert!(!listed(store, n, Tier::Flash) || readable(store, n), "{n} after a scrub");
            }
        }
        Op::Collect(all) => drop(store.collect_garbage(*all, *all).unwrap().orphans),
    }
}

/// What holds at any time.
fn check(store: &Store, dir: &Path, model: &Model) {
    let read = store.read().unwrap();
    let mut counted = Totals { documents: model.len() as u64, ..Totals::default() };
    for (_, record) in read.chunks_after(None, 1000).unwrap() {
        counted.chunks += 1;
        counted.tokens += u64::from(record.rows);
        if let Some(placement) = record.flash {
            counted.flash_chunks += 1;
            counted.flash_bytes += placement.physical;
        }
        if let Some(placement) = record.cold {
            counted.cold_chunks += 1;
            counted.cold_bytes += placement.physical;
        }
    }
    assert_eq!(read.totals().unwrap(), counted);
    let listed: Model = read
        .documents()
        .unwrap()
        .into_iter()
        .map(|d| {
            let number = |c: &matkv_types::ChunkId| (0..CHUNKS).find(|n| id(*n) == *c).unwrap();
            (d.id, d.chunks.iter().map(number).collect())
        })
        .collect();
    assert_eq!(&listed, model);
    for n in 0..CHUNKS {
        let uses = model.values().flatten().filter(|c| **c == n).count() as u32;
        let record = read.chunk(&id(n)).unwrap();
        assert_eq!(record.map_or(0, |r| r.references), uses, "references of {n}");
    }
    let (used, on_disk) = (used(store), du(dir));
    assert!(on_disk <= used, "{on_disk} bytes on disk, {used} counted");
    assert!(used <= CAPACITY, "{used} bytes counted, {CAPACITY} allowed");
}

fn history(kind: VolumeKind, policy: PolicyKind, ops: &[Op]) {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, mut model) = (open(dir.path(), kind, policy), Model::new());
    for op in ops {
        if matches!(op, Op::Reopen) {
            drop(store);
            store = open(dir.path(), kind, policy);
        }
        apply(&store, &mut model, op);
        check(&store, dir.path(), &model);
    }
    // In the end everything listed is good, and nothing is on the device that is not counted.
    apply(&store, &mut model, &Op::Scrub);
    check(&store, dir.path(), &model);
    drop(store);
    let store = open(dir.path(), kind, policy);
    assert_eq!(used(&store), du(dir.path()), "after a restart");
    store.collect_garbage(true, true).unwrap();
    check(&store, dir.path(), &model);
    let totals = store.read().unwrap().totals().unwrap();
    assert_eq!((used(&store), du(dir.path())), (totals.flash_bytes, totals.flash_bytes));
    store.sweep_cold();
    let objects = store.cold().unwrap().scan().unwrap().len() as u64;
    assert_eq!(objects, totals.cold_chunks, "objects in the cold tier");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 32,
        max_shrink_iters: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn one_directory(ops in prop::collection::vec(op(), 1..40), policy in 0usize..4) {
        history(VolumeKind::Single, PolicyKind::ALL[policy], &ops);
    }

    #[test]
    fn a_stripe(ops in prop::collection::vec(op(), 1..40), policy in 0usize..4) {
        history(VolumeKind::Stripe, PolicyKind::ALL[policy], &ops);
    }

    #[test]
    fn a_mirror(ops in prop::collection::vec(op(), 1..40), policy in 0usize..4) {
        history(VolumeKind::Mirror, PolicyKind::ALL[policy], &ops);
    }
}
