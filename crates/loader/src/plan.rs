//! Where every row of a prompt comes from: pure arithmetic, no memory.
//!
//! A prompt is `prefix · chunks · rest`. The plan lists the sequence's own runs (rows computed for
//! this request), the segments attention reads, and the rows to compute. Each own run begins at a
//! whole tile, so that a run of the full prefill has the same block boundaries as a stored chunk:
//! with nothing reused and with one chunk reused the same bits result.
//!
//! A focused request is planned twice: first with link tokens alone and room for what may be
//! chosen, then, when its question has ranked the rows, with the chosen ones (`focus.rs`).

use std::ops::Range;

use matkv_model::ForwardRow;
use matkv_types::{Mode, TILE_ROWS, align_up};

use crate::focus::Units;

/// Where a planned segment's rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlannedSource {
    Prefix,
    /// Index of the chunk in the prompt.
    Chunk(usize),
    Own,
}

/// A segment of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSegment {
    pub source: PlannedSource,
    pub first_row: usize,
    pub rows: usize,
    pub position: usize,
    pub shift: i64,
}

/// A prompt, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Segments in prompt order; the last is the own run the answer is appended to.
    pub segments: Vec<PlannedSegment>,
    /// Rows to compute, by position.
    pub rows: Vec<ForwardRow>,
    /// Rows the own section needs, the answer's included.
    pub own_rows: usize,
    /// Position of the first answer token.
    pub position: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens whose rows are reused.
    pub cached_tokens: usize,
    /// Chunk rows computed although a stored row exists.
    pub recomputed_rows: usize,
    /// Most segments there are after a choice.
    pub segments_max: usize,
    /// Units of rows still to be chosen.
    pub choose: usize,
}

struct Builder {
    plan: Plan,
    own_end: usize,
}

impl Builder {
    fn new() -> Self {
        let plan = Plan {
            segments: Vec::new(),
            rows: Vec::new(),
            own_rows: 0,
            position: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            recomputed_rows: 0,
            segments_max: 0,
            choose: 0,
        };
        Self { plan, own_end: 0 }
    }

    fn finish(mut self, rest: &[u32], max_new_tokens: usize) -> Plan {
        self.own(rest);
        let mut plan = self.plan;
        plan.prompt_tokens = plan.position;
        plan.cached_tokens = plan.prompt_tokens - plan.rows.len();
        plan.own_rows = self.own_end + max_new_tokens;
        plan.segments_max = plan.segments.len();
        plan
    }

    /// Appends a run of own rows for `tokens`, starting at a whole tile.
    fn own(&mut self, tokens: &[u32]) {
        let first_row = align_up(self.own_end, TILE_ROWS);
        let position = self.plan.position;
        self.plan.rows.extend(tokens.iter().enumerate().map(|(i, &token)| ForwardRow {
            token,
            position: position + i,
            row: first_row + i,
        }));
        self.segment(PlannedSource::Own, first_row, tokens.len(), 0);
        self.own_end = first_row + tokens.len();
    }

    fn segment(&mut self, source: PlannedSource, first_row: usize, rows: usize, shift: i64) {
        if rows == 0 {
            return;
        }
        let position = self.plan.position;
        self.plan.segments.push(PlannedSegment { source, first_row, rows, position, shift });
        self.plan.position += rows;
    }

    /// A chunk's stored rows, but for those in `anew`, which are own runs.
    fn chunk(&mut self, i: usize, tokens: &[u32], anew: &[Range<usize>], prefix: usize) {
        let mut row = 0;
        let end = tokens.len()..tokens.len();
        for range in anew.iter().chain([&end]) {
            let shift = self.plan.position as i64 - (prefix + row) as i64;
            self.segment(PlannedSource::Chunk(i), row, range.start - row, shift);
            if !range.is_empty() {
                self.own(&tokens[range.clone()]);
                self.plan.recomputed_rows += range.len();
            }
            row = range.end;
        }
    }
}

/// The rows of a chunk that a mode computes anew whatever the question.
fn always(mode: Mode, chunk: usize, rows: usize) -> Vec<Range<usize>> {
    let link = match mode {
        // The first chunk stands where it was compiled: its rows are exact.
        _ if chunk == 0 => 0,
        Mode::Vanilla | Mode::Exact => rows,
        Mode::Linked(link) | Mode::Focused { link, .. } => rows.min(link as usize),
    };
    if link > 0 { std::iter::once(0..link).collect() } else { Vec::new() }
}

