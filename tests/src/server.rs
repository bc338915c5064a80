//! `matkv up` and its two processes, in directories of their own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use matkv_api::Client;
use matkv_api::v1::{Document, GenerateRequest, GetStatusResponse};
use matkv_sys::CrashPoint;
use tempfile::TempDir;
use tonic::Status;

use crate::ingest::{Ingest, Ingested};
use crate::process::{self, Output, Running, is_alive, profile_dir, run_with_input, signal};
use crate::reply::{Reply, ask};
use crate::separate::at_rest;
use crate::wait::until;

/// Settings of every server here; a test's own come after them. With patience, as chunks of so few
/// tokens may well be computed faster than a busy machine loads them, and tests ask where they came
/// from.
const SETTINGS: [&str; 5] = [
    "chunker.chunk_size=128",
    "arena.size=128MiB",
    "log.level=warn",
    "pipeline.max_new_tokens=16",
    "io.patience=0",
];

/// Where the models are: `<cache>/models/<name>/<file>`.
fn cache_dir() -> PathBuf {
    let model = matkv_testkit::cached_model("smollm2-135m").expect("looked for before");
    model.ancestors().nth(3).expect("a cache directory").to_owned()
}

/// Directories of a server; they outlive it, so that another one can go on with them.
pub struct Home {
    /// On the disk that holds the build, where O_DIRECT works.
    store: TempDir,
    /// Under /tmp: a socket's path has at most 107 bytes.
    runtime: TempDir,
}

impl Home {
    /// Says that the tests are skipped, if the models have not been fetched.
    pub fn models() -> Option<()> {
        matkv_testkit::cached_model("smollm2-135m")?;
        matkv_testkit::cached_model("minilm")?;
        Some(())
    }

    /// Empty directories.
    ///
    /// # Panics
    /// If they cannot be made.
    pub fn new() -> Self {
        let disk = profile_dir().with_file_name("tmp");
        std::fs::create_dir_all(&disk).expect("target/tmp");
        let dir = |parent: &Path, prefix: &str| {
            tempfile::Builder::new().prefix(prefix).tempdir_in(parent).expect("a directory")
        };
        Self { store: dir(&disk, "store-"), runtime: dir(Path::new("/tmp"), "mk-") }
    }

    /// Where chunk files and the index are.
    pub fn store(&self) -> PathBuf {
        self.store.path().join("store")
    }

    /// Where the socket is.
    pub fn runtime(&self) -> PathBuf {
        self.runtime.path().join("run")
    }

