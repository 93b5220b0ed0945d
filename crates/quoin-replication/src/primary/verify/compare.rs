//! Comparison of the answers of several members for the same blocks.
//!
//! Members answer at different positions, while clients write. Up to the lowest of these positions
//! all have the same history, so a block whose versions are all at or below it must be the same
//! everywhere. A block with a later version at any member gives no result yet and is asked for
//! again.

use quoin_types::ids::Lsn;
use quoin_types::membership::Member;
use quoin_types::message::{Content, Slot};

/// Content of a range at one member, from its first block on.
#[derive(Clone, Debug)]
pub struct Answer {
    pub member: Member,
    /// The LSN that it had applied when it read.
    pub at: Lsn,
    pub slots: Vec<Slot>,
}

/// One member's copy of a block: the version, and the checksum of data or `None` for a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    pub member: Member,
    pub version: Lsn,
    pub crc: Option<u32>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All good copies are the same.
    Same,
    /// The block was written meanwhile: it is asked for again.
    InFlux,
    /// Good copies differ: the protocol was broken, and no copy is better.
    Differs(Vec<Copy>),
    /// No good copy is left.
    Lost,
}

/// Neighbouring blocks with the same result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stretch {
    pub lba: u64,
    pub blocks: u64,
    pub outcome: Outcome,
    /// Members whose copies are bad.
    pub bad: Vec<Member>,
}

impl Stretch {
    pub fn end(&self) -> u64 {
        self.lba + self.blocks
    }
}

