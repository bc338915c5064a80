//! The crash matrix: either process dies at every step of handshake, load, publish, claim,
//! decode, release and ingest. After each death the system is as it was: no slot held, no
//! segment, file or descriptor more than before, and the same answer, bit for bit.

use std::collections::BTreeMap;

use matkv_api::v1::{GenerateRequest, GetStatusResponse};
use matkv_sys::CrashPoint;
use matkv_tests::{
    Home, Ingest, Reply, Server, chunk_files, descriptors, entries, question, same_logits, signal,
    text, until,
};
use tonic::Code;

const LOADER: &str = "matkv-loader";
const DECODER: &str = "matkv-decoder";

/// Chunks from flash, and enough tokens for every step of decoding.
fn request() -> GenerateRequest {
    GenerateRequest {
        document_ids: vec!["log".into()],
        return_logits: true,
        cold: true,
        ..question("Who crossed the narrow bridge?")
    }
}

/// Who passes a step.
fn programs(step: CrashPoint) -> &'static [&'static str] {
    let name = step.name();
    let decoder = ["handshake.connected", "handshake.hello-sent", "handshake.welcome-received"];
    if name.starts_with("ring.") {
        return &[LOADER, DECODER];
    }
    let mapped = ["handshake.segment-mapped", "handshake.header-verified"];
    let works = [
        "claim.slots-borrowed",
        "decode.begun",
        "decode.computed",
        "decode.appended",
        "decode.notified",
    ];
    let lets_go = ["release.slots-let-go", "release.finished-posted"];
    let decoders = [&decoder[..], &mapped, &works, &lets_go].concat();
    if decoders.contains(&name) { &[DECODER] } else { &[LOADER] }
}

fn phase(step: CrashPoint) -> &'static str {
    step.name().split('.').next().unwrap_or_default()
}

struct Matrix {
    server: Server,
    expected: Reply,
    /// Descriptors of the loader at rest, and entries of the runtime directory.
    descriptors: usize,
    files: usize,
    /// Deaths by phase and program.
    deaths: BTreeMap<(&'static str, &'static str), u32>,
}

impl Matrix {
    async fn start(settings: &[&str]) -> Option<Self> {
        let server = Server::start(settings).await?;
        server.ingest(&[("log", &text(1, 150))]).await;
        let expected = server.ask(request()).await;
        assert!(expected.chunks.len() >= 2, "{:?}", expected.sources());
        let mut matrix =
            Self { server, expected, descriptors: 0, files: 0, deaths: BTreeMap::new() };
        let status = matrix.server.at_rest().await;
        matrix.descriptors = descriptors(status.loader_pid);
        matrix.files = entries(&matrix.server.home().runtime()).len();
        Some(matrix)
    }

    /// Dies at a step while a request is under way, or while a decoder introduces itself.
    async fn die(&mut self, step: CrashPoint, program: &'static str) {
        let what = format!("{program} dies at {}", step.name());
        let healthy = self.server.at_rest().await;
        self.server.home().crash_at(program, step);
        match phase(step) {
            "handshake" => signal("KILL", &[healthy.decoder_pid]),
            "ingest" => self.ingest_dies(&what).await,
            _ => match self.server.try_ask(request()).await {
                // The answer was complete before the process died.
                Ok(reply) => self.assert_same(&what, &reply),
                Err(status) => {
                    let code = status.code();
                    let known = [Code::Unavailable, Code::Unknown, Code::Internal, Code::Cancelled];
                    assert!(known.contains(&code), "{what}: {status:?}");
                }
            },
        }
        until(&what, async || self.server.home().has_crashed().then_some(())).await;
        let back = self.back(&healthy, program).await;
        self.nothing_is_left(&what, &healthy, &back).await;
        *self.deaths.entry((phase(step), program)).or_default() += 1;
    }

