//! What replicas and targets claim at each step, held against what they claimed before: each rule
//! is looked at where it would first be broken, not only where harm comes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quoin_replication::primary::{ReadMode, ReplicaStanding};
use quoin_types::entry::{Rule, SharedEntry};
use quoin_types::message::{FromReplica, Ping, ReadView, ToReplica};
use quoin_types::{
    Durability, EntryKind, Epoch, Incarnation, Lsn, Member, Membership, ReplicaGuid, SessionKey,
    SnapshotId, View,
};

use super::World;

/// Pings that are remembered of each pool.
const PINGS_MAX: usize = 256;

/// What a replica has told the targets of itself.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Reported {
    guid: ReplicaGuid,
    pub applied: Lsn,
    pub durable: Lsn,
    /// What it once applied and may have lost with its cache since: it is not continuous before
    /// it has been given that again.
    owes: Lsn,
    /// The highest epoch whose open it has answered.
    promised: Epoch,
}

impl Reported {
    /// Whether a target has heard of this replica.
    pub fn has_answered(&self, guid: ReplicaGuid) -> bool {
        self.guid == guid && self.promised > Epoch::ZERO
    }

    /// Entries after `keep` are cut; the history goes to `tip`.
    pub fn cut(&mut self, keep: Lsn, tip: Lsn) {
        self.applied = self.applied.min(keep);
        self.durable = self.durable.min(keep);
        self.owes = self.owes.min(tip);
    }
}

/// What the world remembers of one life of a target, to hold it to its word.
#[derive(Default, Debug)]
pub(crate) struct Commitments {
    /// The version of the membership that it was granted or has swapped.
    pub membership: u64,
    /// The membership that it was granted last.
    pub granted: Membership,
    /// How many answers an open needs under what it was granted.
    pub open_quorum: usize,
    /// Under which it last asked for an epoch.
    pub acquiring: Incarnation,
    /// The newest one that a replica has answered its present open with.
    pub reported_version: u64,
    /// A swap was sent, and its outcome is not known: the LSN it had sent by then.
    pub swapping: Option<Lsn>,
    /// The last swap that it heard of: its version, and the record in the answer.
    pub swapped: Option<(u64, Membership)>,
    /// The newest LSN it has sent.
    pub sent: Lsn,
    /// Those that have answered its present open and may count in it.
    pub answered: BTreeSet<u128>,
    /// The first joint View of its newest change, and whether its newest View is one.
    joint: Lsn,
    is_joint: bool,
    /// The first rule of its newest View.
    rule: Rule,
    /// The boundaries of its rebuilds.
    boundaries: BTreeMap<SnapshotId, Lsn>,
    /// Up to where rebuilds were begun while fewer than CF were fed.
    pub settled_without_stable: Lsn,
    /// The View that was active when it was last looked at.
    active: Lsn,
}

impl World {
    /// What a replica says against what it has said: one that is continuous holds all that it
    /// ever applied, any holds all that it called durable, and Views are on media before they
    /// count as applied.
    pub(crate) fn check_report(&mut self, pool: usize, session: SessionKey, message: &FromReplica) {
        let epoch = session.epoch;
        let guid = self.pools[pool].member.guid;
        let media = self.setup.config.durability == Durability::Media;
        // Where its disk was hurt, it may have lost anything.
        let excused = self.may_be_damaged(pool) && self.pools[pool].hurt;
        let reported = &mut self.pools[pool].reported;
        if reported.guid != guid {
            *reported = Reported { guid, ..Reported::default() };
        }
        match message {
            FromReplica::Applied { applied, durable, ping } => {
                self.note_lease(pool, session, *ping);
                let reported = &mut self.pools[pool].reported;
                reported.applied = reported.applied.max(*applied);
                reported.durable = reported.durable.max(*durable);
                self.note_durable(guid, *durable);
                if !media && let Some(lsn) = self.unsynced_view(epoch, *durable, *applied) {
                    let detail = format!(
                        "pool {pool} has applied {applied}, a View at {lsn} is not on media yet"
                    );
                    self.violate("DurableFirst", detail);
                }
            }
            FromReplica::IncrementDone { position, .. } => {
                (reported.applied, reported.durable) = (position.lsn, position.lsn);
                self.note_durable(guid, position.lsn);
            }
            FromReplica::OpenAck(ack) => {
                self.note_durable(guid, ack.durable);
                self.check_promise(pool, session, excused);
                if self.pools[pool].rolled_back == Some(guid) {
                    let detail = format!("pool {pool} answers from a disk that was rolled back");
                    return self.violate("RollbackNoticed", detail);
                }
                if !excused && !ack.damaged {
                    self.check_open_ack(pool, ack.position.lsn, ack.continuous, media);
                }
            }
            FromReplica::Closed => self.pools[pool].honoured = None,
            _ => {}
        }
    }

