//! The first frame in each direction: the parties, the protocol, and the replica.
//!
//! The dialler (a target) sends [`Hello`] with the range of its protocol versions and two feature
//! words; the pool answers [`Welcome`] with its choice. `features_optional` are on where both sides
//! know them. If the version ranges do not overlap, or a bit in `features_required` is unknown to
//! the pool, it answers with its nearest version and closes, so both sides can report which of the
//! two is older ([`Welcome::validate`]).
//!
//! Later versions may append fields to both frames: fields after the known ones are ignored. The
//! frame's session key is the session of the connection: all later frames carry the same one.

use bytes::{BufMut, Bytes, BytesMut};
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::ids::{ReplicaGuid, ReplicaId, VolumeId};

/// Oldest and newest version of the messages in this build.
pub const PROTOCOL_MIN: u16 = 1;
pub const PROTOCOL_MAX: u16 = 1;
/// Feature bits that this build knows. There are none: all that it has belongs to version 1.
pub const FEATURES_KNOWN: u64 = 0;
/// Limit of a grant: a signed statement of a few ids, with the certificates of its signer.
pub const GRANT_BYTES_MAX: usize = 16 << 10;

/// Purpose of a connection.
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

/// Versions and features of a build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SupportedProtocol {
    pub oldest: u16,
    pub newest: u16,
    pub features: u64,
}

impl SupportedProtocol {
    pub const THIS_BUILD: SupportedProtocol =
        SupportedProtocol { oldest: PROTOCOL_MIN, newest: PROTOCOL_MAX, features: FEATURES_KNOWN };
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Welcome {
    pub protocol: u16,
    pub features: u64,
    /// Proof of a term that is newer than that of the Hello's grant, which refuses the session.
    /// Empty: there is no such refusal.
    pub term: Bytes,
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

    /// Returns the answer of a pool with these versions: the highest version that both sides have
    /// and the features that both know; if there is no common version, the nearest.
    pub fn negotiate(&self, pool: &SupportedProtocol) -> Welcome {
        let offered = self.features_required | self.features_optional;
        Welcome {
            protocol: self.protocol_max.min(pool.newest).max(pool.oldest),
            features: offered & pool.features,
            term: Bytes::new(),
        }
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
    /// Checks that the session can continue with this answer; both sides call it. The error names
    /// the remedy.
    pub fn validate(&self, hello: &Hello) -> Result<(), String> {
        let (oldest, newest) = (hello.protocol_min, hello.protocol_max);
        if !(oldest..=newest).contains(&self.protocol) {
            let older = if self.protocol < oldest { "pool" } else { "target" };
            return Err(format!(
                "the target speaks data protocol {oldest} to {newest}, the pool {} as the nearest: \
                 update the {older}",
                self.protocol
            ));
        }
        let missing = hello.features_required & !self.features;
        if missing != 0 {
            return Err(format!(
                "the target requires features {missing:#x} that the pool does not know: update \
                 the pool"
            ));
        }
        let foreign = self.features & !(hello.features_required | hello.features_optional);
        if foreign != 0 {
            return Err(format!(
                "the pool uses features {foreign:#x} that the target did not offer"
            ));
        }
        Ok(())
    }

    pub(crate) fn encode(&self, out: &mut BytesMut) {
        out.put_u16_le(self.protocol);
        out.put_u64_le(self.features);
        out.put_blob(&self.term);
    }

    pub(crate) fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let (protocol, features) = (r.u16("welcome")?, r.u64("welcome")?);
        let term = r.bytes("term")?;
        if term.len() > GRANT_BYTES_MAX {
            return Err(Malformed("term"));
        }
        Ok(Welcome { protocol, features, term })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello::new(VolumeId(1), ReplicaId(2), ReplicaGuid(3), Bytes::from_static(b"grant"))
    }

    fn supported(oldest: u16, newest: u16, features: u64) -> SupportedProtocol {
        SupportedProtocol { oldest, newest, features }
    }

    #[test]
    fn the_newest_common_version_is_chosen() {
        let newer = Hello { protocol_max: PROTOCOL_MAX + 3, ..hello() };
        let welcome = newer.negotiate(&SupportedProtocol::THIS_BUILD);
        assert_eq!((welcome.protocol, welcome.validate(&newer)), (PROTOCOL_MAX, Ok(())));
        let older = Hello { protocol_min: 2, protocol_max: 3, ..hello() };
        assert_eq!(older.negotiate(&supported(1, 9, 0)).protocol, 3);
    }

    #[test]
    fn versions_that_do_not_overlap_are_refused_by_both_sides_naming_the_older_one() {
        let target = Hello { protocol_min: 5, protocol_max: 7, ..hello() };
        for (pool, expected) in [
            (supported(1, 4, 0), "5 to 7, the pool 4 as the nearest: update the pool"),
            (supported(8, 9, 0), "5 to 7, the pool 8 as the nearest: update the target"),
        ] {
            let refused = target.negotiate(&pool).validate(&target).unwrap_err();
            assert!(refused.ends_with(expected), "{refused}");
        }
    }

    /// Two builds that differ in one of the bits, in both directions.
    #[test]
    fn only_a_missing_required_feature_prevents_a_session() {
        for bit in (0..64).map(|n| 1u64 << n) {
            for (offered, known) in [(bit, 0), (0, bit), (bit, bit), (u64::MAX, !bit)] {
                let target = Hello { features_optional: offered, ..hello() };
                let pool = supported(PROTOCOL_MIN, PROTOCOL_MAX, known);
                let welcome = target.negotiate(&pool);
                assert_eq!(
                    (welcome.validate(&target), welcome.features),
                    (Ok(()), offered & known)
                );
                let demanding = Hello { features_required: bit, ..target };
                let outcome = demanding.negotiate(&pool).validate(&demanding);
                assert_eq!(outcome.is_ok(), known & bit != 0, "{outcome:?}");
            }
        }
    }

    #[test]
    fn an_answer_with_a_version_or_feature_that_was_not_offered_is_refused() {
        let welcome = Welcome { protocol: PROTOCOL_MAX, features: 2, ..Welcome::default() };
        assert!(welcome.validate(&Hello { features_optional: 1, ..hello() }).is_err());
        let welcome = Welcome { protocol: PROTOCOL_MAX + 1, ..Welcome::default() };
        assert!(welcome.validate(&hello()).is_err());
    }
}
