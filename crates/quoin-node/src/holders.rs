//! Users of a file system or of a device, as the kernel's tables of processes show them.
//!
//! A look changes nothing and waits for nothing: the attributes of an open file are those that the kernel
//! has, and no server of a file system is asked. Processes of another PID namespace are not seen;
//! the kernel refuses to unmount what they use. All searches of this program for users are here.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::device_calls::DeviceThread;
use crate::mountinfo::{self, Companions, Mount};

/// Largest table of mounts that is read.
const MOUNTS_BYTES_MAX: u64 = 16 << 20;

/// Use that is searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A file on the file system of a device is open, or the file system is mounted in a table of
    /// mounts other than this process's.
    FileSystem { major: u32, minor: u32 },
    /// The device itself is open.
    Device { major: u32, minor: u32 },
}

/// A process, as the kernel's table lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    directory: PathBuf,
}

/// A table of mounts that is not this process's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherTable {
    /// One of the processes that have it.
    pub process: Process,
    pub mounts: Vec<Mount>,
}

impl Process {
    /// Returns all that there are.
    pub fn all() -> impl Iterator<Item = Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let is_process = |entry: &std::fs::DirEntry| {
            entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit)
        };
        entries.filter(is_process).map(|entry| Self { directory: entry.path() })
    }

    /// Returns this process.
    #[must_use]
    pub fn own() -> Self {
        Self { directory: "/proc/self".into() }
    }

    /// Returns where its root directory is reached.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.directory.join("root")
    }

    /// Returns whether it has a file open of what is searched for, or stands in it.
    #[must_use]
    pub fn has_open(&self, searched: Use) -> bool {
        let files = std::fs::read_dir(self.directory.join("fd")).into_iter().flatten().flatten();
        let links = ["cwd", "root", "exe"].map(|link| self.directory.join(link));
        links.into_iter().chain(files.map(|file| file.path())).any(|file| is_use(&file, searched))
    }

    /// The path of its program. After an update the former one is deleted, and runs on. A thread of the
    /// kernel has none, and no files.
    fn program(&self) -> Option<PathBuf> {
        let program = std::fs::read_link(self.directory.join("exe")).ok()?;
        let text = program.to_str()?;
        Some(text.strip_suffix(" (deleted)").unwrap_or(text).into())
    }

    fn table(&self) -> Option<PathBuf> {
        std::fs::read_link(self.directory.join("ns/mnt")).ok()
    }

    fn mounts(&self) -> Vec<Mount> {
        let Ok(table) = File::open(self.directory.join("mountinfo")) else { return Vec::new() };
        let mut text = Vec::new();
        // A table that is cut short is judged by its beginning.
        let _ = table.take(MOUNTS_BYTES_MAX).read_to_end(&mut text);
        mountinfo::parse(&text)
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = std::fs::read_to_string(self.directory.join("comm")).unwrap_or_default();
        let number = self.directory.file_name().unwrap_or_default().to_string_lossy();
        // The name is the process's own choice.
        let name: String = name.trim().chars().filter(|letter| !letter.is_control()).collect();
        write!(f, "{name} (process {number})")
    }
}

/// Returns the tables of mounts that other processes have, each once. (A container, or a service with a
/// table of its own, has a copy of what was mounted when it began.)
#[must_use]
pub fn other_tables() -> Vec<OtherTable> {
    let mut known: BTreeSet<PathBuf> = Process::own().table().into_iter().collect();
    let mut found = Vec::new();
    for process in Process::all() {
        if process.table().is_some_and(|table| known.insert(table)) {
            let mounts = process.mounts();
            found.push(OtherTable { process, mounts });
        }
    }
    found
}

/// Returns the first user that is found, in words. Processes of this program are none: those that
/// serve the device hold it by themselves. Nor are mounts of other tables that the kernel takes away with
/// those at `own`, which this process is about to take away.
pub fn user_of(_: &DeviceThread, searched: Use, own: &[PathBuf]) -> Option<String> {
    let own_program = Process::own().program();
    let uses = |process: &Process| {
        let program = process.program();
        let is_own = program.is_some() && program == own_program;
        !is_own && process.has_open(searched)
    };
    if let Some(user) = Process::all().find(uses) {
        return Some(format!("{user} has it open"));
    }
    let Use::FileSystem { major, minor } = searched else { return None };
    let (here, others) = (mountinfo::read().unwrap_or_default(), other_tables());
    let others_mounts = others.iter().map(|other| other.mounts.as_slice());
    let tables: Vec<&[Mount]> = std::iter::once(here.as_slice()).chain(others_mounts).collect();
    let going = here.iter().filter(|mount| own.contains(&mount.mount_point));
    let going: Vec<_> = going.filter_map(|mount| Companions::of(mount, &tables)).collect();
    let is_mounted = |other: &&OtherTable| {
        let of_it = |mount: &&Mount| (mount.major, mount.minor) == (major, minor);
        let stays = |mount: &Mount| !going.iter().any(|one| one.have(mount, &other.mounts));
        other.mounts.iter().filter(of_it).any(stays)
    };
    let other = others.iter().find(is_mounted)?;
    Some(format!("{} has a mount of it of its own", other.process))
}

