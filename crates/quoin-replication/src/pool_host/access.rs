//! Rights on a connection to a pool.
//!
//! A session's own connection is believed for exactly what its grant names: one volume, one epoch
//! and incarnation, one node, and for writing only where that says so. It opens the replica that its Hello named and no other. A bulk
//! connection is one of a session that is open for the same replica, and so by the same grant.

use std::time::Duration;

use quoin_types::entry::Entry;
use quoin_types::ids::{Epoch, Incarnation, ReplicaGuid, ReplicaId, SessionKey, VolumeId};
use quoin_types::message::ToReplica;
use quoin_types::mutant;

/// Sessions of all replicas together.
pub const CONNECTIONS_MAX: usize = 8192;
/// Bulk connections of one session, those that it is just done with included.
pub const BULKS_MAX: usize = 4;
/// Sessions that have opened nothing yet. A Hello costs its sender nothing, so one source has a
/// quarter of these at most.
pub const UNOPENED_MAX: usize = 512;
/// From a Hello to its Open or OpenBulk. A target sends both together.
pub const OPEN_MAX: Duration = Duration::from_secs(10);

/// Messages that a connection carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    /// Entries, acknowledgements, reads.
    Log,
    /// Rebuild traffic of the same session.
    Bulk,
}

impl Lane {
    /// Returns true if a message may come by a connection of this kind. Former targets rebuild by
    /// the session's own connection.
    pub fn carries(self, message: &ToReplica) -> bool {
        let opens = matches!(message, ToReplica::OpenBulk { .. });
        match self {
            Lane::Log => !opens,
            Lane::Bulk => opens || message.is_copying(),
        }
    }
}

/// Grant of a controller, and the node that has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted<'a> {
    pub volume: VolumeId,
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    pub node: &'a str,
}

impl Granted<'_> {
    /// Returns true if this is the grant of a session for `volume` that the node `peer` asks for.
    pub fn covers(&self, volume: VolumeId, session: &SessionKey, peer: &str) -> bool {
        self.volume == volume
            && self.epoch == session.epoch
            && self.incarnation == session.incarnation
            && self.node == peer
    }
}

/// Returns true if a session of `epoch` may append an entry, by a grant that lets it change the volume's
/// content or not. A session that may not brings replicas to what others have: entries of former
/// epochs are history. In its own it appends what changes no content, such as Views and snapshots.
pub fn appends(writes: bool, epoch: Epoch, entry: &Entry) -> bool {
    writes
        || entry.epoch != epoch
        || !entry.kind.changes_content()
        || mutant::is("written-by-a-grant-that-reads")
}

/// The replica that a connection was believed for. Only that one is opened by it: the grant was
/// held against the Hello, so an Open for anything else was granted by nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    pub volume: VolumeId,
    pub replica: ReplicaId,
    pub guid: ReplicaGuid,
}

impl Claim {
    pub fn allows(&self, message: &ToReplica) -> bool {
        let ToReplica::Open { volume, replica, guid, .. } = message else { return true };
        *self == Self { volume: *volume, replica: *replica, guid: *guid }
            || mutant::is("opened-for-another-claim")
    }
}

/// The session that a replica has open, as its own connection has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenSession {
    pub session: SessionKey,
    pub claim: Claim,
    /// Bulk connections that it has.
    pub bulks: usize,
}

/// Returns true if a bulk connection is taken for the replica whose session is `open`, if any is.
/// Former ones may not have ended yet.
pub fn takes_bulk(session: SessionKey, claim: Claim, open: Option<OpenSession>) -> bool {
    open.is_some_and(|open| {
        (open.session, open.claim) == (session, claim) && open.bulks < BULKS_MAX
    })
}

#[cfg(test)]
mod tests {
    use quoin_types::message::Ping;
    use quoin_types::{Lsn, Membership};

    use super::*;

    const CLAIM: Claim = Claim { volume: VolumeId(1), replica: ReplicaId(2), guid: ReplicaGuid(3) };

    fn session(nonce: u64) -> SessionKey {
        SessionKey { epoch: Epoch(4), incarnation: Incarnation(5), nonce }
    }

    #[test]
    fn a_grant_covers_one_session_of_one_volume_on_one_node() {
        let granted = Granted {
            volume: VolumeId(1),
            epoch: Epoch(4),
            incarnation: Incarnation(5),
            node: "n",
        };
        assert!(granted.covers(VolumeId(1), &session(1), "n"));
        assert!(granted.covers(VolumeId(1), &session(2), "n"), "a target connects again and again");
        assert!(!granted.covers(VolumeId(2), &session(1), "n"));
        assert!(!granted.covers(VolumeId(1), &session(1), "m"));
        let other = SessionKey { epoch: Epoch(5), ..session(1) };
        assert!(!granted.covers(VolumeId(1), &other, "n"));
        let other = SessionKey { incarnation: Incarnation(6), ..session(1) };
        assert!(!granted.covers(VolumeId(1), &other, "n"));
    }

    #[test]
    fn an_open_is_allowed_for_the_replica_of_the_hello_alone() {
        let open = |claim: Claim| ToReplica::Open {
            volume: claim.volume,
            replica: claim.replica,
            guid: claim.guid,
            lease_ms: 1000,
            membership: Membership::default(),
        };
        assert!(CLAIM.allows(&open(CLAIM)));
        assert!(!CLAIM.allows(&open(Claim { volume: VolumeId(9), ..CLAIM })));
        assert!(!CLAIM.allows(&open(Claim { replica: ReplicaId(9), ..CLAIM })));
        assert!(!CLAIM.allows(&open(Claim { guid: ReplicaGuid(9), ..CLAIM })));
        assert!(CLAIM.allows(&ToReplica::Close), "what opens nothing is the session's business");
    }

    #[test]
    fn bulk_connections_are_those_of_an_open_session_and_few() {
        let open = |bulks| Some(OpenSession { session: session(1), claim: CLAIM, bulks });
        assert!(takes_bulk(session(1), CLAIM, open(0)));
        assert!(takes_bulk(session(1), CLAIM, open(BULKS_MAX - 1)));
        assert!(!takes_bulk(session(1), CLAIM, open(BULKS_MAX)));
        assert!(!takes_bulk(session(2), CLAIM, open(0)));
        assert!(!takes_bulk(session(1), Claim { volume: VolumeId(9), ..CLAIM }, open(0)));
        assert!(!takes_bulk(session(1), CLAIM, None));
    }

    #[test]
    fn clients_io_has_the_sessions_own_connection_and_rebuilds_have_theirs() {
        let ping = ToReplica::Ping { ping: Ping(1), stable: Lsn(0) };
        let bulk = ToReplica::OpenBulk { number: 1 };
        assert!(Lane::Log.carries(&ping) && !Lane::Bulk.carries(&ping));
        assert!(!Lane::Log.carries(&bulk) && Lane::Bulk.carries(&bulk));
    }
}
