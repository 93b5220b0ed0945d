//! Mounts and unmounts by system call: no mount(8), no shell, no `/etc/mtab`.

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::device_calls::DeviceThread;
use crate::error::Error;
use crate::format::FileSystem;

/// Mount flags of a user, split into what the kernel takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parsed {
    pub flags: MountFlags,
    /// Options for the file system itself, comma-separated.
    pub data: String,
    /// True if the user requested `ro`.
    pub read_only: bool,
}

/// Options by which a file system opens another device of the host, or takes itself from elsewhere.
const OTHER_DEVICES: [&str; 8] =
    ["journal_path", "journal_dev", "journal", "logdev", "rtdev", "device", "source", "sb"];

/// Parses mount flags. Words that control mount(8) itself (`loop`, `remount`, …) or that would
/// mount something else are refused.
///
/// # Errors
/// The way in which a flag is wrong, without the flag: it may be sensitive.
pub fn parse_flags(flags: &[String]) -> Result<Parsed, &'static str> {
    let mut parsed = Parsed { flags: MountFlags::empty(), data: String::new(), read_only: false };
    for flag in flags.iter().flat_map(|flag| flag.split(',')) {
        let (set, clear) = match flag {
            "" => continue,
            "defaults" | "rw" | "auto" | "noauto" | "nofail" | "_netdev" | "async" | "exec"
            | "suid" | "dev" | "atime" | "diratime" => (MountFlags::empty(), flag_cleared(flag)),
            "ro" => {
                parsed.read_only = true;
                continue;
            }
            "noatime" => (MountFlags::NOATIME, MountFlags::empty()),
            "nodiratime" => (MountFlags::NODIRATIME, MountFlags::empty()),
            "relatime" => (MountFlags::RELATIME, MountFlags::empty()),
            "strictatime" => (MountFlags::STRICTATIME, MountFlags::empty()),
            "lazytime" => (MountFlags::LAZYTIME, MountFlags::empty()),
            "nodev" => (MountFlags::NODEV, MountFlags::empty()),
            "nosuid" => (MountFlags::NOSUID, MountFlags::empty()),
            "noexec" => (MountFlags::NOEXEC, MountFlags::empty()),
            "sync" => (MountFlags::SYNCHRONOUS, MountFlags::empty()),
            "dirsync" => (MountFlags::DIRSYNC, MountFlags::empty()),
            "bind" | "rbind" | "move" | "remount" | "loop" | "user" | "users" | "owner"
            | "group" | "shared" | "rshared" | "slave" | "rslave" | "private" | "rprivate"
            | "unbindable" | "runbindable" => {
                return Err("one of them changes the mounted object instead of its options");
            }
            other => {
                if other.contains('\0') {
                    return Err("one of them contains a NUL byte");
                }
                let (key, value) = other.split_once('=').unwrap_or((other, ""));
                if OTHER_DEVICES.contains(&key) {
                    return Err("one of them names another device, or another part of this one");
                }
                if (key, value) == ("errors", "panic") {
                    return Err("one of them lets the file system stop this host");
                }
                if !parsed.data.is_empty() {
                    parsed.data.push(',');
                }
                parsed.data.push_str(other);
                continue;
            }
        };
        parsed.flags.remove(clear);
        parsed.flags.insert(set);
    }
    // The kernel accepts one page of data.
    if parsed.data.len() >= 4096 {
        return Err("they are longer than the kernel accepts (4095 bytes)");
    }
    Ok(parsed)
}

/// `exec` after `noexec` undoes the latter, as with mount(8).
fn flag_cleared(flag: &str) -> MountFlags {
    match flag {
        "exec" => MountFlags::NOEXEC,
        "suid" => MountFlags::NOSUID,
        "dev" => MountFlags::NODEV,
        "atime" => MountFlags::NOATIME,
        "diratime" => MountFlags::NODIRATIME,
        "async" => MountFlags::SYNCHRONOUS,
        _ => MountFlags::empty(),
    }
}

