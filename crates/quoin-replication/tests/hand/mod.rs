//! One target with replicas controlled by hand: the test chooses each message that reaches it.

#![allow(dead_code)] // Each of the tests uses a part of it.

use crate::broken;
use std::time::Duration;

use bytes::Bytes;
use quoin_replication::primary::{
    OnFull, OnQuorumLoss, Primary, PrimaryAction, PrimaryConfig, PrimaryEvent, PrimaryNote,
    ReadMode,
};
use quoin_replication::replica::LEASE_MS;
use quoin_types::block::{Operation, Reply, Request};
use quoin_types::message::{
    EpochEnd, Failure, FromReplica, OpenAck, Ping, SnapshotHead, ToReplica,
};
use quoin_types::*;
pub struct Hand {
    pub now: Time,
    pub target: Primary,
    pub membership: Membership,
    pub epoch: Epoch,
    /// Open connections, newest last.
    pub sessions: Vec<(SessionKey, Member)>,
    pub sent: Vec<(Member, ToReplica)>,
    pub asked: Vec<Epoch>,
    pub replies: Vec<Reply>,
    pub notes: Vec<PrimaryNote>,
    pub timer: Option<Time>,
    /// Epochs that replicas have answered with.
    pub answered: Vec<EpochEnd>,
    /// Open bulk connections, newest last.
    pub bulks: Vec<(BulkKey, Member)>,
    /// Set while bulk connections cannot be made.
    pub bulk_cut: bool,
    pub sent_bulk: Vec<(Member, ToReplica)>,
}

pub fn member(id: u128) -> Member {
    Member { id: ReplicaId(id), guid: ReplicaGuid(100 + id) }
}

pub fn config() -> PrimaryConfig {
    PrimaryConfig {
        volume: VolumeId(7),
        volume_blocks: 1024,
        logical_block_size: 512,
        durability: Durability::Cache,
        on_quorum_loss: OnQuorumLoss::Wait,
        on_full: OnFull::Wait,
        reads: ReadMode::Leased,
        read_only: false,
        lease_ms: LEASE_MS,
        open_grace_ms: 300,
        drop_after_ms: 3000,
        window_bytes: 256 << 10,
        sync_bytes: 1 << 20,
        sync_after_ms: 1000,
        local: None,
    }
}

pub fn rule() -> entry::Rule {
    let known = vec![member(1), member(2), member(3)];
    entry::Rule { membership_version: 1, rf: 3, cf: 2, known }
}

pub fn row(epoch: u64, first: u64, last: u64, chain: u64) -> EpochEnd {
    EpochEnd { epoch: Epoch(epoch), first: Lsn(first), last: Lsn(last), chain: Chain(chain) }
}

/// Answer of a replica whose history is this table, in sync with all others since its first epoch.
pub fn ack(table: Vec<EpochEnd>, stable: u64) -> OpenAck {
    let end = *table.last().unwrap();
    let view = View { in_sync: rule().known, rule: rule(), ..View::default() };
    OpenAck {
        position: Position { epoch: end.epoch, lsn: end.last },
        chain: end.chain,
        stable: Lsn(stable),
        durable: end.last,
        base: Lsn(stable),
        last_view: Some((end.first, view)),
        epoch_table: table,
        continuous: true,
        membership_version: 1,
        quorum: true,
        damaged: false,
        volume_blocks: 1024,
        room: quoin_types::message::RoomGrant::UNBOUNDED,
        snapshots: Vec::new(),
        shadow: None,
        shadow_cut: None,
        heads: Vec::new(),
        clients: ClientTable::default(),
    }
}

impl Hand {
    pub fn new(config: PrimaryConfig) -> Self {
        broken::break_a_rule();
        let now = Time::from_millis(1_000_000);
        let membership = Membership {
            version: 1,
            rf: 3,
            cf: 2,
            drf: 3,
            known: rule().known,
            retired: Vec::new(),
            formed: true,
        };
        let mut hand = Self {
            now,
            target: Primary::new(now, config, 1),
            membership,
            epoch: Epoch(10),
            sessions: Vec::new(),
            sent: Vec::new(),
            asked: Vec::new(),
            replies: Vec::new(),
            notes: Vec::new(),
            timer: None,
            answered: Vec::new(),
            bulks: Vec::new(),
            bulk_cut: false,
            sent_bulk: Vec::new(),
        };
        hand.on(PrimaryEvent::Timer);
        hand
    }

