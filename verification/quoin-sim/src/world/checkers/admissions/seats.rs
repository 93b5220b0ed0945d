//! Seats as they are, beside those that should be.

use quoin_replication::primary::{PrimaryStatus, ReplicaStanding};
use quoin_types::Member;

use super::breaks;
use super::seen::Target;
use crate::scaleup::{Caller, Outcome, Seat, Situation, Situations, read};
use crate::world::checkers::{Broken, Scene};

/// The plain reading's decision on all that want a seat.
struct Decided {
    seats: Vec<Seat>,
    /// Peers that were refused, and whether there were too many.
    refused: Vec<(Member, bool)>,
}

impl Target {
    /// After a batch: who has a seat is who should have one.
    pub(super) fn check_seats(
        &mut self,
        scene: &mut Scene<'_>,
        target: usize,
    ) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        if !self.is_dirty {
            return Ok(());
        }
        let is_unsettled = std::mem::take(&mut self.is_unsettled);
        if process.serving.is_none() {
            return Ok(());
        }
        let status = process.target.status();
        if !status.serving || status.membership.version != self.ruling.version {
            return Ok(());
        }
        if is_unsettled {
            self.beside = Some(self.beside_the_list(&status));
            return Ok(());
        }
        self.is_dirty = false;
        self.evaluate(&status, scene.situations)
            .or_else(|(row, what)| breaks(row, format!("target {target}: {what}")))
    }

    fn beside_the_list(&self, status: &PrimaryStatus) -> Vec<Member> {
        status.replicas.iter().map(|r| r.member).filter(|m| !self.known(*m)).collect()
    }

    fn evaluate(
        &mut self,
        status: &PrimaryStatus,
        situations: &mut Situations,
    ) -> Result<(), (&'static str, String)> {
        let sits = |m: &Member| status.replicas.iter().any(|r| r.member == *m);
        if let Some(lost) = self.ruling.known.iter().find(|m| !sits(m)) {
            return Err(("SCALE-ADMIT-08", format!("{lost:?} is known and not let in")));
        }
        let counted = status.replicas.iter().filter(|r| r.standing == ReplicaStanding::InSync);
        let mut unlisted = counted.filter(|r| !self.known(r.member) && !self.is_joint(r.member));
        if let Some(unlisted) = unlisted.next() {
            return Err(("SCALE-LIST-08", format!("{unlisted:?} is counted")));
        }
        let beside = self.beside_the_list(status);
        let before = self.beside.replace(beside.clone());
        // In the first check of an epoch it is not known here who of several came first.
        let several = self.desired.newcomers.len() > 1;
        let Some(before) = before.or((!several).then(Vec::new)) else { return Ok(()) };
        let Decided { seats, refused } = self.decide(&before, situations);
        self.check_decided(&beside, &before, &seats)?;
        for (member, too_many) in &refused {
            if self.refusals.refused.contains(member) {
                continue;
            }
            if !self.refusals.reported.contains(&(*member, *too_many)) {
                let what = format!("nobody is told that {member:?} is turned away");
                return Err(("SCALE-ADMIT-05", what));
            }
            if *too_many {
                situations.add(Situation::TooManyReported);
            }
        }
        self.refusals.refused = refused.iter().map(|(member, _)| *member).collect();
        self.refusals.reported.retain(|(member, _)| self.refusals.refused.contains(member));
        Ok(())
    }

    /// Replicas that are not known and want a seat; those that had one come first, as no replica is
    /// replaced by one of its kind.
    fn callers(&self, before: &[Member]) -> Vec<Caller> {
        let unknown = self.desired.newcomers.iter().filter(|n| !self.known(n.member));
        let caller = |newcomer: &quoin_types::Newcomer| {
            let peer = self.peers.all.iter().find(|peer| peer.member == newcomer.member);
            Caller {
                member: newcomer.member,
                quorum: peer.is_some_and(|peer| peer.quorum),
                membership_version: peer.map_or(0, |peer| peer.membership_version),
                beside: newcomer.beside,
            }
        };
        let mut callers: Vec<Caller> = unknown.map(caller).collect();
        callers.sort_by_key(|caller| !before.contains(&caller.member));
        callers
    }

    fn decide(&mut self, before: &[Member], seen: &mut Situations) -> Decided {
        let listed = self.peers.all.iter().filter(|peer| self.known(peer.member));
        let mut seats: Vec<Seat> =
            listed.map(|peer| Seat { member: peer.member, quorum: true }).collect();
        let moving: Vec<Member> =
            self.desired.newcomers.iter().filter(|n| n.beside).map(|n| n.member).collect();
        let mut refused = Vec::new();
        for caller in &self.callers(before) {
            let (outcome, situations) =
                read(&self.ruling, self.desired.drf, &seats, &moving, caller);
            let was = before.contains(&caller.member);
            let is_new = !was && !self.refusals.refused.contains(&caller.member);
            let arises = match outcome {
                Outcome::LetIn(goes) => {
                    if let Some(goes) = goes {
                        seats.retain(|seat| seat.member != goes);
                        refused.push((goes, true));
                    }
                    seats.push(Seat { member: caller.member, quorum: caller.quorum });
                    // Its quorum is known once it has answered.
                    let turned = caller.quorum && !self.peers.seen_on.contains(&caller.member);
                    if turned {
                        self.peers.seen_on.push(caller.member);
                    }
                    if turned && situations == [Situation::Addition] {
                        seen.add(Situation::AdditionWithQuorum);
                    }
                    is_new || turned || goes.is_some()
                }
                Outcome::Refused { too_many } => {
                    refused.push((caller.member, too_many));
                    if was {
                        seen.add(Situation::LeftOut);
                    }
                    was || is_new
                }
            };
            for situation in situations.into_iter().filter(|_| arises) {
                seen.add(situation);
            }
        }
        Decided { seats, refused }
    }

    fn check_decided(
        &self,
        beside: &[Member],
        before: &[Member],
        seats: &[Seat],
    ) -> Result<(), (&'static str, String)> {
        let excused = |m: &Member| self.is_joint(*m);
        let has_seat = |m: &Member| seats.iter().any(|seat| seat.member == *m);
        if let Some(m) = beside.iter().find(|m| !has_seat(m) && !excused(m)) {
            let row = match before.contains(m) {
                true => "SCALE-KNOWN-06, SCALE-ADMIT-03",
                false => "SCALE-ADMIT-02, SCALE-ADMIT-06, SCALE-ADMIT-15",
            };
            let what = format!("{m:?} is let in, among {seats:?} by {:?}", self.ruling);
            return Err((row, what));
        }
        let out = |m: &Member| !beside.contains(m) && !self.known(*m);
        if let Some(seat) = seats.iter().find(|seat| out(&seat.member)) {
            let row = "SCALE-ADMIT-09, SCALE-ADMIT-11, SCALE-ADMIT-12, SCALE-ADMIT-14";
            let what = format!("{seat:?} is not let in, among {seats:?} by {:?}", self.ruling);
            return Err((row, what));
        }
        Ok(())
    }
}
