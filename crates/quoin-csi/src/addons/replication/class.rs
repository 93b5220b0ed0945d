//! Parameters of a replication class, which come with every call, and of a class of groups.
//!
//! No parameter consents to a loss: one that is in a class would consent for ever, and for every volume.

use std::collections::HashMap;

use quoin_api::control::EnableMirrorRequest;
use tonic::Status;

use crate::limits;
use crate::refusal::invalid;

const FIELD: &str = "parameters";
/// Keys of orchestrators: they are not the user's.
const FOREIGN_PREFIXES: [&str; 2] = ["csi.storage.k8s.io/", "replication.storage.openshift.io/"];
/// Key of a class of groups: it begins the names that people see.
const NAME_PREFIX: &str = "volumeGroupNamePrefix";

const DAY_S: u64 = 24 * 3600;
const INTERVAL_S: std::ops::RangeInclusive<u64> = 10..=30 * DAY_S;
/// Lowest limit, in bytes a second.
const BANDWIDTH_MIN: u64 = 64 << 10;

struct Parameter {
    key: &'static str,
    values: &'static str,
    /// Sets the value; `None` if it is none of the allowed ones.
    set: fn(&mut EnableMirrorRequest, &str) -> Option<()>,
}

const PARAMETERS: [Parameter; 8] = [
    Parameter {
        key: "schedulingInterval",
        values: "a number and one of s, m, h, d, from 10s to 30d",
        set: |settings, value| {
            settings.interval_s = interval(value)?;
            Some(())
        },
    },
    Parameter {
        key: "peer",
        values: "the name or the id of a peer, as `quoin mirror peers` has it",
        set: |settings, value| {
            settings.peer = value.to_owned();
            (!value.is_empty()).then_some(())
        },
    },
    Parameter {
        key: "compression",
        values: "zstd | none",
        set: |settings, value| {
            settings.compression = value.to_owned();
            matches!(value, "zstd" | "none").then_some(())
        },
    },
    Parameter {
        key: "bandwidthLimit",
        values: "bytes a second, 65536 at least, with KiB, MiB or GiB behind the number or without",
        set: |settings, value| {
            settings.bandwidth_limit = bandwidth(value)?;
            Some(())
        },
    },
    Parameter {
        key: "onLivePeer",
        values: "refuse | takeOver",
        set: |settings, value| {
            settings.may_take_over = value == "takeOver";
            matches!(value, "refuse" | "takeOver").then_some(())
        },
    },
    Parameter {
        key: "mirroringMode",
        values: "snapshot: copies are made point by point",
        set: |_, value| (value == "snapshot").then_some(()),
    },
    // Keys of another system's classes, which say nothing here.
    Parameter { key: "flattenMode", values: "any", set: |_, _| Some(()) },
    Parameter { key: "clusterID", values: "any", set: |_, _| Some(()) },
];

fn interval(text: &str) -> Option<u64> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let factor = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => DAY_S,
        _ => return None,
    };
    number(digits)?.checked_mul(factor).filter(|seconds| INTERVAL_S.contains(seconds))
}

fn bandwidth(text: &str) -> Option<u64> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("", 1)];
    let (digits, factor) =
        units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))?;
    number(digits)?.checked_mul(factor).filter(|limit| *limit >= BANDWIDTH_MIN)
}

