//! Figures of the whole way of a request, from a cold device, through two real processes, against
//! llama-server.
//!
//! Both times are those of a whole request for one token, as its client sees them; ours include
//! retrieval.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use matkv_api::Client;
use matkv_api::v1::{GenerateRequest, GetStatusRequest, GetStatusResponse};
use matkv_loader_core::measure::machine::operations;
use matkv_loader_core::offline;
use matkv_loader_core::process::evict_page_cache;

use super::Bench;
use super::llama::Server;
use super::model::CHUNK;
use super::workload::{Corpus, file_of, pieces, pss_mb, ticks};
use crate::ask::{Answer, generate};
use crate::bench::ingest_all;
use crate::figures::Figure;
use crate::fio;
use crate::pair::with_private;

/// Chunks in the prompt.
const CHUNKS: usize = 4;
/// Chunks in the store before the first round.
const STORED: usize = 8;
/// Link tokens of the mode that is measured.
const LINK: usize = 32;
const QUESTION: &str = "Which people, places and works are described in these documents, and how \
                        are they connected with each other? Answer in one sentence.";
/// The slot's file, in the directory the server was given.
const SLOT_FILE: &str = "slot.bin";
/// A full prefill takes as long as many loads: so many show its spread.
const VANILLA_ROUNDS: usize = 3;

/// One prompt, on both sides.
pub struct Prompt {
    /// Prefix, chunks and question.
    pub ids: Vec<u32>,
    /// Of which before the question.
    pub stored: usize,
    /// The question.
    pub rest: Vec<u32>,
    /// The chunks, in the order of the prompt.
    pub chunks: Vec<Vec<u32>>,
    /// Files of the chunks.
    pub files: Vec<PathBuf>,
}

/// Milliseconds of every round.
#[derive(Default)]
struct Times {
    linked: Vec<f64>,
    independent: Vec<f64>,
    vanilla: Vec<f64>,
    miss: Vec<f64>,
    llama: Vec<f64>,
    restore: Vec<f64>,
    fio: Vec<f64>,
    ingest: Vec<f64>,
    prefill: Vec<f64>,
}

/// Asks for one token, and says how long that took.
pub async fn ask(client: &Client, mode: &str) -> anyhow::Result<(Answer, f64)> {
    let request = GenerateRequest {
        question: QUESTION.into(),
        mode: mode.into(),
        top_k: Some(CHUNKS as u32),
        max_new_tokens: Some(1),
        cold: true,
        ..GenerateRequest::default()
    };
    let started = Instant::now();
    let answer = generate(client.clone(), request, |_| Ok(())).await?;
    Ok((answer, started.elapsed().as_secs_f64() * 1e3))
}

/// From a cold device.
pub async fn ask_cold(client: &Client, mode: &str, files: &[PathBuf]) -> anyhow::Result<f64> {
    files.iter().try_for_each(|f| evict_page_cache(f))?;
    Ok(ask(client, mode).await?.1)
}

