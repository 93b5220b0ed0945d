//! Frames through real sockets: they arrive as they were sent, and hostile bytes do no harm.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use quoin_types::entry::{Chain, Entry, EntryKind, Rule, View};
use quoin_types::ids::{Epoch, Lsn, Position, SnapshotId};
use quoin_types::membership::{Durability, Member, Membership};
use quoin_types::message::*;
use quoin_types::{
    BLOCK_SIZE, ClientTable, ReplicaGuid, ReplicaId, VOLUME_BLOCKS_MAX, VolumeId, crc32c,
};
use quoin_wire::frame::{HEADER_LEN, Limits, WireError};
use quoin_wire::security::{Mode, Opener, SECRET_LEN, Sealer};
use quoin_wire::{Connection, Frame, ReadOutcome};

use crate::common::{session, through};

fn lsn() -> impl Strategy<Value = Lsn> {
    any::<u64>().prop_map(Lsn)
}

fn block() -> impl Strategy<Value = Bytes> {
    any::<[u8; 8]>().prop_map(|seed| Bytes::from(seed.repeat(BLOCK_SIZE / 8)))
}

fn member() -> impl Strategy<Value = Member> {
    (any::<u128>(), any::<u128>())
        .prop_map(|(id, guid)| Member { id: ReplicaId(id), guid: ReplicaGuid(guid) })
}

fn position() -> impl Strategy<Value = Position> {
    (any::<u64>(), lsn()).prop_map(|(epoch, lsn)| Position { epoch: Epoch(epoch), lsn })
}

fn view() -> impl Strategy<Value = View> {
    let rule = || {
        (any::<u64>(), proptest::collection::vec(member(), 0..4)).prop_map(|(v, known)| Rule {
            membership_version: v,
            rf: 4,
            cf: 2,
            known,
        })
    };
    let media = any::<bool>().prop_map(|m| if m { Durability::Media } else { Durability::Cache });
    (
        proptest::collection::vec(member(), 0..4),
        rule(),
        proptest::option::of(rule()),
        media,
        any::<bool>(),
    )
        .prop_map(|(in_sync, rule, joint, durability, unflushed_tail_lost)| View {
            in_sync,
            rule,
            joint,
            durability,
            unflushed_tail_lost,
        })
}

fn entry() -> impl Strategy<Value = SharedEntryOf> {
    let kind = prop_oneof![
        (0..1u64 << 40, proptest::collection::vec(block(), 1..5)).prop_map(|(lba, blocks)| (
            EntryKind::Write,
            lba,
            blocks.len() as u32,
            Bytes::from(blocks.concat())
        )),
        (0..1u64 << 40, 1u32..5000).prop_map(|(lba, n)| (EntryKind::Trim, lba, n, Bytes::new())),
        (0..1u64 << 40, any::<bool>()).prop_map(|(lba, no_hole)| (
            EntryKind::Zero { no_hole },
            lba,
            9,
            Bytes::new()
        )),
        (any::<u128>(), any::<bool>()).prop_map(|(id, hidden)| (
            EntryKind::Snapshot { id: SnapshotId(id), hidden },
            0,
            0,
            Bytes::new()
        )),
        view().prop_map(|view| (EntryKind::View(Box::new(view)), 0, 0, Bytes::new())),
    ];
    (kind, position(), any::<u64>(), any::<bool>()).prop_map(
        |((kind, lba, blocks, data), at, chain, fua)| {
            Arc::new(Entry::after(Chain(chain), at, kind, lba, blocks, data, fua))
        },
    )
}
type SharedEntryOf = Arc<Entry>;

fn slot() -> impl Strategy<Value = Slot> {
    let content = prop_oneof![
        (1u32..1000).prop_map(|n| (n, Content::Hole)),
        block().prop_map(|data| (1, Content::Data { crc: crc32c(&data), data })),
        Just((1, Content::Bad)),
    ];
    (0..1u64 << 40, lsn(), content).prop_map(|(lba, version, (blocks, content))| Slot {
        lba,
        blocks,
        version,
        content,
    })
}

