//! The story as an orchestrator tells it, by calls of CSI and CSI-Addons alone: those that Kubernetes, the manager
//! of CSI-Addons and RamenDR make, in their order.

use anyhow::{Context, Result, bail};
use quoin_api::csi_addons::replication::controller_client::ControllerClient as Replication;
use quoin_api::csi_addons::replication::get_volume_replication_info_response::Status as State;
use quoin_api::csi_addons::replication::replication_source::{Type, VolumeGroupSource};
use quoin_api::csi_addons::replication::{
    DemoteVolumeRequest, DisableVolumeReplicationRequest, EnableVolumeReplicationRequest,
    GetVolumeReplicationInfoRequest, GetVolumeReplicationInfoResponse, PromoteVolumeRequest,
    ReplicationSource, ResyncVolumeRequest,
};
use quoin_api::csi_addons::volumegroup::controller_client::ControllerClient as Groups;
use quoin_api::csi_addons::volumegroup::{
    CreateVolumeGroupRequest, DeleteVolumeGroupRequest, ModifyVolumeGroupMembershipRequest,
};
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::super::csi::{Claim, Orchestrator, StillHeld};
use super::super::database::{self, Database, Found, Journal, VOLUME_BYTES, Volumes};
use super::super::script::{note, print_timed};
use super::super::{interrupt, print_line, show_bytes};
use super::{
    GROUP, Hand, LOG, LOST, POLL, Pair, SILENCE_BUDGET, STEP_BUDGET, TABLE, check_told, go_on,
    lose, seconds, tell_loss, wait_for_sync, work,
};
use crate::dev::layout::Layout;

/// Codes that orchestrators answer by the same call, after a while.
const PASSING: [Code; 3] = [Code::Unavailable, Code::Aborted, Code::DeadlineExceeded];

pub(super) fn play(pair: &Pair, directory: &Path) -> Result<()> {
    let first = Cluster::of("first", &pair.first(), directory)?;
    let second = Cluster::of("second", &pair.second(), directory)?;
    let application = first.make()?;
    let side = |cluster| Side { cluster, application: &application };
    Story { first: side(&first), second: side(&second), pair }.play()
}

/// One of the two clusters, by its sockets of CSI and CSI-Addons.
struct Cluster {
    name: &'static str,
    csi: Orchestrator,
    addons: Channel,
    node: String,
}

/// Volumes and group of the database; ids are the same on both sides.
struct Application {
    log: Claim,
    table: Claim,
    group: String,
}

impl Application {
    fn claims(&self) -> [&Claim; 2] {
        [&self.log, &self.table]
    }

    fn ids(&self) -> Vec<String> {
        self.claims().map(|claim| claim.volume_id.clone()).into()
    }

    fn source(&self) -> Option<ReplicationSource> {
        let source = VolumeGroupSource { volume_group_id: self.group.clone() };
        Some(ReplicationSource { r#type: Some(Type::Volumegroup(source)) })
    }
}

/// Parameters of the VolumeGroupReplicationClass, which come with each call.
fn class() -> HashMap<String, String> {
    HashMap::from([("schedulingInterval".to_owned(), "10s".to_owned())])
}

impl Cluster {
    fn of(name: &'static str, layout: &Layout, directory: &Path) -> Result<Self> {
        let places = directory.join(name);
        let csi = Orchestrator::new(&layout.csi_socket(), &places, layout.nbd())?;
        let csi = csi.of_single_replicas();
        let addons = csi.channel_of(&layout.csi_addons_socket());
        let node = csi.node_at(&layout.admin_socket())?;
        Ok(Self { name, csi, addons, node })
    }

    fn groups(&self) -> Groups<Channel> {
        Groups::new(self.addons.clone())
    }

    /// Shows a call and its answer.
    fn tell<T>(&self, call: &str, answer: &Result<T, Status>) {
        let answer = match answer {
            Ok(_) => "OK".to_owned(),
            Err(why) => format!("{:?}: {}", why.code(), why.message()),
        };
        note(&format!("{}: {call}: {answer}", self.name));
    }

    /// Volumes and group, as PVCs and a VolumeGroupReplication ask for them.
    fn make(&self) -> Result<Application> {
        print_timed(&format!(
            "a database on first: volumes {LOG} and {TABLE} of {}, one group, mirrored to second",
            show_bytes(VOLUME_BYTES as u64)
        ));
        let log = self.csi.create(LOG, VOLUME_BYTES as u64)?;
        let table = self.csi.create(TABLE, VOLUME_BYTES as u64)?;
        note(&format!("{}: CreateVolume {LOG}, CreateVolume {TABLE}: OK", self.name));
        let mut client = self.groups();
        let request = CreateVolumeGroupRequest {
            name: GROUP.to_owned(),
            volume_ids: [&log, &table].map(|claim| claim.volume_id.clone()).into(),
            ..Default::default()
        };
        let answer = self.csi.once(client.create_volume_group(request))?;
        self.tell("CreateVolumeGroup", &answer);
        let group = answer?.volume_group.context("no group in the answer")?.volume_group_id;
        Ok(Application { log, table, group })
    }
}

/// The application at one of the clusters.
struct Side<'a> {
    cluster: &'a Cluster,
    application: &'a Application,
}

impl Hand for Side<'_> {
    fn open(&self) -> Result<Volumes> {
        self.open_claims(self.application.claims())
    }

