//! The io_uring engine: one thread, one ring, one blocking wait.
//!
//! Requests are cut into pieces of one block that fill the queue across requests and their files,
//! so that a deep queue stays deep between files, and all free places are filled with one system
//! call. A device serves all it has been given side by side: so a burst begins with a few pieces,
//! which then come soon, and each that has come makes room for one more. New requests wake the
//! thread through an eventfd that is itself read through the ring. The arena is registered where
//! the memory-lock limit allows; so are files, while they are read.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded};
use io_uring::{IoUring, opcode, squeue, types};

use crate::error::{Result, SysError};
use crate::reader::{EngineOptions, REQUESTS_MAX, ReadDone, ReadEngine, ReadRequest};
use crate::region::Region;

/// The kernel refuses larger registered buffers.
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// Files registered at a time; others are read through their descriptors.
const FILES_MAX: usize = 128;
/// Pieces a burst begins with: with blocks of 1 MiB almost enough to keep a device busy.
const WINDOW_MIN: usize = 4;
/// How long the kernel's submission thread stays awake without work.
const SQPOLL_IDLE_MS: u32 = 50;
const WAKE: u64 = u64::MAX;

/// Reads through io_uring.
pub struct UringReader {
    requests: Option<Sender<ReadRequest>>,
    wake: File,
    thread: Option<JoinHandle<()>>,
    description: String,
}

struct Operation {
    request: ReadRequest,
    /// Place of each part's file among the registered ones; counted once for each part.
    files: Vec<Option<u32>>,
    /// Next part, and byte of it, that no piece covers yet.
    part: usize,
    next: usize,
    in_flight: usize,
    error: Option<std::io::Error>,
}

#[derive(Clone, Copy)]
struct Piece {
    operation: usize,
    part: usize,
    /// From the beginning of the part.
    offset: usize,
    len: usize,
}

struct Driver {
    ring: IoUring,
    registered: bool,
    block: usize,
    /// Places for registered files that are free; none at all where the kernel has no table.
    free_files: Vec<u32>,
    /// Registered files by their address, which is theirs as long as a part holds them: their
    /// place, and the parts that use it.
    placed: HashMap<usize, (u32, usize)>,
    base: usize,
    region_bytes: usize,
    operations: Vec<Option<Operation>>,
    /// Operations with bytes no piece covers yet, in order of their turns.
    open: VecDeque<usize>,
    /// Short reads to be continued.
    again: Vec<Piece>,
    pieces: Vec<Option<Piece>>,
    /// How many of them are in flight, and how many may be.
    in_flight: usize,
    window: usize,
    done: Sender<ReadDone>,
    /// Where the eventfd's count is read to; boxed so that its address is stable.
    wake_count: Box<u64>,
}

impl UringReader {
    /// Starts the engine.
    ///
    /// # Errors
    /// If the kernel does not allow io_uring here.
    pub fn new(
        options: EngineOptions,
        region: &Arc<Region>,
        done: Sender<ReadDone>,
    ) -> Result<Self> {
        let call = |what| move |source| SysError::Call { what, source };
        let depth = options.depth.max(1);
        let mut builder = IoUring::builder();
        builder.setup_clamp();
        if options.sqpoll {
            builder.setup_sqpoll(SQPOLL_IDLE_MS);
        }
        let ring = builder.build(depth + 1).map_err(call("io_uring_setup"))?;
        let registered = register(&ring, region);
        let free_files = match ring.submitter().register_files_sparse(FILES_MAX as u32) {
            Ok(()) => (0..FILES_MAX as u32).rev().collect(),
            Err(_) => Vec::new(),
        };
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(SysError::last("eventfd"));
        }
        // SAFETY: a fresh descriptor nobody else owns.
        let wake = unsafe { File::from_raw_fd(fd) };
        let (requests, queue) = bounded(REQUESTS_MAX);
        let depth = depth as usize;
        let files = if free_files.is_empty() { "" } else { ", registered files" };
        let mut driver = Driver {
            ring,
            registered: registered.is_ok(),
            block: options.block.next_multiple_of(4096).max(4096),
            free_files,
            placed: HashMap::new(),
            base: region.base() as usize,
            region_bytes: region.len(),
            operations: Vec::new(),
            open: VecDeque::new(),
            again: Vec::new(),
            pieces: vec![None; depth],
            in_flight: 0,
            window: 0,
            done,
            wake_count: Box::new(0),
        };
        let wake_fd = wake.as_raw_fd();
        let keep = Arc::clone(region);
        let thread = std::thread::Builder::new()
            .name("io".into())
            .spawn(move || {
                driver.run(&queue, wake_fd);
                drop(keep);
            })
            .map_err(call("spawn io thread"))?;
        let how = match registered {
            Ok(()) => "registered buffers".to_owned(),
            Err(e) => format!("unregistered buffers: {e}"),
        };
        let poll = if options.sqpoll { ", SQPOLL" } else { "" };
        let description = format!(
            "io_uring, depth {depth}, blocks of {} KiB, {how}{files}{poll}",
            options.block >> 10
        );
        Ok(Self { requests: Some(requests), wake, thread: Some(thread), description })
    }
}

