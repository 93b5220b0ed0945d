//! Changes of the known list: what a target asks for, what the record becomes, and what the target
//! is answered.

use quoin_types::{Lsn, Member, Membership};

use super::breaks;
use super::seen::Target;
use crate::scaleup::{Situation, read_change};
use crate::world::PoolHost;
use crate::world::checkers::{Broken, Scene};

/// The record may have changed: by one rule of the document, and nothing else with it.
pub(super) fn check_change(
    scene: &mut Scene<'_>,
    before: &Membership,
    leaving: &[Member],
) -> Result<(), Broken> {
    let after = &scene.control.record.membership;
    if after.known == before.known {
        return Ok(());
    }
    let situation = match read_change(before, after, leaving) {
        Ok(situation) => situation,
        Err(rule) => return breaks(rule, format!("{before:?} became {after:?}")),
    };
    let there = |m: &&Member| {
        let holds = |p: &&PoolHost| p.member == **m && !p.gone;
        scene.pools.iter().filter(holds).any(|p| p.process.is_some())
    };
    let old = before.known.iter().filter(there).count();
    let five = situation == Some(Situation::Replaced) && (before.rf, before.cf, old) == (5, 3, 3);
    for situation in situation.into_iter().chain(five.then_some(Situation::ThreeOfFive)) {
        scene.situations.add(situation);
    }
    Ok(())
}

impl Target {
    /// A swap is sent for the first time: it says what the joint View says, and every newcomer has
    /// that View, and so all before it, on media; what was acknowledged meets the new rule.
    pub(super) fn check_asked(
        &mut self,
        scene: &mut Scene<'_>,
        next: &Membership,
    ) -> Result<(), Broken> {
        let new: Vec<Member> = next.known.iter().filter(|m| !self.known(**m)).copied().collect();
        let is_same = next.known == self.ruling.known;
        if is_same && (next.rf, next.cf) == (self.ruling.rf, self.ruling.cf) {
            return Ok(());
        }
        let joint = self.views.newest.as_ref().and_then(|(_, view)| view.joint.as_ref());
        let is_announced = joint.is_some_and(|rule| {
            rule.known == next.known && (rule.rf, rule.cf) == (next.rf, next.cf)
        });
        if !is_announced {
            let what = format!("{next:?} is asked for, and the second rule is {joint:?}");
            return breaks("SCALE-KNOWN-13", what);
        }
        let on_media = |m: &Member| {
            let peer = self.peers.all.iter().find(|peer| peer.member == *m);
            peer.is_some_and(|peer| peer.durable >= self.views.joint_at)
        };
        if let Some(late) = new.iter().find(|m| !on_media(m)) {
            let what = format!("{late:?} is to be known before it has the View that says so");
            return breaks("SCALE-KNOWN-08", what);
        }
        let acknowledged = self.acknowledged;
        let holders = next.known.iter().filter(|m| self.peers.holds(**m, acknowledged)).count();
        let cf = next.cf;
        if acknowledged > Lsn::ZERO && holders < usize::from(cf) {
            let what = format!("{acknowledged} is with {holders} where CF is to be {cf}");
            return breaks("SCALE-KNOWN-09", what);
        }
        scene.situations.add(Situation::SwapSent);
        if self.peers.all.iter().any(|peer| new.contains(&peer.member) && !peer.quorum) {
            scene.situations.add(Situation::TurnedOn);
        }
        if cf > self.ruling.cf && acknowledged > Lsn::ZERO {
            scene.situations.add(Situation::HeldByTheNewRule);
        }
        Ok(())
    }

    /// The control plane's answer to a swap has arrived.
    pub(super) fn note_swap_answer(
        &mut self,
        scene: &mut Scene<'_>,
        version: u64,
        record: &Membership,
    ) {
        self.is_dirty = true;
        let joint = self.views.newest.as_ref().and_then(|(_, view)| view.joint.as_ref());
        if version != self.ruling.version {
            return;
        }
        if record.version > version {
            self.ruling = record.clone();
            self.beside = None;
        }
        let refusals = &mut self.refusals;
        let Some(joint) = joint.filter(|rule| rule.known != record.known) else {
            let made = |m: &Member| record.known.contains(m);
            for member in &refusals.given_up {
                if made(member) {
                    scene.situations.add(Situation::GivenUpAndMade);
                }
            }
            for member in &refusals.not_taken {
                if made(member) {
                    scene.situations.add(Situation::RefusedAndMade);
                }
            }
            refusals.given_up.retain(|m| !made(m));
            refusals.not_taken.retain(|m| !made(m));
            return;
        };
        refusals.not_taken.extend(joint.known.iter().filter(|m| !record.known.contains(m)));
        scene.situations.add(Situation::Refused);
    }
}
