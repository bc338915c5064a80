//! The decode loop: sequences join and leave at token boundaries.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use matkv_model::Step;
use matkv_ring::{
    AllegedDescriptor, Completion, Consumer, DescriptorError, Header, Producer, Submission,
};
use matkv_sys::{CrashPoint, Region, crash_point};
use matkv_telemetry::{names, trace};
use matkv_types::FinishReason;

use crate::engine::Engine;
use crate::error::DecoderError;
use crate::sequence::{Sequence, StepParts};

/// How much is decoded together.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sequences.
    pub sequences: usize,
    /// Rows they attend to, all together; a sequence that has more is decoded alone.
    pub rows: usize,
}

/// What a turn has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// One token for every running sequence.
    Stepped,
    /// There is nothing to decode.
    Idle,
    /// Somebody wants it to stop.
    Stopped,
}

/// One session's sequences and rings.
pub struct Batch<'a, E> {
    engine: &'a E,
    region: Arc<Region>,
    arena: Range<usize>,
    epoch: u64,
    submissions: Consumer,
    completions: Producer,
    running: Vec<Sequence>,
    /// Those the limits keep out for now, in order of arrival, so that a long one is not overtaken
    /// for ever. Nobody waits in the ring: a cancelled sequence gives its slots back at the next
    /// boundary, whether it has been decoded or not.
    waiting: VecDeque<Sequence>,
    limits: Limits,
}

impl<'a, E: Engine> Batch<'a, E> {
    /// The decoder's end of a session's rings.
    ///
    /// # Errors
    /// If the rings do not fit the region.
    pub fn new(
        engine: &'a E,
        region: &Arc<Region>,
        header: &Header,
        epoch: u64,
        limits: Limits,
    ) -> Result<Self, DecoderError> {
        let (submissions, completions) = header.decoder_ends()?;
        Ok(Self {
            engine,
            region: Arc::clone(region),
            arena: header.geometry().arena(),
            epoch,
            submissions,
            completions,
            running: Vec::new(),
            waiting: VecDeque::new(),
            limits,
        })
    }

    /// One token boundary: who has been cancelled leaves, who fits joins, every running sequence
    /// gets a token.
    ///
    /// # Errors
    /// What ends the session: the loader broke the contract.
    pub fn turn(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<Turn, DecoderError> {
        self.take_over_all()?;
        self.drop_cancelled()?;
        self.admit();
        debug_assert_eq!(self.check(), Ok(()));
        if self.running.is_empty() {
            return Ok(Turn::Idle);
        }
        self.step(go_on)
    }

    /// What must hold at every token boundary.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        let Limits { sequences, rows } = self.limits;
        if self.running.len() > sequences {
            return Err(format!("{} sequences are decoded together", self.running.len()));
        }
        // Every step adds a row to each; the limit is kept when one joins.
        let joined: usize = self.running.iter().map(|s| s.rows() - s.steps()).sum();
        if self.running.len() > 1 && joined > rows {
            return Err(format!("{joined} rows were admitted together, at most {rows} may be"));
        }
        Ok(())
    }

    /// The submissions' consumer, to sleep on.
    pub fn submissions(&self) -> &Consumer {
        &self.submissions
    }

