//! What the two processes agree on: segment geometry, rings, descriptors, the sequence record in
//! a sequence's own slot, the slot allocator, and the handshake's messages.
//!
//! Safe code over atomics; the memory comes from `sys`. `docs/ring.md` is the contract.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod alloc;
mod descriptor;
mod geometry;
mod handshake;
mod memory;
mod queue;
mod record;
mod sequence;

pub use alloc::{ExtentAllocator, size_class};
pub use descriptor::{AllegedDescriptor, Completion, DescriptorError, Submission};
pub use geometry::{ABI_VERSION, Geometry, GeometryError, Header, Side};
pub use handshake::{FromDecoder, Hello, Welcome};
pub use memory::{Bell, Memory};
pub use queue::{Consumer, DESCRIPTOR_WORDS, Producer, QueueError, ring_words};
pub use record::{RecordError, SegmentRecord, SequenceRecord, SlotRecord};
pub use sequence::{SequenceControl, TokenLog, control_words};

/// Places of the words that order the others, for the models.
pub mod layout {
    pub use crate::queue::{FIRST, HEAD, PARKED, TAIL};
    pub use crate::sequence::{CANCEL, COUNT, NOTIFIED};
}
