//! Every operation on a host, ended before each of its steps as by a kill, and then repeated or undone: what the
//! kernel has is compared with what was meant, which a plain model says by the operations alone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;

/// Growth of a volume.
const GROWTH: u64 = 32 * MIB;
/// Mount flags that are compared.
const FLAGS: [&str; 5] = ["ro", "nosuid", "nodev", "noexec", "noatime"];

/// Way in which a volume is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    /// `None`: as a block device.
    file_system: Option<FileSystem>,
    staged_read_only: bool,
    published_read_only: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    /// Of a volume that was never written.
    StageBlank,
    Stage,
    Publish,
    Expand,
    Unpublish,
    Unstage,
    /// The kernel has the mounts no more.
    HealMounts,
    /// The device is dead.
    HealDevice,
    TakeDown,
}

use Operation::{
    Expand, HealDevice, HealMounts, Publish, Stage, StageBlank, TakeDown, Unpublish, Unstage,
};

const OPERATIONS: [Operation; 9] =
    [StageBlank, Stage, Publish, Expand, Unpublish, Unstage, HealMounts, HealDevice, TakeDown];

/// State of the volume that a host is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Meant {
    staged: bool,
    published: bool,
    grown: bool,
}

const NOTHING: Meant = Meant { staged: false, published: false, grown: false };
const STAGED: Meant = Meant { staged: true, ..NOTHING };
const PUBLISHED: Meant = Meant { published: true, ..STAGED };

/// State of it that the kernel has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kernel {
    /// Size and read-only switch; the switch is nobody's business while nothing is published.
    device: Option<(u64, Option<bool>)>,
    /// The file system that is mounted has the size of its volume.
    is_filled: bool,
    /// Flags by path.
    mounts: BTreeMap<String, BTreeSet<String>>,
    /// Names in the directory of targets.
    targets: Vec<String>,
    partitions: usize,
}

impl Usage {
    fn all() -> Vec<Self> {
        let usage = |file_system, staged_read_only, published_read_only| Self {
            file_system,
            staged_read_only,
            published_read_only,
        };
        let ext4 = Some(FileSystem::Ext4);
        vec![
            usage(ext4, false, false),
            usage(ext4, false, true),
            usage(ext4, true, true),
            usage(Some(FileSystem::Xfs), false, false),
            usage(None, false, false),
            usage(None, false, true),
        ]
    }

    fn is_block(self) -> bool {
        self.file_system.is_none()
    }

    fn size_bytes(self) -> u64 {
        // XFS is made of no less than 300 MiB.
        if self.file_system == Some(FileSystem::Xfs) { 320 * MIB } else { 64 * MIB }
    }

    fn access(self) -> Access {
        let flags = ["noatime", "nosuid", "noexec"].map(str::to_owned).to_vec();
        match self.file_system {
            None => Access::Block,
            Some(file_system) => Access::Mount { file_system, flags },
        }
    }

    /// Operations that have a sense for it.
    fn operations(self) -> impl Iterator<Item = Operation> {
        let is_xfs = self.file_system == Some(FileSystem::Xfs);
        let is_writable = !self.staged_read_only && !self.published_read_only;
        OPERATIONS.into_iter().filter(move |operation| match operation {
            StageBlank => is_writable && !is_xfs,
            // A mounted ext4 grows where this process has the right to that.
            Expand => {
                is_writable && (is_xfs || self.is_block() || crate::format::may_resize_ext4())
            }
            _ if is_xfs => false,
            Publish | Unpublish => true,
            Stage | Unstage | HealDevice => is_writable || self.staged_read_only,
            HealMounts => is_writable || !self.staged_read_only,
            TakeDown => is_writable,
        })
    }

    /// The model: what the kernel is to have.
    fn kernel(self, meant: Meant) -> Kernel {
        let mut mounts = BTreeMap::new();
        let flags = |read_only: bool| {
            let own: &[&str] = if self.is_block() { &[] } else { &["noatime", "nosuid", "noexec"] };
            let ro: &[&str] = if read_only { &["ro"] } else { &[] };
            own.iter().chain(ro).map(|flag| (*flag).to_owned()).collect::<BTreeSet<_>>()
        };
        if meant.staged && !self.is_block() {
            mounts.insert("stage".to_owned(), flags(self.staged_read_only));
        }
        if meant.published {
            let read_only = self.published_read_only || self.staged_read_only;
            mounts.insert("pods/a".to_owned(), flags(read_only));
        }
        let read_only = match (self.is_block(), meant.published) {
            (true, true) => Some(self.published_read_only),
            (true, false) => None,
            (false, _) => Some(self.staged_read_only),
        };
        let size_bytes = self.size_bytes() + if meant.grown { GROWTH } else { 0 };
        Kernel {
            device: meant.staged.then_some((size_bytes, read_only)),
            is_filled: meant.staged && !self.is_block(),
            mounts,
            targets: if meant.published { vec!["a".to_owned()] } else { Vec::new() },
            partitions: 0,
        }
    }
}

