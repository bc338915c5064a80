//! matkv-config