fn number(digits: &str) -> Option<u64> {
    let is_number = (1..=15).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

/// Reads the parameters of a call of the Replication service.
///
/// # Errors
/// 3 for a key that is none, and for a value that its key does not have.
pub(super) fn read(given: &HashMap<String, String>) -> Result<EnableMirrorRequest, Status> {
    read_with(given, &[])
}

/// Reads the parameters of a call of the VolumeGroup service: the beginning of the group's name. Managers hand the
/// class of the replication over as well, of which a group uses nothing.
///
/// # Errors
/// As [`read`].
pub(in crate::addons) fn of_group(given: &HashMap<String, String>) -> Result<String, Status> {
    let prefix = given.get(NAME_PREFIX).cloned().unwrap_or_default();
    limits::optional(NAME_PREFIX, &prefix)?;
    read_with(given, &[NAME_PREFIX]).map(|_| prefix)
}

fn read_with(
    given: &HashMap<String, String>,
    others: &[&'static str],
) -> Result<EnableMirrorRequest, Status> {
    limits::map(FIELD, given)?;
    let mut settings = EnableMirrorRequest::default();
    // Sorted, so that the same request is always refused for the same key.
    let mut sorted: Vec<_> = given.iter().collect();
    sorted.sort();
    for (key, value) in sorted {
        let is_foreign = FOREIGN_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        if is_foreign || others.contains(&key.as_str()) {
            continue;
        }
        let known = || PARAMETERS.iter().map(|one| one.key).chain(others.iter().copied());
        let Some(found) = PARAMETERS.iter().find(|one| one.key == key) else {
            let shown: String = key.chars().take(64).collect();
            let hint = match quoin_api::volume::nearest(key, known()) {
                Some(nearest) => format!("did you mean {nearest:?}?"),
                None => format!("there are {}", known().collect::<Vec<_>>().join(", ")),
            };
            return Err(invalid(FIELD, format!("has {shown:?}, which is no parameter: {hint}")));
        };
        if (found.set)(&mut settings, value).is_none() {
            let why = format!("has {key:?} with a value that is none of: {}", found.values);
            return Err(invalid(FIELD, why));
        }
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_class_is_read_with_every_key_and_without_any() {
        let none = read(&HashMap::new()).unwrap();
        assert_eq!(none, EnableMirrorRequest::default());
        let all = read(&map(&[
            ("schedulingInterval", "2m"),
            ("peer", "west"),
            ("compression", "none"),
            ("bandwidthLimit", "10MiB"),
            ("onLivePeer", "takeOver"),
            ("mirroringMode", "snapshot"),
            ("flattenMode", "force"),
            ("clusterID", "rook-ceph"),
            ("replication.storage.openshift.io/replication-secret-name", "s"),
        ]))
        .unwrap();
        assert_eq!((all.interval_s, all.peer.as_str(), all.may_take_over), (120, "west", true));
        assert_eq!((all.compression.as_str(), all.bandwidth_limit), ("none", 10 << 20));
        for (text, seconds) in [("10s", 10), ("1h", 3600), ("30d", 30 * DAY_S)] {
            assert_eq!(read(&map(&[("schedulingInterval", text)])).unwrap().interval_s, seconds);
        }
    }

    #[test]
    fn intervals_and_bandwidths_are_taken_at_their_limits() {
        for (text, seconds) in [
            ("9s", None),
            ("10s", Some(10)),
            ("11s", Some(11)),
            ("2592000s", Some(30 * DAY_S)),
            ("2592001s", None),
            ("29d", Some(29 * DAY_S)),
            ("30d", Some(30 * DAY_S)),
            ("31d", None),
            ("720h", Some(30 * DAY_S)),
            ("721h", None),
            ("43200m", Some(30 * DAY_S)),
            ("43201m", None),
            ("000000000000010s", Some(10)),
            ("0000000000000010s", None),
        ] {
            assert_eq!(interval(text), seconds, "{text}");
        }
        for (text, bytes) in [
            ("65535", None),
            ("65536", Some(65536)),
            ("65537", Some(65537)),
            ("63KiB", None),
            ("64KiB", Some(65536)),
            ("1MiB", Some(1 << 20)),
            ("1GiB", Some(1 << 30)),
            ("999999999999999", Some(999_999_999_999_999)),
            ("1000000000000000", None),
        ] {
            assert_eq!(bandwidth(text), bytes, "{text}");
        }
        for (bytes, is_taken) in [(127, true), (128, true), (129, false)] {
            let prefix = "x".repeat(bytes);
            assert_eq!(of_group(&map(&[(NAME_PREFIX, &prefix)])).is_ok(), is_taken, "{bytes}");
        }
    }

    #[test]
    fn a_value_that_its_key_does_not_have_is_refused_with_those_that_it_has() {
        let intervals =
            ["", "0m", "9s", "31d", "1", "1w", "-1m", "1.5h", "m", "99999999999999999d"];
        let mut bad: Vec<_> = intervals.map(|value| ("schedulingInterval", value)).into();
        bad.extend([
            ("peer", ""),
            ("compression", "gzip"),
            ("bandwidthLimit", "1"),
            ("bandwidthLimit", "10MB"),
            ("bandwidthLimit", "999999999999999GiB"),
            ("onLivePeer", "TakeOver"),
            ("mirroringMode", "journal"),
        ]);
        for (key, value) in bad {
            let refused = read(&map(&[(key, value)])).unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{key}={value}");
            assert!(refused.message().contains(key), "{refused}");
        }
        let near = read(&map(&[("schedulinginterval", "1m")])).unwrap_err();
        assert!(near.message().contains("did you mean \"schedulingInterval\""), "{near}");
        assert_eq!(read(&map(&[(NAME_PREFIX, "x")])).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(of_group(&map(&[(NAME_PREFIX, "x"), ("peer", "west")])).unwrap(), "x");
        assert_eq!(of_group(&map(&[("peer", "")])).unwrap_err().code(), Code::InvalidArgument);
    }
}
