//! Programs that the tests and the demo need beside Rust and a C linker.

use anyhow::Result;
use std::path::Path;
use std::process::Command;

/// A program and the Debian package that has it.
pub struct Need {
    pub program: &'static str,
    pub package: &'static str,
    /// Use of the program, for the message when it cannot be installed.
    pub purpose: &'static str,
}

pub const EXT4: Need =
    Need { program: "mkfs.ext4", package: "e2fsprogs", purpose: "ext4 file systems" };
pub const XFS: Need =
    Need { program: "mkfs.xfs", package: "xfsprogs", purpose: "xfs file systems" };
pub const FUSE: Need = Need { program: "fusermount3", package: "fuse3", purpose: "attaching" };
pub const FIO: Need = Need { program: "fio", package: "fio", purpose: "foreign NBD load" };
pub const NBD: Need =
    Need { program: "nbdinfo", package: "libnbd-bin", purpose: "foreign NBD clients" };
pub const QEMU: Need =
    Need { program: "qemu-img", package: "qemu-utils", purpose: "QEMU as an NBD client" };
pub const IPROUTE: Need =
    Need { program: "ip", package: "iproute2", purpose: "hosts of their own (network namespaces)" };
pub const PYTHON: Need =
    Need { program: "python3", package: "python3", purpose: "CSI clients that are not Rust" };
pub const PERF: Need = Need { program: "perf", package: "linux-perf", purpose: "profiles" };
pub const STRACE: Need =
    Need { program: "strace", package: "strace", purpose: "kills at each call of a process" };
pub const ETCD: Need =
    Need { program: "etcd", package: "etcd-server", purpose: "records of several controllers" };
/// Programs that the tests need.
pub const OF_TESTS: [&Need; 10] =
    [&EXT4, &XFS, &FUSE, &FIO, &NBD, &QEMU, &IPROUTE, &PYTHON, &STRACE, &ETCD];

/// Installs missing programs by apt, where permitted; otherwise prints the command. A tool that
/// stays missing is no error here: the test that needs it names it in its own failure.
pub fn provide(needs: &[&Need]) -> Result<()> {
    let missing: Vec<_> = needs.iter().filter(|need| !on_path(need.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    let by_hand = format!("sudo apt-get install {}", packages.join(" "));
    install(&packages);
    for need in missing.iter().filter(|need| !on_path(need.program)) {
        println!(
            "note: `{}` is missing (wanted for {}); install it: {by_hand}",
            need.program, need.purpose
        );
    }
    Ok(())
}

/// Installs Debian packages, where permitted. The caller checks the result by the programs.
pub fn install(packages: &[&str]) {
    if !is_root() || !on_path("apt-get") {
        return;
    }
    println!("installing {}", packages.join(", "));
    apt_get(&["update", "-qq"]);
    let mut arguments = vec!["install", "-y", "-qq", "--no-install-recommends"];
    arguments.extend(packages);
    apt_get(&arguments);
}

fn apt_get(arguments: &[&str]) {
    let status = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .status();
    if !status.is_ok_and(|status| status.success()) {
        println!("note: `apt-get {}` did not succeed", arguments.join(" "));
    }
}

/// Returns whether a program of that name can be started; the system directories count even where a
/// user's PATH leaves them out, since mkfs is there.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/sbin", "/sbin"])
        .any(|directory| Path::new(directory).join(program).is_file())
}

/// Returns whether this process runs as root (by the owner of its own /proc entry).
pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}
