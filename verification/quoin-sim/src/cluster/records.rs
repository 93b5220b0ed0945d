//! Changes that are asked of the records, and what becomes of them.

use std::collections::BTreeMap;

use quoin_cluster::Refusal;
use quoin_cluster::ownership::attachment::{self, Publish};
use quoin_cluster::ownership::devices::{self, NodeReports};
use quoin_cluster::ownership::epochs::MembershipSwap;
use quoin_cluster::ownership::liveness::check_silent;
use quoin_cluster::ownership::{change, epochs, failover, fencing, lending, replay, replicas};
use quoin_cluster::records::{
    Cause, MembershipRecord, ReplicaPhase, ReplicaRecord, Sharing, Spec, VolumePhase, VolumeRecord,
};
use quoin_types::entry::Rule;
use quoin_types::membership::default_cf;
use quoin_types::{Member, Membership, ReplicaGuid, ReplicaId, Term, VolumeId};

use super::members::{Grant, Replica};
use super::{Change, Cluster, NODE_TIMEOUT, OFFLINE_AFTER, node_name, pool_name, time};

impl Cluster {
    pub(super) fn create_volume(&mut self, id: VolumeId) {
        let rf = self.random.between(1, self.pools.len().min(3) as u64) as u8;
        let first = self.random.index(self.pools.len());
        let pools: Vec<usize> =
            (0..usize::from(rf)).map(|n| (first + n) % self.pools.len()).collect();
        let spec = Spec::plain(&format!("v{}", id.0), rf, default_cf(rf));
        let mut volume = VolumeRecord::new(id, spec, 1 << 20, 0);
        let member = |random: &mut crate::random::Random| Member {
            id: ReplicaId(random.wide() | 1),
            guid: ReplicaGuid(random.wide() | 1),
        };
        let known: Vec<Member> = pools.iter().map(|_| member(&mut self.random)).collect();
        let membership = Membership {
            version: 1,
            rf,
            cf: default_cf(rf),
            drf: rf,
            known: known.clone(),
            retired: Vec::new(),
            formed: true,
        };
        volume.phase = VolumePhase::Ready;
        volume.membership = MembershipRecord::from(&membership);
        for (pool, member) in pools.iter().zip(&known) {
            let made = replicas::newcomer(*member, pool_name(*pool), Cause::Asked, false);
            volume.replicas.push(ReplicaRecord { phase: ReplicaPhase::Keep, ..made });
        }
        for (pool, member) in pools.iter().zip(&known) {
            let there = &mut self.pools[*pool];
            (there.runs, there.heard) = (true, true);
            there.replicas.insert(member.guid, Replica::new(&volume, *member, true));
        }
        self.truth.memberships.insert(id, membership);
        self.records.volumes.insert(id, volume);
    }

    /// Makes a change by compare-and-swap, with what follows from it. `None`: it was refused.
    pub(super) fn update<T>(
        &mut self,
        id: VolumeId,
        change: impl FnOnce(&mut VolumeRecord, Term) -> Result<T, Refusal>,
    ) -> Option<T> {
        if self.doubt.is_some() {
            return None;
        }
        let before = self.records.volumes.get(&id)?.clone();
        let mut after = before.clone();
        let value = change(&mut after, self.term).ok()?;
        change::complete(&before, &mut after, true, self.term).ok()?;
        if after.membership != before.membership {
            self.truth.memberships.insert(id, Membership::from(&after.membership));
        }
        self.check_record(&before, &after);
        self.records.volumes.insert(id, after);
        Some(value)
    }

    /// Returns true if the controller takes a node for lost.
    fn is_silent(&self, volume: &VolumeRecord, node: &str) -> bool {
        let observed = &self.observed;
        let last = observed.nodes.get(node).map_or(observed.started, |seen| seen.last);
        let now = self.schedule.now();
        let word = |replica: &ReplicaRecord| {
            let heard = observed.pools.get(&replica.pool);
            let is_heard = heard.is_some_and(|at| at + OFFLINE_AFTER.as_nanos() as u64 > now);
            let word = observed.words.get(&(replica.pool.clone(), replica.guid.0));
            word.filter(|_| is_heard).copied().unwrap_or_default()
        };
        check_silent(volume, time(last), word, NODE_TIMEOUT, time(now)).is_ok()
    }

    fn is_online(&self, node: &str) -> bool {
        let last = self.observed.nodes.get(node).map(|seen| seen.last);
        last.is_some_and(|last| last + OFFLINE_AFTER.as_nanos() as u64 > self.schedule.now())
    }

    /// Looks at whether a node uses a volume, by what it reported.
    fn check_unused(&self, volume: &VolumeRecord, on: &str) -> Result<(), Refusal> {
        let seen = self.observed.nodes.get(on);
        let told = seen.and_then(|seen| seen.devices.as_ref());
        let reports = NodeReports {
            is_online: self.is_online(on),
            last: seen.map(|seen| time(seen.last)),
            devices_told: told.map(|(at, _)| time(*at)),
            devices: told.map_or(&[], |(_, devices)| devices),
        };
        let now = time(self.schedule.now());
        devices::check_unused(volume, on, reports, OFFLINE_AFTER, (self.term, now))
    }

