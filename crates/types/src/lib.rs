//! The words the whole system shares: identifiers, shapes, encodings, layout arithmetic.
//!
//! Not here: any input or output, any policy. Everything in this crate is a plain value.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod encoding;
mod float;
mod hash;
mod ids;
mod layout;
mod lists;
mod mode;
mod precision;
mod span;

pub use encoding::{Codec, Encoding, KvDtype, LayoutId, ParseEncodingError};
pub use float::{bf16_to_f32, f32_to_bf16};
pub use hash::LengthPrefixedHasher;
pub use ids::{ChunkId, ContentId, Digest, Fingerprint, ParseDigestError};
pub use layout::{GROUP_ROWS, KvLayout, KvShape, PAGE_BYTES, TILE_ROWS, align_up};
pub use lists::emptied;
pub use mode::{FinishReason, Mode, ParseModeError, Sampling, Share};
pub use precision::Precision;
pub use span::Span;
