//! Process B: decodes. Started by the loader under `matkv up`, or by a service manager.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use matkv_config::Sources;

/// Decode the sequences a loader publishes.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Configuration file
    #[arg(long, env = "MATKV_CONFIG")]
    config: Option<PathBuf>,
    /// Preset: small or large
    #[arg(long, env = "MATKV_PRESET")]
    preset: Option<String>,
    /// End when the loader hangs up
    #[arg(long)]
    exit_with_loader: bool,
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("matkv-decoder: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let sources = Sources { file: args.config, preset: args.preset, ..Sources::from_environment() };
    let resolved = sources.resolve()?;
    matkv_telemetry::init(&resolved.config.log);
    let options = matkv_decoder_core::Options { exit_with_loader: args.exit_with_loader };
    Ok(matkv_decoder_core::run(&resolved.config, options)?)
}
