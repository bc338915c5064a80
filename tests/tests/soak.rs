//! Kills and pauses by the dozen, under load. The short version is a test; `make soak` runs a
//! hundred kills and pauses of thirty seconds, and prints how long the service was away.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use matkv_api::v1::{GenerateRequest, GetStatusResponse};
use matkv_tests::{
    Reply, Server, ask, entries, is_alive, question, same_logits, signal, text, until,
};
use tonic::Code;

/// Clients that ask without a pause.
const CLIENTS: usize = 4;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn request(n: u64) -> GenerateRequest {
    GenerateRequest {
        document_ids: vec!["log".into()],
        return_logits: true,
        cold: n.is_multiple_of(3),
        ..question("Who crossed the narrow bridge?")
    }
}

/// Clients that go on whatever happens, and what they have seen.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(server: &Server, expected: &Reply) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let failed = Arc::new(AtomicU64::new(0));
        let clients = (0..CLIENTS).map(|_| {
            let (socket, expected) = (server.home().socket(), expected.clone());
            let (stop, answered, failed) = (stop.clone(), answered.clone(), failed.clone());
            tokio::spawn(async move {
                let mut n = 0;
                while !stop.load(Ordering::SeqCst) {
                    n += 1;
                    let outcome = match matkv_api::connect(&socket).await {
                        Ok(client) => ask(&client, request(n)).await,
                        Err(_) => Err(tonic::Status::unavailable("no connection")),
                    };
                    match outcome {
                        Ok(reply) => {
                            assert_eq!(reply.answer(), expected.answer());
                            assert!(same_logits(&reply.logits, &expected.logits));
                            answered.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(status) => {
                            let known = [Code::Unavailable, Code::Unknown, Code::Cancelled];
                            assert!(known.contains(&status.code()), "{status:?}");
                            failed.fetch_add(1, Ordering::SeqCst);
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                }
            })
        });
        Self { clients: clients.collect(), stop, answered, failed }
    }

    async fn stop(self) -> (u64, u64) {
        self.stop.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.await.expect("every answer was right");
        }
        (self.answered.load(Ordering::SeqCst), self.failed.load(Ordering::SeqCst))
    }
}

/// Bytes of this server's segments in /dev/shm, under whatever names.
fn shared_memory(names: &BTreeSet<PathBuf>) -> u64 {
    let bytes = |p: &PathBuf| std::fs::metadata(p).map_or(0, |m| m.blocks() * 512);
    names.iter().map(bytes).sum()
}

fn victims(kill: u64, status: &GetStatusResponse) -> (&'static str, Vec<u32>) {
    match kill % 3 {
        0 => ("decoder", vec![status.decoder_pid]),
        1 => ("loader", vec![status.loader_pid]),
        _ => ("both", vec![status.loader_pid, status.decoder_pid]),
    }
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * q).round() as usize]
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_under_load() {
    let kills = number("MATKV_SOAK_KILLS", 6);
    let Some(mut server) = Server::start(&["arena.size=32MiB"]).await else { return };
    server.ingest(&[("log", &text(1, 150))]).await;
    let expected = server.ask(request(1)).await;
    let mut names = BTreeSet::from([server.segment().to_owned()]);
    let memory = shared_memory(&names);
    let files = entries(&server.home().runtime()).len();
    let load = Load::start(&server, &expected);
    let mut away: Vec<f64> = Vec::new();
    for kill in 0..kills {
        let healthy = server.status().await;
        let (what, pids) = victims(kill, &healthy);
        let killed = Instant::now();
        signal("KILL", &pids);
        let back = server.restarted(&healthy).await;
        let seconds = killed.elapsed().as_secs_f64();
        // The next kill meets clients that are being answered.
        let so_far = load.answered.load(Ordering::SeqCst);
        until("clients are answered again", async || {
            (load.answered.load(Ordering::SeqCst) >= so_far + CLIENTS as u64).then_some(())
        })
        .await;
        println!("kill {kill:>3}: {what:<7} back after {seconds:.2} s, epoch {}", back.epoch);
        away.push(seconds);
        names.insert(server.segment().to_owned());
        assert_eq!(shared_memory(&names), memory, "kill {kill}: /dev/shm has grown");
        assert!(pids.iter().all(|pid| !is_alive(*pid)));
    }
    let (answered, failed) = load.stop().await;
    let left = entries(&server.home().runtime());
    assert!(left.len() <= files, "files pile up in the runtime directory: {left:?}");
    assert!(answered > 0, "nobody was answered in between");
    away.sort_by(f64::total_cmp);
    println!(
        "{kills} kills, {CLIENTS} clients: {answered} right answers, {failed} told to ask again; \
         back after {:.2} s (median), {:.2} s (most)",
        quantile(&away, 0.5),
        quantile(&away, 1.0)
    );
    let after = server.ask(request(1)).await;
    assert_eq!(after.answer(), expected.answer());
    server.stop().await;
}

/// Either process is stopped for longer than a stall: the other one, or `matkv up`, replaces it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "two minutes; `make soak` runs it"]
async fn pauses_of_thirty_seconds() {
    let Some(mut server) = Server::start(&[]).await else { return };
    server.ingest(&[("log", &text(1, 150))]).await;
    let expected = server.ask(request(1)).await;
    let load = Load::start(&server, &expected);
    for loader in [false, true, false, true] {
        let healthy = server.status().await;
        let victim = if loader { healthy.loader_pid } else { healthy.decoder_pid };
        let stopped = Instant::now();
        signal("STOP", &[victim]);
        let back = server.restarted(&healthy).await;
        println!(
            "{} stopped: back after {:.1} s, epoch {}",
            if loader { "loader" } else { "decoder" },
            stopped.elapsed().as_secs_f64(),
            back.epoch
        );
        assert!(!is_alive(victim));
        tokio::time::sleep(Duration::from_secs(30).saturating_sub(stopped.elapsed())).await;
    }
    let (answered, failed) = load.stop().await;
    println!("4 pauses: {answered} right answers, {failed} told to ask again");
    assert!(answered > 0);
    server.stop().await;
}
