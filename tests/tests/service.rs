//! What other programs see: health, reflection, TCP, status, JSON.

use matkv_api::v1::mat_kv_client::MatKvClient;
use matkv_tests::{Server, ask, entries, question, signal, text, until};
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const SERVICE: &str = "matkv.v1.MatKV";

async fn channel(address: &str) -> Channel {
    let endpoint = Endpoint::from_shared(address.to_owned()).expect("an address");
    endpoint.connect().await.unwrap_or_else(|e| panic!("{address}: {e}"))
}

/// An address nobody listens on; another program may take it before the server does, which then
/// says so.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn other_programs_can_use_it() {
    let tcp = free_address();
    let settings = [&format!("server.tcp={tcp}"), "arena.size=100000000"];
    let Some(mut server) = Server::start(&settings).await else { return };
    server.ingest(&[("bell", "The tide bell was cast in 1768."), ("log", &text(2, 130))]).await;
    for address in [format!("unix://{}", server.home().socket().display()), format!("http://{tcp}")]
    {
        let channel = channel(&address).await;
        assert_eq!(health(&channel, SERVICE).await, Ok(ServingStatus::Serving), "{address}");
        assert_eq!(health(&channel, "").await, Ok(ServingStatus::Serving), "{address}");
        assert_eq!(health(&channel, "nothing").await, Err(tonic::Code::NotFound), "{address}");
        reflection(channel.clone()).await;
        let reply = ask(&MatKvClient::new(channel), question("When?")).await.expect("an answer");
        assert_eq!(reply.answer(), server.ask(question("When?")).await.answer());
    }
    status(&server, &tcp).await;
    json(&server);
    verify(&server);
    health_follows_the_decoder(&mut server, &tcp).await;
    interrupted(server, &tcp).await;
}

async fn health(channel: &Channel, service: &str) -> Result<ServingStatus, tonic::Code> {
    let request = HealthCheckRequest { service: service.into() };
    let response = HealthClient::new(channel.clone()).check(request).await;
    response.map(|r| r.into_inner().status()).map_err(|s| s.code())
}

/// Both versions of the protocol list the services and describe ours.
async fn reflection(channel: Channel) {
    macro_rules! check {
        ($pb:ident) => {{
            use tonic_reflection::pb::$pb::ServerReflectionRequest;
            use tonic_reflection::pb::$pb::server_reflection_client::ServerReflectionClient;
            use tonic_reflection::pb::$pb::server_reflection_request::MessageRequest;
            use tonic_reflection::pb::$pb::server_reflection_response::MessageResponse;
            let request = |message: MessageRequest| ServerReflectionRequest {
                host: String::new(),
                message_request: Some(message),
            };
            let requests = tokio_stream::iter([
                request(MessageRequest::ListServices(String::new())),
                request(MessageRequest::FileContainingSymbol(SERVICE.into())),
            ]);
            let mut client = ServerReflectionClient::new(channel.clone());
            let answers = client.server_reflection_info(requests).await.expect("reflection");
            let mut answers = answers.into_inner();
            let list = answers.message().await.expect("an answer").expect("a list");
            let Some(MessageResponse::ListServicesResponse(list)) = list.message_response else {
                panic!("{list:?}");
            };
            let names: Vec<String> = list.service.into_iter().map(|s| s.name).collect();
            for name in [SERVICE, "grpc.health.v1.Health"] {
                assert!(names.contains(&name.to_owned()), "{name} is not in {names:?}");
            }
            let file = answers.message().await.expect("an answer").expect("a file");
            let Some(MessageResponse::FileDescriptorResponse(file)) = file.message_response else {
                panic!("{file:?}");
            };
            let describes = |bytes: &Vec<u8>| bytes.windows(12).any(|w| w == b"return_logit");
            assert!(file.file_descriptor_proto.iter().any(describes));
        }};
    }
    check!(v1);
    check!(v1alpha);
}

