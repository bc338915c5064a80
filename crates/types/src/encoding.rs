//! Encodings: how one chunk's rows are written. An encoding is not part of a chunk's identity.

use serde::{Deserialize, Serialize};

/// Element type of KV rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// 32-bit rows: the reference the kernels are tested with; never written to flash.
    F32,
    /// bfloat16 rows.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Number on flash and in descriptors.
    pub const fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
        }
    }

    /// Inverse of [`Self::code`].
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::F32),
            1 => Some(Self::Bf16),
            _ => None,
        }
    }
}

/// Lossless stage over an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// Bytes on flash are the bytes in the arena.
    None,
}

impl Codec {
    /// Number on flash.
    pub const fn code(self) -> u32 {
        match self {
            Self::None => 0,
        }
    }

    /// Inverse of [`Self::code`].
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::None),
            _ => None,
        }
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
    /// What the materializer writes: bfloat16 rows, no codec, tiles of 16 rows.
    pub const DEFAULT: Self =
        Self { dtype: KvDtype::Bf16, codec: Codec::None, layout: LayoutId::Tile16 };
}
