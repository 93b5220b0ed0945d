//! What a target is told, what it asks its driver for, and what it notes for its operators.

use super::{SnapshotOutcome, SnapshotWish, VerifyOrder, admission};
use quoin_types::block::{Reply, Request, Token};
use quoin_types::ids::{BulkKey, Epoch, Incarnation, Position, SessionKey, SnapshotId};
use quoin_types::membership::{Desired, Member, Membership};
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::time::Time;
use std::time::Duration;

/// What the other side of a session knows beside the first version's messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Knows {
    /// [`ToReplica::Verify`].
    pub verify: bool,
    /// Bulk connections, and with them how increments are counted.
    pub bulk: bool,
}

impl Knows {
    /// All that this version does.
    pub const ALL: Knows = Knows { verify: true, bulk: true };
}

#[derive(Clone, Debug)]
pub enum PrimaryEvent {
    /// Answer to [`PrimaryAction::AcquireEpoch`].
    Granted {
        incarnation: Incarnation,
        epoch: Epoch,
        membership: Membership,
    },
    /// The record names another owner, or the volume is gone: this target stops.
    NotOwner {
        incarnation: Incarnation,
    },
    /// No answer or a passing failure: asked again after a pause, under a new incarnation.
    GrantFailed {
        incarnation: Incarnation,
    },
    Connected {
        session: SessionKey,
        knows: Knows,
    },
    /// The transport ended, or could not be made.
    Disconnected {
        session: SessionKey,
    },
    /// The connection was refused: its pool goes by a newer term of the controller ([`quoin_types::term`]) than
    /// the grant is of.
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
    /// The transport ended, or could not be made; the session's own connection is there still.
    BulkDisconnected {
        bulk: BulkKey,
    },
    BulkMessage {
        bulk: BulkKey,
        message: FromReplica,
    },
    /// `request.token` is unique among those not yet replied to.
    Submit(Request),
    /// Whoever submitted these is gone: what has no LSN yet of them is not wanted any more, and
    /// nothing of it may land behind what comes from now on.
    Abandon(Vec<Token>),
    /// The control plane grew the volume.
    Resize {
        blocks: u64,
    },
    /// A snapshot is to be there, or not any more; said until it is answered by a note.
    Snapshot {
        id: SnapshotId,
        wish: SnapshotWish,
    },
    /// What the membership is to become.
    Desired(Desired),
    /// All members are to be compared; `None`: not any more.
    Verify(Option<VerifyOrder>),
    /// So many bytes of entries may be kept for replicas that are away or behind, where the window
    /// would allow more: other volumes need memory too. Without a limit until it is said.
    Retain {
        bytes_max: usize,
    },
    /// Answer to [`PrimaryAction::SwapMembership`]: the membership as the record now has it
    /// (swapped or not is read from it), or `None` where the outcome is unknown.
    Swapped {
        version: u64,
        membership: Option<Membership>,
    },
    Timer,
    /// Drain, sync, close.
    Shutdown,
}

#[derive(Clone, PartialEq, Debug)]
pub enum PrimaryAction {
    /// One compare-and-swap: epoch := max(record, `at_least`) + 1 while this target is owner.
    AcquireEpoch {
        incarnation: Incarnation,
        at_least: Epoch,
    },
    /// Make a connection to this replica for this session.
    Connect {
        member: Member,
        session: SessionKey,
    },
    /// Compare-and-swap from `version` to `next`, the version after it, while the record has `epoch`.
    SwapMembership {
        epoch: Epoch,
        version: u64,
        next: Membership,
    },
    /// Its bulk connection ends with it.
    Disconnect {
        session: SessionKey,
    },
    Send {
        session: SessionKey,
        message: ToReplica,
    },
    /// Make a bulk connection to this replica for a session that it has open.
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
    /// Call `on(Timer)` then; replaces any earlier timer, `None` cancels it.
    Timer {
        at: Option<Time>,
    },
    Note(PrimaryNote),
    /// Nothing more will come: shut down cleanly, or fenced (see the last note).
    Stopped,
}

/// What an operator wants to know; drivers turn notes into events, status and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PrimaryNote {
    Opening {
        epoch: Epoch,
    },
    /// IO is served from here on.
    Serving {
        epoch: Epoch,
        at: Position,
    },
    /// What the open or the IO waits for, in words; empty when it goes on.
    Waiting(String),
    UnflushedTailMayBeLost,
    InSync {
        members: Vec<Member>,
    },
    Dropped {
        member: Member,
        reason: &'static str,
    },
    /// It takes writes much later than the others, for a while already.
    Slow {
        member: Member,
        took: Duration,
        others: Duration,
    },
    /// It takes them when the others do, again.
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
        /// What the clients wrote meanwhile took more rounds than one.
        rounds: u32,
    },
    /// A bad copy was found at this LBA, and whether it was repaired from another replica.
    BadBlock {
        member: Member,
        lba: u64,
        repaired: bool,
    },
    /// The damaged map of a stretch was rebuilt from another replica's, or could not be now.
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
    /// A verification went on a while, or ended: see the status.
    Verifying {
        ended: bool,
    },
    Fenced {
        by: Epoch,
    },
    ControlPlaneBehind {
        durable_version: u64,
    },
    /// A newcomer may not connect, or had to make room.
    NotAdmitted {
        member: Member,
        refusal: admission::Refusal,
    },
    /// The membership changed: the record and this target have it.
    Changed {
        membership: Membership,
    },
    /// A change of membership was given up before it was asked for; the old rule goes on.
    ChangeGivenUp {
        newcomers: Vec<Member>,
    },
    /// A replica said what an invariant forbids; it was shut out. Names the invariant.
    InvariantRefused {
        member: Member,
        invariant: &'static str,
    },
    Stopped,
}
