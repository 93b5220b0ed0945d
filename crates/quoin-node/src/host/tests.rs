//! Real mounts of real file systems, with a plain loop device instead of the attach process. They
//! need root and loop devices, and report where those are missing.

use std::fs::{self, File};
use std::os::unix::fs::FileTypeExt;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use async_trait::async_trait;

use quoin_testkit::skipped;

use super::*;
use crate::Kind;
use crate::device_calls::DeviceThread;

mod kill_table;
mod places;
mod tool_table;

const MIB: u64 = 1 << 20;

/// Loop devices over sparse files. The kernel keeps attached devices, so a new attacher (a restart)
/// sees those of the one before.
struct LoopAttacher {
    directory: PathBuf,
    /// Volumes in the order in which their devices were made.
    made: Mutex<Vec<String>>,
    /// Why its devices are dead.
    dead: Mutex<Option<String>>,
}

impl LoopAttacher {
    fn file(&self, volume: &str) -> PathBuf {
        self.directory.join(format!("{volume}.raw"))
    }
    /// `losetup -j` is not used: it opens every loop device of the host and blocks on a device
    /// whose server is away.
    fn find(&self, volume: &str) -> Option<PathBuf> {
        let file = self.file(volume);
        let is_on = |device: &fs::DirEntry| {
            let text = fs::read_to_string(device.path().join("loop/backing_file"));
            text.is_ok_and(|text| Path::new(text.trim_end_matches('\n')) == file)
        };
        let device = fs::read_dir("/sys/block").unwrap().flatten().find(is_on)?;
        Some(Path::new("/dev").join(device.file_name()))
    }
}

/// Returns true if the kernel removes a loop device once nobody has it open any more.
fn is_leaving(device: &Path) -> bool {
    let name = device.file_name().unwrap();
    let flag = Path::new("/sys/block").join(name).join("loop/autoclear");
    fs::read_to_string(flag).is_ok_and(|flag| flag.trim() == "1")
}

