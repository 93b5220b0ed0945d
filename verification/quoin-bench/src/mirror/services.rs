//! Moves of volumes through CSI and CSI-Addons, as an orchestrator makes them: from the first call that may succeed to
//! every volume at its path of the other side's node, block volumes and file systems, after processes of both clusters
//! were killed.
//!
//! Each group has five members that a client writes, and one with a file system that is only mounted and read.

use std::collections::HashMap;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use quoin_api::csi::VolumeCapability;
use quoin_api::csi_addons::replication::controller_client::ControllerClient;
use quoin_api::csi_addons::replication::replication_source::{Type, VolumeGroupSource};
use quoin_api::csi_addons::replication::{
    DemoteVolumeRequest, EnableVolumeReplicationRequest, PromoteVolumeRequest, ReplicationSource,
};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::failovers::{
    Compared, History, MEMBERS, Side, TIMED, come_back, compare_all, group_name, kill_for_a_while,
    lose_after_kills, make_groups_of, name, silent, while_writing,
};
use super::{Two, WITHIN};
use crate::Error;
use crate::compare::median;
use crate::further::Fact;
use crate::orchestrated::{Orchestrator, block, mount};
use crate::product::Away;

pub const SERVICES: &str = "mirror-services";

const TRY_AGAIN: Duration = Duration::from_millis(50);
/// File of a mounted volume.
const FILE: &str = "told";

/// A volume of one side, and the caller that brings it up.
struct Claim {
    volume: String,
    capability: VolumeCapability,
    caller: Orchestrator,
    is_mounted: bool,
}

/// An orchestrator of one of the clusters.
struct Manager {
    runtime: Runtime,
    replication: ControllerClient<Channel>,
    groups: Vec<String>,
    claims: Vec<Claim>,
}

/// Ids by names, of volumes or groups of the first cluster; they are the same on both.
fn ids(two: &Two<'_>, what: &str) -> Result<HashMap<String, String>, Error> {
    let text = two.first(&[what, "list", "-o", "json"])?;
    let listed: Vec<serde_json::Value> = serde_json::from_str(&text)
        .map_err(|error| Error::Failed(format!("{what} list: {error}")))?;
    let text = |one: &serde_json::Value, key: &str| one[key].as_str().map(str::to_owned);
    Ok(listed.iter().filter_map(|one| Some((text(one, "name")?, text(one, "id")?))).collect())
}

fn source(group: &str) -> Option<ReplicationSource> {
    let source = VolumeGroupSource { volume_group_id: group.to_owned() };
    Some(ReplicationSource { r#type: Some(Type::Volumegroup(source)) })
}

fn done<T>(answer: Result<T, Status>) -> Result<(), Error> {
    answer.map(drop).map_err(|why| Error::Failed(why.message().to_owned()))
}

impl Manager {
    fn of(
        side: Side<'_>,
        volumes: &HashMap<String, String>,
        groups: &HashMap<String, String>,
        directory: &Path,
    ) -> Result<Self, Error> {
        let made = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = made.map_err(Error::io("start a runtime"))?;
        let replication = {
            let _context = runtime.enter();
            let socket = side.directory().join("csi-addons/csi-addons.sock");
            ControllerClient::new(quoin_identity::unix_channel(&socket))
        };
        let members = (0..TIMED).flat_map(|group| (0..=MEMBERS).map(move |member| (group, member)));
        let claim = |(group, member): (usize, usize)| {
            let name = name(group, member);
            let volume = volumes.get(&name).cloned();
            let paths = directory.join(if side.is_second { "second" } else { "first" }).join(name);
            let is_mounted = member == MEMBERS;
            Ok(Claim {
                volume: volume.ok_or_else(|| Error::Failed("a member is not listed".to_owned()))?,
                capability: if is_mounted { mount() } else { block() },
                caller: Orchestrator::new(&side.directory().join("csi/csi.sock"), &paths)?,
                is_mounted,
            })
        };
        let groups = (0..TIMED).filter_map(|group| groups.get(&group_name(group)).cloned());
        let (groups, claims) = (groups.collect(), members.map(claim).collect::<Result<_, _>>()?);
        Ok(Self { runtime, replication, groups, claims })
    }

    /// Makes a call until its code is no passing one.
    fn call<T, F>(
        &self,
        attempt: impl Fn(ControllerClient<Channel>) -> F,
    ) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let end = Instant::now() + WITHIN;
        loop {
            let answer = self.runtime.block_on(attempt(self.replication.clone()));
            let passing = [Code::Unavailable, Code::Aborted, Code::DeadlineExceeded];
            match &answer {
                Err(why) if passing.contains(&why.code()) && Instant::now() < end => {
                    std::thread::sleep(TRY_AGAIN);
                }
                _ => return answer,
            }
        }
    }

    /// The manager's turn: a failed precondition is answered by force at once.
    fn promote(&self, group: &str) -> Result<(), Error> {
        let parameters = HashMap::from([("schedulingInterval".to_owned(), "10s".to_owned())]);
        let enable = EnableVolumeReplicationRequest {
            replication_source: source(group),
            parameters: parameters.clone(),
            ..Default::default()
        };
        done(self.call(|mut client| {
            let request = enable.clone();
            async move { client.enable_volume_replication(request).await }
        }))?;
        let promote = |force| {
            let request = PromoteVolumeRequest {
                replication_source: source(group),
                parameters: parameters.clone(),
                force,
                ..Default::default()
            };
            self.call(|mut client| {
                let request = request.clone();
                async move { client.promote_volume(request).await }
            })
        };
        match promote(false) {
            Err(why) if why.code() == Code::FailedPrecondition => done(promote(true)),
            answer => done(answer),
        }
    }

    fn demote(&self, group: &str) -> Result<(), Error> {
        let request =
            DemoteVolumeRequest { replication_source: source(group), ..Default::default() };
        done(self.call(|mut client| {
            let request = request.clone();
            async move { client.demote_volume(request).await }
        }))
    }

    fn unpublish(&self) -> Result<(), Error> {
        self.claims.iter().try_for_each(|claim| claim.caller.unpublish(&claim.volume))
    }

    fn give_up(&self) -> Result<(), Error> {
        self.unpublish()?;
        self.groups.iter().try_for_each(|group| self.demote(group))
    }

    /// Promotes all groups and brings up all volumes; a volume each has a caller of its own.
    fn take(&self) -> Result<(), Error> {
        self.groups.iter().try_for_each(|group| self.promote(group))?;
        self.bring_up()
    }

    fn bring_up(&self) -> Result<(), Error> {
        std::thread::scope(|scope| {
            let bring_up = |claim: &Claim| claim.caller.bring_up(&claim.volume, &claim.capability);
            let claims = self.claims.iter();
            let all: Vec<_> = claims.map(|claim| scope.spawn(move || bring_up(claim))).collect();
            let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().map_err(|_| Error::Failed("a caller panicked".to_owned()))?
            };
            all.into_iter().try_for_each(ended)
        })
    }

    /// Writes the file of each file system; it is never changed again.
    fn write_files(&self) -> Result<(), Error> {
        for claim in self.claims.iter().filter(|claim| claim.is_mounted) {
            let path = claim.caller.target.join(FILE);
            std::fs::write(&path, &claim.volume).map_err(Error::io("write a file"))?;
            let file = std::fs::File::open(&path).map_err(Error::io("open a file"))?;
            file.sync_all().map_err(Error::io("sync a file"))?;
        }
        Ok(())
    }

    /// Number of file systems whose file is another one. All volumes leave the paths of the node, and stay published.
    fn check_and_unstage(&self) -> Result<u64, Error> {
        let mut wrong = 0;
        for claim in &self.claims {
            if claim.is_mounted {
                let read = std::fs::read_to_string(claim.caller.target.join(FILE));
                wrong += u64::from(read.ok().as_ref() != Some(&claim.volume));
            }
            claim.caller.unstage(&claim.volume)?;
        }
        Ok(wrong)
    }
}

