//! Loop devices: a block device of the kernel on top of a file.
//!
//! They use direct I/O, so that nothing is cached twice and a write is answered once the target has
//! answered it. The block size is the volume's; discards become holes punched in the file. This
//! process may serve the file, so each open of a device, and each call on it, is made in a [`child`].
//!
//! The kernel keeps much with the number of a device and not with what is bound to it: partitions,
//! the read-only switch, read-ahead and scheduler. The next file under that number would have them:
//! a partition of the former one shows through onto its data. So each use has a device that is made
//! for it, and is removed after it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::child::{self, c_string};

const CONTROL: &str = "/dev/loop-control";
const CTL_ADD: libc::c_ulong = 0x4c80;
const CTL_REMOVE: libc::c_ulong = 0x4c81;
const CLR_FD: libc::c_ulong = 0x4c01;
const GET_STATUS64: libc::c_ulong = 0x4c05;
const SET_STATUS64: libc::c_ulong = 0x4c04;
const SET_CAPACITY: libc::c_ulong = 0x4c07;
const CONFIGURE: libc::c_ulong = 0x4c0a;
/// `BLKGETDISKSEQ` of linux/fs.h: fills a 64-bit number.
const GET_SEQUENCE: libc::c_ulong = 0x8008_1280;
const FLAG_READ_ONLY: u32 = 1;
const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;
/// `BLKPG` of linux/blkpg.h: takes [`PartitionCall`].
const BLKPG: libc::c_ulong = 0x1269;
const DELETE_PARTITION: i32 = 2;
/// Limit of the numbers that are tried.
const NUMBERS_MAX: u32 = 1 << 16;
const POLL: Duration = Duration::from_millis(5);
/// Time that a device which is used no more may stay open: the host's tools look at one that changed.
const REMOVE_FOR: Duration = Duration::from_millis(300);
/// Held from when a device is made until it is bound, and while one is removed: a removal takes any
/// device that nothing holds.
static NUMBERS: Mutex<()> = Mutex::new(());

#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    #[error(
        "/dev/loop-control is missing: load the kernel's loop module (modprobe loop) or pass \
             the device into this container"
    )]
    NoLoop,
    #[error("loop devices need root (CAP_SYS_ADMIN): run attach as root")]
    NotPermitted,
    #[error(
        "all {NUMBERS_MAX} loop devices of this host are there already: detach some (losetup -l)"
    )]
    NoneFree,
    #[error("{device} is in use: unmount it and close it first")]
    Busy { device: PathBuf },
    #[error(
        "{device} waits for the IO of its volume: `quoin volume doctor` says what that waits for, \
             and `quoin volume detach --force` fails it"
    )]
    Waits { device: PathBuf },
    #[error("cannot {doing} {path}: {source}")]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
}

/// The kernel's `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// The kernel's `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// A loop device that stays until [`LoopDevice::detach`]; dropping the value leaves it.
///
/// The kernel gives a device another sequence number each time it is bound to a file. A value with
/// a number refers to that one binding of the device: after another binding, every call reports the
/// device as gone and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopDevice {
    path: PathBuf,
    /// `None`: unknown (before Linux 5.15), or any binding.
    sequence: Option<u64>,
}

impl LoopDevice {
    /// Binds a loop device that is made for it to `file`.
    pub fn attach(file: &Path, block_size: u32, read_only: bool) -> Result<Self, LoopError> {
        let control = open_control()?;
        let names = (0..NUMBERS_MAX).map(|number| (number, format!("loop{number}")));
        for (number, name) in names.filter(|(_, name)| !sysfs(Path::new(name)).exists()) {
            let path = Path::new("/dev").join(name);
            let made = {
                let _numbers = NUMBERS.lock().unwrap_or_else(PoisonError::into_inner);
                if !create(&control, number, &path)? {
                    continue;
                }
                configure(&path, file, block_size, read_only)
            };
            match made {
                Ok(sequence) => return Ok(Self { path, sequence }),
                // Another program was given it as a free device, or took it away.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) || gone(&error) => {}
                Err(error) => {
                    remove(&path, REMOVE_FOR);
                    return Err(failed("configure", &path, error));
                }
            }
        }
        Err(LoopError::NoneFree)
    }

