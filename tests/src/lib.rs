//! matkv-tests
