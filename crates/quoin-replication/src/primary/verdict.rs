//! Step 3 of an open: the verdict on the answers so far (`docs/replication.md`, "Opening a
//! volume").

use super::{Link, Peer, Primary, WaitReason};
use quoin_types::entry::Rule;
use quoin_types::ids::Position;
use quoin_types::membership::Member;
use quoin_types::message::OpenAck;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Verdict on the answers so far.
pub(super) enum Verdict {
    Wait(WaitReason),
    /// The last View is joint, and its second rule may have come to rule alone: these have not
    /// answered.
    MayHaveChanged(Vec<Member>),
    /// Only flushed data is owed: more than a minority lost its cache.
    Unflushed,
    Go {
        authority: usize,
    },
    Behind(u64),
}

impl Primary {
    pub(super) fn all_answered(&self) -> bool {
        self.members.peers.iter().all(|p| p.link == Link::Answered)
    }

    /// Answers with quorum on, from replicas without damage.
    fn answers(&self) -> impl Iterator<Item = (usize, &OpenAck)> {
        self.members.peers.iter().enumerate().filter_map(|(i, p)| {
            let ack = p.ack.as_deref().filter(|_| p.link == Link::Answered)?;
            let quorum = ack.quorum || mutant::is("quorum-off-counted");
            (quorum && !ack.damaged).then_some((i, ack))
        })
    }

    /// V: the answers of known replicas.
    fn voters(&self) -> impl Iterator<Item = (usize, &OpenAck)> {
        self.answers().filter(|(i, _)| self.members.membership.contains(self.members[*i].member))
    }

    /// Connects the replicas that the second rule of a joint View knows and the record does not:
    /// only they may be able to report whether this rule came to rule.
    pub(super) fn open_joint_members(&mut self, now: Time) {
        let Some(authority) = self.authority() else { return };
        let ack = self.members[authority].ack.as_ref();
        let joint = ack.and_then(|a| a.last_view.as_ref()).and_then(|(_, view)| view.joint.clone());
        for member in joint.into_iter().flat_map(|rule| rule.known) {
            self.members.ask_witness(now, member);
        }
    }

    /// Step 4: the highest position in V.
    pub(super) fn authority(&self) -> Option<usize> {
        if mutant::is("view-left-out-of-the-position") {
            return self.voters().max_by_key(|(_, ack)| without_view(ack)).map(|(i, _)| i);
        }
        self.voters().max_by_key(|(_, ack)| ack.position).map(|(i, _)| i)
    }

    /// Step 3.
    pub(super) fn verdict(&self) -> Verdict {
        let record = self.members.membership.version;
        let newest =
            self.members.peers.iter().filter_map(|p| p.ack.as_ref()).map(|a| a.membership_version);
        let newest = newest.max().filter(|_| !mutant::is("control-plane-rollback-ignored"));
        if let Some(version) = newest.filter(|v| *v > record) {
            return Verdict::Behind(version);
        }
        let answered = self.voters().count();
        let mut needed = self.members.membership.open_quorum();
        if mutant::is("open-below-quorum") {
            needed = 1;
        }
        if answered < needed {
            let known = self.members.membership.known.len();
            return Verdict::Wait(WaitReason::Answers { answered, known, needed });
        }
        let Some(authority) = self.authority() else {
            return Verdict::Wait(WaitReason::Authority);
        };
        let ack = self.members[authority].ack.as_ref().expect("a voter has answered");
        let Some((_, view)) = &ack.last_view else {
            // No View in V: nothing was ever acknowledged.
            return Verdict::Go { authority };
        };
        if let Some(joint) = view.joint.as_ref().filter(|joint| self.may_have_ruled(joint)) {
            let silent = joint.known.iter().filter(|m| !self.has_answered(**m));
            return Verdict::MayHaveChanged(silent.copied().collect());
        }
        let owed: Vec<Member> =
            view.in_sync.iter().copied().filter(|m| self.members.membership.contains(*m)).collect();
        let there = |continuous: bool| {
            let is_owed = |index: usize| owed.contains(&self.members[index].member);
            let answers = self.answers().filter(|(i, _)| is_owed(*i));
            answers.filter(|(_, ack)| ack.continuous == continuous).count()
        };
        let cf = usize::from(self.members.membership.cf);
        if there(true) + cf > owed.len() || mutant::is("continuous-rule-left-out") {
            Verdict::Go { authority }
        } else if there(false) >= cf {
            Verdict::Unflushed
        } else {
            let answered = there(true) + there(false);
            Verdict::Wait(WaitReason::Caches { answered, in_sync: owed.len() })
        }
    }

    /// Returns true if the second rule of a joint View may have come to rule alone, though the
    /// record does not know it (for example because it was restored from an old copy). Its first
    /// View alone was then on the media of CF of its replicas before anything was answered by it,
    /// and any of those would report it by the version of the membership. Until then all entries
    /// were counted under both rules, so the record's rule suffices. If the record reached that
    /// version by another way (a forced change), the second rule never comes to rule.
    fn may_have_ruled(&self, joint: &Rule) -> bool {
        if joint.membership_version <= self.members.membership.version {
            return false;
        }
        let silent = joint.known.iter().filter(|m| !self.has_answered(**m)).count();
        silent >= usize::from(joint.cf) && !mutant::is("joint-not-judged")
    }

    /// Returns true if the replica answered and is undamaged; a damaged one may have forgotten.
    fn has_answered(&self, member: Member) -> bool {
        let answered = |p: &&Peer| p.member == member && p.link == Link::Answered;
        let ack = self.members.peers.iter().find(answered).and_then(|p| p.ack.as_ref());
        ack.is_some_and(|ack| !ack.damaged)
    }
}

/// The position without Views, for the mutant.
fn without_view(ack: &OpenAck) -> Position {
    let end = ack.position;
    match (&ack.last_view, ack.epoch_table.as_slice()) {
        (Some((lsn, _)), [.., before, own]) if *lsn == end.lsn && own.first == end.lsn => {
            Position { epoch: before.epoch, lsn: before.last }
        }
        _ => end,
    }
}
