//! The file system tools of the host: found, run, and their failures described.
//!
//! To find out whether its device is mounted, a tool of e2fsprogs opens every loop device of the
//! mount table, and one of xfsprogs looks at every mount. The kernel then asks the process that
//! serves that device or mount, and one that hangs would hold up the tool, which serves another
//! volume. So tools see [`Mounts`] only where they need them.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::error::Error;
use crate::mountinfo::{self, Mount};

/// A program that a node needs for a file system, and the package that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tool {
    pub name: &'static str,
    /// The package, under its usual name.
    pub package: &'static str,
}

pub const MKFS_EXT4: Tool = Tool { name: "mkfs.ext4", package: "e2fsprogs" };
pub const E2FSCK: Tool = Tool { name: "e2fsck", package: "e2fsprogs" };
pub const RESIZE2FS: Tool = Tool { name: "resize2fs", package: "e2fsprogs" };
pub const MKFS_XFS: Tool = Tool { name: "mkfs.xfs", package: "xfsprogs" };
pub const XFS_GROWFS: Tool = Tool { name: "xfs_growfs", package: "xfsprogs" };

/// Time after which a tool is given up: the content that it works on is anybody's, and may be made to
/// keep it busy.
const TIME_MAX: Duration = Duration::from_secs(2 * 3600);
/// Memory that each tool may have, however little the host has.
const MEMORY_BYTES_MIN: u64 = 1 << 30;

/// The mounts of this host, as a tool sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    Shown,
    /// None. The kernel still refuses a mounted device to a tool that opens it for itself alone.
    Hidden,
}

/// Output of a tool, and its exit code (`None` after a signal).
pub struct Outcome {
    pub code: Option<i32>,
    pub output: String,
}

/// Directories that are searched for tools.
#[derive(Debug, Clone)]
pub struct Tools {
    directories: Vec<PathBuf>,
    time_max: Duration,
    memory_bytes_max: u64,
}

impl Tools {
    /// Searches the directories of `PATH`, then the system directories that a service's `PATH`
    /// often lacks.
    #[must_use]
    pub fn of_host() -> Self {
        let mut directories: Vec<PathBuf> = std::env::var_os("PATH")
            .map(|path| std::env::split_paths(&path).collect())
            .unwrap_or_default();
        for system in ["/usr/sbin", "/sbin", "/usr/bin", "/bin"] {
            if !directories.iter().any(|directory| directory == Path::new(system)) {
                directories.push(system.into());
            }
        }
        Self::within(directories)
    }

    /// Searches only these directories.
    #[must_use]
    pub fn within(directories: Vec<PathBuf>) -> Self {
        let memory_bytes_max = (memory_bytes() / 2).max(MEMORY_BYTES_MIN);
        Self { directories, time_max: TIME_MAX, memory_bytes_max }
    }

    /// Returns the path of the tool.
    ///
    /// # Errors
    /// [`Error::MissingTool`] with the package that has it.
    pub fn find(&self, tool: Tool) -> Result<PathBuf, Error> {
        use std::os::unix::fs::PermissionsExt;
        self.directories
            .iter()
            .map(|directory| directory.join(tool.name))
            .find(|path| {
                std::fs::metadata(path)
                    .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
            })
            .ok_or_else(|| Error::MissingTool {
                tool: tool.name,
                package: tool.package,
                looked: std::env::join_paths(&self.directories)
                    .map(|paths| paths.to_string_lossy().into_owned())
                    .unwrap_or_default(),
            })
    }

    /// Runs a tool to its end. Its output is returned as one line of at most 600 bytes.
    ///
    /// # Errors
    /// If the tool is missing or cannot be started.
    pub async fn run(
        &self,
        tool: Tool,
        arguments: &[&std::ffi::OsStr],
        mounts: Mounts,
    ) -> Result<Outcome, Error> {
        self.start(tool, arguments, mounts, Stdio::null()).await
    }

