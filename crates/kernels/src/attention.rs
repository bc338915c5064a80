//! Segmented attention: query rows over a list of KV segments, no concatenated copy.
//!
//! A key is visible to a query when its prompt position is not after the query's, so causality,
//! link tokens and chunked prefill are one rule. Every segment names the rotation its queries are
//! needed in.
//!
//! A plan is made once a step and run once a layer. Many query rows of a job share each K tile, and
//! go through the blocks in order; few query rows, as in decoding, are cut by block, and their
//! partials are merged in block order. Blocks that several jobs see are read once for all of them.

mod attended;
mod plan;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use matkv_types::{GROUP_ROWS, KvDtype, KvLayout, Precision};

use crate::activations::ActivationsMut;
use crate::block::{BLOCK_ROWS, Block, Partial, Queries, Scratch, attend_block};
use crate::isa::Isa;
use crate::team;
use crate::totals::{merge, store_row};

pub use plan::PlanMemory;

/// Query rows one task takes; with three query heads a KV head, 48 rows share each K tile.
const QUERY_ROWS: usize = 16;
/// Up to this many query rows, work is split over context instead of over rows.
const SPLIT_CONTEXT_ROWS: usize = 4;
/// Blocks that a thread takes one after the other at most, as long as each has so many tasks that
/// none waits long for another: what the next block begins with is asked for in the one before.
const BLOCKS_PER_TASK: usize = 4;
const TASKS_PER_THREAD: usize = 6;
/// Up to this many queries of a head, rows of KV are asked for ahead.
const AHEAD_ROWS: usize = 24;

/// What queries are multiplied with before they are scored: `1/√head_dim`, and `log₂ e`, as softmax
/// is computed with powers of 2.
pub fn query_scale(head_dim: usize) -> f32 {
    std::f32::consts::LOG2_E / (head_dim as f32).sqrt()
}

/// A KV section whose layers are there one after the other.
pub trait Layers: Sync {
    /// The bytes of a layer; it is asked for when the layer before has been computed.
    fn layer(&self, layer: usize) -> &[u8];
}

/// Where rows lie.
#[derive(Clone, Copy)]
pub enum Section<'a> {
    /// In the job's own section, which is written between layers.
    Own,
    /// In this one.
    Whole(&'a [u8]),
    /// In these.
    Layers(&'a dyn Layers),
}

/// A run of KV rows.
#[derive(Clone, Copy)]
pub struct SegmentView<'a> {
    /// The KV section the rows lie in.
    pub section: Section<'a>,
    /// The section's arithmetic.
    pub layout: KvLayout,
    /// First row of the run.
    pub first_row: usize,
    /// Rows in the run.
    pub rows: usize,
    /// Prompt position of the first row.
    pub position: usize,
    /// Which of the job's rotations its queries are needed in.
    pub rotation: usize,
}

/// Query rows of one sequence.
#[derive(Default)]
pub struct AttentionJob<'a> {
    /// Segments in prompt order.
    pub segments: Vec<SegmentView<'a>>,
    /// Prompt position of each query row.
    pub positions: Vec<usize>,
}

/// What a job needs in one layer.
#[derive(Clone, Copy)]
pub struct LayerInput<'a> {
    /// Its own KV section.
    pub own: &'a [u8],
    /// For each rotation `[query rows][heads · head_dim]`, times [`query_scale`].
    pub queries: &'a [Vec<f32>],
}

/// Where the output goes.
#[derive(Clone, Copy)]
enum Out {
    F32(*mut f32),
    Bf16(*mut u16),
}