    /// A ping that it acknowledges is a lease that it honours from the ping's receipt on.
    fn note_lease(&mut self, pool: usize, session: SessionKey, ping: Ping) {
        let there = &mut self.pools[pool];
        let arrived = there.pings.iter().rev().find(|(k, p, _)| (*k, *p) == (session, ping));
        if let Some((_, _, at)) = arrived {
            if there.honoured.is_none_or(|(holder, _)| holder != session.incarnation) {
                there.close_heard = false;
            }
            there.honoured = Some((session.incarnation, *at));
        }
    }

    /// A target that has sent Close has given up its lease (`check_reply` holds it to that), so the
    /// close may reach media, and the power go, before the replica has said so: its start then
    /// finds no session open, and owes nobody a lease.
    pub(crate) fn note_close(&mut self, pool: usize, session: SessionKey, message: &ToReplica) {
        let there = &mut self.pools[pool];
        let holder = there.honoured.map(|(holder, _)| holder);
        if matches!(message, ToReplica::Close) && holder == Some(session.incarnation) {
            there.close_heard = true;
        }
    }

    /// What a start does not find is owed no more, if it may be gone: a lease whose holder has
    /// closed. All others are honoured through starts.
    pub(crate) fn forget_closed_lease(&mut self, pool: usize) {
        let there = &mut self.pools[pool];
        if std::mem::take(&mut there.close_heard) {
            there.honoured = None;
        }
    }

    /// The pings of a message, with the instant of their receipt.
    pub(crate) fn note_pings(&mut self, pool: usize, session: SessionKey, message: &ToReplica) {
        let (ToReplica::Append { ping, .. }
        | ToReplica::Sync { ping, .. }
        | ToReplica::Ping { ping, .. }
        | ToReplica::Read { ping, .. }) = message
        else {
            return;
        };
        let now = self.local(self.pools[pool].host);
        let pings = &mut self.pools[pool].pings;
        pings.push_back((session, *ping, now));
        if pings.len() > PINGS_MAX {
            pings.pop_front();
        }
    }

    /// An answer to an open: no older epoch after a newer one, and none before the lease that
    /// another incarnation was given has ended.
    fn check_promise(&mut self, pool: usize, session: SessionKey, excused: bool) {
        let now = self.local(self.pools[pool].host);
        let lease = Duration::from_millis(self.setup.config.lease_ms.into());
        let leased = self.setup.config.reads == ReadMode::Leased;
        let there = &mut self.pools[pool];
        let promised = there.reported.promised;
        there.reported.promised = promised.max(session.epoch);
        if session.epoch < promised && !excused {
            let detail = format!(
                "pool {pool} answers epoch {} after it has answered {promised}",
                session.epoch
            );
            return self.violate("PromiseMonotone", detail);
        }
        // A disk that lied may have lost the session with its promise; the others still hold it off.
        if let Some((holder, since)) = there.honoured.filter(|_| leased && !excused)
            && holder != session.incarnation
            && now < since + lease
        {
            let detail = format!("pool {pool} answers while it has to honour another's lease");
            self.violate("LeaseExcludes", detail);
        }
    }

    /// What a replica's promise is after a start: not less than it has answered.
    pub(crate) fn check_kept_promise(&mut self, pool: usize, promised: Epoch) {
        let there = &self.pools[pool];
        let answered = there.reported.promised;
        let same = there.reported.guid == there.member.guid;
        let excused = self.may_be_damaged(pool) && there.hurt;
        let excused = excused || there.rolled_back == Some(there.member.guid);
        if same && promised < answered && !excused {
            let detail = format!("pool {pool} promised {promised}, and has answered {answered}");
            self.violate("PromiseMonotone", detail);
        }
    }

