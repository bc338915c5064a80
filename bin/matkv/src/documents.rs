//! `matkv docs` and `matkv status`.

use std::process::ExitCode;

use matkv_api::v1::{DeleteDocumentRequest, GetStatusRequest, ListDocumentsRequest};
use matkv_config::{Config, format_bytes};

use crate::args::{DocsCommand, Format};
use crate::out::say;
use crate::render;

pub async fn run(
    config: &Config,
    command: DocsCommand,
    format: Format,
) -> anyhow::Result<ExitCode> {
    let mut client = matkv_api::connect(&config.socket()).await?;
    match command {
        DocsCommand::Ls => {
            let list = client.list_documents(ListDocumentsRequest {}).await?.into_inner();
            if format == Format::Json {
                let rows = list.documents.iter().map(|d| {
                    serde_json::json!({
                        "document_id": d.document_id, "bytes": d.bytes, "tokens": d.tokens,
                        "chunk_ids": d.chunk_ids, "ingested_at": d.ingested_at,
                    })
                });
                say!("{}", serde_json::Value::Array(rows.collect()));
                return Ok(ExitCode::SUCCESS);
            }
            for d in &list.documents {
                say!("{:>8} tokens {:>4} chunks  {}", d.tokens, d.chunk_ids.len(), d.document_id);
            }
            if list.documents.is_empty() {
                say!("no documents; add some with `matkv ingest`");
            }
            Ok(ExitCode::SUCCESS)
        }
        DocsCommand::Rm { ids } => {
            let mut missing = false;
            for id in ids {
                let request = DeleteDocumentRequest { document_id: id.clone() };
                let removed = client.delete_document(request).await?.into_inner();
                if removed.found {
                    say!("removed {id} and {} chunks", removed.chunks_removed);
                } else {
                    eprintln!("no document {id:?}; `matkv docs ls` lists them");
                    missing = true;
                }
            }
            Ok(if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        }
    }
}

pub async fn status(config: &Config, format: Format) -> anyhow::Result<ExitCode> {
    let mut client = matkv_api::connect(&config.socket()).await?;
    let s = client.get_status(GetStatusRequest {}).await?.into_inner();
    if format == Format::Json {
        say!("{}", render::status_json(&s));
        return Ok(ExitCode::SUCCESS);
    }
    let reason = if s.reason.is_empty() { String::new() } else { format!(" ({})", s.reason) };
    say!("state       {}{reason}", s.state);
    say!("model       {} · {} kernels", s.model, s.isa);
    say!("fingerprint {}", &s.fingerprint[..16.min(s.fingerprint.len())]);
    say!("processes   loader {}, decoder {}, session {}", s.loader_pid, s.decoder_pid, s.epoch);
    say!("reading     {}", s.io_engine);
    say!(
        "store       {} documents, {} chunks, {} tokens, {}",
        s.documents,
        s.chunks,
        s.chunk_tokens,
        format_bytes(s.chunk_bytes)
    );
    say!("            in {}", s.store_dir);
    if !s.other_fingerprints.is_empty() {
        say!(
            "            data of other models or prompts, not used: {}",
            s.other_fingerprints.join(", ")
        );
    }
    let most = match s.flash_capacity {
        0 => String::new(),
        most => format!(" of {}", format_bytes(most)),
    };
    say!(
        "flash       {}{most}, {} chunks, {}",
        format_bytes(s.flash_used_bytes),
        s.flash_chunks,
        s.encoding
    );
    if !s.cold_url.is_empty() {
        let bytes = format_bytes(s.cold_bytes);
        say!("cold        {bytes}, {} chunks, {}", s.cold_chunks, s.cold_url);
    }
    say!(
        "arena       {} of {}, {} chunks, {} slots held",
        format_bytes(s.arena_used_bytes),
        format_bytes(s.arena_bytes),
        s.arena_chunks,
        s.held_slots
    );
    if !s.storage_degraded.is_empty() {
        say!("degraded    {}", s.storage_degraded);
    }
    say!("requests    {} running, {} waiting", s.requests_running, s.requests_waiting);
    if s.quarantined > 0 {
        say!("quarantined {} chunk files", s.quarantined);
    }
    Ok(ExitCode::SUCCESS)
}
