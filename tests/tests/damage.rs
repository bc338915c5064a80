//! Chunk files that are not what they should be: the answer must not change, the file must heal.

use std::path::{Path, PathBuf};

use matkv_api::v1::GenerateRequest;
use matkv_tests::{Reply, Server, chunk_file, entries, metric, question, same_logits, text};

const PAGE: usize = 4096;

/// One way to damage a file of these bytes; `other` is the valid file of another chunk.
struct Damage {
    name: &'static str,
    apply: fn(path: &Path, bytes: Vec<u8>, other: &[u8]),
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("a damaged file");
}

fn cut(path: &Path, bytes: &[u8], len: usize) {
    assert!(len < bytes.len());
    write(path, &bytes[..len]);
}

fn flip(path: &Path, mut bytes: Vec<u8>, at: usize, bit: u8) {
    bytes[at] ^= 1 << bit;
    write(path, &bytes);
}

/// Changes a word of the superblock and makes its own checksum right again.
fn forge(path: &Path, mut bytes: Vec<u8>, at: usize, change: fn(u32) -> u32) {
    let word = |b: &[u8], at: usize| u32::from_le_bytes(b[at..at + 4].try_into().expect("a word"));
    let forged = change(word(&bytes, at));
    bytes[at..at + 4].copy_from_slice(&forged.to_le_bytes());
    let own = PAGE - 4;
    let checksum = crc32c::crc32c(&bytes[..own]);
    bytes[own..PAGE].copy_from_slice(&checksum.to_le_bytes());
    write(path, &bytes);
}

/// Files of another length than the index expects.
const LENGTHS: &[Damage] = &[
    Damage { name: "empty", apply: |p, b, _| cut(p, &b, 0) },
    Damage { name: "one byte", apply: |p, b, _| cut(p, &b, 1) },
    Damage { name: "half a superblock", apply: |p, b, _| cut(p, &b, PAGE / 2) },
    Damage { name: "the superblock only", apply: |p, b, _| cut(p, &b, PAGE) },
    Damage { name: "no KV section", apply: |p, b, _| cut(p, &b, 2 * PAGE) },
    Damage { name: "half", apply: |p, b, _| cut(p, &b, b.len() / 2) },
    Damage { name: "without its last page", apply: |p, b, _| cut(p, &b, b.len() - PAGE) },
    Damage { name: "without its last byte", apply: |p, b, _| cut(p, &b, b.len() - 1) },
    Damage {
        name: "a page too long",
        apply: |p, mut b, _| {
            b.resize(b.len() + PAGE, 0);
            write(p, &b);
        },
    },
    Damage {
        name: "eight terabytes of holes",
        apply: |p, _, _| {
            let file = std::fs::File::options().write(true).open(p).expect("it is there");
            file.set_len(8 << 40).expect("holes take nothing");
        },
    },
    Damage {
        name: "a directory",
        apply: |p, _, _| {
            std::fs::remove_file(p).expect("removed");
            std::fs::create_dir(p).expect("a directory");
        },
    },
];

/// Files of the right length with something wrong inside.
const CONTENTS: &[Damage] = &[
    Damage { name: "wrong magic", apply: |p, b, _| flip(p, b, 0, 5) },
    Damage { name: "the next version", apply: |p, b, _| forge(p, b, 8, |v| v + 1) },
    Damage { name: "a bit of the fingerprint", apply: |p, b, _| flip(p, b, 16, 0) },
    Damage { name: "another fingerprint", apply: |p, b, _| forge(p, b, 16, |w| w ^ 1) },
    Damage { name: "another chunk id", apply: |p, b, _| forge(p, b, 48, |w| w ^ 1) },
    Damage { name: "another position", apply: |p, b, _| forge(p, b, 108, |n| n + 1) },
    Damage { name: "fewer rows", apply: |p, b, _| forge(p, b, 104, |n| n - 1) },
    Damage { name: "4 billion rows", apply: |p, b, _| forge(p, b, 104, |_| u32::MAX) },
    Damage { name: "a layer's checksum", apply: |p, b, _| flip(p, b, 192 + 5, 3) },
    Damage { name: "its own checksum", apply: |p, b, _| flip(p, b, PAGE - 1, 7) },
    Damage { name: "a token id", apply: |p, b, _| flip(p, b, PAGE + 4, 0) },
    Damage { name: "padding after the token ids", apply: |p, b, _| flip(p, b, 2 * PAGE - 1, 0) },
    Damage { name: "the first row", apply: |p, b, _| flip(p, b, 2 * PAGE, 0) },
    Damage {
        name: "a row in the middle",
        apply: |p, b, _| {
            let at = b.len() / 2;
            flip(p, b, at, 6);
        },
    },
    Damage {
        name: "the last byte",
        apply: |p, b, _| {
            let at = b.len() - 1;
            flip(p, b, at, 0);
        },
    },
    Damage { name: "zeros", apply: |p, b, _| write(p, &vec![0; b.len()]) },
    Damage { name: "another chunk's file", apply: |p, _, other| write(p, other) },
    Damage {
        name: "another chunk's rows",
        apply: |p, mut b, other| {
            b[2 * PAGE..].copy_from_slice(&other[2 * PAGE..]);
            write(p, &b);
        },
    },
];

/// Asks about one chunk, from flash whatever the arena holds.
fn cold(id: &str) -> GenerateRequest {
    GenerateRequest {
        chunk_ids: vec![id.to_owned()],
        max_new_tokens: Some(1),
        return_logits: true,
        cold: true,
        ..question("What was measured?")
    }
}

