//! Mirrored volumes as metrics, conditions, messages and the end of a pairing see them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use quoin_api::control::{
    GroupIntroduction, PeerMessage, PeerWord, VolumeGroupRef, VolumeRef, peer_word,
};
use quoin_api::volume::Local;
use quoin_cluster::mirror::record::{Parameters, Points};
use quoin_cluster::mirror::{Begun, Chain, ClusterId, Generation, Keepsake, Record as Brain, Role};
use quoin_cluster::ownership::mirrored;
use quoin_cluster::records::{
    Cut, Introduction, MirrorRecord, MirrorSettings, PeerRecord, Record, SnapshotPhase,
    SnapshotRecord, Text, VolumeRecord, decode, encode,
};
use quoin_control::store::Entry;
use quoin_control::{Controller, Error, Metrics};
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};

use crate::cluster::{Cluster, by_name};

const PEER: u128 = 0xe0;
const INTERVAL_S: u64 = 10;

/// Puts a record where the next controller finds it.
fn put<R: Record>(cluster: &Cluster, record: &R) {
    cluster.store.put_back(Entry { key: record.key(), revision: 1, value: encode(record) });
}

/// Makes a peer called west for the next controller.
fn pair(cluster: &Cluster) {
    let peer = PeerRecord {
        cluster: format!("{PEER:032x}"),
        name: "west".into(),
        introduction: Introduction::default(),
        paired_ms: 1,
        limits: Default::default(),
    };
    put(cluster, &peer);
}

fn brain(cluster: &Cluster, group: GroupId, members: Vec<VolumeId>, role: Role) -> Brain {
    let own: ClusterId = cluster.controller.state.identity().cluster().to_string().parse().unwrap();
    let peer: ClusterId = format!("{PEER:032x}").parse().unwrap();
    let parameters = Parameters { interval_s: INTERVAL_S, may_take_over: false };
    let chain = |cluster| {
        Chain::new(Begun { generation: Generation { number: 1, cluster, id: 7 }, at: None })
    };
    match role {
        Role::Primary => Brain {
            chain: chain(own),
            is_paired: true,
            ..Brain::primary(group, [own, peer], members, parameters)
        },
        role => {
            Brain { role, ..Brain::secondary(group, [own, peer], members, chain(peer), parameters) }
        }
    }
}

fn mirror(brain: Brain, name: &str, is_volume: bool) -> MirrorRecord {
    let settings = MirrorSettings {
        interval_s: INTERVAL_S,
        may_take_over: false,
        compresses: true,
        bandwidth_limit: 0,
        is_paused: false,
    };
    MirrorRecord::new(brain, (name.to_owned(), is_volume), settings, 1)
}

/// Makes a volume that is mirrored by itself, for the next controller.
async fn mirrored_volume(cluster: &mut Cluster, name: &str, role: Role) {
    let volume = cluster.create(name).await;
    let group = GroupId(volume.id.0.0);
    let brain = brain(cluster, group, vec![volume.id.0], role);
    let entry = cluster.store.entry(&volume.key());
    let mut record: VolumeRecord = decode(&entry.value).unwrap();
    let keepsake = Keepsake { is_primary: role == Role::Primary, begun: brain.chain.top() };
    mirrored::keep(&mut record, group, keepsake);
    put(cluster, &record);
    put(cluster, &mirror(brain, name, true));
}

/// Looks at all groups once, as the reconciler does again and again.
async fn look(controller: &Controller) {
    for record in controller.mirror.driver.list().unwrap() {
        controller.mirror.driver.view(&record).await.unwrap();
    }
}

fn rendered(controller: &Arc<Controller>) -> String {
    let metrics = Metrics::new();
    metrics.watch(controller);
    metrics.render()
}

fn reasons(cluster: &Cluster, name: &str) -> Vec<String> {
    cluster.shown(name).conditions.into_iter().map(|condition| condition.reason).collect()
}

/// Names of metrics of mirrors that the example of alert rules uses.
fn names_in_rules() -> BTreeSet<String> {
    let rules = include_str!("../../../../packaging/prometheus/quoin.rules.yml");
    let expressions = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = expressions.flat_map(|expression| expression.split(move |c| !is_of_name(c)));
    let of_mirrors =
        |name: &&str| name.starts_with("quoin_mirror_") || name.starts_with("quoin_peer_");
    words.filter(of_mirrors).map(str::to_owned).collect()
}

