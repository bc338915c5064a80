//! One conformance suite for every read engine, on real files.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use crossbeam::channel::{Receiver, unbounded};
use matkv_sys::{
    DirectFile, EngineKind, EngineOptions, ReadDone, ReadEngine, ReadPart, ReadRequest, Region,
    open_engine,
};

const FILES: usize = 9;

fn content(file: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 4096 * 31 + i + file * 17) as u8).collect()
}

fn options(kind: EngineKind, depth: u32) -> EngineOptions {
    EngineOptions { kind, depth, ..EngineOptions::default() }
}

fn run(options: EngineOptions, dir: &Path) {
    let region = Region::anonymous(64 << 20);
    let (done, completions) = unbounded();
    let (engine, note) = open_engine(options, &region, done).unwrap();
    assert!(note.is_none(), "{note:?}");
    let lens: Vec<usize> = (0..FILES).map(|i| 4096 * (1 + i * 150)).collect();
    let mut at = 0;
    for (i, &len) in lens.iter().enumerate() {
        let path = dir.join(format!("{i}"));
        std::fs::File::create(&path).unwrap().write_all(&content(i, len)).unwrap();
        let target = region.exclusive(at..at + len).unwrap();
        at += len;
        let file = Arc::new(DirectFile::open(&path).unwrap().file);
        engine.submit(ReadRequest::whole(i as u64, file, len, target));
    }
    let mut seen = [false; FILES];
    for _ in 0..FILES {
        let done = completions.recv().unwrap();
        done.result.unwrap();
        let i = done.tag as usize;
        assert!(!std::mem::replace(&mut seen[i], true), "completed twice");
        assert!(done.target[..lens[i]] == content(i, lens[i])[..], "file {i}: wrong bytes");
    }
    short_file(engine.as_ref(), &completions, &region, dir);
    stripes(engine.as_ref(), &completions, &region, dir);
    outside(engine.as_ref(), &completions, &region, dir);
    drop(engine);
    assert_eq!(region.handles(), 0, "every slot came back");
}

fn short_file(
    engine: &dyn ReadEngine,
    completions: &Receiver<ReadDone>,
    region: &Arc<Region>,
    dir: &Path,
) {
    for len in [0usize, 4096, 2 << 20] {
        let path = dir.join("short");
        std::fs::write(&path, content(1, len)).unwrap();
        let target = region.exclusive(0..4 << 20).unwrap();
        let file = Arc::new(DirectFile::open(&path).unwrap().file);
        engine.submit(ReadRequest::whole(99, file, 4 << 20, target));
        let done = completions.recv().unwrap();
        let error = done.result.expect_err("a short file is not a success");
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{len} bytes");
    }
}

/// One target from units of three files, and a target outside the registered region.
fn stripes(
    engine: &dyn ReadEngine,
    completions: &Receiver<ReadDone>,
    region: &Arc<Region>,
    dir: &Path,
) {
    const UNIT: usize = 64 << 10;
    const UNITS: usize = 40;
    let whole = content(3, UNIT * UNITS - 4096);
    let units: Vec<&[u8]> = whole.chunks(UNIT).collect();
    let file = |i: usize| {
        let path = dir.join(format!("stripe-{i}"));
        let part: Vec<u8> = units.iter().skip(i).step_by(3).flat_map(|u| u.to_vec()).collect();
        std::fs::write(&path, part).unwrap();
        Arc::new(DirectFile::open(&path).unwrap().file)
    };
    let files = [file(0), file(1), file(2)];
    let part = |(i, unit): (usize, &&[u8])| ReadPart {
        file: Arc::clone(&files[i % 3]),
        file_offset: (i / 3 * UNIT) as u64,
        offset: i * UNIT,
        len: unit.len(),
    };
    for region in [Arc::clone(region), Region::anonymous(UNIT * UNITS)] {
        let target = region.exclusive(0..UNIT * UNITS).unwrap();
        let parts = units.iter().enumerate().map(part).collect();
        engine.submit(ReadRequest { tag: 7, parts, target });
        let done = completions.recv().unwrap();
        done.result.unwrap();
        assert!(done.target[..whole.len()] == whole[..], "units in the wrong places");
    }
}

/// A part that does not fit its target is refused, not written somewhere.
fn outside(
    engine: &dyn ReadEngine,
    completions: &Receiver<ReadDone>,
    region: &Arc<Region>,
    dir: &Path,
) {
    let path = dir.join("outside");
    std::fs::write(&path, content(1, 8192)).unwrap();
    let file = Arc::new(DirectFile::open(&path).unwrap().file);
    let target = region.exclusive(0..4096).unwrap();
    let part = ReadPart { file, file_offset: 0, offset: 0, len: 8192 };
    engine.submit(ReadRequest { tag: 8, parts: vec![part], target });
    let error = completions.recv().unwrap().result.expect_err("it does not fit");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn io_uring() {
    let dir = tempfile::tempdir().unwrap();
    let region = Region::anonymous(4096);
    let (done, _keep) = unbounded();
    if let Err(e) = open_engine(options(EngineKind::Uring, 4), &region, done) {
        println!("skipped: io_uring is not available here: {e}");
        return;
    }
    for depth in [1, 4, 32] {
        for block in [4096, 128 << 10, 1 << 20] {
            run(EngineOptions { block, ..options(EngineKind::Uring, depth) }, dir.path());
        }
    }
    run(EngineOptions { sqpoll: true, ..options(EngineKind::Uring, 8) }, dir.path());
}

#[test]
fn pread() {
    let dir = tempfile::tempdir().unwrap();
    run(options(EngineKind::Pread, 4), dir.path());
}

/// Dropping an engine with reads in flight waits for them: no completion writes into freed slots.
#[test]
fn drop_with_reads_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    for kind in [EngineKind::Auto, EngineKind::Pread] {
        let region = Region::anonymous(64 << 20);
        let (done, completions) = unbounded();
        let (engine, _) = open_engine(options(kind, 8), &region, done).unwrap();
        let path = dir.path().join("big");
        std::fs::write(&path, content(0, 8 << 20)).unwrap();
        for i in 0..8usize {
            let target = region.exclusive(i * (8 << 20)..(i + 1) * (8 << 20)).unwrap();
            let file = Arc::new(DirectFile::open(&path).unwrap().file);
            engine.submit(ReadRequest::whole(i as u64, file, 8 << 20, target));
        }
        drop(engine);
        let finished = completions.iter().filter(|d| d.result.is_ok()).count();
        assert_eq!(finished, 8);
        assert_eq!(region.handles(), 0);
    }
}
