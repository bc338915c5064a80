//! Runs seeds for as long as wanted, or one again.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// `--seed N` runs one; `--first N --count M` runs many.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1)?.parse::<u64>().ok()
    };
    let (first, count) = match value("--seed") {
        Some(seed) => (seed, 1),
        None => (value("--first").unwrap_or(0), value("--count").unwrap_or(10_000)),
    };
    for seed in first..first.saturating_add(count) {
        match matkv_simulation::run(seed) {
            Ok(report) if count == 1 => println!("{report:?}"),
            Ok(_) => {}
            Err(e) => {
                eprintln!("{e}");
                return ExitCode::FAILURE;
            }
        }
        if seed % 10_000 == 9_999 {
            println!("{} seeds", seed + 1 - first);
        }
    }
    ExitCode::SUCCESS
}