fn is_use(link: &Path, searched: Use) -> bool {
    let asked = StatxFlags::TYPE;
    let Ok(file) = rustix::fs::statx(CWD, link, AtFlags::STATX_DONT_SYNC, asked) else {
        return false;
    };
    match searched {
        Use::FileSystem { major, minor } => {
            (file.stx_dev_major, file.stx_dev_minor) == (major, minor)
        }
        Use::Device { major, minor } => {
            let is_block = u32::from(file.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
            is_block && (file.stx_rdev_major, file.stx_rdev_minor) == (major, minor)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};

    use super::*;

    fn look(searched: Use) -> Option<String> {
        DeviceThread::of_test(|thread| user_of(thread, searched, &[]))
    }

    #[test]
    fn a_process_with_an_open_file_is_found_by_its_number_and_name_and_no_more_once_it_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("open");
        std::fs::write(&path, "").unwrap();
        let device = std::fs::metadata(&path).unwrap().dev();
        let on = |device: u64| Use::FileSystem {
            major: libc::major(device),
            minor: libc::minor(device),
        };
        let mut child = Command::new("tail")
            .args(["-f"])
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Other processes of the host use that file system as well.
        let found = look(on(device)).unwrap();
        assert!(found.contains(" (process ") && found.ends_with(") has it open"), "{found}");
        let own = Process { directory: format!("/proc/{}", child.id()).into() };
        while !own.has_open(on(device)) || !own.to_string().starts_with("tail (") {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!own.has_open(on(device)));
        assert_eq!(look(Use::Device { major: 4095, minor: 1 }), None, "no such device");
    }

    /// Each way in which a process stands in a file system without a file open in it.
    #[test]
    fn a_process_that_stands_in_a_directory_or_runs_from_it_is_a_user() {
        if !rustix::process::geteuid().is_root() {
            quoin_testkit::skipped("needs root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().canonicalize().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &at, "tmpfs", flags, c"size=16m,mode=755").unwrap();
        let mounted = Mounted(at);
        let device = std::fs::metadata(&mounted.0).unwrap().dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let searched = Use::FileSystem { major, minor };
        let copied = Command::new("cp").arg("/bin/sleep").arg(mounted.0.join("program")).status();
        assert!(copied.unwrap().success());
        let mut stands = Command::new("sleep");
        stands.arg("600").current_dir(&mounted.0);
        let mut runs = Command::new(mounted.0.join("program"));
        runs.arg("600").current_dir("/");
        for mut command in [stands, runs] {
            let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            let process = Process { directory: format!("/proc/{}", child.id()).into() };
            let is_user = process.has_open(searched);
            let found = DeviceThread::of_test(|thread| {
                user_of(thread, searched, std::slice::from_ref(&mounted.0))
            });
            let other = process.has_open(Use::FileSystem { major: 4095, minor });
            let is_device = process.has_open(Use::Device { major, minor });
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(is_user && !other && !is_device, "{command:?}");
            assert!(found.unwrap().contains(") has it open"), "{command:?}");
        }
    }

    /// A table of mounts of its own, which began after or before the mount.
    struct Other(std::process::Child);

    impl Other {
        fn begin(propagation: &str) -> Self {
            let mut child = Command::new("unshare")
                .args(["--mount", "--propagation", propagation, "sh", "-c", "echo; exec sleep 600"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            Self(child)
        }

        fn mounts(&self) -> Vec<Mount> {
            Process { directory: format!("/proc/{}", self.0.id()).into() }.mounts()
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Unmounts what a test made.
    struct Mounted(PathBuf);

    impl Mounted {
        fn tmpfs(path: PathBuf) -> Self {
            std::fs::create_dir_all(&path).unwrap();
            let flags = rustix::mount::MountFlags::empty();
            rustix::mount::mount("none", &path, "tmpfs", flags, c"size=64k").unwrap();
            Self(path)
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }

    /// Every way in which a copy of a mount may be in another table, with the kernel as the judge: what it
    /// takes away with ours is no user, and what it leaves there is one.
    #[test]
    fn a_copy_of_a_mount_is_a_user_where_the_kernel_leaves_it_and_none_where_it_takes_it_away() {
        if !rustix::process::geteuid().is_root() {
            quoin_testkit::skipped("needs root");
            return;
        }
        use rustix::mount::MountPropagationFlags as Flags;
        let mut left = Vec::new();
        for parent in [Flags::SHARED, Flags::PRIVATE] {
            for propagation in ["private", "slave", "shared", "unchanged"] {
                for began_before in [true, false] {
                    let directory = tempfile::tempdir().unwrap();
                    let around = Mounted::tmpfs(directory.path().canonicalize().unwrap());
                    rustix::mount::mount_change(&around.0, parent).unwrap();
                    let before = began_before.then(|| Other::begin(propagation));
                    let own = Mounted::tmpfs(around.0.join("own"));
                    let other = before.unwrap_or_else(|| Other::begin(propagation));
                    let device = std::fs::metadata(&own.0).unwrap().dev();
                    let (major, minor) = (libc::major(device), libc::minor(device));
                    let has = |mounts: &[Mount]| {
                        mounts.iter().any(|mount| (mount.major, mount.minor) == (major, minor))
                    };
                    let was_there = has(&other.mounts());
                    let searched = Use::FileSystem { major, minor };
                    // Another test may fork a process with a copy of it, for a moment.
                    let number = format!("(process {})", other.0.id());
                    let is_user = DeviceThread::of_test(|thread| {
                        let found = user_of(thread, searched, std::slice::from_ref(&own.0));
                        found.is_some_and(|user| user.contains(&number))
                    });
                    rustix::mount::unmount(&own.0, rustix::mount::UnmountFlags::empty()).unwrap();
                    let stays = has(&other.mounts());
                    let case = (parent, propagation, began_before, was_there);
                    assert_eq!(is_user, stays, "{case:?}");
                    left.push(was_there && !stays);
                }
            }
        }
        assert!(left.contains(&true) && left.contains(&false), "{left:?}");
    }
}
