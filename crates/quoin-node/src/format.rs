//! Makes, checks and grows file systems.
//!
//! A format must be safe against a crash at any moment, on this node or, after it died, as seen
//! from the next one. Half a file system must never be taken for a user's data (it would block the
//! volume permanently) nor for a whole file system. So the tool works on a sparse image on the
//! host, and the result is copied: first the first block becomes [`FORMATTING_MARK`], then all
//! other data is written, last the first block, without which no file system is found. A crash
//! before the end leaves the mark, and the next stage formats anew. Each of the three is answered
//! before the next begins. Nothing is synced: whatever a volume loses, it loses from the end of its
//! history (PrefixAlways), and a sync of a file in it is a sync of all before.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;

use crate::device_calls::DeviceThread;
use crate::error::Error;
use crate::probe::FORMATTING_MARK;
use crate::tools::{E2FSCK, MKFS_EXT4, MKFS_XFS, Mounts, RESIZE2FS, Tools, XFS_GROWFS};

/// The block that makes a file system visible; written last.
const FIRST_BLOCK_BYTES: u64 = 4096;
const COPY_BYTES: usize = 1 << 20;
/// Limit of an ext4 whose image is in memory: what the tool writes of it has 16 MiB at most. XFS
/// writes its whole log, of up to 2 GiB.
const IN_MEMORY_BYTES_MAX: u64 = 1 << 40;
/// `BLKZEROOUT` of linux/fs.h: takes {start, length} in bytes.
const BLKZEROOUT: libc::Ioctl = 0x127f;

/// A file system that Quoin makes and mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileSystem {
    #[default]
    Ext4,
    Xfs,
}

impl FileSystem {
    /// Returns the program that repairs it.
    #[must_use]
    pub fn repair_tool(self) -> &'static str {
        match self {
            Self::Ext4 => E2FSCK.name,
            Self::Xfs => "xfs_repair",
        }
    }

    /// Returns the kernel's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }
}

impl FromStr for FileSystem {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "ext4" => Ok(Self::Ext4),
            "xfs" => Ok(Self::Xfs),
            other => Err(format!("file system {other:?} is not supported; use ext4 or xfs")),
        }
    }
}

/// A file system to be made.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    pub volume: &'a str,
    pub size_bytes: u64,
    pub block_size: u32,
    /// Directory of this host for the sparse image.
    pub scratch: &'a Path,
}

/// The sparse file that a tool has made its file system in. It has no name, so that nothing is left
/// of it after a crash.
pub struct Image {
    file: File,
    size_bytes: u64,
}

impl Image {
    /// Makes a file system in memory or on this host's disk; no device is touched.
    ///
    /// # Errors
    /// If the tool is missing or fails.
    pub async fn make(tools: &Tools, job: Job<'_>, file_system: FileSystem) -> Result<Self, Error> {
        let tool = match file_system {
            FileSystem::Ext4 => MKFS_EXT4,
            FileSystem::Xfs => MKFS_XFS,
        };
        std::fs::create_dir_all(job.scratch).map_err(Error::io("creating", job.scratch))?;
        let file = sparse_file(&job, file_system)?;
        let sector = format!("size={}", job.block_size);
        let mut arguments: Vec<&OsStr> = match file_system {
            // The kernel zeroes inode tables in the background; nothing is discarded, as the
            // image is not the device.
            FileSystem::Ext4 => {
                let options = "nodiscard,lazy_itable_init=1,lazy_journal_init=1";
                ["-F", "-q", "-b", "4096", "-m", "0", "-E", options].map(OsStr::new).to_vec()
            }
            FileSystem::Xfs => ["-f", "-q", "-K", "-s", &sector].map(OsStr::new).to_vec(),
        };
        arguments.push(OsStr::new("/proc/self/fd/0"));
        let shared = file.try_clone().map_err(Error::io("sharing an image in", job.scratch))?;
        let outcome = tools.run_on(tool, &arguments, shared).await?;
        if outcome.code != Some(0) {
            return Err(Error::Tool {
                tool: tool.name,
                volume: job.volume.to_owned(),
                output: outcome.output,
            });
        }
        Ok(Self { file, size_bytes: job.size_bytes })
    }

    /// Writes it to a device that was found blank, or interrupted in an earlier format.
    ///
    /// # Errors
    /// If the device takes no writes. The device is then as before, or marked as interrupted.
    pub fn write_to(
        self,
        _: &DeviceThread,
        device: &Path,
        was_interrupted: bool,
    ) -> Result<(), Error> {
        let outcome = copy(&self.file, device, self.size_bytes, was_interrupted);
        // Freeing a file on a disk takes its time, and no part of the format depends on it.
        std::thread::spawn(move || drop(self));
        outcome
    }
}

