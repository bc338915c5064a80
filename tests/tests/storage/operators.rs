//! What operators do: look, move, rebuild, export and import.

use std::path::Path;

use matkv_tests::{Home, Server, chunk_files, entries, metric, question, text};

use crate::common::{
    Run, SMALL, about, all_from, assert_same, json, placements, refused, start, until_from, url,
    with_ids,
};

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_and_do_the_same_with_the_system_running_or_stopped() {
    let more = |home: &Home| [url(home)].into();
    let Some(server) = start(&[], more).await else { return };
    server.ingest(&[("log", &text(1, 110)), ("tide", &text(2, 44))]).await;
    let ids = server.document("log").await.chunk_ids;
    let expected = server.ask(about("log", true)).await;
    let run = |a: &[&str]| server.matkv(a);
    operate(&run, &ids);
    wrong(&run, &ids[0]);
    doctor_and_cost(&run);
    refused(&run, &["chunks", "rebuild-index"], 1, "running");
    until_from(&server, "log", true, "flash", &expected).await;
    let home = server.stop().await;
    let (cold, settings) = (url(&home), [SMALL]);
    let settings: Vec<&str> = settings.into_iter().chain([cold.as_str()]).collect();
    let run = |a: &[&str]| home.matkv(&settings, a);
    operate(&run, &ids);
    wrong(&run, &ids[0]);
    doctor_and_cost(&run);
    let server = Server::start_in(home, &settings).await;
    let reply = server.ask(about("log", true)).await;
    assert_same("after all that", &expected, &reply);
    server.stop().await;
}

/// Every command that looks at chunks or moves them; at the end they are on flash, or nowhere.
fn operate(run: Run<'_>, ids: &[String]) {
    let all = json(run, &["chunks", "ls"]);
    let all = all.as_array().expect("a list");
    assert!(all.iter().any(|c| c["chunk_id"] == ids[0].as_str()), "{all:?}");
    let first = json(run, &["chunks", "ls", "--limit", "1"]);
    assert_eq!(first[0]["chunk_id"], all[0]["chunk_id"]);
    assert_eq!(first.as_array().map(Vec::len), Some(1));
    let id = ids[0].as_str();
    let short = &id[..12];
    let stat = json(run, &["chunks", "stat", short]);
    assert_eq!((&stat[0]["chunk_id"], &stat[0]["rows"]), (&id.into(), &64.into()));
    assert_eq!(stat[0]["documents"], serde_json::json!(["log"]));
    assert!(stat[0]["placements"][0]["path"].as_str().is_some_and(|p| Path::new(p).is_file()));
    let copies = json(run, &["chunks", "verify", short]);
    let good = serde_json::json!([
        {"chunk_id": id, "tier": "flash", "copy": 0, "error": "", "healed": false}
    ]);
    assert_eq!(copies, good);
    pinned(run, id);

    json(run, &["chunks", "move", "cold", short]);
    assert_eq!(placements(run, id), [("cold".into(), "int8+zstd".into())]);
    let cold = json(run, &["chunks", "ls", "--tier", "cold"]);
    assert_eq!(cold[0]["chunk_id"], id);
    let copies = json(run, &["chunks", "verify", short]);
    assert_eq!((&copies[0]["tier"], &copies[0]["error"]), (&"cold".into(), &"".into()));
    let why = json(run, &["chunks", "explain", short])["lines"].to_string();
    assert!(why.contains("in cold as int8+zstd") && why.contains("not in flash"), "{why}");
    assert!(why.contains("moved by an operator"), "{why}");
    json(run, &["chunks", "move", "flash", short]);
    assert_eq!(placements(run, id), [("flash".into(), "int8+none".into())]);
    let freed = json(run, &["chunks", "rm", "--tier", "cold", short]);
    assert_eq!(freed["freed_bytes"], 0, "it is not there");
    let freed = json(run, &["chunks", "rm", short]);
    assert!(freed["freed_bytes"].as_u64() > Some(64 * 1024), "{freed}");
    let gone = json(run, &["chunks", "ls", "--tier", "none"]);
    assert_eq!(gone[0]["chunk_id"], id);
    let why = json(run, &["chunks", "explain", short])["lines"].to_string();
    assert!(why.contains("removed by an operator"), "{why}");
    refused(run, &["chunks", "move", "cold", short], 1, "not on flash");
    refused(run, &["chunks", "move", "flash", short], 1, "not in the cold tier");
    assert_eq!(json(run, &["chunks", "verify", short]), serde_json::json!([]));
    let gc = json(run, &["chunks", "gc", "--quarantine", "--stale"]);
    assert_eq!(gc["orphan_files"], 0, "{gc}");
}