#[derive(Clone, Copy)]
struct Geometry {
    isa: Isa,
    precision: Precision,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

impl Geometry {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// A job, and where what it computes lies.
struct Planned<'a> {
    segments: Vec<SegmentView<'a>>,
    positions: Vec<usize>,
    /// First output row.
    first_out: usize,
    /// Segment and first row of each block.
    blocks: Vec<(usize, usize)>,
    /// Of a job that is split over context: where its partials begin, `[kv head][block]`.
    partials: usize,
}

/// A block of a job.
#[derive(Clone, Copy)]
struct Member {
    job: usize,
    block: usize,
}

/// Some query rows of one KV head.
#[derive(Clone, Copy)]
struct Rows {
    kv_head: usize,
    first: usize,
    count: usize,
}

/// All of a job's, cut into tasks.
fn row_tasks(kv_heads: usize, rows: usize) -> impl Iterator<Item = Rows> {
    (0..kv_heads).flat_map(move |kv_head| {
        (0..rows).step_by(QUERY_ROWS).map(move |first| Rows {
            kv_head,
            first,
            count: QUERY_ROWS.min(rows - first),
        })
    })
}

/// Attention of some jobs, independent sequences, in every layer of a step.
pub struct Attention<'a> {
    g: Geometry,
    jobs: Vec<Planned<'a>>,
    /// Lists of jobs there are no longer.
    spare: Vec<Planned<'static>>,
    /// Tasks of jobs with many query rows.
    rows: Vec<(usize, Rows)>,
    /// Blocks of the others, those that are the same rows of the same slot side by side.
    members: Vec<Member>,
    /// Which of them are the same.
    shared: Vec<Range<usize>>,
    partials: Vec<f32>,
    /// Partials that are there, `[job][kv head]`: whoever makes the last one merges them.
    done: Vec<AtomicUsize>,
    out_rows: usize,
}

/// One layer of it.
#[derive(Clone, Copy)]
struct Layer<'a, I> {
    plan: &'a Attention<'a>,
    layer: usize,
    input: &'a I,
    out: Out,
    partials: *mut f32,
}

// SAFETY: `out` and `partials` are written through by tasks for disjoint rows and heads only;
// partials of others are read by the task that finds in `done` that all of them are there.
unsafe impl<I: Sync> Sync for Layer<'_, I> {}

fn check_section(section: &[u8], bytes: usize) {
    assert!(section.len() >= bytes, "a section is too short for its rows");
    assert!((section.as_ptr() as usize).is_multiple_of(4), "a section is misaligned");
}

impl Attention<'_> {
    /// Attention of every job in `layer`; `out` is `[query rows of all jobs][heads · head_dim]`, of
    /// any type, whatever the precision.
    ///
    /// # Panics
    /// If sizes disagree or the layer does not exist.
    pub fn run<'i>(
        &mut self,
        layer: usize,
        input: impl Fn(usize) -> LayerInput<'i> + Sync,
        out: ActivationsMut<'_>,
    ) {
        let g = self.g;
        assert_eq!(out.len(), self.out_rows * g.heads * g.dim, "output size");
        self.check(layer, &input);
        let out = match out {
            ActivationsMut::F32(out) => Out::F32(out.as_mut_ptr()),
            ActivationsMut::Bf16(out) => Out::Bf16(out.as_mut_ptr()),
        };
        self.done.iter_mut().for_each(|done| *done.get_mut() = 0);
        let partials = self.partials.as_mut_ptr();
        let layer = Layer { plan: self, layer, input: &input, out, partials };
        // Blocks of one head after the other: they lie side by side.
        let (layer, blocks) = (&layer, self.shared.len() * g.kv_heads);
        let run = (blocks / (TASKS_PER_THREAD * team::threads())).clamp(1, BLOCKS_PER_TASK);
        let tasks = blocks.div_ceil(run);
        team::for_each(self.rows.len() + tasks, |i| match i.checked_sub(tasks) {
            Some(i) => layer.sequential(self.rows[i].0, self.rows[i].1),
            None => layer.shared_blocks(i * run..((i + 1) * run).min(blocks)),
        });
    }

    /// Checks that what a layer reads is there.
    fn check<'i>(&self, layer: usize, input: &impl Fn(usize) -> LayerInput<'i>) {
        let g = self.g;
        for (j, job) in self.jobs.iter().enumerate() {
            let LayerInput { own, queries } = input(j);
            for s in &job.segments {
                assert!(layer < s.layout.shape.layers, "layer {layer} does not exist");
                let size = job.positions.len() * g.heads * g.dim;
                assert_eq!(queries[s.rotation].len(), size, "query size");
                match s.section {
                    Section::Own => check_section(own, s.layout.total_bytes()),
                    Section::Layers(l) => check_section(l.layer(layer), s.layout.layer_stride()),
                    Section::Whole(_) => {}
                }
            }
        }
    }
}

