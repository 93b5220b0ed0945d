//! Decoding of frames to messages. Block data stays in the buffer it was received into: a message's
//! `Bytes` are slices of it.
//!
//! Every count is checked against the bytes that are left before anything is reserved, so a frame
//! never allocates more than a small multiple of its own length. Checksums of blocks are not
//! verified here: the state machines do that, once, where they decide how to handle a bad block.

use std::sync::Arc;

use bytes::Bytes;
use quoin_types::client::{ClientTable, Part};
use quoin_types::codec::{Malformed, Reader};
use quoin_types::entry::{Chain, Entry, EntryKind, SharedEntry, View};
use quoin_types::ids::{
    Epoch, Lsn, Position, ReplicaGuid, ReplicaId, SessionKey, SnapshotId, VolumeId,
};
use quoin_types::membership::Membership;
use quoin_types::message::{
    BadCopy, Content, CutHead, EPOCH_TABLE_MAX, EpochEnd, Failure, FedSum, FromReplica,
    IncrementEnd, OpenAck, Ping, ReadView, RoomGrant, SNAPSHOTS_MAX, Slot, SnapshotHead,
    SnapshotInfo, ToReplica, VERIFY_BLOCKS_MAX,
};
use quoin_types::{BLOCK_SIZE, READ_BLOCKS_MAX, STATUS_BLOCKS_MAX, VOLUME_BLOCKS_MAX, crc32c};

use crate::frame::{FAILURES, HEADER_LEN, Header, TAKES, WireError, kind};
use crate::hello::{Hello, Welcome};

#[derive(Clone, PartialEq, Debug)]
pub enum Frame {
    Hello(Hello),
    Welcome(Welcome),
    ToReplica(ToReplica),
    FromReplica(FromReplica),
}

/// A frame as it arrived.
#[derive(Clone, PartialEq, Debug)]
pub struct Incoming {
    pub session: SessionKey,
    pub frame: Frame,
}

struct Body {
    head: Reader,
    data: Bytes,
}

/// Head and data of a whole frame (header included, tag removed) whose header is `header`.
///
/// # Errors
/// The frame has another length, or its head another checksum.
pub(crate) fn parts(header: &Header, frame: &Bytes) -> Result<(Reader, Bytes), WireError> {
    if frame.len() != header.frame_len() {
        return Err(WireError::Malformed("frame length"));
    }
    let head_end = HEADER_LEN + header.head_len as usize;
    let head = frame.slice(HEADER_LEN..head_end);
    if crc32c(&head) != header.head_crc {
        return Err(WireError::Checksum("head"));
    }
    Ok((Reader::new(head), frame.slice(head_end..)))
}

/// Decodes a whole frame (header included, tag removed) whose header is `header`.
pub fn decode(header: &Header, frame: Bytes) -> Result<Incoming, WireError> {
    let (head, data) = parts(header, &frame)?;
    let mut body = Body { head, data };
    let frame = body.frame(header.kind)?;
    // Later versions may append fields before the version is negotiated.
    if !matches!(frame, Frame::Hello(_) | Frame::Welcome(_)) {
        body.head.end("head")?;
    }
    if !body.data.is_empty() {
        return Err(WireError::Malformed("data length"));
    }
    Ok(Incoming { session: header.session, frame })
}

impl Body {
    fn frame(&mut self, kind: u8) -> Result<Frame, WireError> {
        Ok(match kind {
            kind::HELLO => Frame::Hello(Hello::decode(&mut self.head)?),
            kind::WELCOME => Frame::Welcome(Welcome::decode(&mut self.head)?),
            kind::OPEN..=kind::OPEN_BULK => Frame::ToReplica(self.message_to_replica(kind)?),
            kind::OPEN_ACK..=kind::INCREMENT_BEGUN => {
                Frame::FromReplica(self.message_from_replica(kind)?)
            }
            _ => return Err(WireError::Kind(kind)),
        })
    }

