//! Encodings: how one chunk's rows are written. An encoding is not part of a chunk's identity.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Element type of KV rows.
///
/// Attention reads the arena forms, [`Self::F32`], [`Self::Bf16`] and [`Self::Int8`]; the others
/// are forms at rest and are widened to bf16 on load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// 32-bit rows: the reference the kernels are tested with; never written to flash.
    F32,
    /// bfloat16 rows.
    Bf16,
    /// 8-bit integers: K scaled per channel in groups of 64 rows, V per row and head.
    Int8,
    /// IEEE 754 half precision.
    Fp16,
    /// 8-bit floats e4m3, one scale per head for K and one for V.
    Fp8,
    /// 4-bit integers with scale and minimum: K per channel in groups of 64 rows, V per row and
    /// head.
    Int4,
}

impl KvDtype {
    /// Every type a chunk file may have.
    pub const AT_REST: [Self; 5] = [Self::Bf16, Self::Fp16, Self::Fp8, Self::Int8, Self::Int4];

    /// Bits of one element, scales not counted.
    pub const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::Bf16 | Self::Fp16 => 16,
            Self::Int8 | Self::Fp8 => 8,
            Self::Int4 => 4,
        }
    }

    /// Bytes of `elements` elements.
    pub const fn bytes_of(self, elements: usize) -> usize {
        elements * self.bits() / 8
    }

    /// The form in which rows of this type lie in the arena.
    pub const fn in_arena(self) -> Self {
        match self {
            Self::F32 => Self::F32,
            Self::Int8 => Self::Int8,
            Self::Bf16 | Self::Fp16 | Self::Fp8 | Self::Int4 => Self::Bf16,
        }
    }

    /// Number on flash and in descriptors.
    pub const fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
            Self::Int8 => 2,
            Self::Fp16 => 3,
            Self::Fp8 => 4,
            Self::Int4 => 5,
        }
    }

    /// Inverse of [`Self::code`].
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::F32),
            1 => Some(Self::Bf16),
            2 => Some(Self::Int8),
            3 => Some(Self::Fp16),
            4 => Some(Self::Fp8),
            5 => Some(Self::Int4),
            _ => None,
        }
    }

    /// Name in configuration and output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that is none of the known ones.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{found:?} is not one of {known}")]
pub struct ParseEncodingError {
    /// What was given.
    pub found: String,
    /// What there is.
    pub known: String,
}

pub(crate) fn by_name<T: Copy>(
    found: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> Result<T, ParseEncodingError> {
    all.iter().copied().find(|t| name(*t) == found).ok_or_else(|| ParseEncodingError {
        found: found.to_owned(),
        known: all.iter().map(|t| name(*t)).collect::<Vec<_>>().join(", "),
    })
}

impl FromStr for KvDtype {
    type Err = ParseEncodingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        by_name(text, &Self::AT_REST, Self::as_str)
    }
}

/// Lossless stage over an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Codec {
    /// Bytes as they are.
    None,
    /// LZ4 block format.
    Lz4,
    /// Zstandard.
    Zstd,
    /// The bytes of 16-bit elements split into two planes, then LZ4.
    SplitLz4,
    /// The bytes of 16-bit elements split into two planes, then Zstandard.
    SplitZstd,
}

impl Codec {
    /// Every codec.
    pub const ALL: [Self; 5] = [Self::None, Self::Lz4, Self::Zstd, Self::SplitLz4, Self::SplitZstd];

    /// Number on flash.
    pub const fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Lz4 => 1,
            Self::Zstd => 2,
            Self::SplitLz4 => 3,
            Self::SplitZstd => 4,
        }
    }

    /// Inverse of [`Self::code`].
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::None),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            3 => Some(Self::SplitLz4),
            4 => Some(Self::SplitZstd),
            _ => None,
        }
    }

    /// Name in configuration and output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::SplitLz4 => "split-lz4",
            Self::SplitZstd => "split-zstd",
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Codec {
    type Err = ParseEncodingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        by_name(text, &Self::ALL, Self::as_str)
    }
}

/// Order of elements inside a head's K and V blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayoutId {
    /// K `[row / 16][dim / 2][16 rows][2]`, V `[row / 2][dim][2]`; see [`crate::KvLayout`].
    Tile16,
}

impl LayoutId {
    /// Number on flash and in descriptors.
    pub const fn code(self) -> u32 {
        match self {
            Self::Tile16 => 1,
        }
    }

    /// Inverse of [`Self::code`].
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Tile16),
            _ => None,
        }
    }
}

/// One way of writing a chunk's rows. Each file and each slot names its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Encoding {
    /// Element type.
    pub dtype: KvDtype,
    /// Lossless stage.
    pub codec: Codec,
    /// Order of elements.
    pub layout: LayoutId,
}

impl Encoding {
    /// What is computed: bf16 rows, no codec. Reuse of one chunk is then bit-exact.
    pub const EXACT: Self = Self::new(KvDtype::Bf16, Codec::None);

    /// An encoding in the one layout there is.
    pub const fn new(dtype: KvDtype, codec: Codec) -> Self {
        Self { dtype, codec, layout: LayoutId::Tile16 }
    }

    /// The form in the arena of what is written like this.
    pub const fn in_arena(self) -> Self {
        Self { dtype: self.dtype.in_arena(), codec: Codec::None, layout: self.layout }
    }

    /// Whether the bytes at rest are the bytes in the arena: a load is then one read.
    pub fn is_arena_form(self) -> bool {
        self == self.in_arena()
    }

    /// The same rows without the lossless stage.
    pub const fn uncompressed(self) -> Self {
        Self { codec: Codec::None, ..self }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.dtype, self.codec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for dtype in KvDtype::AT_REST {
            assert_eq!(KvDtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.as_str().parse(), Ok(dtype));
        }
        for codec in Codec::ALL {
            assert_eq!(Codec::from_code(codec.code()), Some(codec));
            assert_eq!(codec.as_str().parse(), Ok(codec));
        }
        let error = "int7".parse::<KvDtype>().unwrap_err().to_string();
        assert!(error.contains("int7") && error.contains("int8"), "{error}");
        assert!("f32".parse::<KvDtype>().is_err(), "never at rest");
    }
}
