//! The arena's allocator: extents in size classes, best fit, merged when freed.
//!
//! Sizes are rounded up to eight classes per power of two, so a slot wastes at most 1/8 of
//! itself. Free extents are merged with their neighbours at once. What best fit cannot prevent is
//! external fragmentation: with slots of sizes between m and M pinned at the worst places, an
//! allocation of M can fail while more than half of the arena is free (Robson 1974 bounds the
//! arena needed by `M · log2(M / m) / 2` times the live bytes). It resolves itself:
//! unpinned slots are evicted until a hole fits, pins end with their requests, and a request whose
//! own pins are in the way has its chunks moved together.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use matkv_types::{PAGE_BYTES, align_up};

/// Bytes a slot of `len` bytes occupies.
pub fn size_class(len: usize) -> usize {
    let len = align_up(len.max(1), PAGE_BYTES);
    let step = (len.next_power_of_two() / 16).max(PAGE_BYTES);
    align_up(len, step)
}

/// Free and used extents of one range.
#[derive(Debug)]
pub struct ExtentAllocator {
    /// Free extents by start.
    by_start: BTreeMap<usize, usize>,
    /// The same, by length.
    by_len: BTreeSet<(usize, usize)>,
    used: BTreeMap<usize, usize>,
    capacity: usize,
}

impl ExtentAllocator {
    /// All of `range` is free.
    pub fn new(range: Range<usize>) -> Self {
        let mut new = Self {
            by_start: BTreeMap::new(),
            by_len: BTreeSet::new(),
            used: BTreeMap::new(),
            capacity: range.len(),
        };
        if !range.is_empty() {
            new.insert_free(range.start, range.len());
        }
        new
    }

    /// Bytes managed.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes in use, rounding included.
    pub fn used(&self) -> usize {
        self.used.values().sum()
    }

    /// The longest free extent.
    pub fn largest_free(&self) -> usize {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// The smallest free extent that fits, cut to the size class of `len`.
    pub fn allocate(&mut self, len: usize) -> Option<Range<usize>> {
        let need = size_class(len);
        let &(have, start) = self.by_len.range((need, 0)..).next()?;
        self.remove_free(start, have);
        if have > need {
            self.insert_free(start + need, have - need);
        }
        self.used.insert(start, need);
        Some(start..start + need)
    }

    /// Gives an extent back.
    ///
    /// # Panics
    /// If no extent in use starts there: a slot was freed twice.
    pub fn free(&mut self, start: usize) {
        let Some(mut len) = self.used.remove(&start) else {
            panic!("extent at {start} is not in use");
        };
        let mut start = start;
        if let Some((&before, &n)) = self.by_start.range(..start).next_back()
            && before + n == start
        {
            self.remove_free(before, n);
            (start, len) = (before, len + n);
        }
        if let Some(&n) = self.by_start.get(&(start + len)) {
            self.remove_free(start + len, n);
            len += n;
        }
        self.insert_free(start, len);
    }

    fn insert_free(&mut self, start: usize, len: usize) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove_free(&mut self, start: usize, len: usize) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_class_wastes_at_most_an_eighth() {
        for pages in 1..100_000usize {
            let len = pages * PAGE_BYTES;
            let class = size_class(len);
            assert!(class >= len && (class - len) * 8 <= len, "{len} {class}");
            assert_eq!(size_class(class), class);
        }
    }

    proptest! {
        /// Against a plain model: extents never overlap, stay inside, and everything comes back.
        #[test]
        fn extents_are_disjoint_and_all_come_back(
            ops in proptest::collection::vec(
                (any::<bool>(), 1usize..300_000, any::<usize>()), 1..200,
            )
        ) {
            let range = 8192..8192 + (4 << 20);
            let mut alloc = ExtentAllocator::new(range.clone());
            let mut live: Vec<Range<usize>> = Vec::new();
            for (take, len, pick) in ops {
                if take || live.is_empty() {
                    match alloc.allocate(len) {
                        Some(got) => {
                            prop_assert!(got.len() >= len && got.start % PAGE_BYTES == 0);
                            prop_assert!(got.start >= range.start && got.end <= range.end);
                            let apart = |l: &Range<usize>| l.end <= got.start || got.end <= l.start;
                            prop_assert!(live.iter().all(apart));
                            live.push(got);
                        }
                        None => prop_assert!(alloc.largest_free() < size_class(len)),
                    }
                } else {
                    let gone = live.swap_remove(pick % live.len());
                    alloc.free(gone.start);
                }
                prop_assert_eq!(alloc.used(), live.iter().map(Range::len).sum::<usize>());
            }
            live.iter().for_each(|l| alloc.free(l.start));
            prop_assert_eq!(alloc.largest_free(), range.len());
        }
    }

    #[test]
    #[should_panic(expected = "not in use")]
    fn freeing_twice_is_seen() {
        let mut alloc = ExtentAllocator::new(0..1 << 20);
        let a = alloc.allocate(4096).unwrap();
        alloc.free(a.start);
        alloc.free(a.start);
    }
}