    /// The device under this path, with any binding.
    pub fn at(path: PathBuf) -> Self {
        Self { path, sequence: None }
    }

    /// The binding of the device under this path that has this number.
    pub fn of(path: PathBuf, sequence: Option<u64>) -> Self {
        Self { path, sequence }
    }

    pub fn sequence(&self) -> Option<u64> {
        self.sequence
    }

    /// Returns true if this binding of the device still exists, on `file`. The number alone proves it
    /// where there is one: the kernel shows the path of the mount namespace in which the device was
    /// bound, and another one once that namespace has ended.
    pub fn is_bound_to(&self, file: &Path) -> bool {
        let found = self.backing_file();
        match self.sequence {
            Some(_) => found.is_some() && self.is_current(),
            None => found.as_deref() == Some(file),
        }
    }

    /// Returns true if the kernel has a device of this number, whatever it is bound to.
    pub fn exists(&self) -> bool {
        self.path.file_name().is_some_and(|name| sysfs(Path::new(name)).exists())
    }

    /// Returns true if this is the present binding of the device.
    pub fn is_current(&self) -> bool {
        self.sequence.is_none() || self.sequence == sequence_of(&self.path)
    }

    /// Opens the device and makes calls on it, in a child; an error is "gone" where this binding has
    /// ended. While it is open, no other can begin.
    ///
    /// # Safety
    /// As of [`child::in_child`].
    unsafe fn with_open(
        &self,
        flags: libc::c_int,
        act: impl FnOnce(libc::c_int) -> io::Result<()>,
    ) -> io::Result<()> {
        let (path, expected) = (c_string(&self.path)?, self.sequence);
        let act = || {
            let device = child::open(&path, flags)?;
            let mut sequence = 0u64;
            if let Some(expected) = expected {
                ioctl(device, GET_SEQUENCE, std::ptr::from_mut(&mut sequence) as usize)?;
                if sequence != expected {
                    return Err(io::Error::from_raw_os_error(libc::ENODEV));
                }
            }
            act(device).map(|()| 0)
        };
        // SAFETY: system calls, and what the caller promises.
        unsafe { child::in_child(&self.path, act) }.map(drop)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the device is held: by a mount, a device mapper, a swap.
    pub fn in_use(&self) -> Result<bool, LoopError> {
        // SAFETY: no call at all.
        match unsafe { self.with_open(libc::O_RDONLY | libc::O_EXCL, |_| Ok(())) } {
            Ok(()) => Ok(false),
            Err(error) if gone(&error) => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(self.is_current()),
            Err(error) => Err(failed("open", &self.path, error)),
        }
    }

    /// Returns true if a mount, a device mapper or a swap holds the device. The check reads what
    /// the kernel shows without opening the device: an open, however short, would prevent others
    /// from opening it exclusively. A program that has the device open is not detected.
    pub fn is_held(&self) -> bool {
        let Some(name) = self.path.file_name().filter(|_| self.is_current()) else { return false };
        let own = std::iter::once(sysfs(Path::new(name)));
        own.chain(partitions(&self.path)).any(|sysfs| is_held(&sysfs))
    }

    /// Removes the kernel's device, once nothing is bound to it and no program has it open; returns
    /// false as long as that is so. All that the kernel keeps with its number goes with it.
    pub fn remove(&self) -> bool {
        let is_another = self.backing_file().is_some() && !self.is_current();
        is_another || remove(&self.path, Duration::ZERO)
    }

    /// Adopts the backing file's new size.
    pub fn update_size(&self) -> Result<(), LoopError> {
        // SAFETY: one system call.
        match unsafe { self.with_open(libc::O_RDONLY, |device| call(device, SET_CAPACITY, 0)) } {
            Err(error) if !gone(&error) => Err(failed("resize", &self.path, error)),
            _ => Ok(()),
        }
    }

    /// Returns its size in bytes, as the kernel reports it without touching the device.
    pub fn size(&self) -> Option<u64> {
        let attribute = Path::new("/sys/block").join(self.path.file_name()?).join("size");
        let sectors: u64 = std::fs::read_to_string(attribute).ok()?.trim().parse().ok()?;
        sectors.checked_mul(512)
    }

    /// Detaches now, or, if a program still has it open, as soon as the last one closes it.
    pub fn release(&self) -> Result<(), LoopError> {
        // SAFETY: one system call.
        match unsafe { self.with_open(libc::O_RDONLY, |device| call(device, CLR_FD, 0)) } {
            Err(error) if !gone(&error) => Err(failed("detach", &self.path, error)),
            _ => Ok(()),
        }
    }

    /// Detaches, waits until it is done, and removes the device. `false`: no program has it open any
    /// more, and IO that is not answered after `timeout` keeps it.
    ///
    /// # Errors
    /// [`LoopError::Busy`] if the device is in use; it stays as it was.
    pub fn detach(&self, timeout: Duration) -> Result<bool, LoopError> {
        if self.in_use()? {
            return Err(LoopError::Busy { device: self.path.clone() });
        }
        self.release()?;
        let until = Instant::now() + timeout;
        while self.is_current() && self.backing_file().is_some() {
            if Instant::now() >= until {
                return match self.keep_bound() {
                    Ok(()) => Err(LoopError::Busy { device: self.path.clone() }),
                    Err(error) if gone(&error) => {
                        Ok(!self.is_current() || self.backing_file().is_none())
                    }
                    Err(error) => Err(failed("keep", &self.path, error)),
                };
            }
            std::thread::sleep(POLL);
        }
        if self.backing_file().is_none() {
            remove(&self.path, REMOVE_FOR);
        }
        Ok(true)
    }

    /// Cancels a [`LoopDevice::release`] that waits for the last program to close the device. The
    /// error is "gone" if there is none.
    fn keep_bound(&self) -> io::Result<()> {
        let keep = |device| {
            let mut info = EMPTY;
            call(device, GET_STATUS64, std::ptr::from_mut(&mut info) as usize)?;
            info.flags &= !FLAG_AUTOCLEAR;
            call(device, SET_STATUS64, std::ptr::from_ref(&info) as usize)
        };
        // SAFETY: two system calls.
        unsafe { self.with_open(libc::O_RDONLY, keep) }
    }

    /// Returns the file that it is bound to, as the kernel reports it without touching the device.
    pub fn backing_file(&self) -> Option<PathBuf> {
        let name = self.path.file_name()?;
        let attribute = Path::new("/sys/block").join(name).join("loop/backing_file");
        let text = std::fs::read_to_string(attribute).ok()?;
        let text = text.trim_end_matches('\n');
        Some(PathBuf::from(text.strip_suffix(" (deleted)").unwrap_or(text)))
    }

    /// Returns all loop devices whose files are under `directory` by their names. Names belong to
    /// one mount namespace: a device that is found may belong to another one, and is shown, not
    /// touched.
    pub fn list_under(directory: &Path) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/sys/block")? {
            let name = entry?.file_name();
            if name.to_string_lossy().starts_with("loop") {
                let path = Path::new("/dev").join(name);
                let sequence = sequence_of(&path);
                let device = Self { path, sequence };
                if device.backing_file().is_some_and(|file| file.starts_with(directory)) {
                    found.push(device);
                }
            }
        }
        Ok(found)
    }
}

