//! One copy of a volume: promises, leases, strict order, durability (R1 to R4).

pub mod store;

use crate::ids::SessionKey;
use crate::message::{FromReplica, ToReplica};
use store::{StoreError, SyncTicket};

/// A transport connection, named by the driver.
pub type ConnectionId = u64;

#[derive(Clone, Debug)]
pub enum ReplicaEvent {
    Message { connection: ConnectionId, session: SessionKey, message: ToReplica },
    Disconnected { connection: ConnectionId },
    /// A sync that covers `ticket` ended. A failed sync is never retried for truth.
    Synced { ticket: SyncTicket, result: Result<(), StoreError> },
    Timer,
    /// The pool is going down: say so to the target and take nothing more.
    Shutdown,
}

#[derive(Clone, PartialEq, Debug)]
pub enum ReplicaAction {
    Send { connection: ConnectionId, session: SessionKey, message: FromReplica },
    /// End the connection after what was sent before.
    Disconnect { connection: ConnectionId },
    /// Call `on(Timer)` then; replaces any earlier timer, `None` cancels it.
    Timer { at: Option<crate::Time> },
    Note(ReplicaNote),
}

/// What an operator wants to know; drivers turn notes into events, logs and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaNote {
    Opened { session: SessionKey },
    Closed,
    Damaged(&'static str),
    DiskFailed(StoreError),
    Full,
    Rebuilt { position: crate::Position },
    /// A peer sent what an invariant forbids; the session was ended. Names the invariant.
    InvariantRefused(&'static str),
}
