//! How values of settings are read, and written as they would stand in the file.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use matkv_types::Mode;

use crate::config::{IoEngine, StorageType};
use crate::units::{exact_bytes, format_duration, parse_bytes, parse_duration};

pub(crate) fn parse<T: FromStr>(text: &str) -> Result<T, String>
where
    T::Err: std::fmt::Display,
{
    text.trim().parse().map_err(|e: T::Err| e.to_string())
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match parse(text)? {
        0 => Err("must be at least 1".into()),
        n => Ok(n),
    }
}

pub(crate) fn between(text: &str, low: usize, high: usize) -> Result<usize, String> {
    match parse(text)? {
        n if (low..=high).contains(&n) => Ok(n),
        _ => Err(format!("must be between {low} and {high}")),
    }
}

pub(crate) fn text(value: &str) -> Result<String, String> {
    Ok(value.to_owned())
}

pub(crate) fn path(value: &str) -> Result<PathBuf, String> {
    if value.trim().is_empty() {
        return Err("must not be empty".into());
    }
    match (value.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => Ok(PathBuf::from(home).join(rest)),
        _ => Ok(PathBuf::from(value)),
    }
}

pub(crate) fn show_path(value: &std::path::Path) -> String {
    value.display().to_string()
}

pub(crate) fn engine(value: &str) -> Result<IoEngine, String> {
    match value {
        "auto" => Ok(IoEngine::Auto),
        "uring" => Ok(IoEngine::Uring),
        "pread" => Ok(IoEngine::Pread),
        _ => Err("must be auto, uring or pread".into()),
    }
}

pub(crate) fn show_engine(value: &IoEngine) -> String {
    match value {
        IoEngine::Auto => "auto",
        IoEngine::Uring => "uring",
        IoEngine::Pread => "pread",
    }
    .into()
}

pub(crate) fn tcp(value: &str) -> Result<String, String> {
    if value.is_empty() {
        return Ok(String::new());
    }
    let address: std::net::SocketAddr =
        value.parse().map_err(|_| "must be ADDRESS:PORT, or empty".to_owned())?;
    if !address.ip().is_loopback() {
        return Err("only loopback addresses are served: there is no authentication yet".into());
    }
    Ok(value.to_owned())
}

pub(crate) fn log_level(value: &str) -> Result<String, String> {
    match value {
        "error" | "warn" | "info" | "debug" | "trace" => Ok(value.to_owned()),
        _ => Err("must be error, warn, info, debug or trace".into()),
    }
}

pub(crate) fn time(value: &str) -> Result<Duration, String> {
    match parse_duration(value)? {
        t if t >= Duration::from_secs(1) => Ok(t),
        _ => Err("must be at least 1s".into()),
    }
}

pub(crate) fn arena(value: &str) -> Result<u64, String> {
    match parse_bytes(value)? {
        n if n >= 16 << 20 => Ok(n),
        _ => Err("must be at least 16MiB".into()),
    }
}

pub(crate) fn storage_type(value: &str) -> Result<StorageType, String> {
    match value {
        "single" => Ok(StorageType::Single),
        "stripe" => Ok(StorageType::Stripe),
        "mirror" => Ok(StorageType::Mirror),
        _ => Err("must be single, stripe or mirror".into()),
    }
}

pub(crate) fn show_storage_type(value: &StorageType) -> String {
    match value {
        StorageType::Single => "single",
        StorageType::Stripe => "stripe",
        StorageType::Mirror => "mirror",
    }
    .into()
}

/// Paths separated by commas, as a list in the file is handed over.
pub(crate) fn paths(value: &str) -> Result<Vec<PathBuf>, String> {
    value.split(',').map(str::trim).filter(|p| !p.is_empty()).map(path).collect()
}

pub(crate) fn show_paths(value: &[PathBuf]) -> String {
    value.iter().map(|p| show_path(p)).collect::<Vec<_>>().join(",")
}

pub(crate) fn cores(value: &str) -> Result<Vec<usize>, String> {
    value.split(',').map(str::trim).filter(|c| !c.is_empty()).map(parse).collect()
}

pub(crate) fn show_cores(value: &[usize]) -> String {
    value.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

pub(crate) fn policy(value: &str) -> Result<String, String> {
    match value {
        "lru" | "s3fifo" | "gdsf" | "semantic-lru" => Ok(value.to_owned()),
        _ => Err("must be lru, s3fifo, gdsf or semantic-lru".into()),
    }
}

pub(crate) fn mode(value: &str) -> Result<String, String> {
    Mode::parse(value, 0).map(|_| value.to_owned()).map_err(|e| e.to_string())
}

pub(crate) fn share(value: &str) -> Result<f64, String> {
    match parse::<f64>(value)? {
        x if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("must be above 0 and at most 1".into()),
    }
}

pub(crate) fn block(value: &str) -> Result<u64, String> {
    match parse_bytes(value)? {
        n if (4096..=64 << 20).contains(&n) && n.is_multiple_of(4096) => Ok(n),
        _ => Err("must be whole pages of 4 KiB, at most 64MiB".into()),
    }
}

pub(crate) fn level(value: &str) -> Result<u32, String> {
    between(value, 1, 19).map(|n| n as u32)
}

pub(crate) fn cold_url(value: &str) -> Result<String, String> {
    let known = ["file:///", "s3://"].iter().any(|p| value.starts_with(p));
    if known || value.is_empty() || value == "memory:" {
        return Ok(value.to_owned());
    }
    Err("must be file:///directory, s3://bucket/prefix, or empty".into())
}

pub(crate) fn endpoint(value: &str) -> Result<String, String> {
    let known = ["http://", "https://"].iter().any(|p| value.starts_with(p));
    if known || value.is_empty() {
        return Ok(value.to_owned());
    }
    Err("must begin with http:// or https://, or be empty".into())
}

pub(crate) fn show_time(value: &Duration) -> String {
    format_duration(*value)
}

pub(crate) fn show_bytes(value: &u64) -> String {
    exact_bytes(*value)
}
