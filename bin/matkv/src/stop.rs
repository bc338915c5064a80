//! Ctrl-C in a run that keeps what it has measured: a flag that every step looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{anyhow, ensure};
use tokio::sync::Notify;

/// Raised by the first Ctrl-C.
#[derive(Clone, Default)]
pub struct Stop(Arc<Flag>);

#[derive(Default)]
struct Flag {
    is_up: AtomicBool,
    changed: Notify,
}

impl Stop {
    /// From now on a Ctrl-C raises the flag; a second one ends the process, and with it its
    /// children.
    pub fn on_ctrl_c() -> Self {
        let stop = Self::default();
        let raised = stop.clone();
        tokio::spawn(async move {
            for asked in 0.. {
                if tokio::signal::ctrl_c().await.is_err() {
                    return;
                }
                if asked > 0 {
                    std::process::exit(130);
                }
                raised.0.is_up.store(true, Ordering::SeqCst);
                raised.0.changed.notify_waiters();
                eprintln!("stopping; once more ends at once");
            }
        });
        stop
    }

    pub fn is_raised(&self) -> bool {
        self.0.is_up.load(Ordering::SeqCst)
    }

    /// Whether to go on with the next of so many, which it names.
    pub fn counting(&self, what: &str, of: usize) -> impl FnMut() -> bool {
        let mut at = 0;
        move || {
            at += 1;
            let go_on = !self.is_raised();
            if go_on {
                eprintln!("{what} {at}/{of}");
            }
            go_on
        }
    }

    /// Waits until it is raised; what `check` says then.
    pub async fn raised(&self) -> anyhow::Error {
        // Made before the look: what comes in between is heard.
        let changed = self.0.changed.notified();
        if !self.is_raised() {
            changed.await;
        }
        anyhow!("interrupted")
    }

    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.is_raised(), "interrupted");
        Ok(())
    }
}