    pub fn on(&mut self, event: PrimaryEvent) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            self.target.on(self.now, event, &mut actions);
            self.target.flush(self.now, &mut actions);
            for action in actions {
                match action {
                    PrimaryAction::AcquireEpoch { incarnation, at_least } => {
                        self.asked.push(at_least);
                        self.epoch = self.epoch.max(at_least).next();
                        events.push(PrimaryEvent::Granted {
                            incarnation,
                            epoch: self.epoch,
                            membership: self.membership.clone(),
                        });
                    }
                    PrimaryAction::Connect { member, session } => {
                        self.sessions.push((session, member));
                        events.push(PrimaryEvent::Connected { session });
                    }
                    PrimaryAction::Disconnect { session } => {
                        self.sessions.retain(|(s, _)| *s != session);
                    }
                    PrimaryAction::Send { session, message } => {
                        if let Some((_, member)) = self.sessions.iter().find(|(s, _)| *s == session)
                        {
                            self.sent.push((*member, message));
                        }
                    }
                    PrimaryAction::ConnectBulk { member, bulk } if self.bulk_cut => {
                        assert!(self.sessions.contains(&(bulk.session, member)));
                        events.push(PrimaryEvent::BulkDisconnected { bulk });
                    }
                    PrimaryAction::ConnectBulk { member, bulk } => {
                        assert!(self.sessions.contains(&(bulk.session, member)));
                        self.bulks.push((bulk, member));
                        events.push(PrimaryEvent::BulkConnected { bulk });
                    }
                    PrimaryAction::DisconnectBulk { bulk } => {
                        self.bulks.retain(|(b, _)| *b != bulk);
                    }
                    PrimaryAction::SendBulk { bulk, message } => {
                        if let Some((_, member)) = self.bulks.iter().find(|(b, _)| *b == bulk) {
                            self.sent_bulk.push((*member, message));
                        }
                    }
                    PrimaryAction::Reply(reply) => self.replies.push(reply),
                    PrimaryAction::Timer { at } => self.timer = at,
                    PrimaryAction::Note(note) => self.notes.push(note),
                    PrimaryAction::SwapMembership { .. }
                    | PrimaryAction::Changes { .. }
                    | PrimaryAction::Stopped => {}
                }
            }
        }
    }

    pub fn pass(&mut self, ms: u64) {
        let end = self.now + Duration::from_millis(ms);
        while let Some(at) = self.timer.filter(|t| *t <= end) {
            self.now = self.now.max(at);
            self.timer = None;
            self.on(PrimaryEvent::Timer);
        }
        self.now = end;
    }

    pub fn session(&self, id: u128) -> Option<SessionKey> {
        self.sessions.iter().rev().find(|(_, m)| *m == member(id)).map(|(s, _)| *s)
    }

    pub fn bulk(&self, id: u128) -> Option<BulkKey> {
        self.bulks.iter().rev().find(|(_, m)| *m == member(id)).map(|(b, _)| *b)
    }

    pub fn say_bulk(&mut self, id: u128, message: FromReplica) {
        let bulk = self.bulk(id).expect("it has a bulk connection");
        self.on(PrimaryEvent::BulkMessage { bulk, message });
    }

    pub fn lose_bulk(&mut self, id: u128) {
        let bulk = self.bulk(id).expect("it has a bulk connection");
        self.bulks.retain(|(b, _)| *b != bulk);
        self.on(PrimaryEvent::BulkDisconnected { bulk });
    }

    pub fn say(&mut self, id: u128, message: FromReplica) {
        let session = self.session(id).expect("the replica is connected");
        self.on(PrimaryEvent::Message { session, message });
    }

    pub fn answer(&mut self, id: u128, mut ack: OpenAck) {
        ack.heads.resize(ack.snapshots.len(), SnapshotHead::default());
        self.answered.extend(&ack.epoch_table);
        self.say(id, FromReplica::OpenAck(Box::new(ack)));
    }

    pub fn truncate_sent(&self, id: u128) -> Option<Lsn> {
        self.sent.iter().rev().find_map(|(m, message)| match message {
            ToReplica::Truncate { keep, .. } if *m == member(id) => Some(*keep),
            _ => None,
        })
    }

    /// Acknowledges the truncation, up to the last entry that was sent to the replica.
    pub fn truncated(&mut self, id: u128) {
        let lsn = self.truncate_sent(id).expect("it was told to truncate");
        let position = Position { epoch: Epoch(0), lsn };
        let row = self.answered.iter().rev().find(|row| row.last == lsn);
        let chain = row.map_or(Chain(0), |row| row.chain);
        self.say(id, FromReplica::Truncated { position, chain });
    }

    pub fn entries_of(&self, id: u128) -> Vec<entry::SharedEntry> {
        let sent = self.sent.iter().filter(|(m, _)| *m == member(id));
        sent.flat_map(|(_, message)| match message {
            ToReplica::Append { entries, .. } => entries.clone(),
            _ => Vec::new(),
        })
        .collect()
    }

    /// Acknowledges everything sent so far as applied, and as on media if `durable`.
    pub fn applied(&mut self, id: u128, durable: bool) {
        let applied = self.entries_of(id).last().expect("entries were sent").lsn;
        let durable = if durable { applied } else { Lsn(0) };
        let ping = Ping(self.now.0);
        self.say(id, FromReplica::Applied { applied, durable, ping });
    }

    pub fn submit(&mut self, token: u64, operation: Operation) {
        self.on(PrimaryEvent::Submit(Request { token, operation, origin: None }));
    }

    pub fn write(&mut self, token: u64, block: u64) {
        let data = Bytes::from(vec![token as u8; 4096]);
        self.submit(token, Operation::Write { offset: block * 4096, data, fua: false });
    }

    /// Opens and feeds the replicas: IO has started.
    pub fn serve(&mut self, table: &[EpochEnd], stable: u64) {
        self.sent.clear();
        for id in 1..=3 {
            self.answer(id, ack(table.to_vec(), stable));
        }
        for id in 1..=3 {
            self.truncated(id);
        }
        for id in 1..=3 {
            self.applied(id, true);
        }
        assert!(self.target.status().serving);
    }

    /// Another incarnation was granted the next epoch, and this replica promised it.
    pub fn overtaken(&mut self, id: u128) {
        let session = self.session(id).unwrap();
        self.on(PrimaryEvent::Disconnected { session });
        self.sessions.retain(|(s, _)| *s != session);
        self.pass(200);
        let promised = self.epoch.next();
        self.epoch = promised;
        self.say(id, FromReplica::Refuse { promised, failure: Failure::Fenced });
        self.pass(1000);
    }
}