#[tokio::test]
async fn metrics_show_each_mirror_and_none_of_one_that_is_gone() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    for (name, role) in [
        ("db", Role::Primary),
        ("copy", Role::Diverged),
        ("left", Role::Orphan),
        ("over", Role::Off),
    ] {
        mirrored_volume(&mut cluster, name, role).await;
    }
    // Two mirrors of one name: each has its own figures.
    for id in [1, 2] {
        let brain = brain(&cluster, GroupId(id << 96), Vec::new(), Role::Secondary);
        put(&cluster, &mirror(brain, "twin", false));
    }
    let mut record =
        mirror(brain(&cluster, GroupId(3), Vec::new(), Role::Primary), "synced", false);
    let mut synced = record.brain().clone();
    synced.points.common = Some(quoin_types::ids::PointId(5));
    synced.points.common_cut_ms = 1;
    record.change(1, synced);
    put(&cluster, &record);
    cluster.restart().await;
    look(&cluster.controller).await;
    let controller =
        Arc::new(crate::cluster::open(&cluster.store, cluster.offline_after).await.unwrap());
    look(&controller).await;
    let shown = rendered(&controller);
    for line in [
        "quoin_mirror_role{mirror=\"db\",role=\"primary\"} 1\n",
        "quoin_mirror_role{mirror=\"copy\",role=\"diverged\"} 1\n",
        "quoin_mirror_role{mirror=\"twin-00000001\",role=\"secondary\"} 1\n",
        "quoin_mirror_role{mirror=\"twin-00000002\",role=\"secondary\"} 1\n",
        "quoin_mirror_healthy{mirror=\"db\"} 0\n",
        "quoin_mirror_interval_seconds{mirror=\"db\"} 10.0\n",
        "quoin_mirror_split_brain{mirror=\"db\"} 0\n",
        "quoin_mirror_orphan{mirror=\"left\"} 1\n",
        "quoin_mirror_orphan{mirror=\"db\"} 0\n",
        "quoin_mirrors{role=\"primary\"} 2\n",
        "quoin_mirrors{role=\"resyncing\"} 0\n",
        "quoin_peer_up{name=\"west\"} 0\n",
    ] {
        assert!(shown.contains(line), "{line}{shown}");
    }
    // The age since the cut of 1970.
    assert!(shown.contains("quoin_mirror_lag_seconds{mirror=\"synced\"} 1"), "{shown}");
    assert!(!shown.contains("quoin_mirror_lag_seconds{mirror=\"db\"}"), "nothing is synced yet");
    assert!(!shown.contains("quoin_mirror_healthy{mirror=\"copy\"}"), "a copy has no health");
    assert!(!shown.contains("mirror=\"over\""), "it was ended");
    let names = names_in_rules();
    assert!(names.len() > 5);
    for name in names {
        assert!(shown.contains(&format!("\n{name}{{")), "a rule is on {name}");
    }
}

#[tokio::test]
async fn the_message_of_a_volume_has_its_role_in_the_mirror() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    mirrored_volume(&mut cluster, "db", Role::Primary).await;
    cluster.create("other").await;
    cluster.restart().await;
    let mirror = cluster.shown("db").mirror.unwrap();
    assert_eq!((mirror.role.as_str(), mirror.group_name.as_str()), ("primary", "db"));
    assert_eq!(mirror.group_id, cluster.volume("db").id.0.to_string());
    assert_eq!(cluster.shown("other").mirror, None);
}

