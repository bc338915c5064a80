//! The store behind two real processes: whatever the tiers, encodings and devices do, an answer
//! is the same bits, and what an operator is told is so.

#[path = "storage/common.rs"]
mod common;
#[path = "storage/operators.rs"]
mod operators;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{
    SMALL, about, all_from, assert_same, files_below, flip, json, nothing_incoming, physical,
    placements, start, until_from, url, with_ids, with_json,
};
use matkv_api::v1::GenerateRequest;
use matkv_tests::{
    Home, Ingest, Reply, Server, chunk_file, chunk_files, metric, same_logits, text, until,
};
use serde_json::Value;

/// One encoding through all tiers and back.
async fn through_all_tiers(dtype: &str, codec: &str) {
    let case = format!("{dtype}+{codec}");
    let settings = [format!("storage.dtype={dtype}"), format!("storage.codec={codec}")];
    let more = |home: &Home| {
        [url(home), format!("cold.dtype={dtype}"), "heat.threshold=1000".into()].into()
    };
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let Some(server) = start(&settings, more).await else { return };
    assert_eq!(server.status().await.encoding, case);
    server.ingest(&[("log", &text(1, 110))]).await;
    let ids = server.document("log").await.chunk_ids;
    assert!(ids.len() >= 2, "{ids:?}");
    let run = |a: &[&str]| server.matkv(a);
    let expected = server.ask(about("log", true)).await;
    all_from(&case, "flash", &expected);
    until_from(&server, "log", false, "arena", &expected).await;

    with_ids(&run, &["chunks", "move", "cold"], &ids);
    let cold = vec![("cold".to_owned(), format!("{dtype}+zstd"))];
    let flash = vec![("flash".to_owned(), case.clone())];
    assert!(ids.iter().all(|id| placements(&run, id) == cold), "{case}");
    assert!(chunk_files(&server.home().store()).is_empty(), "{case}: demoted, and still on flash");
    let reply = server.ask(about("log", true)).await;
    all_from(&case, "cold", &reply);
    assert_same("from the cold tier", &expected, &reply);

    with_ids(&run, &["chunks", "move", "flash"], &ids);
    assert!(ids.iter().all(|id| placements(&run, id) == flash), "{case}");
    assert!(files_below(&server.home().beside("cold")).is_empty(), "{case}: promoted, still cold");
    let reply = server.ask(about("log", true)).await;
    all_from(&case, "flash", &reply);
    assert_same("promoted", &expected, &reply);

    let freed = with_ids(&run, &["chunks", "rm"], &ids);
    assert!(freed["freed_bytes"].as_u64() > Some(0), "{freed}");
    assert!(ids.iter().all(|id| placements(&run, id).is_empty()), "{case}");
    let reply = server.ask(about("log", false)).await;
    all_from(&case, "computed", &reply);
    assert_same("computed", &expected, &reply);
    until_from(&server, "log", true, "flash", &expected).await;
    assert!(ids.iter().all(|id| placements(&run, id) == flash), "{case}: {ids:?}");
    counted(&server).await;
    server.stop().await;
}

