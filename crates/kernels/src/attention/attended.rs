//! How much some query rows attend to each key: the softmax weights attention has inside, summed
//! over query rows and heads.
//!
//! Scores are those of attention, bit for bit. Sums are in a fixed order: query rows of a task one
//! after the other, then tasks.

use super::{Attention, Layer, LayerInput, Out, Rows, row_tasks};
use crate::block::{BLOCK_ROWS, Queries, Scratch, score_block};
use crate::isa::dispatch;
use crate::lanes::{LANES, Lanes};
use crate::{micro, team};

impl Attention<'_> {
    /// Adds to `sums`, for each segment of the first job one value a row, what the job's rows
    /// attend to it in `layer`. The weights of one query row and head add up to 1.
    ///
    /// # Panics
    /// As [`Attention::run`].
    pub fn attended<'i>(
        &self,
        layer: usize,
        input: impl Fn(usize) -> LayerInput<'i> + Sync,
        sums: &mut [Vec<f32>],
    ) {
        let Some(job) = self.jobs.first().filter(|j| !j.blocks.is_empty()) else { return };
        self.check(layer, &input);
        // Nothing is written through these.
        let (out, partials) = (Out::F32(std::ptr::null_mut()), std::ptr::null_mut());
        let layer = &Layer { plan: self, layer, input: &input, out, partials };
        let tasks: Vec<Rows> = row_tasks(self.g.kv_heads, job.positions.len()).collect();
        let width = job.blocks.len() * BLOCK_ROWS;
        let mut parts = vec![0.0; tasks.len() * width];
        team::for_each_part(&mut parts, width, |task, out| layer.weigh(tasks[task], out));
        for part in parts.chunks_exact(width) {
            for (&(i, start), part) in job.blocks.iter().zip(part.chunks_exact(BLOCK_ROWS)) {
                let s = &job.segments[i];
                let lo = s.first_row.saturating_sub(start);
                let hi = (s.first_row + s.rows - start).min(BLOCK_ROWS);
                let to = &mut sums[i][start + lo - s.first_row..start + hi - s.first_row];
                to.iter_mut().zip(&part[lo..hi]).for_each(|(w, x)| *w += x);
            }
        }
    }
}

impl<'i, I: Fn(usize) -> LayerInput<'i>> Layer<'_, I> {
    /// Adds the weights of some query rows of the first job to `out`, `[block][BLOCK_ROWS]`.
    fn weigh(&self, rows: Rows, out: &mut [f32]) {
        let (g, blocks) = (self.plan.g, &self.plan.jobs[0].blocks);
        let (m, width) = (rows.count * self.group(), out.len());
        let mut scores = vec![0.0; m * width];
        let mut seen = vec![(0, 0); m * blocks.len()];
        let mut visible = Vec::new();
        let mut scratch = Box::<Scratch>::default();
        for (b, (segment, _)) in blocks.iter().enumerate() {
            visible.clear();
            self.look(0, b, rows, &mut visible);
            let block = self.block((0, b), rows.kv_head);
            let q = self.rotated(0, *segment, rows);
            let queries = Queries::new(q, (g.group(), g.dim), self.width(), &visible);
            for first in (0..m).step_by(micro::ROWS) {
                let count = micro::ROWS.min(m - first);
                // SAFETY: it has been checked that the segment's rows lie inside the section;
                // blocks are padded to whole tiles there; the section is borrowed, so nobody
                // writes it.
                unsafe {
                    let queries = queries.rows(first, count);
                    score_block(g.isa, g.precision, queries, block, &mut scratch);
                }
                for (row, from) in scratch.scores.chunks_exact(BLOCK_ROWS).take(count).enumerate() {
                    let at = (first + row) * blocks.len() + b;
                    scores[at * BLOCK_ROWS..(at + 1) * BLOCK_ROWS].copy_from_slice(from);
                    seen[at] = (block.lo, visible[first + row].min(block.hi));
                }
            }
        }
        for (row, seen) in scores.chunks_exact_mut(width).zip(seen.chunks_exact(blocks.len())) {
            // SAFETY: both have BLOCK_ROWS elements for each block, of which so many are seen.
            unsafe { add_weights(g.isa, row.as_mut_ptr(), seen, out.as_mut_ptr()) };
        }
    }
}

dispatch! {
    /// Adds the softmax of one query row's scores, `[block][BLOCK_ROWS]`, of which each block's
    /// rows `lo..hi` are seen.
    ///
    /// # Safety
    /// `scores` and `out` have BLOCK_ROWS elements for each block; `hi ≤ BLOCK_ROWS`.
    unsafe fn add_weights => add_weights_body(
        scores: *mut f32, seen: &[(usize, usize)], out: *mut f32,
    )
}

#[inline(always)]
unsafe fn add_weights_body<L: Lanes>(scores: *mut f32, seen: &[(usize, usize)], out: *mut f32) {
    // Tiles with a row that is seen: where they begin, and which of their rows are.
    let tiles = seen.iter().enumerate().flat_map(|(b, &(lo, hi))| {
        let tiles = if hi > lo { lo / LANES..hi.div_ceil(LANES) } else { 0..0 };
        tiles.map(move |t| {
            let first = t * LANES;
            (b * BLOCK_ROWS + first, lo.saturating_sub(first), (hi - first).min(LANES))
        })
    });
    // SAFETY: every tile lies inside its block.
    unsafe {
        let mut top = L::splat(f32::NEG_INFINITY);
        for (at, lo, hi) in tiles.clone() {
            let x = L::select_range(L::load(scores.add(at)), lo, hi, f32::NEG_INFINITY);
            top = L::max(x, top);
        }
        let max = L::splat(L::max_lane(top));
        let mut sum = L::splat(0.0);
        for (at, lo, hi) in tiles.clone() {
            let e = L::exp2(L::sub(L::load(scores.add(at)), max));
            let e = L::select_range(e, lo, hi, 0.0);
            sum = L::add(sum, e);
            L::store(scores.add(at), e);
        }
        let inverse = L::splat(1.0 / L::sum(sum));
        for (at, ..) in tiles {
            let e = L::load(scores.add(at));
            L::store(out.add(at), L::fma(e, inverse, L::load(out.add(at))));
        }
    }
}
