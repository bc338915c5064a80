//! What is in each tier, in the order in which it would leave.

use matkv_types::ChunkId;

use crate::policy::{Item, Policy, PolicyKind};
use crate::records::Tier;

/// The policies of both tiers at rest.
pub(crate) struct Residents {
    flash: Box<dyn Policy<ChunkId>>,
    cold: Box<dyn Policy<ChunkId>>,
    /// Whether all the index names has been entered. Until then those that have been serve.
    pub complete: bool,
}

impl Residents {
    pub fn new(kind: PolicyKind) -> Self {
        Self { flash: kind.build(), cold: kind.build(), complete: false }
    }

    pub fn of(&mut self, tier: Tier) -> &mut dyn Policy<ChunkId> {
        match tier {
            Tier::Flash => &mut *self.flash,
            Tier::Cold => &mut *self.cold,
        }
    }

    /// Takes over what a change of the index has moved.
    pub fn apply(&mut self, moves: &[(ChunkId, Tier, Option<Item>)]) {
        for (id, tier, item) in moves {
            match item {
                Some(item) => self.of(*tier).insert(*id, *item),
                None => self.of(*tier).remove(id),
            }
        }
    }

    /// Chunks have been used, and those near them are warmed.
    pub fn access(&mut self, ids: &[ChunkId], near: &[ChunkId]) {
        for tier in Tier::ALL {
            let policy = self.of(tier);
            ids.iter().for_each(|id| policy.access(id));
            near.iter().for_each(|n| policy.warm(n));
        }
    }
}
