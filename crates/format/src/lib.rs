//! The chunk file (`.kv`), format version 1: pure functions over bytes.
//!
//! Layout: a 4 KiB superblock, token ids, then one extent per layer, all page-aligned. With codec
//! `none` the extents are the KV section exactly as attention reads it, so a load is one read of
//! the file into a slot. See `docs/chunk-file.md`.
//!
//! Nothing here believes a size before the superblock's own checksum has been verified, and
//! nothing allocates from a size in the file.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod chunk_file;
mod error;
mod fp8;
mod lossless;
mod padding;
mod quantize;
mod superblock;

pub use chunk_file::{ChunkFile, Expectation};
pub use error::FormatError;
pub use superblock::{FORMAT_VERSION, MAGIC, Superblock};
