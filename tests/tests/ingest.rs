//! Documents in, documents out: chunks, files, acknowledgements.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use matkv_api::v1::{GenerateRequest, ingest_event::Event};
use matkv_tests::{
    Ingest, Reply, Server, chunk_file, chunk_files, entries, question, same_logits, signal, text,
};

const CHUNK: usize = 64;
const SETTINGS: [&str; 2] = ["chunker.chunk_size=64", "arena.size=64MiB"];

async fn about(server: &Server, document: &str) -> Reply {
    let document_ids = vec![document.to_owned()];
    server.ask(GenerateRequest { document_ids, return_logits: true, ..question("Who?") }).await
}

/// What a rewritten file would change.
fn identity(path: &Path) -> (u64, i64, i64, i64, u64) {
    let m = std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    (m.ino(), m.mtime(), m.mtime_nsec(), m.ctime_nsec(), m.len())
}

fn identities(server: &Server) -> BTreeMap<String, (u64, i64, i64, i64, u64)> {
    let files = chunk_files(&server.home().store());
    files.into_iter().map(|(id, path)| (id, identity(&path))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_become_chunks_once() {
    let Some(server) = Server::start(&SETTINGS).await else { return };
    boundaries(&server).await;
    again(&server).await;
    changed(&server).await;
    shared(&server).await;
    refused_by_the_server(&server).await;
    two_clients(&server).await;
    server.stop().await;
}

/// A text of exactly `tokens` tokens, found by trial: a short word more is a token more.
async fn of_tokens(server: &Server, id: &str, cycle: &[&str], tokens: usize) -> String {
    let mut words = tokens;
    for _ in 0..4 {
        let text: String = cycle.iter().cycle().take(words).map(|w| format!(" {w}")).collect();
        let done = server.ingest(&[(id, &text)]).await.of(id).clone();
        assert_eq!(done.error, "");
        let listed = server.document(id).await;
        assert_eq!((listed.tokens, listed.bytes), (done.tokens, text.len() as u64));
        if done.tokens as usize == tokens {
            return text;
        }
        words = words + tokens - done.tokens as usize;
    }
    panic!("no text of {tokens} tokens found");
}

/// One less than a chunk, a whole one, one more, and the same around two.
async fn boundaries(server: &Server) {
    // Three words of their own each, so that no two chunks are the same: 64 is no multiple of 3.
    for (id, cycle, tokens, sizes) in [
        ("one", ["the", "and", "with"], 1, &[1][..]),
        ("below", ["and", "with", "from"], CHUNK - 1, &[63]),
        ("exact", ["was", "is", "of"], CHUNK, &[64]),
        ("above", ["to", "in", "for"], CHUNK + 1, &[64, 1]),
        ("nearly", ["on", "at", "by"], 2 * CHUNK - 1, &[64, 63]),
        ("twice", ["as", "it", "he"], 2 * CHUNK, &[64, 64]),
        ("over", ["she", "we", "you"], 2 * CHUNK + 1, &[64, 64, 1]),
    ] {
        of_tokens(server, id, &cycle, tokens).await;
        let reply = about(server, id).await;
        let found: Vec<u32> = reply.chunks.iter().map(|c| c.tokens).collect();
        assert_eq!(found, sizes, "{id}");
        assert_eq!(reply.chunk_ids(), server.document(id).await.chunk_ids);
        let ordinals: Vec<u32> = reply.chunks.iter().map(|c| c.ordinal).collect();
        assert_eq!(ordinals, (0..sizes.len() as u32).collect::<Vec<_>>());
    }
    // A file for every chunk that a document names, and no other; the trials have left nothing.
    let named = server.documents().await.into_iter().flat_map(|d| d.chunk_ids);
    let named: std::collections::BTreeSet<String> = named.collect();
    let files: Vec<String> = chunk_files(&server.home().store()).into_keys().collect();
    assert_eq!(files, named.into_iter().collect::<Vec<_>>());
}

/// The same documents again: nothing is computed, no file is touched.
async fn again(server: &Server) {
    let long = text(3, 150);
    let first = server.ingest(&[("log", &long)]).await;
    let chunks = first.summary.chunks_computed;
    assert!(chunks >= 3 && first.summary.bytes_written > 0, "{:?}", first.summary);
    assert_eq!(u64::from(first.of("log").chunks), chunks);
    let before = identities(server);
    let second = server.ingest(&[("log", &long)]).await.summary;
    assert_eq!((second.chunks_computed, second.tokens_computed, second.bytes_written), (0, 0, 0));
    assert_eq!((second.documents, second.unchanged, second.chunks_reused), (1, 1, chunks));
    assert_eq!(before, identities(server));
}

/// A new text replaces the old one: what both share stays, what nobody uses goes.
async fn changed(server: &Server) {
    let old = server.document("log").await.chunk_ids;
    let longer = text(3, 150) + " The keeper added a sentence at the very end of the log.";
    let before = identities(server);
    let done = server.ingest(&[("log", &longer)]).await;
    assert!(!done.of("log").unchanged);
    let new = server.document("log").await.chunk_ids;
    assert!(old[0] == new[0] && old != new && done.summary.chunks_reused >= 1);
    let store = server.home().store();
    for id in old.iter().filter(|id| !new.contains(id)) {
        assert!(!chunk_file(&store, id).exists(), "an orphan file of the old version");
    }
    for id in &new {
        assert!(chunk_file(&store, id).exists());
        let kept = before.get(id).is_none_or(|i| *i == identity(&chunk_file(&store, id)));
        assert!(kept, "a shared chunk was written again");
    }
    assert_eq!(about(server, "log").await.chunk_ids(), new);
}

/// Two documents of the same text share their chunks until the last one is removed.
async fn shared(server: &Server) {
    let long = text(8, 120);
    let first = server.ingest(&[("first", &long)]).await.summary;
    let second = server.ingest(&[("second", &long)]).await;
    assert_eq!(second.summary.chunks_computed, 0);
    assert_eq!(second.summary.chunks_reused, first.chunks_computed);
    assert!(!second.of("second").unchanged, "it is a new document");
    let ids = server.document("first").await.chunk_ids;
    assert_eq!(ids, server.document("second").await.chunk_ids);
    let expected = about(server, "first").await;

    let removed = server.matkv(&["docs", "rm", "first"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    assert!(server.documents().await.iter().all(|d| d.document_id != "first"));
    let reply = about(server, "second").await;
    assert_eq!(reply.answer(), expected.answer());
    assert!(same_logits(&reply.logits, &expected.logits));

    let removed = server.matkv(&["docs", "rm", "second"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    let store = server.home().store();
    assert!(ids.iter().all(|id| !chunk_file(&store, id).exists()), "files of removed documents");
    let gone = GenerateRequest { chunk_ids: ids, ..question("Who?") };
    let refused = server.try_ask(gone).await.expect_err("the chunks are gone");
    assert_eq!(refused.code(), tonic::Code::NotFound);
}

/// What a client may send and the server does not take; the good ones around it are taken.
async fn refused_by_the_server(server: &Server) {
    let ingest = Ingest::start(server.client()).await;
    ingest.document("good-1", "The keeper.").await;
    ingest.document("", "No name.").await;
    ingest.document("blank", " \n\t").await;
    ingest.part("bytes", b"abc\xff", true).await;
    ingest.document(&"x".repeat(500), "A long name.").await;
    // A character split between two parts is one character.
    ingest.part("good-2", b"caf\xc3", false).await;
    ingest.part("", b"\xa9", true).await;
    let done = ingest.finish().await;
    assert_eq!((done.summary.documents, done.summary.failed), (2, 4), "{done:?}");
    for (id, reason) in [("", "no id"), ("blank", "empty"), ("bytes", "byte 3")] {
        assert!(done.of(id).error.contains(reason), "{id:?}: {:?}", done.of(id));
    }
    assert!(done.errors().iter().any(|e| e.contains("500 bytes")), "{:?}", done.errors());
    assert_eq!(server.document("good-2").await.bytes, 5);
}

/// Two at once, with a chunk in common, and one that goes away: the others finish.
async fn two_clients(server: &Server) {
    let (long, tail) = (text(51, 100), text(52, 40));
    let leaver = Ingest::start(server.client()).await;
    leaver.document("left", &text(53, 200)).await;
    leaver.part("half", b"never fin", false).await;
    drop(leaver);
    let more = long.clone() + &tail;
    let documents = [[("two-a", long.as_str())], [("two-b", more.as_str())]];
    let (a, b) = tokio::join!(server.ingest(&documents[0]), server.ingest(&documents[1]));
    assert_eq!((a.errors(), b.errors()), (vec![], vec![]));
    let (a, b) = (server.document("two-a").await, server.document("two-b").await);
    assert!(a.chunk_ids[0] == b.chunk_ids[0] && a.chunk_ids != b.chunk_ids);
    assert!(server.documents().await.iter().all(|d| d.document_id != "half"));
    let chunks = about(server, "two-b").await.chunk_ids();
    assert_eq!(chunks, b.chunk_ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_ingest_goes_on_where_it_was() {
    let Some(mut server) = Server::start(&SETTINGS).await else { return };
    let (early, late) = (text(21, 150), text(22, 500));
    let mut ingest = Ingest::start(server.client()).await;
    ingest.document("early", &early).await;
    let done = ingest.done().await;
    assert_eq!((done.document_id.as_str(), done.error.as_str()), ("early", ""));
    let early_files = chunk_files(&server.home().store()).len();
    ingest.document("late", &late).await;
    while chunk_files_or_less(&server).await < early_files + 3 {
        assert!(ingest.next().await.expect("it goes on").is_some(), "it ended too early");
    }
    let healthy = server.status().await;
    signal("KILL", &[healthy.loader_pid]);
    while let Ok(event) = ingest.next().await {
        let late = matches!(&event, Some(Event::Document(d)) if d.document_id == "late");
        assert!(event.is_some() && !late, "killed too late: {event:?}");
    }
    server.restarted(&healthy).await;

    // What was acknowledged is there; what was not is not, but its files are.
    let listed: Vec<String> = server.documents().await.into_iter().map(|d| d.document_id).collect();
    assert_eq!(listed, ["early"]);
    let left = chunk_files(&server.home().store()).len();
    assert!(left >= early_files + 3, "{left} files");
    assert!(!about(&server, "early").await.text.is_empty());

    let again = server.ingest(&[("early", &early), ("late", &late)]).await;
    let summary = again.summary;
    assert_eq!((summary.documents, summary.unchanged), (2, 1), "{summary:?}");
    assert_eq!(summary.chunks_reused, left as u64, "every file that was left is adopted");
    assert!(summary.chunks_computed > 0, "killed too late");
    like_an_uninterrupted_one(server, &[("early", &early), ("late", &late)]).await;
}

/// Files now; the writer's temporary file may come and go.
async fn chunk_files_or_less(server: &Server) -> usize {
    let stores = entries(&server.home().store());
    let directories = stores.iter().flat_map(|s| entries(&s.join("chunks")));
    let files = directories.flat_map(|d| entries(&d));
    files.filter(|f| f.extension().is_some_and(|e| e == "kv")).count()
}

async fn like_an_uninterrupted_one(server: Server, documents: &[(&str, &str)]) {
    let reply = about(&server, "late").await;
    let home = server.stop().await;
    let other = Server::start(&SETTINGS).await.expect("models");
    assert_eq!(other.ingest(documents).await.summary.chunks_reused, 0);
    assert_eq!(about(&other, "late").await.answer(), reply.answer());
    let other = other.stop().await;
    let (ours, theirs) = (chunk_files(&home.store()), chunk_files(&other.store()));
    assert!(ours.keys().eq(theirs.keys()), "other chunks");
    for (id, path) in &ours {
        let same =
            std::fs::read(path).expect("a file") == std::fs::read(&theirs[id]).expect("a file");
        assert!(same, "chunk {id} has other bytes");
    }
}

/// Chunks change hands within one ingest, as when log files are rotated. Everything that does not
/// work is told at once.
#[tokio::test(flavor = "multi_thread")]
async fn documents_that_trade_chunks() {
    let Some(server) = Server::start(&SETTINGS).await else { return };
    let mut problems = Vec::new();
    let (a, b) = ("The ferry left at low water.", "A visitor painted the copper bell.");

    server.ingest(&[("a", a), ("b", b)]).await;
    let (a_chunks, b_chunks) =
        (server.document("a").await.chunk_ids, server.document("b").await.chunk_ids);
    let done = server.ingest(&[("a", b), ("b", a)]).await;
    if !done.errors().is_empty() {
        problems.push(format!("two documents swapped their texts: {:?}", done.errors()));
    } else if (server.document("a").await.chunk_ids, server.document("b").await.chunk_ids)
        != (b_chunks, a_chunks)
    {
        problems.push("two documents swapped their texts, and have the old chunks".into());
    }

    server.ingest(&[("log", a), ("log.1", b)]).await;
    let done = server.ingest(&[("log", "A new day at the mill."), ("log.1", a)]).await;
    if !done.errors().is_empty() {
        problems.push(format!("a text moved to another document: {:?}", done.errors()));
    }

    let done = server.ingest(&[("twice", a), ("twice", "The last one wins.")]).await;
    let done_again = server.ingest(&[("twice", a), ("twice", "The last one wins.")]).await;
    let bytes = server.document("twice").await.bytes;
    if bytes != "The last one wins.".len() as u64 {
        problems.push(format!("one name twice: {bytes} bytes; {done:?}, {done_again:?}"));
    }

    server.ingest(&[("x-first", "Only here."), ("y-second", "Only here.")]).await;
    assert_eq!(server.matkv(&["docs", "rm", "y-second"]).code, Some(0));
    let places = about(&server, "x-first").await;
    if places.places() != [("x-first", 0)] {
        problems.push(format!("a removed document is named as a source: {:?}", places.places()));
    }
    let chunk_ids = server.documents().await.into_iter().flat_map(|d| d.chunk_ids);
    let missing: Vec<String> =
        chunk_ids.filter(|id| !chunk_file(&server.home().store(), id).exists()).collect();
    if !missing.is_empty() {
        problems.push(format!("indexed chunks without a file: {missing:?}"));
    }
    assert!(problems.is_empty(), "{problems:#?}");
    server.stop().await;
}

/// A chunk of 512 tokens takes 11.25 MiB: one fits, two do not.
#[tokio::test(flavor = "multi_thread")]
async fn an_arena_with_room_for_one_chunk() {
    let settings = ["chunker.chunk_size=512", "arena.size=16MiB"];
    let Some(server) = Server::start(&settings).await else { return };
    let done = server.ingest(&[("log", &text(31, 900))]).await;
    assert_eq!(done.errors(), [""; 0]);
    assert!(done.summary.chunks_computed >= 2, "{:?}", done.summary);
    assert_eq!(server.documents().await.len(), 1);
    server.stop().await;
}
