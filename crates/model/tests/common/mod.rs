//! Prompts as lists of segments, some in the sequence's own section, some in other slots.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::ops::Range;
use std::path::{Path, PathBuf};

use matkv_model::{ForwardRow, LanguageModel, Phase, Segment, Source, Step, greedy};
use matkv_testkit::TinyModel;
use matkv_types::{KvDtype, KvLayout, Precision, TILE_ROWS, align_up};

/// Rows one call computes unless a test says otherwise.
const ROWS_PER_CALL: usize = 512;

pub fn fixture(name: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Writes a model to a temporary directory that lives as long as the first value.
pub fn written(model: &TinyModel) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    model.write(&path);
    (dir, path)
}

pub fn opened(model: &TinyModel) -> LanguageModel {
    let (_dir, path) = written(model);
    LanguageModel::open(&path, None).unwrap()
}

pub fn tiny() -> LanguageModel {
    opened(&TinyModel::default())
}

/// The same in f32.
pub fn exact_tiny() -> LanguageModel {
    let (_dir, path) = written(&TinyModel::default());
    load(&path, Precision::Exact)
}

fn load(path: &Path, precision: Precision) -> LanguageModel {
    load_for(path, precision, Phase::Prefill)
}

fn load_for(path: &Path, precision: Precision, phase: Phase) -> LanguageModel {
    LanguageModel::open_for(path, None, precision, phase).unwrap()
}

/// SmolLM2 as a decoder has it, if it is in the cache.
pub fn real_decoder() -> Option<LanguageModel> {
    let path = matkv_testkit::cached_model("smollm2-135m")?;
    Some(load_for(&path, Precision::default(), Phase::Decode))
}

/// SmolLM2 in the default precision, if it is in the cache.
pub fn real() -> Option<LanguageModel> {
    real_in(Precision::default())
}

/// SmolLM2, if it is in the cache.
pub fn real_in(precision: Precision) -> Option<LanguageModel> {
    Some(load(&matkv_testkit::cached_model("smollm2-135m")?, precision))
}

/// KV rows and their arithmetic. Rows that nobody wrote are NaN, so that reading one shows.
#[derive(Clone)]
pub struct Slot {
    pub section: Vec<u8>,
    pub layout: KvLayout,
}

impl Slot {
    fn new(model: &LanguageModel, dtype: KvDtype, rows: usize) -> Self {
        let layout = KvLayout::new(model.kv_shape(), dtype, rows);
        Self { section: vec![0xff; layout.total_bytes()], layout }
    }
}

#[derive(Clone, Copy)]
struct Run<'a> {
    slot: Option<&'a Slot>,
    first_row: usize,
    rows: usize,
    position: usize,
    shift: i64,
}

/// A prompt under construction.
#[derive(Clone)]
pub struct Sequence<'a> {
    model: &'a LanguageModel,
    pub own: Slot,
    runs: Vec<Run<'a>>,
    /// Prompt position of the next row.
    pub position: usize,
    /// Row of the own section after the last one in use.
    end: usize,
    /// Rows one call computes.
    per_call: usize,
}

impl<'a> Sequence<'a> {
    pub fn new(model: &'a LanguageModel, dtype: KvDtype, rows: usize) -> Self {
        let own = Slot::new(model, dtype, rows);
        Self { model, own, runs: Vec::new(), position: 0, end: 0, per_call: ROWS_PER_CALL }
    }

    /// The same, `per_call` rows a call.
    pub fn per_call(self, per_call: usize) -> Self {
        Self { per_call, ..self }
    }

    /// Appends rows of another slot, the first of which was compiled at position `compiled_at`.
    pub fn attach(&mut self, slot: &'a Slot, rows: Range<usize>, compiled_at: usize) {
        let (first_row, rows) = (rows.start, rows.len());
        let shift = self.position as i64 - compiled_at as i64;
        self.runs.push(Run { slot: Some(slot), first_row, rows, position: self.position, shift });
        self.position += rows;
    }

    /// Begins a run in the own section: at a whole tile, as a slot's rows do, so that blocks of
    /// attention are the same whether a run lies here or in a slot.
    pub fn begin(&mut self) {
        self.end = align_up(self.end, TILE_ROWS);
        let (first_row, position) = (self.end, self.position);
        self.runs.push(Run { slot: None, first_row, rows: 0, position, shift: 0 });
    }

    /// Takes the next rows into the last run, without computing them.
    pub fn rows(&mut self, tokens: &[u32]) -> Vec<ForwardRow> {
        let (position, row) = (self.position, self.end);
        let new = tokens.iter().enumerate();
        let rows =
            new.map(|(i, &token)| ForwardRow { token, position: position + i, row: row + i });
        self.runs.last_mut().expect("a run has begun").rows += tokens.len();
        self.position += tokens.len();
        self.end += tokens.len();
        rows.collect()
    }

    pub fn segments(&self) -> Vec<Segment<'a>> {
        let segment = |run: &Run<'a>| Segment {
            source: run.slot.map_or(Source::Own, |s| Source::Slot(&s.section, s.layout)),
            first_row: run.first_row,
            rows: run.rows,
            position: run.position,
            shift: run.shift,
        };
        self.runs.iter().map(segment).collect()
    }

    /// Rows that have been taken, to be computed, perhaps beside those of others.
    pub fn step<'s>(
        &'s mut self,
        rows: &'s [ForwardRow],
        segments: &'s [Segment<'s>],
        logits: bool,
    ) -> Step<'s> {
        let Slot { section, layout } = &mut self.own;
        Step { rows, segments, own: section, own_layout: *layout, logits }
    }

    /// Computes tokens at the end of the last run; logits of the last one.
    pub fn extend(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut logits = Vec::new();
        let calls = tokens.chunks(self.per_call).len();
        for (call, tokens) in tokens.chunks(self.per_call).enumerate() {
            let (model, rows, segments) = (self.model, self.rows(tokens), self.segments());
            logits = model.forward(&mut [self.step(&rows, &segments, call + 1 == calls)]);
        }
        logits.pop().unwrap_or_default()
    }

    /// Computes tokens as a run of their own; logits of the last.
    pub fn compute(&mut self, tokens: &[u32]) -> Vec<f32> {
        self.begin();
        self.extend(tokens)
    }

    /// The greedy answer that follows `logits`, end tokens taken for ordinary ones.
    pub fn answer(&mut self, mut logits: Vec<f32>, tokens: usize) -> Vec<u32> {
        let mut ids = vec![greedy(&logits)];
        while ids.len() < tokens {
            logits = self.extend(&[ids[ids.len() - 1]]);
            ids.push(greedy(&logits));
        }
        ids
    }
}

/// Position of the first difference in bits, for messages; `None` if all bits are equal.
pub fn first_difference(a: &[f32], b: &[f32]) -> Option<(usize, f32, f32)> {
    assert_eq!(a.len(), b.len());
    let at = a.iter().zip(b).position(|(x, y)| x.to_bits() != y.to_bits())?;
    Some((at, a[at], b[at]))
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}
