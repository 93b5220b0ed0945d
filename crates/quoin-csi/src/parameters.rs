//! The parameters of a storage class, as they become a volume's specification.
//!
//! One spelling is the project's own; names of other systems are accepted as aliases. Unknown keys are
//! refused by name, all at once, because dropping a parameter silently would break a promise silently.
//! A class that was another system's may say that its keys are to be ignored.
//! Keys of Kubernetes' own sidecars (`csi.storage.k8s.io/…`) are ignored and never compared.

use std::collections::{BTreeMap, HashMap};

use quoin_api::control::VolumeSpec;
use quoin_api::volume::{OPTIONS, VolumeOption};
use tonic::Status;

use crate::encryption::PARAMETER;
use crate::refusal::invalid;

const PARAMETERS: &str = "parameters";
const MUTABLE: &str = "mutable_parameters";
const REPLICAS: &str = "replicas";

/// Fate of keys that Quoin does not know, as those of the system that a class was made for.
const UNKNOWN_KEYS: &str = "unknownParameters";
const IGNORE: &str = "ignore";
/// Limit of the unknown keys that a refusal names.
const NAMED_MAX: usize = 16;

/// Prefix of keys that sidecars add; they are not the user's.
const FOREIGN_PREFIX: &str = "csi.storage.k8s.io/";

/// Keys of sidecars, without their prefix, by which people know a volume.
const CLAIM: [&str; 3] = ["pvc/name", "pvc/namespace", "pv/name"];

/// No controller allows more (`quoin controller run --max-replicas`).
const REPLICAS_HARD_MAX: u32 = 8;

/// A parameter that is no option of the volume itself.
struct Other {
    key: &'static str,
    aliases: &'static [&'static str],
    values: &'static str,
    /// Sets the value; `None` if it is none of the allowed ones.
    set: fn(&mut VolumeSpec, &str) -> Option<()>,
}

const OTHERS: [Other; 6] = [
    Other {
        key: REPLICAS,
        aliases: &["repl", "numberOfReplicas", "replicaCount"],
        values: "1 to as many as the cluster allows (5, at most 8); its default is 3",
        // The controller decides how many are allowed.
        set: |spec, value| factor(value).map(|replicas| spec.replicas = replicas),
    },
    Other {
        key: "consistencyFactor",
        aliases: &[],
        values: "1 to replicas; floor(replicas / 2) + 1 unless given",
        set: |spec, value| factor(value).map(|factor| spec.consistency_factor = factor),
    },
    Other {
        key: "allowLossOnSingleFailure",
        aliases: &[],
        values: "true | false",
        set: |spec, value| {
            spec.allow_loss_on_single_failure = value.parse().ok()?;
            Some(())
        },
    },
    Other {
        key: "thin",
        aliases: &["thinProvision"],
        values: "true",
        set: |_, value| (value == "true").then_some(()),
    },
    Other {
        key: "encrypted",
        aliases: &[],
        values: "true | false",
        // The key comes with the call's secrets.
        set: |_, value| matches!(value, "true" | "false").then_some(()),
    },
    Other {
        key: UNKNOWN_KEYS,
        aliases: &[],
        values: "refuse | ignore",
        set: |_, value| matches!(value, "refuse" | IGNORE).then_some(()),
    },
];

/// Checks the parameters of a snapshot class: it has none of its own.
///
/// # Errors
/// 3 for a key that is not a sidecar's.
pub fn of_snapshot(given: &HashMap<String, String>) -> Result<(), Status> {
    match given.keys().filter(|key| !key.starts_with(FOREIGN_PREFIX)).min() {
        Some(key) => {
            Err(invalid("parameters", format!("has {key:?}; snapshots have no parameters")))
        }
        None => Ok(()),
    }
}

/// Returns every key, in the project's spelling.
pub fn keys() -> impl Iterator<Item = &'static str> {
    OTHERS.iter().map(|other| other.key).chain(OPTIONS.iter().map(|option| option.key))
}

fn factor(value: &str) -> Option<u32> {
    // `parse` accepts a leading plus sign, which no user means.
    value.bytes().all(|byte| byte.is_ascii_digit()).then_some(())?;
    value.parse().ok().filter(|number| (1..=REPLICAS_HARD_MAX).contains(number))
}

