//! Segmented attention: query rows over a list of KV segments, no concatenated copy.
//!
//! A key is visible to a query when its prompt position is not after the query's, so causality,
//! link tokens and chunked prefill are one rule. Every segment brings the queries rotated for
//! its position shift.

use std::cell::RefCell;

use matkv_types::{GROUP_ROWS, KvDtype, KvLayout, TILE_ROWS};
use rayon::prelude::*;

use crate::block::{BLOCK_ROWS, Block, Partial, Queries, attend_block, merge};
use crate::isa::Isa;

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
    /// `[query rows][heads · head_dim]`.
    pub out: &'a mut [f32],
}

struct Plan<'a> {
    segments: Vec<SegmentView<'a>>,
    positions: &'a [usize],
    out: *mut f32,
    blocks: Vec<(usize, usize)>,
}

// SAFETY: `out` is written through by tasks for disjoint rows and heads only.
unsafe impl Send for Plan<'_> {}
// SAFETY: as above.
unsafe impl Sync for Plan<'_> {}

#[derive(Clone, Copy)]
struct Geometry {
    isa: Isa,
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
pub fn attend(isa: Isa, layer: usize, heads: usize, jobs: Vec<AttentionJob<'_>>) {
    let Some(shape) = jobs.iter().find_map(|j| j.segments.first()).map(|s| s.layout.shape) else {
        return;
    };
    let g = Geometry { isa, layer, heads, kv_heads: shape.kv_heads, dim: shape.head_dim };
    assert!(g.dim.is_multiple_of(32) && heads.is_multiple_of(g.kv_heads) && layer < shape.layers);
    let plans: Vec<Plan<'_>> = jobs.into_iter().map(|job| plan(&g, job)).collect();
    let mut tasks = Vec::new();
    for plan in &plans {
        for kv_head in 0..g.kv_heads {
            for first in (0..plan.positions.len()).step_by(QUERY_ROWS) {
                let rows = QUERY_ROWS.min(plan.positions.len() - first);
                tasks.push((plan, kv_head, first, rows));
            }
        }
    }
    tasks.into_par_iter().for_each(|(plan, kv_head, first, rows)| {
        let small = plan.positions.len() <= SPLIT_CONTEXT_ROWS && plan.blocks.len() > 2;
        if small {
            split_over_context(&g, plan, kv_head, first, rows);
        } else {
            sequential(&g, plan, kv_head, first, rows);
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
    Plan { segments: job.segments, positions: job.positions, out: job.out.as_mut_ptr(), blocks }
}

/// Gathers the `rows · group` query rows of one KV head: `[row][head in group][dim]`.
fn gather(
    g: &Geometry,
    s: &SegmentView<'_>,
    kv_head: usize,
    first: usize,
    rows: usize,
) -> Vec<f32> {
    let (width, run) = (g.heads * g.dim, g.group() * g.dim);
    let mut q = Vec::with_capacity(rows * run);
    for row in first..first + rows {
        q.extend_from_slice(&s.queries[row * width + kv_head * run..][..run]);
    }
    q
}

fn block_partial(
    g: &Geometry,
    plan: &Plan<'_>,
    at: (usize, usize),
    kv_head: usize,
    (q, first, rows): (&[f32], usize, usize),
    partial: &mut Partial,
) {
    let (s, start) = (&plan.segments[at.0], at.1);
    let end = (s.first_row + s.rows - start).min(BLOCK_ROWS);
    let lo = s.first_row.saturating_sub(start);
    let mut visible = Vec::with_capacity(rows * g.group());
    for row in first..first + rows {
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
    // SAFETY: `plan` checked that the segment's rows lie inside the section; blocks are padded to
    // whole tiles there; the section is borrowed, so nobody writes it.
    unsafe { attend_block(g.isa, Queries { q, dim: g.dim, visible: &visible }, block, partial) }
}

/// Running totals of some rows.
struct Total {
    out: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

impl Total {
    fn new(m: usize, dim: usize) -> Self {
        Self { out: vec![0.0; m * dim], max: vec![f32::NEG_INFINITY; m], sum: vec![0.0; m] }
    }

    fn add(&mut self, p: &Partial, dim: usize) {
        for i in 0..self.max.len() {
            let range = i * dim..(i + 1) * dim;
            merge(
                &mut self.out[range.clone()],
                &mut self.max[i],
                &mut self.sum[i],
                (&p.out[range], p.max[i], p.sum[i]),
            );
        }
    }

    fn store(&self, g: &Geometry, plan: &Plan<'_>, kv_head: usize, first: usize, rows: usize) {
        let (width, group) = (g.heads * g.dim, g.group());
        for row in 0..rows {
            for head in 0..group {
                let m = row * group + head;
                let at = (first + row) * width + (kv_head * group + head) * g.dim;
                let inverse = 1.0 / self.sum[m];
                for d in 0..g.dim {
                    // SAFETY: `out` has a row of `width` for each position (checked in `plan`),
                    // and this task alone owns these rows of this KV head.
                    unsafe { *plan.out.add(at + d) = self.out[m * g.dim + d] * inverse };
                }
            }
        }
    }
}

thread_local! {
    static PARTIAL: RefCell<Option<(usize, Partial)>> = const { RefCell::new(None) };
}

fn sequential(g: &Geometry, plan: &Plan<'_>, kv_head: usize, first: usize, rows: usize) {
    let m = rows * g.group();
    let mut total = Total::new(m, g.dim);
    let key = m * 4096 + g.dim;
    let mut partial = PARTIAL
        .with(|p| p.borrow_mut().take())
        .filter(|(k, _)| *k == key)
        .map_or_else(|| Partial::new(m, g.dim), |(_, p)| p);
    let mut q: (usize, Vec<f32>) = (usize::MAX, Vec::new());
    for &at in &plan.blocks {
        if q.0 != at.0 {
            q = (at.0, gather(g, &plan.segments[at.0], kv_head, first, rows));
        }
        block_partial(g, plan, at, kv_head, (&q.1, first, rows), &mut partial);
        total.add(&partial, g.dim);
    }
    PARTIAL.with(|p| *p.borrow_mut() = Some((key, partial)));
    total.store(g, plan, kv_head, first, rows);
}

fn split_over_context(g: &Geometry, plan: &Plan<'_>, kv_head: usize, first: usize, rows: usize) {
    let m = rows * g.group();
    let queries: Vec<Vec<f32>> =
        plan.segments.iter().map(|s| gather(g, s, kv_head, first, rows)).collect();
    let partials: Vec<Partial> = plan
        .blocks
        .par_iter()
        .map(|&at| {
            let mut partial = Partial::new(m, g.dim);
            block_partial(g, plan, at, kv_head, (&queries[at.0], first, rows), &mut partial);
            partial
        })
        .collect();
    let mut total = Total::new(m, g.dim);
    partials.iter().for_each(|p| total.add(p, g.dim));
    total.store(g, plan, kv_head, first, rows);
}
