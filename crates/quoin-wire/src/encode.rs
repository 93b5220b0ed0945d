//! Encoding of messages to frames: a small buffer of header and head, and the blocks by reference.

use bytes::{BufMut, Bytes, BytesMut};
use quoin_types::codec::Writer;
use quoin_types::entry::{Entry, View};
use quoin_types::ids::{Lsn, SessionKey};
use quoin_types::message::{
    Content, EpochEnd, FromReplica, IncrementEnd, ReadView, Slot, SnapshotHead, SnapshotInfo,
    ToReplica,
};
use quoin_types::{SnapshotId, crc32c};

use crate::frame::{
    APPEND_DATA_SPLIT, APPEND_ENTRIES_SPLIT, FAILURES, HEADER_LEN, Header, Limits, TAKES,
    WireError, kind,
};
use crate::hello::{Hello, Welcome};

/// One encoded frame, ready to be sealed: `head` begins with the header, `data` follows it.
///
/// The buffer is reused from frame to frame, so that encoding allocates nothing in the long run.
#[derive(Default)]
pub struct FrameBuffer {
    pub head: BytesMut,
    pub data: Vec<Bytes>,
}

impl FrameBuffer {
    pub(crate) fn start(&mut self) {
        self.head.clear();
        self.data.clear();
        self.head.put_bytes(0, HEADER_LEN);
    }

    /// Writes the header in front of the bytes encoded since `start`.
    pub(crate) fn finish(&mut self, session: SessionKey, kind: u8) -> Result<(), WireError> {
        let head = self.head.len() - HEADER_LEN;
        let data: usize = self.data.iter().map(Bytes::len).sum();
        let limits = Limits::SESSION;
        if head > limits.head_bytes_max as usize || data > limits.data_bytes_max as usize {
            return Err(WireError::TooLong {
                head: u32::try_from(head).unwrap_or(u32::MAX),
                data: u32::try_from(data).unwrap_or(u32::MAX),
                head_max: limits.head_bytes_max,
                data_max: limits.data_bytes_max,
            });
        }
        let header = Header {
            kind,
            head_len: head as u32,
            data_len: data as u32,
            session,
            head_crc: crc32c(&self.head[HEADER_LEN..]),
        };
        self.head[..HEADER_LEN].copy_from_slice(&header.encode());
        Ok(())
    }

    fn entries(&mut self, entries: &[impl AsRef<Entry>]) {
        self.head.put_count(entries.len());
        for entry in entries {
            self.entry(entry.as_ref());
        }
    }

    fn entry(&mut self, entry: &Entry) {
        let out = &mut self.head;
        out.put_u64_le(entry.epoch.0);
        out.put_u64_le(entry.lsn.0);
        out.put_u64_le(entry.lba);
        out.put_u32_le(entry.blocks);
        out.put_u8(entry.kind.code());
        out.put_u8(entry.flags());
        out.put_u64_le(entry.chain.0);
        out.put_blob(&entry.kind.encode_payload());
        if let Some(part) = &entry.part {
            out.put_slice(&part.to_bytes());
        }
        for crc in &entry.crcs {
            out.put_u32_le(*crc);
        }
        if !entry.data.is_empty() {
            self.data.push(entry.data.clone());
        }
    }

    fn slots(&mut self, slots: &[Slot]) {
        self.head.put_count(slots.len());
        for slot in slots {
            let out = &mut self.head;
            out.put_u64_le(slot.lba);
            out.put_u32_le(slot.blocks);
            out.put_u64_le(slot.version.0);
            match &slot.content {
                Content::Hole => out.put_u8(0),
                Content::Data { crc, data } if data.is_empty() => {
                    out.put_u8(3);
                    out.put_u32_le(*crc);
                }
                Content::Data { crc, data } => {
                    out.put_u8(1);
                    out.put_u32_le(*crc);
                    self.data.push(data.clone());
                }
                Content::Bad => out.put_u8(2),
            }
        }
    }
}

fn read_view(out: &mut BytesMut, view: ReadView) {
    let (code, id) = match view {
        ReadView::Live => (0, SnapshotId(0)),
        ReadView::Snapshot(id) => (1, id),
        ReadView::Base => (2, SnapshotId(0)),
    };
    out.put_u8(code);
    out.put_u128_le(id.0);
}

