//! matkv-loader-core
