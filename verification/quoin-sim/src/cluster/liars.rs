//! Hostile pool at a recovery of the records: its account of one of its replicas is a lie. The other pools of
//! the volume say the truth. Where the recovery stays undecided, it is made again without the hostile pool.

use quoin_cluster::records_rebuild::Held;
use quoin_types::entry::Rule;
use quoin_types::{Epoch, Lsn, Membership, VolumeId};

use crate::random::Random;

/// Of a hundred recoveries so many hear a lie.
const LIES_OF_HUNDRED: u64 = 30;
/// No number of a run comes near it.
pub(super) const BEYOND_ALL: u64 = 1 << 40;

/// Pool that lies, and the volume of which it does.
#[derive(Clone, Debug)]
pub(super) struct Liar {
    pub pool: String,
    pub volume: VolumeId,
}

/// Makes one of the accounts a lie, of a volume of which another pool has a copy that counts.
pub(super) fn lie(random: &mut Random, held: &mut [Held]) -> Option<Liar> {
    if held.is_empty() || !random.percent(LIES_OF_HUNDRED) {
        return None;
    }
    let at = random.below(held.len() as u64) as usize;
    let told = held[at].clone();
    let is_witness = |other: &&Held| {
        // A replica that a later list left out is no witness against it.
        let newest = other.rules().max_by_key(|rule| rule.membership_version);
        other.volume == told.volume
            && other.pool != told.pool
            && other.quorum
            && newest.is_some_and(|rule| rule.known.contains(&other.member))
    };
    held.iter().find(is_witness)?;
    let liar = &mut held[at];
    let version = liar.membership.as_ref().map_or(0, |list| list.version) + 7;
    let alone = Rule { membership_version: version, rf: 1, cf: 1, known: vec![told.member] };
    let list = Membership {
        version,
        rf: 1,
        cf: 1,
        drf: 1,
        known: vec![told.member],
        ..Membership::default()
    };
    match random.below(6) {
        0 => liar.view = Some(alone),
        1 => liar.membership = Some(list),
        2 => {
            if let Some(note) = &mut liar.note {
                note.membership = (&list).into();
                note.generation += 7;
            }
        }
        3 => {
            liar.joint = Some(alone);
            liar.position.lsn = Lsn(1 << 50);
        }
        4 => liar.promised = Epoch(1 << 60),
        _ => {
            if let Some(note) = &mut liar.note {
                note.generation = 1 << 59;
            }
        }
    }
    Some(Liar { pool: told.pool, volume: told.volume })
}