/// Sets one value; returns the key in the project's spelling.
///
/// # Errors
/// `None`: no such key. Otherwise the valid values.
fn set(spec: &mut VolumeSpec, key: &str, value: &str) -> Result<&'static str, Option<String>> {
    if let Some(option) = VolumeOption::find(key) {
        let taken = option.set(spec, value);
        return taken.map(|()| option.key).map_err(|_| Some(option.values.to_string()));
    }
    let named = |other: &&Other| other.key == key || other.aliases.contains(&key);
    let other = OTHERS.iter().find(named).ok_or(None)?;
    let taken = (other.set)(spec, value).map(|()| other.key);
    taken.ok_or_else(|| Some(other.values.to_owned()))
}

/// Returns whether a key, or another spelling of it, is one of the driver's.
fn is_known(key: &str) -> bool {
    spellings().any(|known| known == key)
}

/// Returns whether a key may be changed while the volume exists.
fn is_mutable(key: &str) -> bool {
    key == REPLICAS || VolumeOption::find(key).is_some_and(|option| option.changes)
}

/// Returns the keys that may be changed while a volume exists.
pub fn mutable_keys() -> impl Iterator<Item = &'static str> {
    keys().filter(|key| is_mutable(key))
}

/// Returns what Kubernetes calls a volume, of the keys that its provisioner adds (`--extra-create-metadata`). It is
/// shown to people; a value that is no name is left out.
pub fn claim(given: &HashMap<String, String>) -> HashMap<String, String> {
    let is_name = |text: &str| {
        let is_of_name = |letter: u8| letter.is_ascii_alphanumeric() || b"-._".contains(&letter);
        (1..=253).contains(&text.len()) && text.bytes().all(is_of_name)
    };
    let named = CLAIM.iter().filter_map(|key| {
        let value = given.get(&format!("{FOREIGN_PREFIX}{key}")).filter(|value| is_name(value))?;
        Some(((*key).to_owned(), value.clone()))
    });
    named.collect()
}

/// Returns whether a key is one that sidecars add, which Quoin ignores.
pub fn is_foreign(key: &str) -> bool {
    key.starts_with(FOREIGN_PREFIX)
}

/// Reads one map: the values by the keys in the project's spelling, each valid by itself.
fn canonical(
    field: &str,
    given: &HashMap<String, String>,
) -> Result<BTreeMap<&'static str, String>, Status> {
    let mut values: BTreeMap<&'static str, String> = BTreeMap::new();
    let mut spelled: BTreeMap<&'static str, &str> = BTreeMap::new();
    // Sorted, so that the same request is always refused for the same key.
    let mut sorted: BTreeMap<_, _> = given.iter().filter(|(key, _)| !is_foreign(key)).collect();
    let unknown_keys: Vec<&str> =
        sorted.keys().map(|key| key.as_str()).filter(|key| !is_known(key)).collect();
    if field == PARAMETERS && given.get(UNKNOWN_KEYS).is_some_and(|value| value == IGNORE) {
        sorted.retain(|key, _| is_known(key));
    } else if !unknown_keys.is_empty() {
        return Err(unknown(field, &unknown_keys));
    }
    for (key, value) in sorted {
        let own = set(&mut VolumeSpec::default(), key, value).map_err(|values| {
            let values = values.unwrap_or_default();
            invalid(field, format!("has {key:?} with a value that is none of: {values}"))
        })?;
        if let Some(other) = spelled.insert(own, key) {
            let why = format!("has both {other:?} and {key:?}, which mean the same");
            return Err(invalid(field, why));
        }
        values.insert(own, value.clone());
    }
    Ok(values)
}

/// Reads mutable parameters.
fn canonical_mutable(
    given: &HashMap<String, String>,
) -> Result<BTreeMap<&'static str, String>, Status> {
    let values = canonical(MUTABLE, given)?;
    match values.keys().find(|key| !is_mutable(key)) {
        None => Ok(values),
        Some(key) => Err(invalid(
            MUTABLE,
            format!(
                "has {key:?}, which cannot be changed once a volume is made; {} can",
                mutable_keys().collect::<Vec<_>>().join(", ")
            ),
        )),
    }
}

