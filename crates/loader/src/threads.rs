//! The loader's threads: their channels, their order, and what happens when one ends.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};

use crossbeam::channel::{Receiver, Sender, bounded, never};
use matkv_actors::{Policy, StopFlag, ThreadSpec};
use matkv_config::Config;
use matkv_kernels::Isa;
use matkv_store::Breaker;
use matkv_sys::{REQUESTS_MAX, ReadDone, ReadEngine, Segment, bind_thread, open_engine};
use tokio::sync::Semaphore;

use crate::arena::{Arena, ChunkSlot};
use crate::compile::{CompileJob, Compiled};
use crate::compute::{Compute, WORK_MAX};
use crate::core::Core;
use crate::error::LoaderError;
use crate::gateway::{Gateway, Tracing};
use crate::groups::Groups;
use crate::ingest::{self, IngestSession};
use crate::keeper::{self, KeeperMessage, NOTES_MAX};
use crate::load::Load;
use crate::load_thread::{self, LoadChannels, Process, STORES_MAX};
use crate::offline::engine_options;
use crate::onboard::{self, Fetched, OnboardInlets, OnboardOutlets, Onboarding};
use crate::request::{Materialized, Resident};
use crate::retrieve::{self, Incoming};
use crate::run::Opened;
use crate::session::Sessions;
use crate::session_thread::SessionThread;
use crate::status::Observer;
use crate::store_options::policy;
use crate::throttled::Throttled;
use crate::world::{LOADS_MAX, LoadJob, LoadMessage, Loaded};

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
    /// Every load that can be under way: beginning one never waits.
    starts: (Sender<LoadJob>, Receiver<LoadJob>),
    /// Every read that can be under way: completing one never waits.
    reads: (Sender<ReadDone>, Receiver<ReadDone>),
    /// The same for the cold tier, whose threads must not wait either.
    fetched: (Sender<Fetched>, Receiver<Fetched>),
    /// And for loads that are verified and decoded.
    loaded: (Sender<Loaded>, Receiver<Loaded>),
    /// News for the keeper; when it is behind, the rest is dropped.
    keeper: (Sender<KeeperMessage>, Receiver<KeeperMessage>),
    /// Every compilation that can be under way: the compute thread never waits here.
    compiled: (Sender<Compiled>, Receiver<Compiled>),
    /// Requests ready to be computed: what waits here holds memory.
    requests: (Sender<Box<Resident>>, Receiver<Box<Resident>>),
    /// Every chunk a request may wait for: the load thread never waits here.
    chunks: (Sender<CompileJob>, Receiver<CompileJob>),
    /// The next chunk of an ingest.
    background: (Sender<CompileJob>, Receiver<CompileJob>),
    /// Recomputed chunks: what waits here holds memory, and one too many is not stored.
    store: (Sender<Materialized>, Receiver<Materialized>),
}

impl Channels {
    fn new(config: &Config) -> Self {
        Self {
            retrieve: bounded(config.queue),
            ingest: bounded(1),
            load: bounded(config.queue + 8),
            starts: bounded(REQUESTS_MAX),
            reads: bounded(REQUESTS_MAX),
            fetched: bounded(REQUESTS_MAX),
            loaded: bounded(REQUESTS_MAX),
            keeper: bounded(NOTES_MAX),
            compiled: bounded(2 * LOADS_MAX + 8),
            requests: bounded(WORK_MAX),
            chunks: bounded(LOADS_MAX),
            background: bounded(1),
            store: bounded(STORES_MAX),
        }
    }
}

fn engine(
    config: &Config,
    segment: &Segment,
    done: Sender<ReadDone>,
) -> Result<Arc<dyn ReadEngine>, LoaderError> {
    let options = engine_options(config);
    if config.io_throttle > 0 {
        tracing::warn!("io.throttle: reading at {} bytes a second", config.io_throttle);
        return Ok(Arc::new(Throttled::new(config.io_throttle, done)));
    }
    let (engine, note) = open_engine(options, segment.region(), done)?;
    if let Some(note) = note {
        tracing::warn!("{note}");
    }
    tracing::info!("reading with {}; kernels: {}", engine.describe(), Isa::detect().name());
    Ok(engine)
}