fn epoch_table(out: &mut BytesMut, table: &[EpochEnd]) {
    out.put_count(table.len());
    for row in table {
        out.put_u64_le(row.epoch.0);
        out.put_u64_le(row.first.0);
        out.put_u64_le(row.last.0);
        out.put_u64_le(row.chain.0);
    }
}

fn snapshot(out: &mut BytesMut, snapshot: &SnapshotInfo) {
    out.put_u128_le(snapshot.id.0);
    out.put_u64_le(snapshot.lsn.0);
    out.put_flag(snapshot.hidden);
    out.put_u64_le(snapshot.blocks);
}

fn snapshots(out: &mut BytesMut, list: &[SnapshotInfo]) {
    out.put_count(list.len());
    for info in list {
        snapshot(out, info);
    }
}

fn head(out: &mut BytesMut, head: &SnapshotHead) {
    out.put_u64_le(head.epoch.0);
    out.put_u64_le(head.chain.0);
}

fn optional_snapshot(out: &mut BytesMut, snapshot: Option<SnapshotId>) {
    out.put_flag(snapshot.is_some());
    if let Some(id) = snapshot {
        out.put_u128_le(id.0);
    }
}

fn last_view(out: &mut BytesMut, last: &Option<(Lsn, View)>) {
    out.put_flag(last.is_some());
    if let Some((lsn, view)) = last {
        out.put_u64_le(lsn.0);
        view.encode(out);
    }
}

fn increment_end(out: &mut BytesMut, end: &IncrementEnd) {
    out.put_u64_le(end.position.epoch.0);
    out.put_u64_le(end.position.lsn.0);
    out.put_u64_le(end.chain.0);
    epoch_table(out, &end.epoch_table);
    last_view(out, &end.last_view);
    out.put_u64_le(end.volume_blocks);
    snapshots(out, &end.snapshots);
    end.clients.encode(out);
}

