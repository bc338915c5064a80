//! The process: what is opened in which order, which threads run, how it stops.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crossbeam::channel::{Receiver, bounded};
use matkv_actors::{Outcome, Policy, StopFlag, ThreadSpec, supervise};
use matkv_api::v1::mat_kv_server::MatKvServer;
use matkv_config::{Config, IoEngine};
use matkv_kernels::Isa;
use matkv_model::{LanguageModel, PULLABLE, PromptTexts, model_path};
use matkv_retrieve::{Chunker, Embedder, HannoyIndex};
use matkv_ring::{Geometry, Header};
use matkv_store::Store;
use matkv_sys::{EngineKind, FileLock, Segment, open_engine};
use matkv_types::Encoding;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Mutex, Semaphore};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::Server;

use crate::arena::Arena;
use crate::compile::compile_prefix;
use crate::compute::{Compute, WORK_MAX};
use crate::core::Core;
use crate::error::LoaderError;
use crate::gateway::Gateway;
use crate::load::{Load, LoadChannels, READS_MAX};
use crate::session::{SessionThread, Sessions};
use crate::status::Observer;
use crate::{ingest, retrieve};

/// How the loader was started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Command that starts a decoder; the loader then keeps one alive.
    pub spawn_decoder: Option<Vec<String>>,
}

/// What must live as long as the process.
struct Opened {
    core: Arc<Core>,
    header: Arc<Header>,
    segment: Segment,
    pool: rayon::ThreadPool,
    prefix: Arc<crate::arena::ChunkSlot>,
    _runtime_lock: FileLock,
}

/// Runs until a signal or a fatal error.
///
/// # Errors
/// What keeps the loader from starting, or the thread it cannot do without.
pub fn run(config: &Config, options: Options) -> Result<(), LoaderError> {
    let opened = open(config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| LoaderError::Setup(e.to_string()))?;
    runtime.block_on(serve(config, options, opened))
}

fn open(config: &Config) -> Result<Opened, LoaderError> {
    let setup = |e: &dyn std::fmt::Display| LoaderError::Setup(e.to_string());
    let path = model_path(&config.cache_dir, &config.model)?;
    let embedder_path = model_path(&config.cache_dir, PULLABLE[1].name)?;
    std::fs::create_dir_all(&config.runtime_dir).map_err(|e| {
        LoaderError::Setup(format!("cannot create {}: {e}", config.runtime_dir.display()))
    })?;
    let runtime_lock = FileLock::acquire(&config.runtime_dir.join("LOCK"))?;
    let model = Arc::new(LanguageModel::open(&path, Some(&config.cache_dir))?);
    let texts =
        PromptTexts { system: config.system.clone(), introduction: config.introduction.clone() };
    let prefix_tokens = model.prefix(&texts)?;
    let fingerprint = model.fingerprint(&prefix_tokens);
    let store = Store::open(&config.store_dir, fingerprint)?;
    let index = Box::new(HannoyIndex::open(&store)?);
    let embedder = Embedder::open(embedder_path.parent().unwrap_or(Path::new(".")))?;
    let geometry = Geometry::new(config.arena_bytes as usize);
    let segment = Segment::create(&segment_name(&config.runtime_dir), geometry.segment_bytes())?;
    let header = Header::initialize(segment.region(), geometry, fingerprint, 0)?;
    let arena = Arena::new(segment.region(), geometry.arena());
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(Config::threads(config.loader_threads))
        .thread_name(|i| format!("compute-{i}"))
        .build()
        .map_err(|e| setup(&e))?;
    let prefix = pool.install(|| compile_prefix(&model, &prefix_tokens, &arena))?;
    let chunker = Chunker::new(config.chunk_size, config.chunk_overlap).map_err(|e| setup(&e))?;
    tracing::info!(
        "model {} ({} packed), prefix of {} tokens, fingerprint {}",
        config.model,
        matkv_config::format_bytes(model.weight_bytes() as u64),
        prefix_tokens.len(),
        &fingerprint.to_string()[..16]
    );
    let core = Core {
        config: config.clone(),
        model,
        store,
        index,
        embedder,
        chunker,
        prefix: prefix_tokens,
        fingerprint,
        encoding: Encoding::DEFAULT,
        arena,
        geometry,
    };
    Ok(Opened {
        core: Arc::new(core),
        header: Arc::new(header),
        segment,
        pool,
        prefix: Arc::new(prefix),
        _runtime_lock: runtime_lock,
    })
}