fn slots() -> impl Strategy<Value = Vec<Slot>> {
    proptest::collection::vec(slot(), 0..6)
}

fn snapshot() -> impl Strategy<Value = SnapshotInfo> {
    (any::<u128>(), lsn(), any::<bool>(), any::<u64>()).prop_map(|(id, lsn, hidden, blocks)| {
        SnapshotInfo { id: SnapshotId(id), lsn, hidden, blocks }
    })
}

fn table() -> impl Strategy<Value = Vec<EpochEnd>> {
    let row = (any::<u64>(), lsn(), lsn(), any::<u64>()).prop_map(|(e, first, last, chain)| {
        EpochEnd { epoch: Epoch(e), first, last, chain: Chain(chain) }
    });
    proptest::collection::vec(row, 0..5)
}

fn increment_end() -> impl Strategy<Value = Box<IncrementEnd>> {
    (
        position(),
        any::<u64>(),
        table(),
        proptest::option::of((lsn(), view())),
        any::<u64>(),
        proptest::collection::vec(snapshot(), 0..4),
    )
        .prop_map(|(position, chain, epoch_table, last_view, volume_blocks, snapshots)| {
            Box::new(IncrementEnd {
                position,
                chain: Chain(chain),
                epoch_table,
                last_view,
                volume_blocks,
                snapshots,
                clients: ClientTable::default(),
            })
        })
}

/// Progress of an increment, the end included.
fn cursor() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..1u64 << 44, 1 => Just(u64::MAX)]
}

fn read_view() -> impl Strategy<Value = ReadView> {
    prop_oneof![
        Just(ReadView::Live),
        Just(ReadView::Base),
        any::<u128>().prop_map(|id| ReadView::Snapshot(SnapshotId(id))),
    ]
}

fn membership() -> impl Strategy<Value = Membership> {
    (any::<u64>(), member(), any::<bool>(), 0..200u128).prop_map(|(version, m, formed, retired)| {
        Membership {
            version,
            rf: 3,
            cf: 2,
            drf: 3,
            known: vec![m],
            retired: (0..retired).map(|n| ReplicaGuid(m.guid.0 ^ (n + 1))).collect(),
            formed,
        }
    })
}

fn of_snapshot() -> impl Strategy<Value = Option<SnapshotId>> {
    proptest::option::of(any::<u128>().prop_map(SnapshotId))
}

fn head() -> impl Strategy<Value = SnapshotHead> {
    any::<(u64, u64)>()
        .prop_map(|(epoch, chain)| SnapshotHead { epoch: Epoch(epoch), chain: Chain(chain) })
}