/// Encodes a message to a replica; `emit` gets each frame (several for a long `Append`).
pub fn to_replica(
    session: SessionKey,
    message: &ToReplica,
    frame: &mut FrameBuffer,
    mut emit: impl FnMut(&FrameBuffer),
) -> Result<(), WireError> {
    if let ToReplica::Append { entries, stable, sync, ping } = message {
        // A replica treats the parts like the whole: in order, acknowledged cumulatively. Only the
        // last part requests the sync.
        let mut rest = &entries[..];
        loop {
            let mut bytes = 0;
            let take = rest
                .iter()
                .take(APPEND_ENTRIES_SPLIT)
                .take_while(|entry| {
                    let fits = bytes == 0 || bytes + entry.data.len() <= APPEND_DATA_SPLIT;
                    bytes += entry.data.len().max(1);
                    fits
                })
                .count();
            let (part, later) = rest.split_at(take);
            frame.start();
            frame.head.put_u64_le(stable.0);
            frame.head.put_flag(*sync && later.is_empty());
            frame.head.put_u64_le(ping.0);
            frame.entries(part);
            frame.finish(session, kind::APPEND)?;
            emit(frame);
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
        }
    }
    frame.start();
    let out = &mut frame.head;
    let kind = match message {
        ToReplica::Append { .. } => unreachable!("handled above"),
        ToReplica::Open { volume, replica, guid, membership, lease_ms } => {
            out.put_u128_le(volume.0);
            out.put_u128_le(replica.0);
            out.put_u128_le(guid.0);
            membership.encode(out);
            out.put_u32_le(*lease_ms);
            kind::OPEN
        }
        ToReplica::Truncate { keep, tip } => {
            out.put_u64_le(keep.0);
            out.put_u64_le(tip.0);
            kind::TRUNCATE
        }
        ToReplica::Sync { lsn, ping } => {
            out.put_u64_le(lsn.0);
            out.put_u64_le(ping.0);
            kind::SYNC
        }
        ToReplica::Ping { stable, ping } => {
            out.put_u64_le(stable.0);
            out.put_u64_le(ping.0);
            kind::PING
        }
        ToReplica::Read { id, view, lba, blocks, after, want_data, ping } => {
            out.put_u64_le(*id);
            read_view(out, *view);
            out.put_u64_le(*lba);
            out.put_u32_le(*blocks);
            out.put_u64_le(after.0);
            out.put_flag(*want_data);
            out.put_u64_le(ping.0);
            kind::READ
        }
        ToReplica::Fetch { id, after, bytes_max } => {
            out.put_u64_le(*id);
            out.put_u64_le(after.0);
            out.put_u32_le(*bytes_max);
            kind::FETCH
        }
        ToReplica::Pull { id, view, from, cursor, bytes_max, want_data } => {
            out.put_u64_le(*id);
            read_view(out, *view);
            out.put_u64_le(from.0);
            out.put_u64_le(*cursor);
            out.put_u32_le(*bytes_max);
            out.put_flag(*want_data);
            kind::PULL
        }
        ToReplica::IncrementBegin { rebuild, from } => {
            out.put_u64_le(*rebuild);
            out.put_u64_le(from.0);
            kind::INCREMENT_BEGIN
        }
        ToReplica::OpenBulk { number } => {
            out.put_u64_le(*number);
            kind::OPEN_BULK
        }
        ToReplica::IncrementFeed { rebuild, slots, cursor, after } => {
            out.put_u64_le(*rebuild);
            out.put_u64_le(*cursor);
            out.put_u64_le(*after);
            frame.slots(slots);
            kind::INCREMENT_FEED
        }
        ToReplica::IncrementCut { rebuild, snapshot: info, head: at } => {
            out.put_u64_le(*rebuild);
            snapshot(out, info);
            head(out, &at.head);
            last_view(out, &at.last_view);
            kind::INCREMENT_CUT
        }
        ToReplica::IncrementCommit { rebuild, to, fed } => {
            out.put_u64_le(*rebuild);
            increment_end(out, to);
            out.put_u64_le(fed.slots);
            out.put_u32_le(fed.checksum);
            kind::INCREMENT_COMMIT
        }
        ToReplica::Repair { lba, version, crc, data, snapshot } => {
            out.put_u64_le(*lba);
            out.put_u64_le(version.0);
            out.put_u32_le(*crc);
            optional_snapshot(out, *snapshot);
            frame.data.push(data.clone());
            kind::REPAIR
        }
        ToReplica::Mend { lba, blocks, at, slots, snapshot } => {
            out.put_u64_le(*lba);
            out.put_u32_le(*blocks);
            out.put_u64_le(at.0);
            optional_snapshot(out, *snapshot);
            frame.slots(slots);
            kind::MEND
        }
        ToReplica::Verify { id, lba, blocks, bytes_max, after, repair, ping, snapshot } => {
            out.put_u64_le(*id);
            out.put_u64_le(*lba);
            out.put_u32_le(*blocks);
            out.put_u32_le(*bytes_max);
            out.put_u64_le(after.0);
            out.put_flag(*repair);
            out.put_u64_le(ping.0);
            optional_snapshot(out, *snapshot);
            kind::VERIFY
        }
        ToReplica::Close => kind::CLOSE,
    };
    frame.finish(session, kind)?;
    emit(frame);
    Ok(())
}

