//! The process: what is opened, in which order.

use std::path::Path;
use std::sync::Arc;

use matkv_config::Config;
use matkv_model::{LanguageModel, ModelHeader, PULLABLE, Phase, PromptTexts, Team, model_path};
use matkv_retrieve::{Chunker, Embedder, HannoyIndex};
use matkv_ring::{Geometry, Header};
use matkv_store::{Identity, Store};
use matkv_sys::{FileLock, Segment, bind_thread, check_cores, trim_heap};
use matkv_types::Encoding;

use crate::arena::{Arena, ChunkSlot};
use crate::chunk_spec::ChunkSpec;
use crate::compile::compile_prefix;
use crate::core::Core;
use crate::error::LoaderError;
use crate::rates::Rates;
use crate::self_test::SelfTest;
use crate::serve::{Signals, serve};
use crate::session_thread::DecoderChild;
use crate::store_options::store_options;

/// How the loader was started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Command that starts a decoder; the loader then keeps one alive.
    pub spawn_decoder: Option<Vec<String>>,
}

/// What must live as long as the process.
pub(crate) struct Opened {
    pub core: Arc<Core>,
    pub header: Arc<Header>,
    pub segment: Segment,
    pub prefix: Arc<ChunkSlot>,
    pub runtime_lock: Option<FileLock>,
    pub child: Option<DecoderChild>,
}

/// Runs until a signal or a fatal error.
///
/// # Errors
/// What keeps the loader from starting, or the thread it cannot do without.
pub fn run(config: &Config, options: Options) -> Result<(), LoaderError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| LoaderError::Setup(e.to_string()))?;
    // From here on a signal waits until everything is open, and is then obeyed in order: the
    // default action would leave the segment behind.
    let signals = {
        let _context = runtime.enter();
        Signals::listen().map_err(|e| LoaderError::Setup(e.to_string()))?
    };
    let opened = open(config, options)?;
    let outcome = runtime.block_on(serve(config, opened, signals));
    // A thread that hangs in a device must not keep a process that has been told to stop.
    runtime.shutdown_background();
    outcome
}

fn open(config: &Config, options: Options) -> Result<Opened, LoaderError> {
    let setup = |e: &dyn std::fmt::Display| LoaderError::Setup(e.to_string());
    std::fs::create_dir_all(&config.runtime_dir).map_err(|e| {
        LoaderError::Setup(format!("cannot create {}: {e}", config.runtime_dir.display()))
    })?;
    let runtime_lock = FileLock::acquire(&config.runtime_dir.join("LOCK"))?;
    sweep(&config.runtime_dir);
    let (model, embedder, child) = models(config, options)?;
    let prefix_tokens = prefix_tokens(&model, config)?;
    let identity = identity(&model, &prefix_tokens, config);
    let (shape, fingerprint) = (identity.shape, identity.fingerprint);
    let store = Store::open(store_options(config)?, identity)?;
    let index = Box::new(HannoyIndex::open(&store)?);
    let geometry = Geometry::new(config.arena_bytes as usize);
    let segment = Segment::create(&segment_name(&config.runtime_dir), geometry.segment_bytes())?;
    tracing::info!(
        "arena of {}, {} in huge pages",
        matkv_config::format_bytes(segment.region().len() as u64),
        matkv_config::format_bytes(segment.huge_bytes() as u64)
    );
    let header = Header::initialize(segment.region(), geometry, fingerprint, 0)?;
    let arena = Arena::new(segment.region(), geometry.arena());
    let team = compute_team(config)?;
    let prefix = team.install(|| compile_prefix(&model, &prefix_tokens, &arena))?;
    let chunker = Chunker::new(config.chunk_size, config.chunk_overlap).map_err(|e| setup(&e))?;
    tracing::info!(
        "model {} ({} packed), prefix of {} tokens, fingerprint {}",
        config.model,
        matkv_config::format_bytes(model.weight_bytes() as u64),
        prefix_tokens.len(),
        &fingerprint.to_string()[..16]
    );
    let prefix_tokens_len = prefix_tokens.len();
    let core = Core {
        config: config.clone(),
        model: Arc::clone(&model),
        store,
        index,
        embedder,
        team,
        chunker,
        prefix: prefix_tokens,
        spec: ChunkSpec {
            fingerprint,
            shape,
            encoding: Encoding::new(config.storage_dtype, config.storage_codec),
            level: config.storage_level as i32,
            base_position: prefix_tokens_len,
        },
        arena,
        geometry,
        self_test: SelfTest::new(&model, fingerprint).map_err(LoaderError::Setup)?,
        rates: Rates::new(config.io_patience),
    };
    core.team.install(|| SelfTest::prepare(&core, &prefix));
    Ok(Opened {
        core: Arc::new(core),
        header: Arc::new(header),
        segment,
        prefix: Arc::new(prefix),
        runtime_lock: Some(runtime_lock),
        child,
    })
}

