//! Frames between target and pool: raw, and with valid checksums on hostile content.

use bytes::Bytes;
use quoin_types::entry::{Chain, Entry, EntryKind};
use quoin_types::ids::{Epoch, Incarnation, Lsn, SessionKey};
use quoin_types::message::{ChangedRange, Failure, FromReplica, Ping, ToReplica};
use quoin_types::{BLOCK_SIZE, ReplicaGuid, ReplicaId, SnapshotId, VolumeId, crc32c};
use quoin_wire::decode::decode;
use quoin_wire::encode::{self, FrameBuffer};
use quoin_wire::frame::{HEADER_LEN, Header, Limits};
use quoin_wire::hello::SupportedProtocol;
use quoin_wire::history::{Block, Message, Part, Refused, Wanted};
use quoin_wire::{Frame, Hello};

/// The first byte chooses how the rest is read: as a frame, or as kind, head and data of one.
pub fn run(input: &[u8]) {
    let Some((how, rest)) = input.split_first() else { return };
    let limits = if how & 1 == 0 { Limits::SESSION } else { Limits::HELLO };
    if how & 2 == 0 {
        parse(rest, &limits);
        return;
    }
    let Some((kind, body)) = rest.split_first() else { return };
    let data_len = (usize::from(how >> 2) * BLOCK_SIZE).min(body.len() / BLOCK_SIZE * BLOCK_SIZE);
    let (head, data) = body.split_at(body.len() - data_len);
    let header = Header {
        kind: *kind,
        head_len: head.len() as u32,
        data_len: data.len() as u32,
        session: SessionKey { epoch: Epoch(1), incarnation: Incarnation(2), nonce: 3 },
        head_crc: crc32c(head),
    };
    let mut frame = header.encode().to_vec();
    frame.extend_from_slice(head);
    frame.extend_from_slice(data);
    parse(&frame, &limits);
}

fn parse(bytes: &[u8], limits: &Limits) {
    let Some(first) = bytes.first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = Header::decode(first, limits) else { return };
    assert!(header.frame_len() <= 64 + (2 << 20) + (8 << 20), "a frame beyond all limits");
    let Some(frame) = bytes.get(..header.frame_len()) else { return };
    if let Ok(Message::Part(part)) = Message::decode(&header, Bytes::copy_from_slice(frame)) {
        let _ = part.check();
        assert!(part.blocks.len() * BLOCK_SIZE <= frame.len(), "blocks that did not come");
    }
    let Ok(incoming) = decode(&header, Bytes::copy_from_slice(frame)) else { return };
    if let Frame::Hello(hello) = &incoming.frame {
        // An unsupported version is refused with a message.
        let _ = hello.negotiate(&SupportedProtocol::THIS_BUILD).validate(hello);
    }
}

/// Streams of the history socket, each as it is and as kind, head and data.
fn seeds_of_history() -> Vec<Vec<u8>> {
    let data = Bytes::from(vec![5; BLOCK_SIZE]);
    let wanted = Wanted {
        volume: VolumeId(1),
        from: Some(SnapshotId(2)),
        to: SnapshotId(3),
        cursor: 4,
        want_data: true,
    };
    let ranges = [(5, 1, false), (6, 40, true)];
    let range = |(lba, blocks, hole)| ChangedRange { lba, blocks, hole };
    let part = Part {
        ranges: ranges.map(range).to_vec(),
        blocks: vec![Block { crc: crc32c(&data), data }],
        next: Some(46),
    };
    let refused = Message::Refused(Refused::Damaged { lba: 7 });
    let mut seeds = Vec::new();
    for (message, blocks) in [(Message::Wanted(wanted), 0), (Message::Part(part), 1), (refused, 0)]
    {
        let mut bytes = Vec::new();
        if message.write(&mut bytes).is_ok() {
            seeds.push([&[0], &bytes[..]].concat());
            seeds.push([&[2 | blocks << 2, bytes[5]], &bytes[HEADER_LEN..]].concat());
        }
    }
    seeds
}

pub fn seeds() -> Vec<Vec<u8>> {
    let session = SessionKey { epoch: Epoch(1), incarnation: Incarnation(2), nonce: 3 };
    let hello = Hello::new(VolumeId(1), ReplicaId(2), ReplicaGuid(3), Bytes::from_static(b"grant"));
    let data = Bytes::from(vec![7; BLOCK_SIZE]);
    let entry = Entry {
        epoch: Epoch(1),
        lsn: Lsn(1),
        lba: 5,
        blocks: 1,
        kind: EntryKind::Write,
        fua: false,
        chain: Chain(9),
        crcs: vec![crc32c(&data)],
        data,
        part: None,
    };
    let append = ToReplica::Append {
        entries: vec![entry.into()],
        stable: Lsn(0),
        sync: true,
        ping: Ping::default(),
    };
    let flush = ToReplica::Sync { lsn: Lsn(1), ping: Ping::default() };
    let refuse = FromReplica::Refuse { promised: Epoch(1), failure: Failure::Fenced };
    let mut seeds = seeds_of_history();
    let mut frame = FrameBuffer::default();
    if encode::hello(session, &hello, &mut frame).is_ok() {
        seeds.extend(both_ways(&frame));
    }
    for message in [append, flush] {
        let _ = encode::to_replica(session, &message, &mut FrameBuffer::default(), |frame| {
            seeds.extend(both_ways(frame));
        });
    }
    if encode::from_replica(session, &refuse, &mut frame).is_ok() {
        seeds.extend(both_ways(&frame));
    }
    // Every kind, with a head that its decoder must find too short or too long.
    seeds.extend((0..40).map(|kind| [&[2, kind][..], &[0; 90]].concat()));
    seeds
}

/// Returns the frame whole, and as its kind, head and data.
fn both_ways(frame: &FrameBuffer) -> [Vec<u8>; 2] {
    let data: Vec<u8> = frame.data.concat();
    let blocks = (data.len() / BLOCK_SIZE) as u8;
    let head = &frame.head[..];
    [
        [&[0], head, &data].concat(),
        [&[2 | blocks << 2, head[5]], &head[HEADER_LEN..], &data].concat(),
    ]
}
