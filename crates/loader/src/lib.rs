//! Process A: gateway, retriever, loader, sub-prefill, ring producer.
//!
//! A request moves one way: gateway → `retrieve` thread (embed, search, plan) → `load` thread
//! (arena, flash) → `compute` thread (sub-prefill, first token, publish) → decoder. What it holds
//! travels with it in types that give it back when they are dropped.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

pub mod admin;
mod arena;
mod bundle;
mod cache;
mod chunk_spec;
mod compile;
mod compute;
mod core;
mod earlier;
mod error;
mod flash;
mod focus;
mod gateway;
mod generate;
mod groups;
mod growing;
mod hand_over;
mod ingest;
mod ingest_commit;
mod keeper;
mod load;
mod load_thread;
pub mod measure;
pub mod offline;
mod onboard;
mod operator;
mod plan;
mod prefill;
mod rates;
mod request;
mod retrieve;
mod run;
mod self_test;
mod serve;
mod session;
mod session_thread;
mod staging;
mod status;
mod store_options;
mod threads;
mod throttled;
mod together;
mod wire;
mod world;

/// Writes a bundle of documents without a running loader.
pub use bundle::export;

/// Models by name, for the command line.
pub mod models {
    pub use matkv_model::{PULLABLE, PullProgress, packed_files, pull, pulled};
}

/// Child processes, for the command line.
pub mod process {
    pub use matkv_sys::{
        die_with_parent, evict_page_cache, free_bytes, shared_memory_pages, terminate,
        terminate_and_wait,
    };
}

/// The state machines of this process, without its threads: what the simulation of both processes
/// drives.
pub mod machine {
    pub use crate::arena::{Arena, ChunkSlot, FillingSlot};
    pub use crate::chunk_spec::ChunkSpec;
    pub use crate::compile::{CompileJob, Compiled};
    pub use crate::earlier::Keeping;
    pub use crate::error::RequestError;
    pub use crate::flash::Unusable;
    pub use crate::focus::focused;
    pub use crate::growing::{Growing, Wait};
    pub use crate::hand_over::hand_over;
    pub use crate::load::Load;
    pub use crate::plan::{Plan, PlannedSegment, PlannedSource};
    pub use crate::request::{
        ChunkSource, ChunkUse, Lease, Leased, Materialized, NearChunk, Planned, RequestState,
        Resident,
    };
    pub use crate::session::Sessions;
    pub use crate::world::{Found, LoadJob, LoadMessage, Loaded, Materialize, World};
    pub use matkv_store::Tier;
    pub use matkv_store::policy::PolicyKind;
}

pub use error::LoaderError;
pub use run::{Options, run};
