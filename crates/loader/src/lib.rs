//! Process A: gateway, retriever, loader, sub-prefill, ring producer.
//!
//! A request moves one way: gateway → `retrieve` thread (embed, search, plan) → `load` thread
//! (arena, flash) → `compute` thread (sub-prefill, first token, publish) → decoder. What it holds
//! travels with it in types that give it back when they are dropped.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod arena;
mod cache;
mod compile;
mod compute;
mod core;
mod error;
mod flash;
mod gateway;
mod generate;
mod ingest;
mod ingest_commit;
mod load;
mod plan;
mod prefill;
mod request;
mod retrieve;
mod run;
mod serve;
mod session;
mod status;
mod threads;
mod wire;

/// Models by name, for the command line.
pub mod models {
    pub use matkv_model::{PULLABLE, PullProgress, pull, pulled};
}

/// Child processes, for the command line.
pub mod process {
    pub use matkv_sys::{die_with_parent, evict_page_cache, terminate_and_wait};
}

pub use error::LoaderError;
pub use run::{Options, run};
