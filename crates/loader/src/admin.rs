//! What operators ask of the store, in the protocol's words: the same for a running loader and for
//! a command that has the store to itself.

use matkv_api::v1::{
    Chunk, CollectGarbageRequest, CollectGarbageResponse, ExplainChunkResponse, ListChunksRequest,
    ListChunksResponse, Placement, RemoveChunkResponse, VerifiedCopy, VerifyChunkResponse,
};
use matkv_store::{ChunkRecord, ReadTxn, Store, StoreError, Tier, unix_seconds};
use matkv_types::{ChunkId, Digest};

use crate::error::RequestError;

/// Chunks of one page.
const PAGE: usize = 1000;
/// Documents named with a chunk.
const USERS: usize = 16;

/// Result of an operator's request.
pub type Result<T, E = RequestError> = std::result::Result<T, E>;

fn failed(e: StoreError) -> RequestError {
    match e {
        StoreError::Unknown(_) => RequestError::NotFound(e.to_string()),
        StoreError::Refused(reason) => RequestError::Invalid(reason),
        e @ (StoreError::Full { .. } | StoreError::NoSpace { .. }) => {
            RequestError::Exhausted(e.to_string())
        }
        e @ (StoreError::Cold { .. } | StoreError::ColdMissing) => {
            RequestError::Unavailable(e.to_string())
        }
        other => RequestError::Internal(other.to_string()),
    }
}

fn tier(text: &str) -> Result<Tier> {
    text.parse().map_err(RequestError::Invalid)
}

/// A chunk by its id, or by enough of its first digits.
pub fn resolve(store: &Store, text: &str) -> Result<ChunkId> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let invalid = |why: &str| RequestError::Invalid(format!("chunk {text:?}: {why}"));
    if text.len() < 4 || text.len() > 64 || !text.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(invalid("write at least four of its hexadecimal digits"));
    }
    // The chunk before all that begin like this.
    let from: std::result::Result<Digest, _> = format!("{text:0<64}").parse();
    let from = ChunkId(from.map_err(|e| invalid(&e.to_string()))?);
    let read = store.read().map_err(failed)?;
    let mut found: Vec<ChunkId> = Vec::new();
    if read.chunk(&from).map_err(failed)?.is_some() {
        found.push(from);
    }
    let after = read.chunks_after(Some(&from), 2).map_err(failed)?;
    let lower = text.to_lowercase();
    found.extend(after.into_iter().map(|(id, _)| id));
    found.retain(|id| id.to_string().starts_with(&lower));
    match found.as_slice() {
        [] => Err(RequestError::NotFound(format!("no chunk {text}; `matkv chunks ls` lists them"))),
        [id] => Ok(*id),
        _ => Err(invalid("more than one chunk begins like this")),
    }
}

fn chunk(store: &Store, read: &ReadTxn<'_>, id: &ChunkId, record: &ChunkRecord) -> Result<Chunk> {
    let heat = read.heat(id);
    let now = unix_seconds();
    let placement = |tier: Tier| {
        let p = record.placement(tier)?;
        let path = match tier {
            Tier::Flash => store.files().path(id).display().to_string(),
            Tier::Cold => store.cold().map_or_else(String::new, |c| c.url().to_owned()),
        };
        Some(Placement {
            tier: tier.to_string(),
            encoding: p.encoding.to_string(),
            bytes: p.bytes,
            physical_bytes: p.physical,
            path,
        })
    };
    Ok(Chunk {
        chunk_id: id.to_string(),
        rows: record.rows,
        references: record.references,
        placements: Tier::ALL.into_iter().filter_map(placement).collect(),
        heat: heat.count_at(now, store.options().promotion.half_life).into(),
        last_used: heat.last,
        pinned_until: if record.is_pinned(now) { record.pinned_until } else { 0 },
        compute_ms: record.compute_ms,
        load_ms: heat.load_ms,
        documents: read.users(id, USERS).map_err(failed)?,
    })
}

