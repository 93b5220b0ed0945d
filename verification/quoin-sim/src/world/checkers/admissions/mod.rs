//! Admissions, standings and changes of the known list, seen from outside: each decision of a
//! target held against the plain reading of the rules in [`crate::scaleup`].

mod changes;
mod seats;
mod seen;

use quoin_replication::primary::{ReplicaStanding, ReplicaStatus};
use quoin_types::block::BlockError;
use quoin_types::entry::{Rule, SharedEntry};
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{EntryKind, Lsn, Member, SessionKey, View};

use self::seen::{Peer, Target};
use super::{Broken, Checker, Observation, Scene, broken};
use crate::scaleup::{Situation, needed_to_start};

/// Decisions of each target since its start.
#[derive(Default)]
pub(crate) struct Admissions {
    targets: Vec<Target>,
}

fn breaks(row: &str, what: impl std::fmt::Display) -> Result<(), Broken> {
    broken("Admission", format!("{row}: {what}"))
}

impl Admissions {
    fn of(&mut self, target: usize) -> &mut Target {
        if self.targets.len() <= target {
            self.targets.resize_with(target + 1, Target::default);
        }
        &mut self.targets[target]
    }
}

impl Checker for Admissions {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            Observation::TargetStarted { target } => *self.of(target) = Target::default(),
            Observation::RecordExecuted { before, leaving } => {
                return changes::check_change(scene, before, leaving);
            }
            Observation::Granted { target, membership } => {
                self.of(target).ruling = membership.clone();
            }
            Observation::SwapAsked { target, next, is_first: true } => {
                return self.of(target).check_asked(scene, next);
            }
            Observation::SwapAnswered { target, version, record } => {
                self.of(target).note_swap_answer(scene, version, record);
            }
            Observation::DesiredSent { target, desired } => self.of(target).set_desired(desired),
            Observation::Opening { target, epoch } => self.of(target).begin_epoch(epoch),
            Observation::Dialled { target, member, is_bulk: false, .. } => {
                return self.of(target).check_dialled(target, member);
            }
            Observation::SessionEnded { target, session } => {
                self.of(target).end_session(scene, session);
            }
            Observation::QuorumOffLost { target } => return check_io_continues(scene, target),
            Observation::EntrySent { target, entry, is_new: true } => {
                if let EntryKind::View(view) = &entry.kind {
                    return self.of(target).check_view(scene, entry, view);
                }
            }
            Observation::TargetSends { target, session, message } => {
                return self.of(target).check_sent(scene, session, message);
            }
            Observation::TargetReceives { target, member, session, is_foreign, message } => {
                let target = self.of(target);
                return target.check_received(scene, member, session, is_foreign, message);
            }
            Observation::BatchEnded { target } => {
                return self.of(target).check_seats(scene, target);
            }
            Observation::Waits { target } => self.of(target).note_waiting(scene, target),
            Observation::NotAdmitted { target, member, too_many } => {
                let target = self.of(target);
                target.refusals.reported.push((member, too_many));
                target.is_dirty = true;
            }
            Observation::ChangeGivenUp { target, newcomers } => {
                return self.of(target).note_given_up(scene, newcomers);
            }
            Observation::Starts { target } => return self.of(target).check_start(scene),
            Observation::Answers { target, is_good: true, .. } => {
                return self.of(target).check_connected(scene, target);
            }
            Observation::Acknowledged { target, lsn } => {
                return self.of(target).check_held(scene, lsn);
            }
            Observation::Failed { target, error: BlockError::NoQuorum, .. } => {
                return self.of(target).check_no_quorum(scene, target);
            }
            _ => {}
        }
        Ok(())
    }
}

/// The session with one whose quorum is off is lost: IO goes on.
fn check_io_continues(scene: &mut Scene<'_>, target: usize) -> Result<(), Broken> {
    if scene.process(target).is_none_or(|process| process.serving.is_none()) {
        let what = format!("target {target} stops as a quorum-off replica goes");
        return breaks("SCALE-QUORUM-08", what);
    }
    scene.situations.add(Situation::QuorumOffLost);
    Ok(())
}

