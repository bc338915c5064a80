//! The `session` thread: session after session with a decoder, from its introduction to its
//! confirmed death.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::RecvTimeoutError;
use ipc_channel::ipc::{IpcReceiver, IpcSender};
use matkv_actors::{Pulse, Stillness, StopFlag};
use matkv_config::format_duration;
use matkv_ring::{Consumer, FromDecoder, Geometry, Header, Producer, Side, Welcome};
use matkv_sys::{
    ControlListener, CrashPoint, PidFd, crash_point, die_with_parent, terminate_and_wait,
};
use matkv_telemetry::{names, service};
use matkv_types::{Fingerprint, KvShape};

use crate::session::Sessions;

/// What the session thread needs.
pub(crate) struct SessionThread {
    pub sessions: Arc<Sessions>,
    pub header: Arc<Header>,
    pub segment: String,
    pub geometry: Geometry,
    pub fingerprint: Fingerprint,
    pub shape: KvShape,
    pub runtime: PathBuf,
    /// How long a decoder may make no step.
    pub stall: Duration,
    /// Keeps a decoder alive as a child, under `matkv up`.
    pub child: Option<std::sync::Mutex<DecoderChild>>,
}

/// How long a connected decoder may take to introduce itself.
const HELLO: Duration = Duration::from_secs(10);
/// How long a welcomed decoder may take to map the segment.
const JOIN: Duration = Duration::from_secs(30);
/// How long a child may take to load its model and connect.
const START: Duration = Duration::from_secs(300);
/// How long a decoder that hung up may take to die before it is killed.
const DEATH: Duration = Duration::from_secs(2);
/// How often the decoder's life is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long the completion thread sleeps when nothing rings; a safety net, not a schedule.
const PARK: Duration = Duration::from_secs(1);

type Hellos = IpcReceiver<FromDecoder>;
type Welcomes = IpcSender<Welcome>;

/// A decoder that has joined.
struct Joined {
    hellos: Hellos,
    /// Dropped at the end: that is the hang-up the decoder sees.
    _welcomes: Welcomes,
    pidfd: PidFd,
    pid: u32,
    ends: (Producer, Consumer),
}

/// Why a session ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Stopped,
    HungUp,
    BrokenContract,
    Stalled,
}

impl End {
    fn reason(self) -> &'static str {
        match self {
            Self::Stopped => "the loader is stopping",
            Self::HungUp => "the decoder died",
            Self::BrokenContract => "the decoder broke the protocol",
            Self::Stalled => "the decoder stood still",
        }
    }
}

impl SessionThread {
    /// Session after session until the flag is raised.
    pub fn run(&self, stop: &StopFlag, pulse: &Pulse) -> Result<(), String> {
        let mut epoch = 0;
        while !stop.is_raised() {
            epoch += 1;
            if let Some(joined) = self.handshake(epoch, stop, pulse)? {
                self.session(epoch, joined, stop, pulse)?;
            }
        }
        self.with_child(|c| c.stop());
        Ok(())
    }

