//! Reports of replicas and targets at each step, compared with their former ones. Each rule is checked
//! where it would first be broken, not only where harm comes of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use quoin_replication::primary::{ReadMode, ReplicaStanding};
use quoin_types::entry::{Rule, SharedEntry};
use quoin_types::message::{FromReplica, OpenAck, Ping, ReadView, ToReplica};
use quoin_types::{
    EntryKind, Epoch, Incarnation, Lsn, Member, Membership, ReplicaGuid, SessionKey, SnapshotId,
    Time, View,
};

use super::{Broken, Checker, Observation, Scene, broken};
use crate::world::targets::Process;

/// Pings that are remembered of each pool.
const PINGS_MAX: usize = 256;

#[derive(Default)]
pub(crate) struct Assertions {
    pools: BTreeMap<usize, Reported>,
    targets: BTreeMap<usize, Commitments>,
    /// The highest LSN that each replica ever called durable.
    durable: BTreeMap<u128, Lsn>,
}

/// Reports of a pool's replica to targets, and the leases that the pool honours.
#[derive(Default, Debug)]
struct Reported {
    progress: Progress,
    /// Pings as they came in, by its clock.
    pings: VecDeque<(SessionKey, Ping, Time)>,
    /// Whose lease it has acknowledged, from when on.
    honoured: Option<(Incarnation, Time)>,
    /// It has received the Close of the one whose lease it honours.
    is_close_received: bool,
}

/// How far a replica has reported to be.
#[derive(Clone, Copy, Default, Debug)]
struct Progress {
    guid: ReplicaGuid,
    applied: Lsn,
    durable: Lsn,
    /// Last LSN that it applied and may have lost with its cache. It is not continuous before it has
    /// received the entries up to here again.
    owes: Lsn,
    /// The highest epoch whose open it has answered.
    promised: Epoch,
}

impl Progress {
    /// Entries after `keep` are cut; the history goes to `tip`.
    fn cut(&mut self, keep: Lsn, tip: Lsn) {
        self.applied = self.applied.min(keep);
        self.durable = self.durable.min(keep);
        self.owes = self.owes.min(tip);
    }
}

/// A swap of the membership that a target has asked for.
#[derive(Clone, Copy, Debug)]
struct Swap {
    /// Version of the membership that is asked for.
    version: u64,
    /// The last LSN that was sent by then.
    after: Lsn,
}

/// Commitments of a target since its start.
#[derive(Default, Debug)]
struct Commitments {
    /// The newest membership that a replica has answered its present open with.
    reported_version: u64,
    /// Replicas that have answered its present open and may count in it.
    answered: BTreeSet<u128>,
    /// A swap was sent, and its outcome is not known.
    swapping: Option<Swap>,
    /// The first joint View of its newest change, and whether its newest View is one.
    joint: Lsn,
    is_joint: bool,
    /// The first rule of its newest View.
    rule: Rule,
    /// The boundaries of its rebuilds.
    boundaries: BTreeMap<SnapshotId, Lsn>,
    /// Up to where rebuilds were begun while fewer than CF were fed.
    settled_without_stable: Lsn,
    /// The View that was active when it was last checked.
    active: Lsn,
}

impl Assertions {
    /// Returns true if a target has heard of this replica in this pool.
    pub fn has_answered(&self, pool: usize, guid: ReplicaGuid) -> bool {
        let progress = self.pools.get(&pool).map(|reported| &reported.progress);
        progress.is_some_and(|p| p.guid == guid && p.promised > Epoch::ZERO)
    }

    /// Returns true if a target that is to ask for this membership has not asked for it before. It
    /// is asked for again until the outcome is known, whatever becomes of the newcomer. Asking for
    /// what is so already changes nothing, and needs no second rule; the View that says so may come
    /// after the question.
    pub fn is_first_swap(&self, target: usize, process: &Process, next: &Membership) -> bool {
        let Some(commitments) = self.targets.get(&target) else { return false };
        let present = process.target.status().membership;
        let rule = &commitments.rule;
        let factors = (next.rf, next.cf);
        let is_same = (&next.known, factors) == (&rule.known, (rule.rf, rule.cf))
            || (&next.known, factors) == (&present.known, (present.rf, present.cf));
        commitments.swapping.is_none() && !is_same
    }