    fn check_open_ack(&mut self, pool: usize, at: Lsn, continuous: bool, media: bool) {
        let reported = &mut self.pools[pool].reported;
        let (applied, durable, owes) = (reported.applied, reported.durable, reported.owes);
        // What was not durable may be gone; what is there counts from here.
        reported.applied = at;
        reported.owes = if continuous { Lsn::ZERO } else { owes.max(applied) };
        if at < durable {
            let detail = format!("pool {pool} opens at {at} and called {durable} durable");
            self.violate("DurableHolds", detail);
        } else if continuous && !media && at < applied.max(owes) {
            let applied = applied.max(owes);
            let detail = format!("pool {pool} is continuous at {at} and applied {applied}");
            self.violate("ContinuousHolds", detail);
        }
    }

    fn note_durable(&mut self, guid: ReplicaGuid, lsn: Lsn) {
        let known = self.checkers.durable_reported.entry(guid.0).or_default();
        *known = (*known).max(lsn);
    }

    /// A View of this epoch's history that lies in what is applied and not durable.
    fn unsynced_view(&self, epoch: Epoch, durable: Lsn, applied: Lsn) -> Option<Lsn> {
        let path = self.checkers.lineage.path(epoch)?;
        self.checkers.lineage.view_between(path, durable, applied)
    }

    /// A View is active only when CF of its own in-sync set have it on media, under each rule.
    pub(crate) fn check_activation(&mut self, target: usize) {
        let Some(process) = &mut self.targets[target].process else { return };
        let Some((lsn, view)) = process.target.active_view() else { return };
        if std::mem::replace(&mut process.commitments.active, lsn) == lsn {
            return;
        }
        let rules = std::iter::once(&view.rule).chain(&view.joint);
        let holds = |member: &&Member, rule: &Rule| {
            rule.known.contains(member)
                && self.checkers.durable_reported.get(&member.guid.0).is_some_and(|durable| *durable >= lsn)
        };
        let short = rules
            .map(|rule| (view.in_sync.iter().filter(|m| holds(m, rule)).count(), rule.cf))
            .find(|(count, cf)| *count < usize::from(*cf));
        if let Some((count, cf)) = short {
            let detail = format!("the View at {lsn} is active and on media of {count}, not {cf}");
            self.violate("OwnActivation", detail);
        }
    }

    /// A rebuild moves nothing before its boundary is stable. (Where fewer than CF are fed, stable
    /// may wait for this very rebuild.)
    pub(crate) fn check_boundary(&mut self, target: usize, message: &ToReplica) {
        let Some(process) = &self.targets[target].process else { return };
        let boundaries = &process.commitments.boundaries;
        let lsn = match message {
            ToReplica::Pull { view: ReadView::Snapshot(id), .. } => boundaries.get(id),
            // A boundary's name ends in its rebuild's.
            ToReplica::IncrementBegin { rebuild, .. } => {
                boundaries.iter().find(|(id, _)| id.0 as u64 == *rebuild).map(|(_, lsn)| lsn)
            }
            _ => None,
        };
        let Some(lsn) = lsn.copied() else { return };
        // Where operators change CF, how many must be fed depends on more than the record.
        if self.operators.members.spare_pools() > 0 {
            return;
        }
        let (_, stable) = process.target.reach();
        // Once begun it goes on: should its receiver count no more, then because of a View behind
        // the boundary, and whoever opens without the receiver has heard that View from a holder.
        if lsn <= stable.max(process.commitments.settled_without_stable) {
            return;
        }
        let replicas = process.target.status().replicas;
        let fed = replicas.iter().filter(|r| r.standing == ReplicaStanding::InSync).count();
        if fed >= self.cf_in_force() {
            let detail = format!("a rebuild moves up to {lsn}, and stable is {stable}");
            self.violate("BoundarySettled", detail);
        } else if let Some(process) = &mut self.targets[target].process {
            process.commitments.settled_without_stable = lsn;
        }
    }

