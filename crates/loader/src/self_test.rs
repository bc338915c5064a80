//! The self-test behind readiness: a built-in chunk is loaded from flash, a question over it is
//! sub-prefilled and decoded, and the answer must be, bit for bit, that of a full prefill.
//!
//! It runs once in every session, through the same threads as any request: a loader that says it
//! is ready has just answered.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use matkv_model::{Message, Role};
use matkv_types::{ChunkId, ContentId, Fingerprint, FinishReason, Mode, Sampling};

use crate::arena::{ChunkSlot, FillingSlot};
use crate::compile::{Compilation, CompileJob};
use crate::core::Core;
use crate::plan::Plan;
use crate::request::{ChunkSource, ChunkUse, Planned, RequestState};
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
        if core.files_of(&this.id).path(&this.id).exists() {
            return;
        }
        let stored = (|| {
            let len = core.spec.file_len(this.tokens.len());
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
            let chunk = job.finish(core).outcome?;
            core.files_of(&id).write(&id, chunk.file()).map_err(|e| e.to_string())
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
    let reused = answer(core, load, Mode::Linked(0)).await?;
    let computed = answer(core, load, Mode::Vanilla).await?;
    // The arena is for what users ask.
    let _ = load.try_send(LoadMessage::Forget(vec![core.self_test.id]));
    if reused == computed {
        return Ok(());
    }
    Err(format!("with stored KV {:?}, computed anew {:?}", reused.tokens, computed.tokens))
}

async fn answer(core: &Core, load: &Sender<LoadMessage>, mode: Mode) -> Result<Answer, String> {
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
        urgent: true,
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
