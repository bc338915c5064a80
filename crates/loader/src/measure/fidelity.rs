//! What each way of reusing chunks costs in fidelity, and how many rows it computes anew.
//!
//! The reference is the full prefill of the same tokens: its greedy answer is forced upon every
//! method, which is asked for the distribution of each of its tokens. Chunks are read as they are
//! stored, in the row type they have there.
//!
//! `blend(R)` is not served: it ranks rows by how far their K and V are from those of the full
//! prefill (CacheBlend, Yao et al. 2024), which a request would have to compute first.

use std::collections::HashMap;
use std::ops::Range;

use matkv_kernels::{read_k, read_v, rotate_heads};
use matkv_model::{Detokenizer, LanguageModel, divergence, greedy, log_sum_exp};
use matkv_ring::size_class;
use matkv_store::{Store, Tier};
use matkv_sys::Region;
use matkv_types::{ChunkId, KvDtype, KvLayout, Mode, Share, TILE_ROWS};

use super::answers::{Prefilled, Rows, source};
use super::text;
use crate::arena::{Arena, ChunkSlot};
use crate::compile::{compile_prefix, restore};
use crate::focus::{self, Units};
use crate::plan::{Plan, PlannedSegment};

/// The layer whose K and V are compared: the first one that depends on other rows.
const DEVIATION_LAYER: usize = 1;

/// What rows are ranked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranking {
    /// What the question attends to.
    Question,
    /// How far K and V are from those of the full prefill.
    Deviation,
}

/// A way of reusing chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One that is served.
    Mode(Mode),
    /// Rows chosen in units of so many.
    Ranked {
        /// By what.
        by: Ranking,
        /// How many of the units.
        share: Share,
        /// Link tokens.
        link: u32,
        /// Rows of a unit.
        unit: usize,
    },
}

impl Method {
    /// Reads a mode, or `focused(R,N,U)`, `blend(R)`, `blend(R,N)`, `blend(R,N,U)`, U being the
    /// rows of a unit.
    ///
    /// # Errors
    /// If it is neither.
    pub fn parse(text: &str, link_tokens: u32) -> Result<Self, String> {
        if let Ok(mode) = Mode::parse(text, link_tokens) {
            return Ok(Self::Mode(mode));
        }
        let ranked = || {
            let (name, inside) = text.strip_suffix(')')?.split_once('(')?;
            let by = match name {
                "focused" => Ranking::Question,
                "blend" => Ranking::Deviation,
                _ => return None,
            };
            let mut parts = inside.split(',').map(str::trim);
            let share = parts.next()?.parse().ok()?;
            let link = parts.next().map_or(Some(link_tokens), |t| t.parse().ok())?;
            let unit = parts.next().map_or(Some(TILE_ROWS), |t| t.parse().ok())?;
            let whole = parts.next().is_none() && unit > 0;
            whole.then_some(Self::Ranked { by, share, link, unit })
        };
        ranked().ok_or_else(|| {
            format!("{text:?} is neither a mode nor focused(R,N,U), blend(R), blend(R,N,U)")
        })
    }
}

/// A question over some chunks, most relevant first.
pub struct Question {
    /// Which chunks.
    pub chunks: Vec<ChunkId>,
    /// Tokens after them.
    pub rest: Vec<u32>,
    /// The right answer, if it is known.
    pub gold: Option<String>,
}

/// What a method did with one question.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Answer tokens compared.
    pub tokens: f64,
    /// KL divergence from the full prefill, summed over them.
    pub kl: f64,
    /// How many have the same most probable token.
    pub same: f64,
    /// Log-likelihood of the answer, less that under the full prefill.
    pub likelihood: f64,
    /// Chunk rows computed anew.
    pub recomputed: f64,
    /// Rows of the prompt's chunks.
    pub rows: f64,
    /// Word overlap of its own greedy answer with the right one, and whether they are equal.
    pub f1: f64,
    pub em: f64,
}