impl Bench<'_> {
    pub async fn serving(&mut self) -> anyhow::Result<()> {
        let (resolved, store) = (self.resolved, self.scratch()?);
        let stop = self.stop.clone();
        let serve = async |client, _: &_| self.serve(client).await;
        with_private(resolved, store.path(), &[], &stop, serve).await
    }

    /// A corpus of whole chunks, the first of which are ingested, and the prompt of the question.
    pub async fn prompt(
        &mut self,
        client: &Client,
        more: usize,
    ) -> anyhow::Result<(Corpus, Prompt)> {
        let needed = STORED + more;
        let mut corpus = Corpus::new(pieces(self.speed()?, &self.options.corpus, CHUNK, needed)?)?;
        self.progress(format_args!("ingest of {STORED} chunks"))?;
        ingest_all(client, &corpus.next(STORED)?, None).await?;
        let (answer, _) = ask(client, "independent").await?;
        let status = client.clone().get_status(GetStatusRequest {}).await?.into_inner();
        let speed = self.speed()?;
        let mut ids = speed.prefix().to_vec();
        let (mut files, mut chunks) = (Vec::new(), Vec::new());
        for chunk in &answer.started.chunks {
            let tokens = corpus.tokens(&chunk.document_id)?;
            ids.extend(tokens);
            chunks.push(tokens.to_vec());
            files.push(file_of(status.store_dir.as_ref(), &status.fingerprint, &chunk.chunk_id));
        }
        let stored = ids.len();
        let rest = offline::rest(speed.model(), QUESTION)?;
        ids.extend(&rest);
        let ours = answer.usage.prompt_tokens as usize;
        ensure!(ours == ids.len(), "a prompt of {ours} tokens was expected to have {}", ids.len());
        ensure!(files.len() == CHUNKS, "{} chunks were retrieved", files.len());
        Ok((corpus, Prompt { ids, stored, rest, chunks, files }))
    }

    async fn serve(&mut self, client: Client) -> anyhow::Result<()> {
        let fastest = self.fastest()?;
        let rounds = self.options.rounds;
        let (mut corpus, prompt) = self.prompt(&client, rounds * CHUNKS).await?;
        let slots = self.scratch()?;
        let context = (prompt.ids.len() + 64).next_multiple_of(256);
        let server = self.llama.serve(fastest, context, slots.path())?;
        self.progress(format_args!("llama.cpp {fastest}: {} tokens to save", prompt.stored))?;
        server.complete(&prompt.ids[..prompt.stored], 0, true)?;
        let saved = server.slot("save", SLOT_FILE)?;
        ask(&client, "linked(32)").await?;
        let mut times = Times::default();
        let slot_file = slots.path().join(SLOT_FILE);
        let mut busy = 0;
        for round in 0..rounds {
            self.progress(format_args!("round {}: ours", round + 1))?;
            let before = ticks(server.pid());
            self.ours(&client, &prompt, round, &mut times).await?;
            let started = Instant::now();
            let summary = ingest_all(&client, &corpus.next(CHUNKS)?, None).await?;
            let seconds = started.elapsed().as_secs_f64();
            times.ingest.push(summary.tokens_computed as f64 / seconds);
            busy += ticks(server.pid()) - before;
            self.progress(format_args!("round {}: llama.cpp", round + 1))?;
            times.llama.push(theirs(&server, &prompt, None)?);
            times.restore.push(theirs(&server, &prompt, Some(&slot_file))?);
            times.prefill.extend(self.llama.bench(fastest, [CHUNK, 0, 0], 1)?);
        }
        self.notes.push(format!(
            "requests: {} prompt tokens, four chunks of {CHUNK}, retrieved by their vectors; one \
             token; milliseconds as the client sees them on both sides; llama.cpp {fastest}, f16 \
             rows, {:.1} MB saved; llama-server had {busy} ticks of processor time (of 10 ms) \
             while ours was measured",
            prompt.ids.len(),
            saved["n_written"].as_f64().unwrap_or(0.0) / 1e6,
        ));
        self.ratios(&times);
        self.floor(&prompt, &times)?;
        let status = client.clone().get_status(GetStatusRequest {}).await?.into_inner();
        self.memory(&status)
    }

    /// Every mode, each first in turn.
    async fn ours(
        &self,
        client: &Client,
        prompt: &Prompt,
        round: usize,
        times: &mut Times,
    ) -> anyhow::Result<()> {
        let modes = ["linked(32)", "independent"];
        for i in 0..modes.len() {
            let mode = modes[(round + i) % modes.len()];
            let spent = ask_cold(client, mode, &prompt.files).await?;
            let list = if mode == modes[0] { &mut times.linked } else { &mut times.independent };
            list.push(spent);
        }
        if fio::is_installed() {
            prompt.files.iter().try_for_each(|f| evict_page_cache(f))?;
            times.fio.push(fio::read_rate(&prompt.files)?);
        }
        if round < VANILLA_ROUNDS {
            self.stop.check()?;
            let (answer, spent) = ask(client, "vanilla").await?;
            times.vanilla.push(spent);
            let t = answer.timings;
            times.miss.push((t.total_ms - t.prefill_ms) / t.prefill_ms);
        }
        Ok(())
    }

    fn ratios(&mut self, t: &Times) {
        let times: [(&str, &[f64]); 5] = [
            ("linked32", &t.linked),
            ("independent", &t.independent),
            ("vanilla", &t.vanilla),
            ("llama prefill", &t.llama),
            ("llama restore", &t.restore),
        ];
        for (name, samples) in times {
            self.figures.push(Figure::median(format!("ttft_ms[{name}]"), samples, "ms"));
        }
        let rates = [("ours with vectors", &t.ingest), ("llama prefill", &t.prefill)];
        for (name, samples) in rates {
            let name = format!("ingest_tokens_per_s[{name}]");
            self.figures.push(Figure::median(name, samples, "tokens/s"));
        }
        self.ratio("ttft_llama_over_ours_linked32", &t.llama, &t.linked);
        self.ratio("ttft_llama_over_ours_independent", &t.llama, &t.independent);
        self.ratio("ttft_vanilla_over_ours_linked32", &t.vanilla, &t.linked);
        self.ratio("restore_llama_over_ours_linked32", &t.restore, &t.linked);
        self.ratio("restore_llama_over_ours_independent", &t.restore, &t.independent);
        self.ratio("ingest_with_embedding_over_llama_prefill", &t.ingest, &t.prefill);
        self.figures.push(Figure::median("miss_cost", &t.miss, "share"));
    }

    /// What a request of linked(32) cannot be faster than: its operations at the peak, or its
    /// bytes at fio's rate.
    fn floor(&mut self, prompt: &Prompt, times: &Times) -> anyhow::Result<()> {
        let peak = self.bf16_peak()?;
        ensure!(!times.fio.is_empty(), "fio is not installed; `apt-get install fio`");
        let speed = self.speed()?;
        let prefix = speed.prefix().len();
        // Link tokens of every chunk but the first, and the question.
        let links = (1..CHUNKS).flat_map(|i| (0..LINK).map(move |k| prefix + i * CHUNK + k));
        let positions = links.chain(prompt.stored..prompt.ids.len());
        let compute = operations(speed.model(), positions, 1) / peak * 1e3;
        let size = |f: &PathBuf| std::fs::metadata(f).map(|m| m.len());
        let bytes: u64 = prompt.files.iter().map(size).sum::<Result<u64, _>>()?;
        let load: Vec<f64> = times.fio.iter().map(|rate| bytes as f64 / rate * 1e3).collect();
        let floors: Vec<f64> = load.iter().map(|l| l.max(compute)).collect();
        self.figures.push(Figure::exact("ttft_floor_ms[compute]", compute, "ms"));
        self.figures.push(Figure::median("ttft_floor_ms[load]", &load, "ms"));
        self.ratio("ttft_over_floor", &times.linked, &floors);
        self.notes.push(format!(
            "ttft_over_floor: {} rows, 2 operations a weight outside the embedding and 4 a \
             dimension of each head and row attended to, and the output projection of one row, at \
             {:.0} GFLOP/s; {:.1} MB at fio's rate of the same round",
            3 * LINK + prompt.ids.len() - prompt.stored,
            peak / 1e9,
            bytes as f64 / 1e6
        ));
        Ok(())
    }

    /// Memory of both processes beyond the arena and mapped weights.
    fn memory(&mut self, status: &GetStatusResponse) -> anyhow::Result<()> {
        let skip = |name: &str| name.starts_with("/dev/shm/") || name.ends_with(".weights");
        let mut total = 0.0;
        for (name, pid) in [("loader", status.loader_pid), ("decoder", status.decoder_pid)] {
            let megabytes = pss_mb(pid, skip)?;
            self.figures.push(Figure::exact(format!("pss_mb[{name}]"), megabytes, "MB"));
            total += megabytes;
        }
        self.figures.push(Figure::exact("pss_extra_mb", total, "MB"));
        Ok(())
    }
}

/// Milliseconds of a full prefill, or of a restore from a cold file and the question's prefill.
fn theirs(server: &Server, prompt: &Prompt, restore: Option<&PathBuf>) -> anyhow::Result<f64> {
    if let Some(file) = restore {
        server.slot("erase", SLOT_FILE)?;
        evict_page_cache(file)?;
    }
    let started = Instant::now();
    if restore.is_some() {
        server.slot("restore", SLOT_FILE)?;
    }
    let done = server.complete(&prompt.ids, 1, restore.is_some())?;
    let spent = started.elapsed().as_secs_f64() * 1e3;
    let (expected, processed) = match restore {
        // It always computes the last token again.
        Some(_) => (prompt.ids.len() - prompt.stored, done.processed),
        None => (prompt.ids.len(), done.processed),
    };
    ensure!(
        processed == expected,
        "llama-server computed {processed} prompt tokens instead of {expected}"
    );
    Ok(spent)
}
