//! Setup of a run, drawn from its seed.

use quoin_replication::pool_host::access::Claim;
use quoin_replication::primary::{OnFull, OnQuorumLoss, PrimaryConfig, ReadMode};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta};
use quoin_types::{
    BLOCK_SIZE, Durability, Member, Membership, ReplicaGuid, ReplicaId, VolumeId,
    membership::open_quorum,
};

use super::clients::Clients;
use super::control::Control;
use super::copying::Copying;
use super::durability::DurabilityChanges;
use super::fences::Fences;
use super::growth::Growth;
use super::holes::Holes;
use super::hosts::Hosts;
use super::limits::VolumeLimits;
use super::members::Members;
use super::memory::Memory;
use super::operators::Operators;
use super::points::Points;
use super::processes::Processes;
use super::pulls::Pulls;
use super::recovery::Recovery;
use super::sharers::Sharers;
use super::snapshots::Snapshots;
use super::terms::Terms;
use super::{Event, PoolHost, TargetHost, World};
use crate::control::Record;
use crate::faults::{self, Profile};
use crate::network::Network;
use crate::random::Random;
use crate::real::RealStorage;
use crate::schedule::{Instant, MICROSECOND, MILLISECOND, SECOND, Schedule};
use crate::shape::{FaultShape, PoolShape, Shape, Wanted};
use crate::source::Source;
use crate::storage::{ModelStorage, Outage, Storage};
use crate::swarm::Swarm;
use crate::trace::Trace;
use crate::workload::{Habit, Workload};

/// Faults of one run at most, so that a mask names them.
pub const FAULTS_MAX: usize = 32;
/// Events after which a run is taken for a message loop.
pub const EVENTS_MAX: u64 = 5_000_000;
/// Answered operations that every run reaches.
pub const IOS_MIN: u64 = 1_000;

/// In one of so many seeds reads have to wait for the disks.
const COLD_SEEDS: u64 = 8;

/// Store of the replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StoreKind {
    Model,
    #[default]
    Real,
}

impl StoreKind {
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::Model => "model",
            StoreKind::Real => "real",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        [Self::Model, Self::Real].into_iter().find(|kind| kind.name() == name)
    }
}

/// A deliberate defect in what surrounds the core, to show that the simulator finds defects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// Replicas answer "applied" when an entry arrives, before they hold it.
    AcknowledgesBeforeHolding,
    /// Disks report that a sync is done and do nothing.
    SyncLies,
    /// Clocks stop although reads lean on leases.
    ClocksStop,
    /// The control plane grants an epoch again after a lost answer.
    EpochGrantedTwice,
    /// Replicas lose their data and do not report it.
    ForgetsSilently,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    pub seed: u64,
    pub store: StoreKind,
    pub trace: bool,
    /// Keep the trace for a drawing.
    pub keep: bool,
    /// Bit i: the i-th planned fault is left out.
    pub dropped: u32,
    /// Clients at most; 0: as many as are drawn.
    pub clients_max: u8,
    pub mutant: Option<Mutant>,
    /// The distribution that the seed draws from.
    pub swarm: Swarm,
}

/// Settings that stay the same during a run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    /// Number that contents name: that of another volume where this one is its copy.
    pub run: u64,
    pub mutant: Option<Mutant>,
    /// Bit i: the i-th planned fault is left out.
    dropped: u32,
    /// Failures that may occur together.
    pub profile: Profile,
    pub store: StoreKind,
    /// With the size that the records have.
    pub config: PrimaryConfig,
    /// The size that clients know of.
    pub volume_blocks: u64,
    pub rf: u8,
    pub cf: u8,
    /// Typical time of a sync.
    pub sync_ns: u64,
    /// Typical pause of a client between requests.
    pub think_ns: u64,
    /// When faults stop.
    pub horizon: Instant,
    /// Answered operations that the run reaches at least.
    pub ios_min: u64,
    /// By how much shorter faults and outages are than they are drawn.
    pub haste: u64,
    /// Pools stop for a moment as they refuse entries for room: later ones are on their way then,
    /// and come together with what is offered again.
    pub stops_without_room: bool,
    /// The volume that this one is a clone of.
    pub source: Option<Source>,
}

