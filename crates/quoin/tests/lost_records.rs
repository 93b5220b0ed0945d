//! Lost records of the controller, or an old copy of them, under volumes with data; and the last
//! copy of a volume, with and without the system.

use crate::common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use common::{Cluster, Place, Process, eventually, signal};
use prost::Message;
use quoin_api::control::VolumeSpec;
use quoin_nbd::client::{Address, Client, ClientOptions};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_store::{FileDisk, Pool, PoolOptions, ReplicaPool};
use quoin_types::{
    Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, ReplicaId, VolumeId,
};
use serde_json::Value;

const SIZE: u64 = 1 << 20;
const PIECE: u64 = 64 << 10;

/// Returns the content of a volume; every block has its volume, its position and its round.
fn content(seed: u64, round: u64) -> Vec<u8> {
    let mut all = vec![0; SIZE as usize];
    for (lba, block) in all.chunks_mut(4096).enumerate() {
        let version = if (lba as u64 + seed).is_multiple_of(3) { round } else { 1 };
        // A fifth was never written.
        if !(lba as u64 + seed).is_multiple_of(5) {
            block.fill((lba as u64 ^ seed ^ version) as u8);
            block[..8].copy_from_slice(b"TESTDATA");
            block[8..16].copy_from_slice(&(lba as u64).to_le_bytes());
            block[16..24].copy_from_slice(&seed.to_le_bytes());
            block[24..32].copy_from_slice(&version.to_le_bytes());
        }
    }
    all
}

fn write(client: &Client, seed: u64, round: u64) {
    let all = content(seed, round);
    for (lba, block) in all.chunks(4096).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            let data = Bytes::copy_from_slice(block);
            client.write(lba as u64 * 4096, data, false).unwrap();
        }
    }
    client.flush().unwrap();
}

fn verify(client: &Client, seed: u64, round: u64) {
    let expected = content(seed, round);
    for at in (0..SIZE).step_by(PIECE as usize) {
        let read = client.read(at, PIECE as u32).unwrap();
        assert!(read == expected[at as usize..][..PIECE as usize], "volume {seed} at {at}");
    }
}

fn cluster(name: &str, pools: usize) -> Cluster {
    let flags = ["--default-spread", "pool", "--replace-after", "off"];
    let mut cluster = Cluster::start(name, &Place::here(), &flags);
    for n in 1..=pools {
        cluster.pool(&Place::here(), &format!("p{n}"), &[]);
    }
    cluster.node(&Place::here(), "n1", &[], &[]);
    cluster.wait_for_pools(pools);
    cluster
}

fn attach(cluster: &Cluster, volume: &str) -> Client {
    let address = cluster.ok(&["volume", "attach", volume, "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    eventually("the volume is served", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone().into()))).ok()
    })
}

fn detach(cluster: &Cluster, volume: &str, client: Client) {
    client.stop();
    cluster.ok(&["volume", "detach", volume]);
}

fn create(cluster: &Cluster, volume: &str, replicas: &str) {
    let size = SIZE.to_string();
    cluster.ok(&["volume", "create", volume, "--size", &size, "--replicas", replicas]);
}

/// Returns pools, ids and GUIDs of the known replicas of every volume, with the membership's
/// version.
fn memberships(cluster: &Cluster) -> BTreeMap<String, (u64, Vec<[String; 3]>)> {
    let volumes = cluster.json(&["volume", "list"]);
    let membership = |volume: &Value| {
        let replicas = volume["replicas"].as_array().unwrap().iter();
        let known = replicas.filter(|r| r["known"] == true);
        let mut known: Vec<_> = known
            .map(|r| ["pool", "id", "guid"].map(|key| r[key].as_str().unwrap().to_owned()))
            .collect();
        known.sort();
        let name = volume["name"].as_str().unwrap().to_owned();
        (name, (volume["membershipVersion"].as_u64().unwrap(), known))
    };
    volumes.as_array().unwrap().iter().map(membership).collect()
}

