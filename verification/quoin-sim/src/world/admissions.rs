//! Who connects, who counts and how the known list changes, seen from outside: each decision of a
//! target held against the plain reading of the rules in [`crate::scaleup`].

mod changes;

use std::collections::VecDeque;

use quoin_replication::primary::{PrimaryStatus, ReplicaStanding, ReplicaStatus};
use quoin_types::entry::{Entry, Rule};
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{
    Desired, EntryKind, Epoch, Lsn, Member, Membership, ReplicaGuid, SessionKey, View,
};

use super::World;
use crate::scaleup::{
    Caller, Outcome, Seat, Situation, Situations, needed_to_start, read, read_change,
};

/// Rules that a target's requests may be counted by at once, at most.
const RULES_MAX: usize = 16;

/// A replica that has answered a target's Open, as long as the session lasts.
#[derive(Debug)]
struct Peer {
    session: SessionKey,
    member: Member,
    quorum: bool,
    membership_version: u64,
    durable: Lsn,
    /// The next entry that it must be sent; `None` before it is known where it stands.
    next: Option<Lsn>,
    /// It has said where it stands.
    is_live: bool,
    /// Entries were sent to it.
    is_fed: bool,
    /// The first View of this session that counts it.
    listed: Option<Lsn>,
}

impl Peer {
    /// Its quorum was off, and no View counts it.
    fn is_off(&self) -> bool {
        !self.quorum && self.listed.is_none()
    }
}

/// What the world knows of one life of a target.
#[derive(Default, Debug)]
pub(crate) struct Admissions {
    /// What was desired as it was told last.
    desired: Desired,
    /// The membership that answers of the control plane gave it.
    pub ruling: Membership,
    peers: Vec<Peer>,
    /// What each replica has said that it applied, in this epoch.
    applied_by: Vec<(ReplicaGuid, Lsn)>,
    /// Known replicas that have answered this epoch's open, quorum on and whole.
    voters: Vec<Member>,
    /// Named by joint Views that the open brought.
    named: Vec<Member>,
    /// The newest View that was sent, and where the first under its second rule is.
    newest: Option<(Lsn, View)>,
    joint_at: Lsn,
    /// Rules of Views that were sent in this epoch, the latest ones.
    counted_by: VecDeque<(Lsn, Rule)>,
    epoch: Epoch,
    /// The highest LSN that a write was acknowledged at.
    acknowledged: Lsn,
    /// Who was beside the known ones when it was last looked, unless that was in another epoch.
    beside: Option<Vec<Member>>,
    refused: Vec<Member>,
    /// Whose quorum was seen to be on.
    seen_on: Vec<Member>,
    /// Refusals that were told, and whether of too many.
    reported_refusals: Vec<(Member, bool)>,
    given_up: Vec<Member>,
    not_taken: Vec<Member>,
    below_cf: bool,
    is_dirty: bool,
    /// A session ended in this batch: what was decided may be of before.
    is_unsettled: bool,
}

impl Admissions {
    fn known(&self, member: Member) -> bool {
        self.ruling.known.contains(&member)
    }

