//! What is put in order at a start, checked in the background, and rebuilt when the index is lost.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{MutexGuard, PoisonError};

use matkv_format::{ChunkFile, Superblock};
use matkv_types::ChunkId;

use crate::error::{Result, StoreError};
use crate::identity::RECONCILE;
use crate::records::{ChunkRecord, Placement, Tier};
use crate::store::{NewChunk, Store};
use crate::tiers::unix_seconds;

/// Gives a chunk's tokens a number in the vector index; none if they have no direction.
pub type Embed<'e> = &'e mut dyn FnMut(&mut crate::WriteTxn<'_>, &[u32]) -> Result<Option<u32>>;

/// What a pass over chunks has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Chunks looked at.
    pub chunks: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Copies that were bad.
    pub bad: u64,
    /// Copies written again from a good one.
    pub healed: u64,
    /// Chunks that had outlived their time.
    pub expired: Vec<ChunkId>,
}

/// A copy of a chunk that has been verified.
#[derive(Debug)]
pub struct CheckedCopy {
    /// Where it is.
    pub tier: Tier,
    /// Which of the copies there.
    pub copy: usize,
    /// What is wrong with it.
    pub error: Option<StoreError>,
    /// Whether it has been written again from a good one.
    pub healed: bool,
}

impl CheckedCopy {
    fn is_damaged(&self) -> bool {
        self.error.as_ref().is_some_and(StoreError::is_damage)
    }
}

/// What a rebuild has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// Chunks entered.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files put aside.
    pub quarantined: u64,
    /// Documents entered.
    pub documents: u64,
    /// Documents of which a chunk is in no tier any more.
    pub incomplete: Vec<String>,
}

impl Store {
    pub(crate) fn announced(&self) -> MutexGuard<'_, HashMap<ChunkId, u32>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At a start: what is in use is known from the index, and from the few files it may not name.
    /// A capacity that has been lowered is enforced here.
    pub(crate) fn recover(&self, dir: &Path) -> Result<()> {
        let marker = dir.join(RECONCILE);
        if marker.exists() {
            self.reconcile()?;
            std::fs::remove_file(&marker).map_err(|source| crate::StoreError::File {
                what: "remove",
                path: marker,
                source,
            })?;
        }
        let read = self.read()?;
        let mut used = read.totals()?.flash_bytes + self.volume.quarantined()?.1;
        let mut done = Vec::new();
        for id in read.pending()? {
            let indexed = read.chunk(&id)?.is_some_and(|r| r.flash.is_some());
            let bytes = self.volume.physical_bytes(&id);
            if indexed || bytes == 0 {
                done.push(id);
            } else {
                used += bytes;
            }
        }
        drop(read);
        self.space.set_used(used);
        if !done.is_empty() {
            let mut txn = self.write()?;
            done.iter().try_for_each(|id| txn.clear_pending(id))?;
            txn.commit()?;
        }
        self.enforce()
    }

    /// Brings flash below its capacity.
    fn enforce(&self) -> Result<()> {
        if !self.space.exceeds(0) {
            return Ok(());
        }
        tracing::info!("flash holds more than storage.capacity; evicting");
        self.remove_pending()?;
        while self.space.exceeds(0) {
            if !self.remove_stale()? {
                break;
            }
        }
        while self.space.exceeds(0) {
            let why = "storage.capacity was lowered";
            if self.evict_some(Tier::Flash, why, |s| Ok(s.space.exceeds(0)))? == 0 {
                tracing::warn!("flash holds more than storage.capacity, and all of it is pinned");
                break;
            }
        }
        Ok(())
    }

    /// Another identity has needed room: what is gone is found out.
    fn reconcile(&self) -> Result<()> {
        let mut after = None;
        loop {
            let batch = self.read()?.chunks_after(after.as_ref(), 4096)?;
            let Some((last, _)) = batch.last() else { return Ok(()) };
            after = Some(*last);
            let mut txn = self.write()?;
            for (id, record) in &batch {
                if record.flash.is_some() && !self.volume.exists(id) {
                    let why = "another model needed the room".to_owned();
                    let departure = crate::Departure { tier: Tier::Flash, at: unix_seconds(), why };
                    txn.place(id, Tier::Flash, None, Some(departure))?;
                }
            }
            txn.commit()?;
        }
    }

