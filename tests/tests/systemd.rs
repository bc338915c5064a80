//! The units, and what systemd would see of the two processes: verified, activated, notified,
//! restarted one by one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use matkv_api::v1::{GenerateRequest, GetStatusRequest};
use matkv_tests::{
    Home, Ingest, Manager, Running, ask, at_rest, is_alive, question, ready, run_with_input,
    service, signal, start, text, until, variables,
};
use tempfile::TempDir;

/// Nothing if systemd's tools are not installed, and nobody insists.
fn tool(name: &str) -> Option<()> {
    let found = ["/usr/bin", "/bin"].iter().any(|d| Path::new(d).join(name).exists());
    if !found {
        let required = std::env::var_os("MATKV_REQUIRE_MODELS").is_some();
        assert!(!required, "{name} is missing: scripts/tools.sh installs it");
        println!("skipped: {name} is not installed");
    }
    found.then_some(())
}

/// The units as `make install` writes them, with programs that exist.
fn units() -> (TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().expect("a directory");
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).expect("bin");
    for program in ["matkv-loader", "matkv-decoder"] {
        std::fs::copy("/bin/true", bin.join(program)).expect("a program");
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/systemd");
    let mut out = Vec::new();
    for entry in std::fs::read_dir(source).expect("the units").flatten() {
        let text = std::fs::read_to_string(entry.path()).expect("a unit");
        let text = text.replace("@PREFIX@", &dir.path().display().to_string());
        let path = dir.path().join(entry.file_name());
        std::fs::write(&path, text).expect("written");
        if path.extension().is_some_and(|e| e != "conf") {
            out.push(path);
        }
    }
    (dir, out)
}

#[test]
fn units_are_verified_and_hardened() {
    if tool("systemd-analyze").is_none() {
        return;
    }
    let (_dir, units) = units();
    assert_eq!(units.len(), 4, "{units:?}");
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no", "--recursive-errors=no"]).args(&units);
    let output = run_with_input(verify, b"");
    // It ends with 0 on keys it does not know, and says so.
    assert_eq!((output.code, output.out + &output.err), (Some(0), String::new()));
    let services = units.iter().filter(|u| u.extension().is_some_and(|e| e == "service"));
    let mut security = Command::new("systemd-analyze");
    security.args(["security", "--offline=true", "--threshold=20", "--no-pager"]).args(services);
    let output = run_with_input(security, b"");
    for line in output.out.lines().filter(|l| l.contains("exposure level")) {
        println!("{line}");
    }
    assert_eq!(output.code, Some(0), "exposure above 2.0:\n{}{}", output.out, output.err);
}

fn request() -> GenerateRequest {
    let document_ids = vec!["log".into()];
    GenerateRequest { document_ids, ..question("Who crossed the narrow bridge?") }
}

async fn ended(mut process: Running) -> Option<i32> {
    until("the process ends", async || process.ended()).await.code
}

