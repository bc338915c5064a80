//! The opening messages: a peer that differs in anything that counts is told so with both values,
//! and bytes that are no message are an error.
#![no_main]

use arbitrary::Arbitrary;
use ipc_channel::ipc::IpcMessage;
use libfuzzer_sys::fuzz_target;
use matkv_ring::{FromDecoder, Geometry, Hello, Welcome};
use matkv_types::{Digest, Fingerprint, KvShape};
use serde::{Deserialize, Serialize};

#[derive(Arbitrary, Debug)]
struct Input {
    fingerprint: [u8; 32],
    shape: Shape,
    hello: Alleged,
    welcome: Answer,
    /// Messages as they are, or with these bytes written over.
    edits: Vec<(u8, u8)>,
    bytes: Vec<u8>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Shape {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// A part that is absent is the same as ours.
#[derive(Arbitrary, Debug)]
struct Alleged {
    pid: u32,
    abi: Option<u64>,
    layout_hash: Option<u64>,
    fingerprint: Option<Other>,
    shape: Option<Shape>,
    batch_size: u32,
}

#[derive(Arbitrary, Debug)]
enum Other {
    Any([u8; 32]),
    /// Nearly ours.
    Flip {
        at: u8,
        bit: u8,
    },
}

#[derive(Arbitrary, Debug)]
enum Answer {
    Accepted { epoch: u64, segment: String, arena_start: usize, arena_bytes: usize },
    Refused { reason: String },
}

fn shape(shape: Shape) -> KvShape {
    let Shape { layers, kv_heads, head_dim } = shape;
    KvShape { layers, kv_heads, head_dim }
}

fn hello(input: &Input) -> Hello {
    let alleged = &input.hello;
    let ours = Fingerprint(Digest(input.fingerprint));
    let mut hello = Hello::new(ours, shape(input.shape), alleged.batch_size);
    hello.pid = alleged.pid;
    hello.abi = alleged.abi.unwrap_or(hello.abi);
    hello.layout_hash = alleged.layout_hash.unwrap_or(hello.layout_hash);
    hello.shape = alleged.shape.map_or(hello.shape, shape);
    match alleged.fingerprint {
        Some(Other::Any(bytes)) => hello.fingerprint = Fingerprint(Digest(bytes)),
        Some(Other::Flip { at, bit }) => {
            hello.fingerprint.0.0[usize::from(at % 32)] ^= 1 << (bit % 8);
        }
        None => {}
    }
    hello
}

/// Each compared part as a reader would write it: ours, and the peer's.
fn parts(ours: &Hello, theirs: &Hello) -> [(String, String); 4] {
    let both = |text: fn(&Hello) -> String| (text(ours), text(theirs));
    [
        both(|h| h.abi.to_string()),
        both(|h| format!("{:016x}", h.layout_hash)),
        both(|h| format!("{:?}", h.shape)),
        both(|h| h.fingerprint.to_string()),
    ]
}

fn check_disagreement(theirs: &Hello, fingerprint: Fingerprint, shape: KvShape) {
    let ours = Hello::new(fingerprint, shape, theirs.batch_size);
    let agree = ours.abi == theirs.abi
        && ours.layout_hash == theirs.layout_hash
        && ours.shape == theirs.shape
        && ours.fingerprint == theirs.fingerprint;
    match theirs.disagreement(fingerprint, shape) {
        None => assert!(agree, "{theirs:?} passed for {ours:?}"),
        Some(reason) => {
            assert!(!agree, "{reason}");
            let named = parts(&ours, theirs)
                .iter()
                .any(|(a, b)| a != b && reason.contains(a) && reason.contains(b));
            assert!(named, "{reason:?} does not name both values");
        }
    }
}

/// Reads bytes as the channel does. What can be read can be sent again and is the same then.
fn read<T>(bytes: &[u8]) -> Option<T>
where
    T: Serialize + for<'de> Deserialize<'de> + PartialEq + std::fmt::Debug,
{
    let message: T = IpcMessage::from_data(bytes.to_vec()).to().ok()?;
    let again = postcard::to_stdvec(&message).expect("a message can be written");
    assert_eq!(IpcMessage::from_data(again).to::<T>().ok().as_ref(), Some(&message));
    Some(message)
}

fn check_welcome(welcome: &Welcome) {
    // The decoder's next step is to check the geometry, and then to map that many bytes.
    if let Welcome::Accepted { geometry, .. } = welcome
        && let Ok(geometry) = geometry.checked()
    {
        let bytes = geometry.segment_bytes();
        assert!(bytes >= geometry.arena_start && bytes >= geometry.arena_bytes, "{geometry:?}");
    }
}

fn check_bytes(bytes: &[u8], fingerprint: Fingerprint, shape: KvShape) {
    if let Some(hello) = read::<Hello>(bytes) {
        check_disagreement(&hello, fingerprint, shape);
    }
    if let Some(FromDecoder::Hello(hello)) = read::<FromDecoder>(bytes) {
        check_disagreement(&hello, fingerprint, shape);
    }
    if let Some(welcome) = read::<Welcome>(bytes) {
        check_welcome(&welcome);
    }
}

fn edited(mut bytes: Vec<u8>, edits: &[(u8, u8)]) -> Vec<u8> {
    for &(at, value) in edits {
        let at = usize::from(at) % bytes.len();
        bytes[at] = value;
    }
    bytes
}

fuzz_target!(|input: Input| {
    let (fingerprint, shape) = (Fingerprint(Digest(input.fingerprint)), shape(input.shape));
    let hello = hello(&input);
    check_disagreement(&hello, fingerprint, shape);
    let sent = postcard::to_stdvec(&hello).expect("a message can be written");
    assert_eq!(read::<Hello>(&sent).as_ref(), Some(&hello));
    check_bytes(&edited(sent, &input.edits), fingerprint, shape);

    for message in [FromDecoder::Hello(hello), FromDecoder::Joined] {
        let sent = postcard::to_stdvec(&message).expect("a message can be written");
        assert_eq!(read::<FromDecoder>(&sent).as_ref(), Some(&message));
        check_bytes(&edited(sent, &input.edits), fingerprint, shape);
    }

    let welcome = match input.welcome {
        Answer::Accepted { epoch, segment, arena_start, arena_bytes } => {
            let geometry = Geometry { arena_start, arena_bytes };
            Welcome::Accepted { epoch, segment, geometry }
        }
        Answer::Refused { reason } => Welcome::Refused { reason },
    };
    let sent = postcard::to_stdvec(&welcome).expect("a message can be written");
    assert_eq!(read::<Welcome>(&sent).as_ref(), Some(&welcome));
    check_bytes(&edited(sent, &input.edits), fingerprint, shape);

    check_bytes(&input.bytes, fingerprint, shape);
});
