//! The two processes started one by one, as a service manager does it.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use matkv_api::Client;
use matkv_api::v1::GetStatusResponse;

use crate::process::{Running, isolated};
use crate::server::Home;
use crate::wait::{DEADLINE, until};

/// A program with these directories and settings, told everything by its environment.
///
/// # Panics
/// If the runtime directory cannot be made.
pub fn service(home: &Home, name: &str, settings: &[&str]) -> Command {
    std::fs::create_dir_all(home.runtime()).expect("a runtime directory");
    let mut command = isolated(name);
    command.envs(variables(home, settings));
    command
}

/// The environment of a program with these directories and settings.
pub fn variables(home: &Home, settings: &[&str]) -> Vec<(String, String)> {
    let mut all = vec![("TMPDIR".to_owned(), home.runtime().display().to_string())];
    for setting in home.settings(settings) {
        let (key, value) = setting.split_once('=').expect("key=value");
        all.push((format!("MATKV_{}", key.replace('.', "_").to_uppercase()), value.to_owned()));
    }
    all
}

/// Starts a program whose output is kept.
pub fn start(command: Command) -> Running {
    Running::start(command)
}

/// Waits until the service answers, and says what it says of itself.
pub async fn ready(home: &Home) -> (Client, GetStatusResponse) {
    let socket = home.socket();
    until("the service is ready", async || {
        let mut client = matkv_api::connect(&socket).await.ok()?;
        let status = client.get_status(matkv_api::v1::GetStatusRequest {}).await.ok()?;
        let status = status.into_inner();
        (status.state == "ready").then_some((client, status))
    })
    .await
}

/// Waits until requests hold nothing.
pub async fn at_rest(client: &Client) -> GetStatusResponse {
    until("nothing is held", async || {
        let status = client.clone().get_status(matkv_api::v1::GetStatusRequest {}).await;
        let s = status.expect("a status").into_inner();
        let busy = s.held_slots + s.requests_running + s.requests_waiting;
        (busy == 0).then_some(s)
    })
    .await
}

/// A service manager's notify socket.
pub struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    /// In a directory.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(directory: &Path, name: &str) -> Self {
        let path = directory.join(name);
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
        Self { socket, path }
    }

    /// Tells a program where to write, and how often at least.
    pub fn watch(&self, command: &mut Command, watchdog: Duration) {
        command.env("NOTIFY_SOCKET", &self.path);
        command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
    }

    /// The next message; nothing if none comes for a moment.
    pub fn message(&self) -> Option<String> {
        let mut bytes = [0; 4096];
        let n = self.socket.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..n]).into_owned())
    }

    /// Waits for a message with this line.
    ///
    /// # Panics
    /// If none comes in time.
    pub fn wait_for(&self, line: &str) {
        let started = Instant::now();
        let mut seen = Vec::new();
        while started.elapsed() < DEADLINE {
            if let Some(message) = self.message() {
                if message.lines().any(|l| l == line) {
                    return;
                }
                seen.push(message);
            }
        }
        panic!("no {line:?} among {seen:?}");
    }
}
