//! `matkv model`: fetching and listing.

use std::process::ExitCode;

use matkv_config::{Config, format_bytes};
use matkv_loader_core::models::{PULLABLE, PullProgress, packed_files, pull, pulled};

use crate::args::ModelCommand;
use crate::out::say;

pub fn run(config: &Config, command: &ModelCommand) -> anyhow::Result<ExitCode> {
    match command {
        ModelCommand::Ls => {
            for model in &PULLABLE {
                match pulled(&config.cache_dir, model) {
                    Some(bytes) => say!("{:<14} {}", model.name, format_bytes(bytes)),
                    None => say!("{:<14} not fetched ({} MB)", model.name, model.megabytes),
                }
            }
            say!("in {}", config.cache_dir.join("models").display());
            let packed = packed_files(&config.cache_dir);
            let (bytes, dir) = (format_bytes(packed.bytes), packed.dir.display());
            say!("packed weights: {} files, {bytes} in {dir}", packed.files);
        }
        ModelCommand::Pull { names } => names.iter().try_for_each(|n| pull_one(config, n))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Fetches one model, saying what happens.
pub fn pull_one(config: &Config, name: &str) -> anyhow::Result<()> {
    let path = pull(&config.cache_dir, name, |progress| match progress {
        PullProgress::Present => eprintln!("{name}: in the cache"),
        PullProgress::Fetching(mb) => eprintln!("{name}: fetching {mb} MB"),
        PullProgress::Verifying => eprintln!("{name}: verifying"),
    })?;
    say!("{}", path.display());
    Ok(())
}