impl Planned<'_> {
    /// What tells rows of slots apart; a job's own rows are like no other's.
    fn place(&self, block: usize, job: usize) -> (usize, usize, usize, usize) {
        let (s, start) = self.block(block);
        let end = s.first_row + s.rows;
        let section = match s.section {
            Section::Own => job,
            Section::Whole(section) => section.as_ptr() as usize,
            Section::Layers(layers) => std::ptr::from_ref(layers).addr(),
        };
        (section, start, s.first_row.max(start), end)
    }

    fn block(&self, block: usize) -> (&SegmentView<'_>, usize) {
        let (segment, start) = self.blocks[block];
        (&self.segments[segment], start)
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

/// Runs `f` with the thread's buffers. A task runs no other inside it.
fn with_buffers(f: impl FnOnce(&mut Buffers)) {
    thread_local! {
        static BUFFERS: RefCell<Buffers> = RefCell::default();
    }
    BUFFERS.with_borrow_mut(f);
}

/// Memory of the running total of `m` rows, none of which has seen anything yet.
fn empty_total(memory: &mut Vec<f32>, m: usize, dim: usize) -> Partial<'_> {
    memory.clear();
    memory.resize(Partial::len(m, dim), 0.0);
    let total = Partial::new(memory, m);
    total.max.fill(f32::NEG_INFINITY);
    total
}

