//! matkv-telemetry
