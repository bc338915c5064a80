//! fio on the same files, for comparison.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

/// Whether fio is installed.
pub fn is_installed() -> bool {
    version().is_some()
}

/// What fio calls itself, if it is installed.
pub fn version() -> Option<String> {
    let out = Command::new("fio").arg("--version").output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// Bytes per second of reading one file.
pub fn probe_rate(file: &std::path::Path) -> anyhow::Result<f64> {
    let rates = read_rates(&[file.to_owned()])?;
    Ok(rates.into_iter().fold(0.0, f64::max))
}

/// Ways of reading: block size and depth.
const WAYS: [(&str, u32); 3] = [("512k", 32), ("1M", 32), ("2M", 16)];

/// Bytes per second of reading the files once, O_DIRECT and io_uring, in each of a few ways.
pub fn read_rates(files: &[PathBuf]) -> anyhow::Result<Vec<f64>> {
    WAYS.iter().map(|(block, depth)| read_with(files, block, *depth)).collect()
}

/// Bytes per second of reading the files once: O_DIRECT, 1 MiB, io_uring, depth 32.
pub fn read_rate(files: &[PathBuf]) -> anyhow::Result<f64> {
    read_with(files, "1M", 32)
}

fn read_with(files: &[PathBuf], block: &str, depth: u32) -> anyhow::Result<f64> {
    // fio takes at most 4,096 characters of names: short ones that point to the files.
    let links = tempfile::tempdir().context("a temporary directory")?;
    let mut names = Vec::with_capacity(files.len());
    for (i, file) in files.iter().enumerate() {
        let target = file.canonicalize().with_context(|| format!("{}", file.display()))?;
        std::os::unix::fs::symlink(target, links.path().join(i.to_string()))?;
        names.push(i.to_string());
    }
    let out = Command::new("fio")
        .current_dir(links.path())
        .args([
            "--name=chunks",
            "--rw=read",
            "--direct=1",
            "--readonly",
            "--ioengine=io_uring",
            "--file_service_type=sequential",
            "--output-format=json",
        ])
        .args([format!("--bs={block}"), format!("--iodepth={depth}")])
        .arg(format!("--filename={}", names.join(":")))
        .output()
        .context("cannot run fio")?;
    ensure!(out.status.success(), "fio failed: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout);
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json).context("fio's report")?;
    let read = &report["jobs"][0]["read"];
    let bytes = read["io_bytes"].as_f64().context("fio's report has no io_bytes")?;
    let rate = read["bw_bytes"].as_f64().context("fio's report has no bw_bytes")?;
    ensure!(bytes > 0.0, "fio read nothing");
    Ok(rate)
}
