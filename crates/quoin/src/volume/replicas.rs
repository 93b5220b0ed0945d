//! `quoin volume scale` and `quoin replica move|replace|remove`: how many copies a volume has, and
//! where; and waiting for it with progress.

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use quoin_api::control::{
    ListPoolsRequest, ListReplicasRequest, MoveReplicaRequest, RecoverVolumeRequest,
    RemoveReplicasRequest, Replica, ScaleVolumeRequest, Volume,
};

use super::replica_view::ReplicaView;
use super::view::VolumeView;
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal, unanswered, volume_ref};
use crate::output::{self, Format};
use crate::pace::{self, Interrupted, Part, UnderWay};
use crate::size::{number_within, show_size};

#[derive(Args)]
pub struct ScaleOptions {
    /// The volume's name or id.
    volume: String,
    /// How many replicas it is to have [default: as many as it has]. Fewer: `quoin replica remove`.
    #[arg(long, allow_hyphen_values = true, value_parser = number_within::<u32>(1..=u32::MAX.into(),
          "a volume keeps 1 replica at least: `quoin volume delete` takes it away whole"))]
    replicas: Option<u32>,
    /// Copies that must hold a write before it is acknowledged; 0: a majority, whatever their
    /// number [default: as it is].
    #[arg(long, allow_hyphen_values = true, value_parser = number_within::<u32>(0..=16,
          "1 to as many as there are replicas must hold a write; 0: a majority, whatever their \
           number"))]
    consistency_factor: Option<u32>,
    /// A pool for a new replica, once for each [default: those with the most room].
    #[arg(long = "pool", value_name = "POOL")]
    pools: Vec<String>,
    /// Accept a consistency factor below a majority: one failure may then lose acknowledged
    /// writes.
    #[arg(long)]
    allow_loss_on_single_failure: bool,
    #[command(flatten)]
    wait: WaitOptions,
}

#[derive(Args)]
pub struct RecoverOptions {
    /// The volume's name or id.
    volume: String,
    /// A replica that is left: its pool, or its id (the beginning is enough). All must be named.
    #[arg(long, required_unless_present = "from_pool", value_name = "REPLICA")]
    keep: Vec<String>,
    /// The last copy: what this pool holds becomes the volume, and all the others are declared
    /// destroyed. Those that are there all the same are refused to be left out.
    #[arg(long, value_name = "POOL", conflicts_with_all = ["keep", "destroyed"])]
    from_pool: Option<String>,
    /// A replica that will never be started again with what it holds, once for each whose pool is
    /// away.
    #[arg(long, value_name = "REPLICA")]
    destroyed: Vec<String>,
    /// The volume's name once more: acknowledged writes that only the others held are lost.
    #[arg(long, value_name = "NAME", default_value = "")]
    accept_loss_of: String,
    #[command(flatten)]
    wait: WaitOptions,
}

#[derive(Args)]
pub struct WaitOptions {
    /// Wait until it is done, and say how far it is; --timeout is for how long nothing may move.
    /// Interrupted, it goes on all the same.
    #[arg(long)]
    wait: bool,
}

#[derive(Subcommand)]
pub enum ReplicaCommand {
    /// The copies of one volume, or of all.
    #[command(visible_alias = "ls")]
    List {
        /// Only this volume's: its name or id.
        volume: Option<String>,
    },
    /// Move a replica to another pool; it serves where it is until the new one has everything.
    #[command(after_help = "Example:\n  quoin replica move db pool-a --to pool-d --wait")]
    Move {
        /// The volume's name or id.
        volume: String,
        /// The pool that holds the replica now, or the replica's id (the beginning is enough).
        replica: String,
        /// Where to [default: the pool with the most room].
        #[arg(long)]
        to: Option<String>,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Replace a replica whose pool is gone for good by a new one elsewhere.
    #[command(after_help = "Example:\n  quoin replica replace db pool-a --wait")]
    Replace {
        /// The volume's name or id.
        volume: String,
        /// The pool that held it, or the replica's id (the beginning is enough).
        replica: String,
        /// Where the new one goes [default: the pool with the most room].
        #[arg(long)]
        pool: Option<String>,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Take replicas away by name; all that stay must be in sync. What leaves never comes back:
    /// its data is deleted.
    #[command(
        visible_alias = "rm",
        after_help = "Example:\n  quoin replica remove db pool-c --wait"
    )]
    Remove {
        /// The volume's name or id.
        volume: String,
        /// The pools that hold them, or the replicas' ids (the beginning is enough).
        #[arg(required = true)]
        replicas: Vec<String>,
        #[command(flatten)]
        wait: WaitOptions,
    },
}