fn pinned(run: Run<'_>, id: &str) {
    let pinned = json(run, &["chunks", "pin", id]);
    assert!(pinned[0]["pinned_until"].as_u64() > Some(1 << 40), "{pinned}");
    let why = json(run, &["chunks", "explain", id])["lines"].to_string();
    assert!(why.contains("pinned"), "{why}");
    let text = run(&["chunks", "ls"]).out;
    assert!(text.lines().any(|l| l.starts_with(&id[..12]) && l.contains("pinned")), "{text}");
    let for_a_while = json(run, &["chunks", "pin", "--ttl", "2h", id]);
    let until = for_a_while[0]["pinned_until"].as_u64().expect("a time");
    assert!((1 << 30..1 << 40).contains(&until), "{for_a_while}");
    let free = json(run, &["chunks", "unpin", id]);
    assert_eq!(free[0]["pinned_until"], 0);
}

fn wrong(run: Run<'_>, id: &str) {
    let nobody = "0123456789abcdef".repeat(4);
    for command in [["chunks", "stat"], ["chunks", "verify"], ["chunks", "pin"], ["chunks", "rm"]] {
        let of = |id: &'static str| [command[0], command[1], id];
        refused(run, &of("0000"), 1, "no chunk 0000");
        refused(run, &of("xyz"), 1, "hexadecimal");
        refused(run, &[command[0], command[1], &nobody], 1, "no chunk 0123");
    }
    refused(run, &["chunks", "move", "moon", id], 1, "moon");
    refused(run, &["chunks", "ls", "--tier", "moon"], 1, "moon");
    refused(run, &["chunks", "pin", "--ttl", "soon", id], 1, "--ttl");
    for missing in [["chunks", "stat"], ["chunks", "move"], ["store", "import"]] {
        refused(run, &missing, 2, "Usage");
    }
    refused(run, &["chunks", "fly"], 2, "unrecognized subcommand");
    refused(run, &["store", "export", "--document", "nobody", "/nonexistent/x"], 1, "/nonexistent");
    let why = json(run, &["chunks", "explain", &nobody])["lines"].to_string();
    assert!(why.contains("does not know"), "{why}");
}