const EMPTY: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// Binds the device; returns the number of that binding where the kernel has one (Linux 5.15). Both
/// files are opened in the child: the backing file queries its server as well.
fn configure(
    path: &Path,
    file: &Path,
    block_size: u32,
    read_only: bool,
) -> io::Result<Option<u64>> {
    let (device, backing) = (c_string(path)?, c_string(file)?);
    let mut info = EMPTY;
    info.flags = FLAG_DIRECT_IO | if read_only { FLAG_READ_ONLY } else { 0 };
    let name = backing.as_bytes();
    let length = name.len().min(info.file_name.len() - 1);
    info.file_name[..length].copy_from_slice(&name[..length]);
    let access = if read_only { libc::O_RDONLY } else { libc::O_RDWR };
    let act = || {
        let fd = child::open(&backing, access | libc::O_DIRECT)? as u32;
        let device = child::open(&device, libc::O_RDWR)?;
        let config = Config { fd, block_size, info, reserved: [0; 8] };
        call(device, CONFIGURE, std::ptr::from_ref(&config) as usize)?;
        // While it is open here, no program can end the binding that has begun.
        let mut sequence = 0u64;
        let numbered = call(device, GET_SEQUENCE, std::ptr::from_mut(&mut sequence) as usize);
        Ok(if numbered.is_ok() { sequence } else { 0 })
    };
    // SAFETY: system calls only.
    let sequence = unsafe { child::in_child(path, act) }?;
    Ok(Some(sequence).filter(|sequence| *sequence != 0))
}

