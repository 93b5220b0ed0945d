//! A volume's replicas as its record has them.

use quoin_types::{Member, ReplicaGuid, ReplicaId};
use serde::{Deserialize, Serialize};

use crate::records::Text;

/// Order to the pool about a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ReplicaPhase {
    /// First creation, quorum on; only while the volume is not formed.
    Init,
    /// As `Init`, with the content of the snapshot that the volume is made from.
    Clone,
    /// Creation under a new GUID, quorum off.
    Recreate,
    /// It was created and must exist.
    Keep,
    Delete,
}

impl ReplicaPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Init => "Init",
            Self::Clone => "Clone",
            Self::Recreate => "Recreate",
            Self::Keep => "Keep",
            Self::Delete => "Delete",
        }
    }
}

/// Why a replica was made where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Cause {
    /// A user asked for it, or for the volume.
    #[default]
    Asked,
    /// The one whose place it takes was gone for too long.
    Healing,
    /// The pool of the one whose place it takes is being drained.
    Drain,
    /// The pool of the one whose place it takes is much fuller than this one.
    Balance,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaRecord {
    pub id: Text<ReplicaId>,
    /// The incarnation that the pool is to hold. Where the known list does not name it, this is a
    /// newcomer: to take the place of the one known under this id, or as one more. While a
    /// replica moves there are two records with its id.
    pub guid: Text<ReplicaGuid>,
    pub pool: String,
    pub phase: ReplicaPhase,
    /// Known, and named to leave.
    pub leaving: bool,
    /// It was made in a pool that a person named: rebalancing leaves it there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub placed: bool,
    /// Why it was made.
    pub cause: Cause,
}

impl ReplicaRecord {
    pub fn member(&self) -> Member {
        Member { id: self.id.0, guid: self.guid.0 }
    }
}

/// A replica that is not needed any more, until its pool reports that it is gone.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Discarded {
    pub id: Text<ReplicaId>,
    pub guid: Text<ReplicaGuid>,
    pub pool: String,
}

impl From<ReplicaRecord> for Discarded {
    fn from(replica: ReplicaRecord) -> Self {
        Self { id: replica.id, guid: replica.guid, pool: replica.pool }
    }
}
