//! Time after which a replica that is gone is replaced, and the text form of times.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Text for "never".
const OFF: &str = "off";
/// Longest time. A longer one means never, for which there is a word.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
const UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// Time for which a replica must be gone before another one is made instead.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ReplaceAfter {
    After(Duration),
    /// Only users' requests change anything.
    Never,
}

impl ReplaceAfter {
    /// Default of a cluster: longer than the restart of a host.
    pub const DEFAULT: Self = Self::After(Duration::from_secs(600));
}

impl Default for ReplaceAfter {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for ReplaceAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::After(after) = self else { return f.write_str(OFF) };
        write_time(*after, f)
    }
}

/// A text that is neither a time such as "10m" nor "off".
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither a time, as in 90s, 10m or 2h, of a second to a year, nor off")]
pub struct NotATime(String);

impl FromStr for ReplaceAfter {
    type Err = NotATime;

    fn from_str(text: &str) -> Result<Self, NotATime> {
        if text == OFF {
            return Ok(Self::Never);
        }
        let wrong = || NotATime(text.chars().take(40).collect());
        let after = parse_time(text).ok_or_else(wrong)?;
        // A shorter time would replace a replica for each hiccup of a network.
        let sound = (Duration::from_secs(1)..=LONGEST).contains(&after);
        sound.then_some(Self::After(after)).ok_or_else(wrong)
    }
}

/// Parses a whole number and its unit, as in 90s; `None`: the text has another form.
pub fn parse_time(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let size = UNITS.iter().find(|(name, _)| *name == unit)?.1;
    number.parse::<u64>().ok()?.checked_mul(size).map(Duration::from_millis)
}

/// Writes a time in the largest unit that fits.
pub fn write_time(time: Duration, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let ms = time.as_millis() as u64;
    let mut units = UNITS.iter().rev();
    let (unit, size) = units.find(|(_, size)| ms.is_multiple_of(*size)).expect("1 ms divides all");
    write!(f, "{}{unit}", ms / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_unit_and_written_in_the_largest_that_fits() {
        let read = |text: &str| text.parse::<ReplaceAfter>().unwrap();
        assert_eq!(read("off"), ReplaceAfter::Never);
        assert_eq!(read("600s").to_string(), "10m");
        assert_eq!(read("90s").to_string(), "90s");
        assert_eq!(read("1500ms").to_string(), "1500ms");
        assert_eq!(read("48h").to_string(), "2d");
        assert_eq!(read("10m"), ReplaceAfter::DEFAULT);
    }

    #[test]
    fn what_is_no_time_is_refused_by_what_was_written() {
        for text in ["", "10", "m", "-1s", "1w", "0s", "999ms", "366d", "Off", "9e9s", "1 m"] {
            let refusal = text.parse::<ReplaceAfter>().unwrap_err().to_string();
            assert!(refusal.contains(&format!("{text:?}")), "{refusal}");
        }
    }
}