/// Opens the models, and has the decoder open its own at the same time. What is wrong with a file
/// is said first, once.
fn models(
    config: &Config,
    options: Options,
) -> Result<(Arc<LanguageModel>, Embedder, Option<DecoderChild>), LoaderError> {
    let path = model_path(&config.cache_dir, &config.model)?;
    let embedder_path = model_path(&config.cache_dir, PULLABLE[1].name)?;
    let header = ModelHeader::read(&path)?;
    let child = options.spawn_decoder.map(DecoderChild::start);
    let (model, embedder) = std::thread::scope(|scope| {
        let directory = embedder_path.parent().unwrap_or(Path::new("."));
        let embedder = scope.spawn(|| Embedder::open(directory, config.precision));
        let cache = Some(config.cache_dir.as_path());
        let model = LanguageModel::load(header, cache, config.precision, Phase::Prefill);
        (model, embedder.join())
    });
    let model = Arc::new(model?);
    let embedder = embedder.map_err(|_| LoaderError::Setup("the embedder panicked".into()))??;
    trim_heap();
    Ok((model, embedder, child))
}

/// Whose chunks are read and written.
fn identity(model: &LanguageModel, prefix: &[u32], config: &Config) -> Identity {
    Identity {
        fingerprint: model.fingerprint(prefix),
        shape: model.kv_shape(),
        base_position: prefix.len(),
        model: config.model.clone(),
    }
}

fn compute_team(config: &Config) -> Result<Team, LoaderError> {
    let cores = config.loader_cores.clone();
    check_cores(&cores).map_err(|e| LoaderError::Setup(format!("threads.loader_cores: {e}")))?;
    // They have just been tried.
    let start = move |i| drop(bind_thread(&cores, i));
    Team::with_start(Config::threads(config.loader_threads), "compute", start)
        .map_err(|e| LoaderError::Setup(format!("compute threads: {e}")))
}

/// The prefix of every prompt, if it leaves room for a chunk.
fn prefix_tokens(model: &LanguageModel, config: &Config) -> Result<Vec<u32>, LoaderError> {
    let texts =
        PromptTexts { system: config.system.clone(), introduction: config.introduction.clone() };
    let prefix = model.prefix(&texts)?;
    let (context, needed) = (model.config.context_length, prefix.len() + config.chunk_size);
    if needed < context {
        return Ok(prefix);
    }
    Err(LoaderError::Setup(format!(
        "prefix and one chunk take {needed} tokens, the model's context has {context}; lower \
         chunker.chunk_size"
    )))
}

/// Removes sockets of the control channel that a killed process left: directories named `.tmp…`
/// where the runtime directory is also the temporary one. The runtime lock is ours.
fn sweep(runtime: &Path) {
    if std::env::temp_dir() != runtime {
        return;
    }
    let Ok(entries) = std::fs::read_dir(runtime) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(".tmp") {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// One name per runtime directory: a restarted loader replaces what a killed one left.
pub(crate) fn segment_name(runtime: &Path) -> String {
    let path = runtime.canonicalize().unwrap_or_else(|_| runtime.to_owned());
    let digest = matkv_types::LengthPrefixedHasher::default()
        .part(path.as_os_str().as_encoded_bytes())
        .finish();
    format!("matkv-{}", &digest.to_string()[..16])
}
