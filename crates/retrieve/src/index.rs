//! The trait between retrieval and a vector index.

use matkv_store::{ReadTxn, WriteTxn};

use crate::error::Result;

/// A vector found near a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// Number of the vector.
    pub vector: u32,
    /// Cosine similarity, −1…1.
    pub score: f32,
}

/// An index of unit vectors. An embedded one changes inside the store's transaction; a remote
/// one stages its change there and applies it before the commit.
pub trait VectorIndex: Send + Sync {
    /// Adds and removes vectors in one change.
    ///
    /// # Errors
    /// If the index refuses; the transaction must then be dropped.
    fn update(&self, txn: &mut WriteTxn<'_>, add: &[(u32, Vec<f32>)], remove: &[u32])
    -> Result<()>;

    /// The `k` nearest vectors, nearest first; fewer if there are fewer.
    ///
    /// # Errors
    /// If the index cannot be read.
    fn search(&self, txn: &ReadTxn<'_>, query: &[f32], k: usize) -> Result<Vec<Hit>>;
}