async fn status(server: &Server, tcp: &str) {
    let s = server.at_rest().await;
    assert_eq!((s.state.as_str(), s.reason.as_str()), ("ready", ""));
    assert_eq!((s.version.as_str(), s.model.as_str()), (env!("CARGO_PKG_VERSION"), "smollm2-135m"));
    assert_eq!((s.fingerprint.len(), s.epoch), (64, 1));
    assert_ne!(s.loader_pid, s.decoder_pid);
    for (pid, name) in [(s.loader_pid, "matkv-loader"), (s.decoder_pid, "matkv-decoder")] {
        let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("a process");
        assert_eq!(command.trim(), name);
    }
    let documents = server.documents().await;
    assert_eq!(s.documents, documents.len() as u64);
    assert_eq!(s.chunk_tokens, documents.iter().map(|d| d.tokens).sum::<u64>());
    let files = matkv_tests::chunk_files(&server.home().store());
    let bytes = files.values().map(|p| std::fs::metadata(p).expect("a file").len()).sum::<u64>();
    assert_eq!((s.chunks, s.chunk_bytes), (files.len() as u64, bytes));
    assert!(s.arena_chunks > 0 && s.arena_used_bytes > 0 && s.arena_used_bytes < s.arena_bytes);
    assert_eq!((s.quarantined, s.other_fingerprints.len()), (0, 0));
    assert_eq!(s.store_dir, server.home().store().display().to_string());
    for name in ["matkv_requests_total", "matkv_held_slots", "matkv_completion_tokens_total"] {
        assert!(s.metrics.contains(name), "{name} is not in {}", s.metrics);
    }
    assert_eq!(matkv_tests::metric(&s.metrics, "matkv_held_slots"), 0.0);
    assert!(tcp.starts_with("127.0.0.1:"));
}

fn parsed(server: &Server, arguments: &[&str]) -> Value {
    let output = server.matkv(&[&["--format", "json"], arguments].concat());
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""), "{arguments:?}: {output:?}");
    serde_json::from_str(&output.out).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {output:?}"))
}

fn json(server: &Server) {
    let status = parsed(server, &["status"]);
    assert_eq!((&status["state"], &status["documents"]), (&"ready".into(), &2.into()));
    let documents = parsed(server, &["docs", "ls"]);
    assert_eq!(documents[0]["document_id"], "bell");
    assert_eq!(documents.as_array().map(Vec::len), Some(2));
    let arguments = ["ask", "When?", "--document", "bell", "--max-new-tokens", "4"];
    let answer = parsed(server, &arguments);
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    assert!(answer["usage"]["cached_tokens"].as_u64() > Some(0), "{answer}");
    assert_eq!(answer["chunks"][0]["document_id"], "bell");
    assert!(answer["timings_ms"]["total"].as_f64() > Some(0.0), "{answer}");
    let vanilla = parsed(server, &[&arguments[..], &["--mode", "vanilla"]].concat());
    assert_eq!(vanilla["usage"]["cached_tokens"], 0, "present, and zero");
    assert_eq!(vanilla["text"], answer["text"]);
    let config = parsed(server, &["config"]);
    let rows = config.as_array().expect("a list");
    let row = |key: &str| rows.iter().find(|r| r["key"] == key).expect("the key");
    assert_eq!(row("chunker.chunk_size")["value"], "128");
    assert_eq!(row("chunker.chunk_size")["origin"], "command line");
    assert_eq!(row("io.depth")["origin"], "default");
}

fn verify(server: &Server) {
    let one = ["ask", "When was the tide bell cast?", "--document", "bell", "--verify"];
    let shown = server.matkv(&one);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(shown.out.contains("answer: identical"), "{}", shown.out);
    assert!(shown.out.contains("same top-1: yes"), "{}", shown.out);
    // What is not exact is said as well: two chunks, nothing linked.
    let two = ["ask", "Who?", "--document", "log", "--mode", "independent", "--verify"];
    let shown = server.matkv(&two);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(!shown.out.contains("largest logit difference 0.0000"), "{}", shown.out);
}

/// Not serving while there is no decoder, serving again with the next one.
async fn health_follows_the_decoder(server: &mut Server, tcp: &str) {
    let healthy = server.status().await;
    signal("KILL", &[healthy.decoder_pid]);
    let channel = channel(&format!("http://{tcp}")).await;
    for service in [SERVICE, ""] {
        until("health says not serving", async || {
            (health(&channel, service).await == Ok(ServingStatus::NotServing)).then_some(())
        })
        .await;
    }
    let refused = server.try_ask(question("When?")).await;
    if let Err(status) = refused {
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert!(status.message().contains("decoder"), "{status:?}");
    }
    server.restarted(&healthy).await;
    for service in [SERVICE, ""] {
        until("health says serving", async || {
            (health(&channel, service).await == Ok(ServingStatus::Serving)).then_some(())
        })
        .await;
    }
}

/// Ctrl-C in a terminal reaches all three processes at once.
async fn interrupted(server: Server, tcp: &str) {
    let status = server.at_rest().await;
    let pids = [server.up_pid(), status.loader_pid, status.decoder_pid];
    server.end(|_| signal("INT", &pids)).await;
    assert!(std::net::TcpStream::connect(tcp).is_err(), "somebody still listens");
}

