//! Plans: jobs are checked and cut into tasks, in the memory of the plan before; in a decode loop
//! nothing is allocated for them.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use matkv_types::{Precision, TILE_ROWS, emptied};

use super::{
    Attention, AttentionJob, Geometry, Member, Planned, Rows, SPLIT_CONTEXT_ROWS, Section,
    check_section, row_tasks,
};
use crate::block::{BLOCK_ROWS, HEAD_DIM_MAX, Partial};
use crate::isa::Isa;

/// What an [`Attention`] was made of; every list is empty.
#[derive(Default)]
pub struct PlanMemory {
    /// Room for jobs.
    jobs: Vec<Planned<'static>>,
    /// Lists of jobs.
    pub(super) spare: Vec<Planned<'static>>,
    pub(super) rows: Vec<(usize, Rows)>,
    pub(super) members: Vec<Member>,
    pub(super) shared: Vec<Range<usize>>,
    pub(super) partials: Vec<f32>,
    pub(super) done: Vec<AtomicUsize>,
}

impl PlanMemory {
    /// Room for jobs.
    pub(super) fn take_jobs(&mut self) -> Vec<Planned<'static>> {
        std::mem::take(&mut self.jobs)
    }

    /// An empty job, and room for its blocks.
    pub(super) fn job(&mut self) -> (AttentionJob<'static>, Vec<(usize, usize)>) {
        match self.spare.pop() {
            Some(Planned { segments, positions, blocks, .. }) => {
                (AttentionJob { segments, positions }, blocks)
            }
            None => Default::default(),
        }
    }
}

impl Planned<'_> {
    /// Checks segments, and cuts them into blocks.
    fn cut(&mut self, g: &Geometry) {
        for (i, s) in self.segments.iter().enumerate() {
            let shape = s.layout.shape;
            let same = shape.kv_heads == g.kv_heads && shape.head_dim == g.dim;
            assert!(same, "segment {i}: another shape");
            assert!(s.layout.dtype.in_arena() == s.layout.dtype, "segment {i}: not an arena form");
            assert!(s.first_row + s.rows <= s.layout.rows, "segment {i}: rows past the slot's end");
            if let Section::Whole(section) = s.section {
                check_section(section, s.layout.total_bytes());
            }
            let start = s.first_row / TILE_ROWS * TILE_ROWS;
            let end = s.first_row + s.rows;
            self.blocks.extend((start..end).step_by(BLOCK_ROWS).map(|row| (i, row)));
        }
    }
}

impl<'a> Attention<'a> {
    /// Plans `heads` query heads over the segments of every job.
    ///
    /// # Panics
    /// If a segment does not fit its section or shapes disagree.
    pub fn new(
        isa: Isa,
        precision: Precision,
        heads: usize,
        jobs: impl IntoIterator<Item = AttentionJob<'a>>,
    ) -> Self {
        let (memory, arithmetic) = (PlanMemory::default(), (isa, precision));
        Self::in_memory(memory, arithmetic, heads, jobs, |job, to| *to = job)
    }

    /// The same, of jobs that `fill` writes where nothing is yet, in memory of another plan.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn in_memory<J>(
        mut memory: PlanMemory,
        (isa, precision): (Isa, Precision),
        heads: usize,
        jobs: impl IntoIterator<Item = J>,
        fill: impl Fn(J, &mut AttentionJob<'a>),
    ) -> Self {
        let (mut plan, mut out_rows) = (memory.take_jobs(), 0);
        for job in jobs {
            let (mut to, blocks) = memory.job();
            fill(job, &mut to);
            let AttentionJob { segments, positions } = to;
            let first_out = out_rows;
            out_rows += positions.len();
            plan.push(Planned { segments, positions, first_out, blocks, partials: 0 });
        }
        let shape = plan.iter().find_map(|j| j.segments.first()).map(|s| s.layout.shape);
        let (kv_heads, dim) = shape.map_or((1, 32), |s| (s.kv_heads, s.head_dim));
        assert!(dim.is_multiple_of(32) && dim <= HEAD_DIM_MAX, "head dimension {dim}");
        assert!(heads.is_multiple_of(kv_heads));
        let g = Geometry { isa, precision, heads, kv_heads, dim };
        plan.iter_mut().for_each(|job| job.cut(&g));
        let PlanMemory { spare, rows, members, shared, partials, done, .. } = memory;
        let jobs = plan;
        let mut plan = Self { g, jobs, spare, rows, members, shared, partials, done, out_rows };
        plan.cut();
        plan
    }

    /// Cuts jobs into tasks.
    fn cut(&mut self) {
        let (mut len, g) = (0, self.g);
        for (j, job) in self.jobs.iter_mut().enumerate() {
            let rows = job.positions.len();
            if rows <= SPLIT_CONTEXT_ROWS && job.blocks.len() > 1 {
                job.partials = len;
                let partial = Partial::len(rows * g.group(), g.dim);
                len += g.kv_heads * job.blocks.len() * partial;
                self.members.extend((0..job.blocks.len()).map(|block| Member { job: j, block }));
                continue;
            }
            self.rows.extend(row_tasks(g.kv_heads, rows).map(|rows| (j, rows)));
        }
        // Those that see most first: then little is left to wait for at the end.
        let jobs = &self.jobs;
        let seen = |j: usize, r: &Rows| std::cmp::Reverse(jobs[j].positions[r.first]);
        self.rows.sort_unstable_by_key(|(j, r)| (seen(*j, r), *j, r.kv_head, r.first));
        self.partials.resize(len, 0.0);
        self.done.resize_with(self.jobs.len() * g.kv_heads, AtomicUsize::default);
        // A job's blocks stay in order, and so do jobs.
        let place = |m: &Member| jobs[m.job].place(m.block, m.job);
        self.members.sort_unstable_by_key(|m| (place(m), m.job, m.block));
        let mut first = 0;
        for same in self.members.chunk_by(|a, b| place(a) == place(b)) {
            self.shared.push(first..first + same.len());
            first += same.len();
        }
    }

    /// Its memory, for another one.
    pub fn into_memory(self) -> PlanMemory {
        let Self { mut jobs, mut spare, mut rows, mut members, mut shared, .. } = self;
        let (mut partials, mut done) = (self.partials, self.done);
        let empty = |job: Planned<'_>| {
            let Planned { segments, mut positions, mut blocks, .. } = job;
            positions.clear();
            blocks.clear();
            Planned { segments: emptied(segments), positions, first_out: 0, blocks, partials: 0 }
        };
        // The first one is taken first.
        spare.extend(jobs.drain(..).rev().map(empty));
        rows.clear();
        members.clear();
        shared.clear();
        partials.clear();
        done.clear();
        PlanMemory { jobs: emptied(jobs), spare, rows, members, shared, partials, done }
    }
}