/// Mounts a device's file system.
///
/// # Errors
/// [`Error::NotPermitted`] without root, [`Error::MountFlag`] if the file system refuses a flag,
/// else the kernel's error.
pub fn mount_device(
    _: &DeviceThread,
    volume: &str,
    device: &Path,
    at: &Path,
    file_system: FileSystem,
    parsed: &Parsed,
    read_only: bool,
) -> Result<(), Error> {
    let mut flags = parsed.flags;
    flags.set(MountFlags::RDONLY, read_only || parsed.read_only);
    let mut data = parsed.data.clone();
    let first = match file_system {
        // A clone or snapshot carries its origin's UUID, and both may be mounted here.
        FileSystem::Xfs => "nouuid",
        // The superblock, which may be anybody's, could have the kernel stop the host.
        FileSystem::Ext4 => "errors=remount-ro",
    };
    // A later option of the same name is the one that counts.
    data = if data.is_empty() { first.to_owned() } else { format!("{first},{data}") };
    let text = CString::new(data).map_err(|_| Error::MountFlag { volume: volume.to_owned() })?;
    let mount = || rustix::mount::mount(device, at, file_system.name(), flags, text.as_c_str());
    while_busy(mount).map_err(|errno| {
        match errno {
            Errno::PERM | Errno::ACCESS if !is_root() => {
                Error::NotPermitted { path: at.to_owned() }
            }
            Errno::UCLEAN | Errno::BADMSG => Error::Damaged {
                volume: volume.to_owned(),
                tool: file_system.repair_tool(),
                device: device.to_owned(),
                output: errno.to_string(),
            },
            // The superblock was validated before, so an option is invalid.
            Errno::INVAL if !parsed.data.is_empty() => {
                Error::MountFlag { volume: volume.to_owned() }
            }
            other => Error::io("mounting at", at)(other.into()),
        }
    })
}

/// Binds `source` (a directory or a device node) to `target`.
///
/// # Errors
/// [`Error::NotPermitted`] without root, else the kernel's error.
pub fn bind(_: &DeviceThread, source: &Path, target: &Path) -> Result<(), Error> {
    rustix::mount::mount_bind(source, target).map_err(|errno| not_bound(target, errno))
}

/// Makes the kernel refuse writes through the topmost mount at `target`, and keeps its other flags.
///
/// # Errors
/// As of [`bind`].
pub fn protect(_: &DeviceThread, target: &Path) -> Result<(), Error> {
    let flags = existing_flags(target)? | MountFlags::BIND | MountFlags::RDONLY;
    rustix::mount::mount_remount(target, flags, c"").map_err(|errno| not_bound(target, errno))
}

fn not_bound(target: &Path, errno: Errno) -> Error {
    match errno {
        Errno::PERM | Errno::ACCESS if !is_root() => {
            Error::NotPermitted { path: target.to_owned() }
        }
        other => Error::io("binding to", target)(other.into()),
    }
}

/// A remount sets every flag anew, so those of the source have to be repeated.
fn existing_flags(target: &Path) -> Result<MountFlags, Error> {
    let mounts = crate::mountinfo::read()?;
    let options = crate::mountinfo::at(&mounts, target)
        .map(|mount| mount.options.clone())
        .unwrap_or_default();
    let parsed = parse_flags(&options).map_err(|why| Error::Path { path: target.into(), why })?;
    Ok(parsed.flags)
}

/// Time for which a use may pass that lasts an instant: a process that was just forked has the files
/// of its parent open until it becomes its program, and monitors look at mounts.
const BUSY_FOR: Duration = Duration::from_millis(500);

/// Makes a call again for a moment, while something is in use.
pub fn while_busy<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let began = Instant::now();
    loop {
        match call() {
            Err(Errno::BUSY) if began.elapsed() < BUSY_FOR => {
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => return outcome,
        }
    }
}

/// Unmounts the topmost mount at `target`. Symbolic links are not followed. Blocks for half a second
/// at most while it is in use.
///
/// # Errors
/// [`Error::Busy`] if it is in use, [`Error::NotPermitted`] without root.
pub fn unmount(_: &DeviceThread, target: &Path) -> Result<(), Error> {
    let unmount = || rustix::mount::unmount(target, UnmountFlags::NOFOLLOW);
    while_busy(unmount).map_err(|errno| match errno {
        Errno::BUSY => Error::Busy { path: target.to_owned() },
        Errno::PERM if !is_root() => Error::NotPermitted { path: target.to_owned() },
        other => Error::io("unmounting", target)(other.into()),
    })
}