/// What the counters say must fit together.
async fn counted(server: &Server) {
    let metrics = server.status().await.metrics;
    let [cached, prompt] =
        ["matkv_cached_tokens_total", "matkv_prompt_tokens_total"].map(|n| metric(&metrics, n));
    assert!(0.0 < cached && cached <= prompt, "{cached} of {prompt} tokens cached");
    assert!(metric(&metrics, "matkv_chunk_loads_total") > 0.0);
    assert!(metric(&metrics, "matkv_chunks_recomputed_total") > 0.0);
    let tier = |name: &str| {
        let of = |kind: &str| {
            let named = |l: &&str| {
                l.starts_with("matkv_tier_tokens_total{") && l.contains(name) && l.contains(kind)
            };
            let values = metrics.lines().filter(named);
            values.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
        };
        (of("\"served\""), of("\"hit\""), of("\"requested\""))
    };
    for name in ["\"arena\"", "\"flash\"", "\"cold\""] {
        let (served, hit, requested) = tier(name);
        assert!(
            0.0 < served && served <= hit && hit <= requested,
            "{name}: {served} served, {hit} hit, {requested} requested"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn int8_answers_the_same_from_every_tier() {
    for codec in ["none", "lz4", "zstd"] {
        through_all_tiers("int8", codec).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_row_types_answer_the_same_from_every_tier() {
    for dtype in ["fp16", "fp8", "int4", "bf16"] {
        through_all_tiers(dtype, "none").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lossier_cold_tier_says_so_and_serves() {
    let more = |home: &Home| [url(home), "heat.threshold=1000".into()].into();
    let Some(server) = start(&["cold.dtype=int4"], more).await else { return };
    server.ingest(&[("log", &text(1, 110))]).await;
    let ids = server.document("log").await.chunk_ids;
    let run = |a: &[&str]| server.matkv(a);
    let expected = server.ask(about("log", true)).await;
    with_ids(&run, &["chunks", "move", "cold"], &ids);
    let encodings = |tier: &str| {
        let of = |id: &String| placements(&run, id) == [(tier.to_owned(), "int4+zstd".to_owned())];
        ids.iter().all(of)
    };
    assert!(encodings("cold"), "{:?}", placements(&run, &ids[0]));
    let lossy = server.ask(about("log", true)).await;
    all_from("int4", "cold", &lossy);
    assert!(!lossy.text.is_empty() && !same_logits(&lossy.logits, &expected.logits));
    // What has been lost does not come back with a wider tier, and is not hidden.
    with_ids(&run, &["chunks", "move", "flash"], &ids);
    let narrow = |id: &String| {
        let found = placements(&run, id);
        found.len() == 1 && found[0].0 == "flash" && found[0].1.starts_with("int4")
    };
    assert!(ids.iter().all(narrow), "{:?}", placements(&run, &ids[0]));
    let reply = server.ask(about("log", true)).await;
    all_from("int4", "flash", &reply);
    assert_same("promoted int4", &lossy, &reply);
    with_ids(&run, &["chunks", "rm"], &ids);
    let reply = server.ask(about("log", false)).await;
    all_from("int4", "computed", &reply);
    assert_same("computed again", &expected, &reply);
    server.stop().await;
}

fn two_directories(home: &Home) -> Vec<String> {
    let [a, b] = ["a", "b"].map(|n| home.beside(n).display().to_string());
    vec![format!("storage.dirs={a},{b}")]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_part_of_a_stripe_is_computed() {
    let settings = ["storage.type=stripe", "storage.stripe_unit=64KiB"];
    let Some(server) = start(&settings, two_directories).await else { return };
    server.ingest(&[("log", &text(2, 110))]).await;
    let ids = server.document("log").await.chunk_ids;
    let [a, b] = ["a", "b"].map(|n| server.home().beside(n));
    let parts = [&a, &b].map(|d| chunk_files(d).len());
    assert_eq!(parts, [ids.len(); 2], "every chunk has a part on either device");
    let expected = server.ask(about("log", true)).await;
    all_from("striped", "flash", &expected);
    for (lost, damaged) in [(&b, &a), (&a, &b)] {
        std::fs::remove_file(chunk_file(lost, &ids[0])).expect("removed");
        flip(&chunk_file(damaged, &ids[1]));
        let reply = server.ask(about("log", true)).await;
        assert_same("without a part", &expected, &reply);
        assert_eq!(reply.sources()[..2], ["computed", "computed"]);
        until_from(&server, "log", true, "flash", &expected).await;
    }
    let run = |a: &[&str]| server.matkv(a);
    let copies = json(&run, &["chunks", "verify"]);
    assert_eq!(copies.as_array().map(Vec::len), Some(ids.len()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_answers_from_its_good_copy_and_heals_the_other() {
    let settings = ["storage.type=mirror"];
    let Some(server) = start(&settings, two_directories).await else { return };
    server.ingest(&[("log", &text(3, 110))]).await;
    let ids = server.document("log").await.chunk_ids;
    let [a, b] = ["a", "b"].map(|n| server.home().beside(n));
    let bytes = |dir: &Path, id: &str| std::fs::read(chunk_file(dir, id)).ok();
    let healthy = bytes(&a, &ids[0]).expect("a chunk file");
    assert!(bytes(&b, &ids[0]).as_ref() == Some(&healthy), "two equal copies");
    let expected = server.ask(about("log", true)).await;
    flip(&chunk_file(&a, &ids[0]));
    std::fs::remove_file(chunk_file(&a, &ids[1])).expect("removed");
    let reply = server.ask(about("log", true)).await;
    all_from("one copy", "flash", &reply);
    assert_same("one copy", &expected, &reply);
    until("the copies are healed", async || {
        let whole = |id: &String| bytes(&a, id).is_some_and(|a| bytes(&b, id) == Some(a));
        (bytes(&a, &ids[0]).as_ref() == Some(&healthy) && ids.iter().all(whole)).then_some(())
    })
    .await;
    verified(&server, &a, &b, &ids);
    // Both copies gone: computed.
    flip(&chunk_file(&a, &ids[0]));
    flip(&chunk_file(&b, &ids[0]));
    let reply = server.ask(about("log", true)).await;
    assert_eq!(reply.sources()[0], "computed");
    assert_same("no copy", &expected, &reply);
    until_from(&server, "log", true, "flash", &expected).await;
    assert!(bytes(&a, &ids[0]) == Some(healthy) && bytes(&b, &ids[0]) == bytes(&a, &ids[0]));
    server.stop().await;
}

/// `chunks verify` finds what nobody has read yet, and heals it.
fn verified(server: &Server, a: &Path, b: &Path, ids: &[String]) {
    let run = |a: &[&str]| server.matkv(a);
    flip(&chunk_file(b, &ids[0]));
    std::fs::remove_file(chunk_file(a, &ids[1])).expect("removed");
    let (code, found) = with_json(&run, &["chunks", "verify"]);
    assert_eq!(code, Some(1), "{found}");
    let copies = found.as_array().expect("a list");
    assert_eq!(copies.len(), 2 * ids.len(), "{found}");
    let bad: Vec<&Value> = copies.iter().filter(|c| c["error"] != "").collect();
    let named = |id: &str, copy: u32| {
        let of = |c: &&&Value| c["chunk_id"] == id && c["copy"] == copy;
        bad.iter().find(of).is_some_and(|c| c["healed"] == true)
    };
    assert!(bad.len() == 2 && named(&ids[0], 1) && named(&ids[1], 0), "{found}");
    json(&run, &["chunks", "verify"]);
}

/// Looks at the use of flash as long as it lives.
struct Watch {
    stop: Arc<AtomicBool>,
    looks: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Watch {
    fn start(server: &Server) -> Self {
        let (stop, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopping, count) = (Arc::clone(&stop), Arc::clone(&looks));
        let (mut client, store) = (server.client().clone(), server.home().store());
        let task = tokio::spawn(async move {
            while !stopping.load(Ordering::SeqCst) {
                let status = client.get_status(matkv_api::v1::GetStatusRequest {}).await;
                let s = status.expect("a status").into_inner();
                let (used, capacity) = (s.flash_used_bytes, s.flash_capacity);
                assert!(used <= capacity, "{used} bytes of {capacity} are in use");
                let found = physical(&store, capacity);
                assert!(found <= capacity, "{found} bytes of {capacity} are on the device");
                count.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        });
        Self { stop, looks, task }
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.task.await.expect("never above the capacity");
        assert!(self.looks.load(Ordering::SeqCst) > 10, "nobody has looked");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_capacity_holds_and_every_document_answers() {
    let settings = ["storage.capacity=6MiB", "storage.reserve=0", "storage.policy=lru"];
    let Some(server) = start(&settings, |_| Vec::new()).await else { return };
    let run = |a: &[&str]| server.matkv(a);
    let watch = Watch::start(&server);
    let names: Vec<String> = (0..12).map(|n| format!("log-{n}")).collect();
    let mut answers: Vec<Reply> = Vec::new();
    for (n, name) in names.iter().enumerate() {
        let done = server.ingest(&[(name, &text(n as u64 + 10, 44))]).await;
        assert_eq!(done.errors(), Vec::<&str>::new(), "{name}");
        if n == 0 {
            with_ids(&run, &["chunks", "pin"], &server.document(name).await.chunk_ids);
        }
        answers.push(server.ask(about(name, true)).await);
    }
    let many = in_one_stream(&server).await;
    let flash = json(&run, &["chunks", "ls", "--tier", "flash"]);
    let on_flash = flash.as_array().expect("a list").len();
    let status = server.status().await;
    assert!(status.flash_chunks as usize == on_flash && on_flash > 0);
    assert!((status.flash_chunks as usize) < names.len() + many.len(), "nothing has left");
    for (name, expected) in names.iter().zip(&answers) {
        let reply = server.ask(about(name, true)).await;
        assert_same(name, expected, &reply);
    }
    for name in &many {
        assert!(!server.ask(about(name, false)).await.chunks.is_empty(), "{name}");
    }
    assert_eq!(server.documents().await.len(), names.len() + many.len());
    let pinned = server.document(&names[0]).await.chunk_ids;
    for id in &pinned {
        assert_eq!(placements(&run, id)[0].0, "flash", "a pinned chunk has left");
    }
    explained(&server).await;
    too_large(&server).await;
    watch.stop().await;
    server.stop().await;
}

/// Documents in one stream, each after the one before is durable: all of them fit, for what has
/// been written may leave. All at once: what does not fit says so, and comes in later.
async fn in_one_stream(server: &Server) -> Vec<String> {
    let mut ingest = Ingest::start(server.client()).await;
    let mut names = Vec::new();
    for n in 0..10 {
        names.push(format!("one-by-one-{n}"));
        ingest.document(&names[n], &text(n as u64 + 50, 44)).await;
        let done = ingest.done().await;
        assert_eq!(done.error, "", "{} of one stream", names[n]);
    }
    ingest.finish().await;
    let texts: Vec<(String, String)> =
        (0..10).map(|n| (format!("at-once-{n}"), text(n + 70, 44))).collect();
    let all: Vec<(&str, &str)> = texts.iter().map(|(n, t)| (n.as_str(), t.as_str())).collect();
    let done = server.ingest(&all).await;
    assert_eq!(done.documents.len(), all.len());
    for (name, text) in &all {
        if !done.of(name).error.is_empty() {
            assert!(done.of(name).error.contains("storage.capacity"), "{:?}", done.of(name));
            let again = server.ingest(&[(*name, *text)]).await;
            assert_eq!(again.errors(), Vec::<&str>::new(), "{name} fits alone");
        }
    }
    names.extend(texts.into_iter().map(|(name, _)| name));
    names
}

/// Of what has left somebody can say why.
async fn explained(server: &Server) {
    let run = |a: &[&str]| server.matkv(a);
    let gone = json(&run, &["chunks", "ls", "--tier", "none"]);
    let gone = gone.as_array().expect("a list");
    let id = gone.first().expect("something has left")["chunk_id"].as_str().expect("an id");
    let lines = json(&run, &["chunks", "explain", id])["lines"].to_string();
    assert!(lines.contains("left flash") && lines.contains("room was needed"), "{lines}");
}

/// What could never fit is refused with a reason, and is not half there.
async fn too_large(server: &Server) {
    let done = server.ingest(&[("huge", &text(90, 800))]).await;
    let error = &done.of("huge").error;
    assert!(error.contains("storage.capacity"), "{error:?}");
    assert!(server.documents().await.iter().all(|d| d.document_id != "huge"));
    server.at_rest().await;
    let done = server.ingest(&[("after", &text(91, 40))]).await;
    assert_eq!(done.errors(), Vec::<&str>::new(), "there is room for others");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_device_refuses_documents_and_not_answers() {
    let Some(server) = start(&[], |_| Vec::new()).await else { return };
    server.ingest(&[("log", &text(4, 110))]).await;
    let expected = server.ask(about("log", true)).await;
    let (before, status) = (chunk_files(&server.home().store()), server.status().await);
    assert_eq!(status.storage_degraded, "");
    server.home().device_full(true);
    let done = server.ingest(&[("new", &text(5, 44)), ("newer", &text(6, 44))]).await;
    assert_eq!((done.documents.len(), done.summary.failed), (2, 2), "{done:?}");
    assert!(
        done.errors().iter().all(|e| e.contains("no room on the device")),
        "{:?}",
        done.errors()
    );
    let degraded = server.status().await.storage_degraded;
    assert!(degraded.contains("chunks are not stored"), "{degraded:?}");
    assert_same("full", &expected, &server.ask(about("log", true)).await);
    // Even of what has to be computed.
    let id = server.document("log").await.chunk_ids[0].clone();
    with_ids(&|a: &[&str]| server.matkv(a), &["chunks", "rm"], &[id]);
    for _ in 0..2 {
        let reply = server.ask(about("log", true)).await;
        assert_same("full", &expected, &reply);
        assert_eq!(reply.sources()[0], "computed");
        server.at_rest().await;
    }
    let text_of_status = server.matkv(&["status"]);
    assert!(text_of_status.out.contains("chunks are not stored"), "{text_of_status:?}");
    let left = chunk_files(&server.home().store());
    assert_eq!(left.len(), before.len() - 1, "{left:?}");
    assert_eq!(server.documents().await.len(), 1);
    nothing_incoming(&server.home().store());

    server.home().device_full(false);
    let done = server.ingest(&[("new", &text(5, 44)), ("newer", &text(6, 44))]).await;
    assert_eq!(done.errors(), Vec::<&str>::new());
    assert_eq!(server.status().await.storage_degraded, "");
    until_from(&server, "log", true, "flash", &expected).await;
    all_from("new", "flash", &server.ask(about("new", true)).await);
    nothing_incoming(&server.home().store());
    server.stop().await;
}

/// A row type that is another at the next start: the system is ready, what was stored is used as it
/// is, and what is new is written the new way.
#[tokio::test(flavor = "multi_thread")]
async fn row_types_and_codecs_change_from_start_to_start() {
    let Some(server) = start(&[], |_| Vec::new()).await else { return };
    let first = text(1, 40);
    assert_eq!(server.ingest(&[("first", &first)]).await.errors(), [""; 0]);
    let expected = server.ask(about("first", true)).await;
    let mut home = server.stop().await;
    for (n, (dtype, codec)) in
        [("bf16", "none"), ("int4", "zstd"), ("int8", "lz4")].iter().enumerate()
    {
        let settings =
            [SMALL.to_owned(), format!("storage.dtype={dtype}"), format!("storage.codec={codec}")];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let server = Server::start_in(home, &settings).await;
        let again = server.ask(about("first", true)).await;
        assert!(again.sources().iter().all(|s| *s == "flash"), "{dtype}: {:?}", again.sources());
        assert_same(dtype, &expected, &again);
        let name = format!("{dtype}-{codec}");
        assert_eq!(server.ingest(&[(&name, &text(7 + n as u64, 40))]).await.errors(), [""; 0]);
        let mixed = GenerateRequest {
            document_ids: vec!["first".into(), name.clone()],
            ..about("first", true)
        };
        let reply = server.ask(mixed).await;
        assert!(reply.sources().iter().all(|s| *s == "flash"), "{dtype}: {:?}", reply.sources());
        home = server.stop().await;
    }
}

/// Chunks nobody has used for as long as the tenant's are kept leave all tiers, the arena too.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_outlived_its_time_is_nowhere() {
    let Some(server) = start(&[SMALL, "tenant.ttl=2s"], |_| Vec::new()).await else { return };
    server.ingest(&[("log", &text(1, 110))]).await;
    let ids = server.document("log").await.chunk_ids;
    let expected = server.ask(about("log", false)).await;
    let run = |a: &[&str]| server.matkv(a);
    until("it has left flash", async || {
        ids.iter().all(|id| placements(&run, id).is_empty()).then_some(())
    })
    .await;
    until("it has left the arena", async || {
        (server.status().await.arena_chunks == 0).then_some(())
    })
    .await;
    assert!(chunk_files(&server.home().store()).is_empty());
    let why = json(&run, &["chunks", "explain", &ids[0]]).to_string();
    assert!(why.contains("tenant.ttl"), "{why}");
    let reply = server.ask(about("log", false)).await;
    all_from("after its time", "computed", &reply);
    assert_same("after its time", &expected, &reply);
    server.stop().await;
}
