//! A session with a loader: handshake, decode loop, and the watch over the loader's life.

use std::time::Duration;

use ipc_channel::ipc::{IpcReceiver, IpcSender};
use matkv_actors::StopFlag;
use matkv_model::LanguageModel;
use matkv_ring::{Header, Hello, Welcome};
use matkv_sys::{CrashPoint, Segment, connect_control, crash_point};
use matkv_types::Fingerprint;

use crate::batch::Batch;
use crate::error::DecoderError;

/// What a decoder brings to a session.
pub(crate) struct Side<'a> {
    pub model: &'a LanguageModel,
    pub fingerprint: Fingerprint,
    pub batch_size: usize,
    pub runtime: &'a std::path::Path,
    pub pool: &'a rayon::ThreadPool,
}

/// How long one attempt to find a loader takes before the stop flag is looked at.
const ATTEMPT: Duration = Duration::from_millis(500);
/// How long a loader may take to answer the opening; it may be compiling its prefix.
const ANSWER: Duration = Duration::from_secs(60);

/// Runs one session. Returns false if there was no loader to talk to.
pub(crate) fn run(side: &Side<'_>, stop: &StopFlag) -> Result<bool, DecoderError> {
    let connection = connect_control::<Hello, Welcome>(side.runtime, ATTEMPT);
    let Ok((_, up, down)) = connection else { return Ok(false) };
    crash_point(CrashPoint::DecoderConnected);
    let shape = side.model.kv_shape();
    let hello = Hello::new(side.fingerprint, shape, side.batch_size as u32);
    if up.send(hello).is_err() {
        return Ok(false);
    }
    crash_point(CrashPoint::DecoderIntroduced);
    let Ok(welcome) = down.try_recv_timeout(ANSWER) else { return Ok(false) };
    let (epoch, name, geometry) = match welcome {
        Welcome::Accepted { epoch, segment, geometry } => (epoch, segment, geometry),
        Welcome::Refused { reason } => return Err(DecoderError::Refused(reason)),
    };
    crash_point(CrashPoint::DecoderWelcomed);
    let segment = Segment::open(&name, geometry.segment_bytes())?;
    crash_point(CrashPoint::DecoderMapped);
    let region = segment.region();
    let header = Header::verify(region, geometry, side.fingerprint, epoch)?;
    crash_point(CrashPoint::DecoderVerified);
    let mut batch = Batch::new(side.model, region, &header, epoch, side.batch_size)?;
    tracing::info!(
        "session {epoch}: {} in {name}",
        matkv_config::format_bytes(region.len() as u64)
    );
    // The session ends when the loader hangs up or this process is asked to stop.
    let ended = StopFlag::default();
    let bell = header.submission_bell()?;
    let (outer, inner, ring) = (stop.clone(), ended.clone(), bell.clone());
    let waker = outer.on_raise(move || {
        inner.raise();
        ring.ring();
    });
    let watch = watch(up, down, ended.clone(), move || bell.ring())?;
    let outcome = side.pool.install(|| batch.run(&ended));
    ended.raise();
    // It holds the segment, which must go with the session.
    stop.forget(waker);
    drop(batch);
    // The watch thread ends at the loader's hang-up, or with the process.
    drop(watch);
    outcome.map(|()| true)
}

/// Blocks on the control channel: the loader sends nothing more, so a return is a hang-up.
fn watch(
    up: IpcSender<Hello>,
    down: IpcReceiver<Welcome>,
    ended: StopFlag,
    wake: impl Fn() + Send + 'static,
) -> Result<std::thread::JoinHandle<()>, DecoderError> {
    std::thread::Builder::new()
        .name("watch".into())
        .spawn(move || {
            while !ended.is_raised() {
                match down.try_recv_timeout(Duration::from_millis(200)) {
                    Ok(_) | Err(ipc_channel::TryRecvError::Empty) => {}
                    Err(_) => {
                        tracing::info!("the loader has hung up");
                        ended.raise();
                    }
                }
            }
            wake();
            // Dropping this end is what the loader sees as the end of the session.
            drop(up);
        })
        .map_err(|e| DecoderError::Threads(e.to_string()))
}
