//! What the tests of the store share.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use matkv_api::v1::GenerateRequest;
use matkv_tests::{Home, Output, Reply, Server, entries, question, same_logits, until};
use serde_json::Value;

/// Chunks of 64 tokens are quick to compute.
pub const SMALL: &str = "chunker.chunk_size=64";

/// Anything that runs `matkv` with arguments: beside a running system, or without one.
pub type Run<'a> = &'a dyn Fn(&[&str]) -> Output;

pub fn with_json(run: Run<'_>, arguments: &[&str]) -> (Option<i32>, Value) {
    let all: Vec<&str> = ["--format", "json"].iter().chain(arguments).copied().collect();
    let output = run(&all);
    let value = serde_json::from_str(&output.out);
    (output.code, value.unwrap_or_else(|e| panic!("{arguments:?}: {e}: {output:?}")))
}

/// The JSON of a command that succeeds.
pub fn json(run: Run<'_>, arguments: &[&str]) -> Value {
    let (code, value) = with_json(run, arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {value}");
    value
}

/// A command with ids at its end.
pub fn with_ids(run: Run<'_>, command: &[&str], ids: &[String]) -> Value {
    let all: Vec<&str> = command.iter().copied().chain(ids.iter().map(String::as_str)).collect();
    json(run, &all)
}

pub fn refused(run: Run<'_>, arguments: &[&str], code: i32, words: &str) {
    let output = run(arguments);
    assert_eq!(output.code, Some(code), "{arguments:?}: {output:?}");
    assert!(output.err.contains(words), "{arguments:?} does not say {words:?}: {}", output.err);
}

/// Tier and encoding of every placement of a chunk.
pub fn placements(run: Run<'_>, id: &str) -> Vec<(String, String)> {
    let stat = json(run, &["chunks", "stat", id]);
    let text = |p: &Value, key: &str| p[key].as_str().expect("a word").to_owned();
    let all = stat[0]["placements"].as_array().expect("a list").clone();
    all.iter().map(|p| (text(p, "tier"), text(p, "encoding"))).collect()
}

pub fn about(document: &str, cold: bool) -> GenerateRequest {
    GenerateRequest {
        document_ids: vec![document.to_owned()],
        return_logits: true,
        cold,
        ..question("Who crossed the narrow bridge, and when?")
    }
}

pub fn assert_same(case: &str, expected: &Reply, found: &Reply) {
    assert_eq!(expected.answer(), found.answer(), "{case}");
    assert!(same_logits(&expected.logits, &found.logits), "{case}: other logits");
}

pub fn all_from(case: &str, source: &str, reply: &Reply) {
    let sources = reply.sources();
    assert!(!sources.is_empty() && sources.iter().all(|s| *s == source), "{case}: {sources:?}");
}

/// Asks until every chunk comes from there; every answer on the way must be the same.
pub async fn until_from(
    server: &Server,
    document: &str,
    cold: bool,
    source: &str,
    expected: &Reply,
) {
    until(&format!("{document} comes from {source}"), async || {
        let reply = server.ask(about(document, cold)).await;
        assert_same(source, expected, &reply);
        reply.sources().iter().all(|s| *s == source).then_some(())
    })
    .await;
}

pub fn url(home: &Home) -> String {
    format!("cold.url=file://{}", home.beside("cold").display())
}

/// Starts in a new home, with settings that may name its directories.
pub async fn start(settings: &[&str], more: impl Fn(&Home) -> Vec<String>) -> Option<Server> {
    Home::models()?;
    let home = Home::new();
    let more = more(&home);
    let own = more.iter().map(String::as_str);
    let all: Vec<&str> = [SMALL].into_iter().chain(settings.iter().copied()).chain(own).collect();
    Some(Server::start_in(home, &all).await)
}

/// Files, at whatever depth.
pub fn files_below(dir: &Path) -> Vec<PathBuf> {
    let inner = |p: PathBuf| if p.is_dir() { files_below(&p) } else { vec![p] };
    entries(dir).into_iter().flat_map(inner).collect()
}

pub fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).expect("a chunk file");
    let at = bytes.len() / 2;
    bytes[at] ^= 4;
    std::fs::write(path, bytes).expect("a damaged file");
}

/// Bytes on the device of everything a store's directories of chunks hold. A walk is no snapshot: a
/// file that moves, or leaves for another, may be counted twice. So what is above the limit is
/// counted again; what stays above it is there.
pub fn physical(store: &Path, limit: u64) -> u64 {
    let mut least = u64::MAX;
    for _ in 0..8 {
        least = least.min(walk(store));
        if least <= limit {
            break;
        }
    }
    least
}

fn walk(store: &Path) -> u64 {
    let kinds = ["chunks", "quarantine", "incoming"];
    let dirs = entries(store).into_iter().flat_map(|f| kinds.map(|k| f.join(k)));
    let files = dirs.flat_map(|d| files_below(&d));
    files.filter_map(|f| std::fs::metadata(f).ok()).map(|m| m.blocks() * 512).sum()
}

pub fn nothing_incoming(store: &Path) {
    let left: Vec<_> = entries(store).iter().flat_map(|f| entries(&f.join("incoming"))).collect();
    assert!(left.is_empty(), "{left:?}");
}
