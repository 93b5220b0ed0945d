//! Nodes with their targets and devices, and pools with their replicas.

use std::collections::{BTreeMap, BTreeSet};

use quoin_cluster::ownership::devices::{DeviceSeen, is_over};
use quoin_cluster::ownership::epochs::{Acquire, MembershipSwap, is_granted_to, needs_proof};
use quoin_cluster::ownership::lifecycle::{self, ReplicaState};
use quoin_cluster::ownership::liveness::{self, Hearing};
use quoin_cluster::ownership::{fencing, replicas};
use quoin_cluster::records::{AttachmentRecord, ReplicaPhase, VolumePhase, VolumeRecord};
use quoin_types::entry::Rule;
use quoin_types::membership::open_quorum;
use quoin_types::{Epoch, Incarnation, Member, Membership, ReplicaGuid, VolumeId};

use crate::schedule::SECOND;

use super::{Change, Cluster, Event, LEASE, OFFLINE_AFTER, Seen, TURN, node_name, pool_name, time};

/// A request of which nothing was heard for so long is lost: a plan is carried out within less.
const SWAP_LOST_AFTER: u64 = 2 * SECOND;

pub(super) struct Node {
    pub runs: bool,
    /// The controller and it hear each other.
    pub heard: bool,
    pub attach_answers: bool,
    pub grants: BTreeMap<VolumeId, Grant>,
    pub devices: BTreeMap<VolumeId, Device>,
}

/// Grant of a target.
#[derive(Clone, Debug)]
pub(super) struct Grant {
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    pub membership: Membership,
    /// The rule that it asked the records for, until it has their answer: what it writes counts by both.
    pub joint: Option<Rule>,
    /// When it asked last.
    pub asked: Option<u64>,
    /// Views that it made.
    pub views: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Device {
    pub since_epoch: u64,
    pub made: u64,
    /// Its first IO, from which on something is in its caches.
    pub used: Option<u64>,
    pub in_use_since: Option<u64>,
    pub dead: bool,
    pub is_shared: bool,
}

pub(super) struct Pool {
    pub runs: bool,
    pub heard: bool,
    pub replicas: BTreeMap<ReplicaGuid, Replica>,
    /// Replicas that it deleted by order.
    pub deleted: BTreeSet<ReplicaGuid>,
}

pub(super) struct Replica {
    pub volume: VolumeId,
    pub member: Member,
    pub quorum: bool,
    pub promised: Epoch,
    pub incarnation: Incarnation,
    pub fenced: u64,
    pub membership: Option<Membership>,
    pub joint: Option<Rule>,
    /// Views of its last target.
    pub views: u64,
    /// The record as it was told last.
    pub note: VolumeRecord,
    pub heard: Option<Heard>,
}

/// A node whose target reached a replica: the last time, and the first one without a pause before.
pub(super) struct Heard {
    pub by: String,
    pub since: u64,
    pub last: u64,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            runs: true,
            heard: true,
            attach_answers: true,
            grants: BTreeMap::new(),
            devices: BTreeMap::new(),
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        let (replicas, deleted) = (BTreeMap::new(), BTreeSet::new());
        Self { runs: true, heard: true, replicas, deleted }
    }
}

impl Node {
    pub fn restart_target(&mut self) {
        self.grants.clear();
    }
}

impl Grant {
    /// Goes by another joint rule, or none.
    pub fn make_view(&mut self, joint: Option<Rule>) {
        (self.joint, self.views) = (joint, self.views + 1);
    }

    /// Returns true if what these replicas have is acknowledged.
    fn is_enough(&self, accepting: &[Member]) -> bool {
        let count = |known: &[Member]| accepting.iter().filter(|m| known.contains(m)).count();
        let joint = self.joint.as_ref();
        count(&self.membership.known) >= self.membership.open_quorum()
            && joint.is_none_or(|j| count(&j.known) >= usize::from(open_quorum(j.rf, j.cf)))
    }
}