/// One name per runtime directory: a restarted loader replaces what a killed one left.
fn segment_name(runtime: &Path) -> String {
    let path = runtime.canonicalize().unwrap_or_else(|_| runtime.to_owned());
    let digest = matkv_types::LengthPrefixedHasher::default()
        .part(path.as_os_str().as_encoded_bytes())
        .finish();
    format!("matkv-{}", &digest.to_string()[..16])
}

/// A receiver that is signalled when the flag is raised.
fn stopped(stop: &StopFlag) -> Receiver<()> {
    let (sender, receiver) = bounded(1);
    stop.on_raise(move || {
        let _ = sender.try_send(());
    });
    receiver
}

struct Threads {
    specs: Vec<ThreadSpec>,
    gateway: Gateway,
}

fn threads(config: &Config, options: Options, opened: Opened) -> Result<Threads, LoaderError> {
    let Opened { core, header, segment, pool, prefix, _runtime_lock } = opened;
    // One place for each admitted request; ingests wait their turn.
    let (retrieve_sender, retrieve_queue) = bounded(config.queue);
    let (ingest_sender, ingest_queue) = bounded(1);
    let (load_sender, load_queue) = bounded(config.queue + 8);
    // Every read and every compilation that can be under way, so that neither ever waits here.
    let (read_done, reads) = bounded(READS_MAX);
    let (compiled_sender, compiled) = bounded(2 * READS_MAX + 8);
    let (work_sender, work) = bounded(WORK_MAX);
    let (background_sender, background) = bounded(1);
    let kind = match config.io_engine {
        IoEngine::Auto => EngineKind::Auto,
        IoEngine::Uring => EngineKind::Uring,
        IoEngine::Pread => EngineKind::Pread,
    };
    let (engine, note) = open_engine(kind, config.io_depth, segment.region(), read_done)?;
    if let Some(note) = note {
        tracing::warn!("{note}");
    }
    let description = engine.describe().to_owned();
    tracing::info!("reading with {description}; kernels: {}", Isa::detect().name());
    let sessions = Arc::new(Sessions::default());
    let resident = Arc::new(AtomicU64::new(0));
    let session = SessionThread {
        sessions: Arc::clone(&sessions),
        header,
        segment: segment.name().to_owned(),
        geometry: core.geometry,
        fingerprint: core.fingerprint,
        shape: core.model.kv_shape(),
        runtime: config.runtime_dir.clone(),
        spawn: options.spawn_decoder,
    };
    let compute = Compute {
        core: Arc::clone(&core),
        prefix: Arc::clone(&prefix),
        sessions: Arc::clone(&sessions),
        work,
        background,
        compiled: compiled_sender,
    };
    let channels = LoadChannels {
        messages: load_queue,
        reads,
        compiled,
        compute: work_sender,
        background: background_sender,
    };
    let load = Load::new(Arc::clone(&core), prefix, engine, channels, Arc::clone(&resident));
    let load = std::sync::Mutex::new(load);
    let (c1, c2) = (Arc::clone(&core), Arc::clone(&core));
    let (l1, l2) = (load_sender.clone(), load_sender.clone());
    let keep = (segment, _runtime_lock);
    // What these threads hold cannot be rebuilt after a panic (slots, replies, channels), so the
    // process ends and `matkv up`, or the service manager, starts both again.
    let specs = vec![
        ThreadSpec::new("load", Policy::Fatal, move |stop| {
            let _segment_outlives_the_threads = &keep;
            let signal = stopped(&stop);
            load.lock().map_err(|e| e.to_string())?.run(&stop, &signal);
            Ok(())
        }),
        ThreadSpec::new("compute", Policy::Fatal, move |stop| {
            let signal = stopped(&stop);
            pool.install(|| compute.run(&stop, &signal));
            Ok(())
        }),
        ThreadSpec::new("retrieve", Policy::Restart { times: 100 }, move |stop| {
            until_stopped(&stop, &retrieve_queue, |queue| retrieve::run(&c1, queue, &l1));
            Ok(())
        }),
        ThreadSpec::new("ingest", Policy::Restart { times: 100 }, move |stop| {
            until_stopped(&stop, &ingest_queue, |queue| ingest::run(&c2, queue, &l2));
            Ok(())
        }),
        ThreadSpec::new("session", Policy::Fatal, move |stop| session.run(&stop)),
    ];
    let observer = Observer {
        core,
        sessions,
        engine: description,
        resident,
        admitted: Arc::new(AtomicU64::new(0)),
    };
    let gateway = Gateway {
        observer: Arc::new(observer),
        retrieve: retrieve_sender,
        ingest: ingest_sender,
        load: load_sender,
        queue: Arc::new(Semaphore::new(config.queue)),
        serial: (!config.overlap).then(|| Arc::new(Mutex::new(()))),
    };
    Ok(Threads { specs, gateway })
}

