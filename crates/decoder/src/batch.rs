//! The decode loop: sequences join and leave at token boundaries.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_actors::StopFlag;
use matkv_model::{LanguageModel, Step};
use matkv_ring::{
    AllegedDescriptor, Completion, Consumer, DescriptorError, Header, Producer, Submission,
};
use matkv_sys::{CrashPoint, Region, crash_point};
use matkv_telemetry::names;
use matkv_types::FinishReason;

use crate::error::DecoderError;
use crate::sequence::{Sequence, StepParts};

/// How long the thread sleeps when nothing rings; a safety net, not a schedule.
const PARK: Duration = Duration::from_secs(1);

/// One session's decode loop.
pub(crate) struct Batch<'a> {
    model: &'a LanguageModel,
    region: Arc<Region>,
    arena: Range<usize>,
    epoch: u64,
    submissions: Consumer,
    completions: Producer,
    running: Vec<Sequence>,
    batch_size: usize,
}

impl<'a> Batch<'a> {
    pub fn new(
        model: &'a LanguageModel,
        region: &Arc<Region>,
        header: &Header,
        epoch: u64,
        batch_size: usize,
    ) -> Result<Self, DecoderError> {
        let (submissions, completions) = header.decoder_ends()?;
        Ok(Self {
            model,
            region: Arc::clone(region),
            arena: header.geometry().arena(),
            epoch,
            submissions,
            completions,
            running: Vec::new(),
            batch_size,
        })
    }

    /// Decodes until the flag is raised.
    pub fn run(&mut self, stop: &StopFlag) -> Result<(), DecoderError> {
        while !stop.is_raised() {
            self.admit()?;
            self.drop_cancelled()?;
            if self.running.is_empty() {
                if !self.submissions.has_next() {
                    self.submissions.park(PARK);
                }
                continue;
            }
            self.step()?;
        }
        Ok(())
    }

    fn admit(&mut self) -> Result<(), DecoderError> {
        while self.running.len() < self.batch_size {
            let Some(words) = self.submissions.take()? else { return Ok(()) };
            let submission = match AllegedDescriptor(words).submission(self.epoch, &self.arena) {
                Ok(submission) => submission,
                Err(DescriptorError::Stale { .. }) => {
                    metrics::counter!(names::STALE_COMPLETIONS).increment(1);
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            self.admit_one(&submission)?;
        }
        Ok(())
    }

    /// A sequence that cannot be taken over fails alone.
    fn admit_one(&mut self, submission: &Submission) -> Result<(), DecoderError> {
        let shape = self.model.kv_shape();
        match Sequence::admit(&self.region, &self.arena, shape, submission, self.model) {
            Ok(sequence) => {
                self.running.push(sequence);
                crash_point(CrashPoint::ClaimBorrowed);
                Ok(())
            }
            Err(e) => {
                tracing::error!("sequence {}: {e}", submission.sequence);
                self.post(&[finished(submission.sequence, FinishReason::Failed)])
            }
        }
    }

    fn drop_cancelled(&mut self) -> Result<(), DecoderError> {
        let gone = self.running.extract_if(.., |s| s.control.cancelled());
        let posts: Vec<Completion> =
            gone.map(|s| finished(s.id, FinishReason::Cancelled)).collect();
        self.post(&posts)
    }

    /// One token for every running sequence.
    fn step(&mut self) -> Result<(), DecoderError> {
        let started = Instant::now();
        let logits = {
            let mut parts: Vec<StepParts<'_>> =
                self.running.iter_mut().map(Sequence::step_parts).collect();
            let mut steps: Vec<Step<'_>> = parts.iter_mut().map(StepParts::step).collect();
            self.model.forward(&mut steps)
        };
        crash_point(CrashPoint::DecodeComputed);
        let ns = started.elapsed().as_nanos() as u64;
        let mut posts = Vec::new();
        let mut ended = Vec::new();
        for (i, (sequence, logits)) in self.running.iter_mut().zip(&logits).enumerate() {
            sequence.control.add_decode_ns(ns);
            match sequence.advance(self.model, logits) {
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
        Ok(())
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

fn finished(sequence: u64, reason: FinishReason) -> Completion {
    Completion::Finished { sequence, reason }
}
