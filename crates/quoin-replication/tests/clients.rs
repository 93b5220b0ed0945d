//! Requests that clients of a shared volume send again take effect once (RepeatOnce).

use bytes::Bytes;
use quoin_replication::primary::{LiveOptions, PrimaryEvent, PrimaryNote};
use quoin_types::block::{BlockError, Operation, Reply, Request};
use quoin_types::client::{CLIENT_WINDOW, CLIENTS_MAX};
use quoin_types::message::{EpochEnd, FromReplica, OpenAck, Ping};
use quoin_types::*;

use crate::common::{Cluster, config};
use crate::hand::{Hand, ack};

const TABLE: [EpochEnd; 1] =
    [EpochEnd { epoch: Epoch(5), first: Lsn(1), last: Lsn(10), chain: Chain(55) }];
const ATTACHMENT: u64 = 3;
const BLOCK: u64 = 4096;

fn client(random: u64) -> ClientId {
    ClientId::of_attachment(ATTACHMENT, random)
}

fn origin(number: u64, low: u64) -> Origin {
    Origin { client: client(1), number, low }
}

impl Hand {
    /// A volume that serves, with this table of clients.
    fn sharing(clients: &ClientTable) -> Self {
        let mut hand = Hand::new(config());
        hand.on(PrimaryEvent::Clients {
            attachments: vec![ATTACHMENT, ATTACHMENT + 1],
            version: 1,
        });
        hand.sent.clear();
        for id in 1..=3 {
            hand.answer(id, OpenAck { clients: clients.clone(), ..ack(TABLE.to_vec(), 10) });
        }
        (1..=3).for_each(|id| hand.truncated(id));
        (1..=3).for_each(|id| hand.applied(id, true));
        assert!(hand.target.status().serving);
        hand
    }

    fn begin(&mut self, random: u64) {
        self.on(PrimaryEvent::BeginClient { client: client(random) });
        self.reach_all();
    }

    fn reach_all(&mut self) {
        (1..=3).for_each(|id| self.applied(id, true));
    }

    fn numbered(&mut self, token: u64, origin: Origin, operation: Operation) {
        self.on(PrimaryEvent::Submit(Request { token, operation, origin: Some(origin) }));
    }

    fn numbered_write(&mut self, token: u64, number: u64, fua: bool) {
        let data = Bytes::from(vec![number as u8; BLOCK as usize]);
        self.numbered(token, origin(number, 0), Operation::Write { offset: 5 * BLOCK, data, fua });
    }

    fn entries(&self) -> usize {
        self.entries_of(1).len()
    }

    fn results(&mut self) -> Vec<(u64, Result<(), BlockError>)> {
        let replies: Vec<Reply> = std::mem::take(&mut self.replies);
        replies.into_iter().map(|reply| (reply.token, reply.result.map(|_| ()))).collect()
    }
}

#[test]
fn a_request_that_is_sent_again_takes_effect_once() {
    let mut hand = Hand::sharing(&ClientTable::default());
    hand.begin(1);
    hand.numbered_write(1, 0, false);
    hand.reach_all();
    assert_eq!(hand.results(), [(1, Ok(()))]);
    hand.write(2, 5);
    hand.reach_all();
    assert_eq!(hand.results(), [(2, Ok(()))]);
    let before = hand.entries();
    hand.numbered_write(3, 0, false);
    hand.numbered_write(4, 0, true);
    assert_eq!(hand.results(), [(3, Ok(())), (4, Ok(()))]);
    assert_eq!(hand.entries(), before, "nothing overwrites what came after it");
    hand.numbered_write(5, 1, false);
    assert_eq!(hand.entries(), before + 1, "the next one is new");
}

