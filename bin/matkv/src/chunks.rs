//! `matkv chunks`: through the running loader, or with the store to itself if nothing runs.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use matkv_api::AdminClient;
use matkv_api::v1::{
    Chunk, ChunkRequest, CollectGarbageRequest, CollectGarbageResponse, ExplainChunkResponse,
    ListChunksRequest, ListChunksResponse, MoveChunkRequest, PinChunkRequest, RemoveChunkRequest,
    RemoveChunkResponse, VerifyChunkResponse,
};
use matkv_config::{Config, format_bytes, parse_duration};
use matkv_loader_core::admin;
use matkv_loader_core::offline::{self, Store};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::args::{ChunksCommand, Format};
use crate::out::say;
use crate::render::table;

/// Who answers.
pub enum Access<'a> {
    Running(&'a Runtime, Box<AdminClient>),
    Offline(Box<Store>),
}

/// One request, both ways: the rpc, or the function it calls.
macro_rules! ask {
    ($self:ident, $rpc:ident($request:expr), $local:expr) => {
        match $self {
            Access::Running(runtime, client) => {
                Ok(runtime.block_on(client.$rpc($request)).map_err(said)?.into_inner())
            }
            Access::Offline(store) => Ok($local(store)?),
        }
    };
}

pub fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

impl<'a> Access<'a> {
    /// The running loader, or the store.
    pub fn open(runtime: &'a Runtime, config: &Config) -> anyhow::Result<Self> {
        match runtime.block_on(matkv_api::connect_admin(&config.socket())) {
            Ok(client) => Ok(Self::Running(runtime, Box::new(client))),
            Err(_) => Ok(Self::Offline(Box::new(offline::open(config, None)?))),
        }
    }

    fn list(&mut self, request: ListChunksRequest) -> anyhow::Result<ListChunksResponse> {
        ask!(self, list_chunks(request), |s: &Store| admin::list(s, &request))
    }

    fn stat(&mut self, id: &str) -> anyhow::Result<Chunk> {
        let request = ChunkRequest { chunk_id: id.to_owned() };
        ask!(self, get_chunk(request), |s: &Store| admin::stat(s, id))
    }

    fn verify(&mut self, id: &str) -> anyhow::Result<VerifyChunkResponse> {
        let request = ChunkRequest { chunk_id: id.to_owned() };
        ask!(self, verify_chunk(request), |s: &Store| admin::verify(s, id))
    }

    fn pin(&mut self, id: &str, seconds: Option<u64>) -> anyhow::Result<Chunk> {
        let request = PinChunkRequest { chunk_id: id.to_owned(), seconds };
        ask!(self, pin_chunk(request), |s: &Store| admin::pin(s, id, seconds))
    }

    fn move_to(&mut self, id: &str, tier: &str) -> anyhow::Result<Chunk> {
        let request = MoveChunkRequest { chunk_id: id.to_owned(), tier: tier.to_owned() };
        ask!(self, move_chunk(request), |s: &Store| admin::move_to(s, id, tier))
    }

    fn remove(&mut self, id: &str, tier: &str) -> anyhow::Result<RemoveChunkResponse> {
        let request = RemoveChunkRequest { chunk_id: id.to_owned(), tier: tier.to_owned() };
        let local = |s: &Store| admin::remove(s, id, tier).map(|r| r.1);
        ask!(self, remove_chunk(request), local)
    }

    fn gc(&mut self, request: CollectGarbageRequest) -> anyhow::Result<CollectGarbageResponse> {
        ask!(self, collect_garbage(request), |s: &Store| admin::collect_garbage(s, request))
    }

    fn explain(&mut self, id: &str) -> anyhow::Result<ExplainChunkResponse> {
        let request = ChunkRequest { chunk_id: id.to_owned() };
        ask!(self, explain_chunk(request), |s: &Store| admin::explain(s, id))
    }

    /// Every chunk in a tier, or all, up to a limit.
    fn all(&mut self, tier: &str, limit: usize) -> anyhow::Result<Vec<Chunk>> {
        let (mut after, mut out) = (String::new(), Vec::new());
        while out.len() < limit {
            let request = ListChunksRequest {
                after,
                limit: u32::try_from(limit - out.len()).unwrap_or(u32::MAX),
                tier: tier.to_owned(),
            };
            let page = self.list(request.clone())?;
            out.extend(page.chunks);
            if page.next.is_empty() {
                break;
            }
            after = page.next;
        }
        Ok(out)
    }
}