fn machine(
    core: &Core,
    prefix: &Arc<ChunkSlot>,
    process: Process,
) -> Result<Load<Process>, LoaderError> {
    let (policy, prefix) = (policy(&core.config.arena_policy)?, Arc::clone(prefix));
    Ok(Load::new(core.spec.clone(), &core.arena, prefix, policy, process))
}

/// Without overlap: the door, and what signals that a group may go on.
fn groups(config: &Config, arena: &Arc<Arena>) -> Option<(Arc<Groups>, Receiver<()>)> {
    if config.overlap {
        return None;
    }
    // One signal is as good as many.
    let (changed, regrouped) = bounded(1);
    let arena = Arc::clone(arena);
    let wake = move || {
        arena.signal();
        let _ = changed.try_send(());
    };
    Some((Groups::new(config.batch_size, wake), regrouped))
}

fn session_thread(config: &Config, opened: &mut Opened, sessions: &Arc<Sessions>) -> SessionThread {
    let core = &opened.core;
    SessionThread {
        sessions: Arc::clone(sessions),
        header: Arc::clone(&opened.header),
        segment: opened.segment.name().to_owned(),
        geometry: core.geometry,
        fingerprint: core.spec.fingerprint,
        shape: core.spec.shape,
        runtime: config.runtime_dir.clone(),
        stall: config.stall,
        child: opened.child.take().map(std::sync::Mutex::new),
    }
}

/// Connects everything.
pub(crate) fn threads(config: &Config, mut opened: Opened) -> Result<Threads, LoaderError> {
    let Channels {
        retrieve,
        ingest,
        load,
        starts,
        reads,
        fetched,
        loaded,
        keeper,
        compiled,
        requests,
        chunks,
        background,
        store,
    } = Channels::new(config);
    let engine = engine(config, &opened.segment, reads.0)?;
    let sessions = Arc::new(Sessions::new(load.0.clone()));
    let core = &opened.core;
    let (read, running) = (engine.describe().into(), Arc::clone(&sessions));
    let observer = Arc::new(Observer::new(Arc::clone(core), running, read));
    let resident = Arc::clone(&observer.resident);
    let (groups, regrouped) = groups(config, &core.arena).unzip();
    let gateway = Gateway {
        observer,
        retrieve: retrieve.0,
        ingest: ingest.0,
        load: load.0.clone(),
        queue: Arc::new(Semaphore::new(config.queue)),
        header: Arc::clone(&opened.header),
        tracing: Tracing::default(),
        groups: groups.clone(),
    };
    let session = session_thread(config, &mut opened, &sessions);
    let (core, prefix) = (&opened.core, &opened.prefix);
    let compute = Compute {
        core: Arc::clone(core),
        prefix: Arc::clone(prefix),
        sessions,
        requests: requests.1,
        regrouped: regrouped.unwrap_or_else(never),
        chunks: chunks.1,
        background: background.1,
        load: load.0.clone(),
        compiled: compiled.0,
    };
    let (shelf, decoders) = (Arc::clone(core), Config::threads(config.io_threads));
    let outlets =
        OnboardOutlets { starts: starts.0, fetched: fetched.0, loaded: loaded.0, keeper: keeper.0 };
    let onboarding = Arc::new(Onboarding::new(shelf, engine, outlets, decoders)?);
    let onboard = OnboardInlets { starts: starts.1, reads: reads.1, fetched: fetched.1 };
    let channels = LoadChannels { messages: load.1, loaded: loaded.1, compiled: compiled.1 };
    let process = Process {
        core: Arc::clone(core),
        onboarding: Arc::clone(&onboarding),
        sessions: Arc::clone(&compute.sessions),
        groups,
        flash_breaker: Breaker::default(),
        prefill: requests.0,
        compile: chunks.0,
        background: background.0,
        store: store.0,
    };
    let loading = Loading { machine: machine(core, prefix, process)?, channels, resident };
    let (incoming, ingests, stores, notes) = (retrieve.1, ingest.1, store.1, keeper.1);
    let inlets = Inlets { incoming, ingests, stores, notes };
    let mut specs = specs(opened, loading, compute, session, inlets, &load.0);
    specs.extend(workers(config, &onboarding, &onboard));
    Ok(Threads { specs, gateway })
}

