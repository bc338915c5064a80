//! Reading the index, and changing it.

use heed::{RoTxn, RwTxn, WithoutTls};
use matkv_types::ChunkId;

use super::{NewChunk, ReadTxn, WriteTxn, decode, digest, encode, keys, place_key};
use crate::error::{Result, StoreError};
use crate::heat::Heat;
use crate::records::{ChunkRecord, Departure, DocumentRecord, Placement, Tier, Totals};

impl<'s> ReadTxn<'s> {
    /// LMDB's transaction, for other tables of the environment.
    pub fn txn(&self) -> &RoTxn<'s, WithoutTls> {
        &self.txn
    }

    /// One document.
    ///
    /// # Errors
    /// If the index fails.
    pub fn document(&self, id: &str) -> Result<Option<DocumentRecord>> {
        self.store.document(&self.txn, id)
    }

    /// All documents, by id.
    ///
    /// # Errors
    /// If the index fails.
    pub fn documents(&self) -> Result<Vec<DocumentRecord>> {
        let list = self.store.tables.documents.iter(&self.txn)?;
        list.map(|entry| entry.map_err(Into::into).and_then(|(id, b)| decode(id, b))).collect()
    }

    /// One chunk.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunk(&self, id: &ChunkId) -> Result<Option<ChunkRecord>> {
        self.store.chunk(&self.txn, id)
    }

    /// A chunk's token ids.
    ///
    /// # Errors
    /// If the index fails.
    pub fn tokens(&self, id: &ChunkId) -> Result<Option<Vec<u32>>> {
        let bytes = self.store.tables.tokens.get(&self.txn, id.as_bytes())?;
        Ok(bytes.map(|b| {
            b.chunks_exact(4).map(|t| u32::from_le_bytes([t[0], t[1], t[2], t[3]])).collect()
        }))
    }

    /// A document that uses the chunk, and the chunk's place in it: the first of `preferred` that
    /// does, else the first by name.
    ///
    /// # Errors
    /// If the index fails.
    pub fn place(&self, id: &ChunkId, preferred: &[String]) -> Result<Option<(String, u32)>> {
        for name in preferred {
            if let Some(ordinal) = self.store.tables.places.get(&self.txn, &place_key(id, name))? {
                return decode(name, ordinal).map(|ordinal| Some((name.clone(), ordinal)));
            }
        }
        let mut found = self.store.tables.places.prefix_iter(&self.txn, id.as_bytes())?;
        let Some((key, ordinal)) = found.next().transpose()? else { return Ok(None) };
        let name = String::from_utf8_lossy(&key[id.as_bytes().len()..]).into_owned();
        decode(&name, ordinal).map(|ordinal| Some((name, ordinal)))
    }

    /// The chunk a vector number stands for.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunk_of_vector(&self, vector: u32) -> Result<Option<ChunkId>> {
        let found = self.store.tables.vectors.get(&self.txn, &vector)?;
        found.map(|b| digest(&vector.to_string(), b)).transpose()
    }

    /// Sizes of the whole store.
    ///
    /// # Errors
    /// If the index fails.
    pub fn totals(&self) -> Result<Totals> {
        self.store.tables.totals(&self.txn)
    }

    /// How warm a chunk is.
    pub fn heat(&self, id: &ChunkId) -> Heat {
        self.store.heat.get(id).unwrap_or_else(|| self.store.heat_in(&self.txn, id))
    }

    /// Up to `most` chunks after `after`, in the order of their ids.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunks_after(
        &self,
        after: Option<&ChunkId>,
        most: usize,
    ) -> Result<Vec<(ChunkId, ChunkRecord)>> {
        use std::ops::Bound;
        let from = after.map_or(Bound::Unbounded, |id| Bound::Excluded(id.as_bytes().as_slice()));
        let range = self.store.tables.chunks.range(&self.txn, &(from, Bound::Unbounded))?;
        let mut out = Vec::new();
        for entry in range.take(most) {
            let (key, bytes) = entry?;
            let id = digest("chunks", key)?;
            out.push((id, decode(&id.to_string(), bytes)?));
        }
        Ok(out)
    }

    /// Documents that use a chunk, at most `most`.
    ///
    /// # Errors
    /// If the index fails.
    pub fn users(&self, id: &ChunkId, most: usize) -> Result<Vec<String>> {
        let found = self.store.tables.places.prefix_iter(&self.txn, id.as_bytes())?;
        let name = |key: &[u8]| String::from_utf8_lossy(&key[id.as_bytes().len()..]).into_owned();
        found.take(most).map(|e| e.map(|(key, _)| name(key)).map_err(Into::into)).collect()
    }

    /// Whether a chunk may have files in a tier that the index does not name.
    pub(crate) fn is_pending_in(&self, tier: Tier, id: &ChunkId) -> Result<bool> {
        Ok(self.store.tables.pending_in(tier).get(&self.txn, id.as_bytes())?.is_some())
    }

    /// Chunks that may have files the index does not name.
    ///
    /// # Errors
    /// If the index fails.
    pub fn pending(&self) -> Result<Vec<ChunkId>> {
        self.pending_in(Tier::Flash)
    }

    /// The same of any tier.
    pub(crate) fn pending_in(&self, tier: Tier) -> Result<Vec<ChunkId>> {
        keys(self.store.tables.pending_in(tier), &self.txn)
    }
}

