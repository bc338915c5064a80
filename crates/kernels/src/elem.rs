//! Element types of packed operands.
//!
//! A packed operand stores, for each pair of consecutive k indexes, sixteen columns: bf16 and
//! int8 as `[16][2]`, f32 as `[2][16]`. Both take 32 elements a pair.

use crate::lanes::{LANES, Lanes};

/// An element type the micro-kernel can widen to f32.
///
/// # Safety
/// `load_pair` must read 32 elements and nothing else.
pub(crate) unsafe trait Elem: Copy + Default + Send + Sync + 'static {
    /// Widens one pair: the columns at the even and at the odd k index.
    unsafe fn load_pair<L: Lanes>(p: *const Self) -> (L::V, L::V);
    /// Index inside a pair of `(column, k % 2)`.
    fn index(column: usize, odd: usize) -> usize;
}

// SAFETY: reads 32 u16.
unsafe impl Elem for u16 {
    #[inline(always)]
    unsafe fn load_pair<L: Lanes>(p: *const Self) -> (L::V, L::V) {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { L::load_bf16_pair(p) }
    }
    #[inline(always)]
    fn index(column: usize, odd: usize) -> usize {
        column * 2 + odd
    }
}

// SAFETY: reads 32 i8.
unsafe impl Elem for i8 {
    #[inline(always)]
    unsafe fn load_pair<L: Lanes>(p: *const Self) -> (L::V, L::V) {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { L::load_i8_pair(p) }
    }
    #[inline(always)]
    fn index(column: usize, odd: usize) -> usize {
        column * 2 + odd
    }
}

// SAFETY: reads 32 f32.
unsafe impl Elem for f32 {
    #[inline(always)]
    unsafe fn load_pair<L: Lanes>(p: *const Self) -> (L::V, L::V) {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { (L::load(p), L::load(p.add(LANES))) }
    }
    #[inline(always)]
    fn index(column: usize, odd: usize) -> usize {
        odd * LANES + column
    }
}