/// RF and CF of a run: 3/2 mostly.
fn factors(random: &mut Random) -> (u8, u8) {
    match random.below(20) {
        0 => (1, 1),
        1 | 2 => (2, 2),
        3 => (4, 3),
        4 => (5, 3),
        5 => (3, 1),
        _ => (3, 2),
    }
}

/// Draws the failures that may occur together: rot and lies only where the others can open without
/// the victim.
fn profile(
    rf: u8,
    cf: u8,
    store: StoreKind,
    shape: Option<&Shape>,
    random: &mut Random,
) -> Profile {
    let spare = rf - open_quorum(rf, cf);
    let wanted = shape.map_or(Wanted::AsDrawn, |s| s.wanted);
    let hurt = match wanted {
        Wanted::AsDrawn => spare > 0 && random.percent(35),
        Wanted::Power => false,
        Wanted::Media | Wanted::Liar => spare > 0,
    };
    if !hurt {
        return Profile::Power;
    }
    let victim = random.index(usize::from(rf));
    let lies = match wanted {
        Wanted::AsDrawn => store == StoreKind::Real && random.percent(20),
        wanted => store == StoreKind::Real && wanted == Wanted::Liar,
    };
    if lies { Profile::Liar { victim } } else { Profile::Media { victim } }
}

impl Setup {
    /// The kernel has not all of the pools in its cache.
    pub fn is_cold(&self) -> bool {
        self.seed % COLD_SEEDS == COLD_SEEDS - 1
    }

    /// Returns true if this profile may hurt what the pool holds.
    pub fn may_be_damaged(&self, pool: usize) -> bool {
        self.profile == Profile::Media { victim: pool }
            || self.profile == Profile::Liar { victim: pool }
    }

    /// Returns true if a volume of this shape keeps what this run may do to it: where data may be
    /// lost, one replica must be dispensable; and CF 1 owes nothing to the loss of a cache.
    pub fn is_promised(&self, rf: u8, cf: u8) -> bool {
        self.profile == Profile::Power || rf > open_quorum(rf, cf)
    }

    /// The replica that a Hello of the volume's targets names.
    pub fn claim_of(&self, member: Member) -> Claim {
        Claim { volume: self.config.volume, replica: member.id, guid: member.guid }
    }

    /// Returns what a pool writes when it creates a replica: a first one counts at once, another only
    /// after it has been adopted.
    pub fn newborn(
        &self,
        member: Member,
        quorum: bool,
        membership: Membership,
    ) -> (ReplicaIdentity, ReplicaMeta) {
        let identity = ReplicaIdentity {
            volume: self.config.volume,
            replica: member.id,
            guid: member.guid,
            volume_spec: bytes::Bytes::new(),
        };
        (identity, ReplicaMeta { membership, quorum, ..ReplicaMeta::default() })
    }

    /// A small world in the place of what was drawn.
    fn take(&mut self, shape: &Shape, random: &mut Random) {
        self.volume_blocks = *random.pick(shape.blocks);
        self.sync_ns = *random.pick(shape.times.sync_ns);
        self.think_ns = random.between(shape.load.think_ns.0, shape.load.think_ns.1);
        let horizon_ms = shape.faults.horizon_ms;
        self.horizon = random.between(horizon_ms.0, horizon_ms.1) * MILLISECOND;
        (self.ios_min, self.haste) = (shape.load.ios_min, shape.faults.haste);
        self.stops_without_room = shape.room.stops_without_room;
        let config = &mut self.config;
        config.volume_blocks = self.volume_blocks;
        config.lease_ms = *random.pick(shape.times.lease_ms);
        let drop_after_ms = shape.times.drop_after_ms;
        config.drop_after_ms = random.between(drop_after_ms.0, drop_after_ms.1) as u32;
        config.open_grace_ms = random.between(50, 500) as u32;
        if let Some(window_bytes) = shape.window_bytes {
            config.window_bytes = window_bytes;
        }
    }
}

