//! The forward pass: new rows of some sequences over lists of KV segments.
//!
//! Rows of all sequences run through the matrix products together; attention runs per sequence
//! over its own segments. Nothing is concatenated: segments are read where they lie. What nobody
//! reads is not computed: the last layer makes K and V of all rows, and the rest only of rows whose
//! logits are wanted.

use std::sync::{Mutex, PoisonError};

use matkv_kernels::{
    Attention, AttentionJob, Isa, LayerInput, Layers, NewRows, PlanMemory, RopeAngles, Section,
    SegmentView, append_rows, query_scale, resize_unread, rms_norm, rotate_heads, team,
};
use matkv_types::{KvLayout, Precision};

use crate::config::LlamaConfig;
use crate::linear::{Input, Linear};
use crate::weights::{Layer, LlamaWeights};

/// Rows one parallel task takes; fewer rows run on the calling thread.
const ROWS_PER_TASK: usize = 16;
/// Most rows of a pass whose buffers are kept: as many as sequences are decoded together.
const ROWS_KEPT: usize = 64;

/// A token to compute, and where its K and V go in the sequence's own section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardRow {
    /// Token id.
    pub token: u32,
    /// Position in the prompt.
    pub position: usize,
    /// Row in the sequence's own section.
    pub row: usize,
}

/// Where a segment's rows lie.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// In the sequence's own section.
    Own,
    /// In another slot.
    Slot(&'a [u8], KvLayout),
    /// In a slot whose layers are on their way: each is asked for after `go_on` has been.
    Layers(&'a dyn Layers, KvLayout),
}

/// A run of KV rows a sequence attends to.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    /// Where the rows lie.
    pub source: Source<'a>,
    /// First row there.
    pub first_row: usize,
    /// Rows in the run.
    pub rows: usize,
    /// Prompt position of the first row.
    pub position: usize,
    /// Prompt position minus the position the rows were compiled at.
    pub shift: i64,
}

/// New rows of one sequence.
pub struct Step<'a> {
    /// Rows to compute.
    pub rows: &'a [ForwardRow],
    /// Everything the rows attend to, themselves included, in prompt order.
    pub segments: &'a [Segment<'a>],
    /// The sequence's own KV section.
    pub own: &'a mut [u8],
    /// Its arithmetic.
    pub own_layout: KvLayout,
    /// Compute logits of the last row.
    pub logits: bool,
}

/// How numbers are multiplied.
#[derive(Clone, Copy)]
pub(crate) struct Arithmetic {
    pub isa: Isa,
    pub precision: Precision,
}

/// The shifts that a step's segments have, and its queries rotated for each. Behind those, angles
/// and queries are memory.
#[derive(Default)]
struct Rotations {
    shifts: Vec<i64>,
    /// Rows before these see no segment of the shift, and are not rotated for it.
    first: Vec<usize>,
    angles: Vec<RopeAngles>,
    queries: Vec<Vec<f32>>,
}

impl Rotations {
    fn fit(&mut self, c: &LlamaConfig, step: &Step<'_>) {
        self.shifts.clear();
        self.first.clear();
        for segment in step.segments {
            if !self.shifts.contains(&segment.shift) {
                self.shifts.push(segment.shift);
            }
        }
        for (i, shift) in self.shifts.iter().enumerate() {
            let of = step.segments.iter().filter(|s| s.shift == *shift);
            let position = of.map(|s| s.position).min().unwrap_or(0);
            let seeing = step.rows.iter().position(|r| r.position >= position);
            self.first.push(seeing.unwrap_or(step.rows.len()));
            if i == self.angles.len() {
                self.angles.push(RopeAngles::default());
                self.queries.push(Vec::new());
            }
            let positions = step.rows.iter().map(|r| r.position as i64 - shift);
            c.rope.angles_into(positions, &mut self.angles[i]);
            self.queries[i].clear();
            self.queries[i].resize(step.rows.len() * c.heads * c.head_dim, 0.0);
        }
    }

    /// What attention reads of a step.
    fn job<'s>(&self, step: &Step<'s>, job: &mut AttentionJob<'s>) {
        let view = |segment: &Segment<'s>| {
            let (section, layout) = match segment.source {
                Source::Own => (Section::Own, step.own_layout),
                Source::Slot(section, layout) => (Section::Whole(section), layout),
                Source::Layers(layers, layout) => (Section::Layers(layers), layout),
            };
            SegmentView {
                section,
                layout,
                first_row: segment.first_row,
                rows: segment.rows,
                position: segment.position,
                rotation: self.shifts.iter().position(|s| *s == segment.shift).unwrap_or(0),
            }
        };
        job.segments.extend(step.segments.iter().map(view));
        job.positions.extend(step.rows.iter().map(|r| r.position));
    }
}

