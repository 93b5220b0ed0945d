//! A pool's disk on a real host: a preallocated (or sparse) file, or a raw block device.
//!
//! Writes are buffered: when they return the kernel holds the bytes, and only a sync makes them
//! durable. Those that wait for the next sync anyway ([`Disk::write_with_sync`]) are collected
//! in memory meanwhile and go out with it as few, large direct writes: no copy into the page
//! cache, nothing for the sync to look for, and the thread that took them never waits. Long runs of
//! buffered writes are written out behind the writer, on another thread.
//! The descriptor holds an exclusive lock, so that two processes never share a pool.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_replication::replica::store::{BootCookie, IoFault};
use quoin_types::BLOCK_SIZE;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::disk::aligned_memory::{AlignedMemory, PIECE_BYTES, is_aligned};
use crate::disk::cache_identity::{CacheIdentity, cookie_of_this_open};
use crate::disk::fill::Filling;
use crate::disk::pending_writes::{Held, stretches, zeros};
use crate::disk::read_ring::ReadRing;
use crate::disk::write_behind::WriteBehind;
use crate::disk::{Disk, Medium, Reader, Syncer};

/// The kernel takes no more parts in one call.
const PARTS_MAX: usize = 1024;
/// What `statfs` says of a file system in memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Time for which a device may be locked by the host's tools: udev holds a lock while it looks at one
/// that was just closed.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_POLL: Duration = Duration::from_millis(20);
/// Bytes that may wait for a sync in this process; more goes to the page cache.
const HELD_BYTES_MAX: usize = 32 << 20;

/// Why a pool's file or device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileDiskError {
    #[error("there is no pool at {path}; make one, or mend the path")]
    Missing { path: PathBuf },
    #[error("{path} exists already; choose another path, or remove it if nothing on it is needed")]
    Exists { path: PathBuf },
    #[error("the pool {path} is in use by {holder}; stop that first")]
    Locked { path: PathBuf, holder: String },
    #[error(
        "the device {path} is in use: a file system on it is mounted, it is part of LVM, RAID or \
         device-mapper, it is swapped to, or another pool serves it; `lsblk {path}` shows by what"
    )]
    DeviceInUse { path: PathBuf },
    #[error("{path} may not be written; check its permissions and that its mount is read-write")]
    ReadOnly { path: PathBuf },
    #[error(
        "there is no room for {size_bytes} bytes at {path}; make the pool smaller, sparse, or free \
         some space"
    )]
    NoRoom { path: PathBuf, size_bytes: u64 },
    #[error("{path} is neither a file nor a block device")]
    NotADisk { path: PathBuf },
    #[error("{operation} of {path} failed")]
    System {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// An open, locked pool file or device. Clones share the descriptor.
#[derive(Clone)]
pub struct FileDisk {
    files: Arc<Files>,
    path: PathBuf,
    size: u64,
    is_device: bool,
    read_only: bool,
    cookie: BootCookie,
    exposed: Option<Exposed>,
}

/// The descriptors of a disk and what waits to be written through them.
struct Files {
    /// These two go before the lock that `file` holds.
    filling: Mutex<Filling>,
    behind: Mutex<WriteBehind>,
    file: File,
    /// The file opened for direct IO, where its file system supports that.
    direct: Option<Arc<File>>,
    /// The file system cannot say what it has cached: no read is known not to wait.
    always_waits: AtomicBool,
    /// It holds all in memory, and cannot say so.
    is_in_memory: bool,
    held: Mutex<Held>,
    /// Syncs take turns; the first one that failed decides for all later ones.
    failed: Mutex<Option<IoFault>>,
}

impl std::fmt::Debug for FileDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileDisk").field("file", &self.files.file).finish_non_exhaustive()
    }
}

/// Gives a new file its size, and its space where it is not to be sparse.
fn fill(file: &File, path: &Path, size: u64, sparse: bool) -> Result<(), FileDiskError> {
    let filled = match sparse {
        true => file.set_len(size),
        false => rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size).map_err(Into::into),
    };
    filled.map_err(|source| {
        let no_room = [Errno::NOSPC, Errno::FBIG].map(|errno| Some(errno.raw_os_error()));
        match no_room.contains(&source.raw_os_error()) {
            true => FileDiskError::NoRoom { path: path.into(), size_bytes: size },
            false => explain("preallocation", path, source),
        }
    })
}

