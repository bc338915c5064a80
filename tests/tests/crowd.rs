//! Many requests at once: the answers of one alone, nothing forgotten, nothing held. Whatever the
//! batch, the number of threads, what has been evicted, and who has been restarted in between.

use matkv_api::v1::GenerateRequest;
use matkv_api::v1::generate_event::Event;
use matkv_tests::{Reply, Server, ask, metric, open, question, same_logits, text};
use tonic::Code;

/// Room for a dozen chunks, or for one full prefill and half of them: the requests do not fit
/// together.
const ARENA: &str = "arena.size=24MiB";
const REQUESTS: usize = 16;

/// Three chunks each, of six documents, in every mode.
fn requests() -> Vec<GenerateRequest> {
    let modes = ["matkv", "vanilla", "independent", "linked(5)", "focused(0.3)", "exact"];
    let request = |i: usize| GenerateRequest {
        document_ids: vec![format!("log-{}", i % 6)],
        mode: modes[(i + i / 6) % modes.len()].into(),
        temperature: (i % 3 == 2).then_some(1.0),
        seed: Some(i as u64),
        return_logits: true,
        max_new_tokens: Some(8),
        ..question("Who remembered the copper bell?")
    };
    (0..REQUESTS).map(request).collect()
}

async fn alone(server: &Server, requests: &[GenerateRequest]) -> Vec<Reply> {
    let mut replies = Vec::new();
    for request in requests {
        replies.push(server.ask(request.clone()).await);
    }
    replies
}

async fn together(server: &Server, requests: &[GenerateRequest]) -> Vec<Reply> {
    let tasks: Vec<_> = requests
        .iter()
        .map(|request| {
            let (client, request) = (server.client().clone(), request.clone());
            tokio::spawn(async move { ask(&client, request).await })
        })
        .collect();
    let mut replies = Vec::new();
    for task in tasks {
        replies.push(task.await.expect("no panic").expect("an answer"));
    }
    replies
}

