//! The parameters of a storage class, as they become a volume's specification.
//!
//! One spelling is the project's own; names of other systems are accepted as aliases. An unknown
//! key is refused by name, because dropping a parameter silently would break a promise silently.
//! Keys of Kubernetes' own sidecars (`csi.storage.k8s.io/…`) are ignored and never compared.

use std::collections::{BTreeMap, HashMap};

use quoin_api::control::VolumeSpec;
use quoin_api::volume::{OPTIONS, VolumeOption};
use tonic::Status;

use crate::encryption::PARAMETER;
use crate::refusal::invalid;

/// Prefix of keys that sidecars add; they are not the user's.
const FOREIGN_PREFIX: &str = "csi.storage.k8s.io/";

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
        key: "replicas",
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
        key: "local",
        aliases: &[],
        values: "any",
        set: |_, value| (value == "any").then_some(()),
    },
    Other {
        key: "encrypted",
        aliases: &[],
        values: "true | false",
        // The key comes with the call's secrets.
        set: |_, value| matches!(value, "true" | "false").then_some(()),
    },
];

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

/// Reads parameters into a specification, its `parameters` in the project's spelling.
///
/// # Errors
/// 3 with the key, and for a wrong value with the valid ones.
pub fn read(given: &HashMap<String, String>) -> Result<VolumeSpec, Status> {
    let mut spec = VolumeSpec::default();
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    // Sorted, so that the same request is always refused for the same key.
    let sorted: BTreeMap<_, _> = given.iter().collect();
    for (key, value) in sorted {
        if key.starts_with(FOREIGN_PREFIX) {
            continue;
        }
        let own = set(&mut spec, key, value).map_err(|values| match values {
            None => unknown(key),
            Some(values) => {
                invalid("parameters", format!("has {key:?} with a value that is none of: {values}"))
            }
        })?;
        if let Some(other) = seen.insert(own, key) {
            let why = format!("has both {other:?} and {key:?}, which mean the same");
            return Err(invalid("parameters", why));
        }
        spec.parameters.insert(own.to_owned(), value.clone());
    }
    let is_encrypted = spec.parameters.get(PARAMETER).is_some_and(|value| value == "true");
    if is_encrypted && spec.block_size == 512 {
        let why = "has blockSize 512, and an encrypted volume has blocks of 4096 bytes";
        return Err(invalid("parameters", why));
    }
    let most = if spec.replicas == 0 { REPLICAS_HARD_MAX } else { spec.replicas };
    if spec.consistency_factor > most {
        let why = "has a consistencyFactor above replicas";
        return Err(invalid("parameters", why));
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
        return Err(invalid("parameters", why));
    }
    Ok(spec)
}

fn unknown(key: &str) -> Status {
    let known: Vec<_> = keys().collect();
    invalid("parameters", format!("has the unknown key {key:?}; known are {}", known.join(", ")))
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
        assert_eq!(read(&HashMap::new()).unwrap(), VolumeSpec::default());
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