fn doctor_and_cost(run: Run<'_>) {
    let found = json(run, &["doctor"]);
    let checks = found["checks"].as_array().expect("a list");
    for name in ["memory", "shared memory", "directory", "O_DIRECT", "io_uring", "reads"] {
        let check = checks.iter().find(|c| c["check"] == name);
        let check = check.unwrap_or_else(|| panic!("no {name} in {found}"));
        assert!(check["found"].as_str().is_some_and(|f| !f.is_empty()), "{check}");
    }
    let text = run(&["doctor"]);
    assert!(text.code == Some(0) && text.out.contains("GB/s as configured"), "{text:?}");
    // One unit an hour, an hour of prefill; one unit a year for a TB, one TB: a year.
    let given = ["--compute-per-hour", "1", "--flash-per-tb", "1", "--flash-years", "1"];
    let given = ["cost"].into_iter().chain(given);
    let given = given.chain(["--prefill-ms", "3600000", "--chunk-bytes", "1000000000000"]);
    let seconds = json(run, &given.collect::<Vec<_>>())["break_even_seconds"].as_f64();
    assert!(seconds.is_some_and(|s| (s / (365.25 * 86400.0) - 1.0).abs() < 1e-6), "{seconds:?}");
    let measured = json(run, &["cost"]);
    assert!(measured["chunks_measured"].as_u64() > Some(0), "{measured}");
    assert!(measured["break_even_seconds"].as_f64() > Some(0.0), "{measured}");
    let text = run(&["cost"]);
    assert!(text.code == Some(0) && text.out.contains("Storing pays"), "{text:?}");
    refused(run, &["cost", "--flash-years", "0"], 1, "--flash-years");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_index_is_built_again_from_the_files() {
    let more = |home: &Home| [url(home)].into();
    let Some(server) = start(&[], more).await else { return };
    server.ingest(&[("log", &text(1, 110)), ("tide", &text(2, 44)), ("bell", &text(3, 44))]).await;
    let asked = question("Who crossed the narrow bridge?");
    let retrieved = server.ask(asked.clone()).await;
    assert!(!retrieved.chunks.is_empty());
    let expected = server.ask(about("log", true)).await;
    let run = |a: &[&str]| server.matkv(a);
    with_ids(&run, &["chunks", "move", "cold"], &server.document("tide").await.chunk_ids);
    let tide = server.ask(about("tide", true)).await;
    let (documents, before) = (server.documents().await, server.status().await);
    let home = server.stop().await;
    let cold = url(&home);
    let settings = [SMALL, cold.as_str()];
    let stores = entries(&home.store());
    let store = stores.iter().find(|d| d.join("index").is_dir()).expect("a store");
    std::fs::remove_dir_all(store.join("index")).expect("the index is lost");
    let report = json(&|a: &[&str]| home.matkv(&settings, a), &["chunks", "rebuild-index"]);
    assert_eq!((&report["documents"], &report["quarantined"]), (&3.into(), &0.into()));
    assert_eq!(report["chunks"].as_u64(), Some(before.chunks));

    let server = Server::start_in(home, &settings).await;
    assert_eq!(server.documents().await, documents);
    let after = server.status().await;
    let counts = |s: &matkv_api::v1::GetStatusResponse| {
        (s.documents, s.chunks, s.flash_chunks, s.cold_chunks, s.chunk_bytes, s.flash_used_bytes)
    };
    assert_eq!(counts(&after), counts(&before));
    let reply = server.ask(about("log", true)).await;
    all_from("rebuilt", "flash", &reply);
    assert_same("rebuilt", &expected, &reply);
    let reply = server.ask(about("tide", true)).await;
    all_from("rebuilt", "cold", &reply);
    assert_same("rebuilt", &tide, &reply);
    let reply = server.ask(asked).await;
    assert_eq!((reply.places(), reply.answer()), (retrieved.places(), retrieved.answer()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_brings_answers_to_another_store() {
    let Some(server) = start(&[], |_| Vec::new()).await else { return };
    server.ingest(&[("log", &text(1, 110)), ("tide", &text(2, 44))]).await;
    let expected = server.ask(about("log", true)).await;
    let retrieved = server.ask(question("Who crossed the narrow bridge?")).await;
    let documents = server.documents().await;
    let home = server.home();
    let [all, stopped, one] = ["all", "stopped", "one"].map(|n| home.beside(n));
    let [all, stopped, one] = [&all, &stopped, &one].map(|p| p.to_str().expect("UTF-8"));
    let run = |a: &[&str]| server.matkv(a);
    let written = json(&run, &["store", "export", all]);
    assert_eq!(written["bytes"].as_u64(), std::fs::metadata(all).ok().map(|m| m.len()));
    json(&run, &["store", "export", one, "--document", "tide"]);
    refused(&run, &["store", "export", one, "--document", "nobody"], 1, "no document \"nobody\"");
    let home = server.stop().await;
    json(&|a: &[&str]| home.matkv(&[SMALL], a), &["store", "export", stopped]);
    let bundle = std::fs::read(all).expect("a bundle");
    assert!(bundle == std::fs::read(stopped).expect("a bundle"), "exports differ");

    let Some(server) = start(&[], |_| Vec::new()).await else { return };
    damaged_bundles(&server, &bundle).await;
    let run = |a: &[&str]| server.matkv(a);
    let done = json(&run, &["store", "import", one]);
    assert_eq!((&done["documents"], &done["chunks_known"]), (&1.into(), &0.into()));
    let done = json(&run, &["store", "import", all]);
    assert_eq!((&done["documents"], &done["chunks_known"]), (&2.into(), &1.into()));
    let strip = |mut all: Vec<matkv_api::v1::Document>| {
        all.iter_mut().for_each(|d| d.ingested_at = 0);
        all
    };
    assert_eq!(strip(server.documents().await), strip(documents));
    let reply = server.ask(about("log", true)).await;
    all_from("imported", "flash", &reply);
    assert_same("imported", &expected, &reply);
    let reply = server.ask(question("Who crossed the narrow bridge?")).await;
    assert_eq!((reply.places(), reply.answer()), (retrieved.places(), retrieved.answer()));
    let metrics = server.status().await.metrics;
    assert_eq!(metric(&metrics, "matkv_chunks_recomputed_total"), 0.0);
    assert_eq!(metric(&metrics, "matkv_chunks_materialized_total"), 0.0);
    server.stop().await;

    let settings = ["prompt.system=Answer in one word."];
    let Some(server) = start(&settings, |_| Vec::new()).await else { return };
    refused(&|a: &[&str]| server.matkv(a), &["store", "import", all], 1, "prompt");
    empty(&server).await;
    server.stop().await;
    drop(home);
}

/// Whatever is wrong with a bundle, it is refused and leaves nothing.
async fn damaged_bundles(server: &Server, bundle: &[u8]) {
    let run = |a: &[&str]| server.matkv(a);
    let file = server.home().beside("damaged");
    let import = ["store", "import", file.to_str().expect("UTF-8")];
    let (len, mut cases) = (bundle.len(), vec![]);
    cases.extend([0, 10, 24, 200, len / 2, len - 32, len - 1].map(|n| bundle[..n].to_vec()));
    cases.extend([0, 9, 13, 22, 100, len / 3, len - 40, len - 1].map(|at| {
        let mut bytes = bundle.to_vec();
        bytes[at] ^= 1;
        bytes
    }));
    for (n, case) in cases.iter().enumerate() {
        std::fs::write(&file, case).expect("a damaged bundle");
        let output = run(&import);
        assert_eq!(output.code, Some(1), "case {n}: {output:?}");
        assert!(output.err.starts_with("matkv: ") && output.err.len() > 20, "case {n}: {output:?}");
        empty(server).await;
    }
    refused(&run, &["store", "import", "/nonexistent/bundle"], 1, "/nonexistent/bundle");
}

async fn empty(server: &Server) {
    let status = server.status().await;
    assert_eq!((status.documents, status.chunks, status.flash_used_bytes), (0, 0, 0));
    let left = chunk_files(&server.home().store());
    assert!(left.is_empty(), "{left:?}");
}
