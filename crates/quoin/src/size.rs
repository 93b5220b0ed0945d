//! Sizes as people write them (`1GiB`, `512MiB`, `10G`) and as tables show them.

use quoin_core::{BLOCK_SIZE, VOLUME_BLOCKS_MAX};

/// The largest size that any volume may have.
pub const SIZE_BYTES_MAX: u64 = VOLUME_BLOCKS_MAX * BLOCK_SIZE as u64;

const UNITS: [(&str, u64); 20] = [
    ("", 1),
    ("b", 1),
    ("k", 1_000),
    ("kb", 1_000),
    ("ki", 1 << 10),
    ("kib", 1 << 10),
    ("m", 1_000_000),
    ("mb", 1_000_000),
    ("mi", 1 << 20),
    ("mib", 1 << 20),
    ("g", 1_000_000_000),
    ("gb", 1_000_000_000),
    ("gi", 1 << 30),
    ("gib", 1 << 30),
    ("t", 1_000_000_000_000),
    ("tb", 1_000_000_000_000),
    ("ti", 1 << 40),
    ("tib", 1 << 40),
    ("pi", 1 << 50),
    ("pib", 1 << 50),
];

/// Reads a size of at least one byte and at most [`SIZE_BYTES_MAX`].
///
/// # Errors
/// What is wrong with it, and an example of a right one.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if text.starts_with('-') {
        return Err("a size is above 0: write a number and a unit, as in 10GiB".into());
    }
    let digits_end =
        text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let unit = unit.trim().to_ascii_lowercase();
    let Some((_, factor)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        return Err(format!("unknown unit `{unit}`: write KiB, MiB, GiB or TiB, as in 10GiB"));
    };
    let bytes =
        whole_bytes(number, *factor).ok_or("not a size: write a number and a unit, as in 10GiB")?;
    if bytes == 0 {
        return Err("a volume needs a size above 0, as in 10GiB".into());
    }
    if bytes > u128::from(SIZE_BYTES_MAX) {
        return Err(format!("larger than the largest volume ({})", show_size(SIZE_BYTES_MAX)));
    }
    u64::try_from(bytes).map_err(|_| "larger than the largest volume".into())
}

/// `number` may have a fraction ("1.5"); bytes are rounded down.
fn whole_bytes(number: &str, factor: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || whole.len() > 20 || fraction.len() > 9 {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let fraction: u128 = fraction.parse().ok()?;
    Some(whole * u128::from(factor) + fraction * u128::from(factor) / scale)
}

/// "1.0 GiB": three figures at most, binary units.
pub fn show_size(bytes: u64) -> String {
    const NAMES: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut scaled = bytes as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < NAMES.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{scaled:.1} {}", NAMES[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_binary_and_decimal_units_and_with_fractions() {
        for (text, bytes) in [
            ("1GiB", 1 << 30),
            ("1Gi", 1 << 30),
            ("1 gib", 1 << 30),
            ("1.5GiB", 3 << 29),
            ("4096", 4096),
            ("10G", 10_000_000_000),
            ("7b", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn zero_two_to_the_63_and_what_is_no_number_are_refused_with_the_way_out() {
        for (text, words) in [
            ("0", "above 0"),
            ("0.0GiB", "above 0"),
            ("9223372036854775808", "largest volume"),
            ("99999999999999999999TiB", "largest volume"),
            ("999999999999999999999999", "not a size"),
            ("-1GiB", "above 0"),
            ("GiB", "not a size"),
            ("", "not a size"),
            ("1.2.3GiB", "not a size"),
            ("10 parsecs", "unknown unit"),
        ] {
            let message = parse_size(text).unwrap_err();
            assert!(message.contains(words), "{text}: {message}");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_decimal() {
        assert_eq!(show_size(1 << 30), "1.0 GiB");
        assert_eq!(show_size(1536), "1.5 KiB");
        assert_eq!(show_size(17), "17 B");
    }
}