impl Admissions {
    /// Returns true if IO goes on though this session ends, as its replica's quorum is off.
    pub fn is_quorum_off(&self, target: usize, session: SessionKey) -> bool {
        self.targets.get(target).is_some_and(|target| {
            target.peers.all.iter().any(|peer| peer.session == session && peer.is_off())
        })
    }
}

impl Target {
    /// A session of this target is over, by whichever end.
    fn end_session(&mut self, scene: &mut Scene<'_>, session: SessionKey) {
        let peers = &mut self.peers.all;
        let Some(at) = peers.iter().position(|peer| peer.session == session) else { return };
        peers.swap_remove(at);
        self.is_dirty = true;
        self.is_unsettled = true;
        let short = self.rules().any(|rule| self.peers.connected(rule) < usize::from(rule.cf));
        if short && !std::mem::replace(&mut self.below_cf, short) {
            scene.situations.add(Situation::StoppedBelowCf);
        }
    }

    /// A replica is dialled: it is known, or desired, or a joint View may have made it known.
    fn check_dialled(&mut self, target: usize, member: Member) -> Result<(), Broken> {
        self.is_dirty = true;
        let is_expected = self.known(member)
            || self.desired.newcomer(member).is_some()
            || self.is_joint(member)
            || self.peers.named.contains(&member)
            || self.beside.as_ref().is_some_and(|beside| beside.contains(&member));
        if !is_expected {
            return breaks("SCALE-LIST-01", format!("target {target} dials {member:?}"));
        }
        Ok(())
    }

    /// A message of a replica has arrived.
    fn check_received(
        &mut self,
        scene: &mut Scene<'_>,
        member: Member,
        session: SessionKey,
        is_foreign: bool,
        message: &FromReplica,
    ) -> Result<(), Broken> {
        match message {
            FromReplica::OpenAck(ack) => {
                self.is_dirty = true;
                let known = self.known(member);
                self.peers.answered(session, member, known, ack);
                if is_foreign {
                    let what = format!("{member:?} of another volume has answered");
                    return breaks("SCALE-ADMIT-07", what);
                }
                if known && self.views.newest.is_some() {
                    scene.situations.add(Situation::Known);
                }
            }
            FromReplica::Applied { applied, durable, .. } => {
                let Some(peer) = self.peers.of(session) else { return Ok(()) };
                peer.durable = peer.durable.max(*durable);
                let guid = peer.member.guid;
                self.peers.note_applied(guid, *applied, false);
            }
            FromReplica::IncrementDone { position, .. } => {
                let Some(peer) = self.peers.of(session) else { return Ok(()) };
                peer.durable = peer.durable.max(position.lsn);
                peer.next = Some(position.lsn.next());
                let guid = peer.member.guid;
                self.peers.note_applied(guid, position.lsn, true);
            }
            FromReplica::Truncated { .. } => {
                if let Some(peer) = self.peers.of(session) {
                    peer.is_live = true;
                }
            }
            FromReplica::Refuse { .. } if is_foreign => scene.situations.add(Situation::Foreign),
            _ => {}
        }
        Ok(())
    }

