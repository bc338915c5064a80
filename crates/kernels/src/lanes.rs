//! Sixteen f32 lanes: the one abstraction the kernels are written in.
//!
//! Every operation is exact or correctly rounded, so an implementation has no freedom and all
//! of them give the same bits.

/// Number of lanes.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 lanes on some instruction set.
///
/// # Safety
/// The methods of an implementation may only run on a CPU with the features it names.
pub(crate) unsafe trait Lanes: Copy + 'static {
    /// Rows the micro-kernel takes at once at most: what the registers hold beside two column
    /// tiles of B. Plain arrays gain nothing from more than a few.
    const ROWS: usize;
    type V: Copy;
    /// Sixteen 32-bit integers.
    type I: Copy;
    /// Sixteen pairs of bf16, ready to be multiplied.
    type Bf16Pairs: Copy;
    /// Sixteen pairs of 16-bit integers.
    type I16Pairs: Copy;
    /// Sixteen times four 8-bit integers, ready to be multiplied.
    type I8Quads: Copy;
    /// The same of four bits without sign.
    type U4Quads: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// `a × b + c` with one rounding.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a > b ? a : b`, so a NaN in `a` yields `b`.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `p · 2^n` for `p` in 0.7…1.5 and lanes of `n` that hold integers in −125…127: `n` more in
    /// the exponent.
    unsafe fn scale_2(p: Self::V, n: Self::V) -> Self::V;
    /// Widens sixteen bf16.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// Widens 32 interleaved bf16 values into the even-index and odd-index lanes.
    unsafe fn load_bf16_pair(p: *const u16) -> (Self::V, Self::V);
    /// Widens 32 interleaved 8-bit integers into the even-index and odd-index lanes.
    unsafe fn load_i8_pair(p: *const i8) -> (Self::V, Self::V);
    /// Thirty-two bf16 values, sixteen pairs.
    unsafe fn bf16_pairs(p: *const u16) -> Self::Bf16Pairs;
    /// `(c + a₁ · b₁) + a₀ · b₀` for a pair `a` of bf16 (the first in the low half) and each pair
    /// of `b`. That is what VDPBF16PS does: a product of two bf16 is exact in f32, and each sum
    /// is rounded once. Operands and sums below 2⁻¹²⁶ are the exception to equal bits: VDPBF16PS
    /// takes them for 0.
    unsafe fn dot_bf16(c: Self::V, a: u32, b: Self::Bf16Pairs) -> Self::V;
    /// Sixteen zeros.
    unsafe fn zero_i() -> Self::I;
    /// Thirty-two 8-bit integers, sixteen pairs.
    unsafe fn i16_pairs(p: *const i8) -> Self::I16Pairs;
    /// `c + a₀ · b₀ + a₁ · b₁` for a pair `a` of 16-bit integers and each pair of `b`: exact.
    unsafe fn dot_i16(c: Self::I, a: u32, b: Self::I16Pairs) -> Self::I;
    /// Sixty-four 8-bit integers, lane after lane.
    unsafe fn i8_quads(p: *const i8) -> Self::I8Quads;
    /// Two times thirty-two 8-bit integers, sixteen pairs each: the first pair of a lane, and the
    /// second.
    unsafe fn i8_quads_of_pairs(p: *const i8) -> Self::I8Quads;
    /// Sixty-four bytes of two nibbles each: the low ones and the high ones.
    unsafe fn nibble_quads(p: *const u8) -> [Self::U4Quads; 2];
    /// `c + a₀ · b₀ + … + a₃ · b₃` for four unsigned bytes `a`, the first the lowest, and each four
    /// of `b`: exact.
    unsafe fn dot_u8(c: Self::I, a: u32, b: Self::I8Quads) -> Self::I;
    /// The same for four bytes `a` with sign and four nibbles `b` without.
    unsafe fn dot_i8(c: Self::I, a: u32, b: Self::U4Quads) -> Self::I;
    /// Widens sixteen f16.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// To the nearest f32, ties to even.
    unsafe fn from_i(v: Self::I) -> Self::V;
    /// Rounds finite values to bf16, ties to even; magnitudes below 2⁻¹²⁶ become 0, as
    /// VCVTNEPS2BF16 makes them.
    unsafe fn store_bf16(p: *mut u16, v: Self::V);
    /// Rounds values of magnitude at most 32,767 to integers, ties to even.
    unsafe fn store_i16(p: *mut i16, v: Self::V);
    /// Rounds values of magnitude at most 32,639 to integers, ties to even, each of which is
    /// `256 · high + low` of 8 bits with sign: four high ones, then their low ones.
    unsafe fn store_halves(p: *mut i8, v: Self::V);
    /// `out = ⌊(⌊(a · b + 2¹⁴) / 2¹⁵⌋ + offset) / 2⁷⌋` for thirty-two 16-bit integers above
    /// −32,768; each result fits a byte.
    unsafe fn mul_to_bytes(a: *const i16, b: *const i16, offset: i16, out: *mut u8);
    /// Keeps lanes `lo..hi` of `v`; the others become `other`.
    unsafe fn select_range(v: Self::V, lo: usize, hi: usize, other: f32) -> Self::V;

    #[inline(always)]
    unsafe fn to_array(v: Self::V) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the array has room for all lanes.
        unsafe { Self::store(out.as_mut_ptr(), v) };
        out
    }

    /// Sum of the lanes as a balanced tree: 8 + 4 + 2 + 1.
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        // SAFETY: plain lane access.
        let mut a = unsafe { Self::to_array(v) };
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                a[i] += a[i + width];
            }
        }
        a[0]
    }

    /// Largest lane; none is NaN.
    #[inline(always)]
    unsafe fn max_lane(v: Self::V) -> f32 {
        // SAFETY: plain lane access.
        let a = unsafe { Self::to_array(v) };
        a.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }

    /// `e^x`, relative error below 6e-7, for `x ≤ 88`; below −86 the result is `e^−86`.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // SAFETY: forwarded feature requirement.
        unsafe {
            let x = Self::max(x, Self::splat(-86.0));
            let log2e = Self::splat(std::f32::consts::LOG2_E);
            let n = Self::round(Self::mul(x, log2e));
            let f = Self::fma(x, log2e, Self::sub(Self::splat(0.0), n));
            Self::scale_2(Self::exp2_fraction(f), n)
        }
    }

    /// `2^x`, relative error below 6e-7, for `x ≤ 127`; below −125 the result is `2^−125`.
    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        // SAFETY: forwarded feature requirement.
        unsafe {
            let x = Self::max(x, Self::splat(-125.0));
            let n = Self::round(x);
            Self::scale_2(Self::exp2_fraction(Self::sub(x, n)), n)
        }
    }

    /// `2^f` for `|f| ≤ 1/2`, and 1 for 0: of the polynomials of degree five with a constant of 1
    /// the one whose largest relative error is smallest, 4.3e-7 (Remez' exchange).
    #[inline(always)]
    unsafe fn exp2_fraction(f: Self::V) -> Self::V {
        // SAFETY: forwarded feature requirement.
        unsafe {
            let mut p = Self::splat(1.112_548_4e-3);
            for c in [9.666_282e-3, 5.557_400_6e-2, 2.402_235_1e-1, 6.931_428_3e-1, 1.0] {
                p = Self::fma(p, f, Self::splat(c));
            }
            p
        }
    }
}

