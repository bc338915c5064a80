//! Eviction policies replayed on traces.
//!
//! A trace is a sequence of requests for chunks. Hits are counted by tokens: what a policy is for
//! is not computing, or loading, rows again.

use std::collections::HashMap;

use matkv_store::policy::Item;
pub use matkv_store::policy::PolicyKind;
use serde::{Deserialize, Serialize};

/// One use of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// Which chunk.
    pub chunk: u64,
    /// Its rows.
    pub tokens: u32,
    /// Chunks with the same topic are near each other in embedding space.
    pub topic: u32,
}

/// A named sequence of uses.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Its name.
    pub name: String,
    /// What is used, in order.
    pub accesses: Vec<Access>,
}

/// A pseudo-random sequence (SplitMix64): the same trace everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chunks of the synthetic corpora.
const CHUNKS: u64 = 2000;
const LENGTH: usize = 40_000;
const TOPICS: u64 = 100;

/// Most chunks are whole windows, the last of a document is shorter.
fn access(chunk: u64) -> Access {
    let mut r = Random(chunk);
    let tokens = if r.below(3) == 0 { 64 + r.below(900) as u32 } else { 1024 };
    Access { chunk, tokens, topic: (chunk % TOPICS) as u32 }
}

/// Ranks by Zipf's law with exponent `s`, drawn by inversion.
struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new(n: u64, s: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulative = Vec::with_capacity(n as usize);
        for rank in 1..=n {
            sum += (rank as f64).powf(-s);
            cumulative.push(sum);
        }
        cumulative.iter_mut().for_each(|c| *c /= sum);
        Self { cumulative }
    }

    fn draw(&self, r: &mut Random) -> u64 {
        let u = r.unit();
        self.cumulative.partition_point(|c| *c < u) as u64
    }
}

/// Zipf, Zipf with scans, loop, shifting hot set, and topics.
pub fn synthetic() -> Vec<Trace> {
    let mut r = Random(1);
    let zipf = Zipf::new(CHUNKS, 0.9);
    // Ranks are spread over ids, so that topics do not follow popularity.
    let spread = |rank: u64| (rank * 1_103) % CHUNKS;
    let named = |name: &str, accesses| Trace { name: name.to_owned(), accesses };
    let plain = (0..LENGTH).map(|_| access(spread(zipf.draw(&mut r)))).collect();
    let mut scans = Vec::new();
    let mut fresh = CHUNKS;
    while scans.len() < LENGTH {
        scans.extend((0..1000).map(|_| access(spread(zipf.draw(&mut r)))));
        // Somebody reads many documents once.
        scans.extend((0..500).map(|i| access(fresh + i)));
        fresh += 500;
    }
    let loops = (0..LENGTH as u64).map(|i| access(i % (CHUNKS / 4))).collect();
    let shifting = (0..LENGTH as u64)
        .map(|i| access((spread(zipf.draw(&mut r)) + i / 5_000 * 137) % CHUNKS))
        .collect();
    let mut topics = Vec::new();
    while topics.len() < LENGTH {
        // A conversation stays with a topic, and asks for its chunks without order.
        let topic = zipf.draw(&mut r) % TOPICS;
        let chunk = |r: &mut Random| access(topic + r.below(CHUNKS / TOPICS) * TOPICS);
        topics.extend((0..20).map(|_| chunk(&mut r)));
    }
    vec![
        named("zipf", plain),
        named("zipf+scan", scans),
        named("loop", loops),
        named("shifting", shifting),
        named("topics", topics),
    ]
}

/// Reads a recorded trace: one JSON object a line with `chunk`, `tokens` and `topic`.
///
/// # Errors
/// The line that is none.
pub fn recorded(name: &str, text: &str) -> Result<Trace, String> {
    let lines = text.lines().filter(|l| !l.trim().is_empty()).enumerate();
    let read = lines.map(|(i, line)| {
        serde_json::from_str(line).map_err(|e| format!("{name}, line {}: {e}", i + 1))
    });
    Ok(Trace { name: name.to_owned(), accesses: read.collect::<Result<_, _>>()? })
}

/// Share of tokens that were resident when they were asked for. `capacity` is the share of the
/// trace's distinct tokens that fits.
pub fn hit_rate(trace: &Trace, kind: PolicyKind, capacity: f64) -> f64 {
    let distinct: HashMap<u64, u32> = trace.accesses.iter().map(|a| (a.chunk, a.tokens)).collect();
    let all: u64 = distinct.values().map(|t| u64::from(*t)).sum();
    let room = (all as f64 * capacity) as u64;
    let mut near: HashMap<u32, Vec<u64>> = HashMap::new();
    for access in &trace.accesses {
        let list = near.entry(access.topic).or_default();
        if !list.contains(&access.chunk) {
            list.push(access.chunk);
        }
    }
    let mut policy = kind.build::<u64>();
    let mut resident: HashMap<u64, u32> = HashMap::new();
    let (mut used, mut hits, mut total) = (0u64, 0u64, 0u64);
    for access in &trace.accesses {
        let tokens = u64::from(access.tokens);
        total += tokens;
        if resident.contains_key(&access.chunk) {
            hits += tokens;
            policy.access(&access.chunk);
        } else {
            while used + tokens > room {
                let Some(victim) = policy.evict(&mut |_| true) else { break };
                used -= resident.remove(&victim).map_or(0, u64::from);
            }
            // Attention over the chunk itself makes long ones a little dearer per token.
            let cost = tokens as f64 * (1.0 + tokens as f64 / 4096.0);
            policy.insert(access.chunk, Item { bytes: tokens, cost, frequency: 1.0 });
            resident.insert(access.chunk, access.tokens);
            used += tokens;
        }
        for id in near.get(&access.topic).into_iter().flatten().filter(|n| **n != access.chunk) {
            policy.warm(id);
        }
    }
    hits as f64 / total.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_gains_from_room_and_never_exceeds_what_repeats() {
        for trace in synthetic() {
            let mut seen = std::collections::HashSet::new();
            let mut repeated = 0u64;
            let mut total = 0u64;
            for a in &trace.accesses {
                total += u64::from(a.tokens);
                if !seen.insert(a.chunk) {
                    repeated += u64::from(a.tokens);
                }
            }
            let most = repeated as f64 / total as f64;
            for kind in PolicyKind::ALL {
                let whole = hit_rate(&trace, kind, 1.0);
                assert!((whole - most).abs() < 1e-9, "{} {}: all fits", trace.name, kind.as_str());
                assert!(hit_rate(&trace, kind, 0.1) < most);
            }
        }
    }

    #[test]
    fn a_recorded_trace_names_the_line_that_is_wrong() {
        let line = r#"{"chunk":1,"tokens":9,"topic":0}"#;
        assert_eq!(recorded("t", line).unwrap().accesses.len(), 1);
        assert!(recorded("t", &format!("{line}\nx")).unwrap_err().contains("line 2"));
    }
}