fn is_read_only(device: &Path) -> bool {
    let name = device.file_name().unwrap().to_str().unwrap();
    fs::read_to_string(format!("/sys/block/{name}/ro")).unwrap().trim() == "1"
}

fn partitions(device: &Path) -> usize {
    let name = device.file_name().unwrap().to_str().unwrap();
    let entries = fs::read_dir(format!("/sys/block/{name}")).unwrap().flatten();
    entries.filter(|entry| entry.path().join("partition").exists()).count()
}

/// Makes a call again while a process that another test has just forked uses the volume for a moment.
async fn patiently<T>(mut call: impl AsyncFnMut() -> Result<T, Error>) -> T {
    for _ in 0..1000 {
        match call().await {
            Err(Error::Busy { .. }) => tokio::time::sleep(Duration::from_millis(5)).await,
            outcome => return outcome.unwrap(),
        }
    }
    panic!("it is busy for ever");
}

/// One row of the table.
struct Row<'a> {
    world: &'a World,
    usage: Usage,
}

impl Row<'_> {
    fn stage_request(&self) -> StageRequest {
        let read_only = self.usage.staged_read_only;
        let size_bytes = self.usage.size_bytes();
        StageRequest { read_only, size_bytes, ..self.world.stage_request(self.usage.access()) }
    }

    fn publish_request(&self) -> PublishRequest {
        let read_only = self.usage.published_read_only;
        PublishRequest { read_only, ..self.world.publish_request(self.usage.access(), "pods/a") }
    }

    /// Returns what the kernel has; the model says what is nobody's business.
    fn kernel(&self, meant: &Kernel) -> Kernel {
        let device = self.world.attacher.find(VOLUME);
        let mounts = mountinfo::read().unwrap();
        let within = mounts.iter().filter_map(|mount| {
            let path = mount.mount_point.strip_prefix(self.world.root.path()).ok()?;
            let is_compared = |flag: &&String| {
                FLAGS.contains(&flag.as_str()) && (!self.usage.is_block() || *flag == "ro")
            };
            let flags = mount.options.iter().filter(is_compared).cloned().collect();
            Some((path.display().to_string(), flags))
        });
        let switch = meant.device.is_some_and(|(_, switch)| switch.is_some());
        // Tables of an ext4 and the log of an XFS count for nothing.
        let is_xfs = self.usage.file_system == Some(FileSystem::Xfs);
        let own = if is_xfs { 80 * MIB } else { 16 * MIB };
        let is_filled = |device: &PathBuf| {
            let figures = rustix::fs::statvfs(self.world.path("stage")).unwrap();
            meant.is_filled
                && figures.f_blocks * figures.f_frsize + own > device::size_bytes(device).unwrap()
        };
        let mut targets: Vec<_> =
            fs::read_dir(self.world.path("pods")).unwrap().flatten().collect();
        targets.sort_by_key(fs::DirEntry::file_name);
        Kernel {
            device: device.as_ref().map(|device| {
                let size_bytes = device::size_bytes(device).unwrap();
                (size_bytes, switch.then(|| is_read_only(device)))
            }),
            is_filled: device.as_ref().is_some_and(is_filled),
            mounts: within.collect(),
            targets: targets.iter().map(|one| one.file_name().to_string_lossy().into()).collect(),
            partitions: device.map_or(0, |device| partitions(&device)),
        }
    }

    fn assert_kernel(&self, meant: Meant, what: &str) {
        let expected = self.usage.kernel(meant);
        assert_eq!(self.kernel(&expected), expected, "{what}");
    }

    /// Brings the host to where an operation begins.
    async fn begin(&self, operation: Operation) {
        let node = self.world.node();
        if matches!(operation, StageBlank | Stage) {
            return;
        }
        node.stage(&self.stage_request()).await.unwrap();
        if matches!(operation, Publish | Unstage) {
            return;
        }
        node.publish(&self.publish_request()).await.unwrap();
        match operation {
            HealMounts => {
                for path in self.world.mounts_within().iter().rev() {
                    rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH).unwrap();
                }
            }
            HealDevice | TakeDown => {
                *self.world.attacher.dead.lock().unwrap() = Some("of an earlier use".into());
            }
            _ => {}
        }
    }

    /// Makes a call; false: it was killed.
    async fn call(&self, node: &NodeHost, operation: Operation) -> bool {
        let was_killed = |error: &str| error.contains("stopped before");
        let target = self.world.path("pods/a");
        let outcome = match operation {
            StageBlank | Stage => node.stage(&self.stage_request()).await,
            Publish => node.publish(&self.publish_request()).await,
            Expand => {
                node.expand(VOLUME, &target, self.usage.size_bytes() + GROWTH).await.map(drop)
            }
            Unpublish => node.unpublish(VOLUME, &target).await.map(drop),
            Unstage => node.unstage(VOLUME, &self.world.path("stage")).await.map(drop),
            TakeDown => match node.take_down_left(VOLUME).await {
                Ok(Some(why)) => Err(Error::Attach(why)),
                other => other.map(drop),
            },
            HealMounts | HealDevice => {
                let standing = Standing {
                    is_published: true,
                    size_bytes: self.usage.size_bytes(),
                    block_size: 512,
                    ..Standing::default()
                };
                let volume = VOLUME.to_owned();
                let request = HealRequest { volume, standing: Some(standing), key: None };
                let healed = node.heal(&request).await.unwrap().unwrap();
                match healed.why_not {
                    Some(why) => Err(Error::Attach(why)),
                    None => {
                        assert_eq!(healed.faults, []);
                        Ok(())
                    }
                }
            }
        };
        match outcome {
            Ok(()) => true,
            Err(Error::Stopped(_)) => false,
            Err(error) if was_killed(&error.to_string()) => false,
            Err(error) => panic!("{operation:?}: {error}"),
        }
    }

    async fn end(&self) {
        *self.world.attacher.dead.lock().unwrap() = None;
        let node = self.world.node();
        let (target, stage) = (self.world.path("pods/a"), self.world.path("stage"));
        patiently(async || node.unpublish(VOLUME, &target).await).await;
        patiently(async || node.unstage(VOLUME, &stage).await).await;
    }

    /// Another volume, which may be given the number of the device.
    async fn next_user(&self) {
        let next = AttachRequest {
            volume: "next".into(),
            nbd_socket: PathBuf::new(),
            size_bytes: MIB,
            block_size: 512,
            read_only: false,
            key: None,
        };
        let device = self.world.attacher.attach(&next).await.unwrap();
        assert!(!is_read_only(&device), "{} has the switch of another", device.display());
        assert_eq!((device::size_bytes(&device).unwrap(), partitions(&device)), (MIB, 0));
        write_through(&device).unwrap();
        self.world.attacher.detach("next").await.unwrap();
    }
}

