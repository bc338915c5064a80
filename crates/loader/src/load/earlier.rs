//! Rows of earlier prompts: kept as chunks are, found by what a request begins with.

use super::{Load, Pending};
use crate::earlier::{Beginning, Earlier, Kept};
use crate::hand_over::own_slot_bytes;
use crate::request::{OwnSlot, Planned};
use crate::world::World;

impl<W: World> Load<W> {
    /// Keeps the rows of a prompt whose sequence has ended. They are worth what a chunk of as many
    /// rows is: most questions are not asked again, and should not drive chunks out.
    pub(super) fn keep(&mut self, kept: Kept) {
        let Some((slot, beginning)) = kept.freeze() else { return };
        let cost = self.world.cost(&slot.id(), beginning.rows());
        self.cache.keep(slot.into(), beginning, cost);
    }

    /// A request's own slot. The rows it could begin with leave for it only if nothing else can.
    pub(super) fn take_own_slot(&mut self, request: &mut Pending) {
        let bytes = own_slot_bytes(&self.spec, &request.planned);
        let longest = self.longest(&request.planned);
        let stays = longest.and_then(|(id, _)| self.cache.peek(&id));
        let mut own = self.cache.allocate(&self.arena, bytes);
        if own.is_none() && stays.is_some() {
            drop(stays);
            own = self.cache.allocate(&self.arena, bytes);
        }
        request.own = own.map(OwnSlot::new);
    }

    /// Rows of an earlier prompt that a request begins with.
    pub(super) fn earlier_rows(&mut self, planned: &Planned) -> Option<Earlier> {
        let (id, rows) = self.longest(planned)?;
        Some(Earlier::new(self.cache.get(&id)?, rows, &self.arena))
    }

    /// The last row is always computed: the first token is drawn from it.
    fn longest(&self, planned: &Planned) -> Option<(matkv_types::ChunkId, usize)> {
        if self.cache.earlier() == 0 {
            return None;
        }
        let (id, rows) = self.cache.longest(&Beginning::of(planned)?)?;
        let rows = rows.min(planned.plan.rows.len() - 1);
        (rows > 0).then_some((id, rows))
    }
}
