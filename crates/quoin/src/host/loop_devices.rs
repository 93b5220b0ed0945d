//! Loop devices over a cluster's files, the mounts on them, and the programs that use those.
//!
//! Volumes may be mounted through CSI or by hand, so what belongs to a cluster is read from the
//! kernel: loop devices whose backing file lies below its run directory, and the mounts of those
//! devices.

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A FUSE file that has not answered by then may still have a server.
const ANSWER_BUDGET: Duration = Duration::from_secs(1);

/// A loop device over one of a cluster's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub path: PathBuf,
    /// Backing file.
    file: PathBuf,
    /// The volume's id: its file is named after it.
    pub volume: String,
    /// `major:minor`, as mountinfo has it.
    pub number: String,
    /// Use of the device: another number after each time it was freed.
    pub sequence: u64,
}

impl Device {
    /// Every loop device over a file below `directory`.
    pub fn over(directory: &Path) -> Result<Vec<Self>> {
        let mut found = Vec::new();
        let Ok(devices) = fs::read_dir("/sys/block") else { return Ok(found) };
        for entry in devices {
            let entry = entry?;
            let Ok(backing) = fs::read(entry.path().join("loop/backing_file")) else { continue };
            let backing = backing.strip_suffix(b"\n").unwrap_or(&backing);
            let backing = Path::new(std::ffi::OsStr::from_bytes(backing));
            if !backing.starts_with(directory) {
                continue;
            }
            let name = entry.file_name();
            found.push(Self {
                path: Path::new("/dev").join(&name),
                file: backing.into(),
                volume: backing.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                number: fs::read_to_string(entry.path().join("dev"))?.trim().to_string(),
                sequence: sequence(Path::new(&name)).unwrap_or(0),
            });
        }
        Ok(found)
    }

    pub fn is_below(&self, directory: &Path) -> bool {
        self.file.starts_with(directory)
    }

    /// Returns true if this same use of it goes on.
    pub fn still_there(&self) -> bool {
        let name = Path::new(self.path.file_name().unwrap_or_default());
        let is_bound = Path::new("/sys/block").join(name).join("loop/backing_file").exists();
        is_bound && sequence(name) == Some(self.sequence)
    }

    /// Returns true if its file lies on a mount of this table of mounts.
    pub fn is_mounted_here(&self) -> bool {
        let is_it =
            |mount: &Mount| mount.target == self.file && mount.filesystem.starts_with("fuse");
        mounts().is_ok_and(|mounts| mounts.iter().any(is_it))
    }

    /// Returns true if its file has no server any more, so that all IO fails for ever.
    pub fn is_dead(&self) -> bool {
        is_dead(&self.file)
    }

