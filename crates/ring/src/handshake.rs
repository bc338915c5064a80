//! Messages of the control channel.

use matkv_types::{Fingerprint, KvShape, Span};
use serde::{Deserialize, Serialize};

use crate::geometry::{ABI_VERSION, Geometry};

/// B → A on the control channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromDecoder {
    /// First: who it is.
    Hello(Hello),
    /// In answer to a welcome: the segment is mapped and is what was agreed. Only now does the
    /// session begin; a decoder that dies before costs nobody a request.
    Joined,
    /// What it has recorded, while A traces.
    Spans(Vec<Span>),
}

/// B's introduction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Process id, since the channel does not tell.
    pub pid: u32,
    /// [`ABI_VERSION`] of B's build.
    pub abi: u64,
    /// [`Geometry::layout_hash`] of B's build.
    pub layout_hash: u64,
    /// Fingerprint of B's model and prefix.
    pub fingerprint: Fingerprint,
    /// KV shape of B's model.
    pub shape: KvShape,
    /// Sequences B decodes together.
    pub batch_size: u32,
}

/// A → B, in answer; the channel then stays open as a sign of life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Welcome {
    /// The session begins.
    Accepted {
        /// Session number.
        epoch: u64,
        /// Name of the segment.
        segment: String,
        /// Its geometry.
        geometry: Geometry,
    },
    /// The two do not fit; the reason names both values.
    Refused {
        /// Why.
        reason: String,
    },
}

impl Hello {
    /// The opening of this process.
    pub fn new(fingerprint: Fingerprint, shape: KvShape, batch_size: u32) -> Self {
        Self {
            pid: std::process::id(),
            abi: ABI_VERSION,
            layout_hash: Geometry::layout_hash(),
            fingerprint,
            shape,
            batch_size,
        }
    }

    /// Why this peer cannot be talked to, if it cannot.
    pub fn disagreement(&self, fingerprint: Fingerprint, shape: KvShape) -> Option<String> {
        let ours = Self { pid: self.pid, ..Self::new(fingerprint, shape, self.batch_size) };
        let differs = |what: &str, a: String, b: String| {
            (a != b).then(|| format!("{what}: the loader has {a}, the decoder {b}"))
        };
        differs("ABI version", ours.abi.to_string(), self.abi.to_string())
            .or_else(|| {
                let (a, b) = (ours.layout_hash, self.layout_hash);
                differs("segment layout", format!("{a:016x}"), format!("{b:016x}"))
            })
            .or_else(|| differs("KV shape", format!("{shape:?}"), format!("{:?}", self.shape)))
            .or_else(|| {
                let (a, b) = (fingerprint, self.fingerprint);
                differs("fingerprint", a.to_string(), b.to_string())
            })
    }
}

#[cfg(test)]
mod tests {
    use matkv_types::Digest;

    use super::*;

    #[test]
    fn a_disagreement_names_both_values() {
        let fp = |b| Fingerprint(Digest([b; 32]));
        let shape = KvShape { layers: 2, kv_heads: 1, head_dim: 64 };
        let hello = Hello::new(fp(1), shape, 8);
        assert_eq!(hello.disagreement(fp(1), shape), None);
        let reason = hello.disagreement(fp(2), shape).unwrap();
        assert!(reason.contains("0202") && reason.contains("0101"), "{reason}");
        let old = Hello { abi: 99, ..hello.clone() };
        assert!(old.disagreement(fp(1), shape).unwrap().contains("99"));
        let other = KvShape { layers: 3, ..shape };
        assert!(hello.disagreement(fp(1), other).unwrap().contains("layers: 3"));
    }
}
