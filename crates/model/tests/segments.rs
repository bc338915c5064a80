//! Reuse against full prefill: what is exact is equal in bits, what is not is measured.
//!
//! `vanilla` computes every row of a prompt into the sequence's own section, prefix, chunks and
//! rest each as a run of their own. `matkv` reads the prefix and chunks from slots where they
//! were compiled once.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::ops::Range;

use common::{Sequence, Slot, first_difference, max_difference};
use matkv_kernels::{read_k, read_v};
use matkv_model::{LanguageModel, Message, PromptTexts, Role, divergence};
use matkv_testkit::TinyModel;
use matkv_types::{KvDtype, Precision};

/// Tokens of a greedy answer.
const ANSWER: usize = 24;

/// Token ids of a prompt, cut where its segments are.
struct Prompt {
    prefix: Vec<u32>,
    rest: Vec<u32>,
}

fn prompt(model: &LanguageModel) -> Prompt {
    let texts = PromptTexts {
        system: "Answer from the documents.".into(),
        introduction: "Documents:\n\n".into(),
    };
    let content = "What did the keeper carry over the bridge, and when?".into();
    Prompt {
        prefix: model.prefix(&texts).unwrap(),
        rest: model.rest(&[Message { role: Role::User, content }]).unwrap(),
    }
}

/// A chunk of exactly `rows` tokens.
fn chunk(model: &LanguageModel, seed: u64, rows: usize) -> Vec<u32> {
    // A word is at least one token.
    let mut ids = model.tokenizer.encode(&matkv_testkit::text(seed, rows)).unwrap();
    ids.truncate(rows);
    assert_eq!(ids.len(), rows);
    ids
}

/// Room for a prompt of these runs, each padded to a tile, and an answer.
fn room(runs: &[&[u32]]) -> usize {
    runs.iter().map(|run| run.len() + 15).sum::<usize>() + ANSWER
}

/// Computes `runs` one after the other; logits after the last one.
fn vanilla<'a>(
    model: &'a LanguageModel,
    dtype: KvDtype,
    runs: &[&[u32]],
) -> (Sequence<'a>, Vec<f32>) {
    let mut sequence = Sequence::new(model, dtype, room(runs));
    let mut logits = Vec::new();
    for run in runs {
        logits = sequence.compute(run);
    }
    (sequence, logits)
}

fn compile_prefix(model: &LanguageModel, prefix: &[u32], dtype: KvDtype) -> Slot {
    let mut sequence = Sequence::new(model, dtype, prefix.len());
    sequence.compute(prefix);
    sequence.own
}

/// Compiles a chunk after the prefix, at base position P, into a slot of its own.
fn compile(model: &LanguageModel, prefix: &Slot, tokens: &[u32]) -> Slot {
    let mut sequence = Sequence::new(model, prefix.layout.dtype, tokens.len());
    sequence.attach(prefix, 0..prefix.layout.rows, 0);
    sequence.compute(tokens);
    sequence.own
}

/// What compiled chunks are: a prefix and two chunks in slots of their own.
struct Compiled {
    prefix: Slot,
    chunks: [Slot; 2],
}

fn compile_all(
    model: &LanguageModel,
    p: &Prompt,
    chunks: &[Vec<u32>; 2],
    dtype: KvDtype,
) -> Compiled {
    let prefix = compile_prefix(model, &p.prefix, dtype);
    let chunks = chunks.each_ref().map(|tokens| compile(model, &prefix, tokens));
    Compiled { prefix, chunks }
}

impl Compiled {
    fn base(&self) -> usize {
        self.prefix.layout.rows
    }

