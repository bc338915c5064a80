//! Figures of the model alone: in this process, with the code that serves, against llama-bench.

use anyhow::ensure;
use matkv_loader_core::measure::machine;
use matkv_loader_core::measure::machine::Memory;
use matkv_loader_core::measure::speed::Decoding;

use super::{Bench, own, workload};
use crate::figures::Figure;

/// Tokens of a long prompt.
const LONG: usize = 4096;
/// Tokens of a chunk.
pub const CHUNK: usize = 1024;
/// Contexts that are decoded over.
const CONTEXTS: [usize; 3] = [64, 2048, 4096];
/// Tokens decoded over each.
const DECODED: usize = 32;
/// Sequences decoded together.
const BATCH: usize = 8;
/// Chunks ingested in a round.
const INGESTED: usize = 4;
/// A weight type this much slower than the fastest at 1,024 tokens is not measured at 4,096.
const CONTENDER: f64 = 0.7;

impl Bench<'_> {
    /// The slowest of the model's products, against the peak of the same minute.
    pub fn gemm(&mut self) -> anyhow::Result<()> {
        let peak = self.bf16_peak()?;
        self.figures.push(Figure::exact("bf16_gflops[peak]", peak / 1e9, "GFLOP/s"));
        let mut shares = Vec::new();
        for round in 0..self.options.rounds {
            self.progress(format_args!("round {}: products", round + 1))?;
            let speed = self.speed()?;
            shares.push(machine::gemm_over_peak(speed.team(), speed.model()));
        }
        self.figures.push(Figure::median("bf16_gemm_over_peak", &shares, "ratio"));
        Ok(())
    }

    pub fn prefill(&mut self) -> anyhow::Result<()> {
        self.types()?;
        let rate = |kind: &str, figures: &[Figure]| {
            let name = format!("prefill1024_tokens_per_s[llama {kind}]");
            figures.iter().find(|f| f.name == name).map_or(0.0, |f| f.value)
        };
        let types = self.types()?;
        let least = rate(types[0], &self.figures) * CONTENDER;
        let contenders: Vec<&str> =
            types.into_iter().filter(|k| rate(k, &self.figures) >= least).collect();
        let mut theirs = vec![Vec::new(); contenders.len()];
        let mut ours = Vec::new();
        for round in 0..self.options.rounds {
            self.progress(format_args!("round {}: ours, prefill of {LONG} tokens", round + 1))?;
            ours.push(LONG as f64 / self.speed()?.prefill(LONG));
            for (kind, rates) in contenders.iter().zip(&mut theirs) {
                self.progress(format_args!("round {}: llama.cpp {kind}", round + 1))?;
                rates.extend(self.llama.bench(kind, [LONG, 0, 0], 1)?);
            }
        }
        let name = "prefill4096_tokens_per_s";
        self.figures.push(Figure::median(format!("{name}[ours]"), &ours, "tokens/s"));
        let mut best = (f64::NEG_INFINITY, 0);
        for (i, (kind, rates)) in contenders.iter().zip(&theirs).enumerate() {
            let figure = Figure::median(format!("{name}[llama {kind}]"), rates, "tokens/s");
            if figure.value > best.0 {
                best = (figure.value, i);
            }
            self.figures.push(figure);
        }
        self.ratio("prefill4096_over_llama", &ours, &theirs[best.1]);
        Ok(())
    }

    /// Without vectors: chunks one after the other, computed, encoded, written and committed.
    pub fn ingest(&mut self) -> anyhow::Result<()> {
        let fastest = self.fastest()?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let pieces = workload::pieces(self.speed()?, &self.options.corpus, CHUNK, INGESTED)?;
        let chunks: Vec<&[u32]> = pieces.iter().map(|p| p.tokens.as_slice()).collect();
        for round in 0..self.options.rounds {
            self.progress(format_args!("round {}: ours, {INGESTED} chunks to flash", round + 1))?;
            let dir = self.scratch()?;
            let seconds = own(self.speed()?.ingest(dir.path(), &chunks))?;
            ours.push((INGESTED * CHUNK) as f64 / seconds);
            self.progress(format_args!("round {}: llama.cpp {fastest}", round + 1))?;
            theirs.extend(self.llama.bench(fastest, [CHUNK, 0, 0], 1)?);
        }
        self.figures.push(Figure::median("ingest_tokens_per_s[ours]", &ours, "tokens/s"));
        self.figures.push(Figure::median("ingest_tokens_per_s[llama]", &theirs, "tokens/s"));
        self.ratio("ingest_over_llama_prefill", &ours, &theirs);
        Ok(())
    }

    pub fn decode(&mut self) -> anyhow::Result<()> {
        let floor = self.wants("decode4096_over_floor");
        let memory = floor.then(|| own(Memory::new())).transpose()?;
        for context in CONTEXTS {
            let name = format!("decode{context}_over_llama");
            let memory = memory.as_ref().filter(|_| context == LONG);
            if !self.wants(&name) && memory.is_none() {
                continue;
            }
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            let (mut bytes, mut peaks) = (0.0, Vec::new());
            for round in 0..self.options.rounds {
                self.progress(format_args!("round {}: ours, decode at {context}", round + 1))?;
                let speed = self.speed()?;
                let count = context.div_ceil(CHUNK);
                let decoding = own(Decoding::prepare(speed, count, CHUNK.min(context)))?;
                bytes = decoding.bytes(context);
                ours.push(1.0 / crate::demo::median(decoding.one(context, DECODED)));
                peaks.extend(memory.map(|m| m.peak(speed.team())));
                if self.wants(&name) {
                    self.progress(format_args!("round {}: llama.cpp", round + 1))?;
                    let rates = self.llama.bench("Q4_1", [0, DECODED, context], 1)?;
                    theirs.push(crate::demo::median(rates));
                }
            }
            let rates = format!("decode{context}_tokens_per_s");
            self.figures.push(Figure::median(format!("{rates}[ours]"), &ours, "tokens/s"));
            if self.wants(&name) {
                self.figures.push(Figure::median(format!("{rates}[llama]"), &theirs, "tokens/s"));
                self.ratio(&name, &ours, &theirs);
            }
            if memory.is_some() {
                let rounds = ours.iter().zip(&peaks);
                let over: Vec<f64> = rounds.map(|(rate, peak)| peak / bytes / rate).collect();
                let shown: Vec<f64> = peaks.iter().map(|peak| peak / 1e9).collect();
                self.figures.push(Figure::median("memory_gb_per_s[peak]", &shown, "GB/s"));
                self.figures.push(Figure::median("decode4096_over_floor", &over, "ratio"));
                self.notes.push(format!(
                    "decode4096_over_floor: {:.1} MB of weights and rows a token; memory, in pages \
                     like the arena's, was read in the same rounds",
                    bytes / 1e6
                ));
            }
        }
        let form = self.speed()?.form();
        self.notes.push(format!(
            "decode: stored rows are {form} and the answer's bf16 on our side, all f16 in \
             llama.cpp, flash attention on; weights Q4_1 on both"
        ));
        Ok(())
    }

    /// llama.cpp may share all of the context, not half: whichever of its ways is faster counts.
    pub fn batch(&mut self) -> anyhow::Result<()> {
        let each = LONG / CHUNK;
        let (mut ours, mut theirs) = (Vec::new(), vec![Vec::new(); 2]);
        for round in 0..self.options.rounds {
            self.progress(format_args!("round {}: ours, {BATCH} sequences", round + 1))?;
            let speed = self.speed()?;
            let count = Decoding::chunks_of_shared(BATCH, each);
            let decoding = own(Decoding::prepare(speed, count, CHUNK))?;
            let step = crate::demo::median(decoding.shared(BATCH, LONG, DECODED));
            drop(decoding);
            ours.push(BATCH as f64 / step);
            for (rates, unified) in theirs.iter_mut().zip([false, true]) {
                let way = if unified { "common rows" } else { "rows of its own" };
                self.progress(format_args!("round {}: llama.cpp, {way}", round + 1))?;
                rates.push(self.llama.batched("Q4_1", [BATCH, LONG, DECODED], unified)?);
            }
        }
        ensure!(!ours.is_empty(), "no round was measured");
        let medians: Vec<f64> = theirs.iter().map(|r| crate::demo::median(r.clone())).collect();
        let best = usize::from(medians[1] > medians[0]);
        let name = "batch8_shared_tokens_per_s";
        self.figures.push(Figure::median(format!("{name}[ours]"), &ours, "tokens/s"));
        for (way, rates) in ["own rows", "common rows"].iter().zip(&theirs) {
            self.figures.push(Figure::median(format!("{name}[llama {way}]"), rates, "tokens/s"));
        }
        self.ratio("batch8_shared_over_llama", &ours, &theirs[best]);
        self.notes.push(
            "batch8: llama.cpp has one prompt in common to all sequences, copied to each or kept \
             once; the faster counts"
                .into(),
        );
        Ok(())
    }
}