    fn message_to_replica(&mut self, kind: u8) -> Result<ToReplica, WireError> {
        Ok(match kind {
            kind::OPEN => ToReplica::Open {
                volume: VolumeId(self.head.u128("open")?),
                replica: ReplicaId(self.head.u128("open")?),
                guid: ReplicaGuid(self.head.u128("open")?),
                membership: Membership::decode(&mut self.head)?,
                lease_ms: self.head.u32("open")?,
            },
            kind::TRUNCATE => ToReplica::Truncate { keep: self.lsn()?, tip: self.lsn()? },
            kind::APPEND => ToReplica::Append {
                stable: self.lsn()?,
                sync: self.head.bool("sync flag")?,
                ping: self.ping()?,
                entries: self.entries()?,
            },
            kind::SYNC => ToReplica::Sync { lsn: self.lsn()?, ping: self.ping()? },
            kind::PING => ToReplica::Ping { stable: self.lsn()?, ping: self.ping()? },
            kind::READ => {
                let message = ToReplica::Read {
                    id: self.head.u64("read")?,
                    view: self.read_view()?,
                    lba: self.lba()?,
                    blocks: self.head.u32("read")?,
                    after: self.lsn()?,
                    want_data: self.head.bool("read")?,
                    ping: self.ping()?,
                };
                if let ToReplica::Read { blocks, want_data, .. } = &message {
                    let blocks_max = if *want_data { READ_BLOCKS_MAX } else { STATUS_BLOCKS_MAX };
                    if *blocks == 0 || *blocks > blocks_max {
                        return Err(WireError::Malformed("read length"));
                    }
                }
                message
            }
            kind::FETCH => ToReplica::Fetch {
                id: self.head.u64("fetch")?,
                after: self.lsn()?,
                bytes_max: self.head.u32("fetch")?,
            },
            kind::PULL => ToReplica::Pull {
                id: self.head.u64("pull")?,
                view: self.read_view()?,
                from: self.lsn()?,
                cursor: self.lba()?,
                bytes_max: self.head.u32("pull")?,
                want_data: self.head.bool("pull")?,
            },
            kind::INCREMENT_BEGIN => ToReplica::IncrementBegin {
                rebuild: self.head.u64("increment")?,
                from: self.lsn()?,
            },
            kind::INCREMENT_FEED => ToReplica::IncrementFeed {
                rebuild: self.head.u64("increment")?,
                cursor: self.cursor()?,
                after: self.cursor()?,
                slots: self.slots()?,
            },
            kind::OPEN_BULK => ToReplica::OpenBulk { number: self.head.u64("bulk number")? },
            kind::INCREMENT_CUT => ToReplica::IncrementCut {
                rebuild: self.head.u64("increment")?,
                snapshot: self.snapshot()?,
                head: Box::new(self.cut_head()?),
            },
            kind::INCREMENT_COMMIT => ToReplica::IncrementCommit {
                rebuild: self.head.u64("increment")?,
                to: Box::new(self.increment_end()?),
                fed: self.fed_sum()?,
            },
            kind::REPAIR => {
                let (lba, version) = (self.lba()?, self.lsn()?);
                let crc = self.head.u32("repair")?;
                let data = self.block()?;
                let snapshot = self.optional_snapshot()?;
                ToReplica::Repair { lba, version, crc, data, snapshot }
            }
            kind::MEND => ToReplica::Mend {
                lba: self.lba()?,
                blocks: self.head.u32("mend")?,
                at: self.lsn()?,
                snapshot: self.optional_snapshot()?,
                slots: self.slots()?,
            },
            kind::VERIFY => {
                let (id, lba) = (self.head.u64("verify")?, self.lba()?);
                let blocks = self.head.u32("verify")?;
                if blocks == 0 || blocks > VERIFY_BLOCKS_MAX {
                    return Err(WireError::Malformed("verify length"));
                }
                ToReplica::Verify {
                    id,
                    lba,
                    blocks,
                    bytes_max: self.head.u32("verify")?,
                    after: self.lsn()?,
                    repair: self.head.bool("verify")?,
                    ping: self.ping()?,
                    snapshot: self.optional_snapshot()?,
                }
            }
            kind::CLOSE => ToReplica::Close,
            _ => return Err(WireError::Kind(kind)),
        })
    }

