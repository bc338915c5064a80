//! Everything at once, for as long as `MATKV_SOAK_SECONDS` says: documents come and go, questions
//! are asked, the device is small and now and then full, bits flip, processes are killed. What was
//! acknowledged stays, every answer is the first one again, and nothing is left behind.

#[path = "storage/common.rs"]
#[expect(dead_code, reason = "shared with the tests of one thing at a time, which use all of it")]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{
    about, assert_same, files_below, json, nothing_incoming, physical, start, url, with_json,
};
use matkv_api::Client;
use matkv_api::v1::ingest_event::Event;
use matkv_api::v1::{DeleteDocumentRequest, GetStatusRequest};
use matkv_tests::{DEADLINE, Ingest, Reply, Server, ask, chunk_files, signal, text, until};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

/// As many documents as are kept; some of their chunks fit on flash.
const DOCUMENTS_MAX: usize = 24;
const DOCUMENTS_MIN: usize = 6;

/// Seven chunks.
const CAPACITY: u64 = 6 << 20;
const SETTINGS: [&str; 7] = [
    "arena.size=32MiB",
    "storage.capacity=6MiB",
    "storage.reserve=0",
    "storage.high_watermark=0.7",
    "storage.low_watermark=0.5",
    "cold.capacity=32MiB",
    "log.level=error",
];

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// What must be there, and what nobody was told about; anything else must not be there.
#[derive(Default)]
struct Books {
    /// Acknowledged documents and their first answers.
    known: BTreeMap<String, Option<Reply>>,
    unsure: BTreeSet<String>,
    /// Chunks of answers, by where they came from.
    sources: BTreeMap<String, u64>,
}

impl Books {
    /// A document is about to be deleted.
    fn give_up(&mut self, name: &str) {
        self.known.remove(name);
        self.unsure.insert(name.to_owned());
    }
}

#[derive(Debug, Default)]
struct Counts {
    ingested: AtomicU64,
    asked: AtomicU64,
    deleted: AtomicU64,
    killed: AtomicU64,
    flipped: AtomicU64,
    /// Documents refused because the device, or its share, was full.
    full: AtomicU64,
    /// Requests a kill has taken along, or that came while nobody served.
    away: AtomicU64,
}

fn count(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::SeqCst)
}

struct Soak {
    socket: PathBuf,
    store: PathBuf,
    cold: PathBuf,
    stop: AtomicBool,
    books: Mutex<Books>,
    counts: Counts,
}