impl World {
    pub fn new(options: RunOptions) -> Self {
        Self::with(options, Copying::default())
    }

    /// A world whose volume takes part in the copying of points.
    pub fn with(options: RunOptions, copying: Copying) -> Self {
        let mut random = Random::new(options.seed);
        let shape = options.swarm.shape(&mut random);
        let (rf, cf) = match &shape {
            Some(shape) => *random.pick(shape.factors),
            None => factors(&mut random),
        };
        let replicas = usize::from(rf);
        let in_memory = shape.as_ref().is_some_and(|s| s.room.full_to_the_block);
        let store = if in_memory { StoreKind::Model } else { options.store };
        let profile = profile(rf, cf, store, shape.as_ref(), &mut random);
        let apart = shape.as_ref().is_some_and(|s| s.apart);
        let shared_hosts = random.percent(40) && !apart;
        let target_hosts: [usize; 2] =
            if shared_hosts && replicas > 1 { [0, 1] } else { [replicas, replicas + 1] };
        let members_plan = Members::draw(options.seed, options.swarm, profile);
        // With an entry missing no other replica is dispensable.
        let short = members_plan.unexpected.list_is_short;
        let profile = if short { Profile::Power } else { profile };
        let hosts = replicas + 3 + members_plan.spare_pools();
        let control_host = replicas + 2;
        let volume_blocks = *random.pick(&[32, 128, 128, 400, 1024]);
        let sub_block = random.percent(50);
        let confirmed = random.percent(20) && !apart;
        let lease_ms = *random.pick(&[500, 1000, 2000, 2000, 3000]);
        let members: Vec<Member> = (0..replicas)
            .map(|i| Member {
                id: ReplicaId(0x100 + i as u128),
                guid: ReplicaGuid(random.wide() | 1),
            })
            .collect();
        let local_wanted = shared_hosts && replicas > 1 && random.percent(50);
        let config = PrimaryConfig {
            volume: VolumeId(0xabc0 + u128::from(options.seed)),
            volume_blocks,
            logical_block_size: if sub_block { 512 } else { 4096 },
            durability: if random.percent(20) { Durability::Media } else { Durability::Cache },
            on_quorum_loss: if random.percent(10) {
                OnQuorumLoss::Fail
            } else {
                OnQuorumLoss::Wait
            },
            on_full: if random.percent(20) { OnFull::NoSpace } else { OnFull::Wait },
            reads: if confirmed { ReadMode::Confirmed } else { ReadMode::Leased },
            read_only: false,
            lease_ms,
            open_grace_ms: random.between(100, 2000) as u32,
            drop_after_ms: random.between(300, 5000) as u32,
            window_bytes: *random.pick(&[256 << 10, 1 << 20, 8 << 20, 64 << 20]),
            sync_bytes: *random.pick(&[64 << 10, 1 << 20, 64 << 20]),
            sync_after_ms: random.between(50, 2000) as u32,
            local: local_wanted.then(|| members[0]),
        };
        let setup = Setup {
            seed: options.seed,
            run: copying.run().unwrap_or(options.seed),
            mutant: options.mutant,
            dropped: options.dropped,
            profile,
            store,
            config,
            volume_blocks,
            rf,
            cf,
            sync_ns: *random.pick(&[100 * MICROSECOND, MILLISECOND, 5 * MILLISECOND]),
            think_ns: random.between(10, 120) * MILLISECOND,
            horizon: random.between(10, 40) * SECOND,
            ios_min: IOS_MIN,
            haste: 1,
            stops_without_room: false,
            source: None,
        };
        let listed = members.len() - usize::from(members_plan.unexpected.list_is_short);
        let membership = Membership {
            version: 1,
            rf,
            cf,
            drf: rf,
            known: members[..listed].to_vec(),
            retired: Vec::new(),
            formed: true,
        };
        let mut typical_delay =
            *random.pick(&[30 * MICROSECOND, 200 * MICROSECOND, MILLISECOND, 5 * MILLISECOND]);
        let mut setup = setup;
        let mut clients = (3, 16);
        if let Some(shape) = &shape {
            setup.take(shape, &mut random);
            typical_delay = *random.pick(shape.times.delay_ns);
            clients = shape.load.clients;
        }
        let holes = Holes::draw(options.seed, options.swarm);
        if let Some(volume_blocks) = holes.volume_blocks().or(copying.volume_blocks()) {
            (setup.volume_blocks, setup.config.volume_blocks) = (volume_blocks, volume_blocks);
        }
        let volume_blocks = setup.volume_blocks;
        setup.source = Source::draw(options.seed, options.swarm, volume_blocks);
        let snapshots = Snapshots::draw(options.seed, options.swarm);
        let pulls = Pulls::draw(options.seed, options.swarm);
        let growth = Growth::draw(options.seed, options.swarm, volume_blocks);
        let durability =
            DurabilityChanges::draw(options.seed, options.swarm, setup.config.durability);
        let network = Network::new(hosts, typical_delay, random.fork());
        let hosts = Hosts::draw(hosts, &mut random);
        let mut workload = Workload::draw(volume_blocks, sub_block, &mut random);
        if let Some(shape) = &shape {
            workload.take(&shape.load);
        } else {
            // A window smaller than what is under way lets a member fall out for ever: allowed,
            // and no configuration of a product.
            let sequential = workload.habit == Habit::Sequential;
            let under_way = if sequential { 8 << 20 } else { 4 * workload.longest_bytes() };
            setup.config.window_bytes = setup.config.window_bytes.max(under_way);
        }
        let clients = Clients::new(random.between(clients.0, clients.1), workload);
        let (seed, swarm) = (options.seed, options.swarm);
        let size_bytes = volume_blocks * BLOCK_SIZE as u64;
        let record = Record::new(setup.config.volume, &membership, size_bytes);
        let (fences, terms) = (Fences::draw(seed, swarm), Terms::draw(seed, swarm));
        let target =
            |host: &usize| TargetHost { host: *host, life: 0, process: None, paused: false };
        let mut world = World {
            setup,
            schedule: Schedule::default(),
            stats: Default::default(),
            trace: Trace::new(options.trace, options.keep),
            hosts,
            network,
            control: Control::new(record, control_host, fences, terms),
            targets: target_hosts.iter().map(target).collect(),
            pools: Vec::new(),
            processes: Processes::draw(seed, swarm),
            clients,
            sharers: Sharers::draw(seed, swarm),
            operators: Operators {
                members: members_plan,
                recovery: Recovery::draw(seed, swarm),
                growth,
                memory: Memory::draw(seed, swarm),
                snapshots,
                points: Points::draw(options.swarm),
                pulls,
                limits: VolumeLimits::draw(seed, swarm),
                holes,
                durability,
                copying,
            },
            faults: Default::default(),
            checkers: Default::default(),
            random,
        };
        world.checkers.history.begin_behind(world.operators.copying.first_tag());
        if let Some(source) = world.setup.source.clone() {
            world.checkers.history.begin_with(source.image(options.seed));
            let begun = world.checkers.lineage.begin_with(options.seed, &source.as_begun());
            if let Err(broken) = begun {
                world.violate(broken.invariant, broken.detail);
            }
        }
        let pool_shape = shape.as_ref().and_then(|s| s.room.pool);
        for (host, member) in members.iter().enumerate() {
            world.add_pool(host, *member, &membership, pool_shape);
        }
        if let Some(missing) = members.get(listed) {
            world.begin_with_a_short_list(*missing);
        }
        for spare in 0..world.operators.members.spare_pools() {
            world.add_pool(replicas + 3 + spare, Member::default(), &membership, pool_shape);
        }
        if options.clients_max > 0 {
            world.clients.queues.truncate(options.clients_max.into());
        }
        let clocks_stop = confirmed || options.mutant == Some(Mutant::ClocksStop);
        world.plan_run(clocks_stop, shape.as_ref().map(|shape| &shape.faults));
        world
    }

