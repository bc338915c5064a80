//! Attention over stored rows of each type, median time of a layer:
//! `cargo bench --bench attention`, or of some: `… -- int8 bf16 512`.

use std::time::Instant;

use matkv_kernels::{
    Activations, Attention, AttentionJob, Isa, LayerInput, Section, SegmentView, team,
};
use matkv_sys::{Segment, SlotRef};
use matkv_types::{KvDtype, KvLayout, KvShape, PAGE_BYTES, Precision, f32_to_bf16};

/// SmolLM2-135M: its layers in turn, so that one query finds nothing in a cache.
const SHAPE: KvShape = KvShape { layers: 30, kv_heads: 3, head_dim: 64 };
const HEADS: usize = 9;
const CONTEXT: usize = 4096;

/// Finite rows of any value, scales included, in memory as the arena's.
fn section(layout: &KvLayout) -> (SlotRef, Segment) {
    let fill = match layout.dtype {
        KvDtype::F32 => 0.25f32.to_le_bytes(),
        _ => {
            let [a, b] = f32_to_bf16(0.01).to_le_bytes();
            [a, b, a, b]
        }
    };
    let len = layout.total_bytes().next_multiple_of(PAGE_BYTES);
    let name = format!("matkv-attention-{}", std::process::id());
    let segment = Segment::create(&name, len).expect("memory");
    let mut slot = segment.region().exclusive(0..len).expect("all of it");
    slot.iter_mut().zip(fill.into_iter().cycle()).for_each(|(to, x)| *to = x);
    (slot.freeze(), segment)
}

fn main() {
    let isa = Isa::detect();
    println!("{}, {} threads, {CONTEXT} rows of context", isa.name(), team::threads());
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    for dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8] {
        let layout = KvLayout::new(SHAPE, dtype, CONTEXT);
        let (section, _segment) = section(&layout);
        for precision in Precision::ALL {
            for rows in [1, 24, 512] {
                let names = [dtype.to_string(), precision.to_string(), rows.to_string()];
                if !wanted.iter().all(|w| names.contains(w)) {
                    continue;
                }
                let width = HEADS * SHAPE.head_dim;
                let queries: Vec<f32> =
                    (0..rows * width).map(|i| (i * 7919 % 1009) as f32 / 4036.0 - 0.125).collect();
                let positions: Vec<usize> = (CONTEXT - rows..CONTEXT).collect();
                let mut out = Activations::zeros(precision, rows * width);
                let mut all = Vec::new();
                let view = SegmentView {
                    section: Section::Whole(&section),
                    layout,
                    first_row: 0,
                    rows: CONTEXT,
                    position: 0,
                    rotation: 0,
                };
                let job = AttentionJob { segments: vec![view], positions: positions.clone() };
                let mut attention = Attention::new(isa, precision, HEADS, [job]);
                let queries = [queries];
                for i in 0..if rows < 512 { 600 } else { 24 } {
                    let started = Instant::now();
                    let input = LayerInput { own: &[], queries: &queries };
                    attention.run(i % SHAPE.layers, |_| input, out.as_mut());
                    all.push(started.elapsed().as_secs_f64());
                }
                all.sort_by(f64::total_cmp);
                let median = all[all.len() / 2];
                let pairs: usize = positions.iter().map(|p| p + 1).sum();
                let work = (4 * width * pairs) as f64;
                println!(
                    "  {dtype} rows, {precision}, {rows} queries: {:.3} ms, {:.0} GFLOP/s",
                    median * 1e3,
                    work / median / 1e9
                );
            }
        }
    }
}
