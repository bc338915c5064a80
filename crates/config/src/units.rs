//! Byte counts and times as people write them.

use std::time::Duration;

const UNITS: [(&str, u64); 7] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

/// Reads `512MiB`, `1.5 GiB`, `1000000`.
///
/// # Errors
/// What was expected instead.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let err = || format!("{text:?} is not a size: write bytes, or a number and KiB, MiB, GiB");
    let unit = UNITS.iter().find(|(name, _)| text.ends_with(name));
    let (number, factor) =
        unit.map_or((text, 1), |(name, factor)| (text.trim_end_matches(name).trim_end(), *factor));
    let number: f64 = number.parse().map_err(|_| err())?;
    let bytes = number * factor as f64;
    if !(0.0..1e18).contains(&bytes) {
        return Err(err());
    }
    Ok(bytes as u64)
}

/// Writes a byte count that reads back as itself.
pub(crate) fn exact_bytes(bytes: u64) -> String {
    let unit = UNITS[..4].iter().rev().find(|(_, factor)| bytes.is_multiple_of(*factor));
    unit.map_or_else(|| bytes.to_string(), |(name, factor)| format!("{}{name}", bytes / factor))
}

/// Writes a byte count with three significant digits.
pub fn format_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        return format!("{bytes} B");
    }
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {}", units[unit])
}

const TIMES: [(&str, u64); 4] = [("ms", 1), ("min", 60_000), ("h", 3_600_000), ("s", 1_000)];

/// Reads `500ms`, `10s`, `2min`, `1h`.
///
/// # Errors
/// What was expected instead.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let err = || format!("{text:?} is not a time: write a number and ms, s, min or h");
    let (name, factor) = TIMES.iter().find(|(name, _)| text.ends_with(name)).ok_or_else(err)?;
    let number: f64 = text.trim_end_matches(name).trim_end().parse().map_err(|_| err())?;
    let ms = number * *factor as f64;
    if !(0.0..1e12).contains(&ms) {
        return Err(err());
    }
    Ok(Duration::from_millis(ms as u64))
}

/// Writes a time that reads back as itself.
pub fn format_duration(time: Duration) -> String {
    let ms = time.as_millis() as u64;
    let fits = |(_, factor): &&(&str, u64)| ms > 0 && ms.is_multiple_of(*factor);
    let unit = TIMES.iter().filter(fits).max_by_key(|t| t.1);
    unit.map_or_else(|| format!("{ms}ms"), |(name, factor)| format!("{}{name}", ms / factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes("1000"), Ok(1000));
        assert!(parse_bytes("much").is_err() && parse_bytes("-1").is_err());
        assert_eq!(exact_bytes(1500 << 20), "1500MiB");
        assert_eq!(exact_bytes(12_345), "12345");
        assert_eq!(format_bytes(512), "512 B");
        assert_eq!(format_bytes(23_592_960), "22.5 MiB");
        assert_eq!(format_bytes(1 << 30), "1.00 GiB");
    }

    #[test]
    fn times() {
        for text in ["250ms", "10s", "2min", "1h", "90s", "0ms"] {
            assert_eq!(format_duration(parse_duration(text).unwrap()), text);
        }
        assert_eq!(parse_duration("1.5 s"), Ok(Duration::from_millis(1500)));
        assert!(parse_duration("10").is_err() && parse_duration("-1s").is_err());
    }
}
