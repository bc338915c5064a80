//! Processes that stand still, threads that panic, stops that wait, requests that may not.

use std::time::Duration;

use matkv_api::v1::generate_event::Event;
use matkv_api::v1::{GenerateEvent, GenerateRequest};
use matkv_sys::CrashPoint;
use matkv_tests::{
    DEADLINE, Reply, Server, entries, is_alive, metric, open, question, read, same_logits, signal,
    text, until,
};
use tonic::{Code, Request, Status, Streaming};

fn request() -> GenerateRequest {
    let document_ids = vec!["log".into()];
    GenerateRequest { document_ids, return_logits: true, ..question("Who crossed the bridge?") }
}

/// A request that goes on: at this temperature the end token does not come.
fn endless(tokens: u32) -> GenerateRequest {
    let (temperature, max_new_tokens) = (Some(50.0), Some(tokens));
    GenerateRequest { temperature, max_new_tokens, seed: Some(1), ..request() }
}

async fn ready(settings: &[&str]) -> Option<(Server, Reply)> {
    let server = Server::start(settings).await?;
    server.ingest(&[("log", &text(1, 150))]).await;
    let reply = server.ask(request()).await;
    Some((server, reply))
}

/// A running answer, of which some tokens have come.
async fn decoding(server: &Server, tokens: u32) -> Streaming<GenerateEvent> {
    let mut stream = open(server.client(), endless(tokens)).await.expect("admitted");
    let mut seen = 0;
    while seen < 2 {
        let event = stream.message().await.expect("no error").expect("no end").event;
        seen += if let Some(Event::Text(text)) = event { text.token_ids.len() } else { 0 };
    }
    stream
}

