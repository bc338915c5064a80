//! fio on the same files, for comparison.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

/// Whether fio is installed.
pub fn is_installed() -> bool {
    Command::new("fio").arg("--version").output().is_ok_and(|o| o.status.success())
}

/// Bytes per second of reading the files once: O_DIRECT, 1 MiB, io_uring, depth 32.
pub fn read_rate(files: &[PathBuf]) -> anyhow::Result<f64> {
    let names: Vec<String> =
        files.iter().map(|f| f.display().to_string().replace(':', "\\:")).collect();
    let out = Command::new("fio")
        .args([
            "--name=chunks",
            "--rw=read",
            "--bs=1M",
            "--iodepth=32",
            "--direct=1",
            "--readonly",
            "--ioengine=io_uring",
            "--file_service_type=sequential",
            "--output-format=json",
        ])
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
