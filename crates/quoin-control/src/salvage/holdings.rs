//! What pools say they keep, taken in: hostile until checked, and bounded.

use std::collections::HashSet;

use prost::Message;
use quoin_api::control::{self as api, Holding, Keepsake, PoolHoldings, VolumeSpec};
use quoin_identity::convert;
use quoin_types::entry::Rule;
use quoin_types::{Epoch, Incarnation, Lsn, Member, Membership, Position, ReplicaGuid, VolumeId};

use super::decide::Held;
use crate::Error;
use crate::records::{VolumeRecord, decode};
use crate::reports::id;
use crate::spec::SIZE_BYTES_MAX;

/// Replicas in one pool.
const REPLICAS_MAX: usize = 16_384;
/// Deleted GUIDs that a pool remembers.
const DELETED_MAX: usize = 1 << 16;

/// All that one pool keeps.
#[derive(Clone, Debug, Default)]
pub struct Told {
    pub replicas: Vec<Held>,
    pub deleted: HashSet<ReplicaGuid>,
}

impl Told {
    /// Takes one more piece in.
    pub fn add(&mut self, piece: &PoolHoldings) -> Result<(), Error> {
        let deleted = piece.deleted.chunks_exact(16);
        if !deleted.remainder().is_empty() {
            return Err(Error::invalid("deleted", "16 bytes each"));
        }
        let guid = |bytes: &[u8]| Some(ReplicaGuid(u128::from_le_bytes(bytes.try_into().ok()?)));
        self.deleted.extend(deleted.filter_map(guid));
        for holding in &piece.replicas {
            self.replicas.push(held(&piece.pool, holding)?);
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

/// What a replica keeps of its volume's record, for whoever looks into a pool.
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

fn held(pool: &str, told: &Holding) -> Result<Held, Error> {
    let bad = |why: String| Error::invalid("holdings", why);
    let volume = id("volume_id", &told.volume_id)?;
    let spec = VolumeSpec::decode(&told.spec[..]).ok().filter(|spec| !spec.name.is_empty());
    let keepsake = Keepsake::decode(&told.spec[..]).unwrap_or_default();
    // One that a newer Quoin wrote, or of another volume, is none.
    let note = decode::<VolumeRecord>(&keepsake.record).ok();
    let sound = |note: &VolumeRecord| {
        let known = note.membership.known.iter();
        let mut listed = known.map(|m| note.replicas.iter().any(|r| r.guid == m.guid));
        note.id.0 == volume
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
        .chain(note.iter().flat_map(|n| [n.generation, n.epoch, n.membership.version]));
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
        note: note.map(Box::new),
        membership,
        view,
        joint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{Spec, encode};
    use crate::spec::{Defaults, complete};

    #[test]
    fn a_replica_keeps_its_volumes_name_and_newest_size_and_nothing_of_another_volume() {
        let asked = VolumeSpec { name: "db".into(), ..VolumeSpec::default() };
        let defaults = Defaults { replicas: 3, spread: quoin_api::volume::Spread::Host };
        let spec: Spec = complete(&asked, defaults).unwrap();
        let record = encode(&VolumeRecord::new(VolumeId(7), spec, 90 << 20));
        let mut described = asked.encode_to_vec();
        assert_eq!(Kept::of(VolumeId(7), &described), Kept { name: "db".into(), size_bytes: 0 });
        described.extend(Keepsake { record, generation: 2 }.encode_to_vec());
        let whole = Kept { name: "db".into(), size_bytes: 90 << 20 };
        assert_eq!(Kept::of(VolumeId(7), &described), whole);
        assert_eq!(Kept::of(VolumeId(8), &described).size_bytes, 0);
        assert_eq!(Kept::of(VolumeId(7), b"\xff\xff"), Kept::default());
    }
}
