//! What the index says about documents and chunks.

use std::fmt;
use std::str::FromStr;

use matkv_format::Superblock;
use matkv_types::{ChunkId, ContentId, Encoding};
use serde::{Deserialize, Serialize};

/// A document as it was ingested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentRecord {
    /// The caller's name for it, unique in the store.
    pub id: String,
    /// Hash of its token ids: the same content needs no work.
    pub content: ContentId,
    /// Bytes of its text.
    pub bytes: u64,
    /// Tokens.
    pub tokens: u64,
    /// Its chunks, in order.
    pub chunks: Vec<ChunkId>,
    /// Seconds since 1970 when it was committed.
    pub ingested_at: u64,
}

/// Where bytes at rest may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The directories of the volume.
    Flash,
    /// A directory of slower devices, or an object store.
    Cold,
}

impl Tier {
    /// Fastest first.
    pub const ALL: [Self; 2] = [Self::Flash, Self::Cold];

    /// Name in commands, output and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::Cold => "cold",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Tier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "flash" => Ok(Self::Flash),
            "cold" => Ok(Self::Cold),
            other => Err(format!("{other:?} is not a tier; there are flash and cold")),
        }
    }
}

/// A chunk's bytes in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// How they are written.
    pub encoding: Encoding,
    /// Bytes of one copy.
    pub bytes: u64,
    /// Bytes on the devices, all copies together.
    pub physical: u64,
    /// CRC32C of the superblock: which of several writes this is.
    pub checksum: u32,
}

impl Placement {
    /// Of a file that says this of itself, and takes so many bytes on the devices.
    pub fn of(file: &Superblock, physical: u64) -> Self {
        Self {
            encoding: file.encoding,
            bytes: file.file_len() as u64,
            physical,
            checksum: file.checksum(),
        }
    }
}

/// Why a chunk is not where it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departure {
    /// From where.
    pub tier: Tier,
    /// Seconds since 1970.
    pub at: u64,
    /// In words.
    pub why: String,
}

/// A chunk some document uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRecord {
    /// Rows, one per token.
    pub rows: u32,
    /// Documents that use it, counted with multiplicity.
    pub references: u32,
    /// Number of its vector in the vector index; none for text without an embedding.
    pub vector: Option<u32>,
    /// On flash.
    pub flash: Option<Placement>,
    /// In the cold tier.
    pub cold: Option<Placement>,
    /// Seconds since 1970 until which it may not be evicted; 0 if it may.
    #[serde(default)]
    pub pinned_until: u64,
    /// Milliseconds it took to compute.
    #[serde(default)]
    pub compute_ms: u32,
    /// The last time it left a tier.
    #[serde(default)]
    pub departure: Option<Departure>,
}

impl ChunkRecord {
    /// In this tier.
    pub fn placement(&self, tier: Tier) -> Option<&Placement> {
        match tier {
            Tier::Flash => self.flash.as_ref(),
            Tier::Cold => self.cold.as_ref(),
        }
    }

    /// Puts it into a tier, or takes it out.
    pub fn set_placement(&mut self, tier: Tier, placement: Option<Placement>) {
        match tier {
            Tier::Flash => self.flash = placement,
            Tier::Cold => self.cold = placement,
        }
    }

    /// Whether it may not be evicted.
    pub fn is_pinned(&self, now: u64) -> bool {
        self.pinned_until > now
    }
}

/// Sums over the index, kept with every change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Documents.
    pub documents: u64,
    /// Chunks, wherever they are.
    pub chunks: u64,
    /// Tokens of all chunks.
    pub tokens: u64,
    /// Chunks on flash.
    pub flash_chunks: u64,
    /// Bytes on the devices of flash.
    pub flash_bytes: u64,
    /// Chunks in the cold tier.
    pub cold_chunks: u64,
    /// Bytes in the cold tier.
    pub cold_bytes: u64,
}

impl Totals {
    /// Counts one record in or out.
    pub(crate) fn count(&mut self, record: &ChunkRecord, add: bool) {
        let change = |total: &mut u64, by: u64| {
            *total = if add { *total + by } else { total.saturating_sub(by) };
        };
        change(&mut self.chunks, 1);
        change(&mut self.tokens, u64::from(record.rows));
        if let Some(p) = &record.flash {
            change(&mut self.flash_chunks, 1);
            change(&mut self.flash_bytes, p.physical);
        }
        if let Some(p) = &record.cold {
            change(&mut self.cold_chunks, 1);
            change(&mut self.cold_bytes, p.physical);
        }
    }
}
