//! The one layer that touches the operating system: shared memory, futexes, pidfds, io_uring,
//! O_DIRECT files, locks.
//!
//! Unsafe lives here. Above this crate, memory of a segment is reached only through handles:
//! [`SlotMut`] (exclusive), [`SlotRef`] (read-only, from a read-only mapping) and [`Words`]
//! (atomics). The region's ledger refuses a handle that would alias another one in this process;
//! between the processes, the lease protocol of the `ring` crate does.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod clock;
mod control;
mod cores;
mod crash;
mod doorbell;
mod error;
mod fault;
mod files;
mod huge;
mod lmdb;
mod mapping;
mod pidfd;
mod pread;
mod process;
mod reader;
mod region;
mod segment;
mod uring;

pub use clock::monotonic_ns;
pub use control::{ControlListener, ControlName, connect_control};
pub use cores::{bind_thread, check_cores};
pub use crash::{CrashPoint, crash_point};
pub use doorbell::Doorbell;
pub use error::{Result, SysError};
pub use fault::{Fault, fault};
pub use files::{
    DirectFile, FileLock, evict_page_cache, free_bytes, sync_directory, write_atomically,
};
pub use huge::shared_memory_pages;
pub use lmdb::open_environment;
pub use mapping::{FileMapping, trim_heap};
pub use pidfd::PidFd;
pub use pread::PreadPool;
pub use process::{die_with_parent, let_others_go_first, terminate, terminate_and_wait};
pub use reader::{
    EngineKind, EngineOptions, REQUESTS_MAX, ReadDone, ReadEngine, ReadPart, ReadRequest,
    open_engine,
};
pub use region::{Region, SlotMut, SlotRef, Words};
pub use segment::{Segment, shared_memory_bytes};
pub use uring::UringReader;