    fn admit(&mut self) {
        while self.running.len() < self.limits.sequences
            && let Some(next) = self.waiting.front()
        {
            let rows: usize = self.running.iter().map(Sequence::rows).sum();
            if !self.running.is_empty() && rows + next.rows() > self.limits.rows {
                return;
            }
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// Takes over what has been submitted. A sequence with which that cannot be done fails alone.
    fn take_over_all(&mut self) -> Result<(), DecoderError> {
        while let Some(words) = self.submissions.take()? {
            let submission = match AllegedDescriptor(words).submission(self.epoch, &self.arena) {
                Ok(submission) => submission,
                Err(DescriptorError::Stale { .. }) => {
                    metrics::counter!(names::STALE_COMPLETIONS).increment(1);
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            match self.take_over(&submission) {
                Ok(sequence) => {
                    self.waiting.push_back(sequence);
                    crash_point(CrashPoint::ClaimBorrowed);
                }
                Err(e) => {
                    tracing::error!("sequence {}: {e}", submission.sequence);
                    self.post(&[finished(submission.sequence, FinishReason::Failed)])?;
                }
            }
        }
        Ok(())
    }

    fn take_over(&self, submission: &Submission) -> Result<Sequence, DecoderError> {
        Sequence::admit(&self.region, &self.arena, submission, self.engine)
    }

    fn drop_cancelled(&mut self) -> Result<(), DecoderError> {
        let mut gone = Vec::new();
        let mut is_gone = |s: &Sequence| {
            let cancelled = s.control.cancelled();
            gone.extend(cancelled.then(|| finished(s.id, FinishReason::Cancelled)));
            cancelled
        };
        // Their slots are let go first.
        self.waiting.retain(|s| !is_gone(s));
        self.running.retain(|s| !is_gone(s));
        self.post(&gone)
    }

    /// One token for every running sequence.
    fn step(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<Turn, DecoderError> {
        let started = Instant::now();
        let spans: Vec<_> =
            self.running.iter().map(|s| trace::span("decode", "decode", s.id)).collect();
        let Some(logits) = self.forward(go_on) else { return Ok(Turn::Stopped) };
        crash_point(CrashPoint::DecodeComputed);
        let ns = started.elapsed().as_nanos() as u64;
        drop(spans);
        let mut posts = Vec::new();
        let mut ended = Vec::new();
        for (i, (sequence, logits)) in self.running.iter_mut().zip(&logits).enumerate() {
            sequence.control.add_decode_ns(ns);
            let reason = match logits {
                Some(logits) => sequence.advance(self.engine, logits),
                None => Some(FinishReason::Failed),
            };
            match reason {
                Some(reason) => {
                    posts.push(finished(sequence.id, reason));
                    ended.push(i);
                }
                None if sequence.control.notify() => {
                    crash_point(CrashPoint::DecodeNotified);
                    posts.push(Completion::Tokens { sequence: sequence.id });
                }
                None => {}
            }
        }
        // Slots are let go before the loader is told that it may reuse them.
        let any_ended = !ended.is_empty();
        for i in ended.into_iter().rev() {
            self.running.swap_remove(i);
            crash_point(CrashPoint::ReleaseDropped);
        }
        self.post(&posts)?;
        if any_ended {
            crash_point(CrashPoint::ReleasePosted);
        }
        Ok(Turn::Stepped)
    }

    /// Logits of every running sequence; none for one whose computation panics. A row's bits do
    /// not depend on the batch, so after a panic each can be computed again alone.
    fn forward(&mut self, go_on: &mut dyn FnMut() -> bool) -> Option<Vec<Option<Vec<f32>>>> {
        let engine = self.engine;
        match together(engine, &mut self.running, go_on) {
            Ok(logits) => Some(logits?.into_iter().map(Some).collect()),
            Err(_) => {
                let mut out = Vec::new();
                for sequence in self.running.chunks_mut(1) {
                    out.push(match together(engine, sequence, go_on) {
                        Ok(logits) => Some(logits?.pop().unwrap_or_default()),
                        Err(_) => None,
                    });
                }
                Some(out)
            }
        }
    }

    fn post(&mut self, posts: &[Completion]) -> Result<(), DecoderError> {
        if posts.is_empty() {
            return Ok(());
        }
        let words: Vec<_> = posts.iter().map(|p| p.encode(self.epoch)).collect();
        // Sized for two descriptors per sequence: full means the loader has broken the contract.
        Ok(self.completions.publish(&words)?)
    }
}

/// A step of these sequences, or the panic that ended it.
fn together<E: Engine>(
    engine: &E,
    sequences: &mut [Sequence],
    go_on: &mut dyn FnMut() -> bool,
) -> std::thread::Result<Option<Vec<Vec<f32>>>> {
    catch_unwind(AssertUnwindSafe(|| {
        let mut parts: Vec<StepParts<'_>> =
            sequences.iter_mut().map(Sequence::step_parts).collect();
        let mut steps: Vec<Step<'_>> = parts.iter_mut().map(StepParts::step).collect();
        crash_point(CrashPoint::DecodeBegun);
        engine.forward(&mut steps, go_on)
    }))
}

fn finished(sequence: u64, reason: FinishReason) -> Completion {
    Completion::Finished { sequence, reason }
}
