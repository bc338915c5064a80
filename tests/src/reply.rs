//! Questions and whole answers.

use matkv_api::Client;
use matkv_api::v1::generate_event::Event;
use matkv_api::v1::{ChunkUse, GenerateEvent, GenerateRequest, Timings, Usage};
use tonic::{Status, Streaming};

use crate::wait::DEADLINE;

/// Everything the server has said in answer to a request.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The answer's text.
    pub text: String,
    /// The same as it came.
    pub pieces: Vec<String>,
    /// The answer's token ids.
    pub tokens: Vec<u32>,
    /// The chunks of the prompt.
    pub chunks: Vec<ChunkUse>,
    /// Logits of the first token, if they were asked for.
    pub logits: Vec<f32>,
    /// Why it ended.
    pub reason: String,
    /// Token counts.
    pub usage: Usage,
    /// Milliseconds.
    pub timings: Timings,
}

impl Reply {
    /// Where each chunk came from.
    pub fn sources(&self) -> Vec<&str> {
        self.chunks.iter().map(|c| c.source.as_str()).collect()
    }

    /// Document and ordinal of each chunk.
    pub fn places(&self) -> Vec<(&str, u32)> {
        self.chunks.iter().map(|c| (c.document_id.as_str(), c.ordinal)).collect()
    }

    /// Ids of the chunks.
    pub fn chunk_ids(&self) -> Vec<String> {
        self.chunks.iter().map(|c| c.chunk_id.clone()).collect()
    }

    /// What must not depend on where the KV came from: text, ids, reason.
    pub fn answer(&self) -> (&str, &[u32], &str) {
        (&self.text, &self.tokens, &self.reason)
    }
}

/// A short greedy request.
pub fn question(text: &str) -> GenerateRequest {
    let max_new_tokens = Some(12);
    GenerateRequest { question: text.into(), max_new_tokens, ..GenerateRequest::default() }
}

/// Sends a request; its events are still to come.
///
/// # Errors
/// The server's refusal.
pub async fn open(
    client: &Client,
    request: GenerateRequest,
) -> Result<Streaming<GenerateEvent>, Status> {
    let mut client = client.clone();
    let sent = tokio::time::timeout(DEADLINE, client.generate(request)).await;
    Ok(sent.expect("the request is taken or refused in time")?.into_inner())
}

/// Reads an answer to its end.
///
/// # Errors
/// The status that ended it.
///
/// # Panics
/// If it does not end in time, or ends without a result.
pub async fn read(mut stream: Streaming<GenerateEvent>) -> Result<Reply, Status> {
    let mut reply = Reply::default();
    let mut finished = false;
    let events = async {
        while let Some(event) = stream.message().await? {
            assert!(!finished, "an event after the end: {event:?}");
            match event.event.expect("an event says something") {
                Event::Started(started) => {
                    (reply.chunks, reply.logits) = (started.chunks, started.logits);
                }
                Event::Text(text) => {
                    reply.text.push_str(&text.text);
                    reply.pieces.push(text.text);
                    reply.tokens.extend(text.token_ids);
                }
                Event::Finished(f) => {
                    reply.reason = f.reason;
                    reply.usage = f.usage.expect("usage");
                    reply.timings = f.timings.expect("timings");
                    finished = true;
                }
            }
        }
        Ok::<(), Status>(())
    };
    tokio::time::timeout(DEADLINE, events).await.expect("an answer in time")?;
    assert!(finished, "the stream ended without a result: {reply:?}");
    Ok(reply)
}

/// Sends a request and reads the answer.
///
/// # Errors
/// The server's refusal, or the status that ended the answer.
pub async fn ask(client: &Client, request: GenerateRequest) -> Result<Reply, Status> {
    read(open(client, request).await?).await
}

/// Whether two rows of logits are the same bits.
pub fn same_logits(a: &[f32], b: &[f32]) -> bool {
    !a.is_empty() && a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}

/// The sum of a counter over its labels, in Prometheus text; 0 if it has never been counted.
pub fn metric(metrics: &str, name: &str) -> f64 {
    let samples = metrics
        .lines()
        .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
