//! Focus: which stored rows a question attends to most, to be computed anew.
//!
//! The question runs once over the rows as they are stored. What its rows attend to, summed over
//! layers and heads, ranks *units*: runs of whole tiles of a chunk (ADR 0013). Nothing depends on
//! threads or neighbours, and ties go to the earlier rows, so equal requests choose equal rows.
//! A request that is given up while it ranks has chosen nothing.

use std::ops::Range;

use matkv_model::{LanguageModel, Segment, Source, Step};
use matkv_types::{KvLayout, Mode, TILE_ROWS};

use crate::plan::{Plan, PlannedSegment, PlannedSource};

/// Units of a prompt at most: with more rows a unit has more tiles, so that the segments of a
/// sequence stay few whatever the prompt.
const UNITS_MAX: usize = 512;
/// Rows of the question that rank, the last ones if it has more: a slice of a prefill.
const QUESTION_ROWS_MAX: usize = 256;

/// The units of a prompt: whole tiles of the chunks after the first, without link tokens.
pub struct Units {
    rows: usize,
    list: Vec<(usize, Range<usize>)>,
}

impl Units {
    /// Of chunks with so many rows, of which the first `link` are computed anew anyway.
    pub fn of(chunks: impl Iterator<Item = usize> + Clone, link: usize) -> Self {
        let total: usize = chunks.clone().skip(1).sum();
        let rows = total.div_ceil(UNITS_MAX).next_multiple_of(TILE_ROWS).max(TILE_ROWS);
        Self::of_rows(chunks, link, rows)
    }

    /// The same with `rows` rows in a unit.
    pub fn of_rows(chunks: impl Iterator<Item = usize>, link: usize, rows: usize) -> Self {
        let mut list = Vec::new();
        for (chunk, end) in chunks.enumerate().skip(1) {
            let first = link.min(end) / rows * rows;
            let units = (first..end).step_by(rows).map(|at| at.max(link)..(at + rows).min(end));
            list.extend(units.filter(|u| !u.is_empty()).map(|u| (chunk, u)));
        }
        Self { rows, list }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Rows of a unit; those at the edges of chunks have fewer.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The `count` units whose rows weigh most on average, and the link tokens: ranges of rows of
    /// each chunk, neighbours as one.
    pub fn choose(
        &self,
        count: usize,
        link: usize,
        weights: &[Vec<f32>],
    ) -> Vec<Vec<Range<usize>>> {
        let mean = |(chunk, rows): &(usize, Range<usize>)| {
            weights[*chunk][rows.clone()].iter().sum::<f32>() / rows.len() as f32
        };
        let means: Vec<f32> = self.list.iter().map(mean).collect();
        let mut order: Vec<usize> = (0..self.list.len()).collect();
        order.sort_by(|&a, &b| means[b].total_cmp(&means[a]).then(a.cmp(&b)));
        order.truncate(count);
        order.sort_unstable();
        let mut out: Vec<Vec<Range<usize>>> = vec![Vec::new(); weights.len()];
        for (chunk, (ranges, rows)) in out.iter_mut().zip(weights).enumerate().skip(1) {
            let linked = 0..link.min(rows.len());
            let chosen = order.iter().map(|&i| &self.list[i]).filter(|u| u.0 == chunk);
            for range in std::iter::once(&linked).chain(chosen.map(|u| &u.1)) {
                match ranges.last_mut() {
                    _ if range.is_empty() => {}
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => ranges.push(range.clone()),
                }
            }
        }
        out
    }
}

/// What the rows of a question, the last ones of `rest`, attend to: for each chunk one value a
/// row, the chunks as they are stored. The first rows of `own` are written.
pub fn weights<'a>(
    model: &LanguageModel,
    (prefix, chunks, rest): (&[u32], &[impl AsRef<[u32]>], &[u32]),
    source: impl Fn(PlannedSource) -> Source<'a>,
    (own, own_layout): (&mut [u8], KvLayout),
    go_on: &mut dyn FnMut(usize) -> bool,
) -> Option<Vec<Vec<f32>>> {
    let stored = Plan::new(Mode::Linked(0), prefix, chunks, rest, 0);
    let cut = rest.len().saturating_sub(QUESTION_ROWS_MAX);
    let mut rows = stored.rest()[cut..].to_vec();
    rows.iter_mut().enumerate().for_each(|(i, r)| r.row = i);
    let segment = |s: &PlannedSegment| match s.source {
        PlannedSource::Own => Segment {
            source: Source::Own,
            first_row: 0,
            rows: rows.len(),
            position: s.position + cut,
            shift: 0,
        },
        source_of => Segment {
            source: source(source_of),
            first_row: s.first_row,
            rows: s.rows,
            position: s.position,
            shift: s.shift,
        },
    };
    let segments: Vec<Segment<'_>> = stored.segments.iter().map(segment).collect();
    let step = Step { rows: &rows, segments: &segments, own, own_layout, logits: false };
    let attended = model.attended_while(step, go_on)?;
    let mut out = vec![Vec::new(); chunks.len()];
    for (segment, weights) in stored.segments.iter().zip(attended) {
        if let PlannedSource::Chunk(i) = segment.source {
            out[i] = weights;
        }
    }
    Some(out)
}

/// The plan of a request with the rows chosen that weigh most.
pub fn focused(
    plan: &Plan,
    link: u32,
    prefix: &[u32],
    chunks: &[impl AsRef<[u32]>],
    weights: &[Vec<f32>],
) -> Plan {
    let units = Units::of(chunks.iter().map(|c| c.as_ref().len()), link as usize);
    plan.choose(&units.choose(plan.choose, link as usize, weights), prefix, chunks)
}