pub async fn scale(
    cluster: &mut Cluster,
    options: ScaleOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let request = ScaleVolumeRequest {
        volume: Some(id_ref(&volume.id)),
        replicas: options.replicas.unwrap_or(0),
        consistency_factor: options.consistency_factor,
        allow_loss_on_single_failure: options.allow_loss_on_single_failure,
        pools: options.pools,
    };
    let volume = cluster.scale_volume(request).await.map_err(super::in_flags)?.into_inner();
    finish(cluster, volume, &options.wait, client, format).await
}

pub async fn recover(
    cluster: &mut Cluster,
    options: RecoverOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let (keep, destroyed) = match &options.from_pool {
        None => (
            meant(cluster, &volume, &options.keep).await?,
            meant(cluster, &volume, &options.destroyed).await?,
        ),
        Some(pool) => {
            let keep = meant(cluster, &volume, std::slice::from_ref(pool)).await?.remove(0);
            let others = volume.replicas.iter().filter(|r| r.known && r.replica_id != keep);
            let others = others.map(|r| r.replica_id.clone()).collect();
            (vec![keep], others)
        }
    };
    let request = RecoverVolumeRequest {
        volume: Some(id_ref(&volume.id)),
        keep_replica_ids: keep,
        destroyed_replica_ids: destroyed,
        accept_loss_of: options.accept_loss_of,
    };
    let volume = cluster.recover_volume(request).await.map_err(refusal)?.into_inner();
    if !volume.attachments.is_empty() {
        let nodes: Vec<_> = volume.attachments.iter().map(|a| a.node.as_str()).collect();
        eprintln!(
            "warning: it is in use on {}, by programs and file systems that may count on what is lost: \
             end them, unmount, check the file system (fsck), and mount it again",
            nodes.join(", ")
        );
    }
    finish(cluster, volume, &options.wait, client, format).await
}

pub async fn run(command: ReplicaCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let cluster = &mut cluster;
    match command {
        ReplicaCommand::List { volume } => {
            let request = ListReplicasRequest { volume: volume.as_deref().map(volume_ref) };
            let replicas =
                cluster.list_replicas(request).await.map_err(refusal)?.into_inner().replicas;
            let rows: Vec<_> = replicas.into_iter().map(ReplicaView::from).collect();
            output::print_list(format, &rows, "no replicas")
        }
        ReplicaCommand::Move { volume, replica, to, wait } => {
            let volume = get_volume(cluster, &volume).await?;
            relocate(cluster, volume, &replica, to, false, &wait, client, format).await
        }
        ReplicaCommand::Replace { volume, replica, pool, wait } => {
            let volume = get_volume(cluster, &volume).await?;
            // A user who names a replica by its pool may know better than reports.
            let by_id = volume.replicas.iter().all(|r| r.pool != replica);
            relocate(cluster, volume, &replica, pool, by_id, &wait, client, format).await
        }
        ReplicaCommand::Remove { volume, replicas, wait } => {
            let volume = get_volume(cluster, &volume).await?;
            let replica_ids = meant(cluster, &volume, &replicas).await?;
            let again = by_ids(&volume, &replica_ids);
            let request = RemoveReplicasRequest { volume: Some(id_ref(&volume.id)), replica_ids };
            let go_on = format!("To send it again, name what leaves by id: {again}");
            let answer = cluster.remove_replicas(request).await;
            let volume = answer.map_err(|status| unanswered(status, &go_on))?.into_inner();
            let finished = finish(cluster, volume, &wait, client, format).await;
            finished.map_err(|error| Interrupted::name_command(error, &again))
        }
    }
}

