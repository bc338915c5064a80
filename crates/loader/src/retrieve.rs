//! The `retrieve` thread: embed the question, find chunks, plan the prompt.

use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, select_biased};
use matkv_actors::Pulse;
use matkv_model::{Message, Role};
use matkv_store::ReadTxn;
use matkv_telemetry::trace;
use matkv_types::{ChunkId, FinishReason};

use crate::core::Core;
use crate::error::RequestError;
use crate::plan::Plan;
use crate::request::{Ask, ChunkSource, ChunkUse, NearChunk, Planned, RequestState, ms_since};
use crate::together::Together;
use crate::world::LoadMessage;

/// A request from the gateway.
pub(crate) struct Incoming {
    pub ask: Ask,
    pub state: Arc<RequestState>,
}

/// Ends the request if planning it panics; the thread is restarted for the others.
struct EndOnPanic(Arc<RequestState>);

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end(Err(RequestError::Internal("planning the request panicked".into())));
        }
    }
}

/// Runs until stopped, or until the gateway is gone.
pub(crate) fn run(
    core: &Core,
    incoming: &Receiver<Incoming>,
    load: &Sender<LoadMessage>,
    stopped: &Receiver<()>,
    pulse: &Pulse,
) {
    let mut together = Together::default();
    loop {
        pulse.rest();
        let request = select_biased! {
            recv(stopped) -> _ => return,
            recv(incoming) -> request => match request {
                Ok(request) => request,
                Err(_) => return,
            },
        };
        pulse.step();
        let _guard = EndOnPanic(Arc::clone(&request.state));
        handle(core, request, load, &mut together);
    }
}

fn handle(core: &Core, request: Incoming, load: &Sender<LoadMessage>, together: &mut Together) {
    let state = Arc::clone(&request.state);
    if state.is_cancelled() {
        return state.end(Ok(FinishReason::Cancelled));
    }
    state.update(|p| p.phases.queue_ms = ms_since(state.received));
    match plan(core, request, together) {
        Ok(planned) => {
            if load.send(LoadMessage::Request(Box::new(planned))).is_err() {
                state.end(Err(RequestError::Unavailable("the loader is stopping".into())));
            }
        }
        Err(e) => state.end(Err(e)),
    }
}

fn internal(e: impl std::fmt::Display) -> RequestError {
    RequestError::Internal(e.to_string())
}

fn plan(core: &Core, request: Incoming, together: &mut Together) -> Result<Planned, RequestError> {
    let Incoming { ask, state } = request;
    let started = Instant::now();
    let _span = trace::span("retrieve", "retrieve", state.number);
    let rest = core.model.rest(&ask.messages).map_err(|e| RequestError::Invalid(e.to_string()))?;
    let answer = ask.sampling.max_new_tokens as usize;
    let room = room_for_chunks(core, rest.len(), answer)?;
    let (mut chunks, near) = find_chunks(core, &ask, together)?;
    state.update(|p| p.phases.retrieve_ms = ms_since(started));
    let dropped = drop_last(&mut chunks, room);
    for (_, chunk) in chunks.iter_mut().enumerate().filter(|(i, _)| !ask.mode.reads(*i)) {
        chunk.source = ChunkSource::Vanilla;
    }
    let plan = Plan::new(ask.mode, &core.prefix, &chunks, &rest, answer);
    Ok(Planned {
        state,
        chunks,
        dropped,
        mode: ask.mode,
        plan,
        sampling: ask.sampling,
        return_logits: ask.return_logits,
        cold: ask.cold,
        recompute: false,
        near,
        urgent: false,
        earlier: core.config.earlier_prompts && !ask.cold,
    })
}

/// Tokens of the context that chunks may take; a question that leaves none is refused before
/// anything is searched for it.
fn room_for_chunks(core: &Core, rest: usize, answer: usize) -> Result<usize, RequestError> {
    let context = core.model.config.context_length;
    let fixed = core.prefix.len() + rest + answer;
    if fixed > context {
        return Err(RequestError::Invalid(format!(
            "the question needs {fixed} tokens ({} of prefix, {rest} of its own, {answer} for the \
             answer), the model's context has {context}; shorten it or lower max_new_tokens",
            core.prefix.len()
        )));
    }
    Ok(context - fixed)
}