    /// Users and orchestrators ask for something.
    pub(super) fn orchestrate(&mut self) {
        if self.doubt.is_some() {
            return;
        }
        let Some(id) = self.pick_volume() else { return };
        let volume = self.records.volumes[&id].clone();
        let node = node_name(self.random.index(self.nodes.len()));
        let attached = volume.attachments.first().map(|a| a.node.clone());
        match self.random.below(24) {
            0..=8 => {
                let sharing = match id.0 % 4 {
                    0 => Sharing::MultiWriter,
                    1 if self.random.percent(30) => Sharing::SingleWriter,
                    1 => Sharing::ReadOnly,
                    _ => Sharing::Exclusive,
                };
                let read_only = sharing == Sharing::ReadOnly || self.random.percent(20);
                let replays = self.random.percent(60);
                let publish = Publish { node, read_only, sharing, replays, ..Publish::default() };
                let lost = attachment::holder_in_the_way(&volume, &publish);
                let lost = lost.filter(|node| self.is_silent(&volume, node)).map(str::to_owned);
                if let Some(lost) = &lost {
                    self.check_lost(&volume, lost);
                }
                self.plan(id, Change::Publish { publish, lost });
            }
            9..=15 => {
                let node = attached.filter(|_| self.random.percent(80)).unwrap_or_default();
                self.plan(id, Change::Detach { node, by_force: false });
            }
            16 => self.plan(id, Change::Detach { node, by_force: true }),
            17..=19 => self.move_replica(&volume),
            20 => {
                let known = Membership::from(&volume.membership).known;
                let member = *self.random.pick(&known);
                self.plan(id, Change::Leave(member));
            }
            21 => {
                let newcomer = volume.replicas.iter().find(|r| !volume.is_known(r));
                if let Some(newcomer) = newcomer {
                    self.plan(id, Change::TakeBack(newcomer.guid.0));
                }
            }
            22 => self.plan(id, Change::FenceNode { node }),
            _ if self.random.percent(15) => self.plan(id, Change::Delete),
            _ => {}
        }
    }

    fn move_replica(&mut self, volume: &VolumeRecord) {
        let free = |pool: &usize| volume.pools().all(|of| *of != pool_name(*pool));
        let free: Vec<usize> = (0..self.pools.len()).filter(free).collect();
        if free.is_empty() || volume.replicas.iter().any(|r| !volume.is_known(r) || r.leaving) {
            return;
        }
        let pool = pool_name(*self.random.pick(&free));
        let known = Membership::from(&volume.membership).known;
        let like = *self.random.pick(&known);
        let id = match self.random.percent(70) {
            true => like.id,
            false => ReplicaId(self.random.wide() | 1),
        };
        let guid = ReplicaGuid(self.random.wide() | 1);
        let newcomer = replicas::newcomer(Member { id, guid }, pool, Cause::Asked, false);
        self.plan(volume.id.0, Change::AddReplica(newcomer));
    }

    /// The controller's own tasks look at the volumes.
    pub(super) fn reconcile(&mut self) {
        if self.doubt.is_some() {
            return;
        }
        let volumes: Vec<VolumeRecord> = self.records.volumes.values().cloned().collect();
        for volume in volumes {
            let id = volume.id.0;
            if fencing::is_left_over(&volume) {
                self.plan(id, Change::LeftOver);
            }
            if let Some(node) = replay::due(&volume).map(str::to_owned) {
                match self.random.below(20) {
                    0 => self.plan(id, Change::LateReplay { node }),
                    1..=4 => self.plan(id, Change::ConfirmReplay { node }),
                    _ => {}
                }
            }
            let owner = volume.opened.owner.clone();
            if volume.attachments.is_empty() {
                let has_work = !volume.changing().is_empty();
                let node = node_name(self.random.index(self.nodes.len()));
                let node = Some(node).filter(|node| has_work && self.is_online(node));
                if owner.is_some() != node.is_some() || self.random.percent(5) {
                    self.plan(id, Change::Lend { owner, node });
                }
            } else if let Some(from) = owner
                && failover::is_due(&volume, &from)
                && self.is_silent(&volume, &from)
            {
                let next = failover::next_node(&volume, &from, |node| self.is_online(node));
                if let Some(to) = next.map(str::to_owned) {
                    self.check_lost(&volume, &from);
                    self.plan(id, Change::MoveTarget { from, to });
                }
            }
        }
    }

