//! Many requests at once, with and without preparing the next while others decode.

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
/// Chunks in the store.
const STORED: usize = 16;
/// Chunks of a request.
const CHUNKS: u32 = 4;
/// Requests that say how long one takes without its load.
const PROBES: usize = 6;
/// Of processor time in a second: Linux's unit for programs.
const TICKS: f64 = 100.0;
/// A run takes a minute or so.
const ROUNDS_MAX: usize = 3;

/// One run: seconds, those of both processes' threads, and what each request said.
struct Run {
    seconds: f64,
    processor: f64,
    answers: Vec<Answer>,
}

impl Run {
    /// Seconds of all loads: of requests one after the other, of the device alone.
    fn loads(&self) -> f64 {
        self.answers.iter().map(|a| a.timings.load_ms).sum::<f64>() / 1e3
    }

    /// The share of the time that requests one after the other wait for their chunks.
    fn waiting(&self) -> f64 {
        self.loads() / self.seconds
    }
}

/// Questions that find other chunks.
fn request(i: usize) -> GenerateRequest {
    let about = ["people", "places", "films", "music", "sports", "science", "companies", "wars"];
    GenerateRequest {
        question: format!("What do the documents say about {}?", about[i % about.len()]),
        mode: "linked(32)".into(),
        top_k: Some(CHUNKS),
        max_new_tokens: Some(ANSWER),
        cold: true,
        ..GenerateRequest::default()
    }
}

/// Seconds that threads of both processes have run so far.
async fn processor(client: &Client) -> anyhow::Result<f64> {
    let status = client.clone().get_status(GetStatusRequest {}).await?.into_inner();
    Ok((ticks(status.loader_pid) + ticks(status.decoder_pid)) as f64 / TICKS)
}

async fn all(client: &Client, count: usize) -> anyhow::Result<Run> {
    let before = processor(client).await?;
    let started = Instant::now();
    let asked: Vec<_> = (0..count)
        .map(|i| tokio::spawn(generate(client.clone(), request(i), |_| Ok(()))))
        .collect();
    let mut answers = Vec::new();
    for answer in asked {
        answers.push(answer.await.context("a request panicked")??);
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Run { seconds, processor: processor(client).await? - before, answers })
}

impl Bench<'_> {
    pub async fn overlap(&mut self) -> anyhow::Result<()> {
        let requests = self.options.requests;
        ensure!((1..=QUEUE).contains(&requests), "--requests must be 1 to {QUEUE}");
        let store = self.scratch()?;
        let mut corpus = Corpus::new(pieces(self.speed()?, &self.options.corpus, CHUNK, STORED)?)?;
        let paths = corpus.next(STORED)?;
        self.progress(format_args!("ingest of {STORED} chunks"))?;
        let probe = self.with(store.path(), false, 0, async |client| {
            ingest_all(&client, &paths, None).await?;
            all(&client, PROBES).await
        });
        let probe = probe.await?;
        if self.wants("overlap_on_over_off") {
            self.compare("overlap_on_over_off", store.path(), 0).await?;
        }
        if self.wants("overlap_throttled_on_over_off") {
            // As long for the device as for everything else: half of the time is waiting.
            let computing = probe.seconds * (1.0 - probe.waiting()) / PROBES as f64;
            let bytes = chunk_bytes(store.path())? * f64::from(CHUNKS);
            let rate = (bytes / computing) as u64;
            self.compare("overlap_throttled_on_over_off", store.path(), rate).await?;
        }
        Ok(())
    }

    /// Time of the requests with overlap over without, alternated, each first in turn.
    async fn compare(&mut self, name: &str, store: &Path, rate: u64) -> anyhow::Result<()> {
        let requests = self.options.requests;
        let mut seconds = [Vec::new(), Vec::new()];
        let (mut waiting, mut loads, mut computing) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..self.options.rounds.min(ROUNDS_MAX) {
            for step in 0..2 {
                let on = (round + step) % 2 == 1;
                let state = if on { "on" } else { "off" };
                self.progress(format_args!("round {}: overlap {state}", round + 1))?;
                let run = self
                    .with(store, on, rate, async |client| {
                        all(&client, 1).await?;
                        all(&client, requests).await
                    })
                    .await?;
                seconds[usize::from(on)].push(run.seconds);
                if on {
                    computing
                        .push(run.processor / std::thread::available_parallelism()?.get() as f64);
                } else {
                    waiting.push(run.waiting());
                    loads.push(run.loads());
                }
            }
        }
        let rates = |i: usize| seconds[i].iter().map(|s| requests as f64 / s).collect::<Vec<f64>>();
        let (off, on) = (rates(0), rates(1));
        let what = name.trim_end_matches("_on_over_off");
        self.figures.push(Figure::median(format!("{what}_requests_per_s[on]"), &on, "requests/s"));
        self.figures.push(Figure::median(
            format!("{what}_requests_per_s[off]"),
            &off,
            "requests/s",
        ));
        let share = Figure::median(format!("{what}_load_share[off]"), &waiting, "share");
        let device =
            if rate > 0 { format!("at {:.0} MB/s", rate as f64 / 1e6) } else { "as it is".into() };
        self.notes.push(format!(
            "{name}: {requests} requests of {ANSWER} tokens over four chunks, the device {device}; \
             off is one request at a time, {:.0} % of it waiting for chunks",
            share.value * 100.0
        ));
        self.figures.push(share);
        let bounds = loads.iter().zip(&computing).map(|(device, own)| device.max(*own));
        let over: Vec<f64> = seconds[1].iter().zip(bounds).map(|(s, bound)| s / bound).collect();
        self.figures.push(Figure::median(format!("{what}_over_bound[on]"), &over, "ratio"));
        // Time over time.
        self.ratio(name, &off, &on);
        Ok(())
    }

    /// Something asked of a pair of its own.
    async fn with(
        &self,
        store: &Path,
        overlap: bool,
        rate: u64,
        work: impl AsyncFnOnce(Client) -> anyhow::Result<Run>,
    ) -> anyhow::Result<Run> {
        let settings = [
            ("log.level", "error".to_owned()),
            ("pipeline.overlap", overlap.to_string()),
            ("pipeline.queue", QUEUE.to_string()),
            ("io.throttle", rate.to_string()),
        ];
        with_private(self.resolved, store, &settings, async |client, _| work(client).await).await
    }
}

/// Bytes of a chunk's file: all chunks here have the same size.
fn chunk_bytes(store: &Path) -> anyhow::Result<f64> {
    let files = walkdir::WalkDir::new(store).into_iter().flatten();
    let mut chunks = files.filter(|f| f.path().extension().is_some_and(|e| e == "kv"));
    let largest = chunks.by_ref().filter_map(|f| f.metadata().ok()).map(|m| m.len()).max();
    Ok(largest.context("no chunk file in the store")? as f64)
}
