//! Sixteen lanes as one 512-bit register.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use crate::lanes::Lanes;

/// AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Bits `lo..hi` of a lane mask.
#[inline(always)]
pub(crate) fn range_mask(lo: usize, hi: usize) -> u16 {
    let below = |n: usize| if n >= 16 { u16::MAX } else { (1u16 << n) - 1 };
    below(hi) & !below(lo)
}

// SAFETY: every method is one or a few AVX-512 instructions; callers hold the trait's contract.
#[expect(clippy::undocumented_unsafe_blocks, reason = "the trait's contract covers each line")]
unsafe impl Lanes for Avx512 {
    type V = __m512;

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
    unsafe fn exp2i(n: Self::V) -> Self::V {
        unsafe {
            let bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(bits))
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
    unsafe fn select_range(v: Self::V, lo: usize, hi: usize, other: f32) -> Self::V {
        unsafe { _mm512_mask_blend_ps(range_mask(lo, hi), _mm512_set1_ps(other), v) }
    }
}
