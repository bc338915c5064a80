//! Requests off the wire: validated once, here.

use std::time::Duration;

use matkv_api::v1::{self, GenerateRequest};
use matkv_config::Config;
use matkv_model::{Message, Role};
use matkv_types::{ChunkId, Mode, Sampling};
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::error::RequestError;
use crate::request::{Ask, ChunkUse, Phases};

/// Stop strings a request may name, and bytes of each.
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Chunks a request may retrieve; as in the configuration.
const TOP_K_MAX: u32 = 1024;

impl From<RequestError> for Status {
    fn from(e: RequestError) -> Self {
        let text = e.to_string();
        match e {
            RequestError::Invalid(_) => Self::invalid_argument(text),
            RequestError::NotFound(_) => Self::not_found(text),
            RequestError::Exhausted(_) => Self::resource_exhausted(text),
            RequestError::Unavailable(_) => Self::unavailable(text),
            RequestError::Deadline(_) => Self::deadline_exceeded(text),
            RequestError::Internal(_) => Self::internal(text),
        }
    }
}

fn invalid<T>(text: impl Into<String>) -> Result<T, RequestError> {
    Err(RequestError::Invalid(text.into()))
}

/// How long the client waits: the `grpc-timeout` header, up to eight digits and a unit.
pub(crate) fn deadline(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok().filter(|_| number.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// A request as the loader works with it.
pub(crate) fn ask(request: GenerateRequest, config: &Config) -> Result<Ask, RequestError> {
    let messages = messages(&request)?;
    let mode = match request.mode.as_str() {
        "" | "matkv" => config.reuse(),
        other => Mode::parse(other, config.link_tokens)
            .map_err(|e| RequestError::Invalid(e.to_string()))?,
    };
    if request.top_k.is_some_and(|k| k > TOP_K_MAX) {
        return invalid(format!("top_k is at most {TOP_K_MAX}"));
    }
    let chunk_ids = request.chunk_ids.iter().map(|text| {
        text.parse::<ChunkId>().map_err(|e| RequestError::Invalid(format!("chunk id: {e}")))
    });
    Ok(Ask {
        chunk_ids: chunk_ids.collect::<Result<_, _>>()?,
        document_ids: request.document_ids.clone(),
        mode,
        top_k: request.top_k.map_or(config.top_k, |k| k as usize),
        sampling: sampling(&request, config)?,
        return_logits: request.return_logits,
        cold: request.cold,
        messages,
    })
}

fn messages(request: &GenerateRequest) -> Result<Vec<Message>, RequestError> {
    if request.messages.is_empty() {
        if request.question.trim().is_empty() {
            return invalid("the request has neither a question nor messages");
        }
        return Ok(vec![Message { role: Role::User, content: request.question.clone() }]);
    }
    if !request.question.is_empty() {
        return invalid("give a question or messages, not both");
    }
    let mut out = Vec::new();
    for (i, v1::Message { role, content }) in request.messages.iter().enumerate() {
        let role = match role.as_str() {
            "system" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            other => return invalid(format!("message {}: unknown role {other:?}", i + 1)),
        };
        out.push(Message { role, content: content.clone() });
    }
    if out.last().is_none_or(|m| m.role != Role::User) {
        return invalid("the last message must be the user's");
    }
    Ok(out)
}

fn sampling(request: &GenerateRequest, config: &Config) -> Result<Sampling, RequestError> {
    let temperature = request.temperature.unwrap_or(0.0);
    let top_p = request.top_p.unwrap_or(1.0);
    let max_new_tokens = request.max_new_tokens.unwrap_or(config.max_new_tokens);
    if !(0.0..=100.0).contains(&temperature) {
        return invalid(format!("temperature {temperature} is not in 0…100"));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return invalid(format!("top_p {top_p} is not in 0…1"));
    }
    if max_new_tokens == 0 {
        return invalid("max_new_tokens must be at least 1");
    }
    if request.stop.len() > STOPS_MAX || request.stop.iter().any(|s| s.len() > STOP_BYTES_MAX) {
        return invalid(format!("at most {STOPS_MAX} stop strings of {STOP_BYTES_MAX} bytes"));
    }
    Ok(Sampling {
        temperature,
        top_p,
        seed: request.seed.unwrap_or(0),
        max_new_tokens,
        stop: request.stop.clone(),
    })
}

/// A chunk of the prompt, for the client.
pub(crate) fn chunk_use(chunk: &ChunkUse) -> v1::ChunkUse {
    v1::ChunkUse {
        chunk_id: chunk.id.to_string(),
        document_id: chunk.document.clone(),
        ordinal: chunk.ordinal,
        tokens: chunk.tokens.len() as u32,
        score: chunk.score,
        source: chunk.source.as_str().into(),
    }
}

/// Phases, for the client.
pub(crate) fn timings(p: &Phases) -> v1::Timings {
    v1::Timings {
        queue_ms: p.queue_ms,
        retrieve_ms: p.retrieve_ms,
        load_ms: p.load_ms,
        prefill_ms: p.prefill_ms,
        first_token_ms: p.first_token_ms,
        decode_ms: p.decode_ms,
        total_ms: p.total_ms,
    }
}

/// A span, for the client.
pub(crate) fn span(process: &str, pid: u32, span: matkv_types::Span) -> v1::Span {
    let matkv_types::Span { name, track, request, start_ns, end_ns } = span;
    v1::Span { process: process.into(), pid, track, name, request, start_ns, end_ns }
}

#[cfg(test)]
mod tests {
    use matkv_types::Share;

    use super::*;

    fn request(question: &str) -> GenerateRequest {
        GenerateRequest { question: question.into(), ..GenerateRequest::default() }
    }

    fn error(request: GenerateRequest) -> String {
        ask(request, &Config::default()).unwrap_err().to_string()
    }

    #[test]
    fn defaults_come_from_the_configuration() {
        let ask = ask(request("why?"), &Config::default()).unwrap();
        assert_eq!((ask.mode, ask.top_k), (Mode::Linked(32), 4));
        assert_eq!(ask.sampling.max_new_tokens, 128);
    }

    #[test]
    fn modes_are_those_asked_for_or_configured() {
        let config =
            Config { link_tokens: 7, reuse_mode: "focused(0.2)".into(), ..Config::default() };
        let mode = |mode: &str| {
            ask(GenerateRequest { mode: mode.into(), ..request("q") }, &config).unwrap().mode
        };
        let focused = |share, link| Mode::Focused { share: Share::new(share).unwrap(), link };
        assert_eq!((mode(""), mode("matkv")), (focused(0.2, 7), focused(0.2, 7)));
        assert_eq!(
            (mode("focused(0.1)"), mode("focused(0.1,9)")),
            (focused(0.1, 7), focused(0.1, 9))
        );
        assert_eq!((mode("linked"), mode("linked(3)")), (Mode::Linked(7), Mode::Linked(3)));
        assert_eq!((mode("exact"), mode("vanilla")), (Mode::Exact, Mode::Vanilla));
    }

    #[test]
    fn deadlines_are_read_from_the_header() {
        let of = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            deadline(&metadata)
        };
        assert_eq!(of("2S"), Some(Duration::from_secs(2)));
        assert_eq!(of("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(of("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for nonsense in ["", "S", "2", "2X", "-1S", "123456789S"] {
            assert_eq!(of(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(error(request("  ")).contains("neither"));
        assert!(error(GenerateRequest { mode: "fast".into(), ..request("q") }).contains("fast"));
        let chunk_ids = vec!["abc".into()];
        assert!(error(GenerateRequest { chunk_ids, ..request("q") }).contains("abc"));
        assert!(error(GenerateRequest { top_p: Some(0.0), ..request("q") }).contains("top_p"));
        let max_new_tokens = Some(0);
        assert!(error(GenerateRequest { max_new_tokens, ..request("q") }).contains("at least 1"));
        let message = |role: &str| v1::Message { role: role.into(), content: "x".into() };
        let messages = vec![message("user"), message("assistant")];
        assert!(error(GenerateRequest { messages, ..request("") }).contains("user's"));
        let messages = vec![message("wizard")];
        assert!(error(GenerateRequest { messages, ..request("") }).contains("wizard"));
    }
}