fn losetup(arguments: &[&std::ffi::OsStr]) -> Result<String, Error> {
    let output = Command::new("losetup").args(arguments).output().expect("losetup");
    if !output.status.success() {
        return Err(Error::Attach(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    Ok(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

#[async_trait]
impl Attacher for LoopAttacher {
    async fn attach(&self, request: &AttachRequest) -> Result<PathBuf, Error> {
        // A device that is half removed is still listed, and has no size in a moment.
        while let Some(device) = self.find(&request.volume) {
            if !is_leaving(&device) {
                return Ok(device);
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let path = self.file(&request.volume);
        let file = File::options().create(true).append(true).open(&path).unwrap();
        if file.metadata().unwrap().len() < request.size_bytes {
            file.set_len(request.size_bytes).unwrap();
        }
        let mut arguments = vec!["-f".as_ref(), "--show".as_ref()];
        if request.read_only {
            arguments.push("-r".as_ref());
        }
        arguments.push(path.as_os_str());
        self.made.lock().unwrap().push(request.volume.clone());
        Ok(losetup(&arguments)?.into())
    }
    async fn detach(&self, volume: &str) -> Result<(), Error> {
        // The kernel removes devices asynchronously, and one half removed is still listed.
        for _ in 0..100 {
            let Some(device) = self.find(volume) else {
                // The next one is of another use.
                *self.dead.lock().unwrap() = None;
                return Ok(());
            };
            let _ = losetup(&["-d".as_ref(), device.as_os_str()]);
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        Err(Error::Attach(format!("the loop device of {volume} is not removed")))
    }
    async fn resize(&self, volume: &str, size_bytes: u64) -> Result<(), Error> {
        File::options().append(true).open(self.file(volume)).unwrap().set_len(size_bytes).unwrap();
        if let Some(device) = self.find(volume) {
            losetup(&["-c".as_ref(), device.as_os_str()])?;
        }
        Ok(())
    }
    async fn device(&self, volume: &str) -> Result<Option<PathBuf>, Error> {
        Ok(self.find(volume))
    }
    async fn dead(&self, _volume: &str) -> Result<Option<String>, Error> {
        Ok(self.dead.lock().unwrap().clone())
    }
}

/// A node in a temporary directory; everything that it mounts is unmounted at the end.
struct World {
    root: tempfile::TempDir,
    attacher: Arc<LoopAttacher>,
}

const VOLUME: &str = "00000000000000000000000000000abc";

impl World {
    /// `None`, with a message, where loop devices or root are missing.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            skipped("needs root and /dev/loop-control");
            return None;
        }
        let root = tempfile::Builder::new().prefix("quoin node ").tempdir().unwrap();
        for directory in ["run/nbd", "state", "devices", "stage", "pods"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        let socket = root.path().join(format!("run/nbd/{VOLUME}.sock"));
        let target = std::os::unix::net::UnixListener::bind(socket).unwrap();
        // Every client is disconnected: there is no volume behind it.
        std::thread::spawn(move || target.incoming().for_each(drop));
        let directory = root.path().join("devices");
        let attacher =
            Arc::new(LoopAttacher { directory, made: Mutex::default(), dead: Mutex::default() });
        Some(Self { root, attacher })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Returns a node process, started anew: it knows only what is on disk and in the kernel.
    fn node(&self) -> NodeHost {
        let options = HostOptions {
            state_directory: self.path("state"),
            run_directory: self.path("run"),
            target_deadline_ms: 2000,
        };
        NodeHost::new(options, self.attacher.clone()).unwrap()
    }

    fn stage_request(&self, access: Access) -> StageRequest {
        StageRequest {
            volume: VOLUME.to_owned(),
            staging_path: self.path("stage"),
            access,
            mode: "SINGLE_NODE_WRITER".to_owned(),
            read_only: false,
            size_bytes: 64 * MIB,
            block_size: 512,
            key: None,
        }
    }

    fn publish_request(&self, access: Access, target: &str) -> PublishRequest {
        PublishRequest {
            volume: VOLUME.to_owned(),
            staging_path: self.path("stage"),
            target: self.path(target),
            access,
            mode: "SINGLE_NODE_WRITER".to_owned(),
            read_only: false,
            several_targets: false,
            group: None,
        }
    }

    fn mounts_within(&self) -> Vec<PathBuf> {
        mountinfo::read()
            .unwrap()
            .into_iter()
            .map(|mount| mount.mount_point)
            .filter(|path| path.starts_with(self.root.path()))
            .collect()
    }

    /// Unstages the volume. A process that another test has just forked may have a file of it open
    /// too, until it becomes its program, and a tool that is just started a copy of its mount.
    async fn unstage(&self, node: &NodeHost) -> bool {
        let mut outcome = node.unstage(VOLUME, &self.path("stage")).await;
        for _ in 0..1000 {
            let Err(Error::Busy { .. }) = outcome else { break };
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            outcome = node.unstage(VOLUME, &self.path("stage")).await;
        }
        outcome.unwrap()
    }

    /// Asserts that nothing of the volume is left on the host but its data.
    fn assert_clean(&self) {
        assert_eq!(self.mounts_within(), Vec::<PathBuf>::new());
        assert_eq!(self.attacher.find(VOLUME), None);
        assert_eq!(fs::read_dir(self.path("state/volumes")).unwrap().count(), 0);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for path in self.mounts_within().iter().rev() {
            let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
        }
        if let Some(device) = self.attacher.find(VOLUME) {
            let _ = losetup(&["-d".as_ref(), device.as_os_str()]);
        }
    }
}

fn ext4() -> Access {
    Access::Mount { file_system: FileSystem::Ext4, flags: vec!["noatime".to_owned()] }
}

/// Writes to the device. A kernel may refuse a read-only device at the open, or only at the write.
fn write_through(device: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = File::options().write(true).open(device)?;
    file.write_all_at(&[0x5a; 4096], 4096)?;
    file.sync_all()
}

/// Proves CSI-CONDITION-01: a mount whose volume another node has used since is abnormal.
#[tokio::test]
async fn a_dead_mount_of_an_earlier_use_is_abnormal_and_no_staged_volume() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    assert_eq!(node.stats(VOLUME, &world.path("stage")).await.unwrap().abnormal, None);
    *world.attacher.dead.lock().unwrap() = Some("served by h2 since epoch 31".into());
    let abnormal = node.stats(VOLUME, &world.path("stage")).await.unwrap().abnormal.unwrap();
    assert!(abnormal.contains("served by h2"), "{abnormal}");
    let refused = node.stage(&world.stage_request(ext4())).await.unwrap_err();
    assert_eq!(refused.kind(), crate::Kind::FailedPrecondition);
    assert!(refused.to_string().contains("unstage"), "{refused}");
    // Unstaging works as before, and then the volume is staged anew.
    world.unstage(&node).await;
    *world.attacher.dead.lock().unwrap() = None;
    node.stage(&world.stage_request(ext4())).await.unwrap();
    world.unstage(&node).await;
    world.assert_clean();
}

#[tokio::test]
async fn a_volume_keeps_its_files_through_stage_publish_unpublish_and_unstage() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    for round in 0..2 {
        node.stage(&world.stage_request(ext4())).await.unwrap();
        node.stage(&world.stage_request(ext4())).await.unwrap();
        assert_eq!(world.mounts_within().len(), 1, "one staging mount");
        let mounts = mountinfo::read().unwrap();
        let staged = mountinfo::at(&mounts, &world.path("stage")).unwrap();
        assert!(staged.options.contains(&"noatime".to_owned()));
        let request = world.publish_request(ext4(), "pods/a");
        let other_request = PublishRequest { staging_path: world.path("other"), ..request };
        let error = node.publish(&other_request).await.unwrap_err();
        assert!(matches!(error, Error::NotStaged { .. }), "{error}");
        node.publish(&world.publish_request(ext4(), "pods/a")).await.unwrap();
        node.publish(&world.publish_request(ext4(), "pods/a")).await.unwrap();
        assert_eq!(world.mounts_within().len(), 2, "one publication");
        let file = world.path("pods/a/greeting");
        if round == 0 {
            fs::write(&file, "hello").unwrap();
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "hello");

        let error = node.unstage(VOLUME, &world.path("stage")).await.unwrap_err();
        assert_eq!(error.kind(), Kind::FailedPrecondition, "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "hello", "the directory is unchanged");

        assert!(node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap());
        assert!(!world.path("pods/a").exists());
        assert!(!node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap());
        assert!(world.unstage(&node).await);
        assert!(!node.unstage(VOLUME, &world.path("stage")).await.unwrap());
        world.assert_clean();
    }
}

#[tokio::test]
async fn a_volume_in_use_is_unstaged_only_after_its_last_file_is_closed() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    let mut held = File::create(world.path("stage/held")).unwrap();
    let device = world.attacher.find(VOLUME);
    let records = || fs::read_dir(world.path("state/volumes")).unwrap().count();
    for _ in 0..2 {
        let error = node.unstage(VOLUME, &world.path("stage")).await.unwrap_err();
        assert!(matches!(&error, Error::Busy { path } if *path == world.path("stage")), "{error}");
        assert_eq!(world.mounts_within(), [world.path("stage")], "it is mounted as before");
        assert_eq!(world.attacher.find(VOLUME), device, "its device is attached as before");
        assert_eq!(records(), 1, "the next process finds its record");
        std::io::Write::write_all(&mut held, b"goes on").unwrap();
        held.sync_all().unwrap();
    }
    drop(held);
    assert!(world.unstage(&world.node()).await);
    world.assert_clean();
}

#[tokio::test]
async fn xfs_is_made_mounted_and_grown_while_in_use() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let access = Access::Mount { file_system: FileSystem::Xfs, flags: Vec::new() };
    let request = StageRequest { size_bytes: 400 * MIB, ..world.stage_request(access) };
    node.stage(&request).await.unwrap();
    let open = File::create(world.path("stage/held")).unwrap();
    let before = node.stats(VOLUME, &world.path("stage")).await.unwrap();
    assert_eq!(node.expand(VOLUME, &world.path("stage"), 800 * MIB).await.unwrap(), 800 * MIB);
    assert_eq!(node.expand(VOLUME, &world.path("stage"), 800 * MIB).await.unwrap(), 800 * MIB);
    let after = node.stats(VOLUME, &world.path("stage")).await.unwrap();
    assert!(after.total_bytes > before.total_bytes + 300 * MIB, "{before:?} {after:?}");
    drop(open);
    world.unstage(&node).await;
    world.assert_clean();
}

/// Proves CSI-CREATEVOLUME-07: a volume that became larger while it was staged nowhere, as a clone may
/// be larger than its source, has a file system of its own size once it is staged.
#[tokio::test]
async fn ext4_grows_while_in_use_and_after_the_volume_grew_unstaged() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    node.publish(&world.publish_request(ext4(), "pods/a")).await.unwrap();
    let outcome = node.expand(VOLUME, &world.path("pods/a"), 128 * MIB).await;
    let grown = node.stats(VOLUME, &world.path("pods/a")).await.unwrap();
    if crate::format::may_resize_ext4() {
        assert_eq!(outcome.unwrap(), 128 * MIB);
        assert!(grown.total_bytes > 100 * MIB, "{grown:?}");
    } else {
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("CAP_SYS_RESOURCE"), "{error}");
        assert_eq!(error.kind(), Kind::FailedPrecondition);
    }
    let (inodes, used, free) = grown.inodes.unwrap();
    assert_eq!(inodes, used + free);
    node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap();
    world.unstage(&node).await;

    world.attacher.resize(VOLUME, 256 * MIB).await.unwrap();
    let request = StageRequest { size_bytes: 256 * MIB, ..world.stage_request(ext4()) };
    node.stage(&request).await.unwrap();
    let again = node.stats(VOLUME, &world.path("stage")).await.unwrap();
    assert!(again.total_bytes > 200 * MIB, "{again:?}");
    world.unstage(&node).await;
    world.assert_clean();
}

#[tokio::test]
async fn a_block_volume_is_a_device_at_the_target_and_read_only_on_request() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(Access::Block)).await.unwrap();
    assert_eq!(world.mounts_within().len(), 0, "nothing is mounted for block use");
    let request = world.publish_request(Access::Block, "pods/disk");
    node.publish(&request).await.unwrap();
    node.publish(&request).await.unwrap();
    let target = world.path("pods/disk");
    assert!(fs::metadata(&target).unwrap().file_type().is_block_device());
    write_through(&target).unwrap();
    let stats = node.stats(VOLUME, &target).await.unwrap();
    assert_eq!((stats.total_bytes, stats.used_bytes), (64 * MIB, None));
    assert!(matches!(
        node.unstage(VOLUME, &world.path("stage")).await.unwrap_err(),
        Error::StillPublished { .. }
    ));
    node.unpublish(VOLUME, &target).await.unwrap();
    assert!(!target.exists());

    node.publish(&PublishRequest { read_only: true, ..request }).await.unwrap();
    assert!(write_through(&target).is_err(), "a read-only device");
    node.unpublish(VOLUME, &target).await.unwrap();
    world.unstage(&node).await;
    world.assert_clean();
}

#[tokio::test]
async fn a_read_only_publication_refuses_writes_and_the_staging_stays_writable() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    let request =
        PublishRequest { read_only: true, ..world.publish_request(ext4(), "pods/read only") };
    node.publish(&request).await.unwrap();
    let error = fs::write(world.path("pods/read only/x"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    fs::write(world.path("stage/x"), "x").unwrap();
    let mounts = mountinfo::read().unwrap();
    let target = mountinfo::at(&mounts, &world.path("pods/read only")).unwrap();
    assert!(target.options.contains(&"noatime".to_owned()), "flags survive the remount");
    node.unpublish(VOLUME, &world.path("pods/read only")).await.unwrap();
    world.unstage(&node).await;
    world.assert_clean();
}

#[tokio::test]
async fn calls_with_other_arguments_are_refused_and_change_nothing() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let publish = world.publish_request(ext4(), "pods/a");
    assert_eq!(node.publish(&publish).await.unwrap_err().kind(), Kind::FailedPrecondition);
    node.stage(&world.stage_request(ext4())).await.unwrap();
    let error = node.stage(&world.stage_request(Access::Block)).await.unwrap_err();
    assert_eq!(error.kind(), Kind::AlreadyExists, "{error}");
    fs::create_dir(world.path("elsewhere")).unwrap();
    let other_request =
        StageRequest { staging_path: world.path("elsewhere"), ..world.stage_request(ext4()) };
    let error = node.stage(&other_request).await.unwrap_err();
    assert_eq!(error.kind(), Kind::FailedPrecondition, "{error}");
    assert_eq!(world.attacher.made.lock().unwrap().len(), 1, "the device is attached once");

    node.publish(&publish).await.unwrap();
    let other = PublishRequest { read_only: true, ..publish.clone() };
    assert_eq!(node.publish(&other).await.unwrap_err().kind(), Kind::AlreadyExists);
    let second = PublishRequest { target: world.path("pods/b"), ..publish.clone() };
    assert_eq!(node.publish(&second).await.unwrap_err().kind(), Kind::FailedPrecondition);
    assert!(!world.path("pods/b").exists());
    let several = PublishRequest { several_targets: true, ..second };
    node.publish(&several).await.unwrap();
    let block = PublishRequest {
        access: Access::Block,
        target: world.path("pods/c"),
        several_targets: true,
        ..publish
    };
    assert_eq!(node.publish(&block).await.unwrap_err().kind(), Kind::FailedPrecondition);
    assert_eq!(world.mounts_within().len(), 3);
}

#[tokio::test]
async fn unusable_paths_are_refused_with_the_reason() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    fs::write(world.path("file"), "kept").unwrap();
    for name in ["file", "missing"] {
        let request =
            StageRequest { staging_path: world.path(name), ..world.stage_request(ext4()) };
        assert_eq!(node.stage(&request).await.unwrap_err().kind(), Kind::InvalidArgument);
    }
    assert_eq!(fs::read_to_string(world.path("file")).unwrap(), "kept");
    node.stage(&world.stage_request(ext4())).await.unwrap();
    for target in ["file", "missing/a"] {
        let error = node.publish(&world.publish_request(ext4(), target)).await.unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument, "{error}");
    }
    // A mount of another owner is neither covered nor removed.
    fs::create_dir(world.path("pods/foreign")).unwrap();
    DeviceThread::of_test(|thread| {
        mount::bind(thread, &world.path("devices"), &world.path("pods/foreign")).unwrap();
    });
    let request = world.publish_request(ext4(), "pods/foreign");
    assert!(matches!(node.publish(&request).await, Err(Error::ForeignMount { .. })));
    assert!(!node.unpublish(VOLUME, &world.path("pods/foreign")).await.unwrap());
    assert!(mountinfo::at(&mountinfo::read().unwrap(), &world.path("pods/foreign")).is_some());
}