/// The command that removes these replicas and no others: once they are gone, their pools may get
/// another one of the volume.
fn by_ids(volume: &Volume, replica_ids: &[String]) -> String {
    let name = volume.spec.as_ref().map(|spec| spec.name.as_str()).unwrap_or_default();
    format!("`quoin replica remove {} {} --wait`", output::quoted(name), replica_ids.join(" "))
}

/// Has a replica made anew in another pool. The controller knows whether there is anything to do.
#[expect(clippy::too_many_arguments, reason = "what two commands have in common")]
async fn relocate(
    cluster: &mut Cluster,
    volume: Volume,
    replica: &str,
    pool: Option<String>,
    unless_in_sync: bool,
    wait: &WaitOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    // A pool that holds none may have held the one that has gone to where it was to go.
    let found = find(&volume, replica);
    let (replica_id, from_pool) = match (&found, &pool) {
        (Ok(id), _) => (id.clone(), String::new()),
        (Err(_), Some(_)) => (String::new(), replica.to_owned()),
        (Err(_), None) => {
            return meant(cluster, &volume, &[replica.to_owned()]).await.map(drop);
        }
    };
    let request = MoveReplicaRequest {
        volume: Some(id_ref(&volume.id)),
        replica_id: replica_id.clone(),
        pool: pool.clone().unwrap_or_default(),
        from_pool,
        unless_in_sync,
    };
    let before = volume;
    let volume = match (cluster.move_replica(request).await, found) {
        // The names that exist are known here.
        (Err(status), Err(_)) if status.code() == tonic::Code::NotFound => {
            return meant(cluster, &before, &[replica.to_owned()]).await.map(drop);
        }
        (answer, _) => answer.map_err(refusal)?.into_inner(),
    };
    match settled(&before, &volume, &replica_id, replica, pool.as_deref()) {
        Some(message) => output::print_one(format, &VolumeView::from(volume), || message),
        None => finish(cluster, volume, wait, client, format).await,
    }
}

/// Message where the answer reports nothing under way: the replica is there once, and known.
fn settled(
    before: &Volume,
    volume: &Volume,
    id: &str,
    named: &str,
    pool: Option<&str>,
) -> Option<String> {
    let meant =
        |r: &&Replica| if id.is_empty() { Some(&*r.pool) == pool } else { r.replica_id == id };
    let there = volume.replicas.iter().find(meant)?;
    let (id, on) = (&there.replica_id, &there.pool);
    if !there.known || volume.replicas.iter().filter(|r| r.replica_id == *id).count() > 1 {
        return None;
    }
    let held = named == *on || id.starts_with(&named.to_ascii_lowercase());
    let moved = before.replicas.iter().filter(|r| r.replica_id == *id).count() > 1;
    Some(match pool {
        Some(_) if moved => format!("replica {id} stays on pool {on}: its move is cancelled"),
        Some(_) if held => format!("replica {id} is on pool {on} already"),
        Some(_) => format!(
            "pool {named} holds no replica of the volume, and replica {id} is on pool {on} already"
        ),
        None => format!(
            "replica {id} is in sync on pool {on}: nothing is to be replaced (`quoin replica move` \
             has it elsewhere)"
        ),
    })
}

/// The ids of the replicas that a user names, each as in [`find`]; a name that is neither a
/// replica's nor a pool's is refused with the list of those that exist.
pub(super) async fn meant(
    cluster: &mut Cluster,
    volume: &Volume,
    named: &[String],
) -> Result<Vec<String>> {
    let found: Result<Vec<String>> = named.iter().map(|replica| find(volume, replica)).collect();
    let Err(unknown) = found else { return found };
    let pools = cluster.list_pools(ListPoolsRequest {}).await.map_err(refusal)?.into_inner().pools;
    let pools: Vec<String> = pools.into_iter().map(|pool| pool.name).collect();
    let is_missing = |name: &&String| find(volume, name).is_err();
    let named = named.iter().find(is_missing).map_or("", String::as_str);
    Err(no_pool(named, &pools).map_or(unknown, anyhow::Error::msg))
}

