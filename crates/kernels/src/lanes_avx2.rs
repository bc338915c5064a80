//! Sixteen lanes as two 256-bit registers.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use crate::lanes::{LANES, Lanes};

/// AVX2 with FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Thirty-two-bit integers as words, in their order.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn words(x: [__m256i; 2]) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(x[0], x[1])) }
}

// SAFETY: every method is a few AVX2 or FMA instructions; callers hold the trait's contract.
#[expect(clippy::undocumented_unsafe_blocks, reason = "the trait's contract covers each line")]
unsafe impl Lanes for Avx2 {
    const ROWS: usize = 3;
    type V = [__m256; 2];
    type I = [__m256i; 2];
    type Bf16Pairs = (Self::V, Self::V);
    type I16Pairs = [__m256i; 2];
    type I8Quads = [Self::I16Pairs; 2];
    type U4Quads = [__m256i; 2];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { [_mm256_round_ps::<8>(a[0]), _mm256_round_ps::<8>(a[1])] }
    }
    #[inline(always)]
    unsafe fn scale_2(p: Self::V, n: Self::V) -> Self::V {
        unsafe {
            [0, 1].map(|i| {
                let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n[i]));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p[i]), exponent))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        unsafe {
            [p, p.add(8)].map(|p| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> (Self::V, Self::V) {
        unsafe {
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let raw = [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(LANES).cast())];
            (
                raw.map(|r| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(r))),
                raw.map(|r| _mm256_castsi256_ps(_mm256_and_si256(r, high))),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_i8_pair(p: *const i8) -> (Self::V, Self::V) {
        unsafe {
            // Eight words of two elements each, the even one in the low byte.
            let words = [_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(LANES).cast())]
                .map(|half| _mm256_cvtepi16_epi32(half));
            let even = |w| _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(w));
            (
                words.map(|w| _mm256_cvtepi32_ps(even(w))),
                words.map(|w| _mm256_cvtepi32_ps(_mm256_srai_epi32::<8>(w))),
            )
        }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> Self::Bf16Pairs {
        unsafe { Self::load_bf16_pair(p) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(c: Self::V, a: u32, (even, odd): Self::Bf16Pairs) -> Self::V {
        unsafe {
            let (a0, a1) = (f32::from_bits(a << 16), f32::from_bits(a & 0xffff_0000));
            Self::fma(Self::splat(a0), even, Self::fma(Self::splat(a1), odd, c))
        }
    }
    #[inline(always)]
    unsafe fn zero_i() -> Self::I {
        unsafe { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    unsafe fn i16_pairs(p: *const i8) -> Self::I16Pairs {
        unsafe {
            [_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(LANES).cast())]
                .map(|half| _mm256_cvtepi8_epi16(half))
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(c: Self::I, a: u32, b: Self::I16Pairs) -> Self::I {
        unsafe {
            let a = _mm256_set1_epi32(a as i32);
            [0, 1].map(|i| _mm256_add_epi32(c[i], _mm256_madd_epi16(a, b[i])))
        }
    }
    #[inline(always)]
    unsafe fn i8_quads(p: *const i8) -> Self::I8Quads {
        unsafe {
            let raw = [p, p.add(2 * LANES)].map(|p| _mm256_loadu_si256(p.cast()));
            let even = raw.map(|r| _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(r)));
            let odd = raw.map(|r| _mm256_srai_epi16::<8>(r));
            let first = |i: usize| {
                _mm256_blend_epi16::<0b1010_1010>(even[i], _mm256_slli_epi32::<16>(odd[i]))
            };
            let second = |i: usize| {
                _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even[i]), odd[i])
            };
            [[first(0), first(1)], [second(0), second(1)]]
        }
    }
    #[inline(always)]
    unsafe fn nibble_quads(p: *const u8) -> [Self::U4Quads; 2] {
        unsafe {
            let low = _mm256_set1_epi8(15);
            let raw = [p, p.add(2 * LANES)].map(|p| _mm256_loadu_si256(p.cast()));
            [
                raw.map(|r| _mm256_and_si256(r, low)),
                raw.map(|r| _mm256_and_si256(_mm256_srli_epi16::<4>(r), low)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot_i8(c: Self::I, a: u32, b: Self::U4Quads) -> Self::I {
        unsafe {
            let (a, ones) = (_mm256_set1_epi32(a as i32), _mm256_set1_epi16(1));
            // Two products of 15 · 128 at most fit 16 bits.
            [0, 1].map(|i| {
                let pairs = _mm256_maddubs_epi16(b[i], a);
                _mm256_add_epi32(c[i], _mm256_madd_epi16(pairs, ones))
            })
        }
    }
    #[inline(always)]
    unsafe fn i8_quads_of_pairs(p: *const i8) -> Self::I8Quads {
        unsafe { [Self::i16_pairs(p), Self::i16_pairs(p.add(2 * LANES))] }
    }
    #[inline(always)]
    unsafe fn dot_u8(c: Self::I, a: u32, b: Self::I8Quads) -> Self::I {
        unsafe {
            let a = _mm256_cvtepu8_epi16(_mm_set1_epi32(a as i32));
            let (low, high) = (
                _mm256_shuffle_epi32::<0b00_00_00_00>(a),
                _mm256_shuffle_epi32::<0b01_01_01_01>(a),
            );
            [0, 1].map(|i| {
                let low = _mm256_madd_epi16(low, b[0][i]);
                let high = _mm256_madd_epi16(high, b[1][i]);
                _mm256_add_epi32(c[i], _mm256_add_epi32(low, high))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        unsafe { [p, p.add(8)].map(|p| _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn from_i(v: Self::I) -> Self::V {
        unsafe { v.map(|half| _mm256_cvtepi32_ps(half)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        unsafe {
            let rounded = v.map(|half| {
                let sign = _mm256_set1_ps(-0.0);
                let magnitude = _mm256_andnot_ps(sign, half);
                let normal =
                    _mm256_cmp_ps::<_CMP_GE_OQ>(magnitude, _mm256_set1_ps(f32::MIN_POSITIVE));
                let half = _mm256_and_ps(half, _mm256_or_ps(normal, sign));
                let bits = _mm256_castps_si256(half);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, up))
            });
            // Packing works on halves of registers; the quarters are put in order after it.
            let packed = _mm256_packus_epi32(rounded[0], rounded[1]);
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, v: Self::V) {
        unsafe {
            let whole = v.map(|half| _mm256_cvtps_epi32(half));
            _mm256_storeu_si256(p.cast(), words(whole));
        }
    }
    #[inline(always)]
    unsafe fn store_halves(p: *mut i8, v: Self::V) {
        unsafe {
            let whole = v.map(|half| _mm256_cvtps_epi32(half));
            // Packing saturates: the low bytes are made numbers of their own first.
            let low = whole.map(|w| _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(w)));
            let up = _mm256_set1_epi32(128);
            let high = whole.map(|w| _mm256_srai_epi32::<8>(_mm256_add_epi32(w, up)));
            let bytes = |x: [__m256i; 2]| {
                let words = words(x);
                let upper = _mm256_extracti128_si256::<1>(words);
                _mm_packs_epi16(_mm256_castsi256_si128(words), upper)
            };
            let (high, low) = (bytes(high), bytes(low));
            _mm_storeu_si128(p.cast(), _mm_unpacklo_epi32(high, low));
            _mm_storeu_si128(p.add(LANES).cast(), _mm_unpackhi_epi32(high, low));
        }
    }
    #[inline(always)]
    unsafe fn mul_to_bytes(a: *const i16, b: *const i16, offset: i16, out: *mut u8) {
        unsafe {
            let [low, high] = [0, LANES].map(|i| {
                let a = _mm256_loadu_si256(a.add(i).cast());
                let b = _mm256_loadu_si256(b.add(i).cast());
                let sum = _mm256_add_epi16(_mm256_mulhrs_epi16(a, b), _mm256_set1_epi16(offset));
                _mm256_srli_epi16::<7>(sum)
            });
            // Packing works on halves of registers; the quarters are put in order after it.
            let packed = _mm256_packus_epi16(low, high);
            _mm256_storeu_si256(out.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    unsafe fn select_range(v: Self::V, lo: usize, hi: usize, other: f32) -> Self::V {
        unsafe {
            let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let keep = |half: __m256, base: usize| {
                let lane = _mm256_add_epi32(index, _mm256_set1_epi32(base as i32));
                let from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lo as i32 - 1));
                let to = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi.min(LANES) as i32), lane);
                let mask = _mm256_castsi256_ps(_mm256_and_si256(from, to));
                _mm256_blendv_ps(_mm256_set1_ps(other), half, mask)
            };
            [keep(v[0], 0), keep(v[1], 8)]
        }
    }
}
