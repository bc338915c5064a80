//! matkv-benches
