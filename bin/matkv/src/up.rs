//! `matkv up`: starts and supervises the two processes.

use std::process::ExitCode;
use std::time::Duration;

use matkv_config::Resolved;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::notify::Watchdog;
use crate::pair::Pair;

/// Starts in a row that never came to serve before giving up. A pair that has served is started
/// again for as long as it takes: whatever killed it, its users want it back.
const FAILURES_MAX: u32 = 5;

pub fn run(resolved: &Resolved) -> anyhow::Result<ExitCode> {
    // PR_SET_PDEATHSIG follows the thread that starts the child: a current-thread runtime keeps
    // that the main thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(supervise(resolved))
}

/// What asks `up` to stop: a service manager, a person, or the end of their terminal.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

async fn supervise(resolved: &Resolved) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let mut failures = 0;
    let mut was_ready = false;
    // A loader that notices by itself that a thread is stuck stops feeding; one that has been
    // stopped altogether feeds nothing. Both are given a stall's time, and one more to say so.
    let watchdog = Watchdog::new(&resolved.config.runtime_dir, 2 * resolved.config.stall)?;
    loop {
        let mut pair = Pair::start_watched(resolved, Some(&watchdog))?;
        let silent = watchdog.silent();
        tokio::pin!(silent);
        let mut killed = false;
        tokio::select! {
            () = &mut silent => killed = end(&mut pair)?,
            ready = pair.ready(&resolved.config) => match ready {
                Ok(_) => {
                    was_ready = true;
                    failures = 0;
                    note(format_args!("ready on {}", resolved.config.socket().display()));
                }
                // A loader that has never been ready refuses its configuration.
                Err(e) if !was_ready => return Err(e),
                Err(e) => {
                    eprintln!("matkv: {e:#}");
                    pair.kill()?;
                    killed = true;
                }
            },
            () = signals.next() => return stop(pair, &mut signals).await,
        }
        let status = loop {
            tokio::select! {
                () = &mut silent, if !killed => killed = end(&mut pair)?,
                () = tokio::time::sleep(Duration::from_millis(20)) => {
                    if let Some(status) = pair.ended()? {
                        break status;
                    }
                }
                () = signals.next() => return stop(pair, &mut signals).await,
            }
        };
        failures += 1;
        if failures > FAILURES_MAX {
            anyhow::bail!(
                "the loader ended {failures} times in a row without serving, last with {status}"
            );
        }
        eprintln!("matkv: the loader ended ({status}); starting both processes again");
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(50 << failures)) => {}
            () = signals.next() => return stop(pair, &mut signals).await,
        }
    }
}

/// Ends a loader that makes no progress.
fn end(pair: &mut Pair) -> anyhow::Result<bool> {
    eprintln!("matkv: the loader makes no progress; ending it");
    pair.kill()?;
    Ok(true)
}

/// Running requests may finish; a second signal ends them.
async fn stop(mut pair: Pair, signals: &mut Signals) -> anyhow::Result<ExitCode> {
    pair.terminate();
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(20)) => {
                if pair.ended()?.is_some() || pair.is_overdue() {
                    break;
                }
            }
            () = signals.next() => pair.terminate(),
        }
    }
    let status = pair.stop()?;
    if status.success() {
        note(format_args!("stopped"));
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("matkv: the loader ended with {status}");
    Ok(ExitCode::FAILURE)
}

/// A line for whoever started us; if nobody reads any more, serving goes on.
fn note(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{text}");
}
