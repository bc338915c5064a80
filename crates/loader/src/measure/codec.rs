//! What each encoding costs: bytes, time, and how far answers move.
//!
//! Fidelity is measured against bf16 rows, teacher-forced: the answer over exact rows is decoded
//! greedily, and every encoding is asked for the distribution of each of its tokens. Chunks are
//! used as they are in production, all but the first with link tokens recomputed.

use std::time::Instant;

use matkv_format::Superblock;
use matkv_model::{LanguageModel, divergence, greedy};
use matkv_ring::size_class;
use matkv_store::Store;
use matkv_sys::Region;
use matkv_types::{Codec, Encoding, KvDtype, KvLayout, Mode};

use super::answers::{Prefilled, Rows};
use super::{Stored, stored, text};
use crate::arena::Arena;
use crate::compile::{compile_prefix, restore};
use crate::plan::Plan;

/// Reads chunks of at least `rows` rows.
///
/// # Errors
/// If there are too few, or their rows are not bf16.
pub fn exact(store: &Store, count: usize, rows: usize) -> Result<Vec<Stored>, String> {
    let exact = |chunk: Stored| match chunk.found.encoding {
        Encoding::EXACT => Ok(chunk),
        other => Err(format!("chunk {} is {other}, not bf16+none", chunk.id)),
    };
    stored(store, count, rows)?.map(|chunk| chunk.and_then(exact)).collect()
}

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Cost {
    /// Which encoding.
    pub encoding: Encoding,
    /// Bytes of fp16 rows over stored bytes.
    pub ratio: f64,
    /// Bytes of bf16 rows encoded a second, by one thread.
    pub encode: f64,
    /// Bytes of arena rows restored a second, by one thread.
    pub decode: f64,
}

/// Encodes and restores every chunk.
///
/// # Errors
/// If a codec fails.
pub fn cost(store: &Store, chunks: &[Stored], to: Encoding, level: i32) -> Result<Cost, String> {
    let (mut at_rest, mut wide) = (0usize, 0usize);
    let (mut encoding, mut decoding, mut restored) = (0.0, 0.0, 0usize);
    for chunk in chunks {
        let started = Instant::now();
        let file = chunk.transcode(store, to, level)?;
        encoding += started.elapsed().as_secs_f64();
        let found = Superblock::decode(&file).map_err(text)?;
        let kv = KvLayout::new(found.shape, to.dtype.in_arena(), found.rows);
        let mut out = vec![1u8; kv.total_bytes()];
        let started = Instant::now();
        restore(&file, &found, &mut out)?;
        decoding += started.elapsed().as_secs_f64();
        at_rest += file.len();
        restored += out.len();
        wide += KvLayout::new(found.shape, KvDtype::Bf16, found.rows).total_bytes();
    }
    Ok(Cost {
        encoding: to,
        ratio: wide as f64 / at_rest as f64,
        encode: wide as f64 / encoding,
        decode: restored as f64 / decoding,
    })
}

/// How far answers move.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fidelity {
    /// Mean KL divergence per token from the distribution over exact rows, in nats.
    pub kl: f64,
    /// Half the width of its 95 % confidence interval.
    pub kl_interval: f64,
    /// Share of tokens that are the most probable one under both.
    pub top1: f64,
    /// Tokens compared.
    pub tokens: usize,
}

fn rows_of(store: &Store, chunk: &Stored, dtype: KvDtype) -> Result<Rows, String> {
    let file = chunk.transcode(store, Encoding::new(dtype, Codec::None), 1)?;
    let found = Superblock::decode(&file).map_err(text)?;
    let layout = KvLayout::new(found.shape, dtype.in_arena(), found.rows);
    let mut bytes = vec![0u8; layout.total_bytes()];
    restore(&file, &found, &mut bytes)?;
    Ok(Rows { bytes, layout })
}

/// A question over some chunks.
pub struct Question<'a> {
    /// Their numbers.
    pub chunks: Vec<usize>,
    /// Tokens after them.
    pub rest: &'a [u32],
}

/// Compares row types on questions, as long as `next` asks for the next one. Returns one result a
/// type, in their order.
///
/// # Errors
/// If rows cannot be encoded.
pub fn fidelity(
    store: &Store,
    (model, prefix): (&LanguageModel, &[u32]),
    chunks: &[Stored],
    questions: &[Question<'_>],
    dtypes: &[KvDtype],
    answer: usize,
    mut next: impl FnMut() -> bool,
) -> Result<Vec<Fidelity>, String> {
    let bytes = KvLayout::new(model.kv_shape(), KvDtype::Bf16, prefix.len()).total_bytes();
    let arena = Arena::new(&Region::anonymous(size_class(bytes)), 0..size_class(bytes));
    let prefix_rows = compile_prefix(model, prefix, &arena).map_err(text)?;
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); dtypes.len()];
    let mut same = vec![0usize; dtypes.len()];
    for question in questions.iter().take_while(|_| next()) {
        let tokens: Vec<&[u32]> =
            question.chunks.iter().map(|&i| chunks[i].tokens.as_slice()).collect();
        let plan = Plan::new(Mode::Linked(32), prefix, &tokens, question.rest, answer);
        let rows = |dtype: KvDtype| -> Result<Vec<Rows>, String> {
            question.chunks.iter().map(|&i| rows_of(store, &chunks[i], dtype)).collect()
        };
        let exact = rows(KvDtype::Bf16)?;
        let mut exact = Prefilled::new(model, &plan, &prefix_rows, &exact);
        let (forced, reference) = exact.greedy(answer);
        for (i, dtype) in dtypes.iter().enumerate() {
            let rows = rows(*dtype)?;
            let got = Prefilled::new(model, &plan, &prefix_rows, &rows).forced(&forced);
            for (want, got) in reference.iter().zip(&got) {
                // Rounding must not make it negative.
                samples[i].push(divergence(want, got).max(0.0));
                same[i] += usize::from(greedy(want) == greedy(got));
            }
        }
    }
    Ok(samples
        .iter()
        .zip(same)
        .map(|(kl, same)| {
            let n = kl.len() as f64;
            let mean = kl.iter().sum::<f64>() / n;
            let variance = kl.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            Fidelity {
                kl: mean,
                kl_interval: 1.96 * (variance / n).sqrt(),
                top1: same as f64 / n,
                tokens: kl.len(),
            }
        })
        .collect())
}