fn assert_same(what: &str, expected: &[Reply], found: &[Reply]) {
    for (i, (a, b)) in expected.iter().zip(found).enumerate() {
        assert_eq!(a.answer(), b.answer(), "{what}, request {i}");
        assert!(same_logits(&a.logits, &b.logits), "{what}, request {i}: other logits");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_is_answered_like_one_alone() {
    let settings = [ARENA, "chunker.chunk_size=64", "pipeline.queue=16"];
    let Some(mut server) = Server::start(&settings).await else { return };
    let texts: Vec<(String, String)> = (0..6).map(|i| (format!("log-{i}"), text(i, 130))).collect();
    let documents: Vec<(&str, &str)> =
        texts.iter().map(|(id, text)| (id.as_str(), text.as_str())).collect();
    assert_eq!(server.ingest(&documents).await.summary.documents, 6);
    let requests = requests();
    let expected = alone(&server, &requests).await;
    assert!(expected.iter().all(|r| r.chunks.len() >= 3), "three chunks each");

    let before = server.at_rest().await;
    for (round, size) in [2, 4, 8, 16].into_iter().enumerate() {
        let mut requests = requests.clone();
        // In every other round some want what others use from flash again.
        requests.iter_mut().step_by(3).for_each(|r| r.cold = round % 2 == 1);
        for (asked, expected) in requests.chunks(size).zip(expected.chunks(size)) {
            let replies = together(&server, asked).await;
            assert_same(&format!("{size} at once"), expected, &replies);
        }
    }
    let after = server.at_rest().await;
    let grown = |name| metric(&after.metrics, name) - metric(&before.metrics, name);
    assert!(grown("matkv_arena_evictions_total") > 0.0, "the arena is meant to be too small");
    assert!(grown("matkv_chunk_loads_total") > 0.0, "evicted chunks come back from flash");
    assert!(after.io_engine.contains("uring") || after.io_engine == "pread", "{after:?}");

    one_client_leaves(&server, &expected[0]).await;
    queue_is_bounded(&server, &expected[0]).await;
    while_ingesting(&server, &expected[0]).await;
    deleted_while_decoding(&server).await;
    for loader in [false, true] {
        let healthy = server.at_rest().await;
        let victim = if loader { healthy.loader_pid } else { healthy.decoder_pid };
        matkv_tests::signal("KILL", &[victim]);
        server.restarted(&healthy).await;
        assert_same("after a restart", &expected, &together(&server, &requests).await);
    }
    let home = server.stop().await;

    // One thread each, and all sixteen decoded together.
    let other = ["threads.loader=1", "threads.decoder=1", "pipeline.batch_size=16"];
    let server = Server::start_in(home, &[&settings[..], &other].concat()).await;
    assert_same("one thread, 16 at once", &expected, &together(&server, &requests).await);
    let home = server.stop().await;

    // One after another, and read by threads: slower, and the same answers.
    let other = ["io.engine=pread", "pipeline.overlap=false", "pipeline.batch_size=1"];
    let server = Server::start_in(home, &[&settings[..], &other].concat()).await;
    assert_eq!(server.status().await.io_engine, "pread");
    assert_same("pread, no overlap", &expected, &together(&server, &requests).await);
    assert!(metric(&server.status().await.metrics, "matkv_chunk_loads_total") > 0.0);
    server.stop().await;
}

/// A request that goes on: at this temperature the end token does not come.
fn endless(seed: u64) -> GenerateRequest {
    let (temperature, max_new_tokens) = (Some(50.0), Some(300));
    GenerateRequest { temperature, max_new_tokens, seed: Some(seed), ..requests()[0].clone() }
}

/// A client goes away while its answer is decoded: its slots come back, others are served.
async fn one_client_leaves(server: &Server, expected: &Reply) {
    let mut stream = open(server.client(), endless(1)).await.expect("admitted");
    let mut tokens = 0;
    while tokens < 3 {
        let event = stream.message().await.expect("no error").expect("no end").event;
        tokens += if let Some(Event::Text(text)) = event { text.token_ids.len() } else { 0 };
    }
    let status = server.status().await;
    assert!(status.held_slots > 0 && status.requests_running == 1, "it is being decoded");
    drop(stream);
    server.at_rest().await;
    let reply = server.ask(requests()[0].clone()).await;
    assert_same("after a client left", std::slice::from_ref(expected), &[reply]);
}

/// One more than `pipeline.queue` is refused at once; all clients leave, in every phase.
async fn queue_is_bounded(server: &Server, expected: &Reply) {
    let mut streams = Vec::new();
    for seed in 0..REQUESTS as u64 {
        streams.push(open(server.client(), endless(seed)).await.expect("admitted"));
    }
    let status = server.status().await;
    assert_eq!(status.requests_running + status.requests_waiting, REQUESTS as u64);
    let refused = server.try_ask(endless(99)).await.expect_err("the queue is full");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    assert!(refused.message().contains("pipeline.queue"), "{refused:?}");
    assert!(refused.message().contains("16"), "{refused:?}");
    drop(streams);
    server.at_rest().await;
    let reply = server.ask(requests()[0].clone()).await;
    assert_same("after a full queue", std::slice::from_ref(expected), &[reply]);
}

/// A document is removed while its chunks are read: that answer is the same, the next one none.
async fn deleted_while_decoding(server: &Server) {
    server.ingest(&[("brief", &text(41, 100))]).await;
    let document_ids = vec!["brief".into()];
    let request =
        GenerateRequest { document_ids, max_new_tokens: Some(40), ..requests()[0].clone() };
    let expected = server.ask(request.clone()).await;
    let mut stream = open(server.client(), request.clone()).await.expect("admitted");
    // Nothing is decided before the first event; from then on the decoder reads.
    let first = stream.message().await.expect("no error").expect("no end").event;
    assert!(matches!(first, Some(Event::Started(_))), "{first:?}");
    assert_eq!(server.matkv(&["docs", "rm", "brief"]).code, Some(0));
    let mut tokens = Vec::new();
    while let Some(event) = stream.message().await.expect("no error") {
        if let Some(Event::Text(text)) = event.event {
            tokens.extend(text.token_ids);
        }
    }
    assert_eq!(tokens, expected.tokens);
    let refused = server.try_ask(request).await.expect_err("the document is gone");
    assert_eq!(refused.code(), Code::NotFound);
    server.at_rest().await;
    let files = matkv_tests::chunk_files(&server.home().store());
    assert!(expected.chunk_ids().iter().all(|id| !files.contains_key(id)), "files are left");
}

/// An ingest takes part of a small arena, and no request is refused for it; and it gets on however
/// many clients never pause.
async fn while_ingesting(server: &Server, expected: &Reply) {
    let (client, more) = (server.client().clone(), text(77, 200));
    let ingest = tokio::spawn(async move {
        let ingest = matkv_tests::Ingest::start(&client).await;
        ingest.document("more", &more).await;
        ingest.finish().await
    });
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let clients: Vec<_> = (0..REQUESTS)
        .map(|i| {
            let (client, over) = (server.client().clone(), std::sync::Arc::clone(&over));
            // A few long prefills, and many questions.
            let request = requests()[if i < 3 { 1 } else { 0 }].clone();
            tokio::spawn(async move {
                let mut replies = Vec::new();
                while !over.load(std::sync::atomic::Ordering::SeqCst) {
                    replies.push(ask(&client, request.clone()).await.expect("an answer"));
                }
                (i < 3, replies)
            })
        })
        .collect();
    assert_eq!(ingest.await.expect("no panic").errors(), [""; 0]);
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    for client in clients {
        let (vanilla, replies) = client.await.expect("no panic");
        assert!(!replies.is_empty());
        for reply in replies.iter().filter(|_| !vanilla) {
            assert_same(
                "while ingesting",
                std::slice::from_ref(expected),
                std::slice::from_ref(reply),
            );
        }
    }
}
