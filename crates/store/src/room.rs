//! Room on the devices: what may be written, what has to leave for it, and what is left behind.
//!
//! Physical bytes are counted before they are written, so a capacity holds at every moment. Room
//! is made in this order: files no index entry names, other identities' data, the quarantine, and
//! then what the policy values least. An eviction is in the index before the file is gone: a
//! listed chunk is readable or will be found out.

use std::sync::PoisonError;

use matkv_format::Superblock;
use matkv_types::ChunkId;

use crate::error::{Result, StoreError};
use crate::records::{Departure, Placement, Tier};
use crate::store::Store;
use crate::tiers::{may_leave, unix_seconds};

/// Evictions of one index change.
const BATCH: usize = 64;

impl Store {
    /// Writes a chunk file to flash, for which room is made. The index does not know it yet.
    ///
    /// `file` is sealed, in page-aligned memory.
    ///
    /// # Errors
    /// [`StoreError::Full`] or [`StoreError::NoSpace`] if there is no room, and the system's
    /// reasons; nothing is left behind.
    pub fn write_file(&self, id: &ChunkId, file: &[u8]) -> Result<Placement> {
        let outcome = self.try_write_file(id, file);
        match &outcome {
            Ok(_) => self.space.set_degraded(None),
            Err(e @ (StoreError::NoSpace { .. } | StoreError::Full { .. })) => {
                self.space.set_degraded(Some(format!("chunks are not stored: {e}")));
            }
            Err(_) => {}
        }
        outcome
    }

    fn try_write_file(&self, id: &ChunkId, file: &[u8]) -> Result<Placement> {
        let found = Superblock::decode(file)?;
        let _one = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
        let physical = file.len() as u64 * self.volume.copies() as u64;
        self.make_room(physical, id)?;
        // What is counted for the file that will be replaced, be it there or not: somebody may
        // have removed it by hand.
        let indexed = self.read()?.chunk(id)?.and_then(|r| r.flash);
        let before = indexed.map_or_else(|| self.volume.physical_bytes(id), |p| p.physical);
        self.space.add(physical);
        if let Err(e) = self.volume.write(id, file) {
            // What the index names counts until it does not any more.
            let left = indexed.map_or_else(|| self.volume.physical_bytes(id), |p| p.physical);
            self.space.replace(physical + before, left);
            return Err(e);
        }
        // What was there before has been replaced; what the file system really took counts.
        let after = self.volume.physical_bytes(id);
        self.space.replace(physical + before, after);
        Ok(Placement::of(&found, after))
    }

    /// Whether so many bytes are too many for the capacity, or for the file system.
    pub(crate) fn lacks(&self, more: u64) -> Result<bool> {
        let reserve = self.options.reserve;
        Ok(self.space.exceeds(more)
            || self.exceeds_quota(more)?
            || (reserve > 0 && self.volume.free_bytes()? < reserve.saturating_add(more)))
    }

    /// Whether so many bytes are too many for the tenant, over all tiers.
    pub(crate) fn exceeds_quota(&self, more: u64) -> Result<bool> {
        let Some(quota) = self.options.quota else { return Ok(false) };
        Ok(self.space.used() + self.read()?.totals()?.cold_bytes + more > quota)
    }

    /// Removes the data of the identity used longest ago; false if there is none.
    pub(crate) fn remove_stale(&self) -> Result<bool> {
        let mut all = self.space.stale();
        let Some(stale) = all.last() else { return Ok(false) };
        tracing::info!("removing {} bytes of {}: room is needed", stale.bytes, stale.name);
        stale.remove_files(&self.options.root)?;
        all.pop();
        Ok(true)
    }

    /// Makes room on flash.
    pub(crate) fn make_room(&self, more: u64, for_: &ChunkId) -> Result<()> {
        if !self.lacks(more)? {
            return Ok(());
        }
        if let Some(quota) = self.options.quota {
            let cold = self.read()?.totals()?.cold_bytes;
            if cold + more > quota {
                // Nothing that leaves flash could help.
                let (tier, used) = (Tier::Flash, self.space.used() + cold);
                return Err(StoreError::Full { tier, used, capacity: quota, key: "tenant.quota" });
            }
        }
        self.remove_pending_now(Some(for_))?;
        while self.lacks(more)? {
            if !self.remove_stale()? {
                break;
            }
        }
        if self.lacks(more)? && self.volume.quarantined()?.0 > 0 {
            tracing::info!("emptying the quarantine: room is needed");
            let (_, bytes) = self.volume.empty_quarantine()?;
            self.space.subtract(bytes);
        }
        while self.lacks(more)? {
            if self.evict_some(Tier::Flash, "room was needed", |s| s.lacks(more))? == 0 {
                let used = self.space.used() + self.space.stale_bytes();
                let tier = Tier::Flash;
                return Err(match (self.space.capacity(), self.options.quota) {
                    (Some(capacity), _) if self.space.exceeds(more) => {
                        StoreError::Full { tier, used, capacity, key: "storage.capacity" }
                    }
                    (_, Some(capacity)) if self.exceeds_quota(more)? => {
                        StoreError::Full { tier, used, capacity, key: "tenant.quota" }
                    }
                    _ => StoreError::NoSpace {
                        chunk: *for_,
                        bytes: more as usize,
                        path: self.options.root.clone(),
                    },
                });
            }
        }
        Ok(())
    }

