//! The current session: running sequences, completions, the end of an epoch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam::channel::Sender;
use matkv_ring::{
    AllegedDescriptor, Completion, Consumer, DescriptorError, Producer, QueueError,
    SequenceControl, Submission, TokenLog,
};
use matkv_sys::{CrashPoint, crash_point};
use matkv_telemetry::names;
use matkv_types::{FinishReason, Span};

use crate::earlier::Keeping;
use crate::error::RequestError;
use crate::request::{Lease, OwnSlot, RequestState};
use crate::world::LoadMessage;

/// A published sequence and everything it holds.
pub struct Running {
    state: Arc<RequestState>,
    control: SequenceControl,
    log: TokenLog,
    own: OwnSlot,
    _leases: Vec<Lease>,
    keeping: Option<Keeping>,
}

impl Running {
    pub fn new(
        state: Arc<RequestState>,
        control: SequenceControl,
        own: OwnSlot,
        leases: Vec<Lease>,
        keeping: Option<Keeping>,
    ) -> Self {
        let mut log = control.log();
        // The first token is A's own; the stream has it already.
        log.read_new();
        Self { state, control, log, own, _leases: leases, keeping }
    }

    /// Lets go of everything but what may be kept.
    fn into_kept(self) -> (Option<Keeping>, OwnSlot) {
        (self.keeping, self.own)
    }

    fn take_tokens(&mut self) {
        let new = self.log.read_new();
        if !new.is_empty() {
            self.state.update(|p| p.tokens.extend(new));
        }
    }
}

struct Link {
    epoch: u64,
    producer: Producer,
    running: HashMap<u64, Running>,
    decoder: u32,
    /// Its decoder is gone or about to be; what it runs is told when its death is certain.
    closing: bool,
}

/// The current session, if there is one.
#[derive(Default)]
pub struct Sessions {
    link: Mutex<Option<Link>>,
    refusal: Mutex<String>,
    /// What decoders have recorded for a trace.
    spans: Mutex<Vec<Span>>,
    /// Where slots of sequences that have ended go, if they are kept.
    kept: Option<Sender<LoadMessage>>,
}

/// How a decoder broke the contract of the rings.
#[derive(Debug, thiserror::Error)]
pub enum BrokenContract {
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    #[error(transparent)]
    Queue(#[from] QueueError),
}

/// What status shows.
#[derive(Clone, Debug, Default)]
pub struct SessionStatus {
    pub epoch: u64,
    pub decoder: u32,
    pub running: usize,
    pub refusal: String,
}

impl Sessions {
    /// Slots to keep go to the load thread.
    pub fn new(kept: Sender<LoadMessage>) -> Self {
        Self { kept: Some(kept), ..Self::default() }
    }

    /// Keeps an own slot whose sequence has ended, if its rows may serve others. The load thread
    /// has better to do if its channel is full.
    pub fn keep(&self, keeping: Option<Keeping>, own: OwnSlot) {
        if let (Some(keeping), Some(to)) = (keeping, &self.kept) {
            let _ = to.try_send(LoadMessage::Keep(Box::new(keeping.keep(own))));
        }
    }

    fn locked(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn status(&self) -> SessionStatus {
        let refusal = self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.locked().as_ref().map_or(SessionStatus { refusal, ..SessionStatus::default() }, |l| {
            SessionStatus {
                epoch: l.epoch,
                decoder: if l.closing { 0 } else { l.decoder },
                running: l.running.len(),
                refusal: String::new(),
            }
        })
    }

    /// Hands a sequence to the decoder.
    pub fn publish(
        &self,
        running: Running,
        control_words: usize,
        kv_start: usize,
    ) -> Result<(), RequestError> {
        let mut link = self.locked();
        let Some(link) = link.as_mut().filter(|l| !l.closing) else {
            // Nobody may write to the control part once its slot is given back.
            running.state.attach(None);
            return Err(RequestError::Unavailable("the decoder is not running".into()));
        };
        let slot = running.own.extent().range();
        let sequence = running.state.number;
        let submission = Submission {
            epoch: link.epoch,
            sequence,
            slot_start: slot.start,
            slot_end: slot.end,
            control_words,
            kv_start,
        };
        // The gateway admits no more requests than the ring holds.
        if let Err(e) = link.producer.publish(&[submission.encode()]) {
            running.state.attach(None);
            return Err(RequestError::Unavailable(format!("session broken: {e}")));
        }
        link.running.insert(sequence, running);
        crash_point(CrashPoint::PublishDone);
        Ok(())
    }

    /// What must hold whenever nothing is being done.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        let link = self.locked();
        let Some(link) = link.as_ref() else { return Ok(()) };
        match link.running.iter().find(|(n, r)| **n != r.state.number) {
            Some((n, r)) => Err(format!("sequence {n} is request {}", r.state.number)),
            None => Ok(()),
        }
    }

    /// A decoder of another build, model or geometry has been refused.
    pub fn refused(&self, reason: &str) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = reason.to_owned();
    }

    /// Keeps what a decoder has recorded.
    pub fn add_spans(&self, spans: Vec<Span>) {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
    }

