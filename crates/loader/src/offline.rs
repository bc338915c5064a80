//! The store without a loader: for an operator's commands while nothing runs.

use matkv_config::{Config, IoEngine};
use matkv_model::{Detokenizer, LanguageModel, PULLABLE, Phase, model_path};
use matkv_retrieve::{Embedder, HannoyIndex, VectorIndex};
use matkv_store::{Identity, RebuildReport, StoreError};

use matkv_model::{Message, PromptTexts, Role};
pub use matkv_store::Store;
use matkv_store::{DocumentRecord, NewChunk, Placement};
use matkv_sys::{EngineKind, EngineOptions, FileLock};
use matkv_types::{ChunkId, ContentId, Encoding};

use crate::error::LoaderError;
use crate::store_options::store_options;

/// Vectors added in one step.
const VECTORS_MAX: usize = 1024;

/// Opens the store of the configuration. Which identity, its directory says, if there is only
/// one; else `fingerprint` chooses, by its first digits.
///
/// # Errors
/// If a loader has the store open, or there is no such identity.
pub fn open(config: &Config, fingerprint: Option<&str>) -> Result<Store, LoaderError> {
    Ok(Store::open(store_options(config)?, choose(config, fingerprint)?)?)
}

/// Which of the identities in the store's directory is meant.
fn choose(config: &Config, fingerprint: Option<&str>) -> Result<Identity, LoaderError> {
    let none = || {
        let dir = config.store_dir.display();
        LoaderError::Setup(format!("there is no store in {dir}; ingest something first"))
    };
    if !config.store_dir.is_dir() {
        return Err(none());
    }
    let wanted = |i: &Identity| fingerprint.is_none_or(|f| i.directory().starts_with(f));
    let mut found: Vec<Identity> =
        Identity::list(&config.store_dir)?.into_iter().filter(wanted).collect();
    if found.len() > 1 {
        let of_model: Vec<Identity> =
            found.iter().filter(|i| i.model == config.model).cloned().collect();
        if of_model.len() == 1 {
            found = of_model;
        }
    }
    match found.as_slice() {
        [identity] => Ok(identity.clone()),
        [] => Err(none()),
        several => {
            let list: Vec<String> =
                several.iter().map(|i| format!("{} ({})", i.directory(), i.model)).collect();
            Err(LoaderError::Setup(format!(
                "there are several stores in {}: {}; choose one with --fingerprint",
                config.store_dir.display(),
                list.join(", ")
            )))
        }
    }
}

/// Builds the index of a store anew from its files. The old one is kept beside it.
///
/// # Errors
/// If a loader has the store open, or a device fails.
pub fn rebuild_index(
    config: &Config,
    fingerprint: Option<&str>,
) -> Result<RebuildReport, LoaderError> {
    let setup = |e: &dyn std::fmt::Display| LoaderError::Setup(e.to_string());
    let path = model_path(&config.cache_dir, &config.model)?;
    let embedder_path = model_path(&config.cache_dir, PULLABLE[1].name)?;
    let directory = embedder_path.parent().unwrap_or(std::path::Path::new("."));
    let embedder = Embedder::open(directory, config.precision)?;
    let model =
        LanguageModel::open_for(&path, Some(&config.cache_dir), config.precision, Phase::Prefill)?;
    // The index may be beyond opening: that is what this is for.
    let identity = choose(config, fingerprint)?;
    let lock = FileLock::acquire(&config.store_dir.join("LOCK"))?;
    let dir = config.store_dir.join(identity.directory());
    let old = (0..).map(|n| dir.join(format!("index.old-{n}"))).find(|p| !p.exists());
    if let Some(old) = old {
        match std::fs::rename(dir.join("index"), &old) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(setup(&e)),
            _ => {}
        }
    }
    drop(lock);
    let store = Store::open(store_options(config)?, identity)?;
    let index = HannoyIndex::open(&store)?;
    let mut vectors: Vec<(u32, Vec<f32>)> = Vec::new();
    let mut embed = |txn: &mut matkv_store::WriteTxn<'_>, tokens: &[u32]| {
        let text = Detokenizer::text(&model.tokenizer, tokens);
        let refused = |e: &dyn std::fmt::Display| StoreError::Refused(e.to_string());
        let Some(vector) = embedder.embed(&text).map_err(|e| refused(&e))? else {
            return Ok(None);
        };
        let number = txn.next_vector()?;
        vectors.push((number, vector));
        Ok(Some(number))
    };
    let report = store.rebuild(&mut embed)?;
    // The graph is built in few large steps; a crash before the end asks for another rebuild.
    for part in vectors.chunks(VECTORS_MAX) {
        let mut txn = store.write()?;
        index.update(&mut txn, part, &[])?;
        txn.commit()?;
    }
    Ok(report)
}

/// How the configuration wants files to be read.
pub fn engine_options(config: &Config) -> EngineOptions {
    EngineOptions {
        kind: match config.io_engine {
            IoEngine::Auto => EngineKind::Auto,
            IoEngine::Uring => EngineKind::Uring,
            IoEngine::Pread => EngineKind::Pread,
        },
        depth: config.io_depth,
        block: config.io_block as usize,
        sqpoll: config.io_sqpoll,
    }
}

/// The configured model, and the prefix of every prompt.
///
/// # Errors
/// If the model cannot be opened.
pub fn model(config: &Config) -> Result<(LanguageModel, Vec<u32>), LoaderError> {
    let path = model_path(&config.cache_dir, &config.model)?;
    let model =
        LanguageModel::open_for(&path, Some(&config.cache_dir), config.precision, Phase::Prefill)?;
    let texts =
        PromptTexts { system: config.system.clone(), introduction: config.introduction.clone() };
    let prefix = model.prefix(&texts)?;
    Ok((model, prefix))
}

/// The tokens of a question after the documents.
///
/// # Errors
/// If the template refuses it.
pub fn rest(model: &LanguageModel, question: &str) -> Result<Vec<u32>, LoaderError> {
    let message = Message { role: Role::User, content: question.to_owned() };
    Ok(model.rest(&[message])?)
}

/// Enters so many small chunks into an index, without files: for measurements of a start.
///
/// # Errors
/// If the index fails.
pub fn fill_index(store: &Store, count: u64) -> Result<(), String> {
    /// Chunks of a document, and of a change.
    const STEP: u64 = 1000;
    let text = |e: StoreError| e.to_string();
    for first in (0..count).step_by(STEP as usize) {
        let mut txn = store.write().map_err(text)?;
        let mut chunks = Vec::new();
        for n in first..(first + STEP).min(count) {
            let tokens: Vec<u32> = (0..16).map(|i| (n * 31 + i) as u32).collect();
            let content = ContentId::of_tokens(&[n as u32, (n >> 32) as u32, 7]);
            let id = ChunkId::new(store.identity().fingerprint, "start", content);
            let (encoding, bytes, checksum) = (Encoding::EXACT, 8192, 0);
            let flash = Some(Placement { encoding, bytes, physical: bytes, checksum });
            let (cold, vector, compute_ms) = (None, None, 20);
            let new = NewChunk { id, tokens, flash, cold, vector, compute_ms };
            txn.put_chunk(&new).map_err(text)?;
            chunks.push(id);
        }
        let content = ContentId::of_tokens(&[first as u32]);
        let (bytes, tokens, ingested_at) = (0, 16 * STEP, 0);
        let id = format!("start-{first}");
        let record = DocumentRecord { id, content, bytes, tokens, chunks, ingested_at };
        txn.put_documents(&[&record]).map_err(text)?;
        txn.commit().map_err(text)?;
    }
    Ok(())
}