    fn peer(&mut self, session: SessionKey) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|peer| peer.session == session)
    }

    fn note_applied(&mut self, guid: ReplicaGuid, lsn: Lsn, again: bool) {
        match self.applied_by.iter_mut().find(|(of, _)| *of == guid) {
            Some((_, has)) => *has = if again { lsn } else { lsn.max(*has) },
            None => self.applied_by.push((guid, lsn)),
        }
    }

    fn holds(&self, member: Member, lsn: Lsn) -> bool {
        self.applied_by.iter().any(|(of, has)| *of == member.guid && *has >= lsn)
    }

    /// The rules that its newest View counts by.
    fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.newest.iter().flat_map(|(_, view)| std::iter::once(&view.rule).chain(&view.joint))
    }

    /// A second rule knows it.
    fn is_joint(&self, member: Member) -> bool {
        let joint = self.newest.as_ref().and_then(|(_, view)| view.joint.as_ref());
        joint.is_some_and(|rule| rule.known.contains(&member))
    }

    fn connected(&self, rule: &Rule) -> usize {
        self.peers.iter().filter(|peer| rule.known.contains(&peer.member)).count()
    }

    pub fn set_desired(&mut self, desired: &Desired) {
        if self.desired != *desired {
            self.desired = desired.clone();
            self.is_dirty = true;
        }
    }

    /// What a replica said has arrived.
    pub fn on_message(
        &mut self,
        member: Member,
        session: SessionKey,
        foreign: bool,
        message: &FromReplica,
        seen: &mut Situations,
    ) -> Broken {
        match message {
            FromReplica::OpenAck(ack) => {
                self.is_dirty = true;
                let known = self.known(member);
                if known && ack.quorum && !ack.damaged && !self.voters.contains(&member) {
                    self.voters.push(member);
                }
                if let Some((_, View { joint: Some(rule), .. })) = &ack.last_view {
                    self.named.extend(&rule.known);
                }
                self.peers.retain(|peer| peer.member != member);
                self.peers.push(Peer {
                    session,
                    member,
                    quorum: ack.quorum,
                    membership_version: ack.membership_version,
                    durable: Lsn::ZERO,
                    next: None,
                    is_live: false,
                    is_fed: false,
                    listed: None,
                });
                if foreign {
                    let what = format!("{member:?} of another volume has answered");
                    return Some(("SCALE-ADMIT-07", what));
                }
                if known && self.newest.is_some() {
                    seen.add(Situation::Known);
                }
            }
            FromReplica::Applied { applied, durable, .. } => {
                let peer = self.peer(session)?;
                peer.durable = peer.durable.max(*durable);
                let guid = peer.member.guid;
                self.note_applied(guid, *applied, false);
            }
            FromReplica::IncrementDone { position, .. } => {
                let peer = self.peer(session)?;
                peer.durable = peer.durable.max(position.lsn);
                peer.next = Some(position.lsn.next());
                let guid = peer.member.guid;
                self.note_applied(guid, position.lsn, true);
            }
            FromReplica::Truncated { .. } => self.peer(session)?.is_live = true,
            FromReplica::Refuse { .. } if foreign => seen.add(Situation::Foreign),
            _ => {}
        }
        None
    }

    /// A new epoch: sessions, Views and what was heard are the old one's.
    pub fn opening(&mut self, epoch: Epoch) {
        let old = std::mem::take(self);
        *self = Self {
            desired: old.desired,
            ruling: old.ruling,
            refused: old.refused,
            reported_refusals: old.reported_refusals,
            given_up: old.given_up,
            not_taken: old.not_taken,
            is_dirty: true,
            epoch,
            ..Self::default()
        };
    }
}

impl World {
    fn admissions(&mut self, target: usize) -> Option<&mut Admissions> {
        self.targets[target].process.as_mut().map(|process| &mut process.admissions)
    }

    fn situations(&mut self) -> &mut Situations {
        &mut self.stats.situations
    }

    pub(crate) fn breaks(&mut self, row: &str, what: String) {
        self.violate("Admission", format!("{row}: {what}"));
    }

    /// A session of this target is over, by whichever end.
    pub(crate) fn end_admission(&mut self, target: usize, session: SessionKey) {
        let Some(admissions) = self.admissions(target) else { return };
        let Some(at) = admissions.peers.iter().position(|peer| peer.session == session) else {
            return;
        };
        admissions.peers.swap_remove(at);
        admissions.is_dirty = true;
        admissions.is_unsettled = true;
        let short =
            admissions.rules().any(|rule| admissions.connected(rule) < usize::from(rule.cf));
        if short && !std::mem::replace(&mut admissions.below_cf, short) {
            self.situations().add(Situation::StoppedBelowCf);
        }
    }

    /// A replica is dialled: it is known, or desired, or a joint View may have made it known.
    pub(crate) fn check_dialled(&mut self, target: usize, member: Member) {
        let Some(admissions) = self.admissions(target) else { return };
        admissions.is_dirty = true;
        let expected = admissions.known(member)
            || admissions.desired.newcomer(member).is_some()
            || admissions.is_joint(member)
            || admissions.named.contains(&member)
            || admissions.beside.as_ref().is_some_and(|beside| beside.contains(&member));
        if !expected {
            self.breaks("SCALE-LIST-01", format!("target {target} dials {member:?}"));
        }
    }

