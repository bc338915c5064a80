//! fp8 e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning"): 4 exponent bits of bias
//! 7, 3 mantissa bits, no infinity, largest number 448.

/// Nearest e4m3, ties to even; larger magnitudes become 448, NaN stays NaN.
pub(crate) fn encode(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    let x = x.abs();
    if x.is_nan() {
        return sign | 0x7f;
    }
    if x >= 448.0 {
        return sign | 0x7e;
    }
    // Below 2⁻⁶ numbers are spaced evenly.
    let exponent = ((x.to_bits() >> 23) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    let units = (x / step).round_ties_even() as i32;
    // 16 units carry into the exponent; fewer than 8 are a subnormal.
    sign | ((exponent + 6) * 8 + units) as u8
}

/// The number an e4m3 code stands for.
pub(crate) fn decode(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * power(-9),
        (e, _) => (8.0 + mantissa) * power(e - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn power(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips_and_rounding_is_to_the_nearest() {
        for code in 0..=255u8 {
            let x = decode(code);
            if x.is_nan() {
                assert_eq!(code & 0x7f, 0x7f);
                continue;
            }
            assert_eq!(encode(x), code, "{x}");
        }
        for i in 0..4480 {
            let x = i as f32 / 10.0 + 0.037;
            let nearest = (0..0x7f)
                .map(decode)
                .min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs()))
                .unwrap();
            assert_eq!((decode(encode(x)) - x).abs(), (nearest - x).abs(), "{x}");
        }
        assert_eq!((decode(0x7e), encode(1e9), encode(-1e9)), (448.0, 0x7e, 0xfe));
    }
}
