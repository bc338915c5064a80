//! The store: lock, directories, LMDB environment, transactions.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use heed::types::{Bytes, Str, U32};
use heed::{AnyTls, CommitOrAbort, Database, Env, RoTxn, RwTxn, WithoutTls, byteorder::BigEndian};
use matkv_sys::{FileLock, open_environment};
use matkv_types::{ChunkId, Digest, Fingerprint};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::chunk_files::ChunkFiles;
use crate::error::{Result, StoreError};
use crate::records::{ChunkRecord, DocumentRecord};

/// The LMDB environment other tables of the same store may live in.
pub type StoreEnv = Env<WithoutTls>;

/// Address space of the index, not memory or disk: LMDB grows its file as needed. Tokens take
/// 4 KiB and vectors about 2 KiB a chunk, so this is room for ten million chunks.
const MAP_BYTES: usize = 64 << 30;
/// Five tables here, and room for those of vector indexes.
const DATABASES_MAX: u32 = 16;

/// An open store. Readers and the one writer may be on any threads.
pub struct Store {
    _lock: FileLock,
    env: StoreEnv,
    files: ChunkFiles,
    self_test_files: ChunkFiles,
    fingerprint: Fingerprint,
    other_fingerprints: Vec<String>,
    writing: Mutex<()>,
    documents: Database<'static, Str, Bytes>,
    chunks: Database<'static, Bytes, Bytes>,
    tokens: Database<'static, Bytes, Bytes>,
    vectors: Database<'static, U32<BigEndian>, Bytes>,
    meta: Database<'static, Str, U32<BigEndian>>,
    /// For people: `chunk id ‖ document id` to the chunk's ordinal in the document.
    places: Database<'static, Bytes, Bytes>,
}

/// A consistent view.
pub struct ReadTxn<'s> {
    store: &'s Store,
    txn: RoTxn<'s, WithoutTls>,
}

/// The one open change.
pub struct WriteTxn<'s> {
    store: &'s Store,
    txn: RwTxn<'s>,
    removed: Vec<ChunkId>,
    /// Held until removed files are gone, so that the next change sees files as they are.
    _writing: MutexGuard<'s, ()>,
}

/// A chunk whose file is durable and which the index does not know yet.
#[derive(Clone, Debug)]
pub struct NewChunk {
    /// Its id.
    pub id: ChunkId,
    /// Its token ids.
    pub tokens: Vec<u32>,
    /// Bytes of its file.
    pub file_bytes: u64,
    /// Its number in the vector index.
    pub vector: Option<u32>,
}

/// Sizes of the whole store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Documents.
    pub documents: u64,
    /// Chunks.
    pub chunks: u64,
    /// Tokens of all chunks.
    pub tokens: u64,
    /// Bytes of all chunk files.
    pub file_bytes: u64,
}

impl Store {
    /// Opens the store in `root` for a fingerprint, creating what is missing.
    ///
    /// # Errors
    /// If another process has it open, or the directory or the index cannot be used.
    pub fn open(root: &Path, fingerprint: Fingerprint) -> Result<Self> {
        let create = |dir: &Path| {
            std::fs::create_dir_all(dir).map_err(|source| StoreError::File {
                what: "create",
                path: dir.to_owned(),
                source,
            })
        };
        create(root)?;
        let lock = FileLock::acquire(&root.join("LOCK"))?;
        let name = fingerprint.to_string()[..16].to_owned();
        let dir = root.join(&name);
        let index = dir.join("index");
        create(&index)?;
        let files = ChunkFiles::open(&dir)?;
        let self_test_files = ChunkFiles::open(&dir.join("self-test"))?;
        let env = open_environment(&index, MAP_BYTES, DATABASES_MAX)?;
        env.clear_stale_readers()?;
        let txn = env.write_txn()?;
        let tables = env.create_databases_and_commit(txn, |open, txn| -> heed::Result<_> {
            Ok(CommitOrAbort::<_, ()>::Commit((
                open.create_database(txn, Some("documents"))?,
                open.create_database(txn, Some("chunks"))?,
                open.create_database(txn, Some("tokens"))?,
                open.create_database(txn, Some("vector-chunks"))?,
                open.create_database(txn, Some("meta"))?,
                open.create_database(txn, Some("places"))?,
            )))
        })?;
        let (documents, chunks, tokens, vectors, meta, places) = tables.unwrap_commit();
        let other_fingerprints = others(root, &name);
        Ok(Self {
            _lock: lock,
            env,
            files,
            self_test_files,
            fingerprint,
            other_fingerprints,
            writing: Mutex::new(()),
            documents,
            chunks,
            tokens,
            vectors,
            meta,
            places,
        })
    }

