//! The durable state that the records of the metadata ring add up to.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta};
use quoin_types::codec::{Malformed, Reader};
use quoin_types::{Lsn, ReplicaGuid};

use crate::format::checkpoint::{Checkpoint, SegmentState};
use crate::format::record::{
    CUT_LENGTH, MARK_LENGTH, RECORD_HEAD, Record, encode_meta, identity_length,
};

/// GUIDs of deleted replicas that a pool remembers, and the part of its metadata ring that they may
/// take, in percent: of more it forgets some, since a pool that could delete nothing any more, or
/// create nothing, would be of no use.
const RETIRED_MAX: usize = 1 << 16;
const RETIRED_PERCENT: usize = 10;

/// State of a replica in the ring.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DurableReplica {
    pub identity: ReplicaIdentity,
    pub meta: ReplicaMeta,
    pub watermark: Lsn,
    pub checkpoint: Bytes,
    pub log_segments: Vec<SegmentState>,
    pub cuts: Vec<(u64, Lsn)>,
    /// Encoded [`crate::format::relatives::RelativesState`]; empty: it has none.
    pub relatives: Bytes,
}

/// State of the pool in the ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DurableState {
    replicas: BTreeMap<ReplicaGuid, DurableReplica>,
    pub retired: BTreeSet<ReplicaGuid>,
    /// 0: it was never raised.
    pub mark: u64,
    /// Length of all replicas' records in [`DurableState::encode`].
    replicas_len: usize,
}

impl DurableReplica {
    /// How long its records are in [`DurableState::encode`].
    fn encoded_len(&self) -> usize {
        let mut meta = BytesMut::new();
        encode_meta(&self.meta, self.watermark, &mut meta);
        let bodies = identity_length(&self.identity) + meta.len() + self.checkpoint.len();
        let segments: usize = self.log_segments.iter().map(|s| RECORD_HEAD + s.encoded_len()).sum();
        let relatives = match self.relatives.len() {
            0 => 0,
            length => RECORD_HEAD + length,
        };
        3 * RECORD_HEAD + bodies + relatives + segments + self.cuts.len() * CUT_LENGTH
    }
}

impl DurableState {
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Retired(guid) => {
                self.retired.insert(guid);
            }
            Record::Create(identity) => {
                let replica = DurableReplica {
                    meta: ReplicaMeta::default(),
                    watermark: Lsn::ZERO,
                    checkpoint: Checkpoint::default().encode(),
                    log_segments: Vec::new(),
                    cuts: Vec::new(),
                    relatives: Bytes::new(),
                    identity,
                };
                self.replicas_len += replica.encoded_len();
                let former = self.replicas.insert(replica.identity.guid, replica);
                self.replicas_len -= former.map_or(0, |former| former.encoded_len());
            }
            Record::Delete(guid) => {
                let former = self.replicas.remove(&guid);
                self.replicas_len -= former.map_or(0, |former| former.encoded_len());
                self.retired.insert(guid);
            }
            Record::Mark(mark) => self.mark = self.mark.max(mark),
            Record::Describe(guid, spec) => self.with(guid, |r| r.identity.volume_spec = spec),
            Record::Meta(guid, meta, watermark) => self.with(guid, |r| {
                r.meta = *meta;
                r.watermark = watermark;
            }),
            Record::Checkpoint(guid, bytes) => self.with(guid, |r| {
                if let Ok(checkpoint) = Checkpoint::decode(bytes.clone()) {
                    r.log_segments.retain(|s| s.sequence > checkpoint.sequence);
                    r.cuts.retain(|(index, _)| *index > checkpoint.log.index);
                }
                r.checkpoint = bytes;
            }),
            Record::Relatives(guid, bytes) => self.with(guid, |r| r.relatives = bytes),
            Record::LogSegment(guid, segment) => self.with(guid, |r| r.log_segments.push(segment)),
            Record::Cut { guid, index, keep } => self.with(guid, |r| {
                // A later cut that goes deeper makes an earlier one needless.
                r.cuts.retain(|(_, k)| *k < keep);
                r.cuts.push((index, keep));
            }),
        }
    }

    /// Makes room for one more deleted replica among those that are remembered. Which of them is
    /// forgotten is as good as chance, as GUIDs are.
    pub fn make_room_for_deleted(&mut self, guid: ReplicaGuid, ring_bytes: usize) {
        let most = (ring_bytes / 100 * RETIRED_PERCENT / RECORD_HEAD).clamp(1, RETIRED_MAX);
        while self.retired.len() >= most
            && let Some(other) = self.retired.range(guid..).next().or(self.retired.first()).copied()
        {
            self.retired.remove(&other);
        }
    }

    pub fn replicas(&self) -> &BTreeMap<ReplicaGuid, DurableReplica> {
        &self.replicas
    }

    /// Changes what is known of a replica, if it is known.
    pub fn with(&mut self, guid: ReplicaGuid, change: impl FnOnce(&mut DurableReplica)) {
        if let Some(replica) = self.replicas.get_mut(&guid) {
            self.replicas_len -= replica.encoded_len();
            change(replica);
            self.replicas_len += replica.encoded_len();
        }
    }

    /// Changes each replica, up to the first error.
    pub fn with_each<E>(
        &mut self,
        mut change: impl FnMut(ReplicaGuid, &mut DurableReplica) -> Result<(), E>,
    ) -> Result<(), E> {
        let changed = self.replicas.iter_mut().try_for_each(|(guid, r)| change(*guid, r));
        self.replicas_len = self.replicas.values().map(DurableReplica::encoded_len).sum();
        changed
    }

    /// The records that make this state from nothing.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = BytesMut::new();
        if self.mark != 0 {
            Record::Mark(self.mark).encode(&mut out);
        }
        for guid in &self.retired {
            Record::Retired(*guid).encode(&mut out);
        }
        for (guid, replica) in &self.replicas {
            Record::Create(replica.identity.clone()).encode(&mut out);
            Record::Meta(*guid, Box::new(replica.meta.clone()), replica.watermark).encode(&mut out);
            Record::Checkpoint(*guid, replica.checkpoint.clone()).encode(&mut out);
            if !replica.relatives.is_empty() {
                Record::Relatives(*guid, replica.relatives.clone()).encode(&mut out);
            }
            for segment in &replica.log_segments {
                Record::LogSegment(*guid, *segment).encode(&mut out);
            }
            for (index, keep) in &replica.cuts {
                Record::Cut { guid: *guid, index: *index, keep: *keep }.encode(&mut out);
            }
        }
        out.to_vec()
    }

    /// How long [`DurableState::encode`] is. Asked with every change of a replica, so no walk over
    /// all of them is made for it.
    pub fn encoded_len(&self) -> usize {
        let mark = if self.mark == 0 { 0 } else { MARK_LENGTH };
        mark + self.retired.len() * RECORD_HEAD + self.replicas_len
    }

    pub fn decode(records: Vec<Bytes>) -> Result<Self, Malformed> {
        let mut state = DurableState::default();
        for bytes in records {
            let mut reader = Reader::new(bytes);
            while reader.remaining() > 0 {
                state.apply(Record::decode(&mut reader)?);
            }
        }
        Ok(state)
    }
}
