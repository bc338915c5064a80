//! The control channel between A and B, on ipc-channel.
//!
//! A publishes the name of a one-shot server in the runtime directory, one per epoch; B connects
//! and the two exchange typed messages. A hang-up is the first sign of a peer's death.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ipc_channel::ipc::{self, IpcOneShotServer, IpcReceiver, IpcSender};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Result, SysError};
use crate::files::write_atomically;

/// What the file in the runtime directory says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlName {
    /// Number of the epoch that is waiting for a decoder.
    pub epoch: u64,
    /// Name of the one-shot server.
    pub server: String,
    /// Process id of the loader.
    pub pid: u32,
}

/// What travels first: both directions of the conversation are set up from it.
#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
struct Opening<Up, Down> {
    up: IpcReceiver<Up>,
    down: IpcSender<Down>,
}

/// A's side before B has come. `Up` travels from B to A, `Down` from A to B.
pub struct ControlListener<Up, Down> {
    server: IpcOneShotServer<Opening<Up, Down>>,
}

fn control_path(runtime: &Path) -> PathBuf {
    runtime.join("control")
}

fn control(e: impl std::fmt::Display) -> SysError {
    SysError::Control(e.to_string())
}

impl<Up, Down> ControlListener<Up, Down>
where
    Up: Serialize + DeserializeOwned,
    Down: Serialize + DeserializeOwned,
{
    /// Opens a one-shot server and publishes its name.
    ///
    /// # Errors
    /// If the server or the file cannot be made.
    pub fn publish(runtime: &Path, epoch: u64) -> Result<Self> {
        let (server, name) = IpcOneShotServer::new().map_err(control)?;
        let name = ControlName { epoch, server: name, pid: std::process::id() };
        let text = format!("{}\n{}\n{}\n", name.epoch, name.pid, name.server);
        write_atomically(&control_path(runtime), text.as_bytes())?;
        Ok(Self { server })
    }

    /// Waits for a decoder. Blocks; `accept` of ipc-channel has no time-out, so it runs on a
    /// thread of its own that ends with the process.
    ///
    /// # Errors
    /// If the connection breaks before it is complete.
    pub fn accept(self) -> Result<(IpcReceiver<Up>, IpcSender<Down>)> {
        let (_, opening) = self.server.accept().map_err(control)?;
        Ok((opening.up, opening.down))
    }
}

/// Reads what the loader published, if anything.
fn read_name(runtime: &Path) -> Option<ControlName> {
    let text = std::fs::read_to_string(control_path(runtime)).ok()?;
    let mut lines = text.lines();
    Some(ControlName {
        epoch: lines.next()?.parse().ok()?,
        pid: lines.next()?.parse().ok()?,
        server: lines.next()?.to_owned(),
    })
}

/// A connection from B's side: what A sends, and where to send.
pub type ControlConnection<Up, Down> = (ControlName, IpcSender<Up>, IpcReceiver<Down>);

/// B's side: waits for a loader to publish a name and connects to it.
///
/// # Errors
/// If no loader could be reached before the deadline.
pub fn connect_control<Up, Down>(
    runtime: &Path,
    deadline: Duration,
) -> Result<ControlConnection<Up, Down>>
where
    Up: Serialize + DeserializeOwned,
    Down: Serialize + DeserializeOwned,
{
    let end = Instant::now() + deadline;
    loop {
        let mut reason = format!("no loader has published {}", control_path(runtime).display());
        if let Some(name) = read_name(runtime) {
            match try_connect::<Up, Down>(&name) {
                Ok((up, down)) => return Ok((name, up, down)),
                Err(e) => {
                    reason = format!("the loader (process {}) is not reachable: {e}", name.pid)
                }
            }
        }
        if Instant::now() >= end {
            return Err(SysError::Control(reason));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn try_connect<Up, Down>(
    name: &ControlName,
) -> std::result::Result<(IpcSender<Up>, IpcReceiver<Down>), String>
where
    Up: Serialize + DeserializeOwned,
    Down: Serialize + DeserializeOwned,
{
    let opening = IpcSender::connect(name.server.clone()).map_err(|e| e.to_string())?;
    let (up, up_receiver) = ipc::channel().map_err(|e| e.to_string())?;
    let (down_sender, down) = ipc::channel().map_err(|e| e.to_string())?;
    opening.send(Opening { up: up_receiver, down: down_sender }).map_err(|e| e.to_string())?;
    Ok((up, down))
}
