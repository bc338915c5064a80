//! The store's options from the configuration.

use std::time::Duration;

use matkv_config::{Config, StorageType};
use matkv_store::policy::PolicyKind;
use matkv_store::{
    ColdOptions, ColdTierOptions, PromotionRule, StoreOptions, TierOptions, VolumeKind,
};
use matkv_types::Encoding;

use crate::error::LoaderError;

/// A policy by its name in the configuration.
pub(crate) fn policy(name: &str) -> Result<PolicyKind, LoaderError> {
    let found = PolicyKind::ALL.into_iter().find(|p| p.as_str() == name);
    found.ok_or_else(|| LoaderError::Setup(format!("no policy {name:?}")))
}

fn limit(bytes: u64) -> Option<u64> {
    (bytes > 0).then_some(bytes)
}

/// Everything the store wants to know.
pub fn store_options(config: &Config) -> Result<StoreOptions, LoaderError> {
    let cold = (!config.cold_url.is_empty()).then(|| ColdTierOptions {
        place: ColdOptions {
            url: config.cold_url.clone(),
            endpoint: Some(config.cold_endpoint.clone()).filter(|e| !e.is_empty()),
            deadline: config.cold_deadline,
        },
        tier: TierOptions {
            encoding: Encoding::new(config.cold_dtype, config.cold_codec),
            level: config.cold_level as i32,
            capacity: limit(config.cold_capacity),
        },
    });
    Ok(StoreOptions {
        root: config.store_dir.clone(),
        directories: config.storage_dirs.clone(),
        kind: match config.storage_type {
            StorageType::Single => VolumeKind::Single,
            StorageType::Stripe => VolumeKind::Stripe,
            StorageType::Mirror => VolumeKind::Mirror,
        },
        stripe_unit: config.stripe_unit as usize,
        flash: TierOptions {
            encoding: Encoding::new(config.storage_dtype, config.storage_codec),
            level: config.storage_level as i32,
            capacity: limit(config.storage_capacity),
        },
        cold,
        reserve: config.storage_reserve,
        high_watermark: config.high_watermark,
        low_watermark: config.low_watermark,
        policy: policy(&config.storage_policy)?,
        promotion: PromotionRule {
            threshold: config.promote_threshold as f32,
            window: config.promote_window.as_secs(),
            half_life: config.heat_half_life.as_secs().max(1),
        },
        quota: limit(config.tenant_quota),
        ttl: Some(config.tenant_ttl).filter(|t| *t > Duration::ZERO).map(|t| t.as_secs().max(1)),
    })
}
