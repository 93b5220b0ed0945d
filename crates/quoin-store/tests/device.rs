//! A pool on a raw block device: what it needs of a real one, on a loop device. Only root may
//! make those; without that (or without `losetup`) the test says so and proves nothing.

use crate::common;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{GUID, format_options, identity, model_of, options, read_all, sync};
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore};
use quoin_store::{Disk, FileDisk, FileDiskError, FormatOptions, Pool, PoolError, ReplicaPool};
use quoin_testkit::{attempts_while_processes_start, skipped};
use quoin_types::Lsn;
use quoin_types::entry::SharedEntry;
use quoin_types::message::ReadView;

/// A loop device over a file, detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(file: &Path) -> Result<Self, String> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let made = made.map_err(|error| format!("losetup: {error}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match made.status.success() {
            true => Ok(Self(text(&made.stdout).into())),
            false => Err(text(&made.stderr)),
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A short history with writes, trims and snapshots, as the common world makes them.
fn history() -> Vec<SharedEntry> {
    let mut world = common::World::new(7, 32 << 20);
    while world.history.len() < 300 {
        world.append();
    }
    world.history
}

/// Opens a device that was just closed.
fn opened(path: &std::path::Path) -> FileDisk {
    let attempts = attempts_while_processes_start();
    let disk = attempts
        .map(|()| FileDisk::open(path))
        .find(|disk| !matches!(disk, Err(FileDiskError::DeviceInUse { .. })));
    disk.expect("the device is not in use any more").expect("the device")
}

#[test]
fn a_pool_on_a_block_device_comes_back_whole_and_is_locked_while_open() {
    let folder = tempfile::tempdir().expect("a folder");
    let backing = folder.path().join("device");
    let file = std::fs::File::create(&backing).expect("a file");
    file.set_len(32 << 20).expect("a size");
    let device = match LoopDevice::attach(&backing) {
        Ok(device) => device,
        Err(reason) => {
            return skipped(&format!("no loop device can be made here: {reason}"));
        }
    };
    let path = device.0.clone();
    let open = || opened(&path);

    let disk = open();
    assert!(disk.is_device());
    assert_eq!(disk.size(), 32 << 20);
    assert!(FileDisk::open(&path).is_err(), "two processes must not share a device");
    Pool::format(&disk, &format_options()).expect("a fit device");
    let again = Pool::format(&disk, &FormatOptions { ..format_options() });
    assert!(matches!(again, Err(PoolError::NotEmpty)), "a pool is not made over another one");

    let entries = history();
    let mut pool = Pool::open(disk, options()).expect("a fresh pool");
    pool.create(identity(GUID), ReplicaMeta::default(), common::BLOCKS).expect("room");
    // Half of it folded and recorded, with what clean-up discards; the rest only in the log.
    for (number, part) in entries.chunks(10).enumerate() {
        let mut replica = pool.replica(GUID).expect("it");
        replica.append(part).expect("an append");
        if number < 15 {
            replica.set_stable(part.last().map_or(Lsn::ZERO, |e| e.lsn));
            pool.settle().expect("folded");
            pool.background(4 << 20).expect("background work");
        }
        pool.request_sync();
        let ticket = pool.sync_wanted().expect("one was asked for");
        let result = (pool.syncer())();
        pool.sync_finished(ticket, result).expect("a sync");
    }
    sync(&mut pool);
    drop(pool);

    let mut pool = Pool::open(open(), options()).expect("the pool that was made");
    let mut model = model_of(&entries);
    let mut real = pool.replica(GUID).expect("it");
    assert_eq!(real.state().position.lsn, Lsn(entries.len() as u64));
    common::assert_same(&mut real, &mut model.replica(GUID).expect("the model's"));
    assert!(!read_all(&mut real, ReadView::Live, common::BLOCKS).is_empty());
}

