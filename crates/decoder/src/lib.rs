//! Process B: takes published sequences from the submission ring and decodes them together.
//!
//! The `session` thread shakes hands with a loader and decodes; `watch` looks after the loader's
//! life and shows this process's. B never allocates in the arena and writes only a sequence's own
//! slot.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod batch;
mod engine;
mod error;
mod run;
mod sequence;
mod session;

pub use batch::{Batch, Limits, Turn};
pub use engine::Engine;
pub use error::DecoderError;
pub use run::{Options, run};
