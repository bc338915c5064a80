//! SHA-256 over length-prefixed parts.
//!
//! Prefixing each part with its length makes the encoding injective: `("ab", "c")` and
//! `("a", "bc")` hash differently.

use sha2::{Digest as _, Sha256};

use crate::ids::Digest;

/// Hashes a list of byte strings, each preceded by its length as a little-endian `u64`.
#[derive(Default, Clone)]
pub struct LengthPrefixedHasher(Sha256);

impl LengthPrefixedHasher {
    /// Adds one part.
    #[must_use]
    pub fn part(mut self, bytes: &[u8]) -> Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// Adds token ids, four little-endian bytes each.
    #[must_use]
    pub fn tokens(self, tokens: &[u32]) -> Self {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.part(&bytes)
    }

    /// The digest of the parts so far.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundaries_matter() {
        let a = LengthPrefixedHasher::default().part(b"ab").part(b"c").finish();
        let b = LengthPrefixedHasher::default().part(b"a").part(b"bc").finish();
        assert_ne!(a, b);
    }
}
