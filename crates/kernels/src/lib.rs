//! CPU kernels: attention over KV segments, packed matrix products, pointwise steps.
//!
//! One rule holds for every function here: a row's bits depend on that row alone, not on its
//! batch neighbours, the number of threads or the instruction set. It holds by construction:
//! each output element is one chain of fused multiply-adds in a fixed order, sums are reduced
//! over sixteen lanes in one fixed tree, and context is cut into blocks by row number. AVX-512,
//! AVX2 and the portable version therefore agree bit for bit (`tests/agree.rs`), and all of them
//! are compared with the plain f64 code in [`reference`].
//!
//! Unsafe lives here because of SIMD loads over packed memory. Which thread calls does not
//! matter; parallel sections run on the caller's rayon pool.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod attention;
mod block;
mod elem;
mod gemm;
mod isa;
mod lanes;
mod lanes_avx2;
mod lanes_avx512;
mod micro;
mod pointwise;
pub mod reference;
mod rope;
mod rows;

pub use attention::{AttentionJob, SegmentView, attend};
pub use gemm::{PackedMatrix, gemm};
pub use isa::Isa;
pub use pointwise::{add_assign, rms_norm, silu_mul};
pub use rope::{RopeAngles, RopeStyle, RotaryEmbedding, rotate_heads};
pub use rows::{read_k, read_v, write_rows};