/// `FITRIM` of linux/fs.h: takes the start, the length and the least length of what is trimmed.
const FITRIM: libc::Ioctl = 0xc018_5879_u32 as libc::Ioctl;

/// Discards all blocks that the file system at `path` does not use.
///
/// # Errors
/// [`Error::NotTrimmed`] if it cannot, else the kernel's.
pub fn trim(_: &DeviceThread, volume: &str, path: &Path) -> Result<(), Error> {
    let directory = std::fs::File::open(path).map_err(Error::io("opening", path))?;
    let mut range = [0_u64, u64::MAX, 0];
    // SAFETY: FITRIM reads and writes three u64 through the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(directory.as_raw_fd(), FITRIM, range.as_mut_ptr()) };
    if result >= 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOTTY) => {
            Err(Error::NotTrimmed { volume: volume.to_owned(), path: path.to_owned() })
        }
        _ => Err(Error::io("trimming", path)(error)),
    }
}

/// Figures of a file system.
pub type Figures = rustix::fs::StatVfs;

/// Returns the figures of the file system at `path`.
///
/// # Errors
/// The kernel's.
pub fn measure(_: &DeviceThread, path: &Path) -> Result<Figures, Error> {
    rustix::fs::statvfs(path).map_err(|errno| Error::io("measuring", path)(errno.into()))
}

