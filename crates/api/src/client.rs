//! Connecting to a server over its Unix socket or TCP.

use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::v1::mat_kv_client::MatKvClient;

/// A connected client.
pub type Client = MatKvClient<Channel>;

/// No server.
#[derive(Debug, thiserror::Error)]
#[error("no server at {address}: {reason}; start one with `matkv up`")]
pub struct ConnectError {
    /// Where it was looked for.
    pub address: String,
    /// The transport's reason.
    pub reason: String,
}

/// Connects to a Unix socket.
///
/// # Errors
/// If nobody serves there.
pub async fn connect(socket: &Path) -> Result<Client, ConnectError> {
    let path: PathBuf = socket.to_owned();
    let err = |reason: String| ConnectError { address: socket.display().to_string(), reason };
    // The address is not used: the connector knows the socket.
    let endpoint = Endpoint::from_static("http://matkv.invalid");
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = endpoint.connect_with_connector(connector).await.map_err(|e| {
        let mut reason = e.to_string();
        let mut source = std::error::Error::source(&e);
        while let Some(inner) = source {
            reason = inner.to_string();
            source = inner.source();
        }
        err(reason)
    })?;
    // Logits of a first token are a few hundred KiB; documents come in parts.
    Ok(MatKvClient::new(channel).max_decoding_message_size(16 << 20))
}