    /// Frees it now or, where programs still have it open, when the last one closes it.
    pub fn free(&self) -> Result<()> {
        const LOOP_CLR_FD: u64 = 0x4C01;
        use std::os::fd::AsRawFd;
        let free = || {
            let file = fs::File::open(&self.path)?;
            // SAFETY: the request takes no argument; the descriptor is open for the whole call.
            match unsafe { libc::ioctl(file.as_raw_fd(), LOOP_CLR_FD, 0) } {
                0.. => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        match free() {
            // Freed by another process in the meantime.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
            outcome => outcome.with_context(|| format!("free {}", self.path.display())),
        }
    }

    /// IOs that it has done and IOs under way; `None`: it is gone.
    pub fn io(&self) -> Option<(u64, u64)> {
        let name = Path::new(self.path.file_name()?);
        let text = fs::read_to_string(Path::new("/sys/block").join(name).join("stat")).ok()?;
        counted(&text)
    }

    /// Ends the FUSE connection that serves its file: all its IO, under way and to come, fails. False:
    /// this table of mounts has no such connection, so nothing was done.
    pub fn cut_off(&self) -> Result<bool> {
        let table = mounts()?.into_iter().rev();
        let mut below = table.filter(|mount| mount.filesystem.starts_with("fuse"));
        let Some(mount) = below.find(|mount| self.file.starts_with(&mount.target)) else {
            return Ok(false);
        };
        // The call reports a busy mount, which is true because of the device. The connection is
        // ended.
        let flags = UnmountFlags::FORCE | UnmountFlags::NOFOLLOW;
        let _ = rustix::mount::unmount(&mount.target, flags);
        Ok(true)
    }

    /// Its mounts, and those of its partitions.
    pub fn mounts(&self) -> Result<Vec<Mount>> {
        let numbers = self.numbers();
        Ok(mounts()?.into_iter().filter(|mount| numbers.contains(&mount.number)).collect())
    }

    fn numbers(&self) -> Vec<String> {
        let own = std::iter::once(self.number.clone());
        own.chain(partition_numbers(&self.path)).collect()
    }

    /// Returns true if a file system on it is mounted in any table of mounts, this one or another:
    /// the kernel refuses exclusive use of a device that a file system holds.
    pub fn is_held_by_a_file_system(&self) -> bool {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(&self.path, flags, Mode::empty()).err() == Some(rustix::io::Errno::BUSY)
    }

    /// Its mounts in other tables of mounts, one process for each table. (A container, or a service
    /// with a table of its own, that began after the mount has a copy of it.)
    pub fn mounts_elsewhere(&self) -> Vec<MountElsewhere> {
        let numbers = self.numbers();
        let of_it = |mount: &&quoin_node::Mount| {
            numbers.contains(&format!("{}:{}", mount.major, mount.minor))
        };
        let mut found = Vec::new();
        for other in quoin_node::other_tables() {
            found.extend(other.mounts.iter().filter(of_it).map(|mount| {
                let target = mount.mount_point.clone();
                let path = target.strip_prefix("/").unwrap_or(&target);
                MountElsewhere {
                    reachable_at: other.process.root().join(path),
                    process: other.process.to_string(),
                    target,
                }
            }));
        }
        found
    }
}

/// A mount in a table of mounts that is not this process's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountElsewhere {
    pub target: PathBuf,
    /// A process that has this table: `sleep (process 7)`.
    pub process: String,
    /// Its directory, by way of that process.
    pub reachable_at: PathBuf,
}

/// Returns true if `path` is a FUSE mount (or below one) whose server is gone.
pub fn is_dead(path: &Path) -> bool {
    let path = path.to_owned();
    let (answer, asked) = std::sync::mpsc::channel();
    // On a thread: a running but busy server may never answer.
    std::thread::spawn(move || {
        let refused = rustix::fs::statfs(&path).err();
        let gone = [rustix::io::Errno::NOTCONN, rustix::io::Errno::CONNABORTED];
        // The caller may have stopped waiting.
        let _ = answer.send(refused.is_some_and(|error| gone.contains(&error)));
    });
    asked.recv_timeout(ANSWER_BUDGET).unwrap_or(false)
}

/// A line of `stat`: reads, writes, discards and flushes that are done, and what is in flight.
fn counted(text: &str) -> Option<(u64, u64)> {
    let fields: Vec<u64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let done = [0, 4, 11, 15].iter().filter_map(|field| fields.get(*field)).sum();
    Some((done, *fields.get(8)?))
}

fn sequence(name: &Path) -> Option<u64> {
    let text = fs::read_to_string(Path::new("/sys/block").join(name).join("diskseq")).ok()?;
    text.trim().parse().ok()
}

/// `major:minor` of a block device.
pub fn number_of(device: &Path) -> Result<String> {
    let found = fs::metadata(device).with_context(|| format!("look at {}", device.display()))?;
    let device = found.rdev();
    Ok(format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)))
}

/// `major:minor` of each partition of a block device.
fn partition_numbers(device: &Path) -> Vec<String> {
    let sysfs = Path::new("/sys/block").join(device.file_name().unwrap_or_default());
    let entries = fs::read_dir(sysfs).into_iter().flatten().flatten().map(|entry| entry.path());
    let partitions = entries.filter(|path| path.join("partition").exists());
    let numbers = partitions.filter_map(|path| fs::read_to_string(path.join("dev")).ok());
    numbers.map(|number| number.trim().to_owned()).collect()
}