/// Rounds a finite value as [`Lanes::store_bf16`] does.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let normal = if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x };
    matkv_types::f32_to_bf16(normal)
}

/// Plain arrays.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY: no CPU feature is needed.
unsafe impl Lanes for Portable {
    const ROWS: usize = 2;
    type V = [f32; LANES];
    type I = [i32; LANES];
    type Bf16Pairs = (Self::V, Self::V);
    type I16Pairs = [[i16; 2]; LANES];
    type I8Quads = [[i8; 4]; LANES];
    type U4Quads = [[u8; 4]; LANES];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller gives 16 readable elements.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn scale_2(p: Self::V, n: Self::V) -> Self::V {
        map2(p, n, |p, n| f32::from_bits(p.to_bits().wrapping_add((n as i32 as u32) << 23)))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: the caller gives 16 readable elements.
        let raw = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        raw.map(|x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> (Self::V, Self::V) {
        // SAFETY: the caller gives 32 readable elements.
        let raw = unsafe { p.cast::<[u16; 2 * LANES]>().read_unaligned() };
        let widen = |x: u16| f32::from_bits(u32::from(x) << 16);
        (std::array::from_fn(|i| widen(raw[2 * i])), std::array::from_fn(|i| widen(raw[2 * i + 1])))
    }
    #[inline(always)]
    unsafe fn load_i8_pair(p: *const i8) -> (Self::V, Self::V) {
        // SAFETY: the caller gives 32 readable elements.
        let raw = unsafe { p.cast::<[i8; 2 * LANES]>().read_unaligned() };
        (
            std::array::from_fn(|i| f32::from(raw[2 * i])),
            std::array::from_fn(|i| f32::from(raw[2 * i + 1])),
        )
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> Self::Bf16Pairs {
        // SAFETY: the caller gives 32 readable elements.
        unsafe { Self::load_bf16_pair(p) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(c: Self::V, a: u32, (even, odd): Self::Bf16Pairs) -> Self::V {
        let (a0, a1) = (f32::from_bits(a << 16), f32::from_bits(a & 0xffff_0000));
        std::array::from_fn(|i| (c[i] + a1 * odd[i]) + a0 * even[i])
    }
    #[inline(always)]
    unsafe fn zero_i() -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn i16_pairs(p: *const i8) -> Self::I16Pairs {
        // SAFETY: the caller gives 32 readable elements.
        let raw = unsafe { p.cast::<[[i8; 2]; LANES]>().read_unaligned() };
        raw.map(|pair| pair.map(i16::from))
    }
    #[inline(always)]
    unsafe fn dot_i16(c: Self::I, a: u32, b: Self::I16Pairs) -> Self::I {
        let (a0, a1) = (a as u16 as i16, (a >> 16) as u16 as i16);
        let product = |x: i16, y: i16| i32::from(x) * i32::from(y);
        std::array::from_fn(|i| c[i] + product(a0, b[i][0]) + product(a1, b[i][1]))
    }
    #[inline(always)]
    unsafe fn i8_quads(p: *const i8) -> Self::I8Quads {
        // SAFETY: the caller gives 64 readable elements.
        unsafe { p.cast::<[[i8; 4]; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn nibble_quads(p: *const u8) -> [Self::U4Quads; 2] {
        // SAFETY: the caller gives 64 readable elements.
        let raw = unsafe { p.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        [raw.map(|quad| quad.map(|byte| byte & 15)), raw.map(|quad| quad.map(|byte| byte >> 4))]
    }
    #[inline(always)]
    unsafe fn dot_i8(c: Self::I, a: u32, b: Self::U4Quads) -> Self::I {
        let a = a.to_le_bytes().map(|a| i32::from(a as i8));
        let product = |b: [u8; 4]| (0..4).map(|i| a[i] * i32::from(b[i])).sum::<i32>();
        std::array::from_fn(|i| c[i] + product(b[i]))
    }
    #[inline(always)]
    unsafe fn i8_quads_of_pairs(p: *const i8) -> Self::I8Quads {
        // SAFETY: the caller gives 64 readable elements.
        let [low, high] = unsafe { p.cast::<[[[i8; 2]; LANES]; 2]>().read_unaligned() };
        std::array::from_fn(|i| [low[i][0], low[i][1], high[i][0], high[i][1]])
    }
    #[inline(always)]
    unsafe fn dot_u8(c: Self::I, a: u32, b: Self::I8Quads) -> Self::I {
        let a = a.to_le_bytes().map(i32::from);
        let product = |b: [i8; 4]| (0..4).map(|i| a[i] * i32::from(b[i])).sum::<i32>();
        std::array::from_fn(|i| c[i] + product(b[i]))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: the caller gives 16 readable elements.
        let raw = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        raw.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn from_i(v: Self::I) -> Self::V {
        v.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(v.map(to_bf16)) }
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, v: Self::V) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { p.cast::<[i16; LANES]>().write_unaligned(v.map(|x| x.round_ties_even() as i16)) }
    }
    #[inline(always)]
    unsafe fn store_halves(p: *mut i8, v: Self::V) {
        let whole = v.map(|x| x.round_ties_even() as i32);
        let halves = std::array::from_fn(|quad| {
            let quad: [i32; 4] = std::array::from_fn(|i| whole[4 * quad + i]);
            [quad.map(|x| ((x + 128) >> 8) as i8), quad.map(|x| x as i8)]
        });
        // SAFETY: the caller gives 32 writable elements.
        unsafe { p.cast::<[[[i8; 4]; 2]; LANES / 4]>().write_unaligned(halves) }
    }
    #[inline(always)]
    unsafe fn mul_to_bytes(a: *const i16, b: *const i16, offset: i16, out: *mut u8) {
        // SAFETY: the caller gives 32 elements each.
        unsafe {
            let [a, b] = [a, b].map(|p| p.cast::<[i16; 2 * LANES]>().read_unaligned());
            let product = |i: usize| (i32::from(a[i]) * i32::from(b[i]) + (1 << 14)) >> 15;
            let byte = |i| ((product(i) + i32::from(offset)) >> 7) as u8;
            out.cast::<[u8; 2 * LANES]>().write_unaligned(std::array::from_fn(byte));
        }
    }
    #[inline(always)]
    unsafe fn select_range(v: Self::V, lo: usize, hi: usize, other: f32) -> Self::V {
        std::array::from_fn(|i| if i >= lo && i < hi { v[i] } else { other })
    }
}
