//! Identity of the kernel's cache over a pool's file or device.
//!
//! Writes that a pool did not sync are lost with the cache that holds them. The cache is lost at a
//! reboot, but not only then: also when a device is detached and attached again, and when the file
//! system of a pool's file is unmounted and mounted. Boot, device number and inode are the same
//! afterwards. So the identity also has the kernel's number of this attachment of the device, and
//! names this mount of the file system.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use quoin_replication::replica::store::BootCookie;
use quoin_types::mutant;
use rustix::fs::{AtFlags, StatxFlags};

/// Which cache holds what was written and not synced. Two opens of one identity find what the
/// first one wrote.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CacheIdentity {
    /// The kernel's number of this boot.
    pub boot: u128,
    /// Number of the device, or of the one that the file lies on.
    pub device: u64,
    /// The kernel's number of this life of that device; 0: it has none.
    pub disk_sequence: u64,
    /// This mount of the file system of a file; `None`: a device.
    pub mount: Option<Mounted>,
    /// 0: a device.
    pub inode: u64,
}

/// A mounted file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mounted {
    /// Inode of the directory that the kernel shows for it while it is mounted, however often.
    Shown(u64),
    /// Number of the mount, which is never used again within a boot. Another mount of the same
    /// file system has another one.
    Numbered(u64),
}

impl CacheIdentity {
    /// Identity for an open file or device; `None` where the kernel cannot distinguish its caches.
    pub(crate) fn of(file: &File, metadata: &Metadata) -> Option<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let boot = u128::from_str_radix(&boot.trim().replace('-', ""), 16).ok()?;
        let is_device = metadata.file_type().is_block_device();
        let (device, inode, mount) = match is_device {
            true => (metadata.rdev(), 0, None),
            false => (metadata.dev(), metadata.ino(), Some(mounted(file, metadata.dev())?)),
        };
        Some(CacheIdentity { boot, device, disk_sequence: disk_sequence(device), mount, inode })
    }

    /// The identity as one number.
    pub fn cookie(&self) -> BootCookie {
        let mut bytes = self.boot.to_le_bytes().to_vec();
        let mount = match self.mount {
            None => [0, 0],
            Some(Mounted::Shown(inode)) => [1, inode],
            Some(Mounted::Numbered(number)) => [2, number],
        };
        let forgets = mutant::is("cookie-without-its-mount");
        let mount = if forgets { [0, 0] } else { mount };
        let disk_sequence = if forgets { 0 } else { self.disk_sequence };
        for number in [self.device, self.inode, disk_sequence, mount[0], mount[1]] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        digest(&bytes)
    }
}

/// A number that no other open has.
pub(crate) fn cookie_of_this_open() -> BootCookie {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let wall = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    let mut bytes = Vec::new();
    for number in [now.tv_sec, now.tv_nsec, wall.tv_sec, wall.tv_nsec] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    digest(&bytes)
}

fn digest(bytes: &[u8]) -> BootCookie {
    let check = |salt: u8| {
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        digest.update(&[salt]);
        digest.update(bytes);
        u128::from(digest.finalize())
    };
    BootCookie(check(1) << 64 | check(2))
}

/// The directory of a device in sysfs.
fn shown(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("/sys/dev/block/{major}:{minor}")
}

/// The kernel's number of this life of a device, or of the disk that a partition is part of; 0
/// where it has none.
fn disk_sequence(device: u64) -> u64 {
    let shown = shown(device);
    let read = |path: String| std::fs::read_to_string(path).ok()?.trim().parse().ok();
    read(format!("{shown}/diskseq")).or_else(|| read(format!("{shown}/../diskseq"))).unwrap_or(0)
}

/// The file system as sysfs shows it, else the mount that the file was opened by. The former
/// outlives a bind mount that is made anew, as for each start of a container.
fn mounted(file: &File, device: u64) -> Option<Mounted> {
    shown_by_sysfs(device).or_else(|| unique_mount(file))
}

/// These show a directory for each mounted file system, under the name of its device.
const SHOWN_FILE_SYSTEMS: [&str; 3] = ["ext4", "xfs", "f2fs"];

fn shown_by_sysfs(device: u64) -> Option<Mounted> {
    let path = std::fs::canonicalize(shown(device)).ok()?;
    let name = path.file_name()?.to_str()?;
    let inode = |kind| Some(std::fs::metadata(format!("/sys/fs/{kind}/{name}")).ok()?.ino());
    SHOWN_FILE_SYSTEMS.into_iter().find_map(inode).map(Mounted::Shown)
}

/// Linux 6.8 and later; the numbers of earlier kernels come back with the next mount.
fn unique_mount(file: &File) -> Option<Mounted> {
    const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, MNT_ID_UNIQUE).ok()?;
    let told = found.stx_mask & MNT_ID_UNIQUE.bits() != 0;
    told.then_some(Mounted::Numbered(found.stx_mnt_id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_the_identity_changes_the_cookie() {
        let one = CacheIdentity {
            boot: 1,
            device: 2,
            disk_sequence: 3,
            mount: Some(Mounted::Shown(4)),
            inode: 5,
        };
        let others = [
            CacheIdentity { boot: 9, ..one },
            CacheIdentity { device: 9, ..one },
            CacheIdentity { disk_sequence: 9, ..one },
            CacheIdentity { mount: Some(Mounted::Shown(9)), ..one },
            CacheIdentity { mount: Some(Mounted::Numbered(4)), ..one },
            CacheIdentity { mount: None, ..one },
            CacheIdentity { inode: 9, ..one },
        ];
        for (number, other) in others.iter().enumerate() {
            assert_ne!(other.cookie(), one.cookie(), "{number}");
        }
        assert_eq!(one.cookie(), CacheIdentity { ..one }.cookie());
        assert_ne!(cookie_of_this_open(), cookie_of_this_open());
    }

    #[test]
    fn a_file_has_one_identity_however_often_it_is_opened() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let identity = || {
            let file = File::open(file.path()).expect("the file");
            CacheIdentity::of(&file, &file.metadata().expect("its metadata"))
        };
        let first = identity();
        assert!(first.is_none_or(|first| first.boot != 0 && first.mount.is_some()));
        assert_eq!(identity(), first);
    }
}