    /// The service after a death: another decoder at least, another loader if it was the loader.
    async fn back(&mut self, before: &GetStatusResponse, program: &str) -> GetStatusResponse {
        if program == LOADER {
            let dead = before.loader_pid;
            until("the loader is dead", async || (!matkv_tests::is_alive(dead)).then_some(()))
                .await;
        }
        self.server.restarted(before).await;
        self.server.at_rest().await
    }

    async fn nothing_is_left(
        &mut self,
        what: &str,
        before: &GetStatusResponse,
        after: &GetStatusResponse,
    ) {
        let reply = self.server.ask(request()).await;
        self.assert_same(what, &reply);
        let rest = self.server.at_rest().await;
        assert_eq!(rest.held_slots, 0, "{what}");
        let files = entries(&self.server.home().runtime());
        assert!(files.len() <= self.files, "{what}: {files:?} were {} before", self.files);
        if after.loader_pid == before.loader_pid {
            assert!(after.epoch > before.epoch, "{what}: epoch {}", after.epoch);
            let now = descriptors(after.loader_pid);
            assert_eq!(now, self.descriptors, "{what}: open descriptors");
        } else {
            self.descriptors = descriptors(after.loader_pid);
        }
    }

    fn assert_same(&self, what: &str, reply: &Reply) {
        assert_eq!(reply.answer(), self.expected.answer(), "{what}");
        assert!(same_logits(&reply.logits, &self.expected.logits), "{what}: other logits");
    }

    /// What was acknowledged stays; what was not is ingested again, and nothing is stored twice.
    async fn ingest_dies(&mut self, what: &str) {
        let number = self.deaths.values().sum::<u32>();
        let (id, words) = (format!("other-{number}"), text(100 + u64::from(number), 120));
        let mut ingest = Ingest::start(self.server.client()).await;
        ingest.document(&id, &words).await;
        while let Ok(Some(event)) = ingest.next().await {
            let done = matches!(event, matkv_api::v1::ingest_event::Event::Document(_));
            assert!(!done, "{what}: acknowledged by a process that was to die before");
        }
    }

    async fn report(self) -> Home {
        for ((phase, program), count) in &self.deaths {
            println!("{phase:<10} {program:<14} {count:>3} deaths, {count:>3} recoveries");
        }
        self.server.stop().await
    }
}

fn steps(side: &'static str) -> impl Iterator<Item = CrashPoint> {
    CrashPoint::ALL.iter().copied().filter(move |step| programs(*step).contains(&side))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decoder_dies_at_every_step() {
    let Some(mut matrix) = Matrix::start(&["arena.size=32MiB"]).await else { return };
    let loader = matrix.server.status().await.loader_pid;
    for step in steps(DECODER) {
        matrix.die(step, DECODER).await;
    }
    assert_eq!(matrix.server.status().await.loader_pid, loader, "the loader has lived through it");
    matrix.report().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_loader_dies_at_every_step() {
    let Some(mut matrix) = Matrix::start(&["arena.size=32MiB"]).await else { return };
    for step in steps(LOADER) {
        matrix.die(step, LOADER).await;
        if phase(step) == "ingest" {
            ingest_goes_on(&matrix).await;
        }
    }
    matrix.report().await;
}

/// The interrupted document again: exactly its chunks are there, each once.
async fn ingest_goes_on(matrix: &Matrix) {
    let number = matrix.deaths.values().sum::<u32>() - 1;
    let (id, words) = (format!("other-{number}"), text(100 + u64::from(number), 120));
    let done = matrix.server.ingest(&[(&id, &words)]).await;
    assert_eq!(done.errors(), [""; 0]);
    let documents = matrix.server.documents().await;
    let known: std::collections::BTreeSet<&String> =
        documents.iter().flat_map(|d| &d.chunk_ids).collect();
    let files = chunk_files(&matrix.server.home().store());
    assert_eq!(files.keys().collect::<std::collections::BTreeSet<_>>(), known);
}
