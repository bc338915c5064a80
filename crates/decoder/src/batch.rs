//! The decode loop: sequences join and leave at token boundaries.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use matkv_model::Step;
use matkv_ring::{
    AllegedDescriptor, Completion, Consumer, DESCRIPTOR_WORDS, DescriptorError, Header, Producer,
    Submission,
};
use matkv_sys::{CrashPoint, Region, crash_point};
use matkv_telemetry::{names, trace};
use matkv_types::{FinishReason, emptied};

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
    memory: Memory,
}

/// Lists that every step fills, and leaves empty; of logits those of the last step.
#[derive(Default)]
struct Memory {
    parts: Vec<StepParts<'static>>,
    steps: Vec<Step<'static>>,
    logits: Vec<Vec<f32>>,
    spans: Vec<trace::Timer>,
    posts: Vec<Completion>,
    words: Vec<[u64; DESCRIPTOR_WORDS]>,
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
            memory: Memory::default(),
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
                    self.memory.posts.push(finished(submission.sequence, FinishReason::Failed));
                    self.post()?;
                }
            }
        }
        Ok(())
    }

    fn take_over(&self, submission: &Submission) -> Result<Sequence, DecoderError> {
        Sequence::admit(&self.region, &self.arena, submission, self.engine)
    }

    fn drop_cancelled(&mut self) -> Result<(), DecoderError> {
        let gone = &mut self.memory.posts;
        let mut is_gone = |s: &Sequence| {
            let cancelled = s.control.cancelled();
            gone.extend(cancelled.then(|| finished(s.id, FinishReason::Cancelled)));
            cancelled
        };
        // Their slots are let go first.
        self.waiting.retain(|s| !is_gone(s));
        self.running.retain(|s| !is_gone(s));
        self.post()
    }

    /// One token for every running sequence.
    fn step(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<Turn, DecoderError> {
        let started = Instant::now();
        let spans = self.running.iter().map(|s| trace::span("decode", "decode", s.id));
        self.memory.spans.extend(spans);
        let done = self.forward(go_on);
        self.memory.spans.clear();
        if !done {
            return Ok(Turn::Stopped);
        }
        crash_point(CrashPoint::DecodeComputed);
        let ns = started.elapsed().as_nanos() as u64;
        let Memory { logits, posts, .. } = &mut self.memory;
        let mut ended = Vec::new();
        for (i, (sequence, logits)) in self.running.iter_mut().zip(logits).enumerate() {
            sequence.control.add_decode_ns(ns);
            let reason = if logits.is_empty() {
                Some(FinishReason::Failed)
            } else {
                sequence.advance(self.engine, logits)
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
        self.post()?;
        if any_ended {
            crash_point(CrashPoint::ReleasePosted);
        }
        Ok(Turn::Stepped)
    }

    /// Logits of every running sequence, none for one whose computation panics; false if `go_on`
    /// said no. A row's bits do not depend on the batch, so after a panic each can be computed
    /// again alone.
    fn forward(&mut self, go_on: &mut dyn FnMut() -> bool) -> bool {
        let Self { engine, running, memory, .. } = self;
        if let Ok(done) = together(*engine, running, go_on, memory) {
            return done;
        }
        let mut all = std::mem::take(&mut memory.logits);
        all.clear();
        for sequence in running.chunks_mut(1) {
            all.push(match together(*engine, sequence, go_on, memory) {
                Ok(true) => memory.logits.pop().unwrap_or_default(),
                Ok(false) => return false,
                Err(_) => Vec::new(),
            });
        }
        memory.logits = all;
        true
    }

    /// Tells the loader what is to be told.
    fn post(&mut self) -> Result<(), DecoderError> {
        let Memory { posts, words, .. } = &mut self.memory;
        if posts.is_empty() {
            return Ok(());
        }
        words.clear();
        words.extend(posts.drain(..).map(|p| p.encode(self.epoch)));
        // Sized for two descriptors per sequence: full means the loader has broken the contract.
        Ok(self.completions.publish(words)?)
    }
}

/// A step of these sequences, or the panic that ended it. Lists that it held are gone with it.
fn together<E: Engine>(
    engine: &E,
    sequences: &mut [Sequence],
    go_on: &mut dyn FnMut() -> bool,
    memory: &mut Memory,
) -> std::thread::Result<bool> {
    catch_unwind(AssertUnwindSafe(|| {
        let mut parts: Vec<StepParts<'_>> = std::mem::take(&mut memory.parts);
        parts.extend(sequences.iter_mut().map(Sequence::step_parts));
        let mut steps: Vec<Step<'_>> = std::mem::take(&mut memory.steps);
        steps.extend(parts.iter_mut().map(StepParts::step));
        crash_point(CrashPoint::DecodeBegun);
        let done = engine.forward(&mut steps, go_on, &mut memory.logits);
        memory.steps = emptied(steps);
        parts.drain(..).for_each(StepParts::done);
        memory.parts = emptied(parts);
        done
    }))
}

fn finished(sequence: u64, reason: FinishReason) -> Completion {
    Completion::Finished { sequence, reason }
}
