//! The parameters of a storage class, as they become a volume's specification.
//!
//! One spelling is the project's own; users' words from other systems are accepted as aliases;
//! an unknown key is refused by name, as a parameter that is silently dropped is a promise
//! that is silently broken. Keys of Kubernetes' own sidecars (`csi.storage.k8s.io/…`) are
//! ignored and never compared.

use std::collections::{BTreeMap, HashMap};

use quoin_api::control::{Durability, Spread, VolumeSpec};
use tonic::Status;

use crate::refusal::invalid;

/// Added by sidecars; theirs, not the user's.
const FOREIGN_PREFIX: &str = "csi.storage.k8s.io/";

/// No controller allows more (`quoin controller run --max-replicas`).
const REPLICAS_HARD_MAX: u32 = 8;

/// A key, the aliases under which it is known, and what it does, for the documentation.
pub struct Parameter {
    pub key: &'static str,
    pub aliases: &'static [&'static str],
    pub values: &'static str,
}

/// Every parameter there is.
pub const PARAMETERS: &[Parameter] = &[
    Parameter {
        key: "replicas",
        aliases: &["repl", "numberOfReplicas", "replicaCount"],
        values: "1 to as many as the cluster allows (5, at most 8); its default is 3",
    },
    Parameter {
        key: "consistencyFactor",
        aliases: &[],
        values: "1 to replicas; floor(replicas / 2) + 1 unless given",
    },
    Parameter { key: "durability", aliases: &[], values: "cache | media" },
    Parameter { key: "onQuorumLoss", aliases: &[], values: "wait | fail" },
    Parameter { key: "onFull", aliases: &[], values: "wait | enospc" },
    Parameter { key: "reads", aliases: &[], values: "leased | confirmed" },
    Parameter { key: "spread", aliases: &[], values: "host | pool" },
    Parameter { key: "frontend", aliases: &[], values: "fuse | nbd" },
    Parameter { key: "blockSize", aliases: &[], values: "512 | 4096" },
    Parameter { key: "fsType", aliases: &["fstype"], values: "ext4 | xfs" },
    Parameter { key: "allowLossOnSingleFailure", aliases: &[], values: "true | false" },
    Parameter { key: "iopsLimit", aliases: &[], values: "a number of IOs a second, at least 1" },
    Parameter {
        key: "bandwidthLimit",
        aliases: &[],
        values: "a number of bytes a second, at least 4096",
    },
    Parameter { key: "replaceAfter", aliases: &[], values: "a time, as in 90s, 10m or 2h | off" },
    Parameter { key: "thin", aliases: &["thinProvision"], values: "true" },
    Parameter { key: "local", aliases: &[], values: "any" },
    Parameter { key: "encrypted", aliases: &[], values: "false" },
];

/// Reads parameters into a specification, its `parameters` in the project's spelling.
///
/// # Errors
/// 3 with the key, and for a wrong value with those that are right.
pub fn read(given: &HashMap<String, String>) -> Result<VolumeSpec, Status> {
    let mut spec = VolumeSpec::default();
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    // Sorted, so that the same request is always refused for the same key.
    let sorted: BTreeMap<_, _> = given.iter().collect();
    for (key, value) in sorted {
        if key.starts_with(FOREIGN_PREFIX) {
            continue;
        }
        let parameter = PARAMETERS
            .iter()
            .find(|one| one.key == key || one.aliases.contains(&key.as_str()))
            .ok_or_else(|| unknown(key))?;
        if let Some(other) = seen.insert(parameter.key, key) {
            let why = format!("has both {other:?} and {key:?}, which mean the same");
            return Err(invalid("parameters", why));
        }
        set(&mut spec, parameter.key, value).ok_or_else(|| {
            invalid(
                "parameters",
                format!("has {key:?} with a value that is none of: {}", parameter.values),
            )
        })?;
        spec.parameters.insert(parameter.key.to_owned(), value.clone());
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
             acknowledged writes with one failure; say allowLossOnSingleFailure: \"true\" if \
             that is wanted"
        );
        return Err(invalid("parameters", why));
    }
    Ok(spec)
}

/// Takes over one value; `None` if it is none of the allowed ones.
fn set(spec: &mut VolumeSpec, key: &str, value: &str) -> Option<()> {
    let one_of = |words: &[&str]| words.contains(&value).then(|| value.to_owned());
    let number = |low: u32, high: u32| {
        // `parse` takes a leading plus sign, which no user means.
        value.bytes().all(|byte| byte.is_ascii_digit()).then_some(())?;
        value.parse().ok().filter(|number| (low..=high).contains(number))
    };
    let rate = |least: u64| {
        value.bytes().all(|byte| byte.is_ascii_digit()).then_some(())?;
        value.parse().ok().filter(|number| *number >= least)
    };
    match key {
        "iopsLimit" => spec.iops_limit = rate(1)?,
        "bandwidthLimit" => spec.bandwidth_limit = rate(4096)?,
        // How many it allows is the controller's to say.
        "replicas" => spec.replicas = number(1, REPLICAS_HARD_MAX)?,
        "consistencyFactor" => spec.consistency_factor = number(1, REPLICAS_HARD_MAX)?,
        "durability" => {
            spec.durability = match value {
                "cache" => Durability::Cache.into(),
                "media" => Durability::Media.into(),
                _ => return None,
            }
        }
        "spread" => {
            spec.spread = match value {
                "host" => Spread::Host.into(),
                "pool" => Spread::Pool.into(),
                _ => return None,
            }
        }
        "onQuorumLoss" => spec.on_quorum_loss = one_of(&["wait", "fail"])?,
        "onFull" => spec.on_full = one_of(&["wait", "enospc"])?,
        "reads" => spec.reads = one_of(&["leased", "confirmed"])?,
        "frontend" => spec.frontend = one_of(&["fuse", "nbd"])?,
        "blockSize" => spec.block_size = one_of(&["512", "4096"])?.parse().ok()?,
        "fsType" => spec.fs_type = one_of(&["ext4", "xfs"])?,
        "allowLossOnSingleFailure" => {
            spec.allow_loss_on_single_failure = one_of(&["true", "false"])? == "true";
        }
        // Which times there are is the controller's to say.
        "replaceAfter" => {
            let time = value.len() <= 16 && value.bytes().all(|byte| byte.is_ascii_alphanumeric());
            spec.replace_after = (time && !value.is_empty()).then(|| value.to_owned())?;
        }
        "thin" => drop(one_of(&["true"])?),
        "local" => drop(one_of(&["any"])?),
        "encrypted" => drop(one_of(&["false"])?),
        _ => return None,
    }
    Some(())
}

fn unknown(key: &str) -> Status {
    let known: Vec<_> = PARAMETERS.iter().map(|one| one.key).collect();
    invalid("parameters", format!("has the unknown key {key:?}; known are {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_projects_own_spelling_becomes_a_specification() {
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
    fn limits_are_numbers_of_a_second() {
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
            ("encrypted", "true"),
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
    fn more_replicas_than_any_cluster_allows_are_refused_and_others_are_the_controllers_to_judge() {
        assert_eq!(read(&of(&[("replicas", "7")])).unwrap().replicas, 7);
        let refused = read(&of(&[("replicas", "9")])).unwrap_err();
        assert!(refused.message().contains("at most 8"), "{refused}");
    }

    #[test]
    fn a_consistency_factor_below_the_majority_must_be_wanted_in_words() {
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