/// The chunks of a question as they are stored.
struct Stored {
    tokens: Vec<Vec<u32>>,
    rows: Vec<Rows>,
}

fn stored(store: &Store, ids: &[ChunkId]) -> Result<Stored, String> {
    let (mut tokens, mut rows) = (Vec::new(), Vec::new());
    for id in ids {
        let (file, found) = store.read_verified(id, Tier::Flash, 0).map_err(text)?;
        tokens.push(found.tokens(&file).map_err(text)?);
        let form = found.encoding.in_arena().dtype;
        let layout = KvLayout::new(found.shape, form, found.rows);
        let mut bytes = vec![0u8; layout.total_bytes()];
        restore(&file, &found, &mut bytes)?;
        rows.push(Rows { bytes, layout });
    }
    Ok(Stored { tokens, rows })
}

/// Everything one question is asked with.
struct Asked<'a> {
    model: &'a LanguageModel,
    prefix: &'a [u32],
    prefix_rows: &'a ChunkSlot,
    stored: &'a Stored,
    question: &'a Question,
    answer: usize,
}

/// Asks every question by every method, as long as `next` asks for the next one. Returns for each
/// method one sample a question.
///
/// # Errors
/// If a chunk cannot be read.
pub fn compare(
    store: &Store,
    (model, prefix): (&LanguageModel, &[u32]),
    questions: &[Question],
    methods: &[Method],
    answer: usize,
    mut next: impl FnMut() -> bool,
) -> Result<Vec<Vec<Sample>>, String> {
    let bytes = KvLayout::new(model.kv_shape(), KvDtype::Bf16, prefix.len()).total_bytes();
    let arena = Arena::new(&Region::anonymous(size_class(bytes)), 0..size_class(bytes));
    let prefix_rows = &compile_prefix(model, prefix, &arena).map_err(text)?;
    let mut samples = vec![Vec::new(); methods.len()];
    for question in questions.iter().take_while(|_| next()) {
        let stored = &stored(store, &question.chunks)?;
        let asked = Asked { model, prefix, prefix_rows, stored, question, answer };
        let plan = asked.plan(Mode::Vanilla);
        let mut full = asked.prefilled(&plan);
        let (forced, reference) = full.greedy_to_end(answer);
        let deviations =
            methods.iter().any(|m| matches!(m, Method::Ranked { by: Ranking::Deviation, .. }));
        let deviations = if deviations { asked.deviations(&plan, &full) } else { Vec::new() };
        for (method, samples) in methods.iter().zip(&mut samples) {
            let plan = match *method {
                Method::Mode(mode) => asked.plan(mode),
                Method::Ranked { by, share, link, unit } => {
                    let weights = match by {
                        Ranking::Question => asked.attended(),
                        Ranking::Deviation => deviations.clone(),
                    };
                    asked.ranked(share, link, unit, &weights)
                }
            };
            samples.push(asked.sample(&plan, &forced, &reference));
        }
    }
    Ok(samples)
}

impl<'a> Asked<'a> {
    fn plan(&self, mode: Mode) -> Plan {
        let (chunks, rest) = (&self.stored.tokens, &self.question.rest);
        let plan = Plan::new(mode, self.prefix, chunks, rest, self.answer);
        match mode {
            Mode::Focused { link, .. } if plan.choose > 0 => {
                focus::focused(&plan, link, self.prefix, chunks, &self.attended())
            }
            _ => plan,
        }
    }