impl<'s> WriteTxn<'s> {
    /// LMDB's transaction, for other tables of the environment.
    pub fn txn(&mut self) -> &mut RwTxn<'s> {
        &mut self.txn
    }

    /// A vector number nobody has used.
    ///
    /// # Errors
    /// If the index fails.
    pub fn next_vector(&mut self) -> Result<u32> {
        let next = self.store.tables.meta.get(&self.txn, "next-vector")?.unwrap_or(0);
        self.store.tables.meta.put(&mut self.txn, "next-vector", &(next + 1))?;
        Ok(next)
    }

    /// One chunk, as this change sees it.
    ///
    /// # Errors
    /// If the index fails.
    pub fn chunk(&self, id: &ChunkId) -> Result<Option<ChunkRecord>> {
        self.store.chunk(&self.txn, id)
    }

    /// Adds a chunk nobody refers to yet.
    ///
    /// # Errors
    /// If the index fails.
    pub fn put_chunk(&mut self, new: &NewChunk) -> Result<()> {
        let tokens: Vec<u8> = new.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.store.tables.tokens.put(&mut self.txn, new.id.as_bytes(), &tokens)?;
        if let Some(vector) = new.vector {
            self.store.tables.vectors.put(&mut self.txn, &vector, new.id.as_bytes())?;
        }
        self.removed.retain(|(id, _)| *id != new.id);
        let record = ChunkRecord {
            rows: new.tokens.len() as u32,
            references: 0,
            vector: new.vector,
            flash: new.flash,
            cold: new.cold,
            pinned_until: 0,
            compute_ms: new.compute_ms,
            departure: None,
        };
        self.save_chunk(&new.id, &record)
    }

    /// Writes a record, and keeps sums, policies and the list of pending files in step.
    ///
    /// # Errors
    /// If the index fails.
    pub fn save_chunk(&mut self, id: &ChunkId, record: &ChunkRecord) -> Result<()> {
        let old = self.store.chunk(&self.txn, id)?;
        if let Some(old) = &old {
            self.totals.count(old, false);
        }
        self.totals.count(record, true);
        for tier in Tier::ALL {
            let before = old.as_ref().and_then(|o| o.placement(tier));
            let after = record.placement(tier);
            if before != after {
                let heat = self.store.heat.get(id);
                let heat = heat.unwrap_or_else(|| self.store.heat_in(&self.txn, id));
                self.moves.push((*id, tier, after.map(|p| self.store.item(record, p, &heat))));
            }
        }
        if record.flash.is_some() {
            self.store.tables.pending.delete(&mut self.txn, id.as_bytes())?;
        }
        let bytes = encode(&id.to_string(), record)?;
        Ok(self.store.tables.chunks.put(&mut self.txn, id.as_bytes(), &bytes)?)
    }

    /// Puts a chunk into a tier, or takes it out; false if the index does not know it.
    ///
    /// # Errors
    /// If the index fails.
    pub fn place(
        &mut self,
        id: &ChunkId,
        tier: Tier,
        placement: Option<Placement>,
        departure: Option<Departure>,
    ) -> Result<bool> {
        let Some(mut record) = self.chunk(id)? else { return Ok(false) };
        record.set_placement(tier, placement);
        if departure.is_some() {
            record.departure = departure;
        }
        self.save_chunk(id, &record).map(|()| true)
    }

    /// Notes that a chunk may have files the index does not name.
    ///
    /// # Errors
    /// If the index fails.
    pub fn mark_pending(&mut self, id: &ChunkId) -> Result<()> {
        self.mark_pending_in(Tier::Flash, id)
    }

    /// [`Self::mark_pending`] of any tier.
    ///
    /// # Errors
    /// If the index fails.
    pub(crate) fn mark_pending_in(&mut self, tier: Tier, id: &ChunkId) -> Result<()> {
        Ok(self.store.tables.pending_in(tier).put(&mut self.txn, id.as_bytes(), &[])?)
    }

    /// [`Self::clear_pending`] of any tier.
    pub(crate) fn clear_pending_in(&mut self, tier: Tier, id: &ChunkId) -> Result<()> {
        self.store.tables.pending_in(tier).delete(&mut self.txn, id.as_bytes())?;
        Ok(())
    }

    /// Chunks that may have files the index does not name, as this change sees it.
    pub(crate) fn pending(&self) -> Result<Vec<ChunkId>> {
        keys(&self.store.tables.pending, &self.txn)
    }

    /// The chunk has no file the index does not name.
    ///
    /// # Errors
    /// If the index fails.
    pub fn clear_pending(&mut self, id: &ChunkId) -> Result<()> {
        self.clear_pending_in(Tier::Flash, id)
    }

    /// Writes how warm chunks are; of those the index knows.
    ///
    /// # Errors
    /// If the index fails.
    pub(crate) fn put_heat(&mut self, id: &ChunkId, heat: &Heat) -> Result<()> {
        if self.store.tables.chunks.get(&self.txn, id.as_bytes())?.is_none() {
            return Ok(());
        }
        Ok(self.store.tables.heat.put(&mut self.txn, id.as_bytes(), &heat.encode())?)
    }

    /// Adds documents, or replaces those of the same ids. Every chunk must be known. References
    /// of all of them are counted before any old version is released, so a chunk may move from
    /// one document to another. Returns vector numbers of chunks nobody refers to any more.
    ///
    /// # Errors
    /// If the index fails or a chunk is unknown.
    pub fn put_documents(&mut self, documents: &[&DocumentRecord]) -> Result<Vec<u32>> {
        let mut old = Vec::new();
        for document in documents {
            old.extend(self.store.document(&self.txn, &document.id)?);
            self.refer(document)?;
            let bytes = encode(&document.id, document)?;
            self.store.tables.documents.put(&mut self.txn, &document.id, &bytes)?;
            self.forgotten.retain(|id| *id != document.id);
            self.written.retain(|d| d.id != document.id);
            self.written.push((*document).clone());
        }
        let mut vectors = Vec::new();
        for document in old {
            vectors.extend(self.release(document)?);
        }
        // Releasing the old version has removed the places both versions share.
        for document in documents {
            self.put_places(document)?;
        }
        Ok(vectors)
    }

    fn refer(&mut self, document: &DocumentRecord) -> Result<()> {
        for id in &document.chunks {
            let record = self.store.chunk(&self.txn, id)?;
            let mut record = record.ok_or_else(|| StoreError::Record {
                key: id.to_string(),
                reason: format!("document {:?} names a chunk that is not indexed", document.id),
            })?;
            record.references += 1;
            self.save_chunk(id, &record)?;
        }
        Ok(())
    }

    fn put_places(&mut self, document: &DocumentRecord) -> Result<()> {
        for (ordinal, id) in document.chunks.iter().enumerate() {
            let bytes = encode(&document.id, &ordinal)?;
            self.store.tables.places.put(&mut self.txn, &place_key(id, &document.id), &bytes)?;
        }
        Ok(())
    }

    /// Removes a document. Returns vector numbers of chunks nobody refers to any more, or none
    /// if there is no such document.
    ///
    /// # Errors
    /// If the index fails.
    pub fn delete_document(&mut self, id: &str) -> Result<Option<Vec<u32>>> {
        let Some(old) = self.store.document(&self.txn, id)? else { return Ok(None) };
        self.store.tables.documents.delete(&mut self.txn, id)?;
        self.written.retain(|d| d.id != id);
        self.forgotten.push(id.to_owned());
        self.release(old).map(Some)
    }

    fn release(&mut self, old: DocumentRecord) -> Result<Vec<u32>> {
        let mut vectors = Vec::new();
        for id in old.chunks {
            self.store.tables.places.delete(&mut self.txn, &place_key(&id, &old.id))?;
            let Some(mut record) = self.store.chunk(&self.txn, &id)? else { continue };
            record.references = record.references.saturating_sub(1);
            if record.references > 0 {
                self.save_chunk(&id, &record)?;
                continue;
            }
            self.totals.count(&record, false);
            self.store.tables.chunks.delete(&mut self.txn, id.as_bytes())?;
            self.store.tables.tokens.delete(&mut self.txn, id.as_bytes())?;
            self.store.tables.heat.delete(&mut self.txn, id.as_bytes())?;
            // Until its files are gone, also after a crash.
            self.mark_pending(&id)?;
            if record.cold.is_some() {
                self.mark_pending_in(Tier::Cold, &id)?;
            }
            self.moves.extend(Tier::ALL.map(|tier| (id, tier, None)));
            if let Some(vector) = record.vector {
                self.store.tables.vectors.delete(&mut self.txn, &vector)?;
                vectors.push(vector);
            }
            self.removed.push((id, record));
        }
        Ok(vectors)
    }

    /// Makes the change durable, then removes files nobody refers to any more. A crash in
    /// between, or a file that cannot be removed, leaves a chunk on the list of pending ones.
    ///
    /// # Errors
    /// If LMDB cannot commit: nothing has changed then.
    pub fn commit(mut self) -> Result<Vec<ChunkId>> {
        self.totals.documents = self.store.tables.documents.len(&self.txn)?;
        let totals = encode("totals", &self.totals)?;
        self.store.tables.sums.put(&mut self.txn, "totals", &totals)?;
        // A document without a manifest is lost if the index is; one with a manifest and without
        // an index entry only if the index is rebuilt. So a manifest goes before its entry.
        let forgotten: Vec<String> = std::mem::take(&mut self.forgotten);
        self.store.manifests.remove(&forgotten)?;
        self.store.manifests.write(&self.written)?;
        let Self { store, txn, removed, moves, _writing, .. } = self;
        txn.commit()?;
        store.residents().apply(&moves);
        // Whoever places a file has that lock first and this one second.
        drop(_writing);
        let flash = |r: &ChunkRecord| r.flash.map_or(0, |p| p.physical);
        let files: Vec<_> = removed.iter().map(|(id, r)| (*id, flash(r))).collect();
        store.drop_files(&files);
        // Objects in the cold tier go when it can be reached.
        Ok(files.into_iter().map(|(id, _)| id).collect())
    }
}
