//! The service edge: sockets, health, reflection, signals.

use std::sync::Arc;
use std::time::Duration;

use matkv_actors::{Outcome, StopFlag, supervise};
use matkv_api::v1::mat_kv_server::MatKvServer;
use matkv_config::Config;
use matkv_sys::Segment;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::error::LoaderError;
use crate::gateway::Gateway;
use crate::run::{Opened, Options, segment_name};
use crate::status::Observer;
use crate::threads::{Threads, stopped, threads};

/// How long open streams may take to end after a stop.
const GOODBYE: Duration = Duration::from_secs(2);

fn setup(e: impl std::fmt::Display) -> LoaderError {
    LoaderError::Setup(e.to_string())
}

/// The signals that stop the loader; caught from the moment this exists.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts catching; needs a runtime's context.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }
}

/// Serves until a signal or a fatal error.
pub(crate) async fn serve(
    config: &Config,
    options: Options,
    opened: Opened,
    mut signals: Signals,
) -> Result<(), LoaderError> {
    let Threads { specs, gateway } = threads(config, options, opened)?;
    let (unix, tcp) = listen(config).await?;
    let stop = StopFlag::default();
    let mut tree = supervise(specs, stop.clone()).await.map_err(setup)?;
    let (reporter, health) = health_reporter();
    tokio::spawn(report_health(Arc::clone(&gateway.observer), reporter, stop.clone()));
    let router = Server::builder().add_service(MatKvServer::new(gateway)).add_service(health);
    let router = with_reflection(router)?;
    let serving = tokio::spawn(
        router.clone().serve_with_incoming_shutdown(UnixListenerStream::new(unix), quit(&stop)),
    );
    if let Some(tcp) = tcp {
        let incoming = TcpListenerStream::new(tcp);
        tokio::spawn(router.serve_with_incoming_shutdown(incoming, quit(&stop)));
    }
    tracing::info!("listening on {}", config.socket().display());
    tokio::select! {
        _ = tree.ended() => {}
        _ = signals.terminate.recv() => {}
        _ = signals.interrupt.recv() => {}
    }
    let outcome = tree.stop().await;
    // Open streams have been told by now; a client that never reads cannot keep us.
    let _ = tokio::time::timeout(GOODBYE, serving).await;
    let _ = std::fs::remove_file(config.socket());
    Segment::remove_name(&segment_name(&config.runtime_dir));
    match outcome {
        Outcome::Failed { child, reason } => {
            Err(LoaderError::Setup(format!("thread {child} ended: {reason}")))
        }
        _ => Ok(()),
    }
}

async fn listen(config: &Config) -> Result<(UnixListener, Option<TcpListener>), LoaderError> {
    let cannot =
        |address: &str, e: std::io::Error| setup(format!("cannot listen on {address}: {e}"));
    let tcp = match config.tcp.as_str() {
        "" => None,
        address => Some(TcpListener::bind(address).await.map_err(|e| cannot(address, e))?),
    };
    let socket = config.socket();
    // The runtime directory's lock is ours: a socket there is a leftover.
    let _ = std::fs::remove_file(&socket);
    let unix = UnixListener::bind(&socket).map_err(|e| cannot(&socket.display().to_string(), e))?;
    Ok((unix, tcp))
}

fn with_reflection(router: Router) -> Result<Router, LoaderError> {
    let builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(matkv_api::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    Ok(router
        .add_service(builder().build_v1().map_err(setup)?)
        .add_service(builder().build_v1alpha().map_err(setup)?))
}

/// Ends when the flag is raised.
fn quit(stop: &StopFlag) -> impl Future<Output = ()> + use<> {
    let signal = stopped(stop);
    async move {
        let _ = tokio::task::spawn_blocking(move || signal.recv()).await;
    }
}

/// Keeps the health service at what the sessions say.
async fn report_health(observer: Arc<Observer>, reporter: HealthReporter, stop: StopFlag) {
    let mut served = None;
    while !stop.is_raised() {
        let ready = observer.is_ready();
        if served != Some(ready) {
            let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
            // The empty name is the server as a whole.
            for service in [<MatKvServer<Gateway> as NamedService>::NAME, ""] {
                reporter.set_service_status(service, status).await;
            }
            served = Some(ready);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
