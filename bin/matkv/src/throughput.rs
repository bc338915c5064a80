//! `matkv bench throughput`: many clients, or arrivals that wait for nobody; and what a request
//! costs in energy meanwhile, where the machine can say.
//!
//! Questions are drawn by Zipf's law, so that some documents are asked for again and again. Every
//! mode gets the same questions at the same times, from one seed.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use anyhow::ensure;
use futures_util::future::join_all;
use matkv_api::Client;
use matkv_api::v1::GenerateRequest;
use matkv_config::Resolved;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::args::ThroughputOptions;
use crate::ask::{Answer, generate};
use crate::bench::{ingest_all, questions, with_pair};
use crate::energy::{self, Meter};
use crate::figures::{Figure, Outcome, percentiles};
use crate::stop::Stop;

/// One request: how it ended, and what it took from when it was due.
struct Served {
    answer: Option<Answer>,
    first_ms: f64,
    total_ms: f64,
    /// Milliseconds between tokens.
    gaps: Vec<f64>,
}

/// What is asked, and when it is due if arrivals wait for nobody.
#[derive(Clone)]
struct Request {
    question: String,
    due: Duration,
}

/// A draw from 0 to `n` where rank r has weight 1 / (r + 1)^s.
fn zipf(weights: &[f64], random: &mut StdRng) -> usize {
    let mut rest = random.random::<f64>() * weights.iter().sum::<f64>();
    let at = weights.iter().position(|w| {
        rest -= w;
        rest <= 0.0
    });
    at.unwrap_or(weights.len() - 1)
}

fn requests(o: &ThroughputOptions, questions: &[String]) -> Vec<Request> {
    let mut random = StdRng::seed_from_u64(o.seed);
    let weights: Vec<f64> =
        (0..questions.len()).map(|r| 1.0 / (r as f64 + 1.0).powf(o.zipf)).collect();
    let mut due = 0.0;
    let draw = |_| {
        let question = questions[zipf(&weights, &mut random)].clone();
        // Of a Poisson process: gaps are exponential.
        due -= (1.0 - random.random::<f64>()).ln() / o.rate.unwrap_or(1.0);
        Request { question, due: Duration::from_secs_f64(due) }
    };
    (0..o.requests).map(draw).collect()
}

/// What was served in one mode.
struct Run<'a> {
    mode: &'a str,
    served: RefCell<Vec<Served>>,
    started: Instant,
    /// When the last request was served.
    ended: Cell<Instant>,
    /// Of all of them.
    joules: Option<f64>,
}

pub async fn run(
    resolved: &Resolved,
    o: &ThroughputOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    ensure!(o.clients > 0 && o.requests > 0, "--clients and --requests must be at least 1");
    ensure!(o.rate.is_none_or(|r| r > 0.0), "--rate must be more than 0");
    let requests = requests(o, &questions(&o.questions, usize::MAX)?);
    let meter = Meter::find();
    let mut runs = Vec::new();
    let ended = with_pair(resolved, o.store.as_deref(), stop, async |client| {
        ingest_all(&client, &o.ingest.corpus, o.ingest.documents).await?;
        for mode in &o.mode {
            eprintln!("{mode}: {} requests", requests.len());
            // Code pages, allocator, thread pools.
            ask(client.clone(), o, mode, requests[0].question.clone()).await;
            runs.push(Run::new(mode));
            let joules = meter.as_ref().ok().map(Meter::start);
            if let Some(run) = runs.last_mut() {
                run.all(&client, o, &requests).await;
                run.joules = joules.map(|m| m.stop());
            }
        }
        Ok(())
    });
    let ended = ended.await;
    let how = match o.rate {
        Some(rate) => format!("arrivals of a Poisson process, {rate} a second"),
        None => format!("{} clients, each asks again when it has its answer", o.clients),
    };
    notes.push(format!(
        "{how}; questions by Zipf's law with exponent {}; time to first token from when a request \
         was due; goodput counts those within {} ms; a request of each mode first, to warm up",
        o.zipf, o.limit_ms
    ));
    notes.push(energy::note(&meter));
    let begun = runs.iter().filter(|r| !r.served.borrow().is_empty());
    let out = begun.flat_map(|r| r.figures(o.limit_ms)).collect();
    Outcome::until(ended, out, notes)
}

/// What a request costs in energy; nothing is measured where the machine has no meter.
pub async fn energy(
    resolved: &Resolved,
    o: &ThroughputOptions,
    stop: &Stop,
    notes: &mut Vec<String>,
) -> anyhow::Result<Outcome> {
    let meter = Meter::find();
    if meter.is_err() {
        notes.push(energy::note(&meter));
        return Ok(Outcome::complete(Vec::new()));
    }
    let mut outcome = run(resolved, o, stop, notes).await?;
    let names = ["joules_per_1000_requests", "requests_per_kwh", "requests_per_s"];
    outcome.figures.retain(|f| names.iter().any(|n| f.name.starts_with(n)));
    Ok(outcome)
}