/// Refusal of a name that no pool has; `None` where one has it, or where it may be the beginning of
/// an id.
fn no_pool(named: &str, pools: &[String]) -> Option<String> {
    let is_id = named.len() >= 4 && named.bytes().all(|b| b.is_ascii_hexdigit());
    let unknown = !is_id && pools.iter().all(|pool| pool != named);
    unknown.then(|| format!("there is no pool {named}; pools are {}", pools.join(", ")))
}

/// The id of the replica that a user names by its pool, its id or the beginning of it.
pub(super) fn find(volume: &Volume, named: &str) -> Result<String> {
    let name = volume.spec.as_ref().map(|spec| spec.name.as_str()).unwrap_or_default();
    let lower = named.to_ascii_lowercase();
    let matches =
        |r: &&Replica| r.pool == named || (lower.len() >= 4 && r.replica_id.starts_with(&lower));
    let mut ids: Vec<_> =
        volume.replicas.iter().filter(matches).map(|r| r.replica_id.clone()).collect();
    ids.sort_unstable();
    ids.dedup();
    match ids.as_slice() {
        [id] => Ok(id.clone()),
        [] => bail!(
            "volume {name} has no replica {named}; it has {}",
            volume
                .replicas
                .iter()
                .map(|r| format!("{} on pool {}", r.replica_id, r.pool))
                .collect::<Vec<_>>()
                .join(", ")
        ),
        _ => bail!("{named} matches several replica ids of volume {name}: give more digits"),
    }
}

/// Says what was begun, or waits for it.
async fn finish(
    cluster: &mut Cluster,
    volume: Volume,
    wait: &WaitOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let mut volume = volume;
    if wait.wait {
        volume = wait_until_changed(cluster, volume, client).await?;
    }
    let desired_factor = volume.desired_consistency_factor;
    let view = VolumeView::from(volume);
    output::print_one(format, &view, || {
        let name = output::quoted(&view.name);
        let volume = &view.name;
        if view.membership.changing.is_empty() {
            let (have, need) =
                (view.membership.replication_factor, view.membership.consistency_factor);
            return format!("volume {volume} has {}", survives(have, need));
        }
        // A factor of 0 is a majority.
        let have = view.membership.desired_replication_factor;
        let need = if desired_factor == 0 { have / 2 + 1 } else { desired_factor };
        format!(
            "volume {volume}: {}; then it has {}\n\
             next: quoin volume get {name}   (how far it is; or --wait)",
            view.membership.changing,
            survives(have, need)
        )
    })
}

/// How many replicas there are, and what that means for writes.
fn survives(have: u32, need: u32) -> String {
    let plural = if have == 1 { "" } else { "s" };
    let spare = match have.saturating_sub(need) {
        0 => ", so they wait while any of them is away",
        _ => "",
    };
    format!("{have} replica{plural}; writes need {need} of them{spare}")
}

impl UnderWay for Volume {
    fn is_done(&self) -> bool {
        self.changing.is_empty() && !self.replicas.iter().any(is_on_its_way)
    }

    fn left_bytes(&self) -> u64 {
        left(self)
    }

