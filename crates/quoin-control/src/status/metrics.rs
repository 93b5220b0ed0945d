//! The controller's metrics, as text that a scraper reads. Values are read from the controller
//! for each request, so counting costs nothing in between.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use quoin_cluster::mirror::Role;
use quoin_cluster::records::MirrorRecord;
use quoin_telemetry::volume_labels::volume_labels;

use crate::controller::Controller;
use crate::disaster::scheduled_backup::BackupRecord;
use crate::mirror::{calls, view};
use crate::status::health::{Judgement, Reason};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Named {
    name: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Health {
    health: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Condition {
    reason: String,
    severity: String,
}

impl Condition {
    fn of(reason: Reason) -> Self {
        let severity = reason.severity().as_str().to_owned();
        Self { reason: reason.as_str().to_owned(), severity }
    }
}

/// A handle that can be made before the controller runs and asked while it does.
#[derive(Clone, Default)]
pub struct Metrics {
    controller: Arc<Mutex<Weak<Controller>>>,
    backups: Arc<BackupRecord>,
    has_no_volumes: bool,
}

/// Most volumes that have metrics of their own: the first ones by name.
const VOLUMES_MAX: usize = 5000;

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    pub fn new() -> Self {
        Self::default()
    }

    /// Without metrics by volume.
    #[must_use]
    pub fn without_volumes(self) -> Self {
        Self { has_no_volumes: true, ..self }
    }

    /// Shows this controller from now on, as long as it lives.
    pub fn watch(&self, controller: &Arc<Controller>) {
        *self.controller.lock().expect("no holder of this lock panics") =
            Arc::downgrade(controller);
    }

    /// Where scheduled backups leave what became of them.
    pub(crate) fn backups(&self) -> Arc<BackupRecord> {
        self.backups.clone()
    }

    fn controller(&self) -> Option<Arc<Controller>> {
        self.controller.lock().expect("no holder of this lock panics").upgrade()
    }

    /// Health of the controller: it serves, and can write its records.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn health(&self) -> Result<(), String> {
        let controller = self.controller().ok_or("the controller does not serve yet")?;
        controller
            .state
            .storage
            .writes
            .check()
            .map_err(|why| format!("records cannot be written: {why}"))
    }

    /// The metrics in the OpenMetrics text format.
    pub fn render(&self) -> String {
        let mut registry = Registry::with_prefix("quoin");
        let up = Gauge::<i64>::default();
        registry.register("controller_up", "1 while the controller serves", up.clone());
        if let Some(controller) = self.controller() {
            up.set(1);
            volumes(&controller, &mut registry);
            if !self.has_no_volumes {
                each_volume(&controller, &mut registry);
            }
            replicas(&controller, &mut registry);
            snapshots(&controller, &mut registry);
            healing(&controller, &mut registry);
            let writes = Counter::<u64>::default();
            writes.inc_by(controller.state.storage.writes.count());
            registry.register(
                "record_writes",
                "Commits of records: of one each, or of several events",
                writes,
            );
            records(&controller, &mut registry);
            pools(&controller, &mut registry);
            nodes(&controller, &mut registry);
            mirrors(&controller, &mut registry);
            peers(&controller, &mut registry);
            let fenced = Gauge::<i64>::default();
            fenced.set(i64::try_from(controller.state.fences().len()).unwrap_or(i64::MAX));
            let help = "Blocks of addresses that are fenced (`quoin fence list`)";
            registry.register("fences", help, fenced);
            let reclaimed = Counter::<u64>::default();
            reclaimed.inc_by(controller.volumes.reclaims.reclaimed_bytes());
            let help =
                "Bytes that replicas gave back by orders (`quoin volume reclaim`), since the start";
            registry.register_with_unit("reclaimed", help, Unit::Bytes, reclaimed);
        }
        if self.backups.is_scheduled() {
            backups(&self.backups, &mut registry);
        }
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfStore {
    engine: String,
    leader: String,
}

/// The store of the records: who rules by it, its lease, and how it answers.
fn records(controller: &Controller, registry: &mut Registry) {
    let storage = &controller.state.storage;
    let about = storage.store.about();
    let leader = about.lease.as_ref().map(|lease| lease.holder.clone()).unwrap_or_default();
    let family = Family::<OfStore, Gauge>::default();
    family.get_or_create(&OfStore { engine: about.engine.to_owned(), leader }).set(1);
    let help = "1 for the store of the records, and the controller that rules by it";
    registry.register("records_store", help, family);
    let term = Gauge::<i64>::default();
    term.set(i64::try_from(controller.state.term().number).unwrap_or(i64::MAX));
    registry.register("term", "Term in which the controller rules", term);
    let gauge = |value: f64| {
        let gauge = Seconds::default();
        gauge.set(value);
        gauge
    };
    if let Some(lease) = &about.lease {
        let help = "How long the lease of the records lasts without a renewal";
        registry.register_with_unit(
            "records_lease",
            help,
            Unit::Seconds,
            gauge(lease.lasts.as_secs_f64()),
        );
        let help = "Time until the lease of the records ends, unless it is renewed";
        registry.register_with_unit(
            "records_lease_left",
            help,
            Unit::Seconds,
            gauge(lease.left().as_secs_f64()),
        );
    }
    if let Some(since) = storage.since_answer(about.lease.as_ref()) {
        let help = "Time since the store of the records last answered";
        let since = gauge(since.as_secs_f64());
        registry.register_with_unit("records_answer_age", help, Unit::Seconds, since);
    }
    let latency = storage.writes.latency();
    if let Some(last) = latency.last() {
        let help = "Latency of the last call that the store of the records answered";
        let last = gauge(last.as_secs_f64());
        registry.register_with_unit("records_last_call", help, Unit::Seconds, last);
    }
    let [reads, writes] = latency.histograms();
    let help = "Latency of reads of records that were answered";
    registry.register_with_unit("records_read", help, Unit::Seconds, reads);
    let help = "Latency of changes of records that were answered";
    registry.register_with_unit("records_write", help, Unit::Seconds, writes);
}

fn backups(record: &BackupRecord, registry: &mut Registry) {
    let (last, failures) = (Gauge::<i64>::default(), Counter::<u64>::default());
    last.set(record.last_seconds());
    failures.inc_by(record.failures());
    let help = "When the newest scheduled backup was made, since 1970; 0: there is none";
    registry.register_with_unit("last_backup_timestamp", help, Unit::Seconds, last);
    let help = "Scheduled backups that failed since the start";
    registry.register("backup_failures", help, failures);
}

fn volumes(controller: &Controller, registry: &mut Registry) {
    let family = Family::<Health, Gauge>::default();
    for health in ["Online", "Opening", "Degraded", "Faulted", "Unknown"] {
        family.get_or_create(&Health { health: health.to_owned() }).set(0);
    }
    let conditions = Family::<Condition, Gauge>::default();
    for reason in Reason::ALL {
        conditions.get_or_create(&Condition::of(*reason)).set(0);
    }
    let not_judged = Gauge::<i64>::default();
    let (attached, bytes) = (Gauge::<i64>::default(), Gauge::<i64>::default());
    for volume in controller.state.volumes.list() {
        match controller.status.judge(&volume) {
            Judgement::NotYet(_) => drop(not_judged.inc()),
            Judgement::Known(found) => {
                for found in found {
                    conditions.get_or_create(&Condition::of(found.reason)).inc();
                }
            }
        }
        let health = crate::status::shown(&controller.state, &volume).health.to_owned();
        family.get_or_create(&Health { health }).inc();
        attached.inc_by(i64::from(!volume.attachments.is_empty()));
        bytes.inc_by(i64::try_from(volume.size_bytes).unwrap_or(i64::MAX));
    }
    registry.register("volumes", "Volumes by health", family);
    let help = "Volumes with a condition, by its reason and severity (docs/health.md)";
    registry.register("volume_conditions", help, conditions);
    let help = "Volumes whose health cannot be judged yet";
    registry.register("volumes_not_judged", help, not_judged);
    registry.register("volumes_attached", "Volumes attached to a node", attached);
    registry.register_with_unit("volumes_size", "Sum of the volumes' sizes", Unit::Bytes, bytes);
}

fn each_volume(controller: &Controller, registry: &mut Registry) {
    let family = Family::<Vec<(String, String)>, Gauge>::default;
    let (size, used, snapshots, unwell) = (family(), family(), family(), family());
    let mut volumes = controller.state.volumes.list();
    volumes.sort_by(|one, other| one.spec.name.cmp(&other.spec.name));
    volumes.truncate(VOLUMES_MAX);
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for volume in volumes {
        let labels = volume_labels(&volume.spec.name, &volume.spec.claim);
        let status = crate::status::shown(&controller.state, &volume);
        let replicas = controller.status.replicas(&volume);
        let fullest = replicas.iter().map(|replica| replica.used_bytes).max();
        size.get_or_create(&labels).set(count(volume.size_bytes));
        used.get_or_create(&labels).set(count(fullest.unwrap_or(0)));
        let of_volume = controller.state.snapshots.of_volume(volume.id.0);
        let kept = of_volume.iter().filter(|one| one.point.is_none() && one.is_kept()).count();
        snapshots.get_or_create(&labels).set(count(kept as u64));
        unwell.get_or_create(&labels).set(i64::from(status.health != "Online"));
    }
    registry.register_with_unit("volume_size", "Size of the volume", Unit::Bytes, size);
    let help = "Space of the volume and its snapshots in the pool that has most of it";
    registry.register_with_unit("volume_used", help, Unit::Bytes, used);
    registry.register("volume_snapshots", "Snapshots of the volume", snapshots);
    registry.register("volume_unwell", "1 while the volume's health is not Online", unwell);
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfVolume {
    volume: String,
    pool: String,
}

type Seconds = Gauge<f64, std::sync::atomic::AtomicU64>;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Phase {
    phase: String,
}

fn replicas(controller: &Controller, registry: &mut Registry) {
    let family = Family::<Phase, Gauge>::default();
    for phase in ["Creating", "InSync", "CatchingUp", "Rebuilding", "Offline", "Gone", "Deleting"] {
        family.get_or_create(&Phase { phase: phase.to_owned() }).set(0);
    }
    let (slow, took) =
        (Family::<OfVolume, Gauge>::default(), Family::<OfVolume, Seconds>::default());
    let (mut rebuilt, mut total) = (0u64, 0u64);
    for volume in controller.state.volumes.list() {
        for replica in controller.status.replicas(&volume) {
            if replica.phase == "Rebuilding" {
                rebuilt += replica.rebuilt_bytes;
                total += replica.rebuild_total_bytes;
            }
            // Slow ones only: a number for every replica would be too many.
            if replica.slow {
                let label =
                    OfVolume { volume: volume.spec.name.clone(), pool: replica.pool.clone() };
                slow.get_or_create(&label).set(1);
                took.get_or_create(&label).set(replica.write_us as f64 / 1e6);
            }
            family.get_or_create(&Phase { phase: replica.phase }).inc();
        }
    }
    registry.register("replicas", "Replicas by phase", family);
    let help = "1 for each replica that takes writes much later than the others of its volume";
    registry.register("replica_slow", help, slow);
    let help = "Time until a write is applied there, of the replicas that are slow";
    registry.register_with_unit("replica_write", help, Unit::Seconds, took);
    let gauge = |value: u64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        gauge
    };
    let help = "Copied so far by the rebuilds that are under way";
    registry.register_with_unit("rebuilt", help, Unit::Bytes, gauge(rebuilt));
    let help = "What the rebuilds under way copy in all";
    registry.register_with_unit("rebuild", help, Unit::Bytes, gauge(total));
}

fn snapshots(controller: &Controller, registry: &mut Registry) {
    let family = Family::<Phase, Gauge>::default();
    for phase in ["Wished", "Ready", "Deleting", "Retained"] {
        family.get_or_create(&Phase { phase: phase.to_owned() }).set(0);
    }
    for snapshot in controller.state.snapshots.records.list() {
        let phase = snapshot.phase.as_str().to_owned();
        family.get_or_create(&Phase { phase }).inc();
    }
    registry.register("snapshots", "Snapshots by phase", family);
    let family = Family::<Phase, Gauge>::default();
    for phase in ["Wished", "Ready", "Deleting"] {
        family.get_or_create(&Phase { phase: phase.to_owned() }).set(0);
    }
    for group in controller.state.snapshots.groups.list() {
        let phase = group.phase.as_str().to_owned();
        family.get_or_create(&Phase { phase }).inc();
    }
    registry.register("group_snapshots", "Group snapshots by phase", family);
    // Scheduled ones only: without a schedule nobody says how old the newest may be.
    let (age, interval) =
        (Family::<OfSchedule, Seconds>::default(), Family::<OfSchedule, Seconds>::default());
    for schedule in controller.state.snapshots.schedules.list() {
        let label =
            OfSchedule { schedule: schedule.name.clone(), volume: schedule.volume_name.clone() };
        interval.get_or_create(&label).set(schedule.every_ms as f64 / 1e3);
        let age_ms = crate::snapshot::view::newest_age_ms(&controller.state, &schedule);
        age.get_or_create(&label).set(age_ms as f64 / 1e3);
    }
    let help = "Age of the newest snapshot of a schedule; without one, of the schedule";
    registry.register_with_unit("schedule_newest_snapshot_age", help, Unit::Seconds, age);
    let help = "Time between two snapshots of a schedule";
    registry.register_with_unit("schedule_interval", help, Unit::Seconds, interval);
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfSchedule {
    schedule: String,
    volume: String,
}

fn healing(controller: &Controller, registry: &mut Registry) {
    let healing = controller.work.healer.counts();
    let counter = |value: u64| {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        counter
    };
    let gauge = |value: u64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        gauge
    };
    let help = "Replicas begun elsewhere by self-healing and drains since the start";
    registry.register("heals", help, counter(healing.begun));
    let help = "Of them, those that were dropped because the replica came back";
    registry.register("heals_given_up", help, counter(healing.given_up));
    let help = "Replicas that should be elsewhere and wait for their turn";
    registry.register("heals_waiting", help, gauge(healing.waiting));
    let help = "Replicas that should be elsewhere and cannot be made there";
    registry.register("heals_stuck", help, gauge(healing.stuck));
    let balance = controller.work.balancer.counts();
    let help = "Replicas begun elsewhere to even out how full pools are since the start";
    registry.register("rebalances", help, counter(balance.begun));
    let help = "Of them, those that were dropped on the way";
    registry.register("rebalances_given_up", help, counter(balance.given_up));
    let spread = Gauge::<f64, std::sync::atomic::AtomicU64>::default();
    spread.set(balance.spread as f64 / 1e6);
    let help = "How far the fullest pool and the emptiest one are apart, as a share of them";
    registry.register_with_unit("pools_spread", help, Unit::Ratios, spread);
}

fn pools(controller: &Controller, registry: &mut Registry) {
    let family = Family::<Named, Gauge>::default;
    let (up, capacity, used, live) = (family(), family(), family(), family());
    let (free, replicas, cordoned) = (family(), family(), family());
    for pool in controller.status.pools() {
        let label = Named { name: pool.name };
        let set = |family: &Family<Named, Gauge>, value: u64| {
            family.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&up, u64::from(pool.state == "Online" || pool.state == "Full"));
        set(&capacity, pool.capacity_bytes);
        set(&used, pool.used_bytes);
        set(&live, pool.live_bytes);
        set(&free, pool.free_bytes);
        set(&replicas, pool.replicas.into());
        set(&cordoned, u64::from(!pool.cordon.is_empty()));
    }
    registry.register("pool_up", "1 while the pool reports", up);
    registry.register_with_unit("pool_capacity", "Size of the pool", Unit::Bytes, capacity);
    registry.register_with_unit("pool_used", "Used in the pool", Unit::Bytes, used);
    let help = "About how much of the used space volumes and snapshots need";
    registry.register_with_unit("pool_live", help, Unit::Bytes, live);
    registry.register_with_unit("pool_free", "Free in the pool", Unit::Bytes, free);
    registry.register("pool_replicas", "Replicas placed in the pool", replicas);
    registry.register("pool_cordoned", "1 while the pool takes no new replicas", cordoned);
}

fn nodes(controller: &Controller, registry: &mut Registry) {
    let (up, attached) = (Family::<Named, Gauge>::default(), Family::<Named, Gauge>::default());
    for node in controller.status.nodes() {
        let label = Named { name: node.name };
        up.get_or_create(&label).set(i64::from(node.state == "Online"));
        attached.get_or_create(&label).set(node.attached.into());
    }
    registry.register("node_up", "1 while the node reports", up);
    registry.register("node_volumes_attached", "Volumes attached to the node", attached);
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfMirror {
    mirror: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct InRole {
    mirror: String,
    role: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByRole {
    role: String,
}

/// Labels of mirrored groups: their names. A name that several have gets the beginning of the id.
fn mirror_labels(records: &[Arc<MirrorRecord>]) -> Vec<OfMirror> {
    let mut uses = HashMap::<&str, usize>::new();
    for record in records {
        *uses.entry(&record.group_name).or_default() += 1;
    }
    let label = |record: &Arc<MirrorRecord>| {
        let name = &record.group_name;
        let mirror = match uses.get(name.as_str()) {
            Some(2..) => format!("{name}-{}", &record.id.0.to_string()[..8]),
            _ => name.clone(),
        };
        OfMirror { mirror }
    };
    records.iter().map(label).collect()
}

fn mirrors(controller: &Controller, registry: &mut Registry) {
    let mirrored = &controller.state.mirrored;
    let counts = Family::<ByRole, Gauge>::default();
    for role in Role::ALL {
        counts.get_or_create(&ByRole { role: view::role(role).to_owned() }).set(0);
    }
    let gauges = Family::<OfMirror, Gauge>::default;
    let seconds = Family::<OfMirror, Seconds>::default;
    let (roles, healthy) = (Family::<InRole, Gauge>::default(), gauges());
    let (split, orphan, bytes) = (gauges(), gauges(), gauges());
    let (lag, interval) = (seconds(), seconds());
    let mut records = mirrored.records.list();
    for record in &records {
        counts.get_or_create(&ByRole { role: view::role(record.role()).to_owned() }).inc();
    }
    records.sort_by(|one, other| one.group_name.cmp(&other.group_name));
    records.truncate(calls::GROUPS_MAX);
    for (record, label) in records.iter().zip(mirror_labels(&records)) {
        let role = record.role();
        let in_role = InRole { mirror: label.mirror.clone(), role: view::role(role).to_owned() };
        roles.get_or_create(&in_role).set(1);
        orphan.get_or_create(&label).set(i64::from(role == Role::Orphan));
        let figures = mirrored.figures(record.id.0);
        let is_split = figures.as_ref().is_some_and(|figures| figures.is_split(role));
        split.get_or_create(&label).set(i64::from(is_split));
        if role != Role::Primary {
            continue;
        }
        interval.get_or_create(&label).set(record.settings.interval_s as f64);
        let Some(figures) = figures else { continue };
        healthy.get_or_create(&label).set(i64::from(figures.is_healthy()));
        if let Some(time) = figures.lag() {
            lag.get_or_create(&label).set(time.as_secs_f64());
        }
        let counted = mirrored.lag_bytes(record.id.0);
        if let Some(counted) =
            counted.filter(|lag| lag.since == record.brain().points.common && lag.told.is_none())
        {
            bytes.get_or_create(&label).set(i64::try_from(counted.bytes).unwrap_or(i64::MAX));
        }
    }
    registry.register("mirrors", "Mirrored volumes and groups by their role here", counts);
    let help = "1 for the role that the mirrored volume or group has here";
    registry.register("mirror_role", help, roles);
    let help =
        "Age of what the peer has of a mirror that is primary here; none before its first copy";
    registry.register_with_unit("mirror_lag", help, Unit::Seconds, lag);
    let help = "Bytes written since the last common point of a mirror that is primary here, as counted last";
    registry.register_with_unit("mirror_lag", help, Unit::Bytes, bytes);
    let help = "Time between two points of a mirror that is primary here";
    registry.register_with_unit("mirror_interval", help, Unit::Seconds, interval);
    let help = "1 while the peer of a mirror that is primary here keeps up";
    registry.register("mirror_healthy", help, healthy);
    let help = "1 while both sides of the mirror are primary";
    registry.register("mirror_split_brain", help, split);
    let help = "1 for a copy whose mirror was ended by its peer";
    registry.register("mirror_orphan", help, orphan);
}

fn peers(controller: &Controller, registry: &mut Registry) {
    let up = Family::<Named, Gauge>::default();
    for peer in controller.membership.peers.list() {
        let is_up = peer.state == "linked" || peer.state == "heard";
        up.get_or_create(&Named { name: peer.name }).set(i64::from(is_up));
    }
    registry.register("peer_up", "1 while a mirror of the peer is heard", up);
}
