//! A chunk file that is not exactly right is never used.

use matkv_format::{ChunkFile, Expectation, FORMAT_VERSION, FormatError, Superblock};
use matkv_types::{ChunkId, ContentId, Digest, Fingerprint, KvDtype, KvShape, PAGE_BYTES};
use proptest::prelude::*;

const SHAPE: KvShape = KvShape { layers: 3, kv_heads: 2, head_dim: 32 };

struct Sample {
    tokens: Vec<u32>,
    bytes: Vec<u8>,
}

fn expect(tokens: &[u32]) -> Expectation<'_> {
    let fingerprint = Fingerprint(Digest([9; 32]));
    let chunk_id = ChunkId::new(fingerprint, "default", ContentId::of_tokens(tokens));
    Expectation { fingerprint, chunk_id, tokens, shape: SHAPE, base_position: 31 }
}

fn sample(rows: usize) -> Sample {
    let tokens: Vec<u32> = (0..rows as u32).map(|t| t * 77 + 5).collect();
    let len = ChunkFile::len(SHAPE, KvDtype::Bf16, rows);
    // A recycled slot: garbage everywhere, sealing must not leave any of it.
    let mut bytes: Vec<u8> = (0..len + 4096).map(|i| (i * 131 % 251) as u8).collect();
    ChunkFile::seal(&mut bytes, &expect(&tokens)).unwrap();
    bytes.truncate(len);
    Sample { tokens, bytes }
}

#[test]
fn round_trip() {
    for rows in [1, 15, 16, 17, 300, 1024, 1025] {
        let s = sample(rows);
        let found = ChunkFile::verify(&s.bytes, &expect(&s.tokens)).unwrap();
        assert_eq!((found.rows, found.base_position), (rows, 31));
        assert_eq!(s.bytes.len() % PAGE_BYTES, 0, "O_DIRECT reads whole pages");
    }
}

#[test]
fn the_same_rows_are_the_same_bytes() {
    let s = sample(300);
    let mut again: Vec<u8> = vec![0xee; s.bytes.len()];
    let kv = ChunkFile::kv_range(SHAPE, KvDtype::Bf16, 300);
    again[kv.clone()].copy_from_slice(&s.bytes[kv]);
    ChunkFile::seal(&mut again, &expect(&s.tokens)).unwrap();
    assert!(again == s.bytes);
}

/// Every bit of every byte is covered by some checksum or comparison.
#[test]
fn every_flipped_byte_is_seen() {
    let s = sample(20);
    let mut bytes = s.bytes.clone();
    for at in 0..bytes.len() {
        bytes[at] ^= 1 << (at % 8);
        assert!(ChunkFile::verify(&bytes, &expect(&s.tokens)).is_err(), "byte {at}");
        bytes[at] ^= 1 << (at % 8);
    }
    assert!(ChunkFile::verify(&bytes, &expect(&s.tokens)).is_ok());
}

#[test]
fn every_truncation_is_seen() {
    let s = sample(20);
    for len in (0..s.bytes.len()).step_by(256).chain([s.bytes.len() - 1]) {
        assert!(ChunkFile::verify(&s.bytes[..len], &expect(&s.tokens)).is_err(), "{len} bytes");
    }
}

fn reseal(bytes: &mut [u8]) {
    let own = crc32c::crc32c(&bytes[..PAGE_BYTES - 4]);
    bytes[PAGE_BYTES - 4..PAGE_BYTES].copy_from_slice(&own.to_le_bytes());
}

/// Header fields that are wrong though the checksum is right: a careful forger, or a bug.
#[test]
fn each_header_field_counts() {
    let s = sample(20);
    for at in (0..192 + 3 * 4).step_by(4) {
        let mut bytes = s.bytes.clone();
        bytes[at] ^= 0x40;
        reseal(&mut bytes);
        assert!(ChunkFile::verify(&bytes, &expect(&s.tokens)).is_err(), "header byte {at}");
    }
}

#[test]
fn the_reason_is_named() {
    let s = sample(20);
    let verify = |bytes: &[u8], tokens: &[u32]| ChunkFile::verify(bytes, &expect(tokens));
    let mut bytes = s.bytes.clone();
    bytes[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
    reseal(&mut bytes);
    assert!(matches!(verify(&bytes, &s.tokens), Err(FormatError::Version { .. })));
    assert!(matches!(verify(b"", &s.tokens), Err(FormatError::Length { .. })));
    assert!(matches!(verify(&[7; 5000], &s.tokens), Err(FormatError::Magic { .. })));
    let other: Vec<u32> = s.tokens.iter().map(|t| t + 1).collect();
    assert!(matches!(verify(&s.bytes, &other), Err(FormatError::Field { field: "chunk id", .. })));
    let mut bytes = s.bytes.clone();
    *bytes.last_mut().unwrap() ^= 1;
    let error = verify(&bytes, &s.tokens).unwrap_err();
    assert!(error.to_string().contains("layer 2"), "{error}");
}

proptest! {
    /// Any bytes: an answer, never a panic, never a large allocation.
    #[test]
    fn arbitrary_bytes(
        bytes in proptest::collection::vec(any::<u8>(), 0..9000), keep in 0usize..200,
    ) {
        let s = sample(3);
        let mut file = s.bytes.clone();
        for (i, b) in bytes.iter().enumerate() {
            if i + keep < file.len() {
                file[i + keep] = *b;
            }
        }
        reseal(&mut file);
        let _ = Superblock::decode(&file);
        let _ = Superblock::decode(&bytes);
        let changed = file[..s.bytes.len()] != s.bytes[..];
        prop_assert_eq!(ChunkFile::verify(&file, &expect(&s.tokens)).is_err(), changed);
    }
}

/// Files of format version 1 as the first release wrote them, and a damaged twin.
#[test]
fn golden_files_of_version_1() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1");
    let s = sample(20);
    if std::env::var_os("MATKV_WRITE_GOLDEN").is_some() {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(format!("{dir}/good.kv"), &s.bytes).unwrap();
        let mut bad = s.bytes.clone();
        bad[PAGE_BYTES * 2 + 100] ^= 4;
        std::fs::write(format!("{dir}/flipped.kv"), bad).unwrap();
    }
    let good = std::fs::read(format!("{dir}/good.kv")).unwrap();
    assert!(good == s.bytes, "this build writes other bytes than version 1 did");
    assert!(ChunkFile::verify(&good, &expect(&s.tokens)).is_ok());
    let flipped = std::fs::read(format!("{dir}/flipped.kv")).unwrap();
    assert!(ChunkFile::verify(&flipped, &expect(&s.tokens)).is_err());
}