    /// A sequence with room for link rows and the rest.
    fn begin<'a>(&self, model: &'a LanguageModel, link: &[u32], rest: &[u32]) -> Sequence<'a> {
        Sequence::new(model, self.prefix.layout.dtype, room(&[link, rest]))
    }

    /// Reads the prefix and the first of `order` from their slots, recomputes `link` rows at the
    /// start of the second, reads its other rows from its slot, and computes the rest.
    fn linked<'a>(
        &'a self,
        mut sequence: Sequence<'a>,
        order: [usize; 2],
        link: &[u32],
        rest: &[u32],
    ) -> (Sequence<'a>, Vec<f32>) {
        sequence.attach(&self.prefix, 0..self.base(), 0);
        let [first, second] = order.map(|i| &self.chunks[i]);
        sequence.attach(first, 0..first.layout.rows, self.base());
        if !link.is_empty() {
            sequence.compute(link);
        }
        sequence.attach(second, link.len()..second.layout.rows, self.base() + link.len());
        let logits = sequence.compute(rest);
        (sequence, logits)
    }
}

/// Every element of the K and V of some rows of a slot.
fn elements(slot: &Slot, rows: Range<usize>) -> Vec<f32> {
    let shape = slot.layout.shape;
    let mut out = Vec::new();
    for layer in 0..shape.layers {
        for head in 0..shape.kv_heads {
            for row in rows.clone() {
                for d in 0..shape.head_dim {
                    out.push(read_k(&slot.section, &slot.layout, (layer, head), row, d));
                    out.push(read_v(&slot.section, &slot.layout, (layer, head), row, d));
                }
            }
        }
    }
    out
}

/// (a), (e): prefix and one chunk from slots equal a full prefill: rows, logits, answer.
fn one_chunk_is_exact(model: &LanguageModel, rows: usize) {
    let p = prompt(model);
    let tokens = chunk(model, rows as u64, rows);
    let dtype = KvDtype::Bf16;
    let (mut full, want) = vanilla(model, dtype, &[&p.prefix, &tokens, &p.rest]);

    let prefix = compile_prefix(model, &p.prefix, dtype);
    let slot = compile(model, &prefix, &tokens);
    let start = p.prefix.len().next_multiple_of(16);
    let (in_slot, in_full) = (elements(&slot, 0..rows), elements(&full.own, start..start + rows));
    assert_eq!(first_difference(&in_slot, &in_full), None, "KV of {rows} rows");

    let mut reused = Sequence::new(model, dtype, room(&[&p.rest]));
    reused.attach(&prefix, 0..p.prefix.len(), 0);
    reused.attach(&slot, 0..rows, p.prefix.len());
    let got = reused.compute(&p.rest);
    assert_eq!(reused.position, full.position);
    assert!(got.iter().all(|x| x.is_finite()));
    assert_eq!(first_difference(&got, &want), None, "logits after a chunk of {rows} rows");
    let answer = reused.answer(got, ANSWER);
    assert_eq!(answer, full.answer(want, ANSWER), "answer after a chunk of {rows} rows");
    let distinct: std::collections::BTreeSet<u32> = answer.iter().copied().collect();
    assert!(distinct.len() > 4, "a dull answer shows little: {answer:?}");
}

