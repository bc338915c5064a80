//! Memory for files on their way: those that are not in the form attention reads.
//!
//! Fresh pages cost about as much as reading a file into them, so the same ones are used again and
//! again. There is a bound: loads beyond it wait for memory, not for the system to give more.

use std::sync::Arc;

use matkv_sys::{Region, SlotMut};

/// Enough to keep a device busy while as much is decoded; a larger file still gets its memory when
/// nothing else is under way.
const BYTES_MAX: usize = 64 << 20;
/// So that chunks of about the same length use the same memory.
const GRAIN: usize = 1 << 20;

/// Regions that are lent; whatever happens to a borrower, its memory comes back when the handle
/// goes.
#[derive(Default)]
pub(crate) struct Staging {
    regions: Vec<Arc<Region>>,
}

impl Staging {
    /// Memory of exactly `len` bytes; none if what there may be is in use.
    pub fn take(&mut self, len: usize) -> Option<SlotMut> {
        let fits = self.regions.iter().filter(|r| r.len() >= len);
        if let Some(slot) = fits.into_iter().find_map(|r| r.exclusive(0..len).ok()) {
            return Some(slot);
        }
        let new = len.next_multiple_of(GRAIN);
        // What is too small, and not in use, goes first.
        while self.bytes() + new > BYTES_MAX {
            let free = |r: &Arc<Region>| r.exclusive(0..r.len()).is_ok();
            match self.regions.iter().position(free) {
                Some(i) => drop(self.regions.swap_remove(i)),
                None if self.regions.is_empty() => break,
                None => return None,
            }
        }
        let region = Region::anonymous(new);
        let slot = region.exclusive(0..len).ok();
        self.regions.push(region);
        slot
    }

    fn bytes(&self) -> usize {
        self.regions.iter().map(|r| r.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_and_is_used_again() {
        let mut staging = Staging::default();
        let first = staging.take(5 << 20).expect("there is room");
        let at = first.as_ptr();
        let second = staging.take(5 << 20).expect("there is room");
        assert_ne!(second.as_ptr(), at);
        drop(first);
        let again = staging.take((5 << 20) - 4096).expect("there is room");
        assert_eq!((again.as_ptr(), again.len()), (at, (5 << 20) - 4096));
        assert_eq!(staging.regions.len(), 2);
    }

    #[test]
    fn there_is_a_bound() {
        let mut staging = Staging::default();
        let lent: Vec<SlotMut> = std::iter::from_fn(|| staging.take(20 << 20)).collect();
        assert_eq!(lent.len(), 3);
        assert!(staging.take(5 << 20).is_none());
        assert!(staging.take(4 << 20).is_some(), "that much is left");
        drop(lent);
        // Small ones make way for a large one, and one that is too large comes alone.
        assert!(staging.take(60 << 20).is_some());
        assert!(staging.bytes() <= BYTES_MAX);
        let huge = staging.take(100 << 20).expect("it is alone");
        assert!(staging.take(4096).is_none());
        drop(huge);
        assert!(staging.take(4096).is_some());
    }
}