    /// What a target says to a replica.
    pub(crate) fn note_sent(&mut self, target: usize, session: SessionKey, message: &ToReplica) {
        let Some(admissions) = self.admissions(target) else { return };
        match message {
            ToReplica::Append { entries, .. } => {
                let (Some(first), Some(last)) = (entries.first(), entries.last()) else { return };
                let Some(peer) = admissions.peer(session) else { return };
                let expected = peer.next.unwrap_or(first.lsn);
                peer.next = Some(expected.max(last.lsn.next()));
                peer.is_fed = true;
                if !peer.is_off() {
                    return;
                }
                let what = format!("{:?} is sent {} and lacks {expected}", peer.member, first.lsn);
                if first.lsn > expected {
                    return self.breaks("SCALE-QUORUM-09", what);
                }
                if entries.iter().any(|entry| entry.kind == EntryKind::Write) {
                    self.situations().add(Situation::QuorumOffFedOn);
                }
            }
            ToReplica::Truncate { keep, .. } => {
                let Some(peer) = admissions.peer(session) else { return };
                peer.next = Some(keep.next());
                let guid = peer.member.guid;
                admissions.note_applied(guid, *keep, true);
            }
            ToReplica::Read { .. } => {
                let Some(peer) = admissions.peer(session) else { return };
                if peer.is_off() {
                    let what = format!("{:?} is asked to read", peer.member);
                    return self.breaks("SCALE-QUORUM-03", what);
                }
                if admissions.peers.iter().any(|peer| peer.is_off() && peer.is_fed) {
                    self.situations().add(Situation::ReadBesideQuorumOff);
                }
            }
            _ => {}
        }
    }

    /// A View that was not sent before: it is by the list of the record, counts nobody else, and
    /// begins no change that what is desired has no room for.
    pub(crate) fn check_lists(&mut self, target: usize, entry: &Entry, view: &View) {
        let lsn = entry.lsn;
        // One of an older epoch, that somebody lacks, was looked at then.
        let Some(admissions) =
            self.admissions(target).filter(|admissions| admissions.epoch == entry.epoch)
        else {
            return;
        };
        let (rule, ruling) = (&view.rule, &admissions.ruling);
        let (room, drf) = (admissions.desired.drf.max(ruling.rf), admissions.desired.drf);
        if (rule.rf, rule.cf) != (ruling.rf, ruling.cf) || rule.known != ruling.known {
            let what = format!("the View at {lsn} is by {rule:?}, the record has {ruling:?}");
            return self.breaks("SCALE-KNOWN-14", what);
        }
        let is_known = |m: &Member| {
            rule.known.contains(m) || view.joint.as_ref().is_some_and(|r| r.known.contains(m))
        };
        if let Some(unlisted) = view.in_sync.iter().find(|m| !is_known(m)) {
            let what = format!("the View at {lsn} counts {unlisted:?}, which is not known");
            return self.breaks("SCALE-LIST-06", what);
        }
        let before = admissions.newest.as_ref().and_then(|(_, view)| view.joint.as_ref());
        // Who is let in because of a second rule is looked at again in the next batch.
        let turns = before.is_some() != view.joint.is_some();
        let begins = view.joint.as_ref().filter(|joint| Some(*joint) != before);
        if let Some(joint) = begins
            && joint.rf > room
        {
            let what = format!("RF is to be {} where {drf} are desired", joint.rf);
            return self.breaks("SCALE-KNOWN-06", what);
        }
        if begins.is_some() {
            admissions.joint_at = lsn;
        }
        admissions.is_unsettled |= turns;
        admissions.is_dirty |= turns;
        let beside = admissions.peers.iter().any(|peer| !is_known(&peer.member));
        let fed = admissions.peers.iter().any(|peer| !is_known(&peer.member) && peer.is_fed);
        for peer in &mut admissions.peers {
            if view.in_sync.contains(&peer.member) {
                peer.listed.get_or_insert(lsn);
            }
        }
        let version = rule.membership_version;
        let moved_on = admissions.newest.as_ref().is_some_and(|(_, old)| {
            old.joint.is_some() && old.rule.membership_version < version && view.joint.is_none()
        });
        admissions.newest = Some((lsn, view.clone()));
        admissions.counted_by.push_back((lsn, view.rule.clone()));
        admissions.counted_by.extend(view.joint.clone().map(|joint| (lsn, joint)));
        admissions.counted_by.drain(..admissions.counted_by.len().saturating_sub(RULES_MAX));
        for (yes, situation) in [
            (beside, Situation::UnlistedBesideTheList),
            (fed, Situation::UnlistedFed),
            (moved_on, Situation::RuledOnceRecorded),
        ] {
            if yes {
                self.situations().add(situation);
            }
        }
    }

