//! How warm chunks are: uses that fade, and when the last one was.
//!
//! Kept in memory and written to the index now and then: a crash loses some seconds of warmth, no
//! data.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use matkv_types::ChunkId;

/// Warmth of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Heat {
    /// Uses, each halved every half-life, as of `last`.
    pub count: f32,
    /// Seconds since 1970 of the last use; 0 if there was none.
    pub last: u64,
    /// Milliseconds its last load took; 0 if it was never loaded.
    pub load_ms: f32,
}

impl Heat {
    pub(crate) const BYTES: usize = 16;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&self.count.to_le_bytes());
        out[4..8].copy_from_slice(&self.load_ms.to_le_bytes());
        out[8..].copy_from_slice(&self.last.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let [a, b, c, d, e, f, g, h, last @ ..] = *bytes;
        Some(Self {
            count: f32::from_le_bytes([a, b, c, d]),
            load_ms: f32::from_le_bytes([e, f, g, h]),
            last: u64::from_le_bytes(last),
        })
    }

    /// Uses as of `now`.
    pub fn count_at(&self, now: u64, half_life: u64) -> f32 {
        let age = now.saturating_sub(self.last) as f32;
        self.count * (-age / half_life.max(1) as f32).exp2()
    }
}

/// When a chunk in a slower tier is brought up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromotionRule {
    /// Uses it must have more than.
    pub threshold: f32,
    /// Seconds the last use may lie back.
    pub window: u64,
    /// Seconds in which uses halve.
    pub half_life: u64,
}

impl PromotionRule {
    /// `access_count > threshold && since_last_access < time_window`.
    pub fn promotes(&self, heat: &Heat, now: u64) -> bool {
        heat.count_at(now, self.half_life) > self.threshold
            && now.saturating_sub(heat.last) < self.window
    }
}

/// Warmth that has changed since it was last written.
#[derive(Default)]
pub(crate) struct HeatCache {
    entries: Mutex<HashMap<ChunkId, Heat>>,
}

impl HeatCache {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<ChunkId, Heat>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, id: &ChunkId) -> Option<Heat> {
        self.entries().get(id).copied()
    }

    /// Changes one; `stored` says what the index has.
    pub fn change(
        &self,
        id: ChunkId,
        stored: impl FnOnce() -> Heat,
        change: impl FnOnce(&mut Heat),
    ) -> Heat {
        let mut entries = self.entries();
        let heat = entries.entry(id).or_insert_with(stored);
        change(heat);
        *heat
    }

    pub fn snapshot(&self) -> Vec<(ChunkId, Heat)> {
        self.entries().iter().map(|(id, heat)| (*id, *heat)).collect()
    }

    /// What has been written and has not changed since need not be kept.
    pub fn written(&self, written: &[(ChunkId, Heat)]) {
        let mut entries = self.entries();
        let ids: HashSet<_> = written.iter().map(|(id, _)| *id).collect();
        let same: HashMap<_, _> = written.iter().copied().collect();
        entries.retain(|id, heat| !ids.contains(id) || same.get(id) != Some(heat));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warmth_fades_and_promotes() {
        let heat = Heat { count: 4.0, last: 1000, load_ms: 1.5 };
        assert_eq!(Heat::decode(&heat.encode()), Some(heat));
        assert_eq!((heat.count_at(1000, 60), heat.count_at(1120, 60)), (4.0, 1.0));
        let rule = PromotionRule { threshold: 2.0, window: 100, half_life: 60 };
        assert!(rule.promotes(&heat, 1030));
        assert!(!rule.promotes(&heat, 1070), "faded to less than two");
        let slow = PromotionRule { half_life: 1 << 40, ..rule };
        assert!(slow.promotes(&heat, 1099) && !slow.promotes(&heat, 1100), "too long ago");
        let once = Heat { count: 1.0, ..heat };
        assert!(!rule.promotes(&once, 1000));
    }
}