/// The target path of a call is the caller's word: it may name any directory of the host.
#[tokio::test]
async fn a_path_that_was_never_published_is_not_removed() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    fs::create_dir(world.path("pods/other")).unwrap();
    fs::write(world.path("pods/file"), "").unwrap();
    for staged in [false, true] {
        if staged {
            node.stage(&world.stage_request(ext4())).await.unwrap();
        }
        for path in ["pods/other", "pods/file"] {
            for volume in [VOLUME, "no-such-volume"] {
                assert!(!node.unpublish(volume, &world.path(path)).await.unwrap());
                assert!(world.path(path).exists(), "{path}");
            }
        }
    }
    world.unstage(&node).await;
}

/// The pod runs on though its volume was unmounted, and the orchestrator stages again.
#[tokio::test]
async fn a_lost_staging_mount_is_made_again_while_a_pod_has_the_volume() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    node.publish(&world.publish_request(ext4(), "pods/a")).await.unwrap();
    let held = File::create(world.path("pods/a/held")).unwrap();
    rustix::mount::unmount(world.path("stage"), rustix::mount::UnmountFlags::empty()).unwrap();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    assert!(world.path("stage/held").exists(), "it is the same file system");
    assert_eq!(node.stats(VOLUME, &world.path("stage")).await.unwrap().abnormal, None);
    // No tool for unmounted devices runs on it, and nothing is formatted.
    let device = world.attacher.find(VOLUME).unwrap();
    assert!(DeviceThread::of_test(|thread| device::is_held(thread, &device).unwrap()));
    let scratch = world.path("state");
    let job = Job { volume: VOLUME, size_bytes: 64 * MIB, block_size: 512, scratch: &scratch };
    let image = Image::make(node.tools(), job, FileSystem::Ext4).await.unwrap();
    let refused =
        DeviceThread::of_test(|thread| image.write_to(thread, &device, false).unwrap_err());
    assert!(matches!(refused, Error::Busy { .. }), "{refused}");
    drop(held);
    node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap();
    world.unstage(&node).await;
    world.assert_clean();
}

