//! The one writer of a volume: orders writes, sends them to replicas, answers reads.
//!
//! [`Primary`] holds nothing durable. It acquires an epoch, opens the known replicas, recovers one
//! history that holds all that was ever acknowledged, and only then serves. The driver calls
//! [`Primary::on`] for each event and [`Primary::flush`] after each batch of events. All entries,
//! pings and syncs are sent in `flush`, so that a batch of requests becomes one message for each
//! replica.
//!
//! | module | idea |
//! |---|---|
//! | `events` | events in, actions and notes out |
//! | `open`, `verdict` | epoch, answers, authority, recovery (steps 1 to 6); verdict on answers |
//! | `opening` | state that outlives an open that failed, or an epoch that ended |
//! | `history` | the tail of entries, the epoch table, common prefixes |
//! | `past`, `refusals` | writers that came after this one; replicas that report a higher promise |
//! | `commit`, `quorum` | commit, stable, syncs, loss of the quorum; counting, lease, active View |
//! | `members`, `admission` | the replicas: their membership, and which may connect and as what |
//! | `peer` | the state of one replica, as known here |
//! | `requests` | waits of a client's request |
//! | `clients` | clients of a shared volume; requests that are sent again |
//! | `write`, `read` | requests of the client |
//! | `serve`, `timers` | messages sent in `flush`; drop and return; the next timer |
//! | `retention` | which entries are kept in memory, for which replicas |
//! | `room` | pools that run full |
//! | `verify` | comparison of all members while in use |
//! | `rebuild`, `lanes` | increments, and how they are copied from several sources |
//! | `bulk` | the connections that rebuilds use |
//! | `pace` | the rate of rebuilds beside clients |
//! | `rounds` | rebuilds that do not gain on the writers |
//! | `slow` | replicas that take writes later than the others |
//! | `holds` | answers held back for a point over several volumes |
//! | `snapshots`, `changes` | snapshots of users, and Reverts to them; changed ranges between two |
//! | `plan`, `change` | the next membership of a change; its execution under both rules |
//! | `wait_reason` | reasons for which the open or the IO waits |
//! | `status`, `steps` | state for reports; work under way, by name |

pub mod admission;
mod announced;
mod bulk;
mod change;
mod changes;
mod clients;
mod commit;
mod events;
mod gather;
mod history;
mod holds;
mod incarnations;
mod lanes;
mod members;
mod open;
mod opening;
mod options;
mod pace;
mod past;
mod peer;
mod plan;
mod quorum;
mod read;
mod rebuild;
mod refusals;
mod repair;
mod requests;
mod retention;
mod room;
mod rounds;
mod serve;
mod slab;
mod slow;
mod snapshots;
mod status;
mod steps;
mod timers;
mod verdict;
mod verify;
mod wait_reason;
mod write;

use announced::Announced;
pub use changes::{ChangesAnswer, ChangesRequest};
pub use events::{PrimaryAction, PrimaryEvent, PrimaryNote};
use history::History;
pub use holds::{HOLD_MS_MAX, PointOutcome, PointWish};
pub use options::LiveOptions;
use peer::{Link, Peer};
use quoin_types::VOLUME_BLOCKS_MAX;
use quoin_types::block::{BlockError, Payload, Reply, Token};
use quoin_types::ids::{SessionKey, VolumeId};
use quoin_types::membership::{Durability, Member};
pub use quoin_types::message::ChangedRange;
use quoin_types::message::{Failure, FromReplica, Ping, ToReplica};
use quoin_types::time::Time;
use quorum::Views;
pub use snapshots::{RevertOutcome, SnapshotOutcome, SnapshotWish, USER_SNAPSHOTS_MAX};
pub use status::{PrimaryStatus, ReplicaStanding, ReplicaStatus};
pub use timers::TIMER_DELAY_MIN;
pub use verify::{Copy, FINDINGS_MAX, Finding, Found, VerifiedMember, VerifyOrder, VerifyReport};
use wait_reason::WaitReason;

