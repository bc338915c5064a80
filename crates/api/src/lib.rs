//! The protocol `matkv.v1` and a client for it.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod client;

/// Generated code of `matkv.v1`.
#[allow(clippy::all, reason = "generated code")]
pub mod v1 {
    tonic::include_proto!("matkv.v1");
}

/// Descriptor set, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/matkv_descriptor.bin"));

/// Bytes of a part of a document; well under gRPC's message limit of 4 MiB.
pub const PART_BYTES: usize = 1 << 20;

pub use client::{AdminClient, Client, ConnectError, connect, connect_admin};
