//! matkv-format
