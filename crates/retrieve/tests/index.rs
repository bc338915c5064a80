//! The vector index against brute force, through adds, updates and removals.

use matkv_retrieve::{EMBEDDING_DIM, HannoyIndex, VectorIndex};
use matkv_store::{Identity, Store, StoreOptions};
use matkv_types::{Digest, Fingerprint, KvShape};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

fn open(dir: &std::path::Path) -> Store {
    let identity = Identity {
        fingerprint: Fingerprint(Digest([1; 32])),
        shape: KvShape { layers: 1, kv_heads: 1, head_dim: 32 },
        base_position: 0,
        model: "none".into(),
    };
    Store::open(StoreOptions::new(dir.to_owned()), identity).unwrap()
}

fn unit(rng: &mut StdRng) -> Vec<f32> {
    let v: Vec<f32> = (0..EMBEDDING_DIM).map(|_| rng.random_range(-1.0..1.0)).collect();
    let norm = v.iter().map(|x| x * x).sum::<f32>().sqrt();
    v.iter().map(|x| x / norm).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

#[test]
fn finds_what_brute_force_finds() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let index = HannoyIndex::open(&store).unwrap();
    let search = |q: &[f32], k| index.search(&store.read().unwrap(), q, k).unwrap();
    let mut rng = StdRng::seed_from_u64(5);
    assert!(search(&unit(&mut rng), 4).is_empty(), "an index nobody wrote is empty");
    let mut vectors: Vec<(u32, Vec<f32>)> = (0..300).map(|i| (i, unit(&mut rng))).collect();
    for part in vectors.chunks(100) {
        let mut txn = store.write().unwrap();
        index.update(&mut txn, part, &[]).unwrap();
        txn.commit().unwrap();
    }
    let gone: Vec<u32> = (0..300).filter(|i| i % 3 == 0).collect();
    let mut txn = store.write().unwrap();
    index.update(&mut txn, &[], &gone).unwrap();
    txn.commit().unwrap();
    vectors.retain(|v| !gone.contains(&v.0));
    let mut found = 0;
    for _ in 0..50 {
        let q = unit(&mut rng);
        let mut exact: Vec<(f32, u32)> = vectors.iter().map(|v| (dot(&q, &v.1), v.0)).collect();
        exact.sort_by(|a, b| b.0.total_cmp(&a.0));
        let hits = search(&q, 4);
        assert_eq!(hits.len(), 4);
        for (hit, want) in hits.iter().zip(&exact) {
            found += usize::from(hit.vector == want.1);
            let score = dot(&q, &vectors.iter().find(|v| v.0 == hit.vector).unwrap().1);
            assert!((hit.score - score).abs() < 1e-4, "{} {score}", hit.score);
        }
    }
    assert!(found >= 190, "only {found} of 200 nearest neighbours found");
    let all: Vec<u32> = vectors.iter().map(|v| v.0).collect();
    let mut txn = store.write().unwrap();
    index.update(&mut txn, &[], &all).unwrap();
    txn.commit().unwrap();
    assert!(search(&unit(&mut rng), 4).is_empty());
}

#[test]
fn few_vectors_and_a_large_k() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let index = HannoyIndex::open(&store).unwrap();
    let mut rng = StdRng::seed_from_u64(6);
    let mut txn = store.write().unwrap();
    index.update(&mut txn, &[(7, unit(&mut rng)), (9, unit(&mut rng))], &[]).unwrap();
    txn.commit().unwrap();
    assert_eq!(index.search(&store.read().unwrap(), &unit(&mut rng), 4).unwrap().len(), 2);
    let mut txn = store.write().unwrap();
    assert!(index.update(&mut txn, &[(1, vec![0.0; EMBEDDING_DIM])], &[]).is_err());
}
