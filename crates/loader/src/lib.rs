//! Process A: gateway, retriever, loader, sub-prefill, ring producer.
//!
//! A request moves one way: gateway → `retrieve` thread (embed, search, plan) → `load` thread
//! (arena, flash) → `compute` thread (sub-prefill, first token, publish) → decoder. What it holds
//! travels with it in types that give it back when they are dropped.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod arena;
mod cache;
mod chunk_spec;
mod compile;
mod compute;
mod core;
mod error;
mod flash;
mod gateway;
mod generate;
mod hand_over;
mod ingest;
mod ingest_commit;
mod load;
mod load_thread;
mod plan;
mod prefill;
mod request;
mod retrieve;
mod run;
mod self_test;
mod serve;
mod session;
mod session_thread;
mod status;
mod threads;
mod wire;
mod world;

/// Models by name, for the command line.
pub mod models {
    pub use matkv_model::{PULLABLE, PullProgress, pull, pulled};
}

/// Child processes, for the command line.
pub mod process {
    pub use matkv_sys::{die_with_parent, evict_page_cache, terminate, terminate_and_wait};
}

/// The state machines of this process, without its threads: what the simulation of both processes
/// drives.
pub mod machine {
    pub use crate::arena::{Arena, ChunkSlot, FillingSlot};
    pub use crate::chunk_spec::ChunkSpec;
    pub use crate::compile::{CompileJob, Compiled};
    pub use crate::error::RequestError;
    pub use crate::flash::Unusable;
    pub use crate::hand_over::hand_over;
    pub use crate::load::Load;
    pub use crate::plan::{Plan, PlannedSegment, PlannedSource};
    pub use crate::request::{ChunkSource, ChunkUse, Lease, Planned, RequestState, Resident};
    pub use crate::session::Sessions;
    pub use crate::world::{LoadMessage, Materialize, World};
}

pub use error::LoaderError;
pub use run::{Options, run};
