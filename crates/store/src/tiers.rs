//! Bringing chunks into tiers and out of them.

use std::sync::{MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use matkv_format::{ChunkFile, Superblock};
use matkv_sys::{Region, SlotMut};
use matkv_types::{ChunkId, Encoding};

use crate::error::{Result, StoreError};
use crate::heat::Heat;
use crate::policy::Item;
use crate::records::{ChunkRecord, Departure, Placement, Tier};
use crate::residents::Residents;
use crate::store::Store;

/// Milliseconds to compute a row, before anything has been measured.
const COMPUTE_MS_PER_ROW: f64 = 2.0;

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Copies bytes into memory that can be written past the page cache.
///
/// # Errors
/// If there is nothing to copy.
pub fn page_aligned(bytes: &[u8]) -> Result<SlotMut> {
    let mut slot = Region::anonymous(bytes.len()).exclusive(0..bytes.len())?;
    slot.copy_from_slice(bytes);
    Ok(slot)
}

fn no_cold_tier() -> StoreError {
    StoreError::Refused("there is no cold tier; set cold.url".into())
}

/// Whether a chunk may be evicted. One that cannot be read in the index may: nobody finds it there.
pub(crate) fn may_leave(record: Result<Option<ChunkRecord>>, now: u64) -> bool {
    record.ok().flatten().is_none_or(|r| !r.is_pinned(now))
}

impl Store {
    pub(crate) fn residents(&self) -> MutexGuard<'_, Residents> {
        self.residents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a policy weighs.
    pub(crate) fn item(&self, record: &ChunkRecord, placement: &Placement, heat: &Heat) -> Item {
        let measured = f64::from(record.compute_ms);
        let ms =
            if measured > 0.0 { measured } else { f64::from(record.rows) * COMPUTE_MS_PER_ROW };
        let frequency = heat.count_at(unix_seconds(), self.options.promotion.half_life);
        Item { bytes: placement.physical.max(1), cost: ms / 1e3, frequency: f64::from(frequency) }
    }

    /// Enters what the index names into the policies: in the background after a start, at once
    /// when something must leave that is not known yet.
    ///
    /// # Errors
    /// If the index fails.
    pub fn load_residents(&self, go_on: &dyn Fn() -> bool) -> Result<()> {
        let (mut after, mut found) = (None, Vec::new());
        loop {
            let read = self.read()?;
            let batch = read.chunks_after(after.as_ref(), 4096)?;
            let Some((last, _)) = batch.last() else { break };
            after = Some(*last);
            for (id, record) in &batch {
                let heat = read.heat(id);
                for tier in Tier::ALL {
                    if let Some(placement) = record.placement(tier) {
                        found.push((heat.last, *id, tier, self.item(record, placement, &heat)));
                    }
                }
            }
            if !go_on() {
                return Ok(());
            }
        }
        // As they would have come in: whoever was used last, last.
        found.sort_by_key(|(last, id, ..)| (*last, *id));
        for part in found.chunks(4096) {
            let mut residents = self.residents();
            for (_, id, tier, item) in part {
                // What has moved meanwhile is known better.
                if !residents.of(*tier).contains(id) {
                    residents.of(*tier).insert(*id, *item);
                }
            }
        }
        let read = self.read()?;
        let mut residents = self.residents();
        for (_, id, tier, _) in &found {
            if read.chunk(id)?.is_none_or(|r| r.placement(*tier).is_none()) {
                residents.of(*tier).remove(id);
            }
        }
        residents.complete = true;
        Ok(())
    }

    /// A chunk has been used; `near` are those close to it in embedding space.
    pub fn touch(&self, ids: &[ChunkId], near: &[ChunkId]) {
        let now = unix_seconds();
        let half_life = self.options.promotion.half_life;
        let Ok(read) = self.read() else { return };
        for id in ids {
            let stored = || self.heat_in(read.txn(), id);
            self.heat.change(*id, stored, |heat| {
                heat.count = heat.count_at(now, half_life) + 1.0;
                heat.last = now;
            });
        }
        self.residents().access(ids, near);
    }

    /// How long a load took.
    pub fn measured_load(&self, id: &ChunkId, ms: f32) {
        let Ok(read) = self.read() else { return };
        self.heat.change(*id, || self.heat_in(read.txn(), id), |heat| heat.load_ms = ms);
    }

    /// Writes what has become warmer or colder.
    ///
    /// # Errors
    /// If the index fails.
    pub fn flush_heat(&self) -> Result<()> {
        let changed = self.heat.snapshot();
        if changed.is_empty() {
            return Ok(());
        }
        let mut txn = self.write()?;
        for (id, heat) in &changed {
            txn.put_heat(id, heat)?;
        }
        txn.commit()?;
        self.heat.written(&changed);
        Ok(())
    }

    /// A chunk's file from a tier, verified whole.
    ///
    /// # Errors
    /// What is wrong with it, or why it cannot be read.
    pub fn read_verified(
        &self,
        id: &ChunkId,
        tier: Tier,
        copy: usize,
    ) -> Result<(SlotMut, Superblock)> {
        let bytes = match tier {
            Tier::Flash => self.volume.read_copy(id, copy)?,
            Tier::Cold => {
                let cold = self.cold.as_ref().ok_or_else(no_cold_tier)?;
                page_aligned(&cold.get(id)?)?
            }
        };
        let tokens = self.read()?.tokens(id)?;
        let tokens = tokens.ok_or_else(|| StoreError::Unknown(*id))?;
        let found = ChunkFile::verify(&bytes, &self.identity.expectation(*id, &tokens))?;
        if bytes.len() != found.file_len() {
            return Err(matkv_format::FormatError::Length {
                expected: found.file_len(),
                found: bytes.len(),
            }
            .into());
        }
        Ok((bytes, found))
    }

    /// Copies a tier keeps of a chunk.
    pub fn copies_in(&self, tier: Tier) -> usize {
        match tier {
            Tier::Flash => self.volume.copies(),
            Tier::Cold => 1,
        }
    }

    /// The first good copy in these tiers, verified whole.
    ///
    /// # Errors
    /// Why the last that was tried is not good, or that there is none.
    pub fn read_good(&self, id: &ChunkId, tiers: &[Tier]) -> Result<(SlotMut, Superblock)> {
        let record = self.read()?.chunk(id)?.ok_or_else(|| StoreError::Unknown(*id))?;
        let mut last = StoreError::Refused(format!("chunk {id} has no bytes there"));
        for tier in tiers.iter().filter(|t| record.placement(**t).is_some()) {
            for copy in 0..self.copies_in(*tier) {
                match self.read_verified(id, *tier, copy) {
                    Ok(good) => return Ok(good),
                    Err(e) => last = e,
                }
            }
        }
        Err(last)
    }

    fn recoded(
        &self,
        id: &ChunkId,
        (bytes, found): (&[u8], &Superblock),
        to: Encoding,
        level: i32,
    ) -> Result<Vec<u8>> {
        // A tier's row type is not undone by another's: what is narrower stays so.
        let narrower = to.dtype.bits() < found.encoding.dtype.bits();
        let dtype = if narrower { to.dtype } else { found.encoding.dtype };
        let to = Encoding::new(dtype, to.codec);
        if to == found.encoding {
            return Ok(bytes[..found.file_len()].to_vec());
        }
        let tokens = self.read()?.tokens(id)?.unwrap_or_default();
        let expect = self.identity.expectation(*id, &tokens);
        Ok(ChunkFile::transcode(bytes, found, &expect, to, level)?)
    }

    /// Copies a chunk from flash to the cold tier, and then takes it off flash.
    ///
    /// # Errors
    /// If it cannot be read, or the cold tier does not take it: it stays where it is.
    pub fn demote(&self, id: &ChunkId, why: &str) -> Result<u64> {
        let (Some(cold), Some(options)) = (&self.cold, &self.options.cold) else {
            return Err(no_cold_tier());
        };
        let one = self.moving_cold.lock().unwrap_or_else(PoisonError::into_inner);
        let record = self.read()?.chunk(id)?;
        let Some(record) = record.filter(|r| r.flash.is_some()) else {
            return Err(StoreError::Refused(format!("chunk {id} is not on flash")));
        };
        let mut placement = record.cold;
        if placement.is_none() {
            let (bytes, found) = self.read_good(id, &[Tier::Flash])?;
            let tier = &options.tier;
            let file = self.recoded(id, (&bytes, &found), tier.encoding, tier.level)?;
            // Known before it is there, whatever a crash leaves. What is on the list already was
            // condemned, and would be taken for this one.
            let condemned = self.read()?.is_pending_in(Tier::Cold, id)?;
            let mut txn = self.write()?;
            txn.mark_pending_in(Tier::Cold, id)?;
            txn.commit()?;
            if condemned {
                cold.remove(id)?;
            }
            let there = cold.put(id, file)?;
            placement = Some(Placement::of(&there, there.file_len() as u64));
        }
        let mut txn = self.write()?;
        // It may have been deleted meanwhile: then the object goes too.
        let departure = Departure { tier: Tier::Flash, at: unix_seconds(), why: why.to_owned() };
        if !txn.place(id, Tier::Cold, placement, None)? {
            txn.mark_pending_in(Tier::Cold, id)?;
            txn.commit()?;
            drop(one);
            self.sweep_cold();
            return Ok(0);
        }
        // It may have been evicted while it was copied.
        let flash = txn.chunk(id)?.and_then(|r| r.flash);
        if flash.is_some() {
            txn.mark_pending(id)?;
            txn.place(id, Tier::Flash, None, Some(departure))?;
        }
        txn.commit()?;
        let physical = flash.map_or(0, |p| p.physical);
        if flash.is_some() {
            self.drop_files(&[(*id, physical)]);
        }
        Ok(physical)
    }

    /// Keeps tiers between their watermarks: what is valued least goes to the cold tier, and out
    /// of that when it is full. Asks before every chunk. Returns chunks and bytes moved.
    ///
    /// # Errors
    /// If the index fails, or the cold tier takes nothing.
    pub fn balance(&self, go_on: &dyn Fn(u64) -> bool) -> Result<(u64, u64)> {
        let mut moved = (0, 0);
        if self.cold.is_none() {
            return Ok(moved);
        }
        self.trim_cold()?;
        let Some(capacity) = self.space.capacity() else { return Ok(moved) };
        let share = |share: f64| (capacity as f64 * share) as u64;
        if self.space.used() <= share(self.options.high_watermark) {
            return Ok(moved);
        }
        let now = unix_seconds();
        while self.space.used() > share(self.options.low_watermark) && go_on(moved.1) {
            let read = self.read()?;
            let mut may_leave = |id: &ChunkId| may_leave(read.chunk(id), now);
            let victim = self.residents().of(Tier::Flash).evict(&mut may_leave);
            let Some(id) = victim else { break };
            let Some(record) = read.chunk(&id)?.filter(|r| r.flash.is_some()) else { continue };
            let heat = read.heat(&id);
            drop(read);
            match self.demote(&id, "above storage.high_watermark") {
                Ok(bytes) => {
                    moved = (moved.0 + 1, moved.1 + bytes);
                    self.trim_cold()?;
                }
                Err(e) => {
                    // It has not left after all.
                    if let Some(placement) = &record.flash {
                        let item = self.item(&record, placement, &heat);
                        self.residents().of(Tier::Flash).insert(id, item);
                    }
                    return Err(e);
                }
            }
        }
        Ok(moved)
    }

    /// Brings the cold tier below its capacity.
    fn trim_cold(&self) -> Result<()> {
        let over = |s: &Self| Ok(s.bytes_over(Tier::Cold) > 0);
        while over(self)? && self.evict_some(Tier::Cold, "cold.capacity", over)? > 0 {}
        Ok(())
    }

    /// Copies a chunk from the cold tier to flash; it stays in both.
    ///
    /// # Errors
    /// If it cannot be read or there is no room.
    pub fn promote(&self, id: &ChunkId) -> Result<u64> {
        let record = self.read()?.chunk(id)?;
        match record {
            Some(record) if record.flash.is_some() => return Ok(0),
            Some(record) if record.cold.is_some() => {}
            _ => return Err(StoreError::Refused(format!("chunk {id} is not in the cold tier"))),
        }
        let (bytes, found) = self.read_verified(id, Tier::Cold, 0)?;
        let flash = &self.options.flash;
        let file = self.recoded(id, (&bytes, &found), flash.encoding, flash.level)?;
        self.put_on_flash(id, &page_aligned(&file)?)
    }

    /// Writes a file to flash and names it in the index at once. Returns its physical bytes; 0 if
    /// the chunk is not known any more.
    ///
    /// # Errors
    /// As [`Self::write_file`], or if the index fails.
    pub fn put_on_flash(&self, id: &ChunkId, file: &[u8]) -> Result<u64> {
        let announced = self.announce(&[*id])?;
        let outcome = self.write_file(id, file).and_then(|placement| {
            let mut txn = self.write()?;
            let known = txn.place(id, Tier::Flash, Some(placement), None)?;
            txn.commit()?;
            Ok(if known { placement.physical } else { 0 })
        });
        drop(announced);
        if matches!(outcome, Ok(0)) {
            self.remove_pending()?;
        }
        outcome
    }

    /// A copy of a chunk that must not be used is kept aside; if there is no other, the chunk is
    /// not on flash any more.
    ///
    /// # Errors
    /// If it can be neither moved nor removed, or the index fails.
    pub fn quarantine(&self, id: &ChunkId, copy: usize, why: &str) -> Result<bool> {
        let _one = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.volume.physical_bytes(id);
        if !self.volume.quarantine_copy(id, copy)? {
            return Ok(false);
        }
        let after = self.volume.physical_bytes(id);
        // What is kept for inspection takes room too; that of a file the index does not name is
        // counted already.
        if self.read()?.chunk(id)?.is_some_and(|r| r.flash.is_some()) {
            let kept = before.saturating_sub(after);
            if after == 0 {
                self.lost_keeping(id, Tier::Flash, &format!("quarantined: {why}"), kept)?;
            } else {
                self.takes(id, after, kept)?;
            }
        }
        Ok(true)
    }

    /// The index does not name a chunk's bytes in a tier any more.
    ///
    /// # Errors
    /// If the index fails.
    pub fn lost(&self, id: &ChunkId, tier: Tier, why: &str) -> Result<()> {
        self.lost_keeping(id, tier, why, 0)
    }

    /// The same, with bytes on flash that are kept aside.
    fn lost_keeping(&self, id: &ChunkId, tier: Tier, why: &str, kept: u64) -> Result<()> {
        let mut txn = self.write()?;
        let before = txn.chunk(id)?.and_then(|r| r.placement(tier).map(|p| p.physical));
        let Some(before) = before else {
            self.space.add(kept);
            return Ok(());
        };
        let departure = Departure { tier, at: unix_seconds(), why: why.to_owned() };
        if tier == Tier::Cold {
            // Otherwise it would be taken for the next writer's.
            txn.mark_pending_in(tier, id)?;
        }
        txn.place(id, tier, None, Some(departure))?;
        txn.commit()?;
        match tier {
            Tier::Flash => self.space.replace(before, kept),
            // The object goes when the tier is swept: whoever is here may not wait for a network.
            Tier::Cold => {}
        }
        Ok(())
    }

    /// Writes a copy again from one that is good.
    ///
    /// # Errors
    /// If there is none, or it cannot be written.
    pub fn heal(&self, id: &ChunkId, copy: usize) -> Result<()> {
        let (bytes, found) = self.read_good(id, &[Tier::Flash])?;
        let _one = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
        self.make_room(found.file_len() as u64, id)?;
        if self.read()?.chunk(id)?.is_none_or(|r| r.flash.is_none()) {
            return Err(StoreError::Refused(format!("chunk {id} has left flash")));
        }
        self.volume.write_copy(id, copy, &bytes[..found.file_len()])?;
        self.takes(id, self.volume.physical_bytes(id), 0)
    }

    /// A chunk's files on flash take so many bytes now, and so many are kept aside.
    fn takes(&self, id: &ChunkId, physical: u64, kept: u64) -> Result<()> {
        let mut txn = self.write()?;
        let Some(mut record) = txn.chunk(id)? else { return Ok(()) };
        let Some(placement) = &mut record.flash else { return Ok(()) };
        let before = std::mem::replace(&mut placement.physical, physical);
        txn.save_chunk(id, &record)?;
        txn.commit()?;
        self.space.replace(before, physical + kept);
        Ok(())
    }

    /// Why chunks are not stored just now; nothing if they are.
    pub fn degraded(&self) -> Option<String> {
        let cold = self
            .cold
            .as_ref()
            .and_then(|c| c.breaker().trouble().map(|r| format!("cold tier {}: {r}", c.url())));
        self.space.degraded().or(cold)
    }
}
