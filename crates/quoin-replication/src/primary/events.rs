//! Events of a target, its requests to the driver, and its notes for operators.

use super::{
    ChangesAnswer, ChangesRequest, LiveOptions, PointOutcome, PointWish, RevertOutcome,
    SnapshotOutcome, SnapshotWish, VerifyOrder, admission,
};
use quoin_types::block::{Reply, Request, Token};
use quoin_types::ids::{
    BulkKey, ClientId, Epoch, Incarnation, PointId, Position, SessionKey, SnapshotId,
};
use quoin_types::membership::{Desired, Member, Membership};
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::time::Time;
use std::time::Duration;

#[derive(Clone, Debug)]
pub enum PrimaryEvent {
    /// Answer to [`PrimaryAction::AcquireEpoch`].
    Granted {
        incarnation: Incarnation,
        epoch: Epoch,
        membership: Membership,
    },
    /// The record names another owner, or the volume does not exist any more: this target stops.
    NotOwner {
        incarnation: Incarnation,
    },
    /// No answer or a transient failure: the target asks again after a pause, under a new
    /// incarnation.
    GrantFailed {
        incarnation: Incarnation,
    },
    Connected {
        session: SessionKey,
    },
    /// The transport ended, or could not be established.
    Disconnected {
        session: SessionKey,
    },
    /// The pool refused the connection: it has heard of a newer term of the controller
    /// ([`quoin_types::term`]) than that of the grant.
    FormerTerm {
        session: SessionKey,
    },
    Message {
        session: SessionKey,
        message: FromReplica,
    },
    BulkConnected {
        bulk: BulkKey,
    },
    /// The bulk transport ended, or could not be established; the session's own connection remains.
    BulkDisconnected {
        bulk: BulkKey,
    },
    BulkMessage {
        bulk: BulkKey,
        message: FromReplica,
    },
    /// Request of a client; `request.token` is unique among those not yet replied to.
    Submit(Request),
    /// The submitter of these requests is gone. Those without an LSN are dropped; none of them may
    /// take effect after a later request.
    Abandon(Vec<Token>),
    /// Attachments of hosts that share the volume: clients of these alone may change it, and the
    /// others end.
    Clients {
        attachments: Vec<u64>,
        /// Version of the record that names them, as that of [`LiveOptions`].
        version: u64,
    },
    /// A client of such a host begins; its id was drawn at random. Its requests follow.
    BeginClient {
        client: ClientId,
    },
    /// The submitter is gone: the client does not begin if it has not yet.
    ForgetClient {
        client: ClientId,
    },
    /// The control plane grew the volume.
    Resize {
        blocks: u64,
    },
    /// The volume's options, which may have changed.
    Options(LiveOptions),
    /// Requests that a snapshot exist, or not exist any more; repeated until a note answers it.
    Snapshot {
        id: SnapshotId,
        wish: SnapshotWish,
    },
    /// Requests a step of a point over several volumes; repeated until a note answers it.
    Point {
        point: PointId,
        wish: PointWish,
    },
    /// Requests that the volume show a snapshot's content again; repeated until a note answers it.
    /// The driver passes it on only while no client is attached. `attempt` is drawn for this one
    /// Revert: it names the hidden snapshot that records it, which the owner deletes once it has
    /// the answer on record, and never uses again.
    Revert {
        snapshot: SnapshotId,
        attempt: SnapshotId,
    },
    /// Requests a part of the changes between two snapshots; answered with
    /// [`PrimaryAction::Changes`], or not at all by a target that does not serve.
    Changes(ChangesRequest),
    /// The membership that the control plane desires.
    Desired(Desired),
    /// Keeps the lease while the volume is idle too, so that its replicas hear this target. A driver
    /// asks for it while the controller does not hear the target.
    KeepLease(bool),
    /// Requests a comparison of all members; `None` ends it.
    Verify(Option<VerifyOrder>),
    /// Limit of bytes of entries that may be kept for replicas that are away or behind, where the
    /// window would allow more: other volumes need memory too. There is no limit before this event.
    Retain {
        bytes_max: usize,
    },
    /// Answer to [`PrimaryAction::SwapMembership`]: the membership as the record now has it, which
    /// shows whether the swap succeeded, or `None` where the outcome is unknown.
    Swapped {
        version: u64,
        membership: Option<Membership>,
    },
    Timer,
    /// Drains, syncs and closes.
    Shutdown,
}

