//! matkv-store