/// Returns whether the file system is made in memory: what its tool writes must have room there.
fn is_made_in_memory(file_system: FileSystem, size_bytes: u64) -> bool {
    file_system == FileSystem::Ext4 && size_bytes <= IN_MEMORY_BYTES_MAX
}

fn sparse_file(job: &Job<'_>, file_system: FileSystem) -> Result<File, Error> {
    let path = job.scratch.join(format!("{}.image", job.volume));
    let made = match is_made_in_memory(file_system, job.size_bytes) {
        true => rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(std::io::Error::from),
        false => File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .and_then(|file| std::fs::remove_file(&path).map(|()| file)),
    };
    let file = made.map_err(Error::io("creating", &path))?;
    file.set_len(job.size_bytes).map_err(|error| unsized_image(error, job, &path))?;
    Ok(file)
}

/// File systems limit the size of a file; a volume may be larger than that.
fn unsized_image(error: std::io::Error, job: &Job<'_>, image: &Path) -> Error {
    if error.kind() != std::io::ErrorKind::FileTooLarge {
        return Error::io("sizing", image)(error);
    }
    Error::ImageTooLarge {
        volume: job.volume.to_owned(),
        size_bytes: job.size_bytes,
        scratch: job.scratch.to_owned(),
    }
}

fn copy(from: &File, device: &Path, size_bytes: u64, was_interrupted: bool) -> Result<(), Error> {
    // A device that anything holds, such as a mount in any table of mounts, is refused by the kernel.
    let opened = File::options().write(true).custom_flags(libc::O_EXCL).open(device);
    let to = opened.map_err(|error| match error.kind() {
        std::io::ErrorKind::ResourceBusy => Error::Busy { path: device.to_owned() },
        _ => Error::io("opening for writing", device)(error),
    })?;
    let write = |bytes: &[u8], offset: u64| {
        to.write_all_at(bytes, offset).map_err(Error::io("writing", device))
    };
    let answered = || write_out(&to).map_err(Error::io("writing", device));

    let mut first = vec![0; usize::try_from(FIRST_BLOCK_BYTES).expect("4096 fits")];
    first[..FORMATTING_MARK.len()].copy_from_slice(FORMATTING_MARK);
    write(&first, 0)?;
    answered()?;
    if was_interrupted {
        // Data of the earlier attempt may lie where this one relies on zeroes.
        zero(&to, device, FIRST_BLOCK_BYTES, size_bytes)?;
    }
    let reading = || Error::io("reading the image of", device);
    let mut buffer = vec![0; COPY_BYTES];
    let mut offset = 0;
    while let Some((start, end)) = next_data(from, offset).map_err(reading())? {
        let mut at = start.max(FIRST_BLOCK_BYTES);
        while at < end {
            let bytes = usize::try_from((end - at).min(COPY_BYTES as u64)).expect("a mebibyte");
            let chunk = &mut buffer[..bytes];
            from.read_exact_at(chunk, at).map_err(reading())?;
            write(chunk, at)?;
            at += bytes as u64;
        }
        offset = end;
    }
    answered()?;
    from.read_exact_at(&mut first, 0).map_err(reading())?;
    write(&first, 0)?;
    answered()
}

/// Has everything written that is cached of a device, and waits until the device has answered.
/// Nothing is flushed below it.
fn write_out(device: &File) -> std::io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes numbers only.
    match unsafe { libc::sync_file_range(device.as_raw_fd(), 0, 0, all) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Returns the next stretch of data at or after `offset` in a sparse file.
fn next_data(file: &File, offset: u64) -> std::io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start))?;
    Ok(Some((start, end)))
}

fn zero(to: &File, device: &Path, from: u64, end: u64) -> Result<(), Error> {
    const STEP_BYTES: u64 = 1 << 30;
    let mut at = from;
    while at < end {
        let range = [at, (end - at).min(STEP_BYTES)];
        // SAFETY: BLKZEROOUT reads two u64 through the pointer, which outlives the call.
        let result = unsafe { libc::ioctl(to.as_raw_fd(), BLKZEROOUT, range.as_ptr()) };
        if result < 0 {
            return Err(Error::io("zeroing", device)(std::io::Error::last_os_error()));
        }
        at += range[1];
    }
    Ok(())
}