/// Compares the range that all have answered.
pub fn compare(lba: u64, answers: &[Answer]) -> Vec<Stretch> {
    let common = answers.iter().map(|answer| answer.at).min().unwrap_or_default();
    let mut walks: Vec<_> = answers.iter().map(|a| (a.member, a.slots.iter().peekable())).collect();
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut at = lba;
    loop {
        let mut end = u64::MAX;
        let (mut bad, mut copies) = (Vec::new(), Vec::new());
        let mut in_flux = false;
        for (member, slots) in &mut walks {
            while slots.next_if(|slot| slot.lba + u64::from(slot.blocks) <= at).is_some() {}
            let Some(slot) = slots.peek() else { return stretches };
            end = end.min(slot.lba + u64::from(slot.blocks));
            in_flux |= slot.version > common;
            let crc = match &slot.content {
                Content::Bad => {
                    bad.push(*member);
                    continue;
                }
                Content::Hole => None,
                Content::Data { crc, .. } => Some(*crc),
            };
            copies.push(Copy { member: *member, version: slot.version, crc });
        }
        if walks.is_empty() {
            return stretches;
        }
        let same = copies.windows(2).all(|w| (w[0].version, w[0].crc) == (w[1].version, w[1].crc));
        let outcome = match copies.is_empty() {
            _ if in_flux => Outcome::InFlux,
            true => Outcome::Lost,
            false if same => Outcome::Same,
            false => Outcome::Differs(copies),
        };
        let blocks = end - at;
        match stretches.last_mut() {
            Some(last) if last.outcome == outcome && last.bad == bad => last.blocks += blocks,
            _ => stretches.push(Stretch { lba: at, blocks, outcome, bad }),
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use quoin_types::ids::{ReplicaGuid, ReplicaId};

    fn member(n: u128) -> Member {
        Member { id: ReplicaId(n), guid: ReplicaGuid(n) }
    }

    fn hole(lba: u64, blocks: u32, version: u64) -> Slot {
        Slot { lba, blocks, version: Lsn(version), content: Content::Hole }
    }

    fn data(lba: u64, version: u64, crc: u32) -> Slot {
        let content = Content::Data { crc, data: Bytes::new() };
        Slot { lba, blocks: 1, version: Lsn(version), content }
    }

    fn bad(lba: u64, version: u64) -> Slot {
        Slot { lba, blocks: 1, version: Lsn(version), content: Content::Bad }
    }

    fn answer(n: u128, at: u64, slots: Vec<Slot>) -> Answer {
        Answer { member: member(n), at: Lsn(at), slots }
    }

    #[test]
    fn holes_are_equal_regardless_of_their_splits() {
        let answers =
            [answer(1, 9, vec![hole(0, 8, 3)]), answer(2, 9, vec![hole(0, 5, 3), hole(5, 3, 3)])];
        let same = Stretch { lba: 0, blocks: 8, outcome: Outcome::Same, bad: vec![] };
        assert_eq!(compare(0, &answers), [same]);
    }

    #[test]
    fn a_bad_copy_is_reported_for_its_member_and_a_block_without_a_good_one_as_lost() {
        let answers = [
            answer(1, 9, vec![data(4, 2, 7), data(5, 2, 7), bad(6, 2)]),
            answer(2, 9, vec![data(4, 2, 7), bad(5, 2), bad(6, 2)]),
        ];
        let found = compare(4, &answers);
        assert_eq!(found[0].outcome, Outcome::Same);
        assert_eq!((&found[1].outcome, &found[1].bad), (&Outcome::Same, &vec![member(2)]));
        assert_eq!((&found[2].outcome, found[2].bad.len()), (&Outcome::Lost, 2));
    }

    #[test]
    fn a_block_written_between_two_answers_is_asked_again_and_differs_only_below_both() {
        let of = |version, crc, at| {
            let answers =
                [answer(1, 5, vec![data(0, 2, 7)]), answer(2, at, vec![data(0, version, crc)])];
            compare(0, &answers).remove(0).outcome
        };
        assert_eq!(of(2, 7, 8), Outcome::Same);
        assert_eq!(of(8, 1, 8), Outcome::InFlux);
        assert!(matches!(of(3, 7, 8), Outcome::Differs(_)), "another version of the same history");
        assert!(matches!(of(2, 8, 5), Outcome::Differs(_)), "another content of one version");
    }

    #[test]
    fn no_result_reaches_beyond_the_shortest_answer() {
        let answers = [answer(1, 9, vec![hole(0, 8, 0)]), answer(2, 9, vec![hole(0, 3, 0)])];
        let same = Stretch { lba: 0, blocks: 3, outcome: Outcome::Same, bad: vec![] };
        assert_eq!(compare(0, &answers), [same]);
        assert_eq!(compare(0, &[]), []);
    }

    proptest! {
        /// One history of writes; each member has applied a prefix of it, and some copies rotted.
        #[test]
        fn prefixes_of_one_history_never_differ_and_each_rotten_copy_is_found(
            writes in proptest::collection::vec((0u64..16, any::<u32>()), 0..40),
            lags in proptest::collection::vec(0usize..6, 3),
            rot in proptest::collection::btree_set((0usize..3, 0u64..16), 0..6),
        ) {
            let state = |n: usize| {
                let applied = writes.len().saturating_sub(lags[n]);
                let mut slots: Vec<Slot> = (0..16).map(|lba| hole(lba, 1, 0)).collect();
                for (i, (lba, crc)) in writes[..applied].iter().enumerate() {
                    slots[*lba as usize] = data(*lba, i as u64 + 1, *crc);
                }
                for (_, lba) in rot.iter().filter(|(member, _)| *member == n) {
                    slots[*lba as usize].content = Content::Bad;
                }
                answer(n as u128, applied as u64, slots)
            };
            let answers: Vec<_> = (0..3).map(state).collect();
            let common = answers.iter().map(|a| a.at.0).min().unwrap() as usize;
            let mut next = 0;
            for stretch in compare(0, &answers) {
                prop_assert_eq!(stretch.lba, next);
                next = stretch.end();
                for lba in stretch.lba..stretch.end() {
                    let later = writes[common..].iter().enumerate().any(|(i, (written, _))| {
                        *written == lba && answers.iter().any(|a| a.at.0 > (common + i) as u64)
                    });
                    let rotten: Vec<_> = (0..3).filter(|n| rot.contains(&(*n, lba)))
                        .map(|n| member(n as u128)).collect();
                    prop_assert_eq!(stretch.outcome == Outcome::InFlux, later);
                    if !later {
                        prop_assert_eq!(stretch.outcome == Outcome::Lost, rotten.len() == 3);
                        prop_assert!(!matches!(stretch.outcome, Outcome::Differs(_)));
                        prop_assert_eq!(&stretch.bad, &rotten);
                    }
                }
            }
            prop_assert_eq!(next, 16);
        }
    }
}
