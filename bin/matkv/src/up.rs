//! `matkv up`: starts and supervises the two processes.

use std::process::ExitCode;
use std::time::Duration;

use matkv_config::Resolved;

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

async fn supervise(resolved: &Resolved) -> anyhow::Result<ExitCode> {
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let mut failures = 0;
    let mut was_ready = false;
    loop {
        let mut pair = Pair::start(resolved)?;
        tokio::select! {
            ready = pair.ready(&resolved.config) => match ready {
                Ok(_) => {
                    was_ready = true;
                    failures = 0;
                    note(format_args!("ready on {}", resolved.config.socket().display()));
                }
                // A loader that has never been ready refuses its configuration.
                Err(e) if !was_ready => return Err(e),
                Err(e) => eprintln!("matkv: {e:#}"),
            },
            _ = term.recv() => return stop(pair),
            _ = tokio::signal::ctrl_c() => return stop(pair),
        }
        let status = loop {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(50)) => {
                    if let Some(status) = pair.ended()? {
                        break status;
                    }
                }
                _ = term.recv() => return stop(pair),
                _ = tokio::signal::ctrl_c() => return stop(pair),
            }
        };
        failures += 1;
        if failures > FAILURES_MAX {
            anyhow::bail!(
                "the loader ended {failures} times in a row without serving, last with {status}"
            );
        }
        eprintln!("matkv: the loader ended ({status}); starting both processes again");
        tokio::time::sleep(Duration::from_millis(50 << failures)).await;
    }
}

fn stop(pair: Pair) -> anyhow::Result<ExitCode> {
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
