//! Drawing the next token. The draw at step `n` depends on `(seed, n)` and the logits only, so a
//! replay after a crash, or on another process, draws the same tokens.

use matkv_types::Sampling;

/// The most probable token; the lowest id among equals.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (id, &x) in logits.iter().enumerate() {
        if x > best.1 {
            best = (id as u32, x);
        }
    }
    best.0
}

/// `ln Σ e^x`, in f64.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    top + logits.iter().map(|&x| (f64::from(x) - top).exp()).sum::<f64>().ln()
}

/// Kullback-Leibler divergence `KL(p ‖ q)` of the distributions two rows of logits stand for, in
/// nats.
pub fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (zp, zq) = (log_sum_exp(p), log_sum_exp(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let (p, q) = (f64::from(p) - zp, f64::from(q) - zq);
        p.exp() * (p - q)
    };
    p.iter().zip(q).map(term).sum()
}

/// Samples by temperature and nucleus (Holtzman et al. 2020).
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f32,
    top_p: f32,
    seed: u64,
    /// Tokens and their weights, the heaviest first as far as they are needed; memory from step to
    /// step.
    order: Vec<(u32, f64)>,
}

/// So many of the heaviest tokens are looked at first.
const HEAD: usize = 64;

impl Sampler {
    /// A sampler for these options.
    pub fn new(options: &Sampling) -> Self {
        let Sampling { temperature, top_p, seed, .. } = *options;
        Self { temperature, top_p, seed, order: Vec::new() }
    }

    /// The token of step `step`.
    pub fn sample(&mut self, logits: &[f32], step: u64) -> u32 {
        if self.temperature <= 0.0 {
            return greedy(logits);
        }
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |x: f32| f64::from((x - top) / self.temperature).exp();
        self.order.clear();
        self.order.extend(logits.iter().enumerate().map(|(id, &x)| (id as u32, weight(x))));
        let total: f64 = self.order.iter().map(|o| o.1).sum();
        let (len, kept) = if self.top_p < 1.0 {
            self.nucleus(f64::from(self.top_p) * total)
        } else {
            (self.order.len(), total)
        };
        let order = &self.order;
        let mut at = uniform(self.seed, step) * kept;
        for &(id, w) in &order[..len] {
            at -= w;
            if at < 0.0 {
                return id;
            }
        }
        order[len - 1].0
    }

    /// How many of the heaviest tokens weigh so much together, and how much it is; they stand in
    /// front. A nucleus is small: the rest need not be sorted.
    fn nucleus(&mut self, wanted: f64) -> (usize, f64) {
        let heaviest = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let order = &mut self.order;
        let (mut sorted, mut len, mut kept) = (0, 0, 0.0);
        while kept < wanted && sorted < order.len() {
            let more = (4 * sorted).max(HEAD).min(order.len());
            if more < order.len() {
                order[sorted..].select_nth_unstable_by(more - sorted, heaviest);
            }
            order[sorted..more].sort_unstable_by(heaviest);
            sorted = more;
            while kept < wanted && len < sorted {
                kept += order[len].1;
                len += 1;
            }
        }
        (len, kept)
    }
}

/// A number in 0…1 from SplitMix64 (Steele et al. 2014) over seed and step.
fn uniform(seed: u64, step: u64) -> f64 {
    let mut z = seed ^ step.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..2 {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
    }
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32) -> Sampler {
        Sampler { temperature, top_p, seed: 42, order: Vec::new() }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(greedy(&[0.0, 3.0, 3.0, f32::NAN]), 1);
        assert_eq!(sampler(0.0, 0.5).sample(&[0.0, 1.0], 9), 1);
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let logits = [1.0f32.ln(), 2.0f32.ln(), 5.0f32.ln()];
        let mut s = sampler(1.0, 1.0);
        let mut count = [0usize; 3];
        (0..20_000).for_each(|step| count[s.sample(&logits, step) as usize] += 1);
        for (n, p) in count.iter().zip([0.125, 0.25, 0.625]) {
            // Five standard deviations of a binomial of 20,000.
            assert!((*n as f64 - 20_000.0 * p).abs() < 5.0 * (20_000.0 * p * (1.0 - p)).sqrt());
        }
    }

    #[test]
    fn nucleus_keeps_the_smallest_set() {
        let logits = [1.0f32.ln(), 2.0f32.ln(), 5.0f32.ln()];
        let mut s = sampler(1.0, 0.6);
        assert!((0..500).all(|step| s.sample(&logits, step) == 2));
        assert_eq!(s.sample(&logits, 7), s.sample(&logits, 7));
    }

    /// Whatever part of it had to be sorted, the nucleus is that of a list sorted whole.
    #[test]
    fn a_nucleus_of_any_size_is_that_of_the_sorted_list() {
        // Many equal ones among them.
        let logits: Vec<f32> = (0..3_000).map(|i| (i * 7_919 % 1_013) as f32 / 300.0).collect();
        for top_p in [0.001, 0.05, 0.3, 0.7, 0.99, 0.999_999] {
            let mut s = sampler(1.0, top_p);
            s.sample(&logits, 0);
            let mut sorted = s.order.clone();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let wanted = f64::from(top_p) * s.order.iter().map(|o| o.1).sum::<f64>();
            let (len, kept) = s.nucleus(wanted);
            assert_eq!(s.order[..len], sorted[..len], "{top_p}");
            let sum = |n: usize| sorted[..n].iter().map(|o| o.1).sum::<f64>();
            assert!(sum(len) == kept && kept >= wanted && sum(len - 1) < wanted, "{top_p}: {len}");
        }
    }
}
