//! A loader and a decoder as child processes of this one, and waiting for them to be ready.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use matkv_api::Client;
use matkv_api::v1::GetStatusRequest;
use matkv_config::{Config, Resolved};
use matkv_loader_core::process::{die_with_parent, terminate, terminate_and_wait};
use matkv_telemetry::service;

use crate::notify::Watchdog;
use crate::stop::Stop;

/// How long two processes may take to load their models.
const READY: Duration = Duration::from_secs(120);
/// How long they may take to stop, besides the time for running requests.
const STOP: Duration = Duration::from_secs(15);

/// A running loader, which keeps a decoder alive.
pub struct Pair {
    loader: Child,
    resolved: PathBuf,
    /// How long a stop may take.
    patience: Duration,
    /// When a stop was asked for.
    asked: Option<Instant>,
}

impl Pair {
    /// Starts a loader with exactly this configuration.
    pub fn start(resolved: &Resolved) -> anyhow::Result<Self> {
        Self::start_watched(resolved, None)
    }

    /// The same, under a watchdog.
    pub fn start_watched(resolved: &Resolved, watchdog: Option<&Watchdog>) -> anyhow::Result<Self> {
        let runtime = &resolved.config.runtime_dir;
        std::fs::create_dir_all(runtime)
            .with_context(|| format!("cannot create {}", runtime.display()))?;
        sweep(runtime);
        // One per starter: two `up` on one runtime directory must not mix their files.
        let file = runtime.join(format!("resolved-{}.toml", std::process::id()));
        std::fs::write(&file, resolved.to_toml())
            .with_context(|| format!("cannot write {}", file.display()))?;
        let program = sibling("matkv-loader")?;
        let mut command = Command::new(&program);
        command.arg("--config").arg(&file).arg("--spawn-decoder").stdin(Stdio::null());
        // Already resolved into the file.
        matkv_config::SETTINGS.iter().for_each(|s| {
            command.env_remove(s.variable());
        });
        command.env("TMPDIR", runtime);
        service::OWN_VARIABLES.iter().for_each(|v| {
            command.env_remove(v);
        });
        if let Some(watchdog) = watchdog {
            watchdog.introduce(&mut command);
        }
        // A Ctrl-C in the terminal is ours to pass on, once: a second signal would end running
        // requests.
        command.process_group(0);
        let loader = die_with_parent(&mut command)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self { loader, resolved: file, patience: resolved.config.drain + STOP, asked: None })
    }

    /// The loader's exit status, if it has ended.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.loader.try_wait()?)
    }

    /// Waits until requests are answered.
    pub async fn ready(&mut self, config: &Config) -> anyhow::Result<Client> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                bail!("the loader ended with {status}; its messages are above");
            }
            if let Ok(mut client) = matkv_api::connect(&config.socket()).await {
                let status = client.get_status(GetStatusRequest {}).await;
                if let Ok(status) = status {
                    let status = status.into_inner();
                    let ours = status.loader_pid == self.loader.id();
                    if ours && status.state == "ready" {
                        return Ok(client);
                    }
                }
            }
            if started.elapsed() > READY {
                bail!("not ready after {} s", READY.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends a loader that makes no progress; the decoder ends with it.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.loader.kill()?)
    }

    /// Asks both processes to stop in order, now or once running requests have finished.
    pub fn terminate(&mut self) {
        self.asked.get_or_insert_with(Instant::now);
        if self.loader.try_wait().is_ok_and(|status| status.is_none()) {
            terminate(self.loader.id());
        }
    }

    /// Whether a stop has taken longer than it may.
    pub fn is_overdue(&self) -> bool {
        self.asked.is_some_and(|at| at.elapsed() > self.patience)
    }

    /// Stops both processes in order.
    pub fn stop(mut self) -> anyhow::Result<ExitStatus> {
        let spent = self.asked.map_or(Duration::ZERO, |at| at.elapsed());
        terminate_and_wait(&mut self.loader, self.patience.saturating_sub(spent));
        let status = self.loader.wait()?;
        let _ = std::fs::remove_file(&self.resolved);
        Ok(status)
    }
}

/// Removes configurations of starters that are gone.
fn sweep(runtime: &Path) {
    let Ok(entries) = std::fs::read_dir(runtime) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix("resolved-").and_then(|rest| rest.strip_suffix(".toml"));
        let pid = pid.or(name.strip_prefix("notify-").and_then(|rest| rest.strip_suffix(".sock")));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn sibling(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("where this program lives")?;
    let path = own.with_file_name(name);
    if !path.exists() {
        bail!("{} is missing: it is installed beside matkv", path.display());
    }
    Ok(path)
}

/// Runs `work` with a pair of its own over a store, and stops the pair, however the work ends.
pub async fn with_private<T>(
    resolved: &Resolved,
    store: &Path,
    settings: &[(&'static str, String)],
    stop: &Stop,
    work: impl AsyncFnOnce(Client, &Config) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    stop.check()?;
    let runtime = tempfile::tempdir().context("a temporary directory")?;
    let resolved = private(resolved, runtime.path(), store, settings)?;
    let mut pair = Pair::start(&resolved)?;
    let config = &resolved.config;
    let worked = tokio::select! {
        outcome = async { work(pair.ready(config).await?, config).await } => outcome,
        interrupted = stop.raised() => Err(interrupted),
    };
    pair.stop()?;
    worked
}

/// A configuration with its own runtime directory, and its own store in this one directory. Unless
/// `more` says so, it writes to none of the directories and tiers of the configured one, and logs
/// warnings only.
fn private(
    resolved: &Resolved,
    directory: &Path,
    store: &Path,
    more: &[(&str, String)],
) -> anyhow::Result<Resolved> {
    let mut resolved = resolved.clone();
    resolved.override_with("paths.runtime_dir", &directory.join("run").display().to_string())?;
    resolved.override_with("paths.store_dir", &store.display().to_string())?;
    resolved.override_with("storage.type", "single")?;
    resolved.override_with("storage.dirs", "")?;
    resolved.override_with("cold.url", "")?;
    resolved.override_with("log.level", "warn")?;
    // A question asked again is to be computed again.
    resolved.override_with("reuse.earlier_prompts", "false")?;
    for (key, value) in more {
        resolved.override_with(key, value)?;
    }
    Ok(resolved)
}
