//! Space that is given back and keys that are rotated through the socket of CSI-Addons, beside IO, on
//! processes that die.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::{GetVolumeRequest, VolumeRef};
use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use quoin_api::csi::{CapacityRange, CreateVolumeRequest, VolumeCapability};
use quoin_api::csi_addons::encryptionkeyrotation::EncryptionKeyRotateRequest;
use quoin_api::csi_addons::encryptionkeyrotation::encryption_key_rotation_controller_client::EncryptionKeyRotationControllerClient;
use quoin_api::csi_addons::reclaimspace::ControllerReclaimSpaceRequest;
use quoin_api::csi_addons::reclaimspace::reclaim_space_controller_client::ReclaimSpaceControllerClient;
use quoin_identity::unix_channel;
use quoin_nbd::client::Client;
use quoin_types::block::Operation;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::common::dev::Dev;
use crate::common::{Scratch, User, can_attach, eventually, signal};
use crate::mirrors::{Two, assert_holds, client_by, detach, some, write};
use crate::support::block;

const BLOCK: u64 = 4096;

/// The orchestrator of a cluster, by its sockets.
struct Orchestrator {
    runtime: tokio::runtime::Runtime,
    csi: Channel,
    addons: Channel,
}

impl Orchestrator {
    fn of(directory: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (csi, addons) = {
            let _context = runtime.enter();
            let channel = |socket: &str| unix_channel(&directory.join(socket));
            (channel("run/csi/csi.sock"), channel("run/csi-addons/csi-addons.sock"))
        };
        Self { runtime, csi, addons }
    }

    /// Makes an encrypted volume with this key; returns its id.
    fn create_encrypted(&self, name: &str, replicas: u8, key: &str) -> String {
        let capability = VolumeCapability {
            access_type: Some(AccessType::Block(BlockVolume {})),
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        };
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: 32 << 20, limit_bytes: 0 }),
            volume_capabilities: vec![capability],
            parameters: [("replicas", replicas.to_string()), ("encrypted", "true".to_owned())]
                .map(|(key, value)| (key.to_owned(), value))
                .into(),
            secrets: secret(key),
            ..Default::default()
        };
        let made =
            self.runtime.block_on(ControllerClient::new(self.csi.clone()).create_volume(request));
        made.unwrap().into_inner().volume.unwrap().volume_id
    }

    fn rotate(&self, id: &str, key: &str) -> Result<(), Status> {
        let request = EncryptionKeyRotateRequest {
            volume_id: id.to_owned(),
            // The manager sends the new key alone, as the secret.
            secrets: secret(key),
            ..Default::default()
        };
        let mut client = EncryptionKeyRotationControllerClient::new(self.addons.clone());
        self.runtime.block_on(client.encryption_key_rotate(request)).map(drop)
    }

    /// Has a volume's space given back; returns the bytes before and after.
    fn reclaim(&self, id: &str) -> (i64, i64) {
        let request =
            ControllerReclaimSpaceRequest { volume_id: id.to_owned(), ..Default::default() };
        let mut client = ReclaimSpaceControllerClient::new(self.addons.clone());
        let answer = self.runtime.block_on(client.controller_reclaim_space(request)).unwrap();
        let answer = answer.into_inner();
        let bytes = |usage: Option<_>| {
            let usage: quoin_api::csi_addons::reclaimspace::StorageConsumption = usage.unwrap();
            usage.usage_bytes
        };
        let (pre, post) = (bytes(answer.pre_usage), bytes(answer.post_usage));
        println!("reclaimed: {pre} bytes before, {post} after");
        assert!(pre >= 0 && post >= 0);
        (pre, post)
    }
}

fn secret(key: &str) -> HashMap<String, String> {
    [("encryptionKey".to_owned(), key.to_owned())].into()
}

fn key_file(scratch: &Scratch, key: &str) -> String {
    let path = scratch.0.join(&key[..8]);
    std::fs::write(&path, key).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    path.display().to_string()
}

