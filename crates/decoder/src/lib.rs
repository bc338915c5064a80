//! matkv-decoder-core
