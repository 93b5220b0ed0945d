//! The rules on who may connect and who counts, read plainly from the scale-up document as it was
//! decided, and how often each of its situations arose.
//!
//! This is not the core's own decision ([`quoin_replication::primary::admission`] is never called here):
//! it is the list once more, line by line and in other words, for a world that sees everybody.

use quoin_types::{Member, Membership};

/// Situation that a rule is about, counted whenever the rule is checked in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Situation {
    // Admission of connections.
    /// As many as are desired sit already; an unlisted one with quorum off comes.
    FullAndUnlisted,
    FullAndUnlistedWithQuorum,
    /// The same, with a listed GUID under another ReplicaId.
    FullAndCopied,
    FullAndListed,
    /// The list is full, and no seat may be freed for the replica.
    FullAndListedWithoutPlace,
    SentAwayQuorumOff,
    /// No replica with quorum off had a seat.
    SentAwayQuorumOn,
    TooManyReported,
    AllConnected,
    Foreign,
    Known,
    Listed,
    ListedWithQuorum,
    Addition,
    AdditionWithQuorum,
    ListShort,
    ListShortWithQuorum,
    ListShortAndRefused,
    Unasked,
    // Members of the lists.
    UnlistedBesideTheList,
    UnlistedFed,
    // Members that have a say.
    ReadBesideQuorumOff,
    WriteBesideQuorumOff,
    QuorumOffLost,
    QuorumOffFedOn,
    NoQuorumReported,
    // When IO starts and stops.
    StartedWithJustEnough,
    StoppedBelowCf,
    WentOnAtCf,
    // How the list changes.
    TurnedOn,
    Replaced,
    ListFilled,
    LeftOut,
    RaisedWithCfAsItWas,
    RaisedWithCf,
    HeldByTheNewRule,
    WriteWhileJoint,
    SwapSent,
    RuledOnceRecorded,
    GivenUp,
    GivenUpAndMade,
    Refused,
    RefusedAndMade,
    Trimmed,
    ThreeOfFive,
    UnlistedWereEnough,
    /// The same with five on the list and CF 3: some of the five are there, fewer than three.
    SixthMadeThreeOfFive,
}

const SITUATIONS: usize = Situation::SixthMadeThreeOfFive as usize + 1;

/// How often each situation arose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Situations([u64; SITUATIONS]);

impl Default for Situations {
    fn default() -> Self {
        Self([0; SITUATIONS])
    }
}

impl Situations {
    pub fn add(&mut self, situation: Situation) {
        self.0[situation as usize] += 1;
    }

    pub fn of(&self, situation: Situation) -> u64 {
        self.0[situation as usize]
    }

    pub fn merge(&mut self, other: &Self) {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a += b;
        }
    }
}

/// A replica with a seat: a known one that is connected, or another that was admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Seat {
    pub member: Member,
    pub quorum: bool,
}

/// A replica that is not known and wants to connect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub member: Member,
    pub quorum: bool,
    pub membership_version: u64,
    /// The records hold the replica whose place it takes beside it: it needs no seat.
    pub beside: bool,
}

/// Outcome for a caller that is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Admitted among the replicas that are not known, perhaps in the place of another.
    LetIn(Option<Member>),
    Refused {
        too_many: bool,
    },
}

/// The list of the document for one caller that is not on the known list, with the situations
/// that the decision was an instance of. `moving`: who needs no seat.
pub(crate) fn read(
    list: &Membership,
    drf: u8,
    seats: &[Seat],
    moving: &[Member],
    caller: &Caller,
) -> (Outcome, Vec<Situation>) {
    use Situation::*;
    let refused =
        |too_many, situations: &[Situation]| (Outcome::Refused { too_many }, situations.to_vec());
    let who = caller.member;
    let ids: Vec<_> = list.known.iter().map(|entry| entry.id).collect();
    let is_listed = ids.contains(&who.id);
    // Check 0. (A foreign one is found by what it answers, not here.)
    if list.retired.contains(&who.guid) || caller.membership_version > list.version {
        return refused(false, &[]);
    }
    // Check 1: one of each ReplicaId; who moves has both.
    let same_id = seats.iter().find(|s| s.member.id == who.id && s.member != who);
    if same_id.is_some_and(|s| !caller.beside && !moving.contains(&s.member)) {
        return refused(false, &[]);
    }
    let desired = usize::from(drf.max(list.rf));
    let others: Vec<Seat> = seats.iter().filter(|s| s.member != who).copied().collect();
    if !caller.beside {
        // Check 2: all that are desired are known and there.
        if others.iter().filter(|s| list.known.contains(&s.member)).count() >= desired {
            return refused(true, &[AllConnected]);
        }
        // Check 3: as many as are desired are there.
        if others.iter().filter(|s| !moving.contains(&s.member)).count() >= desired {
            if !is_listed {
                let copied = list.known.iter().any(|entry| entry.guid == who.guid);
                let seen = if caller.quorum { FullAndUnlistedWithQuorum } else { FullAndUnlisted };
                return match copied {
                    true => refused(true, &[seen, FullAndCopied]),
                    false => refused(true, &[seen]),
                };
            }
            let mut unlisted: Vec<&Seat> =
                others.iter().filter(|s| !ids.contains(&s.member.id)).collect();
            unlisted.sort_by_key(|s| s.quorum);
            let Some(goes) = unlisted.first() else {
                return refused(true, &[FullAndListedWithoutPlace]);
            };
            let sent = if goes.quorum { SentAwayQuorumOn } else { SentAwayQuorumOff };
            let listed = if caller.quorum { ListedWithQuorum } else { Listed };
            let seen = vec![FullAndListed, sent, listed];
            return (Outcome::LetIn(Some(goes.member)), seen);
        }
    }
    let let_in = |situation| (Outcome::LetIn(None), vec![situation]);
    // Check 4 in the numbers of the list: a ReplicaId that is listed, with another GUID.
    if is_listed {
        return let_in(if caller.quorum { ListedWithQuorum } else { Listed });
    }
    // Check 5: entries are missing. (The list was complete once: no replica becomes known this way.)
    let is_short = list.known.len() < usize::from(list.rf);
    if is_short && !caller.quorum {
        return let_in(ListShort);
    }
    // Check 6, and 7.
    if list.rf < drf {
        return let_in(if is_short { ListShortWithQuorum } else { Addition });
    }
    refused(false, &[if is_short { ListShortAndRefused } else { Unasked }])
}