fn trim(client: &Client, lba: u64, count: u64) {
    let (done, answer) = std::sync::mpsc::channel();
    let operation = Operation::Trim { offset: lba * BLOCK, length: count * BLOCK, fua: false };
    client.submit(operation, Box::new(move |result| drop(done.send(result))));
    answer.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
}

/// Bytes that the pools hold.
fn used_bytes(user: &User) -> u64 {
    let pools = user.json(&["pool", "list"]);
    pools.as_array().unwrap().iter().map(|pool| pool["usedBytes"].as_u64().unwrap()).sum()
}

/// Proves ADDONS-RECLAIM-04: of a volume in use, and of one that is in use nowhere.
#[test]
fn dead_space_of_volumes_in_use_and_of_others_goes_back_to_the_pools_and_no_byte_changes() {
    const BLOCKS: u64 = 16 << 8;
    let scratch = Scratch::new("reclaiming");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "1GiB"]);
    let orchestrator = Orchestrator::of(&dev.directory);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let id = dev.json(&["volume", "get", "db"])["id"].as_str().unwrap().to_owned();
    let mut held: HashMap<u64, u64> = HashMap::new();
    for turn in [1, 2] {
        let client = dev.client("db");
        // 16 MiB that are written four times, of which three blocks of four are trimmed: a sixteenth of what
        // was written is alive.
        for version in (turn * 10)..(turn * 10 + 4) {
            for lba in 0..BLOCKS {
                client.write(lba * BLOCK, block(lba, version).into(), false).unwrap();
                held.insert(lba, version);
            }
            client.flush().unwrap();
        }
        for first in (0..BLOCKS).step_by(4) {
            trim(&client, first + 1, 3);
            held.retain(|lba, _| !(first + 1..first + 4).contains(lba));
        }
        client.flush().unwrap();
        let check = |client: &Client, what: &str| {
            for lba in 0..BLOCKS {
                let found = client.read(lba * BLOCK, BLOCK as u32).unwrap();
                let is_held = match held.get(&lba) {
                    Some(version) => found[..] == block(lba, *version)[..],
                    None => found.iter().all(|byte| *byte == 0),
                };
                assert!(is_held, "{what}: block {lba}");
            }
        };
        let before = eventually("the pools tell of it", || {
            Some(used_bytes(&dev)).filter(|used| *used > 3 * (BLOCKS * BLOCK) / 4)
        });
        let client = match turn {
            1 => Some(client),
            _ => {
                drop(client);
                dev.ok(&["volume", "detach", "db"]);
                None
            }
        };
        let (pre, post) = orchestrator.reclaim(&id);
        // Segments that are being filled, in each of three pools.
        let bound = (3 * held.len()) as u64 * BLOCK * 3 / 2 + 3 * (16 << 20);
        assert!(post <= pre && post as u64 <= bound, "at most {bound}");
        let told = eventually("the pools have it free", || {
            Some(used_bytes(&dev)).filter(|used| *used <= bound)
        });
        println!("pools: {before} bytes before, {told} after; at most {bound}");
        assert!(told < before);
        match client {
            Some(client) => {
                check(&client, "in use");
                drop(client);
                dev.ok(&["volume", "detach", "db"]);
            }
            None => {
                let client = dev.client("db");
                check(&client, "detached");
                drop(client);
                dev.ok(&["volume", "detach", "db"]);
            }
        }
    }
    // By a person: the same order, whose figures are told.
    let said = dev.ok(&["volume", "reclaim", "db"]);
    assert!(said.starts_with("volume db: its replicas held "), "{said}");
    let told = dev.json(&["volume", "reclaim", "db"]);
    assert_eq!((&told["volume"], &told["done"]), (&"db".into(), &true.into()), "{told}");
    assert!(told["bytes"].as_u64() <= told["beforeBytes"].as_u64(), "{told}");
    let begun = dev.json(&["volume", "reclaim", "db", "--no-wait"]);
    assert!(begun["beforeBytes"].is_u64(), "{begun}");
    let unknown = dev.quoin(&["volume", "reclaim", "nothing"]);
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(!unknown.status.success() && said.contains("nothing"), "{said}");
    dev.stop();
}

