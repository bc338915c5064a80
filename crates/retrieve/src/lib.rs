//! Finding chunks: token windows, MiniLM embeddings, a vector index beside the store's tables.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod bert;
mod chunker;
mod embedder;
mod error;
mod hannoy_index;
mod index;
mod words;

pub use chunker::{Chunker, ChunkerError};
pub use embedder::{EMBEDDING_DIM, Embedder};
pub use error::{Result, RetrieveError};
pub use hannoy_index::HannoyIndex;
pub use index::{Hit, VectorIndex};
