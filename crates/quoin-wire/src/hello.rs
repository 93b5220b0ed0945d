//! The first frame each way: who speaks, which protocol, about which replica.
//!
//! The dialler (a target) sends [`Hello`] with the range of protocol versions it can speak and
//! two feature words; the pool answers [`Welcome`] with its choice, or closes. A bit in
//! `features_required` that the other side does not know ends the connection; `features_optional`
//! are on where both sides set them. The frame's session key is the session of the connection:
//! all later frames carry the same one.

use bytes::{BufMut, Bytes, BytesMut};
use quoin_core::codec::{Malformed, Reader, Writer};
use quoin_core::ids::{ReplicaGuid, ReplicaId, VolumeId};

/// Oldest and newest version of the messages that this build speaks.
pub const PROTOCOL_MIN: u16 = 1;
pub const PROTOCOL_MAX: u16 = 1;
/// Feature bits this build knows (none are defined yet).
pub const FEATURES_KNOWN: u64 = 0;
/// A grant is a signed statement of a few ids, with the certificates of who signed it.
pub const GRANT_BYTES_MAX: usize = 16 << 10;

/// What a connection carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ConnectionKind {
    /// Entries, acknowledgements, reads.
    #[default]
    Log,
    /// Rebuild traffic of the same session.
    Bulk,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hello {
    pub protocol_min: u16,
    pub protocol_max: u16,
    pub features_required: u64,
    pub features_optional: u64,
    pub kind: ConnectionKind,
    pub volume: VolumeId,
    pub replica: ReplicaId,
    pub guid: ReplicaGuid,
    /// The controller's signed permission for this volume, epoch, incarnation and node.
    pub grant: Bytes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Welcome {
    pub protocol: u16,
    pub features: u64,
}

impl Hello {
    /// A Hello with this build's versions and features.
    pub fn new(volume: VolumeId, replica: ReplicaId, guid: ReplicaGuid, grant: Bytes) -> Self {
        Hello {
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            features_required: 0,
            features_optional: FEATURES_KNOWN,
            kind: ConnectionKind::Log,
            volume,
            replica,
            guid,
            grant,
        }
    }

    /// The highest version both sides speak and the features both know, or why there is none.
    pub fn negotiate(&self) -> Result<Welcome, String> {
        let protocol = self.protocol_max.min(PROTOCOL_MAX);
        if protocol < self.protocol_min.max(PROTOCOL_MIN) {
            return Err(format!(
                "the peer speaks protocol versions {} to {}, this build {PROTOCOL_MIN} to {PROTOCOL_MAX}: update the older of the two",
                self.protocol_min, self.protocol_max
            ));
        }
        let unknown = self.features_required & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(format!(
                "the peer requires features {unknown:#x} that this build does not know: update this pool"
            ));
        }
        Ok(Welcome {
            protocol,
            features: (self.features_required | self.features_optional) & FEATURES_KNOWN,
        })
    }

    pub(crate) fn encode(&self, out: &mut BytesMut) {
        out.put_u16_le(self.protocol_min);
        out.put_u16_le(self.protocol_max);
        out.put_u64_le(self.features_required);
        out.put_u64_le(self.features_optional);
        out.put_u8(match self.kind {
            ConnectionKind::Log => 0,
            ConnectionKind::Bulk => 1,
        });
        out.put_u128_le(self.volume.0);
        out.put_u128_le(self.replica.0);
        out.put_u128_le(self.guid.0);
        out.put_blob(&self.grant);
    }

    pub(crate) fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let hello = Hello {
            protocol_min: r.u16("hello")?,
            protocol_max: r.u16("hello")?,
            features_required: r.u64("hello")?,
            features_optional: r.u64("hello")?,
            kind: match r.u8("hello")? {
                0 => ConnectionKind::Log,
                1 => ConnectionKind::Bulk,
                _ => return Err(Malformed("connection kind")),
            },
            volume: VolumeId(r.u128("hello")?),
            replica: ReplicaId(r.u128("hello")?),
            guid: ReplicaGuid(r.u128("hello")?),
            grant: r.bytes("grant")?,
        };
        if hello.grant.len() > GRANT_BYTES_MAX {
            return Err(Malformed("grant"));
        }
        Ok(hello)
    }
}

impl Welcome {
    pub(crate) fn encode(&self, out: &mut BytesMut) {
        out.put_u16_le(self.protocol);
        out.put_u64_le(self.features);
    }

    pub(crate) fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        Ok(Welcome { protocol: r.u16("welcome")?, features: r.u64("welcome")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello::new(VolumeId(1), ReplicaId(2), ReplicaGuid(3), Bytes::from_static(b"grant"))
    }

    #[test]
    fn the_newest_common_version_is_chosen() {
        let newer = Hello { protocol_max: PROTOCOL_MAX + 3, ..hello() };
        assert_eq!(newer.negotiate().unwrap().protocol, PROTOCOL_MAX);
    }

    #[test]
    fn versions_that_do_not_meet_are_refused_with_both_ranges() {
        let newer = Hello { protocol_min: PROTOCOL_MAX + 1, protocol_max: 99, ..hello() };
        assert!(newer.negotiate().unwrap_err().contains("99"));
    }

    #[test]
    fn an_unknown_required_feature_is_refused_and_an_optional_one_is_left_off() {
        assert!(Hello { features_required: 1 << 40, ..hello() }.negotiate().is_err());
        let optional = Hello { features_optional: 1 << 40, ..hello() };
        assert_eq!(optional.negotiate().unwrap().features, 0);
    }
}