    /// The environment, for tables that must change together with these.
    pub fn env(&self) -> &StoreEnv {
        &self.env
    }

    /// Chunk files.
    pub fn files(&self) -> &ChunkFiles {
        &self.files
    }

    /// Where the chunk of the self-test lies; no document names it.
    pub fn self_test_files(&self) -> &ChunkFiles {
        &self.self_test_files
    }

    /// What all chunks here were compiled with.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Directories of other fingerprints: misses, reclaimable by removing them.
    pub fn other_fingerprints(&self) -> &[String] {
        &self.other_fingerprints
    }

    /// Begins reading.
    ///
    /// # Errors
    /// LMDB's reason.
    pub fn read(&self) -> Result<ReadTxn<'_>> {
        Ok(ReadTxn { store: self, txn: self.env.read_txn()? })
    }

    /// Begins a change; waits for another one to end.
    ///
    /// # Errors
    /// LMDB's reason.
    pub fn write(&self) -> Result<WriteTxn<'_>> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let txn = self.env.write_txn()?;
        Ok(WriteTxn { store: self, txn, removed: Vec::new(), _writing })
    }

    fn document(&self, txn: &RoTxn<'_, AnyTls>, id: &str) -> Result<Option<DocumentRecord>> {
        self.documents.get(txn, id)?.map(|b| decode(id, b)).transpose()
    }

    fn chunk(&self, txn: &RoTxn<'_, AnyTls>, id: &ChunkId) -> Result<Option<ChunkRecord>> {
        self.chunks.get(txn, id.as_bytes())?.map(|b| decode(&id.to_string(), b)).transpose()
    }
}

fn others(root: &Path, own: &str) -> Vec<String> {
    let Ok(list) = std::fs::read_dir(root) else { return Vec::new() };
    let mut names: Vec<String> = list
        .flatten()
        .filter(|e| e.path().join("index").is_dir())
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|n| n != own)
        .collect();
    names.sort();
    names
}

fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| StoreError::Record { key: key.to_owned(), reason: e.to_string() })
}

fn encode<T: Serialize>(key: &str, value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|e| StoreError::Record { key: key.to_owned(), reason: e.to_string() })
}

fn digest(key: &str, bytes: &[u8]) -> Result<ChunkId> {
    let bytes: [u8; 32] = bytes.try_into().map_err(|_| StoreError::Record {
        key: key.to_owned(),
        reason: format!("a chunk id of {} bytes", bytes.len()),
    })?;
    Ok(ChunkId(Digest(bytes)))
}