fn spec_of<'a>(values: impl IntoIterator<Item = (&'a &'static str, &'a String)>) -> VolumeSpec {
    let mut spec = VolumeSpec::default();
    for (key, value) in values {
        set(&mut spec, key, value).expect("checked when it was read");
    }
    spec
}

fn texts(values: BTreeMap<&'static str, String>) -> HashMap<String, String> {
    values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Reads parameters into a specification, its `parameters` in the project's spelling.
///
/// # Errors
/// 3 with the key, and for a wrong value with the valid ones.
pub fn read(given: &HashMap<String, String>) -> Result<VolumeSpec, Status> {
    read_new(given, &HashMap::new())
}

/// Reads the parameters of a new volume. A mutable one holds against a fixed one.
///
/// # Errors
/// As [`read`].
pub fn read_new(
    given: &HashMap<String, String>,
    mutable: &HashMap<String, String>,
) -> Result<VolumeSpec, Status> {
    let (parameters, mutable) = (canonical(PARAMETERS, given)?, canonical_mutable(mutable)?);
    let mut merged = parameters.clone();
    merged.extend(mutable.iter().map(|(key, value)| (*key, value.clone())));
    let spec = spec_of(&merged);
    check_factors(&spec)?;
    let is_encrypted = parameters.get(PARAMETER).is_some_and(|value| value == "true");
    if is_encrypted && spec.block_size == 512 {
        let why = "has blockSize 512, and an encrypted volume has blocks of 4096 bytes";
        return Err(invalid(PARAMETERS, why));
    }
    Ok(VolumeSpec { parameters: texts(parameters), mutable_parameters: texts(mutable), ..spec })
}

/// Reads mutable parameters into a request for a change; `None`: there are none.
///
/// # Errors
/// 3 with the key: it is unknown, its value is wrong, or it cannot be changed.
pub fn read_change(mutable: &HashMap<String, String>) -> Result<Option<VolumeSpec>, Status> {
    let values = canonical_mutable(mutable)?;
    Ok((!values.is_empty()).then(|| spec_of(&values)))
}

fn check_factors(spec: &VolumeSpec) -> Result<(), Status> {
    let most = if spec.replicas == 0 { REPLICAS_HARD_MAX } else { spec.replicas };
    if spec.consistency_factor > most {
        let why = "has a consistencyFactor above replicas";
        return Err(invalid(PARAMETERS, why));
    }
    let majority = most / 2 + 1;
    if spec.replicas != 0
        && spec.consistency_factor != 0
        && spec.consistency_factor < majority
        && !spec.allow_loss_on_single_failure
    {
        let why = format!(
            "has a consistencyFactor below the majority ({majority}), which may lose \
             acknowledged writes with one failure; set allowLossOnSingleFailure: \"true\" to \
             accept that"
        );
        return Err(invalid(PARAMETERS, why));
    }
    Ok(())
}

/// Every spelling that is accepted.
fn spellings() -> impl Iterator<Item = &'static str> {
    let aliases = OTHERS.iter().flat_map(|other| other.aliases);
    let of_options = OPTIONS.iter().flat_map(|option| option.aliases);
    keys().chain(aliases.copied()).chain(of_options.copied())
}

