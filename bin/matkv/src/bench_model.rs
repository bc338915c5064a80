//! `matkv bench prefill|decode`: the model alone, in this process, with the code that serves, and
//! what the machine allows at the same time.

use anyhow::ensure;
use matkv_config::{Config, Resolved};
use matkv_loader_core::measure::machine::{self, Memory};
use matkv_loader_core::measure::speed::{Decoding, Speed};

use crate::bench_store::own;
use crate::demo::median;
use crate::figures::{Figure, Outcome};
use crate::stop::Stop;

/// Rows of a stored chunk.
const CHUNK: usize = 1024;

#[derive(clap::Args, Clone)]
pub struct PrefillOptions {
    /// Lengths of prompts, in tokens
    #[arg(long, value_delimiter = ',', default_values_t = [512, 1024, 2048, 4096])]
    pub tokens: Vec<usize>,
    /// Alternated rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
}

#[derive(clap::Args, Clone)]
pub struct DecodeOptions {
    /// Stored rows each sequence attends to; beyond 1,024 whole chunks of 1,024
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1024, 2048, 4096])]
    pub context: Vec<usize>,
    /// Sequences decoded together; the first half of their chunks, rounded down, are the same
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32])]
    pub batch: Vec<usize>,
    /// Tokens decoded in a round
    #[arg(long, default_value_t = 32)]
    pub steps: usize,
    /// Alternated rounds
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
}

fn open(resolved: &Resolved, threads: usize) -> anyhow::Result<Speed> {
    own(Speed::open(&resolved.config, Config::threads(threads)))
}

/// Full prefills of every length in every round, and the peak of the processor beside each.
pub fn prefill(
    resolved: &Resolved,
    o: &PrefillOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    ensure!(o.rounds > 0, "--rounds must be at least 1");
    ensure!(o.tokens.iter().all(|n| *n > 0), "--tokens must be at least 1");
    let speed = open(resolved, resolved.config.loader_threads)?;
    // Code pages and buffers.
    speed.prefill(o.tokens[0]);
    let (mut rates, mut floors) =
        (vec![Vec::new(); o.tokens.len()], vec![Vec::new(); o.tokens.len()]);
    let mut round = |round| {
        for (i, &count) in o.tokens.iter().enumerate() {
            stop.check()?;
            let peak = machine::bf16_peak(speed.team());
            let seconds = speed.prefill(count);
            rates[i].push(count as f64 / seconds);
            floors[i].push(seconds * peak / machine::operations(speed.model(), 0..count, 1));
        }
        eprintln!("round {}/{}", round + 1, o.rounds);
        Ok(())
    };
    let ended = (0..o.rounds).try_for_each(&mut round);
    let mut out = Vec::new();
    for (i, count) in o.tokens.iter().enumerate() {
        out.push(Figure::median(format!("prefill_tokens_per_s[{count}]"), &rates[i], "tokens/s"));
        out.push(Figure::median(format!("prefill_over_floor[{count}]"), &floors[i], "ratio"));
    }
    Outcome::until(ended, out, notes)
}

/// Steps of every batch over every context, and memory's bandwidth beside each.
pub fn decode(
    resolved: &Resolved,
    o: &DecodeOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    ensure!(o.rounds > 0 && o.steps > 0, "--rounds and --steps must be at least 1");
    ensure!(o.batch.iter().all(|n| *n > 0), "--batch must be at least 1");
    for context in &o.context {
        let whole = *context > 0 && (*context <= CHUNK || context.is_multiple_of(CHUNK));
        ensure!(whole, "--context {context}: beyond {CHUNK} only whole chunks of {CHUNK}");
    }
    let speed = open(resolved, resolved.config.decoder_threads)?;
    let memory = own(Memory::new())?;
    let mut out = Vec::new();
    let mut context = |&context| {
        let rounds = Rounds { o, context, speed: &speed, memory: &memory };
        rounds.measure(stop, &mut out, notes)
    };
    let ended = o.context.iter().try_for_each(&mut context);
    notes.push(format!(
        "stored rows are {}, the answer's bf16; the floor is reading weights and rows once at the \
         bandwidth measured in the same round",
        speed.form()
    ));
    Outcome::until(ended, out, notes)
}

/// Every batch over one context.
struct Rounds<'a> {
    o: &'a DecodeOptions,
    context: usize,
    speed: &'a Speed,
    memory: &'a Memory,
}

impl Rounds<'_> {
    fn measure(
        &self,
        stop: &Stop,
        out: &mut Vec<Figure>,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let Self { o, context, speed, memory } = *self;
        let (size, each) = (context.min(CHUNK), context.div_ceil(CHUNK));
        let most = o.batch.iter().copied().max().unwrap_or(1);
        let chunks = |batch| Decoding::chunks_of_shared(batch, each);
        stop.check()?;
        let decoding = match Decoding::prepare(speed, chunks(most), size) {
            Ok(decoding) => decoding,
            Err(e) => {
                notes.push(format!("not measured over {context} rows: {e}"));
                return Ok(());
            }
        };
        let (mut rates, mut floors) =
            (vec![Vec::new(); o.batch.len()], vec![Vec::new(); o.batch.len()]);
        let mut round = |round| {
            for (i, &batch) in o.batch.iter().enumerate() {
                stop.check()?;
                let step = median(decoding.shared(batch, context, o.steps));
                let floor = decoding.bytes(chunks(batch) * size) / memory.peak(speed.team());
                rates[i].push(batch as f64 / step);
                floors[i].push(step / floor);
            }
            eprintln!("context {context}, round {}/{}", round + 1, o.rounds);
            Ok(())
        };
        let ended = (0..o.rounds).try_for_each(&mut round);
        for (i, batch) in o.batch.iter().enumerate() {
            let of = format!("[{context},batch {batch}]");
            out.push(Figure::median(format!("decode_tokens_per_s{of}"), &rates[i], "tokens/s"));
            out.push(Figure::median(format!("decode_over_floor{of}"), &floors[i], "ratio"));
        }
        ended
    }
}
