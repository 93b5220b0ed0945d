//! Exact bounds on messages of a peer: the last possible value is accepted, the first impossible
//! one is refused.

use bytes::Bytes;
use quoin_types::message::{
    EPOCH_TABLE_MAX, EpochEnd, IncrementEnd, OpenAck, RoomGrant, SNAPSHOTS_MAX, SnapshotHead,
    SnapshotInfo,
};
use quoin_types::{
    BLOCK_SIZE, Chain, ClientTable, Desired, Entry, EntryKind, Epoch, HOLE_BLOCKS_MAX, LSN_MAX,
    Lsn, Member, Membership, Newcomer, Position, ReplicaGuid, ReplicaId, SnapshotId, Time,
    VOLUME_BLOCKS_MAX, View, WRITE_BLOCKS_MAX,
};

const EPOCH: Epoch = Epoch(1000);

fn membership(rf: u8, cf: u8, known: &[(u128, u128)], retired: &[u128]) -> Membership {
    let member =
        |(id, guid): &(u128, u128)| Member { id: ReplicaId(*id), guid: ReplicaGuid(*guid) };
    Membership {
        version: 1,
        rf,
        cf,
        drf: rf,
        known: known.iter().map(member).collect(),
        retired: retired.iter().map(|guid| ReplicaGuid(*guid)).collect(),
        formed: true,
    }
}

#[test]
fn a_membership_is_held_to_its_factors_and_names_each_replica_once() {
    assert_eq!(membership(16, 16, &[(1, 1), (2, 2)], &[3]).check(), Ok(()));
    assert_eq!(membership(2, 1, &[(1, 1), (2, 2)], &[]).check(), Ok(()));
    let refused = [
        (membership(17, 9, &[], &[]), "more replicas than there may be"),
        (membership(0, 0, &[], &[]), "no replica"),
        (membership(3, 0, &[], &[]), "no acknowledgement needed"),
        (membership(3, 4, &[], &[]), "more acknowledgements than replicas"),
        (membership(1, 1, &[(1, 1), (2, 2)], &[]), "more known than the factor"),
        (membership(3, 2, &[(1, 1), (1, 2)], &[]), "one id twice"),
        (membership(3, 2, &[(1, 1), (2, 1)], &[]), "one GUID twice"),
        (membership(3, 2, &[(1, 1), (2, 2)], &[2]), "a retired one"),
    ];
    for (membership, what) in refused {
        assert!(membership.check().is_err(), "{what}");
    }
}

/// Answer of a replica with so many epochs of one entry each; the last epoch is `EPOCH`.
fn answer(epochs: usize, last: Lsn) -> OpenAck {
    let first = last.0 + 1 - epochs as u64;
    let row = |i: usize| {
        let (epoch, lsn) = (Epoch(EPOCH.0 + 1 + i as u64 - epochs as u64), Lsn(first + i as u64));
        EpochEnd { epoch, first: lsn, last: lsn, chain: Chain(7) }
    };
    OpenAck {
        position: Position { epoch: EPOCH, lsn: last },
        chain: Chain(7),
        epoch_table: (0..epochs).map(row).collect(),
        stable: last,
        durable: last,
        base: last,
        last_view: None,
        continuous: true,
        membership_version: 1,
        quorum: true,
        damaged: false,
        volume_blocks: VOLUME_BLOCKS_MAX,
        room: RoomGrant::UNBOUNDED,
        snapshots: Vec::new(),
        shadow: None,
        shadow_cut: None,
        heads: Vec::new(),
        clients: ClientTable::default(),
    }
}

fn snapshots(count: usize, lsn: Lsn) -> Vec<SnapshotInfo> {
    let info = |i: usize| SnapshotInfo { id: SnapshotId(i as u128), lsn, hidden: false, blocks: 1 };
    (0..count).map(info).collect()
}

