//! The membership of a volume as its record has it.

use quoin_types::{Member, Membership, ReplicaGuid, ReplicaId};
use serde::{Deserialize, Serialize};

use crate::records::Text;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemberRecord {
    pub id: Text<ReplicaId>,
    pub guid: Text<ReplicaGuid>,
}

/// [`Membership`] as it is written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MembershipRecord {
    pub version: u64,
    pub rf: u8,
    pub cf: u8,
    pub drf: u8,
    pub known: Vec<MemberRecord>,
    pub retired: Vec<Text<ReplicaGuid>>,
    pub formed: bool,
}

impl From<&Membership> for MembershipRecord {
    fn from(membership: &Membership) -> Self {
        let known = membership.known.iter();
        Self {
            version: membership.version,
            rf: membership.rf,
            cf: membership.cf,
            drf: membership.drf,
            known: known.map(|m| MemberRecord { id: Text(m.id), guid: Text(m.guid) }).collect(),
            retired: membership.retired.iter().copied().map(Text).collect(),
            formed: membership.formed,
        }
    }
}

impl From<&MembershipRecord> for Membership {
    fn from(record: &MembershipRecord) -> Self {
        Membership {
            version: record.version,
            rf: record.rf,
            cf: record.cf,
            drf: record.drf,
            known: record.known.iter().map(|m| Member { id: m.id.0, guid: m.guid.0 }).collect(),
            retired: record.retired.iter().map(|guid| guid.0).collect(),
            formed: record.formed,
        }
    }
}