/// Values are kept as they are written, and a store of another prompt is another corpus.
#[tokio::test(flavor = "multi_thread")]
async fn settings_reach_the_processes_unchanged() {
    let system = "prompt.system=Answer in one \"word\".\\ é\n";
    let overlap = ["chunker.chunk_size=64", "chunker.chunk_overlap=16"];
    let settings = [&["arena.size=50003968", system], &overlap[..]].concat();
    let Some(server) = Server::start(&settings).await else { return };
    let first = server.status().await;
    assert_eq!(first.arena_bytes, 50_003_968);
    server.ingest(&[("log", &text(2, 100))]).await;
    let tokens = server.document("log").await.tokens as u32;
    let ask = |mode: &str| matkv_api::v1::GenerateRequest {
        mode: mode.into(),
        document_ids: vec!["log".into()],
        ..question("Who?")
    };
    let reply = server.ask(ask("linked(1000)")).await;
    let chunks: Vec<u32> = reply.chunks.iter().map(|c| c.tokens).collect();
    let shared = 16 * (chunks.len() as u32 - 1);
    assert!(chunks.len() > 1 && chunks[0] == 64, "{chunks:?}");
    assert_eq!(chunks.iter().sum::<u32>(), tokens + shared, "{chunks:?}");
    assert_eq!(server.ask(ask("vanilla")).await.answer(), reply.answer());

    let home = server.stop().await;
    let server = Server::start_in(home, &overlap).await;
    let second = server.status().await;
    assert_ne!(second.fingerprint, first.fingerprint);
    assert_eq!(second.other_fingerprints, [&first.fingerprint[..16]]);
    assert_eq!((second.documents, second.chunks), (0, 0));
    assert!(server.ask(question("Who?")).await.chunks.is_empty());
    let shown = server.matkv(&["status"]);
    assert!(shown.out.contains(&first.fingerprint[..16]), "{}", shown.out);
    server.stop().await;
}

/// This file of the threads of a process whose names begin so.
fn of_threads(pid: u32, name: &str, file: &str) -> Vec<String> {
    let threads = entries(format!("/proc/{pid}/task").as_ref());
    let read = |file: &str| {
        threads
            .iter()
            .map(|t| std::fs::read_to_string(t.join(file)).unwrap_or_default())
            .collect::<Vec<_>>()
    };
    let all = read("comm").into_iter().zip(read(file));
    all.filter(|(comm, _)| comm.starts_with(name)).map(|(_, text)| text).collect()
}

/// The cores each of them may run on.
fn bound(pid: u32, name: &str) -> Vec<Vec<usize>> {
    let line = "Cpus_allowed_list:";
    let list = |status: &String| status.lines().find_map(|l| Some(cores(l.strip_prefix(line)?)));
    of_threads(pid, name, "status").iter().filter_map(list).collect()
}

/// How nice each of them is.
fn nice(pid: u32, name: &str) -> Vec<i32> {
    let of = |stat: &String| {
        let fields = stat.rsplit_once(") ").expect("fields behind a name").1;
        fields.split(' ').nth(16).and_then(|n| n.parse().ok()).expect("a number")
    };
    of_threads(pid, name, "stat").iter().map(of).collect()
}

/// Of a list as the kernel writes it: `0-2,5`.
fn cores(list: &str) -> Vec<usize> {
    let number = |n: &str| n.trim().parse::<usize>().expect("a core");
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        number(first)..=number(last)
    };
    list.split(',').flat_map(range).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn threads_run_where_they_are_told_to() {
    let all = bound(std::process::id(), "").swap_remove(0);
    let (first, last) = (all[0], all[all.len() - 1]);
    let settings = [
        "threads.loader=2",
        &format!("threads.loader_cores={first}"),
        "threads.decoder=1",
        &format!("threads.decoder_cores={last},{first}"),
        "threads.decoder_nice=7",
    ];
    let Some(server) = Server::start(&settings).await else { return };
    server.ingest(&[("bell", "The tide bell was cast in 1768.")]).await;
    assert_eq!(server.ask(question("When?")).await.places(), [("bell", 0)]);
    let status = server.status().await;
    assert_eq!(bound(status.loader_pid, "compute"), [[first], [first]]);
    assert_eq!(bound(status.decoder_pid, "session"), [[last]]);
    let loader = nice(status.loader_pid, "compute")[0];
    assert_eq!(nice(status.loader_pid, "compute"), [loader, loader]);
    assert_eq!(nice(status.decoder_pid, "session"), [(loader + 7).min(19)]);
    server.stop().await;
}