    fn add_pool(
        &mut self,
        host: usize,
        member: Member,
        membership: &Membership,
        shape: Option<PoolShape>,
    ) {
        let is_cold = self.setup.is_cold();
        let mut storage: Box<dyn Storage> = match self.setup.store {
            StoreKind::Model => Box::new(ModelStorage::default()),
            StoreKind::Real => match RealStorage::new(shape, is_cold, &mut self.random) {
                Ok(storage) => Box::new(storage),
                Err(error) => {
                    self.violate("Setup", format!("a pool could not be made: {error}"));
                    return;
                }
            },
        };
        let spare = member == Member::default();
        let listed = membership.contains(member);
        let (identity, meta) = self.setup.newborn(member, listed, membership.clone());
        let blocks = self.setup.config.volume_blocks;
        let source = self.setup.source.as_ref().filter(|_| listed);
        let created = || match source {
            Some(source) => storage.create_clone(source, identity, meta, blocks, &mut self.random),
            None => storage.create(identity, meta, blocks),
        };
        if !spare && let Err(error) = created() {
            self.violate("Setup", format!("a replica could not be created: {error}"));
        }
        if let Some(ticket) = storage.sync_begin()
            && storage.sync_end(ticket, &mut self.random).is_err()
        {
            self.violate("Setup", "the first sync failed");
        }
        let pool = self.pools.len();
        self.pools.push(PoolHost {
            host,
            life: 0,
            storage,
            member,
            gone: spare,
            process: None,
            paused: false,
            outage: Outage::Process,
            slow: 1,
            cache_lost: false,
            ended_in_order: false,
            reads_failed: false,
            rolled_back: None,
            is_foreign: false,
            hurt: false,
            stuck: false,
            starts: super::recognition::Starts::new(self.setup.seed, pool),
        });
        self.schedule.after(0, Event::StartPool { pool });
    }

