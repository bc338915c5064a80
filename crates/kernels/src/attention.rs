//! Segmented attention: query rows over a list of KV segments, no concatenated copy.
//!
//! A key is visible to a query when its prompt position is not after the query's, so causality,
//! link tokens and chunked prefill are one rule. Every segment brings the queries rotated for
//! its position shift.

use std::cell::RefCell;

use matkv_types::{GROUP_ROWS, KvDtype, KvLayout, Precision, TILE_ROWS};
use rayon::prelude::*;

use crate::activations::ActivationsMut;
use crate::block::{BLOCK_ROWS, Block, HEAD_DIM_MAX, Partial, Queries, Scratch, attend_block};
use crate::isa::Isa;
use crate::totals::{merge, store_row};

/// Query rows one task takes; with three query heads a KV head, 48 rows share each K tile.
const QUERY_ROWS: usize = 16;
/// Up to this many query rows, work is split over context instead of over rows.
const SPLIT_CONTEXT_ROWS: usize = 4;

/// A run of KV rows in one slot.
#[derive(Clone, Copy)]
pub struct SegmentView<'a> {
    /// The slot's KV section.
    pub section: &'a [u8],
    /// Its arithmetic.
    pub layout: KvLayout,
    /// First row of the run.
    pub first_row: usize,
    /// Rows in the run.
    pub rows: usize,
    /// Prompt position of the first row.
    pub position: usize,
    /// `[query rows][heads · head_dim]`, rotated for this segment and scaled by `1/√head_dim`.
    pub queries: &'a [f32],
}

/// Query rows of one sequence in one layer.
pub struct AttentionJob<'a> {
    /// Segments in prompt order.
    pub segments: Vec<SegmentView<'a>>,
    /// Prompt position of each query row.
    pub positions: &'a [usize],
    /// `[query rows][heads · head_dim]`; of any type, whatever the precision.
    pub out: ActivationsMut<'a>,
}

/// Where a plan's output goes.
#[derive(Clone, Copy)]
enum Out {
    F32(*mut f32),
    Bf16(*mut u16),
}

struct Plan<'a> {
    segments: Vec<SegmentView<'a>>,
    positions: &'a [usize],
    out: Out,
    blocks: Vec<(usize, usize)>,
}

// SAFETY: `out` is written through by tasks for disjoint rows and heads only.
unsafe impl Send for Plan<'_> {}
// SAFETY: as above.
unsafe impl Sync for Plan<'_> {}

#[derive(Clone, Copy)]
struct Geometry {
    isa: Isa,
    precision: Precision,
    layer: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

impl Geometry {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Attention of every job in `layer`; jobs are independent sequences.
///
/// # Panics
/// If a segment does not fit its section or sizes disagree.
pub fn attend(
    isa: Isa,
    precision: Precision,
    layer: usize,
    heads: usize,
    jobs: Vec<AttentionJob<'_>>,
) {
    let Some(shape) = jobs.iter().find_map(|j| j.segments.first()).map(|s| s.layout.shape) else {
        return;
    };
    let (kv_heads, dim) = (shape.kv_heads, shape.head_dim);
    let g = Geometry { isa, precision, layer, heads, kv_heads, dim };
    assert!(dim.is_multiple_of(32) && dim <= HEAD_DIM_MAX, "head dimension {dim}");
    assert!(heads.is_multiple_of(kv_heads) && layer < shape.layers);
    let plans: Vec<Plan<'_>> = jobs.into_iter().map(|job| plan(&g, job)).collect();
    let mut tasks = Vec::new();
    for plan in &plans {
        for kv_head in 0..g.kv_heads {
            for first in (0..plan.positions.len()).step_by(QUERY_ROWS) {
                let count = QUERY_ROWS.min(plan.positions.len() - first);
                tasks.push((plan, Rows { kv_head, first, count }));
            }
        }
    }
    tasks.into_par_iter().for_each(|(plan, rows)| {
        if plan.positions.len() <= SPLIT_CONTEXT_ROWS && plan.blocks.len() > 2 {
            split_over_context(&g, plan, rows);
        } else {
            sequential(&g, plan, rows);
        }
    });
}

fn plan<'a>(g: &Geometry, job: AttentionJob<'a>) -> Plan<'a> {
    let width = g.heads * g.dim;
    assert_eq!(job.out.len(), job.positions.len() * width, "output size");
    let mut blocks = Vec::new();
    for (i, s) in job.segments.iter().enumerate() {
        assert_eq!(s.queries.len(), job.out.len(), "query size of segment {i}");
        let shape = s.layout.shape;
        let same =
            shape.kv_heads == g.kv_heads && shape.head_dim == g.dim && g.layer < shape.layers;
        assert!(same, "segment {i}: another shape");
        assert!(s.layout.dtype.in_arena() == s.layout.dtype, "segment {i}: not an arena form");
        assert!(s.section.len() >= s.layout.total_bytes(), "segment {i}: section too short");
        assert!(s.first_row + s.rows <= s.layout.rows, "segment {i}: rows past the slot's end");
        assert!((s.section.as_ptr() as usize).is_multiple_of(4), "segment {i}: misaligned");
        let start = s.first_row / TILE_ROWS * TILE_ROWS;
        let end = s.first_row + s.rows;
        blocks.extend((start..end).step_by(BLOCK_ROWS).map(|row| (i, row)));
    }
    let out = match job.out {
        ActivationsMut::F32(out) => Out::F32(out.as_mut_ptr()),
        ActivationsMut::Bf16(out) => Out::Bf16(out.as_mut_ptr()),
    };
    Plan { segments: job.segments, positions: job.positions, out, blocks }
}

