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
//! matter; parallel sections run on the [`team`] it has installed.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod activations;
mod ahead;
mod attention;
mod block;
mod gemm;
mod isa;
mod lanes;
mod lanes_avx2;
mod lanes_avx512;
mod micro;
mod packed;
mod peak;
mod pointwise;
mod product;
mod quant;
mod quantize;
pub mod reference;
mod rope;
mod rows;
mod scores;
mod softmax;
mod storage;
pub mod team;
mod totals;
mod values;

pub use activations::{Activations, ActivationsMut, resize_unread};
pub use attention::{
    Attention, AttentionJob, LayerInput, Layers, PlanMemory, Section, SegmentView, query_scale,
};
pub use block::HEAD_DIM_MAX;
pub use gemm::{gemm, gemm_add, gemm_gated};
pub use isa::Isa;
pub use packed::PackedMatrix;
pub use peak::peak_flops;
pub use pointwise::{gelu, layer_norm, rms_norm};
pub use quant::{
    QUANT_BLOCK, QuantKind, QuantMatrix, QuantRows, gate_rows, quant_gemm, quant_gemm_add,
};
pub use rope::{RopeAngles, RopeStyle, RotaryEmbedding, rotate_heads};
pub use rows::{NewRows, append_rows, read_k, read_v, write_rows};
pub use storage::{SHARED_ALIGN, SharedBytes};