fn hold_snapshots(ack: &mut OpenAck, count: usize, lsn: Lsn) {
    (ack.snapshots, ack.heads) = (snapshots(count, lsn), vec![SnapshotHead::default(); count]);
}

#[test]
fn the_largest_answer_to_an_open_that_can_be_is_taken() {
    let mut most = answer(EPOCH_TABLE_MAX, LSN_MAX);
    hold_snapshots(&mut most, SNAPSHOTS_MAX, LSN_MAX);
    assert_eq!(most.check(EPOCH), Ok(()));
    let damaged = OpenAck { damaged: true, epoch_table: Vec::new(), ..most };
    assert_eq!(damaged.check(EPOCH), Ok(()));
}

#[test]
fn an_answer_to_an_open_that_cannot_be_is_refused() {
    let good = || answer(3, Lsn(100));
    let with = |change: &dyn Fn(&mut OpenAck)| {
        let mut ack = good();
        change(&mut ack);
        ack
    };
    let refused = [
        (answer(EPOCH_TABLE_MAX + 1, Lsn(500)), "too many epochs"),
        (answer(3, Lsn(LSN_MAX.0 + 1)), "an LSN beyond the last"),
        (with(&|a| a.volume_blocks += 1), "a volume too large"),
        (with(&|a| hold_snapshots(a, SNAPSHOTS_MAX + 1, Lsn(1))), "too many snapshots"),
        (with(&|a| a.snapshots = snapshots(1, Lsn(1))), "a snapshot without its head"),
        (with(&|a| a.heads.push(SnapshotHead::default())), "a head of no snapshot"),
        (with(&|a| hold_snapshots(a, 1, Lsn(101))), "a snapshot of what is not there"),
        (with(&|a| a.stable = Lsn(101)), "stable beyond the end"),
        (with(&|a| a.durable = Lsn(101)), "durable beyond the end"),
        (with(&|a| a.stable = Lsn(99)), "a base above stable"),
        (with(&|a| a.epoch_table[0].epoch = a.epoch_table[1].epoch), "one epoch twice"),
        (with(&|a| a.epoch_table[0].last = a.epoch_table[1].first), "epochs that overlap"),
        (with(&|a| a.epoch_table[1].first = Lsn(100)), "an epoch that ends before it begins"),
        (with(&|a| a.chain = Chain(8)), "another chain at its end"),
        (with(&|a| a.position.epoch = Epoch(999)), "another epoch at its end"),
        (with(&|a| a.epoch_table.clear()), "a history without epochs"),
    ];
    for (ack, what) in refused {
        assert!(ack.check(EPOCH).is_err(), "{what}");
    }
    assert!(good().check(Epoch(999)).is_err(), "an epoch beyond the session's");
    let damaged = |change: &dyn Fn(&mut OpenAck)| OpenAck { damaged: true, ..with(change) };
    assert!(damaged(&|_| ()).check(Epoch(999)).is_err(), "damaged, and beyond the session's epoch");
    let far = damaged(&|a| a.position.lsn = Lsn(LSN_MAX.0 + 1));
    assert!(far.check(EPOCH).is_err(), "damaged, and beyond the last LSN");
}

/// The end of an increment with the state of this answer.
fn end_of(ack: OpenAck) -> IncrementEnd {
    IncrementEnd {
        position: ack.position,
        chain: ack.chain,
        epoch_table: ack.epoch_table,
        last_view: ack.last_view,
        volume_blocks: ack.volume_blocks,
        snapshots: ack.snapshots,
        clients: ack.clients,
    }
}

