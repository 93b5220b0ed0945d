//! Segments from which volumes are reachable and in which their replicas may be.
//!
//! A Quoin volume is reached over the network by every node of its cluster, so each node and each
//! volume carries the segment `quoin.io/cluster`. Operators give further segments (`quoin.io/zone`,
//! …) to pools and nodes; a volume that requests some gets its replicas on pools that carry them.
//! Keys are compared without regard to case.

use std::collections::{BTreeMap, HashMap};

use quoin_api::control;
use quoin_api::csi::{Topology, TopologyRequirement};
use tonic::Status;

use crate::refusal::{self, invalid};

/// Prefix of every key that Quoin issues.
pub const PREFIX: &str = "quoin.io";
/// The segment that all nodes and volumes of one cluster share.
pub const CLUSTER_KEY: &str = "quoin.io/cluster";

/// Checks a requirement and returns the segments that pools must match: each entry a possibility,
/// the preferred ones first; empty if every pool will do.
///
/// # Errors
/// 3 for anything that is not well-formed.
pub fn of_requirement(
    given: Option<&TopologyRequirement>,
    cluster_id: &str,
) -> Result<Vec<control::Topology>, Status> {
    let Some(given) = given else { return Ok(Vec::new()) };
    const FIELD: &str = "accessibility_requirements";
    if given.requisite.is_empty() && given.preferred.is_empty() {
        return Err(invalid(FIELD, "has neither requisite nor preferred"));
    }
    let fold = |list: &[Topology]| -> Result<Vec<_>, Status> {
        list.iter().map(|one| normalized(FIELD, one)).collect()
    };
    let (requisite, preferred) = (fold(&given.requisite)?, fold(&given.preferred)?);
    if !requisite.is_empty() && !preferred.iter().all(|one| requisite.contains(one)) {
        return Err(invalid(FIELD, "prefers a topology that is not among the requisite ones"));
    }
    let mut possibilities: Vec<BTreeMap<String, String>> = Vec::new();
    for one in preferred.into_iter().chain(requisite) {
        if !possibilities.contains(&one) {
            possibilities.push(one);
        }
    }
    restrict_to_cluster(possibilities, cluster_id)
}

/// Checks a single topology as [`of_requirement`] does; one of another cluster has no storage,
/// which is `None`.
///
/// # Errors
/// 3 for anything that is not well-formed.
pub fn of_one(
    given: Option<&Topology>,
    cluster_id: &str,
) -> Result<Option<Vec<control::Topology>>, Status> {
    let Some(given) = given else { return Ok(Some(Vec::new())) };
    let one = normalized("accessible_topology", given)?;
    Ok(restrict_to_cluster(vec![one], cluster_id).ok())
}

/// Removes the cluster's own segment: it is valid everywhere, and pools do not carry it.
fn restrict_to_cluster(
    possibilities: Vec<BTreeMap<String, String>>,
    cluster_id: &str,
) -> Result<Vec<control::Topology>, Status> {
    let mut here = Vec::new();
    for mut one in possibilities {
        match one.remove(CLUSTER_KEY) {
            Some(other) if other != cluster_id => continue,
            _ => {}
        }
        if one.is_empty() {
            // One of the possibilities is "anywhere", which includes all others.
            return Ok(Vec::new());
        }
        here.push(control::Topology { segments: one.into_iter().collect() });
    }
    if here.is_empty() {
        return Err(refusal::no_topology(format!(
            "none of the requested topologies is in this cluster ({CLUSTER_KEY}={cluster_id})"
        )));
    }
    Ok(here)
}

/// Returns the topology that a volume reports: its restrictions, each with the cluster's segment.
pub fn of_volume(restricted_to: &[control::Topology], cluster_id: &str) -> Vec<Topology> {
    let with_cluster = |mut segments: HashMap<String, String>| {
        segments.insert(CLUSTER_KEY.to_owned(), cluster_id.to_owned());
        Topology { segments }
    };
    if restricted_to.is_empty() {
        return vec![with_cluster(HashMap::new())];
    }
    restricted_to.iter().map(|one| with_cluster(one.segments.clone())).collect()
}

/// Returns the topology that a node reports.
///
/// # Errors
/// If an operator's segment is not well-formed or has another prefix than Quoin's.
pub fn of_node(own: &BTreeMap<String, String>, cluster_id: &str) -> Result<Topology, Status> {
    let segments: HashMap<_, _> = own.clone().into_iter().collect();
    for key in own.keys() {
        if key.split_once('/').map(|(prefix, _)| prefix) != Some(PREFIX) {
            return Err(invalid(
                "topology",
                format!("has the key {key:?}; keys start with {PREFIX}/"),
            ));
        }
    }
    let mut topology = Topology { segments };
    topology.segments.insert(CLUSTER_KEY.to_owned(), cluster_id.to_owned());
    // The whole is checked: an operator without segments violates no rule.
    normalized("topology", &topology)?;
    Ok(topology)
}

/// Returns a well-formed topology with its keys in lower case.
fn normalized(field: &str, given: &Topology) -> Result<BTreeMap<String, String>, Status> {
    if given.segments.is_empty() {
        return Err(invalid(field, "has a topology without segments"));
    }
    crate::limits::map(field, &given.segments)?;
    let mut normalized = BTreeMap::new();
    for (key, value) in &given.segments {
        if !is_key(key) {
            return Err(invalid(field, format!("has {key:?}, which is not a topology key")));
        }
        if !is_label(value) {
            return Err(invalid(
                field,
                format!("has a value of {key:?} that is not a valid segment"),
            ));
        }
        if normalized.insert(key.to_ascii_lowercase(), value.clone()).is_some() {
            return Err(invalid(field, format!("has {key:?} twice, in different case")));
        }
    }
    Ok(normalized)
}

