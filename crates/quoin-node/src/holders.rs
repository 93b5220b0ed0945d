//! Users of a file system or of a device, as the kernel's tables of processes show them.
//!
//! A look changes nothing and waits for nothing: the attributes of an open file are those that the kernel
//! has, and no server of a file system is asked. Processes of another PID namespace are not seen;
//! the kernel refuses to unmount what they use.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::device_calls::DeviceThread;
use crate::mountinfo;

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

/// Returns the first user that is found, in words. Processes of this program are none: those that
/// serve the device hold it by themselves.
pub fn user_of(_: &DeviceThread, searched: Use) -> Option<String> {
    let own_program = program_of(Path::new("/proc/self"));
    let mut tables = BTreeSet::from([std::fs::read_link("/proc/self/ns/mnt").unwrap_or_default()]);
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let is_process = process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
        if !is_process {
            continue;
        }
        let path = process.path();
        let program = program_of(&path);
        let is_own = program.is_some() && program == own_program;
        // A thread of the kernel has no program, and no files.
        if !is_own && has_open(&path, searched) {
            return Some(format!("{} has it open", named(&path)));
        }
        if let Use::FileSystem { major, minor } = searched
            && let Ok(table) = std::fs::read_link(path.join("ns/mnt"))
            && tables.insert(table)
            && is_mounted_for(&path, major, minor)
        {
            return Some(format!("{} has a mount of it of its own", named(&path)));
        }
    }
    None
}

/// The path of a process's program. After an update the former one is deleted, and runs on.
fn program_of(process: &Path) -> Option<PathBuf> {
    let program = std::fs::read_link(process.join("exe")).ok()?;
    let text = program.to_str()?;
    Some(text.strip_suffix(" (deleted)").unwrap_or(text).into())
}

fn has_open(process: &Path, searched: Use) -> bool {
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let links = ["cwd", "root", "exe"].map(|link| process.join(link));
    links.into_iter().chain(files.map(|file| file.path())).any(|file| is_use(&file, searched))
}

fn is_use(link: &PathBuf, searched: Use) -> bool {
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

fn is_mounted_for(process: &Path, major: u32, minor: u32) -> bool {
    let Ok(table) = File::open(process.join("mountinfo")) else { return false };
    let mut text = Vec::new();
    // A table that is cut short is judged by its beginning.
    let _ = table.take(MOUNTS_BYTES_MAX).read_to_end(&mut text);
    mountinfo::parse(&text).iter().any(|mount| (mount.major, mount.minor) == (major, minor))
}

/// Returns a process's name and number.
fn named(process: &Path) -> String {
    let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
    let number = process.file_name().unwrap_or_default().to_string_lossy();
    // The name is the process's own choice.
    let name: String = name.trim().chars().filter(|letter| !letter.is_control()).collect();
    format!("process {number} ({name})")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};

    use super::*;

    fn look(searched: Use) -> Option<String> {
        DeviceThread::of_test(|thread| user_of(thread, searched))
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
        assert!(found.starts_with("process ") && found.contains(" ("), "{found}");
        let own = PathBuf::from(format!("/proc/{}", child.id()));
        while !has_open(&own, on(device)) || !named(&own).contains("(tail)") {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!has_open(&own, on(device)));
        assert_eq!(look(Use::Device { major: 4095, minor: 1 }), None, "no such device");
    }
}