#[tokio::test]
async fn a_volume_says_what_is_wrong_with_its_mirror() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    for (name, role) in [("db", Role::Primary), ("copy", Role::Diverged), ("left", Role::Orphan)] {
        mirrored_volume(&mut cluster, name, role).await;
    }
    // Three intervals of it are over at once.
    let hasty = cluster.create("hasty").await;
    let primary = brain(&cluster, GroupId(hasty.id.0.0), vec![hasty.id.0], Role::Primary);
    let mut hasty = mirror(primary, "hasty", true);
    hasty.settings.interval_s = 0;
    mirrored_volume(&mut cluster, "hasty", Role::Primary).await;
    put(&cluster, &hasty);
    cluster.restart().await;
    cluster.settle().await.unwrap();
    look(&cluster.controller).await;
    tokio::time::sleep(Duration::from_millis(2)).await;
    look(&cluster.controller).await;
    assert_eq!(reasons(&cluster, "db"), Vec::<String>::new(), "it has three intervals");
    assert_eq!(reasons(&cluster, "hasty"), ["MirrorBehind"]);
    assert_eq!(reasons(&cluster, "copy"), ["MirrorDiverged"]);
    let orphan = cluster.shown("left").conditions.pop().unwrap();
    assert_eq!(orphan.reason, "MirrorOrphan");
    assert!(orphan.message.contains("west"), "{}", orphan.message);
    assert!(orphan.way_out.contains("`quoin mirror promote left`"), "{}", orphan.way_out);
    // It may be on its way back to its last point, and a client's writes would go with the rest.
    let refused = cluster.attach("left", "n1").await.unwrap_err();
    assert!(refused.to_string().contains("promote it first"), "{refused}");
}

#[tokio::test]
async fn a_peer_stays_paired_while_groups_are_mirrored_with_it() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    for (at, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        let brain = brain(&cluster, GroupId(at as u128 + 1), Vec::new(), Role::Secondary);
        put(&cluster, &mirror(brain, name, false));
    }
    cluster.restart().await;
    let refused = cluster.controller.membership.peers.unpair("west").await;
    let Err(Error::Precondition(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("\"a\"") && why.contains("\"c\"") && !why.contains("\"d\""), "{why}");
    assert!(why.contains("and 1 more") && why.contains("`quoin mirror disable`"), "{why}");
    for (at, role) in [Role::Off, Role::Orphan, Role::Off, Role::Orphan].into_iter().enumerate() {
        let brain = brain(&cluster, GroupId(at as u128 + 1), Vec::new(), role);
        put(&cluster, &mirror(brain, "over", false));
    }
    cluster.restart().await;
    cluster.controller.membership.peers.unpair("west").await.unwrap();
    assert_eq!(cluster.controller.membership.peers.list(), []);
}

#[tokio::test]
async fn a_copy_is_an_orphan_once_its_peer_begins_another_mirror_of_the_same_volume() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    mirrored_volume(&mut cluster, "db", Role::Secondary).await;
    cluster.restart().await;
    let driver = &cluster.controller.mirror.driver;
    let copy = driver.list().unwrap().pop().unwrap();
    let [own, peer] = [copy.brain().cluster, copy.brain().peer];
    let member = copy.brain().members[0].volume;
    let role_after = async |id: u128| {
        let parameters = copy.brain().parameters;
        let mut theirs = Brain::primary(copy.id.0, [peer, own], vec![member], parameters);
        let generation = Generation { number: 1, cluster: peer, id };
        theirs.chain = Chain::new(Begun { generation, at: None });
        let said = GroupIntroduction {
            name: "db".into(),
            is_volume: true,
            record: theirs.encode(),
            interval_s: INTERVAL_S,
            may_take_over: false,
            compresses: true,
            bandwidth_limit: 0,
        };
        let body = PeerWord { what: Some(peer_word::What::Group(said)) }.encode_to_vec();
        let (peer_cluster_id, group_id) = (peer.to_string(), copy.id.0.to_string());
        driver.reported(vec![PeerMessage { peer_cluster_id, group_id, body }], vec![]).await;
        driver.list().unwrap().pop().unwrap().role()
    };
    assert_eq!(role_after(7).await, Role::Secondary, "it is the mirror that it follows");
    assert_eq!(role_after(8).await, Role::Orphan);
    assert_eq!(role_after(8).await, Role::Orphan, "a person promotes or deletes it");
}

#[tokio::test]
async fn a_member_that_left_is_an_ordinary_volume_though_the_controller_died_as_it_left() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    let (stays, left) = (cluster.create("stays").await, cluster.create("left").await);
    let group = GroupId(77);
    let brain = brain(&cluster, group, vec![stays.id.0], Role::Primary);
    let keepsake = Keepsake { is_primary: true, begun: brain.chain.top() };
    for volume in [&stays, &left] {
        let entry = cluster.store.entry(&volume.key());
        let mut record: VolumeRecord = decode(&entry.value).unwrap();
        mirrored::keep(&mut record, group, keepsake);
        put(&cluster, &record);
    }
    put(&cluster, &mirror(brain, "shop", false));
    cluster.restart().await;
    look(&cluster.controller).await;
    assert!(cluster.volume("left").mirror.is_none());
    assert!(cluster.volume("stays").mirror.is_some());
}