fn assert_same(case: &str, expected: &Reply, found: &Reply) {
    assert_eq!(expected.answer(), found.answer(), "{case}");
    assert!(same_logits(&expected.logits, &found.logits), "{case}: other logits");
}

/// A server with as many chunks of 64 tokens as there are cases, and one more.
async fn with_chunks(count: usize) -> Option<(Server, Vec<String>)> {
    let server = Server::start(&["chunker.chunk_size=64", "log.level=error"]).await?;
    server.ingest(&[("log", &text(5, count * 54))]).await;
    let chunks = server.document("log").await.chunk_ids;
    assert!(chunks.len() > count, "{} chunks", chunks.len());
    Some((server, chunks))
}

fn quarantine(server: &Server) -> Vec<PathBuf> {
    let stores = entries(&server.home().store());
    stores.iter().flat_map(|s| entries(&s.join("quarantine"))).collect()
}

/// Damages a chunk's file, asks, and looks at everything that must have happened.
async fn heals(server: &Server, damage: &Damage, id: &str, other: &str) {
    let case = damage.name;
    let path = chunk_file(&server.home().store(), id);
    let other = std::fs::read(chunk_file(&server.home().store(), other)).expect("a chunk file");
    let healthy = std::fs::read(&path).expect("a chunk file");
    let expected = server.ask(cold(id)).await;
    assert_eq!(expected.sources(), ["flash"], "{case}");
    let quarantined = server.status().await.quarantined;

    (damage.apply)(&path, healthy.clone(), &other);
    let reply = server.ask(cold(id)).await;
    assert_eq!(reply.sources(), ["computed"], "{case}");
    assert_same(case, &expected, &reply);
    // Its rows were computed for this request: none of them was cached.
    let (before_usage, usage) = (&expected.usage, &reply.usage);
    assert_eq!((before_usage.recomputed_rows, usage.recomputed_rows), (0, 64), "{case}");
    assert_eq!(usage.cached_tokens(), before_usage.cached_tokens() - 64, "{case}");

    assert_eq!(server.status().await.quarantined, quarantined + 1, "{case}");
    let kept = quarantine(server).iter().any(|p| p.to_string_lossy().contains(id));
    assert!(kept, "{case}: the damaged file is not kept");
    // It is put back behind the request's back.
    server.at_rest().await;
    assert!(std::fs::read(&path).expect("a new file") == healthy, "{case}: other bytes");
}

async fn all_heal(server: &Server, cases: &[Damage], chunks: &[String]) {
    let before = server.status().await.metrics;
    // The last chunk is shorter than the others: not used.
    for (i, damage) in cases.iter().enumerate() {
        heals(server, damage, &chunks[i], &chunks[i + 1]).await;
    }
    let after = server.status().await.metrics;
    for counted in ["matkv_chunks_recomputed_total", "matkv_chunks_quarantined_total"] {
        let counts = metric(&after, counted) - metric(&before, counted);
        assert_eq!(counts, cases.len() as f64, "{counted}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_wrong_bytes_is_replaced() {
    let Some((server, chunks)) = with_chunks(CONTENTS.len() + 1).await else { return };
    all_heal(&server, CONTENTS, &chunks).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_another_length_is_replaced() {
    let Some((server, chunks)) = with_chunks(LENGTHS.len() + 3).await else { return };
    wanted_twice(&server, &chunks[LENGTHS.len() + 2]).await;
    deleted(&server, &chunks[LENGTHS.len() + 1]).await;
    all_heal(&server, LENGTHS, &chunks).await;
    server.stop().await;
}

/// Two requests wait for the same recomputation, and the decoder reads what came of it.
async fn wanted_twice(server: &Server, id: &str) {
    let request = GenerateRequest { max_new_tokens: Some(12), ..cold(id) };
    let expected = server.ask(request.clone()).await;
    std::fs::remove_file(chunk_file(&server.home().store(), id)).expect("removed");
    let (warm, again) = (GenerateRequest { cold: false, ..request.clone() }, request.clone());
    let (first, second) = tokio::join!(server.ask(request), server.ask(warm));
    assert_same("first of two", &expected, &first);
    assert_same("second of two", &expected, &second);
    // The new file is used, once it is there.
    server.at_rest().await;
    let again = server.ask(again).await;
    assert_eq!(again.sources(), ["flash"]);
    assert_same("once more", &expected, &again);
    let computed = [&first, &second].iter().any(|r| r.sources() == ["computed"]);
    assert!(computed, "{:?} and {:?}", first.sources(), second.sources());
}

/// A missing file is computed, and there is nothing to keep aside.
async fn deleted(server: &Server, id: &str) {
    let path = chunk_file(&server.home().store(), id);
    let healthy = std::fs::read(&path).expect("a chunk file");
    let expected = server.ask(cold(id)).await;
    let before = server.status().await;
    std::fs::remove_file(&path).expect("removed");
    let reply = server.ask(cold(id)).await;
    assert_same("deleted", &expected, &reply);
    assert_eq!(reply.sources(), ["computed"]);
    server.at_rest().await;
    assert!(std::fs::read(&path).expect("a new file") == healthy);
    let after = server.status().await;
    assert_eq!(after.quarantined, before.quarantined);
    let counted = "matkv_chunks_quarantined_total";
    assert_eq!(metric(&after.metrics, counted), metric(&before.metrics, counted));
}