    /// A change that somebody decided on a moment ago meets the record as it is now.
    pub(super) fn change(&mut self, id: VolumeId, change: Change) {
        if self.doubt.is_some() {
            return;
        }
        let Some(before) = self.records.volumes.get(&id).cloned() else { return };
        self.say(|| format!("volume {id}: {change:?}"));
        match change {
            Change::Publish { publish, lost } => {
                self.update(id, |volume, term| {
                    if let Some(lost) = &lost {
                        attachment::take_over(volume, lost, term)?;
                    }
                    attachment::attach(volume, &publish, term)
                });
            }
            Change::Detach { node, by_force } => {
                let nodes = before.attachments.iter().map(|a| a.node.clone());
                let looks: BTreeMap<String, _> =
                    nodes.map(|on| (on.clone(), self.check_unused(&before, &on))).collect();
                let check = |_: &VolumeRecord, on: &str| match by_force {
                    true => Ok(()),
                    false => looks[on].clone(),
                };
                let lost = self.update(id, |v, term| {
                    attachment::detach_unused(v, &node, by_force, check, term)
                });
                let lost = lost.unwrap_or_default();
                lost.iter().filter(|_| !by_force).for_each(|node| self.check_detached(id, node));
            }
            Change::MoveTarget { from, to } => {
                self.update(id, |v, term| failover::move_target(v, &from, &to, term));
            }
            Change::Lend { owner, node } => {
                self.update(id, |v, _| Ok(lending::lend(v, owner.as_deref(), node.as_deref())));
            }
            Change::LateReplay { node } => {
                self.update(id, |v, term| replay::end_late(v, &node, term));
            }
            Change::ConfirmReplay { node } => {
                self.update(id, |v, term| replay::confirm(v, &node, term));
            }
            Change::FenceNode { node } if fencing::concerns(&before, &node) => {
                self.update(id, |v, term| fencing::of_node(v, &node, false, term));
            }
            Change::FenceNode { .. } => {}
            Change::FenceStale { node } => {
                self.update(id, |v, term| fencing::stale(v, &node, term));
            }
            Change::ProveHolder { node, epoch } => {
                self.update(id, |v, _| {
                    epochs::prove_holder(v, &node, epoch);
                    Ok(())
                });
            }
            Change::LeftOver => {
                self.update(id, fencing::left_over);
            }
            Change::Acquire(asked) => self.acquire(id, &asked),
            Change::AddReplica(newcomer) => {
                self.update(id, |v, _| {
                    let is_busy = v.replicas.iter().any(|r| !v.is_known(r) || r.leaving);
                    if v.phase.is_kept() && !is_busy {
                        let is_more = v.known_guid(newcomer.id.0).is_none();
                        v.membership.drf += u8::from(is_more && v.membership.drf < 5);
                        v.replicas.push(newcomer);
                    }
                    Ok(())
                });
            }
            Change::Leave(member) => {
                let all: Vec<ReplicaId> = before.membership.known.iter().map(|m| m.id.0).collect();
                self.update(id, |v, _| replicas::leave(v, &[member.id], &all));
            }
            Change::TakeBack(guid) => {
                self.update(id, |v, _| {
                    let named = v.replicas.iter().find(|r| r.guid.0 == guid && !v.is_known(r));
                    if let Some(newcomer) = named.map(ReplicaRecord::member) {
                        replicas::discard(v, newcomer);
                    }
                    Ok(())
                });
            }
            Change::Swap(asked) => {
                self.update(id, |v, _| epochs::swap(v, &asked).map_err(Refusal::Busy));
                self.learn(&asked);
            }
            Change::Delete => {
                self.truth.deleted.insert(id);
                self.update(id, |v, _| {
                    v.attachments.clear();
                    v.opened.owner = None;
                    v.begin_deletion();
                    Ok(())
                });
                let next = self.records.volumes.keys().map(|id| id.0).max().unwrap_or(0) + 100;
                self.create_volume(VolumeId(next));
            }
        }
    }

    fn acquire(&mut self, id: VolumeId, asked: &epochs::Acquire) {
        let index = self.index_of(&asked.node);
        let acquired = self.update(id, |v, term| epochs::acquire(v, asked, term));
        if acquired != Some(Ok(())) {
            return;
        }
        self.stats.opens.epochs += 1;
        self.check_granted(id, &asked.node);
        let record = &self.records.volumes[&id];
        let grant = Grant {
            epoch: record.epoch(),
            incarnation: asked.incarnation,
            membership: Membership::from(&record.membership),
            joint: None,
            asked: None,
            views: 0,
        };
        let there = &mut self.nodes[index];
        if there.runs && there.heard {
            there.grants.insert(id, grant);
        }
    }

    /// The target that asked for a swap goes by the record, and so do the replicas that it reaches.
    fn learn(&mut self, asked: &MembershipSwap) {
        let (id, node) = (asked.volume, asked.node.as_str());
        let index = self.index_of(node);
        let Some(record) = self.records.volumes.get(&id) else { return };
        let membership = Membership::from(&record.membership);
        let owns = record.opened.owner.as_deref() == Some(node);
        let is_asked = |joint: &Rule| {
            joint.membership_version == asked.version + 1 && joint.known == asked.known
        };
        let is_newest = |grant: &&mut Grant| {
            grant.epoch == record.epoch() && owns && grant.joint.as_ref().is_some_and(is_asked)
        };
        let grant = self.nodes[index].grants.get_mut(&id).filter(is_newest);
        if let Some(grant) = grant {
            grant.membership = membership;
            grant.make_view(None);
        }
    }
}