impl FileDisk {
    /// Makes a file of `size` bytes, rounded down to whole blocks. A sparse file takes space as
    /// it is written; otherwise all of it is taken now.
    pub fn create(path: &Path, size: u64, sparse: bool) -> Result<Self, FileDiskError> {
        let size = size & !(BLOCK_SIZE as u64 - 1);
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let made = options.open(path);
        let file = made.map_err(|e| explain("creation", path, e))?;
        if let Err(error) = fill(&file, path, size, sparse) {
            // Nothing half-made stays behind.
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        // The name must survive a power cut as well.
        if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty())
            && let Ok(folder) = File::open(folder)
        {
            let _ = folder.sync_all();
        }
        drop(file);
        Self::open(path)
    }

    /// Whether [`Self::create`] would find the room, permission and file size that it needs, tried
    /// with a nameless file that is gone at once. A file system without such files passes.
    pub fn rehearse(path: &Path, size: u64, sparse: bool) -> Result<(), FileDiskError> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        match rustix::fs::open(folder.unwrap_or(Path::new(".")), flags, mode) {
            Ok(file) => fill(&File::from(file), path, size & !(BLOCK_SIZE as u64 - 1), sparse),
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => Ok(()),
            Err(error) => Err(explain("creation", path, error.into())),
        }
    }

    /// Opens and locks a file or device.
    pub fn open(path: &Path) -> Result<Self, FileDiskError> {
        Self::open_with(path, OFlags::RDWR, FlockOperation::NonBlockingLockExclusive)
    }

    /// Opens for offline tools: writes fail. Refused while a pool process has it open.
    pub fn open_read_only(path: &Path) -> Result<Self, FileDiskError> {
        Self::open_with(path, OFlags::RDONLY, FlockOperation::NonBlockingLockShared)
    }

    fn open_with(path: &Path, access: OFlags, lock: FlockOperation) -> Result<Self, FileDiskError> {
        let flags = access | OFlags::CLOEXEC | claim(path, access);
        let opened = rustix::fs::open(path, flags, Mode::empty());
        let file = File::from(opened.map_err(|e| explain("opening", path, e.into()))?);
        let system = |source| explain("inspection", path, source);
        let metadata = file.metadata().map_err(system)?;
        let is_device = metadata.file_type().is_block_device();
        if !metadata.is_file() && !is_device {
            return Err(FileDiskError::NotADisk { path: path.into() });
        }
        take_lock(&file, path, lock, if is_device { LOCK_WAIT } else { Duration::ZERO })?;
        // The mode of a device is the system's.
        let is_ours = !is_device && access != OFlags::RDONLY;
        let exposed = is_ours.then(|| close_to_others(&file, &metadata)).flatten();
        let size = match is_device {
            true => {
                let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
                end.map_err(|e| system(e.into()))?
            }
            false => metadata.len(),
        };
        let cookie = CacheIdentity::of(&file, &metadata)
            .map_or_else(cookie_of_this_open, |identity| identity.cookie());
        let size = size & !(BLOCK_SIZE as u64 - 1);
        let is_in_memory = is_in_memory(&file);
        let files = Files {
            direct: open_direct(&file, access).map(Arc::new),
            file,
            always_waits: AtomicBool::new(false),
            is_in_memory,
            held: Mutex::default(),
            filling: Mutex::default(),
            behind: Mutex::default(),
            failed: Mutex::default(),
        };
        Ok(FileDisk {
            files: Arc::new(files),
            path: path.to_owned(),
            size,
            is_device,
            read_only: access == OFlags::RDONLY,
            cookie,
            exposed,
        })
    }

    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// Copies of what waits for a sync in a range, oldest first, each with its place in the range.
    pub(crate) fn held_of(&self, offset: u64, length: usize) -> Vec<(usize, Vec<u8>)> {
        self.files.held().overlapping(offset, length)
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.files.file.as_raw_fd()
    }

    /// The descriptor for direct IO, where its file system supports that.
    pub(crate) fn direct_descriptor(&self) -> Option<RawFd> {
        self.files.direct.as_ref().map(|file| file.as_raw_fd())
    }

    /// Whether other users of the host could open the file when it was opened.
    pub fn exposed(&self) -> Option<Exposed> {
        self.exposed
    }
}

/// Locks a pool's file or device.
fn take_lock(
    file: &File,
    path: &Path,
    lock: FlockOperation,
    patience: Duration,
) -> Result<(), FileDiskError> {
    let until = Instant::now() + patience;
    loop {
        match rustix::fs::flock(file, lock) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOCK_POLL),
            Err(Errno::WOULDBLOCK) => {
                let table = std::fs::read_to_string("/proc/locks").unwrap_or_default();
                let holder = lock_holder(&table, file);
                let holder = holder.unwrap_or_else(|| "another process".to_owned());
                return Err(FileDiskError::Locked { path: path.into(), holder });
            }
            Err(error) => return Err(explain("locking", path, error.into())),
        }
    }
}

