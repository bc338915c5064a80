//! matkv-sys
