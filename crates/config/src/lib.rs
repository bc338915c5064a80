//! Configuration of every component: one table of settings, with the origin of each value.
//!
//! Precedence: flag > environment (`MATKV_*`) > file > preset > default. A key nobody knows is
//! an error that names the nearest one.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod config;
mod error;
mod forms;
mod resolve;
mod settings;
mod units;

pub use config::{Config, IoEngine, StorageType};
pub use error::ConfigError;
pub use resolve::{Origin, Resolved, Sources};
pub use settings::{SETTINGS, Setting};
pub use units::{format_bytes, format_duration, parse_bytes, parse_duration};