/// Repairs everything that needs no decision, before a writable mount; the device must not be mounted,
/// in any table of mounts ([`crate::device::is_held`]). `thoroughly` reads
/// everything even if the file system is marked clean. XFS replays its log when it is mounted, and
/// has no such check.
///
/// # Errors
/// [`Error::Damaged`] if a user has to decide.
pub async fn check(
    tools: &Tools,
    volume: &str,
    device: &Path,
    file_system: FileSystem,
    thoroughly: bool,
) -> Result<(), Error> {
    if file_system == FileSystem::Xfs {
        return Ok(());
    }
    let how = OsStr::new(if thoroughly { "-fp" } else { "-p" });
    let outcome = tools.run(E2FSCK, &[how, device.as_os_str()], Mounts::Hidden).await?;
    match outcome.code {
        // A sum: 1 repaired; 2 repaired, and a mounted root would need a reboot; 4 errors left. 8 and above:
        // the check could not run (for example: device in use).
        Some(0..=3) => Ok(()),
        Some(4..=7) => Err(Error::Damaged {
            volume: volume.to_owned(),
            tool: E2FSCK.name,
            device: device.to_owned(),
            output: outcome.output,
        }),
        _ => Err(Error::Tool {
            tool: E2FSCK.name,
            volume: volume.to_owned(),
            output: outcome.output,
        }),
    }
}

/// Grows a file system to the size of its device: XFS only while mounted at `mounted_at`, ext4 also
/// unmounted (checked thoroughly before). No effect if it has that size.
///
/// # Errors
/// If the tool is missing or fails; [`Error::GrowNotPermitted`] for a mounted ext4 without
/// `CAP_SYS_RESOURCE`, which that file system requires.
pub async fn grow(
    tools: &Tools,
    volume: &str,
    device: &Path,
    mounted_at: Option<&Path>,
    file_system: FileSystem,
) -> Result<(), Error> {
    let (tool, argument) = match (file_system, mounted_at) {
        (FileSystem::Ext4, _) => (RESIZE2FS, device),
        (FileSystem::Xfs, Some(mounted_at)) => (XFS_GROWFS, mounted_at),
        (FileSystem::Xfs, None) => return Ok(()),
    };
    let mounts = if mounted_at.is_some() { Mounts::Shown } else { Mounts::Hidden };
    let outcome = tools.run(tool, &[argument.as_os_str()], mounts).await?;
    if outcome.code == Some(0) {
        return Ok(());
    }
    if file_system == FileSystem::Ext4 && mounted_at.is_some() && !may_resize_ext4() {
        return Err(Error::GrowNotPermitted { volume: volume.to_owned() });
    }
    Err(Error::Tool { tool: tool.name, volume: volume.to_owned(), output: outcome.output })
}