    fn pool(&mut self, pool: usize) -> &mut Reported {
        self.pools.entry(pool).or_default()
    }

    fn target(&mut self, target: usize) -> &mut Commitments {
        self.targets.entry(target).or_default()
    }

    fn note_durable(&mut self, guid: ReplicaGuid, lsn: Lsn) {
        let known = self.durable.entry(guid.0).or_default();
        *known = (*known).max(lsn);
    }
}

impl Checker for Assertions {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            Observation::TargetStarted { target } => {
                self.targets.insert(target, Commitments::default());
            }
            Observation::Opening { target, .. } => {
                let commitments = self.target(target);
                (commitments.reported_version, commitments.swapping) = (0, None);
                commitments.settled_without_stable = Lsn::ZERO;
                commitments.answered.clear();
            }
            Observation::TargetReceives {
                target,
                member,
                message: FromReplica::OpenAck(ack),
                ..
            } => {
                self.note_answer(target, member, ack);
            }
            // A refusal settles nothing: older requests may still land.
            // Nor does a late answer to a former one.
            Observation::SwapAnswered { target, record, .. } => {
                self.target(target).swapping.take_if(|swap| record.version >= swap.version);
            }
            Observation::SwapAsked { target, next, is_first: true } => {
                return self.check_swap(scene, target, next);
            }
            Observation::EntrySent { target, entry, is_new: true } => {
                return self.check_entry(target, entry);
            }
            Observation::ViewSent { target, lsn, view } => {
                return self.check_joint(target, lsn, view);
            }
            Observation::TargetSends { target, message, .. } => {
                return self.check_boundary(scene, target, message);
            }
            Observation::ActionsDone { target } => return self.check_activation(scene, target),
            Observation::StartsNewest { target, epoch } => {
                return self.check_record(scene, target, epoch);
            }
            Observation::PoolStarts { pool, promised, has_replica } => {
                return self.check_start(scene, pool, promised, has_replica);
            }
            // Leases were the lost one's. This one helps no target before it is known, and an open
            // meets each CF that a lease was counted with in one that is still there.
            Observation::ReplicaMade { pool } => {
                let reported = self.pool(pool);
                (reported.honoured, reported.is_close_received) = (None, false);
            }
            Observation::PoolReceives { pool, session, message, at } => {
                self.pool(pool).receive(session, message, at);
            }
            Observation::PoolSends { pool, session, message } => {
                return self.check_report(scene, pool, session, message);
            }
            _ => {}
        }
        Ok(())
    }
}

impl Reported {
    fn receive(&mut self, session: SessionKey, message: &ToReplica, at: Time) {
        match message {
            ToReplica::Append { ping, .. }
            | ToReplica::Sync { ping, .. }
            | ToReplica::Ping { ping, .. }
            | ToReplica::Read { ping, .. } => {
                self.pings.push_back((session, *ping, at));
                if self.pings.len() > PINGS_MAX {
                    self.pings.pop_front();
                }
            }
            // A target that has sent Close has given up its lease (`Durability` holds it to that),
            // so the close may reach media, and the power go, before the replica has reported it: its
            // start then finds no session open, and owes no lease.
            ToReplica::Close => {
                let holder = self.honoured.map(|(holder, _)| holder);
                self.is_close_received |= holder == Some(session.incarnation);
            }
            ToReplica::Truncate { keep, tip } => self.progress.cut(*keep, *tip),
            _ => {}
        }
    }