    /// Takes out what the policy values least while `more` says so, at most a batch. Returns how
    /// many have left.
    pub(crate) fn evict_some(
        &self,
        tier: Tier,
        why: &str,
        more: impl Fn(&Self) -> Result<bool>,
    ) -> Result<usize> {
        let now = unix_seconds();
        let mut txn = self.write()?;
        let (mut gone, mut freed) = (Vec::new(), 0u64);
        let most = self.bytes_over(tier).max(1);
        while gone.len() < BATCH && (gone.is_empty() || freed < most) && more(self)? {
            let mut may_leave = |id: &ChunkId| may_leave(txn.chunk(id), now);
            let mut residents = self.residents();
            let mut victim = residents.of(tier).evict(&mut may_leave);
            let complete = residents.complete;
            drop(residents);
            if victim.is_none() && !complete {
                self.load_residents(&|| true)?;
                victim = self.residents().of(tier).evict(&mut may_leave);
            }
            let Some(id) = victim else { break };
            let Some(record) = txn.chunk(&id)? else { continue };
            let Some(placement) = record.placement(tier) else { continue };
            freed += placement.physical;
            let departure = Departure { tier, at: now, why: why.to_owned() };
            txn.mark_pending_in(tier, &id)?;
            txn.place(&id, tier, None, Some(departure))?;
            gone.push((id, placement.physical));
        }
        txn.commit()?;
        match tier {
            Tier::Flash => self.drop_files_now(&gone),
            Tier::Cold => self.sweep_cold(),
        }
        Ok(gone.len())
    }

