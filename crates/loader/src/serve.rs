//! The service edge: sockets, health, reflection, signals.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use matkv_actors::{Outcome, StopFlag, Watch, supervise};
use matkv_api::v1::admin_server::AdminServer;
use matkv_api::v1::mat_kv_server::MatKvServer;
use matkv_config::{Config, format_duration};
use matkv_ring::{Header, Side};
use matkv_sys::Segment;
use matkv_telemetry::service;
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
use crate::operator::Operator;
use crate::run::{Opened, segment_name};
use crate::self_test;
use crate::status::{Observer, Testing, Unready};
use crate::threads::{Threads, stopped, threads};
use crate::world::LoadMessage;

/// How long open streams may take to end after a stop.
const GOODBYE: Duration = Duration::from_secs(2);
/// What a stop may take after the drain: threads, streams, the decoder.
const DRAIN_MARGIN: Duration = Duration::from_secs(15);
/// How often the process is looked after.
const LOOK: Duration = Duration::from_millis(100);
/// How long after a failed self-test the next one runs.
const TEST_AGAIN: Duration = Duration::from_secs(5);

fn setup(e: impl std::fmt::Display) -> LoaderError {
    LoaderError::Setup(e.to_string())
}

/// The signals that stop the loader; caught from the moment this exists.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Let running requests finish.
    Drain,
    /// Whoever started this process is gone.
    Now,
}

impl Signals {
    /// Starts catching; needs a runtime's context.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The next one of them.
    async fn next(&mut self) -> Stop {
        tokio::select! {
            _ = self.terminate.recv() => Stop::Drain,
            _ = self.interrupt.recv() => Stop::Drain,
            _ = self.hang_up.recv() => Stop::Now,
        }
    }
}

/// Serves until a signal or a fatal error.
pub(crate) async fn serve(
    config: &Config,
    mut opened: Opened,
    mut signals: Signals,
) -> Result<(), LoaderError> {
    let header = Arc::clone(&opened.header);
    // Held until the socket and the segment's name are gone.
    let _runtime_lock = opened.runtime_lock.take();
    let Threads { specs, gateway } = threads(config, opened)?;
    let listeners = Listeners::open(config).await?;
    let stop = StopFlag::default();
    let mut tree = supervise(specs, stop.clone()).await.map_err(setup)?;
    let (reporter, health) = health_reporter();
    let observer = Arc::clone(&gateway.observer);
    let life = Life {
        observer: Arc::clone(&observer),
        header,
        load: gateway.load.clone(),
        watch: tree.watch(config.stall),
        reporter,
        fed: None,
    };
    let life = tokio::spawn(life.watch(stop.clone()));
    let operator =
        Operator { core: Arc::clone(&gateway.observer.core), load: gateway.load.clone() };
    let router = Server::builder()
        .add_service(MatKvServer::new(gateway))
        .add_service(AdminServer::new(operator))
        .add_service(health);
    let router = with_reflection(router)?;
    let mut serving = tokio::task::JoinSet::new();
    let incoming = UnixListenerStream::new(listeners.unix);
    serving.spawn(router.clone().serve_with_incoming_shutdown(incoming, quit(&stop)));
    if let Some(tcp) = listeners.tcp {
        let incoming = TcpListenerStream::new(tcp);
        serving.spawn(router.serve_with_incoming_shutdown(incoming, quit(&stop)));
    }
    tracing::info!("listening on {}", config.socket().display());
    service::ready("waiting for a decoder");
    tokio::select! {
        _ = tree.ended() => {}
        stop = signals.next() => if stop == Stop::Drain {
            drain(&observer, config, &mut tree, &mut signals).await;
        },
    }
    service::stopping("stopping");
    let outcome = tree.stop().await;
    observer.end_all();
    // Open streams have been told by now; a client that never reads cannot keep us.
    let _ = tokio::time::timeout(GOODBYE, serving.join_all()).await;
    life.abort();
    if !listeners.inherited {
        let _ = std::fs::remove_file(config.socket());
    }
    Segment::remove_name(&segment_name(&config.runtime_dir));
    match outcome {
        Outcome::Failed { child, reason } => {
            Err(LoaderError::Setup(format!("thread {child} ended: {reason}")))
        }
        Outcome::Returned { child } => Err(LoaderError::Setup(format!("thread {child} ended"))),
        Outcome::Running | Outcome::Stopped => Ok(()),
    }
}