    /// A message to a replica is sent.
    fn check_sent(
        &mut self,
        scene: &mut Scene<'_>,
        session: SessionKey,
        message: &ToReplica,
    ) -> Result<(), Broken> {
        match message {
            ToReplica::Append { entries, .. } => {
                let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
                    return Ok(());
                };
                let Some(peer) = self.peers.of(session) else { return Ok(()) };
                let expected = peer.next.unwrap_or(first.lsn);
                peer.next = Some(expected.max(last.lsn.next()));
                peer.is_fed = true;
                if !peer.is_off() {
                    return Ok(());
                }
                if first.lsn > expected {
                    let member = peer.member;
                    let what = format!("{member:?} is sent {} and lacks {expected}", first.lsn);
                    return breaks("SCALE-QUORUM-09", what);
                }
                if entries.iter().any(|entry| entry.kind == EntryKind::Write) {
                    scene.situations.add(Situation::QuorumOffFedOn);
                }
            }
            ToReplica::Truncate { keep, .. } => {
                let Some(peer) = self.peers.of(session) else { return Ok(()) };
                peer.next = Some(keep.next());
                let guid = peer.member.guid;
                self.peers.note_applied(guid, *keep, true);
            }
            ToReplica::Read { .. } => {
                let Some(peer) = self.peers.of(session) else { return Ok(()) };
                if peer.is_off() {
                    let what = format!("{:?} is asked to read", peer.member);
                    return breaks("SCALE-QUORUM-03", what);
                }
                if self.peers.all.iter().any(Peer::is_fed_quorum_off) {
                    scene.situations.add(Situation::ReadBesideQuorumOff);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A View that was not sent before: it is by the list of the record, counts no other, and
    /// begins no change that what is desired has no room for.
    fn check_view(
        &mut self,
        scene: &mut Scene<'_>,
        entry: &SharedEntry,
        view: &View,
    ) -> Result<(), Broken> {
        let lsn = entry.lsn;
        // One of an older epoch, that a replica lacks, was checked then.
        if self.epoch != entry.epoch {
            return Ok(());
        }
        let (rule, ruling) = (&view.rule, &self.ruling);
        let (room, drf) = (self.desired.drf.max(ruling.rf), self.desired.drf);
        if (rule.rf, rule.cf) != (ruling.rf, ruling.cf) || rule.known != ruling.known {
            let what = format!("the View at {lsn} is by {rule:?}, the record has {ruling:?}");
            return breaks("SCALE-KNOWN-14", what);
        }
        let is_known = |m: &Member| {
            rule.known.contains(m) || view.joint.as_ref().is_some_and(|r| r.known.contains(m))
        };
        if let Some(unlisted) = view.in_sync.iter().find(|m| !is_known(m)) {
            let what = format!("the View at {lsn} counts {unlisted:?}, which is not known");
            return breaks("SCALE-LIST-06", what);
        }
        let newest = self.views.newest.as_ref();
        let before = newest.and_then(|(_, view)| view.joint.as_ref());
        // A peer that is let in because of a second rule is checked in the next batch.
        let turns = before.is_some() != view.joint.is_some();
        let begins = view.joint.as_ref().filter(|joint| Some(*joint) != before);
        if let Some(joint) = begins
            && joint.rf > room
        {
            let what = format!("RF is to be {} where {drf} are desired", joint.rf);
            return breaks("SCALE-KNOWN-06", what);
        }
        let version = rule.membership_version;
        let moved_on = newest.is_some_and(|(_, old)| {
            old.joint.is_some() && old.rule.membership_version < version && view.joint.is_none()
        });
        if begins.is_some() {
            self.views.joint_at = lsn;
        }
        self.is_unsettled |= turns;
        self.is_dirty |= turns;
        let peers = &mut self.peers.all;
        let beside = peers.iter().any(|peer| !is_known(&peer.member));
        let fed = peers.iter().any(|peer| !is_known(&peer.member) && peer.is_fed);
        for peer in peers {
            if view.in_sync.contains(&peer.member) {
                peer.listed.get_or_insert(lsn);
            }
        }
        self.views.add(lsn, view);
        for (yes, situation) in [
            (beside, Situation::UnlistedBesideTheList),
            (fed, Situation::UnlistedFed),
            (moved_on, Situation::RuledOnceRecorded),
        ] {
            if yes {
                scene.situations.add(situation);
            }
        }
        Ok(())
    }

    /// A write is acknowledged: CF of the known replicas have reported that they have it, under
    /// each rule, and no other was needed.
    fn check_held(&mut self, scene: &mut Scene<'_>, lsn: Lsn) -> Result<(), Broken> {
        self.acknowledged = self.acknowledged.max(lsn);
        let Some((_, view)) = &self.views.newest else { return Ok(()) };
        let is_joint = view.joint.is_some();
        let mut counts = self.rules().map(|rule| {
            let holds = |m: &&Member| view.in_sync.contains(m) && self.peers.holds(**m, lsn);
            (rule.known.iter().filter(holds).count(), usize::from(rule.cf))
        });
        if let Some((holders, cf)) = counts.find(|(holders, cf)| holders < cf) {
            let row = if is_joint { "SCALE-KNOWN-12" } else { "SCALE-QUORUM-08" };
            let what = format!("{lsn} is acknowledged with {holders} known replicas, CF is {cf}");
            return breaks(row, what);
        }
        if self.peers.all.iter().any(Peer::is_fed_quorum_off) {
            scene.situations.add(Situation::WriteBesideQuorumOff);
        }
        if is_joint {
            scene.situations.add(Situation::WriteWhileJoint);
        }
        Ok(())
    }

    /// Any good answer: CF of the known replicas are connected, under each rule.
    fn check_connected(&mut self, scene: &mut Scene<'_>, target: usize) -> Result<(), Broken> {
        let count = |rule: &Rule| (self.peers.connected(rule), usize::from(rule.cf));
        let short = self.rules().map(count).find(|(there, cf)| there < cf);
        if let Some((there, cf)) = short {
            let what = format!("target {target} answers with {there} known ones, CF is {cf}");
            return breaks("SCALE-IO-03", what);
        }
        if std::mem::take(&mut self.below_cf) {
            scene.situations.add(Situation::WentOnAtCf);
        }
        Ok(())
    }

    /// A request failed for want of a quorum: CF known ones did not hold all that was committed.
    fn check_no_quorum(&self, scene: &mut Scene<'_>, target: usize) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        let (commit, _) = process.target.reach();
        if process.serving.is_none() || self.views.newest.is_none() {
            return Ok(());
        }
        // A member that was taken back counts once the View that says so is active.
        let status = process.target.status();
        let counted = |m: Member| {
            let counts = |r: &&ReplicaStatus| r.standing == ReplicaStanding::InSync;
            status.replicas.iter().filter(counts).any(|r| r.member == m)
        };
        // Every View that is not over has a say.
        let active = process.target.active_view().map_or(Lsn::ZERO, |(lsn, _)| lsn);
        let mut rules = self.views.counted_by.iter().filter(|(lsn, _)| *lsn >= active);
        let enough = rules.all(|(_, rule)| {
            let live = |m: &&Member| self.peers.all.iter().any(|p| p.member == **m && p.is_live);
            let holds = |m: &&Member| live(m) && counted(**m) && self.peers.holds(**m, commit);
            let holders = rule.known.iter().filter(holds).count();
            holders >= usize::from(rule.cf)
        });
        if enough {
            let what = format!("target {target} fails IO, and CF known ones hold {commit}");
            return breaks("SCALE-QUORUM-10", what);
        }
        scene.situations.add(Situation::NoQuorumReported);
        Ok(())
    }

    /// IO starts: as many known replicas have answered as the factors ask for.
    fn check_start(&mut self, scene: &mut Scene<'_>) -> Result<(), Broken> {
        self.is_dirty = true;
        let (rf, cf) = (self.ruling.rf, self.ruling.cf);
        let (there, needed) = (self.peers.voters.len(), needed_to_start(rf, cf));
        if there < needed {
            let what = format!("RF {rf}, CF {cf}: IO starts with {there} known replicas");
            return breaks("SCALE-IO-01", what);
        }
        if there == needed && there < self.ruling.known.len() {
            scene.situations.add(Situation::StartedWithJustEnough);
        }
        Ok(())
    }

    /// An open waits: would it find enough, if those counted that are not known (any more)?
    fn note_waiting(&self, scene: &mut Scene<'_>, target: usize) {
        let Some(process) = scene.process(target) else { return };
        let needed = needed_to_start(self.ruling.rf, self.ruling.cf);
        let unlisted = scene
            .pools
            .iter()
            .filter(|p| !p.is_spare() && !p.gone && p.process.is_some() && !self.known(p.member));
        let there = self.peers.voters.len();
        let three_of_five = (self.ruling.rf, self.ruling.cf) == (5, 3) && there > 0;
        if process.serving.is_none() && there < needed && there + unlisted.count() >= needed {
            scene.situations.add(Situation::UnlistedWereEnough);
            if three_of_five {
                scene.situations.add(Situation::SixthMadeThreeOfFive);
            }
        }
    }

    fn note_given_up(&mut self, scene: &mut Scene<'_>, newcomers: &[Member]) -> Result<(), Broken> {
        self.is_dirty = true;
        if newcomers.iter().any(|m| self.known(*m)) {
            let what = format!("{newcomers:?} was given up and is known");
            return breaks("SCALE-KNOWN-10", what);
        }
        self.refusals.given_up.extend(newcomers);
        scene.situations.add(Situation::GivenUp);
        Ok(())
    }
}