/// How many known replicas must be there before IO starts.
pub(crate) fn needed_to_start(rf: u8, cf: u8) -> usize {
    let overlap = usize::from(rf) + 1 - usize::from(cf);
    overlap.max(cf.into())
}

/// Returns the change that one update of the record made to the list; the error names the rule that
/// it broke.
pub(crate) fn read_change(
    before: &Membership,
    after: &Membership,
    leaving: &[Member],
) -> Result<Option<Situation>, &'static str> {
    let is_in = |list: &Membership, m: &Member| list.known.contains(m);
    let has_id = |list: &Membership, m: &Member| list.known.iter().any(|k| k.id == m.id);
    let new: Vec<Member> = after.known.iter().filter(|m| !is_in(before, m)).copied().collect();
    let gone: Vec<Member> = before.known.iter().filter(|m| !is_in(after, m)).copied().collect();
    if after.known.len() > usize::from(after.rf) {
        return Err("SCALE-SHORT-05: more entries than RF");
    }
    if gone.iter().any(|m| !after.retired.contains(&m.guid)) {
        return Err("SCALE-VALID-02: who left the list may come back");
    }
    let replaced = new.iter().filter(|m| has_id(before, m)).count();
    if replaced > 0 {
        let in_place = before.known.iter().zip(&after.known).all(|(a, b)| a.id == b.id);
        let alone = replaced == new.len() && replaced == gone.len() && replaced == 1;
        if !in_place || !alone || before.known.len() != after.known.len() {
            return Err("SCALE-SHORT-07: a replacement touched another entry");
        }
        if after.rf != before.rf {
            return Err("SCALE-KNOWN-05: a replacement changed RF");
        }
        return Ok(Some(Situation::Replaced));
    }
    if !new.is_empty() {
        if !gone.is_empty() || after.known[..before.known.len()] != before.known[..] {
            return Err("SCALE-KNOWN-05: an addition touched other entries");
        }
        if before.known.len() < usize::from(before.rf) {
            let fits = after.rf == before.rf && after.cf == before.cf;
            return match fits {
                true => Ok(Some(Situation::ListFilled)),
                false => Err("SCALE-KNOWN-05: RF changed though entries were missing"),
            };
        }
        if usize::from(after.rf) != usize::from(before.rf) + new.len() {
            return Err("SCALE-KNOWN-07: RF and the list were not raised together");
        }
        let as_it_was = after.cf == before.cf;
        use Situation::{RaisedWithCf, RaisedWithCfAsItWas};
        return Ok(Some(if as_it_was { RaisedWithCfAsItWas } else { RaisedWithCf }));
    }
    if !gone.is_empty() {
        if gone.iter().any(|m| !leaving.contains(m)) {
            return Err("SCALE-VALID-02: an entry left that nobody named");
        }
        if usize::from(after.rf) + gone.len() != usize::from(before.rf) {
            return Err("SCALE-VALID-02: RF and the list were not lowered together");
        }
        return Ok(Some(Situation::Trimmed));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use quoin_types::{ReplicaGuid, ReplicaId};

    use super::*;

    fn member(id: u128, guid: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(guid) }
    }

    fn three() -> Membership {
        let known = vec![member(1, 101), member(2, 102), member(3, 103)];
        Membership { version: 4, rf: 3, cf: 2, drf: 3, known, retired: vec![], formed: true }
    }

    #[test]
    fn a_change_that_breaks_a_rule_is_named_by_it() {
        let before = three();
        let mut after = Membership { retired: vec![ReplicaGuid(102)], ..before.clone() };
        after.known[1] = member(2, 202);
        assert_eq!(read_change(&before, &after, &[]), Ok(Some(Situation::Replaced)));
        after.known.swap(0, 2);
        assert!(read_change(&before, &after, &[]).is_err_and(|rule| rule.contains("SHORT-07")));
        let mut after = before.clone();
        after.known.push(member(4, 104));
        assert!(read_change(&before, &after, &[]).is_err_and(|rule| rule.contains("SHORT-05")));
        (after.rf, after.cf) = (4, 3);
        assert_eq!(read_change(&before, &after, &[]), Ok(Some(Situation::RaisedWithCf)));
        let mut after = Membership { retired: vec![ReplicaGuid(103)], rf: 2, ..before.clone() };
        after.known.pop();
        assert!(read_change(&before, &after, &[]).is_err_and(|rule| rule.contains("nobody named")));
        assert_eq!(read_change(&before, &after, &before.known), Ok(Some(Situation::Trimmed)));
    }

    #[test]
    fn io_starts_with_the_larger_of_both_numbers() {
        let factors = [(1, 1), (2, 2), (3, 2), (3, 1), (4, 3), (5, 3), (5, 1), (5, 5)];
        assert_eq!(factors.map(|(rf, cf)| needed_to_start(rf, cf)), [1, 2, 2, 3, 3, 3, 5, 5]);
    }
}