/// The mounts of a whole block device, by its path.
pub fn mounts_of(device: &Path) -> Result<Vec<Mount>> {
    let number = number_of(device)?;
    Ok(mounts()?.into_iter().filter(|mount| mount.number == number).collect())
}

/// The mounts of a block device and of its partitions, by its path.
pub fn mounts_of_all(device: &Path) -> Result<Vec<Mount>> {
    let mut numbers = partition_numbers(device);
    numbers.push(number_of(device)?);
    Ok(mounts()?.into_iter().filter(|mount| numbers.contains(&mount.number)).collect())
}

/// A line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// `major:minor` of the device.
    pub number: String,
    pub target: PathBuf,
    pub filesystem: String,
    /// Source of the mount, as it was named.
    pub source: PathBuf,
}

/// The mount table, in the order in which things were mounted.
pub fn mounts() -> Result<Vec<Mount>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    Ok(table.lines().filter_map(Mount::parse).collect())
}

impl Mount {
    /// `36 35 98:0 /mnt1 /mnt2 rw,noatime shared:1 - ext4 /dev/sda rw`
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let number = words.nth(2)?.to_string();
        let target = unescape(words.nth(1)?);
        let mut after = words.skip_while(|word| *word != "-");
        let filesystem = after.nth(1)?.to_string();
        let source = unescape(after.next().unwrap_or_default());
        Some(Self { number, target, filesystem, source })
    }

    /// Programs that have something open on it or stand in it: `sh (process 7)`, at most five.
    pub fn users(&self) -> Vec<String> {
        let Some(searched) = self.file_system() else { return Vec::new() };
        let users = quoin_node::Process::all().filter(|process| process.has_open(searched));
        users.take(5).map(|process| process.to_string()).collect()
    }

    fn file_system(&self) -> Option<quoin_node::Use> {
        let (major, minor) = self.number.split_once(':')?;
        Some(quoin_node::Use::FileSystem { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

/// The kernel, and fstab, write blanks, tabs, line ends and backslashes in octal.
pub fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let octal = bytes.get(index + 1..index + 4).filter(|_| bytes[index] == b'\\');
        let value =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(value.unwrap_or(bytes[index]));
        index += if value.is_some() { 4 } else { 1 };
    }
    PathBuf::from(std::ffi::OsStr::from_bytes(&plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_lines_are_parsed_to_device_number_target_and_file_system() {
        let line = "36 35 7:3 / /mnt/my\\040disk rw,noatime master:1 - ext4 /dev/loop3 rw";
        let parsed = Mount::parse(line).unwrap();
        assert_eq!(parsed.number, "7:3");
        assert_eq!(parsed.target, Path::new("/mnt/my disk"));
        assert_eq!(parsed.filesystem, "ext4");
        assert_eq!(parsed.source, Path::new("/dev/loop3"));
        assert!(Mount::parse("36 35").is_none());
        assert_eq!(unescape("a\\9\\"), Path::new("a\\9\\"));
    }

    #[test]
    fn completed_and_pending_io_are_parsed_from_the_line_of_a_device() {
        let line = "  1 0 8 0  2 0 16 0  3 4 5  6 0 0 0  7 0\n";
        assert_eq!(counted(line), Some((1 + 2 + 6 + 7, 3)));
        assert_eq!(counted("1 2 3"), None);
        assert_eq!(counted(""), None);
    }

    #[test]
    fn a_program_with_an_open_file_on_a_mount_is_found_by_name_and_pid() {
        let directory = tempfile::tempdir().unwrap();
        let open = fs::File::create(directory.path().join("open")).unwrap();
        let device = open.metadata().unwrap().dev();
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let (target, source) = (directory.path().into(), PathBuf::new());
        let mount = Mount { number, target, filesystem: "any".into(), source };
        let own = quoin_node::Process::own();
        assert!(own.has_open(mount.file_system().unwrap()));
        let nobody = Mount { number: "0:0".into(), ..mount };
        assert!(!own.has_open(nobody.file_system().unwrap()));
    }
}
