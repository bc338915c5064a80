//! The self-test behind readiness: a built-in chunk is loaded from flash, a question over it is
//! sub-prefilled and decoded, and the answer must be, bit for bit, that over the chunk computed
//! anew: with exact rows, that of a full prefill.
//!
//! It runs once in every session, through the same threads as any request: a loader that says it
//! is ready has just answered.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use matkv_model::{Message, Role};
use matkv_types::{ChunkId, ContentId, Fingerprint, FinishReason, KvDtype, Mode, Sampling};

use crate::arena::{ChunkSlot, FillingSlot};
use crate::compile::{Compilation, CompileJob};
use crate::core::Core;
use crate::plan::Plan;
use crate::request::{ChunkSource, ChunkUse, Lease, Materialized, Planned, RequestState};
use crate::world::LoadMessage;

/// The text of the built-in chunk.
const TEXT: &str = "What has been read once is kept, and need not be read again.";
/// The question.
const QUESTION: &str = "What is kept?";
/// A scope no document has.
const SCOPE: &str = "self-test";
/// Tokens decoded: the first is the loader's, the others the decoder's.
const TOKENS: u32 = 3;
/// How long one answer may take.
const LIMIT: Duration = Duration::from_secs(60);

/// The built-in chunk.
#[derive(Clone)]
pub struct SelfTest {
    pub id: ChunkId,
    pub tokens: Arc<[u32]>,
}

/// What an answer is compared by.
#[derive(PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    logits: Vec<u32>,
}

impl SelfTest {
    pub fn new(
        model: &matkv_model::LanguageModel,
        fingerprint: Fingerprint,
    ) -> Result<Self, String> {
        let tokens = model.tokenizer.encode_inner(TEXT).map_err(|e| e.to_string())?;
        let id = ChunkId::new(fingerprint, SCOPE, ContentId::of_tokens(&tokens));
        Ok(Self { id, tokens: tokens.into() })
    }

    /// Puts the chunk on flash if it is not there. A device that is full is no reason not to
    /// serve: the chunk is then computed when it is asked for.
    pub fn prepare(core: &Core, prefix: &ChunkSlot) {
        let this = &core.self_test;
        // It is written again after storage.dtype has changed: what it is compared with has, too.
        let found = core.files_of(&this.id).superblock(&this.id, 0);
        if found.is_ok_and(|f| f.encoding.dtype == core.spec.encoding.dtype) {
            return;
        }
        let stored = (|| {
            let len = core.spec.slot_len(this.tokens.len(), core.spec.form());
            let extent = core.arena.allocate(len).ok_or("there is no room in the arena")?;
            let slot = extent.exclusive().map_err(|e| e.to_string())?;
            let filling = FillingSlot { slot, extent };
            let (id, tokens) = (this.id, Arc::clone(&this.tokens));
            let mut job = Compilation::new(CompileJob {
                id,
                tokens,
                filling,
                for_request: false,
                store: true,
            });
            while !job.step(core, prefix, &mut || true) {}
            let compiled = job.finish(core);
            let lease = Lease::new(Arc::new(compiled.outcome?), &core.arena);
            let (image, compute_ms) = (compiled.image, compiled.compute_ms);
            let chunk = Materialized { lease, image, compute_ms };
            let file = core.on_flash(&chunk).map_err(|e| e.to_string())?;
            core.files_of(&id).write(&id, &file).map_err(|e| e.to_string())
        })();
        if let Err(e) = stored {
            tracing::warn!("the self-test's chunk is not stored: {e}");
        }
    }
}

/// Runs the self-test.
///
/// # Errors
/// What did not work.
pub async fn run(core: &Core, load: &Sender<LoadMessage>) -> Result<(), String> {
    let reused = answer(core, load, Mode::Linked(0), false).await?;
    // Through the same encoder; with exact rows that is a full prefill as well.
    let again = answer(core, load, Mode::Linked(0), true).await?;
    let exact = core.spec.encoding.dtype == KvDtype::Bf16;
    let vanilla = if exact { Some(answer(core, load, Mode::Vanilla, false).await?) } else { None };
    // The arena is for what users ask.
    let _ = load.try_send(LoadMessage::Forget(vec![core.self_test.id]));
    for computed in [Some(again), vanilla].into_iter().flatten() {
        if reused != computed {
            let (stored, anew) = (&reused.tokens, &computed.tokens);
            return Err(format!("with stored KV {stored:?}, computed anew {anew:?}"));
        }
    }
    Ok(())
}

async fn answer(
    core: &Core,
    load: &Sender<LoadMessage>,
    mode: Mode,
    recompute: bool,
) -> Result<Answer, String> {
    let message = Message { role: Role::User, content: QUESTION.into() };
    let rest = core.model.rest(&[message]).map_err(|e| e.to_string())?;
    let SelfTest { id, tokens } = core.self_test.clone();
    let source = if mode == Mode::Vanilla { ChunkSource::Vanilla } else { ChunkSource::Flash };
    let chunks =
        vec![ChunkUse { id, document: SCOPE.into(), ordinal: 0, tokens, score: 0.0, source }];
    let state = RequestState::new();
    let planned = Planned {
        state: Arc::clone(&state),
        plan: Plan::new(mode, &core.prefix, &chunks, &rest, TOKENS as usize),
        chunks,
        dropped: Vec::new(),
        mode,
        sampling: Sampling {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
            max_new_tokens: TOKENS,
            stop: Vec::new(),
        },
        return_logits: true,
        cold: true,
        recompute,
        near: Vec::new(),
        urgent: true,
        earlier: false,
    };
    if load.try_send(LoadMessage::Request(Box::new(planned))).is_err() {
        return Err("the loader has no room for it".into());
    }
    let ended = async {
        loop {
            if let Some(ended) = state.look(|p| p.ended.clone()) {
                return ended;
            }
            state.changed().await;
        }
    };
    let Ok(ended) = tokio::time::timeout(LIMIT, ended).await else {
        state.cancel();
        return Err(format!("no answer in {} s", LIMIT.as_secs()));
    };
    match ended {
        Ok(FinishReason::Length | FinishReason::Stop) => Ok(state.look(|p| Answer {
            tokens: p.tokens.clone(),
            logits: p.started.iter().flat_map(|s| s.logits.iter().map(|l| l.to_bits())).collect(),
        })),
        Ok(other) => Err(format!("it ended with {}", other.as_str())),
        Err(e) => Err(e.to_string()),
    }
}
