//! Measurements of parts, for `doctor` and the benchmarks: the code that serves, without the
//! processes around it.

pub mod codec;
pub mod device;
pub mod load;
pub mod policies;