impl Replica {
    pub fn new(record: &VolumeRecord, member: Member, quorum: bool) -> Self {
        let membership = quorum.then(|| Membership::from(&record.membership));
        Self {
            volume: record.id.0,
            member,
            quorum,
            promised: Epoch::ZERO,
            incarnation: Incarnation(0),
            fenced: 0,
            membership,
            joint: None,
            views: 0,
            note: record.clone(),
            heard: None,
        }
    }
}

impl Cluster {
    pub(super) fn index_of(&self, node: &str) -> usize {
        let index = node.strip_prefix('h').and_then(|digits| digits.parse().ok());
        index.expect("nodes have names of their numbers")
    }

    pub(super) fn node_turn(&mut self, node: usize) {
        if !self.nodes[node].runs {
            return;
        }
        if self.nodes[node].heard {
            if self.doubt.is_none() {
                let records: Vec<VolumeRecord> = self.records.volumes.values().cloned().collect();
                records.iter().for_each(|record| self.take_assignment(node, record));
                let volumes = &self.records.volumes;
                self.nodes[node].grants.retain(|volume, _| volumes.contains_key(volume));
            }
            self.report_node(node);
        }
        // Its targets keep their leases, with and without IO.
        for (volume, grant) in self.nodes[node].grants.clone() {
            self.accepting(node, volume, &grant);
        }
        let users: Vec<VolumeId> = self.nodes[node].devices.keys().copied().collect();
        for volume in users {
            self.use_device(node, volume);
            let delay = self.random.below(TURN);
            self.schedule.after(delay, Event::Io { node, volume });
        }
    }

    fn take_assignment(&mut self, node: usize, record: &VolumeRecord) {
        let (name, id) = (node_name(node), record.id.0);
        let owns = record.opened.owner.as_ref() == Some(&name) && record.phase.is_kept();
        if !owns {
            self.nodes[node].grants.remove(&id);
        }
        if owns {
            self.serve(node, record);
        }
        self.look_at_device(node, record);
        let attachment = record.attachments.iter().find(|a| a.node == name);
        // A node that has it alone is served by its own target.
        let is_served = |attachment: &AttachmentRecord| match attachment.sharing.is_exclusive() {
            true => self.nodes[node].grants.contains_key(&id),
            false => self.nodes.iter().any(|there| there.grants.contains_key(&id)),
        };
        let attachment = attachment.filter(|attachment| is_served(attachment));
        if let Some(attachment) = attachment.filter(|_| record.phase.is_kept()) {
            let device = Device {
                since_epoch: record.used.since_of(&name),
                made: self.schedule.now(),
                used: None,
                in_use_since: None,
                dead: false,
                is_shared: !attachment.sharing.is_exclusive(),
            };
            self.nodes[node].devices.entry(id).or_insert(device);
        }
    }

    /// The target of the node that owns the volume.
    fn serve(&mut self, node: usize, record: &VolumeRecord) {
        let (name, id) = (node_name(node), record.id.0);
        let Some(grant) = self.nodes[node].grants.get(&id).cloned() else {
            let held = self.pools.iter().flat_map(|pool| pool.replicas.values());
            let promised = held.filter(|r| r.volume == id).map(|r| r.promised).max();
            let incarnation = Incarnation(self.random.wide() | 1);
            let at_least = promised.unwrap_or_default();
            return self.plan(id, Change::Acquire(Acquire { node: name, incarnation, at_least }));
        };
        if fencing::is_stale(record, &name) {
            self.plan(id, Change::FenceStale { node: name });
        }
        if grant.epoch.0 <= record.grants.fenced {
            // Its sessions end, and it asks for another epoch.
            self.nodes[node].grants.remove(&id);
        } else {
            self.change_members(node, record, grant);
        }
    }

