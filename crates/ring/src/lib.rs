//! matkv-ring