fn all(names: &[&str]) -> Vec<VolumeRef> {
    names.iter().filter_map(|name| by_name(name)).collect()
}

fn named(name: &str) -> VolumeGroupRef {
    VolumeGroupRef { id: String::new(), name: name.to_owned() }
}

/// Makes a group of one volume that is mirrored, for the next controller.
async fn mirrored_group(
    cluster: &mut Cluster,
    name: &str,
    volume: &str,
    change: impl Fn(Brain) -> Brain,
) {
    let volume = cluster.create(volume).await;
    let members = all(&[&volume.spec.name]);
    let group = cluster.controller.mirror.groups.create(name, &members).await.unwrap().id.0;
    let brain = change(brain(cluster, group, vec![volume.id.0], Role::Primary));
    let mut record: VolumeRecord = decode(&cluster.store.entry(&volume.key()).value).unwrap();
    mirrored::keep(&mut record, group, brain.keepsake());
    put(cluster, &record);
    put(cluster, &mirror(brain, name, false));
}

/// A point that a volume holds.
fn held(volume: &VolumeRecord, point: PointId) -> SnapshotRecord {
    SnapshotRecord {
        id: Text(mirrored::snapshot_of(point, volume.id.0)),
        name: "point".to_owned(),
        volume: volume.id,
        volume_name: volume.spec.name.clone(),
        phase: SnapshotPhase::Ready,
        wished_ms: 1,
        cut: Some(Cut { lsn: 9, epoch: 0, chain: 1, at_ms: 5, size_bytes: 1 << 20 }),
        schedule: String::new(),
        group: None,
        failure: String::new(),
        used_by: Vec::new(),
        made_for: String::new(),
        point: Some(Text(point)),
    }
}

#[tokio::test]
async fn a_volume_that_is_bound_to_nodes_does_not_join_a_mirrored_group() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    mirrored_group(&mut cluster, "shop", "a", |brain| brain).await;
    let bound = cluster.create("bound").await;
    let mut record: VolumeRecord = decode(&cluster.store.entry(&bound.key()).value).unwrap();
    record.spec.options.local = Local::Required;
    put(&cluster, &record);
    cluster.create("free").await;
    cluster.restart().await;
    let parts = &cluster.controller.mirror;
    let joins = async |names: &[&str]| {
        let changed = parts.groups.modify(&parts.driver, Some(&named("shop")), &all(names)).await;
        changed.map(|group| group.members.len())
    };
    let refused = joins(&["a", "bound"]).await;
    let Err(Error::Precondition(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("\"bound\"") && why.contains("local: required"), "{why}");
    assert_eq!(parts.groups.get(Some(&named("shop"))).unwrap().members.len(), 1);
    assert_eq!(joins(&["a", "free"]).await.unwrap(), 2);
}

/// It may show a half of a transfer, and would keep that.
#[tokio::test]
async fn a_member_does_not_leave_an_orphan_that_is_not_back_at_its_last_point() {
    let mut cluster = Cluster::of(3).await;
    pair(&cluster);
    let point = Some(PointId(5));
    let orphan = |brain: Brain| {
        let points = Points { complete: point, ..brain.points };
        Brain { role: Role::Orphan, points, ..brain }
    };
    mirrored_group(&mut cluster, "shop", "a", orphan).await;
    // It holds the point, and nobody knows that its view shows that.
    let volume = cluster.volume("a");
    put(&cluster, &held(&volume, PointId(5)));
    cluster.restart().await;
    let parts = &cluster.controller.mirror;
    let refused = parts.groups.modify(&parts.driver, Some(&named("shop")), &[]).await;
    let Err(Error::Busy(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("its last point; try again"), "{why}");
    assert_eq!(parts.groups.get(Some(&named("shop"))).unwrap().members.len(), 1);
    assert!(cluster.volume("a").mirror.is_some());
    let same = parts.groups.modify(&parts.driver, Some(&named("shop")), &all(&["a"])).await;
    assert_eq!(same.unwrap().members.len(), 1);
}
