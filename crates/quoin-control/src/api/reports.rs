//! Reports of agents: hostile until checked, bounded, and never a command.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use quoin_api::control::{
    self as api, NodeReport, PoolReport, ReplicaReport, VolumeReport, replica_report,
};
use quoin_cluster::ownership::liveness::{self, Hearing};
use quoin_cluster::records::{Concerned, NodeRecord, PoolRecord, ReplicaRecord, VolumeRecord};
use quoin_identity::convert;
use quoin_replication::recognition::PoolCounts;
use quoin_types::{Epoch, Lsn, Position, ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::fields::{id, is_address, sentence, short};
use crate::mirror::driver::Mirrors;
use crate::reconcile::absence::Absence;
use crate::reconcile::dying::DyingPools;
use crate::reconcile::lifecycle::Lifecycle;
use crate::state::census::Doubt;
use crate::state::events::{Object, Severity};
use crate::state::observed::{
    ContentSeen, DeviceMade, DevicesSeen, PoolSeen, Progress, ReplicaSeen, ReplicaState, VolumeSeen,
};
use crate::state::{State, about};
use crate::status::health::Conditions;
use crate::text::plain;
use crate::time::now_ms;
use crate::volume::devices::{self, Devices, DevicesAnswer};
use crate::volume::epochs::Epochs;
use crate::volume::fencing::Fences;
use crate::volume::network_fences::NetworkFences;
use crate::volume::verification::Verifier;
use crate::{Error, reconcile, time, volume};

/// Replicas in one pool, and so in one report.
const REPLICAS_MAX: usize = 16_384;
const EVENTS_MAX: usize = 64;
const TOPOLOGY_MAX: usize = 64;
/// Addresses of one host.
const ADDRESSES_MAX: usize = 256;
/// No record changes so often while it is away.
const CHANGES_AHEAD_MAX: u64 = 1 << 20;
/// Reason of the event of a block without any good copy.
const BLOCK_LOST: &str = "BlockLost";

/// Checks an address: nothing, or a host's name or IP address, with or without a port.
fn address(field: &'static str, text: &str) -> Result<(), Error> {
    match text.is_empty() || is_address(text) {
        true => Ok(()),
        false => Err(Error::invalid(
            field,
            "the name or IP address of a host, with or without a port (HOST, HOST:PORT)",
        )),
    }
}

/// Reads the addresses of a host.
fn addresses(given: &[String]) -> Result<BTreeSet<IpAddr>, Error> {
    if given.len() > ADDRESSES_MAX {
        return Err(Error::invalid("addresses", format!("at most {ADDRESSES_MAX}")));
    }
    let address = |text: &String| {
        let address: Option<IpAddr> = text.parse().ok();
        address.ok_or_else(|| Error::invalid("addresses", "IPv4 and IPv6 addresses alone"))
    };
    given.iter().map(address).collect()
}

fn topology(given: &HashMap<String, String>) -> Result<BTreeMap<String, String>, Error> {
    if given.len() > TOPOLOGY_MAX {
        return Err(Error::invalid("topology", format!("at most {TOPOLOGY_MAX} keys")));
    }
    for (key, value) in given {
        short("topology", key)?;
        short("topology", value)?;
    }
    Ok(given.clone().into_iter().collect())
}

fn counts(pool: &PoolRecord) -> PoolCounts {
    PoolCounts { starts: pool.start_counter, nonce: pool.start_nonce, mark: pool.mark }
}

/// Returns true if a report is of the process before the one that reported last.
fn is_late(report: &PoolReport, pool: &PoolRecord) -> bool {
    let told =
        PoolCounts { starts: report.start_counter, nonce: report.start_nonce, mark: report.mark };
    let former = PoolCounts { starts: pool.former_start, nonce: pool.former_nonce, mark: 0 };
    pool.pool_id == report.pool_id && told.are_late(&former)
}

/// Memory of reports, and the parts that act on them.
pub struct Reports {
    state: Arc<State>,
    lifecycle: Arc<Lifecycle>,
    conditions: Arc<Conditions>,
    verifier: Arc<Verifier>,
    dying: Arc<DyingPools>,
    absence: Arc<Absence>,
    devices: Arc<Devices>,
    epochs: Arc<Epochs>,
    mirrors: Arc<Mirrors>,
    fences: Fences,
    network_fences: Arc<NetworkFences>,
    /// Replicas that are in no record, announced once.
    unexpected: Mutex<HashSet<ReplicaGuid>>,
}

impl Reports {
    pub(crate) fn new(
        state: Arc<State>,
        work: &reconcile::Parts,
        volumes: &volume::Parts,
        mirrors: Arc<Mirrors>,
    ) -> Self {
        Self {
            lifecycle: work.lifecycle.clone(),
            conditions: work.conditions.clone(),
            verifier: volumes.verifier.clone(),
            dying: work.dying.clone(),
            absence: work.absence.clone(),
            devices: volumes.devices.clone(),
            epochs: volumes.epochs.clone(),
            mirrors,
            fences: Fences::new(state.clone()),
            network_fences: volumes.network_fences.clone(),
            unexpected: Mutex::default(),
            state,
        }
    }

    /// Takes a pool's report in and does what follows from it. Returns the number of the report that
    /// the next one may build on; 0: it is to be whole.
    pub async fn pool(&self, report: &PoolReport) -> Result<u64, Error> {
        quoin_identity::check_name("pool", &report.pool)?;
        quoin_identity::check_name("node", &report.node)?;
        short("pool_id", &report.pool_id)?;
        address("address", &report.address)?;
        let error = sentence("error", &report.error)?;
        let warning = sentence("warning", &report.warning)?;
        if report.replicas.len() + report.removed.len() > REPLICAS_MAX {
            return Err(Error::invalid("replicas", format!("at most {REPLICAS_MAX}")));
        }
        let replicas: HashMap<_, _> =
            report.replicas.iter().map(replica_seen).collect::<Result<_, _>>()?;
        if !self.record_pool(report).await? {
            return Ok(0);
        }
        let removed: Vec<ReplicaGuid> =
            report.removed.iter().map(|guid| id("removed", guid)).collect::<Result<_, _>>()?;
        let about = Object::new("pool", &report.pool_id, &report.pool);
        self.agent_events(&report.events, &about, |volume| {
            let here = volume.replicas.iter().map(|replica| &replica.pool);
            here.chain(volume.discarded.iter().map(|gone| &gone.pool)).any(|p| *p == report.pool)
        });
        let back = self.absence.ends("pool", &report.pool);
        let named: Vec<ReplicaGuid> = replicas.keys().copied().collect();
        let (taken, differing) = self.pool_seen(report, replicas, &removed, [error, warning]);
        // A pool that is opening says that it lives, and nothing of what it holds.
        let is_whole =
            report.since == 0 && (report.start_counter != 0 || report.capacity_bytes != 0);
        if is_whole && self.state.term.census.hears(&report.pool) {
            self.look_for_newer_records(&report.pool);
            self.state.look_at_census();
        }
        if back && !report.leaving && report.error.is_empty() {
            let by = reporter(&about);
            let told = "it reports again";
            self.state.events.record_of(&by, Severity::Normal, about, "PoolOnline", told);
        }
        if let Some(wear) = report.wear {
            self.dying.judge(&report.pool, wear).await?;
        }
        // A heartbeat that says nothing new must cost nothing, and what is new of one volume nothing
        // for the others.
        let differing = match differing {
            None => self.state.volumes.indexed(|index| index.of_pool(&report.pool)),
            Some(volumes) if volumes.is_empty() => return Ok(taken),
            Some(volumes) => {
                volumes.iter().filter_map(|id| self.state.volumes.get(&id.to_string())).collect()
            }
        };
        if self.state.check_ruling().is_ok() {
            self.unexpected(&report.pool, &named);
            self.announce_old_records(&report.pool, &named);
        }
        self.state.announce(&Concerned::Status);
        self.state.look_at(&differing);
        self.lifecycle.reconcile_those(&differing).await?;
        Ok(taken)
    }

    /// Keeps what a pool says. Returns the number that the next report may build on, and the volumes
    /// of which it holds something else than before; `None`: all may stand otherwise now.
    fn pool_seen(
        &self,
        report: &PoolReport,
        listed: HashMap<ReplicaGuid, ReplicaSeen>,
        removed: &[ReplicaGuid],
        [error, warning]: [String; 2],
    ) -> (u64, Option<HashSet<VolumeId>>) {
        let mut observed = self.state.observed();
        // One of the next process may have been recorded since this one was.
        if self.state.pools.get(&report.pool).is_some_and(|pool| is_late(report, &pool)) {
            return (0, Some(HashSet::new()));
        }
        let was_online =
            observed.heard_pool(&report.pool, self.state.settings.offline_after).is_some();
        if !report.leaving {
            observed.reach.told(&report.pool, &report.address);
        }
        let mut seen = PoolSeen {
            last: Instant::now(),
            leaving: report.leaving,
            error,
            warning,
            ring_full: report.ring_full,
            capacity_bytes: report.capacity_bytes,
            used_bytes: report.used_bytes,
            live_bytes: report.live_bytes,
            free_bytes: report.free_bytes,
            replicas: HashMap::new(),
            scrub: report.scrub.unwrap_or_default(),
            report: report.number,
        };
        let mut before = observed.pools.remove(&report.pool);
        if let Some(before) = &mut before
            && liveness::was_away(
                time::of(before.last),
                self.state.settings.offline_after,
                time::of(seen.last),
            )
        {
            before.pause(seen.last);
        }
        let is_like_before = before.as_ref().is_some_and(|before| {
            was_online && before.error == seen.error && before.leaving == seen.leaving
        });
        let differing = match before {
            // A pool that is busy opening says that it lives, and nothing of what it holds.
            Some(before) if report.start_counter == 0 && report.capacity_bytes == 0 => {
                seen = PoolSeen {
                    capacity_bytes: before.capacity_bytes,
                    used_bytes: before.used_bytes,
                    live_bytes: before.live_bytes,
                    free_bytes: before.free_bytes,
                    ring_full: before.ring_full,
                    replicas: before.replicas,
                    scrub: before.scrub,
                    report: 0,
                    ..seen
                };
                HashSet::new()
            }
            Some(before) if report.since != 0 && before.report == report.since => {
                seen.replicas = before.replicas;
                seen.change(listed, removed)
            }
            // The report that it builds on is not known here: it says everything with its next
            // report.
            before if report.since != 0 => {
                seen.replicas = before.map(|before| before.replicas).unwrap_or_default();
                seen.report = 0;
                HashSet::new()
            }
            before => {
                let was = |guid: &ReplicaGuid| {
                    before.as_ref().and_then(|before| before.replicas.get(guid))
                };
                let after = |(guid, replica): (ReplicaGuid, ReplicaSeen)| {
                    (guid, replica.after(was(&guid), seen.last))
                };
                seen.replicas = listed.into_iter().map(after).collect();
                before.map(|before| seen.differing(&before)).unwrap_or_default()
            }
        };
        let taken = seen.report;
        observed.pools.insert(report.pool.clone(), seen);
        (taken, is_like_before.then_some(differing))
    }

    /// Records what a report tells of the pool itself; false: it is of the pool's former process, and
    /// tells nothing of the present one.
    async fn record_pool(&self, report: &PoolReport) -> Result<bool, Error> {
        let record = PoolRecord {
            name: report.pool.clone(),
            pool_id: report.pool_id.clone(),
            node: report.node.clone(),
            address: report.address.clone(),
            topology: topology(&report.topology)?,
            start_counter: report.start_counter,
            start_nonce: report.start_nonce,
            former_start: 0,
            former_nonce: 0,
            mark: report.mark,
            rolled_back: false,
            scrub_request: 0,
        };
        let about = Object::new("pool", &report.pool_id, &report.pool);
        if self.state.pools.get(&report.pool).is_none()
            && self.state.pools.create(record.clone()).await?.is_ok()
        {
            let message = format!("on node {}, data at {}", record.node, record.address);
            self.state.events.record(Severity::Normal, about, "PoolAdded", message);
            return Ok(true);
        }
        let change = |pool: &mut PoolRecord| {
            if is_late(report, pool) {
                return Ok((false, None));
            }
            let replaced = pool.pool_id != record.pool_id;
            // A pool that is opening or leaving does not tell its starts.
            let told = record.start_counter != 0 && !report.leaving;
            let (now, known) = (counts(&record), counts(pool));
            let rolled_back = !replaced && told && now.are_older_than(&known);
            let news = match (replaced, rolled_back && !pool.rolled_back) {
                (true, _) => Some(("PoolReplaced", format!("it was {}", pool.pool_id))),
                (_, true) => {
                    let message = format!(
                        "an older state of its disk came back (start {}, mark {}, after start {}, \
                         mark {}): its replicas are not used, for they may lack acknowledged \
                         writes; wipe the pool to have them rebuilt",
                        now.starts, now.mark, known.starts, known.mark
                    );
                    Some(("PoolRolledBack", message))
                }
                _ => None,
            };
            let rolled_back = !replaced && (rolled_back || pool.rolled_back);
            // The last report of a process whose starts are known tells what it did since.
            let ends = report.leaving && now.nonce != 0 && now.nonce == known.nonce;
            let counts = match (rolled_back, told, ends) {
                _ if replaced => now,
                (false, true, _) => now.after(&known),
                (false, false, true) => PoolCounts { starts: known.starts, ..now.after(&known) },
                _ => known,
            };
            let scrub_request = pool.scrub_request;
            let former = match (replaced, counts.nonce == known.nonce) {
                (true, _) => PoolCounts::default(),
                (false, true) => {
                    PoolCounts { starts: pool.former_start, nonce: pool.former_nonce, mark: 0 }
                }
                (false, false) => known,
            };
            *pool = PoolRecord {
                rolled_back,
                former_start: former.starts,
                former_nonce: former.nonce,
                start_counter: counts.starts,
                start_nonce: counts.nonce,
                mark: counts.mark,
                scrub_request,
                // A pool that leaves before it reached the controller does not know its own.
                address: match record.address.is_empty() {
                    true => std::mem::take(&mut pool.address),
                    false => record.address.clone(),
                },
                ..record.clone()
            };
            Ok((true, news))
        };
        let updated = self.state.pools.update(&report.pool, change).await?;
        let (is_present, news) = updated.map_or((true, None), |(_, told)| told);
        if let Some((reason, message)) = news {
            let by = reporter(&about);
            self.state.events.record_of(&by, Severity::Error, about, reason, message);
        }
        Ok(is_present)
    }

    /// Takes a node's report in; the answer says what the records have of its devices.
    pub async fn node(&self, report: &NodeReport) -> Result<DevicesAnswer, Error> {
        quoin_identity::check_name("node", &report.node)?;
        address("address", &report.address)?;
        short("version", &report.version)?;
        let record = NodeRecord {
            name: report.node.clone(),
            address: report.address.clone(),
            topology: topology(&report.topology)?,
            volumes_max: report.volumes_max,
            version: report.version.clone(),
            host_addresses: BTreeSet::new(),
        };
        let about = self.node_reports(&record, "it reports").await?;
        let change = |node: &mut NodeRecord| {
            // CSI knows none; the target does.
            let address = match record.address.is_empty() {
                true => std::mem::take(&mut node.address),
                false => record.address.clone(),
            };
            let host_addresses = std::mem::take(&mut node.host_addresses);
            *node = NodeRecord { address, host_addresses, ..record.clone() };
            Ok(())
        };
        if let Some((node, ())) = self.state.nodes.update(&report.node, change).await? {
            self.network_fences.node_has_addresses(&node).await?;
        }
        self.agent_events(&report.events, &about, |volume| {
            let used = volume.attachments.iter().any(|a| a.node == report.node);
            let holds = volume.opened.owner.as_deref() == Some(report.node.as_str());
            used || holds || volume.grants.holder == report.node
        });
        let devices = report.knows_devices.then_some(&report.devices[..]);
        self.node_lives(about, report.leaving, devices)
    }

    /// A target lives: its node is one that volumes can be attached to, and online. CSI's report
    /// of the node stays beside that.
    pub async fn target(&self, report: &api::TargetReport) -> Result<DevicesAnswer, Error> {
        quoin_identity::check_name("node", &report.node)?;
        address("address", &report.address)?;
        short("version", &report.version)?;
        let record = NodeRecord {
            name: report.node.clone(),
            address: report.address.clone(),
            topology: BTreeMap::new(),
            volumes_max: 0,
            version: report.version.clone(),
            host_addresses: addresses(&report.addresses)?,
        };
        let about = self.node_reports(&record, "its target reports").await?;
        let change = |node: &mut NodeRecord| {
            if !record.address.is_empty() {
                node.address.clone_from(&record.address);
            }
            node.version.clone_from(&record.version);
            // A version that does not report them says nothing of them.
            if !record.host_addresses.is_empty() {
                node.host_addresses.clone_from(&record.host_addresses);
            }
            Ok(())
        };
        if let Some((node, ())) = self.state.nodes.update(&report.node, change).await? {
            self.network_fences.node_has_addresses(&node).await?;
        }
        self.share_address(report)?;
        let devices = report.knows_devices.then_some(&report.devices[..]);
        self.node_lives(about, false, devices)
    }

    /// Takes in where other nodes reach the volumes that they share with this one.
    fn share_address(&self, report: &api::TargetReport) -> Result<(), Error> {
        let address = &report.share_address;
        short("share_address", address)?;
        if !address.is_empty() && !is_host_port(address) {
            return Err(Error::invalid("share_address", "HOST:PORT of printed ASCII"));
        }
        let is_news = {
            let mut observed = self.state.observed();
            observed.node_lives(&report.node);
            let seen = observed.nodes.get_mut(&report.node);
            seen.is_some_and(|seen| {
                seen.fences_digest = Some(report.fences_digest);
                let is_news = seen.share_address != *address;
                seen.share_address.clone_from(address);
                is_news
            })
        };
        if is_news {
            self.state.announce(&Concerned::all_nodes());
        }
        Ok(())
    }

    /// The node of a report, which is recorded with its first one.
    async fn node_reports(&self, record: &NodeRecord, why: &str) -> Result<Object, Error> {
        let about = Object::new("node", &record.name, &record.name);
        if self.state.nodes.get(&record.name).is_none()
            && self.state.nodes.create(record.clone()).await?.is_ok()
        {
            self.state.events.record(Severity::Normal, about.clone(), "NodeAdded", why);
        }
        Ok(about)
    }

    /// Takes a sign of life in. `devices`: those that the node has now, where it says so; the answer is
    /// what the records have of them.
    fn node_lives(
        &self,
        about: Object,
        leaving: bool,
        devices: Option<&[api::DeviceReport]>,
    ) -> Result<DevicesAnswer, Error> {
        let devices = devices.map(devices::seen).transpose()?;
        let node = about.name.clone();
        {
            let mut observed = self.state.observed();
            observed.node_lives(&about.name);
            if let Some(seen) = observed.nodes.get_mut(&about.name) {
                seen.leaving = leaving;
                let told = devices.map(|all| DevicesSeen { told: seen.last, all });
                seen.devices = told.or(seen.devices.take());
            }
        }
        let back = self.absence.ends("node", &about.name);
        if back || leaving {
            self.state.look_at(&self.state.volumes_of_node(&about.name));
        }
        if back && !leaving {
            let by = reporter(&about);
            let told = "it reports again";
            self.state.events.record_of(&by, Severity::Normal, about, "NodeOnline", told);
        }
        Ok(self.devices.answer(&node))
    }

    /// Takes a target's report in; the answer is a fresh grant where the target may have one.
    pub async fn volume(&self, report: &VolumeReport) -> Result<Vec<u8>, Error> {
        let volume: VolumeId = id("volume_id", &report.volume_id)?;
        quoin_identity::check_name("node", &report.node)?;
        short("state", &report.state)?;
        let waiting_for = sentence("waiting_for", &report.waiting_for)?;
        short("device", &report.device)?;
        let device_message = sentence("device_message", &report.device_message)?;
        short("waiting_kind", &report.waiting_kind)?;
        self.state.check_ruling()?;
        let record = self
            .state
            .volumes
            .get(&volume.to_string())
            .ok_or_else(|| Error::missing("volume", &report.volume_id))?;
        if report.epoch != 0 && report.epoch < record.opened.epoch && report.state != "stopped" {
            self.fences.stale(volume, &report.node).await?;
        }
        // A fenced target's last words must not pass for the present state, nor those of one that
        // never asked for an epoch: an epoch that a fence used up belongs to no target.
        let is_over =
            report.epoch != record.opened.epoch || (report.epoch != 0 && !record.is_granted());
        if record.opened.owner.as_deref() != Some(report.node.as_str()) || is_over {
            return Ok(Vec::new());
        }
        if report.replicas.len() > 64 {
            return Err(Error::invalid("replicas", "at most 64"));
        }
        if report.silent.len() > quoin_types::membership::REPLICAS_MAX {
            return Err(Error::invalid("silent", "at most 16"));
        }
        if !report.nbd_uri.is_empty() && !is_nbd_uri(&report.nbd_uri) {
            return Err(Error::invalid("nbd_uri", "an nbd:// or nbds:// address of printed ASCII"));
        }
        if !report.device.is_empty() && !is_device(&report.device) {
            return Err(Error::invalid("device", "an absolute path of printed ASCII"));
        }
        let goes_by = report.goes_by.as_ref().map(goes_by).transpose()?;
        let progress = |progress: &api::ReplicaProgress| {
            let seen = Progress {
                state: plain(&progress.state).chars().take(32).collect(),
                applied_lsn: progress.applied_lsn,
                rebuilt_bytes: progress.rebuilt_bytes,
                rebuild_total_bytes: progress.rebuild_total_bytes,
                write_us: progress.write_us,
                slow: progress.slow,
            };
            Ok((id("guid", &progress.guid)?, seen))
        };
        let seen = VolumeSeen {
            node: report.node.clone(),
            epoch: report.epoch,
            state: report.state.clone(),
            waiting_for,
            nbd_uri: report.nbd_uri.clone(),
            membership_version: report.membership_version,
            replicas: report.replicas.iter().map(progress).collect::<Result<_, Error>>()?,
            silent: report
                .silent
                .iter()
                .map(|guid| id("silent", guid))
                .collect::<Result<_, Error>>()?,
            goes_by,
            device: DeviceMade {
                path: report.device.clone(),
                message: device_message,
                refused: report.device_refused,
            },
            options_version: report.options_version,
            waiting_kind: report.waiting_kind.clone(),
            content: ContentSeen {
                lsn: report.content_lsn,
                after_ms: 0,
                told_ms: now_ms(),
                feed: report.feed.clone(),
            },
        };
        let confirms = (report.epoch, report.membership_version)
            == (record.opened.epoch, record.membership.version)
            && report.state == "serving";
        let by = format!("node/{}", report.node);
        self.agent_events_of(&by, &report.events, &about(&record), |volume| volume.id == record.id);
        let is_lost = |event: &api::AgentEvent| {
            event.reason == BLOCK_LOST && event.volume_id == report.volume_id
        };
        if report.events.iter().any(is_lost) {
            self.conditions.block_lost(volume);
        }
        let is_news;
        {
            let mut observed = self.state.observed();
            if seen.is_whole() {
                observed.openings.remove(&volume);
            }
            let mut seen = seen.clone();
            let before = observed.volumes.get(&volume);
            let before = before.filter(|before| before.epoch == seen.epoch);
            seen.content.after_ms = before.map_or(0, |before| before.content.told_ms);
            let before = observed.volumes.insert(volume, seen.clone());
            is_news = before.is_none_or(|before| seen.differs(&before));
            if confirms {
                observed.confirmed.insert(volume);
            }
            // A target that speaks proves its host alive, whatever became of the CSI process.
            observed.node_lives(&report.node);
        }
        crate::reconcile::reach::pools_are_served(&self.state, connected(&record, report));
        if is_news {
            self.state.look_at(std::slice::from_ref(&record));
        }
        if let Some(mirror) = &record.mirror {
            self.mirrors.look_at(mirror.group.0);
        }
        self.lifecycle.announce_health(&record);
        if let Some(verification) = &report.verification {
            self.verifier.reported(&record, verification).await?;
        }
        if report.state == "serving" {
            self.epochs.prove_holder(&record, &report.node, report.epoch).await?;
        }
        Ok(self.epochs.fresh_grant(&record, &report.node, report.epoch))
    }

    /// Takes events in that an agent tells. One about a volume that it has nothing to do with is
    /// told of the agent itself, so that it speaks for no other.
    fn agent_events(
        &self,
        events: &[api::AgentEvent],
        about: &Object,
        concerns: impl Fn(&VolumeRecord) -> bool,
    ) {
        self.agent_events_of(&reporter(about), events, about, concerns);
    }

    fn agent_events_of(
        &self,
        by: &str,
        events: &[api::AgentEvent],
        reporter: &Object,
        concerns: impl Fn(&VolumeRecord) -> bool,
    ) {
        for event in events.iter().take(EVENTS_MAX) {
            let volume = self.state.volumes.get(&event.volume_id).filter(|volume| concerns(volume));
            let object = match (&volume, event.replica_id.len()) {
                (Some(volume), 0) => about(volume),
                (Some(volume), 32) => Object::new("replica", &event.replica_id, &volume.spec.name),
                _ => reporter.clone(),
            };
            let reason: String = event.reason.chars().take(64).collect();
            let message = match object.kind {
                "replica" => {
                    with_pool(volume.as_deref(), &event.replica_id, reporter, &event.message)
                }
                _ => event.message.clone(),
            };
            // A target lent to a volume without users leaves its pools one after the other.
            let is_unused = volume.as_ref().is_some_and(|volume| volume.attachments.is_empty());
            let severity = match Severity::of(&event.severity) {
                Severity::Warning if is_unused && LETS_GO.contains(&reason.as_str()) => {
                    Severity::Normal
                }
                severity => severity,
            };
            self.state.events.record_told(by, severity, object, &reason, message);
        }
    }

    /// Replicas that no record names are kept, and told of: a restored backup of the records
    /// must not cost data.
    fn unexpected(&self, pool: &str, named: &[ReplicaGuid]) {
        let mut news = Vec::new();
        {
            let observed = self.state.observed();
            let Some(seen) = observed.pools.get(pool) else { return };
            let unknown: Vec<_> = named
                .iter()
                .filter_map(|guid| seen.replicas.get_key_value(guid))
                .filter(|(_, replica)| replica.state != ReplicaState::Gone)
                .filter(|(_, replica)| {
                    self.state.volumes.get(&replica.volume.to_string()).is_none()
                })
                .map(|(guid, replica)| (*guid, replica.volume))
                .collect();
            let mut known = self.unexpected.lock().expect("no holder of this lock panics");
            for (guid, volume) in unknown {
                if known.len() < REPLICAS_MAX && known.insert(guid) {
                    news.push((guid, volume));
                }
            }
        }
        for (guid, volume) in news {
            let message = format!(
                "pool {pool} holds {guid} of volume {volume}, which is in no record; it is kept \
                 (`quoin controller recover --dry-run` says what it is)"
            );
            let about = Object::new("replica", guid, pool);
            let by = format!("pool/{pool}");
            self.state.events.record_told(&by, Severity::Warning, about, "ReplicaUnknown", message);
        }
    }

    /// Records of which a pool knows something newer are an old copy.
    fn look_for_newer_records(&self, pool: &str) {
        if self.state.check_ruling().is_err() || self.state.is_rolled_back(pool) {
            return;
        }
        let (mut newer, mut unknown) = (Vec::new(), false);
        {
            let observed = self.state.observed();
            let Some(seen) = observed.pools.get(pool) else { return };
            for (guid, replica) in &seen.replicas {
                if replica.state != ReplicaState::Present {
                    continue;
                }
                let Some(volume) = self.state.volumes.get(&replica.volume.to_string()) else {
                    unknown |= replica.quorum && replica.record_generation > 0;
                    continue;
                };
                let generations = volume.generation + 1..=volume.generation + CHANGES_AHEAD_MAX;
                let epoch = replica.promised.max(replica.position.epoch);
                let is_ahead = volume.epoch() < epoch && has_replica(&volume, pool, *guid);
                if is_ahead || generations.contains(&replica.record_generation) {
                    newer.push(volume.spec.name.clone());
                }
            }
        }
        newer.sort();
        let doubt = match newer.first() {
            Some(first) => Doubt::Behind(format!(
                "pool {pool} knows newer ones of {} volumes, {first} among them: they are an old copy",
                newer.len()
            )),
            None if unknown => Doubt::Suspected,
            None => return,
        };
        let message = match &doubt {
            Doubt::Behind(why) => format!(
                "the records do not rule, for {why}. They are recovered by themselves where no pool is \
                 away and nothing is undecided; `quoin controller recover --dry-run` tells"
            ),
            _ => String::new(),
        };
        if self.state.term.census.doubts(doubt) {
            if !message.is_empty() {
                let cluster = Object::new("cluster", "", "");
                self.state.events.record(Severity::Error, cluster, "RecordsBehind", message);
            }
            self.state.announce(&Concerned::Everybody);
        }
    }

    /// Replicas that were written in an epoch that no record has: the records are an old copy.
    fn announce_old_records(&self, pool: &str, named: &[ReplicaGuid]) {
        let mut behind = Vec::new();
        {
            let mut observed = self.state.observed();
            let Some(seen) = observed.pools.get(pool) else { return };
            let found = named.iter().filter_map(|guid| seen.replicas.get_key_value(guid));
            let found: Vec<_> = found
                .filter_map(|(guid, replica)| {
                    let volume = self.state.volumes.get(&replica.volume.to_string())?;
                    let is_ahead = volume.epoch() < replica.position.epoch;
                    (is_ahead && has_replica(&volume, pool, *guid)).then_some(volume)
                })
                .collect();
            for volume in found {
                if observed.behind.insert(volume.id.0) {
                    behind.push(volume);
                }
            }
        }
        for volume in behind {
            let message = "its replicas were written in a later epoch than its record knows: the \
                           records are an old copy; `quoin controller recover` makes them agree \
                           with what the pools hold";
            self.state.events.record(Severity::Error, about(&volume), "RecordsBehind", message);
        }
    }
}

/// Name under which a member's events are counted.
fn reporter(about: &Object) -> String {
    format!("{}/{}", about.kind, about.name)
}

/// Returns whether the record has this replica in this pool, now or until it is deleted there. A pool's
/// word about any other says nothing of the volume.
fn has_replica(volume: &VolumeRecord, pool: &str, guid: ReplicaGuid) -> bool {
    let mut held = volume.replicas.iter().map(|replica| (replica.guid.0, &replica.pool));
    let mut gone = volume.discarded.iter().map(|gone| (gone.guid.0, &gone.pool));
    held.any(|of| of == (guid, &pool.to_owned())) || gone.any(|of| of == (guid, &pool.to_owned()))
}

/// The pools of the replicas to which a target has a connection.
fn connected<'a>(
    volume: &'a VolumeRecord,
    report: &'a VolumeReport,
) -> impl Iterator<Item = &'a str> {
    let is_there = |progress: &&api::ReplicaProgress| {
        ["in-sync", "catching-up", "rebuilding"].contains(&progress.state.as_str())
    };
    report.replicas.iter().filter(is_there).filter_map(|progress| {
        let of_it = |replica: &&ReplicaRecord| replica.guid.0.to_string() == progress.guid;
        volume.replicas.iter().find(of_it).map(|replica| replica.pool.as_str())
    })
}