/// Returns whether the text is `name` or `prefix/name`.
fn is_key(key: &str) -> bool {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    prefix.is_none_or(is_domain) && is_label(name)
}

/// Returns whether the text has 1 to 63 characters, alphanumeric at both ends, '-', '_' and '.' in
/// between.
fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let inside = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(inside)
        && bytes[0].is_ascii_alphanumeric()
        && bytes[bytes.len() - 1].is_ascii_alphanumeric()
}

/// Returns whether the text is lower-case labels of a domain name, 63 characters in all.
fn is_domain(text: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        !bytes.is_empty()
            && bytes.iter().all(|byte| plain(byte) || *byte == b'-')
            && plain(&bytes[0])
            && plain(&bytes[bytes.len() - 1])
    };
    text.len() <= 63 && text.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Topology {
        Topology {
            segments: pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        }
    }
    fn requirement(requisite: Vec<Topology>, preferred: Vec<Topology>) -> TopologyRequirement {
        TopologyRequirement { requisite, preferred }
    }
    fn code(given: &TopologyRequirement) -> Code {
        of_requirement(Some(given), "c1").unwrap_err().code()
    }

    /// Proves CSI-TOPOLOGY-16, CSI-TOPOLOGY-17, CSI-TOPOLOGY-18, CSI-TOPOLOGY-22.
    #[test]
    fn topology_keys_and_values_have_the_form_of_the_specification() {
        let long = "x".repeat(64);
        for key in ["zone", "Zone_1.a-b", "quoin.io/zone", "a-1.b/Z", &"x".repeat(63)] {
            assert!(normalized("t", &of(&[(key, "v")])).is_ok(), "{key}");
        }
        for key in [
            "",
            "/zone",
            "a/",
            "a/b/c",
            "-zone",
            "zone-",
            "zo ne",
            "ü",
            "A/zone",
            "a..b/zone",
            "-a/zone",
            "a_b/zone",
            &long,
            &format!("{long}/zone"),
        ] {
            let status = normalized("t", &of(&[(key, "v")])).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{key}");
        }
        for value in ["", "-v", "v_", "v v", &long] {
            assert!(normalized("t", &of(&[("zone", value)])).is_err(), "{value}");
        }
    }

    /// Proves CSI-TOPOLOGY-21: for requests.
    #[test]
    fn keys_that_differ_only_in_case_are_equal_and_refused_in_one_topology() {
        assert_eq!(
            code(&requirement(vec![of(&[("zone", "a"), ("Zone", "b")])], vec![])),
            Code::InvalidArgument
        );
        let mixed = requirement(vec![of(&[("Zone", "a")])], vec![of(&[("zone", "a")])]);
        assert_eq!(of_requirement(Some(&mixed), "c1").unwrap().len(), 1);
    }

    /// Proves CSI-TOPOLOGY-01, CSI-TOPOLOGY-09.
    #[test]
    fn a_requirement_is_not_empty_and_prefers_only_requisite_topologies() {
        assert_eq!(code(&requirement(vec![], vec![])), Code::InvalidArgument);
        let (a, b) = (of(&[("zone", "a")]), of(&[("zone", "b")]));
        assert_eq!(code(&requirement(vec![a.clone()], vec![b.clone()])), Code::InvalidArgument);
        let fine = requirement(vec![a.clone(), b.clone()], vec![b]);
        let possibilities = of_requirement(Some(&fine), "c1").unwrap();
        assert_eq!(possibilities[0].segments["zone"], "b", "preferred first");
        assert_eq!(possibilities.len(), 2);
    }

    #[test]
    fn the_segment_of_this_cluster_restricts_nothing_and_that_of_another_has_no_room() {
        let here = requirement(vec![of(&[(CLUSTER_KEY, "c1")])], vec![]);
        assert!(of_requirement(Some(&here), "c1").unwrap().is_empty());
        assert_eq!(
            code(&requirement(vec![of(&[(CLUSTER_KEY, "c2")])], vec![])),
            Code::ResourceExhausted
        );
        let zone = requirement(vec![of(&[(CLUSTER_KEY, "c1"), ("quoin.io/zone", "a")])], vec![]);
        let restricted = of_requirement(Some(&zone), "c1").unwrap();
        assert_eq!(restricted[0].segments.len(), 1);
        let reported = of_volume(&restricted, "c1");
        assert_eq!(reported, vec![of(&[(CLUSTER_KEY, "c1"), ("quoin.io/zone", "a")])]);
        assert_eq!(of_volume(&[], "c1"), vec![of(&[(CLUSTER_KEY, "c1")])]);
    }

    /// Proves CSI-TOPOLOGY-20: for a node's report.
    #[test]
    fn a_nodes_own_keys_share_one_prefix() {
        let own = |key: &str| BTreeMap::from([(key.to_owned(), "a".to_owned())]);
        assert_eq!(of_node(&own("quoin.io/zone"), "c1").unwrap().segments.len(), 2);
        assert_eq!(of_node(&BTreeMap::new(), "c1").unwrap(), of(&[(CLUSTER_KEY, "c1")]));
        for key in ["zone", "example.com/zone", "quoin.io/"] {
            assert!(of_node(&own(key), "c1").is_err(), "{key}");
        }
    }
}
