//! The embedded index: hannoy's HNSW in the store's LMDB environment.

use hannoy::distances::Cosine;
use hannoy::{Database, Reader, Writer};
use heed::CommitOrAbort;
use matkv_store::{ReadTxn, Store, WriteTxn};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::embedder::EMBEDDING_DIM;
use crate::error::{Result, RetrieveError};
use crate::index::{Hit, VectorIndex};

/// Links per node above the ground level and on it (Malkov and Yashunin 2016 call them M, M0).
const LINKS: usize = 16;
const GROUND_LINKS: usize = 32;
const EF_CONSTRUCTION: usize = 100;
/// Candidates looked at during a search; recall against speed.
const EF_SEARCH: usize = 200;
const INDEX: u16 = 0;

/// Vectors beside the store's tables; committed with them.
pub struct HannoyIndex {
    database: Database<'static, Cosine>,
}

fn failed(e: impl std::fmt::Display) -> RetrieveError {
    RetrieveError::Index(e.to_string())
}

impl HannoyIndex {
    /// Opens or creates the table in the store's environment.
    ///
    /// # Errors
    /// If LMDB refuses.
    pub fn open(store: &Store) -> Result<Self> {
        let env = store.env();
        let txn = env.write_txn().map_err(failed)?;
        let database = env
            .create_databases_and_commit(txn, |open, txn| -> heed::Result<_> {
                open.create_database(txn, Some("vectors")).map(CommitOrAbort::<_, ()>::Commit)
            })
            .map_err(failed)?
            .unwrap_commit();
        Ok(Self { database })
    }
}

impl VectorIndex for HannoyIndex {
    fn update(
        &self,
        txn: &mut WriteTxn<'_>,
        add: &[(u32, Vec<f32>)],
        remove: &[u32],
    ) -> Result<()> {
        if add.is_empty() && remove.is_empty() {
            return Ok(());
        }
        let writer = Writer::new(self.database, INDEX, EMBEDDING_DIM);
        for (id, vector) in add {
            // A vector without direction would be at distance 0 of everything.
            if vector.iter().all(|x| *x == 0.0) {
                return Err(RetrieveError::Index(format!("vector {id} is zero")));
            }
            writer.add_item(txn.txn(), *id, vector).map_err(failed)?;
        }
        for id in remove {
            writer.del_item(txn.txn(), *id).map_err(failed)?;
        }
        // A reader fails on an index that has changed and was not built: build in the same
        // transaction. The seed is fixed, so the same history gives the same graph.
        let mut rng = StdRng::seed_from_u64(0);
        let mut builder = writer.builder(&mut rng);
        builder.ef_construction(EF_CONSTRUCTION);
        builder.build::<LINKS, GROUND_LINKS>(txn.txn()).map_err(failed)
    }

    fn search(&self, txn: &ReadTxn<'_>, query: &[f32], k: usize) -> Result<Vec<Hit>> {
        let reader = match Reader::open(txn.txn(), INDEX, self.database) {
            Ok(reader) => reader,
            // Nothing has ever been added.
            Err(hannoy::Error::MissingMetadata(_)) => return Ok(Vec::new()),
            Err(e) => return Err(failed(e)),
        };
        if reader.n_items() == 0 || k == 0 {
            return Ok(Vec::new());
        }
        let mut search = reader.nns(k);
        search.ef_search(EF_SEARCH.max(k));
        let found = search.by_vector(txn.txn(), query).map_err(failed)?;
        // hannoy's distance is (1 − cos) / 2.
        let hit = |(vector, distance): (u32, f32)| Hit { vector, score: 1.0 - 2.0 * distance };
        Ok(found.into_nns().into_iter().map(hit).collect())
    }
}