    /// A swap is asked for when the joint View is on the newcomer's media.
    pub(crate) fn check_swap(&mut self, target: usize, next: &Membership) {
        let Some(process) = &mut self.targets[target].process else { return };
        // It is asked for again until the outcome is known, whatever becomes of the newcomer.
        // Asking for what is so already changes nothing, and needs no second rule; the View that
        // says so may come after the question.
        let gone_by = process.target.status().membership;
        let commitments = &mut process.commitments;
        let rule = &commitments.rule;
        let factors = (next.rf, next.cf);
        let same = (&next.known, factors) == (&rule.known, (rule.rf, rule.cf))
            || (&next.known, factors) == (&gone_by.known, (gone_by.rf, gone_by.cf));
        if commitments.swapping.is_some() || same {
            return;
        }
        let before = &self.control.record.membership;
        commitments.swapping = Some(commitments.sent);
        let joint = commitments.joint;
        let newcomers = next.known.iter().filter(|m| !before.known.contains(m));
        let durable =
            |m: &Member| self.checkers.durable_reported.get(&m.guid.0).copied().unwrap_or_default();
        let late = newcomers.filter(|m| durable(m) < joint).count();
        // (Operators may begin a change over an earlier one: which View is meant is not known here.)
        let known = self.operators.members.spare_pools() == 0;
        if known && (joint == Lsn::ZERO || late > 0) && next.version > before.version {
            let detail = format!("a swap is asked for, and the joint View {joint} is not durable");
            return self.violate("DurableBeforeCAS", detail);
        }
        self.check_asked(target, next);
    }

    /// No target serves under a membership that a replica's answer has shown to be an old one.
    pub(crate) fn check_record(&mut self, target: usize, epoch: Epoch) {
        let Some(process) = &self.targets[target].process else { return };
        let (own, reported_version) =
            (process.commitments.membership, process.commitments.reported_version);
        let needed = process.commitments.open_quorum;
        let answered = process.commitments.answered.len();
        if answered < needed {
            let detail = format!("epoch {epoch} serves after {answered} answers, {needed} needed");
            return self.violate("OpenQuorum", detail);
        }
        if own < reported_version {
            let detail = format!(
                "epoch {epoch} serves under membership {own}, {reported_version} was heard"
            );
            self.violate("MembershipMonotone", detail);
        }
    }

    /// Each rule of a View finds CF in its in-sync set.
    fn check_view(&mut self, lsn: Lsn, view: &View) {
        for rule in std::iter::once(&view.rule).chain(&view.joint) {
            let there = view.in_sync.iter().filter(|m| rule.known.contains(m)).count();
            if there < usize::from(rule.cf) {
                let cf = rule.cf;
                let detail = format!("the View at {lsn} lists {there} where CF is {cf}");
                return self.violate("NeverBelowCF", detail);
            }
        }
    }

    /// While a swap's outcome is unknown every new View is under both rules.
    pub(crate) fn check_joint(&mut self, target: usize, entry: &SharedEntry) {
        let Some(process) = &mut self.targets[target].process else { return };
        let commitments = &mut process.commitments;
        let new = entry.lsn > commitments.sent;
        commitments.sent = commitments.sent.max(entry.lsn);
        if let EntryKind::Snapshot { id, .. } = &entry.kind
            && new
        {
            commitments.boundaries.insert(*id, entry.lsn);
        }
        let EntryKind::View(view) = &entry.kind else { return };
        let swapping = commitments.swapping;
        let begins = new && view.joint.is_some() && !commitments.is_joint;
        commitments.is_joint = if new { view.joint.is_some() } else { commitments.is_joint };
        if begins {
            commitments.joint = entry.lsn;
        }
        if new {
            commitments.rule = view.rule.clone();
            self.check_view(entry.lsn, view);
            self.check_lists(target, entry, view);
        }
        if view.joint.is_some() {
            return;
        }
        if swapping.is_some_and(|after| entry.lsn > after) {
            let detail = format!("a View under one rule at {} while a swap is unknown", entry.lsn);
            self.violate("JointUntilKnown", detail);
        }
    }
}
