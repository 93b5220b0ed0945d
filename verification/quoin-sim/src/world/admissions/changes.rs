//! Changes of the known list: what a target asks for, what the record becomes, and what the target
//! hears of that.

use super::*;

impl World {
    /// A swap is sent for the first time: it says what the joint View says, and every newcomer has
    /// that View, and so all before it, on media; what was acknowledged meets the new rule.
    pub(crate) fn check_asked(&mut self, target: usize, next: &Membership) {
        let Some(admissions) = self.admissions(target) else { return };
        let new: Vec<Member> =
            next.known.iter().filter(|m| !admissions.known(**m)).copied().collect();
        let same = next.known == admissions.ruling.known;
        if same && (next.rf, next.cf) == (admissions.ruling.rf, admissions.ruling.cf) {
            return;
        }
        let joint = admissions.newest.as_ref().and_then(|(_, view)| view.joint.as_ref());
        let told = joint.is_some_and(|rule| {
            rule.known == next.known && (rule.rf, rule.cf) == (next.rf, next.cf)
        });
        if !told {
            let what = format!("{next:?} is asked for, and the second rule is {joint:?}");
            return self.breaks("SCALE-KNOWN-13", what);
        }
        let on_media = |m: &Member| {
            let peer = admissions.peers.iter().find(|peer| peer.member == *m);
            peer.is_some_and(|peer| peer.durable >= admissions.joint_at)
        };
        if let Some(late) = new.iter().find(|m| !on_media(m)) {
            let what = format!("{late:?} is to be known before it has the View that says so");
            return self.breaks("SCALE-KNOWN-08", what);
        }
        let holders =
            next.known.iter().filter(|m| admissions.holds(**m, admissions.acknowledged)).count();
        let (acknowledged, cf) = (admissions.acknowledged, next.cf);
        if acknowledged > Lsn::ZERO && holders < usize::from(cf) {
            let what = format!("{acknowledged} is with {holders} where CF is to be {cf}");
            return self.breaks("SCALE-KNOWN-09", what);
        }
        let was_off = admissions.peers.iter().any(|h| new.contains(&h.member) && !h.quorum);
        let rises = cf > admissions.ruling.cf && acknowledged > Lsn::ZERO;
        self.situations().add(Situation::SwapSent);
        if was_off {
            self.situations().add(Situation::TurnedOn);
        }
        if rises {
            self.situations().add(Situation::HeldByTheNewRule);
        }
    }

    /// The control plane's answer to a swap has arrived.
    pub(crate) fn note_swap_answer(&mut self, target: usize, version: u64, record: &Membership) {
        let Some(admissions) = self.admissions(target) else { return };
        admissions.is_dirty = true;
        let joint = admissions.newest.as_ref().and_then(|(_, view)| view.joint.clone());
        if version != admissions.ruling.version {
            return;
        }
        if record.version > version {
            admissions.ruling = record.clone();
            admissions.beside = None;
        }
        let Some(joint) = joint.filter(|rule| rule.known != record.known) else {
            let made = |m: &Member| record.known.contains(m);
            let again = admissions.given_up.iter().filter(|m| made(m)).count();
            let late = admissions.not_taken.iter().filter(|m| made(m)).count();
            admissions.given_up.retain(|m| !made(m));
            admissions.not_taken.retain(|m| !made(m));
            for _ in 0..again {
                self.situations().add(Situation::GivenUpAndMade);
            }
            for _ in 0..late {
                self.situations().add(Situation::RefusedAndMade);
            }
            return;
        };
        let new = joint.known.iter().filter(|m| !record.known.contains(m));
        admissions.not_taken.extend(new);
        self.situations().add(Situation::Refused);
    }

    /// The record may have changed: by one rule of the document, and nothing else with it.
    pub(crate) fn check_change(&mut self, before: &Membership, leaving: &[Member]) {
        let after = &self.control.record.membership;
        if after.known == before.known {
            return;
        }
        match read_change(before, after, leaving) {
            Ok(situation) => {
                let there = |m: &&Member| {
                    let holds = |p: &&crate::world::PoolHost| p.member == **m && !p.gone;
                    self.pools.iter().filter(holds).any(|p| p.process.is_some())
                };
                let old = before.known.iter().filter(there).count();
                let five = situation == Some(Situation::Replaced)
                    && (before.rf, before.cf, old) == (5, 3, 3);
                let seen = situation.into_iter().chain(five.then_some(Situation::ThreeOfFive));
                for situation in seen {
                    self.stats.situations.add(situation);
                }
            }
            Err(rule) => {
                let what = format!("{before:?} became {after:?}");
                self.breaks(rule, what);
            }
        }
    }
}
