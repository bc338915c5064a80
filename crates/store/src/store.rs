//! The store: lock, directories, LMDB environment, transactions.

mod txn;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use heed::types::{Bytes, Str, U32};
use heed::{AnyTls, CommitOrAbort, Database, Env, RoTxn, RwTxn, WithoutTls, byteorder::BigEndian};
use matkv_sys::{FileLock, open_environment};
use matkv_types::{ChunkId, Digest};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cold::ColdTier;
use crate::error::{Result, StoreError};
use crate::heat::{Heat, HeatCache};
use crate::identity::{Identity, others};
use crate::manifests::Manifests;
use crate::options::StoreOptions;
use crate::policy::Item;
use crate::records::{ChunkRecord, DocumentRecord, Placement, Tier, Totals};
use crate::residents::Residents;
use crate::space::Space;
use crate::volume::{Volume, VolumeKind};

/// The LMDB environment other tables of the same store may live in.
pub type StoreEnv = Env<WithoutTls>;

/// Address space of the index, not memory or disk: LMDB grows its file as needed. Tokens take
/// 4 KiB and vectors about 2 KiB a chunk, so this is room for ten million chunks.
const MAP_BYTES: usize = 64 << 30;
/// Nine tables here, and room for those of vector indexes.
const DATABASES_MAX: u32 = 24;

type Table<K> = Database<'static, K, Bytes>;

/// LMDB tables.
pub(crate) struct Tables {
    pub documents: Table<Str>,
    pub chunks: Table<Bytes>,
    pub tokens: Table<Bytes>,
    pub vectors: Table<U32<BigEndian>>,
    pub meta: Database<'static, Str, U32<BigEndian>>,
    /// For people: `chunk id ‖ document id` to the chunk's ordinal in the document.
    pub places: Table<Bytes>,
    /// Uses of chunks.
    pub heat: Table<Bytes>,
    /// Chunks that may have files the index does not name: being written, or being removed.
    pub pending: Table<Bytes>,
    /// Chunks that may have objects in the cold tier the index does not name.
    pub pending_cold: Table<Bytes>,
    /// Sums, so that nobody has to count.
    pub sums: Table<Str>,
}

impl Tables {
    fn open(env: &StoreEnv) -> Result<Self> {
        let txn = env.write_txn()?;
        // Databases may be used only after this commit.
        let opened = env.create_databases_and_commit(txn, |open, txn| -> heed::Result<_> {
            Ok(CommitOrAbort::<_, ()>::Commit((
                (
                    open.create_database(txn, Some("documents"))?,
                    open.create_database(txn, Some("chunks"))?,
                    open.create_database(txn, Some("tokens"))?,
                    open.create_database(txn, Some("vector-chunks"))?,
                    open.create_database(txn, Some("meta"))?,
                ),
                (
                    open.create_database(txn, Some("places"))?,
                    open.create_database(txn, Some("heat"))?,
                    open.create_database(txn, Some("pending"))?,
                    open.create_database(txn, Some("pending-cold"))?,
                    open.create_database(txn, Some("sums"))?,
                ),
            )))
        })?;
        let (
            (documents, chunks, tokens, vectors, meta),
            (places, heat, pending, pending_cold, sums),
        ) = opened.unwrap_commit();
        Ok(Self {
            documents,
            chunks,
            tokens,
            vectors,
            meta,
            places,
            heat,
            pending,
            pending_cold,
            sums,
        })
    }

    /// Chunks that may have bytes in a tier the index does not name.
    pub fn pending_in(&self, tier: Tier) -> &Table<Bytes> {
        match tier {
            Tier::Flash => &self.pending,
            Tier::Cold => &self.pending_cold,
        }
    }

    pub fn totals(&self, txn: &RoTxn<'_, AnyTls>) -> Result<Totals> {
        let found = self.sums.get(txn, "totals")?;
        found.map_or_else(|| Ok(Totals::default()), |b| decode("totals", b))
    }
}

/// An open store. Readers and the one writer may be on any threads.
pub struct Store {
    pub(crate) env: StoreEnv,
    pub(crate) tables: Tables,
    pub(crate) volume: Volume,
    self_test_files: Volume,
    pub(crate) cold: Option<Arc<ColdTier>>,
    pub(crate) options: StoreOptions,
    pub(crate) identity: Identity,
    pub(crate) heat: HeatCache,
    pub(crate) space: Space,
    pub(crate) residents: Mutex<Residents>,
    pub(crate) manifests: Manifests,
    /// Chunks whose files are being written, and by how many.
    pub(crate) announced: Mutex<HashMap<ChunkId, u32>>,
    writing: Mutex<()>,
    /// One chunk moves into the cold tier, or out of it, at a time.
    pub(crate) moving_cold: Mutex<()>,
    /// One chunk file is written at a time: room is found for it first.
    pub(crate) placing: Mutex<()>,
    _lock: FileLock,
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
    totals: Totals,
    /// Chunks nobody refers to any more.
    removed: Vec<(ChunkId, ChunkRecord)>,
    /// Documents to be written beside the index, and those to be taken away.
    written: Vec<DocumentRecord>,
    forgotten: Vec<String>,
    /// What the policies have to be told.
    moves: Vec<(ChunkId, Tier, Option<Item>)>,
    _writing: MutexGuard<'s, ()>,
}