    fn plan_run(&mut self, clocks_stop: bool, shape: Option<&FaultShape>) {
        self.schedule.after(MILLISECOND, Event::StartTarget { target: 0 });
        for queue in 0..self.clients.queues.len() {
            let delay = self.random.below(self.setup.think_ns);
            self.schedule.after(delay, Event::Client { queue, turn: 0 });
        }
        let horizon = self.setup.horizon;
        let plan = faults::plan(self.setup.profile, clocks_stop, horizon, shape, &mut self.random);
        for (index, planned) in plan.into_iter().enumerate() {
            if index < FAULTS_MAX && self.setup.dropped & (1 << index) != 0 {
                continue;
            }
            self.schedule.at(planned.at, Event::Fault(planned));
        }
        self.plan_network_fence();
        self.schedule.at(horizon + 2 * SECOND, Event::FaultsEnd);
        self.plan_operators();
        self.plan_recovery();
        self.plan_growth();
        self.plan_memory();
        self.plan_holes();
        self.plan_snapshots();
        self.plan_durability();
        self.plan_revert();
        self.plan_pulls();
        self.plan_sharers();
        let setup = &self.setup;
        let words = format!(
            "seed {}: RF {} CF {}, {:?}, {:?}, {} blocks ({} bytes), {} clients, {:?}",
            self.setup.seed,
            setup.rf,
            setup.cf,
            setup.config.durability,
            setup.config.reads,
            setup.volume_blocks,
            setup.volume_blocks * BLOCK_SIZE as u64,
            self.clients.queues.len(),
            self.setup.profile,
        );
        self.trace.line(0, || words);
    }
}
