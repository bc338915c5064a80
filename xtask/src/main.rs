//! Checks of the code base that no compiler makes: `cargo xtask tidy`.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod edges;
mod source;

use std::path::Path;
use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    let command = std::env::args().nth(1).unwrap_or_default();
    anyhow::ensure!(command == "tidy", "usage: cargo xtask tidy");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let mut problems = Vec::new();
    source::check(root, &mut problems)?;
    edges::check(root, &mut problems)?;
    let (failures, warnings): (Vec<_>, Vec<_>) = problems.into_iter().partition(|p| p.fails);
    for p in &warnings {
        println!("warning: {}: {}", p.place, p.text);
    }
    for p in &failures {
        println!("error: {}: {}", p.place, p.text);
    }
    println!("tidy: {} errors, {} warnings", failures.len(), warnings.len());
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Something tidy found.
pub struct Problem {
    /// Fails the check, or is only reported.
    pub fails: bool,
    /// File, and line where it has one.
    pub place: String,
    /// What is wrong.
    pub text: String,
}

impl Problem {
    /// A failure.
    pub fn error(place: impl Into<String>, text: impl Into<String>) -> Self {
        Self { fails: true, place: place.into(), text: text.into() }
    }

    /// A warning.
    pub fn warning(place: impl Into<String>, text: impl Into<String>) -> Self {
        Self { fails: false, place: place.into(), text: text.into() }
    }
}
