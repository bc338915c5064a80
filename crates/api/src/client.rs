//! Connecting to a server over its Unix socket or TCP.

use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::v1;
use crate::v1::mat_kv_client::MatKvClient;

/// A connected client.
pub type Client = MatKvClient<Channel>;

/// A connected client for operators.
pub type AdminClient = v1::admin_client::AdminClient<Channel>;

/// No server.
#[derive(Debug, thiserror::Error)]
#[error("no server at {address}: {reason}; start one with `matkv up`")]
pub struct ConnectError {
    /// Where it was looked for.
    pub address: String,
    /// The transport's reason.
    pub reason: String,
}

async fn channel(socket: &Path) -> Result<Channel, ConnectError> {
    let path: PathBuf = socket.to_owned();
    let err = |reason: String| ConnectError { address: socket.display().to_string(), reason };
    // The address is not used: the connector knows the socket.
    let endpoint = Endpoint::from_static("http://matkv.invalid");
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|e| {
        let mut reason = e.to_string();
        let mut source = std::error::Error::source(&e);
        while let Some(inner) = source {
            reason = inner.to_string();
            source = inner.source();
        }
        err(reason)
    })
}

/// Bytes of a message: logits of a first token are a few hundred KiB, a page of chunks is less
/// than a MiB; documents come in parts.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Connects to a Unix socket.
///
/// # Errors
/// If nobody serves there.
pub async fn connect(socket: &Path) -> Result<Client, ConnectError> {
    let client = MatKvClient::new(channel(socket).await?);
    Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// Connects to a Unix socket for an operator's requests.
///
/// # Errors
/// If nobody serves there.
pub async fn connect_admin(socket: &Path) -> Result<AdminClient, ConnectError> {
    let client = v1::admin_client::AdminClient::new(channel(socket).await?);
    Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX))
}
