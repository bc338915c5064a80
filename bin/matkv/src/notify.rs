//! The receiving end of the notify protocol: `matkv up` watches its loader as systemd would.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use matkv_actors::Stillness;
use tokio::net::UnixDatagram;

/// How often the count of messages is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// A notify socket and the watch over whoever writes to it.
pub struct Watchdog {
    socket: UnixDatagram,
    path: PathBuf,
    limit: Duration,
}

impl Watchdog {
    /// A socket in the runtime directory.
    pub fn new(runtime: &Path, limit: Duration) -> anyhow::Result<Self> {
        std::fs::create_dir_all(runtime)
            .with_context(|| format!("cannot create {}", runtime.display()))?;
        let path = runtime.join(format!("notify-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let socket =
            UnixDatagram::bind(&path).with_context(|| format!("cannot use {}", path.display()))?;
        Ok(Self { socket, path, limit })
    }

    /// Tells a child where to write, and how often it must.
    pub fn introduce(&self, command: &mut Command) {
        // What an earlier child has said is not this one's.
        let mut message = [0; 4096];
        while self.socket.try_recv(&mut message).is_ok() {}
        command.env("NOTIFY_SOCKET", &self.path);
        command.env("WATCHDOG_USEC", self.limit.as_micros().to_string());
    }

    /// Returns when the child, once it has said that it is up, has said nothing for too long.
    pub async fn silent(&self) {
        let (mut alive, mut up) = (0, false);
        let (mut stillness, mut last) = (Stillness::default(), Instant::now());
        let mut message = [0; 4096];
        loop {
            let received = tokio::time::timeout(LOOK, self.socket.recv(&mut message)).await;
            if let Ok(Ok(n)) = received {
                let text = String::from_utf8_lossy(&message[..n]).into_owned();
                up |= text.lines().any(|l| l == "READY=1");
                alive += u64::from(text.lines().any(|l| l == "WATCHDOG=1"));
            }
            if last.elapsed() < LOOK {
                continue;
            }
            let passed = last.elapsed();
            last = Instant::now();
            if stillness.look(alive, passed) > self.limit && up {
                return;
            }
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