/// The process that holds a lock of this file, by the kernel's table: `udevd (process 7)`.
fn lock_holder(table: &str, file: &File) -> Option<String> {
    let metadata = file.metadata().ok()?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let place = format!("{major:02x}:{minor:02x}:{inode}");
    // "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; a process that waits has "->" before it.
    let pid = table.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let is_held = words.next()? == "FLOCK";
        let pid = words.nth(2)?;
        (is_held && words.next()? == place).then_some(pid)
    })?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match name.trim() {
        "" => Some(format!("process {pid}")),
        name => Some(format!("{name} (process {pid})")),
    }
}

/// Whether a file lies in a file system in memory.
fn is_in_memory(file: &File) -> bool {
    #[allow(clippy::cast_sign_loss, reason = "a magic number of 32 bits, of whatever type")]
    rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type as u64 & 0xffff_ffff == TMPFS_MAGIC)
}

/// With this flag the kernel refuses a block device that is mounted, swapped to or part of
/// something, and lets none of these begin while it is open.
fn claim(path: &Path, access: OFlags) -> OFlags {
    let found = std::fs::metadata(path);
    match access != OFlags::RDONLY && found.is_ok_and(|m| m.file_type().is_block_device()) {
        true => OFlags::EXCL,
        false => OFlags::empty(),
    }
}

/// A pool's file that other users of the host could open: it holds the data of all volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exposed {
    /// The mode that was found.
    pub mode: u32,
    /// Whether only the owner can open it now; `false`: the system refused to change the mode.
    pub is_closed: bool,
}

/// Restricts the access to a file to its owner.
fn close_to_others(file: &File, metadata: &std::fs::Metadata) -> Option<Exposed> {
    let mode = metadata.permissions().mode() & 0o7777;
    let closed = std::fs::Permissions::from_mode(mode & 0o700);
    let change = || Exposed { mode, is_closed: file.set_permissions(closed).is_ok() };
    (mode & 0o077 != 0).then(change)
}

fn explain(operation: &'static str, path: &Path, source: std::io::Error) -> FileDiskError {
    use std::io::ErrorKind;
    let path = path.to_path_buf();
    match source.kind() {
        ErrorKind::NotFound => FileDiskError::Missing { path },
        ErrorKind::AlreadyExists => FileDiskError::Exists { path },
        ErrorKind::ResourceBusy => FileDiskError::DeviceInUse { path },
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            FileDiskError::ReadOnly { path }
        }
        _ => FileDiskError::System { operation, path, source },
    }
}

pub(crate) fn fault(operation: &'static str, offset: u64, errno: Errno) -> IoFault {
    IoFault { operation, offset, errno: errno.raw_os_error() }
}

/// A second descriptor of an open file, for direct IO. By its number, since a path may have come
/// to name another file.
fn open_direct(file: &File, access: OFlags) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from)
}

/// Writes all of `parts`, which are no more than one call takes.
pub(crate) fn write_all(file: &File, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
    let total: usize = parts.iter().map(|p| p.len()).sum();
    let written = loop {
        match rustix::io::pwritev(file, parts, offset) {
            Err(Errno::INTR) => {}
            result => break result.map_err(|e| fault("write", offset, e))?,
        }
    };
    if written == total { Ok(()) } else { write_rest(file, offset, parts, written) }
}

