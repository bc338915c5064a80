//! The arithmetic a model is computed with. Unlike an encoding it decides the bits of every row,
//! so it is part of a chunk's identity.

use std::fmt;
use std::str::FromStr;

use crate::encoding::{ParseEncodingError, by_name};

/// What the operands of matrix products and of attention are rounded to. Sums are f32 in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f32 operands: exact to the model's own quantization.
    Exact,
    /// bf16 operands; against int8 rows queries are bytes and weights 16-bit integers. Twice the
    /// peak, half the bytes.
    #[default]
    Bf16,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Self; 2] = [Self::Exact, Self::Bf16];

    /// Name in configuration and output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Precision {
    type Err = ParseEncodingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        by_name(text, &Self::ALL, Self::as_str)
    }
}
