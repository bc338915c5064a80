//! Compiles the protocol without protoc and writes the descriptor set for reflection.

use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["matkv/v1/matkv.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?).join("matkv_descriptor.bin");
    std::fs::write(out, descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