    /// A write is acknowledged: CF of the known replicas have said that they have it, under each
    /// rule, and nobody else was needed.
    pub(crate) fn check_held_by_known(&mut self, target: usize, lsn: Lsn) {
        let Some(admissions) = self.admissions(target) else { return };
        admissions.acknowledged = admissions.acknowledged.max(lsn);
        let Some((_, view)) = &admissions.newest else { return };
        let joint = view.joint.is_some();
        let short = admissions.rules().map(|rule| {
            let holds = |m: &&Member| view.in_sync.contains(m) && admissions.holds(**m, lsn);
            (rule.known.iter().filter(holds).count(), usize::from(rule.cf))
        });
        let short: Vec<(usize, usize)> = short.filter(|(holders, cf)| holders < cf).collect();
        let off = admissions.peers.iter().any(|peer| peer.is_off() && peer.is_fed);
        if let Some((holders, cf)) = short.first() {
            let row = if joint { "SCALE-KNOWN-12" } else { "SCALE-QUORUM-08" };
            let what = format!("{lsn} is acknowledged with {holders} known replicas, CF is {cf}");
            return self.breaks(row, what);
        }
        if off {
            self.situations().add(Situation::WriteBesideQuorumOff);
        }
        if joint {
            self.situations().add(Situation::WriteWhileJoint);
        }
    }

    /// Any good answer: CF of the known replicas are connected, under each rule.
    pub(crate) fn check_known_connected(&mut self, target: usize) {
        let Some(admissions) = self.admissions(target) else { return };
        let counts =
            admissions.rules().map(|rule| (admissions.connected(rule), usize::from(rule.cf)));
        let short = counts.into_iter().find(|(there, cf)| there < cf);
        if let Some((there, cf)) = short {
            let what = format!("target {target} answers with {there} known ones, CF is {cf}");
            return self.breaks("SCALE-IO-03", what);
        }
        if std::mem::take(&mut admissions.below_cf) {
            self.situations().add(Situation::WentOnAtCf);
        }
    }

    /// A request failed for want of a quorum: CF known ones did not hold all that was committed.
    pub(crate) fn check_no_quorum(&mut self, target: usize) {
        let Some(process) = &self.targets[target].process else { return };
        let (commit, _) = process.target.reach();
        let admissions = &process.admissions;
        if process.serving.is_none() || admissions.newest.is_none() {
            return;
        }
        // Who counts now: one that was taken back does once the View that says so is active.
        let status = process.target.status();
        let counted = |m: Member| {
            let counts = |r: &&ReplicaStatus| r.standing == ReplicaStanding::InSync;
            status.replicas.iter().filter(counts).any(|r| r.member == m)
        };
        // Every View that is not over has a say.
        let active = process.target.active_view().map_or(Lsn::ZERO, |(lsn, _)| lsn);
        let mut rules = admissions.counted_by.iter().filter(|(lsn, _)| *lsn >= active);
        let enough = rules.all(|(_, rule)| {
            let live = |m: &&Member| admissions.peers.iter().any(|h| h.member == **m && h.is_live);
            let holds = |m: &&Member| live(m) && counted(**m) && admissions.holds(**m, commit);
            let holders = rule.known.iter().filter(holds).count();
            holders >= usize::from(rule.cf)
        });
        if enough {
            let what = format!("target {target} fails IO, and CF known ones hold {commit}");
            return self.breaks("SCALE-QUORUM-10", what);
        }
        self.situations().add(Situation::NoQuorumReported);
    }

    /// IO starts: as many known replicas have answered as the factors ask for.
    pub(crate) fn check_start(&mut self, target: usize) {
        let Some(admissions) = self.admissions(target) else { return };
        admissions.is_dirty = true;
        let (rf, cf) = (admissions.ruling.rf, admissions.ruling.cf);
        let (there, needed) = (admissions.voters.len(), needed_to_start(rf, cf));
        if there < needed {
            let what = format!("RF {rf}, CF {cf}: IO starts with {there} known replicas");
            return self.breaks("SCALE-IO-01", what);
        }
        if there == needed && there < admissions.ruling.known.len() {
            self.situations().add(Situation::StartedWithJustEnough);
        }
    }

