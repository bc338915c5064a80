//! A corpus's KV as one portable file: documents, and the chunk files as they lie in the store.
//!
//! ```text
//! "MATKVBND" · version u32 · bytes of the table u64 · CRC32C of the table u32 · table (JSON)
//! · for every chunk of the table, in its order: bytes u64, chunk file
//! · SHA-256 of everything before
//! ```
//! The table names identity, documents and chunks. Each chunk file verifies itself; the hash at the
//! end covers the rest. An import of another identity is refused before a chunk is read.

use std::io::{Read, Write};

use matkv_format::{ChunkFile, Superblock};
use matkv_store::{DocumentRecord, Identity, Placement, Store, Tier, page_aligned};
use matkv_types::ChunkId;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::core::Core;
use crate::ingest::OpenDocument;
use crate::ingest_commit::{Batch, DurableChunk};

const MAGIC: &[u8; 8] = b"MATKVBND";
const VERSION: u32 = 1;
/// A table of a million chunks has about 100 MiB.
const TABLE_BYTES_MAX: u64 = 1 << 30;

/// Far above any chunk's file.
const FILE_BYTES_MAX: u64 = 8 << 30;

#[derive(Serialize, Deserialize)]
struct Table {
    identity: Identity,
    documents: Vec<DocumentRecord>,
    chunks: Vec<ChunkId>,
}

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// A writer that hashes what goes through it.
struct Hashing<W> {
    to: W,
    hash: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.to.write(bytes)?;
        self.hash.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// A reader that hashes what goes through it.
struct HashingReader<R> {
    from: R,
    hash: Sha256,
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let n = self.from.read(bytes)?;
        self.hash.update(&bytes[..n]);
        Ok(n)
    }
}

/// Writes documents (all, if none are named) and their chunks.
///
/// # Errors
/// If a document is not there, or a chunk is in no tier.
pub fn export(store: &Store, names: &[String], to: impl Write) -> Result<(u64, u64), String> {
    let read = store.read().map_err(text)?;
    let mut documents = Vec::new();
    if names.is_empty() {
        documents = read.documents().map_err(text)?;
    }
    for name in names {
        let found = read.document(name).map_err(text)?;
        documents.push(found.ok_or_else(|| format!("no document {name:?}"))?);
    }
    drop(read);
    let mut chunks: Vec<ChunkId> = documents.iter().flat_map(|d| d.chunks.clone()).collect();
    chunks.sort();
    chunks.dedup();
    // Before anything is written: an export that cannot be whole is not begun.
    let read = store.read().map_err(text)?;
    for id in &chunks {
        let record = read.chunk(id).map_err(text)?;
        if record.is_none_or(|r| Tier::ALL.iter().all(|t| r.placement(*t).is_none())) {
            return Err(format!("chunk {id} is in no tier; ingest its document again"));
        }
    }
    drop(read);
    let table = Table { identity: store.identity().clone(), documents, chunks };
    let json = serde_json::to_vec(&table).map_err(text)?;
    let mut out = Hashing { to, hash: Sha256::new() };
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(text);
    put(MAGIC)?;
    put(&VERSION.to_le_bytes())?;
    put(&(json.len() as u64).to_le_bytes())?;
    put(&crc32c::crc32c(&json).to_le_bytes())?;
    put(&json)?;
    for id in &table.chunks {
        let good = store.read_good(id, &Tier::ALL);
        let (file, found) = good.map_err(|e| format!("chunk {id}: {e}"))?;
        let file = &file[..found.file_len()];
        put(&(file.len() as u64).to_le_bytes())?;
        put(file)?;
    }
    let hash = out.hash.clone().finalize();
    out.to.write_all(&hash).and_then(|()| out.to.flush()).map_err(text)?;
    Ok((table.documents.len() as u64, table.chunks.len() as u64))
}

/// What an import has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Imported {
    pub documents: u64,
    pub chunks: u64,
    pub known: u64,
    pub bytes: u64,
}

