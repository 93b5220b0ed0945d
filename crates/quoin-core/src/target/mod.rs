//! The one writer of a volume: orders writes, sends them to replicas, answers reads.

use crate::block::{Reply, Request};
use crate::ids::{Epoch, Incarnation, Position, SessionKey, VolumeId};
use crate::membership::{Durability, Member, Membership};
use crate::message::{FromReplica, ToReplica};
use crate::time::Time;

/// What a volume asks of its target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetConfig {
    pub volume: VolumeId,
    pub volume_blocks: u64,
    /// 512 or 4096.
    pub logical_block_size: u32,
    pub durability: Durability,
    pub on_quorum_loss: OnQuorumLoss,
    pub on_full: OnFull,
    pub reads: ReadMode,
    pub read_only: bool,
    /// 500 to 30,000.
    pub lease_ms: u32,
    /// How long an open waits for the rest of K once it could go on.
    pub open_grace_ms: u32,
    /// A member of the in-sync set that lags longer than this is dropped while CF remain.
    pub drop_after_ms: u32,
    /// Bytes of entries kept in memory for members that lag.
    pub window_bytes: usize,
    /// Bytes above stable that start a sync by themselves.
    pub sync_bytes: usize,
    /// Time above stable that starts a sync by itself.
    pub sync_after_ms: u32,
    /// Prefer this replica for reads (it is on the same host).
    pub local: Option<Member>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnQuorumLoss {
    #[default]
    Wait,
    Fail,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFull {
    #[default]
    Wait,
    NoSpace,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReadMode {
    #[default]
    Leased,
    Confirmed,
}

#[derive(Clone, Debug)]
pub enum TargetEvent {
    /// Answer to [`TargetAction::AcquireEpoch`].
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
    },
    /// The transport ended, or could not be made.
    Disconnected {
        session: SessionKey,
    },
    Message {
        session: SessionKey,
        message: FromReplica,
    },
    /// `request.token` is unique among those not yet replied to.
    Submit(Request),
    /// The control plane grew the volume.
    Resize {
        blocks: u64,
    },
    /// Replicas that are to replace known ones with the same ReplicaId (their data is gone).
    /// The whole list each time it changes.
    Candidates(Vec<Member>),
    /// Answer to [`TargetAction::SwapMembership`]: the membership as the record now has it
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
pub enum TargetAction {
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
    /// Compare-and-swap of the membership `version` -> `next` (`next.version` = `version` + 1),
    /// valid only while the record has `epoch`.
    SwapMembership {
        epoch: Epoch,
        version: u64,
        next: Membership,
    },
    Disconnect {
        session: SessionKey,
    },
    Send {
        session: SessionKey,
        message: ToReplica,
    },
    Reply(Reply),
    /// Call `on(Timer)` then; replaces any earlier timer, `None` cancels it.
    Timer {
        at: Option<Time>,
    },
    Note(TargetNote),
    /// Nothing more will come: shut down cleanly, or fenced (see the last note).
    Stopped,
}

/// What an operator wants to know; drivers turn notes into events, status and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetNote {
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
    Rebuilding {
        member: Member,
        done_bytes: u64,
        total_bytes: u64,
    },
    Rebuilt {
        member: Member,
    },
    /// A bad copy was found at this LBA, and whether it was repaired from another replica.
    BadBlock {
        member: Member,
        lba: u64,
        repaired: bool,
    },
    BlockLost {
        lba: u64,
    },
    Fenced {
        by: Epoch,
    },
    ControlPlaneBehind {
        durable_version: u64,
    },
    /// A replica said what an invariant forbids; it was shut out. Names the invariant.
    InvariantRefused {
        member: Member,
        invariant: &'static str,
    },
    Stopped,
}