/// Returns whether the file system at `path` fails what it is asked of its root, which the kernel always has in
/// memory.
pub fn is_shut_down(_: &DeviceThread, path: &Path) -> bool {
    use rustix::io::Errno;
    matches!(rustix::fs::stat(path), Err(Errno::IO | Errno::SHUTDOWN | Errno::UCLEAN))
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Result<Parsed, &'static str> {
        parse_flags(&flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn kernel_flags_are_separated_from_file_system_options() {
        let parsed = parse(&["noatime,nosuid", "data=ordered", "commit=5"]).unwrap();
        assert_eq!(parsed.flags, MountFlags::NOATIME | MountFlags::NOSUID);
        assert_eq!(parsed.data, "data=ordered,commit=5");
        assert!(!parsed.read_only);
        assert!(parse(&["ro"]).unwrap().read_only);
        assert_eq!(parse(&[]).unwrap().data, "");
        assert_eq!(parse(&["noexec", "exec"]).unwrap().flags, MountFlags::empty());
    }

    /// The whole table of words that the kernel has flags for, and those that clear them again.
    #[test]
    fn every_word_of_a_user_becomes_its_own_flag_or_option_and_its_opposite_clears_it() {
        let sets = [
            ("noatime", "atime", MountFlags::NOATIME),
            ("nodiratime", "diratime", MountFlags::NODIRATIME),
            ("nodev", "dev", MountFlags::NODEV),
            ("nosuid", "suid", MountFlags::NOSUID),
            ("noexec", "exec", MountFlags::NOEXEC),
            ("sync", "async", MountFlags::SYNCHRONOUS),
        ];
        for (word, opposite, flag) in sets {
            assert_eq!(parse(&[word]).unwrap().flags, flag, "{word}");
            assert_eq!(parse(&[opposite]).unwrap().flags, MountFlags::empty(), "{opposite}");
            let cleared = parse(&[word, "lazytime", opposite]).unwrap();
            assert_eq!(
                (cleared.flags, cleared.data.as_str()),
                (MountFlags::LAZYTIME, ""),
                "{word}"
            );
            assert_eq!(parse(&[opposite, word]).unwrap().flags, flag, "the last one counts");
        }
        for (word, flag) in [
            ("relatime", MountFlags::RELATIME),
            ("strictatime", MountFlags::STRICTATIME),
            ("lazytime", MountFlags::LAZYTIME),
            ("dirsync", MountFlags::DIRSYNC),
        ] {
            assert_eq!(parse(&[word]).unwrap().flags, flag, "{word}");
        }
        for word in ["", "defaults", "rw", "auto", "noauto", "nofail", "_netdev"] {
            let parsed = parse(&[word]).unwrap();
            let found = (parsed.flags, parsed.data.as_str(), parsed.read_only);
            assert_eq!(found, (MountFlags::empty(), "", false), "{word}");
        }
        let all: MountFlags = sets.iter().map(|(_, _, flag)| *flag).collect();
        let words: Vec<&str> = sets.iter().map(|(word, _, _)| *word).collect();
        let parsed = parse(&[&words.join(","), "ro", "data=ordered"]).unwrap();
        assert_eq!((parsed.flags, parsed.data.as_str()), (all, "data=ordered"));
        assert!(parsed.read_only);
    }

    #[test]
    fn options_are_as_long_as_a_page_with_its_end_and_no_longer() {
        for (bytes, is_taken) in [(4094, true), (4095, true), (4096, false), (4097, false)] {
            assert_eq!(parse(&[&"x".repeat(bytes)]).is_ok(), is_taken, "{bytes} bytes");
            // The comma between two of them counts.
            let two = parse(&[&"x".repeat(2000), &"y".repeat(bytes - 2001)]);
            assert_eq!(two.is_ok(), is_taken, "{bytes} bytes in two");
        }
    }

    #[test]
    fn the_words_that_are_refused_are_all_that_mount_something_else() {
        for word in [
            "bind",
            "rbind",
            "move",
            "remount",
            "loop",
            "user",
            "users",
            "owner",
            "group",
            "shared",
            "rshared",
            "slave",
            "rslave",
            "private",
            "rprivate",
            "unbindable",
            "runbindable",
            "journal_path",
            "journal_dev",
            "journal",
            "logdev",
            "rtdev",
            "device",
            "source",
            "sb",
            "logdev=/dev/vda",
            "sb=32768",
            "errors=panic",
        ] {
            assert!(parse(&[word]).is_err(), "{word}");
            assert!(parse(&["noatime,commit=5", &format!("nodev,{word}")]).is_err(), "{word}");
        }
        // The kernel has options of its own that begin alike.
        for word in ["journal_checksum", "usrquota", "grpquota", "errors=continue", "sbx"] {
            assert_eq!(parse(&[word]).unwrap().data, word);
        }
    }

    #[test]
    fn only_what_is_in_use_is_tried_again_and_not_for_long() {
        let mut tries = 0;
        let outcome = while_busy(|| {
            tries += 1;
            if tries < 4 { Err(Errno::BUSY) } else { Ok(tries) }
        });
        assert_eq!(outcome, Ok(4));
        let mut tries = 0;
        let outcome: Result<(), _> = while_busy(|| {
            tries += 1;
            Err(Errno::IO)
        });
        assert_eq!((outcome, tries), (Err(Errno::IO), 1));
        let began = Instant::now();
        let outcome: Result<(), _> = while_busy(|| Err(Errno::BUSY));
        assert_eq!(outcome, Err(Errno::BUSY));
        assert!(began.elapsed() >= BUSY_FOR);
    }

    #[test]
    fn flags_that_would_mount_something_else_are_refused_without_being_printed() {
        for flag in ["bind", "remount", "loop", "move", "rshared"] {
            let why = parse(&["noatime", flag]).unwrap_err();
            assert!(!why.contains(flag), "{why}");
        }
        for key in OTHER_DEVICES {
            for flag in [key.to_owned(), format!("{key}=/dev/vda"), format!("noatime,{key}=0x700")]
            {
                let why = parse(&[&flag]).unwrap_err();
                assert!(why.contains("another device") && !why.contains("vda"), "{flag}: {why}");
            }
        }
        assert!(parse(&["errors=panic"]).is_err());
        for flag in ["errors=remount-ro", "data=journal", "journal_checksum", "logbufs=8"] {
            assert_eq!(parse(&[flag]).unwrap().data, flag);
        }
        assert!(parse(&["x=\0"]).is_err());
        assert!(parse(&[&"x".repeat(4096)]).is_err());
    }
}