    fn message_from_replica(&mut self, kind: u8) -> Result<FromReplica, WireError> {
        Ok(match kind {
            kind::OPEN_ACK => {
                let ack = OpenAck {
                    position: self.position()?,
                    chain: Chain(self.head.u64("chain")?),
                    epoch_table: self.epoch_table()?,
                    stable: self.lsn()?,
                    durable: self.lsn()?,
                    base: self.lsn()?,
                    last_view: self.last_view()?,
                    continuous: self.head.bool("continuous flag")?,
                    membership_version: self.head.u64("membership version")?,
                    quorum: self.head.bool("quorum flag")?,
                    damaged: self.head.bool("damaged flag")?,
                    volume_blocks: self.head.u64("volume size")?,
                    room: self.room()?,
                    snapshots: self.snapshots()?,
                    shadow: if self.head.bool("shadow flag")? {
                        Some((self.head.u64("shadow")?, self.lsn()?, self.cursor()?))
                    } else {
                        None
                    },
                    shadow_cut: {
                        let has_cut = self.head.bool("shadow cut")?;
                        Some(self.lsn()?).filter(|_| has_cut)
                    },
                    heads: self.heads()?,
                    clients: ClientTable::decode(&mut self.head)?,
                };
                FromReplica::OpenAck(Box::new(ack))
            }
            kind::REFUSE => FromReplica::Refuse {
                promised: Epoch(self.head.u64("refuse")?),
                failure: self.failure()?,
            },
            kind::TRUNCATED => FromReplica::Truncated {
                position: self.position()?,
                chain: Chain(self.head.u64("chain")?),
            },
            kind::APPLIED => FromReplica::Applied {
                applied: self.lsn()?,
                durable: self.lsn()?,
                ping: self.ping()?,
            },
            kind::DATA => FromReplica::Data {
                id: self.head.u64("data")?,
                at: self.lsn()?,
                ping: self.ping()?,
                slots: self.slots()?,
            },
            kind::VERIFIED => FromReplica::Verified {
                id: self.head.u64("verified")?,
                at: self.lsn()?,
                ping: self.ping()?,
                slots: self.slots()?,
            },
            kind::FETCHED => FromReplica::Fetched {
                id: self.head.u64("fetched")?,
                gone: self.head.bool("gone flag")?,
                entries: self.entries()?,
            },
            kind::PULLED => {
                let id = self.head.u64("pulled")?;
                let gone = self.head.bool("gone flag")?;
                let more = self.head.bool("cursor flag")?;
                let cursor = self.lba()?;
                let end = if self.head.bool("end flag")? {
                    Some(Box::new(self.increment_end()?))
                } else {
                    None
                };
                FromReplica::Pulled {
                    id,
                    slots: self.slots()?,
                    cursor: more.then_some(cursor),
                    end,
                    gone,
                }
            }
            kind::INCREMENT_FED => FromReplica::IncrementFed {
                rebuild: self.head.u64("increment")?,
                cursor: self.cursor()?,
            },
            kind::INCREMENT_BEGUN => FromReplica::IncrementBegun {
                rebuild: self.head.u64("increment")?,
                cursor: self.cursor()?,
                cut: self.lsn()?,
            },
            kind::INCREMENT_DONE => FromReplica::IncrementDone {
                rebuild: self.head.u64("increment")?,
                position: self.position()?,
            },
            kind::REPAIRED => FromReplica::Repaired {
                lba: self.lba()?,
                version: self.lsn()?,
                done: self.head.bool("done flag")?,
            },
            kind::MENDED => FromReplica::Mended {
                lba: self.lba()?,
                blocks: self.head.u32("mended")?,
                done: self.head.bool("done flag")?,
            },
            kind::NO_ROOM => FromReplica::NoRoom { applied: self.lsn()? },
            kind::ROOM => FromReplica::Room(self.room()?),
            kind::BAD_COPY => FromReplica::BadCopy(BadCopy {
                lba: self.lba()?,
                blocks: self.head.u32("bad copy")?,
                version: self.lsn()?,
                snapshot: self.optional_snapshot()?,
            }),
            kind::CLOSED => FromReplica::Closed,
            kind::FAILED => FromReplica::Failed(self.failure()?),
            _ => return Err(WireError::Kind(kind)),
        })
    }

