//! Tokens per second of prefill and decode, and the time of `linked(32)` over stored rows, in both
//! precisions:
//! `cargo bench --bench forward -- MODEL.gguf`, or in one: `… -- MODEL.gguf bf16`, or at one
//! length: `… -- MODEL.gguf bf16 4096`.

use std::path::Path;
use std::time::Instant;

use matkv_kernels::{Isa, team};
use matkv_model::{ForwardRow, LanguageModel, Phase, Segment, Source, Step, file_digest};
use matkv_types::{KvDtype, KvLayout, Precision, f32_to_bf16};

/// Rows of one prefill call, as the loader's engine uses them.
const ROWS_PER_CALL: usize = 512;
/// Tokens decoded after each prompt.
const DECODED: usize = 64;
/// Stored chunks a question is about.
const CHUNKS: usize = 4;
/// Rows of each.
const CHUNK: usize = 1024;
/// Rows computed anew at the start of a chunk.
const LINK: usize = 32;
/// Tokens of a question.
const QUESTION: usize = 34;

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

/// What a question of [`QUESTION`] tokens costs over four chunks of stored int8 rows, the first
/// [`LINK`] rows of each but the first computed anew.
fn measure_linked(model: &LanguageModel) {
    let layout = KvLayout::new(model.kv_shape(), KvDtype::Int8, CHUNK);
    let stored: Vec<Vec<u8>> = (0..CHUNKS).map(|_| stored_rows(&layout)).collect();
    let (mut rows, mut segments) = (Vec::new(), Vec::new());
    let own = |first_row, rows, position| Segment {
        source: Source::Own,
        first_row,
        rows,
        position,
        shift: 0,
    };
    for (i, section) in stored.iter().enumerate() {
        let (first, link) = (i * CHUNK, if i == 0 { 0 } else { LINK });
        if link > 0 {
            segments.push(own(rows.len(), link, first));
        }
        rows.extend(first..first + link);
        segments.push(Segment {
            source: Source::Slot(section, layout),
            first_row: link,
            rows: CHUNK - link,
            position: first + link,
            shift: first as i64,
        });
    }
    segments.push(own(rows.len(), QUESTION, CHUNKS * CHUNK));
    rows.extend(CHUNKS * CHUNK..CHUNKS * CHUNK + QUESTION);
    let row = |(row, position): (usize, &usize)| ForwardRow {
        token: (position * 7919 % 40_000) as u32,
        position: *position,
        row,
    };
    let rows: Vec<ForwardRow> = rows.iter().enumerate().map(row).collect();
    let own_layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, rows.len());
    let mut own = vec![0; own_layout.total_bytes()];
    let mut all = Vec::new();
    for _ in 0..15 {
        let started = Instant::now();
        let step =
            Step { rows: &rows, segments: &segments, own: &mut own, own_layout, logits: true };
        std::hint::black_box(model.forward(&mut [step]));
        all.push(started.elapsed().as_secs_f64() * 1e3);
    }
    all.sort_by(f64::total_cmp);
    println!(
        "  linked({LINK}), {CHUNKS} chunks of {CHUNK} and {QUESTION}: {} rows in {:.0} ms, at best \
         {:.0}",
        rows.len(),
        all[all.len() / 2],
        all[0]
    );
}

/// Finite rows of any value, scales included.
fn stored_rows(layout: &KvLayout) -> Vec<u8> {
    let [a, b] = f32_to_bf16(0.01).to_le_bytes();
    [a, b].into_iter().cycle().take(layout.total_bytes()).collect()
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
        measure_linked(&models[0]);
    }
}