impl<'i, I: Fn(usize) -> LayerInput<'i>> Layer<'_, I> {
    fn group(&self) -> usize {
        self.plan.g.group()
    }

    /// The query rows of one KV head, rotated for a segment, from where the first lies.
    fn rotated(&self, job: usize, segment: usize, rows: Rows) -> &'i [f32] {
        let rotation = self.plan.jobs[job].segments[segment].rotation;
        let first = rows.first * self.width() + rows.kv_head * self.run();
        &(self.input)(job).queries[rotation][first..]
    }

    /// Elements of a query row, of all heads.
    fn width(&self) -> usize {
        self.plan.g.heads * self.plan.g.dim
    }

    /// Those of the heads that share a KV head.
    fn run(&self) -> usize {
        self.group() * self.plan.g.dim
    }

    /// Appends them, `[row][head in group][dim]`.
    fn gather(&self, job: usize, segment: usize, rows: Rows, out: &mut Vec<f32>) {
        for row in self.rotated(job, segment, rows).chunks(self.width()).take(rows.count) {
            out.extend_from_slice(&row[..self.run()]);
        }
    }

    /// Appends for each query row the number of rows of a block it sees.
    fn look(&self, job: usize, block: usize, rows: Rows, visible: &mut Vec<usize>) {
        let job = &self.plan.jobs[job];
        let (s, start) = job.block(block);
        let end = (s.first_row + s.rows - start).min(BLOCK_ROWS);
        for row in rows.first..rows.first + rows.count {
            // Keys at or before the query's position, counted from the block's first row.
            let seen = (job.positions[row] + 1).saturating_sub(s.position).min(s.rows);
            let below = (s.first_row + seen).saturating_sub(start).min(end);
            visible.extend(std::iter::repeat_n(below, self.group()));
        }
    }

    /// One block of a job, as it lies in memory.
    fn block(&self, (job, block): (usize, usize), kv_head: usize) -> Block {
        let g = self.plan.g;
        let (s, start) = self.plan.jobs[job].block(block);
        let (section, before) = match s.section {
            Section::Own => ((self.input)(job).own, 0),
            Section::Whole(section) => (section, 0),
            Section::Layers(l) => (l.layer(self.layer), self.layer * s.layout.layer_stride()),
        };
        let offset = s.layout.dtype.bytes_of(start * g.dim);
        let (mut k_scales, mut v_scales) = (std::ptr::null(), std::ptr::null());
        if s.layout.dtype == KvDtype::Int8 {
            let groups = s.layout.k_scale_offset(self.layer, kv_head) - before
                + start / GROUP_ROWS * g.dim * 2;
            k_scales = section[groups..].as_ptr().cast();
            let rows = s.layout.v_scale_offset(self.layer, kv_head) - before + start * 2;
            v_scales = section[rows..].as_ptr().cast();
        }
        Block {
            k: section[s.layout.k_offset(self.layer, kv_head) - before + offset..].as_ptr(),
            v: section[s.layout.v_offset(self.layer, kv_head) - before + offset..].as_ptr(),
            dtype: s.layout.dtype,
            k_scales,
            v_scales,
            phase: start % GROUP_ROWS,
            lo: s.first_row.saturating_sub(start),
            hi: (s.first_row + s.rows - start).min(BLOCK_ROWS),
            ahead: false,
            next: std::ptr::null(),
        }
    }

    /// One block of a job for query rows, of this job or of others that see the same rows.
    fn block_partial(
        &self,
        at: (usize, usize),
        kv_head: usize,
        (queries, scratch): (Queries<'_>, &mut Scratch),
        next: *const u8,
        partial: &mut Partial<'_>,
    ) {
        let (g, mut block) = (self.plan.g, self.block(at, kv_head));
        block.ahead = queries.visible.len() <= AHEAD_ROWS;
        block.next = next;
        // SAFETY: it has been checked that the segment's rows lie inside the section; blocks are
        // padded to whole tiles there; the section is borrowed, so nobody writes it.
        unsafe { attend_block(g.isa, g.precision, queries, block, scratch, partial) }
    }

    fn store(&self, job: usize, rows: Rows, total: &Partial<'_>) {
        let (g, group) = (self.plan.g, self.group());
        let first = self.plan.jobs[job].first_out + rows.first;
        for m in 0..rows.count * group {
            let (row, head) = (first + m / group, rows.kv_head * group + m % group);
            let at = (row * g.heads + head) * g.dim;
            // SAFETY: `out` has `heads · dim` for each query row of all jobs (checked in `run`),
            // and this task alone owns these rows of this KV head.
            unsafe {
                match self.out {
                    Out::F32(out) => store_row(g.isa, total, m, out.add(at)),
                    Out::Bf16(out) => store_row(g.isa, total, m, out.add(at)),
                }
            }
        }
    }

    /// Some query rows of a job, block after block.
    fn sequential(&self, job: usize, rows: Rows) {
        let (g, m) = (self.plan.g, rows.count * self.group());
        with_buffers(|b| {
            let mut total = empty_total(&mut b.total, m, g.dim);
            b.partial.resize(Partial::len(m, g.dim), 0.0);
            let mut partial = Partial::new(&mut b.partial, m);
            for (block, (segment, _)) in self.plan.jobs[job].blocks.iter().enumerate() {
                b.visible.clear();
                self.look(job, block, rows, &mut b.visible);
                let q = self.rotated(job, *segment, rows);
                let queries = Queries::new(q, (g.group(), g.dim), self.width(), &b.visible);
                let memory = (queries, &mut *b.scratch);
                let next = std::ptr::null();
                self.block_partial((job, block), rows.kv_head, memory, next, &mut partial);
                // SAFETY: both are partials of `m` rows of `dim`, a multiple of 32.
                unsafe { merge(g.isa, &mut total, &partial) };
            }
            self.store(job, rows, &total);
        });
    }

    /// All query rows of a job, of one KV head.
    fn all_rows(&self, job: usize, kv_head: usize) -> Rows {
        Rows { kv_head, first: 0, count: self.plan.jobs[job].positions.len() }
    }

    /// Memory of a partial of a job that is split over context.
    ///
    /// # Safety
    /// Nobody else uses this block's partial meanwhile.
    unsafe fn partial(&self, job: usize, kv_head: usize, block: usize) -> Partial<'_> {
        let (g, job) = (self.plan.g, &self.plan.jobs[job]);
        let m = job.positions.len() * g.group();
        let len = Partial::len(m, g.dim);
        let at = job.partials + (kv_head * job.blocks.len() + block) * len;
        // SAFETY: `cut` has made room for the partials of every block and head; the caller's
        // contract keeps them apart.
        Partial::new(unsafe { std::slice::from_raw_parts_mut(self.partials.add(at), len) }, m)
    }

    /// Partials of some blocks, counted head by head, for every job that sees them; and what is
    /// complete with them.
    fn shared_blocks(&self, blocks: Range<usize>) {
        let count = self.plan.shared.len();
        for i in blocks.clone() {
            let next = Some(i + 1).filter(|n| blocks.contains(n)).map(|n| {
                let first = self.members(n % count)[0];
                self.block((first.job, first.block), n / count).k
            });
            let (kv_head, shared) = (i / count, i % count);
            self.shared_block(kv_head, shared, next.unwrap_or(std::ptr::null()));
            for m in self.members(shared) {
                let done = &self.plan.done[m.job * self.plan.g.kv_heads + kv_head];
                // Others' partials are seen by whoever comes last.
                if done.fetch_add(1, Ordering::AcqRel) + 1 == self.plan.jobs[m.job].blocks.len() {
                    self.merge_blocks(m.job, kv_head);
                }
            }
        }
    }

    fn members(&self, shared: usize) -> &[Member] {
        &self.plan.members[self.plan.shared[shared].clone()]
    }

    /// Partials of one block for every job that sees it.
    fn shared_block(&self, kv_head: usize, shared: usize, next: *const u8) {
        let g = self.plan.g;
        let members = self.members(shared);
        let first = members[0];
        with_buffers(|b| {
            b.queries.clear();
            b.visible.clear();
            for m in members {
                let (rows, segment) =
                    (self.all_rows(m.job, kv_head), self.plan.jobs[m.job].blocks[m.block].0);
                self.gather(m.job, segment, rows, &mut b.queries);
                self.look(m.job, m.block, rows, &mut b.visible);
            }
            let m = b.visible.len();
            b.partial.resize(Partial::len(m, g.dim), 0.0);
            let mut partial = Partial::new(&mut b.partial, m);
            let queries = Queries::new(&b.queries, (g.group(), g.dim), self.run(), &b.visible);
            let memory = (queries, &mut *b.scratch);
            self.block_partial((first.job, first.block), kv_head, memory, next, &mut partial);
            let mut row = 0;
            for m in members {
                // SAFETY: one task has this block of this head.
                let part = unsafe { self.partial(m.job, kv_head, m.block) };
                let rows = row..row + part.max.len();
                part.out.copy_from_slice(&partial.out[rows.start * g.dim..rows.end * g.dim]);
                part.max.copy_from_slice(&partial.max[rows.clone()]);
                part.sum.copy_from_slice(&partial.sum[rows.clone()]);
                row = rows.end;
            }
        });
    }

    /// Merges the partials of a job that is split over context.
    fn merge_blocks(&self, job: usize, kv_head: usize) {
        let (g, planned) = (self.plan.g, &self.plan.jobs[job]);
        let rows = self.all_rows(job, kv_head);
        with_buffers(|b| {
            let mut total = empty_total(&mut b.total, rows.count * self.group(), g.dim);
            for block in 0..planned.blocks.len() {
                // SAFETY: one task is the last of this job and head; all blocks are done.
                let partial = unsafe { self.partial(job, kv_head, block) };
                // SAFETY: both are partials of as many rows of `dim`, a multiple of 32.
                unsafe { merge(g.isa, &mut total, &partial) };
            }
            self.store(job, rows, &total);
        });
    }
}
