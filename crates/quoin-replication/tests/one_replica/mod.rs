//! One replica on the model of the store, with target messages chosen by the test.

#![allow(dead_code)] // Each test binary uses its part.

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_replication::replica::{LEASE_MS, Replica, ReplicaAction, ReplicaEvent};
use quoin_store::ReplicaPool;
use quoin_store::model::ModelPool;
use quoin_types::message::{FromReplica, OpenAck, Ping, ToReplica};
use quoin_types::*;
use std::sync::Arc;

use crate::broken;

pub const OWN: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(11) };
pub const VOLUME: VolumeId = VolumeId(5);

pub struct One {
    pub pool: ModelPool,
    pub replica: Replica,
    pub now: Time,
    /// Set while its disk is slow: requested syncs do not end.
    pub syncs_wait: bool,
}

pub fn membership() -> Membership {
    let known = vec![OWN, Member { id: ReplicaId(2), guid: ReplicaGuid(12) }];
    Membership { version: 1, rf: 2, cf: 2, drf: 2, known, retired: vec![], formed: true }
}

pub fn key(epoch: u64, incarnation: u128, nonce: u64) -> SessionKey {
    SessionKey { epoch: Epoch(epoch), incarnation: Incarnation(incarnation), nonce }
}

impl One {
    pub fn new() -> Self {
        broken::break_a_rule();
        let mut pool = ModelPool::new();
        let identity = ReplicaIdentity {
            volume: VOLUME,
            replica: OWN.id,
            guid: OWN.guid,
            volume_spec: Bytes::new(),
        };
        let meta = ReplicaMeta {
            membership: membership(),
            quorum: true,
            closed_continuous: true,
            ..ReplicaMeta::default()
        };
        pool.create(identity, meta, 64).unwrap();
        let now = Time::from_millis(1000);
        let replica = Replica::new(now, pool.cookie(), &pool.replica(OWN.guid).unwrap());
        Self { pool, replica, now, syncs_wait: false }
    }

    pub fn restart(&mut self) {
        self.pool.restart();
        let cookie = self.pool.cookie();
        self.replica = Replica::new(self.now, cookie, &self.pool.replica(OWN.guid).unwrap());
    }

    pub fn on(&mut self, event: ReplicaEvent) -> Vec<FromReplica> {
        let mut sent = Vec::new();
        let mut actions = Vec::new();
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            {
                let mut store = self.pool.replica(OWN.guid).unwrap();
                self.replica.on(self.now, event, &mut store, &mut actions);
            }
            self.replica.flush(&mut actions);
            if !self.syncs_wait
                && let Some(ticket) = self.pool.sync_wanted()
            {
                self.pool.sync_finished(ticket, Ok(())).expect("a sync");
                events.push(ReplicaEvent::Synced { ticket, result: Ok(()) });
            }
        }
        for action in actions {
            if let ReplicaAction::Send { message, .. } = action {
                sent.push(message);
            }
        }
        sent
    }

    pub fn send(&mut self, session: SessionKey, message: ToReplica) -> Vec<FromReplica> {
        self.on(ReplicaEvent::Message { connection: session.nonce, session, message })
    }

    pub fn open(&mut self, session: SessionKey) -> Vec<FromReplica> {
        let message = ToReplica::Open {
            volume: VOLUME,
            replica: OWN.id,
            guid: OWN.guid,
            membership: membership(),
            lease_ms: LEASE_MS,
        };
        self.send(session, message)
    }

    pub fn opened(&mut self, session: SessionKey) -> OpenAck {
        match self.open(session).pop() {
            Some(FromReplica::OpenAck(ack)) => *ack,
            other => panic!("not opened: {other:?}"),
        }
    }

    pub fn feed(&mut self, session: SessionKey) {
        let position = self.position();
        let keep = position.lsn;
        let sent = self.send(session, ToReplica::Truncate { keep, tip: keep });
        assert!(sent.iter().any(|m| matches!(m, FromReplica::Truncated { .. })), "{sent:?}");
    }

    pub fn position(&mut self) -> Position {
        self.pool.replica(OWN.guid).unwrap().state().position
    }

    pub fn entry(&mut self, epoch: u64, fill: u8) -> Arc<Entry> {
        let state = self.pool.replica(OWN.guid).unwrap().state();
        let position = Position { epoch: Epoch(epoch), lsn: state.position.lsn.next() };
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Arc::new(Entry::after(state.chain, position, EntryKind::Write, 3, 1, data, false))
    }

    /// A View of its own that lists only this replica.
    pub fn view(&mut self, epoch: u64, durability: Durability) -> Arc<Entry> {
        let state = self.pool.replica(OWN.guid).unwrap().state();
        let known = membership().known;
        let rule = quoin_types::entry::Rule { membership_version: 1, rf: 2, cf: 2, known };
        let view = View { in_sync: vec![OWN], rule, durability, ..View::default() };
        let position = Position { epoch: Epoch(epoch), lsn: state.position.lsn.next() };
        let kind = EntryKind::View(Box::new(view));
        Arc::new(Entry::after(state.chain, position, kind, 0, 0, Bytes::new(), false))
    }

    pub fn append(&mut self, session: SessionKey, entry: Arc<Entry>) -> Vec<FromReplica> {
        let message =
            ToReplica::Append { entries: vec![entry], stable: Lsn(0), sync: false, ping: Ping(9) };
        self.send(session, message)
    }
}
