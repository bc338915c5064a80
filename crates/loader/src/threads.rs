//! The loader's threads: their channels, their order, and what happens when one ends.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};

use crossbeam::channel::{Receiver, Sender, bounded};
use matkv_actors::{Policy, StopFlag, ThreadSpec};
use matkv_config::{Config, IoEngine};
use matkv_kernels::Isa;
use matkv_sys::{EngineKind, ReadDone, ReadEngine, Segment, open_engine};
use tokio::sync::{Mutex, Semaphore};

use crate::compile::{CompileJob, Compiled};
use crate::compute::{Compute, WORK_MAX, Work};
use crate::error::LoaderError;
use crate::gateway::Gateway;
use crate::ingest::{self, IngestSession};
use crate::load::{LOADS_MAX, Load, LoadChannels, LoadMessage};
use crate::retrieve::{self, Incoming};
use crate::run::{Opened, Options};
use crate::session::{SessionThread, Sessions};
use crate::status::Observer;

/// A receiver that is disconnected, and so ready for ever, once the flag is raised.
pub(crate) fn stopped(stop: &StopFlag) -> Receiver<()> {
    let (sender, receiver) = bounded(0);
    let sender = std::sync::Mutex::new(Some(sender));
    stop.on_raise(move || {
        sender.lock().unwrap_or_else(PoisonError::into_inner).take();
    });
    receiver
}

/// Threads to supervise, and the service that feeds them.
pub(crate) struct Threads {
    pub specs: Vec<ThreadSpec>,
    pub gateway: Gateway,
}

/// Every channel between the threads, with the reason for its bound.
struct Channels {
    /// One place for each admitted request.
    retrieve: (Sender<Incoming>, Receiver<Incoming>),
    /// Ingests wait their turn in the gateway.
    ingest: (Sender<IngestSession>, Receiver<IngestSession>),
    /// Each admitted request, and what an ingest and a deletion may send.
    load: (Sender<LoadMessage>, Receiver<LoadMessage>),
    /// Every read that can be under way: completing one never waits.
    reads: (Sender<ReadDone>, Receiver<ReadDone>),
    /// Every compilation that can be under way: the compute thread never waits here.
    compiled: (Sender<Compiled>, Receiver<Compiled>),
    work: (Sender<Work>, Receiver<Work>),
    /// The next chunk of an ingest.
    background: (Sender<CompileJob>, Receiver<CompileJob>),
}

impl Channels {
    fn new(config: &Config) -> Self {
        Self {
            retrieve: bounded(config.queue),
            ingest: bounded(1),
            load: bounded(config.queue + 8),
            reads: bounded(LOADS_MAX),
            compiled: bounded(2 * LOADS_MAX + 8),
            work: bounded(WORK_MAX),
            background: bounded(1),
        }
    }
}

fn engine(
    config: &Config,
    segment: &Segment,
    done: Sender<ReadDone>,
) -> Result<Arc<dyn ReadEngine>, LoaderError> {
    let kind = match config.io_engine {
        IoEngine::Auto => EngineKind::Auto,
        IoEngine::Uring => EngineKind::Uring,
        IoEngine::Pread => EngineKind::Pread,
    };
    let (engine, note) = open_engine(kind, config.io_depth, segment.region(), done)?;
    if let Some(note) = note {
        tracing::warn!("{note}");
    }
    tracing::info!("reading with {}; kernels: {}", engine.describe(), Isa::detect().name());
    Ok(engine)
}

/// Connects everything.
pub(crate) fn threads(
    config: &Config,
    options: Options,
    opened: Opened,
) -> Result<Threads, LoaderError> {
    let Channels { retrieve, ingest, load, reads, compiled, work, background } =
        Channels::new(config);
    let engine = engine(config, &opened.segment, reads.0)?;
    let sessions = Arc::new(Sessions::default());
    let resident = Arc::new(AtomicU64::new(0));
    let observer = Arc::new(Observer {
        core: Arc::clone(&opened.core),
        sessions: Arc::clone(&sessions),
        engine: engine.describe().to_owned(),
        resident: Arc::clone(&resident),
        admitted: Arc::new(AtomicU64::new(0)),
    });
    let gateway = Gateway {
        observer,
        retrieve: retrieve.0,
        ingest: ingest.0,
        load: load.0.clone(),
        queue: Arc::new(Semaphore::new(config.queue)),
        serial: (!config.overlap).then(|| Arc::new(Mutex::new(()))),
    };
    let core = &opened.core;
    let session = SessionThread {
        sessions: Arc::clone(&sessions),
        header: Arc::clone(&opened.header),
        segment: opened.segment.name().to_owned(),
        geometry: core.geometry,
        fingerprint: core.fingerprint,
        shape: core.model.kv_shape(),
        runtime: config.runtime_dir.clone(),
        spawn: options.spawn_decoder,
    };
    let prefix = Arc::clone(&opened.prefix);
    let compute = Compute {
        core: Arc::clone(core),
        prefix: Arc::clone(&prefix),
        sessions,
        work: work.1,
        background: background.1,
        compiled: compiled.0,
    };
    let channels = LoadChannels {
        messages: load.1,
        reads: reads.1,
        compiled: compiled.1,
        compute: work.0,
        background: background.0,
    };
    let loading = Load::new(Arc::clone(core), prefix, engine, channels, resident);
    let specs = specs(opened, loading, compute, session, retrieve.1, ingest.1, &load.0);
    Ok(Threads { specs, gateway })
}

/// What `load` and `compute` hold cannot be rebuilt after a panic (slots, replies), so the process
/// ends then and `matkv up`, or the service manager, starts both again. `retrieve` and `ingest`
/// hold one request each, which fails; they are restarted.
fn specs(
    opened: Opened,
    load: Load,
    compute: Compute,
    session: SessionThread,
    incoming: Receiver<Incoming>,
    ingests: Receiver<IngestSession>,
    to_load: &Sender<LoadMessage>,
) -> Vec<ThreadSpec> {
    let (retriever, ingester) = (Arc::clone(&opened.core), Arc::clone(&opened.core));
    let (from_retrieve, from_ingest) = (to_load.clone(), to_load.clone());
    let load = std::sync::Mutex::new(load);
    let Opened { pool, segment, runtime_lock, .. } = opened;
    let keep = (segment, runtime_lock);
    vec![
        ThreadSpec::new("load", Policy::Fatal, move |stop| {
            let _outlives_the_threads = &keep;
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
            retrieve::run(&retriever, &incoming, &from_retrieve, &stopped(&stop));
            Ok(())
        }),
        ThreadSpec::new("ingest", Policy::Restart { times: 100 }, move |stop| {
            ingest::run(&ingester, &ingests, &from_ingest, &stopped(&stop));
            Ok(())
        }),
        ThreadSpec::new("session", Policy::Fatal, move |stop| session.run(&stop)),
    ]
}
