//! matkv-api