#[tokio::test]
async fn an_ext4_stops_writing_at_an_error_whatever_its_superblock_says() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let staged = async |access: Access| {
        node.stage(&world.stage_request(access)).await.unwrap();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let stage = world.path("stage").display().to_string().replace(' ', "\\040");
        let line = table.lines().find(|line| line.contains(&stage)).unwrap().to_owned();
        world.unstage(&node).await;
        line
    };
    staged(ext4()).await;
    let file = world.attacher.file(VOLUME);
    assert!(
        Command::new("tune2fs").args(["-e", "panic"]).arg(&file).output().unwrap().status.success()
    );
    let line = staged(ext4()).await;
    assert!(line.contains("errors=remount-ro"), "{line}");
    let flags = vec!["errors=continue".to_owned()];
    let line = staged(Access::Mount { file_system: FileSystem::Ext4, flags }).await;
    assert!(line.contains("errors=continue"), "{line}");
}

#[tokio::test]
async fn an_ext4_whose_journal_is_on_another_device_is_neither_checked_nor_mounted() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    world.unstage(&node).await;
    // A hostile image says: the journal is on the device of that number of this host.
    let file = File::options().write(true).open(world.attacher.file(VOLUME)).unwrap();
    use std::os::unix::fs::FileExt;
    file.write_all_at(&0_u32.to_le_bytes(), 0x4e0).unwrap();
    file.write_all_at(&0xfe00_u32.to_le_bytes(), 0x4e4).unwrap();
    let before = fs::read(world.attacher.file(VOLUME)).unwrap();
    for read_only in [false, true] {
        let request = StageRequest { read_only, ..world.stage_request(ext4()) };
        let refused = node.stage(&request).await.unwrap_err();
        assert!(matches!(refused, Error::ExternalJournal { .. }), "{refused}");
        world.unstage(&node).await;
    }
    assert_eq!(fs::read(world.attacher.file(VOLUME)).unwrap(), before);
}