/// Takes no new requests and lets the running ones finish, up to a deadline or another signal.
async fn drain(
    observer: &Observer,
    config: &Config,
    tree: &mut matkv_actors::Supervision,
    signals: &mut Signals,
) {
    observer.draining.store(true, Ordering::SeqCst);
    let running = observer.streams.load(Ordering::SeqCst);
    service::extend(config.drain + DRAIN_MARGIN);
    if running > 0 {
        let limit = format_duration(config.drain);
        let text = format!("stopping; {running} requests may finish within {limit}");
        tracing::info!("{text}; another signal stops at once");
        service::status(&text);
    }
    let done = async {
        // Not only decoded: told.
        while observer.streams.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(LOOK / 5).await;
        }
    };
    tokio::select! {
        () = done => {}
        () = tokio::time::sleep(config.drain) => {
            tracing::warn!("requests are still running; they end now");
        }
        _ = signals.next() => {}
        _ = tree.ended() => {}
    }
}

/// Where clients connect.
struct Listeners {
    unix: UnixListener,
    tcp: Option<TcpListener>,
    /// The socket is the service manager's: it stays when this process ends.
    inherited: bool,
}

impl Listeners {
    async fn open(config: &Config) -> Result<Self, LoaderError> {
        let cannot =
            |address: &str, e: std::io::Error| setup(format!("cannot listen on {address}: {e}"));
        let tcp = match config.tcp.as_str() {
            "" => None,
            address => Some(TcpListener::bind(address).await.map_err(|e| cannot(address, e))?),
        };
        let inherited = listenfd::ListenFd::from_env()
            .take_unix_listener(0)
            .map_err(|e| cannot("the inherited socket", e))?;
        if let Some(unix) = inherited {
            unix.set_nonblocking(true).map_err(|e| cannot("the inherited socket", e))?;
            let unix =
                UnixListener::from_std(unix).map_err(|e| cannot("the inherited socket", e))?;
            return Ok(Self { unix, tcp, inherited: true });
        }
        let socket = config.socket();
        // The runtime directory's lock is ours: a socket there is a leftover.
        let _ = std::fs::remove_file(&socket);
        let unix =
            UnixListener::bind(&socket).map_err(|e| cannot(&socket.display().to_string(), e))?;
        Ok(Self { unix, tcp, inherited: false })
    }
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

/// Looks after the process: whether its threads get on, whether it can answer, and who is told.
struct Life {
    observer: Arc<Observer>,
    header: Arc<Header>,
    load: crossbeam::channel::Sender<LoadMessage>,
    watch: Watch,
    reporter: HealthReporter,
    /// When the service manager has heard of us last.
    fed: Option<Instant>,
}

impl Life {
    async fn watch(mut self, stop: StopFlag) {
        let mut served = None;
        let mut last = Instant::now();
        while !stop.is_raised() {
            let passed = last.elapsed();
            last = Instant::now();
            self.look(passed);
            self.self_test();
            self.report(&mut served).await;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Signs of life go out only while every thread gets on.
    fn look(&mut self, passed: Duration) {
        let stuck = self.watch.look(passed);
        let mut known = self.observer.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = stuck
            && known.is_none()
        {
            tracing::error!("thread {thread} makes no progress");
        }
        *known = stuck;
        drop(known);
        if stuck.is_none() {
            self.header.beat(Side::Loader);
            self.feed();
        }
    }

    fn feed(&mut self) {
        let Some(period) = service::watchdog() else { return };
        if self.fed.is_none_or(|at| at.elapsed() >= period / 4) {
            self.fed = Some(Instant::now());
            service::alive();
        }
    }

    /// Every session begins with a self-test; one that failed is tried again.
    fn self_test(&self) {
        let epoch = self.observer.sessions.status().epoch;
        let mut testing = self.observer.testing.lock().unwrap_or_else(PoisonError::into_inner);
        let due = testing.epoch != epoch || testing.again.is_some_and(|at| Instant::now() >= at);
        if epoch == 0 || !due {
            return;
        }
        *testing = Testing { epoch, again: None };
        let (observer, load) = (Arc::clone(&self.observer), self.load.clone());
        tokio::spawn(async move {
            let outcome = self_test::run(&observer.core, &load).await;
            let mut testing = observer.testing.lock().unwrap_or_else(PoisonError::into_inner);
            if testing.epoch != epoch {
                return;
            }
            if let Err(e) = &outcome {
                tracing::error!("the self-test of session {epoch} failed: {e}");
                testing.again = Some(Instant::now() + TEST_AGAIN);
            }
            *observer.self_test.lock().unwrap_or_else(PoisonError::into_inner) = (epoch, outcome);
        });
    }

    /// Keeps the health service, and the service manager, at what can be answered.
    async fn report(&self, served: &mut Option<Option<Unready>>) {
        let unready = self.observer.unready();
        if served.as_ref() == Some(&unready) {
            return;
        }
        let status = match &unready {
            None => ServingStatus::Serving,
            Some(_) => ServingStatus::NotServing,
        };
        // The empty name is the server as a whole.
        for service in [<MatKvServer<Gateway> as NamedService>::NAME, ""] {
            self.reporter.set_service_status(service, status).await;
        }
        service::status(unready.as_ref().map_or("ready", |u| &u.reason));
        *served = Some(unready);
    }
}
