//! Sizes as people write them (`1GiB`, `512MiB`, `10G`) and as tables show them; numbers that have
//! limits, refused in a sentence.

use std::ops::RangeInclusive;

use quoin_types::{BLOCK_SIZE, VOLUME_BLOCKS_MAX};

/// The largest size that any volume may have.
pub const SIZE_BYTES_MAX: u64 = VOLUME_BLOCKS_MAX * BLOCK_SIZE as u64;

/// No file and no device is larger.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

const UNITS: [(&str, u64); 22] = [
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
    ("p", 1_000_000_000_000_000),
    ("pb", 1_000_000_000_000_000),
    ("pi", 1 << 50),
    ("pib", 1 << 50),
];

/// Reads a volume's size: at least one byte and at most [`SIZE_BYTES_MAX`].
///
/// # Errors
/// The mistake, and an example of a right size.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let none = "a volume needs a size above 0, as in 10GiB";
    parse(text, SIZE_BYTES_MAX, none, "larger than the largest volume")
}

/// The size of a pool, or of another thing that lies on a disk or in memory.
///
/// # Errors
/// See [`parse_size`].
pub fn parse_pool_size(text: &str) -> Result<u64, String> {
    let none = "a pool needs a size above 0, as in 10GiB";
    parse(text, FILE_BYTES_MAX, none, "larger than any file or device")
}

/// Memory that is set aside.
///
/// # Errors
/// See [`parse_size`].
pub fn parse_memory(text: &str) -> Result<u64, String> {
    let none = "some memory is needed, as in 128MiB";
    parse(text, FILE_BYTES_MAX, none, "larger than any memory")
}

/// Bytes a second.
///
/// # Errors
/// See [`parse_size`].
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let none = "with a limit of 0 nothing would be served: give more, as in 100MiB, or leave it out \
                for no limit";
    parse(text, FILE_BYTES_MAX, none, "more than any disk moves in a second")
}

fn parse(text: &str, most: u64, none: &str, too_large: &str) -> Result<u64, String> {
    let text = text.trim();
    if text.starts_with('-') {
        return Err("a size is above 0: write a number and a unit, as in 10GiB".into());
    }
    let digits_end =
        text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let unit = unit.trim().to_ascii_lowercase();
    let Some((_, factor)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        return Err(format!("unknown unit {unit:?}: write KiB, MiB, GiB, TiB or PiB, as in 10GiB"));
    };
    let bytes =
        whole_bytes(number, *factor).ok_or("not a size: write a number and a unit, as in 10GiB")?;
    if bytes == 0 {
        return Err(none.into());
    }
    let fitting = u64::try_from(bytes).ok().filter(|bytes| *bytes <= most);
    fitting.ok_or_else(|| format!("{too_large} ({})", show_size(most)))
}

/// Reads a whole number of which `rule` says what is allowed, and why.
pub fn number_within<T: TryFrom<u64>>(
    allowed: RangeInclusive<u64>,
    rule: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.trim().parse::<i128>();
        let number = number.map_err(|_| format!("not a whole number: {rule}"))?;
        let number = u64::try_from(number).ok().filter(|number| allowed.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| rule.to_owned())
    }
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
    fn sizes_are_parsed_in_binary_and_decimal_units_and_with_fractions() {
        for (text, bytes) in [
            ("1GiB", 1 << 30),
            ("1Gi", 1 << 30),
            ("1 gib", 1 << 30),
            ("1.5GiB", 3 << 29),
            ("4096", 4096),
            ("10G", 10_000_000_000),
            ("7b", 7),
            ("1PiB", 1 << 50),
            ("2Pi", 2 << 50),
            ("3PB", 3_000_000_000_000_000),
            ("1.5p", 1_500_000_000_000_000),
            ("64PiB", SIZE_BYTES_MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn zero_two_to_the_63_and_text_are_refused_with_the_way_out() {
        for (text, words) in [
            ("0", "above 0"),
            ("0.0GiB", "above 0"),
            ("9223372036854775808", "largest volume"),
            ("99999999999999999999TiB", "largest volume"),
            ("99999999999999999999PiB", "largest volume"),
            ("65PiB", "largest volume (64.0 PiB)"),
            ("73PB", "largest volume"),
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
    fn the_error_of_a_size_names_the_object_that_has_it() {
        assert!(parse_pool_size("0").unwrap_err().contains("a pool needs"));
        assert_eq!(parse_pool_size("100PiB"), Ok(100 << 50));
        assert!(parse_pool_size("9000PiB").unwrap_err().contains("file or device"));
        assert!(parse_rate("0").unwrap_err().contains("for no limit"));
        assert!(parse_memory("0").unwrap_err().contains("memory"));
        assert!(parse_size("1 \u{1b}[31m").unwrap_err().contains("\"\\u{1b}[31m\""));
    }

    #[test]
    fn numbers_out_of_their_range_are_refused_by_the_rule() {
        let read = number_within::<u8>(1..=8, "1 to 8 of them");
        assert_eq!((read("1"), read("8")), (Ok(1), Ok(8)));
        for text in ["0", "9", "-1", "300", "99999999999999999999999"] {
            assert_eq!(read(text), Err("1 to 8 of them".into()), "{text}");
        }
        for text in ["", "x", "1.5"] {
            assert_eq!(read(text), Err("not a whole number: 1 to 8 of them".into()), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_decimal() {
        assert_eq!(show_size(1 << 30), "1.0 GiB");
        assert_eq!(show_size(1536), "1.5 KiB");
        assert_eq!(show_size(17), "17 B");
    }
}
