//! How a store is opened.

use std::path::PathBuf;

use matkv_types::Encoding;

use crate::cold::ColdOptions;
use crate::heat::PromotionRule;
use crate::policy::PolicyKind;
use crate::volume::VolumeKind;

/// What a tier may hold, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierOptions {
    /// How chunks are written.
    pub encoding: Encoding,
    /// Level of Zstandard.
    pub level: i32,
    /// Bytes on the devices at most.
    pub capacity: Option<u64>,
}

/// The cold tier.
#[derive(Clone, Debug, PartialEq)]
pub struct ColdTierOptions {
    /// Where.
    pub place: ColdOptions,
    /// What it may hold.
    pub tier: TierOptions,
}

/// Everything about a store that is not its identity.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreOptions {
    /// Lock, index, and chunk files if there are no other directories.
    pub root: PathBuf,
    /// Directories for chunk files.
    pub directories: Vec<PathBuf>,
    /// How they are used together.
    pub kind: VolumeKind,
    /// Bytes of a stripe's unit.
    pub stripe_unit: usize,
    /// The flash tier.
    pub flash: TierOptions,
    /// The cold tier, if there is one.
    pub cold: Option<ColdTierOptions>,
    /// Bytes of the file system that are left to others.
    pub reserve: u64,
    /// Demotion starts above this share of the capacity, …
    pub high_watermark: f64,
    /// … and stops at this one.
    pub low_watermark: f64,
    /// What leaves first.
    pub policy: PolicyKind,
    /// What is brought up.
    pub promotion: PromotionRule,
    /// Bytes a tenant scope may keep in all tiers together.
    pub quota: Option<u64>,
    /// Seconds after which a chunk nobody has used leaves all tiers.
    pub ttl: Option<u64>,
}

impl StoreOptions {
    /// A store in one directory with the defaults of the configuration.
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            directories: Vec::new(),
            kind: VolumeKind::Single,
            stripe_unit: 1 << 20,
            flash: TierOptions { encoding: Encoding::EXACT, level: 3, capacity: None },
            cold: None,
            reserve: 0,
            high_watermark: 0.95,
            low_watermark: 0.85,
            policy: PolicyKind::Gdsf,
            promotion: PromotionRule { threshold: 2.0, window: 600, half_life: 3600 },
            quota: None,
            ttl: None,
        }
    }

    /// Where chunk files go.
    pub fn volume_roots(&self) -> Vec<PathBuf> {
        if self.directories.is_empty() { vec![self.root.clone()] } else { self.directories.clone() }
    }
}
