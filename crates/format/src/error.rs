//! Why bytes are not the chunk file that was expected.

use matkv_types::Codec;

/// A difference between a file and what was expected of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The file ends too early.
    #[error("file of {found} bytes, expected {expected}")]
    Length {
        /// Bytes there should be.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// Not a chunk file.
    #[error("wrong magic {found:02x?}")]
    Magic {
        /// The first eight bytes.
        found: [u8; 8],
    },
    /// Written by a later version.
    #[error("format version {found}, this build reads {expected}")]
    Version {
        /// What this build reads.
        expected: u32,
        /// What the file says.
        found: u32,
    },
    /// A checksum does not match.
    #[error("checksum of {what} is {found:08x}, expected {expected:08x}")]
    Checksum {
        /// Which part.
        what: String,
        /// What the file says.
        expected: u32,
        /// What its bytes give.
        found: u32,
    },
    /// A field differs from what was expected.
    #[error("{field} is {found}, expected {expected}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What was expected.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// A compressed extent cannot be restored, or a layer not compressed.
    #[error("{codec}: {reason}")]
    Codec {
        /// Which codec.
        codec: Codec,
        /// What it said.
        reason: String,
    },
}