fn open_control() -> Result<File, LoopError> {
    let control = OpenOptions::new().read(true).write(true).open(CONTROL);
    control.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => LoopError::NoLoop,
        _ => failed("open", Path::new(CONTROL), error),
    })
}

/// Makes the device of this number; false: another program made it. Nothing is bound to it, so no
/// call on it waits.
fn create(control: &File, number: u32, path: &Path) -> Result<bool, LoopError> {
    match ioctl(control.as_raw_fd(), CTL_ADD, number as usize) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => return Ok(false),
        Err(error) => return Err(failed("make", path, error)),
    }
    match make_node(path) {
        Err(error) if !gone(&error) => Err(failed("make", path, error)),
        _ => Ok(true),
    }
}

/// Removes a device that is bound to nothing and that no program has open; waits `patience` for that.
fn remove(path: &Path, patience: Duration) -> bool {
    let number =
        path.file_name().and_then(|name| name.to_str()?.strip_prefix("loop")?.parse().ok());
    let (Some(number), Ok(control)) = (number, open_control()) else { return true };
    let number: u32 = number;
    let until = Instant::now() + patience;
    loop {
        let removed = {
            let _numbers = NUMBERS.lock().unwrap_or_else(PoisonError::into_inner);
            ioctl(control.as_raw_fd(), CTL_REMOVE, number as usize)
        };
        match removed {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            _ => return true,
        }
        if LoopDevice::at(path.to_owned()).backing_file().is_some() {
            return false;
        }
        // A program that is given this number while it stays must not find the partitions.
        delete_partitions(path);
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(POLL);
    }
}

/// The kernel's `struct blkpg_ioctl_arg`.
#[repr(C)]
struct PartitionCall {
    operation: i32,
    flags: i32,
    bytes: i32,
    partition: *const Partition,
}

/// The kernel's `struct blkpg_partition`.
#[repr(C)]
struct Partition {
    start: i64,
    length: i64,
    number: i32,
    names: [u8; 128],
}