    /// Bytes a tier holds beyond what it may.
    pub(crate) fn bytes_over(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Flash => {
                let used = self.space.used() + self.space.stale_bytes();
                self.space.capacity().map_or(0, |c| used.saturating_sub(c))
            }
            Tier::Cold => {
                let used = self.read().and_then(|r| r.totals()).map_or(0, |t| t.cold_bytes);
                let capacity = self.options.cold.as_ref().and_then(|c| c.tier.capacity);
                capacity.map_or(0, |c| used.saturating_sub(c))
            }
        }
    }

    /// Removes files of chunks that the index does not have on flash any more. With each goes what
    /// was counted for it.
    pub(crate) fn drop_files(&self, ids: &[(ChunkId, u64)]) {
        if ids.is_empty() {
            return;
        }
        let _one = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
        // What is not listed any more was removed, and its count with it, by whoever needed room.
        let Ok(read) = self.read() else { return };
        let listed = |id: &ChunkId| read.is_pending_in(Tier::Flash, id).unwrap_or(false);
        let ids: Vec<_> = ids.iter().copied().filter(|(id, _)| listed(id)).collect();
        drop(read);
        self.drop_files_now(&ids);
    }

    /// The same for those who are placing a file.
    fn drop_files_now(&self, ids: &[(ChunkId, u64)]) {
        for (id, counted) in ids {
            // Somebody is bringing it back, or has: the new file takes the place, and the count, of
            // the old.
            let Ok(record) = self.read().and_then(|r| r.chunk(id)) else { continue };
            let back = record.is_some_and(|r| r.flash.is_some());
            if back || self.announced().contains_key(id) {
                continue;
            }
            match self.volume.remove(id) {
                Ok(()) => self.space.subtract(*counted),
                Err(e) => tracing::warn!("chunk {id}: {e}"),
            }
        }
    }

    /// Removes objects that the index does not name any more. What cannot be removed now stays on
    /// the list.
    pub fn sweep_cold(&self) {
        let Some(cold) = &self.cold else { return };
        // Nobody may put one there meanwhile that the index is about to name.
        let _one = self.moving_cold.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = (|| {
            let read = self.read()?;
            let mut swept = Vec::new();
            for id in read.pending_in(Tier::Cold)? {
                cold.remove_staged(&id);
                let named = read.chunk(&id)?.is_some_and(|r| r.cold.is_some());
                if !named && let Err(e) = cold.remove(&id) {
                    tracing::debug!("cold chunk {id}: {e}");
                    if cold.breaker().allows(std::time::Instant::now()) {
                        // It alone cannot be removed.
                        continue;
                    }
                    break;
                }
                swept.push((id, named));
            }
            drop(read);
            if swept.is_empty() {
                return Ok(());
            }
            let mut txn = self.write()?;
            for (id, named) in swept {
                // What has left the tier since stays on the list, for whoever comes next.
                if txn.chunk(&id)?.is_some_and(|r| r.cold.is_some()) == named {
                    txn.clear_pending_in(Tier::Cold, &id)?;
                }
            }
            txn.commit().map(|_| ())
        })();
        if let Err(e) = outcome {
            let e: StoreError = e;
            tracing::warn!("cold tier: {e}");
        }
    }

    /// Takes chunks off the list of pending ones that have no file and await none.
    ///
    /// # Errors
    /// If the index fails.
    pub fn forget_gone(&self) -> Result<()> {
        let listed = self.read()?.pending()?;
        if listed.iter().all(|id| self.volume.exists(id)) {
            return Ok(());
        }
        // Inside a change, so that nobody announces one of them meanwhile.
        let mut txn = self.write()?;
        for id in &listed {
            if !self.volume.exists(id) && !self.announced().contains_key(id) {
                txn.clear_pending(id)?;
            }
        }
        txn.commit().map(|_| ())
    }

    /// Removes files that no index entry names, but not those of an ingest that is under way.
    /// Returns files and bytes.
    ///
    /// # Errors
    /// If the index fails.
    pub(crate) fn remove_pending(&self) -> Result<(u64, u64)> {
        let _one = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
        self.remove_pending_now(None)
    }

    /// The same, for those who are placing a file, which is `except`.
    fn remove_pending_now(&self, except: Option<&ChunkId>) -> Result<(u64, u64)> {
        // Inside a change, so that nobody commits one of them meanwhile.
        let mut txn = self.write()?;
        let mut out = (0, 0);
        for id in txn.pending()? {
            if Some(&id) == except || self.announced().contains_key(&id) {
                continue;
            }
            if txn.chunk(&id)?.is_none_or(|r| r.flash.is_none()) {
                let bytes = self.volume.physical_bytes(&id);
                self.drop_files_now(&[(id, bytes)]);
                if self.volume.exists(&id) {
                    continue;
                }
                out = (out.0 + u64::from(bytes > 0), out.1 + bytes);
            }
            txn.clear_pending(&id)?;
        }
        txn.commit()?;
        Ok(out)
    }

    /// Says that files of these chunks are about to be written, before they are: whatever a crash
    /// leaves is then known, and nobody removes them meanwhile.
    ///
    /// # Errors
    /// If the index fails.
    pub fn announce(&self, ids: &[ChunkId]) -> Result<Announced<'_>> {
        let mut announced = Announced::none(self);
        announced.add(ids)?;
        Ok(announced)
    }
}

/// Chunks whose files somebody is about to write, until this is dropped.
#[must_use]
pub struct Announced<'s> {
    store: &'s Store,
    ids: Vec<ChunkId>,
}

impl<'s> Announced<'s> {
    /// Nothing yet.
    pub fn none(store: &'s Store) -> Self {
        Self { store, ids: Vec::new() }
    }

    /// [`Store::announce`] of more chunks.
    ///
    /// # Errors
    /// If the index fails.
    pub fn add(&mut self, ids: &[ChunkId]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let mut txn = self.store.write()?;
        ids.iter().try_for_each(|id| txn.mark_pending(id))?;
        // Before the change is there for others to see.
        ids.iter().for_each(|id| *self.store.announced().entry(*id).or_default() += 1);
        self.ids.extend_from_slice(ids);
        txn.commit()?;
        Ok(())
    }

    /// Whether a chunk is one of these.
    pub fn contains(&self, id: &ChunkId) -> bool {
        self.ids.contains(id)
    }

    /// Withdraws those of which `keep` says no.
    pub fn retain(&mut self, mut keep: impl FnMut(&ChunkId) -> bool) {
        let mut announced = self.store.announced();
        self.ids.retain(|id| {
            let kept = keep(id);
            if !kept && let Some(count) = announced.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    announced.remove(id);
                }
            }
            kept
        });
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.retain(|_| false);
    }
}