/// Options of a volume for its target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrimaryConfig {
    pub volume: VolumeId,
    /// The size set by the control plane; a smaller history is grown to it.
    pub volume_blocks: u64,
    /// Block size in bytes: 512 or 4096.
    pub logical_block_size: u32,
    pub durability: Durability,
    pub on_quorum_loss: OnQuorumLoss,
    pub on_full: OnFull,
    pub reads: ReadMode,
    pub read_only: bool,
    /// Lease in ms: 500 to 30,000.
    pub lease_ms: u32,
    /// Time that an open waits for the rest of K once it could continue, in ms.
    pub open_grace_ms: u32,
    /// Lag in ms beyond which a member of the in-sync set is dropped while CF remain.
    pub drop_after_ms: u32,
    /// Bytes of entries kept in memory for members that lag.
    pub window_bytes: usize,
    /// Bytes above stable that start a sync by themselves.
    pub sync_bytes: usize,
    /// Time above stable that starts a sync by itself.
    pub sync_after_ms: u32,
    /// Preferred replica for reads (it is on the same host).
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

/// Phase of a target between an epoch and IO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Not started, or waiting to ask for an epoch again.
    Resting {
        until: Time,
    },
    Acquiring,
    /// Waits for answers. The times: since OQ was reached; since only the loss of unflushed data
    /// allows the open.
    Opening {
        quorum_at: Option<Time>,
        unflushed_since: Option<Time>,
    },
    /// Reads the authority's log.
    Fetching {
        authority: Member,
    },
    /// The first View is on its way.
    Recovering,
    Serving,
    /// Shutting down: no new requests are accepted.
    Draining {
        closing: bool,
        until: Time,
    },
    Stopped,
}

pub struct Primary {
    config: PrimaryConfig,
    phase: Phase,
    members: members::Members,
    opening: opening::Opening,
    options: options::Options,
    history: History,
    commit: commit::Commit,
    requests: requests::Requests,
    changes: changes::Changes,
    clients: clients::Clients,
    holds: holds::Holds,
    reads: read::Reads,
    change: change::Change,
    verification: verify::Verification,
    rebuilds: rebuild::Rebuilds,
    drain_requested: bool,
    announced: Announced,
}

impl Primary {
    /// `seed` determines the incarnations; it must not repeat for a volume.
    pub fn new(now: Time, config: PrimaryConfig, seed: u64) -> Self {
        Self {
            phase: Phase::Resting { until: now },
            members: members::Members::new(),
            opening: opening::Opening::new(now, seed),
            options: options::Options::default(),
            history: History::empty(config.volume_blocks),
            commit: commit::Commit::default(),
            requests: requests::Requests::default(),
            changes: changes::Changes::default(),
            clients: clients::Clients::default(),
            holds: holds::Holds::default(),
            reads: read::Reads::default(),
            change: change::Change::default(),
            verification: verify::Verification::new(),
            rebuilds: rebuild::Rebuilds::new(),
            drain_requested: false,
            announced: Announced::default(),
            config,
        }
    }

    pub fn on(&mut self, now: Time, event: PrimaryEvent, actions: &mut Vec<PrimaryAction>) {
        if self.phase == Phase::Stopped {
            return;
        }
        match event {
            PrimaryEvent::Granted { incarnation, epoch, membership } => {
                if self.phase == Phase::Acquiring
                    && incarnation == self.opening.incarnations.current()
                {
                    self.granted(now, epoch, membership, actions);
                }
            }
            PrimaryEvent::NotOwner { incarnation } => {
                if self.phase == Phase::Acquiring
                    && incarnation == self.opening.incarnations.current()
                {
                    actions.push(PrimaryAction::Note(PrimaryNote::Fenced {
                        by: self.opening.refusals.newest().max(self.opening.epoch),
                    }));
                    self.stop(actions);
                }
            }
            PrimaryEvent::GrantFailed { incarnation } => {
                if self.phase == Phase::Acquiring
                    && incarnation == self.opening.incarnations.current()
                {
                    self.wait_for(WaitReason::Grant, actions);
                    self.rest(now);
                }
            }
            PrimaryEvent::Connected { session } => {
                self.connected(now, session, actions);
            }
            PrimaryEvent::BulkConnected { bulk } => self.bulk_connected(bulk, actions),
            PrimaryEvent::BulkDisconnected { bulk } => self.bulk_disconnected(now, bulk, actions),
            PrimaryEvent::BulkMessage { bulk, message } => {
                self.on_bulk_message(now, bulk, message, actions);
            }
            PrimaryEvent::Disconnected { session } => {
                if let Some(index) = self.peer_of(session) {
                    self.peer_lost(now, index, actions);
                }
            }
            PrimaryEvent::FormerTerm { session } => {
                if let Some(index) = self.peer_of(session) {
                    self.on_former_term(now, index, actions);
                }
            }
            PrimaryEvent::Message { session, message } => {
                if let Some(index) = self.peer_of(session) {
                    self.on_message(now, index, message, actions);
                }
            }
            PrimaryEvent::Submit(request) => self.submit(now, request, actions),
            PrimaryEvent::Abandon(tokens) => self.abandon(now, &tokens, actions),
            PrimaryEvent::Clients { attachments, version } => {
                self.grant_clients(attachments, version, actions);
            }
            PrimaryEvent::BeginClient { client } => self.begin_client(client, actions),
            PrimaryEvent::ForgetClient { client } => self.forget_client(client),
            PrimaryEvent::Resize { blocks } => {
                let blocks = blocks.min(VOLUME_BLOCKS_MAX);
                self.config.volume_blocks = self.config.volume_blocks.max(blocks);
                if self.phase == Phase::Serving {
                    self.grow();
                }
            }
            PrimaryEvent::Options(options) => self.change_options(&options),
            PrimaryEvent::Snapshot { id, wish } => self.wish_snapshot(id, wish),
            PrimaryEvent::Point { point, wish } => self.wish_point(now, point, wish, actions),
            PrimaryEvent::Changes(request) => self.ask_changes(now, request),
            PrimaryEvent::Revert { snapshot, attempt } => self.wish_revert(snapshot, attempt),
            PrimaryEvent::Desired(desired) => self.members.desired = desired,
            PrimaryEvent::KeepLease(keeps) => self.members.keeps_lease = keeps,
            PrimaryEvent::Verify(order) => self.order_verify(now, order),
            PrimaryEvent::Retain { bytes_max } => self.rebuilds.retain_bytes_max = bytes_max,
            PrimaryEvent::Swapped { version, membership } => {
                self.swapped(now, version, membership, actions);
            }
            PrimaryEvent::Timer => self.announced.timer_expired(),
            PrimaryEvent::Shutdown => self.drain_requested = true,
        }
    }

