//! How an operand of f32, 16-bit elements or bytes is multiplied with a packed one.
//!
//! A packed operand stores, for each pair of consecutive k indexes, sixteen columns: bf16 and
//! int8 as `[16][2]`, f32 as `[2][16]`. All take 32 elements a pair, and some are multiplied two
//! pairs at once.

use std::marker::PhantomData;

use crate::lanes::{LANES, Lanes};

/// An element type of a packed operand.
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

/// Products of elements of A with as many of each column of B, summed up in k order.
///
/// # Safety
/// `load` reads `16 · STEP` elements of B and `step` `STEP` of A, and nothing else.
pub(crate) unsafe trait Product: 'static {
    /// Elements of A.
    type A: Copy + Send + Sync + 'static;
    /// Elements of B.
    type B: Elem;
    /// Elements of each row and column that a step multiplies.
    const STEP: usize = 2;
    /// A running sum.
    type Sum<L: Lanes>: Copy;
    /// What a step takes of B.
    type Pair<L: Lanes>: Copy;
    /// What makes values of a row's sums.
    type Row: Copy + Send + Sync + 'static;

    unsafe fn zero<L: Lanes>() -> Self::Sum<L>;
    /// Adds up columns alone, for all rows, where [`Self::finish`] needs that.
    #[inline(always)]
    unsafe fn add_columns<L: Lanes>(sum: Self::Sum<L>, _: Self::Pair<L>) -> Self::Sum<L> {
        sum
    }
    unsafe fn load<L: Lanes>(b: *const Self::B) -> Self::Pair<L>;
    unsafe fn step<L: Lanes>(
        sum: Self::Sum<L>,
        a: *const Self::A,
        b: Self::Pair<L>,
    ) -> Self::Sum<L>;
    unsafe fn finish<L: Lanes>(sum: Self::Sum<L>, columns: Self::Sum<L>, row: Self::Row) -> L::V;
}

/// Of products whose sums are values: nothing is read through it.
pub(crate) const NO_ROWS: *const () = std::ptr::NonNull::<()>::dangling().as_ptr();

/// Everything widened to f32; fused multiply-adds.
pub(crate) struct Exact<E>(PhantomData<E>);

// SAFETY: as `E::load_pair`; two f32 of A.
unsafe impl<E: Elem> Product for Exact<E> {
    type A = f32;
    type B = E;
    type Sum<L: Lanes> = L::V;
    type Pair<L: Lanes> = (L::V, L::V);
    type Row = ();

    #[inline(always)]
    unsafe fn zero<L: Lanes>() -> L::V {
        // SAFETY: the caller's CPU has the features of `L`; so everywhere below.
        unsafe { L::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(b: *const E) -> (L::V, L::V) {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { E::load_pair::<L>(b) }
    }
    #[inline(always)]
    unsafe fn step<L: Lanes>(sum: L::V, a: *const f32, (even, odd): (L::V, L::V)) -> L::V {
        // SAFETY: the caller gives two readable elements.
        unsafe {
            let sum = L::fma(L::splat(*a), even, sum);
            L::fma(L::splat(*a.add(1)), odd, sum)
        }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::V, _: L::V, (): ()) -> L::V {
        sum
    }
}

/// Both operands bf16, sums f32.
pub(crate) struct DotBf16;

// SAFETY: 32 u16 of B, two of A.
unsafe impl Product for DotBf16 {
    type A = u16;
    type B = u16;
    type Sum<L: Lanes> = L::V;
    type Pair<L: Lanes> = L::Bf16Pairs;
    type Row = ();

    #[inline(always)]
    unsafe fn zero<L: Lanes>() -> L::V {
        // SAFETY: as above.
        unsafe { L::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(b: *const u16) -> L::Bf16Pairs {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { L::bf16_pairs(b) }
    }
    #[inline(always)]
    unsafe fn step<L: Lanes>(sum: L::V, a: *const u16, b: L::Bf16Pairs) -> L::V {
        // SAFETY: the caller gives two readable elements.
        unsafe { L::dot_bf16(sum, a.cast::<u32>().read_unaligned(), b) }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::V, _: L::V, (): ()) -> L::V {
        sum
    }
}

/// A 16-bit and B 8-bit integers, sums exact as long as they have 32 bits.
pub(crate) struct DotInt;

// SAFETY: 32 i8 of B, two i16 of A.
unsafe impl Product for DotInt {
    type A = i16;
    type B = i8;
    type Sum<L: Lanes> = L::I;
    type Pair<L: Lanes> = L::I16Pairs;
    /// What integers are multiplied with.
    type Row = f32;

    #[inline(always)]
    unsafe fn zero<L: Lanes>() -> L::I {
        // SAFETY: as above.
        unsafe { L::zero_i() }
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(b: *const i8) -> L::I16Pairs {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { L::i16_pairs(b) }
    }
    #[inline(always)]
    unsafe fn step<L: Lanes>(sum: L::I, a: *const i16, b: L::I16Pairs) -> L::I {
        // SAFETY: the caller gives two readable elements.
        unsafe { L::dot_i16(sum, a.cast::<u32>().read_unaligned(), b) }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::I, _: L::I, factor: f32) -> L::V {
        // SAFETY: as above.
        unsafe { L::mul(L::from_i(sum), L::splat(factor)) }
    }
}

/// Integers of 8 bits, those of A without a sign, as the instruction takes them. Sums are exact,
/// and the f32 that are made of them too, as long as they have 24 bits.
pub(crate) struct DotBytes;

/// What bytes of a row stand for: `factor · (byte − zero)`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Affine {
    pub factor: f32,
    pub zero: f32,
}

/// Four times one.
const ONES: u32 = 0x0101_0101;

// SAFETY: 64 i8 of B, four u8 of A.
unsafe impl Product for DotBytes {
    type A = u8;
    type B = i8;
    const STEP: usize = 4;
    type Sum<L: Lanes> = L::I;
    type Pair<L: Lanes> = L::I8Quads;
    type Row = Affine;

    #[inline(always)]
    unsafe fn zero<L: Lanes>() -> L::I {
        // SAFETY: as above.
        unsafe { L::zero_i() }
    }
    #[inline(always)]
    unsafe fn add_columns<L: Lanes>(sum: L::I, b: L::I8Quads) -> L::I {
        // SAFETY: as above.
        unsafe { L::dot_u8(sum, ONES, b) }
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(b: *const i8) -> L::I8Quads {
        // SAFETY: the caller gives 64 readable elements.
        unsafe { L::i8_quads_of_pairs(b) }
    }
    #[inline(always)]
    unsafe fn step<L: Lanes>(sum: L::I, a: *const u8, b: L::I8Quads) -> L::I {
        // SAFETY: the caller gives four readable elements.
        unsafe { L::dot_u8(sum, a.cast::<u32>().read_unaligned(), b) }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::I, columns: L::I, row: Affine) -> L::V {
        // SAFETY: as above.
        unsafe {
            let sum = L::fma(L::splat(-row.zero), L::from_i(columns), L::from_i(sum));
            L::mul(sum, L::splat(row.factor))
        }
    }
}