impl<'s> ReadTxn<'s> {
    /// LMDB's transaction, for other tables of the environment.
    pub fn txn(&self) -> &RoTxn<'s, WithoutTls> {
        &self.txn
    }

    /// One document.
    ///
    /// # Errors
    /// If the index fails.
    pub fn document(&self, id: &str) -> Result<Option<DocumentRecord>> {
        self.store.document(&self.txn, id)
    }

    /// All documents, by id.
    ///
    /// # Errors
    /// If the index fails.
    pub fn documents(&self) -> Result<Vec<DocumentRecord>> {
        let list = self.store.documents.iter(&self.txn)?;
        list.map(|entry| entry.map_err(Into::into).and_then(|(id, b)| decode(id, b))).collect()
    }

    /// One chunk.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunk(&self, id: &ChunkId) -> Result<Option<ChunkRecord>> {
        self.store.chunk(&self.txn, id)
    }

    /// A chunk's token ids.
    ///
    /// # Errors
    /// If the index fails.
    pub fn tokens(&self, id: &ChunkId) -> Result<Option<Vec<u32>>> {
        let bytes = self.store.tokens.get(&self.txn, id.as_bytes())?;
        Ok(bytes.map(|b| {
            b.chunks_exact(4).map(|t| u32::from_le_bytes([t[0], t[1], t[2], t[3]])).collect()
        }))
    }

    /// A document that uses the chunk, and the chunk's place in it: the first of `preferred` that
    /// does, else the first by name.
    ///
    /// # Errors
    /// If the index fails.
    pub fn place(&self, id: &ChunkId, preferred: &[String]) -> Result<Option<(String, u32)>> {
        for name in preferred {
            if let Some(ordinal) = self.store.places.get(&self.txn, &place_key(id, name))? {
                return decode(name, ordinal).map(|ordinal| Some((name.clone(), ordinal)));
            }
        }
        let mut found = self.store.places.prefix_iter(&self.txn, id.as_bytes())?;
        let Some((key, ordinal)) = found.next().transpose()? else { return Ok(None) };
        let name = String::from_utf8_lossy(&key[id.as_bytes().len()..]).into_owned();
        decode(&name, ordinal).map(|ordinal| Some((name, ordinal)))
    }

    /// The chunk a vector number stands for.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunk_of_vector(&self, vector: u32) -> Result<Option<ChunkId>> {
        let found = self.store.vectors.get(&self.txn, &vector)?;
        found.map(|b| digest(&vector.to_string(), b)).transpose()
    }

    /// Sizes of the whole store.
    ///
    /// # Errors
    /// If the index fails.
    pub fn totals(&self) -> Result<Totals> {
        let documents = self.store.documents.len(&self.txn)?;
        let mut totals = Totals { documents, ..Totals::default() };
        for entry in self.store.chunks.iter(&self.txn)? {
            let (key, bytes) = entry?;
            let chunk: ChunkRecord = decode(&format!("{key:02x?}"), bytes)?;
            totals.chunks += 1;
            totals.tokens += u64::from(chunk.rows);
            totals.file_bytes += chunk.file_bytes;
        }
        Ok(totals)
    }
}

