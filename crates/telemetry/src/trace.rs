//! Spans of both processes, for `matkv trace`: what ran when, for which request.
//!
//! Off, a span costs one relaxed load. On, the last [`SPANS_MAX`] are kept.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use matkv_sys::monotonic_ns;
use matkv_types::Span;

/// Spans kept until they are taken.
const SPANS_MAX: usize = 100_000;

static ON: AtomicBool = AtomicBool::new(false);
static SPANS: Mutex<VecDeque<Span>> = Mutex::new(VecDeque::new());

/// Starts or stops recording.
pub fn set(on: bool) {
    ON.store(on, Ordering::Relaxed);
}

/// A span that begins now and is recorded when it is dropped.
#[must_use]
pub struct Timer {
    name: &'static str,
    track: &'static str,
    request: u64,
    start_ns: u64,
}

/// Begins a span.
pub fn span(track: &'static str, name: &'static str, request: u64) -> Timer {
    let start_ns = if ON.load(Ordering::Relaxed) { monotonic_ns() } else { 0 };
    Timer { name, track, request, start_ns }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // Zero: recording was off when it began.
        if self.start_ns == 0 {
            return;
        }
        let (name, track) = (self.name.to_owned(), self.track.to_owned());
        let (request, start_ns, end_ns) = (self.request, self.start_ns, monotonic_ns());
        let mut spans = SPANS.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() == SPANS_MAX {
            spans.pop_front();
        }
        spans.push_back(Span { name, track, request, start_ns, end_ns });
    }
}

/// Takes what has been recorded.
pub fn take() -> Vec<Span> {
    std::mem::take(&mut *SPANS.lock().unwrap_or_else(PoisonError::into_inner)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_begins_while_recording_is_kept() {
        let before = span("t", "before", 1);
        set(true);
        drop(before);
        drop(span("t", "while", 2));
        set(false);
        drop(span("t", "after", 3));
        let spans = take();
        assert_eq!(spans.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["while"]);
        assert!(spans[0].end_ns >= spans[0].start_ns && spans[0].request == 2);
        assert!(take().is_empty());
    }
}