    /// An open waits: would it find enough, if those counted that are not known (any more)?
    pub(crate) fn note_unexpected(&mut self, target: usize) {
        let Some(process) = &self.targets[target].process else { return };
        let admissions = &process.admissions;
        let needed = needed_to_start(admissions.ruling.rf, admissions.ruling.cf);
        let unlisted = self.pools.iter().filter(|p| {
            !p.is_spare() && !p.gone && p.process.is_some() && !admissions.known(p.member)
        });
        let there = admissions.voters.len();
        let three_of_five = (admissions.ruling.rf, admissions.ruling.cf) == (5, 3) && there > 0;
        if process.serving.is_none() && there < needed && there + unlisted.count() >= needed {
            self.situations().add(Situation::UnlistedWereEnough);
            if three_of_five {
                self.situations().add(Situation::SixthMadeThreeOfFive);
            }
        }
    }

    /// The session with one whose quorum is off is lost: IO goes on.
    pub(crate) fn is_quorum_off(&self, target: usize, session: SessionKey) -> bool {
        let Some(process) = &self.targets[target].process else { return false };
        let admissions = &process.admissions;
        let waits = !process.waiting.is_empty();
        process.serving.is_some()
            && !waits
            && admissions.peers.iter().any(|peer| peer.session == session && peer.is_off())
    }

    pub(crate) fn check_io_continues(&mut self, target: usize) {
        let process = self.targets[target].process.as_ref();
        if process.is_none_or(|process| process.serving.is_none()) {
            let what = format!("target {target} stops as a quorum-off replica goes");
            return self.breaks("SCALE-QUORUM-08", what);
        }
        self.situations().add(Situation::QuorumOffLost);
    }

    pub(crate) fn note_given_up(&mut self, target: usize, newcomers: &[Member]) {
        let Some(admissions) = self.admissions(target) else { return };
        admissions.is_dirty = true;
        if newcomers.iter().any(|m| admissions.known(*m)) {
            return self
                .breaks("SCALE-KNOWN-10", format!("{newcomers:?} was given up and is known"));
        }
        admissions.given_up.extend(newcomers);
        self.situations().add(Situation::GivenUp);
    }

    pub(crate) fn note_not_admitted(&mut self, target: usize, member: Member, too_many: bool) {
        if let Some(admissions) = self.admissions(target) {
            admissions.reported_refusals.push((member, too_many));
            admissions.is_dirty = true;
        }
        self.refill(member);
    }

    /// After a batch: who has a seat is who should have one.
    pub(crate) fn check_admissions(&mut self, target: usize) {
        let Some(process) = &mut self.targets[target].process else { return };
        let admissions = &mut process.admissions;
        if !admissions.is_dirty {
            return;
        }
        let is_unsettled = std::mem::take(&mut admissions.is_unsettled);
        if process.serving.is_none() {
            return;
        }
        let status = process.target.status();
        if !status.serving || status.membership.version != admissions.ruling.version {
            return;
        }
        if is_unsettled {
            admissions.beside = Some(admissions.beside_the_list(&status));
            return;
        }
        admissions.is_dirty = false;
        let (broken, seen) = admissions.evaluate(&status);
        for situation in seen {
            self.situations().add(situation);
        }
        if let Some((row, what)) = broken {
            self.breaks(row, format!("target {target}: {what}"));
        }
    }
}

