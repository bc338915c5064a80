//! What an operator does with chunks.

use std::fmt::Write;

use matkv_types::ChunkId;

use crate::error::{Result, StoreError};
use crate::records::{Departure, Tier};
use crate::store::{ReadTxn, Store};
use crate::tiers::unix_seconds;

/// What a collection of garbage has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Files no index entry names, and their bytes.
    pub orphans: (u64, u64),
    /// Files in quarantine, and their bytes.
    pub quarantined: (u64, u64),
    /// Bytes of other identities.
    pub stale_bytes: u64,
}

impl Store {
    fn known(&self, id: &ChunkId) -> Result<crate::ChunkRecord> {
        self.read()?.chunk(id)?.ok_or(StoreError::Unknown(*id))
    }

    /// Keeps a chunk from being evicted until a time; 0 lets it go again.
    ///
    /// # Errors
    /// If there is no such chunk or the index fails.
    pub fn pin(&self, id: &ChunkId, until: u64) -> Result<()> {
        let mut txn = self.write()?;
        let mut record = txn.chunk(id)?.ok_or(StoreError::Unknown(*id))?;
        record.pinned_until = until;
        txn.save_chunk(id, &record)?;
        txn.commit()?;
        Ok(())
    }

    /// Brings a chunk into a tier, and out of the other. Returns the bytes that have moved.
    ///
    /// # Errors
    /// If it is in no tier, cannot be read, or finds no room.
    pub fn move_to(&self, id: &ChunkId, tier: Tier) -> Result<u64> {
        self.known(id)?;
        match tier {
            Tier::Cold => self.demote(id, "moved by an operator"),
            Tier::Flash => {
                let bytes = self.promote(id)?;
                self.remove_from(id, &[Tier::Cold], "moved by an operator")?;
                Ok(bytes)
            }
        }
    }

    /// Takes a chunk's bytes out of tiers; it is computed again when it is asked for.
    ///
    /// # Errors
    /// If there is no such chunk or the index fails.
    pub fn remove_from(&self, id: &ChunkId, tiers: &[Tier], why: &str) -> Result<u64> {
        let mut freed = 0;
        let mut txn = self.write()?;
        let record = txn.chunk(id)?.ok_or(StoreError::Unknown(*id))?;
        for tier in tiers {
            let Some(placement) = record.placement(*tier) else { continue };
            freed += placement.physical;
            let departure = Departure { tier: *tier, at: unix_seconds(), why: why.to_owned() };
            txn.mark_pending_in(*tier, id)?;
            txn.place(id, *tier, None, Some(departure))?;
        }
        txn.commit()?;
        if tiers.contains(&Tier::Flash) && record.flash.is_some() {
            self.drop_files(&[(*id, record.flash.map_or(0, |p| p.physical))]);
        }
        if tiers.contains(&Tier::Cold) && record.cold.is_some() {
            self.sweep_cold();
        }
        Ok(freed)
    }

    /// Removes what nobody will use: files without an index entry and, if asked to, those in
    /// quarantine and other identities' data.
    ///
    /// # Errors
    /// The system's reason, or if the index fails.
    pub fn collect_garbage(&self, quarantine: bool, stale: bool) -> Result<GcReport> {
        let mut report = GcReport { orphans: self.remove_pending()?, ..GcReport::default() };
        if quarantine {
            let (files, bytes) = self.volume.empty_quarantine()?;
            report.quarantined = (files as u64, bytes);
            self.space.subtract(bytes);
        }
        if stale {
            let before = self.space.stale_bytes();
            while self.remove_stale()? {}
            report.stale_bytes = before;
        }
        Ok(report)
    }

    /// Names of other identities' directories.
    pub fn other_identities(&self) -> Vec<String> {
        self.space.stale().iter().map(|s| s.name.clone()).collect()
    }

    /// Bytes on the devices of flash, over all identities, and the capacity.
    pub fn flash_usage(&self) -> (u64, Option<u64>) {
        (self.space.used() + self.space.stale_bytes(), self.space.capacity())
    }

    /// Why a chunk is, or is not, where one would expect it: a line each.
    ///
    /// # Errors
    /// If the index fails.
    pub fn explain(&self, id: &ChunkId) -> Result<Vec<String>> {
        let read = self.read()?;
        let now = unix_seconds();
        let mut out = Vec::new();
        let Some(record) = read.chunk(id)? else {
            return self.explain_unknown(id, &read);
        };
        let users = read.users(id, 4)?;
        out.push(format!(
            "{} rows, used {} times by documents: {}",
            record.rows,
            record.references,
            users.join(", ")
        ));
        for tier in Tier::ALL {
            let Some(p) = record.placement(tier) else {
                out.push(format!("not in {tier}"));
                continue;
            };
            let mut line = format!("in {tier} as {}, {} bytes", p.encoding, p.physical);
            if tier == Tier::Flash && !self.volume.exists(id) {
                let _ = write!(line, ", but its file is missing: it is computed when asked for");
            }
            out.push(line);
        }
        if let Some(d) = &record.departure {
            out.push(format!("left {} {} s ago: {}", d.tier, now.saturating_sub(d.at), d.why));
        }
        let heat = read.heat(id);
        let rule = &self.options().promotion;
        out.push(if heat.last == 0 {
            "never used since it was ingested".to_owned()
        } else {
            format!(
                "used {} s ago, warmth {:.2}",
                now.saturating_sub(heat.last),
                heat.count_at(now, rule.half_life)
            )
        });
        if record.cold.is_some() && record.flash.is_none() {
            out.push(format!(
                "promoted once its warmth is above {} and its last use less than {} s ago",
                rule.threshold, rule.window
            ));
        }
        if record.is_pinned(now) {
            out.push(match record.pinned_until {
                u64::MAX => "pinned".to_owned(),
                until => format!("pinned for another {} s", until - now),
            });
        }
        out.push(format!(
            "policy {}, scope default, fingerprint {}",
            self.options().policy.as_str(),
            self.identity().directory()
        ));
        Ok(out)
    }

    fn explain_unknown(&self, id: &ChunkId, read: &ReadTxn<'_>) -> Result<Vec<String>> {
        let mut out = vec![format!("the index does not know chunk {id}")];
        if self.volume.exists(id) {
            let pending = read.is_pending_in(Tier::Flash, id)?;
            out.push(if pending {
                "it has a file on flash: an ingest has not committed it; `chunks gc` removes it"
                    .to_owned()
            } else {
                "it has a file on flash that nobody names; `chunks rebuild-index` enters it"
                    .to_owned()
            });
        }
        let other = self.other_identities();
        if !other.is_empty() {
            out.push(format!(
                "other models, prompts or tokenizers have stores of their own here ({}); the same \
                 text has another id there",
                other.join(", ")
            ));
        }
        Ok(out)
    }
}
