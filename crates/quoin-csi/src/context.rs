//! Quoin's keys in a volume's context, and their comparison when the context comes back.
//!
//! Orchestrators add keys of their own to the map, so only those that Quoin issued are read: none
//! of them equals no context (a volume that existed before); some of them, or another value, is
//! another volume's context.
//!
//! Nothing in it names the cluster, so that a volume of the same id on another one takes it as well.

use std::collections::HashMap;

const BLOCK_SIZE: &str = "quoin.io/block-size";
/// Only in the context of an encrypted volume. It outlives a record that lost its encryption, by
/// which a node would write clear text.
const ENCRYPTED: &str = "quoin.io/encrypted";

/// Returns the context of a volume; it never changes.
pub fn of_volume(volume: &quoin_api::control::Volume) -> HashMap<String, String> {
    let is_encrypted = volume.spec.as_ref().is_some_and(|spec| spec.encryption.is_some());
    let always = [(BLOCK_SIZE.to_owned(), block_size(volume).to_string())];
    let encrypted = is_encrypted.then(|| (ENCRYPTED.to_owned(), "true".to_owned()));
    always.into_iter().chain(encrypted).collect()
}

/// Returns the logical block of a volume in bytes.
pub fn block_size(volume: &quoin_api::control::Volume) -> u32 {
    match volume.spec.as_ref().map_or(0, |spec| spec.block_size) {
        512 => 512,
        _ => 4096,
    }
}

/// Compares a context that a caller sent with the volume's own.
///
/// # Errors
/// Why it is not this volume's.
pub fn compare(
    sent: &HashMap<String, String>,
    own: &HashMap<String, String>,
) -> Result<(), String> {
    if !own.keys().any(|key| sent.contains_key(key)) {
        return Ok(());
    }
    if sent.contains_key(ENCRYPTED) && !own.contains_key(ENCRYPTED) {
        return Err("is of an encrypted volume, and this volume is not encrypted".to_owned());
    }
    for (key, value) in own {
        match sent.get(key) {
            Some(sent) if sent == value => {}
            Some(_) => return Err(format!("has another value of {key:?} than this volume")),
            None => return Err(format!("lacks {key:?}, which was issued with its other keys")),
        }
    }
    Ok(())
}

/// Returns the keys of Quoin within a context that was compared.
pub fn issued(
    sent: &HashMap<String, String>,
    own: &HashMap<String, String>,
) -> HashMap<String, String> {
    sent.iter()
        .filter(|(key, _)| own.contains_key(*key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_issued_keys_are_compared_and_all_of_them() {
        let own = of(&[(BLOCK_SIZE, "4096")]);
        compare(&own, &own).unwrap();
        compare(&HashMap::new(), &own).unwrap();
        compare(&of(&[("storage.kubernetes.io/csiProvisionerIdentity", "x")]), &own).unwrap();
        let mut more = own.clone();
        more.insert("csi.storage.k8s.io/pod.name".to_owned(), "web".to_owned());
        // Early versions issued it; it may be of another cluster.
        more.insert(quoin_api::topology::CLUSTER_KEY.to_owned(), "c9".to_owned());
        compare(&more, &own).unwrap();
        assert_eq!(issued(&more, &own), own);
        let encrypted = of(&[(BLOCK_SIZE, "4096"), (ENCRYPTED, "true")]);
        compare(&encrypted, &encrypted).unwrap();
        assert!(compare(&encrypted, &own).unwrap_err().contains("not encrypted"));
        assert!(compare(&own, &encrypted).is_err());
        assert!(compare(&of(&[(BLOCK_SIZE, "512")]), &own).is_err());
        assert!(compare(&of(&[(ENCRYPTED, "true")]), &encrypted).is_err());
    }
}