impl<'s> WriteTxn<'s> {
    /// LMDB's transaction, for other tables of the environment.
    pub fn txn(&mut self) -> &mut RwTxn<'s> {
        &mut self.txn
    }

    /// A vector number nobody has used.
    ///
    /// # Errors
    /// If the index fails.
    pub fn next_vector(&mut self) -> Result<u32> {
        let next = self.store.meta.get(&self.txn, "next-vector")?.unwrap_or(0);
        self.store.meta.put(&mut self.txn, "next-vector", &(next + 1))?;
        Ok(next)
    }

    /// One chunk, as this change sees it.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunk(&self, id: &ChunkId) -> Result<Option<ChunkRecord>> {
        self.store.chunk(&self.txn, id)
    }

    /// Adds a chunk nobody refers to yet.
    ///
    /// # Errors
    /// If the index fails.
    pub fn put_chunk(&mut self, new: &NewChunk) -> Result<()> {
        let tokens: Vec<u8> = new.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.store.tokens.put(&mut self.txn, new.id.as_bytes(), &tokens)?;
        if let Some(vector) = new.vector {
            self.store.vectors.put(&mut self.txn, &vector, new.id.as_bytes())?;
        }
        let (rows, file_bytes) = (new.tokens.len() as u32, new.file_bytes);
        let record = ChunkRecord { rows, file_bytes, references: 0, vector: new.vector };
        self.save_chunk(&new.id, &record)
    }

    fn save_chunk(&mut self, id: &ChunkId, record: &ChunkRecord) -> Result<()> {
        let bytes = encode(&id.to_string(), record)?;
        Ok(self.store.chunks.put(&mut self.txn, id.as_bytes(), &bytes)?)
    }

    /// Adds documents, or replaces those of the same ids. Every chunk must be known. References
    /// of all of them are counted before any old version is released, so a chunk may move from
    /// one document to another. Returns vector numbers of chunks nobody refers to any more.
    ///
    /// # Errors
    /// If the index fails or a chunk is unknown.
    pub fn put_documents(&mut self, documents: &[&DocumentRecord]) -> Result<Vec<u32>> {
        let mut old = Vec::new();
        for document in documents {
            old.extend(self.store.document(&self.txn, &document.id)?);
            self.refer(document)?;
            let bytes = encode(&document.id, document)?;
            self.store.documents.put(&mut self.txn, &document.id, &bytes)?;
        }
        let mut vectors = Vec::new();
        for document in old {
            vectors.extend(self.release(document)?);
        }
        // Releasing the old version has removed the places both versions share.
        for document in documents {
            self.put_places(document)?;
        }
        Ok(vectors)
    }

    fn refer(&mut self, document: &DocumentRecord) -> Result<()> {
        for id in &document.chunks {
            let record = self.store.chunk(&self.txn, id)?;
            let mut record = record.ok_or_else(|| StoreError::Record {
                key: id.to_string(),
                reason: format!("document {:?} names a chunk that is not indexed", document.id),
            })?;
            record.references += 1;
            self.save_chunk(id, &record)?;
        }
        Ok(())
    }

    fn put_places(&mut self, document: &DocumentRecord) -> Result<()> {
        for (ordinal, id) in document.chunks.iter().enumerate() {
            let bytes = encode(&document.id, &ordinal)?;
            self.store.places.put(&mut self.txn, &place_key(id, &document.id), &bytes)?;
        }
        Ok(())
    }

    /// Removes a document. Returns vector numbers of chunks nobody refers to any more, or none
    /// if there is no such document.
    ///
    /// # Errors
    /// If the index fails.
    pub fn delete_document(&mut self, id: &str) -> Result<Option<Vec<u32>>> {
        let Some(old) = self.store.document(&self.txn, id)? else { return Ok(None) };
        self.store.documents.delete(&mut self.txn, id)?;
        self.release(old).map(Some)
    }

    fn release(&mut self, old: DocumentRecord) -> Result<Vec<u32>> {
        let mut vectors = Vec::new();
        for id in old.chunks {
            self.store.places.delete(&mut self.txn, &place_key(&id, &old.id))?;
            let Some(mut record) = self.store.chunk(&self.txn, &id)? else { continue };
            record.references = record.references.saturating_sub(1);
            if record.references > 0 {
                self.save_chunk(&id, &record)?;
                continue;
            }
            self.store.chunks.delete(&mut self.txn, id.as_bytes())?;
            self.store.tokens.delete(&mut self.txn, id.as_bytes())?;
            if let Some(vector) = record.vector {
                self.store.vectors.delete(&mut self.txn, &vector)?;
                vectors.push(vector);
            }
            self.removed.push(id);
        }
        Ok(vectors)
    }

    /// Makes the change durable, then removes files nobody refers to any more. A crash in
    /// between, or a file that cannot be removed, leaves a file without an index entry, which a
    /// later ingest adopts.
    ///
    /// # Errors
    /// If LMDB cannot commit: nothing has changed then.
    pub fn commit(self) -> Result<Vec<ChunkId>> {
        self.txn.commit()?;
        for id in &self.removed {
            if let Err(e) = self.store.files.remove(id) {
                tracing::warn!("chunk {id}: {e}");
            }
        }
        Ok(self.removed)
    }
}

fn place_key(id: &ChunkId, document: &str) -> Vec<u8> {
    [id.as_bytes().as_slice(), document.as_bytes()].concat()
}
