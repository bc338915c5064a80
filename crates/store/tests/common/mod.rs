//! Real chunk files of a tiny shape, and stores to put them into.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;

use matkv_format::ChunkFile;
use matkv_store::{
    ColdOptions, ColdTierOptions, DocumentRecord, Identity, NewChunk, Placement, Result, Store,
    StoreOptions, Tier, TierOptions, page_aligned,
};
use matkv_types::{ChunkId, ContentId, Digest, Encoding, Fingerprint, KvDtype, KvLayout, KvShape};

pub const FP: Fingerprint = Fingerprint(Digest([1; 32]));
pub const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 1, head_dim: 32 };

/// Bytes of an uncompressed file of this shape.
pub const LEN: u64 = 24_576;

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
    let _announced = store.announce(&[id(n)]).unwrap();
    store.write_file(&id(n), &file).unwrap()
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

/// A store whose options have been changed.
pub fn open_with(dir: &Path, change: impl FnOnce(&mut StoreOptions)) -> Store {
    let mut options = options(dir);
    change(&mut options);
    Store::open(options, identity(FP)).unwrap()
}

/// A cold tier at a URL that takes chunks as they are.
pub fn cold(url: &str) -> Option<ColdTierOptions> {
    let deadline = std::time::Duration::from_secs(30);
    let place = ColdOptions { url: url.into(), endpoint: None, deadline };
    let tier = TierOptions { encoding: Encoding::EXACT, level: 3, capacity: None };
    Some(ColdTierOptions { place, tier })
}

/// As [`put`] of one document with one chunk of its own, and named after it.
pub fn try_put(store: &Store, n: u32) -> Result<()> {
    let file = page_aligned(&file(n, Encoding::EXACT))?;
    let announced = store.announce(&[id(n)])?;
    let placement = store.write_file(&id(n), &file)?;
    drop(announced);
    let mut txn = store.write()?;
    txn.put_chunk(&new_chunk(n, Some(placement)))?;
    txn.put_documents(&[&document(&n.to_string(), &[n])])?;
    txn.commit().map(drop)
}

pub fn put_all(store: &Store, numbers: impl IntoIterator<Item = u32>) {
    numbers.into_iter().for_each(|n| try_put(store, n).unwrap());
}

/// Whether the index lists chunk `n` in a tier.
pub fn listed(store: &Store, n: u32, tier: Tier) -> bool {
    let record = store.read().unwrap().chunk(&id(n)).unwrap();
    record.is_some_and(|r| r.placement(tier).is_some())
}

/// The bytes of chunk `n` in a tier, verified.
pub fn bytes(store: &Store, n: u32, tier: Tier) -> Result<Vec<u8>> {
    store.read_verified(&id(n), tier, 0).map(|(bytes, found)| bytes[..found.file_len()].to_vec())
}

/// Whether some copy of chunk `n` on flash is good.
pub fn readable(store: &Store, n: u32) -> bool {
    (0..store.files().copies()).any(|c| store.read_verified(&id(n), Tier::Flash, c).is_ok())
}

pub fn used(store: &Store) -> u64 {
    store.flash_usage().0
}

/// Bytes on the device of files in `chunks` and `quarantine`, anywhere below: what `du` counts.
pub fn du(dir: &Path) -> u64 {
    fn walk(dir: &Path, counts: bool) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let Ok(list) = std::fs::read_dir(dir) else { return 0 };
        list.map(|entry| {
            let path = entry.unwrap().path();
            let counts = counts || path.ends_with("chunks") || path.ends_with("quarantine");
            let meta = path.symlink_metadata().unwrap();
            match meta.is_dir() {
                true => walk(&path, counts),
                false => {
                    if counts {
                        meta.blocks() * 512
                    } else {
                        0
                    }
                }
            }
        })
        .sum()
    }
    walk(dir, false)
}

/// Scrubs everything.
pub fn scrub(store: &Store) -> matkv_store::ScrubReport {
    let (next, report) = store.scrub(None, u64::MAX).unwrap();
    assert_eq!(next, None);
    report
}

/// Flips a bit in the middle of a file.
pub fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 4;
    std::fs::write(path, bytes).unwrap();
}
