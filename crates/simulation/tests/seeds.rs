//! Ten thousand seeds. A failing one is named; `cargo run -p matkv-simulation -- --seed N` runs it
//! again.

use std::panic::catch_unwind;

use matkv_simulation::{Report, run};

const SEEDS: u64 = 10_000;

fn outcome(seed: u64) -> Result<Report, String> {
    catch_unwind(|| run(seed)).unwrap_or_else(|_| Err(format!("seed {seed} panicked")))
}

fn add(total: &mut Report, one: &Report) {
    total.requests += one.requests;
    total.answered += one.answered;
    total.cancelled += one.cancelled;
    total.refused += one.refused;
    total.materialized += one.materialized;
    total.earlier += one.earlier;
    total.quarantined += one.quarantined;
    total.deaths += one.deaths;
    total.events += one.events;
}

#[test]
fn every_seed_keeps_the_invariants() {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let workers: Vec<_> = (0..threads)
        .map(|first| {
            std::thread::spawn(move || {
                let mut total = Report::default();
                for seed in (first..SEEDS).step_by(threads as usize) {
                    add(&mut total, &outcome(seed).unwrap_or_else(|e| panic!("{e}")));
                }
                total
            })
        })
        .collect();
    let mut total = Report::default();
    for worker in workers {
        add(&mut total, &worker.join().expect("every seed of this worker"));
    }
    println!("{SEEDS} seeds: {total:?}");
    // The faults happened, and most requests were answered all the same.
    assert!(total.deaths > SEEDS / 2 && total.quarantined > SEEDS / 20, "{total:?}");
    assert!(total.answered * 2 > total.requests && total.refused > 0, "{total:?}");
    assert!(total.cancelled > 0 && total.materialized > SEEDS, "{total:?}");
    assert!(total.earlier > SEEDS, "conversations went on: {total:?}");
}

#[test]
fn a_seed_replays() {
    for seed in [3, 77, 4096] {
        assert_eq!(outcome(seed), outcome(seed));
    }
}