    /// A ping that it acknowledges is a lease that it honours from the ping's receipt on.
    fn acknowledge(&mut self, session: SessionKey, ping: Ping) {
        let arrived = self.pings.iter().rev().find(|(k, p, _)| (*k, *p) == (session, ping));
        if let Some((_, _, at)) = arrived {
            if self.honoured.is_none_or(|(holder, _)| holder != session.incarnation) {
                self.is_close_received = false;
            }
            self.honoured = Some((session.incarnation, *at));
        }
    }
}

/// Of a replica.
impl Assertions {
    /// Compares a replica's report with its former ones: a continuous replica holds all that it ever
    /// applied, every replica holds all that it called durable, and Views are on media before they
    /// count as applied.
    fn check_report(
        &mut self,
        scene: &Scene<'_>,
        pool: usize,
        session: SessionKey,
        message: &FromReplica,
    ) -> Result<(), Broken> {
        let guid = scene.pools[pool].member.guid;
        let media = scene.operators.durability.has_media;
        let reported = self.pool(pool);
        if reported.progress.guid != guid {
            reported.progress = Progress { guid, ..Progress::default() };
        }
        match message {
            FromReplica::Applied { applied, durable, ping } => {
                reported.acknowledge(session, *ping);
                let progress = &mut reported.progress;
                progress.applied = progress.applied.max(*applied);
                progress.durable = progress.durable.max(*durable);
                self.note_durable(guid, *durable);
                // A View of this epoch's history that lies in what is applied and not durable.
                let path = scene.lineage.path(session.epoch).filter(|_| !media);
                let view = path.and_then(|p| scene.lineage.view_between(p, *durable, *applied));
                if let Some(lsn) = view {
                    let detail = format!(
                        "pool {pool} has applied {applied}, a View at {lsn} is not on media yet"
                    );
                    return broken("DurableFirst", detail);
                }
            }
            FromReplica::IncrementDone { position, .. } => {
                let progress = &mut reported.progress;
                (progress.applied, progress.durable) = (position.lsn, position.lsn);
                self.note_durable(guid, position.lsn);
            }
            FromReplica::OpenAck(ack) => {
                self.note_durable(guid, ack.durable);
                let there = &scene.pools[pool];
                // Where its disk was hurt, it may have lost anything.
                let is_excused = scene.may_be_damaged(pool) && there.hurt;
                self.check_promise(scene, pool, session, is_excused)?;
                if there.rolled_back == Some(guid) {
                    let detail = format!("pool {pool} answers from a disk that was rolled back");
                    return broken("RollbackNoticed", detail);
                }
                if !is_excused && !ack.damaged {
                    return self.check_open_ack(pool, ack.position.lsn, ack.continuous, media);
                }
            }
            FromReplica::Closed => reported.honoured = None,
            _ => {}
        }
        Ok(())
    }

    /// An answer to an open: no older epoch after a newer one, and none before the lease that
    /// another incarnation was given has ended.
    fn check_promise(
        &mut self,
        scene: &Scene<'_>,
        pool: usize,
        session: SessionKey,
        is_excused: bool,
    ) -> Result<(), Broken> {
        let now = scene.local(scene.pools[pool].host);
        let lease = Duration::from_millis(scene.setup.config.lease_ms.into());
        let is_leased = scene.setup.config.reads == ReadMode::Leased;
        let reported = self.pool(pool);
        let promised = reported.progress.promised;
        reported.progress.promised = promised.max(session.epoch);
        if session.epoch < promised && !is_excused {
            let detail = format!(
                "pool {pool} answers epoch {} after it has answered {promised}",
                session.epoch
            );
            return broken("PromiseMonotone", detail);
        }
        // A disk that lied may have lost the session with its promise; the others still hold it off.
        if let Some((holder, since)) = reported.honoured.filter(|_| is_leased && !is_excused)
            && holder != session.incarnation
            && now < since + lease
        {
            let detail = format!("pool {pool} answers while it has to honour another's lease");
            return broken("LeaseExcludes", detail);
        }
        Ok(())
    }