    fn key(&self, nonce: u64) -> SessionKey {
        SessionKey {
            epoch: self.opening.epoch,
            incarnation: self.opening.incarnations.current(),
            nonce,
        }
    }

    fn peer_of(&self, session: SessionKey) -> Option<usize> {
        if session.epoch != self.opening.epoch
            || session.incarnation != self.opening.incarnations.current()
        {
            return None;
        }
        self.members.peers.iter().position(|p| p.nonce == session.nonce && p.link != Link::Down)
    }

    fn send(&self, index: usize, message: ToReplica, actions: &mut Vec<PrimaryAction>) {
        let session = self.key(self.members[index].nonce);
        actions.push(PrimaryAction::Send { session, message });
    }

    fn reply(
        &self,
        token: Token,
        result: Result<Payload, BlockError>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        actions.push(PrimaryAction::Reply(Reply { token, result }));
    }

    /// Notes the reason to wait, once for each change.
    fn wait_for(&mut self, reason: WaitReason, actions: &mut Vec<PrimaryAction>) {
        if self.announced.wait(reason) {
            actions.push(PrimaryAction::Note(PrimaryNote::Waiting(reason.to_string())));
        }
    }

    /// Notes that the wait is over.
    fn wait_no_longer(&mut self, actions: &mut Vec<PrimaryAction>) {
        if self.announced.wait_no_longer() {
            actions.push(PrimaryAction::Note(PrimaryNote::Waiting(String::new())));
        }
    }

