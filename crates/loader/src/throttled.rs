//! An engine in which every directory is a device of a given speed: shows what several of them add
//! up to on a machine that has one, and what waiting for a slow one costs.
//!
//! For measurements. A read takes a thread of its own, so requests are bounded by who submits them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use matkv_sys::{ReadDone, ReadEngine, ReadPart, ReadRequest};

/// Reads at a given rate from every device.
pub(crate) struct Throttled {
    rate: u64,
    done: Sender<ReadDone>,
    /// When each device is free, by its number.
    free: Mutex<HashMap<usize, Instant>>,
}

impl Throttled {
    pub fn new(rate: u64, done: Sender<ReadDone>) -> Self {
        Self { rate, done, free: Mutex::default() }
    }
}

impl ReadEngine for Throttled {
    fn submit(&self, mut request: ReadRequest) {
        use std::os::unix::fs::FileExt;
        let done = self.done.clone();
        // Files of one device take turns; the n-th part file of a stripe is on the n-th device.
        let mut devices: Vec<*const std::fs::File> = Vec::new();
        let mut device = |part: &ReadPart| {
            let file = Arc::as_ptr(&part.file);
            devices.iter().position(|d| *d == file).unwrap_or_else(|| {
                devices.push(file);
                devices.len() - 1
            })
        };
        let mut until = Instant::now();
        for part in &request.parts {
            let spent = Duration::from_secs_f64(part.len as f64 / self.rate as f64);
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let at = free.entry(device(part)).or_insert_with(Instant::now);
            *at = (*at).max(Instant::now()) + spent;
            until = until.max(*at);
        }
        std::thread::spawn(move || {
            let parts = std::mem::take(&mut request.parts);
            let read = parts.iter().try_for_each(|p| {
                let target = &mut request.target[p.offset..p.offset + p.len];
                p.file.read_exact_at(target, p.file_offset)
            });
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            let _ = done.send(ReadDone { tag: request.tag, target: request.target, result: read });
        });
    }

    fn describe(&self) -> &str {
        "throttled"
    }
}