    fn check_open_ack(
        &mut self,
        pool: usize,
        at: Lsn,
        is_continuous: bool,
        media: bool,
    ) -> Result<(), Broken> {
        let progress = &mut self.pool(pool).progress;
        let (applied, durable, owes) = (progress.applied, progress.durable, progress.owes);
        // Entries that were not durable may be gone; the entries that are there count from here.
        progress.applied = at;
        progress.owes = if is_continuous { Lsn::ZERO } else { owes.max(applied) };
        if at < durable {
            let detail = format!("pool {pool} opens at {at} and called {durable} durable");
            return broken("DurableHolds", detail);
        }
        if is_continuous && !media && at < applied.max(owes) {
            let applied = applied.max(owes);
            let detail = format!("pool {pool} is continuous at {at} and applied {applied}");
            return broken("ContinuousHolds", detail);
        }
        Ok(())
    }

    /// Checks a replica's promise after a start: it is not below the last answer. A lease whose holder
    /// has closed may be gone after the start; all other leases are honoured through starts.
    fn check_start(
        &mut self,
        scene: &Scene<'_>,
        pool: usize,
        promised: Epoch,
        has_replica: bool,
    ) -> Result<(), Broken> {
        let there = &scene.pools[pool];
        let reported = self.pool(pool);
        let answered = reported.progress.promised;
        let is_same = has_replica && reported.progress.guid == there.member.guid;
        let is_hurt = scene.may_be_damaged(pool) && there.hurt;
        let is_excused = is_hurt || there.rolled_back == Some(there.member.guid);
        if is_same && promised < answered && !is_excused {
            let detail = format!("pool {pool} promised {promised}, and has answered {answered}");
            return broken("PromiseMonotone", detail);
        }
        if std::mem::take(&mut reported.is_close_received) {
            reported.honoured = None;
        }
        Ok(())
    }
}

/// Of a target.
impl Assertions {
    fn note_answer(&mut self, target: usize, member: Member, ack: &OpenAck) {
        let commitments = self.target(target);
        commitments.reported_version = commitments.reported_version.max(ack.membership_version);
        if ack.quorum && !ack.damaged {
            commitments.answered.insert(member.guid.0);
        }
    }

    /// A View is active only when CF of its own in-sync set have it on media, under each rule.
    fn check_activation(&mut self, scene: &Scene<'_>, target: usize) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        let Some((lsn, view)) = process.target.active_view() else { return Ok(()) };
        if std::mem::replace(&mut self.target(target).active, lsn) == lsn {
            return Ok(());
        }
        let rules = std::iter::once(&view.rule).chain(&view.joint);
        let holds = |member: &&Member, rule: &Rule| {
            rule.known.contains(member)
                && self.durable.get(&member.guid.0).is_some_and(|durable| *durable >= lsn)
        };
        let short = rules
            .map(|rule| (view.in_sync.iter().filter(|m| holds(m, rule)).count(), rule.cf))
            .find(|(count, cf)| *count < usize::from(*cf));
        if let Some((count, cf)) = short {
            let detail = format!("the View at {lsn} is active and on media of {count}, not {cf}");
            return broken("OwnActivation", detail);
        }
        Ok(())
    }