fn register(ring: &IoUring, region: &Arc<Region>) -> std::io::Result<()> {
    let buffers: Vec<libc::iovec> = (0..region.len())
        .step_by(REGISTERED_BYTES_MAX)
        .map(|at| libc::iovec {
            iov_base: region.base().wrapping_add(at).cast(),
            iov_len: REGISTERED_BYTES_MAX.min(region.len() - at),
        })
        .collect();
    // SAFETY: the buffers lie in the region, which the thread keeps alive longer than the ring.
    unsafe { ring.submitter().register_buffers(&buffers) }
}

impl Driver {
    fn run(&mut self, queue: &Receiver<ReadRequest>, wake: i32) {
        let mut stopping = false;
        self.arm_wake(wake);
        loop {
            if !stopping {
                stopping = self.take_requests(queue);
            }
            self.fill_queue();
            let idle = self.operations.iter().all(Option::is_none);
            if stopping && idle {
                // A read of the eventfd is still armed on this word: it outlives the ring.
                Box::leak(std::mem::take(&mut self.wake_count));
                return;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if is_passing(&e) => {
                    // Out of kernel memory or completion slots for a moment: completions free them.
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                Err(e) => {
                    // Nothing will complete any more, and the kernel may still write into slots
                    // that are lent to it: only the end of the process takes them back.
                    eprintln!("io_uring broke ({e}); ending the process");
                    std::process::abort();
                }
            }
            let completions: Vec<(u64, i32)> =
                self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (user_data, result) in completions {
                if user_data == WAKE {
                    self.arm_wake(wake);
                } else {
                    self.complete(user_data as usize, result);
                }
            }
        }
    }

    /// Returns true once the handle has been dropped.
    fn take_requests(&mut self, queue: &Receiver<ReadRequest>) -> bool {
        loop {
            match queue.try_recv() {
                Ok(request) => {
                    let operation = self.operation(request);
                    let at = self.operations.iter().position(Option::is_none);
                    let at = at.unwrap_or_else(|| {
                        self.operations.push(None);
                        self.operations.len() - 1
                    });
                    let turn = operation.request.turn;
                    self.operations[at] = Some(operation);
                    let later = |o: &usize| {
                        self.operations[*o].as_ref().is_some_and(|o| o.request.turn > turn)
                    };
                    let place = self.open.iter().position(later).unwrap_or(self.open.len());
                    self.open.insert(place, at);
                }
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
    }

    fn operation(&mut self, request: ReadRequest) -> Operation {
        let error = (!request.fits()).then(|| std::io::ErrorKind::InvalidInput.into());
        let files = request.parts.iter().map(|p| self.register_file(&p.file)).collect();
        Operation { request, files, part: 0, next: 0, in_flight: 0, error }
    }

    /// A stripe names each of its files many times, and so do the requests for one file.
    fn register_file(&mut self, file: &Arc<File>) -> Option<u32> {
        let key = Arc::as_ptr(file) as usize;
        if let Some((place, parts)) = self.placed.get_mut(&key) {
            *parts += 1;
            return Some(*place);
        }
        let place = self.free_files.pop()?;
        match self.ring.submitter().register_files_update(place, &[file.as_raw_fd()]) {
            Ok(_) => {
                self.placed.insert(key, (place, 1));
                Some(place)
            }
            Err(_) => {
                self.free_files.push(place);
                None
            }
        }
    }

    /// Gives up the places of an operation's files.
    fn unregister(&mut self, operation: &Operation) {
        for (part, place) in operation.request.parts.iter().zip(&operation.files) {
            let key = Arc::as_ptr(&part.file) as usize;
            let Some(place) = *place else { continue };
            let Some((_, parts)) = self.placed.get_mut(&key) else { continue };
            *parts -= 1;
            if *parts == 0 {
                self.placed.remove(&key);
                // Fails only if the place is not in the table; then it holds nothing.
                let _ = self.ring.submitter().register_files_update(place, &[-1]);
                self.free_files.push(place);
            }
        }
    }

    fn arm_wake(&mut self, fd: i32) {
        let p: *mut u64 = &raw mut *self.wake_count;
        let entry = opcode::Read::new(types::Fd(fd), p.cast(), 8).build().user_data(WAKE);
        self.push(&entry);
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: reads go to `wake_count` (boxed, owned by the driver) or into slots owned by an
        // operation that stays in `operations` until all its pieces have completed.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // The queue has room for `depth` pieces and the wake-up, so this is not reached; if
            // it were, submitting makes room.
            if self.ring.submit().is_err() {
                return;
            }
        }
    }

    fn fill_queue(&mut self) {
        if self.in_flight == 0 {
            self.window = WINDOW_MIN.min(self.pieces.len());
        }
        while self.in_flight < self.window {
            let Some(free) = self.pieces.iter().position(Option::is_none) else { return };
            let Some(piece) = self.next_piece() else { return };
            self.pieces[free] = Some(piece);
            self.in_flight += 1;
            self.start(free, piece);
        }
    }

    fn next_piece(&mut self) -> Option<Piece> {
        if let Some(piece) = self.again.pop() {
            return Some(piece);
        }
        loop {
            let operation = *self.open.front()?;
            let Some(o) = self.operations[operation].as_mut() else {
                self.open.pop_front();
                continue;
            };
            while o.request.parts.get(o.part).is_some_and(|p| o.next == p.len) {
                (o.part, o.next) = (o.part + 1, 0);
            }
            let part = o.request.parts.get(o.part).filter(|_| o.error.is_none());
            let Some(part) = part else {
                self.open.pop_front();
                if o.in_flight == 0 {
                    self.finish(operation);
                }
                continue;
            };
            let len = self.block.min(part.len - o.next);
            let piece = Piece { operation, part: o.part, offset: o.next, len };
            o.next += len;
            o.in_flight += 1;
            return Some(piece);
        }
    }

    fn start(&mut self, slot: usize, piece: Piece) {
        let Some(o) = self.operations[piece.operation].as_mut() else { return };
        let part = &o.request.parts[piece.part];
        let start = part.offset + piece.offset;
        let file = o.files[piece.part];
        let (fd, at) = (part.file.as_raw_fd(), part.file_offset + piece.offset as u64);
        let p = o.request.target[start..start + piece.len].as_mut_ptr();
        let buffer = self.registered_buffer(p, piece.len);
        let len = piece.len as u32;
        macro_rules! read {
            ($file:expr) => {
                match buffer {
                    Some(index) => opcode::ReadFixed::new($file, p, len, index).offset(at).build(),
                    None => opcode::Read::new($file, p, len).offset(at).build(),
                }
            };
        }
        let entry = match file {
            Some(place) => read!(types::Fixed(place)),
            None => read!(types::Fd(fd)),
        };
        self.push(&entry.user_data(slot as u64));
    }

    /// The registered buffer that holds a target; none for those outside the region, such as a
    /// compressed file's.
    fn registered_buffer(&self, p: *mut u8, len: usize) -> Option<u16> {
        let from_base = (p as usize).wrapping_sub(self.base);
        let first = from_base / REGISTERED_BYTES_MAX;
        let last = from_base.wrapping_add(len - 1) / REGISTERED_BYTES_MAX;
        (self.registered && from_base < self.region_bytes && first == last).then_some(first as u16)
    }

    fn complete(&mut self, slot: usize, result: i32) {
        let Some(piece) = self.pieces.get_mut(slot).and_then(Option::take) else { return };
        self.in_flight -= 1;
        self.window = (self.window + 1).min(self.pieces.len());
        let Some(o) = self.operations[piece.operation].as_mut() else { return };
        let read = usize::try_from(result).unwrap_or(0);
        let failure = match result {
            n if n == -libc::EINTR || n == -libc::EAGAIN => None,
            n if n < 0 => Some(std::io::Error::from_raw_os_error(-n)),
            0 => Some(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                format!("the file ends at or before byte {}", piece.offset),
            )),
            _ => None,
        };
        if failure.is_none() && read < piece.len {
            // A short read is continued where it stopped.
            let rest = Piece { offset: piece.offset + read, len: piece.len - read, ..piece };
            self.again.push(rest);
            return;
        }
        o.in_flight -= 1;
        o.error = o.error.take().or(failure);
        let all = o.request.parts.iter().skip(o.part).enumerate();
        let rest: usize = all.map(|(i, p)| if i == 0 { p.len - o.next } else { p.len }).sum();
        let covered = rest == 0 || o.error.is_some();
        if covered && o.in_flight == 0 {
            self.finish(piece.operation);
        }
    }

    fn finish(&mut self, operation: usize) {
        if let Some(o) = self.operations[operation].take() {
            self.unregister(&o);
            let result = o.error.map_or(Ok(()), Err);
            // A loader that is gone needs no completion; the slot is released here.
            let _ =
                self.done.send(ReadDone { tag: o.request.tag, target: o.request.target, result });
        }
    }
}

fn is_passing(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

impl ReadEngine for UringReader {
    fn submit(&self, request: ReadRequest) {
        if let Some(requests) = &self.requests
            && requests.send(request).is_ok()
        {
            // Cannot fail: an eventfd write blocks only at 2⁶⁴ − 2 pending wake-ups.
            let _ = (&self.wake).write_all(&1u64.to_ne_bytes());
        }
    }

    fn describe(&self) -> &str {
        &self.description
    }
}

impl Drop for UringReader {
    fn drop(&mut self) {
        self.requests = None;
        let _ = (&self.wake).write_all(&1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
