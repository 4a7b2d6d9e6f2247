//! Sizes and durations as people write them.

use std::time::Duration;

const SIZES: [(&str, u64); 11] = [
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];
const TIMES: [(&str, u64); 6] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

fn split(text: &str) -> Option<(u64, &str)> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
    let number = text.get(..digits)?.replace('_', "").parse().ok()?;
    Some((number, text.get(digits..)?.trim_start()))
}

/// Reads `64MiB`, `4 GB`, `4096`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "{text:?} is no size: write a whole number and B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        )
    };
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let (_, factor) = SIZES.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    number.checked_mul(*factor).ok_or_else(|| format!("{text:?} is more than 2^64 bytes"))
}

/// Reads `100ms`, `2 s`; a bare number has no meaning.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is no duration: write a whole number and ns, us, ms, s, min or h");
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let (_, factor) = TIMES.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    number
        .checked_mul(*factor)
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("{text:?} is more than 584 years"))
}

/// Reads permission bits in octal.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("write permission bits in octal, 0 to 7777".into()),
    }
}

/// Reads 32 hexadecimal digits, with or without dashes.
pub fn parse_uuid(text: &str) -> Result<[u8; 16], String> {
    let wrong = || "write 32 hexadecimal digits, with or without dashes".to_string();
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    let pair = |i: usize| u8::from_str_radix(digits.get(2 * i..2 * i + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..16).map(pair).collect();
    bytes.and_then(|b| b.try_into().ok()).ok_or_else(wrong)
}

/// The shortest exact form with a binary unit.
pub fn show_bytes(bytes: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

/// The shortest exact form.
pub fn show_duration(duration: Duration) -> String {
    let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    if nanos == 0 {
        return "0ms".into();
    }
    let exact = TIMES[..4].iter().rev().find(|(_, unit)| nanos.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{nanos}ns"), |(name, unit)| format!("{}{name}", nanos / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_read_back() {
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("4 kB"), Ok(4000));
        assert_eq!(parse_bytes("1_000"), Ok(1000));
        for bad in ["", "MiB", "-1", "1.5GiB", "1 mib", "99999999999TiB", "18446744073709551616"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_duration("100ms"), Ok(Duration::from_millis(100)));
        for bad in ["", "100", "1.5s", "1 year", "99999999999999999h"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        for bytes in [0, 1, 4096, 4097, 64 << 20, 3 << 40, u64::MAX] {
            assert_eq!(parse_bytes(&show_bytes(bytes)), Ok(bytes));
        }
        for nanos in [0, 1, 1_000, 1_500_000, 2_000_000_000, 90_000_000_000] {
            let duration = Duration::from_nanos(nanos);
            assert_eq!(parse_duration(&show_duration(duration)), Ok(duration));
        }
    }
}
