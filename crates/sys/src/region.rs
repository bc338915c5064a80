//! A span of memory lent out in handles that cannot alias inside this process.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Result, SysError};

/// Keeps a mapping alive; dropped with the last handle.
pub(crate) trait Backing: Send + Sync {}

/// Memory of fixed address and size, and the ledger of what is lent.
pub struct Region {
    base: *mut u8,
    /// The same pages mapped read-only, or `base` where there is no second mapping.
    read_only: *const u8,
    len: usize,
    ledger: Mutex<BTreeMap<usize, Loan>>,
    _backing: Box<dyn Backing>,
}

struct Loan {
    end: usize,
    /// 0 is one exclusive handle; n is n shared ones over exactly this range.
    shared: usize,
}

// SAFETY: the pointers stay valid as long as `_backing`; access through them is governed by the
// ledger (handles) or atomic (words).
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// `base` points to `len` readable and writable bytes, page-aligned, valid while `backing`
    /// lives; `read_only` maps the same pages.
    pub(crate) unsafe fn new(
        base: *mut u8,
        read_only: *const u8,
        len: usize,
        backing: Box<dyn Backing>,
    ) -> Arc<Self> {
        let ledger = Mutex::new(BTreeMap::new());
        Arc::new(Self { base, read_only, len, ledger, _backing: backing })
    }

    /// Private memory that behaves like a segment: for one-process tests and tools.
    pub fn anonymous(len: usize) -> Arc<Self> {
        struct Heap(*mut u8, std::alloc::Layout);
        // SAFETY: the allocation is owned and only freed on drop.
        unsafe impl Send for Heap {}
        // SAFETY: as above.
        unsafe impl Sync for Heap {}
        impl Backing for Heap {}
        impl Drop for Heap {
            fn drop(&mut self) {
                // SAFETY: allocated below with this layout.
                unsafe { std::alloc::dealloc(self.0, self.1) }
            }
        }
        let len = len.max(1).next_multiple_of(4096);
        let Ok(layout) = std::alloc::Layout::from_size_align(len, 4096) else {
            unreachable!("a page-aligned layout of {len} bytes is valid")
        };
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!base.is_null(), "out of memory: {len} bytes");
        // SAFETY: freshly allocated, owned by the backing.
        unsafe { Self::new(base, base, len, Box::new(Heap(base, layout))) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no memory at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    fn error(&self, range: &Range<usize>, reason: &'static str) -> SysError {
        let (offset, len) = (range.start, range.end.wrapping_sub(range.start));
        SysError::Range { offset, len, region_len: self.len, reason }
    }

    fn check(&self, range: &Range<usize>, align: usize) -> Result<()> {
        if range.start >= range.end || range.end > self.len {
            return Err(self.error(range, "outside the region"));
        }
        if !range.start.is_multiple_of(align) {
            return Err(self.error(range, "misaligned"));
        }
        Ok(())
    }

    /// An exclusive handle over a page-aligned range.
    ///
    /// # Errors
    /// If the range is outside, misaligned, or overlaps a live handle.
    pub fn exclusive(self: &Arc<Self>, range: Range<usize>) -> Result<SlotMut> {
        self.check(&range, 4096)?;
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if overlaps(&ledger, &range) {
            return Err(self.error(&range, "overlaps a handle that is still held"));
        }
        ledger.insert(range.start, Loan { end: range.end, shared: 0 });
        drop(ledger);
        Ok(SlotMut { region: Arc::clone(self), range })
    }

    /// A read-only handle; several may cover exactly the same range.
    ///
    /// # Errors
    /// If the range is outside, misaligned, or overlaps a live handle over another range.
    pub fn shared(self: &Arc<Self>, range: Range<usize>) -> Result<SlotRef> {
        self.check(&range, 4096)?;
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loan) = ledger.get_mut(&range.start)
            && loan.end == range.end
            && loan.shared > 0
        {
            loan.shared += 1;
        } else if overlaps(&ledger, &range) {
            return Err(self.error(&range, "overlaps a handle that is still held"));
        } else {
            ledger.insert(range.start, Loan { end: range.end, shared: 1 });
        }
        drop(ledger);
        Ok(SlotRef { region: Arc::clone(self), range, parts: Vec::new() })
    }

    /// Atomic words; they alias each other freely, but never a handle's bytes by protocol.
    ///
    /// # Errors
    /// If the range is outside or not a multiple of eight bytes.
    pub fn words(self: &Arc<Self>, range: Range<usize>) -> Result<Words> {
        self.check(&range, 8)?;
        if !range.len().is_multiple_of(8) {
            return Err(self.error(&range, "not whole words"));
        }
        Ok(Words { region: Arc::clone(self), range })
    }

    /// The 32-bit word at `offset`, for a futex.
    ///
    /// # Errors
    /// If the offset is outside or misaligned.
    pub(crate) fn futex_word(&self, offset: usize) -> Result<&AtomicU32> {
        self.check(&(offset..offset.saturating_add(4)), 4)?;
        // SAFETY: inside the region, aligned; atomics may be shared with the peer.
        Ok(unsafe { &*self.base.add(offset).cast::<AtomicU32>() })
    }

    fn release(&self, start: usize) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loan) = ledger.get_mut(&start)
            && loan.shared > 1
        {
            loan.shared -= 1;
        } else {
            ledger.remove(&start);
        }
    }

    /// Handles alive in this process.
    pub fn handles(&self) -> usize {
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.values().map(|l| l.shared.max(1)).sum()
    }
}