fn table(from: &mut impl Read, identity: &Identity) -> Result<Table, String> {
    let mut head = [0u8; 24];
    from.read_exact(&mut head).map_err(|e| format!("not a bundle: {e}"))?;
    if &head[..8] != MAGIC {
        return Err("not a bundle: it begins otherwise".into());
    }
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if word(8) != VERSION {
        return Err(format!("bundle version {}, this build reads {VERSION}", word(8)));
    }
    let bytes = u64::from(word(12)) | u64::from(word(16)) << 32;
    if bytes > TABLE_BYTES_MAX {
        return Err(format!("a table of {bytes} bytes; the bundle is damaged"));
    }
    let mut json = Vec::new();
    from.by_ref().take(bytes).read_to_end(&mut json).map_err(text)?;
    if json.len() as u64 != bytes || crc32c::crc32c(&json) != word(20) {
        return Err("the bundle's table is damaged".into());
    }
    let table: Table = serde_json::from_slice(&json).map_err(text)?;
    if table.identity.fingerprint != identity.fingerprint {
        return Err(format!(
            "the bundle is of another model, prompt or tokenizer (fingerprint {}, model {}), \
             this store has {} ({})",
            table.identity.directory(),
            table.identity.model,
            identity.directory(),
            identity.model
        ));
    }
    Ok(table)
}

/// Takes a bundle in: chunks first, each verified; documents only if the whole bundle was right.
///
/// # Errors
/// If the bundle is of another identity or damaged: nothing is entered then.
pub(crate) fn import(core: &Core, from: impl Read) -> Result<Imported, String> {
    let store = &core.store;
    let mut from = HashingReader { from, hash: Sha256::new() };
    let table = table(&mut from, store.identity())?;
    let announced = store.announce(&table.chunks).map_err(text)?;
    let outcome = import_chunks(core, &mut from, &table).and_then(|(mut batch, mut done)| {
        let hash = from.hash.clone().finalize();
        let mut said = [0u8; 32];
        from.from.read_exact(&mut said).map_err(|e| format!("the bundle ends early: {e}"))?;
        if hash[..] != said {
            return Err("the bundle's hash is wrong: it is damaged".into());
        }
        let open = table.documents.into_iter().map(|record| OpenDocument {
            record,
            missing: std::collections::HashSet::new(),
            computed: 0,
        });
        for (document, _) in batch.commit(core, open.collect(), &std::collections::HashMap::new()) {
            if !document.error.is_empty() {
                return Err(format!("document {:?}: {}", document.document_id, document.error));
            }
            done.documents += 1;
        }
        Ok(done)
    });
    drop(announced);
    if outcome.is_err() {
        store.collect_garbage(false, false).map_err(text)?;
    }
    outcome
}

fn import_chunks(
    core: &Core,
    from: &mut impl Read,
    table: &Table,
) -> Result<(Batch, Imported), String> {
    let store = &core.store;
    let (mut batch, mut done) = (Batch::default(), Imported::default());
    for id in &table.chunks {
        let fault = |e: String| format!("chunk {id} of the bundle: {e}");
        let mut bytes = [0u8; 8];
        from.read_exact(&mut bytes).map_err(|e| fault(e.to_string()))?;
        let bytes = u64::from_le_bytes(bytes);
        if bytes > FILE_BYTES_MAX {
            return Err(fault(format!("it has {bytes} bytes")));
        }
        let mut file = Vec::new();
        from.by_ref().take(bytes).read_to_end(&mut file).map_err(text)?;
        let found = Superblock::decode(&file).map_err(|e| fault(e.to_string()))?;
        let tokens = found.tokens(&file).map_err(|e| fault(e.to_string()))?;
        let expect = store.identity().expectation(*id, &tokens);
        ChunkFile::verify(&file, &expect).map_err(|e| fault(e.to_string()))?;
        if core.chunk_id(&tokens) != *id {
            return Err(fault("its tokens belong to another id".into()));
        }
        let record = store.read().and_then(|r| r.chunk(id)).map_err(text)?;
        if record.is_some_and(|r| r.flash.is_some() || r.cold.is_some()) {
            done.known += 1;
            continue;
        }
        let placement: Placement =
            store.write_file(id, &page_aligned(&file).map_err(text)?).map_err(text)?;
        let vector = core.embed(&core.text(&tokens)).map_err(text)?;
        let (id, tokens, compute_ms) = (*id, tokens.into(), 0);
        batch.add(DurableChunk { id, tokens, placement, compute_ms, vector });
        done.chunks += 1;
        done.bytes += placement.physical;
    }
    Ok((batch, done))
}
