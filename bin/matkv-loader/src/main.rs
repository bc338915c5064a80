//! Process A: retrieves, loads, sub-prefills. Started by `matkv up` or a service manager.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use matkv_config::Sources;

/// Retrieve documents, load their KV, prefill questions, hand them to the decoder.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Configuration file
    #[arg(long, env = "MATKV_CONFIG")]
    config: Option<PathBuf>,
    /// Preset: small or large
    #[arg(long, env = "MATKV_PRESET")]
    preset: Option<String>,
    /// Start a decoder as a child process and keep one alive
    #[arg(long)]
    spawn_decoder: bool,
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("matkv-loader: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let sources =
        Sources { file: args.config.clone(), preset: args.preset, ..Sources::from_environment() };
    let resolved = sources.resolve()?;
    matkv_telemetry::init(&resolved.config.log);
    let mut options = matkv_loader_core::Options::default();
    if args.spawn_decoder {
        let program = std::env::current_exe()
            .context("where this program lives")?
            .with_file_name("matkv-decoder");
        let mut command = vec![program.display().to_string(), "--exit-with-loader".into()];
        if let Some(config) = args.config {
            command.extend(["--config".into(), config.display().to_string()]);
        }
        options.spawn_decoder = Some(command);
    }
    Ok(matkv_loader_core::run(&resolved.config, options)?)
}