impl Plan {
    /// Plans a prompt. `chunks` are token ids, most relevant first; `rest` is not empty.
    pub fn new(
        mode: Mode,
        prefix: &[u32],
        chunks: &[impl AsRef<[u32]>],
        rest: &[u32],
        max_new_tokens: usize,
    ) -> Self {
        if mode == Mode::Vanilla {
            let mut b = Builder::new();
            b.own(prefix);
            chunks.iter().for_each(|c| b.own(c.as_ref()));
            return b.finish(rest, max_new_tokens);
        }
        let rows = |(i, c): (usize, &_)| always(mode, i, AsRef::<[u32]>::as_ref(c).len());
        let anew: Vec<_> = chunks.iter().enumerate().map(rows).collect();
        let mut plan = Self::with(&anew, prefix, chunks, rest, max_new_tokens);
        if let Mode::Focused { share, link } = mode {
            let units = Units::of(chunks.iter().map(|c| c.as_ref().len()), link as usize);
            plan.choose = share.of(units.len());
            // A unit takes at most its rows, and parts a run of stored rows in two.
            plan.own_rows += plan.choose * units.rows();
            plan.segments_max += 2 * plan.choose;
        }
        plan
    }

    /// The same prompt with these rows of its chunks computed anew. The own section, which has
    /// been allocated, stays as it is.
    pub fn choose(
        &self,
        anew: &[Vec<Range<usize>>],
        prefix: &[u32],
        chunks: &[impl AsRef<[u32]>],
    ) -> Self {
        let rest: Vec<u32> = self.rest().iter().map(|r| r.token).collect();
        let plan = Self::with(anew, prefix, chunks, &rest, 0);
        Self { own_rows: self.own_rows, segments_max: self.segments_max, ..plan }
    }

    /// The first of the rows to compute are those of an earlier prompt: they are not computed.
    pub fn count_earlier(&mut self, rows: usize) {
        let of_chunks = self.rows.len() - self.rest().len();
        self.cached_tokens += rows;
        self.recomputed_rows -= rows.min(of_chunks);
    }

    /// Rows of what follows the chunks.
    pub fn rest(&self) -> &[ForwardRow] {
        let rows = self.segments.last().map_or(0, |s| s.rows);
        &self.rows[self.rows.len() - rows..]
    }

    fn with(
        anew: &[Vec<Range<usize>>],
        prefix: &[u32],
        chunks: &[impl AsRef<[u32]>],
        rest: &[u32],
        max_new_tokens: usize,
    ) -> Self {
        let mut b = Builder::new();
        b.segment(PlannedSource::Prefix, 0, prefix.len(), 0);
        for (i, (chunk, anew)) in chunks.iter().zip(anew).enumerate() {
            b.chunk(i, chunk.as_ref(), anew, prefix.len());
        }
        b.finish(rest, max_new_tokens)
    }

