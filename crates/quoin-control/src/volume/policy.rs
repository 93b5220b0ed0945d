//! Times at which replicas are replaced, or moved to even out pools, without a request.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

pub use quoin_api::volume::ReplaceAfter;
use quoin_api::volume::{parse_time, write_time};

/// Text for "never".
const OFF: &str = "off";

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
        parse_time(text).filter(sound).map(Self).ok_or_else(wrong)
    }
}

/// How far apart in what is used of them the fullest and the emptiest pool are before replicas move
/// between them.
///
/// It is on unless told otherwise: a pool that fills up stops the writes of all volumes in it while
/// others have room, no person watches for that, and a paced move is not felt. It is far enough apart
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
        fn a_policy_reads_back_as_it_was_written(ms in 1000u64..31_536_000_000) {
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