fn to_replica() -> impl Strategy<Value = ToReplica> {
    let ping = || any::<u64>().prop_map(Ping);
    prop_oneof![
        (any::<u128>(), member(), membership(), any::<u32>()).prop_map(
            |(volume, m, membership, lease_ms)| ToReplica::Open {
                volume: VolumeId(volume),
                replica: m.id,
                guid: m.guid,
                membership,
                lease_ms,
            }
        ),
        (lsn(), lsn()).prop_map(|(keep, tip)| ToReplica::Truncate { keep, tip }),
        (proptest::collection::vec(entry(), 0..6), lsn(), any::<bool>(), ping()).prop_map(
            |(entries, stable, sync, ping)| ToReplica::Append { entries, stable, sync, ping }
        ),
        (lsn(), ping()).prop_map(|(lsn, ping)| ToReplica::Sync { lsn, ping }),
        (lsn(), ping()).prop_map(|(stable, ping)| ToReplica::Ping { stable, ping }),
        (
            any::<u64>(),
            read_view(),
            0..1u64 << 44,
            1..=quoin_types::READ_BLOCKS_MAX,
            lsn(),
            any::<bool>(),
            ping()
        )
            .prop_map(|(id, view, lba, blocks, after, want_data, ping)| ToReplica::Read {
                id,
                view,
                lba,
                blocks,
                after,
                want_data,
                ping
            }),
        (any::<u64>(), lsn(), any::<u32>()).prop_map(|(id, after, bytes_max)| ToReplica::Fetch {
            id,
            after,
            bytes_max
        }),
        (any::<u64>(), read_view(), lsn(), 0..1u64 << 44, any::<u32>(), any::<bool>()).prop_map(
            |(id, view, from, cursor, bytes_max, want_data)| ToReplica::Pull {
                id,
                view,
                from,
                cursor,
                bytes_max,
                want_data,
            }
        ),
        (any::<u64>(), lsn())
            .prop_map(|(rebuild, from)| ToReplica::IncrementBegin { rebuild, from }),
        (any::<u64>(), slots(), cursor(), cursor()).prop_map(|(rebuild, slots, cursor, after)| {
            ToReplica::IncrementFeed { rebuild, slots, cursor, after }
        }),
        any::<u64>().prop_map(|number| ToReplica::OpenBulk { number }),
        (any::<u64>(), snapshot(), head(), view()).prop_map(|(rebuild, snapshot, head, view)| {
            let head = CutHead { head, last_view: Some((snapshot.lsn, view)) };
            ToReplica::IncrementCut { rebuild, snapshot, head: Box::new(head) }
        }),
        (any::<u64>(), increment_end(), any::<(u64, u32)>()).prop_map(
            |(rebuild, to, (slots, checksum))| {
                let fed = FedSum { slots, checksum };
                ToReplica::IncrementCommit { rebuild, to, fed }
            }
        ),
        (0..1u64 << 44, lsn(), block(), of_snapshot()).prop_map(
            |(lba, version, data, snapshot)| ToReplica::Repair {
                lba,
                version,
                crc: crc32c(&data),
                data,
                snapshot,
            }
        ),
        (0..1u64 << 44, any::<u32>(), lsn(), slots(), of_snapshot()).prop_map(
            |(lba, blocks, at, slots, snapshot)| {
                ToReplica::Mend { lba, blocks, at, slots, snapshot }
            }
        ),
        (
            any::<u64>(),
            0..1u64 << 40,
            1u32..VERIFY_BLOCKS_MAX,
            any::<(u32, bool)>(),
            lsn(),
            ping(),
            of_snapshot()
        )
            .prop_map(|(id, lba, blocks, (bytes_max, repair), after, ping, snapshot)| {
                ToReplica::Verify { id, lba, blocks, bytes_max, after, repair, ping, snapshot }
            }),
        Just(ToReplica::Close),
    ]
}

