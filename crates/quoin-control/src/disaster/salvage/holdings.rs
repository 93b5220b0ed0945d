//! Holdings as pools tell them, taken in: hostile until checked, and bounded.

use std::collections::HashSet;

use prost::Message;
use quoin_api::control::{self as api, Holding, Keepsake, PoolHoldings, VolumeSpec};
use quoin_cluster::records::{KEEPSAKE_BYTES_MAX, VolumeRecord, decode};
use quoin_identity::convert;
use quoin_types::entry::Rule;
use quoin_types::ids::SnapshotId;
use quoin_types::message::SNAPSHOTS_MAX;
use quoin_types::{Epoch, Incarnation, Lsn, Member, Membership, Position, ReplicaGuid, VolumeId};

use crate::Error;
use crate::fields::id;
use crate::snapshot::recovery::{FoundSnapshot, FoundSnapshots};
use crate::text;
use crate::volume::spec::SIZE_BYTES_MAX;
use quoin_cluster::records_rebuild::Held;

/// Replicas in one pool.
const REPLICAS_MAX: usize = 16_384;
/// Deleted GUIDs that a pool remembers.
const DELETED_MAX: usize = 1 << 16;
/// Of one pool's whole answer. A replica's part is 2 KiB or so, with a record of a few replicas.
const BYTES_MAX: usize = 128 << 20;
/// Of a volume's record and its parameters, as a pool is given them to keep.
const KEPT_BYTES_MAX: usize = KEEPSAKE_BYTES_MAX + (16 << 10);
/// Of the name of a pool, a node or a replica's place in a record.
const TEXT_BYTES_MAX: usize = 512;

/// All that one pool keeps.
#[derive(Clone, Debug, Default)]
pub struct Told {
    pub replicas: Vec<Held>,
    pub deleted: HashSet<ReplicaGuid>,
    pub snapshots: FoundSnapshots,
    bytes: usize,
}

impl Told {
    /// That a pool holds nothing, and deleted these by order.
    pub fn nothing_but_deleted(deleted: impl IntoIterator<Item = ReplicaGuid>) -> Self {
        Self { deleted: deleted.into_iter().collect(), ..Self::default() }
    }

    /// Takes one more piece in.
    pub fn add(&mut self, piece: &PoolHoldings) -> Result<(), Error> {
        self.bytes = self.bytes.saturating_add(piece.encoded_len());
        if self.bytes > BYTES_MAX {
            let rule =
                format!("at most {} for all that a pool keeps", text::bytes(BYTES_MAX as u64));
            return Err(Error::invalid("holdings", rule));
        }
        let deleted = piece.deleted.chunks_exact(16);
        if !deleted.remainder().is_empty() {
            return Err(Error::invalid("deleted", "16 bytes each"));
        }
        let guid = |bytes: &[u8]| Some(ReplicaGuid(u128::from_le_bytes(bytes.try_into().ok()?)));
        self.deleted.extend(deleted.filter_map(guid));
        for holding in &piece.replicas {
            let replica = held(&piece.pool, holding)?;
            self.snapshots.insert(replica.member.guid, snapshots(holding)?);
            self.replicas.push(replica);
        }
        if self.replicas.len() > REPLICAS_MAX || self.deleted.len() > DELETED_MAX {
            let rule = format!("at most {REPLICAS_MAX} replicas and {DELETED_MAX} deleted ones");
            return Err(Error::invalid("holdings", rule));
        }
        Ok(())
    }
}

/// No volume lives to see more epochs, entries, versions or generations. A pool that says so would
/// have the records count beyond what they can.
const NUMBER_MAX: u64 = 1 << 60;

fn rule(message: &api::Membership) -> Result<Rule, String> {
    let Membership { version, rf, cf, known, .. } = convert::membership(message)?;
    Ok(Rule { membership_version: version, rf, cf, known })
}

/// A replica's copy of its volume's record, for people who look into a pool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// Empty: it keeps none.
    pub name: String,
    /// The size by the newest record that its pool was told of; 0: it keeps none.
    pub size_bytes: u64,
}

impl Kept {
    /// Reads what lies beside a replica of `volume`; of another volume, or damaged, it is nothing.
    pub fn of(volume: VolumeId, described: &[u8]) -> Self {
        let spec = VolumeSpec::decode(described).unwrap_or_default();
        let keepsake = Keepsake::decode(described).unwrap_or_default();
        let record = decode::<VolumeRecord>(&keepsake.record).ok();
        let record = record.filter(|record| record.id.0 == volume);
        let size_bytes = record.as_ref().map_or(0, |record| record.size_bytes);
        Self {
            name: record.map_or(spec.name, |record| record.spec.name),
            size_bytes: if size_bytes > SIZE_BYTES_MAX { 0 } else { size_bytes },
        }
    }
}