    /// Verifies the chunks after `after`, up to `budget` bytes, heals what has a good copy, and
    /// lets those leave whose time is over. Returns where to go on; nothing at the end.
    ///
    /// # Errors
    /// If the index fails. A bad chunk is no error.
    pub fn scrub(
        &self,
        after: Option<ChunkId>,
        budget: u64,
    ) -> Result<(Option<ChunkId>, ScrubReport)> {
        let mut report = ScrubReport::default();
        let mut last = after;
        while report.bytes < budget {
            let batch = self.read()?.chunks_after(last.as_ref(), 1)?;
            let Some((id, record)) = batch.into_iter().next() else { return Ok((None, report)) };
            last = Some(id);
            report.chunks += 1;
            if self.expire(&id)? {
                report.expired.push(id);
                continue;
            }
            if let Some(placement) = record.flash {
                report.bytes += placement.physical;
                // What cannot be reached costs money to reach: the cold tier verifies on reading.
                for checked in self.verify_chunk(&id, &[Tier::Flash])? {
                    report.bad += u64::from(checked.is_damaged());
                    report.healed += u64::from(checked.healed);
                }
            }
        }
        Ok((last, report))
    }

    /// Reads every copy a chunk has in these tiers. A damaged one is set aside, and written again
    /// if another on flash is good; of one that cannot be read nothing is known, and it stays.
    ///
    /// # Errors
    /// If the index fails or does not know the chunk. A bad copy is no error.
    pub fn verify_chunk(&self, id: &ChunkId, tiers: &[Tier]) -> Result<Vec<CheckedCopy>> {
        let Some(record) = self.read()?.chunk(id)? else { return Err(StoreError::Unknown(*id)) };
        let mut copies = Vec::new();
        for tier in tiers.iter().copied().filter(|t| record.placement(*t).is_some()) {
            for copy in 0..self.copies_in(tier) {
                let error = self.read_verified(id, tier, copy).err();
                copies.push(CheckedCopy { tier, copy, error, healed: false });
            }
        }
        let good = copies.iter().any(|c| c.tier == Tier::Flash && c.error.is_none());
        for checked in &mut copies {
            let Some(error) = &checked.error else { continue };
            tracing::warn!("chunk {id}: {error}");
            if checked.is_damaged() {
                let why = error.to_string();
                match checked.tier {
                    Tier::Flash => checked.healed = self.mend(id, checked.copy, &why, good)?,
                    Tier::Cold => self.lost_if_same(id, &record, &why)?,
                }
            }
        }
        Ok(copies)
    }

    /// Sets a damaged copy on flash aside, and writes it again if there is a good one.
    fn mend(&self, id: &ChunkId, copy: usize, why: &str, good: bool) -> Result<bool> {
        // It may have been evicted or deleted while it was read.
        if self.read()?.chunk(id)?.is_none_or(|r| r.flash.is_none()) {
            return Ok(false);
        }
        let moved = self.quarantine(id, copy, why)?;
        if good {
            return Ok(self
                .heal(id, copy)
                .inspect_err(|e| tracing::warn!("chunk {id}: not healed: {e}"))
                .is_ok());
        }
        if !moved && !self.volume.exists(id) {
            self.lost(id, Tier::Flash, "its file is missing")?;
        }
        Ok(false)
    }

    /// The object that was read is damaged; one that has taken its place meanwhile is not.
    fn lost_if_same(&self, id: &ChunkId, seen: &ChunkRecord, why: &str) -> Result<()> {
        let _one = self.moving_cold.lock().unwrap_or_else(PoisonError::into_inner);
        if self.read()?.chunk(id)?.is_some_and(|r| r.cold == seen.cold) {
            self.lost(id, Tier::Cold, &format!("damaged: {why}"))?;
        }
        Ok(())
    }