async fn ask(client: Client, o: &ThroughputOptions, mode: &str, question: String) -> Served {
    let started = Instant::now();
    let request = GenerateRequest {
        question,
        mode: mode.to_owned(),
        top_k: Some(o.top_k),
        max_new_tokens: Some(o.max_new_tokens),
        ..GenerateRequest::default()
    };
    let (mut gaps, mut last) = (Vec::new(), None);
    let token = |_: &str| {
        let now = Instant::now();
        gaps.extend(last.replace(now).map(|l: Instant| (now - l).as_secs_f64() * 1e3));
        Ok(())
    };
    let answer = generate(client, request, token).await.ok();
    let total_ms = started.elapsed().as_secs_f64() * 1e3;
    let first_ms = answer.as_ref().map_or(f64::NAN, |a| a.timings.first_token_ms);
    Served { answer, first_ms, total_ms, gaps }
}

impl<'a> Run<'a> {
    fn new(mode: &'a str) -> Self {
        let now = Instant::now();
        let (served, ended) = (RefCell::default(), Cell::new(now));
        Self { mode, served, started: now, ended, joules: None }
    }

    /// All requests. Nothing is spawned: when this is dropped, nobody asks any more.
    async fn all(&self, client: &Client, o: &ThroughputOptions, requests: &[Request]) {
        let one = async |request: &Request| {
            let served = ask(client.clone(), o, self.mode, request.question.clone()).await;
            let mut all = self.served.borrow_mut();
            all.push(served);
            self.ended.set(Instant::now());
            if all.len().is_multiple_of(requests.len().div_ceil(10)) {
                eprintln!("{}: {}/{}", self.mode, all.len(), requests.len());
            }
        };
        if o.rate.is_some() {
            // Each when it is due, whoever still waits.
            let started = tokio::time::Instant::now();
            let due = async |request: &Request| {
                tokio::time::sleep_until(started + request.due).await;
                one(request).await;
            };
            join_all(requests.iter().map(due)).await;
        } else {
            let next = &RefCell::new(requests.iter());
            let client = async |_| {
                loop {
                    let Some(request) = next.borrow_mut().next() else { return };
                    one(request).await;
                }
            };
            join_all((0..o.clients).map(client)).await;
        }
    }

    fn figures(&self, limit_ms: f64) -> Vec<Figure> {
        let served = self.served.borrow();
        let seconds = (self.ended.get() - self.started).as_secs_f64();
        let named = |name: &str| format!("{name}[{}]", self.mode);
        let done: Vec<&Served> = served.iter().filter(|s| s.answer.is_some()).collect();
        let tokens: usize =
            done.iter().filter_map(|s| s.answer.as_ref()).map(|a| a.tokens.len()).sum();
        let good = done.iter().filter(|s| s.first_ms <= limit_ms).count();
        let mut out = vec![
            Figure::exact(named("requests_per_s"), done.len() as f64 / seconds, "requests/s"),
            Figure::exact(named("goodput_per_s"), good as f64 / seconds, "requests/s"),
            Figure::exact(named("tokens_per_s"), tokens as f64 / seconds, "tokens/s"),
            Figure::exact(named("failed"), (served.len() - done.len()) as f64, "requests"),
        ];
        let first: Vec<f64> = done.iter().map(|s| s.first_ms).collect();
        let total = done.iter().map(|s| s.total_ms).collect();
        let gaps = done.iter().flat_map(|s| &s.gaps).copied().collect();
        for (name, all) in [("ttft_ms", first), ("total_ms", total), ("token_gap_ms", gaps)] {
            let shares = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)];
            // Answers of one token have no gaps.
            if !all.is_empty() {
                out.extend(percentiles(all, &shares, |p| named(&format!("{name}_{p}"))));
            }
        }
        if let (Some(joules), false) = (self.joules, done.is_empty()) {
            let each = joules / done.len() as f64;
            out.push(Figure::exact(named("joules_per_1000_requests"), each * 1e3, "J"));
            out.push(Figure::exact(named("requests_per_kwh"), 3.6e6 / each, "requests"));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::CorpusOptions;

    #[test]
    fn popular_questions_are_drawn_more_often() {
        let mut random = StdRng::seed_from_u64(1);
        let weights: Vec<f64> = (0..50).map(|r| 1.0 / f64::from(r + 1)).collect();
        let mut counts = [0; 50];
        (0..20_000).for_each(|_| counts[zipf(&weights, &mut random)] += 1);
        let share = f64::from(counts[0]) / 20_000.0;
        let wanted = 1.0 / weights.iter().sum::<f64>();
        assert!((share - wanted).abs() < 0.02, "{share} for {wanted}");
        assert!(counts[0] > counts[10] && counts.iter().all(|c| *c > 0));
    }

    #[test]
    fn arrivals_have_the_rate_that_was_asked_for() {
        let o = ThroughputOptions { rate: Some(4.0), requests: 4_000, ..options() };
        let all = requests(&o, &["a".into(), "b".into()]);
        let rate = all.len() as f64 / all[all.len() - 1].due.as_secs_f64();
        assert!((rate - 4.0).abs() < 0.3, "{rate}");
        assert!(all.is_sorted_by_key(|r| r.due));
        let again = requests(&o, &["a".into(), "b".into()]);
        assert!(all.iter().zip(&again).all(|(a, b)| a.question == b.question && a.due == b.due));
    }

    fn options() -> ThroughputOptions {
        ThroughputOptions {
            ingest: CorpusOptions { corpus: Vec::new(), documents: None },
            questions: "questions".into(),
            mode: vec!["matkv".into()],
            clients: 1,
            rate: None,
            requests: 1,
            zipf: 1.0,
            limit_ms: 500.0,
            seed: 1,
            top_k: 4,
            max_new_tokens: 1,
            store: None,
        }
    }
}
