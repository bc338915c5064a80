//! Many requests at once, with and without overlap of loads, prefills and decoding.
//!
//! Without it, groups of as many requests as are decoded together go through each stage in turn;
//! with it, the decoder's batches are formed by the same rule. Every request loads its own chunks,
//! in both: nothing that one has loaded is there for another.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use matkv_api::Client;
use matkv_api::v1::{GenerateRequest, GetStatusRequest};

use super::Bench;
use super::model::CHUNK;
use super::workload::{Corpus, pieces, ticks};
use crate::ask::{Answer, generate};
use crate::bench::ingest_all;
use crate::figures::Figure;
use crate::pair::with_private;

/// Requests that `pipeline.queue` takes at most; all of a run are there from its beginning.
const QUEUE: usize = 64;
/// Tokens of each answer.
const ANSWER: u32 = 20;
/// Chunks of a request.
const CHUNKS: usize = 4;
/// Requests decoded together.
const BATCH: usize = 8;
/// Chunks in the store: those of two groups of requests.
const STORED: usize = 2 * BATCH * CHUNKS;
/// A slot in the arena over what it is for, at most.
const SLOT_WASTE: f64 = 1.125;
/// Memory for what requests compute themselves.
const OWN_BYTES: f64 = 128e6;
/// Of processor time in a second: Linux's unit for programs.
const TICKS: f64 = 100.0;
/// A run takes a minute or so.
const ROUNDS_MAX: usize = 3;

/// How requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serving {
    /// With overlap.
    On,
    /// Without.
    Off,
    /// Without, and every chunk is in memory: what is left is computing.
    Warm,
}

/// One run: seconds, those of both processes' threads, and what each request said.
struct Run {
    seconds: f64,
    processor: f64,
    answers: Vec<Answer>,
}

impl Run {
    /// Chunks that came from flash, of all.
    fn from_flash(&self) -> f64 {
        let chunks = || self.answers.iter().flat_map(|a| &a.started.chunks);
        chunks().filter(|c| c.source == "flash").count() as f64 / chunks().count() as f64
    }
}

/// Asks about four documents of a chunk each; the next one about the next four.
fn request(i: usize, documents: &[String]) -> GenerateRequest {
    let first = i * CHUNKS % documents.len();
    GenerateRequest {
        question: "What do the documents say about people, places and years?".into(),
        document_ids: documents[first..first + CHUNKS].to_vec(),
        mode: "linked(32)".into(),
        max_new_tokens: Some(ANSWER),
        ..GenerateRequest::default()
    }
}

/// Seconds that threads of both processes have run so far.
async fn processor(client: &Client) -> anyhow::Result<f64> {
    let status = client.clone().get_status(GetStatusRequest {}).await?.into_inner();
    Ok((ticks(status.loader_pid) + ticks(status.decoder_pid)) as f64 / TICKS)
}

async fn all(client: &Client, count: usize, documents: &[String]) -> anyhow::Result<Run> {
    let before = processor(client).await?;
    let started = Instant::now();
    let asked: Vec<_> = (0..count)
        .map(|i| tokio::spawn(generate(client.clone(), request(i, documents), |_| Ok(()))))
        .collect();
    let mut answers = Vec::new();
    for answer in asked {
        answers.push(answer.await.context("a request panicked")??);
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Run { seconds, processor: processor(client).await? - before, answers })
}

/// A store, and the documents in it.
struct Place<'a> {
    store: &'a Path,
    documents: Vec<String>,
    /// Bytes of a chunk's file.
    chunk: f64,
    /// Bytes a second the device is slowed to; 0 for as it is.
    rate: u64,
}

