//! matkv-retrieve