/// Gathers the query rows of one KV head: `[row][head in group][dim]`.
fn gather(g: &Geometry, s: &SegmentView<'_>, rows: Rows, out: &mut Vec<f32>) {
    let (width, run) = (g.heads * g.dim, g.group() * g.dim);
    out.clear();
    for row in rows.first..rows.first + rows.count {
        out.extend_from_slice(&s.queries[row * width + rows.kv_head * run..][..run]);
    }
}

/// Memory a thread keeps from task to task.
#[derive(Default)]
struct Buffers {
    queries: Vec<f32>,
    visible: Vec<usize>,
    partial: Vec<f32>,
    total: Vec<f32>,
    scratch: Box<Scratch>,
}

/// Runs `f` with the thread's buffers. They are taken out meanwhile, so that a task the thread
/// steals while it waits inside `f` finds none and makes its own.
fn with_buffers(f: impl FnOnce(&mut Buffers)) {
    thread_local! {
        static BUFFERS: RefCell<Option<Box<Buffers>>> = const { RefCell::new(None) };
    }
    let mut buffers = BUFFERS.take().unwrap_or_default();
    f(&mut buffers);
    BUFFERS.set(Some(buffers));
}

/// Some query rows of one KV head.
#[derive(Clone, Copy)]
struct Rows {
    kv_head: usize,
    first: usize,
    count: usize,
}

fn block_partial(
    g: &Geometry,
    plan: &Plan<'_>,
    at: (usize, usize),
    rows: Rows,
    (q, visible, scratch): (&[f32], &mut Vec<usize>, &mut Scratch),
    partial: &mut Partial<'_>,
) {
    let (s, start) = (&plan.segments[at.0], at.1);
    let kv_head = rows.kv_head;
    let end = (s.first_row + s.rows - start).min(BLOCK_ROWS);
    let lo = s.first_row.saturating_sub(start);
    visible.clear();
    for row in rows.first..rows.first + rows.count {
        // Keys at or before the query's position, counted from the block's first row.
        let seen = (plan.positions[row] + 1).saturating_sub(s.position).min(s.rows);
        let below = (s.first_row + seen).saturating_sub(start).min(end);
        visible.extend(std::iter::repeat_n(below, g.group()));
    }
    let offset = s.layout.dtype.bytes_of(start * g.dim);
    let (mut k_scales, mut v_scales) = (std::ptr::null(), std::ptr::null());
    if s.layout.dtype == KvDtype::Int8 {
        let groups = s.layout.k_scale_offset(g.layer, kv_head) + start / GROUP_ROWS * g.dim * 2;
        k_scales = s.section[groups..].as_ptr().cast();
        v_scales =
            s.section[s.layout.v_scale_offset(g.layer, kv_head) + start * 2..].as_ptr().cast();
    }
    let block = Block {
        k: s.section[s.layout.k_offset(g.layer, kv_head) + offset..].as_ptr(),
        v: s.section[s.layout.v_offset(g.layer, kv_head) + offset..].as_ptr(),
        dtype: s.layout.dtype,
        k_scales,
        v_scales,
        phase: start % GROUP_ROWS,
        lo,
        hi: end,
    };
    let queries = Queries { q, dim: g.dim, visible };
    // SAFETY: `plan` checked that the segment's rows lie inside the section; blocks are padded to
    // whole tiles there; the section is borrowed, so nobody writes it.
    unsafe { attend_block(g.isa, g.precision, queries, block, scratch, partial) }
}

