//! A session with a loader: handshake, decode loop, and the watch over the loader's life.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc_channel::ipc::{IpcReceiver, IpcSender};
use matkv_actors::{Pulse, Stillness, StopFlag, Watch};
use matkv_config::format_duration;
use matkv_model::{LanguageModel, Team};
use matkv_ring::{FromDecoder, Header, Hello, Side, Welcome};
use matkv_sys::{CrashPoint, Segment, connect_control, crash_point};
use matkv_telemetry::{names, service, trace};
use matkv_types::Fingerprint;

use crate::batch::{Batch, Limits, Turn};
use crate::error::DecoderError;

/// What a decoder brings to a session.
pub(crate) struct Decoder<'a> {
    pub model: &'a LanguageModel,
    pub fingerprint: Fingerprint,
    pub limits: Limits,
    pub stall: Duration,
    pub runtime: &'a std::path::Path,
    pub team: &'a Team,
    pub pulse: &'a Arc<Pulse>,
}

/// How long one attempt to find a loader takes before the stop flag is looked at.
const ATTEMPT: Duration = Duration::from_millis(500);
/// How long a loader may take to answer the opening.
const ANSWER: Duration = Duration::from_secs(10);
/// How often the watch looks.
const LOOK: Duration = Duration::from_millis(100);
/// How long the decode thread sleeps when nothing rings; a safety net, not a schedule.
const PARK: Duration = Duration::from_secs(1);

/// Runs one session. Returns false if there was no loader to talk to.
pub(crate) fn run(decoder: &Decoder<'_>, stop: &StopFlag) -> Result<bool, DecoderError> {
    decoder.pulse.rest();
    let connection = connect_control::<FromDecoder, Welcome>(decoder.runtime, ATTEMPT);
    let Ok((_, up, down)) = connection else { return Ok(false) };
    crash_point(CrashPoint::DecoderConnected);
    let shape = decoder.model.kv_shape();
    let hello = Hello::new(decoder.fingerprint, shape, decoder.limits.sequences as u32);
    if up.send(FromDecoder::Hello(hello)).is_err() {
        return Ok(false);
    }
    crash_point(CrashPoint::DecoderIntroduced);
    let Ok(welcome) = down.try_recv_timeout(ANSWER) else { return Ok(false) };
    let (epoch, name, geometry) = match welcome {
        Welcome::Accepted { epoch, segment, geometry } => (epoch, segment, geometry.checked()?),
        Welcome::Refused { reason } => return Err(DecoderError::Refused(reason)),
    };
    crash_point(CrashPoint::DecoderWelcomed);
    let segment = Segment::open(&name, geometry.segment_bytes())?;
    crash_point(CrashPoint::DecoderMapped);
    let region = segment.region();
    let header = Header::verify(region, geometry, decoder.fingerprint, epoch)?;
    crash_point(CrashPoint::DecoderVerified);
    let mut batch = Batch::new(decoder.model, region, &header, epoch, decoder.limits)?;
    if up.send(FromDecoder::Joined).is_err() {
        return Ok(true);
    }
    let size = matkv_config::format_bytes(region.len() as u64);
    tracing::info!("session {epoch}: {size} in {name}");
    service::status(&format!("session {epoch}"));
    // The session ends when the loader hangs up or this process is asked to stop.
    let ended = StopFlag::default();
    let bell = header.submission_bell()?;
    let (inner, ring) = (ended.clone(), bell.clone());
    let waker = stop.on_raise(move || {
        inner.raise();
        ring.ring();
    });
    let watch = SessionWatch::new(decoder, up, down, header, ended.clone());
    let watch = watch.start(move || bell.ring())?;
    let outcome = decoder.team.install(|| decode(&mut batch, &ended, decoder.pulse));
    ended.raise();
    // It holds the segment, which must go with the session.
    stop.forget(waker);
    drop(batch);
    // It sees the flag within a look; then this end of the channel is closed.
    let _ = watch.join();
    service::status("waiting for a loader");
    outcome.map(|()| true)
}

/// Decodes until the flag is raised.
fn decode(
    batch: &mut Batch<'_, LanguageModel>,
    ended: &StopFlag,
    pulse: &Pulse,
) -> Result<(), DecoderError> {
    let mut go_on = || {
        pulse.step();
        !ended.is_raised()
    };
    while go_on() {
        if batch.turn(&mut go_on)? == Turn::Idle {
            pulse.rest();
            if !batch.submissions().has_next() {
                batch.submissions().park(PARK);
            }
        }
    }
    Ok(())
}

/// Watches the loader's life, and shows it ours.
struct SessionWatch {
    up: IpcSender<FromDecoder>,
    down: IpcReceiver<Welcome>,
    header: Header,
    ended: StopFlag,
    own: Watch,
    loader: Stillness,
    stall: Duration,
    stalled: bool,
}

impl SessionWatch {
    fn new(
        decoder: &Decoder<'_>,
        up: IpcSender<FromDecoder>,
        down: IpcReceiver<Welcome>,
        header: Header,
        ended: StopFlag,
    ) -> Self {
        let own = Watch::new(decoder.stall, vec![("decode", Arc::clone(decoder.pulse))]);
        let (loader, stall) = (Stillness::default(), decoder.stall);
        Self { up, down, header, ended, own, loader, stall, stalled: false }
    }

    fn start(
        mut self,
        wake: impl Fn() + Send + 'static,
    ) -> Result<std::thread::JoinHandle<()>, DecoderError> {
        let run = move || {
            let mut last = Instant::now();
            while !self.ended.is_raised() {
                // The loader sends nothing more: anything but silence is a hang-up.
                match self.down.try_recv_timeout(LOOK) {
                    Ok(_) | Err(ipc_channel::TryRecvError::Empty) => {}
                    Err(_) => {
                        tracing::info!("the loader has hung up");
                        self.ended.raise();
                    }
                }
                let passed = last.elapsed();
                last = Instant::now();
                self.look(passed);
            }
            wake();
            // Dropping this end is what the loader sees as the end of the session.
            drop(self.up);
        };
        let thread = std::thread::Builder::new().name("watch".into());
        thread.spawn(run).map_err(|e| DecoderError::Threads(e.to_string()))
    }

    /// What has been recorded since the last look goes to the loader, if it wants it.
    fn trace(&self) {
        trace::set(self.header.trace());
        if self.stalled {
            // It does not read, and this thread must not wait for it.
            return;
        }
        let spans = trace::take();
        if !spans.is_empty() {
            // A loader that is gone needs no trace.
            let _ = self.up.send(FromDecoder::Spans(spans));
        }
    }

    /// A loader that stands still is its service manager's business: this process says so and
    /// goes on decoding what it has.
    fn look(&mut self, passed: Duration) {
        if self.own.look(passed).is_none() {
            self.header.beat(Side::Decoder);
        }
        self.trace();
        let still = self.loader.look(self.header.beats(Side::Loader), passed);
        if still > self.stall && !self.stalled {
            self.stalled = true;
            metrics::counter!(names::STALLS).increment(1);
            let text = format!("the loader has not moved for {}", format_duration(self.stall));
            tracing::warn!("{text}");
            service::status(&text);
        }
        if still.is_zero() && self.stalled {
            self.stalled = false;
            tracing::warn!("the loader moves again");
            service::status("the loader moves again");
        }
    }
}
