//! Sixteen lanes as one 512-bit register.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use crate::lanes::Lanes;

/// AVX-512 F, BW, DQ, VL; with `DOT` also BF16 and VNNI, which multiply two pairs or four bytes at
/// once.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const DOT: bool>;

/// Bits `lo..hi` of a lane mask.
#[inline(always)]
pub(crate) fn range_mask(lo: usize, hi: usize) -> u16 {
    let below = |n: usize| if n >= 16 { u16::MAX } else { (1u16 << n) - 1 };
    below(hi) & !below(lo)
}

/// VPDPWSSD. Written out, because LLVM takes the intrinsic apart into a product and a sum to
/// shorten the chain, which costs twice the instructions where they are what limits.
///
/// # Safety
/// The CPU has AVX-512 with VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dot_pairs(mut c: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: registers only.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {c}, {b}, {a}",
            c = inout(zmm_reg) c, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    c
}

// SAFETY: every method is one or a few AVX-512 instructions; callers hold the trait's contract.
#[expect(clippy::undocumented_unsafe_blocks, reason = "the trait's contract covers each line")]
unsafe impl<const DOT: bool> Lanes for Avx512<DOT> {
    const ROWS: usize = 12;
    type V = __m512;
    type I = __m512i;
    type Bf16Pairs = __m512i;
    type I16Pairs = __m512i;
    /// With `DOT` the first one only, of bytes; otherwise pairs of 16 bits.
    type I8Quads = [__m512i; 2];
    type U4Quads = __m512i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { _mm512_roundscale_ps::<8>(a) }
    }
    #[inline(always)]
    unsafe fn scale_2(p: Self::V, n: Self::V) -> Self::V {
        unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> (Self::V, Self::V) {
        unsafe {
            let raw = _mm512_loadu_si512(p.cast());
            let odd = _mm512_and_si512(raw, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw)), _mm512_castsi512_ps(odd))
        }
    }
    #[inline(always)]
    unsafe fn load_i8_pair(p: *const i8) -> (Self::V, Self::V) {
        unsafe {
            // Sixteen words of two elements each, the even one in the low byte.
            let words = _mm512_cvtepi16_epi32(_mm256_loadu_si256(p.cast()));
            let even = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(words));
            let odd = _mm512_srai_epi32::<8>(words);
            (_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(odd))
        }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> Self::Bf16Pairs {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(c: Self::V, a: u32, b: Self::Bf16Pairs) -> Self::V {
        unsafe {
            if DOT {
                let a = _mm512_set1_epi32(a as i32);
                let pairs = |x| std::mem::transmute::<__m512i, __m512bh>(x);
                return _mm512_dpbf16_ps(c, pairs(a), pairs(b));
            }
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b));
            let odd = _mm512_castsi512_ps(_mm512_and_si512(b, high));
            let (a0, a1) = (f32::from_bits(a << 16), f32::from_bits(a & 0xffff_0000));
            Self::fma(Self::splat(a0), even, Self::fma(Self::splat(a1), odd, c))
        }
    }
    #[inline(always)]
    unsafe fn zero_i() -> Self::I {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn i16_pairs(p: *const i8) -> Self::I16Pairs {
        unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn dot_i16(c: Self::I, a: u32, b: Self::I16Pairs) -> Self::I {
        unsafe {
            let a = _mm512_set1_epi32(a as i32);
            if DOT {
                return dot_pairs(c, a, b);
            }
            _mm512_add_epi32(c, _mm512_madd_epi16(a, b))
        }
    }
    #[inline(always)]
    unsafe fn i8_quads(p: *const i8) -> Self::I8Quads {
        unsafe {
            let raw = _mm512_loadu_si512(p.cast());
            if DOT {
                return [raw, _mm512_setzero_si512()];
            }
            let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(raw));
            let odd = _mm512_srai_epi16::<8>(raw);
            let upper = 0xaaaa_aaaa;
            [
                _mm512_mask_blend_epi16(upper, even, _mm512_slli_epi32::<16>(odd)),
                _mm512_mask_blend_epi16(upper, _mm512_srli_epi32::<16>(even), odd),
            ]
        }
    }
    #[inline(always)]
    unsafe fn nibble_quads(p: *const u8) -> [Self::U4Quads; 2] {
        unsafe {
            let (low, raw) = (_mm512_set1_epi8(15), _mm512_loadu_si512(p.cast()));
            let high = _mm512_srli_epi16::<4>(raw);
            [_mm512_and_si512(raw, low), _mm512_and_si512(high, low)]
        }
    }
    #[inline(always)]
    unsafe fn dot_i8(c: Self::I, a: u32, b: Self::U4Quads) -> Self::I {
        unsafe {
            let a = _mm512_set1_epi32(a as i32);
            if DOT {
                return _mm512_dpbusd_epi32(c, b, a);
            }
            // Two products of 15 · 128 at most fit 16 bits.
            let pairs = _mm512_maddubs_epi16(b, a);
            _mm512_add_epi32(c, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn i8_quads_of_pairs(p: *const i8) -> Self::I8Quads {
        unsafe {
            if DOT {
                // Pairs of a lane are 32 bytes apart.
                let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
                let order = _mm512_loadu_si512(order.as_ptr().cast());
                let quads = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(p.cast()));
                return [quads, _mm512_setzero_si512()];
            }
            [Self::i16_pairs(p), Self::i16_pairs(p.add(32))]
        }
    }
    #[inline(always)]
    unsafe fn dot_u8(c: Self::I, a: u32, b: Self::I8Quads) -> Self::I {
        unsafe {
            if DOT {
                return _mm512_dpbusd_epi32(c, _mm512_set1_epi32(a as i32), b[0]);
            }
            let a = _mm512_cvtepu8_epi16(_mm256_set1_epi32(a as i32));
            let low = _mm512_madd_epi16(_mm512_shuffle_epi32::<0b00_00_00_00>(a), b[0]);
            let high = _mm512_madd_epi16(_mm512_shuffle_epi32::<0b01_01_01_01>(a), b[1]);
            _mm512_add_epi32(c, _mm512_add_epi32(low, high))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn from_i(v: Self::I) -> Self::V {
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        unsafe {
            if DOT {
                let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
                return _mm256_storeu_si256(p.cast(), rounded);
            }
            let sign = _mm512_set1_epi32(i32::MIN);
            let normal = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(
                _mm512_abs_ps(v),
                _mm512_set1_ps(f32::MIN_POSITIVE),
            );
            let bits = _mm512_castps_si512(v);
            let bits = _mm512_mask_blend_epi32(normal, _mm512_and_si512(bits, sign), bits);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(rounded));
        }
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, v: Self::V) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v))) }
    }
    #[inline(always)]
    unsafe fn store_halves(p: *mut i8, v: Self::V) {
        unsafe {
            let whole = _mm512_cvtps_epi32(v);
            let up = _mm512_add_epi32(whole, _mm512_set1_epi32(128));
            let high = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(up));
            let low = _mm512_cvtepi32_epi8(whole);
            _mm_storeu_si128(p.cast(), _mm_unpacklo_epi32(high, low));
            _mm_storeu_si128(p.add(16).cast(), _mm_unpackhi_epi32(high, low));
        }
    }
    #[inline(always)]
    unsafe fn mul_to_bytes(a: *const i16, b: *const i16, offset: i16, out: *mut u8) {
        unsafe {
            let (a, b) = (_mm512_loadu_si512(a.cast()), _mm512_loadu_si512(b.cast()));
            let sum = _mm512_add_epi16(_mm512_mulhrs_epi16(a, b), _mm512_set1_epi16(offset));
            let bytes = _mm512_cvtepi16_epi8(_mm512_srli_epi16::<7>(sum));
            _mm256_storeu_si256(out.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(v);
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), high);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(v: Self::V) -> f32 {
        unsafe { _mm512_reduce_max_ps(v) }
    }
    #[inline(always)]
    unsafe fn select_range(v: Self::V, lo: usize, hi: usize, other: f32) -> Self::V {
        unsafe { _mm512_mask_blend_ps(range_mask(lo, hi), _mm512_set1_ps(other), v) }
    }
}
