//! Processes killed for real, at the worst moments.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use matkv_api::v1::generate_event::Event;
use matkv_api::v1::{GenerateEvent, GenerateRequest};
use matkv_tests::{
    DEADLINE, Home, Reply, Server, children, entries, is_alive, metric, open, question, read,
    segments, signal, text, until,
};
use tonic::{Code, Status, Streaming};

const QUESTION: &str = "Who crossed the narrow bridge?";

fn request() -> GenerateRequest {
    GenerateRequest { document_ids: vec!["log".into()], return_logits: true, ..question(QUESTION) }
}

/// A request that goes on: at this temperature the end token does not come.
fn endless(seed: u64) -> GenerateRequest {
    let (temperature, max_new_tokens, seed) = (Some(50.0), Some(600), Some(seed));
    GenerateRequest { temperature, max_new_tokens, seed, return_logits: false, ..request() }
}

/// A running answer of which at least `tokens` tokens have come from the decoder.
async fn decoding(server: &Server, seed: u64, tokens: usize) -> Streaming<GenerateEvent> {
    let mut stream = open(server.client(), endless(seed)).await.expect("admitted");
    let mut seen = 0;
    while seen < tokens {
        match stream.message().await.expect("no error").expect("no end").event {
            Some(Event::Text(text)) => seen += text.token_ids.len(),
            Some(Event::Started(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    stream
}

/// Reads to the end of a stream that must break.
async fn broken(mut stream: Streaming<GenerateEvent>) -> Status {
    loop {
        match tokio::time::timeout(DEADLINE, stream.message()).await.expect("the stream ends") {
            Err(status) => return status,
            Ok(Some(event)) => {
                let finished = matches!(event.event, Some(Event::Finished(_)));
                assert!(!finished, "it ended as if nothing had happened: {event:?}");
            }
            Ok(None) => panic!("it ended without a status"),
        }
    }
}

fn assert_same(before: &Reply, after: &Reply) {
    assert_eq!(before.answer(), after.answer());
    assert!(matkv_tests::same_logits(&before.logits, &after.logits), "other logits");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_decoder_costs_its_requests_and_nothing_else() {
    let settings = ["log.level=info", "supervision.drain=1s"];
    let Some(mut server) = Server::start(&settings).await else { return };
    server.ingest(&[("log", &text(1, 150))]).await;
    let before = server.ask(request()).await;
    let healthy = server.status().await;

    let stream = decoding(&server, 1, 3).await;
    signal("KILL", &[healthy.decoder_pid]);
    let status = broken(stream).await;
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("decoder"), "{status:?}");

    let back = server.restarted(&healthy).await;
    assert!(back.epoch > healthy.epoch, "epoch {} after {}", back.epoch, healthy.epoch);
    assert_eq!(back.loader_pid, healthy.loader_pid, "the loader lives on");
    let after = server.ask(request()).await;
    assert_same(&before, &after);
    assert!(after.sources().iter().all(|s| *s == "arena"), "still warm: {:?}", after.sources());
    assert_eq!(metric(&back.metrics, "matkv_epochs_total"), 2.0);

    killed_in_a_crowd(&mut server, &before).await;
    killed_at_rest(&mut server, &before).await;
    terminated_while_decoding(server).await;
}

/// Requests in every phase: each answers as ever, or says that it cannot.
async fn killed_in_a_crowd(server: &mut Server, expected: &Reply) {
    let healthy = server.status().await;
    let victim = decoding(server, 2, 1).await;
    let crowd: Vec<_> = (0..6)
        .map(|_| {
            let client = server.client().clone();
            tokio::spawn(async move { matkv_tests::ask(&client, request()).await })
        })
        .collect();
    until("the crowd has arrived", async || {
        let s = server.status().await;
        (s.requests_running + s.requests_waiting >= 3).then_some(())
    })
    .await;
    signal("KILL", &[healthy.decoder_pid]);
    assert_eq!(broken(victim).await.code(), Code::Unavailable);
    for outcome in crowd {
        match outcome.await.expect("no panic") {
            Ok(reply) => assert_same(expected, &reply),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status:?}"),
        }
    }
    server.restarted(&healthy).await;
    server.at_rest().await;
    assert_same(expected, &server.ask(request()).await);
}

/// Nobody was waiting, and nobody has to do anything.
async fn killed_at_rest(server: &mut Server, expected: &Reply) {
    let healthy = server.at_rest().await;
    signal("KILL", &[healthy.decoder_pid]);
    let back = server.restarted(&healthy).await;
    assert_eq!(back.loader_pid, healthy.loader_pid);
    assert_same(expected, &server.ask(request()).await);
}

/// An orderly stop waits for a long answer no longer than it may, and tells its client.
async fn terminated_while_decoding(server: Server) {
    let stream = decoding(&server, 3, 2).await;
    let up = server.up_pid();
    let client = tokio::spawn(broken(stream));
    server.end(|_| signal("TERM", &[up])).await;
    let status = client.await.expect("no panic");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

/// Shared-memory files of this server: the mapped one and every earlier name that still exists.
fn shared_memory(names: &BTreeSet<PathBuf>) -> Vec<(PathBuf, u64)> {
    let bytes = |p: &PathBuf| std::fs::metadata(p).map(|m| m.blocks() * 512);
    names.iter().filter_map(|p| Some((p.clone(), bytes(p).ok()?))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_loader_comes_back_and_leaks_nothing() {
    let Some(mut server) = Server::start(&["arena.size=64MiB"]).await else { return };
    server.ingest(&[("log", &text(1, 150))]).await;
    let before = server.ask(request()).await;
    let mut names = BTreeSet::from([server.segment().to_owned()]);
    let memory = shared_memory(&names);
    assert!(memory.len() == 1 && memory[0].1 >= 64 << 20, "{memory:?}");
    let runtime = entries(&server.home().runtime()).len();

    for kill in 1..=5 {
        let healthy = server.status().await;
        // At rest and in the middle of an answer.
        let stream = if kill % 2 == 1 { Some(decoding(&server, kill, 2).await) } else { None };
        signal("KILL", &[healthy.loader_pid]);
        if let Some(stream) = stream {
            // The connection itself breaks: what code that is depends on the client.
            broken(stream).await;
        }
        let back = server.restarted(&healthy).await;
        assert!(!is_alive(healthy.decoder_pid), "kill {kill}: the old decoder lives on");
        assert_eq!((back.held_slots, back.documents), (0, 1), "kill {kill}");
        names.insert(server.segment().to_owned());
        assert_eq!(shared_memory(&names), memory, "kill {kill}");
    }
    let after = server.ask(request()).await;
    assert_same(&before, &after);
    assert!(after.sources().iter().all(|s| *s == "flash"), "{:?}", after.sources());
    let left = entries(&server.home().runtime());
    assert!(left.len() <= runtime, "files pile up in the runtime directory: {left:?}");
    killed_from_above(server).await;
}

/// `matkv up` itself is killed: its processes do not outlive it.
async fn killed_from_above(server: Server) {
    let status = server.status().await;
    let stream = decoding(&server, 9, 2).await;
    signal("KILL", &[server.up_pid()]);
    broken(stream).await;
    server.all_gone().await;
    assert!(!is_alive(status.loader_pid) && !is_alive(status.decoder_pid));
    assert!(!server.segment().exists(), "{} is left", server.segment().display());
}

/// Writes a word of the shared segment, as no peer of ours would.
fn poison(server: &Server, offset: u64, value: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().write(true).open(server.segment()).expect("a segment");
    file.write_all_at(&value.to_le_bytes(), offset).expect("written");
}

/// Byte offsets of the producers' indexes: the header is one page, the submission ring three.
const SUBMISSION_TAIL: u64 = 4096;
const COMPLETION_TAIL: u64 = 4 * 4096;

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_ring_closes_its_session() {
    let Some(mut server) = Server::start(&["arena.size=32MiB"]).await else { return };
    server.ingest(&[("log", &text(1, 150))]).await;
    let before = server.ask(request()).await;
    // The loader reads nonsense where the decoder's index should be, and the other way round. Both
    // look by themselves now and then, so it need not wait for a request.
    for (offset, end) in [
        (COMPLETION_TAIL, "the decoder broke the protocol"),
        (SUBMISSION_TAIL, "peer index 1099511627776 is not within 128"),
    ] {
        let healthy = server.at_rest().await;
        poison(&server, offset, 1 << 40);
        until("the session is closed", async || server.log().contains(end).then_some(())).await;
        let back = server.restarted(&healthy).await;
        assert_eq!(back.loader_pid, healthy.loader_pid, "only the session has ended");
        assert_same(&before, &server.ask(request()).await);
    }
    server.stop().await;
}

/// A child of a process, other than an earlier one.
async fn next_child(parent: u32, earlier: u32) -> u32 {
    until("a new child is started", async || {
        children(parent).into_iter().find(|pid| *pid != earlier)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_killed_while_it_starts_is_started_again() {
    let Some(mut server) = Server::start(&["arena.size=32MiB"]).await else { return };
    let healthy = server.status().await;
    signal("KILL", &[healthy.loader_pid]);
    let successor = next_child(server.up_pid(), healthy.loader_pid).await;
    signal("KILL", &[successor]);
    let back = server.restarted(&healthy).await;
    assert_ne!(back.loader_pid, successor);

    // The same for a decoder that has not connected yet.
    signal("KILL", &[back.decoder_pid]);
    let successor = next_child(back.loader_pid, back.decoder_pid).await;
    signal("KILL", &[successor]);
    let again = server.restarted(&back).await;
    assert_eq!(again.loader_pid, back.loader_pid);
    assert_ne!(again.decoder_pid, successor);
    let reply = read(open(server.client(), question(QUESTION)).await.expect("admitted")).await;
    assert!(!reply.expect("an answer").tokens.is_empty());
    server.stop().await;
}

/// Stopped, or killed from above, before it was ready: nothing is left, whatever it was doing.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_stopped_while_it_starts_leaves_nothing() {
    if Home::models().is_none() {
        return;
    }
    let mut problems = Vec::new();
    // Moments: the process exists, it has its shared memory, it has started a decoder.
    for (how, moment) in [("TERM", 0), ("TERM", 1), ("TERM", 2), ("KILL", 1), ("INT", 1)] {
        let home = Home::new();
        let mut up = home.up(&["arena.size=32MiB"]);
        let loader = next_child(up.pid(), 0).await;
        let segment = until("the loader has come so far", async || {
            let segment = segments(loader).pop();
            match moment {
                0 => Some(segment),
                1 => segment.map(Some),
                _ => (!children(loader).is_empty()).then_some(segment),
            }
        })
        .await;
        let decoders = children(loader);
        // A terminal tells both.
        let both = [up.pid(), loader];
        signal(how, if how == "INT" { &both } else { &both[..1] });
        until("`matkv up` ends", async || up.ended()).await;
        let pids = decoders.iter().chain([&loader]);
        until("both processes end", async || pids.clone().all(|pid| !is_alive(*pid)).then_some(()))
            .await;
        if let Some(left) = segment.filter(|s| s.exists()) {
            problems.push(format!("{how} at moment {moment}: {} is left", left.display()));
            let _ = std::fs::remove_file(left);
        }
        if home.socket().exists() {
            problems.push(format!("{how} at moment {moment}: the socket is left"));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