/// Keys of volumes, in turn.
fn key(number: usize) -> String {
    format!("{number:08}-correct horse battery staple")
}

/// Where each replica of a volume is in its history, by its pool.
fn positions(orchestrator: &Orchestrator, dev: &Dev, id: &str) -> Vec<(String, u64, u64)> {
    let socket = dev.directory.join("run/admin.sock");
    orchestrator.runtime.block_on(async {
        let mut cluster = ClusterClient::new(unix_channel(&socket));
        let reference = VolumeRef { id: id.to_owned(), name: String::new() };
        let request = GetVolumeRequest { volume: Some(reference) };
        let found = cluster.get_volume(request).await.unwrap().into_inner();
        let of = |replica: quoin_api::control::Replica| {
            (replica.pool, replica.position_epoch, replica.position_lsn)
        };
        found.replicas.into_iter().map(of).collect()
    })
}

/// The data key of a volume, as each of its slots has it.
fn key_slots(orchestrator: &Orchestrator, admin_socket: &Path, id: &str) -> Vec<Vec<u8>> {
    orchestrator.runtime.block_on(async {
        let mut cluster = ClusterClient::new(unix_channel(admin_socket));
        let reference = VolumeRef { id: id.to_owned(), name: String::new() };
        let request = GetVolumeRequest { volume: Some(reference) };
        let found = cluster.get_volume(request).await.unwrap().into_inner();
        let slots = found.spec.unwrap().encryption.unwrap().slots;
        slots.into_iter().map(|slot| slot.wrapped.to_vec()).collect()
    })
}

/// Attaches with a key; false: it opens the volume no more.
fn opens(dev: &Dev, file: &str) -> bool {
    eventually("the attachment has an answer", || {
        let output = dev.quoin(&["volume", "attach", "db", "--nbd", "--key-file", file]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match (output.status.success(), said.contains("opens no key slot")) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            (false, false) => {
                println!("{said}");
                None
            }
        }
    })
}

