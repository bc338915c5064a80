//! Identifiers: a 32-byte digest under three names that must not be mixed up.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::hash::LengthPrefixedHasher;

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

/// Why a digest could not be read from text.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("expected 64 hexadecimal digits, found {found:?}")]
pub struct ParseDigestError {
    /// The text that was given.
    pub found: String,
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let err = || ParseDigestError { found: text.to_owned() };
        if text.len() != 64 || !text.is_ascii() {
            return Err(err());
        }
        let mut out = [0u8; 32];
        for (byte, pair) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| err())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| err())?;
        }
        Ok(Self(out))
    }
}

macro_rules! digest_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub Digest);

        impl $name {
            /// The raw bytes.
            pub fn as_bytes(&self) -> &[u8; 32] {
                &self.0.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = ParseDigestError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }
    };
}

digest_newtype! {
    /// Hash of everything that decides the bits of a chunk's KV: weights, tokenizer, prefix,
    /// RoPE, arithmetic class. Another fingerprint is a miss, never wrong KV.
    Fingerprint
}
digest_newtype! {
    /// Hash of a chunk's token ids.
    ContentId
}
digest_newtype! {
    /// Identity of a materialized chunk: fingerprint, tenant scope and content together.
    ChunkId
}

impl ContentId {
    /// `SHA-256(tokens)`.
    pub fn of_tokens(tokens: &[u32]) -> Self {
        Self(LengthPrefixedHasher::default().tokens(tokens).finish())
    }
}

impl ChunkId {
    /// `SHA-256(fingerprint, tenant scope, content id)`, each part length-prefixed.
    pub fn new(fingerprint: Fingerprint, scope: &str, content: ContentId) -> Self {
        Self(
            LengthPrefixedHasher::default()
                .part(fingerprint.as_bytes())
                .part(scope.as_bytes())
                .part(content.as_bytes())
                .finish(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trip_and_refusal() {
        let id = ContentId::of_tokens(&[1, 2, 3]);
        assert_eq!(id.to_string().parse::<ContentId>(), Ok(id));
        assert!("zz".parse::<Digest>().is_err());
        assert!("é".repeat(32).parse::<Digest>().is_err());
    }

    #[test]
    fn scope_and_fingerprint_are_part_of_the_identity() {
        let fp = Fingerprint(Digest([7; 32]));
        let content = ContentId::of_tokens(&[5]);
        let id = ChunkId::new(fp, "default", content);
        assert_ne!(id, ChunkId::new(fp, "other", content));
        assert_ne!(id, ChunkId::new(Fingerprint(Digest([8; 32])), "default", content));
    }
}
