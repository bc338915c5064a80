//! The store of one corpus: chunk files on flash and in a cold tier, and the index of documents
//! and chunks in LMDB.
//!
//! One process opens a store (its lock says which). A chunk file is durable before the index
//! names it; documents, chunks, tokens and vectors change in one transaction. Data of another
//! identity lives in another directory: it is never read, and makes room before anything of ours.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod admin;
mod breaker;
mod cold;
mod error;
mod heat;
mod identity;
mod manifests;
mod options;
pub mod policy;
mod records;
mod recovery;
mod residents;
mod room;
mod space;
mod store;
mod tiers;
mod volume;

pub use admin::GcReport;
pub use breaker::Breaker;
pub use cold::{ColdOptions, ColdTier};
pub use error::{Result, StoreError};
pub use heat::{Heat, PromotionRule};
pub use identity::Identity;
pub use options::{ColdTierOptions, StoreOptions, TierOptions};
pub use records::{ChunkRecord, Departure, DocumentRecord, Placement, Tier, Totals};
pub use recovery::{CheckedCopy, Embed, RebuildReport, ScrubReport};
pub use room::Announced;
pub use store::{NewChunk, ReadTxn, Store, StoreEnv, WriteTxn};
pub use tiers::{page_aligned, unix_seconds};
pub use volume::{OpenCopy, Volume, VolumeKind};