fn from_replica() -> impl Strategy<Value = FromReplica> {
    let ping = || any::<u64>().prop_map(Ping);
    let shadow = proptest::option::of((any::<u64>(), lsn(), cursor()));
    prop_oneof![
        (
            increment_end(),
            [lsn(), lsn(), lsn()],
            any::<[bool; 3]>(),
            any::<u64>(),
            shadow,
            (proptest::option::of(lsn()), proptest::collection::vec(head(), 0..4)),
        )
            .prop_map(
                |(e, [stable, durable, base], flags, membership_version, shadow, told)| {
                    let (shadow_cut, heads) = told;
                    FromReplica::OpenAck(Box::new(OpenAck {
                        position: e.position,
                        chain: e.chain,
                        epoch_table: e.epoch_table,
                        stable,
                        durable,
                        base,
                        last_view: e.last_view,
                        continuous: flags[0],
                        membership_version,
                        quorum: flags[1],
                        damaged: flags[2],
                        volume_blocks: e.volume_blocks,
                        room: RoomGrant { takes: Takes::Holes, share_blocks: 9 },
                        snapshots: e.snapshots,
                        shadow,
                        shadow_cut,
                        heads,
                        clients: ClientTable::default(),
                    }))
                }
            ),
        any::<u64>()
            .prop_map(|e| FromReplica::Refuse { promised: Epoch(e), failure: Failure::Fenced }),
        (position(), any::<u64>())
            .prop_map(|(position, c)| FromReplica::Truncated { position, chain: Chain(c) }),
        (lsn(), lsn(), ping()).prop_map(|(applied, durable, ping)| FromReplica::Applied {
            applied,
            durable,
            ping
        }),
        (any::<u64>(), lsn(), slots(), ping())
            .prop_map(|(id, at, slots, ping)| FromReplica::Data { id, at, slots, ping }),
        (any::<u64>(), lsn(), slots(), ping())
            .prop_map(|(id, at, slots, ping)| FromReplica::Verified { id, at, slots, ping }),
        (any::<u64>(), proptest::collection::vec(entry(), 0..5), any::<bool>())
            .prop_map(|(id, entries, gone)| FromReplica::Fetched { id, entries, gone }),
        (
            any::<u64>(),
            slots(),
            proptest::option::of(0..1u64 << 44),
            proptest::option::of(increment_end()),
            any::<bool>()
        )
            .prop_map(|(id, slots, cursor, end, gone)| FromReplica::Pulled {
                id,
                slots,
                cursor,
                end,
                gone
            }),
        (any::<u64>(), cursor())
            .prop_map(|(rebuild, cursor)| FromReplica::IncrementFed { rebuild, cursor }),
        (any::<u64>(), cursor(), lsn()).prop_map(|(rebuild, cursor, cut)| {
            FromReplica::IncrementBegun { rebuild, cursor, cut }
        }),
        (any::<u64>(), position())
            .prop_map(|(rebuild, position)| FromReplica::IncrementDone { rebuild, position }),
        (0..1u64 << 44, lsn(), any::<bool>())
            .prop_map(|(lba, version, done)| FromReplica::Repaired { lba, version, done }),
        (0..1u64 << 44, any::<u32>(), any::<bool>())
            .prop_map(|(lba, blocks, done)| FromReplica::Mended { lba, blocks, done }),
        lsn().prop_map(|applied| FromReplica::NoRoom { applied }),
        (0..3_usize, any::<u32>()).prop_map(|(takes, share_blocks)| {
            let takes = [Takes::Nothing, Takes::Holes, Takes::Writes][takes];
            FromReplica::Room(RoomGrant { takes, share_blocks })
        }),
        (0..1u64 << 44, any::<u32>(), lsn(), of_snapshot()).prop_map(
            |(lba, blocks, version, snapshot)| {
                FromReplica::BadCopy(BadCopy { lba, blocks, version, snapshot })
            }
        ),
        Just(FromReplica::Closed),
        Just(FromReplica::Failed(Failure::Stopping)),
    ]
}

fn pair(mode: Mode) -> (Connection, Connection) {
    let (a, b) = UnixStream::pair().unwrap();
    let connection = |socket: UnixStream, send: u8, receive: u8| {
        socket.set_nonblocking(true).unwrap();
        let mut connection = Connection::new(
            OwnedFd::from(socket),
            Sealer::new(mode, [send; SECRET_LEN]),
            Opener::new(mode, [receive; SECRET_LEN]),
        );
        connection.authenticated(0);
        connection
    };
    (connection(a, 1, 2), connection(b, 2, 1))
}

/// The bytes of one frame, as they would be on the wire.
fn bytes_of(message: &ToReplica) -> Vec<u8> {
    use std::io::Read;
    let (a, mut b) = UnixStream::pair().unwrap();
    a.set_nonblocking(true).unwrap();
    let mut connection = Connection::new(a.into(), Sealer::plain(), Opener::plain());
    connection.send_to_replica(session(), message).unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        b.read_to_end(&mut bytes).unwrap();
        bytes
    });
    while !connection.flush().unwrap() {}
    drop(connection);
    reader.join().unwrap()
}
/// Returns true if the checksums of a message show that one of its blocks was changed.
fn has_a_bad_block(frame: &Frame) -> bool {
    match frame {
        Frame::ToReplica(ToReplica::Append { entries, .. }) => {
            entries.iter().any(|entry| !entry.data_is_good())
        }
        Frame::ToReplica(
            ToReplica::IncrementFeed { slots, .. } | ToReplica::Mend { slots, .. },
        ) => slots
            .iter()
            .any(|s| matches!(&s.content, Content::Data { crc, data } if crc32c(data) != *crc)),
        Frame::ToReplica(ToReplica::Repair { crc, data, .. }) => crc32c(data) != *crc,
        _ => false,
    }
}

