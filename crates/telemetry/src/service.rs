//! What a process tells its service manager (systemd, or `matkv up`) on the notify socket.
//!
//! Without one, nothing is sent. A manager that does not read must not stop us: a thread of its own
//! writes, and what it has no time for is dropped.

use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use sd_notify::NotifyState;

enum Message {
    Ready(String),
    Status(String),
    Stopping(String),
    Extend(Duration),
    Alive,
}

/// Messages on their way to a manager that is slow.
const PENDING_MAX: usize = 16;

fn tell(message: Message) {
    static WRITER: OnceLock<Option<SyncSender<Message>>> = OnceLock::new();
    let writer = WRITER.get_or_init(|| {
        std::env::var_os("NOTIFY_SOCKET")?;
        let (sender, messages) = sync_channel(PENDING_MAX);
        let write = move || messages.iter().for_each(|m| write(&m));
        std::thread::Builder::new().name("notify".into()).spawn(write).ok()?;
        Some(sender)
    });
    if let Some(writer) = writer {
        let _ = writer.try_send(message);
    }
}

fn write(message: &Message) {
    let told = match message {
        Message::Ready(s) => sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(s)]),
        Message::Status(s) => sd_notify::notify(&[NotifyState::Status(s)]),
        Message::Stopping(s) => sd_notify::notify(&[NotifyState::Stopping, NotifyState::Status(s)]),
        Message::Extend(time) => {
            let microseconds = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
            sd_notify::notify(&[NotifyState::ExtendTimeoutUsec(microseconds)])
        }
        Message::Alive => sd_notify::notify(&[NotifyState::Watchdog]),
    };
    if let Err(e) = told {
        tracing::debug!("the service manager cannot be told: {e}");
    }
}

/// The process serves.
pub fn ready(status: &str) {
    tell(Message::Ready(status.into()));
}

/// A line for `systemctl status`.
pub fn status(status: &str) {
    tell(Message::Status(status.into()));
}

/// The process is about to end.
pub fn stopping(status: &str) {
    tell(Message::Stopping(status.into()));
}

/// A stop takes up to this long, whatever the unit says.
pub fn extend(time: Duration) {
    tell(Message::Extend(time));
}

/// Every thread gets on.
pub fn alive() {
    tell(Message::Alive);
}

/// How often [`alive`] must be said at least; nothing if nobody watches.
pub fn watchdog() -> Option<Duration> {
    sd_notify::watchdog_enabled()
}

/// Variables that are meant for this process alone, not for its children.
pub const OWN_VARIABLES: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
];