    /// The segments as they are once the rows before `computed` have been computed: own runs end
    /// at the last computed row, so that attention never touches memory nobody has written.
    pub fn segments_after(&self, computed: usize) -> Vec<PlannedSegment> {
        let Some(last) = computed.checked_sub(1).and_then(|i| self.rows.get(i)) else {
            return Vec::new();
        };
        let cut = |s: &PlannedSegment| match s.source {
            PlannedSource::Own => {
                let rows = (last.position + 1).saturating_sub(s.position).min(s.rows);
                Some(PlannedSegment { rows, ..*s }).filter(|s| s.rows > 0)
            }
            // Later than every row so far: nothing of it is visible yet.
            _ => Some(*s).filter(|s| s.position <= last.position),
        };
        self.segments.iter().filter_map(cut).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::focus::focused;
    use matkv_types::Share;

    /// The worked prompt of ARCHITECTURE.md.
    #[test]
    fn worked_example() {
        let prefix = vec![1; 31];
        let chunks = [vec![2; 1024], vec![3; 300]];
        let plan = Plan::new(Mode::Linked(32), &prefix, &chunks, &[4; 24], 100);
        let segment = |source, first_row, rows, position, shift| PlannedSegment {
            source,
            first_row,
            rows,
            position,
            shift,
        };
        assert_eq!(
            plan.segments,
            [
                segment(PlannedSource::Prefix, 0, 31, 0, 0),
                segment(PlannedSource::Chunk(0), 0, 1024, 31, 0),
                segment(PlannedSource::Own, 0, 32, 1055, 0),
                segment(PlannedSource::Chunk(1), 32, 268, 1087, 1024),
                segment(PlannedSource::Own, 32, 24, 1355, 0),
            ]
        );
        assert_eq!((plan.position, plan.prompt_tokens), (1379, 1379));
        assert_eq!((plan.cached_tokens, plan.recomputed_rows), (31 + 1024 + 268, 32));
        assert_eq!((plan.rows.len(), plan.own_rows), (56, 156));
    }

    #[test]
    fn what_is_chosen_is_computed_and_nothing_else() {
        let (prefix, chunks) = ([1; 31], [vec![2; 100], vec![3; 100], vec![4; 40]]);
        let link = 8;
        let plan = |share: f64, weights: &[Vec<f32>]| {
            let mode = Mode::Focused { share: Share::new(share).unwrap(), link };
            let plan = Plan::new(mode, &prefix, &chunks, &[5; 24], 10);
            focused(&plan, link, &prefix, &chunks, weights)
        };
        let mut weights: Vec<Vec<f32>> = chunks.iter().map(|c| vec![1.0; c.len()]).collect();
        // The first chunk is exact: nothing of it is chosen, however much it weighs.
        weights[0].fill(9.0);
        let linked = Plan::new(Mode::Linked(link), &prefix, &chunks, &[5; 24], 10);
        assert_eq!(plan(0.0, &weights), linked);
        // All of it: the runs of a full prefill.
        let exact = Plan::new(Mode::Exact, &prefix, &chunks, &[5; 24], 10);
        let all = plan(1.0, &weights);
        assert_eq!((&all.segments, &all.rows), (&exact.segments, &exact.rows));
        assert_eq!(all.recomputed_rows, 140);

        // Ten units: rows 8..16, 16..32, …, 96..100 of one chunk, 8..16, 16..32, 32..40 of the
        // other. Two are chosen, the second of equal ones being the earlier.
        weights[1][50] = 100.0;
        let own = |plan: &Plan| -> Vec<(usize, usize, usize)> {
            let own = plan.segments.iter().filter(|s| s.source == PlannedSource::Own);
            own.map(|s| (s.position - 31 - 100, s.rows, s.first_row)).collect()
        };
        let two = plan(0.2, &weights);
        assert_eq!(own(&two), [(0, 16, 0), (48, 16, 16), (100, 8, 32), (140, 24, 48)]);
        assert_eq!(two.recomputed_rows, 40);
        weights[2][33] = 90.0;
        let two = plan(0.2, &weights);
        let runs = [(0, 8, 0), (48, 16, 16), (100, 8, 32), (132, 8, 48), (140, 24, 64)];
        assert_eq!(own(&two), runs);
    }

    proptest! {
        /// Whatever the sizes: segments tile the prompt, own rows never overlap, every token is
        /// either cached or computed.
        #[test]
        fn segments_tile_the_prompt(
            prefix in 1usize..50,
            chunks in proptest::collection::vec(1usize..80, 0..5),
            rest in 1usize..40,
            link in 0u32..90,
            share in 0.0..=1.0f64,
            kind in 0usize..4,
        ) {
            let chunks: Vec<Vec<u32>> = chunks.iter().map(|&n| vec![7; n]).collect();
            let share = Share::new(share).unwrap();
            let mode = [
                Mode::Vanilla,
                Mode::Exact,
                Mode::Linked(link),
                Mode::Focused { share, link },
            ][kind];
            let before = Plan::new(mode, &vec![1; prefix], &chunks, &vec![9; rest], 10);
            let weight = |i: usize| (i * 31 % 17) as f32;
            let weights: Vec<Vec<f32>> =
                chunks.iter().map(|c| (0..c.len()).map(weight).collect()).collect();
            let plan = match mode {
                Mode::Focused { link, .. } => {
                    focused(&before, link, &vec![1; prefix], &chunks, &weights)
                }
                _ => before.clone(),
            };
            // What has been allocated is enough, and stays as it is.
            prop_assert_eq!(plan.own_rows, before.own_rows);
            prop_assert!(plan.segments.len() <= before.segments_max);
            prop_assert_eq!(plan.segments_max, before.segments_max);
            prop_assert_eq!(plan.choose, 0);
            let total = prefix + chunks.iter().map(Vec::len).sum::<usize>() + rest;
            prop_assert_eq!(plan.prompt_tokens, total);
            prop_assert_eq!(plan.cached_tokens + plan.rows.len(), total);
            let mut position = 0;
            for s in &plan.segments {
                prop_assert_eq!(s.position, position);
                position += s.rows;
                if let PlannedSource::Chunk(i) = s.source {
                    prop_assert!(s.first_row + s.rows <= chunks[i].len());
                    // Compiled at prefix + row, read here.
                    let compiled = (prefix + s.first_row) as i64;
                    prop_assert_eq!(s.shift, s.position as i64 - compiled);
                }
            }
            let mut own: Vec<usize> = plan.rows.iter().map(|r| r.row).collect();
            own.sort_unstable();
            own.dedup();
            prop_assert_eq!(own.len(), plan.rows.len());
            prop_assert!(plan.rows.iter().all(|r| r.row + 10 < plan.own_rows));
            // A run begins where a tile does.
            let own_runs = plan.segments.iter().filter(|s| s.source == PlannedSource::Own);
            prop_assert!(own_runs.clone().all(|s| s.first_row % TILE_ROWS == 0));
            prop_assert!(plan.rows.is_sorted_by_key(|r| r.position));
            for n in 1..=plan.rows.len() {
                let last = plan.rows[n - 1].position;
                let written = |row: usize| plan.rows[..n].iter().any(|r| r.row == row);
                for s in plan.segments_after(n).iter().filter(|s| s.source == PlannedSource::Own) {
                    prop_assert!((s.first_row..s.first_row + s.rows).all(written));
                    prop_assert!(s.position <= last);
                }
            }
        }
    }
}