    fn on_message(
        &mut self,
        now: Time,
        index: usize,
        message: FromReplica,
        actions: &mut Vec<PrimaryAction>,
    ) {
        match message {
            FromReplica::OpenAck(ack) => self.on_open_ack(now, index, ack, actions),
            FromReplica::Refuse { promised, failure } => {
                self.on_refused(now, index, promised, failure, actions);
            }
            FromReplica::Truncated { position, chain } => {
                self.on_truncated(now, index, position, chain, actions);
            }
            FromReplica::Applied { applied, durable, ping } => {
                self.saw_ping(now, index, ping);
                self.compare_writes(now, index, applied, ping, actions);
                self.on_applied(now, index, applied, durable, actions);
            }
            FromReplica::Data { id, at, slots, ping } => {
                self.saw_ping(now, index, ping);
                if !self.on_choice(index, id, at, &slots) {
                    self.on_data(now, index, id, at, slots, actions);
                }
            }
            FromReplica::Verified { id, at, slots, ping } => {
                self.saw_ping(now, index, ping);
                self.on_verified(now, index, id, at, slots, actions);
            }
            FromReplica::Fetched { entries, gone, .. } => {
                self.on_fetched(now, index, entries, gone, actions);
            }
            FromReplica::Pulled { id, slots, cursor, gone, .. }
                if self.on_changes(now, index, id, &slots, cursor, gone) => {}
            FromReplica::Pulled { id, slots, cursor, end, gone } => {
                self.on_pulled(now, index, id, slots, cursor, end, gone, actions);
            }
            FromReplica::IncrementFed { rebuild, cursor } => {
                self.on_increment_fed(index, rebuild, cursor);
            }
            // Valid on a bulk connection only.
            FromReplica::IncrementBegun { .. } => {}
            FromReplica::IncrementDone { rebuild, position } => {
                self.on_increment_done(now, index, rebuild, position, actions);
            }
            FromReplica::Repaired { lba, version: _, done } => {
                let member = self.members[index].member;
                actions.push(PrimaryAction::Note(PrimaryNote::BadBlock {
                    member,
                    lba,
                    repaired: done,
                }));
            }
            FromReplica::Mended { lba, blocks, done } => {
                let member = self.members[index].member;
                actions.push(PrimaryAction::Note(PrimaryNote::MapMended {
                    member,
                    lba,
                    blocks,
                    done,
                }));
            }
            FromReplica::NoRoom { applied } => self.on_no_room(now, index, applied, actions),
            FromReplica::Room(room) => self.on_room(index, room),
            FromReplica::BadCopy(copy) => self.on_bad_copy(now, index, copy, actions),
            FromReplica::Closed => self.hang_up(now, index, actions),
            FromReplica::Failed(failure) => {
                // While IO goes on it is one replica that waits for room, and not the volume.
                if failure == Failure::Full && self.phase != Phase::Serving {
                    self.wait_for(WaitReason::RoomInPool, actions);
                }
                self.hang_up(now, index, actions);
            }
        }
    }

    /// Handles the echo of a ping. Its clock value is one that this target sent, so it is never in
    /// the future.
    fn saw_ping(&mut self, now: Time, index: usize, ping: Ping) {
        let sent = Time(ping.0);
        if ping.0 != 0 && sent <= now {
            let from_receipt = quoin_types::mutant::is("lease-from-the-receipt");
            self.members[index].lease.ping_answered(if from_receipt { now } else { sent });
        }
    }

    /// Ends the session with a replica; it is tried again later.
    fn hang_up(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) {
        let session = self.key(self.members[index].nonce);
        actions.push(PrimaryAction::Disconnect { session });
        self.peer_lost(now, index, actions);
    }

    /// Shuts out, for a while, a replica that sent what no correct replica can send.
    fn shut_out(
        &mut self,
        now: Time,
        index: usize,
        invariant: &'static str,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let member = self.members[index].member;
        actions.push(PrimaryAction::Note(PrimaryNote::InvariantRefused { member, invariant }));
        self.members.ban(now, member);
        self.hang_up(now, index, actions);
    }

    fn peer_lost(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) {
        let was = self.members[index].link;
        self.end_bulk(index, actions);
        self.cancel_rebuilds_from(index);
        self.reissue_reads(index);
        self.members.slow.forget(self.members[index].member);
        self.members[index].down(now);
        match self.phase {
            // A replica that this open may count on is gone: back to step 1 with those that answer
            // now.
            Phase::Fetching { .. } if was == Link::Answered => self.reopen(now, actions),
            Phase::Recovering => {
                let first = self.commit.views.pending.back();
                if first.is_none_or(|(_, view)| !Views::may_activate(view, &self.members.peers)) {
                    self.reopen(now, actions);
                }
            }
            Phase::Serving | Phase::Draining { .. } => {
                self.progress(now, actions);
            }
            _ => {}
        }
    }

    fn stop(&mut self, actions: &mut Vec<PrimaryAction>) {
        for peer in &self.members.peers {
            if peer.link != Link::Down {
                actions.push(PrimaryAction::Disconnect { session: self.key(peer.nonce) });
            }
        }
        self.members.peers.clear();
        self.phase = Phase::Stopped;
        actions.push(PrimaryAction::Note(PrimaryNote::Stopped));
        actions.push(PrimaryAction::Timer { at: None });
        actions.push(PrimaryAction::Stopped);
    }

    /// Returns true while IO is served: not while it opens, also not again.
    pub fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }

    /// Blocks of the volume that a client may address.
    pub fn volume_blocks(&self) -> u64 {
        self.history.blocks
    }
}
