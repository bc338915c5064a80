//! Both processes in one thread, under a seed: the loader's load machine and sessions, the real
//! rings and sequence records over one region, the decoder's batch; only the device, the clock,
//! the model and death are simulated.
//!
//! Everything that happens is decided by the seed, so a seed that fails fails again. Both
//! processes share one region, and so one ledger of handles: memory that one side reuses while the
//! other still reads it is an error at once, not a wrong answer later.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod chunks;
mod client;
mod engine;
mod loader;
mod random;
mod sim;
mod world;

pub use sim::{Report, run};
