//! A step of decoding asks for no memory: everything is there from the steps before.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::quantized::GgmlDType;
use matkv_model::{ForwardRow, LanguageModel, Phase, Segment, Source, Step, Team};
use matkv_testkit::TinyModel;
use matkv_types::{KvDtype, KvLayout, Precision};

/// The system's allocator, and how often and for how much it was asked.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's, which it is for every call; growing is its `realloc`'s default, counted as
// one call of `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: forwarded.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls and bytes of one step of some sequences, each over 600 stored rows, after others.
fn of_a_step(model: &LanguageModel, sequences: usize) -> (usize, usize) {
    let shape = model.kv_shape();
    let (stored, own) =
        (KvLayout::new(shape, KvDtype::Int8, 600), KvLayout::new(shape, KvDtype::Bf16, 16));
    let slot = vec![0; stored.total_bytes()];
    let mut sections = vec![vec![0; own.total_bytes()]; sequences];
    let mut last = (0, 0);
    // Alone, so that every buffer of a thread has been made by the steps before.
    let team = Team::new(1, "test").unwrap();
    let mut logits = Vec::new();
    for i in 0..4 {
        let rows = [ForwardRow { token: 5, position: 600 + i, row: i }];
        let run =
            |source, rows, position, shift| Segment { source, first_row: 0, rows, position, shift };
        // Two rotations: a chunk that stands elsewhere than it was compiled.
        let segments =
            [run(Source::Slot(&slot, stored), 600, 0, -7), run(Source::Own, i + 1, 600, 0)];
        let step = |section| Step {
            rows: &rows,
            segments: &segments,
            own: section,
            own_layout: own,
            logits: true,
        };
        let mut steps: Vec<Step<'_>> =
            sections.iter_mut().map(|s| step(s.as_mut_slice())).collect();
        let before = (CALLS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        let done = team.install(|| model.forward_into(&mut steps, &mut |_| true, &mut logits));
        let after = (CALLS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        assert!(done && logits.len() == sequences);
        last = (after.0 - before.0, after.1 - before.1);
    }
    last
}

#[test]
fn a_step_allocates_nothing() {
    let model = |layers, ffn| {
        let model = TinyModel { layers, ffn, matrices: GgmlDType::Q8_0, ..TinyModel::default() };
        let (_dir, path) = common::written(&model);
        LanguageModel::open_for(&path, None, Precision::Bf16, Phase::Decode).unwrap()
    };
    let (one, deep) = (model(1, 256), model(8, 2048));
    for sequences in [1, 2, 8, 17] {
        for model in [&one, &deep] {
            assert_eq!(of_a_step(model, sequences), (0, 0), "{sequences} sequences");
        }
    }
    // Fewer than before use what is there.
    assert_eq!(of_a_step(&deep, 3), (0, 0));
}