/// Returns whether this process has `CAP_SYS_RESOURCE`, as the kernel reports it.
pub(crate) fn may_resize_ext4() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities >> CAP_SYS_RESOURCE & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn an_ext4_up_to_its_limit_is_made_in_memory_and_no_xfs_is() {
        for (size_bytes, is_in_memory) in [
            (IN_MEMORY_BYTES_MAX - 4096, true),
            (IN_MEMORY_BYTES_MAX, true),
            (IN_MEMORY_BYTES_MAX + 4096, false),
        ] {
            assert_eq!(is_made_in_memory(FileSystem::Ext4, size_bytes), is_in_memory);
            assert!(!is_made_in_memory(FileSystem::Xfs, size_bytes));
        }
    }

    /// Runs where the file system of the scratch directory ends below 8 EiB, as ext4 does at 16
    /// TiB.
    #[test]
    fn a_volume_larger_than_any_file_of_the_host_is_refused_with_the_way_out() {
        let scratch = tempfile::tempdir().unwrap();
        let job = Job {
            volume: "db",
            size_bytes: i64::MAX as u64 - 4095,
            block_size: 4096,
            scratch: scratch.path(),
        };
        let refused = |error: std::io::Error| unsized_image(error, &job, scratch.path());
        let error = refused(std::io::Error::from_raw_os_error(libc::EFBIG));
        assert_eq!(error.kind(), Kind::FailedPrecondition);
        let text = error.to_string();
        assert!(text.contains("db") && text.contains("16 TiB") && text.contains("xfs"), "{text}");
        assert_eq!(refused(std::io::Error::from_raw_os_error(libc::EIO)).kind(), Kind::Internal);
        let file = File::create(scratch.path().join("probe")).unwrap();
        if let Err(error) = file.set_len(job.size_bytes) {
            assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
        }
    }

    fn image_bytes(image: &Image, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        image.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// Properties of a new file system that nobody sees until they are missed.
    #[tokio::test]
    async fn a_new_file_system_has_the_blocks_of_its_volume_and_keeps_none_for_root() {
        let tools = Tools::of_host();
        if tools.find(MKFS_EXT4).is_err() || tools.find(MKFS_XFS).is_err() {
            quoin_testkit::skipped("needs e2fsprogs and xfsprogs");
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        for (file_system, size_bytes) in [
            // Small ones would get blocks of 1024 bytes.
            (FileSystem::Ext4, 8 << 20),
            (FileSystem::Ext4, 600 << 20),
            (FileSystem::Xfs, 400 << 20),
        ] {
            for block_size in [512, 4096] {
                let job = Job {
                    volume: "db",
                    size_bytes,
                    block_size,
                    scratch: &scratch.path().join("made here"),
                };
                let image = Image::make(&tools, job, file_system).await.unwrap();
                assert_eq!(image.file.metadata().unwrap().len(), size_bytes);
                let what = format!("{file_system:?} of {size_bytes} bytes, blocks of {block_size}");
                match file_system {
                    FileSystem::Ext4 => {
                        let head = image_bytes(&image, 1024, 1024);
                        let at =
                            |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
                        assert_eq!(u64::from(at(4)) * 4096, size_bytes, "{what}");
                        assert_eq!((at(8), at(0x18)), (0, 2), "reserved, block size: {what}");
                    }
                    FileSystem::Xfs => {
                        let head = image_bytes(&image, 0, 512);
                        let sector = u16::from_be_bytes([head[102], head[103]]);
                        assert_eq!(u32::from(sector), block_size, "{what}");
                    }
                }
                // Nothing of it has a name.
                assert_eq!(std::fs::read_dir(job.scratch).unwrap().count(), 0, "{what}");
            }
        }
    }

    /// Returns an image of blocks: its first one, two in the middle, and its last.
    fn odd_image(directory: &Path, size_bytes: u64) -> Image {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(directory.join("image"))
            .unwrap();
        file.set_len(size_bytes).unwrap();
        for (at, fill) in [(0, 1), (2 << 20, 2), ((2 << 20) + 4096, 3), (size_bytes - 4096, 4)] {
            file.write_all_at(&[fill; 4096], at).unwrap();
        }
        Image { file, size_bytes }
    }

    /// A device that ends too early takes all but the end: the mark is there and no file system.
    #[test]
    fn a_copy_that_fails_leaves_its_mark_and_one_that_ends_has_every_block_to_the_last() {
        let directory = tempfile::tempdir().unwrap();
        let size_bytes = 5 << 20;
        let device = directory.path().join("device");
        for was_interrupted in [false, true] {
            std::fs::write(&device, vec![0; size_bytes as usize]).unwrap();
            let image = odd_image(directory.path(), size_bytes);
            let copied = copy(&image.file, &device, size_bytes, was_interrupted);
            if was_interrupted {
                // A plain file takes no call of a block device.
                assert!(matches!(copied, Err(Error::Io { operation: "zeroing", .. })));
                let head = std::fs::read(&device).unwrap();
                assert!(head.starts_with(FORMATTING_MARK), "it is made anew the next time");
                assert!(head[4096..].iter().all(|byte| *byte == 0));
                continue;
            }
            copied.unwrap();
            let mut expected = vec![0; size_bytes as usize];
            image.file.read_exact_at(&mut expected, 0).unwrap();
            assert!(std::fs::read(&device).unwrap() == expected);
        }
        let none = directory.path().join("none");
        let image = odd_image(directory.path(), size_bytes);
        assert!(copy(&image.file, &none, size_bytes, false).is_err());
        assert!(!none.exists(), "a device that has gone is not made as a file");
    }

    #[tokio::test]
    async fn a_failed_growth_is_reported_with_the_tool_or_the_missing_privilege() {
        let scratch = tempfile::tempdir().unwrap();
        // Another process writes them: a file that is open for writing cannot be executed.
        let write = "for tool in resize2fs xfs_growfs; do printf '#!/bin/sh\necho no >&2\nexit 1\n' \
                     >\"$0/$tool\"; chmod 755 \"$0/$tool\"; done";
        let written =
            std::process::Command::new("sh").args(["-c", write]).arg(scratch.path()).status();
        assert!(written.unwrap().success());
        let tools = Tools::within(vec![scratch.path().into()]);
        let refused = async |mounted_at: Option<&Path>, file_system| {
            grow(&tools, "db", Path::new("/dev/null"), mounted_at, file_system).await
        };
        let mounted = Some(Path::new("/mnt"));
        for (mounted_at, file_system) in
            [(None, FileSystem::Ext4), (mounted, FileSystem::Ext4), (mounted, FileSystem::Xfs)]
        {
            let lacks = file_system == FileSystem::Ext4 && mounted_at.is_some();
            match refused(mounted_at, file_system).await.unwrap_err() {
                Error::GrowNotPermitted { .. } => assert!(lacks && !may_resize_ext4()),
                Error::Tool { output, .. } => {
                    assert!(output == "no" && (!lacks || may_resize_ext4()), "{output}");
                }
                other => panic!("{other}"),
            }
        }
        refused(None, FileSystem::Xfs).await.unwrap();
    }
}
