//! Micro-benchmarks; see `benches/`. The end-to-end harness is `matkv bench`.
#![forbid(unsafe_code)]
