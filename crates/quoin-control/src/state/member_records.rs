//! The records of who may join the cluster, and of who has.

use serde::{Deserialize, Serialize};

use crate::state::changes::Concerned;
use crate::state::records::Record;

/// A join token, known by a hash of its secret.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TokenRecord {
    pub secret_hash: String,
    /// "pool", "node", "admin", or empty: pool or node.
    pub role: String,
    /// Empty: any name that is not taken.
    pub holder: String,
    pub expires_ms: u64,
    /// User of the token: role/name and the hash of the key. The same key may ask again, because an
    /// answer can get lost.
    pub used_by: Option<(String, String)>,
    /// Its user may manage volumes ([`MemberOfCluster::manages_volumes`]).
    pub manages_volumes: bool,
    pub created_ms: u64,
}

impl Record for TokenRecord {
    type Index = ();
    const PREFIX: &'static str = "token/";
    fn name(&self) -> String {
        self.secret_hash.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Nobody
    }
}

/// A holder of a certificate, known by its key; keeps a second one from taking the name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemberOfCluster {
    pub role: String,
    pub holder: String,
    /// Empty: not known, as after a recovery of the records. The first call tells it.
    pub key_hash: String,
    /// Hash of the key that a certificate was renewed for. It replaces the present one with its first
    /// call, since the answer to the renewal can get lost.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub next_key_hash: String,
    pub joined_ms: u64,
    /// His certificate lets him do nothing any more; the name is free.
    pub removed: bool,
    /// A node that may create, delete and publish any volume, as CSI's controller service does;
    /// others see what is attached to them.
    pub manages_volumes: bool,
}

impl Record for MemberOfCluster {
    type Index = ();
    const PREFIX: &'static str = "member/";
    fn name(&self) -> String {
        format!("{}/{}", self.role, self.holder)
    }
    fn concerned(&self) -> Concerned {
        // A stream ends once its caller is no member any more.
        Concerned::Everybody
    }
}