    /// A file or directory of the test's own, on the disk of the store.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.store.path().join(name)
    }

    /// While this is on, programs of this system find the device full when they write chunks.
    ///
    /// # Panics
    /// If that cannot be changed.
    pub fn device_full(&self, full: bool) {
        let file = self.fault_file();
        let changed = if full {
            let temp = file.with_extension("new");
            std::fs::write(&temp, "write").and_then(|()| std::fs::rename(&temp, &file))
        } else {
            std::fs::remove_file(&file)
        };
        changed.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    }

    /// The file by which writes are told to fail.
    fn fault_file(&self) -> PathBuf {
        self.runtime.path().join("fault")
    }

    /// The file by which a process is told where to die.
    fn crash_file(&self) -> PathBuf {
        self.runtime.path().join("crash")
    }

    /// Makes a program of this system die at its next pass of a step.
    ///
    /// # Panics
    /// If that cannot be written.
    pub fn crash_at(&self, program: &str, step: CrashPoint) {
        self.ask_for(&format!("{program} {}", step.name()));
    }

    /// Makes a program of this system panic at its next pass of a step.
    ///
    /// # Panics
    /// If that cannot be written.
    pub fn panic_at(&self, program: &str, step: CrashPoint) {
        self.ask_for(&format!("{program} {} panic", step.name()));
    }

    fn ask_for(&self, what: &str) {
        let file = self.crash_file();
        let temp = file.with_extension("new");
        std::fs::write(&temp, what).and_then(|()| std::fs::rename(&temp, &file)).expect("armed");
    }

    /// Whether the step has been passed, and the process has died.
    pub fn has_crashed(&self) -> bool {
        !self.crash_file().exists()
    }

    /// The socket clients connect to.
    pub fn socket(&self) -> PathBuf {
        self.runtime().join("matkv.sock")
    }

    /// `--set` values for these directories.
    pub(crate) fn settings(&self, more: &[&str]) -> Vec<String> {
        let mut all = vec![
            format!("paths.store_dir={}", self.store().display()),
            format!("paths.runtime_dir={}", self.runtime().display()),
            format!("paths.cache_dir={}", cache_dir().display()),
        ];
        all.extend(SETTINGS.iter().chain(more).map(|s| (*s).to_owned()));
        all
    }

    /// Starts `matkv up` with these directories.
    pub fn up(&self, settings: &[&str]) -> Running {
        let mut command = process::matkv(&self.settings(settings));
        command.arg("up").env("MATKV_CRASH_FILE", self.crash_file());
        command.env("MATKV_FAULT_FILE", self.fault_file());
        Running::start(command)
    }

    /// Runs `matkv` to its end with these directories.
    pub fn matkv(&self, settings: &[&str], arguments: &[&str]) -> Output {
        run_with_input(self.command(settings, arguments), b"")
    }

    /// Starts `matkv` with these directories.
    pub fn start(&self, settings: &[&str], arguments: &[&str]) -> Running {
        Running::start(self.command(settings, arguments))
    }

    fn command(&self, settings: &[&str], arguments: &[&str]) -> Command {
        let mut command = process::matkv(&self.settings(settings));
        command.args(arguments);
        command
    }
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

/// A running system.
pub struct Server {
    home: Option<Home>,
    settings: Vec<String>,
    up: Running,
    client: Client,
    known: Vec<u32>,
    segment: PathBuf,
    /// The test makes threads panic.
    panics: bool,
}

impl Server {
    /// Starts in new directories; nothing if the models have not been fetched.
    pub async fn start(settings: &[&str]) -> Option<Self> {
        Home::models()?;
        Some(Self::start_in(Home::new(), settings).await)
    }

    /// Starts in the directories of an earlier one.
    ///
    /// # Panics
    /// If it is not ready in time.
    pub async fn start_in(home: Home, settings: &[&str]) -> Self {
        let mut up = home.up(settings);
        let settings = home.settings(settings);
        let client = until("`matkv up` says ready", async || {
            if let Some(ended) = up.ended() {
                panic!("matkv up ended: {ended:?}");
            }
            let ready = up.out().contains("ready on ");
            if ready { matkv_api::connect(&home.socket()).await.ok() } else { None }
        })
        .await;
        let (known, segment) = (Vec::new(), PathBuf::new());
        let home = Some(home);
        let mut server = Self { home, settings, up, client, known, segment, panics: false };
        server.note_processes().await;
        server
    }

    async fn note_processes(&mut self) {
        let status = self.status().await;
        self.known.extend([status.loader_pid, status.decoder_pid]);
        let found = process::segments(status.loader_pid);
        let [segment] = found.as_slice() else { panic!("one segment, found {found:?}") };
        self.segment.clone_from(segment);
    }

    /// Panics are part of the test.
    pub fn expect_panics(&mut self) {
        self.panics = true;
    }

    /// The directories.
    pub fn home(&self) -> &Home {
        self.home.as_ref().expect("taken only at the end")
    }

    /// A client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Process id of `matkv up`.
    pub fn up_pid(&self) -> u32 {
        self.up.pid()
    }

    /// The shared-memory file of the running loader.
    pub fn segment(&self) -> &Path {
        &self.segment
    }

    /// What has been logged so far.
    pub fn log(&self) -> String {
        self.up.err()
    }

    /// The server's status.
    ///
    /// # Panics
    /// If there is none.
    pub async fn status(&self) -> GetStatusResponse {
        let status = self.client.clone().get_status(matkv_api::v1::GetStatusRequest {}).await;
        status.expect("a status").into_inner()
    }

