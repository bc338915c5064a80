//! Something that took time, for a trace of both processes.

use serde::{Deserialize, Serialize};

/// What ran when, and for which request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What.
    pub name: String,
    /// Thread it ran on, or what it waited for.
    pub track: String,
    /// Number of the request it was for; 0 for none.
    pub request: u64,
    /// Nanoseconds of the monotonic clock, which all processes of a machine share.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}
