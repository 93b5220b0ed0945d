//! The store of several controllers in a Kubernetes cluster: records as custom resources, and a Lease that lets
//! one controller rule.
//!
//! A record is an object of the kind `Record` (`records.quoin.io`): its key, and its value as bytes that nothing
//! in Kubernetes reads. Its revision is the object's `resourceVersion`, which a change compares. No webhook, no
//! conversion and no finalizer stands in the way of any object. The cluster's authority, with its private key, is
//! a Secret: whoever reads it can become a member.
//!
//! Kubernetes compares one object alone, so it cannot refuse the change of a controller that has lost the Lease.
//! Three things stand for that: such a controller sends nothing once its renewal is overdue; what it sent ends
//! at the server too before the Lease passes on (`LeaseTimes::change_time`); and each object names
//! the rule under which it was written, so that the one that rules notices any other's change and reads all anew.

mod client;
mod engine;
mod lease;
mod objects;

use super::StoreError;
use crate::kubernetes_api::ApiOptions;
pub use engine::Kubernetes;

/// Longest name of a cluster: object names begin with it.
const CLUSTER_BYTES_MAX: usize = 40;

/// Where the records lie in Kubernetes, and how its API is reached.
#[derive(Clone, Debug)]
pub struct KubernetesStoreOptions {
    /// Begins the name of each object: one namespace may serve several clusters.
    pub cluster: String,
    /// The API, and the namespace of all objects.
    pub api: ApiOptions,
}

impl KubernetesStoreOptions {
    /// # Errors
    /// An option breaks its rule.
    pub fn check(&self) -> Result<(), StoreError> {
        let name = self.cluster.as_bytes();
        let is_plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
        let is_edge = |b: Option<&u8>| b.is_some_and(|b| *b != b'-');
        let is_name = (1..=CLUSTER_BYTES_MAX).contains(&name.len())
            && name.iter().all(is_plain)
            && is_edge(name.first())
            && is_edge(name.last());
        match is_name {
            true => Ok(()),
            false => Err(StoreError::Setting {
                name: "--kubernetes-cluster",
                rule: format!(
                    "1 to {CLUSTER_BYTES_MAX} lower-case letters, digits and -, no - at its ends"
                ),
            }),
        }
    }
}