    /// Lets a chunk go that nobody has used for as long as `tenant.ttl` says.
    fn expire(&self, id: &ChunkId) -> Result<bool> {
        let Some(ttl) = self.options().ttl else { return Ok(false) };
        let (read, now) = (self.read()?, unix_seconds());
        let Some(record) = read.chunk(id)? else { return Ok(false) };
        let mut last = read.heat(id).last;
        if last == 0 {
            // Never used: its documents' age counts.
            for name in read.users(id, usize::MAX)? {
                last = last.max(read.document(&name)?.map_or(0, |d| d.ingested_at));
            }
        }
        let there = record.flash.is_some() || record.cold.is_some();
        if !there || record.is_pinned(now) || now.saturating_sub(last) < ttl {
            return Ok(false);
        }
        drop(read);
        self.remove_from(id, &Tier::ALL, "not used for tenant.ttl")?;
        Ok(true)
    }

    /// Enters chunk files and documents that lie on the devices into an empty index. Vectors are
    /// not in the files: `embed` is asked for each chunk's number in the vector index.
    ///
    /// # Errors
    /// If the index fails or a device cannot be listed. A bad file is put aside.
    pub fn rebuild(&self, embed: Embed<'_>) -> Result<RebuildReport> {
        let mut report = RebuildReport::default();
        for id in self.volume.scan()? {
            let mut reason = String::new();
            let good = (0..self.volume.copies()).find_map(|copy| {
                let bytes = self.volume.read_copy(&id, copy).map_err(|e| e.to_string());
                match bytes.and_then(|b| self.self_described(&id, &b).map_err(|e| e.to_string())) {
                    Ok(found) => Some(found),
                    Err(e) => {
                        reason = e;
                        None
                    }
                }
            });
            let Some((found, tokens)) = good else {
                tracing::warn!("chunk {id}: {reason}");
                self.volume.quarantine(&id)?;
                report.quarantined += 1;
                continue;
            };
            let physical = self.volume.physical_bytes(&id);
            self.enter(id, &found, tokens, Tier::Flash, physical, embed)?;
            report.chunks += 1;
            report.bytes += physical;
        }
        let objects = self.cold.as_ref().map_or(Ok(Vec::new()), |c| c.scan())?;
        for id in objects {
            let Some(cold) = &self.cold else { break };
            match cold.get(&id).and_then(|b| self.self_described(&id, &b)) {
                Ok((found, tokens)) => {
                    let bytes = found.file_len() as u64;
                    let new = self.enter(id, &found, tokens, Tier::Cold, bytes, embed)?;
                    report.chunks += u64::from(new);
                    report.bytes += bytes;
                }
                Err(e) => tracing::warn!("cold chunk {id}: {e}"),
            }
        }
        for document in self.manifests.all()? {
            let read = self.read()?;
            let missing =
                document.chunks.iter().any(|id| !read.chunk(id).is_ok_and(|c| c.is_some()));
            drop(read);
            if missing {
                report.incomplete.push(document.id);
                continue;
            }
            let mut txn = self.write()?;
            txn.put_documents(&[&document])?;
            txn.commit()?;
            report.documents += 1;
        }
        self.space.set_used(self.read()?.totals()?.flash_bytes + self.volume.quarantined()?.1);
        self.enforce()?;
        Ok(report)
    }

    /// A file that says of itself what it is, if it is one of ours.
    fn self_described(&self, id: &ChunkId, bytes: &[u8]) -> Result<(Superblock, Vec<u32>)> {
        let found = Superblock::decode(bytes)?;
        let tokens = found.tokens(bytes)?;
        ChunkFile::verify(bytes, &self.identity().expectation(*id, &tokens))?;
        Ok((found, tokens))
    }

    fn enter(
        &self,
        id: ChunkId,
        found: &Superblock,
        tokens: Vec<u32>,
        tier: Tier,
        physical: u64,
        embed: Embed<'_>,
    ) -> Result<bool> {
        let placement = Some(Placement::of(found, physical));
        let mut txn = self.write()?;
        let new = !txn.place(&id, tier, placement, None)?;
        if new {
            let vector = embed(&mut txn, &tokens)?;
            let (flash, cold) = match tier {
                Tier::Flash => (placement, None),
                Tier::Cold => (None, placement),
            };
            txn.put_chunk(&NewChunk { id, tokens, flash, cold, vector, compute_ms: 0 })?;
        }
        txn.commit()?;
        Ok(new)
    }
}