    /// Waits until another decoder, or another pair, serves instead of the one of `before`.
    pub async fn restarted(&mut self, before: &GetStatusResponse) -> GetStatusResponse {
        let socket = self.home().socket();
        let same_loader = is_alive(before.loader_pid);
        let (client, status) = until("the service is back", async || {
            let mut client = matkv_api::connect(&socket).await.ok()?;
            let status = client.get_status(matkv_api::v1::GetStatusRequest {}).await.ok()?;
            let status = status.into_inner();
            let new = status.decoder_pid != before.decoder_pid
                && (same_loader || status.loader_pid != before.loader_pid);
            (new && status.state == "ready").then_some((client, status))
        })
        .await;
        self.client = client;
        self.note_processes().await;
        status
    }

    /// Waits until requests hold nothing.
    pub async fn at_rest(&self) -> GetStatusResponse {
        at_rest(&self.client).await
    }

    /// An answer.
    ///
    /// # Errors
    /// The server's refusal.
    pub async fn try_ask(&self, request: GenerateRequest) -> Result<Reply, Status> {
        ask(&self.client, request).await
    }

    /// An answer.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn ask(&self, request: GenerateRequest) -> Reply {
        let asked = request.clone();
        self.try_ask(request).await.unwrap_or_else(|e| panic!("{asked:?}: {e}"))
    }

    /// Ingests documents, each a name and a text.
    pub async fn ingest(&self, documents: &[(&str, &str)]) -> Ingested {
        let ingest = Ingest::start(&self.client).await;
        for (id, text) in documents {
            ingest.document(id, text).await;
        }
        ingest.finish().await
    }

    /// Documents by name.
    ///
    /// # Panics
    /// If they cannot be listed.
    pub async fn documents(&self) -> Vec<Document> {
        let list = self.client.clone().list_documents(matkv_api::v1::ListDocumentsRequest {}).await;
        list.expect("a list").into_inner().documents
    }

    /// One document.
    ///
    /// # Panics
    /// If it is not there.
    pub async fn document(&self, id: &str) -> Document {
        let found = self.documents().await.into_iter().find(|d| d.document_id == id);
        found.unwrap_or_else(|| panic!("no document {id}"))
    }

    /// Runs `matkv` with this server's settings.
    pub fn matkv(&self, arguments: &[&str]) -> Output {
        self.matkv_with_input(arguments, b"")
    }

    /// The same, with something on standard input.
    pub fn matkv_with_input(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut command = process::matkv(&self.settings);
        command.args(arguments);
        run_with_input(command, input)
    }

    /// Waits until nothing is held, stops in order, and looks for anything left behind.
    pub async fn stop(self) -> Home {
        self.at_rest().await;
        let up = self.up.pid();
        self.end(|_| signal("TERM", &[up])).await
    }

    /// Ends the system by `how` and looks for anything left behind.
    ///
    /// # Panics
    /// If something is, or a thread has panicked.
    pub async fn end(mut self, how: impl FnOnce(&Self)) -> Home {
        how(&self);
        let ended = until("`matkv up` ends", async || self.up.ended()).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        self.all_gone().await;
        assert!(!self.home().socket().exists(), "the socket is left");
        assert!(!self.segment.exists(), "{} is left", self.segment.display());
        assert!(self.panics || !self.log().contains("panicked"), "{}", self.log());
        self.home.take().expect("taken only here")
    }

    /// Waits until every process that was ever seen is dead.
    pub async fn all_gone(&self) {
        until("all processes are gone", async || {
            self.known.iter().all(|pid| !is_alive(*pid)).then_some(())
        })
        .await;
    }
}

impl Drop for Server {
    /// A test that failed leaves nothing running.
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- matkv up ---\n{}---", self.up.said());
        }
        self.up.kill();
        let patience = std::time::Instant::now() + Duration::from_secs(10);
        while self.known.iter().any(|pid| is_alive(*pid)) && std::time::Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(10));
        }
        let left: Vec<u32> = self.known.iter().copied().filter(|pid| is_alive(*pid)).collect();
        if !left.is_empty() {
            signal("KILL", &left);
            let _ = std::fs::remove_file(&self.segment);
        }
    }
}