    fn close(&self, volumes: Volumes) -> Result<()> {
        drop(volumes);
        self.unpublish()
    }

    fn synced_at(&self) -> Result<Option<SystemTime>> {
        Ok(self.info()?.ok().as_ref().and_then(synced_at))
    }
}

fn synced_at(info: &GetVolumeReplicationInfoResponse) -> Option<SystemTime> {
    let at = info.last_sync_time?;
    Some(UNIX_EPOCH + Duration::new(at.seconds.try_into().ok()?, at.nanos.try_into().ok()?))
}

impl Side<'_> {
    fn replication(&self) -> Replication<Channel> {
        Replication::new(self.cluster.addons.clone())
    }

    fn open_claims(&self, claims: [&Claim; 2]) -> Result<Volumes> {
        let csi = &self.cluster.csi;
        for claim in claims {
            csi.publish(&mut claim.clone(), &self.cluster.node)?;
        }
        let [log, table] = claims.map(|claim| csi.nbd_socket(claim));
        Volumes::connect(&log, &table)
    }

    fn unpublish(&self) -> Result<()> {
        let csi = &self.cluster.csi;
        self.application
            .claims()
            .into_iter()
            .try_for_each(|claim| csi.unpublish(claim, &self.cluster.node))
    }

    fn enable(&self) -> Result<Result<(), Status>> {
        let request = EnableVolumeReplicationRequest {
            replication_source: self.application.source(),
            parameters: class(),
            ..Default::default()
        };
        let mut client = self.replication();
        Ok(self.cluster.csi.once(client.enable_volume_replication(request))?.map(drop))
    }

    fn promote(&self, force: bool) -> Result<Result<(), Status>> {
        let request = PromoteVolumeRequest {
            replication_source: self.application.source(),
            parameters: class(),
            force,
            ..Default::default()
        };
        let mut client = self.replication();
        Ok(self.cluster.csi.once(client.promote_volume(request))?.map(drop))
    }

    fn demote(&self) -> Result<Result<(), Status>> {
        let request = DemoteVolumeRequest {
            replication_source: self.application.source(),
            parameters: class(),
            ..Default::default()
        };
        let mut client = self.replication();
        Ok(self.cluster.csi.once(client.demote_volume(request))?.map(drop))
    }

    fn resync(&self, force: bool) -> Result<Result<bool, Status>> {
        let request = ResyncVolumeRequest {
            replication_source: self.application.source(),
            parameters: class(),
            force,
            ..Default::default()
        };
        let mut client = self.replication();
        Ok(self.cluster.csi.once(client.resync_volume(request))?.map(|answer| answer.ready))
    }

    fn info(&self) -> Result<Result<GetVolumeReplicationInfoResponse, Status>> {
        let request = GetVolumeReplicationInfoRequest {
            replication_source: self.application.source(),
            ..Default::default()
        };
        let mut client = self.replication();
        self.cluster.csi.once(client.get_volume_replication_info(request))
    }

    fn modify(&self, ids: Vec<String>) -> Result<Result<usize, Status>> {
        let request = ModifyVolumeGroupMembershipRequest {
            volume_group_id: self.application.group.clone(),
            volume_ids: ids,
            ..Default::default()
        };
        let mut client = self.cluster.groups();
        let answer = self.cluster.csi.once(client.modify_volume_group_membership(request))?;
        Ok(answer.map(|answer| answer.volume_group.map_or(0, |group| group.volumes.len())))
    }

    /// Repeats a call while its code says so, and shows each code that it has once.
    fn repeated<T>(
        &self,
        call: &str,
        budget: Duration,
        mut attempt: impl FnMut() -> Result<Result<T, Status>>,
    ) -> Result<Result<T, Status>> {
        let (began, mut shown) = (Instant::now(), None);
        loop {
            let answer = attempt()?;
            let code = answer.as_ref().err().map(Status::code);
            if code.is_none() || shown != code {
                self.cluster.tell(call, &answer);
                shown = code;
            }
            if !code.is_some_and(|code| PASSING.contains(&code)) || began.elapsed() > budget {
                return Ok(answer);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Repeats a call until it is OK.
    fn succeeds<T>(
        &self,
        call: &str,
        attempt: impl FnMut() -> Result<Result<T, Status>>,
    ) -> Result<T> {
        let answer = self.repeated(call, STEP_BUDGET, attempt)?;
        answer.with_context(|| format!("{call} on {}", self.cluster.name))
    }

    /// A call that is to have this code at once.
    fn is_refused<T>(
        &self,
        call: &str,
        code: Code,
        attempt: impl FnOnce() -> Result<Result<T, Status>>,
    ) -> Result<()> {
        let answer = attempt()?;
        self.cluster.tell(call, &answer);
        match answer {
            Err(why) if why.code() == code => Ok(()),
            Err(why) => bail!("{call} is not {code:?}: {why}"),
            Ok(_) => bail!("{call} is not refused"),
        }
    }

    /// Turns of the manager for what is to be primary. A failed precondition is answered by force at once.
    fn become_primary(&self) -> Result<()> {
        self.succeeds("EnableVolumeReplication", || self.enable())?;
        match self.repeated("PromoteVolume", SILENCE_BUDGET, || self.promote(false))? {
            Err(why) if why.code() == Code::FailedPrecondition => {
                self.succeeds("PromoteVolume, force", || self.promote(true))
            }
            answer => answer.with_context(|| format!("PromoteVolume on {}", self.cluster.name)),
        }
    }

    /// Turns of the manager for what is to be a copy, until it has what the primary has.
    fn become_copy(&self) -> Result<()> {
        let began = Instant::now();
        self.succeeds("DemoteVolume", || self.demote())?;
        while !self.resync(true)?.unwrap_or(false) {
            if began.elapsed() > STEP_BUDGET {
                bail!("{} does not follow", self.cluster.name);
            }
            std::thread::sleep(POLL);
        }
        note(&format!("{}: ResyncVolume, force: OK, it is ready", self.cluster.name));
        Ok(())
    }

    /// Removes the application from the side that it left, as RamenDR does. The copy stays.
    fn clean_up(&self) -> Result<()> {
        let (cluster, application) = (self.cluster, self.application);
        let request = DisableVolumeReplicationRequest {
            replication_source: application.source(),
            ..Default::default()
        };
        let mut client = self.replication();
        cluster.csi.once(client.disable_volume_replication(request))??;
        for claim in application.claims() {
            cluster.csi.give_back(claim)?;
        }
        let members = self.modify(Vec::new())??;
        let request = DeleteVolumeGroupRequest {
            volume_group_id: application.group.clone(),
            ..Default::default()
        };
        let mut client = cluster.groups();
        cluster.csi.once(client.delete_volume_group(request))??;
        note(&format!(
            "{}: DisableVolumeReplication, DeleteVolume of each, ModifyVolumeGroupMembership to nothing, \
             DeleteVolumeGroup: OK",
            cluster.name
        ));
        if members != application.claims().len() {
            bail!("{members} members of the copy are left");
        }
        Ok(())
    }
}

struct Story<'a> {
    first: Side<'a>,
    second: Side<'a>,
    pair: &'a Pair,
}

impl Story<'_> {
    fn play(&self) -> Result<()> {
        let (first, second) = (&self.first, &self.second);
        let database = self.begin()?;
        let told_by = "GetVolumeReplicationInfo";
        let (told, journal) = lose(&self.pair.cluster, first, database, told_by)?;
        let found = self.fail_over(told, &journal)?;
        print_timed("the database goes on at second");
        let database = go_on(second, &journal, found, 2)?;
        self.come_back(&journal)?;
        work(&database)?;
        print_timed("failback, a planned move: the database stops for it");
        let database = relocate(second, first, database, 3)?;
        print_timed("relocation to second, which is the same with the sides changed");
        let database = relocate(first, second, database, 4)?;
        let journal = database.finish()?;
        let volumes = second.open()?;
        let count = journal.check_whole(&volumes)?;
        second.close(volumes)?;
        print_timed("the database is at second, and first has the copy");
        print_line(&format!(
            "\n{count} records are on second: all that was acknowledged, less what the failover said to lose; \
             no command of Quoin was used\n"
        ));
        Ok(())
    }

    /// A database on the first cluster, whose group is to be primary there.
    fn begin(&self) -> Result<Database> {
        let (first, second) = (&self.first, &self.second);
        first.become_primary()?;
        wait_for_sync(first, UNIX_EPOCH)?;
        second.is_refused("PromoteVolume, force", Code::Aborted, || second.promote(true))?;
        print_timed(&format!(
            "the database writes: each record to {LOG}, flushed, then to {TABLE}, flushed"
        ));
        let nothing = Found { in_log: 0, in_table: 0 };
        Database::start(first.open()?, Journal::default(), nothing, 1)
    }

    /// The second cluster is to be primary; what is lost is compared with what was told.
    fn fail_over(&self, told: SystemTime, journal: &Journal) -> Result<Found> {
        let second = &self.second;
        print_timed("failover: second is to be primary, which takes 30 s without a word of first");
        second.become_primary()?;
        let began = Instant::now();
        let volumes = second.open()?;
        note(&format!("served {} after the promotion", seconds(began.elapsed())));
        let found = journal.check(&volumes)?;
        check_told(told, journal, found)?;
        tell_loss(told, journal, found)?;
        second.close(volumes)?;
        Ok(found)
    }

    /// The first cluster is back, and is to be a copy. `lost`: what was acknowledged there.
    fn come_back(&self, lost: &Journal) -> Result<()> {
        let (first, second) = (&self.first, &self.second);
        print_timed("the first cluster is back, and knows nothing of the failover");
        self.pair.cluster.release(&LOST)?;
        let began = Instant::now();
        let why = loop {
            match first.info()? {
                Ok(info) if info.status() == State::Error => break info.status_message,
                answer if began.elapsed() > STEP_BUDGET => {
                    bail!("the split is not seen: {answer:?}")
                }
                _ => std::thread::sleep(POLL),
            }
        };
        note(&format!("first: GetVolumeReplicationInfo: {:?}: {why}", State::Error));
        let volumes = first.open()?;
        let count = lost.check_whole(&volumes)?;
        note(&format!("first has its own {count} records: neither side overwrites the other one"));
        first.close(volumes)?;

        print_timed("first is to be a copy: it has diverged, and discards nothing without force");
        first.succeeds("DemoteVolume", || first.demote())?;
        let began = Instant::now();
        // Its brain hears of the other history first.
        while !matches!(first.promote(true)?, Err(why) if why.message().contains("both sides wrote"))
        {
            if began.elapsed() > STEP_BUDGET {
                bail!("it has not diverged");
            }
            std::thread::sleep(POLL);
        }
        first.is_refused("PromoteVolume, force", Code::Aborted, || first.promote(true))?;
        let ready = first.succeeds("ResyncVolume", || first.resync(false))?;
        if ready {
            bail!("what it wrote is discarded without force");
        }
        first.clean_up()?;
        first.become_copy()?;
        self.check_lost(lost)?;
        first.clean_up()?;

        print_timed("first follows as a copy of what the database writes at second");
        wait_for_sync(second, database::now())?;
        let info = second.info()??;
        let behind = synced_at(&info).and_then(|at| database::now().duration_since(at).ok());
        note(&format!(
            "second: GetVolumeReplicationInfo: {:?}, first is {} behind",
            info.status(),
            seconds(behind.unwrap_or_default())
        ));
        match first.open() {
            Err(error) if error.is::<StillHeld>() => note(&format!("first: {error}")),
            Err(error) => return Err(error),
            Ok(_) => bail!("a copy is published"),
        }
        Ok(())
    }

    /// Snapshots of the resync have all that it discarded, and are cloned.
    fn check_lost(&self, lost: &Journal) -> Result<()> {
        let (first, application) = (&self.first, self.first.application);
        let csi = &first.cluster.csi;
        let kept = |claim: &Claim, name: &str| {
            let snapshots = csi.snapshots(claim)?;
            let [snapshot] = &*snapshots else { bail!("{} snapshots of {name}", snapshots.len()) };
            csi.create_from(&format!("old-{name}"), VOLUME_BYTES as u64, Some(snapshot))
        };
        let clones = [kept(&application.log, LOG)?, kept(&application.table, TABLE)?];
        let volumes = first.open_claims([&clones[0], &clones[1]])?;
        let count = lost.check_whole(&volumes)?;
        drop(volumes);
        for clone in &clones {
            csi.delete(clone, &first.cluster.node)?;
        }
        note(&format!(
            "ListSnapshots has what the resync kept, and clones of it all {count} records of before, every byte \
             compared"
        ));
        Ok(())
    }
}

/// A planned move, after which the side that was left is cleaned up and follows. Nothing is lost.
fn relocate(from: &Side, to: &Side, database: Database, reign: u64) -> Result<Database> {
    interrupt::check()?;
    let journal = database.finish()?;
    let began = Instant::now();
    from.unpublish()?;
    from.succeeds("DemoteVolume", || from.demote())?;
    to.become_primary()?;
    let restored = to.modify(to.application.ids());
    let volumes = to.open()?;
    let took = began.elapsed();
    if restored?? != to.application.ids().len() {
        bail!("the group has other members than before");
    }
    let count = journal.check_whole(&volumes)?;
    note(&format!(
        "all {count} records are on {}, none is lost, every byte compared; it stood still for {}",
        to.cluster.name,
        seconds(took)
    ));
    let found = Found { in_log: count, in_table: count };
    let database = Database::start(volumes, journal, found, reign)?;
    from.become_copy()?;
    from.clean_up()?;
    work(&database)?;
    Ok(database)
}
