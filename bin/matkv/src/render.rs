//! What people and programs read.

use std::process::ExitCode;

use matkv_api::v1::GetStatusResponse;
use matkv_config::Resolved;
use serde_json::{Value, json};

use crate::args::Format;
use crate::ask::Answer;
use crate::out::say;

pub fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

pub fn config(resolved: &Resolved, format: Format) -> anyhow::Result<ExitCode> {
    if format == Format::Json {
        let rows = resolved.rows().map(|(s, value, origin)| {
            json!({"key": s.key, "value": value, "origin": origin.to_string(), "help": s.help})
        });
        say!("{}", Value::Array(rows.collect()));
        return Ok(ExitCode::SUCCESS);
    }
    for (setting, value, origin) in resolved.rows() {
        say!("{} = {:?}  # {origin}: {}", setting.key, value, setting.help);
    }
    Ok(ExitCode::SUCCESS)
}

/// Where an answer comes from.
pub fn sources(answer: &Answer) {
    for chunk in &answer.started.chunks {
        say!(
            "  {:.3} {} #{} ({} tokens, {})",
            chunk.score,
            chunk.document_id,
            chunk.ordinal,
            chunk.tokens,
            chunk.source
        );
    }
    if !answer.usage.dropped_chunks.is_empty() {
        say!("  {} chunks did not fit the context", answer.usage.dropped_chunks.len());
    }
}

pub fn usage(answer: &Answer) {
    let (u, t) = (&answer.usage, &answer.timings);
    let earlier = match u.earlier_tokens {
        0 => String::new(),
        n => format!(", {n} of them from an earlier prompt"),
    };
    say!(
        "  {}: {} prompt tokens ({} cached{earlier}, {} recomputed), {} answered; first token {:.0} \
         ms, {}",
        u.mode,
        u.prompt_tokens,
        u.cached_tokens(),
        u.recomputed_rows,
        u.completion_tokens,
        t.first_token_ms,
        answer.reason
    );
}

pub fn answer_json(a: &Answer) -> Value {
    let (u, t) = (&a.usage, &a.timings);
    let chunks: Vec<Value> = a
        .started
        .chunks
        .iter()
        .map(|c| {
            json!({
                "chunk_id": c.chunk_id, "document_id": c.document_id, "ordinal": c.ordinal,
                "tokens": c.tokens, "score": c.score, "source": c.source,
            })
        })
        .collect();
    json!({
        "text": a.text, "token_ids": a.tokens, "reason": a.reason, "chunks": chunks,
        "usage": {
            "prompt_tokens": u.prompt_tokens, "cached_tokens": u.cached_tokens(),
            "completion_tokens": u.completion_tokens, "recomputed_rows": u.recomputed_rows,
            "earlier_tokens": u.earlier_tokens,
            "dropped_chunks": u.dropped_chunks, "mode": u.mode,
        },
        "timings_ms": {
            "queue": t.queue_ms, "retrieve": t.retrieve_ms, "load": t.load_ms,
            "prefill": t.prefill_ms, "first_token": t.first_token_ms, "decode": t.decode_ms,
            "total": t.total_ms,
        },
    })
}

pub fn status_json(s: &GetStatusResponse) -> Value {
    json!({
        "state": s.state, "reason": s.reason, "version": s.version, "model": s.model,
        "fingerprint": s.fingerprint, "epoch": s.epoch, "loader_pid": s.loader_pid,
        "decoder_pid": s.decoder_pid, "io_engine": s.io_engine, "isa": s.isa,
        "documents": s.documents, "chunks": s.chunks, "chunk_tokens": s.chunk_tokens,
        "chunk_bytes": s.chunk_bytes, "arena_bytes": s.arena_bytes,
        "arena_used_bytes": s.arena_used_bytes, "arena_chunks": s.arena_chunks,
        "held_slots": s.held_slots, "requests_running": s.requests_running,
        "requests_waiting": s.requests_waiting, "quarantined": s.quarantined,
        "storage_degraded": s.storage_degraded, "flash_used_bytes": s.flash_used_bytes,
        "flash_capacity": s.flash_capacity, "flash_chunks": s.flash_chunks,
        "cold_chunks": s.cold_chunks, "cold_bytes": s.cold_bytes, "cold_url": s.cold_url,
        "encoding": s.encoding,
        "other_fingerprints": s.other_fingerprints, "metrics": s.metrics,
        "store_dir": s.store_dir,
    })
}

/// A table with right-aligned numbers; the first column is left-aligned.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count());
        cells.chain([header[i].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let mut out = String::new();
        for (i, (cell, w)) in cells.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(w - cell.chars().count());
            let cell = if i == 0 { format!("{cell}{pad}") } else { format!("  {pad}{cell}") };
            out.push_str(&cell);
        }
        out.trim_end().to_owned() + "\n"
    };
    let mut out = line(header.to_vec());
    rows.iter().for_each(|r| out.push_str(&line(r.iter().map(String::as_str).collect())));
    out
}