/// Names in a record, which end up in messages, events and other records.
fn texts_of(note: &VolumeRecord) -> impl Iterator<Item = &str> {
    let replicas = note.replicas.iter().map(|replica| replica.pool.as_str());
    let discarded = note.discarded.iter().map(|discarded| discarded.pool.as_str());
    let attached = note.attachments.iter().flat_map(|a| [a.node.as_str(), a.usage.as_str()]);
    [note.spec.name.as_str()].into_iter().chain(replicas).chain(discarded).chain(attached)
}

/// Snapshots of a replica; more than a volume may have, or what cannot be, is refused.
fn snapshots(told: &Holding) -> Result<Vec<FoundSnapshot>, Error> {
    const BYTES: usize = 32;
    let bad = |why: &str| Error::invalid("snapshots", why);
    if told.snapshots.len() > SNAPSHOTS_MAX * BYTES || !told.snapshots.len().is_multiple_of(BYTES) {
        return Err(bad("32 bytes each, at most as many as a volume may have"));
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
    let found = told.snapshots.chunks_exact(BYTES).map(|bytes| {
        let id = u128::from(number(&bytes[8..16])) << 64 | u128::from(number(&bytes[..8]));
        let (lsn, blocks) = (number(&bytes[16..24]), number(&bytes[24..]));
        match lsn <= told.position_lsn && blocks <= quoin_types::VOLUME_BLOCKS_MAX {
            true => Ok(FoundSnapshot { id: SnapshotId(id), lsn, blocks }),
            false => Err(bad("one behind the replica's position, or of an impossible size")),
        }
    });
    found.collect()
}

fn held(pool: &str, told: &Holding) -> Result<Held, Error> {
    let bad = |why: String| Error::invalid("holdings", why);
    if told.spec.len() > KEPT_BYTES_MAX {
        return Err(bad(format!(
            "a record of {} bytes, at most {KEPT_BYTES_MAX}",
            told.spec.len()
        )));
    }
    let volume = id("volume_id", &told.volume_id)?;
    let spec = VolumeSpec::decode(&told.spec[..]).ok().filter(|spec| !spec.name.is_empty());
    let keepsake = Keepsake::decode(&told.spec[..]).unwrap_or_default();
    // A record that a newer Quoin wrote, or of another volume, is none.
    let note = decode::<VolumeRecord>(&keepsake.record).ok();
    let sound = |note: &VolumeRecord| {
        let known = note.membership.known.iter();
        let mut listed = known.map(|m| note.replicas.iter().any(|r| r.guid == m.guid));
        note.id.0 == volume
            && texts_of(note).all(|text| text.len() <= TEXT_BYTES_MAX)
            && Membership::from(&note.membership).check().is_ok()
            && listed.all(|listed| listed)
    };
    let rule_of = |told: &Option<api::Membership>| told.as_ref().map(rule).transpose();
    let (view, joint) = (rule_of(&told.view).map_err(bad)?, rule_of(&told.joint).map_err(bad)?);
    let membership = told.membership.as_ref().map(convert::membership).transpose().map_err(bad)?;
    let note = note.filter(sound);
    let numbers = [told.promised_epoch, told.position_epoch, told.position_lsn]
        .into_iter()
        .chain(view.iter().chain(&joint).map(|rule| rule.membership_version))
        .chain(membership.iter().map(|membership| membership.version))
        .chain(note.iter().flat_map(|n| [n.generation, n.opened.epoch, n.membership.version]));
    if let Some(number) = numbers.into_iter().find(|number| *number > NUMBER_MAX) {
        return Err(bad(format!("{number} is no epoch, LSN, version or generation of a volume")));
    }
    Ok(Held {
        pool: pool.to_owned(),
        trusted: true,
        volume,
        member: Member { id: id("replica_id", &told.replica_id)?, guid: id("guid", &told.guid)? },
        quorum: told.quorum,
        damaged: told.damaged,
        promised: Epoch(told.promised_epoch),
        incarnation: match told.promised_incarnation.as_str() {
            "" => Incarnation(0),
            text => id("promised_incarnation", text)?,
        },
        position: Position { epoch: Epoch(told.position_epoch), lsn: Lsn(told.position_lsn) },
        blocks: told.blocks.min(quoin_types::VOLUME_BLOCKS_MAX),
        spec,
        // The pool knows better than its copy of the record what an opening changes.
        note: note.map(|note| Box::new(note.unopened())),
        membership,
        view,
        joint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::spec::{Defaults, complete};
    use quoin_cluster::records::encode;

    #[test]
    fn a_replica_keeps_its_volumes_name_and_newest_size_and_nothing_of_another_volume() {
        let asked = VolumeSpec { name: "db".into(), ..VolumeSpec::default() };
        let defaults = Defaults { replicas: 3, spread: quoin_api::volume::Spread::Host };
        let spec = complete(&asked, defaults).unwrap();
        let record = encode(&VolumeRecord::new(VolumeId(7), spec, 90 << 20, 1));
        let mut described = asked.encode_to_vec();
        assert_eq!(Kept::of(VolumeId(7), &described), Kept { name: "db".into(), size_bytes: 0 });
        described.extend(Keepsake { record, generation: 2 }.encode_to_vec());
        let whole = Kept { name: "db".into(), size_bytes: 90 << 20 };
        assert_eq!(Kept::of(VolumeId(7), &described), whole);
        assert_eq!(Kept::of(VolumeId(8), &described).size_bytes, 0);
        assert_eq!(Kept::of(VolumeId(7), b"\xff\xff"), Kept::default());
    }

    fn holding(described: Vec<u8>) -> Holding {
        let (volume_id, replica_id) = (VolumeId(7).to_string(), "1".repeat(32));
        Holding {
            volume_id,
            guid: replica_id.clone(),
            replica_id,
            spec: described,
            ..Holding::default()
        }
    }

    #[test]
    fn what_a_pool_makes_the_controller_keep_is_bounded_in_bytes_replicas_and_each_text() {
        let piece =
            |replicas| PoolHoldings { pool: "p".into(), replicas, ..PoolHoldings::default() };
        let mut told = Told::default();
        let largest = piece(vec![holding(vec![0; KEPT_BYTES_MAX]); 64]);
        let pieces = (0..).take_while(|_| told.add(&largest).is_ok()).count();
        assert_eq!(pieces, BYTES_MAX / largest.encoded_len());
        let larger = piece(vec![holding(vec![0; KEPT_BYTES_MAX + 1])]);
        assert!(Told::default().add(&larger).is_err());

        let asked = VolumeSpec { name: "db".into(), ..VolumeSpec::default() };
        let defaults = Defaults { replicas: 3, spread: quoin_api::volume::Spread::Host };
        let mut record =
            VolumeRecord::new(VolumeId(7), complete(&asked, defaults).unwrap(), 1 << 20, 1);
        record.membership.drf = record.membership.rf;
        record.opened.epoch = 9;
        let noted = |record: &VolumeRecord| {
            let keepsake = Keepsake { record: encode(record), generation: 1 };
            held("p", &holding(keepsake.encode_to_vec())).unwrap().note
        };
        assert_eq!(
            noted(&record).expect("it is sound").opened.epoch,
            0,
            "an opening is no word of a record"
        );
        record.spec.name = "x".repeat(TEXT_BYTES_MAX + 1);
        assert_eq!(noted(&record), None);
    }

    #[test]
    fn snapshots_of_a_replica_are_bounded_and_lie_within_its_history() {
        let told = |ids: u128, lsn: u64, blocks: u64| {
            let one = |id: u128| {
                let numbers = [lsn.to_le_bytes(), blocks.to_le_bytes()].concat();
                [id.to_le_bytes().to_vec(), numbers].concat()
            };
            let snapshots = (0..ids).flat_map(one).collect();
            snapshots_of(snapshots)
        };
        assert_eq!(
            told(2, 7, 3).unwrap()[1],
            FoundSnapshot { id: SnapshotId(1), lsn: 7, blocks: 3 }
        );
        assert!(told(1, 8, 3).is_err(), "behind the replica's end");
        assert!(told(1, 7, u64::MAX).is_err());
        assert!(told(SNAPSHOTS_MAX as u128 + 1, 7, 3).is_err());
        assert!(snapshots_of(vec![0; 33]).is_err());
    }

    fn snapshots_of(snapshots: Vec<u8>) -> Result<Vec<FoundSnapshot>, Error> {
        let told = Holding { snapshots, position_lsn: 7, ..holding(Vec::new()) };
        super::snapshots(&told)
    }
}