/// Result of a connection for raw bytes: its frames, and the error that ended it, if any.
fn receive_raw(bytes: &[u8], limits: Limits) -> (Vec<Frame>, Option<WireError>) {
    use std::io::Write;
    let (mut a, b) = UnixStream::pair().unwrap();
    b.set_nonblocking(true).unwrap();
    let mut connection = Connection::new(b.into(), Sealer::plain(), Opener::plain());
    if limits == Limits::SESSION {
        connection.authenticated(0);
    }
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || a.write_all(&bytes));
    let mut frames = Vec::new();
    let error = loop {
        match connection.receive() {
            Err(error) => break Some(error),
            Ok(outcome) => {
                let next = loop {
                    match connection.next_frame() {
                        Ok(Some(incoming)) => frames.push(incoming.frame),
                        Ok(None) => break None,
                        Err(error) => break Some(error),
                    }
                };
                if next.is_some() || outcome == ReadOutcome::End {
                    break next;
                }
            }
        }
    };
    drop(connection);
    let _ = writer.join().unwrap();
    (frames, error)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn messages_to_a_replica_arrive_as_they_were_sent_in_every_mode(
        messages in proptest::collection::vec(to_replica(), 1..5),
        mode in prop_oneof![Just(Mode::Plain), Just(Mode::Authenticate), Just(Mode::Encrypt)],
    ) {
        let (mut a, mut b) = pair(mode);
        for message in &messages {
            a.send_to_replica(session(), message).unwrap();
        }
        let expected: Vec<_> = messages.into_iter().map(Frame::ToReplica).collect();
        prop_assert_eq!(through(&mut a, &mut b), expected);
    }

    #[test]
    fn messages_from_a_replica_arrive_as_they_were_sent_in_every_mode(
        messages in proptest::collection::vec(from_replica(), 1..5),
        mode in prop_oneof![Just(Mode::Plain), Just(Mode::Authenticate), Just(Mode::Encrypt)],
    ) {
        let (mut a, mut b) = pair(mode);
        for message in &messages {
            a.send_from_replica(session(), message).unwrap();
        }
        let expected: Vec<_> = messages.into_iter().map(Frame::FromReplica).collect();
        prop_assert_eq!(through(&mut a, &mut b), expected);
    }

    #[test]
    fn a_changed_byte_never_decodes_to_the_message_that_was_sent(
        message in to_replica(), at in any::<prop::sample::Index>(), flip in 1u8..=255,
    ) {
        let mut bytes = bytes_of(&message);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        let (frames, error) = receive_raw(&bytes, Limits::SESSION);
        for frame in frames {
            prop_assert!(has_a_bad_block(&frame), "{:?} {:?}", frame, error);
        }
    }

    #[test]
    fn a_head_with_false_lengths_is_an_error_and_not_a_panic(
        message in to_replica(), at in any::<prop::sample::Index>(),
        lie in proptest::collection::vec(any::<u8>(), 1..9),
    ) {
        // The checksums are corrected, so that only the decoder's own checks are left.
        let mut bytes = bytes_of(&message);
        let head = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        if head == 0 { return Ok(()); }
        let at = HEADER_LEN + at.index(head);
        for (i, byte) in lie.iter().enumerate() {
            if at + i < HEADER_LEN + head { bytes[at + i] = *byte; }
        }
        let crc = crc32c(&bytes[HEADER_LEN..HEADER_LEN + head]);
        bytes[48..52].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        let (frames, error) = receive_raw(&bytes, Limits::SESSION);
        prop_assert!(frames.len() + usize::from(error.is_some()) == 1);
    }

    #[test]
    fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 4..4000)) {
        let (frames, error) = receive_raw(&bytes, Limits::HELLO);
        prop_assert!(frames.is_empty());
        prop_assert!(bytes[0] == 0x15 || error.is_some());
    }

    #[test]
    fn a_frame_cut_off_anywhere_yields_nothing(
        message in to_replica(), at in any::<prop::sample::Index>(),
    ) {
        let bytes = bytes_of(&message);
        let (frames, _) = receive_raw(&bytes[..at.index(bytes.len())], Limits::SESSION);
        prop_assert!(frames.is_empty());
    }
}

