//! Real chunk files of a tiny shape, and stores to put them into.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;

use matkv_format::ChunkFile;
use matkv_store::{
    DocumentRecord, Identity, NewChunk, Placement, Store, StoreOptions, page_aligned,
};
use matkv_types::{
    ChunkId, ContentId, Digest, Encoding, Fingerprint, KvDtype, KvLayout, KvShape,
};

pub const FP: Fingerprint = Fingerprint(Digest([1; 32]));
pub const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 1, head_dim: 32 };

pub fn identity(fingerprint: Fingerprint) -> Identity {
    Identity { fingerprint, shape: SHAPE, base_position: 3, model: "tiny".into() }
}

pub fn options(dir: &Path) -> StoreOptions {
    StoreOptions::new(dir.to_owned())
}

pub fn open(dir: &Path) -> Store {
    Store::open(options(dir), identity(FP)).unwrap()
}

pub fn tokens(n: u32) -> Vec<u32> {
    (0..40).map(|i| n * 1000 + i).collect()
}

pub fn id(n: u32) -> ChunkId {
    ChunkId::new(FP, "default", ContentId::of_tokens(&tokens(n)))
}

/// The sealed file of chunk `n`.
pub fn file(n: u32, encoding: Encoding) -> Vec<u8> {
    let tokens = tokens(n);
    let layout = KvLayout::new(SHAPE, KvDtype::Bf16, tokens.len());
    let mut rows: Vec<u8> = (0..layout.total_bytes())
        // bf16 numbers between about 0.5 and 2.
        .map(|i| if i % 2 == 0 { (i as u32 * 31 + n * 7) as u8 } else { 0x3f })
        .collect();
    let id = id(n);
    let identity = identity(FP);
    let expect = identity.expectation(id, &tokens);
    let mut out = vec![0; ChunkFile::len(SHAPE, encoding.dtype, tokens.len())];
    let found = ChunkFile::encode(&mut rows, &mut out, &expect, encoding.dtype).unwrap();
    ChunkFile::compress(&out, &found, encoding.codec, 1).unwrap()
}

/// Writes chunk `n` to flash.
pub fn write(store: &Store, n: u32) -> Placement {
    let file = page_aligned(&file(n, Encoding::EXACT)).unwrap();
    store.announce(&[id(n)]).unwrap();
    let placement = store.write_file(&id(n), &file).unwrap();
    store.withdraw(&[id(n)]);
    placement
}

pub fn new_chunk(n: u32, flash: Option<Placement>) -> NewChunk {
    NewChunk { id: id(n), tokens: tokens(n), flash, cold: None, vector: Some(n), compute_ms: 80 }
}

pub fn document(name: &str, chunks: &[u32]) -> DocumentRecord {
    let chunks: Vec<ChunkId> = chunks.iter().map(|&n| id(n)).collect();
    let content = ContentId::of_tokens(&[chunks.len() as u32]);
    DocumentRecord { id: name.into(), content, bytes: 1, tokens: 2, chunks, ingested_at: 0 }
}

/// Commits a document; chunks in `new` are written first. Returns vectors that are gone.
pub fn put(store: &Store, doc: &DocumentRecord, new: &[u32]) -> Vec<u32> {
    let placements: Vec<Placement> = new.iter().map(|&n| write(store, n)).collect();
    let mut txn = store.write().unwrap();
    for (&n, placement) in new.iter().zip(placements) {
        txn.put_chunk(&new_chunk(n, Some(placement))).unwrap();
    }
    let vectors = txn.put_documents(&[doc]).unwrap();
    txn.commit().unwrap();
    vectors
}