    fn fed_sum(&mut self) -> Result<FedSum, Malformed> {
        Ok(FedSum { slots: self.head.u64("fed slots")?, checksum: self.head.u32("fed slots")? })
    }

    fn lsn(&mut self) -> Result<Lsn, Malformed> {
        self.head.u64("LSN").map(Lsn)
    }

    fn ping(&mut self) -> Result<Ping, Malformed> {
        self.head.u64("ping").map(Ping)
    }

    /// Reads an LBA, or a cursor one past the last.
    fn lba(&mut self) -> Result<u64, Malformed> {
        let lba = self.head.u64("LBA")?;
        if lba > VOLUME_BLOCKS_MAX { Err(Malformed("LBA")) } else { Ok(lba) }
    }

    /// Reads the progress of an increment: an LBA, or `u64::MAX` once all of the volume is done.
    fn cursor(&mut self) -> Result<u64, Malformed> {
        let cursor = self.head.u64("cursor")?;
        let is_known = cursor <= VOLUME_BLOCKS_MAX || cursor == u64::MAX;
        if is_known { Ok(cursor) } else { Err(Malformed("cursor")) }
    }

    fn position(&mut self) -> Result<Position, Malformed> {
        Ok(Position { epoch: Epoch(self.head.u64("position")?), lsn: self.lsn()? })
    }

    fn room(&mut self) -> Result<RoomGrant, Malformed> {
        let code = self.head.u8("room")?;
        let takes = TAKES.iter().find(|(c, _)| *c == code).map(|(_, takes)| *takes);
        let share_blocks = self.head.u32("room")?;
        Ok(RoomGrant { takes: takes.ok_or(Malformed("room"))?, share_blocks })
    }

    fn failure(&mut self) -> Result<Failure, Malformed> {
        let code = self.head.u8("failure")?;
        FAILURES.iter().find(|(c, _)| *c == code).map(|(_, f)| *f).ok_or(Malformed("failure"))
    }

    fn read_view(&mut self) -> Result<ReadView, Malformed> {
        let code = self.head.u8("read view")?;
        let id = SnapshotId(self.head.u128("read view")?);
        match code {
            0 => Ok(ReadView::Live),
            1 => Ok(ReadView::Snapshot(id)),
            2 => Ok(ReadView::Base),
            _ => Err(Malformed("read view")),
        }
    }

    fn epoch_table(&mut self) -> Result<Vec<EpochEnd>, Malformed> {
        let n = self.head.count(32, "epoch table")?;
        if n > EPOCH_TABLE_MAX {
            return Err(Malformed("epoch table"));
        }
        (0..n)
            .map(|_| {
                Ok(EpochEnd {
                    epoch: Epoch(self.head.u64("epoch table")?),
                    first: self.lsn()?,
                    last: self.lsn()?,
                    chain: Chain(self.head.u64("epoch table")?),
                })
            })
            .collect()
    }

    fn snapshot(&mut self) -> Result<SnapshotInfo, Malformed> {
        Ok(SnapshotInfo {
            id: SnapshotId(self.head.u128("snapshot")?),
            lsn: self.lsn()?,
            hidden: self.head.bool("snapshot")?,
            blocks: self.head.u64("snapshot")?,
        })
    }

    fn snapshots(&mut self) -> Result<Vec<SnapshotInfo>, Malformed> {
        let n = self.head.count(33, "snapshots")?;
        if n > SNAPSHOTS_MAX {
            return Err(Malformed("snapshots"));
        }
        (0..n).map(|_| self.snapshot()).collect()
    }

    fn optional_snapshot(&mut self) -> Result<Option<SnapshotId>, Malformed> {
        let is_there = self.head.bool("snapshot flag")?;
        is_there.then(|| self.head.u128("snapshot").map(SnapshotId)).transpose()
    }

    fn snapshot_head(&mut self) -> Result<SnapshotHead, Malformed> {
        Ok(SnapshotHead {
            epoch: Epoch(self.head.u64("snapshot head")?),
            chain: Chain(self.head.u64("snapshot head")?),
        })
    }

    fn cut_head(&mut self) -> Result<CutHead, Malformed> {
        Ok(CutHead { head: self.snapshot_head()?, last_view: self.last_view()? })
    }