pub fn run(
    runtime: &Runtime,
    config: &Config,
    command: &ChunksCommand,
    format: Format,
) -> anyhow::Result<ExitCode> {
    if let ChunksCommand::RebuildIndex { fingerprint } = command {
        return rebuild(runtime, config, fingerprint.as_deref(), format);
    }
    let mut access = Access::open(runtime, config)?;
    match command {
        ChunksCommand::Ls { tier, limit } => {
            let chunks = access.all(tier, *limit)?;
            show(&chunks, format);
            if chunks.is_empty() && format == Format::Text {
                say!("no chunks; add some with `matkv ingest`");
            }
        }
        ChunksCommand::Stat { ids } => {
            details(&each(ids, |id| access.stat(id))?, format);
        }
        ChunksCommand::Verify { ids } => return verify(&mut access, ids, format),
        ChunksCommand::Pin { ids, ttl } => {
            let ttl = ttl.as_deref().map(parse_duration).transpose();
            let ttl = ttl.map_err(|e| anyhow::anyhow!("--ttl: {e}"))?;
            let seconds = ttl.map(|t: Duration| t.as_secs().max(1));
            show(&each(ids, |id| access.pin(id, seconds))?, format);
        }
        ChunksCommand::Unpin { ids } => {
            show(&each(ids, |id| access.pin(id, Some(0)))?, format);
        }
        ChunksCommand::Move { tier, ids } => {
            show(&each(ids, |id| access.move_to(id, tier))?, format);
        }
        ChunksCommand::Rm { ids, tier } => {
            let mut freed = 0;
            for id in ids {
                freed += access.remove(id, tier)?.freed_bytes;
            }
            if format == Format::Json {
                say!("{}", json!({"chunks": ids.len(), "freed_bytes": freed}));
            } else {
                say!("{} chunks removed, {} freed", ids.len(), format_bytes(freed));
            }
        }
        ChunksCommand::Gc { quarantine, stale } => {
            let request = CollectGarbageRequest { quarantine: *quarantine, stale: *stale };
            garbage(&access.gc(request)?, format);
        }
        ChunksCommand::Explain { id } => {
            let answer = access.explain(id)?;
            if format == Format::Json {
                say!("{}", json!({"chunk_id": answer.chunk_id, "lines": answer.lines}));
            } else {
                answer.lines.iter().for_each(|line| say!("{line}"));
            }
        }
        ChunksCommand::RebuildIndex { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn each(
    ids: &[String],
    ask: impl FnMut(&String) -> anyhow::Result<Chunk>,
) -> anyhow::Result<Vec<Chunk>> {
    ids.iter().map(ask).collect()
}

fn garbage(r: &CollectGarbageResponse, format: Format) {
    if format == Format::Json {
        return say!(
            "{}",
            json!({
                "orphan_files": r.orphan_files, "orphan_bytes": r.orphan_bytes,
                "quarantined_files": r.quarantined_files,
                "quarantined_bytes": r.quarantined_bytes, "stale_bytes": r.stale_bytes,
            })
        );
    }
    say!("orphans    {} files, {}", r.orphan_files, format_bytes(r.orphan_bytes));
    say!("quarantine {} files, {}", r.quarantined_files, format_bytes(r.quarantined_bytes));
    say!("other      {}", format_bytes(r.stale_bytes));
}

fn verify(access: &mut Access<'_>, ids: &[String], format: Format) -> anyhow::Result<ExitCode> {
    let ids: Vec<String> = if ids.is_empty() {
        access.all("", usize::MAX)?.into_iter().map(|c| c.chunk_id).collect()
    } else {
        ids.to_vec()
    };
    let (mut copies, mut bad) = (0, 0);
    let mut rows = Vec::new();
    for id in &ids {
        let verified = access.verify(id)?;
        for copy in verified.copies {
            copies += 1;
            bad += u32::from(!copy.error.is_empty());
            if format == Format::Json {
                rows.push(json!({
                    "chunk_id": verified.chunk_id, "tier": copy.tier, "copy": copy.copy,
                    "error": copy.error, "healed": copy.healed,
                }));
            } else if !copy.error.is_empty() {
                let healed = if copy.healed { ", healed" } else { "" };
                say!(
                    "{} {} copy {}: {}{healed}",
                    verified.chunk_id,
                    copy.tier,
                    copy.copy,
                    copy.error
                );
            }
        }
    }
    if format == Format::Json {
        say!("{}", Value::Array(rows));
    } else {
        say!("{} chunks, {copies} copies, {bad} bad", ids.len());
    }
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn as_json(c: &Chunk) -> Value {
    let placements = c.placements.iter().map(|p| {
        json!({
            "tier": p.tier, "encoding": p.encoding, "bytes": p.bytes,
            "physical_bytes": p.physical_bytes, "path": p.path,
        })
    });
    json!({
        "chunk_id": c.chunk_id, "rows": c.rows, "references": c.references,
        "placements": placements.collect::<Vec<_>>(), "heat": c.heat, "last_used": c.last_used,
        "pinned_until": c.pinned_until, "compute_ms": c.compute_ms, "load_ms": c.load_ms,
        "documents": c.documents,
    })
}

fn tiers(c: &Chunk) -> String {
    let names: Vec<&str> = c.placements.iter().map(|p| p.tier.as_str()).collect();
    if names.is_empty() { "-".into() } else { names.join("+") }
}

fn show(chunks: &[Chunk], format: Format) {
    if format == Format::Json {
        return say!("{}", Value::Array(chunks.iter().map(as_json).collect()));
    }
    if chunks.is_empty() {
        return;
    }
    let row = |c: &Chunk| {
        let bytes: u64 = c.placements.iter().map(|p| p.physical_bytes).sum();
        let encoding = c.placements.first().map_or_else(String::new, |p| p.encoding.clone());
        vec![
            c.chunk_id[..12.min(c.chunk_id.len())].to_owned(),
            c.rows.to_string(),
            tiers(c),
            encoding,
            format_bytes(bytes),
            format!("{:.2}", c.heat),
            if c.pinned_until > 0 { "pinned".into() } else { String::new() },
            c.documents.first().cloned().unwrap_or_default(),
        ]
    };
    let rows: Vec<_> = chunks.iter().map(row).collect();
    let head = ["chunk", "rows", "tier", "encoding", "bytes", "heat", "pin", "document"];
    crate::out::write(format_args!("{}", table(&head, &rows)));
}

fn details(chunks: &[Chunk], format: Format) {
    if format == Format::Json {
        return show(chunks, format);
    }
    for c in chunks {
        say!("chunk     {}", c.chunk_id);
        say!("rows      {}, used {} times", c.rows, c.references);
        for p in &c.placements {
            let bytes = format_bytes(p.physical_bytes);
            say!("{:<9} {}, {bytes}, {}", p.tier, p.encoding, p.path);
        }
        say!("heat      {:.2}", c.heat);
        say!("cost      computing {} ms, loading {:.1} ms", c.compute_ms, c.load_ms);
        say!("documents {}", c.documents.join(", "));
    }
}

fn rebuild(
    runtime: &Runtime,
    config: &Config,
    fingerprint: Option<&str>,
    format: Format,
) -> anyhow::Result<ExitCode> {
    if runtime.block_on(matkv_api::connect(&config.socket())).is_ok() {
        bail!("the system is running; stop it first: its index is in use");
    }
    let report = offline::rebuild_index(config, fingerprint).context("rebuilding the index")?;
    if format == Format::Json {
        say!(
            "{}",
            json!({
                "chunks": report.chunks, "bytes": report.bytes, "documents": report.documents,
                "quarantined": report.quarantined, "incomplete": report.incomplete,
            })
        );
    } else {
        say!(
            "{} documents and {} chunks ({}) are indexed, {} files put aside",
            report.documents,
            report.chunks,
            format_bytes(report.bytes),
            report.quarantined
        );
        for name in &report.incomplete {
            say!("{name}: a chunk is in no tier; ingest the document again");
        }
    }
    let fine = report.quarantined == 0 && report.incomplete.is_empty();
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
