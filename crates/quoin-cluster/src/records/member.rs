//! The records of who may join the cluster, and of who has.

use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Record};
use crate::wall_clock::is_ahead;

/// A join token, known by a hash of its secret.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TokenRecord {
    pub secret_hash: String,
    /// "pool", "node", "admin", "mirror", or empty: pool or node.
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

impl TokenRecord {
    /// Returns whether its time has begun and is not over. One that was made at a time that lies ahead
    /// would last for as long as the clock was ahead.
    pub fn is_good(&self, now_ms: u64) -> bool {
        self.expires_ms > now_ms && !is_ahead(self.created_ms, now_ms)
    }
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

impl MemberOfCluster {
    /// Hashes of the keys by which it is known now; empty: its certificates count nowhere.
    pub fn key_hashes(&self) -> Vec<String> {
        let keys = [&self.key_hash, &self.next_key_hash].into_iter();
        keys.filter(|key| !key.is_empty() && !self.removed).cloned().collect()
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wall_clock::CORRECTION_MS;

    #[test]
    fn a_token_is_good_from_when_it_was_made_until_it_expires() {
        let (made, expires) = (1_700_000_000_000, 1_700_000_000_000 + 3_600_000);
        let token = TokenRecord {
            secret_hash: "5".repeat(64),
            role: String::new(),
            holder: String::new(),
            expires_ms: expires,
            used_by: None,
            manages_volumes: false,
            created_ms: made,
        };
        assert!(token.is_good(made) && token.is_good(expires - 1));
        assert!(!token.is_good(expires));
        // A clock is corrected by little; one that was days ahead makes no token that lasts for days.
        assert!(token.is_good(made - CORRECTION_MS));
        assert!(!token.is_good(made - CORRECTION_MS - 1) && !token.is_good(made - 25 * 86_400_000));
    }
}