/// Memory of the running total of `m` rows, none of which has seen anything yet.
fn empty_total(memory: &mut Vec<f32>, m: usize, dim: usize) -> Partial<'_> {
    memory.clear();
    memory.resize(Partial::len(m, dim), 0.0);
    let total = Partial::new(memory, m);
    total.max.fill(f32::NEG_INFINITY);
    total
}

fn store(g: &Geometry, plan: &Plan<'_>, rows: Rows, total: &Partial<'_>) {
    let (width, group) = (g.heads * g.dim, g.group());
    for m in 0..rows.count * group {
        let (row, head) = (rows.first + m / group, rows.kv_head * group + m % group);
        let at = row * width + head * g.dim;
        // SAFETY: `out` has a row of `width` for each position (checked in `plan`), and this
        // task alone owns these rows of this KV head.
        unsafe {
            match plan.out {
                Out::F32(out) => store_row(g.isa, total, m, out.add(at)),
                Out::Bf16(out) => store_row(g.isa, total, m, out.add(at)),
            }
        }
    }
}

fn sequential(g: &Geometry, plan: &Plan<'_>, rows: Rows) {
    let m = rows.count * g.group();
    with_buffers(|b| {
        let mut total = empty_total(&mut b.total, m, g.dim);
        b.partial.resize(Partial::len(m, g.dim), 0.0);
        let mut partial = Partial::new(&mut b.partial, m);
        let mut segment = usize::MAX;
        for &at in &plan.blocks {
            if segment != at.0 {
                segment = at.0;
                gather(g, &plan.segments[segment], rows, &mut b.queries);
            }
            let memory = (&b.queries[..], &mut b.visible, &mut *b.scratch);
            block_partial(g, plan, at, rows, memory, &mut partial);
            // SAFETY: both are partials of `m` rows of `dim`, a multiple of 32.
            unsafe { merge(g.isa, &mut total, &partial) };
        }
        store(g, plan, rows, &total);
    });
}

fn split_over_context(g: &Geometry, plan: &Plan<'_>, rows: Rows) {
    let m = rows.count * g.group();
    let mut queries = vec![Vec::new(); plan.segments.len()];
    plan.segments.iter().zip(&mut queries).for_each(|(s, q)| gather(g, s, rows, q));
    let len = Partial::len(m, g.dim);
    let mut partials = vec![0.0; plan.blocks.len() * len];
    partials.par_chunks_exact_mut(len).zip(&plan.blocks).for_each(|(memory, &at)| {
        with_buffers(|b| {
            let memory_of_block = (&queries[at.0][..], &mut b.visible, &mut *b.scratch);
            block_partial(g, plan, at, rows, memory_of_block, &mut Partial::new(memory, m));
        });
    });
    let mut memory = Vec::new();
    let mut total = empty_total(&mut memory, m, g.dim);
    for partial in partials.chunks_exact_mut(len) {
        // SAFETY: both are partials of `m` rows of `dim`, a multiple of 32.
        unsafe { merge(g.isa, &mut total, &Partial::new(partial, m)) };
    }
    store(g, plan, rows, &total);
}
