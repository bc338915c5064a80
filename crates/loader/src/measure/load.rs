//! From a cold device into the arena, through the code that serves: store, engine, verification,
//! decoding. Only the model is not there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, bounded};
use matkv_format::ChunkFile;
use matkv_store::{
    DocumentRecord, NewChunk, Store, StoreOptions, Tier, TierOptions, Volume, VolumeKind,
    page_aligned,
};
pub use matkv_sys::EngineOptions;
use matkv_sys::{REQUESTS_MAX, ReadEngine, Segment, SlotMut, evict_page_cache, open_engine};
use matkv_types::{ChunkId, ContentId, Encoding, KvLayout};

use super::{stored, text};
use crate::chunk_spec::ChunkSpec;
use crate::compile::restore;
use crate::keeper::NOTES_MAX;
use crate::onboard::{self, OnboardInlets, OnboardOutlets, Onboarding, Shelf};
use crate::rates::Rates;
use crate::throttled::Throttled;
use crate::world::{Found, LoadJob, Loaded};

/// Level of the lossless stage.
const LEVEL: i32 = 3;

/// A chunk as the benchmark has it.
struct Sample {
    id: ChunkId,
    tokens: Arc<[u32]>,
}

/// A store of its own with the chunks of another, in one encoding.
pub struct Bench {
    shelf: Arc<BenchShelf>,
    samples: Vec<Sample>,
    encoding: Encoding,
}

struct BenchShelf {
    store: Store,
    spec: ChunkSpec,
    rates: Rates,
}

impl Shelf for BenchShelf {
    fn store(&self) -> &Store {
        &self.store
    }

    fn files_of(&self, _id: &ChunkId) -> &Volume {
        self.store.files()
    }

    fn is_indexed(&self, _id: &ChunkId) -> bool {
        true
    }

    fn spec(&self) -> &ChunkSpec {
        &self.spec
    }

    fn rates(&self) -> &Rates {
        &self.rates
    }
}

impl Bench {
    /// Copies up to `count` chunks of at least `rows` rows from a store into one in `dir`.
    ///
    /// # Errors
    /// If there are too few, or they cannot be read or written.
    pub fn prepare(
        from: &Store,
        dir: &Path,
        directories: Vec<PathBuf>,
        encoding: Encoding,
        (count, rows): (usize, usize),
    ) -> Result<Self, String> {
        let kind = if directories.len() > 1 { VolumeKind::Stripe } else { VolumeKind::Single };
        let options = StoreOptions {
            directories,
            kind,
            flash: TierOptions { encoding, level: LEVEL, capacity: None },
            ..StoreOptions::new(dir.to_owned())
        };
        let identity = from.identity().clone();
        let spec = ChunkSpec {
            fingerprint: identity.fingerprint,
            shape: identity.shape,
            encoding,
            level: LEVEL,
            base_position: identity.base_position,
        };
        let store = Store::open(options, identity).map_err(text)?;
        let mut samples = Vec::new();
        for chunk in stored(from, count, rows)? {
            let chunk = chunk?;
            let file = chunk.transcode(from, encoding, LEVEL)?;
            add(&store, chunk.id, &chunk.tokens, &file)?;
            samples.push(Sample { id: chunk.id, tokens: chunk.tokens.into() });
        }
        let shelf = Arc::new(BenchShelf { store, spec, rates: Rates::default() });
        Ok(Self { shelf, samples, encoding })
    }

    /// Every file of the first `count` chunks.
    pub fn files(&self, count: usize) -> Vec<PathBuf> {
        let files = self.shelf.store.files();
        let paths = |s: &Sample| files.paths(&s.id).collect::<Vec<_>>();
        self.samples[..count].iter().flat_map(paths).collect()
    }

    /// Bytes of the files of the first `count` chunks.
    pub fn stored_bytes(&self, count: usize) -> u64 {
        let files = self.shelf.store.files();
        self.samples[..count].iter().map(|s| files.physical_bytes(&s.id)).sum()
    }

