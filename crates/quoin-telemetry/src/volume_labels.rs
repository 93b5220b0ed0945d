//! Labels of metrics by volume, the same in every process.

use std::collections::BTreeMap;

/// Keys of what an orchestrator calls a volume, and the labels that they become.
const CLAIM_LABELS: [(&str, &str); 3] = [
    ("pvc/namespace", "namespace"),
    ("pvc/name", "persistentvolumeclaim"),
    ("pv/name", "persistentvolume"),
];

/// Returns the volume's name, and what its orchestrator calls it; empty where it says nothing.
pub fn volume_labels(name: &str, claim: &BTreeMap<String, String>) -> Vec<(String, String)> {
    let of_claim = CLAIM_LABELS
        .iter()
        .map(|(key, label)| ((*label).to_owned(), claim.get(*key).cloned().unwrap_or_default()));
    std::iter::once(("volume".to_owned(), name.to_owned())).chain(of_claim).collect()
}
