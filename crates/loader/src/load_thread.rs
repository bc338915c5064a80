//! The `load` thread: the load machine between its channels and the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, TrySendError, select_biased};
use matkv_actors::{Pulse, StopFlag};
use matkv_sys::{ReadDone, ReadEngine, ReadRequest, SlotMut};
use matkv_types::ChunkId;

use crate::compile::{CompileJob, Compiled};
use crate::core::Core;
use crate::flash::{Unusable, open_chunk};
use crate::load::Load;
use crate::request::{Lease, Resident};
use crate::world::{LoadMessage, World};

/// How soon a request whose client has gone stops waiting for memory.
const SWEEP: Duration = Duration::from_millis(100);
/// With nothing waiting there is nothing to sweep.
const NOTHING_TO_SWEEP: Duration = Duration::from_secs(3600);

/// The device, the compute thread and the store.
pub(crate) struct Process {
    pub core: Arc<Core>,
    pub engine: Arc<dyn ReadEngine>,
    pub prefill: Sender<Box<Resident>>,
    pub compile: Sender<CompileJob>,
    pub background: Sender<CompileJob>,
    pub store: Sender<Lease>,
}

impl World for Process {
    fn read(
        &mut self,
        tag: u64,
        id: &ChunkId,
        len: usize,
        target: SlotMut,
    ) -> Result<(), (SlotMut, Unusable)> {
        match open_chunk(&self.core.files_of(id).path(id), len) {
            Ok(file) => {
                let file = Arc::new(file);
                self.engine.submit(ReadRequest { tag, file, len, target });
                Ok(())
            }
            Err(reason) => Err((target, reason)),
        }
    }

    fn compile(&mut self, job: CompileJob) {
        // The channel has a place for every load that can be under way.
        let _ = self.compile.send(job);
    }

    fn compile_in_background(&mut self, job: CompileJob) -> Result<(), CompileJob> {
        self.background.try_send(job).map_err(TrySendError::into_inner)
    }

    fn background_has_room(&self) -> bool {
        !self.background.is_full()
    }

    fn prefill(&mut self, resident: Resident) -> bool {
        self.prefill.send(Box::new(resident)).is_ok()
    }

    fn prefill_has_room(&self) -> bool {
        !self.prefill.is_full()
    }

    fn quarantine(&mut self, id: &ChunkId) {
        self.core.quarantine(id);
    }

    fn store_again(&mut self, chunk: Lease) {
        if let Err(TrySendError::Full(lease)) = self.store.try_send(chunk) {
            // It is recomputed, and stored, another time.
            tracing::debug!(
                "chunk {}: recomputed, not stored: the device is busy",
                lease.chunk().id()
            );
        }
    }
}

/// Recomputed chunks waiting for the device; each holds its slot.
pub(crate) const STORES_MAX: usize = 8;

/// The `store` thread: puts recomputed chunks back on flash, so that nobody waits for the device.
pub(crate) fn store(core: &Core, leases: &Receiver<Lease>, stopped: &Receiver<()>) {
    loop {
        let lease = select_biased! {
            recv(stopped) -> _ => return,
            recv(leases) -> lease => match lease {
                Ok(lease) => lease,
                Err(_) => return,
            },
        };
        let id = lease.chunk().id();
        let known = core.store.read().and_then(|r| r.chunk(&id));
        if !known.is_ok_and(|c| c.is_some()) && id != core.self_test.id {
            // Its document has been deleted meanwhile.
            continue;
        }
        if let Err(e) = core.files_of(&id).write(&id, lease.chunk().file()) {
            tracing::warn!("chunk {id}: recomputed, but not stored: {e}");
        }
    }
}

/// What the thread hears.
pub(crate) struct LoadChannels {
    pub messages: Receiver<LoadMessage>,
    pub reads: Receiver<ReadDone>,
    pub compiled: Receiver<Compiled>,
}

/// What has woken the thread.
enum Event {
    Read(ReadDone),
    Compiled(Compiled),
    Message(LoadMessage),
    /// Memory has been freed, a waiting client may have gone, or the flag is up.
    Look,
}

/// Runs until the flag is raised.
///
/// # Errors
/// If a thread it cannot do without is gone.
pub(crate) fn run(
    load: &mut Load<Process>,
    channels: &LoadChannels,
    resident: &AtomicU64,
    stop: &StopFlag,
    stopped: &Receiver<()>,
    pulse: &Pulse,
) -> Result<(), String> {
    let freed = load.world().core.arena.signals().clone();
    while !stop.is_raised() {
        let sweep = if load.has_waiting() { SWEEP } else { NOTHING_TO_SWEEP };
        pulse.rest();
        let event = select_biased! {
            recv(stopped) -> _ => Event::Look,
            recv(channels.reads) -> r => Event::Read(r.map_err(|_| "nobody reads any more")?),
            recv(channels.compiled) -> c => {
                Event::Compiled(c.map_err(|_| "nobody computes any more")?)
            }
            recv(freed) -> _ => Event::Look,
            recv(channels.messages) -> message => match message {
                Ok(message) => Event::Message(message),
                Err(_) => return Ok(()),
            },
            default(sweep) => Event::Look,
        };
        // Everything from here on is work: a device that hangs in it is seen by the watch.
        pulse.step();
        match event {
            Event::Read(done) => load.read_done(done),
            Event::Compiled(compiled) => load.compiled(compiled),
            Event::Message(message) => load.message(message),
            Event::Look => {}
        }
        load.pump();
        resident.store(load.resident() as u64, Ordering::Relaxed);
    }
    load.stop();
    Ok(())
}