/// The advice for content that is not what was asked for never destroys it.
#[tokio::test]
async fn the_advice_fits_what_was_found() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let large = StageRequest { size_bytes: 300 * MIB, ..world.stage_request(ext4()) };
    node.stage(&large).await.unwrap();
    fs::write(world.path("stage/x"), "kept").unwrap();
    world.unstage(&node).await;
    let whole = world.path("whole");
    fs::copy(world.attacher.file(VOLUME), &whole).unwrap();
    let write = |bytes: &[(usize, &[u8])], base: &Path| {
        use std::os::unix::fs::FileExt;
        let path = world.attacher.file(VOLUME);
        let copied = Command::new("cp").arg("--sparse=always").arg(base).arg(&path).output();
        assert!(copied.unwrap().status.success());
        let file = File::options().write(true).open(&path).unwrap();
        for (at, bytes) in bytes {
            file.write_all_at(bytes, *at as u64).unwrap();
        }
    };
    let none = world.path("none");
    File::create(&none).unwrap().set_len(300 * MIB).unwrap();
    let lvm: &[(usize, &[u8])] = &[(512 + 24, b"LVM2 001")];
    let xfs: &[(usize, &[u8])] = &[(4096, b"AB3B"), (8192, b"AB3C")];
    for (bytes, base, advice) in [
        (&[(0, &[0; 4096][..])][..], &whole, "e2fsck -b 32768 -B 4096"),
        (xfs, &none, "xfs_repair"),
        (lvm, &none, "raw block volume"),
        (&[(0, &b"LUKS\xba\xbe"[..])], &none, "raw block volume"),
        (&[(510, &b"\x55\xaa"[..])], &none, "raw block volume"),
        (&[(0x1_0040, &b"_BHRfS_M"[..])], &none, "mount it there"),
        (&[(0, &b"XFSB"[..])], &none, "request xfs"),
        (&[(77, &b"data"[..])], &none, "raw block volume"),
    ] {
        write(bytes, base);
        let refused = node.stage(&large).await.unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, Error::OtherContent { .. }) && text.contains(advice), "{text}");
        assert!(!text.contains("empty the volume") && !text.contains("request data"), "{text}");
        world.unstage(&node).await;
    }
    // The advised command brings it back.
    write(&[(0, &[0; 4096][..])], &whole);
    let file = world.attacher.file(VOLUME);
    let mut mended = Command::new("e2fsck");
    let mended = mended.args(["-fy", "-b", "32768", "-B", "4096"]).arg(&file);
    assert!(mended.output().unwrap().status.code().unwrap() <= 1);
    node.stage(&large).await.unwrap();
    assert_eq!(fs::read_to_string(world.path("stage/x")).unwrap(), "kept");
    world.unstage(&node).await;
}