fn kill(cluster: &mut Cluster, name: &str) {
    // The drop kills it.
    cluster.processes.retain(|process| process.name != name);
}

fn start_controller(cluster: &mut Cluster) {
    let mut arguments: Vec<String> = ["controller", "run"].map(String::from).to_vec();
    arguments.extend(["--state".into(), cluster.path("controller")]);
    arguments.extend(["--admin-socket".into(), cluster.path("run/admin.sock")]);
    arguments.extend(["--listen".into(), cluster.controller.clone()]);
    let flags = ["--default-spread", "pool", "--replace-after", "off"];
    arguments.extend(flags.map(String::from));
    cluster.run(&Place::here(), "controller", arguments);
    eventually("the controller answers", || {
        cluster.quoin(&["cluster", "info"]).status.success().then_some(())
    });
}

/// Starts a pool that has joined before.
fn start_pool(cluster: &mut Cluster, name: &str) {
    let mut arguments: Vec<String> =
        ["pool", "run", "--name", name, "--node", name].map(String::from).to_vec();
    arguments.extend(["--state".into(), cluster.path(name)]);
    arguments.extend(["--data".into(), cluster.path(&format!("{name}-data"))]);
    arguments.extend(["--listen".into(), "127.0.0.1:0".into()]);
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    cluster.run(&Place::here(), name, arguments);
}

fn stop(cluster: &mut Cluster, name: &str) {
    let at = cluster.processes.iter().position(|process| process.name == name).unwrap();
    let process: Process = cluster.processes.remove(at);
    process.stop();
}

