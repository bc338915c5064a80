//! How fast a directory's device reads, for every way of asking it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::bounded;
use matkv_sys::{
    DirectFile, EngineKind, EngineOptions, ReadRequest, Region, evict_page_cache, free_bytes,
    open_engine,
};

use super::text;

/// One way of reading, and what it reached.
#[derive(Clone, Debug)]
pub struct Point {
    /// io_uring or pread.
    pub engine: &'static str,
    /// Reads in flight.
    pub depth: u32,
    /// Bytes of each.
    pub block: usize,
    /// Bytes a second.
    pub rate: f64,
}

/// What a directory allows.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Whether files can be read past the page cache.
    pub direct: bool,
    /// How io_uring works here, or why it does not.
    pub uring: Result<String, String>,
    /// Bytes an unprivileged process may still write.
    pub free: u64,
}

/// Bytes of the file that is read.
const FILE_BYTES: usize = 256 << 20;

/// Bytes of a chunk, as the file is written and read.
const SLOT: usize = 16 << 20;

/// A file of its own, removed at the end.
pub struct Probe {
    file: tempfile::NamedTempFile,
    bytes: usize,
    region: Arc<Region>,
}

impl Probe {
    /// Writes the file to read.
    ///
    /// # Errors
    /// If the directory cannot be written, or has too little room.
    pub fn new(dir: &Path) -> Result<Self, String> {
        std::fs::create_dir_all(dir)
            .map_err(|e| format!("cannot create {}: {e}", dir.display()))?;
        let free = free_bytes(dir).map_err(text)?;
        let bytes = FILE_BYTES.min((free / 4) as usize) / SLOT * SLOT;
        if bytes == 0 {
            return Err(format!("{} has only {free} bytes free", dir.display()));
        }
        let file = tempfile::Builder::new().prefix("probe-").tempfile_in(dir);
        let file = file.map_err(|e| format!("cannot write in {}: {e}", dir.display()))?;
        let region = Region::anonymous(64 << 20);
        // Not zeros: devices and file systems may treat those otherwise.
        let mut page = region.exclusive(0..SLOT).map_err(text)?;
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for word in page.chunks_exact_mut(8) {
            state = state.wrapping_mul(0xd129_42f0_35a2_2d1b).wrapping_add(1);
            word.copy_from_slice(&state.to_le_bytes());
        }
        use std::os::unix::fs::FileExt;
        for at in (0..bytes).step_by(SLOT) {
            file.as_file().write_all_at(&page, at as u64).map_err(text)?;
        }
        drop(page);
        file.as_file().sync_all().map_err(text)?;
        evict_page_cache(file.path()).map_err(text)?;
        Ok(Self { file, bytes, region })
    }

    /// The file that is read.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// What the directory allows.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn directory(&self) -> Result<Directory, String> {
        let opened = DirectFile::open(self.path()).map_err(text)?;
        let (done, _keep) = bounded(1);
        let options = EngineOptions { kind: EngineKind::Uring, ..EngineOptions::default() };
        let uring = open_engine(options, &self.region, done);
        Ok(Directory {
            direct: opened.direct,
            uring: uring.map(|(engine, _)| engine.describe().to_owned()).map_err(text),
            free: free_bytes(self.path()).map_err(text)?,
        })
    }

    /// Bytes a second of reading the file once.
    ///
    /// # Errors
    /// If the engine cannot be used or a read fails.
    pub fn rate(&self, options: EngineOptions) -> Result<f64, String> {
        let (done, completions) = bounded(matkv_sys::REQUESTS_MAX);
        let (engine, _) = open_engine(options, &self.region, done).map_err(text)?;
        let file = Arc::new(DirectFile::open(self.path()).map_err(text)?.file);
        evict_page_cache(self.path()).map_err(text)?;
        let started = Instant::now();
        let (mut next, mut under_way) = (0, 0);
        let mut free: Vec<usize> = (0..self.region.len() / SLOT).collect();
        while next < self.bytes || under_way > 0 {
            while next < self.bytes
                && let Some(slot) = free.pop()
            {
                let target = self.region.exclusive(slot * SLOT..(slot + 1) * SLOT).map_err(text)?;
                let mut request = ReadRequest::whole(slot as u64, Arc::clone(&file), SLOT, target);
                request.parts[0].file_offset = next as u64;
                engine.submit(request);
                (next, under_way) = (next + SLOT, under_way + 1);
            }
            let finished = completions.recv().map_err(text)?;
            finished.result.map_err(text)?;
            free.push(finished.tag as usize);
            under_way -= 1;
        }
        Ok(self.bytes as f64 / started.elapsed().as_secs_f64())
    }

    /// Every engine, depth and block size; `progress` is called before each. The rate of each is
    /// the median of `rounds`, taken in turn, so that a slow moment hits all alike.
    ///
    /// # Errors
    /// If none works.
    pub fn tune(
        &self,
        rounds: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<Point>, String> {
        let engines = [(EngineKind::Uring, "uring"), (EngineKind::Pread, "pread")];
        let mut points = Vec::new();
        for (kind, name) in engines {
            for depth in [4, 8, 16, 32, 64] {
                // pread has at most eight threads.
                if kind == EngineKind::Pread && depth > 8 {
                    continue;
                }
                for block in [128 << 10, 512 << 10, 1 << 20, 2 << 20] {
                    points.push((kind, name, depth, block, Vec::new()));
                }
            }
        }
        let total = points.len() * rounds;
        let mut step = 0;
        for _ in 0..rounds {
            for (kind, _, depth, block, rates) in &mut points {
                progress(step, total);
                step += 1;
                let options =
                    EngineOptions { kind: *kind, depth: *depth, block: *block, sqpoll: false };
                rates.extend(self.rate(options).ok());
            }
        }
        let mut out: Vec<Point> = points
            .into_iter()
            .filter(|p| !p.4.is_empty())
            .map(|(_, engine, depth, block, mut rates)| {
                rates.sort_by(f64::total_cmp);
                Point { engine, depth, block, rate: rates[rates.len() / 2] }
            })
            .collect();
        out.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        if out.is_empty() {
            return Err("no engine could read the file".into());
        }
        Ok(out)
    }
}
