//! What a request asks for: reuse mode, sampling, and how it ended.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A share of rows, in ten-thousandths: modes are compared and printed exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Share(u16);

impl Share {
    /// The nearest share; none if it is not in 0…1.
    pub fn new(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then(|| Self((share * 10_000.0).round() as u16))
    }

    /// How many of so many, to the nearest.
    pub const fn of(self, count: usize) -> usize {
        (count * self.0 as usize + 5_000) / 10_000
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 10_000.0)
    }
}

impl FromStr for Share {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        text.parse().ok().and_then(Self::new).ok_or(())
    }
}

/// How the KV of a prompt's chunks is obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Full prefill of every token: the reference.
    Vanilla,
    /// Stored rows of the first chunk only, which are those of a full prefill.
    Exact,
    /// Stored rows, with the first `n` rows of every chunk after the first recomputed.
    /// `Linked(0)` is `independent`.
    Linked(u32),
    /// As `Linked(link)`, with the share of the chunks' other rows that the question attends to
    /// most recomputed as well.
    Focused {
        /// Of the rows of chunks after the first that are not link tokens.
        share: Share,
        /// Rows at the start of every chunk after the first.
        link: u32,
    },
}

/// Why a mode could not be read from text.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "unknown mode {found:?}: use \"matkv\" (the configured reuse), \"vanilla\", \"exact\", \
     \"independent\", \"linked\", \"linked(N)\", \"focused(R)\" or \"focused(R,N)\", R in 0…1"
)]
pub struct ParseModeError {
    /// The text that was given.
    pub found: String,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vanilla => f.write_str("vanilla"),
            Self::Exact => f.write_str("exact"),
            Self::Linked(0) => f.write_str("independent"),
            Self::Linked(n) => write!(f, "linked({n})"),
            Self::Focused { share, link } => write!(f, "focused({share},{link})"),
        }
    }
}

impl Mode {
    /// Reads a mode; one that does not say how many link tokens it has gets `link_tokens`.
    ///
    /// # Errors
    /// If it is not one.
    pub fn parse(text: &str, link_tokens: u32) -> Result<Self, ParseModeError> {
        let inside = |name: &str| text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')');
        let known = match text {
            "vanilla" => Some(Self::Vanilla),
            "exact" => Some(Self::Exact),
            "independent" => Some(Self::Linked(0)),
            "linked" => Some(Self::Linked(link_tokens)),
            _ => None,
        };
        let linked = || inside("linked")?.parse().ok().map(Self::Linked);
        let focused = || {
            let inside = inside("focused")?;
            let (share, link) = match inside.split_once(',') {
                Some((share, link)) => (share.trim(), link.trim().parse().ok()?),
                None => (inside, link_tokens),
            };
            Some(Self::Focused { share: share.parse().ok()?, link })
        };
        known
            .or_else(linked)
            .or_else(focused)
            .ok_or_else(|| ParseModeError { found: text.to_owned() })
    }

    /// Whether stored rows of the chunk at this place of the prompt are read.
    pub const fn reads(self, chunk: usize) -> bool {
        match self {
            Self::Vanilla => false,
            Self::Exact => chunk == 0,
            Self::Linked(_) | Self::Focused { .. } => true,
        }
    }
}

/// How the next token is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus: the smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// The draw at step `n` depends on `(seed, n)` only, so a replay draws the same tokens.
    pub seed: u64,
    /// Upper bound of generated tokens.
    pub max_new_tokens: u32,
    /// Generation ends before the first of these texts.
    pub stop: Vec<String>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0, max_new_tokens: 128, stop: Vec::new() }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model's end-of-text token, or a stop string.
    Stop,
    /// `max_new_tokens` reached.
    Length,
    /// The client went away.
    Cancelled,
    /// The decoder could not go on.
    Failed,
}

impl FinishReason {
    /// Number in descriptors.
    pub const fn code(self) -> u32 {
        match self {
            Self::Stop => 1,
            Self::Length => 2,
            Self::Cancelled => 3,
            Self::Failed => 4,
        }
    }

    /// Inverse of [`Self::code`].
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Stop),
            2 => Some(Self::Length),
            3 => Some(Self::Cancelled),
            4 => Some(Self::Failed),
            _ => None,
        }
    }

    /// Word in the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_round_trip() {
        let share = |x| Share::new(x).unwrap();
        for mode in [
            Mode::Vanilla,
            Mode::Exact,
            Mode::Linked(0),
            Mode::Linked(32),
            Mode::Focused { share: share(0.125), link: 16 },
            Mode::Focused { share: share(1.0), link: 0 },
        ] {
            assert_eq!(Mode::parse(&mode.to_string(), 99), Ok(mode));
        }
        assert_eq!(Mode::parse("linked", 7), Ok(Mode::Linked(7)));
        let focused = Mode::Focused { share: share(0.1), link: 7 };
        assert_eq!(Mode::parse("focused(0.1)", 7), Ok(focused));
        assert_eq!(Mode::parse("focused(0.1, 7)", 9), Ok(focused));
        for text in [
            "",
            "linked(x)",
            "linked(-1)",
            "linked(1",
            "focused()",
            "focused(1.1)",
            "focused(-0.1)",
            "focused(NaN)",
            "focused(0.1,)",
            "focused(0.1,2,3)",
            "focused",
            "exact()",
        ] {
            assert!(Mode::parse(text, 32).is_err(), "{text:?}");
        }
    }

    #[test]
    fn shares_round_to_the_nearest() {
        let share = |x| Share::new(x).unwrap();
        assert_eq!((share(0.1).of(64), share(0.1).of(4), share(0.15).of(10)), (6, 0, 2));
        assert_eq!((share(0.0).of(1000), share(1.0).of(1000)), (0, 1000));
    }
}