    fn with_child(&self, act: impl FnOnce(&mut DecoderChild)) {
        if let Some(child) = &self.child {
            act(&mut child.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        }
    }

    /// Waits for a decoder and lets it join; nothing if this one did not.
    fn handshake(
        &self,
        epoch: u64,
        stop: &StopFlag,
        pulse: &Pulse,
    ) -> Result<Option<Joined>, String> {
        let listener = ControlListener::<FromDecoder, Welcome>::publish(&self.runtime, epoch)
            .map_err(|e| e.to_string())?;
        crash_point(CrashPoint::LoaderPublishedName);
        let Some((hellos, welcomes)) = self.accept(listener, stop, pulse) else { return Ok(None) };
        crash_point(CrashPoint::LoaderAccepted);
        let hello = match hear(&hellos, HELLO, stop, pulse) {
            Some(FromDecoder::Hello(hello)) => hello,
            _ => {
                self.with_child(|c| c.kill("it has connected and not introduced itself"));
                return Ok(None);
            }
        };
        crash_point(CrashPoint::LoaderHeard);
        if let Some(reason) = hello.disagreement(self.fingerprint, self.shape) {
            tracing::error!("decoder {} refused: {reason}", hello.pid);
            self.sessions.refused(&reason);
            let _ = welcomes.send(Welcome::Refused { reason });
            return Ok(None);
        }
        let pidfd = match PidFd::open(hello.pid) {
            Ok(pidfd) => pidfd,
            Err(e) => {
                // Without it its death could not be confirmed.
                tracing::error!("decoder {}: {e}", hello.pid);
                return Ok(None);
            }
        };
        self.header.begin_epoch(epoch).map_err(|e| e.to_string())?;
        let ends = self.header.loader_ends().map_err(|e| e.to_string())?;
        crash_point(CrashPoint::LoaderEpochBegun);
        let welcome =
            Welcome::Accepted { epoch, segment: self.segment.clone(), geometry: self.geometry };
        if welcomes.send(welcome).is_err() {
            // It has gone without hearing what to map.
            return Ok(None);
        }
        crash_point(CrashPoint::LoaderWelcomed);
        if hear(&hellos, JOIN, stop, pulse) != Some(FromDecoder::Joined) {
            // It may have mapped the segment by now.
            tracing::warn!("decoder {} was welcomed and has not joined", hello.pid);
            drop(welcomes);
            self.confirm_death(&pidfd, stop, pulse);
            return Ok(None);
        }
        Ok(Some(Joined { hellos, _welcomes: welcomes, pidfd, pid: hello.pid, ends }))
    }

    /// A session, to the confirmed death of its decoder.
    fn session(
        &self,
        epoch: u64,
        joined: Joined,
        stop: &StopFlag,
        pulse: &Pulse,
    ) -> Result<(), String> {
        let Joined { hellos, _welcomes: welcomes, pidfd, pid, ends: (producer, consumer) } = joined;
        let bell = self.header.completion_bell().map_err(|e| e.to_string())?;
        self.sessions.begin(epoch, pid, producer);
        crash_point(CrashPoint::LoaderSessionBegun);
        self.with_child(|c| c.failures = 0);
        tracing::info!("session {epoch} with decoder {pid}");
        let over = Arc::new(AtomicBool::new(false));
        let completions = self.completions(epoch, consumer, &over)?;
        let completions_live = || !completions.is_finished();
        let end = self.wait_for_end(&hellos, stop, completions_live, pulse);
        self.sessions.close();
        drop(welcomes);
        if end == End::Stalled {
            pidfd.kill();
        }
        self.confirm_death(&pidfd, stop, pulse);
        over.store(true, Ordering::SeqCst);
        bell.ring();
        let _ = completions.join();
        self.sessions.end(end.reason());
        if end != End::Stopped {
            tracing::warn!("session {epoch} ended: {}", end.reason());
        }
        Ok(())
    }

    /// Looks at the decoder's life until it, or the session, is over.
    fn wait_for_end(
        &self,
        hellos: &Hellos,
        stop: &StopFlag,
        completions_live: impl Fn() -> bool,
        pulse: &Pulse,
    ) -> End {
        let mut beats = Stillness::default();
        let mut last = Instant::now();
        while !stop.is_raised() {
            pulse.step();
            // It ends by itself only over something that cannot be.
            if !completions_live() {
                return End::BrokenContract;
            }
            match hellos.try_recv_timeout(LOOK) {
                Ok(FromDecoder::Spans(spans)) => self.sessions.add_spans(spans),
                Ok(_) | Err(ipc_channel::TryRecvError::Empty) => {}
                Err(_) => return End::HungUp,
            }
            let passed = last.elapsed();
            last = Instant::now();
            if beats.look(self.header.beats(Side::Decoder), passed) > self.stall {
                metrics::counter!(names::STALLS).increment(1);
                let text = format!("the decoder has not moved for {}", format_duration(self.stall));
                tracing::error!("{text}; killing it");
                service::status(&text);
                return End::Stalled;
            }
        }
        End::Stopped
    }

    /// The loans of a session are taken back only from a dead decoder.
    fn confirm_death(&self, pidfd: &PidFd, stop: &StopFlag, pulse: &Pulse) {
        let patience = Instant::now();
        let mut killed = false;
        while !pidfd.wait(LOOK) {
            pulse.step();
            if self.child.is_none() && stop.is_raised() {
                // A decoder with a service manager of its own waits for the next loader; this
                // process's segment is never used again.
                return;
            }
            if !killed && patience.elapsed() > DEATH {
                tracing::warn!("the decoder hung up and lives on; killing it");
                pidfd.kill();
                killed = true;
            }
        }
    }

    fn completions(
        &self,
        epoch: u64,
        mut consumer: Consumer,
        over: &Arc<AtomicBool>,
    ) -> Result<std::thread::JoinHandle<()>, String> {
        let (sessions, over) = (Arc::clone(&self.sessions), Arc::clone(over));
        let thread = std::thread::Builder::new().name("completions".into());
        let run = move || {
            loop {
                // Read first: what was posted before the end is taken after it.
                let last = over.load(Ordering::SeqCst);
                if let Err(e) = sessions.drain(epoch, &mut consumer) {
                    return tracing::error!("{e}");
                }
                if last {
                    return;
                }
                consumer.park(PARK);
            }
        };
        thread.spawn(run).map_err(|e| e.to_string())
    }

    /// Waits for a decoder. `accept` has no time-out, so it runs on a thread of its own; if the
    /// child dies first, a new one connects to the same name.
    fn accept(
        &self,
        listener: ControlListener<FromDecoder, Welcome>,
        stop: &StopFlag,
        pulse: &Pulse,
    ) -> Option<(Hellos, Welcomes)> {
        let (sender, receiver) = crossbeam::channel::bounded(1);
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || {
                let _ = sender.send(listener.accept());
            })
            .ok()?;
        loop {
            pulse.step();
            self.with_child(DecoderChild::keep_alive);
            match receiver.recv_timeout(LOOK) {
                Ok(Ok(connection)) => return Some(connection),
                Ok(Err(e)) => {
                    tracing::warn!("a decoder failed to connect: {e}");
                    return None;
                }
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(_) if stop.is_raised() => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// What the decoder says next; nothing if it hangs up or does not say it in time.
fn hear(hellos: &Hellos, limit: Duration, stop: &StopFlag, pulse: &Pulse) -> Option<FromDecoder> {
    let started = Instant::now();
    while !stop.is_raised() && started.elapsed() < limit {
        pulse.step();
        match hellos.try_recv_timeout(LOOK) {
            Ok(message) => return Some(message),
            Err(ipc_channel::TryRecvError::Empty) => {}
            Err(_) => return None,
        }
    }
    None
}

/// A decoder this process starts, and starts again when it dies.
pub(crate) struct DecoderChild {
    command: Vec<String>,
    child: Option<Child>,
    failures: u32,
    started: Instant,
    /// A decoder that dies at once, again and again, must not keep the machine busy.
    not_before: Instant,
}

impl DecoderChild {
    /// Started from a thread that lives as long as the process: a child's life follows its
    /// parent's *thread*.
    pub fn start(command: Vec<String>) -> Self {
        let (started, not_before) = (Instant::now(), Instant::now());
        let mut this = Self { command, child: None, failures: 0, started, not_before };
        this.keep_alive();
        this
    }

    /// Starts it if it does not live.
    fn keep_alive(&mut self) {
        if let Some(child) = &mut self.child {
            match child.try_wait() {
                Ok(None) if self.started.elapsed() > START => {
                    return self.kill("it has not connected");
                }
                Ok(None) => return,
                Ok(Some(status)) => tracing::warn!("the decoder ended: {status}"),
                Err(e) => tracing::error!("the decoder cannot be waited for: {e}"),
            }
            self.child = None;
            self.not_before = Instant::now() + Duration::from_millis(50 << self.failures.min(6));
            self.failures += 1;
        }
        if Instant::now() < self.not_before {
            return;
        }
        let [program, arguments @ ..] = self.command.as_slice() else { return };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        service::OWN_VARIABLES.iter().for_each(|v| {
            command.env_remove(v);
        });
        match die_with_parent(&mut command).spawn() {
            Ok(child) => (self.child, self.started) = (Some(child), Instant::now()),
            Err(e) => {
                tracing::error!("cannot start {program}: {e}");
                self.not_before = Instant::now() + Duration::from_secs(1);
            }
        }
    }

    /// Ends a child that does not do its part; [`Self::keep_alive`] starts another.
    fn kill(&mut self, why: &str) {
        let Some(child) = &mut self.child else { return };
        tracing::warn!("decoder {}: {why}; killing it", child.id());
        let _ = child.kill();
        // Started anew once it has been waited for.
        self.started = Instant::now();
    }

    /// It has seen the hang-up, or has not come so far.
    fn stop(&mut self) {
        if let Some(child) = &mut self.child {
            terminate_and_wait(child, DEATH);
        }
    }
}
