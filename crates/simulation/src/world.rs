//! What surrounds the load machine: a device with faults, and computations that take their time.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::sync::Arc;

use matkv_format::ChunkFile;
use matkv_loader_core::machine::{
    CompileJob, Found, Growing, LoadJob, Loaded, Materialized, Resident, Tier, Unusable, World,
};
use matkv_sys::SlotMut;
use matkv_types::ChunkId;

use crate::chunks::spec;
use crate::random::Random;

/// How often things go wrong, in a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// A read brings wrong bytes, too few, or an error.
    pub read: u64,
    /// A read takes a hundred times as long.
    pub late: u64,
    /// A write finds the device full.
    pub full: u64,
    /// A computation fails.
    pub compute: u64,
    /// The decoder dies at a token boundary.
    pub decoder: u64,
    /// The loader dies at an event.
    pub loader: u64,
    /// A client goes away.
    pub cancel: u64,
}

/// What the load machine has asked for, with the time it takes.
pub(crate) enum Effect {
    /// A load that ends, and those who are told if it does not end well.
    Load(Box<Loaded>, Option<Arc<Growing>>),
    Compile {
        job: CompileJob,
        background: bool,
    },
    Prefill(Box<Resident>),
}

/// The device and the queue of what is under way.
pub(crate) struct SimWorld {
    pub disk: BTreeMap<ChunkId, Vec<u8>>,
    pub effects: Vec<(u64, Effect)>,
    pub faults: Faults,
    pub random: Random,
    pub prefills: usize,
    pub background: usize,
    pub quarantined: u64,
    pub now: u64,
    /// Loads that were given up.
    pub late: u64,
}

/// Longest a load may take: some of the late ones take longer.
const DEADLINE: u64 = 250;

/// As in the loader: one computing and two waiting, one chunk of an ingest and the next.
const PREFILLS_MAX: usize = 3;
const BACKGROUND_MAX: usize = 2;

impl SimWorld {
    pub fn new(disk: BTreeMap<ChunkId, Vec<u8>>, faults: Faults, random: Random) -> Self {
        let (prefills, background, quarantined) = (0, 0, 0);
        let (effects, now, late) = (Vec::new(), 0, 0);
        Self { disk, effects, faults, random, prefills, background, quarantined, now, late }
    }

    /// Writes a chunk's file, unless the device is full.
    pub fn write(&mut self, id: ChunkId, file: &[u8]) -> bool {
        if self.random.chance(self.faults.full) {
            return false;
        }
        self.disk.insert(id, file.to_owned());
        true
    }

    /// What a read brings: the file, or what a bad device makes of it.
    fn transfer(&mut self, id: &ChunkId, target: &mut [u8]) -> std::io::Result<()> {
        let Some(file) = self.disk.get(id) else { return Err(ErrorKind::NotFound.into()) };
        target[..file.len()].copy_from_slice(file);
        if !self.random.chance(self.faults.read) {
            return Ok(());
        }
        let len = file.len() as u64;
        match self.random.below(4) {
            // A torn write: the end is what it was before.
            0 => target[self.random.below(len) as usize..].fill(0xee),
            1 => target[self.random.below(len) as usize] ^= 1 << self.random.below(8),
            2 => return Err(ErrorKind::UnexpectedEof.into()),
            _ => return Err(Error::from_raw_os_error(5)),
        }
        Ok(())
    }
}

impl World for SimWorld {
    fn now_ms(&self) -> u64 {
        self.now
    }

    fn deadline_ms(&self) -> u64 {
        DEADLINE
    }

    fn locate(&mut self, id: &ChunkId, _rows: usize) -> Result<Found, Unusable> {
        let Some(file) = self.disk.get(id) else { return Err(Unusable::Missing) };
        let bytes = file.len() as u64;
        // The cost model may say so at any time.
        if self.random.chance(self.faults.read) {
            return Err(Unusable::Slower { load_ms: 2, compute_ms: 1 });
        }
        let tier = if self.random.chance(300) { Tier::Cold } else { Tier::Flash };
        Ok(Found { tier, encoding: spec().encoding, bytes })
    }

    fn load(&mut self, job: LoadJob) -> Result<(), (SlotMut, Unusable)> {
        let LoadJob { tag, id, tokens, mut target, growing, .. } = job;
        match self.disk.get(&id) {
            None => return Err((target, Unusable::Missing)),
            Some(file) if file.len() > target.len() => {
                return Err((target, Unusable::Damaged("another length".into())));
            }
            Some(_) => {}
        }
        let read = self.transfer(&id, &mut target).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => Unusable::Damaged(e.to_string()),
            _ => Unusable::Unreadable(e.to_string()),
        });
        let result = read.and_then(|()| {
            ChunkFile::verify(&target, &spec().expectation(id, &tokens)).map_err(|e| {
                // Set aside, as whoever verifies does.
                self.quarantined += u64::from(self.disk.remove(&id).is_some());
                Unusable::Damaged(e.to_string())
            })
        });
        let mut time = self.random.between(1, 5);
        if self.random.chance(self.faults.late) {
            time *= 100;
        }
        // Final, or let go.
        let result = result.map(|found| (found, target.freeze()));
        if let (Ok((found, slot)), Some(growing)) = (&result, &growing) {
            // Layers come before the load ends: some of them, or all.
            let there = self.random.below(found.shape.layers as u64 + 1) as usize;
            let layers = found.extents().take(there);
            layers.for_each(|layer| growing.publish(slot.clone(), layer));
        }
        self.effects.push((time, Effect::Load(Box::new(Loaded { tag, result }), growing)));
        Ok(())
    }

    fn in_time(&mut self, _found: Found) {}

    fn late(&mut self, _id: &ChunkId, _found: Found) {
        self.late += 1;
    }

    fn used(&mut self, _ids: Vec<ChunkId>, _near: Vec<ChunkId>) {}

    fn cost(&self, _id: &ChunkId, rows: usize) -> f64 {
        rows as f64
    }

    fn prefetch_window(&self) -> usize {
        2
    }

    fn compile(&mut self, job: CompileJob) {
        let time = self.random.between(5, 30);
        self.effects.push((time, Effect::Compile { job, background: false }));
    }

    fn compile_in_background(&mut self, job: CompileJob) -> Result<(), CompileJob> {
        self.background += 1;
        let time = self.random.between(5, 60);
        self.effects.push((time, Effect::Compile { job, background: true }));
        Ok(())
    }

    fn background_has_room(&self) -> bool {
        self.background < BACKGROUND_MAX
    }

    fn overlap(&self) -> bool {
        true
    }

    fn lacks_memory(&mut self) {}

    fn prefill(&mut self, resident: Resident) -> bool {
        self.prefills += 1;
        let time = self.random.between(2, 20);
        self.effects.push((time, Effect::Prefill(Box::new(resident))));
        true
    }

    fn prefill_has_room(&self) -> bool {
        self.prefills < PREFILLS_MAX
    }

    fn store_again(&mut self, chunk: Materialized) {
        self.write(chunk.id(), chunk.file());
    }
}