#[test]
fn a_request_that_is_sent_again_is_answered_once_the_first_one_may_be() {
    let mut hand = Hand::sharing(&ClientTable::default());
    hand.begin(1);
    hand.numbered_write(1, 0, true);
    let before = hand.entries();
    hand.on(PrimaryEvent::Abandon(vec![1]));
    hand.numbered_write(2, 0, true);
    hand.write(3, 9);
    assert_eq!((hand.entries(), hand.results()), (before + 1, Vec::new()));
    (1..=3).for_each(|id| hand.applied(id, false));
    assert_eq!(hand.results(), [(3, Ok(()))], "not on media yet");
    hand.reach_all();
    assert_eq!(hand.results(), [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn answers_leave_in_the_order_of_their_entries_though_one_was_asked_for_again() {
    let mut hand = Hand::sharing(&ClientTable::default());
    hand.begin(1);
    hand.numbered_write(1, 0, false);
    let first = hand.entries_of(1).last().unwrap().lsn;
    hand.write(2, 9);
    hand.numbered_write(3, 0, false);
    for id in [1, 2] {
        let (durable, ping) = (Lsn(0), Ping(hand.now.0));
        hand.say(id, FromReplica::Applied { applied: first, durable, ping });
    }
    assert_eq!(hand.results(), [(1, Ok(())), (3, Ok(()))], "nothing holds it up");
}

#[test]
fn the_next_target_knows_what_took_effect_and_goes_on_where_a_part_did() {
    let mut clients = ClientTable::default();
    clients.apply(Lsn(3), &EntryKind::BeginClient { client: client(1) }, None);
    let mut part = Part { origin: origin(7, 7), end: 6, is_last: true };
    clients.apply(Lsn(8), &EntryKind::Write, Some(&part));
    part = Part { origin: origin(8, 7), end: 100, is_last: false };
    clients.apply(Lsn(9), &EntryKind::Write, Some(&part));
    let mut hand = Hand::sharing(&clients);
    let before = hand.entries();
    hand.numbered_write(1, 7, false);
    assert_eq!((hand.entries(), hand.results()), (before, vec![(1, Ok(()))]));
    let data = Bytes::from(vec![9; 600 * BLOCK as usize]);
    hand.numbered(2, origin(8, 7), Operation::Write { offset: 0, data, fua: false });
    let parts: Vec<_> = hand.entries_of(1)[before..]
        .iter()
        .map(|e| (e.lba, e.part.unwrap().end, e.part.unwrap().is_last))
        .collect();
    assert_eq!(parts, [(100, 356, false), (356, 600, true)]);
    let data = Bytes::from(vec![9; 600 * BLOCK as usize]);
    hand.numbered(3, origin(8, 7), Operation::Write { offset: 0, data, fua: false });
    assert_eq!(hand.entries(), before + 2);
}

#[test]
fn replicas_tell_the_next_target_what_took_effect() {
    let mut cluster = Cluster::new(3, config());
    let grant = || PrimaryEvent::Clients { attachments: vec![ATTACHMENT], version: 1 };
    let write = |token| {
        let data = Bytes::from(vec![7; BLOCK as usize]);
        let operation = Operation::Write { offset: 0, data, fua: false };
        PrimaryEvent::Submit(Request { token, operation, origin: Some(origin(0, 0)) })
    };
    cluster.event(grant());
    cluster.event(PrimaryEvent::BeginClient { client: client(1) });
    cluster.event(write(901));
    assert!(cluster.answer(901).unwrap().result.is_ok());
    cluster.write(0, 9);
    cluster.replace_target(config());
    cluster.event(grant());
    cluster.event(write(902));
    assert!(cluster.answer(902).unwrap().result.is_ok());
    assert_eq!(cluster.read(0, 4096), [9; 4096], "what another client wrote meanwhile");
}

#[test]
fn a_request_outside_of_its_window_or_of_a_client_without_a_row_is_refused() {
    let mut hand = Hand::sharing(&ClientTable::default());
    hand.numbered_write(1, 0, false);
    hand.begin(1);
    hand.results();
    let trim = || Operation::Trim { offset: 0, length: BLOCK, fua: false };
    hand.numbered(2, origin(5, 5), trim());
    hand.numbered(3, origin(4, 4), trim());
    hand.numbered(4, origin(5 + CLIENT_WINDOW, 5), trim());
    hand.reach_all();
    let refused = Err(BlockError::OutOfWindow);
    assert_eq!(hand.results(), [(3, refused), (4, refused), (2, Ok(()))]);
}

#[test]
fn a_client_ends_with_its_attachment_or_by_another_one_and_its_requests_are_refused() {
    let mut hand = Hand::sharing(&ClientTable::default());
    let kinds = |hand: &Hand| -> Vec<EntryKind> {
        let entries = hand.entries_of(1).into_iter().map(|entry| entry.kind.clone());
        entries.filter(|kind| !matches!(kind, EntryKind::View(_))).collect()
    };
    hand.begin(1);
    hand.numbered_write(1, 0, false);
    hand.reach_all();
    assert_eq!(hand.results(), [(1, Ok(()))]);
    hand.begin(2);
    let (begin, end) =
        (|client| EntryKind::BeginClient { client }, |client| EntryKind::EndClient { client });
    let (first, second) = (client(1), client(2));
    assert_eq!(kinds(&hand), [begin(first), EntryKind::Write, end(first), begin(second)]);
    hand.numbered_write(2, 1, false);
    hand.reach_all();
    assert_eq!(hand.results(), [(2, Err(BlockError::NoClient))]);
    hand.on(PrimaryEvent::Clients { attachments: vec![ATTACHMENT + 1], version: 1 });
    assert_eq!(kinds(&hand)[4..], [end(second)]);
    hand.on(PrimaryEvent::BeginClient { client: client(3) });
    assert_eq!(kinds(&hand).len(), 5, "its attachment is over");
    assert!(hand.notes.contains(&PrimaryNote::ClientRefused { client: client(3) }));
}

#[test]
fn clients_begin_before_the_requests_that_waited_for_io_and_those_of_the_past_end() {
    let mut clients = ClientTable::default();
    let gone = ClientId::of_attachment(99, 1);
    clients.apply(Lsn(3), &EntryKind::BeginClient { client: gone }, None);
    let mut hand = Hand::new(config());
    hand.on(PrimaryEvent::Clients { attachments: vec![ATTACHMENT], version: 1 });
    hand.on(PrimaryEvent::BeginClient { client: client(1) });
    hand.on(PrimaryEvent::BeginClient { client: client(2) });
    hand.on(PrimaryEvent::ForgetClient { client: client(2) });
    hand.numbered_write(1, 0, false);
    for id in 1..=3 {
        hand.answer(id, OpenAck { clients: clients.clone(), ..ack(TABLE.to_vec(), 10) });
    }
    (1..=3).for_each(|id| hand.truncated(id));
    hand.reach_all();
    let kinds: Vec<_> = hand.entries_of(1).iter().skip(1).map(|e| e.kind.clone()).collect();
    let begun = EntryKind::BeginClient { client: client(1) };
    assert_eq!(kinds, [EntryKind::EndClient { client: gone }, begun, EntryKind::Write]);
    hand.reach_all();
    assert_eq!(hand.results(), [(1, Ok(()))]);
}

#[test]
fn a_volume_has_no_more_clients_than_may_change_it_at_the_same_time() {
    let mut hand = Hand::new(config());
    let attachments: Vec<u64> = (0..=CLIENTS_MAX as u64).collect();
    hand.on(PrimaryEvent::Clients { attachments: attachments.clone(), version: 1 });
    hand.serve(&TABLE, 10);
    for attachment in &attachments {
        let client = ClientId::of_attachment(*attachment, 1);
        hand.on(PrimaryEvent::BeginClient { client });
    }
    let client = ClientId::of_attachment(CLIENTS_MAX as u64, 1);
    assert_eq!(hand.notes.last(), Some(&PrimaryNote::ClientRefused { client }));
}

#[test]
fn a_target_that_opens_again_writes_what_was_lost_with_the_requests_that_it_is_of() {
    let mut hand = Hand::sharing(&ClientTable::default());
    hand.on(PrimaryEvent::BeginClient { client: client(1) });
    hand.numbered_write(1, 0, false);
    let begun = hand.entries_of(1).len();
    let lost: Vec<_> = hand.entries_of(1)[begun - 2..].to_vec();
    hand.overtaken(3);
    hand.sent.clear();
    for id in 1..=3 {
        hand.answer(id, ack(TABLE.to_vec(), 10));
    }
    (1..=3).for_each(|id| hand.truncated(id));
    hand.reach_all();
    let again = hand.entries_of(1);
    let of = |entry: &entry::SharedEntry| (entry.kind.clone(), entry.part);
    let expected: Vec<_> = lost.iter().map(of).collect();
    assert_eq!(again.iter().skip(1).map(of).collect::<Vec<_>>(), expected);
    hand.numbered_write(2, 0, false);
    assert_eq!(hand.entries_of(1).len(), again.len());
}

#[test]
fn an_assignment_older_than_the_grant_neither_ends_nor_begins_a_client() {
    let mut hand = Hand::sharing(&ClientTable::default());
    hand.begin(1);
    let kinds = |hand: &Hand| -> Vec<EntryKind> {
        let entries = hand.entries_of(1).into_iter().map(|entry| entry.kind.clone());
        entries.filter(|kind| !matches!(kind, EntryKind::View(_))).collect()
    };
    let begun = kinds(&hand);
    // The record of now has another attachment, of which the target has not heard.
    hand.on(PrimaryEvent::Options(LiveOptions::of(&config(), 5)));
    hand.on(PrimaryEvent::Clients { attachments: vec![ATTACHMENT + 1], version: 4 });
    assert_eq!(kinds(&hand), begun);
    let other = ClientId::of_attachment(ATTACHMENT + 1, 7);
    hand.on(PrimaryEvent::BeginClient { client: other });
    assert!(hand.notes.contains(&PrimaryNote::ClientRefused { client: other }));
    hand.on(PrimaryEvent::Clients { attachments: vec![ATTACHMENT, ATTACHMENT + 1], version: 5 });
    hand.on(PrimaryEvent::Clients { attachments: vec![], version: 3 });
    assert_eq!(kinds(&hand), begun, "what is older than the newest list changes nothing");
    hand.on(PrimaryEvent::BeginClient { client: other });
    let last = kinds(&hand).pop();
    assert_eq!(last, Some(EntryKind::BeginClient { client: other }));
}