fn overlaps(ledger: &BTreeMap<usize, Loan>, range: &Range<usize>) -> bool {
    ledger.range(..range.end).next_back().is_some_and(|(_, loan)| loan.end > range.start)
}

/// Exclusive bytes of a region.
pub struct SlotMut {
    region: Arc<Region>,
    range: Range<usize>,
}

impl SlotMut {
    /// Offset and end in the region.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The region the bytes belong to.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Two handles instead of one; the second begins at `at`.
    ///
    /// # Panics
    /// If `at` is not a page boundary inside the handle.
    pub fn split(self, at: usize) -> (Self, Self) {
        assert!(at > 0 && at < self.range.len() && at.is_multiple_of(4096), "no boundary: {at}");
        let (region, range) = self.into_parts();
        let middle = range.start + at;
        let mut ledger = region.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.insert(range.start, Loan { end: middle, shared: 0 });
        ledger.insert(middle, Loan { end: range.end, shared: 0 });
        drop(ledger);
        let first = Self { region: Arc::clone(&region), range: range.start..middle };
        (first, Self { region, range: middle..range.end })
    }

    /// One handle again.
    ///
    /// # Panics
    /// If `next` does not begin where this ends, in the same region.
    pub fn join(self, next: Self) -> Self {
        let same = Arc::ptr_eq(&self.region, &next.region) && self.range.end == next.range.start;
        assert!(same, "handles that do not follow each other");
        let (region, first) = self.into_parts();
        let (_, second) = next.into_parts();
        let range = first.start..second.end;
        let mut ledger = region.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.remove(&second.start);
        ledger.insert(range.start, Loan { end: range.end, shared: 0 });
        drop(ledger);
        Self { region, range }
    }

    /// What the handle is made of; the loan lives on.
    fn into_parts(self) -> (Arc<Region>, Range<usize>) {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so its Arc is taken out exactly once.
        (unsafe { std::ptr::read(&this.region) }, this.range.clone())
    }

    /// Gives up writing to the first `at` bytes, which are final; the others stay as they are.
    ///
    /// # Panics
    /// As [`Self::split`].
    pub fn freeze_front(self, at: usize) -> (SlotRef, Self) {
        let (front, rest) = self.split(at);
        (front.freeze(), rest)
    }

    /// Gives up writing: the bytes are final.
    pub fn freeze(self) -> SlotRef {
        let (region, range) = self.into_parts();
        let mut ledger = region.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        // The loan lives on as the shared one.
        if let Some(loan) = ledger.get_mut(&range.start) {
            loan.shared = 1;
        }
        drop(ledger);
        SlotRef { region, range, parts: Vec::new() }
    }
}

impl Deref for SlotMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: checked to lie inside the region; the ledger gives no other handle over it.
        unsafe {
            std::slice::from_raw_parts(self.region.base.add(self.range.start), self.range.len())
        }
    }
}

impl DerefMut for SlotMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(self.region.base.add(self.range.start), self.range.len())
        }
    }
}

impl Drop for SlotMut {
    fn drop(&mut self) {
        self.region.release(self.range.start);
    }
}

/// Read-only bytes of a region, through the read-only mapping.
pub struct SlotRef {
    region: Arc<Region>,
    range: Range<usize>,
    /// Handles that together cover the range, in whose place this one is; none if the loan is its
    /// own.
    parts: Vec<SlotRef>,
}

impl SlotRef {
    /// One handle over what several cover, one after the other. Others may still hold the parts.
    ///
    /// # Panics
    /// If there is none, or they do not follow each other in one region.
    pub fn joined(parts: Vec<Self>) -> Self {
        let follow = |w: &[Self]| {
            Arc::ptr_eq(&w[0].region, &w[1].region) && w[0].range.end == w[1].range.start
        };
        assert!(parts.windows(2).all(follow), "handles that do not follow each other");
        let (first, last) = (&parts[0], &parts[parts.len() - 1]);
        let (region, range) = (Arc::clone(&first.region), first.range.start..last.range.end);
        let mut flat = Vec::with_capacity(parts.len());
        for mut part in parts {
            match std::mem::take(&mut part.parts) {
                own if own.is_empty() => flat.push(part),
                own => {
                    flat.extend(own);
                    // Its loans live on in its parts.
                    let part = std::mem::ManuallyDrop::new(part);
                    // SAFETY: `part` is never dropped, so its Arc is taken out exactly once.
                    drop(unsafe { std::ptr::read(&part.region) });
                }
            }
        }
        Self { region, range, parts: flat }
    }

