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
mod queue;
mod record;
mod sequence;

pub use alloc::{ExtentAllocator, size_class};
pub use descriptor::{AllegedDescriptor, Completion, DescriptorError, Submission};
pub use geometry::{ABI_VERSION, Geometry, GeometryError, Header};
pub use handshake::{Hello, Welcome};
pub use queue::{Consumer, DESCRIPTOR_WORDS, Producer, QueueError, ring_words};
pub use record::{RecordError, SegmentRecord, SequenceRecord, SlotRecord};
pub use sequence::{SequenceControl, TokenLog, control_words};