/// A mounted file system, unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn make(arguments: &[&str], at: &Path) -> Result<Self, String> {
        std::fs::create_dir_all(at).map_err(|error| error.to_string())?;
        run("mount", &[arguments, &[at.to_str().expect("a name")]].concat())?;
        Ok(Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let done = Command::new(program).args(arguments).output();
    let done = done.map_err(|error| format!("{program}: {error}"))?;
    let said = || format!("{program}: {}", String::from_utf8_lossy(&done.stderr));
    if done.status.success() { Ok(()) } else { Err(said()) }
}

/// A loop device with an empty ext4, mounted.
fn ext4(folder: &Path) -> Result<(LoopDevice, Mount), String> {
    let backing = folder.join("backing");
    let file = std::fs::File::create(&backing).expect("a file");
    file.set_len(96 << 20).expect("a size");
    let device = LoopDevice::attach(&backing)?;
    let name = device.0.to_str().expect("a name").to_owned();
    run("mkfs.ext4", &["-q", &name])?;
    let mount = Mount::make(&[&name], &folder.join("mounted"))?;
    Ok((device, mount))
}

/// Whether the replica of the pool at `path` claims, in this open, to hold all that it ever
/// applied.
fn is_continuous(path: &Path) -> bool {
    let disk = FileDisk::open(path).expect("the pool's file");
    let cookie = disk.cookie();
    let mut pool = Pool::open(disk, options()).expect("the pool");
    let store = pool.replica(GUID).expect("its replica");
    quoin_replication::replica::Replica::new(quoin_types::Time::default(), cookie, &store)
        .is_continuous()
}

#[test]
fn a_pool_file_is_continuous_over_a_restart_and_not_over_an_unmounting_within_one_boot() {
    let folder = tempfile::tempdir().expect("a folder");
    let (device, mount) = match ext4(folder.path()) {
        Ok(made) => made,
        Err(reason) => return skipped(&format!("no file system can be mounted here: {reason}")),
    };
    let path = mount.0.join("pool");
    let disk = FileDisk::create(&path, 32 << 20, true).expect("a file");
    Pool::format(&disk, &format_options()).expect("a pool");
    let meta = ReplicaMeta { session_open: true, cookie: disk.cookie(), ..ReplicaMeta::default() };
    let mut pool = Pool::open(disk, options()).expect("a fresh pool");
    pool.create(identity(GUID), meta, common::BLOCKS).expect("room");
    sync(&mut pool);
    // Held by the page cache alone.
    pool.replica(GUID).expect("it").append(&history()[..10]).expect("an append");
    drop(pool);
    assert!(is_continuous(&path), "the same mount");
    let bound =
        Mount::make(&["--bind", mount.0.to_str().expect("a name")], &folder.path().join("b"))
            .expect("a second mount of the same file system");
    assert!(is_continuous(&bound.0.join("pool")), "a container that starts anew");
    drop(bound);

    drop(mount);
    let name = device.0.to_str().expect("a name");
    let mount = Mount::make(&[name], &folder.path().join("mounted")).expect("it is mounted again");
    assert!(!is_continuous(&mount.0.join("pool")), "what the cache held may be gone");
}

#[test]
fn a_device_that_is_mounted_is_no_place_for_a_pool_and_what_is_on_it_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let (device, mount) = match ext4(folder.path()) {
        Ok(made) => made,
        Err(reason) => return skipped(&format!("no file system can be mounted here: {reason}")),
    };
    let refused = FileDisk::open(&device.0).expect_err("it is mounted");
    assert!(matches!(refused, quoin_store::FileDiskError::DeviceInUse { .. }), "{refused}");
    drop(mount);
    let disk = opened(&device.0);
    let name = device.0.to_str().expect("a name");
    let mounting = Mount::make(&[name], &folder.path().join("mounted"));
    assert!(mounting.is_err(), "the pool's device cannot be mounted");
    let refused = Pool::format(&disk, &format_options()).expect_err("it holds something");
    assert!(matches!(refused, PoolError::Holds("ext4")), "{refused}");
}
