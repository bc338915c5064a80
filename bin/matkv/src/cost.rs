//! `matkv cost`: at which interval of re-use storing KV costs less than computing it again.
//!
//! Keep a chunk's KV if it is read at least once in
//! `T = compute price per second × prefill seconds ÷ (storage price per byte and second × bytes)`:
//! the rule of MatKV (ICDE 2026), which with its authors' prices comes to about ten days.

use std::process::ExitCode;

use anyhow::ensure;
use matkv_api::v1::ListChunksRequest;
use matkv_config::{Config, format_bytes};
use matkv_loader_core::{admin, offline};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::args::Format;
use crate::out::say;

#[derive(clap::Args, Clone)]
pub struct CostOptions {
    /// Price of the machine's compute, per hour
    #[arg(long, default_value_t = 0.40)]
    pub compute_per_hour: f64,
    /// Price of flash, per TB (10^12 bytes)
    #[arg(long, default_value_t = 80.0)]
    pub flash_per_tb: f64,
    /// Years over which flash is paid off
    #[arg(long, default_value_t = 5.0)]
    pub flash_years: f64,
    /// Milliseconds of computing a chunk; measured ones if absent
    #[arg(long)]
    pub prefill_ms: Option<f64>,
    /// Bytes of a chunk at rest; those in the store if absent
    #[arg(long)]
    pub chunk_bytes: Option<f64>,
}

const YEAR: f64 = 365.25 * 86_400.0;

/// Seconds between two uses at which both cost the same.
fn break_even(o: &CostOptions, prefill_ms: f64, bytes: f64) -> f64 {
    let compute = o.compute_per_hour / 3600.0 * prefill_ms / 1e3;
    let storage = o.flash_per_tb / 1e12 / (o.flash_years * YEAR) * bytes;
    compute / storage
}

/// Mean milliseconds and bytes of the chunks that have both.
fn measured(runtime: &Runtime, config: &Config) -> anyhow::Result<Option<(f64, f64, usize)>> {
    let request = ListChunksRequest { tier: "flash".into(), ..ListChunksRequest::default() };
    let page = match runtime.block_on(matkv_api::connect_admin(&config.socket())) {
        Ok(mut client) => runtime.block_on(client.list_chunks(request))?.into_inner(),
        Err(_) => match offline::open(config, None) {
            Ok(store) => admin::list(&store, &request)?,
            Err(_) => return Ok(None),
        },
    };
    let known: Vec<_> = page.chunks.iter().filter(|c| c.compute_ms > 0).collect();
    let n = known.len() as f64;
    let ms: f64 = known.iter().map(|c| f64::from(c.compute_ms)).sum();
    let bytes: u64 = known.iter().flat_map(|c| &c.placements).map(|p| p.physical_bytes).sum();
    Ok((n > 0.0).then(|| (ms / n, bytes as f64 / n, known.len())))
}

fn interval(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} seconds"),
        s if s < 7200.0 => format!("{:.0} minutes", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} hours", s / 3600.0),
        s if s < 2.0 * YEAR => format!("{:.0} days", s / 86_400.0),
        s => format!("{:.1} years", s / YEAR),
    }
}

pub fn run(
    runtime: &Runtime,
    config: &Config,
    o: &CostOptions,
    format: Format,
) -> anyhow::Result<ExitCode> {
    for (name, value) in [
        ("--compute-per-hour", o.compute_per_hour),
        ("--flash-per-tb", o.flash_per_tb),
        ("--flash-years", o.flash_years),
        ("--prefill-ms", o.prefill_ms.unwrap_or(1.0)),
        ("--chunk-bytes", o.chunk_bytes.unwrap_or(1.0)),
    ] {
        ensure!(value > 0.0 && value.is_finite(), "{name} must be above 0");
    }
    let found = match (o.prefill_ms, o.chunk_bytes) {
        (Some(ms), Some(bytes)) => Some((ms, bytes, 0)),
        _ => measured(runtime, config)?,
    };
    let Some((ms, bytes, chunks)) = found else {
        anyhow::bail!(
            "nothing has been measured here: ingest documents first, or give --prefill-ms and \
             --chunk-bytes"
        );
    };
    let (ms, bytes) = (o.prefill_ms.unwrap_or(ms), o.chunk_bytes.unwrap_or(bytes));
    let seconds = break_even(o, ms, bytes);
    // The paper's inputs, as published: an H100 machine, LLaMA-70B, a consumer SSD.
    if format == Format::Json {
        say!(
            "{}",
            json!({
                "break_even_seconds": seconds, "prefill_ms": ms, "chunk_bytes": bytes,
                "chunks_measured": chunks, "compute_per_hour": o.compute_per_hour,
                "flash_per_tb": o.flash_per_tb, "flash_years": o.flash_years,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    let source = if chunks > 0 { format!("mean of {chunks} chunks") } else { "given".into() };
    say!("computing a chunk   {ms:.0} ms ({source})");
    say!("keeping a chunk     {} on flash", format_bytes(bytes as u64));
    say!("compute             {} per hour", o.compute_per_hour);
    say!("flash               {} per TB, paid off in {} years", o.flash_per_tb, o.flash_years);
    say!();
    say!("Storing pays if a chunk is used at least once every {}.", interval(seconds));
    say!("T = compute per second × seconds of prefill ÷ (flash per byte and second × bytes)");
    say!("The paper (MatKV, ICDE 2026) comes to about ten days with its prices and model.");
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_with_round_numbers() {
        // One unit an hour, one hour of prefill; one unit a year for a TB, one TB: a year.
        let o = CostOptions {
            compute_per_hour: 1.0,
            flash_per_tb: 1.0,
            flash_years: 1.0,
            prefill_ms: None,
            chunk_bytes: None,
        };
        let seconds = break_even(&o, 3_600_000.0, 1e12);
        assert!((seconds / YEAR - 1.0).abs() < 1e-9);
        assert_eq!(interval(90.0), "90 seconds");
        assert_eq!(interval(864_000.0), "10 days");
        assert_eq!(interval(3.0 * YEAR), "3.0 years");
    }
}