/// Reasons of a target's events about pools that it does not reach any more.
const LETS_GO: [&str; 2] = ["Waiting", "ReplicaDropped"];

/// A message about a replica, which says in which pool that is.
fn with_pool(
    volume: Option<&VolumeRecord>,
    replica_id: &str,
    reporter: &Object,
    message: &str,
) -> String {
    let of_it = |r: &&ReplicaRecord| r.id.0.to_string() == replica_id;
    // A replica that moves is in two of them, and its target speaks of either.
    let pools: Vec<&str> = match (reporter.kind, volume) {
        ("pool", _) => vec![&reporter.name],
        (_, Some(volume)) => {
            volume.replicas.iter().filter(of_it).map(|r| r.pool.as_str()).collect()
        }
        (_, None) => Vec::new(),
    };
    if pools.is_empty() || pools.iter().any(|pool| message.contains(pool)) {
        return message.to_owned();
    }
    format!("pool {}: {message}", pools.join(" or "))
}

/// Checks memberships as the core does, so that only lists and factors by its rules are kept.
fn goes_by(told: &api::GoesBy) -> Result<Arc<api::GoesBy>, Error> {
    let sound = |told: &Option<api::Membership>| {
        let told = told.as_ref().ok_or_else(|| "a membership is missing".to_owned());
        let mut membership = told.and_then(convert::membership)?;
        membership.retired.clear();
        Ok::<_, String>(Some(convert::membership_message(&membership)))
    };
    let refused = |rule| Error::invalid("goes_by", rule);
    let many = quoin_types::membership::REPLICAS_MAX;
    if told.newcomers.len() > many || told.leaving.len() > many {
        return Err(refused(format!("at most {many} newcomers, and as many that leave")));
    }
    told.newcomers
        .iter()
        .chain(&told.leaving)
        .try_for_each(|guid| id::<quoin_types::ReplicaGuid>("goes_by", guid).map(drop))?;
    let granted = sound(&told.granted).map_err(refused)?;
    let held = sound(&told.held).map_err(refused)?;
    Ok(Arc::new(api::GoesBy { granted, held, ..told.clone() }))
}