#[tokio::test]
async fn a_device_with_anything_on_it_is_never_formatted() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    for (name, offset, bytes) in
        [("data", 1_000_000, &b"precious"[..]), ("btrfs", 0x1_0040, b"_BHRfS_M")]
    {
        let mut image = vec![0; usize::try_from(64 * MIB).unwrap()];
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
        fs::write(world.attacher.file(VOLUME), &image).unwrap();
        let error = node.stage(&world.stage_request(ext4())).await.unwrap_err();
        assert_eq!(error.kind(), Kind::FailedPrecondition, "{name}: {error}");
        world.assert_clean();
        assert_eq!(fs::read(world.attacher.file(VOLUME)).unwrap(), image, "{name}");
    }
}

#[tokio::test]
async fn a_volume_that_holds_ext4_is_not_mounted_as_xfs() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    fs::write(world.path("stage/x"), "kept").unwrap();
    world.unstage(&node).await;
    let xfs = Access::Mount { file_system: FileSystem::Xfs, flags: Vec::new() };
    let error = node.stage(&world.stage_request(xfs)).await.unwrap_err();
    assert!(error.to_string().contains("ext4"), "{error}");
    world.assert_clean();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    assert_eq!(fs::read_to_string(world.path("stage/x")).unwrap(), "kept");
}

/// A process that has a file open until it is dropped.
struct User(std::process::Child);

impl User {
    fn of(path: &Path) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", "exec 3<\"$0\" && echo open && exec sleep 600"])
            .arg(path)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
        Self(child)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The orchestrator never comes back for a volume that was taken from its host.
