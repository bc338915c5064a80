//! Sequences decoded together: each has the bits it has alone, in every batch size.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use candle_core::quantized::GgmlDType;
use common::{Sequence, Slot, first_difference};
use matkv_kernels::team::Team;
use matkv_model::{LanguageModel, Phase, greedy};
use matkv_testkit::TinyModel;
use matkv_types::{KvDtype, Precision};

/// More than are ever decoded together by default, and not a multiple of anything.
const SEQUENCES: usize = 17;
const STEPS: usize = 4;

/// Rows of a slot: more than a block of attention, so that work is split over context.
fn slot(model: &LanguageModel, seed: u64, rows: usize) -> Slot {
    let mut tokens = model.tokenizer.encode(&matkv_testkit::text(seed, rows)).unwrap();
    tokens.truncate(rows);
    let mut sequence = Sequence::new(model, KvDtype::Bf16, rows);
    sequence.compute(&tokens);
    sequence.own
}

/// The `i`-th sequence: two of three slots, in either order, and a few rows of its own.
fn sequence<'a>(model: &'a LanguageModel, slots: &'a [Slot; 3], i: usize) -> Sequence<'a> {
    let mut sequence = Sequence::new(model, KvDtype::Bf16, 32);
    for slot in [&slots[i % 3], &slots[(i + 1 + i % 2) % 3]] {
        sequence.attach(slot, 0..slot.layout.rows, 0);
    }
    let own: Vec<u32> = (0..=i as u32 % 5).map(|k| 7 + k + i as u32).collect();
    sequence.compute(&own);
    sequence
}

/// Decodes sequences together; logits of every step, `[sequence][step]`.
fn decode(model: &LanguageModel, sequences: &mut [Sequence<'_>]) -> Vec<Vec<Vec<f32>>> {
    let mut tokens: Vec<u32> = (0..sequences.len() as u32).map(|_| 11).collect();
    let mut out = vec![Vec::new(); sequences.len()];
    for _ in 0..STEPS {
        let rows: Vec<_> = sequences.iter_mut().zip(&tokens).map(|(s, t)| s.rows(&[*t])).collect();
        let segments: Vec<_> = sequences.iter().map(Sequence::segments).collect();
        let parts = sequences.iter_mut().zip(rows.iter().zip(&segments));
        let mut steps: Vec<_> =
            parts.map(|(sequence, (rows, segments))| sequence.step(rows, segments, true)).collect();
        let logits = model.forward(&mut steps);
        assert_eq!(logits.len(), sequences.len());
        tokens = logits.iter().map(|l| greedy(l)).collect();
        out.iter_mut().zip(logits).for_each(|(out, logits)| out.push(logits));
    }
    out
}

#[test]
fn a_sequence_has_the_same_bits_in_every_batch() {
    for matrices in [GgmlDType::Q8_0, GgmlDType::Q4_1] {
        let (_dir, path) = common::written(&TinyModel { matrices, ..TinyModel::default() });
        let precision = Precision::Bf16;
        let model = LanguageModel::open_for(&path, None, precision, Phase::Decode).unwrap();
        let slots = [slot(&model, 1, 600), slot(&model, 2, 300), slot(&model, 3, 40)];
        let all: Vec<_> = (0..SEQUENCES).map(|i| sequence(&model, &slots, i)).collect();
        let one = Team::new(1, "test").unwrap();
        let alone: Vec<_> = all
            .iter()
            .map(|s| one.install(|| decode(&model, &mut [s.clone()])).swap_remove(0))
            .collect();
        assert!(alone[0] != alone[1], "the comparison can fail");
        for threads in [1, 3] {
            let team = Team::new(threads, "test").unwrap();
            for size in 1..=SEQUENCES {
                let mut batch = all[SEQUENCES - size..].to_vec();
                let got = team.install(|| decode(&model, &mut batch));
                for (want, got) in alone[SEQUENCES - size..].iter().zip(&got) {
                    for (want, got) in want.iter().zip(got) {
                        assert_eq!(first_difference(want, got), None, "{size} of {matrices:?}");
                    }
                }
            }
        }
    }
}
