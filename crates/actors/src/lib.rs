//! Supervision of dedicated threads with ractor: one actor per thread, policies as data.
//!
//! Actors carry lifecycle only. Data goes through bounded channels between the threads, which
//! know nothing of actors: a thread is a function that returns when its [`StopFlag`] is raised,
//! and says in its [`Pulse`] how it gets on.
//! A panic is caught, reported to the supervisor as a failure, and handled by the child's
//! [`Policy`]; ractor's default supervisor would stop itself instead.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod pulse;
mod stop;
mod supervisor;
mod worker;

pub use pulse::{Pulse, Stillness, Watch};
pub use stop::{StopFlag, WakerId};
pub use supervisor::{Outcome, Supervision, supervise};
pub use worker::{Policy, ThreadSpec};