/// Takes the partitions off a device, but for those that a program has open.
fn delete_partitions(path: &Path) {
    for sysfs in partitions(path) {
        let number = std::fs::read_to_string(sysfs.join("partition")).unwrap_or_default();
        let Ok(number) = number.trim().parse() else { continue };
        let partition = Partition { start: 0, length: 0, number, names: [0; 128] };
        let wanted = PartitionCall {
            operation: DELETE_PARTITION,
            flags: 0,
            bytes: size_of::<Partition>() as i32,
            partition: &raw const partition,
        };
        let device = LoopDevice::at(path.to_owned());
        let argument = std::ptr::from_ref(&wanted) as usize;
        // SAFETY: one system call.
        let delete = unsafe {
            device.with_open(libc::O_RDONLY, |device| ioctl(device, BLKPG, argument).map(drop))
        };
        if let Err(error) = delete {
            tracing::warn!(partition = %sysfs.display(), %error, "stays with the kernel");
        }
    }
}

fn sysfs(name: &Path) -> PathBuf {
    Path::new("/sys/block").join(name)
}

/// The directories of a device's partitions.
fn partitions(path: &Path) -> Vec<PathBuf> {
    let Some(name) = path.file_name() else { return Vec::new() };
    let entries = std::fs::read_dir(sysfs(Path::new(name))).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.join("partition").exists()).collect()
}

/// Returns true if a mount, a device mapper or a swap holds the device or partition of this directory.
fn is_held(sysfs: &Path) -> bool {
    let Some(name) = sysfs.file_name() else { return false };
    let holders = std::fs::read_dir(sysfs.join("holders"));
    if holders.is_ok_and(|mut holders| holders.next().is_some()) {
        return true;
    }
    // File systems that are mounted anywhere, also in another mount namespace.
    let kinds = std::fs::read_dir("/sys/fs").into_iter().flatten().flatten();
    if kinds.map(|kind| kind.path().join(name)).any(|mounted| mounted.exists()) {
        return true;
    }
    let number = std::fs::read_to_string(sysfs.join("dev")).unwrap_or_default();
    let path = Path::new("/dev").join(name);
    let (number, path) = (number.trim(), path.to_string_lossy());
    let is_mounted = |line: &str| {
        let (before, after) = line.split_once(" - ").unwrap_or((line, ""));
        before.split(' ').nth(2) == Some(number) || after.split(' ').nth(1) == Some(&*path)
    };
    let lines = |table: &str| std::fs::read_to_string(table).unwrap_or_default();
    lines("/proc/self/mountinfo").lines().any(is_mounted)
        || lines("/proc/swaps").lines().any(|line| line.split(' ').next() == Some(&*path))
}

/// Makes the device's node if no devtmpfs has.
fn make_node(path: &Path) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default();
    let numbers = std::fs::read_to_string(sysfs(Path::new(name)).join("dev"))?;
    let numbers = numbers.trim().split_once(':');
    let parsed = numbers.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (major, minor) = parsed.ok_or(io::ErrorKind::InvalidData)?;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let kind = rustix::fs::FileType::BlockDevice;
    let device = rustix::fs::makedev(major, minor);
    Ok(rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, device)?)
}

fn call(fd: RawFd, request: libc::c_ulong, argument: usize) -> io::Result<()> {
    ioctl(fd, request, argument).map(drop)
}

fn ioctl(fd: RawFd, request: libc::c_ulong, argument: usize) -> io::Result<i32> {
    // SAFETY: every caller passes 0, or the address of a live struct with the layout that this
    // request of the loop driver reads or fills.
    let result = unsafe { libc::ioctl(fd, request as _, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Returns the sequence number of the present binding, as the kernel reports it without touching
/// the device.
fn sequence_of(path: &Path) -> Option<u64> {
    let attribute = Path::new("/sys/block").join(path.file_name()?).join("diskseq");
    std::fs::read_to_string(attribute).ok()?.trim().parse().ok()
}

fn gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENOENT | libc::ENODEV))
}

fn failed(doing: &'static str, path: &Path, source: io::Error) -> LoopError {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => LoopError::NotPermitted,
        Some(libc::ETIMEDOUT) => LoopError::Waits { device: path.to_owned() },
        _ => LoopError::Io { doing, path: path.to_owned(), source },
    }
}
