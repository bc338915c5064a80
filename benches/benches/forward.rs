//! Tokens per second of prefill and decode: `cargo bench --bench forward -- MODEL.gguf`.

use std::time::Instant;

use matkv_model::{ForwardRow, LanguageModel, Segment, Source, Step};
use matkv_types::{KvDtype, KvLayout};

/// Rows of one prefill call, as the loader's engine uses them.
const ROWS_PER_CALL: usize = 512;

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

fn main() {
    let Some(path) = std::env::args().skip(1).find(|a| !a.starts_with("--")) else {
        println!("skipped: give the path of a .gguf file");
        return;
    };
    let started = Instant::now();
    let model = LanguageModel::open(path.as_ref(), None).expect("model opens");
    println!(
        "open: {:.2} s, {} MB packed",
        started.elapsed().as_secs_f64(),
        model.weight_bytes() >> 20
    );
    for length in [512usize, 2048, 4096] {
        let layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, length + 64);
        let mut s = Sequence { section: vec![0; layout.total_bytes()], layout };
        let mut best = f64::INFINITY;
        for _ in 0..2 {
            let started = Instant::now();
            for first in (0..length).step_by(ROWS_PER_CALL) {
                step(&model, &mut s, first, ROWS_PER_CALL.min(length - first), false);
            }
            best = best.min(started.elapsed().as_secs_f64());
        }
        let started = Instant::now();
        (0..32).for_each(|i| step(&model, &mut s, length + i, 1, true));
        let decode = started.elapsed().as_secs_f64() / 32.0;
        println!(
            "{length} tokens: prefill {best:.3} s = {:.0} tokens/s; decode {:.1} ms = {:.0} tokens/s",
            length as f64 / best,
            decode * 1e3,
            1.0 / decode
        );
    }
}