/// What the load thread runs on.
struct Loading {
    machine: Load<Process>,
    channels: LoadChannels,
    resident: Arc<AtomicU64>,
}

/// Where the threads that can be restarted get their work.
struct Inlets {
    incoming: Receiver<Incoming>,
    ingests: Receiver<IngestSession>,
    stores: Receiver<Materialized>,
    notes: Receiver<KeeperMessage>,
}

/// Threads that verify and decode. A load that one of them held when it panicked is given up at
/// its deadline.
fn workers(
    config: &Config,
    onboarding: &Arc<Onboarding>,
    inlets: &OnboardInlets,
) -> Vec<ThreadSpec> {
    let worker = |_| {
        let (onboarding, inlets) = (Arc::clone(onboarding), inlets.clone());
        // Not watched: they open files, and a device may hang while the arena still serves.
        ThreadSpec::new("onboard", Policy::Restart { times: 100 }, move |stop, _| {
            onboard::run(&onboarding, &inlets, &stopped(&stop));
            Ok(())
        })
    };
    (0..Config::threads(config.io_threads)).map(worker).collect()
}

/// What `load` and `compute` hold cannot be rebuilt after a panic (slots, replies), so the process
/// ends then and `matkv up`, or the service manager, starts both again. `retrieve` and `ingest`
/// hold one request each, which fails; they are restarted.
fn specs(
    opened: Opened,
    load: Loading,
    compute: Compute,
    session: SessionThread,
    inlets: Inlets,
    to_load: &Sender<LoadMessage>,
) -> Vec<ThreadSpec> {
    let Inlets { incoming, ingests, stores, notes } = inlets;
    let (kept, from_keeper) = (Arc::clone(&opened.core), to_load.clone());
    let (retriever, ingester) = (Arc::clone(&opened.core), Arc::clone(&opened.core));
    let storer = Arc::clone(&opened.core);
    let (from_retrieve, from_ingest) = (to_load.clone(), to_load.clone());
    let load = std::sync::Mutex::new(load);
    let (computing, keep) = (Arc::clone(&opened.core), opened.segment);
    vec![
        ThreadSpec::new("load", Policy::Fatal, move |stop, pulse| {
            let _outlives_the_threads = &keep;
            let signal = stopped(&stop);
            let mut load = load.lock().map_err(|e| e.to_string())?;
            let Loading { machine, channels, resident } = &mut *load;
            load_thread::run(machine, channels, resident, &stop, &signal, pulse)
        }),
        ThreadSpec::new("compute", Policy::Fatal, move |stop, pulse| {
            let signal = stopped(&stop);
            bind_thread(&computing.config.loader_cores, 0).map_err(|e| e.to_string())?;
            computing.team.install(|| compute.run(&stop, &signal, pulse));
            Ok(())
        }),
        ThreadSpec::new("retrieve", Policy::Restart { times: 100 }, move |stop, pulse| {
            retrieve::run(&retriever, &incoming, &from_retrieve, &stopped(&stop), pulse);
            Ok(())
        }),
        // These wait for a device that may hang while the arena still serves: not watched.
        ThreadSpec::new("store", Policy::Restart { times: 100 }, move |stop, _| {
            load_thread::store(&storer, &stores, &stopped(&stop));
            Ok(())
        }),
        ThreadSpec::new("keeper", Policy::Restart { times: 100 }, move |stop, _| {
            keeper::run(&kept, &notes, &from_keeper, &stopped(&stop));
            Ok(())
        }),
        ThreadSpec::new("ingest", Policy::Restart { times: 100 }, move |stop, _| {
            ingest::run(&ingester, &ingests, &from_ingest, &stopped(&stop));
            Ok(())
        }),
        ThreadSpec::new("session", Policy::Fatal, move |stop, pulse| session.run(&stop, pulse)),
    ]
}