/// (b), (d): with k link rows, those are the rows of a full prefill; all of chunk 2 linked is a
/// full prefill, none of it is not.
fn links_approach_a_full_prefill(model: &LanguageModel, rows: [usize; 2]) {
    let p = prompt(model);
    let chunks = [chunk(model, 1, rows[0]), chunk(model, 2, rows[1])];
    let compiled = compile_all(model, &p, &chunks, KvDtype::Bf16);
    let runs = [&p.prefix[..], &chunks[0], &chunks[1], &p.rest];
    let (mut full, want) = vanilla(model, KvDtype::Bf16, &runs);
    let second = [&p.prefix, &chunks[0]].iter().map(|run| run.len().next_multiple_of(16)).sum();

    let mut by_links = Vec::new();
    for k in [0, 1, 31, 32, 33, rows[1]] {
        let link = &chunks[1][..k];
        let (mut linked, got) =
            compiled.linked(compiled.begin(model, link, &p.rest), [0, 1], link, &p.rest);
        assert_eq!(linked.position, full.position);
        assert!(got.iter().all(|x| x.is_finite()), "k = {k}");
        let (mine, theirs) = (elements(&linked.own, 0..k), elements(&full.own, second..second + k));
        assert_eq!(first_difference(&mine, &theirs), None, "link rows, k = {k}");
        by_links.push((k, divergence(&want, &got)));
        if k == rows[1] {
            assert_eq!(first_difference(&got, &want), None, "logits, all rows linked");
            assert_eq!(linked.answer(got, ANSWER), full.answer(want.clone(), ANSWER));
        } else {
            assert!(first_difference(&got, &want).is_some(), "k = {k} is not a full prefill");
        }
    }
    println!("KL(vanilla || linked(k)): {by_links:?}");
    let (none, all) = (by_links[0].1, by_links[by_links.len() - 1].1);
    assert!(all == 0.0 && none > 0.0, "{by_links:?}");
}

/// (c): the order of chunks is seen, and independent chunks are not a full prefill.
fn order_matters_and_independent_differs(model: &LanguageModel, rows: [usize; 2]) {
    let p = prompt(model);
    let chunks = [chunk(model, 3, rows[0]), chunk(model, 4, rows[1])];
    let compiled = compile_all(model, &p, &chunks, KvDtype::Bf16);
    let [one, other] = [[0, 1], [1, 0]]
        .map(|order| compiled.linked(compiled.begin(model, &[], &p.rest), order, &[], &p.rest).1);
    let (_, want) = vanilla(model, KvDtype::Bf16, &[&p.prefix, &chunks[0], &chunks[1], &p.rest]);
    assert!(one.iter().chain(&other).all(|x| x.is_finite()));
    // 1e-3 is fifty times what f32 rounding moves a logit.
    assert!(max_difference(&one, &other) > 1e-3, "swapped chunks");
    assert!(max_difference(&one, &want) > 1e-3, "independent chunks");
}

/// Reading compiled rows `offset` positions later is what compiling them there gives: prefix at
/// `offset`, chunk after it. Only the keys' rotation differs, in its last f32 bits: the tolerance
/// is fifteen times the error measured, and a shift off by one is ten times outside it.
fn a_shift_is_a_compile_elsewhere(model: &LanguageModel, rows: usize, tolerance: f32) {
    let p = prompt(model);
    let tokens = chunk(model, 5, rows);
    let dtype = KvDtype::F32;
    let offset = 1000;
    let at = |base: usize| {
        let mut sequence = Sequence::new(model, dtype, room(&[&p.prefix, &tokens]));
        sequence.position = base;
        sequence.compute(&p.prefix);
        sequence.compute(&tokens);
        sequence.own
    };
    let (here, there) = (at(0), at(offset));
    // Reads both runs at `offset`, taking them to be compiled from `base` on.
    let read = |slot: &Slot, base: usize| {
        let start = p.prefix.len().next_multiple_of(16);
        let mut sequence = Sequence::new(model, dtype, room(&[&p.rest]));
        sequence.position = offset;
        sequence.attach(slot, 0..p.prefix.len(), base);
        // Padding rows lie between the runs, but no positions do.
        sequence.attach(slot, start..start + rows, base + p.prefix.len());
        sequence.compute(&p.rest)
    };
    let want = read(&there, offset);
    let error = max_difference(&read(&here, 0), &want);
    println!("shift by {offset}: largest error {error}");
    assert!(error <= tolerance, "{error}");
    // A shift that is wrong by one position is seen.
    let wrong = max_difference(&read(&here, 1), &want);
    assert!(wrong > 10.0 * tolerance, "{wrong}");
}

