//! The records of other clusters, and of the addresses at which those reach this one.

use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Record};

/// Statement of a cluster about itself, to a peer.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Introduction {
    /// Authorities of its mirrors' certificates, the newest first, as PEM.
    pub authorities_pem: String,
    /// SHA-256 of the public keys of its mirrors, in hex.
    pub keys: Vec<String>,
    /// `host:port` of its mirrors.
    pub addresses: Vec<String>,
}

/// Another cluster whose mirrors this one's mirrors trust.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PeerRecord {
    /// Its id: 32 hex digits.
    pub cluster: String,
    /// Its name here.
    pub name: String,
    /// Its last statement about itself.
    pub introduction: Introduction,
    pub paired_ms: u64,
    #[serde(default, skip_serializing_if = "PeerLimits::is_default")]
    pub limits: PeerLimits,
}

/// Limits of what a peer may have in this cluster.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct PeerLimits {
    /// Copies, and their sizes together; `None`: the cluster's own limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Seconds after which an orphan is deleted; `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub orphans_s: Option<u64>,
}

impl PeerLimits {
    /// Most copies of a peer, and their sizes together, where nobody says less.
    pub const COPIES_MAX: u64 = 10_000;
    pub const BYTES_MAX: u64 = 1 << 52;
    /// Shortest and longest time of an orphan.
    pub const ORPHANS_S: std::ops::RangeInclusive<u64> = 60..=365 * 24 * 3600;

    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    pub fn copies_max(&self) -> u64 {
        self.copies.unwrap_or(Self::COPIES_MAX)
    }

    pub fn bytes_max(&self) -> u64 {
        self.bytes.unwrap_or(Self::BYTES_MAX)
    }
}

impl Record for PeerRecord {
    type Index = ();
    const PREFIX: &'static str = "peer/";
    fn name(&self) -> String {
        self.cluster.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

/// Address of a mirror of this cluster. It is kept so that peers are not told of none after a restart.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorAddressRecord {
    pub mirror: String,
    /// `host:port`.
    pub address: String,
}

impl Record for MirrorAddressRecord {
    type Index = ();
    const PREFIX: &'static str = "mirror-address/";
    fn name(&self) -> String {
        self.mirror.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}
