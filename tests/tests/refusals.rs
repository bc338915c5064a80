//! What is wrong is said, in words that help, and nothing is left behind.

use std::path::Path;

use matkv_api::v1::GenerateRequest;
use matkv_tests::{Home, Output, Server, entries, question};
use tonic::Code;

/// A failed command whose standard error names all of these.
fn assert_refused(output: &Output, code: i32, names: &[&str]) {
    assert_eq!(output.code, Some(code), "{output:?}");
    for name in names {
        assert!(output.err.contains(name), "{name:?} is not in {}", output.err);
    }
    assert!(!output.err.contains("panicked"), "{}", output.err);
    assert!(!output.out.contains("ready"), "{}", output.out);
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

/// A server that would do with these settings is refused; the setting `paths.…` is last.
fn up(home: &Home, settings: &[&str]) -> Output {
    home.matkv(settings, &["up"])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_server_refuses() {
    let Some(server) = Server::start(&["arena.size=16MiB"]).await else { return };
    server.ingest(&[("bell", "The tide bell was cast in 1768.")]).await;
    second_server(&server).await;
    wrong_requests(&server).await;
    arena_too_small(&server).await;
    wrong_commands(&server);
    // After all that it answers.
    assert_eq!(server.ask(question("When?")).await.places(), [("bell", 0)]);
    server.stop().await;
}

/// Neither the store nor the runtime directory can be used twice; the first server goes on.
async fn second_server(server: &Server) {
    let first = server.status().await;
    let home = server.home();
    let pid = first.loader_pid.to_string();

    let elsewhere = Home::new();
    let store = format!("paths.store_dir={}", show(&home.store()));
    let lock = show(&home.store().join("LOCK"));
    assert_refused(&up(&elsewhere, &[&store]), 1, &[&lock, &pid]);
    assert!(!elsewhere.socket().exists());

    let runtime = format!("paths.runtime_dir={}", show(&home.runtime()));
    let lock = show(&home.runtime().join("LOCK"));
    assert_refused(&up(&elsewhere, &[&runtime]), 1, &[&lock, &pid]);
    assert!(entries(&elsewhere.store()).is_empty(), "it was not to touch a store");

    let now = server.status().await;
    assert_eq!(
        (now.loader_pid, now.decoder_pid, now.epoch),
        (first.loader_pid, first.decoder_pid, 1)
    );
    assert!(home.socket().exists());
}

async fn refused(server: &Server, request: GenerateRequest, code: Code, names: &[&str]) {
    let status = server.try_ask(request.clone()).await.expect_err("refused");
    assert_eq!(status.code(), code, "{request:?}: {status:?}");
    for name in names {
        assert!(status.message().contains(name), "{name:?} is not in {status:?}");
    }
}

async fn wrong_requests(server: &Server) {
    let q = || question("When?");
    let request = GenerateRequest { mode: "fast".into(), ..q() };
    refused(server, request, Code::InvalidArgument, &["fast", "vanilla", "linked(N)"]).await;
    let request = GenerateRequest { chunk_ids: vec!["abc".into()], ..q() };
    refused(server, request, Code::InvalidArgument, &["abc", "64"]).await;
    let request = GenerateRequest { chunk_ids: vec!["ab".repeat(32)], ..q() };
    refused(server, request, Code::NotFound, &[&"ab".repeat(32)]).await;
    let request = GenerateRequest { document_ids: vec!["nowhere".into()], ..q() };
    refused(server, request, Code::NotFound, &["nowhere"]).await;
    let request = GenerateRequest { max_new_tokens: Some(0), ..q() };
    refused(server, request, Code::InvalidArgument, &["max_new_tokens"]).await;
    let request = GenerateRequest { temperature: Some(f32::NAN), ..q() };
    refused(server, request, Code::InvalidArgument, &["temperature"]).await;
    refused(server, question(" \n"), Code::InvalidArgument, &["question"]).await;

    // About two tokens a word: more than the context of 2,048 or 8,192 tokens holds.
    let long = "word seven ".repeat(6_000);
    let request = GenerateRequest { document_ids: vec!["bell".into()], ..question(&long) };
    let status = server.try_ask(request).await.expect_err("too long");
    assert_eq!(status.code(), Code::InvalidArgument);
    let numbers: Vec<usize> = status
        .message()
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect();
    let (needed, context) = (numbers[0], numbers[numbers.len() - 1]);
    assert!(needed > 12_000 && (1_024..needed).contains(&context), "{status:?}");
    server.at_rest().await;
}

/// A request that cannot run even alone is refused at once, not queued for ever.
async fn arena_too_small(server: &Server) {
    let request = GenerateRequest { max_new_tokens: Some(1_000), ..question("When?") };
    let names = ["arena.size", &(16 << 20).to_string()];
    refused(server, request, Code::ResourceExhausted, &names).await;
    let output = server.matkv(&["ask", "When?", "--max-new-tokens", "1000"]);
    assert_refused(&output, 1, &["arena.size"]);
}

fn wrong_commands(server: &Server) {
    assert_refused(&server.matkv(&["ask", "When?", "--mode", "fast"]), 1, &["fast", "vanilla"]);
    assert_refused(&server.matkv(&["ask", "When?", "--chunk", "zz"]), 1, &["zz"]);
    assert_refused(&server.matkv(&["ask", "When?", "--document", "nowhere"]), 1, &["nowhere"]);
    assert_refused(&server.matkv(&["docs", "rm", "nowhere"]), 1, &["nowhere", "docs ls"]);
    assert_refused(&server.matkv(&["ask"]), 2, &["QUESTION"]);
}

#[test]
fn nothing_answers_without_a_server() {
    if Home::models().is_none() {
        return;
    }
    let home = Home::new();
    let socket = show(&home.socket());
    for command in [&["ask", "When?"][..], &["status"], &["docs", "ls"], &["ingest", "Cargo.toml"]]
    {
        assert_refused(&home.matkv(&[], command), 1, &["matkv up", &socket]);
    }
}

#[test]
fn settings_that_cannot_be() {
    if Home::models().is_none() {
        return;
    }
    let home = Home::new();
    for (setting, names) in [
        (
            "chunker.chunksize=5",
            &["chunker.chunksize", "\"chunker.chunk_size\"", "command line"][..],
        ),
        ("chunk_size=5", &["\"chunker.chunk_size\""]),
        ("chunker.chunk_size=0", &["chunker.chunk_size", "at least 1"]),
        ("chunker.chunk_overlap=128", &["chunker.chunk_overlap", "smaller", "128"]),
        ("arena.size=big", &["arena.size", "big", "MiB"]),
        ("server.tcp=0.0.0.0:7070", &["server.tcp", "loopback"]),
        ("threads.loader_cores=0,all", &["threads.loader_cores", "0,all"]),
        ("nonsense", &["nonsense", "KEY=VALUE"]),
    ] {
        assert_refused(&up(&home, &[setting]), 1, names);
    }
    let file = home.store().with_file_name("matkv.toml");
    std::fs::write(&file, "[retrieval]\ntopk = 3\n").expect("a file");
    let file = show(&file);
    let output = home.matkv(&[], &["--config", &file, "config"]);
    assert_refused(&output, 1, &["retrieval.topk", "\"retrieval.top_k\"", &file]);
    assert!(!home.runtime().exists() && !home.store().exists(), "nothing was begun");
}

#[test]
fn places_that_cannot_be_used() {
    if Home::models().is_none() {
        return;
    }
    let dir = Home::new();
    let file = show(&dir.store().with_file_name("file"));
    let garbage = show(&dir.store().with_file_name("garbage.gguf"));
    std::fs::write(&file, "not a directory").expect("a file");
    std::fs::write(&garbage, vec![0x55; 100_000]).expect("a file");
    let busy = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let busy = busy.local_addr().expect("its address").to_string();
    let cases: Vec<(String, Vec<&str>)> = vec![
        (format!("paths.store_dir={file}"), vec![&file]),
        ("paths.store_dir=/proc/matkv".into(), vec!["/proc/matkv"]),
        ("threads.loader_cores=1023".into(), vec!["threads.loader_cores", "core 1023"]),
        (format!("paths.runtime_dir={file}"), vec![&file]),
        ("model.path=/nowhere/model.gguf".into(), vec!["/nowhere/model.gguf"]),
        (format!("model.path={garbage}"), vec![&garbage]),
        ("model.path=gpt-5".into(), vec!["gpt-5", "smollm2-135m"]),
        ("arena.size=1000GiB".into(), vec!["arena.size"]),
        (format!("server.tcp={busy}"), vec![&busy]),
    ];
    // Together: some of them load the model first.
    std::thread::scope(|scope| {
        for (setting, names) in &cases {
            scope.spawn(move || {
                let home = Home::new();
                assert_refused(&up(&home, &[setting]), 1, names);
                assert!(!home.socket().exists(), "{setting}: the socket is left");
            });
        }
    });
}