    /// The target takes newcomers in, and lets go of replicas that are to leave.
    fn change_members(&mut self, node: usize, record: &VolumeRecord, mut grant: Grant) {
        let (id, now) = (record.id.0, self.now());
        if grant.joint.is_none() {
            let Some(next) = self.next_rule(record, &grant.membership) else { return };
            let accepting = self.accepting(node, id, &grant);
            if !grant.is_enough(&accepting) {
                return;
            }
            grant.make_view(Some(next));
            grant.asked = None;
            self.nodes[node].grants.insert(id, grant.clone());
        }
        // It asks the records when both lists have the joint View, and once more where no answer came.
        let accepting = self.accepting(node, id, &grant);
        let has_asked = grant.asked.is_some_and(|at| at + SWAP_LOST_AFTER > now);
        let Some(Rule { membership_version, rf, cf, known }) = grant.joint.clone() else { return };
        if has_asked || !grant.is_enough(&accepting) {
            return;
        }
        let swap = MembershipSwap {
            volume: id,
            node: node_name(node),
            epoch: grant.epoch,
            incarnation: grant.incarnation,
            version: membership_version - 1,
            rf,
            cf,
            known,
        };
        grant.asked = Some(now);
        self.nodes[node].grants.insert(id, grant);
        self.plan(id, Change::Swap(swap));
    }

    /// The rule behind the target's that the record wishes for.
    fn next_rule(&self, record: &VolumeRecord, now: &Membership) -> Option<Rule> {
        let desired = replicas::desired(record);
        let mut known = now.known.clone();
        let there = |m: &Member| self.holder_of(m.guid).is_some();
        let newcomer = desired.newcomers.iter().map(|n| n.member).find(there);
        match newcomer.filter(|new| !now.contains(*new)) {
            Some(new) => match known.iter_mut().find(|m| m.id == new.id) {
                Some(old) => *old = new,
                None => known.push(new),
            },
            None => {
                let leaving = desired.leaving.first().filter(|_| known.len() > 1)?;
                known.retain(|m| m != leaving);
            }
        }
        let (rf, membership_version) = (known.len() as u8, now.version + 1);
        Some(Rule { membership_version, rf, cf: record.cf_of(rf), known })
    }

    fn holder_of(&self, guid: ReplicaGuid) -> Option<usize> {
        self.pools.iter().position(|pool| pool.replicas.contains_key(&guid))
    }

    /// Replicas of the grant's list that take what the target sends.
    fn accepting(&mut self, node: usize, volume: VolumeId, grant: &Grant) -> Vec<Member> {
        let (name, now) = (node_name(node), self.schedule.now());
        let mut accepting = Vec::new();
        for (index, pool) in self.pools.iter_mut().enumerate() {
            if !pool.runs || self.cut.contains(&(node, index)) {
                continue;
            }
            for replica in pool.replicas.values_mut().filter(|r| r.volume == volume) {
                let version = replica.membership.as_ref().map_or(0, |m| m.version);
                let is_known = grant.membership.contains(replica.member);
                let joint = grant.joint.as_ref();
                let is_next = joint.is_some_and(|joint| joint.known.contains(&replica.member));
                let takes = (is_known || is_next)
                    && grant.epoch >= replica.promised
                    && grant.epoch.0 > replica.fenced
                    && version <= grant.membership.version;
                if takes {
                    (replica.promised, replica.incarnation) = (grant.epoch, grant.incarnation);
                    let before = replica.heard.take();
                    let before = before.filter(|h| h.by == name && h.last + 2 * LEASE > now);
                    let since = before.map_or(now, |heard| heard.since);
                    replica.heard = Some(Heard { by: name.clone(), since, last: now });
                    (replica.joint, replica.views) = (grant.joint.clone(), grant.views);
                    if is_known {
                        replica.membership = Some(grant.membership.clone());
                        replica.quorum = true;
                    }
                    accepting.push(replica.member);
                }
            }
        }
        accepting
    }

