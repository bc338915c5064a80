//! What the end-to-end tests share: a pair of real processes, its client, its files.
//!
//! Every test starts what it needs in directories of its own, waits by polling with a deadline,
//! and ends with [`Server::stop`], which also checks that nothing is held and nothing is left.
//! A failure here is a panic that says what was waited for.
#![forbid(unsafe_code)]

mod files;
mod ingest;
mod process;
mod reply;
mod separate;
mod server;
mod wait;

pub use files::{chunk_file, chunk_files, entries};
pub use ingest::{Ingest, Ingested};
pub use matkv_testkit::text;
pub use process::{
    Output, Running, children, descriptors, is_alive, program, run_with_input, segments, signal,
};
pub use reply::{Reply, ask, metric, open, question, read, same_logits};
pub use separate::{Manager, at_rest, ready, service, start, variables};
pub use server::{Home, Server};
pub use wait::{DEADLINE, until};
