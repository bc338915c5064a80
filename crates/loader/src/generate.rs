//! The stream a client sees: started, text as it comes, finished.

use std::sync::Arc;
use std::time::Duration;

use matkv_api::v1::{self, GenerateEvent, generate_event::Event};
use matkv_model::{Detokenizer, StopFilter};
use matkv_telemetry::names;
use matkv_types::{FinishReason, Sampling};
use tokio::sync::mpsc;
use tonic::Status;

use crate::core::Core;
use crate::error::RequestError;
use crate::request::{Phases, RequestState, Started};
use crate::wire;

type Sender = mpsc::Sender<Result<GenerateEvent, Status>>;

/// Cancels the request when the stream's task ends for any reason.
struct CancelOnDrop(Arc<RequestState>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

struct News {
    started: Option<Started>,
    tokens: Vec<u32>,
    ended: Option<Result<FinishReason, RequestError>>,
    phases: Phases,
}

/// Follows a request and tells its client, until its time is over. Reads only copies in this
/// process, so a slow client holds nothing up; one that does not read at all is let go with its
/// deadline.
pub(crate) async fn follow(
    core: Arc<Core>,
    state: Arc<RequestState>,
    sampling: Sampling,
    client: Sender,
    limit: Duration,
) {
    // There is always room for the last word.
    let Ok(last) = client.clone().try_reserve_owned() else { return state.cancel() };
    let ends = tokio::time::Instant::from_std(state.received + limit);
    let told = tell(core, Arc::clone(&state), sampling, client.clone());
    if tokio::time::timeout_at(ends, told).await.is_err() {
        // Dropping the future has cancelled the request, wherever it was.
        metrics::counter!(names::REQUESTS, "outcome" => "deadline").increment(1);
        last.send(Err(RequestError::Deadline(limit).into()));
    }
}

async fn tell(core: Arc<Core>, state: Arc<RequestState>, sampling: Sampling, client: Sender) {
    let _cancel = CancelOnDrop(Arc::clone(&state));
    let mut text = TextStream::new(&sampling);
    let mut started: Option<Started> = None;
    let mut seen = 0;
    loop {
        let news = state.look(|p| News {
            started: if started.is_none() { p.started.clone() } else { None },
            tokens: p.tokens[seen..].to_vec(),
            ended: p.ended.clone(),
            phases: p.phases,
        });
        if let Some(new) = news.started {
            if send(&client, Event::Started(started_event(&new))).await.is_err() {
                return;
            }
            started = Some(new);
        }
        seen += news.tokens.len();
        if let Some(part) = text.push(&core, &news.tokens)
            && send(&client, Event::Text(part)).await.is_err()
        {
            return;
        }
        if let Some(outcome) = news.ended {
            finish(&client, text, outcome, started.unwrap_or_default(), seen, news.phases).await;
            return;
        }
        tokio::select! {
            () = state.changed() => {}
            () = client.closed() => return,
        }
    }
}

async fn send(client: &Sender, event: Event) -> Result<(), ()> {
    client.send(Ok(GenerateEvent { event: Some(event) })).await.map_err(|_| ())
}

async fn finish(
    client: &Sender,
    mut text: TextStream,
    outcome: Result<FinishReason, RequestError>,
    started: Started,
    tokens: usize,
    phases: Phases,
) {
    let outcome_name = outcome.as_ref().map_or("error", |r| r.as_str());
    metrics::counter!(names::REQUESTS, "outcome" => outcome_name).increment(1);
    metrics::counter!(names::PROMPT_TOKENS).increment(started.prompt_tokens as u64);
    metrics::counter!(names::CACHED_TOKENS).increment(started.cached_tokens as u64);
    metrics::counter!(names::EARLIER_TOKENS).increment(started.earlier_rows as u64);
    metrics::counter!(names::COMPLETION_TOKENS).increment(tokens as u64);
    let reason = match outcome {
        Ok(reason) => reason,
        Err(e) => {
            let _ = client.send(Err(e.into())).await;
            return;
        }
    };
    if let Some(rest) = text.finish() {
        let _ = send(client, Event::Text(rest)).await;
    }
    let usage = v1::Usage {
        prompt_tokens: started.prompt_tokens as u32,
        cached_tokens: Some(started.cached_tokens as u32),
        completion_tokens: tokens as u32,
        recomputed_rows: started.recomputed_rows as u32,
        dropped_chunks: started.dropped.iter().map(ToString::to_string).collect(),
        earlier_tokens: started.earlier_rows as u32,
        mode: started.mode.map(|m| m.to_string()).unwrap_or_default(),
    };
    let event = v1::Finished {
        reason: reason.as_str().into(),
        usage: Some(usage),
        timings: Some(wire::timings(&phases)),
    };
    let _ = send(client, Event::Finished(event)).await;
}

fn started_event(started: &Started) -> v1::Started {
    v1::Started {
        chunks: started.chunks.iter().map(wire::chunk_use).collect(),
        logits: started.logits.clone(),
    }
}

/// Tokens to text: whole characters, nothing past a stop string.
struct TextStream {
    detokenizer: Detokenizer,
    stops: StopFilter,
}

impl TextStream {
    fn new(sampling: &Sampling) -> Self {
        Self { detokenizer: Detokenizer::default(), stops: StopFilter::new(&sampling.stop) }
    }

    fn push(&mut self, core: &Core, tokens: &[u32]) -> Option<v1::Text> {
        if tokens.is_empty() {
            return None;
        }
        let mut text = String::new();
        for &token in tokens {
            let piece = self.detokenizer.push(&core.model.tokenizer, token);
            text.push_str(&self.stops.push(&piece));
        }
        Some(v1::Text { text, token_ids: tokens.to_vec() })
    }

    fn finish(&mut self) -> Option<v1::Text> {
        if self.stops.stopped() {
            return None;
        }
        let tail = self.detokenizer.finish();
        let mut text = self.stops.push(&tail);
        if !self.stops.stopped() {
            text.push_str(&self.stops.finish());
        }
        (!text.is_empty()).then(|| v1::Text { text, token_ids: Vec::new() })
    }
}
