//! The command line of MatKV.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod args;
mod ask;
mod bench;
mod bench_e2e;
mod bench_fidelity;
mod bench_model;
mod bench_store;
mod bench_turns;
mod chunks;
mod cost;
mod demo;
mod doctor;
mod documents;
mod energy;
mod figures;
mod fio;
mod ingest;
mod model;
mod notify;
mod out;
mod pair;
mod paper;
mod peers;
mod render;
mod report;
mod sources;
mod stop;
mod store;
mod throughput;
mod trace;
mod up;

use std::process::ExitCode;

use args::{Args, Command};
use clap::Parser;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(args) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("matkv: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<ExitCode> {
    let resolved = args.sources()?.resolve()?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let config = &resolved.config;
    match args.command {
        Command::Up => up::run(&resolved),
        Command::Model { command } => model::run(config, &command),
        Command::Config => render::config(&resolved, args.format),
        Command::Ingest(options) => runtime.block_on(ingest::run(config, &options, args.format)),
        Command::Ask(options) => runtime.block_on(ask::run(config, &options, args.format)),
        Command::Docs { command } => runtime.block_on(documents::run(config, command, args.format)),
        Command::Status => runtime.block_on(documents::status(config, args.format)),
        Command::Chunks { command } => chunks::run(&runtime, config, &command, args.format),
        Command::Store { command } => store::run(&runtime, config, &command, args.format),
        Command::Doctor(options) => doctor::run(&resolved, &options, args.format),
        Command::Cost(options) => cost::run(&runtime, config, &options, args.format),
        Command::Trace(options) => runtime.block_on(trace::run(config, options)),
        Command::Demo(options) => runtime.block_on(demo::run(&resolved, &options)),
        Command::Bench { command } => {
            runtime.block_on(bench::run(&resolved, &command, args.format))
        }
    }
}