fn unknown(field: &str, given: &[&str]) -> Status {
    let known: Vec<_> = match field {
        MUTABLE => mutable_keys().collect(),
        _ => keys().collect(),
    };
    let named = |key: &&str| {
        let shown: String = key.chars().take(64).collect();
        match quoin_api::volume::nearest(key, spellings()) {
            Some(nearest) => format!("{shown:?} (did you mean {nearest:?}?)"),
            None => format!("{shown:?}"),
        }
    };
    let mut listed: Vec<_> = given.iter().take(NAMED_MAX).map(named).collect();
    if given.len() > NAMED_MAX {
        listed.push(format!("{} more", given.len() - NAMED_MAX));
    }
    let what = if given.len() == 1 { "the unknown key" } else { "the unknown keys" };
    let way_out = match field {
        MUTABLE => "",
        _ => "; unknownParameters: \"ignore\" leaves another system's keys aside",
    };
    let (listed, known) = (listed.join(", "), known.join(", "));
    invalid(field, format!("has {what} {listed}; known are {known}{way_out}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quoin_api::control::{Durability, Spread};
    use tonic::Code;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_spelling_of_quoin_becomes_a_specification() {
        let spec = read(&of(&[
            ("replicas", "3"),
            ("durability", "media"),
            ("spread", "pool"),
            ("blockSize", "4096"),
            ("fsType", "xfs"),
            ("onQuorumLoss", "fail"),
        ]))
        .unwrap();
        assert_eq!((spec.replicas, spec.block_size), (3, 4096));
        assert_eq!(spec.durability(), Durability::Media);
        assert_eq!(spec.spread(), Spread::Pool);
        assert_eq!((spec.fs_type.as_str(), spec.on_quorum_loss.as_str()), ("xfs", "fail"));
        assert_eq!(spec.parameters.len(), 6);
    }

    #[test]
    fn limits_per_second_are_numbers() {
        let spec = read(&of(&[("iopsLimit", "500"), ("bandwidthLimit", "10485760")])).unwrap();
        assert_eq!((spec.iops_limit, spec.bandwidth_limit), (500, 10 << 20));
    }

    #[test]
    fn aliases_mean_the_same_and_compare_the_same() {
        let own = read(&of(&[("replicas", "2")])).unwrap();
        for alias in ["repl", "numberOfReplicas", "replicaCount"] {
            assert_eq!(read(&of(&[(alias, "2")])).unwrap(), own, "{alias}");
        }
        let both = read(&of(&[("repl", "2"), ("replicas", "3")])).unwrap_err();
        assert_eq!(both.code(), Code::InvalidArgument);
    }

    /// Proves CSI-CREATEVOLUME-21: the rule itself.
    #[test]
    fn unknown_keys_and_wrong_values_are_refused_by_name_and_sidecars_keys_are_ignored() {
        for (key, value) in [
            ("replica", "3"),
            ("Replicas", "3"),
            ("replicas", "0"),
            ("replicas", "+3"),
            ("replicas", "six"),
            ("durability", "disk"),
            ("blockSize", "1024"),
            ("iopsLimit", "0"),
            ("bandwidthLimit", "10MiB"),
            ("bandwidthLimit", "4095"),
            ("replaceAfter", "10 minutes"),
            ("replaceAfter", ""),
            ("encrypted", "yes"),
            ("", ""),
        ] {
            let status = read(&of(&[(key, value)])).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains(&format!("{key:?}")), "{}", status.message());
        }
        let foreign = of(&[("csi.storage.k8s.io/pvc/name", "claim")]);
        assert_eq!(read(&foreign).unwrap(), VolumeSpec::default());
        assert_eq!(claim(&foreign), of(&[("pvc/name", "claim")]));
        for no_name in ["", "a b", "\u{1b}[2J", &"x".repeat(254)] {
            let given = of(&[("csi.storage.k8s.io/pv/name", no_name), ("pvc/name", "x")]);
            assert_eq!(claim(&given), HashMap::new(), "{no_name:?}");
        }
        assert_eq!(read(&HashMap::new()).unwrap(), VolumeSpec::default());
    }

    /// Proves CSIN-MODIFY-03, CSIN-MODIFY-04: the rule itself.
    #[test]
    fn mutable_parameters_hold_against_fixed_ones_and_are_refused_by_name() {
        let fixed = of(&[("repl", "3"), ("durability", "cache"), ("spread", "pool")]);
        let mutable = of(&[("durability", "media"), ("replicaCount", "5"), ("iopsLimit", "off")]);
        let spec = read_new(&fixed, &mutable).unwrap();
        assert_eq!((spec.durability(), spec.replicas), (Durability::Media, 5));
        assert_eq!(spec.parameters["durability"], "cache");
        assert_eq!(spec.mutable_parameters["replicas"], "5");
        for (key, value, words) in [
            ("durabilty", "media", "did you mean \"durability\""),
            ("colour", "red", "known are"),
            ("durability", "disk", "cache | media"),
            ("blockSize", "512", "cannot be changed"),
            ("fstype", "xfs", "cannot be changed"),
            ("consistencyFactor", "2", "cannot be changed"),
        ] {
            for refused in [
                read_new(&HashMap::new(), &of(&[(key, value)])).unwrap_err(),
                read_change(&of(&[("reads", "leased"), (key, value)])).unwrap_err(),
            ] {
                assert_eq!(refused.code(), Code::InvalidArgument);
                let message = refused.message();
                let own = if key == "fstype" { "fsType" } else { key };
                assert!(message.contains(own) && message.contains(words), "{message}");
                assert!(message.starts_with("mutable_parameters"), "{message}");
            }
        }
        assert_eq!(read_change(&of(&[("csi.storage.k8s.io/x", "y")])).unwrap(), None);
        let change = read_change(&of(&[("iopsLimit", "off"), ("repl", "3")])).unwrap().unwrap();
        assert_eq!((change.iops_limit, change.replicas), (quoin_api::volume::NO_LIMIT, 3));
        assert!(change.parameters.is_empty() && change.mutable_parameters.is_empty());
    }

    /// A class that was written for Longhorn, as its documentation has it.
    #[test]
    fn keys_of_another_system_are_all_named_at_once_or_ignored_by_a_switch() {
        let longhorn = [
            ("numberOfReplicas", "3"),
            ("staleReplicaTimeout", "2880"),
            ("dataLocality", "disabled"),
            ("fromBackup", ""),
            ("fsType", "ext4"),
        ];
        let refused = read(&of(&longhorn)).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        for word in ["staleReplicaTimeout", "dataLocality", "fromBackup", "unknownParameters"] {
            assert!(refused.message().contains(word), "{word}: {}", refused.message());
        }
        let with = |value| read(&of(&[&longhorn[..], &[(UNKNOWN_KEYS, value)]].concat()));
        let taken = with("ignore").unwrap();
        assert_eq!((taken.replicas, taken.fs_type.as_str()), (3, "ext4"));
        assert!(!taken.parameters.contains_key("dataLocality"), "a repeat compares its own alone");
        assert!(with("refuse").is_err() && with("yes").is_err());
        // A wrong value of a known key is refused all the same, and so are unknown mutable keys.
        let wrong = of(&[(UNKNOWN_KEYS, "ignore"), ("dataLocality", "x"), ("replicas", "six")]);
        assert!(read(&wrong).unwrap_err().message().contains("replicas"));
        let switch = of(&[(UNKNOWN_KEYS, "ignore")]);
        assert!(read_new(&switch, &of(&[("dataLocality", "x")])).is_err());
        let many: Vec<_> = (0..40).map(|number| (format!("key-{number}"), String::new())).collect();
        let refused = read(&many.into_iter().collect()).unwrap_err();
        assert!(refused.message().contains("24 more"), "{}", refused.message());
    }

    #[test]
    fn encryption_needs_blocks_of_4096_bytes() {
        read(&of(&[("encrypted", "true"), ("blockSize", "4096")])).unwrap();
        read(&of(&[("encrypted", "false"), ("blockSize", "512")])).unwrap();
        let refused = read(&of(&[("encrypted", "true"), ("blockSize", "512")])).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("blockSize 512"), "{refused}");
    }

    #[test]
    fn only_replica_counts_above_every_cluster_limit_are_refused_here() {
        assert_eq!(read(&of(&[("replicas", "7")])).unwrap().replicas, 7);
        let refused = read(&of(&[("replicas", "9")])).unwrap_err();
        assert!(refused.message().contains("at most 8"), "{refused}");
    }

    #[test]
    fn a_consistency_factor_below_the_majority_needs_an_explicit_parameter() {
        let weak = [("replicas", "3"), ("consistencyFactor", "1")];
        assert!(read(&of(&weak)).unwrap_err().message().contains("allowLossOnSingleFailure"));
        let wanted = [weak[0], weak[1], ("allowLossOnSingleFailure", "true")];
        assert_eq!(read(&of(&wanted)).unwrap().consistency_factor, 1);
        assert!(read(&of(&[("replicas", "3"), ("consistencyFactor", "4")])).is_err());
    }

    proptest! {
        #[test]
        fn no_parameters_make_the_reader_panic(
            given in proptest::collection::hash_map(".*", ".*", 0..5),
        ) {
            let _ = read(&given);
        }
    }
}
