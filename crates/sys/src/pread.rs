//! The fallback engine: threads that call pread.

use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};

use crate::reader::{REQUESTS_MAX, ReadDone, ReadEngine, ReadRequest};

/// A few threads, one request each at a time.
pub struct PreadPool {
    requests: Option<Sender<ReadRequest>>,
    threads: Vec<JoinHandle<()>>,
}

impl PreadPool {
    /// Starts the threads.
    pub fn new(threads: u32, block: usize, done: Sender<ReadDone>) -> Self {
        let (requests, queue) = bounded(REQUESTS_MAX);
        let block = block.next_multiple_of(4096);
        let spawn = |_| {
            let (queue, done) = (queue.clone(), done.clone());
            std::thread::spawn(move || work(&queue, block, &done))
        };
        Self { requests: Some(requests), threads: (0..threads.max(1)).map(spawn).collect() }
    }
}

fn work(queue: &Receiver<ReadRequest>, block: usize, done: &Sender<ReadDone>) {
    for mut request in queue {
        let result = fill(&mut request, block);
        let completion = ReadDone { tag: request.tag, target: request.target, result };
        if done.send(completion).is_err() {
            return;
        }
    }
}

fn fill(request: &mut ReadRequest, block: usize) -> std::io::Result<()> {
    if !request.fits() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    for part in &request.parts {
        let target = &mut request.target[part.offset..part.offset + part.len];
        for (i, piece) in target.chunks_mut(block).enumerate() {
            part.file.read_exact_at(piece, part.file_offset + (i * block) as u64)?;
        }
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