#[test]
fn a_peer_cannot_send_more_than_a_hello_before_its_hello_is_accepted() {
    let block = Bytes::from(vec![1u8; BLOCK_SIZE]);
    let entry = Entry::after(
        Chain(0),
        Position { epoch: Epoch(1), lsn: Lsn(1) },
        EntryKind::Write,
        0,
        1,
        block,
        false,
    );
    let append = ToReplica::Append {
        entries: vec![Arc::new(entry)],
        stable: Lsn(0),
        sync: false,
        ping: Ping(0),
    };
    let (frames, error) = receive_raw(&bytes_of(&append), Limits::HELLO);
    assert!(frames.is_empty());
    assert!(matches!(error, Some(WireError::TooLong { .. })));
}

#[test]
fn an_append_over_the_frame_limit_arrives_whole_in_parts_and_syncs_once() {
    let entries: Vec<_> = (1..=20u64)
        .map(|n| {
            let at = Position { epoch: Epoch(1), lsn: Lsn(n) };
            let data = Bytes::from(vec![n as u8; 256 * BLOCK_SIZE]);
            Arc::new(Entry::after(Chain(n), at, EntryKind::Write, n * 256, 256, data, false))
        })
        .collect();
    let append =
        ToReplica::Append { entries: entries.clone(), stable: Lsn(0), sync: true, ping: Ping(4) };
    let (mut a, mut b) = pair(Mode::Authenticate);
    a.send_to_replica(session(), &append).unwrap();
    let (mut got, mut syncs) = (Vec::new(), 0);
    for frame in through(&mut a, &mut b) {
        let Frame::ToReplica(ToReplica::Append { entries, sync, .. }) = frame else {
            panic!("another message");
        };
        got.extend(entries);
        syncs += usize::from(sync);
    }
    assert_eq!((got, syncs), (entries, 1));
}

#[test]
fn a_block_that_fails_its_checksum_arrives_unchanged_and_is_detected() {
    let data = Bytes::from(vec![9u8; BLOCK_SIZE]);
    let slot = Slot { lba: 1, blocks: 1, version: Lsn(1), content: Content::Data { crc: 1, data } };
    let (mut a, mut b) = pair(Mode::Plain);
    let answer = FromReplica::Data { id: 1, at: Lsn(1), slots: vec![slot.clone()], ping: Ping(0) };
    a.send_from_replica(session(), &answer).unwrap();
    let frames = through(&mut a, &mut b);
    let [Frame::FromReplica(FromReplica::Data { slots, .. })] = &frames[..] else {
        panic!("{frames:?}");
    };
    assert_eq!(slots[0], slot);
    assert!(!slots[0].is_good(Lsn(1)));
}

#[test]
fn a_block_address_may_be_one_past_the_last_block_of_a_volume_and_no_further() {
    let at = |lba: u64| {
        let (mut from, mut to) = pair(Mode::Authenticate);
        let read = ToReplica::Read {
            id: 1,
            view: ReadView::Live,
            lba,
            blocks: 1,
            after: Lsn(0),
            want_data: true,
            ping: Ping(1),
        };
        from.send_to_replica(session(), &read).unwrap();
        from.flush().unwrap();
        to.receive().unwrap();
        assert!(to.buffered_bytes() > HEADER_LEN);
        to.next_frame().map(|incoming| {
            assert_eq!(to.buffered_bytes(), 0);
            assert!(matches!(incoming.unwrap().frame, Frame::ToReplica(got) if got == read));
        })
    };
    for lba in [0, 1, VOLUME_BLOCKS_MAX - 1, VOLUME_BLOCKS_MAX] {
        at(lba).unwrap();
    }
    for lba in [VOLUME_BLOCKS_MAX + 1, u64::MAX] {
        assert!(matches!(at(lba), Err(WireError::Malformed(_))), "{lba}");
    }
}
