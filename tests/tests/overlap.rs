//! The pipeline: while the decoder decodes one request, the loader loads the next.

use std::time::Duration;

use matkv_api::v1::generate_event::Event;
use matkv_api::v1::{GenerateEvent, GenerateRequest, Span, TraceRequest};
use matkv_tests::{DEADLINE, Server, open, question, text, until};
use tonic::{Code, Streaming};

const REQUESTS: usize = 8;

/// From flash, with a long answer: at this temperature the end token does not come.
fn request(n: usize) -> GenerateRequest {
    GenerateRequest {
        document_ids: vec![format!("log-{n}")],
        cold: true,
        temperature: Some(50.0),
        seed: Some(n as u64),
        max_new_tokens: Some(48),
        ..question("Who crossed the narrow bridge?")
    }
}

async fn documents(server: &Server) {
    let texts: Vec<(String, String)> =
        (0..REQUESTS).map(|n| (format!("log-{n}"), text(n as u64, 120))).collect();
    let documents: Vec<(&str, &str)> =
        texts.iter().map(|(id, text)| (id.as_str(), text.as_str())).collect();
    assert_eq!(server.ingest(&documents).await.errors(), [""; 0]);
}

/// Waits for tokens of the decoder; the first one is the loader's.
async fn decoding(stream: &mut Streaming<GenerateEvent>) {
    let mut seen = 0;
    while seen < 2 {
        let event = stream.message().await.expect("no error").expect("no end").event;
        seen += if let Some(Event::Text(text)) = event { text.token_ids.len() } else { 0 };
    }
}

async fn end(mut stream: Streaming<GenerateEvent>) {
    let events = async { while stream.message().await.expect("no error").is_some() {} };
    tokio::time::timeout(DEADLINE, events).await.expect("an end in time");
}

/// What both processes did during this.
async fn traced(server: &Server, work: impl Future<Output = ()>) -> Vec<Span> {
    let mut client = server.client().clone();
    let trace = tokio::spawn(async move {
        loop {
            match client.trace(TraceRequest { seconds: 600.0 }).await {
                Ok(trace) => return trace.into_inner().spans,
                // The one below was quicker.
                Err(e) if e.code() == Code::ResourceExhausted => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(e) => panic!("{e}"),
            }
        }
    });
    until("the trace is being recorded", async || {
        // Then another one is refused.
        let mut client = server.client().clone();
        client.trace(TraceRequest { seconds: 1e-3 }).await.err()
    })
    .await;
    work.await;
    let mut client = server.client().clone();
    client.trace(TraceRequest { seconds: 0.0 }).await.expect("ended");
    trace.await.expect("no panic")
}

/// Eight requests, each made while the one before is decoded.
async fn one_after_the_other(server: &Server) {
    let mut before: Option<Streaming<GenerateEvent>> = None;
    for n in 0..REQUESTS {
        let mut stream = open(server.client(), request(n)).await.expect("admitted");
        // Without overlap a request waits at the door until the one before has ended.
        if let Some(before) = before.take() {
            tokio::spawn(end(before));
        }
        decoding(&mut stream).await;
        before = Some(stream);
    }
    end(before.expect("the last one")).await;
}

/// Eight requests that are there at once.
async fn all_at_once(server: &Server) {
    let ask = |n| {
        let client = server.client().clone();
        tokio::spawn(async move { end(open(&client, request(n)).await.expect("admitted")).await })
    };
    let asked: Vec<_> = (0..REQUESTS).map(ask).collect();
    for one in asked {
        one.await.expect("no panic");
    }
}

/// When something was done for each request, in the order of the requests.
fn times(spans: &[Span], name: &str) -> Vec<(u64, u64)> {
    let mut requests: Vec<u64> = spans.iter().map(|s| s.request).filter(|r| *r > 0).collect();
    requests.sort_unstable();
    requests.dedup();
    let of = |request: &u64| {
        let mine = || spans.iter().filter(|s| s.request == *request && s.name == name);
        let (start, end) = (mine().map(|s| s.start_ns).min(), mine().map(|s| s.end_ns).max());
        (start.expect("it was done"), end.expect("it was done"))
    };
    requests.iter().map(of).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_lies_inside_the_decode_before_it() {
    let Some(server) = Server::start(&[]).await else { return };
    documents(&server).await;
    let spans = traced(&server, one_after_the_other(&server)).await;
    let pids: std::collections::BTreeSet<(&str, u32)> =
        spans.iter().map(|s| (s.process.as_str(), s.pid)).collect();
    let status = server.status().await;
    let expected = [("decoder", status.decoder_pid), ("loader", status.loader_pid)];
    assert_eq!(pids, expected.into_iter().collect(), "one clock, two processes");
    let (loads, decodes) = (times(&spans, "load"), times(&spans, "decode"));
    assert_eq!((loads.len(), decodes.len()), (REQUESTS, REQUESTS));
    for (n, (load, decode)) in loads[1..].iter().zip(&decodes).enumerate() {
        let inside = decode.0 <= load.0 && load.1 <= decode.1;
        assert!(inside, "load of request {} at {load:?}, decode before it at {decode:?}", n + 1);
    }
    let home = server.stop().await;

    let server = Server::start_in(home, &["pipeline.overlap=false"]).await;
    let spans = traced(&server, one_after_the_other(&server)).await;
    let (loads, decodes) = (times(&spans, "load"), times(&spans, "decode"));
    assert_eq!((loads.len(), decodes.len()), (REQUESTS, REQUESTS));
    for load in &loads {
        let apart = |d: &(u64, u64)| load.1 <= d.0 || d.1 <= load.0;
        assert!(decodes.iter().all(apart), "{load:?} lies in one of {decodes:?}");
    }
    server.stop().await;
}

fn crossing(a: &(u64, u64), b: &(u64, u64)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// How many of these times cross one of them, at most.
fn together(times: &[(u64, u64)]) -> Option<usize> {
    times.iter().map(|a| times.iter().filter(|b| crossing(a, b)).count()).max()
}

#[tokio::test(flavor = "multi_thread")]
async fn without_overlap_a_group_goes_through_one_stage_after_the_other() {
    let settings = ["pipeline.overlap=false", "pipeline.batch_size=4"];
    let Some(server) = Server::start(&settings).await else { return };
    documents(&server).await;
    let spans = traced(&server, all_at_once(&server)).await;
    let stages = ["load", "sub-prefill", "decode"].map(|name| times(&spans, name));
    for (i, stage) in stages.iter().enumerate() {
        assert_eq!(stage.len(), REQUESTS);
        for other in &stages[i + 1..] {
            let apart = |a: &(u64, u64)| !other.iter().any(|b| crossing(a, b));
            assert!(stage.iter().all(apart), "{stage:?} and {other:?}");
        }
    }
    // Whoever was not there when the first group closed is in a full one.
    assert_eq!(together(&stages[2]), Some(4), "{:?}", stages[2]);
    let home = server.stop().await;

    // All eight, their chunks and rows, have no place in so little memory.
    let small = ["pipeline.overlap=false", "arena.size=20MiB"];
    let server = Server::start_in(home, &small).await;
    let spans = traced(&server, all_at_once(&server)).await;
    let decodes = times(&spans, "decode");
    assert!(together(&decodes) < Some(REQUESTS), "{decodes:?}");
    server.stop().await;
}
