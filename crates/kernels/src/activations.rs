//! Inputs of matrix products, in the type their precision multiplies.

use matkv_types::Precision;

use crate::lanes::{Lanes, to_bf16};

/// An element type activations or weights are stored in.
///
/// # Safety
/// `store` must write sixteen elements and nothing else.
pub(crate) unsafe trait Stored: Copy + Send + Sync + 'static {
    /// Stores sixteen values.
    unsafe fn store<L: Lanes>(p: *mut Self, v: L::V);
}

// SAFETY: sixteen f32.
unsafe impl Stored for f32 {
    #[inline(always)]
    unsafe fn store<L: Lanes>(p: *mut Self, v: L::V) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { L::store(p, v) }
    }
}

// SAFETY: sixteen u16.
unsafe impl Stored for u16 {
    #[inline(always)]
    unsafe fn store<L: Lanes>(p: *mut Self, v: L::V) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { L::store_bf16(p, v) }
    }
}

// SAFETY: sixteen i16.
unsafe impl Stored for i16 {
    #[inline(always)]
    unsafe fn store<L: Lanes>(p: *mut Self, v: L::V) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { L::store_i16(p, v) }
    }
}

/// Rows of activations. Whoever computes them rounds them where they are written, so that a
/// product never converts its input.
#[derive(Clone, Debug, PartialEq)]
pub enum Activations {
    /// For [`Precision::Exact`].
    F32(Vec<f32>),
    /// For [`Precision::Bf16`].
    Bf16(Vec<u16>),
}

/// Activations to be written.
pub enum ActivationsMut<'a> {
    /// f32.
    F32(&'a mut [f32]),
    /// bf16, rounded to nearest, ties to even.
    Bf16(&'a mut [u16]),
}

/// `len` elements that are written before they are read: in a debug build none of them is one that
/// was there before.
pub fn resize_unread<T: Copy>(x: &mut Vec<T>, len: usize, poison: T) {
    if cfg!(debug_assertions) {
        x.clear();
    }
    x.resize(len, poison);
}

impl Activations {
    /// `len` zeros.
    pub fn zeros(precision: Precision, len: usize) -> Self {
        match precision {
            Precision::Exact => Self::F32(vec![0.0; len]),
            Precision::Bf16 => Self::Bf16(vec![0; len]),
        }
    }

    /// Finite values, rounded to the precision's type.
    pub fn rounded(precision: Precision, values: &[f32]) -> Self {
        match precision {
            Precision::Exact => Self::F32(values.to_vec()),
            Precision::Bf16 => Self::Bf16(values.iter().map(|&x| to_bf16(x)).collect()),
        }
    }

    /// `len` elements of any value, to be written; memory is used again.
    pub fn resize(&mut self, len: usize) {
        match self {
            Self::F32(x) => resize_unread(x, len, f32::NAN),
            Self::Bf16(x) => resize_unread(x, len, u16::MAX),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, to be written.
    pub fn as_mut(&mut self) -> ActivationsMut<'_> {
        match self {
            Self::F32(x) => ActivationsMut::F32(x),
            Self::Bf16(x) => ActivationsMut::Bf16(x),
        }
    }
}

impl<'a> ActivationsMut<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `mid` elements and the others.
    ///
    /// # Panics
    /// If there are fewer than `mid`.
    pub fn split_at_mut(self, mid: usize) -> (Self, Self) {
        match self {
            Self::F32(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::F32(a), Self::F32(b))
            }
            Self::Bf16(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::Bf16(a), Self::Bf16(b))
            }
        }
    }
}
