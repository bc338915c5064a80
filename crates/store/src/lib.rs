//! The store of one corpus: chunk files on flash and the index of documents and chunks in LMDB.
//!
//! One process opens a store (its lock says which). A chunk file is durable before the index
//! names it; documents, chunks, tokens and vectors change in one transaction. Data of another
//! fingerprint lives in another directory: it is never read, and can be removed as a whole.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod chunk_files;
mod error;
mod records;
mod store;

pub use chunk_files::ChunkFiles;
pub use error::{Result, StoreError};
pub use records::{ChunkRecord, DocumentRecord};
pub use store::{NewChunk, ReadTxn, Store, StoreEnv, Totals, WriteTxn};
