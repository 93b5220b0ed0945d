//! Segments from which volumes are reachable and in which their replicas may be: form and messages.
//!
//! Each node has the segment `quoin.io/node`, and those that its operator gives it (`quoin.io/zone`,
//! …). The control plane chooses the places of replicas; a volume without topologies is reachable
//! from every node of its cluster. Keys are compared without regard to case.

use std::collections::{BTreeMap, HashMap};

use quoin_api::control;
use quoin_api::csi::{Topology, TopologyRequirement};
use quoin_api::topology::{NODE_KEY, PREFIX, is_key, is_label};
use tonic::Status;

use crate::refusal::invalid;

const REQUIREMENTS: &str = "accessibility_requirements";

/// Topologies of a request, each list in the caller's order.
#[derive(Debug, Default)]
pub struct Requirement {
    pub requisite: Vec<control::Topology>,
    pub preferred: Vec<control::Topology>,
}

/// Reads a requirement.
///
/// # Errors
/// 3 for anything that is not well-formed.
pub fn of_requirement(given: Option<&TopologyRequirement>) -> Result<Requirement, Status> {
    let Some(given) = given else { return Ok(Requirement::default()) };
    if given.requisite.is_empty() && given.preferred.is_empty() {
        return Err(invalid(REQUIREMENTS, "has neither requisite nor preferred"));
    }
    let fold = |list: &[Topology]| -> Result<Vec<_>, Status> {
        list.iter().map(|one| normalized(REQUIREMENTS, one)).collect()
    };
    let (requisite, preferred) = (fold(&given.requisite)?, fold(&given.preferred)?);
    if !requisite.is_empty() && !preferred.iter().all(|one| requisite.contains(one)) {
        return Err(invalid(
            REQUIREMENTS,
            "prefers a topology that is not among the requisite ones",
        ));
    }
    let messages = |list: Vec<BTreeMap<String, String>>| list.into_iter().map(message).collect();
    Ok(Requirement { requisite: messages(requisite), preferred: messages(preferred) })
}

/// Reads a single topology.
///
/// # Errors
/// 3 for anything that is not well-formed.
pub fn of_one(given: Option<&Topology>) -> Result<Vec<control::Topology>, Status> {
    let one = given.map(|given| normalized("accessible_topology", given)).transpose()?;
    Ok(one.into_iter().map(message).collect())
}

fn message(segments: BTreeMap<String, String>) -> control::Topology {
    control::Topology { segments: segments.into_iter().collect() }
}

/// Returns the topologies that a volume or snapshot reports; none: every node reaches it.
pub fn of_record(topologies: &[control::Topology]) -> Vec<Topology> {
    topologies.iter().map(|one| Topology { segments: one.segments.clone() }).collect()
}

/// Returns the topology that a node reports: its own segment, and those of its operator. A name that
/// is no value of a segment (one of more than 63 characters) is left out.
///
/// # Errors
/// If an operator's segment is not well-formed or has another prefix than Quoin's.
pub fn of_node(name: &str, own: &BTreeMap<String, String>) -> Result<Topology, Status> {
    let mut segments: HashMap<_, _> = own.clone().into_iter().collect();
    for key in own.keys() {
        if key.split_once('/').map(|(prefix, _)| prefix) != Some(PREFIX) {
            return Err(invalid(
                "topology",
                format!("has the key {key:?}; keys start with {PREFIX}/"),
            ));
        }
        if key.eq_ignore_ascii_case(NODE_KEY) {
            return Err(invalid("topology", format!("has {key:?}, which is the node's own name")));
        }
    }
    if is_label(name) {
        segments.insert(NODE_KEY.to_owned(), name.to_owned());
    }
    let topology = Topology { segments };
    if !topology.segments.is_empty() {
        normalized("topology", &topology)?;
    }
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
        of_requirement(Some(given)).unwrap_err().code()
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
        let read = of_requirement(Some(&mixed)).unwrap();
        assert_eq!(read.requisite, read.preferred);
    }

    /// Proves CSI-TOPOLOGY-01, CSI-TOPOLOGY-09.
    #[test]
    fn a_requirement_is_not_empty_and_prefers_only_requisite_topologies() {
        assert_eq!(code(&requirement(vec![], vec![])), Code::InvalidArgument);
        let (a, b) = (of(&[("zone", "a")]), of(&[("zone", "b")]));
        assert_eq!(code(&requirement(vec![a.clone()], vec![b.clone()])), Code::InvalidArgument);
        let fine = requirement(vec![a.clone(), b.clone()], vec![b]);
        let read = of_requirement(Some(&fine)).unwrap();
        assert_eq!(read.preferred[0].segments["zone"], "b");
        assert_eq!((read.requisite.len(), read.preferred.len()), (2, 1));
    }

    #[test]
    fn a_volume_reports_the_topologies_of_its_record_and_none_where_every_node_reaches_it() {
        let zone = control::Topology { segments: of(&[("quoin.io/zone", "a")]).segments };
        assert_eq!(of_record(&[zone]), vec![of(&[("quoin.io/zone", "a")])]);
        assert_eq!(of_record(&[]), vec![]);
    }

    /// Proves CSI-TOPOLOGY-19, CSI-TOPOLOGY-20: for a node's report.
    #[test]
    fn a_nodes_own_keys_share_one_prefix_and_its_name_is_among_them() {
        let own = |key: &str| BTreeMap::from([(key.to_owned(), "a".to_owned())]);
        let node = ("quoin.io/node", "h1");
        let with_zone = of(&[node, ("quoin.io/zone", "a")]);
        assert_eq!(of_node("h1", &own("quoin.io/zone")).unwrap(), with_zone);
        assert_eq!(of_node("h1", &BTreeMap::new()).unwrap(), of(&[node]));
        assert_eq!(of_node(&"x".repeat(64), &BTreeMap::new()).unwrap(), of(&[]));
        // Nodes go on reporting it where volumes of an early version need it.
        let cluster = of(&[node, ("quoin.io/cluster", "a")]);
        assert_eq!(of_node("h1", &own("quoin.io/cluster")).unwrap(), cluster);
        for key in ["zone", "example.com/zone", "quoin.io/", "quoin.io/node"] {
            assert!(of_node("h1", &own(key)).is_err(), "{key}");
        }
    }
}