#[derive(Clone, PartialEq, Debug)]
pub enum PrimaryAction {
    /// Requests one compare-and-swap: epoch := max(record, `at_least`) + 1 while this target is
    /// owner.
    AcquireEpoch {
        incarnation: Incarnation,
        at_least: Epoch,
    },
    /// Requests a connection to this replica for this session.
    Connect {
        member: Member,
        session: SessionKey,
    },
    /// Requests a compare-and-swap from `version` to `next`, the version after it, while the record
    /// has `epoch`.
    SwapMembership {
        epoch: Epoch,
        version: u64,
        next: Membership,
    },
    /// Ends the connection of the session; its bulk connection ends with it.
    Disconnect {
        session: SessionKey,
    },
    Send {
        session: SessionKey,
        message: ToReplica,
    },
    /// Requests a bulk connection to this replica for a session that it has open.
    ConnectBulk {
        member: Member,
        bulk: BulkKey,
    },
    DisconnectBulk {
        bulk: BulkKey,
    },
    SendBulk {
        bulk: BulkKey,
        message: ToReplica,
    },
    Reply(Reply),
    /// Answer to [`PrimaryEvent::Changes`].
    Changes {
        token: u64,
        answer: ChangesAnswer,
    },
    /// Requests a call of `on(Timer)` at this time; replaces any earlier timer, `None` cancels it.
    Timer {
        at: Option<Time>,
    },
    Note(PrimaryNote),
    /// Last action: the target has shut down cleanly, or was fenced (see the last note).
    Stopped,
}

/// Information for operators; drivers turn notes into events, status and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PrimaryNote {
    Opening {
        epoch: Epoch,
    },
    /// A client may not begin: its attachment is not granted, or as many clients change the volume
    /// as may at the same time.
    ClientRefused {
        client: ClientId,
    },
    /// IO is served from here on.
    Serving {
        epoch: Epoch,
        at: Position,
    },
    /// Text of what the open or the IO waits for; empty when it continues.
    Waiting(String),
    UnflushedTailMayBeLost,
    InSync {
        members: Vec<Member>,
    },
    Dropped {
        member: Member,
        reason: &'static str,
    },
    /// The replica has applied writes much later than the others for a while.
    Slow {
        member: Member,
        took: Duration,
        others: Duration,
    },
    /// The replica applies writes as fast as the others again.
    NoLongerSlow {
        member: Member,
        took: Duration,
    },
    Rebuilding {
        member: Member,
        done_bytes: u64,
        total_bytes: u64,
    },
    Rebuilt {
        member: Member,
        /// Data that was copied to it since it was last in sync, in all rounds.
        moved_bytes: u64,
        /// Number of rounds; more than one if clients wrote much meanwhile.
        rounds: u32,
    },
    /// A bad copy was found at this LBA, and whether it was repaired from another replica.
    BadBlock {
        member: Member,
        lba: u64,
        repaired: bool,
    },
    /// The damaged map of a range was rebuilt from another replica's, or could not be rebuilt now.
    MapMended {
        member: Member,
        lba: u64,
        blocks: u32,
        done: bool,
    },
    BlockLost {
        lba: u64,
    },
    Snapshot {
        id: SnapshotId,
        outcome: SnapshotOutcome,
    },
    /// Outcome of [`PrimaryEvent::Point`], or the end of a hold that nobody released in time.
    Point {
        point: PointId,
        outcome: PointOutcome,
    },
    /// Outcome of [`PrimaryEvent::Revert`].
    Reverted {
        attempt: SnapshotId,
        outcome: RevertOutcome,
    },
    /// A verification made progress or ended: see the status.
    Verifying {
        ended: bool,
    },
    Fenced {
        by: Epoch,
    },
    ControlPlaneBehind {
        durable_version: u64,
    },
    /// A newcomer may not connect, or lost its seat.
    NotAdmitted {
        member: Member,
        refusal: admission::Refusal,
    },
    /// The membership changed: the record and this target have it.
    Changed {
        membership: Membership,
    },
    /// A change of membership was given up before its swap; the old rule stays in force.
    ChangeGivenUp {
        newcomers: Vec<Member>,
    },
    /// A replica sent what an invariant forbids; it was shut out. Names the invariant.
    InvariantRefused {
        member: Member,
        invariant: &'static str,
    },
    Stopped,
}

impl PrimaryNote {
    /// Returns true if requests that were answered before, and not flushed, may be lost: another epoch begins, or
    /// none does.
    pub fn is_of_another_epoch(&self) -> bool {
        matches!(
            self,
            Self::Opening { .. } | Self::Serving { .. } | Self::Fenced { .. } | Self::Stopped
        )
    }
}