    /// Takes what decoders have recorded.
    pub fn take_spans(&self) -> Vec<Span> {
        std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A decoder has joined.
    pub fn begin(&self, epoch: u64, decoder: u32, producer: Producer) {
        metrics::counter!(names::EPOCHS).increment(1);
        self.refused("");
        let running = HashMap::new();
        *self.locked() = Some(Link { epoch, producer, running, decoder, closing: false });
    }

    /// Takes nothing new.
    pub fn close(&self) {
        if let Some(link) = self.locked().as_mut() {
            link.closing = true;
        }
    }

    /// Ends the session: what it ran fails, what it held comes back.
    pub fn end(&self, reason: &str) {
        let Some(link) = self.locked().take() else { return };
        for running in link.running.into_values() {
            running.state.attach(None);
            let state = Arc::clone(&running.state);
            drop(running);
            state.end(Err(RequestError::Unavailable(reason.to_owned())));
        }
    }

    /// Takes everything the decoder has posted.
    ///
    /// # Errors
    /// What ends the session: the decoder broke the contract.
    pub fn drain(&self, epoch: u64, completions: &mut Consumer) -> Result<(), BrokenContract> {
        while let Some(words) = completions.take()? {
            match AllegedDescriptor(words).completion(epoch) {
                Ok(completion) => self.complete(completion),
                Err(DescriptorError::Stale { .. }) => {
                    metrics::counter!(names::STALE_COMPLETIONS).increment(1);
                }
                Err(e) => return Err(e.into()),
            }
        }
        debug_assert_eq!(self.check(), Ok(()));
        Ok(())
    }

    fn complete(&self, completion: Completion) {
        let mut link = self.locked();
        let Some(link) = link.as_mut() else { return };
        match completion {
            Completion::Tokens { sequence } => {
                if let Some(running) = link.running.get_mut(&sequence) {
                    running.control.acknowledge();
                    crash_point(CrashPoint::CompleteAcknowledged);
                    running.take_tokens();
                }
            }
            Completion::Finished { sequence, reason } => {
                if let Some(mut running) = link.running.remove(&sequence) {
                    crash_point(CrashPoint::ReleaseReceived);
                    running.take_tokens();
                    let decode_ms = running.control.decode_ns() as f64 / 1e6;
                    running.state.update(|p| p.phases.decode_ms = decode_ms);
                    running.state.attach(None);
                    let state = Arc::clone(&running.state);
                    // Slots come back before the client is told: at rest nothing is held.
                    let (keeping, own) = running.into_kept();
                    self.keep(keeping.filter(|_| reason != FinishReason::Failed), own);
                    crash_point(CrashPoint::ReleaseFreed);
                    state.end(match reason {
                        FinishReason::Failed => {
                            Err(RequestError::Internal("the decoder refused the sequence".into()))
                        }
                        other => Ok(other),
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use matkv_ring::{Geometry, Header};
    use matkv_sys::Region;
    use matkv_types::Digest;
    use matkv_types::Fingerprint;

    use super::*;
    use crate::arena::Arena;
    use crate::request::OwnSlot;

    /// A sequence as the decoder would see it, with room for four tokens.
    fn running(arena: &Arc<Arena>) -> Running {
        let extent = arena.allocate(8192).unwrap();
        let start = extent.range().start;
        let words = extent.region().words(start..start + 4096).unwrap();
        let control = SequenceControl::new(words);
        let state = RequestState::new();
        control.fill(state.number, &[0], 5);
        Running::new(state, control, OwnSlot::new(extent), Vec::new(), None)
    }

    #[test]
    fn what_an_earlier_epoch_says_is_ignored() {
        let geometry = Geometry::new(1 << 20);
        let region = Region::anonymous(geometry.segment_bytes());
        let header =
            Header::initialize(&region, geometry, Fingerprint(Digest([1; 32])), 2).unwrap();
        let arena = Arena::new(&region, geometry.arena());
        let sessions = Sessions::default();
        let (producer, mut completions) = header.loader_ends().unwrap();
        let (_, mut decoder) = header.decoder_ends().unwrap();
        sessions.begin(2, 1, producer);
        let sequence = running(&arena);
        let (state, number) = (Arc::clone(&sequence.state), sequence.state.number);
        sessions.publish(sequence, 8, 4096 + geometry.arena_start).unwrap();

        let end = Completion::Finished { sequence: number, reason: FinishReason::Length };
        let unknown = Completion::Finished { sequence: number + 1, reason: FinishReason::Stop };
        decoder.publish(&[end.encode(1), unknown.encode(2)]).unwrap();
        sessions.drain(2, &mut completions).unwrap();
        assert!(state.look(|p| p.ended.is_none()), "epoch 1 is over");
        assert_eq!((sessions.status().running, arena.held()), (1, 1));

        decoder.publish(&[end.encode(2)]).unwrap();
        sessions.drain(2, &mut completions).unwrap();
        assert_eq!(state.look(|p| p.ended.clone()), Some(Ok(FinishReason::Length)));
        assert_eq!((sessions.status().running, arena.held(), arena.usage().1), (0, 0, 0));
        decoder.publish(&[[7; 8]]).unwrap();
        assert!(sessions.drain(2, &mut completions).is_err(), "that is no descriptor");
    }

    #[test]
    fn the_end_of_a_session_is_told_to_everyone_it_ran() {
        let geometry = Geometry::new(1 << 20);
        let region = Region::anonymous(geometry.segment_bytes());
        let header =
            Header::initialize(&region, geometry, Fingerprint(Digest([1; 32])), 1).unwrap();
        let arena = Arena::new(&region, geometry.arena());
        let sessions = Sessions::default();
        let early = running(&arena);
        let early_state = Arc::clone(&early.state);
        assert!(sessions.publish(early, 8, 4096 + geometry.arena_start).is_err());
        sessions.begin(1, 1, header.loader_ends().unwrap().0);
        let sequence = running(&arena);
        let state = Arc::clone(&sequence.state);
        sessions.publish(sequence, 8, 4096 + geometry.arena_start).unwrap();
        sessions.end("it died");
        let told = Some(Err(RequestError::Unavailable("it died".into())));
        assert_eq!(state.look(|p| p.ended.clone()), told);
        assert!(early_state.look(|p| p.ended.is_none()), "its caller tells this one");
        assert_eq!((arena.held(), arena.usage().1), (0, 0));
    }
}
