//! Measurements of parts, for `doctor` and the benchmarks: the code that serves, without the
//! processes around it.

mod answers;
pub mod codec;
pub mod device;
pub mod fidelity;
pub mod load;
pub mod machine;
pub mod policies;
pub mod speed;

use matkv_format::{ChunkFile, Superblock};
use matkv_store::{Store, Tier};
use matkv_sys::SlotMut;
use matkv_types::{ChunkId, Encoding};

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// A chunk and its file.
pub struct Stored {
    id: ChunkId,
    tokens: Vec<u32>,
    file: SlotMut,
    found: Superblock,
}

impl Stored {
    /// The chunk's file in another encoding.
    fn transcode(&self, store: &Store, to: Encoding, level: i32) -> Result<Vec<u8>, String> {
        let expect = store.identity().expectation(self.id, &self.tokens);
        ChunkFile::transcode(&self.file, &self.found, &expect, to, level).map_err(text)
    }
}

/// Reads, one after the other, the first `count` chunks on flash of at least `rows` rows.
fn stored(
    store: &Store,
    count: usize,
    rows: usize,
) -> Result<impl Iterator<Item = Result<Stored, String>>, String> {
    let all = store.read().and_then(|r| r.chunks_after(None, usize::MAX)).map_err(text)?;
    let fit = all.into_iter().filter(|(_, c)| c.rows as usize >= rows && c.flash.is_some());
    let ids: Vec<ChunkId> = fit.map(|(id, _)| id).take(count).collect();
    if ids.len() < count {
        return Err(format!(
            "{count} chunks of {rows} rows are needed, there are {}; ingest more documents",
            ids.len()
        ));
    }
    Ok(ids.into_iter().map(|id| {
        let (file, found) = store.read_verified(&id, Tier::Flash, 0).map_err(text)?;
        let tokens = found.tokens(&file).map_err(text)?;
        Ok(Stored { id, tokens, file, found })
    }))
}