    /// Runs a tool on a file that has no name: `/proc/self/fd/0`. It sees no mounts.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_on(
        &self,
        tool: Tool,
        arguments: &[&std::ffi::OsStr],
        file: std::fs::File,
    ) -> Result<Outcome, Error> {
        self.start(tool, arguments, Mounts::Hidden, file.into()).await
    }

    async fn start(
        &self,
        tool: Tool,
        arguments: &[&std::ffi::OsStr],
        mounts: Mounts,
        input: Stdio,
    ) -> Result<Outcome, Error> {
        let path = self.find(tool)?;
        let mut command = tokio::process::Command::new(&path);
        command.args(arguments).stdin(input);
        // Messages are quoted to users and not parsed: one language for all.
        command.env("LC_ALL", "C");
        if mounts == Mounts::Hidden {
            let served = served_mounts()?;
            // SAFETY: between fork and exec the closure makes system calls, and does nothing else.
            unsafe {
                command.pre_exec(move || {
                    let _ = hide_mounts(&served);
                    Ok(())
                });
            }
        }
        // It was made of content that is anybody's, on a host that others use as well.
        let limit = Some(self.memory_bytes_max);
        // SAFETY: between fork and exec the closure makes one system call.
        unsafe {
            command.pre_exec(move || {
                let limits = rustix::process::Rlimit { current: limit, maximum: limit };
                let _ = rustix::process::setrlimit(rustix::process::Resource::As, limits);
                Ok(())
            });
        }
        // A tool that waits for a device without an answer stays until that answers.
        command.kill_on_drop(true);
        let ended = tokio::time::timeout(self.time_max, command.output()).await;
        let Ok(output) = ended else {
            let output = format!("given up after {} s", self.time_max.as_secs());
            return Ok(Outcome { code: None, output });
        };
        let output = output.map_err(Error::io("running", &path))?;
        let mut text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        if text.is_empty() {
            text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        }
        let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if line.len() > 600 {
            let cut = (0..=600).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0);
            line.truncate(cut);
            line.push('…');
        }
        if line.is_empty() {
            line = match output.status.code() {
                Some(code) => format!("exit code {code}"),
                None => "ended by a signal".to_owned(),
            };
        }
        Ok(Outcome { code: output.status.code(), output: line })
    }
}

/// Returns the memory of this host.
fn memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Returns the mounts that a process serves, or the device below them.
fn served_mounts() -> Result<Vec<CString>, Error> {
    const LOOP_MAJOR: u32 = 7;
    let is_served = |mount: &Mount| {
        mount.major == LOOP_MAJOR
            || mount.source.starts_with("/dev/loop")
            || mount.fs_type.starts_with("fuse")
    };
    let served = mountinfo::read()?.into_iter().filter(is_served).map(|mount| mount.mount_point);
    let others = served.filter(|path| path != Path::new("/"));
    Ok(others.filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect())
}

/// Gives this process a mount table that is empty, and leaves that of the host as it is. Where that
/// is not permitted, the tool sees them all: it works, and may be held up.
///
/// The process has copies of the host's mounts. It gives those up that are `served`, since a copy
/// keeps a volume's file system mounted.
fn hide_mounts(served: &[CString]) -> rustix::io::Result<()> {
    // SAFETY: the process has one thread, and shares nothing else.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    for path in served {
        // A mount on another of them is gone with that.
        let _ = unmount(path, UnmountFlags::DETACH);
    }
    mount_bind("/dev/null", "/proc/self/mounts")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_reported_with_its_package_and_the_search_path() {
        let tools = Tools::within(vec!["/nowhere".into()]);
        let text = tools.find(MKFS_XFS).unwrap_err().to_string();
        assert!(text.contains("mkfs.xfs") && text.contains("xfsprogs"), "{text}");
        assert!(text.contains("/nowhere"), "{text}");
    }

    #[tokio::test]
    async fn a_tool_is_bounded_in_time_and_memory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("e2fsck");
        let script = "printf '#!/bin/sh\nulimit -v >&2\nsleep $1\n' >\"$0\"; chmod 755 \"$0\"";
        let written = std::process::Command::new("sh").args(["-c", script]).arg(&path).status();
        assert!(written.unwrap().success());
        let within = Tools::within(vec![directory.path().into(), "/bin".into()]);
        assert!(within.memory_bytes_max >= MEMORY_BYTES_MIN && memory_bytes() > 0);
        let tools = Tools { time_max: Duration::from_millis(500), ..within };
        let outcome = tools.run(E2FSCK, &["0".as_ref()], Mounts::Shown).await.unwrap();
        assert_eq!(outcome.output, (tools.memory_bytes_max / 1024).to_string());
        let began = std::time::Instant::now();
        let outcome = tools.run(E2FSCK, &["60".as_ref()], Mounts::Hidden).await.unwrap();
        assert!(
            outcome.code.is_none() && outcome.output.contains("given up"),
            "{}",
            outcome.output
        );
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[tokio::test]
    async fn the_output_of_a_tool_is_returned_as_one_short_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("e2fsck");
        // Another process writes it: a child that is forked here meanwhile would have it open, and
        // a file that is open for writing cannot be executed.
        let script =
            "printf '#!/bin/sh\necho \"two\n lines\" >&2\nexit 4\n' >\"$0\"; chmod 755 \"$0\"";
        let written = std::process::Command::new("sh").args(["-c", script]).arg(&path).status();
        assert!(written.unwrap().success());
        let tools = Tools::within(vec![directory.path().into()]);
        for mounts in [Mounts::Shown, Mounts::Hidden] {
            let outcome = tools.run(E2FSCK, &[], mounts).await.unwrap();
            assert_eq!(outcome.code, Some(4));
            assert_eq!(outcome.output, "two lines");
        }
    }
}