/// A socket that systemd holds: a client that comes first is answered when the loader is there,
/// and the socket stays when it goes.
#[tokio::test(flavor = "multi_thread")]
async fn a_socket_activated_loader_answers() {
    if tool("systemd-socket-activate").is_none() || Home::models().is_none() {
        return;
    }
    let home = Home::new();
    let socket = home.socket();
    let mut command = Command::new("systemd-socket-activate");
    std::fs::create_dir_all(home.runtime()).expect("a runtime directory");
    command.arg("--listen").arg(&socket).arg("--fdname=grpc");
    for (name, value) in variables(&home, &[]) {
        command.arg("-E").arg(format!("{name}={value}"));
    }
    command.arg(matkv_tests::program("matkv-loader"));
    let loader = start(command);
    until("systemd-socket-activate listens", async || socket.exists().then_some(())).await;
    let decoder = start(service(&home, "matkv-decoder", &[]));
    // This connection starts the loader.
    let (client, status) = ready(&home).await;
    assert_eq!(status.loader_pid, loader.pid(), "it has become the loader");
    let ingest = Ingest::start(&client).await;
    ingest.document("log", &text(1, 60)).await;
    assert_eq!(ingest.finish().await.errors(), [""; 0]);
    let reply = ask(&client, request()).await.expect("an answer");
    assert!(!reply.tokens.is_empty());
    at_rest(&client).await;
    signal("TERM", &[loader.pid()]);
    assert_eq!(ended(loader).await, Some(0));
    assert!(socket.exists(), "the socket is the manager's");
    signal("TERM", &[decoder.pid()]);
    assert_eq!(ended(decoder).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn either_process_restarts_alone() {
    if Home::models().is_none() {
        return;
    }
    let home = Home::new();
    let loader = start(service(&home, "matkv-loader", &["log.level=info"]));
    let decoder = start(service(&home, "matkv-decoder", &[]));
    let (client, first) = ready(&home).await;
    assert_eq!((first.loader_pid, first.decoder_pid), (loader.pid(), decoder.pid()));
    let ingest = Ingest::start(&client).await;
    ingest.document("log", &text(1, 60)).await;
    assert_eq!(ingest.finish().await.errors(), [""; 0]);
    let expected = ask(&client, request()).await.expect("an answer");

    // The decoder: stopped in order, and another one started.
    signal("TERM", &[decoder.pid()]);
    assert_eq!(ended(decoder).await, Some(0));
    let decoder = start(service(&home, "matkv-decoder", &[]));
    let (client, second) = ready(&home).await;
    assert_eq!((second.loader_pid, second.decoder_pid), (first.loader_pid, decoder.pid()));
    assert!(second.epoch > first.epoch);
    let reply = ask(&client, request()).await.expect("an answer");
    assert_eq!(reply.answer(), expected.answer());
    assert!(reply.sources().iter().all(|s| *s == "arena"), "still warm");

    // The loader: the same decoder waits for the next one.
    let mut loader = loader;
    for how in ["TERM", "KILL"] {
        let (_, before) = ready(&home).await;
        signal(how, &[before.loader_pid]);
        // As a service manager does: nothing of it is left when it has been waited for.
        ended(loader).await;
        assert!(is_alive(decoder.pid()), "the decoder lives on");
        let next = start(service(&home, "matkv-loader", &[]));
        let (client, after) = ready(&home).await;
        assert_eq!((after.loader_pid, after.decoder_pid), (next.pid(), decoder.pid()));
        let reply = ask(&client, request()).await.expect("an answer");
        assert_eq!(reply.answer(), expected.answer());
        at_rest(&client).await;
        loader = next;
    }
    let (_, last) = ready(&home).await;
    signal("TERM", &[last.loader_pid, decoder.pid()]);
    assert_eq!(ended(decoder).await, Some(0));
    assert_eq!(ended(loader).await, Some(0));
}

/// A decoder whose prompt has another prefix would read rows that mean something else.
#[tokio::test(flavor = "multi_thread")]
async fn another_model_is_refused_with_both_values() {
    if Home::models().is_none() {
        return;
    }
    let home = Home::new();
    let loader = start(service(&home, "matkv-loader", &[]));
    let other = ["prompt.system=You are someone else."];
    let mut stranger = start(service(&home, "matkv-decoder", &other));
    let refused = until("it is refused", async || stranger.ended()).await;
    assert_eq!(refused.code, Some(1));
    let socket = home.socket();
    let reason = until("the loader says why", async || {
        let mut client = matkv_api::connect(&socket).await.ok()?;
        let status = client.get_status(GetStatusRequest {}).await.ok()?;
        Some(status.into_inner().reason).filter(|r| r.contains("refused"))
    })
    .await;
    for text in [&reason, &refused.err] {
        let digests = text.split(|c: char| !c.is_ascii_hexdigit()).filter(|w| w.len() >= 16);
        let digests: std::collections::BTreeSet<&str> = digests.collect();
        assert_eq!(digests.len(), 2, "both fingerprints in {text:?}");
    }
    // The right one is welcome all the same.
    let decoder = start(service(&home, "matkv-decoder", &[]));
    ready(&home).await;
    signal("TERM", &[loader.pid(), decoder.pid()]);
    assert_eq!((ended(loader).await, ended(decoder).await), (Some(0), Some(0)));
}

/// READY, STATUS, WATCHDOG and STOPPING, from both; and silence from a process that stands still.
#[tokio::test(flavor = "multi_thread")]
async fn the_service_manager_is_told() {
    if Home::models().is_none() {
        return;
    }
    let home = Home::new();
    std::fs::create_dir_all(home.runtime()).expect("a runtime directory");
    let settings = ["supervision.stall=2s"];
    let (for_loader, for_decoder) =
        (Manager::new(&home.runtime(), "notify-a"), Manager::new(&home.runtime(), "notify-b"));
    let watched = |name: &str, manager: &Manager| {
        let mut command = service(&home, name, &settings);
        manager.watch(&mut command, Duration::from_secs(4));
        start(command)
    };
    // The decoder is ready when it looks for a loader, not when it has found one: systemd starts
    // it first.
    let decoder = watched("matkv-decoder", &for_decoder);
    for_decoder.wait_for("READY=1");
    for_decoder.wait_for("WATCHDOG=1");
    let loader = watched("matkv-loader", &for_loader);
    for_loader.wait_for("READY=1");
    ready(&home).await;
    for_loader.wait_for("STATUS=ready");
    for_loader.wait_for("WATCHDOG=1");
    for_decoder.wait_for("WATCHDOG=1");

    // A decoder that stands still is not fed, and reported by the loader, which ends it.
    signal("STOP", &[decoder.pid()]);
    for_loader.wait_for("STATUS=the decoder has not moved for 2s");
    while for_decoder.message().is_some() {}
    assert_eq!(for_decoder.message(), None, "nothing from a process that stands still");
    until("the loader ends it", async || (!is_alive(decoder.pid())).then_some(())).await;
    for_loader.wait_for("STATUS=no decoder is connected");

    signal("TERM", &[loader.pid()]);
    for_loader.wait_for("STOPPING=1");
    assert_eq!(ended(loader).await, Some(0));
}
