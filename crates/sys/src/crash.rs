//! Steps at which a process of a debug build can be made to die, for the crash matrix.
//!
//! A test writes the name of a step, and the process it is meant for, into the file named by
//! `MATKV_CRASH_FILE`. The first time that process passes the step it takes the file away and
//! kills itself: no destructor runs, nothing is flushed, as after `kill -9`. With `panic` after the
//! step, it panics there instead. In a release build there is nothing of this.

macro_rules! steps {
    ($($name:ident $text:literal,)*) => {
        /// A step of the protocol, just after what its name says.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum CrashPoint {
            $(#[doc = $text] $name,)*
        }

        impl CrashPoint {
            /// Every step, in the order of the protocol; a step's number is its place here.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Phase and step.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

steps! {
    LoaderPublishedName "handshake.name-published",
    LoaderAccepted "handshake.accepted",
    LoaderHeard "handshake.hello-received",
    LoaderEpochBegun "handshake.epoch-begun",
    LoaderWelcomed "handshake.welcome-sent",
    LoaderSessionBegun "handshake.session-begun",
    DecoderConnected "handshake.connected",
    DecoderIntroduced "handshake.hello-sent",
    DecoderWelcomed "handshake.welcome-received",
    DecoderMapped "handshake.segment-mapped",
    DecoderVerified "handshake.header-verified",
    LoadPlanned "load.planned",
    LoadSubmitted "load.submitted",
    LoadRead "load.read",
    LoadResident "load.resident",
    LoadHandedOn "load.handed-on",
    PrefillComputed "publish.prefilled",
    PublishFilled "publish.filled",
    RingWritten "ring.descriptors-written",
    RingStored "ring.tail-stored",
    PublishDone "publish.published",
    RingCopied "ring.descriptor-copied",
    RingFreed "ring.head-stored",
    ClaimBorrowed "claim.slots-borrowed",
    DecodeBegun "decode.begun",
    DecodeComputed "decode.computed",
    DecodeAppended "decode.appended",
    DecodeNotified "decode.notified",
    CompleteAcknowledged "decode.acknowledged",
    ReleaseDropped "release.slots-let-go",
    ReleasePosted "release.finished-posted",
    ReleaseReceived "release.finished-received",
    ReleaseFreed "release.slots-freed",
    IngestSynced "ingest.temp-synced",
    IngestRenamed "ingest.renamed",
    IngestWritten "ingest.chunk-durable",
    IngestCommitted "ingest.committed",
}

/// Dies here if this step of this process has been asked for.
#[inline(always)]
pub fn crash_point(point: CrashPoint) {
    #[cfg(debug_assertions)]
    debug::look(point);
    #[cfg(not(debug_assertions))]
    let _ = point;
}

#[cfg(debug_assertions)]
mod debug {
    use std::path::PathBuf;
    use std::sync::OnceLock;

    use super::CrashPoint;

    /// Environment variable that names the file.
    const VARIABLE: &str = "MATKV_CRASH_FILE";

    pub fn look(point: CrashPoint) {
        static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
        let file = FILE.get_or_init(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        let Some(file) = file else { return };
        let Ok(asked) = std::fs::read_to_string(file) else { return };
        let mut words = asked.split_whitespace();
        let (Some(program), Some(step)) = (words.next(), words.next()) else { return };
        let own = std::env::current_exe().unwrap_or_default();
        // Whoever takes the file away dies, and only that one.
        if step == point.name() && own.ends_with(program) && std::fs::remove_file(file).is_ok() {
            if words.next() == Some("panic") {
                panic!("asked to at {step}");
            }
            eprintln!("dies at {step}");
            if let Ok(pidfd) = crate::PidFd::open(std::process::id()) {
                pidfd.kill();
            }
            std::process::abort();
        }
    }
}
