//! What this machine can do at most: the floors that speeds are held against.

use std::time::Instant;

use std::sync::atomic::{AtomicU64, Ordering};

use matkv_kernels::{Activations, Isa, PackedMatrix, gemm, peak_flops, team};
use matkv_model::{LanguageModel, Team};
use matkv_sys::{Segment, SlotRef};
use matkv_types::Precision;

use super::text;

/// Larger than the last-level cache of any known processor.
const STREAM_BYTES: usize = 512 << 20;
/// The best of so many passes is the bandwidth: a floor must not be slow because of neighbours.
const PASSES: usize = 7;
/// Rows of the products whose speed is held against the peak.
const GEMM_ROWS: [usize; 2] = [512, 2048];

/// As many threads as the measured process has.
///
/// # Errors
/// If they cannot be started.
pub fn team(threads: usize) -> Result<Team, String> {
    Team::new(threads, "bench").map_err(text)
}

/// Floating-point operations a second of bf16 dot products on registers, of all threads together.
pub fn bf16_peak(team: &Team) -> f64 {
    team.install(|| peak_flops(Isa::detect(), Precision::Bf16))
}

/// Memory as the arena's, and how fast all threads together read it. It changes from one second to
/// the next where other machines share it: to be asked beside what it is a floor of.
pub struct Memory {
    bytes: SlotRef,
    _segment: Segment,
}

impl Memory {
    /// # Errors
    /// If there is not enough.
    pub fn new() -> Result<Self, String> {
        let name = format!("matkv-memory-{}", std::process::id());
        let segment = Segment::create(&name, STREAM_BYTES).map_err(text)?;
        let mut bytes = segment.region().exclusive(0..STREAM_BYTES).map_err(text)?;
        bytes.fill(1);
        Ok(Self { bytes: bytes.freeze(), _segment: segment })
    }

    /// Bytes a second.
    pub fn peak(&self, team: &Team) -> f64 {
        team.install(|| (0..PASSES).map(|_| self.pass()).fold(0.0, f64::max))
    }

    /// Every thread sums its own part.
    fn pass(&self) -> f64 {
        let (threads, total) = (team::threads(), AtomicU64::new(0));
        let part = STREAM_BYTES.div_ceil(threads);
        let started = Instant::now();
        team::for_each(threads, |i| {
            let mine = &self.bytes[i * part..((i + 1) * part).min(STREAM_BYTES)];
            total.fetch_add(sum(mine), Ordering::Relaxed);
        });
        std::hint::black_box(&total);
        STREAM_BYTES as f64 / started.elapsed().as_secs_f64()
    }
}

/// Independent chains, so that memory and not the additions is the limit.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// Speed of the model's bf16 products of at least 512 rows over the peak: the slowest shape.
pub fn gemm_over_peak(team: &Team, model: &LanguageModel) -> f64 {
    let c = &model.config;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let shapes = [(q + 2 * kv, c.hidden), (c.hidden, q), (2 * c.ffn, c.hidden), (c.hidden, c.ffn)];
    let isa = Isa::detect();
    team.install(|| {
        let (mut least, mut peak) = (f64::INFINITY, 0f64);
        for m in GEMM_ROWS {
            for (n, k) in shapes {
                let a = Activations::rounded(Precision::Bf16, &values(m * k));
                let w = PackedMatrix::pack(&values(n * k), n, k, Precision::Bf16);
                let mut c = vec![0.0; m * w.padded_n()];
                let mut best = f64::INFINITY;
                // Between them: the clock of a shared machine is not always the same, and what it
                // once reached is the peak.
                peak = peak.max(peak_flops(isa, Precision::Bf16));
                for _ in 0..20 {
                    let started = Instant::now();
                    gemm(isa, &a, &w, &mut c);
                    best = best.min(started.elapsed().as_secs_f64());
                }
                least = least.min((2 * m * n * k) as f64 / best);
            }
        }
        least / peak
    })
}

/// Values in −1…1 without a pattern that sums could profit from.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect()
}

/// Operations of computing rows at these positions, each attending to all before it and itself:
/// two for each weight outside the embedding, four for each dimension of each head and row
/// attended to; and the output projection of `heads` rows.
pub fn operations(
    model: &LanguageModel,
    positions: impl Iterator<Item = usize>,
    heads: usize,
) -> f64 {
    let c = &model.config;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let weights = c.hidden * (q + 2 * kv) + q * c.hidden + 3 * c.hidden * c.ffn;
    let rows: f64 = positions.map(|p| (2 * weights) as f64 + (4 * q) as f64 * (p + 1) as f64).sum();
    rows * c.layers as f64 + (2 * c.hidden * c.vocab * heads) as f64
}