/// A chunk whose file is durable and which the index does not know yet.
#[derive(Clone, Debug)]
pub struct NewChunk {
    /// Its id.
    pub id: ChunkId,
    /// Its token ids.
    pub tokens: Vec<u32>,
    /// Its file on flash, if it has one.
    pub flash: Option<Placement>,
    /// In the cold tier.
    pub cold: Option<Placement>,
    /// Its number in the vector index.
    pub vector: Option<u32>,
    /// Milliseconds it took to compute.
    pub compute_ms: u32,
}

impl Store {
    /// Opens the store of an identity, creating what is missing. What a killed process left is
    /// put in order, and capacities are enforced, before this returns.
    ///
    /// # Errors
    /// If another process has it open, or a directory or the index cannot be used.
    pub fn open(options: StoreOptions, identity: Identity) -> Result<Self> {
        let create = |dir: &Path| {
            std::fs::create_dir_all(dir).map_err(|source| StoreError::File {
                what: "create",
                path: dir.to_owned(),
                source,
            })
        };
        create(&options.root)?;
        let lock = FileLock::acquire(&options.root.join("LOCK"))?;
        let name = identity.directory();
        let dir = options.root.join(&name);
        let index = dir.join("index");
        create(&index)?;
        identity.write(&dir)?;
        let roots: Vec<PathBuf> = options.volume_roots().iter().map(|d| d.join(&name)).collect();
        let volume = Volume::open(&roots, options.kind, options.stripe_unit)?;
        let self_test = [dir.join("self-test")];
        let self_test_files = Volume::open(&self_test, VolumeKind::Single, 4096)?;
        let env = open_environment(&index, MAP_BYTES, DATABASES_MAX)?;
        env.clear_stale_readers()?;
        let cold = match &options.cold {
            Some(cold) => Some(Arc::new(ColdTier::open(&cold.place, identity.fingerprint)?)),
            None => None,
        };
        let stale = others(&options, &name);
        let this = Self {
            tables: Tables::open(&env)?,
            env,
            volume,
            self_test_files,
            cold,
            space: Space::new(&options, stale),
            residents: Mutex::new(Residents::new(options.policy)),
            manifests: Manifests::open(&dir)?,
            options,
            identity,
            heat: HeatCache::default(),
            announced: Mutex::default(),
            writing: Mutex::new(()),
            moving_cold: Mutex::new(()),
            placing: Mutex::new(()),
            _lock: lock,
        };
        this.recover(&dir)?;
        Ok(this)
    }

    /// The environment, for tables that must change together with these.
    pub fn env(&self) -> &StoreEnv {
        &self.env
    }

    /// Chunk files on flash.
    pub fn files(&self) -> &Volume {
        &self.volume
    }

    /// The cold tier.
    pub fn cold(&self) -> Option<&Arc<ColdTier>> {
        self.cold.as_ref()
    }

    /// Where the chunk of the self-test lies; no document names it.
    pub fn self_test_files(&self) -> &Volume {
        &self.self_test_files
    }

    /// What all chunks here were compiled with.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// How it was opened.
    pub fn options(&self) -> &StoreOptions {
        &self.options
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
        let totals = self.tables.totals(&txn)?;
        Ok(WriteTxn {
            store: self,
            txn,
            totals,
            removed: Vec::new(),
            written: Vec::new(),
            forgotten: Vec::new(),
            moves: Vec::new(),
            _writing,
        })
    }

    fn document(&self, txn: &RoTxn<'_, AnyTls>, id: &str) -> Result<Option<DocumentRecord>> {
        self.tables.documents.get(txn, id)?.map(|b| decode(id, b)).transpose()
    }

    pub(crate) fn chunk(
        &self,
        txn: &RoTxn<'_, AnyTls>,
        id: &ChunkId,
    ) -> Result<Option<ChunkRecord>> {
        self.tables.chunks.get(txn, id.as_bytes())?.map(|b| decode(&id.to_string(), b)).transpose()
    }

    pub(crate) fn heat_in(&self, txn: &RoTxn<'_, AnyTls>, id: &ChunkId) -> Heat {
        let stored = self.tables.heat.get(txn, id.as_bytes()).ok().flatten();
        stored.and_then(Heat::decode).unwrap_or_default()
    }
}

pub(crate) fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| StoreError::Record { key: key.to_owned(), reason: e.to_string() })
}

pub(crate) fn encode<T: Serialize>(key: &str, value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|e| StoreError::Record { key: key.to_owned(), reason: e.to_string() })
}

pub(crate) fn digest(key: &str, bytes: &[u8]) -> Result<ChunkId> {
    let bytes: [u8; 32] = bytes.try_into().map_err(|_| StoreError::Record {
        key: key.to_owned(),
        reason: format!("a chunk id of {} bytes", bytes.len()),
    })?;
    Ok(ChunkId(Digest(bytes)))
}

fn keys(table: &Table<Bytes>, txn: &RoTxn<'_, AnyTls>) -> Result<Vec<ChunkId>> {
    let all = table.iter(txn)?;
    all.map(|e| e.map_err(Into::into).and_then(|(k, _)| digest("pending", k))).collect()
}

fn place_key(id: &ChunkId, document: &str) -> Vec<u8> {
    [id.as_bytes().as_slice(), document.as_bytes()].concat()
}
