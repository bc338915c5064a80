//! Where packed weights lie: in memory of this process, or in memory that others read too.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// What the first byte of shared weights is aligned to.
pub const SHARED_ALIGN: usize = 64;

/// A range of bytes that others read too and that never change, such as a mapped file.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// A range of what `owner` holds; none if it is outside or not aligned to [`SHARED_ALIGN`].
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Option<Self> {
        let bytes = (*owner).as_ref().get(range.clone())?;
        let aligned = bytes.as_ptr().addr().is_multiple_of(SHARED_ALIGN);
        aligned.then_some(Self { owner, range })
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

/// Numbers of which every pattern of bits is one.
///
/// # Safety
/// No padding, no invalid patterns.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: a number.
unsafe impl Plain for u8 {}
// SAFETY: a number.
unsafe impl Plain for u16 {}
// SAFETY: a number.
unsafe impl Plain for f32 {}

/// Elements of packed weights.
pub(crate) enum Storage<T> {
    Owned(Vec<T>),
    Shared(SharedBytes),
}

impl<T: Plain> Storage<T> {
    /// Exactly `len` elements in shared memory, in this machine's byte order.
    pub fn shared(bytes: SharedBytes, len: usize) -> Option<Self> {
        (bytes.len() == len * size_of::<T>()).then_some(Self::Shared(bytes))
    }

    /// What is written to a file that is to be shared.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: numbers without padding.
        let (head, bytes, tail) = unsafe { self.align_to::<u8>() };
        debug_assert!(head.is_empty() && tail.is_empty());
        bytes
    }
}

impl<T: Plain> Deref for Storage<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = match self {
            Self::Owned(elements) => return elements,
            Self::Shared(bytes) => bytes,
        };
        // SAFETY: every pattern of bits is a number.
        let (head, elements, tail) = unsafe { bytes.align_to::<T>() };
        assert!(head.is_empty() && tail.is_empty(), "shared weights have moved");
        elements
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Aligned([u8; 256]);

    impl AsRef<[u8]> for Aligned {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    #[test]
    fn shared_bytes_are_inside_and_aligned() {
        let mut bytes = Aligned([0; 256]);
        bytes.0[64..68].copy_from_slice(&1.5f32.to_ne_bytes());
        let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(bytes);
        let range = |range| SharedBytes::new(Arc::clone(&owner), range);
        assert!(range(64..257).is_none() && range(32..64).is_none());
        let two = Storage::<f32>::shared(range(64..72).unwrap(), 2).unwrap();
        assert_eq!((&*two, two.as_bytes().len()), (&[1.5f32, 0.0][..], 8));
        assert!(Storage::<f32>::shared(range(64..72).unwrap(), 3).is_none());
    }
}