/// Proves ADDONS-KEYROTATE-06, ADDONS-KEYROTATE-07: by where each replica is in its history, by the IO that runs, and
/// with each process killed at several moments of a rotation.
#[test]
fn a_rotation_writes_no_block_holds_no_io_and_whichever_process_dies_leaves_a_key_that_opens() {
    // The call is the node's, which `quoin dev` has only where it can attach.
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("rotation");
    let dev = Dev::start(&scratch.cluster(), &["--pool-size", "512MiB"]);
    let orchestrator = Orchestrator::of(&dev.directory);
    let id = orchestrator.create_encrypted("db", 3, &key(0));
    let files: Vec<String> = (0..40).map(|n| key_file(&scratch, &key(n))).collect();
    let attach =
        |file: &str| client_by(&dev, &["volume", "attach", "db", "--nbd", "--key-file", file]);
    let client = attach(&files[0]);
    let written = some(0, 100, 1);
    write(&client, &written);

    // Nobody writes: no replica gets an entry.
    let at_rest = || {
        let mut last = positions(&orchestrator, &dev, &id);
        eventually("the replicas are at rest", || {
            std::thread::sleep(Duration::from_secs(2));
            let now = positions(&orchestrator, &dev, &id);
            let is_at_rest = now == last && now.len() == 3 && now.iter().all(|p| p.2 == now[0].2);
            last = now;
            is_at_rest.then(|| last.clone())
        })
    };
    let before = at_rest();
    let epoch = dev.json(&["volume", "get", "db"])["epoch"].clone();
    orchestrator.rotate(&id, &key(1)).unwrap();
    assert_eq!(at_rest(), before);

    // Writes and reads go on in each call.
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !stop.load(Ordering::Relaxed) {
                let (began, number) = (Instant::now(), count.load(Ordering::Relaxed) + 1);
                let lba = 2000 + number % 100;
                client.write(lba * BLOCK, block(lba, number).into(), true).unwrap();
                let found = client.read(lba * BLOCK, BLOCK as u32).unwrap();
                assert!(found[..] == block(lba, number)[..]);
                count.store(number, Ordering::Relaxed);
                longest = longest.max(began.elapsed());
            }
            println!("the longest write with its read took {longest:?}");
        });
        for number in 2..8 {
            let before = count.load(Ordering::Relaxed);
            let rotated = orchestrator.rotate(&id, &key(number));
            let in_the_call = count.load(Ordering::Relaxed) - before;
            println!("{in_the_call} writes and reads in a rotation: {rotated:?}");
            if rotated.is_err() || in_the_call < 2 {
                stop.store(true, Ordering::Relaxed);
            }
            rotated.unwrap();
            assert!(in_the_call >= 2, "IO waits for the rotation");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(dev.json(&["volume", "get", "db"])["epoch"], epoch, "the target served on");
    assert!(!opens(&dev, &files[6]) && opens(&dev, &files[7]));
    drop(client);

    let mut present = 7;
    for process in ["target", "controller", "node"] {
        for delay_ms in [0, 30, 80, 160] {
            let next = present + 1;
            let pid = dev.pid(process).unwrap();
            std::thread::scope(|scope| {
                let rotation = scope.spawn(|| orchestrator.rotate(&id, &key(next)));
                std::thread::sleep(Duration::from_millis(delay_ms));
                signal(pid, "KILL");
                println!("{process} after {delay_ms} ms: {:?}", rotation.join().unwrap());
            });
            eventually("it runs again", || dev.pid(process).filter(|now| *now != pid));
            let (new, former) = (opens(&dev, &files[next]), opens(&dev, &files[present]));
            assert!(new != former, "new {new}, former {former}: one of both opens it");
            let kept = if new { next } else { present };
            let client = attach(&files[kept]);
            assert_holds(&client, &written);
            drop(client);
            present = kept;
        }
    }
    dev.stop();
}

/// Proves ADDONS-KEYROTATE-11: on two clusters.
#[test]
fn the_key_of_a_copy_is_rotated_at_its_primary_and_opens_the_copy_after_the_next_exchange() {
    if !can_attach() {
        return;
    }
    let two = Two::start_with("rotation-of-a-copy", &[]);
    let (first, second) = (&two.dev, &two.second);
    let [here, there] = [first.directory.clone(), two.of_second()].map(|d| Orchestrator::of(&d));
    let id = here.create_encrypted("db", 1, &key(0));
    let files = [0, 1, 2].map(|number| key_file(&two.scratch, &key(number)));
    let attach = |user: &User, file: &str| {
        client_by(user, &["volume", "attach", "db", "--nbd", "--key-file", file])
    };
    let client = attach(first, &files[0]);
    let written = some(0, 100, 1);
    write(&client, &written);
    two.enable("db");
    let slots = |user: &User| key_slots(&here, &user.admin_socket, &id);
    let of_copy = slots(second);
    for key in [key(2), key(0)] {
        let refused = there.rotate(&id, &key).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    }
    assert_eq!(slots(second), of_copy);
    here.rotate(&id, &key(1)).unwrap();
    let more = some(100, 50, 2);
    write(&client, &more);
    detach(first, "db", client);
    second.eventually("the copy has the slot of its primary", || {
        (slots(second) == slots(first) && slots(second) != of_copy).then_some(())
    });
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    let refused = second.quoin(&["volume", "attach", "db", "--nbd", "--key-file", &files[0]]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("opens no key slot"));
    let client = attach(second, &files[1]);
    assert_holds(&client, &[written, more].concat());
    detach(second, "db", client);
    // It is primary now, and the former one the copy.
    assert_eq!(here.rotate(&id, &key(2)).unwrap_err().code(), Code::FailedPrecondition);
    two.stop();
}