/// Drops chunks of the lowest rank until the others fit.
fn drop_last(chunks: &mut Vec<ChunkUse>, room: usize) -> Vec<ChunkId> {
    let mut used: usize = chunks.iter().map(|c| c.tokens.len()).sum();
    let mut dropped = Vec::new();
    while used > room
        && let Some(last) = chunks.pop()
    {
        used -= last.tokens.len();
        dropped.push(last.id);
    }
    dropped
}

/// The request's chunks, and those that may be asked for next: what was used together with them
/// before, then what lies next to the question.
fn find_chunks(
    core: &Core,
    ask: &Ask,
    together: &mut Together,
) -> Result<(Vec<ChunkUse>, Vec<NearChunk>), RequestError> {
    let read = core.store.read().map_err(internal)?;
    let explicit = !ask.chunk_ids.is_empty() || !ask.document_ids.is_empty();
    let mut ranked = if explicit { named(&read, ask)? } else { search(core, &read, ask)? };
    let next = if explicit { Vec::new() } else { ranked.split_off(ask.top_k.min(ranked.len())) };
    let ids: Vec<ChunkId> = ranked.iter().map(|r| r.0).collect();
    let mut near = Vec::new();
    let most = if core.config.prefetch { core.config.prefetch_max } else { 0 };
    let partners = together.partners(&ids).into_iter();
    for id in partners.chain(next.into_iter().map(|n| n.0)) {
        if near.len() < most
            && !ids.contains(&id)
            && !near.iter().any(|n: &NearChunk| n.id == id)
            && let Some(tokens) = read.tokens(&id).map_err(internal)?
        {
            near.push(NearChunk { id, tokens: tokens.into() });
        }
    }
    together.used(&ids);
    let mut out = Vec::with_capacity(ranked.len());
    for (id, score) in ranked {
        let tokens = read.tokens(&id).map_err(internal)?;
        let tokens = tokens.ok_or_else(|| RequestError::NotFound(format!("no chunk {id}")))?;
        // Where the chunk is from, for people to read: what they named, if they did.
        let place = read.place(&id, &ask.document_ids).map_err(internal)?;
        let (document, ordinal) = place.unwrap_or_default();
        let source = ChunkSource::Flash;
        out.push(ChunkUse { id, document, ordinal, tokens: tokens.into(), score, source });
    }
    Ok((out, near))
}

fn named(read: &ReadTxn<'_>, ask: &Ask) -> Result<Vec<(ChunkId, f32)>, RequestError> {
    let mut ids = ask.chunk_ids.clone();
    for name in &ask.document_ids {
        let document = read.document(name).map_err(internal)?;
        let document =
            document.ok_or_else(|| RequestError::NotFound(format!("no document {name:?}")))?;
        ids.extend(document.chunks);
    }
    let mut seen = std::collections::HashSet::new();
    Ok(ids.into_iter().filter(|id| seen.insert(*id)).map(|id| (id, 0.0)).collect())
}

fn search(core: &Core, read: &ReadTxn<'_>, ask: &Ask) -> Result<Vec<(ChunkId, f32)>, RequestError> {
    let question = last_question(&ask.messages);
    if ask.top_k == 0 {
        return Ok(Vec::new());
    }
    let Some(query) = core.embed(question).map_err(internal)? else {
        return Ok(Vec::new());
    };
    let more = if core.config.prefetch { core.config.prefetch_max } else { 0 };
    let hits = core.index.search(read, &query, ask.top_k + more).map_err(internal)?;
    let mut out = Vec::with_capacity(hits.len());
    for hit in hits {
        if let Some(id) = read.chunk_of_vector(hit.vector).map_err(internal)? {
            out.push((id, hit.score));
        }
    }
    Ok(out)
}

fn last_question(messages: &[Message]) -> &str {
    let user = messages.iter().rev().find(|m| m.role == Role::User);
    user.map_or("", |m| &m.content)
}
