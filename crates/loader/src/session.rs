//! Sessions with a decoder: handshake, running sequences, completions, the end of an epoch.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam::channel::RecvTimeoutError;
use ipc_channel::ipc::IpcReceiver;
use matkv_actors::StopFlag;
use matkv_ring::{
    AllegedDescriptor, Completion, Consumer, DescriptorError, Geometry, Header, Hello, Producer,
    SequenceControl, Submission, TokenLog, Welcome,
};
use matkv_sys::{ControlListener, CrashPoint, PidFd, crash_point, die_with_parent};
use matkv_telemetry::names;
use matkv_types::{Fingerprint, FinishReason, KvShape};

use crate::error::RequestError;
use crate::request::{Lease, OwnSlot, RequestState};

/// A published sequence and everything it holds.
pub(crate) struct Running {
    state: Arc<RequestState>,
    control: SequenceControl,
    log: TokenLog,
    own: OwnSlot,
    _leases: Vec<Lease>,
}

impl Running {
    pub fn new(
        state: Arc<RequestState>,
        control: SequenceControl,
        own: OwnSlot,
        leases: Vec<Lease>,
    ) -> Self {
        let mut log = control.log();
        // The first token is A's own; the stream has it already.
        log.read_new();
        Self { state, control, log, own, _leases: leases }
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
}

/// The current session, if there is one.
#[derive(Default)]
pub(crate) struct Sessions {
    link: Mutex<Option<Link>>,
    last_refusal: Mutex<String>,
}

/// What status shows.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionStatus {
    pub epoch: u64,
    pub decoder: u32,
    pub running: usize,
    pub refusal: String,
}

impl Sessions {
    fn locked(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a decoder is there.
    pub fn is_connected(&self) -> bool {
        self.locked().is_some()
    }

    pub fn status(&self) -> SessionStatus {
        let refusal = self.last_refusal.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.locked().as_ref().map_or(SessionStatus { refusal, ..SessionStatus::default() }, |l| {
            SessionStatus {
                epoch: l.epoch,
                decoder: l.decoder,
                running: l.running.len(),
                refusal: String::new(),
            }
        })
    }

    /// Hands a sequence to the decoder.
    pub fn publish(
        &self,
        sequence: u64,
        running: Running,
        control_words: usize,
        kv_start: usize,
    ) -> Result<(), RequestError> {
        let mut link = self.locked();
        let Some(link) = link.as_mut() else {
            // Nobody may write to the control part once its slot is given back.
            running.state.attach(None);
            return Err(RequestError::Unavailable("the decoder is not running".into()));
        };
        let slot = running.own.extent().range();
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

    fn begin(&self, epoch: u64, decoder: u32, producer: Producer) {
        metrics::counter!(names::EPOCHS).increment(1);
        *self.locked() = Some(Link { epoch, producer, running: HashMap::new(), decoder });
    }

    /// Ends the session: what it ran fails, what it held comes back.
    fn end(&self, reason: &str) {
        let Some(link) = self.locked().take() else { return };
        for running in link.running.into_values() {
            running.state.attach(None);
            let state = Arc::clone(&running.state);
            drop(running);
            state.end(Err(RequestError::Unavailable(reason.to_owned())));
        }
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
                    drop(running);
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

/// What the session thread needs.
pub(crate) struct SessionThread {
    pub sessions: Arc<Sessions>,
    pub header: Arc<Header>,
    pub segment: String,
    pub geometry: Geometry,
    pub fingerprint: Fingerprint,
    pub shape: KvShape,
    pub runtime: PathBuf,
    /// Starts a decoder as a child, under `matkv up`.
    pub spawn: Option<Vec<String>>,
}

/// How long a connected decoder may take to introduce itself.
const HELLO: Duration = Duration::from_secs(10);
/// How long a decoder that hung up may take to die before it is killed.
const DEATH: Duration = Duration::from_secs(2);
/// How long the completion thread sleeps when nothing rings; a safety net, not a schedule.
const PARK: Duration = Duration::from_secs(1);

impl SessionThread {
    /// Session after session until the flag is raised.
    pub fn run(&self, stop: &StopFlag) -> Result<(), String> {
        let mut epoch = 0;
        let mut child: Option<Child> = None;
        let mut failures = 0u32;
        while !stop.is_raised() {
            epoch += 1;
            let listener = ControlListener::<Hello, Welcome>::publish(&self.runtime, epoch)
                .map_err(|e| e.to_string())?;
            crash_point(CrashPoint::LoaderPublishedName);
            self.restart_child(&mut child, &mut failures)?;
            let Some((hellos, welcomes)) = self.accept(listener, &mut child, stop) else {
                continue;
            };
            crash_point(CrashPoint::LoaderAccepted);
            let Ok(hello) = hellos.try_recv_timeout(HELLO) else { continue };
            crash_point(CrashPoint::LoaderHeard);
            if let Some(reason) = hello.disagreement(self.fingerprint, self.shape) {
                tracing::error!("decoder {} refused: {reason}", hello.pid);
                *self.sessions.last_refusal.lock().unwrap_or_else(PoisonError::into_inner) =
                    reason.clone();
                let _ = welcomes.send(Welcome::Refused { reason });
                continue;
            }
            let Ok(pidfd) = PidFd::open(hello.pid) else { continue };
            self.header.begin_epoch(epoch).map_err(|e| e.to_string())?;
            crash_point(CrashPoint::LoaderEpochBegun);
            let (producer, consumer) = self.header.loader_ends().map_err(|e| e.to_string())?;
            let bell = self.header.completion_bell().map_err(|e| e.to_string())?;
            let welcome =
                Welcome::Accepted { epoch, segment: self.segment.clone(), geometry: self.geometry };
            if welcomes.send(welcome).is_err() {
                continue;
            }
            crash_point(CrashPoint::LoaderWelcomed);
            self.sessions.begin(epoch, hello.pid, producer);
            crash_point(CrashPoint::LoaderSessionBegun);
            failures = 0;
            tracing::info!("session {epoch} with decoder {}", hello.pid);
            let over = StopFlag::default();
            let completions = self.completions(epoch, consumer, over.clone())?;
            let corrupt = wait_for_hang_up(&hellos, stop, &over);
            drop(welcomes);
            self.confirm_death(&pidfd, stop);
            over.raise();
            bell.ring();
            let _ = completions.join();
            let reason =
                if corrupt { "the decoder broke the protocol" } else { "the decoder died" };
            self.sessions.end(reason);
            if !stop.is_raised() {
                tracing::warn!("session {epoch} ended: {reason}");
            }
        }
        stop_child(child);
        Ok(())
    }

    /// The loans of a session are taken back only from a dead decoder.
    fn confirm_death(&self, pidfd: &PidFd, stop: &StopFlag) {
        if !pidfd.wait(DEATH) {
            if self.spawn.is_none() && stop.is_raised() {
                // A decoder with a service manager of its own waits for the next loader; this
                // process's segment is never used again.
                return;
            }
            tracing::warn!("the decoder hung up and lives on; killing it");
            pidfd.kill();
            while !pidfd.wait(DEATH) {
                tracing::error!("the decoder has been killed and has not ended yet");
            }
        }
    }

    fn completions(
        &self,
        epoch: u64,
        mut consumer: Consumer,
        over: StopFlag,
    ) -> Result<std::thread::JoinHandle<()>, String> {
        let sessions = Arc::clone(&self.sessions);
        let thread = std::thread::Builder::new().name("completions".into());
        let run = move || {
            loop {
                match consumer.take() {
                    Ok(Some(words)) => match AllegedDescriptor(words).completion(epoch) {
                        Ok(completion) => sessions.complete(completion),
                        Err(DescriptorError::Stale { .. }) => {
                            metrics::counter!(names::STALE_COMPLETIONS).increment(1);
                        }
                        Err(e) => {
                            tracing::error!("{e}");
                            return over.raise();
                        }
                    },
                    Ok(None) if over.is_raised() => return,
                    Ok(None) => consumer.park(PARK),
                    Err(e) => {
                        tracing::error!("{e}");
                        return over.raise();
                    }
                }
            }
        };
        thread.spawn(run).map_err(|e| e.to_string())
    }

    /// Waits for a decoder. `accept` has no time-out, so it runs on a thread of its own; if the
    /// child dies first, a new one connects to the same name.
    fn accept(
        &self,
        listener: ControlListener<Hello, Welcome>,
        child: &mut Option<Child>,
        stop: &StopFlag,
    ) -> Option<(IpcReceiver<Hello>, ipc_channel::ipc::IpcSender<Welcome>)> {
        let (sender, receiver) = crossbeam::channel::bounded(1);
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || {
                let _ = sender.send(listener.accept());
            })
            .ok()?;
        let mut failures = 0;
        loop {
            match receiver.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(connection)) => return Some(connection),
                Ok(Err(e)) => {
                    tracing::warn!("a decoder failed to connect: {e}");
                    return None;
                }
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(_) if stop.is_raised() => return None,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(e) = self.restart_child(child, &mut failures) {
                        tracing::error!("{e}");
                    }
                }
            }
        }
    }

