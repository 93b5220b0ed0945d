//! Editions of the interface: the newest one whose capabilities are advertised.
//!
//! Later editions add calls and capabilities and change nothing that was there, so one set of
//! messages serves all of them. A client may take a capability that it does not know for a fault of
//! the plugin: the field's conformance suite does. So calls of later editions than the chosen one
//! are not advertised, and are refused as not served.

use std::fmt;
use std::str::FromStr;

/// An edition: 1.8 to 1.13.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edition {
    minor: u32,
}

impl Edition {
    /// The edition of the document that the plugin is built from.
    pub const OLDEST: Self = Self { minor: 8 };
    /// With ControllerModifyVolume.
    pub const V1_9: Self = Self { minor: 9 };
    /// With SnapshotMetadata.
    pub const V1_10: Self = Self { minor: 10 };
    /// With GetSnapshot.
    pub const V1_12: Self = Self { minor: 12 };
    /// With health and with the topology of snapshots.
    pub const NEWEST: Self = Self { minor: 13 };
}

impl Default for Edition {
    /// The one that the field's conformance suite knows.
    fn default() -> Self {
        Self::V1_12
    }
}

impl fmt::Display for Edition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}", self.minor)
    }
}

impl FromStr for Edition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let minor = text.strip_prefix("1.").filter(|minor| !minor.starts_with('0'));
        let edition = minor.and_then(|minor| minor.parse().ok()).map(|minor| Self { minor });
        let (oldest, newest) = (Self::OLDEST, Self::NEWEST);
        edition
            .filter(|edition| (oldest..=newest).contains(edition))
            .ok_or_else(|| format!("edition {text:?} is not one of {oldest} to {newest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edition_is_one_of_1_8_to_1_13() {
        for minor in 8..=13 {
            let text = format!("1.{minor}");
            assert_eq!(text.parse::<Edition>().unwrap().to_string(), text);
        }
        for bad in ["", "1", "1.7", "1.14", "2.0", "1.08", "1.+9", "1.12.0", "v1.12"] {
            assert!(bad.parse::<Edition>().unwrap_err().contains("1.8 to 1.13"), "{bad}");
        }
        assert!("1.9".parse::<Edition>().unwrap() < Edition::default());
    }
}