    fn state_text(&self) -> String {
        // Positions of those that are in sync go on with every write.
        let replica = |r: &Replica| match r.phase.as_str() {
            "InSync" => format!("{} {}", r.guid, r.phase),
            _ => format!("{} {} {} {}", r.guid, r.phase, r.position_lsn, r.rebuilt_bytes),
        };
        let replicas: Vec<_> = self.replicas.iter().map(replica).collect();
        let version = self.membership.as_ref().map_or(0, |membership| membership.version);
        format!("{version} {} {}", self.changing, replicas.join(", "))
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        fn part(r: &mut Replica) -> Part<'_> {
            let (done_bytes, total_bytes) = (&mut r.rebuilt_bytes, &mut r.rebuild_total_bytes);
            Part { name: r.guid.clone(), done_bytes, total_bytes }
        }
        self.replicas.iter_mut().map(part).collect()
    }

    fn progress(&self, pace: &str) -> String {
        progress(self, pace)
    }
}

/// Polls until nothing is being changed any more.
pub async fn wait_until_changed(
    cluster: &mut Cluster,
    volume: Volume,
    client: &ClientOptions,
) -> Result<Volume> {
    let id = volume.id.clone();
    pace::follow(volume, client, async || get_volume(cluster, &id).await).await
}

/// A target brings the replica up to date. It reports every few seconds, so for a moment after a
/// change is recorded a new replica may be shown as not in sync yet. Without a target nothing moves,
/// and the replica has a message that says so.
fn is_on_its_way(replica: &Replica) -> bool {
    matches!(replica.phase.as_str(), "Rebuilding" | "CatchingUp") && replica.message.is_empty()
}

/// Bytes that its rebuilds have still to go through.
fn left(volume: &Volume) -> u64 {
    let left = |r: &Replica| r.rebuild_total_bytes.saturating_sub(r.rebuilt_bytes);
    volume.replicas.iter().map(left).sum()
}