    /// The node learns which of its devices are of a use that is over.
    fn look_at_device(&mut self, node: usize, record: &VolumeRecord) {
        let (name, id) = (node_name(node), record.id.0);
        let Some(device) = self.nodes[node].devices.get_mut(&id) else { return };
        let since = record.used.since_of(&name);
        let is_another = since != 0 && since != device.since_epoch;
        device.dead |= is_another || is_over(record, &name, device.since_epoch);
        let device = device.clone();
        // Nothing of it passes before its node has another epoch, with which its use begins anew.
        let is_told = device.dead || device.is_shared || record.used.unproven;
        if !is_told && self.truth.is_over(id, &name, &device) {
            let detail = format!("volume {id}: {name} is not told that {device:?} is dead");
            self.violate("DeadDevicesAreTold", detail);
        }
        let is_attached = record.attachments.iter().any(|a| a.node == name);
        let device = self.nodes[node].devices.get_mut(&id).expect("it was there");
        if (!is_attached || device.dead) && self.random.percent(30) {
            device.in_use_since = None;
        }
        if (!is_attached || device.dead) && device.in_use_since.is_none() {
            self.nodes[node].devices.remove(&id);
        }
    }

    fn use_device(&mut self, node: usize, volume: VolumeId) {
        let (begins, ends) = (self.random.percent(50), self.random.percent(15));
        let (now, name) = (self.schedule.now(), node_name(node));
        let record = self.records.volumes.get(&volume);
        let is_attached = record.is_some_and(|r| r.attachments.iter().any(|a| a.node == name));
        let Some(device) = self.nodes[node].devices.get_mut(&volume) else { return };
        match device.in_use_since {
            None if begins && is_attached && !device.dead => device.in_use_since = Some(now),
            Some(_) if ends => device.in_use_since = None,
            _ => {}
        }
    }

    fn report_node(&mut self, node: usize) {
        let (name, now) = (node_name(node), self.schedule.now());
        let there = &self.nodes[node];
        let devices = there.devices.iter().map(|(volume, device)| DeviceSeen {
            volume: *volume,
            device: String::new(),
            in_use: device.in_use_since.is_some(),
            mounts: Vec::new(),
            since_epoch: device.since_epoch,
            size_bytes: 0,
            dead: String::new(),
        });
        let told = there.attach_answers.then(|| (now, devices.collect()));
        let seen = self.observed.nodes.entry(name.clone());
        let seen = seen.or_insert(Seen { last: now, devices: None });
        seen.last = now;
        seen.devices = told.or(seen.devices.take());
        // The controller signs grants once more, by what is reported. A node may report anything.
        let (mut signed, mut holds) = (Vec::new(), Vec::new());
        for (volume, grant) in &there.grants {
            let Some(record) = self.records.volumes.get(volume) else { continue };
            if self.doubt.is_none() && needs_proof(record, &name, grant.epoch.0) {
                holds.push((*volume, grant.epoch.0));
            }
            let lies = self.random.percent(10);
            let epoch = if lies { record.opened.epoch } else { grant.epoch.0 };
            if self.doubt.is_none() && is_granted_to(record, &name, epoch) {
                signed.push((*volume, epoch));
            }
        }
        for (volume, epoch) in holds {
            self.plan(volume, Change::ProveHolder { node: name.clone(), epoch });
        }
        signed.into_iter().for_each(|(volume, epoch)| self.check_signed(volume, &name, epoch));
    }