/// What is planned of each step, beside attention. There may be more of them than steps.
#[derive(Default)]
struct Lists {
    rotations: Rotations,
    angles: RopeAngles,
    rows: Vec<usize>,
}

impl Lists {
    fn fit(&mut self, c: &LlamaConfig, step: &Step<'_>) {
        self.rotations.fit(c, step);
        c.rope.angles_into(step.rows.iter().map(|r| r.position as i64), &mut self.angles);
        self.rows.clear();
        self.rows.extend(step.rows.iter().map(|r| r.row));
    }
}

/// Results between matrix products, all rows together; memory that every layer, and the next pass,
/// uses again.
pub(crate) struct Buffers {
    x: Vec<f32>,
    normed: Input,
    qkv: Vec<f32>,
    keys: Vec<f32>,
    attended: Input,
    gate_up: Vec<f32>,
    gated: Input,
    wanted: Input,
    logits: Vec<f32>,
    lists: Vec<Lists>,
    plan: PlanMemory,
}

impl Buffers {
    fn new(w: &LlamaWeights) -> Self {
        Self {
            x: Vec::new(),
            normed: Input::zeros(w.kept, 0),
            qkv: Vec::new(),
            keys: Vec::new(),
            attended: Input::zeros(w.kept, 0),
            gate_up: Vec::new(),
            gated: Input::zeros(w.kept, 0),
            wanted: Input::zeros(w.head_kept, 0),
            logits: Vec::new(),
            lists: Vec::new(),
            plan: PlanMemory::default(),
        }
    }

    /// Room for so many rows.
    fn fit(&mut self, c: &LlamaConfig, w: &LlamaWeights, rows: usize) {
        let width = w.layers.first().map_or(0, |l| l.qkv.padded_n());
        self.normed.resize(rows * c.hidden);
        resize_unread(&mut self.qkv, rows * width, f32::NAN);
        resize_unread(&mut self.keys, rows * c.kv_heads * c.head_dim, f32::NAN);
        self.attended.resize(rows * c.heads * c.head_dim);
        self.gated.resize(rows * c.ffn);
    }

    /// `x += Wo · attended`, then `x += Wdown · (silu(Wgate · n) · (Wup · n))`, `n = norm(x)`.
    fn finish_layer(&mut self, isa: Isa, c: &LlamaConfig, layer: &Layer, x: &mut [f32]) {
        layer.output.add_product(isa, &mut self.attended, x);
        rms_norm(isa, x, &layer.ffn_norm, c.epsilon, &mut self.normed.values);
        layer.gate_up.product(isa, &mut self.normed, &mut self.gate_up, &mut self.gated);
        layer.down.add_product(isa, &mut self.gated, x);
    }
}

/// The buffers of the last pass, unless it was a large one: steps of decoding follow each other.
#[derive(Default)]
pub(crate) struct LastBuffers(Mutex<Option<Buffers>>);

impl LastBuffers {
    fn take(&self, w: &LlamaWeights) -> Buffers {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.unwrap_or_else(|| Buffers::new(w))
    }

    fn put(&self, buffers: Buffers, rows: usize) {
        if rows <= ROWS_KEPT {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffers);
        }
    }
}

struct Pass<'a> {
    isa: Isa,
    precision: Precision,
    c: &'a LlamaConfig,
    w: &'a LlamaWeights,
    attention: Attention<'a>,
    lists: Vec<Lists>,
    buffers: Buffers,
    /// What each row of each segment of the first step is attended to, if that is wanted.
    attended: Option<Vec<Vec<f32>>>,
}