    fn heads(&mut self) -> Result<Vec<SnapshotHead>, Malformed> {
        let n = self.head.count(16, "snapshot heads")?;
        if n > SNAPSHOTS_MAX {
            return Err(Malformed("snapshot heads"));
        }
        (0..n).map(|_| self.snapshot_head()).collect()
    }

    fn last_view(&mut self) -> Result<Option<(Lsn, View)>, Malformed> {
        Ok(if self.head.bool("view flag")? {
            Some((self.lsn()?, View::decode(&mut self.head)?))
        } else {
            None
        })
    }

    fn increment_end(&mut self) -> Result<IncrementEnd, Malformed> {
        Ok(IncrementEnd {
            position: self.position()?,
            chain: Chain(self.head.u64("chain")?),
            epoch_table: self.epoch_table()?,
            last_view: self.last_view()?,
            volume_blocks: self.head.u64("volume size")?,
            snapshots: self.snapshots()?,
            clients: ClientTable::decode(&mut self.head)?,
        })
    }

    fn data(&mut self, n: usize) -> Result<Bytes, Malformed> {
        if n > self.data.len() {
            return Err(Malformed("data length"));
        }
        Ok(self.data.split_to(n))
    }

    fn block(&mut self) -> Result<Bytes, Malformed> {
        self.data(BLOCK_SIZE)
    }

    fn entries(&mut self) -> Result<Vec<SharedEntry>, WireError> {
        let n = self.head.count(ENTRY_HEAD_MIN, "entries")?;
        let mut entries = Vec::with_capacity(n);
        for _ in 0..n {
            entries.push(Arc::new(self.entry()?));
        }
        Ok(entries)
    }

    fn entry(&mut self) -> Result<Entry, WireError> {
        let head = &mut self.head;
        let epoch = Epoch(head.u64("entry")?);
        let lsn = Lsn(head.u64("entry")?);
        let lba = head.u64("entry")?;
        let blocks = head.u32("entry")?;
        let code = head.u8("entry")?;
        let flags = head.u8("entry")?;
        if flags & !(Entry::FLAG_FUA | Entry::FLAG_PART) != 0 {
            return Err(WireError::Malformed("entry"));
        }
        let fua = flags & Entry::FLAG_FUA != 0;
        let chain = Chain(head.u64("entry")?);
        let kind = EntryKind::decode(code, head.bytes("entry payload")?)?;
        let part = match flags & Entry::FLAG_PART {
            0 => None,
            _ => Some(Part::decode(head)?),
        };
        let (mut crcs, mut data) = (Vec::new(), Bytes::new());
        if kind == EntryKind::Write {
            let n = blocks as usize;
            crcs = head.u32s(n, "entry checksums")?;
            data = self.data(n.saturating_mul(BLOCK_SIZE))?;
        }
        let entry = Entry { epoch, lsn, kind, lba, blocks, crcs, data, chain, fua, part };
        entry.check()?;
        Ok(entry)
    }

    fn slots(&mut self) -> Result<Vec<Slot>, WireError> {
        let n = self.head.count(SLOT_HEAD_MIN, "slots")?;
        let mut slots = Vec::with_capacity(n);
        for _ in 0..n {
            let lba = self.lba()?;
            let blocks = self.head.u32("slot")?;
            let version = self.lsn()?;
            let code = self.head.u8("slot")?;
            let blocks_max = if code == 1 || code == 3 { 1 } else { u32::MAX };
            if blocks == 0 || blocks > blocks_max || lba + u64::from(blocks) > VOLUME_BLOCKS_MAX {
                return Err(WireError::Malformed("slot"));
            }
            let content = match code {
                0 => Content::Hole,
                1 => Content::Data { crc: self.head.u32("slot")?, data: self.block()? },
                2 => Content::Bad,
                3 => Content::Data { crc: self.head.u32("slot")?, data: Bytes::new() },
                _ => return Err(WireError::Malformed("slot")),
            };
            slots.push(Slot { lba, blocks, version, content });
        }
        Ok(slots)
    }
}

/// Least size of an entry in a head: its fixed fields and an empty payload.
const ENTRY_HEAD_MIN: usize = 42;
/// Least size of a slot in a head.
const SLOT_HEAD_MIN: usize = 21;