/// Goes on after a short write, one part at a time.
fn write_rest(
    file: &File,
    offset: u64,
    parts: &[IoSlice<'_>],
    written: usize,
) -> Result<(), IoFault> {
    let (mut skip, mut at) = (written, offset + written as u64);
    for part in parts {
        let mut rest = &part[skip.min(part.len())..];
        skip = skip.saturating_sub(part.len());
        while !rest.is_empty() {
            match rustix::io::pwrite(file, rest, at) {
                Ok(0) => return Err(fault("write", at, Errno::NOSPC)),
                Ok(n) => {
                    rest = &rest[n..];
                    at += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(fault("write", at, error)),
            }
        }
    }
    Ok(())
}

impl Files {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn filling(&self) -> MutexGuard<'_, Filling> {
        self.filling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what the kernel has cached; false where that is not all of it, or not known.
    fn read_cached(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, IoFault> {
        if self.always_waits.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let length = buffer.len();
        let parts = &mut [IoSliceMut::new(buffer)];
        match rustix::io::preadv2(&self.file, parts, offset, ReadWriteFlags::NOWAIT) {
            // The rest is not cached, or lies behind the file's end: a read that waits tells.
            Ok(read) => Ok(read == length),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                self.always_waits.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(error) => Err(fault("read", offset, error)),
        }
    }

    /// Writes what is held and makes everything durable that was written.
    fn sync(&self) -> Result<(), IoFault> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fault) = *failed {
            return Err(fault);
        }
        let done = self
            .write_held()
            .and_then(|()| rustix::fs::fdatasync(&self.file).map_err(|e| fault("sync", 0, e)));
        *failed = done.err();
        done
    }

    fn write_held(&self) -> Result<(), IoFault> {
        // A statement of its own, so that the lock is given back before the IO.
        let taken = self.held().begin();
        let Some(pieces) = taken else { return Ok(()) };
        for stretch in stretches(&pieces, PARTS_MAX - 1) {
            let mut parts: Vec<IoSlice<'_>> =
                stretch.iter().map(|piece| IoSlice::new(piece.bytes())).collect();
            match self.held().padding_after(stretch, &pieces) {
                0 => {}
                length => parts.push(IoSlice::new(zeros(length))),
            }
            let offset = stretch[0].offset;
            let direct = self.direct.as_ref().map(|file| write_all(file, offset, &parts));
            match direct {
                Some(Err(IoFault { errno, .. })) if errno == Errno::INVAL.raw_os_error() => {
                    write_all(&self.file, offset, &parts)?;
                }
                Some(done) => done?,
                None => write_all(&self.file, offset, &parts)?,
            }
        }
        self.held().end(pieces);
        Ok(())
    }
}

/// Overlays held writes on what was read: they are newer.
pub(crate) fn lay_over(buffer: &mut [u8], held: &[(usize, Vec<u8>)]) {
    for (at, bytes) in held {
        buffer[*at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Disk for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn medium(&self) -> Medium {
        // A device has the size that it has, and may be called by many names.
        let Ok(open) = self.files.file.metadata() else { return Medium::Whole };
        if self.is_device {
            return Medium::Whole;
        }
        // What is written after a cut makes the file longer again, but for its last block: that one is the copy
        // of the superblock, and written at an opening alone.
        if open.len() < self.size {
            return Medium::Cut;
        }
        let is_there = match std::fs::metadata(&self.path) {
            Ok(named) => (named.dev(), named.ino()) == (open.dev(), open.ino()),
            // Another reason says nothing of the file.
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        };
        if is_there { Medium::Whole } else { Medium::Nameless }
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        // Looked up before the file is read: what is written meanwhile is in the one or the other.
        let held = self.held_of(offset, buffer.len());
        let whole = held.iter().any(|(_, bytes)| bytes.len() == buffer.len());
        let mut done = if whole { buffer.len() } else { 0 };
        while done < buffer.len() {
            let at = offset + done as u64;
            match rustix::io::pread(&self.files.file, &mut buffer[done..], at) {
                // A file that became shorter under us.
                Ok(0) => return Err(fault("read", at, Errno::IO)),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(error) => return Err(fault("read", at, error)),
            }
        }
        lay_over(buffer, &held);
        Ok(())
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, IoFault> {
        if self.files.is_in_memory {
            return self.read_at(offset, buffer).map(|()| true);
        }
        let held = self.held_of(offset, buffer.len());
        let whole = held.iter().any(|(_, bytes)| bytes.len() == buffer.len());
        if !whole && !self.files.read_cached(offset, buffer)? {
            return Ok(false);
        }
        lay_over(buffer, &held);
        Ok(true)
    }

    fn may_lack(&self) -> bool {
        !self.files.is_in_memory
    }

    fn reader(&self) -> Option<Reader> {
        let disk = self.clone();
        Some(Arc::new(move |fetch| disk.fetch(fetch)))
    }

    fn read_ring(&self) -> std::io::Result<ReadRing> {
        ReadRing::new(self.clone())
    }

    fn read_once(&self, offset: u64, length: usize) -> Result<Bytes, IoFault> {
        let held = self.held_of(offset, length);
        let mut memory = AlignedMemory::of(length);
        self.read_media(offset, &mut memory)?;
        lay_over(&mut memory, &held);
        Ok(Bytes::from_owner(memory))
    }

    fn read_media(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        let Some(direct) = &self.files.direct else { return self.read_at(offset, buffer) };
        // Memory that direct IO does not take is filled by way of other memory.
        let mut other = (!is_aligned(buffer)).then(|| AlignedMemory::of(PIECE_BYTES));
        let mut done = 0;
        while done < buffer.len() {
            let (at, rest) = (offset + done as u64, &mut buffer[done..]);
            let read = match &mut other {
                None => rustix::io::pread(direct, rest, at),
                Some(other) => {
                    let part = &mut other[..rest.len().min(PIECE_BYTES)];
                    rustix::io::pread(direct, &mut *part, at)
                        .inspect(|n| rest[..*n].copy_from_slice(&part[..*n]))
                }
            };
            match read {
                Ok(0) => return Err(fault("read", at, Errno::IO)),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) => return self.read_at(offset, buffer),
                Err(error) => return Err(fault("read", at, error)),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        let total = parts.iter().map(|p| p.len()).sum();
        if self.files.held().is_padding(offset, total) {
            // Rare: a volume has just become one that is not synced for each write.
            self.files.sync()?;
        }
        let mut at = offset;
        for group in parts.chunks(PARTS_MAX) {
            write_all(&self.files.file, at, group)?;
            at += group.iter().map(|p| p.len() as u64).sum::<u64>();
        }
        Ok(())
    }

    fn write_with_sync(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
        spare: usize,
    ) -> Result<(), IoFault> {
        let mut held = self.files.held();
        let total = parts.iter().map(|p| p.len()).sum();
        if held.waiting_bytes > HELD_BYTES_MAX
            && held.overlapping(offset, total).is_empty()
            && !held.is_padding(offset, total)
        {
            drop(held);
            return self.write_at(offset, parts);
        }
        held.push(offset, parts);
        // A device has all its space.
        if !self.is_device && self.files.direct.is_some() {
            let end = offset + total as u64;
            held.pad(end..end + spare as u64);
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), IoFault> {
        if self.read_only { Ok(()) } else { self.files.sync() }
    }

    fn syncer(&self) -> Syncer {
        let files = self.files.clone();
        Box::new(move || files.sync())
    }

    fn write_out(&self, offset: u64, length: u64) {
        let mut behind = self.files.behind.lock().unwrap_or_else(PoisonError::into_inner);
        behind.add(&self.files.file, offset..offset.saturating_add(length));
    }

    fn forget_cached(&self, offset: u64, length: u64) {
        let advice = rustix::fs::Advice::DontNeed;
        let length = std::num::NonZeroU64::new(length);
        // A hint: where it is not taken, what was cached is read.
        let _ = rustix::fs::fadvise(&self.files.file, offset, length, advice);
    }

    fn discard(&self, offset: u64, length: u64) {
        if self.is_device {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.files.file, flags, offset, length);
    }

    fn gives_back(&self) -> bool {
        !self.is_device && !self.read_only
    }

    fn next_space(&self, offset: u64) -> Option<u64> {
        if !self.gives_back() {
            return None;
        }
        // All reads and writes name their place, so only this call uses the descriptor's position.
        rustix::fs::seek(&self.files.file, rustix::fs::SeekFrom::Data(offset)).ok()
    }

    fn claim(&self, offset: u64, length: u64, spare_bytes: u64) -> bool {
        if self.is_device || self.read_only {
            return true;
        }
        // With nothing to spare the file system decides: the range may have its space already.
        if spare_bytes > 0
            && self.room_below().is_some_and(|room| room < length.saturating_add(spare_bytes))
        {
            return false;
        }
        let flags = FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.files.file, flags, offset, length) {
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC | Errno::DQUOT) => return false,
                // A file system that cannot promise room is believed.
                _ => return true,
            }
        }
    }

    fn notes_space(&self) -> bool {
        !self.is_device && !self.read_only && self.files.direct.is_some()
    }

    fn make_ready(&self, offset: u64, length: u64) -> bool {
        let Some(direct) = &self.files.direct else { return false };
        self.files.filling().begin(direct.clone(), offset, length)
    }

    fn made_ready(&self) -> Option<bool> {
        self.files.filling().end()
    }

    fn room_below(&self) -> Option<u64> {
        if self.is_device {
            return None;
        }
        let below = rustix::fs::fstatvfs(&self.files.file).ok()?;
        Some(below.f_bavail.saturating_mul(below.f_frsize))
    }

    fn cookie(&self) -> BootCookie {
        self.cookie
    }
}

#[cfg(test)]
mod tests;