#[tokio::test]
async fn mounts_of_a_volume_that_is_here_no_more_are_taken_from_nobody_and_go_through_a_kill_at_any_step()
 {
    let Some(world) = World::new() else { return };
    let pieces = |node: &NodeHost| {
        let pieces = node.staged_pieces(&mountinfo::read().unwrap()).unwrap();
        pieces.into_iter().map(|piece| piece.path).collect::<Vec<_>>()
    };
    for access in [ext4(), Access::Block] {
        for step in 0.. {
            *world.attacher.dead.lock().unwrap() = None;
            let node = world.node();
            node.stage(&world.stage_request(access.clone())).await.unwrap();
            node.publish(&world.publish_request(access.clone(), "pods/a")).await.unwrap();
            let mounts = world.mounts_within();
            assert!(pieces(&node).contains(&world.path("pods/a")), "{:?}", pieces(&node));
            assert_eq!(pieces(&node).len(), mounts.len());
            // A device that works is another use.
            assert_eq!(node.take_down_left(VOLUME).await.unwrap(), None);
            assert_eq!(world.mounts_within(), mounts);

            *world.attacher.dead.lock().unwrap() = Some("detached from this host".into());
            if step == 0 {
                let user = User::of(&world.path("pods/a"));
                let why = node.take_down_left(VOLUME).await.unwrap().unwrap();
                assert!(why.contains(") has it open"), "{why}");
                assert_eq!(world.mounts_within(), mounts, "nothing is taken from a process");
                drop(user);
            }
            node.steps_left.store(step, Ordering::Relaxed);
            let killed = node.take_down_left(VOLUME).await;
            let node = world.node();
            // A process that another test has just forked is a user for a moment.
            for _ in 0..1000 {
                if node.take_down_left(VOLUME).await.unwrap().is_none() {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            assert_eq!(world.mounts_within(), Vec::<PathBuf>::new());
            assert_eq!((world.attacher.find(VOLUME), pieces(&node)), (None, Vec::new()));
            assert!(!world.path("pods/a").exists());
            // The orchestrator comes after all.
            assert!(node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap());
            assert!(node.unstage(VOLUME, &world.path("stage")).await.unwrap());
            world.assert_clean();
            if killed.is_ok() {
                assert!(step > 2, "steps were interrupted");
                break;
            }
        }
    }
}

/// A path of a record, at which another program has a device of its own by now.
#[tokio::test]
async fn a_mount_of_another_device_at_a_recorded_path_is_not_taken_away() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    let file = world.attacher.file(VOLUME);
    DeviceThread::of_test(|thread| mount::unmount(thread, &world.path("stage")).unwrap());
    world.attacher.detach(VOLUME).await.unwrap();
    fs::rename(file, world.attacher.file("other")).unwrap();
    let other = AttachRequest {
        volume: "other".into(),
        nbd_socket: PathBuf::new(),
        size_bytes: 64 * MIB,
        block_size: 512,
        read_only: false,
        key: None,
    };
    let device = world.attacher.attach(&other).await.unwrap();
    let mounted = |device: &Path| {
        let parsed = mount::parse_flags(&[]).unwrap();
        let at = world.path("stage");
        DeviceThread::of_test(|thread| {
            mount::mount_device(thread, "other", device, &at, FileSystem::Ext4, &parsed, false)
        })
    };
    mounted(&device).unwrap();
    assert_eq!(node.staged_pieces(&mountinfo::read().unwrap()).unwrap(), []);
    assert_eq!(node.take_down_left(VOLUME).await.unwrap(), None);
    assert_eq!(world.mounts_within(), [world.path("stage")]);
    rustix::mount::unmount(world.path("stage"), rustix::mount::UnmountFlags::empty()).unwrap();
    world.attacher.detach("other").await.unwrap();
}

/// An orchestrator does not unstage what it was refused.
#[tokio::test]
async fn a_staging_that_is_refused_leaves_neither_device_nor_record() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let flags = vec!["commit=abc".to_owned()];
    let wrong = Access::Mount { file_system: FileSystem::Ext4, flags };
    node.stage(&world.stage_request(wrong)).await.unwrap_err();
    world.assert_clean();
    assert!(!node.has_record(VOLUME).unwrap());
    node.stage(&world.stage_request(ext4())).await.unwrap();
    world.unstage(&node).await;
    world.assert_clean();
}

#[tokio::test]
async fn an_interrupted_format_is_repeated_with_either_file_system() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let mut image = vec![0; usize::try_from(400 * MIB).unwrap()];
    image[..probe::FORMATTING_MARK.len()].copy_from_slice(probe::FORMATTING_MARK);
    // Possible leftovers of an attempt with the other file system.
    image[5_000_000..5_000_400].fill(0xa5);
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        fs::write(world.attacher.file(VOLUME), &image).unwrap();
        let access = Access::Mount { file_system, flags: Vec::new() };
        let request = StageRequest { size_bytes: 400 * MIB, ..world.stage_request(access) };
        node.stage(&request).await.unwrap();
        fs::write(world.path("stage/x"), "x").unwrap();
        world.unstage(&node).await;
        world.assert_clean();
    }
}

#[tokio::test]
async fn an_empty_volume_cannot_be_staged_read_only_and_a_formatted_one_can() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let read_only = StageRequest { read_only: true, ..world.stage_request(ext4()) };
    assert!(matches!(node.stage(&read_only).await, Err(Error::EmptyReadOnly { .. })));
    world.unstage(&node).await;
    node.stage(&world.stage_request(ext4())).await.unwrap();
    fs::write(world.path("stage/x"), "x").unwrap();
    world.unstage(&node).await;
    node.stage(&read_only).await.unwrap();
    assert_eq!(fs::read_to_string(world.path("stage/x")).unwrap(), "x");
    assert!(fs::write(world.path("stage/y"), "y").is_err());
    let stats = node.stats(VOLUME, &world.path("stage")).await.unwrap();
    assert_eq!(stats.abnormal, None, "asked for, so not abnormal");
}

