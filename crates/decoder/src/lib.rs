//! Process B: takes published sequences from the submission ring and decodes them together.
//!
//! Two threads: `session` shakes hands with the loader and watches its life; `decode` runs the
//! steps. B never allocates in the arena and writes only a sequence's own slot.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod batch;
mod error;
mod run;
mod sequence;
mod session;

pub use error::DecoderError;
pub use run::{Options, run};