/// One page of chunks.
pub fn list(store: &Store, request: &ListChunksRequest) -> Result<ListChunksResponse> {
    let wanted = match request.tier.as_str() {
        "" => None,
        "none" => Some(None),
        name => Some(Some(tier(name)?)),
    };
    let limit = match request.limit as usize {
        0 => PAGE,
        n => n.min(PAGE),
    };
    let mut after = match request.after.as_str() {
        "" => None,
        id => Some(id.parse::<ChunkId>().map_err(|e| RequestError::Invalid(e.to_string()))?),
    };
    let read = store.read().map_err(failed)?;
    let mut chunks = Vec::new();
    loop {
        let batch = read.chunks_after(after.as_ref(), PAGE).map_err(failed)?;
        let Some((last, _)) = batch.last() else {
            return Ok(ListChunksResponse { chunks, next: String::new() });
        };
        after = Some(*last);
        for (id, record) in &batch {
            let fits = match wanted {
                None => true,
                Some(None) => record.flash.is_none() && record.cold.is_none(),
                Some(Some(tier)) => record.placement(tier).is_some(),
            };
            if !fits {
                continue;
            }
            chunks.push(chunk(store, &read, id, record)?);
            if chunks.len() == limit {
                return Ok(ListChunksResponse { chunks, next: id.to_string() });
            }
        }
    }
}

/// One chunk.
pub fn stat(store: &Store, id: &str) -> Result<Chunk> {
    let id = resolve(store, id)?;
    let read = store.read().map_err(failed)?;
    let record = read.chunk(&id).and_then(|r| r.ok_or(StoreError::Unknown(id)));
    chunk(store, &read, &id, &record.map_err(failed)?)
}

/// Verifies every copy of a chunk; heals what has a good copy.
pub fn verify(store: &Store, id: &str) -> Result<VerifyChunkResponse> {
    let id = resolve(store, id)?;
    let copies = store.verify_chunk(&id, &Tier::ALL).map_err(failed)?.into_iter().map(|c| {
        let error = c.error.map_or_else(String::new, |e| e.to_string());
        let (tier, copy) = (c.tier.to_string(), c.copy as u32);
        VerifiedCopy { tier, copy, error, healed: c.healed }
    });
    Ok(VerifyChunkResponse { chunk_id: id.to_string(), copies: copies.collect() })
}

/// Pins a chunk for some seconds, for ever, or not at all.
pub fn pin(store: &Store, id: &str, seconds: Option<u64>) -> Result<Chunk> {
    let id = resolve(store, id)?;
    let until = match seconds {
        None => u64::MAX,
        Some(0) => 0,
        Some(s) => unix_seconds().saturating_add(s),
    };
    store.pin(&id, until).map_err(failed)?;
    stat(store, &id.to_string())
}

/// Brings a chunk into a tier and out of the other.
pub fn move_to(store: &Store, id: &str, to: &str) -> Result<Chunk> {
    let (id, to) = (resolve(store, id)?, tier(to)?);
    store.move_to(&id, to).map_err(failed)?;
    stat(store, &id.to_string())
}

/// Takes a chunk's bytes out of one tier, or of all.
pub fn remove(store: &Store, id: &str, from: &str) -> Result<(ChunkId, RemoveChunkResponse)> {
    let id = resolve(store, id)?;
    let tiers = if from.is_empty() { Tier::ALL.to_vec() } else { vec![tier(from)?] };
    let freed = store.remove_from(&id, &tiers, "removed by an operator").map_err(failed)?;
    Ok((id, RemoveChunkResponse { freed_bytes: freed }))
}

/// Removes what nobody will use.
pub fn collect_garbage(
    store: &Store,
    request: CollectGarbageRequest,
) -> Result<CollectGarbageResponse> {
    let r = store.collect_garbage(request.quarantine, request.stale).map_err(failed)?;
    Ok(CollectGarbageResponse {
        orphan_files: r.orphans.0,
        orphan_bytes: r.orphans.1,
        quarantined_files: r.quarantined.0,
        quarantined_bytes: r.quarantined.1,
        stale_bytes: r.stale_bytes,
    })
}

/// Why a chunk is, or is not, where one would expect it. An id nobody knows is an answer, too.
pub fn explain(store: &Store, text: &str) -> Result<ExplainChunkResponse> {
    let id = resolve(store, text)?;
    let lines = store.explain(&id).map_err(failed)?;
    Ok(ExplainChunkResponse { chunk_id: id.to_string(), lines })
}
