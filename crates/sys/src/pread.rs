//! The fallback engine: threads that call pread.

use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};

use crate::reader::{PIECE_BYTES, ReadDone, ReadEngine, ReadRequest};

/// A few threads, one request each at a time.
pub struct PreadPool {
    requests: Option<Sender<ReadRequest>>,
    threads: Vec<JoinHandle<()>>,
}

impl PreadPool {
    /// Starts the threads.
    pub fn new(threads: u32, done: Sender<ReadDone>) -> Self {
        // As many waiting as working: the loader blocks beyond that.
        let (requests, queue) = bounded(threads as usize);
        let spawn = |_| {
            let (queue, done) = (queue.clone(), done.clone());
            std::thread::spawn(move || work(&queue, &done))
        };
        Self { requests: Some(requests), threads: (0..threads.max(1)).map(spawn).collect() }
    }
}

fn work(queue: &Receiver<ReadRequest>, done: &Sender<ReadDone>) {
    for mut request in queue {
        let result = fill(&mut request);
        let completion = ReadDone { tag: request.tag, target: request.target, result };
        if done.send(completion).is_err() {
            return;
        }
    }
}

fn fill(request: &mut ReadRequest) -> std::io::Result<()> {
    let len = request.len.min(request.target.len());
    for (i, piece) in request.target[..len].chunks_mut(PIECE_BYTES).enumerate() {
        request.file.read_exact_at(piece, (i * PIECE_BYTES) as u64)?;
    }
    Ok(())
}

impl ReadEngine for PreadPool {
    fn submit(&self, request: ReadRequest) {
        if let Some(requests) = &self.requests {
            // Fails only if every thread panicked; the request's slot is then released.
            let _ = requests.send(request);
        }
    }

    fn describe(&self) -> &str {
        "pread"
    }
}

impl Drop for PreadPool {
    fn drop(&mut self) {
        self.requests = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
