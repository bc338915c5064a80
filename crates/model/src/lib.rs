//! matkv-model