/// Stages a volume, writes a file, and leaves the volume as a power failure during its use would.
async fn leave_dirty(world: &World, request: &StageRequest) {
    let node = world.node();
    node.stage(request).await.unwrap();
    let file = File::create(world.path("stage/x")).unwrap();
    std::io::Write::write_all(&mut &file, b"x").unwrap();
    file.sync_all().unwrap();
    let dirty = world.path("dirty");
    fs::copy(world.attacher.file(VOLUME), &dirty).unwrap();
    drop(file);
    assert!(world.unstage(&node).await);
    fs::rename(dirty, world.attacher.file(VOLUME)).unwrap();
}

/// Proves CSI-CREATEVOLUME-07: a clone that was mounted nowhere before it is staged read-only, and is
/// larger than its source.
#[tokio::test]
async fn a_journal_is_replayed_before_a_read_only_staging_through_a_kill_at_any_step() {
    let Some(world) = World::new() else { return };
    let xfs = Access::Mount { file_system: FileSystem::Xfs, flags: Vec::new() };
    for (access, size_bytes) in [(ext4(), 64 * MIB), (xfs, 400 * MIB)] {
        let writes = StageRequest { size_bytes, ..world.stage_request(access) };
        let reads =
            StageRequest { read_only: true, size_bytes: size_bytes + 100 * MIB, ..writes.clone() };
        for step in 0.. {
            let _ = fs::remove_file(world.attacher.file(VOLUME));
            leave_dirty(&world, &writes).await;
            if step == 0 {
                world.node().stage(&reads).await.unwrap_err();
                world.unstage(&world.node()).await;
            }
            world.attacher.resize(VOLUME, reads.size_bytes).await.unwrap();
            let node = world.node();
            node.steps_left.store(step, Ordering::Relaxed);
            let outcome = node.replay(&reads).await;
            let node = world.node();
            node.replay(&reads).await.unwrap();
            world.assert_clean();
            node.stage(&reads).await.unwrap();
            assert_eq!(fs::read_to_string(world.path("stage/x")).unwrap(), "x");
            assert!(fs::write(world.path("stage/y"), "y").is_err());
            let stats = node.stats(VOLUME, &world.path("stage")).await.unwrap();
            assert!(stats.total_bytes > size_bytes + 20 * MIB, "{stats:?}");
            world.unstage(&node).await;
            if outcome.is_ok() {
                break;
            }
        }
    }
}

/// The kernel clears old blocks of an XFS log whenever it mounts one, so its bytes may differ.
#[tokio::test]
async fn a_replay_makes_no_file_system_and_changes_no_clean_ext4() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let reads = StageRequest { read_only: true, ..world.stage_request(ext4()) };
    assert!(matches!(node.replay(&reads).await, Err(Error::EmptyReadOnly { .. })));
    world.unstage(&node).await;
    node.stage(&world.stage_request(ext4())).await.unwrap();
    fs::write(world.path("stage/x"), "x").unwrap();
    assert!(world.unstage(&node).await);
    let before = fs::read(world.attacher.file(VOLUME)).unwrap();
    node.replay(&reads).await.unwrap();
    assert!(fs::read(world.attacher.file(VOLUME)).unwrap() == before, "bytes were written");
}

#[tokio::test]
async fn a_missing_mkfs_leaves_a_blank_device_blank() {
    let Some(world) = World::new() else { return };
    let options = HostOptions {
        state_directory: world.path("state"),
        run_directory: world.path("run"),
        target_deadline_ms: 2000,
    };
    let tools = Tools::within(vec![world.path("run")]);
    let node = NodeHost::with_tools(options, world.attacher.clone(), tools).unwrap();
    let error = node.stage(&world.stage_request(ext4())).await.unwrap_err();
    assert!(error.to_string().contains("e2fsprogs"), "{error}");
    world.node().stage(&world.stage_request(ext4())).await.unwrap();
}

#[tokio::test]
async fn after_a_reboot_old_records_neither_block_nor_mislead() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    node.publish(&world.publish_request(ext4(), "pods/a")).await.unwrap();
    // Mounts and devices are gone after a reboot; files stay.
    for path in ["pods/a", "stage"] {
        DeviceThread::of_test(|thread| mount::unmount(thread, &world.path(path)).unwrap());
    }
    world.attacher.detach(VOLUME).await.unwrap();

    let node = world.node();
    let second = world.publish_request(ext4(), "pods/b");
    assert!(matches!(node.publish(&second).await, Err(Error::NotStaged { .. })));
    assert!(node.stats(VOLUME, &world.path("stage")).await.is_err());
    fs::create_dir(world.path("other")).unwrap();
    let other_request =
        StageRequest { staging_path: world.path("other"), ..world.stage_request(ext4()) };
    node.stage(&other_request).await.unwrap();
    let second = PublishRequest { staging_path: world.path("other"), ..second };
    node.publish(&second).await.unwrap();
    node.unpublish(VOLUME, &world.path("pods/b")).await.unwrap();
    node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap();
    node.unstage(VOLUME, &world.path("other")).await.unwrap();
    world.assert_clean();
}