#[test]
fn an_increment_ends_in_a_state_that_can_be() {
    let mut most = end_of(answer(EPOCH_TABLE_MAX, LSN_MAX));
    most.snapshots = snapshots(SNAPSHOTS_MAX, LSN_MAX);
    most.last_view = Some((LSN_MAX, View::default()));
    assert_eq!(most.check(EPOCH), Ok(()));
    let with = |change: &dyn Fn(&mut IncrementEnd)| {
        let mut end = end_of(answer(3, Lsn(100)));
        change(&mut end);
        end
    };
    assert_eq!(with(&|e| e.volume_blocks = 1).check(EPOCH), Ok(()));
    let refused = [
        (with(&|e| e.volume_blocks = 0), "a volume of nothing"),
        (with(&|e| e.volume_blocks += 1), "a volume too large"),
        (with(&|e| e.snapshots = snapshots(SNAPSHOTS_MAX + 1, Lsn(1))), "too many snapshots"),
        (with(&|e| e.snapshots = snapshots(1, Lsn(101))), "a snapshot of what is not there"),
        (with(&|e| e.last_view = Some((Lsn(101), View::default()))), "a View of what is not"),
        (with(&|e| e.position.lsn = Lsn(101)), "a position beyond its epochs"),
    ];
    for (end, what) in refused {
        assert!(end.check(EPOCH).is_err(), "{what}");
    }
}

#[test]
fn an_entry_meets_the_blocks_that_it_covers_and_no_others() {
    let position = Position { epoch: EPOCH, lsn: Lsn(1) };
    let data = Bytes::from(vec![1; 3 * BLOCK_SIZE]);
    let entry = Entry::after(Chain(0), position, EntryKind::Write, 10, 3, data, false);
    for (lba, blocks) in [(10, 1), (12, 1), (9, 2), (11, 100), (0, 11)] {
        assert!(entry.overlaps(lba, blocks), "[{lba}, {lba}+{blocks})");
    }
    for (lba, blocks) in [(13, 1), (9, 1), (0, 10), (13, 100)] {
        assert!(!entry.overlaps(lba, blocks), "[{lba}, {lba}+{blocks})");
    }
    let kind = EntryKind::View(Box::default());
    let view = Entry::after(Chain(0), position, kind, 0, 0, Bytes::new(), false);
    assert!(!view.overlaps(0, 100), "what covers no blocks meets none");
}

#[test]
fn only_replicas_that_the_records_name_are_newcomers() {
    let named = Member { id: ReplicaId(4), guid: ReplicaGuid(40) };
    let newcomers = vec![Newcomer { member: named, beside: true }];
    let desired = Desired { newcomers, ..Desired::default() };
    assert_eq!(desired.newcomer(named), Some(&Newcomer { member: named, beside: true }));
    assert_eq!(desired.newcomer(Member { guid: ReplicaGuid(41), ..named }), None);
    assert_eq!(Desired::default().newcomer(named), None);
}

#[test]
fn a_time_is_made_of_milliseconds() {
    assert_eq!(Time::from_millis(3), Time(3_000_000));
}

#[test]
fn an_entry_covers_as_much_as_its_kind_may_and_no_less_than_a_block() {
    let position = Position { epoch: EPOCH, lsn: Lsn(1) };
    let malformed = |kind: EntryKind, blocks: u32| {
        let bytes = if kind == EntryKind::Write { blocks as usize * BLOCK_SIZE } else { 0 };
        let data = Bytes::from(vec![1; bytes]);
        Entry::after(Chain(0), position, kind, 8, blocks, data, false).check().is_err()
    };
    let zero = EntryKind::Zero { no_hole: false };
    let resize = EntryKind::Resize { blocks: 64 };
    for (kind, most) in [
        (EntryKind::Write, WRITE_BLOCKS_MAX),
        (EntryKind::Trim, HOLE_BLOCKS_MAX),
        (zero, HOLE_BLOCKS_MAX),
    ] {
        assert!(!malformed(kind.clone(), 1) && !malformed(kind.clone(), most), "{kind:?}");
        assert!(malformed(kind.clone(), 0), "{kind:?} of nothing");
        assert!(malformed(kind.clone(), most + 1), "{kind:?} of too much");
    }
    assert!(malformed(resize, 1), "what covers no blocks names none");
}
