//! Process A: the load machine, sessions, and the memory they share.

use std::sync::Arc;

use crossbeam::channel::{Receiver, bounded};
use matkv_decoder_core::{Batch, Limits};
use matkv_loader_core::machine::{
    Arena, ChunkSlot, FillingSlot, Load, LoadMessage, PolicyKind, Sessions,
};
use matkv_ring::{Consumer, Geometry, Header};
use matkv_sys::Region;
use matkv_types::{ChunkId, Digest};

use crate::chunks::{self, PREFIX, spec};
use crate::engine::HashEngine;
use crate::world::SimWorld;

/// Process A.
pub(crate) struct Loader {
    pub region: Arc<Region>,
    pub header: Header,
    pub arena: Arc<Arena>,
    pub prefix: Arc<ChunkSlot>,
    pub load: Load<SimWorld>,
    pub sessions: Sessions,
    /// Slots to keep, for the load machine.
    pub kept: Receiver<LoadMessage>,
    pub epoch: u64,
    pub completions: Option<Consumer>,
}

impl Loader {
    /// With an empty arena.
    pub fn start(arena_bytes: usize, mut world: SimWorld) -> Result<Self, String> {
        // The answers do not depend on who leaves first.
        let policies = PolicyKind::ALL;
        let policy = policies[world.random.below(policies.len() as u64) as usize];
        let geometry = Geometry::new(arena_bytes);
        let region = Region::anonymous(geometry.segment_bytes());
        let header = Header::initialize(&region, geometry, spec().fingerprint, 0)
            .map_err(|e| e.to_string())?;
        let arena = Arena::new(&region, geometry.arena());
        let layout = spec().own_layout(PREFIX.len());
        let bytes = layout.total_bytes();
        let extent = arena.allocate(bytes).ok_or("no room for the prefix")?;
        let mut slot = extent.exclusive().map_err(|e| e.to_string())?;
        chunks::write_prefix(&mut slot);
        let id = ChunkId(Digest([0; 32]));
        let prefix = Arc::new(FillingSlot { slot, extent }.freeze(id, 0..bytes, layout, bytes));
        let load = Load::new(spec(), &arena, Arc::clone(&prefix), policy, world);
        let (sender, kept) = bounded(4);
        let (sessions, epoch, completions) = (Sessions::new(sender), 0, None);
        Ok(Self { region, header, arena, prefix, load, sessions, kept, epoch, completions })
    }

    /// A session with a new decoder.
    pub fn begin(&mut self, limits: Limits) -> Result<Batch<'static, HashEngine>, String> {
        self.epoch += 1;
        self.header.begin_epoch(self.epoch).map_err(|e| e.to_string())?;
        let (producer, consumer) = self.header.loader_ends().map_err(|e| e.to_string())?;
        let batch = Batch::new(&HashEngine, &self.region, &self.header, self.epoch, limits)
            .map_err(|e| e.to_string())?;
        self.sessions.begin(self.epoch, 1, producer);
        self.completions = Some(consumer);
        Ok(batch)
    }
}