pub(crate) type Broken = Option<(&'static str, String)>;

impl Admissions {
    fn beside_the_list(&self, status: &PrimaryStatus) -> Vec<Member> {
        status.replicas.iter().map(|r| r.member).filter(|m| !self.known(*m)).collect()
    }

    fn evaluate(&mut self, status: &PrimaryStatus) -> (Broken, Vec<Situation>) {
        let mut seen = Vec::new();
        let sits = |m: &Member| status.replicas.iter().any(|r| r.member == *m);
        if let Some(lost) = self.ruling.known.iter().find(|m| !sits(m)) {
            return (Some(("SCALE-ADMIT-08", format!("{lost:?} is known and not let in"))), seen);
        }
        let counted = status.replicas.iter().filter(|r| r.standing == ReplicaStanding::InSync);
        let mut unlisted = counted.filter(|r| !self.known(r.member) && !self.is_joint(r.member));
        if let Some(unlisted) = unlisted.next() {
            return (Some(("SCALE-LIST-08", format!("{unlisted:?} is counted"))), seen);
        }
        let beside = self.beside_the_list(status);
        let before = self.beside.replace(beside.clone());
        // In the first look of an epoch it is not known here who of several came first.
        let several = self.desired.newcomers.len() > 1;
        let Some(before) = before.or((!several).then(Vec::new)) else { return (None, seen) };
        let peer = |m: Member| self.peers.iter().find(|peer| peer.member == m);
        let mut seats: Vec<Seat> = self
            .peers
            .iter()
            .filter(|peer| self.known(peer.member))
            .map(|peer| Seat { member: peer.member, quorum: true })
            .collect();
        let moving: Vec<Member> =
            self.desired.newcomers.iter().filter(|n| n.beside).map(|n| n.member).collect();
        let mut callers: Vec<Caller> = Vec::new();
        for newcomer in self.desired.newcomers.iter().filter(|n| !self.known(n.member)) {
            callers.push(Caller {
                member: newcomer.member,
                quorum: peer(newcomer.member).is_some_and(|peer| peer.quorum),
                membership_version: peer(newcomer.member).map_or(0, |h| h.membership_version),
                beside: newcomer.beside,
            });
        }
        // Nobody is exchanged for his like.
        callers.sort_by_key(|caller| !before.contains(&caller.member));
        let mut refused = Vec::new();
        for caller in &callers {
            let (outcome, situations) =
                read(&self.ruling, self.desired.drf, &seats, &moving, caller);
            let was = before.contains(&caller.member);
            let is_new = !was && !self.refused.contains(&caller.member);
            match outcome {
                Outcome::LetIn(goes) => {
                    if let Some(goes) = goes {
                        seats.retain(|seat| seat.member != goes);
                        refused.push((goes, true));
                    }
                    seats.push(Seat { member: caller.member, quorum: caller.quorum });
                    // Its quorum is known once it has answered.
                    let turned = caller.quorum && !self.seen_on.contains(&caller.member);
                    if turned {
                        self.seen_on.push(caller.member);
                    }
                    if turned && situations == [Situation::Addition] {
                        seen.push(Situation::AdditionWithQuorum);
                    }
                    if is_new || turned || goes.is_some() {
                        seen.extend(situations);
                    }
                }
                Outcome::Refused { too_many } => {
                    refused.push((caller.member, too_many));
                    if was {
                        seen.push(Situation::LeftOut);
                    }
                    if was || is_new {
                        seen.extend(situations);
                    }
                }
            }
        }
        let excused = |m: &Member| self.is_joint(*m);
        let has_seat = |m: &Member| seats.iter().any(|seat| seat.member == *m);
        if let Some(m) = beside.iter().find(|m| !has_seat(m) && !excused(m)) {
            let row = match before.contains(m) {
                true => "SCALE-KNOWN-06, SCALE-ADMIT-03",
                false => "SCALE-ADMIT-02, SCALE-ADMIT-06, SCALE-ADMIT-15",
            };
            let what = format!("{m:?} is let in, among {seats:?} by {:?}", self.ruling);
            return (Some((row, what)), seen);
        }
        let out = |m: &Member| !beside.contains(m) && !self.known(*m);
        if let Some(seat) = seats.iter().find(|seat| out(&seat.member)) {
            let row = "SCALE-ADMIT-09, SCALE-ADMIT-11, SCALE-ADMIT-12, SCALE-ADMIT-14";
            let what = format!("{seat:?} is not let in, among {seats:?} by {:?}", self.ruling);
            return (Some((row, what)), seen);
        }
        for (member, too_many) in &refused {
            if self.refused.contains(member) {
                continue;
            }
            if !self.reported_refusals.contains(&(*member, *too_many)) {
                let what = format!("nobody is told that {member:?} is turned away");
                return (Some(("SCALE-ADMIT-05", what)), seen);
            }
            if *too_many {
                seen.push(Situation::TooManyReported);
            }
        }
        self.refused = refused.iter().map(|(member, _)| *member).collect();
        self.reported_refusals.retain(|(member, _)| self.refused.contains(member));
        (None, seen)
    }
}