    fn prefilled(&self, plan: &Plan) -> Prefilled<'a> {
        Prefilled::new(self.model, plan, self.prefix_rows, &self.stored.rows)
    }

    /// What the question attends to, as it is when a request is served.
    fn attended(&self) -> Vec<Vec<f32>> {
        let rest = &self.question.rest;
        let own = KvLayout::new(self.model.kv_shape(), KvDtype::Bf16, rest.len());
        let mut bytes = vec![0u8; own.total_bytes()];
        let prompt = (self.prefix, &self.stored.tokens[..], &rest[..]);
        let source = |s| source(self.prefix_rows, &self.stored.rows, s);
        focus::weights(self.model, prompt, source, (&mut bytes, own), &mut |_| true)
            .unwrap_or_default()
    }

    fn ranked(&self, share: Share, link: u32, unit: usize, weights: &[Vec<f32>]) -> Plan {
        let chunks = &self.stored.tokens;
        let units = Units::of_rows(chunks.iter().map(Vec::len), link as usize, unit);
        let anew = units.choose(share.of(units.len()), link as usize, weights);
        // A run begins at a whole tile, however short it is.
        let padding = TILE_ROWS * anew.iter().map(Vec::len).sum::<usize>();
        let computed = anew.iter().flatten().map(Range::len).sum::<usize>();
        let mut plan =
            Plan::new(Mode::Linked(0), self.prefix, chunks, &self.question.rest, self.answer);
        plan.own_rows += padding + computed;
        plan.choose(&anew, self.prefix, chunks)
    }

    /// How far the K and V of every stored row are from those of the full prefill.
    fn deviations(&self, plan: &Plan, full: &Prefilled<'_>) -> Vec<Vec<f32>> {
        let shape = self.model.kv_shape();
        let layer = DEVIATION_LAYER.min(shape.layers - 1);
        // The runs of the full prefill: prefix, chunks, rest.
        let chunks = self.stored.rows.iter().zip(&plan.segments[1..]);
        let of_chunk = |(stored, run): (&Rows, &PlannedSegment)| -> Vec<f32> {
            let shift = run.position as i64 - self.prefix.len() as i64;
            let mut sums = vec![0.0; stored.layout.rows];
            for head in 0..shape.kv_heads {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let own = (&full.own[..], &full.layout);
                    let (k, v) = vectors(own, (layer, head), run.first_row + row);
                    let (kept_k, kept_v) =
                        vectors((&stored.bytes, &stored.layout), (layer, head), row);
                    let kept_k = self.moved(&kept_k, shift);
                    let pairs = k.iter().zip(&kept_k).chain(v.iter().zip(&kept_v));
                    *sum += pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
                }
            }
            sums
        };
        chunks.map(of_chunk).collect()
    }

    /// A key as if its row stood `shift` positions later.
    fn moved(&self, key: &[f32], shift: i64) -> Vec<f32> {
        let rope = &self.model.config.rope;
        let mut out = vec![0.0; key.len()];
        // Keys carry the magnitude already.
        let scale = (1.0 / rope.magnitude) as f32;
        rotate_heads(rope.style, &rope.angles([shift]), 0, key, scale, &mut out);
        out
    }

    fn sample(&self, plan: &Plan, forced: &[u32], reference: &[Vec<f32>]) -> Sample {
        let mut prefilled = self.prefilled(plan);
        let mut sample = Sample {
            tokens: forced.len() as f64,
            recomputed: plan.recomputed_rows as f64,
            rows: self.stored.tokens.iter().map(Vec::len).sum::<usize>() as f64,
            ..Sample::default()
        };
        let likelihood =
            |logits: &[f32], token: u32| f64::from(logits[token as usize]) - log_sum_exp(logits);
        for ((want, got), &token) in reference.iter().zip(prefilled.forced(forced)).zip(forced) {
            // Rounding must not make it negative.
            sample.kl += divergence(want, &got).max(0.0);
            sample.same += f64::from(u8::from(greedy(want) == greedy(&got)));
            sample.likelihood += likelihood(&got, token) - likelihood(want, token);
        }
        if let Some(gold) = &self.question.gold {
            let (tokens, _) = prefilled.greedy_to_end(self.answer);
            let said = words(&Detokenizer::text(&self.model.tokenizer, &tokens));
            let gold = words(gold);
            sample.f1 = f1(&said, &gold);
            sample.em = f64::from(u8::from(said == gold));
        }
        sample
    }
}

