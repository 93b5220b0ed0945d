//! When replicas are replaced, or moved to even out pools, without anybody asking.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What is written for "never".
const OFF: &str = "off";
/// Longer is meant to be never, and said so.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
const UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// How long a replica must be gone before another one is made in its place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ReplaceAfter {
    After(Duration),
    /// Only what people declare changes anything.
    Never,
}

impl ReplaceAfter {
    /// Of a cluster that does not say: longer than a host takes to be restarted.
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

/// Not a time such as "10m", nor "off".
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither a time, as in 90s, 10m or 2h, of a second to a year, nor off")]
pub struct NotATime(String);

fn time(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let size = UNITS.iter().find(|(name, _)| *name == unit)?.1;
    number.parse::<u64>().ok()?.checked_mul(size).map(Duration::from_millis)
}

fn write_time(time: Duration, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let ms = time.as_millis() as u64;
    let mut units = UNITS.iter().rev();
    let (unit, size) = units.find(|(_, size)| ms.is_multiple_of(*size)).expect("1 ms divides all");
    write!(f, "{}{unit}", ms / size)
}

/// The time in which what a pool's disk does counts together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Within(pub Duration);

impl Within {
    pub const DEFAULT: Self = Self(Duration::from_secs(600));
    /// Pools report every few seconds.
    const LEAST: Duration = Duration::from_secs(60);
    const MOST: Duration = Duration::from_secs(7 * 24 * 3600);
}

impl fmt::Display for Within {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_time(self.0, f)
    }
}

/// Not a time such as "10m".
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no time, as in 10m or 2h, of a minute to seven days")]
pub struct NotAWindow(String);

impl FromStr for Within {
    type Err = NotAWindow;

    fn from_str(text: &str) -> Result<Self, NotAWindow> {
        let sound = |time: &Duration| (Self::LEAST..=Self::MOST).contains(time);
        let wrong = || NotAWindow(text.chars().take(40).collect());
        time(text).filter(sound).map(Self).ok_or_else(wrong)
    }
}

impl FromStr for ReplaceAfter {
    type Err = NotATime;

    fn from_str(text: &str) -> Result<Self, NotATime> {
        if text == OFF {
            return Ok(Self::Never);
        }
        let wrong = || NotATime(text.chars().take(40).collect());
        let after = time(text).ok_or_else(wrong)?;
        // Less would replace a replica for each hiccup of a network.
        let sound = (Duration::from_secs(1)..=LONGEST).contains(&after);
        sound.then_some(Self::After(after)).ok_or_else(wrong)
    }
}

/// How far apart in what is used of them the fullest and the emptiest pool are before replicas move
/// between them.
///
/// It is on unless told otherwise: a pool that fills up stops the writes of all volumes in it while
/// others have room, nobody watches for that, and a paced move is not felt. It is far enough apart
/// that pools which placement keeps even, or that differ by one volume's garbage, are let alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RebalanceAt {
    /// Percent of their capacities.
    Apart(u8),
    /// Only what people ask for, and what heals, moves replicas.
    Never,
}

impl RebalanceAt {
    pub const DEFAULT: Self = Self::Apart(20);
    /// Closer pools would be evened out for what cleaning up makes of them by itself.
    const LEAST: u8 = 5;
    const MOST: u8 = 90;

    pub(crate) fn percent(self) -> Option<u8> {
        match self {
            Self::Apart(percent) => Some(percent),
            Self::Never => None,
        }
    }
}

impl Default for RebalanceAt {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for RebalanceAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apart(percent) => write!(f, "{percent}%"),
            Self::Never => f.write_str(OFF),
        }
    }
}

/// Not a share such as "20%", nor "off".
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither a share of a pool, as in 20%, of 5% to 90%, nor off")]
pub struct NotAShare(String);

impl FromStr for RebalanceAt {
    type Err = NotAShare;

    fn from_str(text: &str) -> Result<Self, NotAShare> {
        if text == OFF {
            return Ok(Self::Never);
        }
        let wrong = || NotAShare(text.chars().take(40).collect());
        let digits = text.strip_suffix('%').unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let percent = digits.parse().ok().filter(|_| is_number).ok_or_else(wrong)?;
        let sound = (Self::LEAST..=Self::MOST).contains(&percent);
        sound.then_some(Self::Apart(percent)).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    #[test]
    fn windows_of_a_minute_to_a_week_are_read_and_others_refused() {
        let read = |text: &str| text.parse::<Within>();
        assert_eq!(read("600s").unwrap(), Within::DEFAULT);
        assert_eq!(read("7d").unwrap().to_string(), "7d");
        for text in ["59s", "8d", "off", "", "10"] {
            assert!(read(text).unwrap_err().to_string().contains(&format!("{text:?}")));
        }
    }

    #[test]
    fn shares_are_read_with_and_without_their_sign_and_others_are_refused_by_what_was_written() {
        let read = |text: &str| text.parse::<RebalanceAt>();
        for (text, meant) in [
            ("20%", RebalanceAt::DEFAULT),
            ("5", RebalanceAt::Apart(5)),
            ("off", RebalanceAt::Never),
        ] {
            assert_eq!(read(text).unwrap(), meant);
            assert_eq!(read(&meant.to_string()).unwrap(), meant);
        }
        for text in ["", "%", "4%", "91%", "+20%", "20 %", "20%%", "1000", "on"] {
            let refusal = read(text).unwrap_err().to_string();
            assert!(refusal.contains(&format!("{text:?}")), "{refusal}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(ms in 1000u64..31_536_000_000) {
            let after = ReplaceAfter::After(Duration::from_millis(ms));
            prop_assert_eq!(after.to_string().parse::<ReplaceAfter>().unwrap(), after);
        }

        #[test]
        fn no_text_panics(text in ".*") {
            let _ = text.parse::<ReplaceAfter>();
            let _ = text.parse::<RebalanceAt>();
            let _ = text.parse::<Within>();
        }
    }
}