    /// Offset and end in the region.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Clone for SlotRef {
    fn clone(&self) -> Self {
        if !self.parts.is_empty() {
            return Self::joined(self.parts.clone());
        }
        let mut ledger = self.region.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loan) = ledger.get_mut(&self.range.start) {
            loan.shared += 1;
        }
        drop(ledger);
        Self { region: Arc::clone(&self.region), range: self.range.clone(), parts: Vec::new() }
    }
}

impl Deref for SlotRef {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: checked to lie inside the region; the ledger allows readers only.
        unsafe {
            std::slice::from_raw_parts(
                self.region.read_only.add(self.range.start),
                self.range.len(),
            )
        }
    }
}

impl Drop for SlotRef {
    fn drop(&mut self) {
        if self.parts.is_empty() {
            self.region.release(self.range.start);
        }
    }
}

/// Atomic 64-bit words of a region.
#[derive(Clone)]
pub struct Words {
    region: Arc<Region>,
    range: Range<usize>,
}

impl Words {
    /// Private words: for tests of the ring.
    pub fn private(count: usize) -> Self {
        let region = Region::anonymous(count * 8);
        Self { region, range: 0..count * 8 }
    }

    /// Offset and end in the region.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: inside the region, aligned, and atomics tolerate concurrent access by anyone.
        unsafe {
            std::slice::from_raw_parts(
                self.region.base.add(self.range.start).cast(),
                self.range.len() / 8,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_handles_of_their_own() {
        let region = Region::anonymous(64 << 10);
        let (mut a, b) = region.exclusive(4096..20480).unwrap().split(8192);
        let (b, c) = b.split(4096);
        assert_eq!([a.range(), b.range(), c.range()], [4096..12288, 12288..16384, 16384..20480]);
        a[8191] = 1;
        drop(b);
        assert!(region.exclusive(8192..16384).is_err() && region.exclusive(16384..20480).is_err());
        let mut b = region.exclusive(12288..16384).unwrap();
        b[0] = 2;
        let whole = a.join(b).join(c);
        assert_eq!(
            (whole.range(), &whole[8191..8193], region.handles()),
            (4096..20480, &[1, 2][..], 1)
        );
        let shared = whole.freeze();
        assert!(region.exclusive(16384..20480).is_err());
        drop(shared);
        assert_eq!(region.handles(), 0);
    }

    #[test]
    fn frozen_parts_make_a_whole() {
        let region = Region::anonymous(64 << 10);
        let mut all = region.exclusive(4096..20480).unwrap();
        all.iter_mut().zip((0..=255).cycle()).for_each(|(to, x)| *to = x);
        let wanted = all.to_vec();
        let (a, rest) = all.freeze_front(4096);
        let reader = a.clone();
        let (b, rest) = rest.freeze_front(8192);
        let whole = SlotRef::joined(vec![a, b, rest.freeze()]);
        assert_eq!((whole.range(), &whole[..]), (4096..20480, &wanted[..]));
        let other = whole.clone();
        drop(whole);
        assert_eq!(&other[..], &wanted[..]);
        drop(other);
        assert_eq!((region.handles(), &reader[..]), (1, &wanted[..4096]));
        assert!(region.exclusive(8192..20480).is_ok());
        drop(reader);
        assert_eq!(region.handles(), 0);
    }

    #[test]
    fn the_ledger_refuses_aliases() {
        let region = Region::anonymous(64 << 10);
        let mut a = region.exclusive(4096..12288).unwrap();
        a[0] = 7;
        assert!(region.exclusive(8192..16384).is_err());
        assert!(region.shared(4096..12288).is_err());
        let b = a.freeze();
        let c = region.shared(4096..12288).unwrap();
        assert!(region.shared(4096..8192).is_err(), "another range over the same bytes");
        assert_eq!((b[0], c[0], c.clone()[0]), (7, 7, 7));
        assert_eq!(region.handles(), 2);
        drop(b);
        assert!(region.exclusive(4096..8192).is_err());
        drop(c);
        assert_eq!(region.handles(), 0);
        assert!(region.exclusive(4096..8192).is_ok());
    }

    #[test]
    fn ranges_are_checked() {
        let region = Region::anonymous(8192);
        assert!(region.exclusive(0..8193).is_err());
        assert!(region.exclusive(100..200).is_err());
        assert!(region.exclusive(4096..4096).is_err());
        assert!(region.words(0..12).is_err());
        assert!(region.words(8..16).is_ok());
    }
}