    /// Seconds of bringing the first `count` chunks from a cold device into an arena. `slow` may
    /// wrap the engine.
    ///
    /// # Errors
    /// If a load fails.
    pub fn load(
        &self,
        count: usize,
        options: EngineOptions,
        threads: usize,
        slow: Option<u64>,
    ) -> Result<f64, String> {
        let form = self.encoding.in_arena().dtype;
        let slot =
            |s: &Sample| self.shelf.spec.slot_len(s.tokens.len(), form).next_multiple_of(4096);
        let samples = &self.samples[..count];
        let bytes: usize = samples.iter().map(slot).sum();
        let segment =
            Segment::create(&format!("matkv-bench-{}", std::process::id()), bytes).map_err(text)?;
        let (starts, start) = bounded(REQUESTS_MAX);
        let (reads, read) = bounded(REQUESTS_MAX);
        let (fetched, fetch) = bounded(1);
        let (loaded, outcomes) = bounded(REQUESTS_MAX);
        let (keeper, _notes) = bounded(NOTES_MAX);
        let (engine, _) = open_engine(options, segment.region(), reads.clone()).map_err(text)?;
        let engine: Arc<dyn ReadEngine> = match slow {
            Some(rate) => Arc::new(Throttled::new(rate, reads)),
            None => {
                drop(reads);
                engine
            }
        };
        let shelf: Arc<dyn Shelf> = Arc::clone(&self.shelf) as _;
        let to = OnboardOutlets { starts, fetched, loaded, keeper };
        let onboarding = Onboarding::new(shelf, engine, to, threads).map_err(text)?;
        let inlets = OnboardInlets { starts: start, reads: read, fetched: fetch };
        let (stop, stopped) = bounded::<()>(0);
        let spent = std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| onboard::run(&onboarding, &inlets, &stopped));
            }
            // A loader that has been running has the memory it decodes from.
            let warm = self.run(&onboarding, &segment, &outcomes, &samples[..count.min(8)], slot);
            let spent = warm.and_then(|_| {
                for file in self.files(count) {
                    evict_page_cache(&file).map_err(text)?;
                }
                self.run(&onboarding, &segment, &outcomes, samples, slot)
            });
            drop(stop);
            spent
        });
        spent.map(|t| t.as_secs_f64())
    }

    fn run(
        &self,
        onboarding: &Onboarding,
        segment: &Segment,
        outcomes: &Receiver<Loaded>,
        samples: &[Sample],
        slot: impl Fn(&Sample) -> usize,
    ) -> Result<Duration, String> {
        let mut at = 0;
        let mut jobs = Vec::new();
        let read = self.shelf.store.read().map_err(text)?;
        for (tag, sample) in samples.iter().enumerate() {
            let len = slot(sample);
            let target = segment.region().exclusive(at..at + len).map_err(text)?;
            at += len;
            let (tag, id, tokens) = (tag as u64, sample.id, Arc::clone(&sample.tokens));
            let placement = read.chunk(&id).map_err(text)?.and_then(|r| r.flash);
            let bytes = placement.ok_or("a chunk has left flash")?.bytes;
            let found = Found { tier: Tier::Flash, encoding: self.encoding, bytes };
            jobs.push(LoadJob { tag, id, tokens, found, target, growing: None });
        }
        drop(read);
        let started = Instant::now();
        let (mut jobs, mut done, mut under_way) = (jobs.into_iter(), 0, 0);
        while done < samples.len() {
            while under_way < crate::world::LOADS_MAX
                && let Some(job) = jobs.next()
            {
                onboarding.start(job).map_err(|(_, reason)| reason.to_string())?;
                under_way += 1;
            }
            let outcome = outcomes.recv().map_err(text)?;
            outcome.result.map_err(|e| e.to_string())?;
            (done, under_way) = (done + 1, under_way - 1);
        }
        Ok(started.elapsed())
    }

    /// Seconds of verifying and decoding the first `count` chunks from memory, by as many threads
    /// as loading uses.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn decode(&self, count: usize, threads: usize) -> Result<f64, String> {
        let form = self.encoding.in_arena().dtype;
        // It has room for all.
        let (todo, jobs) = bounded::<(&Sample, SlotMut, Vec<u8>)>(count);
        for sample in &self.samples[..count] {
            let file = self.shelf.store.files().read_copy(&sample.id, 0).map_err(text)?;
            let layout = KvLayout::new(self.shelf.spec.shape, form, sample.tokens.len());
            // Touched before: the arena is, too.
            let _ = todo.send((sample, file, vec![1u8; layout.total_bytes()]));
        }
        drop(todo);
        let started = Instant::now();
        let failed = std::thread::scope(|scope| {
            let work = || {
                jobs.iter().try_for_each(|(s, file, mut out)| self.decode_one(s, &file, &mut out))
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().find_map(|w| w.join().map_or(Some("panic".into()), |r| r.err()))
        });
        match failed {
            Some(e) => Err(e),
            None => Ok(started.elapsed().as_secs_f64()),
        }
    }

    fn decode_one(&self, sample: &Sample, file: &[u8], out: &mut [u8]) -> Result<(), String> {
        let expect = self.shelf.spec.expectation(sample.id, &sample.tokens);
        let found = ChunkFile::verify(file, &expect).map_err(text)?;
        if found.encoding.is_arena_form() {
            return Ok(());
        }
        restore(file, &found, out)
    }
}

/// Writes a chunk and enters it.
pub(super) fn add(store: &Store, id: ChunkId, tokens: &[u32], file: &[u8]) -> Result<(), String> {
    let announced = store.announce(&[id]).map_err(text)?;
    let file = page_aligned(file).map_err(text)?;
    let placement = store.write_file(&id, &file).map_err(text)?;
    drop(announced);
    let mut txn = store.write().map_err(text)?;
    let (tokens, flash, cold, vector) = (tokens.to_vec(), Some(placement), None, None);
    let content = ContentId::of_tokens(&tokens);
    let new = NewChunk { id, tokens, flash, cold, vector, compute_ms: 0 };
    txn.put_chunk(&new).map_err(text)?;
    let name = id.to_string();
    let chunks = vec![id];
    let record = DocumentRecord { id: name, content, bytes: 0, tokens: 0, chunks, ingested_at: 0 };
    txn.put_documents(&[&record]).map_err(text)?;
    txn.commit().map_err(text)?;
    Ok(())
}
