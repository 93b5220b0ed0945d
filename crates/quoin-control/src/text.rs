//! Numbers and names in messages, as people read and type them.

/// "3 GiB" where that is exact, else "1.3 GiB (1395864371 bytes)": a refusal that hides the
/// bytes which are too many explains nothing.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = (1..=UNITS.len()).rev().find(|power| count >> (10 * power) > 0);
    let Some(power) = unit else { return format!("{count} bytes") };
    let (factor, name) = (1u64 << (10 * power), UNITS[power - 1]);
    match count.is_multiple_of(factor) {
        true => format!("{} {name}", count / factor),
        false => format!("{:.1} {name} ({count} bytes)", count as f64 / factor as f64),
    }
}

/// Text from outside as it is kept and logged: control characters, which move a terminal or begin a
/// line of their own, are written out, and so are those that turn the direction of writing.
pub(crate) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for letter in text.chars() {
        match is_control(letter) {
            true => plain.extend(letter.escape_default()),
            false => plain.push(letter),
        }
    }
    plain
}

pub(crate) fn is_control(letter: char) -> bool {
    letter.is_control() || matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A name as a shell takes it whole.
pub(crate) fn quoted(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match !name.starts_with('-') && name.bytes().all(is_plain) {
        true => name.to_owned(),
        false => format!("'{}'", name.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn text_from_outside_moves_no_terminal_and_forges_no_line() {
        let forged = "ok\n2026-01-01 admin/root AdminRemoved\u{1b}]52;c;\u{7}\u{9b}2J\u{202e}ä";
        let plain = super::plain(forged);
        assert!(!plain.chars().any(super::is_control), "{plain}");
        assert!(plain.starts_with("ok\\n2026") && plain.ends_with("\\u{202e}ä"), "{plain}");
        assert_eq!(super::plain("plain, 3 GiB (ü)"), "plain, 3 GiB (ü)");
    }

    #[test]
    fn names_with_other_than_plain_letters_are_quoted() {
        assert_eq!(super::quoted("db-1"), "db-1");
        assert_eq!(super::quoted("it's; rm"), "'it'\\''s; rm'");
    }

    #[test]
    fn sizes_are_exact_or_say_both() {
        assert_eq!(super::bytes(0), "0 bytes");
        assert_eq!(super::bytes(1023), "1023 bytes");
        assert_eq!(super::bytes(1 << 30), "1 GiB");
        assert_eq!(super::bytes(3 << 29), "1.5 GiB (1610612736 bytes)");
        assert_eq!(super::bytes(u64::MAX), "16384.0 PiB (18446744073709551615 bytes)");
    }
}