async fn ends(mut stream: Streaming<GenerateEvent>) -> Result<(), Status> {
    let events = async {
        while stream.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(DEADLINE, events).await.expect("the stream ends")
}

fn assert_same(before: &Reply, after: &Reply) {
    assert_eq!(before.answer(), after.answer());
    assert!(same_logits(&before.logits, &after.logits), "other logits");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decoder_that_stands_still_is_replaced() {
    let Some((mut server, before)) = ready(&["supervision.stall=2s"]).await else { return };
    let healthy = server.status().await;
    // A pause that is shorter than a stall costs time and nothing else.
    let stream = decoding(&server, 30).await;
    signal("STOP", &[healthy.decoder_pid]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    signal("CONT", &[healthy.decoder_pid]);
    ends(stream).await.expect("it has only been slow");
    assert_eq!(server.status().await.epoch, healthy.epoch);

    let stream = decoding(&server, 600).await;
    signal("STOP", &[healthy.decoder_pid]);
    let status = ends(stream).await.expect_err("nobody decodes it");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("stood still"), "{status:?}");
    let back = server.restarted(&healthy).await;
    assert!(!is_alive(healthy.decoder_pid), "what stands still holds memory until it is dead");
    assert_eq!(back.loader_pid, healthy.loader_pid);
    assert_eq!(metric(&back.metrics, "matkv_peer_stalls_total"), 1.0);
    assert!(server.log().contains("the decoder has not moved for 2s"), "{}", server.log());
    assert_same(&before, &server.ask(request()).await);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loader_that_stands_still_is_replaced() {
    let Some((mut server, before)) = ready(&["supervision.stall=2s"]).await else { return };
    let healthy = server.status().await;
    signal("STOP", &[healthy.loader_pid]);
    until("the decoder and `up` notice", async || {
        let log = server.log();
        let both = log.contains("the loader has not moved for 2s")
            && log.contains("the loader makes no progress");
        both.then_some(())
    })
    .await;
    let back = server.restarted(&healthy).await;
    assert!(!is_alive(healthy.loader_pid) && back.held_slots == 0);
    assert_same(&before, &server.ask(request()).await);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_fails_one_request_and_no_process() {
    let Some((mut server, before)) = ready(&[]).await else { return };
    server.expect_panics();
    let healthy = server.status().await;
    server.home().panic_at("matkv-loader", CrashPoint::PrefillComputed);
    let status = server.try_ask(request()).await.expect_err("its computation panicked");
    assert_eq!(status.code(), Code::Internal, "{status:?}");
    assert!(status.message().contains("panicked"), "{status:?}");
    server.at_rest().await;
    assert_same(&before, &server.ask(request()).await);
    // A step of the decoder that panics is tried again for each sequence alone.
    server.home().panic_at("matkv-decoder", CrashPoint::DecodeBegun);
    assert_same(&before, &server.ask(request()).await);
    assert!(server.home().has_crashed(), "it has panicked");
    let after = server.at_rest().await;
    assert_eq!((after.loader_pid, after.decoder_pid), (healthy.loader_pid, healthy.decoder_pid));
    assert_eq!(after.epoch, healthy.epoch);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_running_answers_finish() {
    let Some((server, _)) = ready(&[]).await else { return };
    let stream = decoding(&server, 80).await;
    let up = server.up_pid();
    signal("TERM", &[up]);
    let refused =
        until("new requests are refused", async || server.try_ask(request()).await.err()).await;
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("stopping"), "{refused:?}");
    ends(stream).await.expect("the running answer is finished");
    server.end(|_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_does_not_wait() {
    let Some((server, _)) = ready(&["supervision.drain=1h"]).await else { return };
    let stream = decoding(&server, 2000).await;
    let up = server.up_pid();
    signal("TERM", &[up]);
    until("it drains", async || (server.status().await.state == "draining").then_some(())).await;
    let client = tokio::spawn(ends(stream));
    server.end(|_| signal("TERM", &[up])).await;
    let status = client.await.expect("no panic").expect_err("it has been cut off");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

/// With a deadline: `DEADLINE_EXCEEDED`, and everything comes back.
async fn in_time(server: &Server, request: GenerateRequest, limit: Duration) -> Status {
    let mut client = server.client().clone();
    let mut request = Request::new(request);
    request.set_timeout(limit);
    match client.generate(request).await {
        Ok(reply) => ends(reply.into_inner()).await.expect_err("it takes longer"),
        Err(status) => status,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlines_hold_in_every_phase() {
    let settings = ["pipeline.batch_size=1", "pipeline.deadline=20s"];
    let Some((server, before)) = ready(&settings).await else { return };
    let short = Duration::from_millis(700);
    // While it is decoded.
    let status = in_time(&server, endless(4000), short).await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    server.at_rest().await;
    // While it waits for its turn to be decoded, behind one that goes on.
    let running = decoding(&server, 4000).await;
    let held = server.status().await.held_slots;
    let status = in_time(&server, request(), short).await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    until("what it held comes back while the other one goes on", async || {
        let s = server.status().await;
        (s.requests_running == 1 && s.held_slots == held).then_some(())
    })
    .await;
    drop(running);
    server.at_rest().await;
    // In the middle of a prefill: no row of it is computed in vain for long.
    let vanilla = GenerateRequest { mode: "vanilla".into(), ..request() };
    let status = in_time(&server, vanilla, Duration::from_millis(30)).await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    server.at_rest().await;
    assert_same(&before, &server.ask(request()).await);
    server.stop().await;

    // Without a deadline of its own a request has the server's.
    let Some((server, _)) = ready(&["pipeline.deadline=2s"]).await else { return };
    let status = ends(decoding(&server, 4000).await).await.expect_err("it takes longer");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(status.message().contains("2s"), "{status:?}");
    server.stop().await;
}

/// Prefills have slices in turn: a question does not wait for the whole of a long prompt.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_does_not_hold_up_a_short_one() {
    let Some((server, before)) = ready(&["arena.size=256MiB"]).await else { return };
    server.ingest(&[("long", &text(9, 2500))]).await;
    let long = GenerateRequest {
        document_ids: vec!["long".into()],
        mode: "vanilla".into(),
        max_new_tokens: Some(1),
        ..question("What was it about?")
    };
    let (client, asked) = (server.client().clone(), long.clone());
    let order = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let done = std::sync::Arc::clone(&order);
    let first = tokio::spawn(async move {
        let reply = matkv_tests::ask(&client, asked).await.expect("an answer");
        done.lock().unwrap().push("long");
        reply
    });
    until("the long one has been admitted", async || {
        (server.status().await.requests_waiting == 1).then_some(())
    })
    .await;
    assert_same(&before, &server.ask(request()).await);
    order.lock().unwrap().push("short");
    let reply = first.await.expect("no panic");
    // Twelve slices at least, and the short one has one.
    assert!(reply.usage.prompt_tokens > 3000, "{}", reply.usage.prompt_tokens);
    assert_eq!(*order.lock().unwrap(), ["short", "long"]);
    server.stop().await;
}

/// A client that opens a stream and never reads keeps no slot, and no other client waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_holds_nothing() {
    let Some((server, before)) = ready(&["pipeline.batch_size=1"]).await else { return };
    let stuck = open(server.client(), endless(120)).await.expect("admitted");
    let status = server.at_rest().await;
    assert_eq!(status.held_slots, 0, "decoded to its end, whoever reads it");
    assert_same(&before, &server.ask(request()).await);
    // What it was sent is still there.
    assert_eq!(read(stuck).await.expect("the answer").tokens.len(), 120);
    server.stop().await;
}

/// Readiness does not depend on the built-in chunk's file being good.
#[tokio::test(flavor = "multi_thread")]
async fn the_self_test_repairs_its_own_chunk() {
    let Some((server, before)) = ready(&[]).await else { return };
    let home = server.stop().await;
    let directories = entries(&home.store()).into_iter().map(|d| d.join("self-test/chunks"));
    let files: Vec<_> = directories.flat_map(|d| entries(&d)).flat_map(|d| entries(&d)).collect();
    let [file] = files.as_slice() else { panic!("one built-in chunk, found {files:?}") };
    let good = std::fs::read(file).expect("readable");
    let mut bad = good.clone();
    bad[5000] ^= 1;
    std::fs::write(file, bad).expect("writable");
    let server = Server::start_in(home, &[]).await;
    assert_same(&before, &server.ask(request()).await);
    server.at_rest().await;
    assert_eq!(std::fs::read(file).expect("readable"), good, "computed and stored again");
    assert!(metric(&server.status().await.metrics, "matkv_chunks_quarantined_total") >= 1.0);
    server.stop().await;
}