    /// Starts the decoder if this process is the one to do it and none lives.
    fn restart_child(&self, child: &mut Option<Child>, failures: &mut u32) -> Result<(), String> {
        let Some(command) = &self.spawn else { return Ok(()) };
        if let Some(running) = child {
            match running.try_wait() {
                Ok(None) => return Ok(()),
                Ok(Some(status)) => tracing::warn!("the decoder ended: {status}"),
                Err(e) => return Err(e.to_string()),
            }
            // A decoder that dies at once, again and again, must not keep the machine busy.
            std::thread::sleep(Duration::from_millis(100 << (*failures).min(5)));
            *failures += 1;
        }
        let [program, arguments @ ..] = command.as_slice() else { return Ok(()) };
        let mut process = Command::new(program);
        process.args(arguments).stdin(Stdio::null());
        let spawned = die_with_parent(&mut process).spawn();
        *child = Some(spawned.map_err(|e| format!("cannot start {program}: {e}"))?);
        Ok(())
    }
}

/// Blocks until the decoder hangs up; true if the session was ended because it broke the rules.
fn wait_for_hang_up(hellos: &IpcReceiver<Hello>, stop: &StopFlag, over: &StopFlag) -> bool {
    while !stop.is_raised() {
        if over.is_raised() {
            return true;
        }
        match hellos.try_recv_timeout(Duration::from_millis(50)) {
            Ok(_) | Err(ipc_channel::TryRecvError::Empty) => {}
            Err(_) => return false,
        }
    }
    false
}

fn stop_child(child: Option<Child>) {
    let Some(mut child) = child else { return };
    if let Ok(pidfd) = PidFd::open(child.id()) {
        // It has seen the hang-up and ends by itself; if not, it is ended.
        if !pidfd.wait(Duration::from_secs(5)) {
            pidfd.kill();
        }
    }
    let _ = child.wait();
}