impl Operation {
    /// State of the host after it.
    fn meant(self) -> Meant {
        match self {
            StageBlank | Stage | Unpublish => STAGED,
            Publish | HealMounts | HealDevice => PUBLISHED,
            Expand => Meant { grown: true, ..PUBLISHED },
            // Of one that was taken down the record is left: the orchestrator may yet unstage it.
            Unstage | TakeDown => NOTHING,
        }
    }

    fn opposite(self) -> Option<Self> {
        match self {
            StageBlank | Stage => Some(Unstage),
            Publish => Some(Unpublish),
            Unpublish => Some(Publish),
            Unstage => Some(Stage),
            Expand | HealMounts | HealDevice | TakeDown => None,
        }
    }
}

#[tokio::test]
async fn a_kill_before_any_step_of_any_operation_leaves_what_its_repetition_and_its_opposite_make_whole()
 {
    let Some(world) = World::new() else { return };
    let (file, prepared) = (world.attacher.file(VOLUME), world.path("prepared"));
    let mut steps = BTreeMap::new();
    for usage in Usage::all() {
        let _ = fs::remove_file(&file);
        let row = Row { world: &world, usage: Usage { staged_read_only: false, ..usage } };
        row.call(&world.node(), Stage).await;
        if !usage.is_block() {
            fs::write(world.path("stage/x"), "kept").unwrap();
        }
        row.end().await;
        fs::rename(&file, &prepared).unwrap();
        let row = Row { world: &world, usage };
        for operation in usage.operations() {
            let has_opposite = operation.opposite().is_some() && !usage.staged_read_only;
            for is_repeated in if has_opposite { vec![true, false] } else { vec![true] } {
                for step in 0.. {
                    let _ = fs::remove_file(&file);
                    if operation != StageBlank {
                        let mut copy = Command::new("cp");
                        let copied = copy.arg("--sparse=always").args([&prepared, &file]).status();
                        assert!(copied.unwrap().success());
                    }
                    row.begin(operation).await;
                    let node = world.node();
                    node.steps_left.store(step, Ordering::Relaxed);
                    let has_ended = row.call(&node, operation).await;
                    let what = format!("{usage:?} {operation:?} killed before step {step}");
                    let opposite = operation.opposite().filter(|_| !is_repeated);
                    let next = opposite.unwrap_or(operation);
                    let node = world.node();
                    assert!(row.call(&node, next).await, "{what}");
                    let meant = next.meant();
                    row.assert_kernel(meant, &what);
                    let kept = match (usage.is_block(), meant.published, meant.staged) {
                        (false, true, _) => Some("pods/a/x"),
                        (false, false, true) => Some("stage/x"),
                        _ => None,
                    };
                    if let Some(path) = kept.filter(|_| operation != StageBlank) {
                        assert_eq!(fs::read_to_string(world.path(path)).unwrap(), "kept", "{what}");
                    }
                    row.end().await;
                    row.assert_kernel(NOTHING, &what);
                    world.assert_clean();
                    row.next_user().await;
                    if has_ended {
                        steps.insert(format!("{operation:?}"), step);
                        break;
                    }
                }
            }
        }
    }
    assert!(steps.values().all(|steps| *steps > 0), "operations without a step: {steps:?}");
}