/// K and V of one row of a layer and head.
fn vectors(
    (bytes, layout): (&[u8], &KvLayout),
    at: (usize, usize),
    row: usize,
) -> (Vec<f32>, Vec<f32>) {
    let dims = 0..layout.shape.head_dim;
    let k = dims.clone().map(|d| read_k(bytes, layout, at, row, d)).collect();
    (k, dims.map(|d| read_v(bytes, layout, at, row, d)).collect())
}

/// Words as SQuAD counts them: lower case, without punctuation and articles.
fn words(text: &str) -> Vec<String> {
    let kept: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let words = kept.split_whitespace().filter(|w| !["a", "an", "the"].contains(w));
    words.map(str::to_owned).collect()
}

fn f1(said: &[String], gold: &[String]) -> f64 {
    if said.is_empty() || gold.is_empty() {
        return f64::from(u8::from(said == gold));
    }
    let mut left: HashMap<&String, usize> = HashMap::new();
    gold.iter().for_each(|w| *left.entry(w).or_default() += 1);
    let common = said
        .iter()
        .filter(|w| left.get_mut(w).is_some_and(|n| std::mem::replace(n, n.saturating_sub(1)) > 0))
        .count();
    2.0 * common as f64 / (said.len() + gold.len()) as f64
}

/// A ratio of sums over questions, with its 95 % interval: questions are independent, the tokens
/// of one are not.
pub fn ratio(samples: &[Sample], over: fn(&Sample) -> f64, under: fn(&Sample) -> f64) -> [f64; 3] {
    let n = samples.len() as f64;
    let total: f64 = samples.iter().map(under).sum();
    let mean = samples.iter().map(over).sum::<f64>() / total;
    let residuals: f64 = samples.iter().map(|s| (over(s) - mean * under(s)).powi(2)).sum();
    // One question says nothing about how others differ.
    let half = if n > 1.0 { 1.96 * (residuals * n / (n - 1.0)).sqrt() / total } else { f64::NAN };
    [mean, mean - half, mean + half]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_read() {
        let share = Share::new(0.1).unwrap();
        let (by, unit) = (Ranking::Deviation, TILE_ROWS);
        assert_eq!(Method::parse("linked", 5), Ok(Method::Mode(Mode::Linked(5))));
        assert_eq!(Method::parse("blend(0.1)", 5), Ok(Method::Ranked { by, share, link: 5, unit }));
        let by = Ranking::Question;
        assert_eq!(
            Method::parse("focused(0.1,8,1)", 5),
            Ok(Method::Ranked { by, share, link: 8, unit: 1 })
        );
        for text in ["blend", "blend()", "blend(2)", "blend(0.1,2,0)", "blend(0.1,2,3,4)", "x(1)"] {
            assert!(Method::parse(text, 5).is_err(), "{text}");
        }
    }

    #[test]
    fn scores_of_answers() {
        let f1 = |a: &str, b: &str| f1(&words(a), &words(b));
        assert_eq!(f1("The Mill.", "mill"), 1.0);
        assert_eq!(f1("", "mill"), 0.0);
        // Two of three words said, two of two asked for.
        assert_eq!(f1("old tide mill", "tide mill"), 0.8);
        assert_eq!(f1("mill mill", "mill"), 2.0 / 3.0);
    }

    #[test]
    fn intervals_are_over_questions() {
        let sample = |kl, tokens| Sample { kl, tokens, ..Sample::default() };
        let of = |s: &[Sample]| ratio(s, |s| s.kl, |s| s.tokens);
        let [mean, low, high] = of(&[sample(1.0, 10.0), sample(3.0, 10.0)]);
        // Means 0.1 and 0.3: a deviation of 0.1414, over the root of two.
        assert!((mean - 0.2).abs() < 1e-12 && (high - mean - 0.196).abs() < 1e-9, "{mean} {high}");
        assert!((mean - low - 0.196).abs() < 1e-9);
        // Longer answers weigh more.
        assert!((of(&[sample(1.0, 10.0), sample(3.0, 30.0)])[0] - 0.1).abs() < 1e-12);
        assert!(of(&[sample(1.0, 10.0)])[1].is_nan());
    }
}