/// People and scripts hand it to other programs, so nothing but an address gets through.
fn is_nbd_uri(text: &str) -> bool {
    let scheme = text.starts_with("nbd://") || text.starts_with("nbds://");
    scheme && text.len() <= 1024 && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// See [`is_nbd_uri`]: file systems are made on the named device.
fn is_device(text: &str) -> bool {
    text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Returns true if the text is a host and a port.
fn is_host_port(text: &str) -> bool {
    let parts = text.rsplit_once(':');
    parts.is_some_and(|(host, port)| {
        !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_graphic())
            && port.parse::<u16>().is_ok_and(|port| port != 0)
    })
}

fn replica_seen(report: &ReplicaReport) -> Result<(quoin_types::ReplicaGuid, ReplicaSeen), Error> {
    let state = match report.state.as_str() {
        "created" | "open" | "closed" => ReplicaState::Present,
        "gone" => ReplicaState::Gone,
        "damaged" => ReplicaState::Damaged,
        _ => return Err(Error::invalid("state", "created, open, closed, gone or damaged")),
    };
    let seen = ReplicaSeen {
        volume: id("volume_id", &report.volume_id)?,
        state,
        quorum: report.quorum,
        position: Position { epoch: Epoch(report.position_epoch), lsn: Lsn(report.position_lsn) },
        used_bytes: report.used_bytes,
        bad_blocks: report.bad_blocks,
        repaired: report.repaired,
        is_clone: report.is_clone,
        record_generation: report.record_generation,
        promised: Epoch(report.promised_epoch),
        promised_since: time::now(),
        closed_since: (report.state == "closed").then(time::now),
        reclaimed: report.reclaimed,
        hearing: match report.hearing() {
            replica_report::Hearing::Unknown => Hearing::Unknown,
            replica_report::Hearing::Hears => Hearing::Hears,
            replica_report::Hearing::Silent => Hearing::Silent(None),
        },
    };
    Ok((id("guid", &report.guid)?, seen))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::TEXT_BYTES_MAX;

    #[test]
    fn an_address_is_a_host_with_or_without_a_port_and_no_other_text() {
        for text in ["10.0.0.2", "10.0.0.2:7401", "h3", "h3.example.org:1", "::1", "[fd00::1]:7401"]
        {
            assert!(is_address(text) && address("address", text).is_ok(), "{text}");
        }
        assert!(address("address", "").is_ok(), "not known yet");
        let long = "h".repeat(254);
        for text in ["a\u{1b}[2J", "a b", "h3:0", "h3:70000", "h3:", ":1", "-.", "ä", "h3\n", &long]
        {
            assert!(address("address", text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn words_with_control_characters_are_refused_and_sentences_become_one_line() {
        assert!(short("version", "0.1.0").is_ok());
        for text in ["0.1\n", "\u{1b}[2J", "\u{9b}", "\u{202e}x"] {
            let refused = short("version", text).unwrap_err().to_string();
            assert!(refused.contains("version") && refused.contains("control"), "{refused}");
        }
        assert_eq!(sentence("error", "disk:\nbad").unwrap(), "disk:\\nbad");
        assert!(sentence("error", &"x".repeat(TEXT_BYTES_MAX + 1)).is_err());
    }
}