impl Soak {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }

    async fn client(&self) -> Result<Client, Status> {
        let connected = matkv_api::connect(&self.socket).await;
        connected.map_err(|_| Status::unavailable("no connection"))
    }

    /// A request that failed because a process was killed; anything else is a failure of the test.
    async fn was_away(&self, status: &Status) {
        let known = [Code::Unavailable, Code::Unknown, Code::Cancelled];
        assert!(known.contains(&status.code()), "{status:?}");
        count(&self.counts.away);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    /// Ingests new documents, one after another.
    async fn ingest(&self, worker: u64) {
        for n in 0.. {
            while self.goes_on() && self.books().known.len() >= DOCUMENTS_MAX {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            if !self.goes_on() {
                return;
            }
            let name = format!("log-{worker}-{n}");
            // One chunk, or three.
            let words = if n % 4 == 3 { 130 } else { 44 };
            let content = text(worker * 1_000_000 + n, words);
            self.books().unsure.insert(name.clone());
            match self.ingest_one(&name, &content).await {
                Ok(error) if error.is_empty() => {
                    let mut books = self.books();
                    books.unsure.remove(&name);
                    books.known.insert(name, None);
                    count(&self.counts.ingested);
                }
                Ok(error) => {
                    let full = ["no room on the device", "flash is full"];
                    let stopping = error.contains("stopping") || error.contains("decoder");
                    let typed = full.iter().any(|f| error.contains(f));
                    assert!(typed || stopping, "{name}: {error}");
                    // It has been refused, so it is not there.
                    self.books().unsure.remove(&name);
                    count(if typed { &self.counts.full } else { &self.counts.away });
                }
                Err(status) => self.was_away(&status).await,
            }
        }
    }

    /// Why the document was refused; empty if it is durable.
    async fn ingest_one(&self, name: &str, content: &str) -> Result<String, Status> {
        let mut ingest = Ingest::try_start(&self.client().await?).await?;
        ingest.document(name, content).await;
        loop {
            match ingest.next().await? {
                Some(Event::Document(done)) => return Ok(done.error),
                Some(Event::Progress(_)) => {}
                Some(Event::Summary(_)) | None => {
                    return Err(Status::unavailable("it ended early"));
                }
            }
        }
    }

    fn some_document(&self, dice: &mut Dice) -> Option<String> {
        let books = self.books();
        let n = books.known.len();
        (n > 0).then(|| books.known.keys().nth(dice.below(n)).cloned()).flatten()
    }

    /// Asks about documents; every answer must be the document's first.
    async fn ask(&self, worker: u64) {
        let mut dice = Dice(worker);
        while self.goes_on() {
            let Some(name) = self.some_document(&mut dice) else {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            let request = about(&name, dice.below(3) > 0);
            let reply = match self.client().await {
                Ok(client) => ask(&client, request).await,
                Err(e) => Err(e),
            };
            match reply {
                Ok(reply) => self.compare(&name, reply),
                // Deleted meanwhile?
                Err(e) if e.code() == Code::NotFound && !self.books().known.contains_key(&name) => {
                }
                Err(status) => self.was_away(&status).await,
            }
        }
    }

    fn compare(&self, name: &str, reply: Reply) {
        assert!(!reply.chunks.is_empty() && !reply.tokens.is_empty(), "{name}: {reply:?}");
        let mut books = self.books();
        for source in reply.sources() {
            *books.sources.entry(source.to_owned()).or_default() += 1;
        }
        if let Some(first) = books.known.get_mut(name) {
            match first {
                Some(first) => assert_same(name, first, &reply),
                None => *first = Some(reply),
            }
        }
        count(&self.counts.asked);
    }

    async fn delete(&self) {
        let mut dice = Dice(77);
        while self.goes_on() {
            tokio::time::sleep(Duration::from_millis(900)).await;
            if self.books().known.len() <= DOCUMENTS_MIN {
                continue;
            }
            let Some(name) = self.some_document(&mut dice) else { continue };
            self.books().give_up(&name);
            let request = DeleteDocumentRequest { document_id: name.clone() };
            let deleted = match self.client().await {
                Ok(mut client) => client.delete_document(request).await,
                Err(e) => Err(e),
            };
            match deleted {
                Ok(response) => {
                    assert!(response.into_inner().found, "{name} was acknowledged, and is gone");
                    self.books().unsure.remove(&name);
                    count(&self.counts.deleted);
                }
                Err(status) => self.was_away(&status).await,
            }
        }
    }

    /// Flips a bit in a file of either tier.
    async fn flip(&self) {
        let mut dice = Dice(5);
        while self.goes_on() {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let mut files: Vec<PathBuf> = files_below(&self.store);
            files.retain(|p| p.extension().is_some_and(|e| e == "kv"));
            files.retain(|p| p.components().any(|c| c.as_os_str() == "chunks"));
            if dice.below(3) == 0 {
                files = files_below(&self.cold);
            }
            if !files.is_empty() && flip_in_place(&files[dice.below(files.len())], &mut dice) {
                count(&self.counts.flipped);
            }
        }
    }

    /// What must hold at every moment.
    async fn watch(&self) {
        while self.goes_on() {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let found = physical(&self.store, CAPACITY);
            assert!(found <= CAPACITY, "{found} bytes are on the device");
            let Ok(mut client) = self.client().await else { continue };
            let Ok(status) = client.get_status(GetStatusRequest {}).await else { continue };
            let s = status.into_inner();
            assert_eq!(s.flash_capacity, CAPACITY);
            assert!(s.flash_used_bytes <= s.flash_capacity, "{} bytes", s.flash_used_bytes);
        }
    }

    /// Whether everything has happened that this is about.
    fn has_done_everything(&self) -> bool {
        let c = &self.counts;
        let done = [&c.ingested, &c.asked, &c.deleted, &c.killed, &c.flipped, &c.full];
        let seen = ["flash", "cold", "computed", "arena"];
        done.iter().all(|n| n.load(Ordering::SeqCst) > 0)
            && seen.iter().all(|source| self.books().sources.contains_key(*source))
    }
}

/// The file may be gone by then.
fn flip_in_place(path: &Path, dice: &mut Dice) -> bool {
    let Ok(file) = std::fs::File::options().read(true).write(true).open(path) else { return false };
    let len = file.metadata().map_or(0, |m| m.len()) as usize;
    if len == 0 {
        return false;
    }
    let at = dice.below(len) as u64;
    let mut byte = [0];
    let read = file.read_exact_at(&mut byte, at).is_ok();
    byte[0] ^= 1 << dice.below(8);
    read && file.write_all_at(&byte, at).is_ok()
}

/// Switches the device between full and not: full until a document has been refused.
struct Device {
    full: bool,
    /// Refusals before it was full.
    refused: u64,
    next: Instant,
}

impl Device {
    fn step(&mut self, server: &Server, soak: &Soak) {
        let refused = soak.counts.full.load(Ordering::SeqCst);
        if self.full && refused > self.refused {
            self.set(server, false);
        } else if !self.full && Instant::now() >= self.next {
            self.refused = refused;
            self.set(server, true);
        }
    }

    fn set(&mut self, server: &Server, full: bool) {
        if self.full != full {
            server.home().device_full(full);
            self.full = full;
            self.next = Instant::now() + Duration::from_secs(5);
        }
    }
}

/// Until the time is over, or a worker has failed: kills one process after another, each time the
/// service must come back; and makes the device full.
async fn disturb(server: &mut Server, soak: &Soak, seconds: u64, workers: &[JoinHandle<()>]) {
    let end = Instant::now() + Duration::from_secs(seconds);
    let between = Duration::from_secs((seconds / 4).clamp(2, 60));
    let mut names = BTreeSet::from([server.segment().to_owned()]);
    let memory = shared_memory(&names);
    let mut next = Instant::now() + between;
    let mut device = Device { full: false, refused: 0, next: Instant::now() };
    // On a machine that is busy with other things, a little longer.
    let more = || !soak.has_done_everything() && Instant::now() < end + DEADLINE;
    while (Instant::now() < end || more()) && !workers.iter().any(JoinHandle::is_finished) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        device.step(server, soak);
        if Instant::now() < next {
            continue;
        }
        let before = server.status().await;
        let loader = count(&soak.counts.killed).is_multiple_of(2);
        signal("KILL", &[if loader { before.loader_pid } else { before.decoder_pid }]);
        server.restarted(&before).await;
        names.insert(server.segment().to_owned());
        assert_eq!(shared_memory(&names), memory, "/dev/shm has grown");
        next = Instant::now() + between;
    }
    device.set(server, false);
}

/// Bytes of this server's segments in /dev/shm, under whatever names.
fn shared_memory(names: &BTreeSet<PathBuf>) -> u64 {
    names.iter().map(|p| std::fs::metadata(p).map_or(0, |m| m.blocks() * 512)).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_at_once() {
    let seconds = number("MATKV_SOAK_SECONDS", 120);
    let Some(mut server) = start(&SETTINGS, |home| vec![url(home)]).await else { return };
    let soak = Arc::new(Soak {
        socket: server.home().socket(),
        store: server.home().store(),
        cold: server.home().beside("cold"),
        stop: AtomicBool::new(false),
        books: Mutex::default(),
        counts: Counts::default(),
    });
    run(&mut server, &soak, seconds).await;
    settled(&server, &soak).await;
    println!("{seconds} s: {:?}, chunks from {:?}", soak.counts, soak.books().sources);
    assert!(soak.has_done_everything(), "something was not done");
    // Once more, from what is on the devices.
    let home = server.stop().await;
    let cold = url(&home);
    let settings: Vec<&str> = [common::SMALL, cold.as_str()].into_iter().chain(SETTINGS).collect();
    json(&|a: &[&str]| home.matkv(&settings, a), &["chunks", "gc", "--quarantine"]);
    let server = Server::start_in(home, &settings).await;
    all_there(&server, &soak).await;
    server.stop().await;
}

/// All workers until the time is over.
async fn run(server: &mut Server, soak: &Arc<Soak>, seconds: u64) {
    let share = || Arc::clone(soak);
    let mut workers = Vec::new();
    for n in 1..=2 {
        let soak = share();
        workers.push(tokio::spawn(async move { soak.ingest(n).await }));
    }
    for n in 1..=3 {
        let soak = share();
        workers.push(tokio::spawn(async move { soak.ask(n).await }));
    }
    let (deleting, flipping, watching) = (share(), share(), share());
    workers.push(tokio::spawn(async move { deleting.delete().await }));
    workers.push(tokio::spawn(async move { flipping.flip().await }));
    workers.push(tokio::spawn(async move { watching.watch().await }));
    disturb(server, soak, seconds, &workers).await;
    soak.stop.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.expect("a worker found nothing wrong");
    }
}

/// Everything that must be true once nobody asks for anything.
async fn settled(server: &Server, soak: &Soak) {
    assert_eq!(server.at_rest().await.held_slots, 0);
    all_there(server, soak).await;
    let run = |a: &[&str]| server.matkv(a);
    // What is bad is found and set aside, or healed; then there is nothing bad.
    let (code, found) = with_json(&run, &["chunks", "verify"]);
    let bad = found.as_array().map_or(0, |c| c.iter().filter(|c| c["error"] != "").count());
    println!("{bad} bad copies found at the end");
    assert_eq!(code, Some(i32::from(bad > 0)), "{found}");
    until("no bad copy is left", async || {
        let (code, found) = with_json(&run, &["chunks", "verify"]);
        (code == Some(0) && found.as_array().is_some_and(|c| !c.is_empty())).then_some(())
    })
    .await;
    all_there(server, soak).await;
    server.at_rest().await;
    nothing_incoming(&soak.store);
    // What a killed writer has left goes with the keeper's next sweep.
    until("the cold tier holds whole objects only", async || {
        let whole = |p: &PathBuf| p.extension().is_some_and(|e| e == "kv");
        files_below(&soak.cold).iter().all(whole).then_some(())
    })
    .await;
    // Any file is either named or waits to be removed.
    json(&run, &["chunks", "gc"]);
    until("the index names exactly the files", async || {
        let listed = json(&run, &["chunks", "ls", "--tier", "flash"]);
        let id = |c: &serde_json::Value| c["chunk_id"].as_str().map(str::to_owned);
        let listed: BTreeSet<String> = listed.as_array()?.iter().filter_map(id).collect();
        let files: BTreeSet<String> = chunk_files(&soak.store).into_keys().collect();
        (files == listed).then_some(())
    })
    .await;
}

/// Acknowledged documents are listed and answer as they did; deleted ones are gone.
async fn all_there(server: &Server, soak: &Soak) {
    let listed: BTreeSet<String> =
        server.documents().await.into_iter().map(|d| d.document_id).collect();
    let (known, unsure): (Vec<String>, BTreeSet<String>) = {
        let books = soak.books();
        (books.known.keys().cloned().collect(), books.unsure.clone())
    };
    let missing: Vec<&String> = known.iter().filter(|d| !listed.contains(*d)).collect();
    assert!(missing.is_empty(), "acknowledged and gone: {missing:?}");
    let extra: Vec<&String> =
        listed.iter().filter(|d| !known.contains(*d) && !unsure.contains(*d)).collect();
    assert!(extra.is_empty(), "deleted or refused, and there: {extra:?}");
    for name in listed {
        let reply = server.ask(about(&name, true)).await;
        soak.compare(&name, reply);
    }
}
