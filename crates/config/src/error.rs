//! What is wrong with a configuration, where, and what to do.

use std::path::PathBuf;

/// A configuration error.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path} is not valid TOML: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's reason, with line and column.
        reason: String,
    },
    /// No such key.
    #[error("unknown key {key:?} in {origin}{hint}")]
    UnknownKey {
        /// The key.
        key: String,
        /// Where it stands.
        origin: String,
        /// The nearest key, as a suggestion.
        hint: String,
    },
    /// A value does not fit its key.
    #[error("{key} = {value:?} in {origin}: {reason}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// Where it stands.
        origin: String,
        /// What is wrong.
        reason: String,
    },
}