/// Linked prompts, cut into other calls and run by other numbers of threads.
fn linked_bits_do_not_depend_on_calls_or_threads(model: &LanguageModel, rows: [usize; 2]) {
    let p = prompt(model);
    let chunks = [chunk(model, 6, rows[0]), chunk(model, 7, rows[1])];
    let compiled = compile_all(model, &p, &chunks, KvDtype::Bf16);
    let link = &chunks[1][..32];
    let run = |threads: usize, per_call: usize| {
        let pool = matkv_kernels::team::Team::new(threads, "test").unwrap();
        pool.install(|| {
            let sequence = compiled.begin(model, link, &p.rest).per_call(per_call);
            let (mut sequence, logits) = compiled.linked(sequence, [0, 1], link, &p.rest);
            (logits.clone(), sequence.answer(logits, ANSWER), sequence.own.section)
        })
    };
    let want = run(2, 512);
    for (threads, per_call) in [(1, 512), (1, 7), (3, 7), (2, 1), (3, 4)] {
        let got = run(threads, per_call);
        let what = format!("{threads} threads, {per_call} rows a call");
        assert_eq!(first_difference(&got.0, &want.0), None, "{what}");
        assert_eq!(got.1, want.1, "{what}");
        assert!(got.2 == want.2, "KV rows: {what}");
    }
}

#[test]
fn tiny_linked_bits_do_not_depend_on_calls_or_threads() {
    linked_bits_do_not_depend_on_calls_or_threads(&common::tiny(), [300, 280]);
}

#[test]
fn other_shapes_are_exact() {
    let default = TinyModel::default();
    for shape in [
        TinyModel { heads: 3, kv_heads: 1, head_dim: 96, ..default.clone() },
        TinyModel { heads: 2, kv_heads: 2, head_dim: 128, hidden: 144, ..default.clone() },
        TinyModel { layers: 3, rope_base: 500_000.0, ffn: 400, seed: 9, ..default },
    ] {
        let model = common::opened(&shape);
        one_chunk_is_exact(&model, 263);
        links_approach_a_full_prefill(&model, [130, 50]);
    }
}

#[test]
fn tiny_one_chunk_at_every_boundary() {
    let model = common::tiny();
    for boundary in [16, 32, 256, 1024] {
        for rows in [boundary - 1, boundary, boundary + 1] {
            one_chunk_is_exact(&model, rows);
        }
    }
    one_chunk_is_exact(&model, 1);
}

#[test]
fn tiny_links_approach_a_full_prefill() {
    let model = common::tiny();
    for rows in [[300, 280], [256, 48], [17, 257], [1024, 34]] {
        links_approach_a_full_prefill(&model, rows);
    }
}

#[test]
fn tiny_order_matters_and_independent_differs() {
    order_matters_and_independent_differs(&common::tiny(), [300, 280]);
}

#[test]
fn tiny_shift_is_a_compile_elsewhere() {
    a_shift_is_a_compile_elsewhere(&common::exact_tiny(), 300, 1e-4);
}

#[test]
fn smollm2_one_chunk_is_exact() {
    let Some(model) = common::real() else { return };
    one_chunk_is_exact(&model, 257);
}

#[test]
fn smollm2_links_approach_a_full_prefill() {
    let Some(model) = common::real() else { return };
    links_approach_a_full_prefill(&model, [150, 120]);
}

#[test]
fn smollm2_order_and_shift() {
    let Some(model) = common::real() else { return };
    order_matters_and_independent_differs(&model, [150, 120]);
    let Some(model) = common::real_in(Precision::Exact) else { return };
    a_shift_is_a_compile_elsewhere(&model, 120, 1e-3);
}

#[test]
fn precisions_have_fingerprints_of_their_own() {
    let (bf16, exact) = (common::tiny(), common::exact_tiny());
    assert_eq!((bf16.precision(), exact.precision()), (Precision::Bf16, Precision::Exact));
    assert_eq!(bf16.digest(), exact.digest());
    assert_ne!(bf16.fingerprint(&[1]), exact.fingerprint(&[1]));
}
