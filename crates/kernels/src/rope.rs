//! Rotary position embedding with angles reduced in f64.
//!
//! A score depends on position differences only (Su et al. 2021, RoFormer), so a chunk compiled
//! at one position is read at another by rotating the query by the difference: the key rows are
//! never touched. At position 131,072 an angle computed in f32 is off by 0.004 rad; hence f64.

use crate::isa::{Isa, dispatch};
use crate::lanes::Lanes;

/// Which dimensions form a rotation pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(0, 1), (2, 3), …`: GGUF llama.
    Interleaved,
    /// `(0, d/2), (1, d/2 + 1), …`: safetensors llama, Qwen.
    HalfSplit,
}

/// Frequencies of a model: the angle of pair `i` at position `p` is `p · inv_freq[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryEmbedding {
    /// Radians per position for each pair; `head_dim / 2` of them.
    pub inv_freq: Vec<f64>,
    /// Factor on cosine and sine of both queries and keys (YaRN); 1 otherwise.
    pub magnitude: f64,
    /// Pairing.
    pub style: RopeStyle,
}

/// Cosines and sines of some positions, `[position][head_dim / 2]`.
#[derive(Clone, Debug, Default)]
pub struct RopeAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    pairs: usize,
}

impl RotaryEmbedding {
    /// Plain RoPE: `inv_freq[i] = base^(−2i/d)`.
    pub fn plain(head_dim: usize, base: f64, style: RopeStyle) -> Self {
        let freq = |i: usize| base.powf(-2.0 * i as f64 / head_dim as f64);
        Self { inv_freq: (0..head_dim / 2).map(freq).collect(), magnitude: 1.0, style }
    }

    /// Cosines and sines of `positions`.
    pub fn angles(&self, positions: impl IntoIterator<Item = i64>) -> RopeAngles {
        let mut out = RopeAngles::default();
        self.angles_into(positions, &mut out);
        out
    }

    /// The same, in memory that is there.
    pub fn angles_into(&self, positions: impl IntoIterator<Item = i64>, out: &mut RopeAngles) {
        out.pairs = self.inv_freq.len();
        out.cos.clear();
        out.sin.clear();
        for position in positions {
            for freq in &self.inv_freq {
                let angle = (position as f64 * freq) % std::f64::consts::TAU;
                out.cos.push((angle.cos() * self.magnitude) as f32);
                out.sin.push((angle.sin() * self.magnitude) as f32);
            }
        }
    }
}

impl RopeAngles {
    fn row(&self, i: usize) -> (&[f32], &[f32]) {
        let range = i * self.pairs..(i + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// `out[heads·dim] = scale · R(row i of angles) · x`, head by head.
///
/// # Panics
/// If the lengths are not equal multiples of the head dimension.
pub fn rotate_heads(
    style: RopeStyle,
    angles: &RopeAngles,
    i: usize,
    x: &[f32],
    scale: f32,
    out: &mut [f32],
) {
    let (cos, sin) = angles.row(i);
    assert!(x.len() == out.len() && x.len().is_multiple_of(2 * cos.len()));
    // SAFETY: nothing is asked but the instruction set.
    unsafe { rotate(Isa::detect(), style, (cos, sin), x, scale, out) };
}

dispatch! {
    /// Plain loops, compiled for each instruction set.
    unsafe fn rotate => rotate_body(
        style: RopeStyle, angles: (&[f32], &[f32]), x: &[f32], scale: f32, out: &mut [f32],
    )
}

#[inline(always)]
unsafe fn rotate_body<L: Lanes>(
    style: RopeStyle,
    (cos, sin): (&[f32], &[f32]),
    x: &[f32],
    scale: f32,
    out: &mut [f32],
) {
    let half = cos.len();
    for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
        let angles = cos.iter().zip(sin);
        match style {
            RopeStyle::Interleaved => {
                let pairs = x.chunks_exact(2).zip(out.chunks_exact_mut(2));
                for ((x, out), (cos, sin)) in pairs.zip(angles) {
                    let (u, v) = (x[0] * scale, x[1] * scale);
                    out[0] = u * cos - v * sin;
                    out[1] = u * sin + v * cos;
                }
            }
            RopeStyle::HalfSplit => {
                let (x, y) = x.split_at(half);
                let (first, second) = out.split_at_mut(half);
                let pairs = x.iter().zip(y).zip(first.iter_mut().zip(second));
                for (((x, y), (first, second)), (cos, sin)) in pairs.zip(angles) {
                    let (u, v) = (x * scale, y * scale);
                    *first = u * cos - v * sin;
                    *second = u * sin + v * cos;
                }
            }
        }
    }
}