    /// A program on the node reads and writes.
    pub(super) fn io(&mut self, node: usize, volume: VolumeId) {
        let name = node_name(node);
        let device = self.nodes[node].devices.get(&volume).cloned();
        let is_used = |device: &Device| device.in_use_since.is_some() && !device.dead;
        let Some(device) = device.filter(is_used).filter(|_| self.nodes[node].runs) else { return };
        let serves = |there: &Node| there.runs && there.grants.contains_key(&volume);
        let target = match serves(&self.nodes[node]) {
            true => Some(node),
            false if device.is_shared => self.nodes.iter().position(serves),
            false => None,
        };
        let Some(target) = target else { return };
        let grant = self.nodes[target].grants[&volume].clone();
        let accepting = self.accepting(target, volume, &grant);
        if !grant.is_enough(&accepting) {
            return;
        }
        self.stats.ios.checked += 1;
        if self.truth.is_over(volume, &name, &device) {
            let detail =
                format!("volume {volume}: {name} writes by {device:?} after another node did");
            self.violate("DeviceOfOneUse", detail);
        }
        let now = self.now();
        if let Some(device) = self.nodes[node].devices.get_mut(&volume) {
            device.used.get_or_insert(now);
        }
        // Records that went back to an older copy cannot know of it.
        let is_newest = |record: &VolumeRecord| record.opened.epoch >= grant.epoch.0;
        let is_known = self.records.volumes.get(&volume).is_some_and(is_newest);
        if !device.is_shared && is_known && self.doubt.is_none() {
            self.truth.used.insert((volume, name), now);
        }
    }

    pub(super) fn pool_turn(&mut self, pool: usize) {
        if !self.pools[pool].runs || !self.pools[pool].heard {
            return;
        }
        let (name, now) = (pool_name(pool), self.schedule.now());
        let before = self.observed.pools.insert(name.clone(), now);
        let paused =
            before.is_some_and(|before| liveness::was_away(time(before), OFFLINE_AFTER, time(now)));
        for (guid, replica) in &self.pools[pool].replicas {
            let lives = replica.heard.as_ref().is_some_and(|heard| heard.last + LEASE > now);
            let word = if lives { Hearing::Hears } else { Hearing::Silent(None) };
            let known = self.observed.words.entry((name.clone(), *guid)).or_default();
            if paused {
                *known = known.after_a_pause(time(now));
            }
            *known = word.after(*known, time(now));
        }
        if self.doubt.is_some() {
            return;
        }
        let here = |record: &&VolumeRecord| record.pools().any(|of| *of == name);
        let records: Vec<_> = self.records.volumes.values().filter(here).cloned().collect();
        records.iter().for_each(|record| self.follow_orders(pool, record));
    }

    /// The pool makes and deletes what the record orders, and says what it has.
    fn follow_orders(&mut self, pool: usize, record: &VolumeRecord) {
        let (name, id) = (pool_name(pool), record.id.0);
        for replica in record.replicas.iter().filter(|replica| replica.pool == name) {
            let there = &mut self.pools[pool];
            let is_new = replica.phase == ReplicaPhase::Recreate;
            if is_new && !there.deleted.contains(&replica.guid.0) {
                let new = || Replica::new(record, replica.member(), false);
                there.replicas.entry(replica.guid.0).or_insert_with(new);
            }
            if let Some(held) = there.replicas.get_mut(&replica.guid.0) {
                held.note = record.clone();
                held.fenced = held.fenced.max(record.grants.fenced);
            }
        }
        let held: Vec<ReplicaGuid> = self.pools[pool].replicas.keys().copied().collect();
        for guid in held.into_iter().filter(|guid| Self::is_ordered(record, &name, *guid)) {
            self.check_deleted(id, guid);
            self.pools[pool].replicas.remove(&guid);
            self.pools[pool].deleted.insert(guid);
        }
        let there = &self.pools[pool];
        let held = there.replicas.values().filter(|replica| replica.volume == id);
        let held = held.map(|replica| (replica.member.guid, ReplicaState::Present));
        let gone = there.deleted.iter().map(|guid| (*guid, ReplicaState::Gone));
        let answers = held.chain(gone).map(|(guid, state)| ((name.clone(), guid), state)).collect();
        let random = &mut self.random;
        let mut new = || ReplicaGuid(random.wide() | 1);
        let mut after = record.clone();
        lifecycle::step(&mut after, &answers, false, &mut new, &mut Vec::new());
        let is_gone = after.replicas.is_empty() && after.discarded.is_empty();
        if after.phase == VolumePhase::Deleting && is_gone {
            self.records.volumes.remove(&id);
        } else if after != *record {
            self.update(id, |volume, _| {
                *volume = after;
                Ok(())
            });
        }
    }
}
