//! matkv-testkit