fn refused(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.quoin(arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {printed}");
    printed
}

/// Returns the findings of `recover` for each volume.
fn outcomes(found: &Value) -> BTreeMap<String, String> {
    let volumes = found["volumes"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    volumes.map(|volume| (text(&volume["name"]), text(&volume["outcome"]))).collect()
}

fn wait_for_online(cluster: &Cluster, volume: &str) {
    cluster.wait_for_volume(volume, "online", |v| v["health"] == "Online" && v["changing"] == "");
}

#[test]
fn twenty_volumes_with_deleted_records_are_recovered_without_loss() {
    let mut cluster = cluster("lost", 4);
    let names: Vec<String> = (0..20).map(|n| format!("v{n:02}")).collect();
    let mut attached = Vec::new();
    for (seed, name) in (0..).zip(&names) {
        create(&cluster, name, "3");
        let client = attach(&cluster, name);
        write(&client, seed, 1);
        match seed % 2 {
            0 => attached.push((seed, client)),
            _ => detach(&cluster, name, client),
        }
    }
    // One has another membership than that of its making, one is gone already.
    let (version, known) = memberships(&cluster)["v00"].clone();
    let free = (1..=4).map(|n| format!("p{n}"));
    let free = free.into_iter().find(|pool| known.iter().all(|[p, ..]| p != pool)).unwrap();
    let from = known[0][0].clone();
    cluster.ok(&["replica", "move", "v00", &from, "--to", &free, "--wait", "--timeout", "170"]);
    create(&cluster, "gone", "3");
    let client = attach(&cluster, "gone");
    write(&client, 99, 1);
    detach(&cluster, "gone", client);
    cluster.ok(&["volume", "delete", "gone", "--yes"]);
    eventually("it is deleted", || (!memberships(&cluster).contains_key("gone")).then_some(()));
    let before = memberships(&cluster);
    assert!(before["v00"].0 > version);
    let epochs = |cluster: &Cluster| -> Vec<u64> {
        let epoch =
            |seed| cluster.json(&["volume", "get", &format!("v{seed:02}")])["epoch"].as_u64();
        (0..20).step_by(2).map(|seed| epoch(seed).unwrap()).collect()
    };
    let opened = epochs(&cluster);

    kill(&mut cluster, "controller");
    for (seed, client) in &attached {
        write(client, *seed, 2);
    }
    let state = cluster.path("controller");
    std::fs::remove_file(format!("{state}/records.redb")).unwrap();
    let printed = cluster.ok(&["controller", "init", "--state", &state]);
    assert!(
        printed.contains("they were lost") && printed.contains("quoin controller recover"),
        "{printed}"
    );
    start_controller(&mut cluster);
    // Records that know nothing give no orders, and no caller is told that volumes do not exist.
    for command in [
        &["volume", "list"][..],
        &["volume", "get", "v00"],
        &["volume", "delete", "v00", "--yes"],
        &["volume", "create", "new", "--size", "1MiB"],
    ] {
        let printed = refused(&cluster, command);
        assert!(printed.contains("quoin controller recover"), "{command:?}: {printed}");
        assert!(!printed.contains("does not answer"), "{command:?}: {printed}");
    }
    assert!(cluster.ok(&["cluster", "info"]).contains("do not rule, for they were lost"));
    let planned = cluster.json(&["controller", "recover", "--dry-run"]);
    assert_eq!(planned["done"], false);
    assert_eq!(planned["pools"].as_array().unwrap().len(), 4);
    let all: BTreeMap<_, _> = names.iter().map(|n| (n.clone(), "created".to_owned())).collect();
    assert_eq!(outcomes(&planned), all);
    let table = cluster.ok(&["controller", "recover", "--dry-run"]);
    assert!(table.contains("nothing was written") && table.contains("v19"), "{table}");
    assert!(refused(&cluster, &["volume", "list"]).contains("recover"), "a dry run ended it");
    for (seed, client) in &attached {
        verify(client, *seed, 2);
    }

    let done = cluster.json(&["controller", "recover"]);
    assert_eq!((&done["done"], outcomes(&done)), (&Value::Bool(true), all));
    assert_eq!(memberships(&cluster), before, "pools, ids, GUIDs and versions are as they were");
    // Served volumes stayed served, by the same opening of the same target.
    for (seed, client) in &attached {
        verify(client, *seed, 2);
        write(client, *seed, 3);
    }
    assert_eq!(epochs(&cluster), opened);
    for (seed, name) in (0..).zip(&names).filter(|(seed, _)| seed % 2 == 1) {
        let client = attach(&cluster, name);
        verify(&client, seed, 1);
        detach(&cluster, name, client);
        wait_for_online_or_detached(&cluster, name);
    }
    for (seed, client) in attached {
        let name = &names[seed as usize];
        wait_for_online(&cluster, name);
        // The volumes can be opened anew.
        detach(&cluster, name, client);
        let client = attach(&cluster, name);
        verify(&client, seed, 3);
        client.stop();
    }
    let again = cluster.json(&["controller", "recover"]);
    assert!(outcomes(&again).values().all(|outcome| outcome == "as-recorded"), "{again}");
}

/// Waits until an unused volume is as online as it can be reported.
fn wait_for_online_or_detached(cluster: &Cluster, volume: &str) {
    cluster.wait_for_volume(volume, "whole", |v| {
        v["replicas"].as_array().unwrap().iter().all(|r| r["quorum"] == true)
    });
}

#[test]
fn changes_after_a_backup_survive_the_restore_of_the_records() {
    let mut cluster = cluster("oldcopy", 4);
    for (seed, name) in (1..).zip(["scaled", "moved", "deleted", "kept"]) {
        create(&cluster, name, if name == "scaled" { "1" } else { "3" });
        let client = attach(&cluster, name);
        write(&client, seed, 1);
        detach(&cluster, name, client);
    }
    let (file, state) = (cluster.path("backup"), cluster.path("controller"));
    let printed = cluster.ok(&["controller", "backup", &file]);
    assert!(printed.contains("4 volumes") && printed.contains("private key"), "{printed}");
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(refused(&cluster, &["controller", "backup", &file]).contains("exists already"));

    let wait = ["--wait", "--timeout", "170"];
    let change = |arguments: &[&str]| {
        let arguments: Vec<&str> = arguments.iter().copied().chain(wait).collect();
        cluster.ok(&arguments);
    };
    change(&["volume", "scale", "scaled", "--replicas", "3"]);
    let (_, known) = memberships(&cluster)["moved"].clone();
    let free = (1..=4).map(|n| format!("p{n}"));
    let free = free.into_iter().find(|pool| known.iter().all(|[p, ..]| p != pool)).unwrap();
    let [from, _, retired] = known[0].clone();
    change(&["replica", "move", "moved", &from, "--to", &free]);
    cluster.ok(&["volume", "delete", "deleted", "--yes"]);
    eventually("it is deleted", || (!memberships(&cluster).contains_key("deleted")).then_some(()));
    create(&cluster, "since", "3");
    for (seed, name) in [(1, "scaled"), (2, "moved"), (5, "since")] {
        let client = attach(&cluster, name);
        write(&client, seed, 2);
        detach(&cluster, name, client);
    }
    let served = attach(&cluster, "kept");
    write(&served, 4, 2);
    let before = memberships(&cluster);

    // A restore happens only where it does no harm, and whole or not at all.
    let restore = ["controller", "restore", &file, "--state", &state];
    assert!(refused(&cluster, &restore).contains("--replace"));
    let replacing: Vec<_> = restore.iter().copied().chain(["--replace"]).collect();
    assert!(refused(&cluster, &replacing).contains("another process"));
    kill(&mut cluster, "controller");
    let bytes = std::fs::read(&file).unwrap();
    let torn = cluster.path("torn");
    let mut changed = bytes.clone();
    changed[bytes.len() / 2] ^= 1;
    let files = std::fs::read_dir(&state).unwrap().count();
    for harmed in [&bytes[..bytes.len() - 90], &changed, b"{}\n"] {
        std::fs::write(&torn, harmed).unwrap();
        refused(&cluster, &["controller", "restore", &torn, "--state", &state, "--replace"]);
    }
    assert_eq!(std::fs::read_dir(&state).unwrap().count(), files, "something was made");
    // The host is lost whole; the authority comes from the backup.
    std::fs::remove_dir_all(&state).unwrap();
    let printed = cluster.ok(&restore);
    assert!(
        printed.contains("4 volumes") && printed.contains("quoin controller recover"),
        "{printed}"
    );
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    start_controller(&mut cluster);
    verify(&served, 4, 2);
    let planned = cluster.json(&["controller", "recover", "--dry-run"]);
    let expected = [
        ("deleted", "deleted"),
        ("kept", "updated"),
        ("moved", "updated"),
        ("scaled", "updated"),
        ("since", "created"),
    ];
    let expected: BTreeMap<_, _> =
        expected.iter().map(|(name, outcome)| ((*name).into(), (*outcome).into())).collect();
    assert_eq!(outcomes(&planned), expected, "{planned}");
    // A pool that is away is waited for, or named.
    let pid = cluster.process("p1").pid();
    signal(pid, "STOP");
    let planned = eventually("p1 is missed", || {
        let output = cluster.quoin(&["controller", "recover", "--dry-run", "-o", "json"]);
        let planned: Value = serde_json::from_slice(&output.stdout).unwrap();
        (planned["missingPools"] == serde_json::json!(["p1"])).then_some(planned)
    });
    assert_eq!(outcomes(&planned)["deleted"], "undecided", "p1 may hold the last copy: {planned}");
    let printed = refused(&cluster, &["controller", "recover"]);
    assert!(printed.contains("p1") && printed.contains("--without"), "{printed}");
    signal(pid, "CONT");
    let done = eventually("it is recovered", || {
        let output = cluster.quoin(&["controller", "recover", "-o", "json"]);
        output.status.success().then(|| serde_json::from_slice::<Value>(&output.stdout).unwrap())
    });
    assert_eq!(outcomes(&done), expected);

    eventually("the deleted one is gone", || {
        (!memberships(&cluster).contains_key("deleted")).then_some(())
    });
    assert_eq!(memberships(&cluster), before);
    verify(&served, 4, 2);
    write(&served, 4, 3);
    detach(&cluster, "kept", served);
    for (seed, name, round) in [(1, "scaled", 2), (2, "moved", 2), (5, "since", 2), (4, "kept", 3)]
    {
        let client = attach(&cluster, name);
        verify(&client, seed, round);
        wait_for_online(&cluster, name);
        detach(&cluster, name, client);
    }
    let replicas = cluster.json(&["replica", "list", "moved"]);
    assert!(replicas.as_array().unwrap().iter().all(|r| r["guid"] != retired.as_str()));
    // The name is free, and a volume that gets it is another one.
    create(&cluster, "deleted", "3");
    let client = attach(&cluster, "deleted");
    assert!(client.read(0, PIECE as u32).unwrap().iter().all(|byte| *byte == 0));
    client.stop();
}

/// Writes a replica in the form from before there were known lists: it counts, has data, and knows
/// no membership.
fn write_replica(data: &Path, identity: ReplicaIdentity, blocks: &[Vec<u8>]) {
    let disk = FileDisk::open(data).unwrap();
    let mut sync = quoin_store::Disk::syncer(&disk);
    let mut pool = Pool::open(disk, PoolOptions::default()).unwrap();
    let guid = identity.guid;
    let meta = ReplicaMeta { quorum: true, ..ReplicaMeta::default() };
    pool.create(identity, meta, SIZE / 4096).unwrap();
    let mut replica = pool.replica(guid).unwrap();
    let mut chain = Chain::default();
    for (n, block) in (0u64..).zip(blocks) {
        let position = Position { epoch: Epoch(1), lsn: Lsn(n + 1) };
        let data = Bytes::copy_from_slice(block);
        let entry = Entry::after(chain, position, EntryKind::Write, n, 1, data, false);
        chain = entry.chain;
        replica.append(&[Arc::new(entry)]).unwrap();
    }
    pool.request_sync();
    let ticket = pool.sync_wanted().unwrap();
    pool.sync_finished(ticket, sync()).expect("a sync");
}

/// Proves SCALE-TEST-09.
#[test]
fn a_volume_without_a_known_list_opens_with_the_counted_replicas_and_its_data() {
    let mut cluster = cluster("upgrade", 3);
    let written: Vec<Vec<u8>> = content(7, 1).chunks(4096).map(<[u8]>::to_vec).collect();
    for (n, pool) in (1u128..).zip(["p1", "p2", "p3"]) {
        stop(&mut cluster, pool);
        let spec = VolumeSpec {
            name: "old".into(),
            size_bytes: SIZE,
            replicas: 3,
            ..VolumeSpec::default()
        };
        let identity = ReplicaIdentity {
            volume: VolumeId(77),
            replica: ReplicaId(n),
            guid: ReplicaGuid(n + 100),
            volume_spec: spec.encode_to_vec().into(),
        };
        // One of them missed the last writes.
        let count = if n == 3 { 200 } else { written.len() };
        write_replica(
            Path::new(&cluster.path(&format!("{pool}-data"))),
            identity,
            &written[..count],
        );
    }
    start_pool(&mut cluster, "p1");
    start_pool(&mut cluster, "p3");
    eventually("two pools are there", || {
        let pools = cluster.json(&["pool", "list"]);
        let online = pools.as_array()?.iter().filter(|p| p["state"] == "Online").count();
        (online == 2).then_some(())
    });
    // Two of three entries: the list stays open and nothing is served.
    let output = cluster.quoin(&["controller", "recover", "--without", "p2", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcomes(&found)["old"], "undecided");
    let printed = cluster.quoin(&["volume", "get", "old", "-o", "json"]);
    let shown: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_ne!(shown["health"], "Online");
    start_pool(&mut cluster, "p2");
    cluster.wait_for_pools(3);
    let done = cluster.json(&["controller", "recover"]);
    assert_eq!(outcomes(&done)["old"], "updated", "{done}");
    let (_, known) = memberships(&cluster)["old"].clone();
    assert_eq!(known.len(), 3);
    let client = attach(&cluster, "old");
    verify(&client, 7, 1);
    write(&client, 7, 2);
    wait_for_online(&cluster, "old");
    verify(&client, 7, 2);
    client.stop();
}

#[test]
fn the_last_copy_is_exported_offline_and_becomes_the_volume_by_consent() {
    let mut cluster = cluster("lastcopy", 3);
    create(&cluster, "db", "3");
    let client = attach(&cluster, "db");
    write(&client, 1, 1);
    // The last writes are everywhere before two of three pools are lost.
    wait_for_online(&cluster, "db");
    write(&client, 1, 2);
    cluster.wait_for_volume("db", "equal everywhere", |v| {
        let replicas = v["replicas"].as_array().unwrap();
        replicas.iter().all(|r| r["position"] == replicas[0]["position"] && r["phase"] == "InSync")
    });
    for pool in ["p2", "p3"] {
        kill(&mut cluster, pool);
        std::fs::remove_file(cluster.path(&format!("{pool}-data"))).unwrap();
    }
    let recover = ["volume", "recover", "db", "--from-pool", "p1"];
    let printed = eventually("it is seen that they are away", || {
        let printed = refused(&cluster, &recover);
        (!printed.contains("keep it too")).then_some(printed)
    });
    assert!(
        printed.contains("1 of 3 replicas are left") && printed.contains("--accept-loss-of"),
        "{printed}"
    );
    let accepted: Vec<_> = recover.iter().copied().chain(["--accept-loss-of", "db"]).collect();
    cluster.ok(&accepted);
    cluster.wait_for_volume("db", "served", |v| v["replicationFactor"] == 1);
    verify(&client, 1, 2);
    write(&client, 1, 3);
    client.stop();
    let guid = memberships(&cluster)["db"].1[0][2].clone();
    // Nothing of Quoin runs any more; the pool was not even stopped.
    cluster.processes.clear();
    let (pool, image) = (cluster.path("p1-data"), cluster.path("db.img"));
    cluster.ok(&["pool", "export", &pool, "--replica", &guid, "--to", &image]);
    assert!(std::fs::read(&image).unwrap() == content(1, 3), "the image is not what was written");
}

fn wait_for_event(cluster: &Cluster, reason: &str) -> String {
    cluster.eventually(reason, || event(cluster, reason))
}

fn event(cluster: &Cluster, reason: &str) -> Option<String> {
    let events = cluster.ok(&["events"]);
    events.lines().find(|line| line.contains(reason)).map(str::to_owned)
}

#[test]
fn an_old_copy_of_the_records_does_not_rule_and_is_recovered_by_itself_once_all_pools_are_there() {
    let mut cluster = cluster("byhand", 3);
    for (seed, name, replicas) in [(1, "db", "1"), (2, "dead", "3")] {
        create(&cluster, name, replicas);
        let client = attach(&cluster, name);
        write(&client, seed, 1);
        detach(&cluster, name, client);
    }
    let (records, old) = (cluster.path("controller/records.redb"), cluster.path("old.redb"));
    stop(&mut cluster, "controller");
    std::fs::copy(&records, &old).unwrap();
    start_controller(&mut cluster);
    cluster.wait_for_pools(3);
    let arguments = ["volume", "scale", "db", "--replicas", "3", "--wait", "--timeout", "170"];
    cluster.ok(&arguments);
    let client = attach(&cluster, "db");
    write(&client, 1, 2);
    wait_for_online(&cluster, "db");
    detach(&cluster, "db", client);
    cluster.ok(&["volume", "delete", "dead", "--yes"]);
    eventually("it is deleted", || (!memberships(&cluster).contains_key("dead")).then_some(()));
    let before = memberships(&cluster);

    kill(&mut cluster, "controller");
    kill(&mut cluster, "p3");
    std::fs::copy(&old, &records).unwrap();
    start_controller(&mut cluster);
    let reported = wait_for_event(&cluster, "RecordsBehind");
    assert!(reported.contains("quoin controller recover"), "{reported}");
    // A pool that is away may know more: a person decides, or the pool comes back.
    cluster.eventually("the pool is named", || {
        let events = cluster.ok(&["events"]);
        events.contains("without you: pool p3 does not answer").then_some(())
    });
    let printed = refused(&cluster, &["volume", "list"]);
    assert!(printed.contains("p1") || printed.contains("p2"), "{printed}");
    assert!(printed.contains("quoin controller recover"), "{printed}");
    start_pool(&mut cluster, "p3");
    cluster.eventually("they are recovered, and the deleted one is gone", || {
        let rules = cluster.quoin(&["volume", "list"]).status.success();
        (rules && memberships(&cluster) == before).then_some(())
    });
    let client = attach(&cluster, "db");
    verify(&client, 1, 2);
    write(&client, 1, 3);
    wait_for_online(&cluster, "db");
    verify(&client, 1, 3);
    client.stop();

    // A backup without the key is restored only beside it.
    let (file, other) = (cluster.path("backup"), cluster.path("other"));
    let printed = cluster.ok(&["controller", "backup", &file, "--without-authority"]);
    assert!(printed.contains("without the authority"), "{printed}");
    assert!(!std::fs::read_to_string(&file).unwrap().contains("PRIVATE KEY"));
    let restore = ["controller", "restore", &file, "--state", &other];
    assert!(refused(&cluster, &restore).contains("authority.json"));
    std::fs::create_dir_all(&other).unwrap();
    let authority = cluster.path("controller/authority.json");
    std::fs::copy(authority, format!("{other}/authority.json")).unwrap();
    cluster.ok(&restore);
    let printed = refused(&cluster, &["controller", "init", "--state", &other]);
    assert!(printed.contains("never overwritten"), "{printed}");
}

#[test]
fn a_volume_with_lost_records_and_pools_waits_for_consent() {
    let mut cluster = cluster("allbutone", 3);
    create(&cluster, "db", "3");
    let client = attach(&cluster, "db");
    write(&client, 1, 2);
    wait_for_online(&cluster, "db");
    client.stop();
    for name in ["controller", "p2", "p3", "target"] {
        kill(&mut cluster, name);
    }
    // The authority is all that is left of the controller.
    let (state, authority) = (cluster.path("controller"), cluster.path("authority.json"));
    std::fs::rename(format!("{state}/authority.json"), &authority).unwrap();
    std::fs::remove_dir_all(&state).unwrap();
    let init = ["controller", "init", "--state", &state, "--records-lost"];
    assert!(refused(&cluster, &init).contains("authority.json"));
    std::fs::create_dir_all(&state).unwrap();
    std::fs::copy(&authority, format!("{state}/authority.json")).unwrap();
    cluster.ok(&init);
    start_controller(&mut cluster);
    // The pool that is left knows where the others were.
    let printed = refused(&cluster, &["controller", "recover"]);
    assert!(printed.contains("p2, p3") && printed.contains("--without"), "{printed}");
    let output = cluster.quoin(&["controller", "recover", "--without", "p2", "--without", "p33"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && printed.contains("no pool p33 is known"), "{printed}");
    assert!(printed.contains("do not answer: p2, p3"), "{printed}");
    let without = ["controller", "recover", "--without", "p2", "--without", "p3"];
    let output = cluster.quoin(&without);
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("1 of 3 replicas are there, 2 are needed"), "{printed}");
    assert!(
        printed.contains("quoin volume recover") && printed.contains("the records rule"),
        "{printed}"
    );
    let run = cluster.path("run");
    let (node, controller) = (cluster.path("node"), cluster.controller.clone());
    let target = ["target", "--state", &node, "--run", &run, "--controller", &controller];
    cluster.run(&Place::here(), "target", target.map(String::from).to_vec());
    let recover = ["volume", "recover", "db", "--from-pool", "p1"];
    assert!(refused(&cluster, &recover).contains("--accept-loss-of"));
    let accepted: Vec<_> = recover.iter().copied().chain(["--accept-loss-of", "db"]).collect();
    cluster.ok(&accepted);
    let client = attach(&cluster, "db");
    verify(&client, 1, 2);
    client.stop();
}