fn progress(volume: &Volume, pace: &str) -> String {
    let name = volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let what = if volume.changing.is_empty() { "replicas catch up" } else { &volume.changing };
    let mut text = format!("volume {name}: {what}");
    for replica in &volume.replicas {
        if replica.rebuild_total_bytes > 0 {
            text += &format!(
                "; pool {}: {} of {} gone through",
                replica.pool,
                show_size(replica.rebuilt_bytes),
                show_size(replica.rebuild_total_bytes)
            );
        }
    }
    text += pace;
    if !volume.waiting_for.is_empty() {
        text += &format!("; waits for {}", volume.waiting_for);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_removal_is_waited_for_by_the_ids_of_what_leaves() {
        let spec = Some(quoin_api::control::VolumeSpec { name: "db".into(), ..Default::default() });
        let again = by_ids(&Volume { spec, ..Volume::default() }, &["0a".into(), "0b".into()]);
        let error = anyhow::Error::from(Interrupted::new("volume db: 1 leaves".to_owned()));
        let told = Interrupted::name_command(error, &again);
        assert!(told.is::<Interrupted>() && told.to_string().contains("remove db 0a 0b"), "{told}");
        assert!(!told.to_string().contains("the same command"), "{told}");
        let other = Interrupted::name_command(anyhow::anyhow!("no answer"), &again);
        assert_eq!(other.to_string(), "no answer");
    }

    fn replica(id: &str, pool: &str, rebuilt_bytes: u64, rebuild_total_bytes: u64) -> Replica {
        Replica {
            replica_id: id.into(),
            pool: pool.into(),
            rebuilt_bytes,
            rebuild_total_bytes,
            ..Replica::default()
        }
    }

    fn volume(replicas: Vec<Replica>) -> Volume {
        Volume { replicas, ..Volume::default() }
    }

    #[test]
    fn a_replica_is_named_by_its_pool_or_a_prefix_of_its_id() {
        let volume = volume(vec![
            replica("aabb01", "pool-a", 0, 0),
            replica("aabb02", "pool-b", 0, 0),
            replica("aabb02", "pool-c", 0, 0),
        ]);
        assert_eq!(find(&volume, "pool-a").unwrap(), "aabb01");
        assert_eq!(find(&volume, "AABB02").unwrap(), "aabb02");
        assert_eq!(find(&volume, "pool-c").unwrap(), "aabb02", "it is on its way there");
        assert!(find(&volume, "aabb").unwrap_err().to_string().contains("several"));
        assert!(find(&volume, "aab").unwrap_err().to_string().contains("no replica"));
    }

    #[test]
    fn a_repeated_move_reports_the_present_pool_and_wrong_names_are_refused() {
        let known = |id: &str, pool: &str| Replica {
            known: true,
            phase: "InSync".into(),
            ..replica(id, pool, 0, 0)
        };
        let mut volume = volume(vec![known("aabb01", "pool-d"), known("aabb02", "pool-b")]);
        for (named, id) in [("aabb01", "aabb01"), ("pool-d", "aabb01"), ("pool-a", "")] {
            let message = settled(&volume, &volume, id, named, Some("pool-d")).unwrap_or_default();
            assert!(
                message.contains("replica aabb01 is on pool pool-d already"),
                "{named}: {message}"
            );
            assert_eq!(
                message.contains("pool pool-a holds no replica"),
                named == "pool-a",
                "{message}"
            );
        }
        let message = settled(&volume, &volume, "aabb01", "aabb01", None).unwrap();
        assert!(message.contains("in sync on pool pool-d"), "{message}");
        let back = volume.clone();
        volume.replicas.push(replica("aabb01", "pool-c", 0, 0));
        let on_its_way = settled(&back, &volume, "aabb01", "aabb01", Some("pool-c"));
        assert_eq!(on_its_way, None);
        assert_eq!(settled(&back, &volume, "aabb01", "aabb01", None), None);
        let message = settled(&volume, &back, "aabb01", "pool-d", Some("pool-d")).unwrap();
        assert_eq!(message, "replica aabb01 stays on pool pool-d: its move is cancelled");
        let text = find(&volume, "ccdd").unwrap_err().to_string();
        assert!(text.contains("aabb01 on pool pool-d, aabb02 on pool pool-b"), "{text}");
    }

    #[test]
    fn an_unknown_pool_name_is_refused_with_the_existing_names() {
        let pools = ["pool-a".to_owned(), "pool-b".to_owned()];
        let message = no_pool("pool-x", &pools);
        assert_eq!(message.as_deref(), Some("there is no pool pool-x; pools are pool-a, pool-b"));
        assert_eq!(no_pool("pool-b", &pools), None, "it holds none of the volume");
        assert_eq!(no_pool("aabb0", &pools), None, "an id");
    }

    #[test]
    fn a_wait_for_a_change_ends_once_no_target_brings_a_replica_up_to_date_any_more() {
        let shown = |phase: &str, message: &str| Replica {
            phase: phase.into(),
            message: message.into(),
            known: true,
            ..replica("aabb01", "pool-a", 0, 0)
        };
        let in_sync = || shown("InSync", "");
        for phase in ["Rebuilding", "CatchingUp"] {
            let volume = volume(vec![in_sync(), shown(phase, "")]);
            assert!(!volume.is_done(), "{phase}");
            let text = progress(&volume, "");
            assert!(text.starts_with("volume : replicas catch up"), "{text}");
        }
        assert!(volume(vec![in_sync(), in_sync()]).is_done());
        let changing = Volume { changing: "1 replica moving".into(), ..volume(vec![in_sync()]) };
        assert!(!changing.is_done());
        // Nothing moves before somebody attaches the volume, or starts the pool.
        let lags =
            shown("CatchingUp", "it lags; it catches up as soon as a target opens the volume");
        let away = shown("Offline", "its pool is offline");
        assert!(volume(vec![in_sync(), lags, away]).is_done());
    }

    #[test]
    fn progress_shows_the_bytes_of_each_pool_and_the_time_left() {
        let volume = volume(vec![replica("aabb01", "pool-a", 250, 1000)]);
        assert_eq!(left(&volume), 750);
        let text = progress(&volume, "; 50 B/s, about 15 s left");
        assert!(text.contains("pool-a: 250 B of 1000 B gone through"), "{text}");
        assert!(text.ends_with("; 50 B/s, about 15 s left"), "{text}");
    }
}
