//! What a request asks for: reuse mode, sampling, and how it ended.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How the KV of a prompt's chunks is obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Full prefill of every token: the reference.
    Vanilla,
    /// Stored rows, with the first `n` rows of every chunk after the first recomputed.
    /// `Linked(0)` is `independent`.
    Linked(u32),
}

/// Why a mode could not be read from text.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "unknown mode {found:?}: use \"vanilla\", \"matkv\" (the configured reuse), \
     \"independent\" or \"linked(N)\""
)]
pub struct ParseModeError {
    /// The text that was given.
    pub found: String,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vanilla => f.write_str("vanilla"),
            Self::Linked(0) => f.write_str("independent"),
            Self::Linked(n) => write!(f, "linked({n})"),
        }
    }
}

impl FromStr for Mode {
    type Err = ParseModeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let err = || ParseModeError { found: text.to_owned() };
        match text {
            "vanilla" => Ok(Self::Vanilla),
            "independent" => Ok(Self::Linked(0)),
            _ => {
                let n = text.strip_prefix("linked(").and_then(|t| t.strip_suffix(')'));
                n.ok_or_else(err)?.parse().map(Self::Linked).map_err(|_| err())
            }
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
        for mode in [Mode::Vanilla, Mode::Linked(0), Mode::Linked(32)] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("linked(x)".parse::<Mode>().is_err());
        assert!("".parse::<Mode>().is_err());
    }
}