/// Encodes a message from a replica.
pub fn from_replica(
    session: SessionKey,
    message: &FromReplica,
    frame: &mut FrameBuffer,
) -> Result<(), WireError> {
    frame.start();
    let out = &mut frame.head;
    let kind = match message {
        FromReplica::OpenAck(ack) => {
            out.put_u64_le(ack.position.epoch.0);
            out.put_u64_le(ack.position.lsn.0);
            out.put_u64_le(ack.chain.0);
            epoch_table(out, &ack.epoch_table);
            out.put_u64_le(ack.stable.0);
            out.put_u64_le(ack.durable.0);
            out.put_u64_le(ack.base.0);
            last_view(out, &ack.last_view);
            out.put_flag(ack.continuous);
            out.put_u64_le(ack.membership_version);
            out.put_flag(ack.quorum);
            out.put_flag(ack.damaged);
            out.put_u64_le(ack.volume_blocks);
            room(out, ack.room);
            snapshots(out, &ack.snapshots);
            out.put_flag(ack.shadow.is_some());
            if let Some((rebuild, from, cursor)) = ack.shadow {
                out.put_u64_le(rebuild);
                out.put_u64_le(from.0);
                out.put_u64_le(cursor);
            }
            out.put_flag(ack.shadow_cut.is_some());
            out.put_u64_le(ack.shadow_cut.unwrap_or_default().0);
            out.put_count(ack.heads.len());
            ack.heads.iter().for_each(|at| head(out, at));
            ack.clients.encode(out);
            kind::OPEN_ACK
        }
        FromReplica::Refuse { promised, failure: why } => {
            out.put_u64_le(promised.0);
            out.put_u8(failure_code(*why));
            kind::REFUSE
        }
        FromReplica::Truncated { position, chain } => {
            out.put_u64_le(position.epoch.0);
            out.put_u64_le(position.lsn.0);
            out.put_u64_le(chain.0);
            kind::TRUNCATED
        }
        FromReplica::Applied { applied, durable, ping } => {
            out.put_u64_le(applied.0);
            out.put_u64_le(durable.0);
            out.put_u64_le(ping.0);
            kind::APPLIED
        }
        FromReplica::Data { id, at, slots, ping } => {
            out.put_u64_le(*id);
            out.put_u64_le(at.0);
            out.put_u64_le(ping.0);
            frame.slots(slots);
            kind::DATA
        }
        FromReplica::Verified { id, at, slots, ping } => {
            out.put_u64_le(*id);
            out.put_u64_le(at.0);
            out.put_u64_le(ping.0);
            frame.slots(slots);
            kind::VERIFIED
        }
        FromReplica::Fetched { id, entries, gone } => {
            out.put_u64_le(*id);
            out.put_flag(*gone);
            frame.entries(entries);
            kind::FETCHED
        }
        FromReplica::Pulled { id, slots, cursor, end, gone } => {
            out.put_u64_le(*id);
            out.put_flag(*gone);
            out.put_flag(cursor.is_some());
            out.put_u64_le(cursor.unwrap_or(0));
            out.put_flag(end.is_some());
            if let Some(end) = end {
                increment_end(out, end);
            }
            frame.slots(slots);
            kind::PULLED
        }
        FromReplica::IncrementFed { rebuild, cursor } => {
            out.put_u64_le(*rebuild);
            out.put_u64_le(*cursor);
            kind::INCREMENT_FED
        }
        FromReplica::IncrementBegun { rebuild, cursor, cut } => {
            out.put_u64_le(*rebuild);
            out.put_u64_le(*cursor);
            out.put_u64_le(cut.0);
            kind::INCREMENT_BEGUN
        }
        FromReplica::IncrementDone { rebuild, position } => {
            out.put_u64_le(*rebuild);
            out.put_u64_le(position.epoch.0);
            out.put_u64_le(position.lsn.0);
            kind::INCREMENT_DONE
        }
        FromReplica::Repaired { lba, version, done } => {
            out.put_u64_le(*lba);
            out.put_u64_le(version.0);
            out.put_flag(*done);
            kind::REPAIRED
        }
        FromReplica::Mended { lba, blocks, done } => {
            out.put_u64_le(*lba);
            out.put_u32_le(*blocks);
            out.put_flag(*done);
            kind::MENDED
        }
        FromReplica::NoRoom { applied } => {
            out.put_u64_le(applied.0);
            kind::NO_ROOM
        }
        FromReplica::Room(granted) => {
            room(out, *granted);
            kind::ROOM
        }
        FromReplica::BadCopy(copy) => {
            out.put_u64_le(copy.lba);
            out.put_u32_le(copy.blocks);
            out.put_u64_le(copy.version.0);
            optional_snapshot(out, copy.snapshot);
            kind::BAD_COPY
        }
        FromReplica::Closed => kind::CLOSED,
        FromReplica::Failed(why) => {
            out.put_u8(failure_code(*why));
            kind::FAILED
        }
    };
    frame.finish(session, kind)
}

fn room(out: &mut BytesMut, room: quoin_types::message::RoomGrant) {
    let takes = TAKES.iter().find(|(_, takes)| *takes == room.takes);
    out.put_u8(takes.map_or(0, |(code, _)| *code));
    out.put_u32_le(room.share_blocks);
}

fn failure_code(failure: quoin_types::message::Failure) -> u8 {
    FAILURES.iter().find(|(_, f)| *f == failure).map_or(0, |(code, _)| *code)
}

pub fn hello(session: SessionKey, hello: &Hello, frame: &mut FrameBuffer) -> Result<(), WireError> {
    frame.start();
    hello.encode(&mut frame.head);
    frame.finish(session, kind::HELLO)
}

pub fn welcome(
    session: SessionKey,
    welcome: &Welcome,
    frame: &mut FrameBuffer,
) -> Result<(), WireError> {
    frame.start();
    welcome.encode(&mut frame.head);
    frame.finish(session, kind::WELCOME)
}
