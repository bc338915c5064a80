//! The forward pass: new rows of some sequences over lists of KV segments.
//!
//! Rows of all sequences run through the matrix products together; attention runs per sequence
//! over its own segments. Nothing is concatenated: segments are read where they lie.

use matkv_kernels::{
    AttentionJob, Isa, PackedMatrix, RopeAngles, SegmentView, add_assign, attend, gemm, rms_norm,
    rotate_heads, silu_mul, write_rows,
};
use matkv_types::KvLayout;
use rayon::prelude::*;

use crate::config::LlamaConfig;
use crate::weights::{Layer, LlamaWeights};

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

/// Queries of a step rotated for one shift.
struct Rotation {
    shift: i64,
    angles: RopeAngles,
    queries: Vec<f32>,
}

struct Pass<'a> {
    isa: Isa,
    c: &'a LlamaConfig,
    w: &'a LlamaWeights,
    rotations: Vec<Vec<Rotation>>,
    own_angles: Vec<RopeAngles>,
    positions: Vec<Vec<usize>>,
}

/// Runs the steps together; returns logits `[steps that want them][vocab]`, or nothing if
/// `go_on`, asked before every layer, said no: the new rows are then partly written.
pub(crate) fn forward(
    isa: Isa,
    c: &LlamaConfig,
    w: &LlamaWeights,
    steps: &mut [Step<'_>],
    go_on: &mut dyn FnMut() -> bool,
) -> Option<Vec<Vec<f32>>> {
    let mut x: Vec<f32> = Vec::new();
    for row in steps.iter().flat_map(|s| s.rows) {
        embed(&w.embedding, row.token, &mut x);
    }
    let mut pass = Pass::new(isa, c, w, steps);
    for (i, layer) in w.layers.iter().enumerate() {
        if !go_on() {
            return None;
        }
        pass.attention(i, layer, steps, &mut x);
        pass.feed_forward(layer, &mut x);
    }
    Some(pass.logits(steps, &x))
}

fn embed(embedding: &PackedMatrix, token: u32, x: &mut Vec<f32>) {
    let start = x.len();
    x.resize(start + embedding.k(), 0.0);
    embedding.unpack_row(token as usize, &mut x[start..]);
}

impl<'a> Pass<'a> {
    fn new(isa: Isa, c: &'a LlamaConfig, w: &'a LlamaWeights, steps: &[Step<'_>]) -> Self {
        let rotations = steps.iter().map(|step| {
            let mut list: Vec<Rotation> = Vec::new();
            for segment in step.segments {
                if list.iter().all(|r| r.shift != segment.shift) {
                    let at = step.rows.iter().map(|r| r.position as i64 - segment.shift);
                    let queries = vec![0.0; step.rows.len() * c.heads * c.head_dim];
                    list.push(Rotation {
                        shift: segment.shift,
                        angles: c.rope.angles(at),
                        queries,
                    });
                }
            }
            list
        });
        Self {
            isa,
            c,
            w,
            rotations: rotations.collect(),
            own_angles: steps
                .iter()
                .map(|s| c.rope.angles(s.rows.iter().map(|r| r.position as i64)))
                .collect(),
            positions: steps.iter().map(|s| s.rows.iter().map(|r| r.position).collect()).collect(),
        }
    }

    /// `x += Wo · attention(norm(x))`.
    fn attention(&mut self, i: usize, layer: &Layer, steps: &mut [Step<'_>], x: &mut [f32]) {
        let c = self.c;
        let rows = x.len() / c.hidden;
        let mut normed = vec![0.0; x.len()];
        rms_norm(self.isa, x, &layer.attention_norm, c.epsilon, &mut normed);
        let width = layer.qkv.padded_n();
        let mut qkv = vec![0.0; rows * width];
        gemm(self.isa, &normed, &layer.qkv, &mut qkv);
        let mut first = 0;
        for (s, step) in steps.iter_mut().enumerate() {
            let part = &qkv[first * width..(first + step.rows.len()) * width];
            self.store_rows(i, s, step, part, width);
            self.rotate_queries(s, part, width);
            first += step.rows.len();
        }
        let mut out = vec![0.0; rows * c.heads * c.head_dim];
        self.attend(i, steps, &mut out);
        let mut y = vec![0.0; rows * layer.output.padded_n()];
        gemm(self.isa, &out, &layer.output, &mut y);
        add_rows(x, &y, c.hidden, layer.output.padded_n());
    }

    /// Rotates keys to their own position and writes K and V into the own section.
    fn store_rows(&self, layer: usize, s: usize, step: &mut Step<'_>, qkv: &[f32], width: usize) {
        let c = self.c;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut k = vec![0.0; kv];
        for (i, (row, x)) in step.rows.iter().zip(qkv.chunks_exact(width)).enumerate() {
            rotate_heads(c.rope.style, &self.own_angles[s], i, &x[q..q + kv], 1.0, &mut k);
            write_rows(step.own, &step.own_layout, layer, row.row, &k, &x[q + kv..q + 2 * kv]);
        }
    }

    fn rotate_queries(&mut self, s: usize, qkv: &[f32], width: usize) {
        let c = self.c;
        let q = c.heads * c.head_dim;
        let scale = 1.0 / (c.head_dim as f32).sqrt();
        for rotation in &mut self.rotations[s] {
            let angles = &rotation.angles;
            let turn = |(i, (out, x)): (usize, (&mut [f32], &[f32]))| {
                rotate_heads(c.rope.style, angles, i, &x[..q], scale, out);
            };
            let rows = qkv.len() / width;
            let (out, input) = (&mut rotation.queries, qkv);
            if rows > 16 {
                out.par_chunks_exact_mut(q)
                    .zip(input.par_chunks_exact(width))
                    .enumerate()
                    .for_each(turn);
            } else {
                out.chunks_exact_mut(q).zip(input.chunks_exact(width)).enumerate().for_each(turn);
            }
        }
    }

    fn attend(&self, layer: usize, steps: &[Step<'_>], mut out: &mut [f32]) {
        let c = self.c;
        let width = c.heads * c.head_dim;
        let mut jobs = Vec::with_capacity(steps.len());
        for (s, step) in steps.iter().enumerate() {
            let (mine, rest) = out.split_at_mut(step.rows.len() * width);
            out = rest;
            let segments = step.segments.iter().map(|segment| {
                let (section, layout) = match segment.source {
                    Source::Own => (&*step.own, step.own_layout),
                    Source::Slot(section, layout) => (section, layout),
                };
                let rotation = self.rotations[s].iter().find(|r| r.shift == segment.shift);
                SegmentView {
                    section,
                    layout,
                    first_row: segment.first_row,
                    rows: segment.rows,
                    position: segment.position,
                    queries: rotation.map_or(&[], |r| &r.queries),
                }
            });
            jobs.push(AttentionJob {
                segments: segments.collect(),
                positions: &self.positions[s],
                out: mine,
            });
        }
        attend(self.isa, layer, c.heads, jobs);
    }

    /// `x += Wdown · (silu(Wgate · n) · (Wup · n))`, `n = norm(x)`.
    fn feed_forward(&self, layer: &Layer, x: &mut [f32]) {
        let c = self.c;
        let rows = x.len() / c.hidden;
        let mut normed = vec![0.0; x.len()];
        rms_norm(self.isa, x, &layer.ffn_norm, c.epsilon, &mut normed);
        let mut gate_up = vec![0.0; rows * layer.gate_up.padded_n()];
        gemm(self.isa, &normed, &layer.gate_up, &mut gate_up);
        let mut act = vec![0.0; rows * c.ffn];
        silu_mul(self.isa, &gate_up, c.ffn, &mut act);
        let mut y = vec![0.0; rows * layer.down.padded_n()];
        gemm(self.isa, &act, &layer.down, &mut y);
        add_rows(x, &y, c.hidden, layer.down.padded_n());
    }

    fn logits(&self, steps: &[Step<'_>], x: &[f32]) -> Vec<Vec<f32>> {
        let c = self.c;
        let mut last = Vec::new();
        let mut first = 0;
        for step in steps {
            first += step.rows.len();
            if step.logits {
                last.extend_from_slice(&x[(first - 1) * c.hidden..first * c.hidden]);
            }
        }
        let mut normed = vec![0.0; last.len()];
        rms_norm(self.isa, &last, &self.w.norm, c.epsilon, &mut normed);
        let head = self.w.head.as_ref().unwrap_or(&self.w.embedding);
        let mut out = vec![0.0; last.len() / c.hidden * head.padded_n()];
        gemm(self.isa, &normed, head, &mut out);
        out.chunks_exact(head.padded_n()).map(|row| row[..c.vocab].to_vec()).collect()
    }
}

/// Adds rows of `y` (stride `padded`) to rows of `x` (stride `width`).
fn add_rows(x: &mut [f32], y: &[f32], width: usize, padded: usize) {
    for (x, y) in x.chunks_exact_mut(width).zip(y.chunks_exact(padded)) {
        add_assign(x, &y[..width]);
    }
}
