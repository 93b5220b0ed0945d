//! Mounts and devices that a cluster would leave behind.
//!
//! A volume may be mounted by anybody, through CSI or by hand, so what belongs to a cluster is
//! read from the kernel: loop devices whose backing file lies below its run directory, and the
//! mounts of those devices.

use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::layout::Layout;

/// A loop device over one of the cluster's files.
#[derive(Debug)]
struct Loop {
    device: PathBuf,
    /// `major:minor`, as mountinfo has it.
    number: String,
}

/// Unmounts every file system on this cluster's devices, the latest first. IO is still served,
/// so each is written back whole.
pub fn unmount_volumes(layout: &Layout) -> Result<()> {
    let mut busy = Vec::new();
    for target in mounts_of(&loops(layout)?)?.iter().rev() {
        if let Err(error) = rustix::mount::unmount(target, rustix::mount::UnmountFlags::empty()) {
            busy.push(format!("{} ({error})", target.display()));
        }
    }
    if !busy.is_empty() {
        bail!(
            "could not unmount {}: end the programs that use it, `umount` it, and start and stop \
             `quoin dev` once more",
            busy.join(", ")
        );
    }
    Ok(())
}

/// Frees what a killed cluster left: mounts, loop devices and FUSE mounts that nobody serves.
/// Called only when none of its processes runs.
pub fn release_leftovers(layout: &Layout) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let loops = loops(layout)?;
    for target in mounts_of(&loops)?.iter().rev() {
        // Nobody serves it any more: detached from the tree now, gone when its users let go.
        let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
    }
    for Loop { device, .. } in &loops {
        clear_loop(device).with_context(|| format!("free {}", device.display()))?;
    }
    for target in mounts_below(&layout.run())?.iter().rev() {
        let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
    }
    Ok(())
}

fn loops(layout: &Layout) -> Result<Vec<Loop>> {
    let run = layout.run();
    let mut found = Vec::new();
    let Ok(devices) = fs::read_dir("/sys/block") else { return Ok(found) };
    for entry in devices {
        let entry = entry?;
        let Ok(backing) = fs::read(entry.path().join("loop/backing_file")) else { continue };
        let backing = backing.strip_suffix(b"\n").unwrap_or(&backing);
        let backing = Path::new(std::ffi::OsStr::from_bytes(backing));
        if backing.starts_with(&run) {
            let number = fs::read_to_string(entry.path().join("dev"))?.trim().to_string();
            found.push(Loop { device: Path::new("/dev").join(entry.file_name()), number });
        }
    }
    Ok(found)
}

/// Mount points of these devices in the order in which they were mounted.
fn mounts_of(loops: &[Loop]) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let is_ours = |line: &MountLine| loops.iter().any(|device| device.number == line.number);
    Ok(table.lines().filter_map(MountLine::parse).filter(is_ours).map(|line| line.target).collect())
}

fn mounts_below(directory: &Path) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let lines = table.lines().filter_map(MountLine::parse);
    Ok(lines.map(|line| line.target).filter(|target| target.starts_with(directory)).collect())
}

struct MountLine {
    number: String,
    target: PathBuf,
}

impl MountLine {
    /// `36 35 98:0 /mnt1 /mnt2 rw,noatime …`
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let number = words.nth(2)?.to_string();
        let target = unescape(words.nth(1)?);
        Some(Self { number, target })
    }
}

/// The kernel writes blanks, tabs, line ends and backslashes in octal.
fn unescape(text: &str) -> PathBuf {
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

fn clear_loop(device: &Path) -> Result<()> {
    const LOOP_CLR_FD: u64 = 0x4C01;
    let file = fs::File::open(device)?;
    use std::os::fd::AsRawFd;
    // SAFETY: the request takes no argument; the descriptor is open for the whole call.
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), LOOP_CLR_FD, 0) };
    if outcome < 0 {
        let error = std::io::Error::last_os_error();
        // Freed by someone else in the meantime.
        if error.raw_os_error() != Some(libc::ENXIO) {
            return Err(error.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_lines_give_device_number_and_target_with_blanks() {
        let line = "36 35 7:3 / /mnt/my\\040disk rw,noatime master:1 - ext4 /dev/loop3 rw";
        let parsed = MountLine::parse(line).unwrap();
        assert_eq!(parsed.number, "7:3");
        assert_eq!(parsed.target, Path::new("/mnt/my disk"));
        assert!(MountLine::parse("36 35").is_none());
        assert_eq!(unescape("a\\9\\"), Path::new("a\\9\\"));
    }

    #[test]
    fn a_cluster_that_was_never_started_has_nothing_to_release() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        assert!(loops(&layout).unwrap().is_empty());
        release_leftovers(&layout).unwrap();
        unmount_volumes(&layout).unwrap();
    }
}
