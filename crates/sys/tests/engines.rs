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
    conforms(engine, &completions, &region, dir);
    assert_eq!(region.handles(), 0, "every slot came back");
}

/// What holds for every engine.
fn conforms(
    engine: Arc<dyn ReadEngine>,
    completions: &Receiver<ReadDone>,
    region: &Arc<Region>,
    dir: &Path,
) {
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
    short_file(engine.as_ref(), completions, region, dir);
    stripes(engine.as_ref(), completions, region, dir);
    outside(engine.as_ref(), completions, region, dir);
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
        engine.submit(ReadRequest { tag: 7, parts, target, turn: 0 });
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
    engine.submit(ReadRequest { tag: 8, parts: vec![part], target, turn: 0 });
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

/// What a device may do to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// The end of the target keeps what it held.
    Torn,
    /// Fewer bytes than asked for.
    Short,
    /// A bit is another.
    Corrupt,
    /// EIO.
    Failed,
    /// The device is full: of reads only a file system that writes, such as one with metadata in
    /// a log, says so.
    Full,
    /// It is done when it is told to.
    Late,
    /// It is never done while the engine lives.
    Hung,
}

/// An engine without threads that does what it is told to, one request at a time.
struct Faulty {
    next: std::sync::Mutex<Wrong>,
    held: std::sync::Mutex<Vec<ReadRequest>>,
    done: crossbeam::channel::Sender<ReadDone>,
}

impl Faulty {
    fn new(done: crossbeam::channel::Sender<ReadDone>) -> Self {
        Self { next: std::sync::Mutex::new(Wrong::Nothing), held: Default::default(), done }
    }

    fn read(mut request: ReadRequest, wrong: Wrong) -> ReadDone {
        use std::os::unix::fs::FileExt;
        let fits = request.parts.iter().all(|p| p.offset + p.len <= request.target.len());
        let mut result = if fits { Ok(()) } else { Err(std::io::ErrorKind::InvalidInput.into()) };
        let parts = std::mem::take(&mut request.parts);
        for part in parts.iter().filter(|_| fits) {
            let len = if wrong == Wrong::Torn { part.len / 2 } else { part.len };
            let target = &mut request.target[part.offset..part.offset + len];
            let read = part.file.read_exact_at(target, part.file_offset);
            result = result.and(read);
        }
        match wrong {
            Wrong::Short => result = Err(std::io::ErrorKind::UnexpectedEof.into()),
            Wrong::Corrupt => request.target[100] ^= 4,
            Wrong::Failed => result = Err(std::io::Error::from_raw_os_error(5)),
            Wrong::Full => result = Err(std::io::Error::from_raw_os_error(28)),
            Wrong::Nothing | Wrong::Torn | Wrong::Late | Wrong::Hung => {}
        }
        ReadDone { tag: request.tag, target: request.target, result }
    }

    /// Lets what is late go on.
    fn release(&self) {
        for request in self.held.lock().unwrap().drain(..) {
            self.done.send(Self::read(request, Wrong::Nothing)).unwrap();
        }
    }
}

impl ReadEngine for Faulty {
    fn submit(&self, request: ReadRequest) {
        match std::mem::replace(&mut *self.next.lock().unwrap(), Wrong::Nothing) {
            Wrong::Late | Wrong::Hung => self.held.lock().unwrap().push(request),
            wrong => self.done.send(Self::read(request, wrong)).unwrap(),
        }
    }

    fn describe(&self) -> &str {
        "memory"
    }
}

/// The engine of the tests keeps the contract of the real ones, and breaks it as it is told to:
/// what its users must live with.
#[test]
fn memory_with_faults() {
    let dir = tempfile::tempdir().unwrap();
    let region = Region::anonymous(64 << 20);
    let (done, completions) = unbounded();
    let engine = Arc::new(Faulty::new(done));
    conforms(engine.clone(), &completions, &region, dir.path());
    let whole = content(5, 64 << 10);
    let path = dir.path().join("memory");
    std::fs::write(&path, &whole).unwrap();
    let ask = |wrong: Wrong, tag: u64| {
        *engine.next.lock().unwrap() = wrong;
        let mut target = region.exclusive(0..64 << 10).unwrap();
        target.fill(0xee);
        let file = Arc::new(std::fs::File::open(&path).unwrap());
        engine.submit(ReadRequest::whole(tag, file, 64 << 10, target));
    };
    for (wrong, kind) in [
        (Wrong::Short, std::io::ErrorKind::UnexpectedEof),
        (Wrong::Full, std::io::ErrorKind::StorageFull),
    ] {
        ask(wrong, 1);
        assert_eq!(completions.recv().unwrap().result.unwrap_err().kind(), kind);
    }
    ask(Wrong::Failed, 2);
    assert_eq!(completions.recv().unwrap().result.unwrap_err().raw_os_error(), Some(5));
    // What reports success and is wrong is for checksums to find.
    for wrong in [Wrong::Torn, Wrong::Corrupt] {
        ask(wrong, 3);
        let done = completions.recv().unwrap();
        assert!(done.result.is_ok() && done.target[..] != whole[..], "{wrong:?}");
    }
    // Memory of a read that is late is not anyone else's, however long it takes.
    ask(Wrong::Late, 4);
    assert!(completions.is_empty() && region.exclusive(0..4096).is_err());
    engine.release();
    let done = completions.recv().unwrap();
    assert!(done.result.is_ok() && done.tag == 4 && done.target[..] == whole[..]);
    drop(done);
    ask(Wrong::Hung, 5);
    assert!(completions.is_empty() && region.handles() == 1);
    drop(engine);
    assert_eq!(region.handles(), 0, "its memory comes back with the engine");
}
