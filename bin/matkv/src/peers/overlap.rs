//! Many requests at once, with and without overlap of loads, prefills and decoding.
//!
//! Without it, groups of as many requests as are decoded together go through each stage in turn;
//! with it, the decoder's batches are formed by the same rule. Every request loads its own chunks,
//! in both: nothing that one has loaded is there for another.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use matkv_api::Client;
use matkv_api::v1::{GenerateRequest, GetStatusRequest};

use super::Bench;
use super::model::CHUNK;
use super::workload::{Corpus, pieces, ticks};
use crate::ask::generate;
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
const OWN_BYTES: f64 = 64e6;
/// How long requests come one after the other.
const APART: Duration = Duration::from_millis(1);
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

/// One run: seconds, and those of both processes' threads.
struct Run {
    seconds: f64,
    processor: f64,
    /// Chunks loaded.
    loads: f64,
}

fn each(runs: &[Run], value: impl Fn(&Run) -> f64) -> Vec<f64> {
    runs.iter().map(value).collect()
}

/// Asks about four documents of a chunk each; the next one about the next four.
fn request(i: usize, documents: &[String], cold: bool) -> GenerateRequest {
    let first = i * CHUNKS % documents.len();
    GenerateRequest {
        question: "What do the documents say about people, places and years?".into(),
        document_ids: documents[first..first + CHUNKS].to_vec(),
        mode: "linked(32)".into(),
        max_new_tokens: Some(ANSWER),
        cold,
        ..GenerateRequest::default()
    }
}

/// Seconds that threads of both processes have run so far, and chunks that have been loaded.
async fn spent(client: &Client) -> anyhow::Result<(f64, f64)> {
    let status = client.clone().get_status(GetStatusRequest {}).await?.into_inner();
    let loads = status.metrics.lines().filter(|l| l.starts_with("matkv_chunk_loads_total"));
    let loads = loads.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    Ok(((ticks(status.loader_pid) + ticks(status.decoder_pid)) as f64 / TICKS, loads))
}

async fn all(
    client: &Client,
    count: usize,
    documents: &[String],
    cold: bool,
) -> anyhow::Result<Run> {
    let before = spent(client).await?;
    let started = Instant::now();
    let ask = async |i: usize| {
        // They come in their order: the same chunks are never wanted by two at once.
        tokio::time::sleep(APART * i as u32).await;
        generate(client.clone(), request(i, documents, cold), |_| Ok(())).await
    };
    futures_util::future::try_join_all((0..count).map(ask)).await?;
    let seconds = started.elapsed().as_secs_f64();
    let after = spent(client).await?;
    Ok(Run { seconds, processor: after.0 - before.0, loads: after.1 - before.1 })
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
        with_private(self.resolved, store.path(), &quiet, &self.stop, ingest).await?;
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
        let (mut off, mut on, mut warm) = (Vec::<Run>::new(), Vec::new(), Vec::new());
        let (mut shares, mut over) = (Vec::new(), Vec::new());
        for round in 0..self.options.rounds.min(ROUNDS_MAX) {
            let mut order = [Serving::Off, Serving::On];
            order.rotate_left(round % 2);
            for serving in order.into_iter().chain([Serving::Warm]) {
                self.progress(format_args!("round {}: overlap {serving:?}", round + 1))?;
                let run = self.run(place, serving).await?;
                let expected = if serving == Serving::Warm { 0 } else { CHUNKS * requests };
                let loads = run.loads;
                ensure!(loads == expected as f64, "{serving:?}: {loads} loads, not {expected}");
                match serving {
                    Serving::Off => off.push(run),
                    Serving::On => on.push(run),
                    Serving::Warm => warm.push(run),
                }
            }
            let (off, on, warm) = (off[round].seconds, &on[round], warm[round].seconds);
            shares.push(1.0 - warm / off);
            let cores = std::thread::available_parallelism()?.get() as f64;
            over.push(on.seconds / (off - warm).max(on.processor / cores));
        }
        for (runs, state) in [(&on, "on"), (&off, "off"), (&warm, "off, no loads")] {
            let rates = each(runs, |r| requests as f64 / r.seconds);
            let name = format!("{what}_requests_per_s[{state}]");
            self.figures.push(Figure::median(name, &rates, "requests/s"));
            let name = format!("{what}_processor_s[{state}]");
            self.figures.push(Figure::median(name, &each(runs, |r| r.processor), "s"));
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
        let [on, off, warm] = [on, off, warm].map(|runs| each(&runs, |r| r.seconds));
        self.ratio(&format!("{what}_on_over_off"), &on, &off);
        Ok(crate::demo::median(warm))
    }

    /// All requests, served by a pair of their own, which has served some before.
    async fn run(&self, place: &Place<'_>, serving: Serving) -> anyhow::Result<Run> {
        let Place { store, documents, chunk, rate } = place;
        let warm = serving == Serving::Warm;
        // Room for all chunks, or for those of fewer requests than lie between two for the same.
        let (chunks, rate) = if warm { (STORED, 0) } else { (5 * STORED / 8, *rate) };
        let arena = chunk * SLOT_WASTE * chunks as f64 + OWN_BYTES;
        let settings = [
            ("log.level", "error".to_owned()),
            ("pipeline.overlap", (serving == Serving::On).to_string()),
            ("pipeline.queue", QUEUE.to_string()),
            ("pipeline.batch_size", BATCH.to_string()),
            ("prefetch.enabled", "false".to_owned()),
            ("arena.size", (arena as u64).next_multiple_of(4096).to_string()),
            ("io.throttle", rate.to_string()),
            // Many loads at once wait for one slow device.
            ("io.deadline", "10min".to_owned()),
        ];
        with_private(self.resolved, store, &settings, &self.stop, async |client, _| {
            // All chunks are there, unless a request wants them from flash.
            all(&client, STORED / CHUNKS, documents, !warm).await?;
            all(&client, self.options.requests, documents, !warm).await
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
