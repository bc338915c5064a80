//! Tokens per second of prefill and decode in both precisions:
//! `cargo bench --bench forward -- MODEL.gguf`, or in one: `… -- MODEL.gguf bf16`, or at one
//! length: `… -- MODEL.gguf bf16 4096`.

use std::path::Path;
use std::time::Instant;

use matkv_kernels::{Isa, team};
use matkv_model::{ForwardRow, LanguageModel, Phase, Segment, Source, Step, file_digest};
use matkv_types::{KvDtype, KvLayout, Precision};

/// Rows of one prefill call, as the loader's engine uses them.
const ROWS_PER_CALL: usize = 512;
/// Tokens decoded after each prompt.
const DECODED: usize = 64;

struct Sequence {
    section: Vec<u8>,
    layout: KvLayout,
}

fn step(model: &LanguageModel, s: &mut Sequence, first: usize, count: usize, logits: bool) {
    let rows: Vec<ForwardRow> = (first..first + count)
        .map(|i| ForwardRow { token: (i * 7919 % 40_000) as u32, position: i, row: i })
        .collect();
    let own =
        Segment { source: Source::Own, first_row: 0, rows: first + count, position: 0, shift: 0 };
    let mut steps =
        [Step { rows: &rows, segments: &[own], own: &mut s.section, own_layout: s.layout, logits }];
    std::hint::black_box(model.forward(&mut steps));
}

fn measure([model, decoder]: &[LanguageModel; 2], length: usize) {
    let layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, length + 2 * DECODED);
    let mut s = Sequence { section: vec![0; layout.total_bytes()], layout };
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let started = Instant::now();
        for first in (0..length).step_by(ROWS_PER_CALL) {
            step(model, &mut s, first, ROWS_PER_CALL.min(length - first), false);
        }
        best = best.min(started.elapsed().as_secs_f64());
    }
    let started = Instant::now();
    (0..DECODED).for_each(|i| step(decoder, &mut s, length + i, 1, true));
    let decode = started.elapsed().as_secs_f64() / DECODED as f64;
    println!(
        "  {length} tokens: prefill {best:.3} s = {:.0} tokens/s; decode {:.1} ms = {:.0} tokens/s",
        length as f64 / best,
        decode * 1e3,
        1.0 / decode
    );
}

/// Opens a model for both phases: private, writing packed files, and mapping them.
fn opened(path: &Path, precision: Precision) -> [LanguageModel; 2] {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}", std::process::id()));
    // Else the first to open would hash the file for all.
    file_digest(path, Some(&cache)).expect("the model can be read");
    let open = |how, cache| {
        [Phase::Prefill, Phase::Decode].map(|phase| {
            let started = Instant::now();
            let model = LanguageModel::open_for(path, cache, precision, phase);
            let s = started.elapsed().as_secs_f64();
            println!("{precision}: {phase:?} opened in {s:.3} s, {how}");
            model.expect("the model opens")
        })
    };
    open("packed privately, the file hashed", None);
    open("packed files written", Some(&*cache));
    let models = open("packed files mapped", Some(&*cache));
    let _ = std::fs::remove_dir_all(&cache);
    models
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let Some(path) = args.next() else {
        println!("skipped: give the path of a .gguf file");
        return;
    };
    println!("{}, {} threads", Isa::detect().name(), team::threads());
    let only = args.next();
    let at = args.next().and_then(|n| n.parse::<usize>().ok());
    let wanted = |p: &Precision| only.as_deref().is_none_or(|name| name == p.as_str());
    for precision in Precision::ALL.into_iter().filter(wanted) {
        let models = opened(path.as_ref(), precision);
        println!(
            "{precision}: {} MB to prefill with, {} MB to decode with",
            models[0].weight_bytes() >> 20,
            models[1].weight_bytes() >> 20
        );
        let lengths =
            [64, 512, 1024, 2048, 4096].into_iter().filter(|l| at.is_none_or(|at| at == *l));
        lengths.for_each(|length| measure(&models, length));
    }
}