    /// A rebuild moves nothing before its boundary is stable. (Where fewer than CF are fed, stable
    /// may wait for this very rebuild.)
    fn check_boundary(
        &mut self,
        scene: &Scene<'_>,
        target: usize,
        message: &ToReplica,
    ) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        let commitments = self.target(target);
        let boundaries = &commitments.boundaries;
        let lsn = match message {
            ToReplica::Pull { view: ReadView::Snapshot(id), .. } => boundaries.get(id),
            // A boundary's name ends in its rebuild's.
            ToReplica::IncrementBegin { rebuild, .. } => {
                boundaries.iter().find(|(id, _)| id.0 as u64 == *rebuild).map(|(_, lsn)| lsn)
            }
            _ => None,
        };
        let Some(lsn) = lsn.copied() else { return Ok(()) };
        // Where operators change CF, how many must be fed depends on more than the record.
        if scene.operators.members.spare_pools() > 0 {
            return Ok(());
        }
        let (_, stable) = process.target.reach();
        // Once begun it continues: should its receiver count no more, then because of a View behind
        // the boundary, and a target that opens without the receiver has got that View from a holder.
        if lsn <= stable.max(commitments.settled_without_stable) {
            return Ok(());
        }
        let replicas = process.target.status().replicas;
        let fed = replicas.iter().filter(|r| r.standing == ReplicaStanding::InSync).count();
        if fed >= scene.cf_in_force() {
            let detail = format!("a rebuild moves up to {lsn}, and stable is {stable}");
            return broken("BoundarySettled", detail);
        }
        commitments.settled_without_stable = lsn;
        Ok(())
    }

    /// A swap is asked for when the joint View is on the newcomer's media.
    fn check_swap(
        &mut self,
        scene: &Scene<'_>,
        target: usize,
        next: &Membership,
    ) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        let before = &scene.control.record.membership;
        let commitments = self.target(target);
        commitments.swapping = Some(Swap { version: next.version, after: process.sent.lsn });
        let joint = commitments.joint;
        let newcomers = next.known.iter().filter(|m| !before.known.contains(m));
        let durable = |m: &Member| self.durable.get(&m.guid.0).copied().unwrap_or_default();
        let late = newcomers.filter(|m| durable(m) < joint).count();
        // (Operators may begin a change over an earlier one: which View is meant is not known here.)
        let is_known = scene.operators.members.spare_pools() == 0;
        if is_known && (joint == Lsn::ZERO || late > 0) && next.version > before.version {
            let detail = format!("a swap is asked for, and the joint View {joint} is not durable");
            return broken("DurableBeforeCAS", detail);
        }
        Ok(())
    }

    /// No target serves under a membership that a replica's answer has shown to be an old one.
    fn check_record(
        &mut self,
        scene: &Scene<'_>,
        target: usize,
        epoch: Epoch,
    ) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        let (own, needed) = (process.grant.version, process.grant.membership.open_quorum());
        let commitments = self.target(target);
        let (reported, answered) = (commitments.reported_version, commitments.answered.len());
        if answered < needed {
            let detail = format!("epoch {epoch} serves after {answered} answers, {needed} needed");
            return broken("OpenQuorum", detail);
        }
        if own < reported {
            let detail =
                format!("epoch {epoch} serves under membership {own}, {reported} was heard");
            return broken("MembershipMonotone", detail);
        }
        Ok(())
    }

    /// Each rule of a new View finds CF in its in-sync set.
    fn check_entry(&mut self, target: usize, entry: &SharedEntry) -> Result<(), Broken> {
        let commitments = self.target(target);
        let lsn = entry.lsn;
        match &entry.kind {
            EntryKind::Snapshot { id, .. } => {
                commitments.boundaries.insert(*id, lsn);
            }
            EntryKind::View(view) => {
                if view.joint.is_some() && !commitments.is_joint {
                    commitments.joint = lsn;
                }
                commitments.is_joint = view.joint.is_some();
                commitments.rule = view.rule.clone();
                for rule in std::iter::once(&view.rule).chain(&view.joint) {
                    let there = view.in_sync.iter().filter(|m| rule.known.contains(m)).count();
                    let cf = rule.cf;
                    if there < usize::from(cf) {
                        let detail = format!("the View at {lsn} lists {there} where CF is {cf}");
                        return broken("NeverBelowCF", detail);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// While a swap's outcome is unknown every new View is under both rules.
    fn check_joint(&mut self, target: usize, lsn: Lsn, view: &View) -> Result<(), Broken> {
        let swapping = self.target(target).swapping;
        if view.joint.is_none() && swapping.is_some_and(|swap| lsn > swap.after) {
            let detail = format!("a View under one rule at {lsn} while a swap is unknown");
            return broken("JointUntilKnown", detail);
        }
        Ok(())
    }
}