/// Runs the steps together; writes logits of those that want them, `[steps][vocab]`. False if
/// `go_on`, asked before every layer with its number, said no: the new rows are then partly
/// written.
pub(crate) fn forward(
    arithmetic: Arithmetic,
    (c, w): (&LlamaConfig, &LlamaWeights),
    last: &LastBuffers,
    steps: &mut [Step<'_>],
    go_on: &mut dyn FnMut(usize) -> bool,
    logits: &mut Vec<Vec<f32>>,
) -> bool {
    let rows = steps.iter().map(|s| s.rows.len()).sum();
    let mut pass = Pass::new(arithmetic, (c, w), last.take(w), steps);
    let x = pass.run(steps, go_on);
    let done = x.is_some();
    if let Some(x) = x {
        pass.logits(&x, logits);
        pass.buffers.x = x;
    }
    last.put(pass.into_buffers(), rows);
    done
}

/// Runs a step, and returns for each of its segments what each row is attended to by the step's
/// rows, summed over layers, heads and rows.
pub(crate) fn forward_attended(
    arithmetic: Arithmetic,
    c: &LlamaConfig,
    w: &LlamaWeights,
    step: Step<'_>,
    go_on: &mut dyn FnMut(usize) -> bool,
) -> Option<Vec<Vec<f32>>> {
    let zeros = step.segments.iter().map(|s| vec![0.0; s.rows]).collect();
    let mut steps = [step];
    let mut pass = Pass::new(arithmetic, (c, w), Buffers::new(w), &steps);
    pass.attended = Some(zeros);
    pass.run(&mut steps, go_on)?;
    pass.attended
}

fn embed(embedding: &Linear, token: u32, x: &mut Vec<f32>) {
    let start = x.len();
    x.resize(start + embedding.k(), 0.0);
    embedding.unpack_row(token as usize, &mut x[start..]);
}

impl<'a> Pass<'a> {
    fn new(
        Arithmetic { isa, precision }: Arithmetic,
        (c, w): (&'a LlamaConfig, &'a LlamaWeights),
        mut buffers: Buffers,
        steps: &[Step<'a>],
    ) -> Self {
        let rows: usize = steps.iter().map(|s| s.rows.len()).sum();
        buffers.fit(c, w, rows);
        let mut lists = std::mem::take(&mut buffers.lists);
        lists.resize_with(lists.len().max(steps.len()), Lists::default);
        lists.iter_mut().zip(steps).for_each(|(lists, step)| lists.fit(c, step));
        let (plan, arithmetic) = (std::mem::take(&mut buffers.plan), (isa, precision));
        let jobs = steps.iter().zip(&lists);
        let attention = Attention::in_memory(plan, arithmetic, c.heads, jobs, |(s, l), job| {
            l.rotations.job(s, job);
        });
        Self { isa, precision, c, w, attention, lists, buffers, attended: None }
    }

    /// Its memory, for the next one.
    fn into_buffers(self) -> Buffers {
        let Self { attention, lists, buffers, .. } = self;
        Buffers { plan: attention.into_memory(), lists, ..buffers }
    }

    /// All layers, unless `go_on` says no.
    fn run(
        &mut self,
        steps: &mut [Step<'_>],
        go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Option<Vec<f32>> {
        let mut x = std::mem::take(&mut self.buffers.x);
        x.clear();
        for row in steps.iter().flat_map(|s| s.rows) {
            embed(&self.w.ends.embedding, row.token, &mut x);
        }
        // Whether only some rows are wanted of the last layer; who attends counts all of them.
        let more = |s: &Step<'_>| s.rows.len() > usize::from(s.logits);
        let some = self.attended.is_none() && steps.iter().any(more);
        for (i, layer) in self.w.layers.iter().enumerate() {
            if !go_on(i) {
                return None;
            }
            self.project(i, layer, steps, &x);
            if some && i + 1 == self.w.layers.len() {
                return Some(self.last_layer(i, layer, steps, &x));
            }
            self.attend(i, steps);
            self.buffers.finish_layer(self.isa, self.c, layer, &mut x);
        }
        Some(x)
    }

    /// Queries, keys and values of `norm(x)`; keys and values go to their sections.
    fn project(&mut self, i: usize, layer: &Layer, steps: &mut [Step<'_>], x: &[f32]) {
        let c = self.c;
        let width = layer.qkv.padded_n();
        let Buffers { normed, qkv, .. } = &mut self.buffers;
        rms_norm(self.isa, x, &layer.attention_norm, c.epsilon, &mut normed.values);
        layer.qkv.product(self.isa, normed, qkv);
        let qkv = std::mem::take(&mut self.buffers.qkv);
        let mut first = 0;
        for (s, step) in steps.iter_mut().enumerate() {
            let part = &qkv[first * width..(first + step.rows.len()) * width];
            self.store_rows(i, s, step, part, width);
            first += step.rows.len();
        }
        self.buffers.qkv = qkv;
    }

    /// Rotates keys to their own position and writes K and V into the own section.
    fn store_rows(
        &mut self,
        layer: usize,
        s: usize,
        step: &mut Step<'_>,
        qkv: &[f32],
        width: usize,
    ) {
        let c = self.c;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let keys = &mut self.buffers.keys[..step.rows.len() * kv];
        let Lists { angles, rows, .. } = &self.lists[s];
        for_each_row(keys, kv, qkv, width, |i, out, x| {
            rotate_heads(c.rope.style, angles, i, &x[q..q + kv], 1.0, out);
        });
        let k = NewRows { values: keys, stride: kv };
        let v = NewRows { values: qkv.get(q + kv..).unwrap_or_default(), stride: width };
        append_rows(step.own, &step.own_layout, layer, rows, k, v);
    }

    /// Attention of all rows.
    fn attend(&mut self, layer: usize, steps: &[Step<'_>]) {
        let c = self.c;
        let (q, width) = (c.heads * c.head_dim, self.w.layers[layer].qkv.padded_n());
        let scale = query_scale(c.head_dim);
        let mut qkv = &self.buffers.qkv[..];
        for (step, lists) in steps.iter().zip(&mut self.lists) {
            let Rotations { first, angles, queries, .. } = &mut lists.rotations;
            let (part, rest) = qkv.split_at(step.rows.len() * width);
            for ((&first, angles), queries) in first.iter().zip(angles.iter()).zip(queries) {
                let (queries, qkv) = (&mut queries[first * q..], &part[first * width..]);
                for_each_row(queries, q, qkv, width, |i, out, x| {
                    rotate_heads(c.rope.style, angles, first + i, &x[..q], scale, out);
                });
            }
            qkv = rest;
        }
        let lists = &self.lists;
        let input =
            |s: usize| LayerInput { own: steps[s].own, queries: &lists[s].rotations.queries };
        if let Some(sums) = &mut self.attended {
            self.attention.attended(layer, input, sums);
        }
        self.attention.run(layer, input, self.buffers.attended.values.as_mut());
    }

    /// The rest of the last layer for the last row of each step that wants logits; returns them.
    fn last_layer(&self, i: usize, layer: &Layer, steps: &[Step<'_>], x: &[f32]) -> Vec<f32> {
        let c = self.c;
        let (q, width) = (c.heads * c.head_dim, layer.qkv.padded_n());
        let scale = query_scale(c.head_dim);
        let (mut out, mut jobs, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let mut end = 0;
        for (step, Lists { rotations, .. }) in steps.iter().zip(&self.lists) {
            end += step.rows.len();
            if !step.logits {
                continue;
            }
            let (at, own) = (end - 1, step.rows.len() - 1);
            out.extend_from_slice(&x[at * c.hidden..end * c.hidden]);
            let mut job = AttentionJob::default();
            rotations.job(step, &mut job);
            job.positions.drain(..own);
            jobs.push(job);
            let row = &self.buffers.qkv[at * width..][..q];
            let rotated = |angles: &RopeAngles| {
                let mut queries = vec![0.0; q];
                rotate_heads(c.rope.style, angles, own, row, scale, &mut queries);
                queries
            };
            let angles = rotations.angles.iter().take(rotations.shifts.len());
            wanted.push((&*step.own, angles.map(rotated).collect::<Vec<_>>()));
        }
        if out.is_empty() {
            return out;
        }
        let input = |r: usize| LayerInput { own: wanted[r].0, queries: &wanted[r].1 };
        let mut buffers = Buffers::new(self.w);
        buffers.fit(c, self.w, wanted.len());
        let mut attention = Attention::new(self.isa, self.precision, c.heads, jobs);
        attention.run(i, input, buffers.attended.values.as_mut());
        buffers.finish_layer(self.isa, c, layer, &mut out);
        out
    }

    /// Logits of rows that have gone through all layers.
    fn logits(&mut self, x: &[f32], out: &mut Vec<Vec<f32>>) {
        let (c, head) = (self.c, self.w.ends.head());
        let Buffers { wanted, logits, .. } = &mut self.buffers;
        wanted.resize(x.len());
        rms_norm(self.isa, x, &self.w.norm, c.epsilon, &mut wanted.values);
        let (rows, width) = (x.len() / c.hidden, head.padded_n());
        out.resize_with(rows, Vec::new);
        if let [out] = &mut out[..] {
            resize_unread(out, width, f32::NAN);
            head.product(self.isa, wanted, out);
            return out.truncate(c.vocab);
        }
        resize_unread(logits, rows * width, f32::NAN);
        head.product(self.isa, wanted, logits);
        for (row, out) in logits.chunks_exact(width).zip(out) {
            out.clear();
            out.extend_from_slice(&row[..c.vocab]);
        }
    }
}

/// Calls `f` with every row of `out` and the row of `input` it is made of; many rows are shared
/// out.
fn for_each_row(
    out: &mut [f32],
    width: usize,
    input: &[f32],
    input_width: usize,
    f: impl Fn(usize, &mut [f32], &[f32]) + Sync,
) {
    if out.len() > ROWS_PER_TASK * width {
        team::for_each_part(out, ROWS_PER_TASK * width, |task, out| {
            let input = &input[task * ROWS_PER_TASK * input_width..];
            let rows = out.chunks_exact_mut(width).zip(input.chunks_exact(input_width));
            rows.enumerate().for_each(|(i, (out, x))| f(task * ROWS_PER_TASK + i, out, x));
        });
    } else {
        let rows = out.chunks_exact_mut(width).zip(input.chunks_exact(input_width));
        rows.enumerate().for_each(|(i, (out, x))| f(i, out, x));
    }
}