/// Runs a consumer that ends when its channel closes, closing it when the flag is raised.
fn until_stopped<T: Send>(stop: &StopFlag, queue: &Receiver<T>, f: impl FnOnce(&Receiver<T>)) {
    let signal = stopped(stop);
    let (relay, relayed) = bounded(0);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                crossbeam::channel::select_biased! {
                    recv(signal) -> _ => return,
                    recv(queue) -> item => match item {
                        Ok(item) => if relay.send(item).is_err() { return },
                        Err(_) => return,
                    },
                }
            }
        });
        f(&relayed);
        drop(relayed);
    });
}

async fn serve(config: &Config, options: Options, opened: Opened) -> Result<(), LoaderError> {
    let setup = |e: &dyn std::fmt::Display| LoaderError::Setup(e.to_string());
    let Threads { specs, gateway } = threads(config, options, opened)?;
    let socket = config.socket();
    // The runtime directory's lock is ours: a socket there is a leftover.
    let _ = std::fs::remove_file(&socket);
    let unix = UnixListener::bind(&socket)
        .map_err(|e| LoaderError::Setup(format!("cannot listen on {}: {e}", socket.display())))?;
    let tcp = match config.tcp.as_str() {
        "" => None,
        address => Some(TcpListener::bind(address).await.map_err(|e| {
            LoaderError::Setup(format!("cannot listen on {address}: {e}"))
        })?),
    };
    let stop = StopFlag::default();
    let mut tree = supervise(specs, stop.clone()).await.map_err(|e| setup(&e))?;
    let (health_reporter, health) = tonic_health::server::health_reporter();
    let observer = Arc::clone(&gateway.observer);
    let watching = stop.clone();
    tokio::spawn(async move {
        let mut served = None;
        while !watching.is_raised() {
            let ready = observer.is_ready();
            if served != Some(ready) {
                if ready {
                    health_reporter.set_serving::<MatKvServer<Gateway>>().await;
                } else {
                    health_reporter.set_not_serving::<MatKvServer<Gateway>>().await;
                }
                served = Some(ready);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(matkv_api::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let router = Server::builder()
        .add_service(MatKvServer::new(gateway))
        .add_service(health)
        .add_service(reflection().build_v1().map_err(|e| setup(&e))?)
        .add_service(reflection().build_v1alpha().map_err(|e| setup(&e))?);
    let quit = |stop: StopFlag| async move {
        let signal = stopped(&stop);
        let _ = tokio::task::spawn_blocking(move || signal.recv()).await;
    };
    let serving = {
        let (router, stop) = (router.clone(), stop.clone());
        tokio::spawn(async move {
            router.serve_with_incoming_shutdown(UnixListenerStream::new(unix), quit(stop)).await
        })
    };
    if let Some(tcp) = tcp {
        let stop = stop.clone();
        tokio::spawn(async move {
            router.serve_with_incoming_shutdown(TcpListenerStream::new(tcp), quit(stop)).await
        });
    }
    tracing::info!("listening on {}", socket.display());
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(|e| setup(&e))?;
    tokio::select! {
        _ = tree.ended() => {}
        _ = term.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    let outcome = tree.stop().await;
    // Open streams have been told by now; a client that never reads cannot keep us.
    let _ = tokio::time::timeout(Duration::from_secs(2), serving).await;
    let _ = std::fs::remove_file(&socket);
    match outcome {
        Outcome::Failed { child, reason } => {
            Err(LoaderError::Setup(format!("thread {child} failed: {reason}")))
        }
        _ => Ok(()),
    }
}
