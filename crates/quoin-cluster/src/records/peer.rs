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
