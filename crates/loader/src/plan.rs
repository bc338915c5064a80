//! Where every row of a prompt comes from: pure arithmetic, no memory.
//!
//! A prompt is `prefix · chunks · rest`. The plan lists the sequence's own runs (rows computed for
//! this request), the segments attention reads, and the rows to compute. Each own run begins at a
//! whole tile, so that a run of the full prefill has the same block boundaries as a stored chunk:
//! with nothing reused and with one chunk reused the same bits result.

use matkv_model::ForwardRow;
use matkv_types::{Mode, TILE_ROWS, align_up};

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
}

struct Builder {
    plan: Plan,
    own_end: usize,
}

impl Builder {
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
        let empty = Self {
            segments: Vec::new(),
            rows: Vec::new(),
            own_rows: 0,
            position: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            recomputed_rows: 0,
        };
        let mut b = Builder { plan: empty, own_end: 0 };
        match mode {
            Mode::Vanilla => {
                b.own(prefix);
                chunks.iter().for_each(|c| b.own(c.as_ref()));
            }
            Mode::Linked(link) => {
                b.segment(PlannedSource::Prefix, 0, prefix.len(), 0);
                for (i, chunk) in chunks.iter().enumerate() {
                    let chunk = chunk.as_ref();
                    // The first chunk stands where it was compiled: its rows are exact.
                    let k = if i == 0 { 0 } else { (link as usize).min(chunk.len()) };
                    if k > 0 {
                        b.own(&chunk[..k]);
                        b.plan.recomputed_rows += k;
                    }
                    let shift = b.plan.position as i64 - (prefix.len() + k) as i64;
                    b.segment(PlannedSource::Chunk(i), k, chunk.len() - k, shift);
                }
            }
        }
        b.own(rest);
        let mut plan = b.plan;
        plan.prompt_tokens = plan.position;
        plan.cached_tokens = plan.prompt_tokens - plan.rows.len();
        plan.own_rows = b.own_end + max_new_tokens;
        plan
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

    proptest! {
        /// Whatever the sizes: segments tile the prompt, own rows never overlap, every token is
        /// either cached or computed.
        #[test]
        fn segments_tile_the_prompt(
            prefix in 1usize..50,
            chunks in proptest::collection::vec(1usize..80, 0..5),
            rest in 1usize..40,
            link in 0u32..90,
            vanilla in any::<bool>(),
        ) {
            let chunks: Vec<Vec<u32>> = chunks.iter().map(|&n| vec![7; n]).collect();
            let mode = if vanilla { Mode::Vanilla } else { Mode::Linked(link) };
            let plan = Plan::new(mode, &vec![1; prefix], &chunks, &vec![9; rest], 10);
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