impl Bench<'_> {
    pub async fn overlap(&mut self) -> anyhow::Result<()> {
        let requests = self.options.requests;
        ensure!((1..=QUEUE).contains(&requests), "--requests must be 1 to {QUEUE}");
        let store = self.scratch()?;
        let mut corpus = Corpus::new(pieces(self.speed()?, &self.options.corpus, CHUNK, STORED)?)?;
        let documents = corpus.next(STORED)?;
        self.progress(format_args!("ingest of {STORED} chunks"))?;
        let quiet = [("log.level", "error".to_owned())];
        let ingest = async |client, _: &_| ingest_all(&client, &documents, None).await;
        with_private(self.resolved, store.path(), &quiet, ingest).await?;
        let chunk = chunk_bytes(store.path())?;
        let mut place = Place { store: store.path(), documents, chunk, rate: 0 };
        let wanted = |what: &str| {
            self.wants(&format!("{what}_on_over_off")) || self.wants(&format!("{what}_over_bound"))
        };
        let (as_it_is, throttled) = (wanted("overlap"), wanted("overlap_throttled"));
        let mut computing = None;
        if as_it_is {
            computing = Some(self.compare("overlap", &place).await?);
        }
        if throttled {
            // As long for the device as for everything else: half of the time is waiting.
            let computing = match computing {
                Some(computing) => computing,
                None => self.run(&place, Serving::Warm).await?.seconds,
            };
            let bytes = chunk * (CHUNKS * requests) as f64;
            place.rate = (bytes / computing) as u64;
            self.compare("overlap_throttled", &place).await?;
        }
        Ok(())
    }

    /// Time of the requests with overlap over without, alternated, each first in turn. Returns
    /// what they take without loads.
    async fn compare(&mut self, what: &str, place: &Place<'_>) -> anyhow::Result<f64> {
        let requests = self.options.requests;
        let (mut off, mut on, mut warm) = (Vec::new(), Vec::new(), Vec::new());
        let (mut shares, mut over) = (Vec::new(), Vec::new());
        for round in 0..self.options.rounds.min(ROUNDS_MAX) {
            let mut order = [Serving::Off, Serving::On];
            order.rotate_left(round % 2);
            for serving in order.into_iter().chain([Serving::Warm]) {
                self.progress(format_args!("round {}: overlap {serving:?}", round + 1))?;
                let run = self.run(place, serving).await?;
                let loaded = run.from_flash();
                let expected = f64::from(u8::from(serving != Serving::Warm));
                ensure!(loaded == expected, "{serving:?}: {loaded} of the chunks were loaded");
                match serving {
                    Serving::Off => off.push(run.seconds),
                    Serving::On => on.push(run),
                    Serving::Warm => warm.push(run.seconds),
                }
            }
            let (off, on, warm) = (off[round], &on[round], warm[round]);
            shares.push(1.0 - warm / off);
            let cores = std::thread::available_parallelism()?.get() as f64;
            over.push(on.seconds / (off - warm).max(on.processor / cores));
        }
        let rate = |seconds: &f64| requests as f64 / seconds;
        let rates: [Vec<f64>; 2] =
            [on.iter().map(|r| rate(&r.seconds)).collect(), off.iter().map(rate).collect()];
        for (rates, state) in rates.iter().zip(["on", "off"]) {
            let name = format!("{what}_requests_per_s[{state}]");
            self.figures.push(Figure::median(name, rates, "requests/s"));
        }
        let share = Figure::median(format!("{what}_load_share[off]"), &shares, "share");
        let device = match place.rate {
            0 => "as it is".to_owned(),
            rate => format!("at {:.0} MB/s", rate as f64 / 1e6),
        };
        self.notes.push(format!(
            "{what}: {requests} requests of {ANSWER} tokens over four chunks of their own, the \
             device {device}; off is groups of {BATCH}, each retrieved, loaded, prefilled and \
             decoded in turn, {:.0} % of the time waiting for chunks",
            share.value * 100.0
        ));
        self.figures.push(share);
        self.figures.push(Figure::median(format!("{what}_over_bound"), &over, "ratio"));
        let on: Vec<f64> = on.iter().map(|r| r.seconds).collect();
        self.ratio(&format!("{what}_on_over_off"), &on, &off);
        Ok(crate::demo::median(warm))
    }

    /// All requests, served by a pair of their own, which has served one before.
    async fn run(&self, place: &Place<'_>, serving: Serving) -> anyhow::Result<Run> {
        let Place { store, documents, chunk, rate } = place;
        // Memory for the chunks of a group and a half, which what comes next has pushed out before
        // it is wanted again; or for all of them.
        let (chunks, rate) = match serving {
            Serving::Warm => (STORED, 0),
            _ => (3 * STORED / 4, *rate),
        };
        let arena = chunk * SLOT_WASTE * chunks as f64 + OWN_BYTES;
        let settings = [
            ("log.level", "error".to_owned()),
            ("pipeline.overlap", (serving == Serving::On).to_string()),
            ("pipeline.queue", QUEUE.to_string()),
            ("pipeline.batch_size", BATCH.to_string()),
            ("prefetch.enabled", "false".to_owned()),
            ("arena.size", (arena as u64).next_multiple_of(4096).to_string()),
            ("arena.policy", "lru".to_owned()),
            ("io.throttle", rate.to_string()),
        ];
        with_private(self.resolved, store, &settings, async |client, _| {
            // All chunks once, so that those of the first requests are the ones used longest ago;
            // or so that all are there.
            all(&client, STORED / CHUNKS, documents).await?;
            all(&client, self.options.requests, documents).await
        })
        .await
    }
}

/// Bytes of a chunk's file: all chunks here have the same size.
fn chunk_bytes(store: &Path) -> anyhow::Result<f64> {
    let files = walkdir::WalkDir::new(store).into_iter().flatten();
    let mut chunks = files.filter(|f| f.path().extension().is_some_and(|e| e == "kv"));
    let largest = chunks.by_ref().filter_map(|f| f.metadata().ok()).map(|m| m.len()).max();
    Ok(largest.context("no chunk file in the store")? as f64)
}