pub(super) fn services(two: &Two<'_>, directory: &Path) -> Result<Vec<Fact>, Error> {
    make_groups_of(two, TIMED, MEMBERS + 1, &[])?;
    let (volumes, groups) = (ids(two, "volume")?, ids(two, "group")?);
    let side = Side { two, is_second: false, published: Some(&volumes) };
    let paths = directory.join("claims");
    let first = Manager::of(side, &volumes, &groups, &paths)?;
    let second = Manager::of(side.other(), &volumes, &groups, &paths)?;
    first.bring_up()?;
    first.write_files()?;
    let mut all = Compared { wrong: first.check_and_unstage()?, ..Default::default() };
    let mut histories: Vec<History> = (0..TIMED).map(|_| History::default()).collect();
    let (mut failovers, mut relocations) = (Vec::new(), Vec::new());
    let mut random = two.seed();
    for run in 1..=two.failovers {
        while_writing(side, &mut histories, || {
            kill_for_a_while(side, &mut random);
            Ok(())
        })?;
        let began = Instant::now();
        first.give_up()?;
        second.take()?;
        relocations.push(began.elapsed().as_secs_f64());
        let mut wrong = second.check_and_unstage()?;
        let now = SystemTime::now();
        let moved = compare_all(side.other(), &mut histories, |_| now)?;

        let away = while_writing(side.other(), &mut histories, || {
            lose_after_kills(side.other(), &mut random)
        })?;
        let told = silent(side, TIMED)?;
        let began = Instant::now();
        first.take()?;
        failovers.push(began.elapsed().as_secs_f64());
        wrong += first.check_and_unstage()?;
        let found = compare_all(side, &mut histories, |group| told[group])?;
        wrong += moved.wrong + found.wrong;
        let untold = moved.untold + found.untold;
        eprintln!(
            "run {run} of {}: relocation {:.2} s, failover {:.2} s, {wrong} wrong, {untold} writes untold",
            two.failovers,
            relocations.last().copied().unwrap_or_default(),
            failovers.last().copied().unwrap_or_default(),
        );
        all.wrong += wrong;
        all.untold += untold;
        away.into_iter().try_for_each(Away::give_back)?;
        second.unpublish()?;
        come_back(side.other(), TIMED)?;
    }
    let most = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    let (longest_failover, longest_relocation) = (most(&failovers), most(&relocations));
    let fact = |what: &str, value, unit, goal| Fact::of(SERVICES, what, value, unit, goal);
    Ok(vec![
        fact("failover", median(failovers), "s for twelve volumes", 10.0),
        fact("failover-longest", longest_failover, "s for twelve volumes", 10.0),
        fact("relocation", median(relocations), "s for twelve volumes", 20.0),
        fact("relocation-longest", longest_relocation, "s for twelve volumes", 20.0),
        fact("wrong", all.wrong as f64, "blocks or files", 0.0),
        fact("untold", all.untold as f64, "writes lost", 0.0),
    ])
}
