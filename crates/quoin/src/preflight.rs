//! `quoin preflight`: whether this host can do its part, before anything of Quoin runs on it.
//!
//! Nothing is changed: ports are bound for a moment, devices are read.

use std::fmt::Write as _;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use clap::{Args, ValueEnum};
use quoin_node::{E2FSCK, MKFS_EXT4, MKFS_XFS, RESIZE2FS, Tool, Tools, XFS_GROWFS};
use serde::Serialize;

use crate::host::{self, ports};
use crate::output::{self, Format};

/// Exit status where something is missing.
const LACKS: i32 = 3;
/// Since then the kernel sends FUSE requests again, so that an update of `quoin attach` costs a pause.
const RESENDS_SINCE: (u32, u32) = (6, 9);
/// Since then a loop device tells its bindings apart.
const NUMBERS_SINCE: (u32, u32) = (5, 15);
/// Bits of capabilities(7) in a set.
const CAPABILITIES: [(&str, u32, Part, Verdict, &str); 3] = [
    ("CAP_SYS_ADMIN", 21, Part::Attach, Verdict::Missing, "nothing can be mounted without it"),
    (
        "CAP_SYS_RESOURCE",
        24,
        Part::Node,
        Verdict::Warning,
        "an ext4 grows at its next staging, and not while it is mounted",
    ),
    ("CAP_IPC_LOCK", 14, Part::Pool, Verdict::Warning, "memory cannot be kept out of swap"),
];
/// The kernel's clock was never set by a time service, or not for long (`STA_UNSYNC`).
const UNSYNCHRONIZED: libc::c_int = 0x40;

#[derive(Args)]
pub struct PreflightOptions {
    /// Parts that are to run here; may be repeated [default: node and attach].
    #[arg(long = "for", value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// A directory whose mounts others must see: the run directory, in a container kubelet's. May be
    /// repeated; it is created by whoever starts the parts.
    #[arg(long, value_name = "DIRECTORY")]
    run: Vec<PathBuf>,
    /// A port that must be free; may be repeated.
    #[arg(long, value_name = "PORT")]
    port: Vec<u16>,
    /// A block device that is to become a pool: nobody else's data may be on it. May be repeated.
    #[arg(long, value_name = "PATH")]
    device: Vec<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// CSI: formats and mounts.
    Node,
    /// Makes block devices.
    Attach,
    /// Keeps replicas.
    Pool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
enum Verdict {
    Good,
    /// The part works, with less than it could.
    Warning,
    Missing,
}

/// One requirement, as `-o json` has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Check {
    name: String,
    verdict: Verdict,
    /// The finding, and the way out.
    message: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    /// False where something is missing.
    ready: bool,
    checks: Vec<Check>,
}

impl Check {
    fn new(name: &str, verdict: Verdict, message: impl Into<String>) -> Self {
        Self { name: name.to_owned(), verdict, message: message.into() }
    }

    /// `otherwise`: what a failure means.
    fn of(name: &str, found: Result<String, String>, otherwise: Verdict) -> Self {
        match found {
            Ok(message) => Self::new(name, Verdict::Good, message),
            Err(message) => Self::new(name, otherwise, message),
        }
    }
}

impl Report {
    fn text(&self) -> String {
        let mut text = String::new();
        for Check { name, verdict, message } in &self.checks {
            let word = match verdict {
                Verdict::Good => "good",
                Verdict::Warning => "WARNING",
                Verdict::Missing => "MISSING",
            };
            let _ = writeln!(text, "{word:8} {name:16} {message}");
        }
        text + if self.ready { "this host can do its part" } else { "this host cannot do its part" }
    }
}

pub fn run(options: &PreflightOptions, format: Format) -> Result<()> {
    let checks = checks(options);
    let ready = checks.iter().all(|check| check.verdict != Verdict::Missing);
    let report = Report { ready, checks };
    output::print_one(format, &report, || report.text())?;
    if !report.ready {
        std::process::exit(LACKS);
    }
    Ok(())
}

fn checks(options: &PreflightOptions) -> Vec<Check> {
    let default = [Part::Node, Part::Attach];
    let parts = if options.parts.is_empty() { &default[..] } else { &options.parts };
    let runs = |part: Part| parts.contains(&part);
    let mut checks = Vec::new();
    if runs(Part::Attach) {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        checks.push(kernel(&release));
        let devices = host::can_attach().map(|()| "/dev/fuse and /dev/loop-control".to_owned());
        checks.push(Check::of("devices", devices, Verdict::Missing));
    }
    if runs(Part::Node) {
        let tools = Tools::of_host();
        for (tool, otherwise) in [
            (MKFS_EXT4, Verdict::Missing),
            (E2FSCK, Verdict::Missing),
            (RESIZE2FS, Verdict::Missing),
            (MKFS_XFS, Verdict::Warning),
            (XFS_GROWFS, Verdict::Warning),
        ] {
            checks.push(tool_of(&tools, tool, otherwise));
        }
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for (name, bit, part, otherwise, why) in CAPABILITIES {
        if runs(part) || part == Part::Attach && runs(Part::Node) {
            checks.push(capability(&status, name, bit, otherwise, why));
        }
    }
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    checks.extend(options.run.iter().map(|directory| shared(&table, directory)));
    checks.extend(options.port.iter().map(|port| free_port(*port)));
    checks.extend(options.device.iter().map(|device| blank(device)));
    checks.push(clock());
    checks
}

fn kernel(release: &str) -> Check {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let is = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (verdict, message) = if is < NUMBERS_SINCE {
        (Verdict::Missing, format!("{release}; Linux 5.15 is needed, 6.9 recommended"))
    } else if is < RESENDS_SINCE {
        let what = "an update or a crash of `quoin attach` fails the IO of mounted volumes before \
                    Linux 6.9";
        (Verdict::Warning, format!("{release}; {what}"))
    } else {
        (Verdict::Good, release.to_owned())
    };
    Check::new("kernel", verdict, message)
}

fn tool_of(tools: &Tools, tool: Tool, otherwise: Verdict) -> Check {
    let found = tools.find(tool).map(|path| path.display().to_string());
    Check::of(tool.name, found.map_err(|error| error.to_string()), otherwise)
}

fn capability(status: &str, name: &str, bit: u32, otherwise: Verdict, why: &str) -> Check {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    match set & (1 << bit) {
        0 => Check::new(name, otherwise, format!("this process has it not: {why}")),
        _ => Check::new(name, Verdict::Good, "effective"),
    }
}

fn shared(table: &str, directory: &Path) -> Check {
    let shown = directory.display();
    let is_shared = quoin_attach::fuse::mount::is_shared_in(table, directory);
    let found = match is_shared {
        true => Ok(format!("{shown} is on a shared mount")),
        false => Err(format!(
            "{shown} is on no shared mount: others would not see what is mounted there (`mount \
             --make-rshared`, in a container bidirectional propagation)"
        )),
    };
    Check::of("propagation", found, Verdict::Missing)
}

fn free_port(port: u16) -> Check {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let found = match TcpListener::bind(address) {
        Ok(_) => Ok(format!("{port} is free")),
        Err(error) => {
            let who = ports::listener(address).map(|who| format!(": {who}")).unwrap_or_default();
            Err(format!("{port} cannot be used ({error}){who}"))
        }
    };
    Check::of("port", found, Verdict::Missing)
}

/// Looks for another owner's signature. One of Quoin is none that blkid knows.
fn blank(device: &Path) -> Check {
    let shown = device.display();
    let found = match Command::new("blkid").args(["-p", "-o", "export"]).arg(device).output() {
        Err(error) => Err(format!("{shown}: blkid cannot be run ({error}): install util-linux")),
        // blkid's word for a device on which it finds nothing.
        Ok(output) if output.status.code() == Some(2) => match std::fs::File::open(device) {
            Ok(_) => Ok(format!("{shown} has no signature of another owner")),
            Err(error) => Err(format!("{shown}: {error}")),
        },
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let kinds = text.lines().filter_map(|line| line.split_once('='));
            let kinds = kinds.filter(|(key, _)| matches!(*key, "TYPE" | "PTTYPE"));
            let kinds: Vec<_> = kinds.map(|(_, kind)| kind.to_owned()).collect();
            Err(format!(
                "{shown} has a signature ({}): take it off with wipefs once its data are worth nothing",
                if kinds.is_empty() { "of an unknown kind".to_owned() } else { kinds.join(", ") }
            ))
        }
    };
    Check::of("device", found, Verdict::Missing)
}

/// Certificates, schedules and backups go by the clock. IO does not.
fn clock() -> Check {
    let mut asked = MaybeUninit::<libc::timex>::zeroed();
    // SAFETY: all zero is a valid value, whose modes ask for no change; the call fills the structure.
    let (state, asked) = unsafe { (libc::adjtimex(asked.as_mut_ptr()), asked.assume_init()) };
    let found = match state {
        _ if asked.status & UNSYNCHRONIZED == 0 && state >= 0 => {
            Ok("kept by a time service".to_owned())
        }
        _ => {
            Err("no time service keeps it (NTP): certificates are refused where clocks differ by \
                  more than they last"
                .to_owned())
        }
    };
    Check::of("clock", found, Verdict::Warning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_judged_by_what_attach_needs_of_it() {
        let verdict = |release: &str| kernel(release).verdict;
        assert_eq!(verdict("6.18.44-fc-v669"), Verdict::Good);
        assert_eq!(verdict("6.9.0"), Verdict::Good);
        assert_eq!(verdict("7.0-rc1"), Verdict::Good);
        assert_eq!(verdict("6.1.0-37-amd64"), Verdict::Warning);
        assert_eq!(verdict("5.15.0"), Verdict::Warning);
        assert_eq!(verdict("5.14.0-570.el9"), Verdict::Missing);
        assert_eq!(verdict("unheard"), Verdict::Missing);
    }

    #[test]
    fn a_capability_is_looked_up_in_the_effective_set() {
        let status = "CapPrm:\tffffffffffffffff\nCapEff:\t0000000000204000\n";
        let verdict =
            |status: &str, bit| capability(status, "CAP", bit, Verdict::Warning, "less").verdict;
        assert_eq!(verdict(status, 21), Verdict::Good);
        assert_eq!(verdict(status, 14), Verdict::Good);
        assert_eq!(verdict(status, 24), Verdict::Warning);
        assert_eq!(verdict("", 14), Verdict::Warning);
    }

    #[test]
    fn a_port_that_is_taken_and_a_device_with_data_are_named_with_their_owner() {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let check = free_port(port);
        assert_eq!(check.verdict, Verdict::Missing);
        assert!(check.message.contains(&format!("process {}", std::process::id())), "{check:?}");
        drop(taken);
        assert_eq!(free_port(port).verdict, Verdict::Good);

        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        if Command::new("blkid").arg("--version").output().is_err() {
            quoin_testkit::skipped("needs blkid");
            return;
        }
        assert_eq!(blank(&disk).verdict, Verdict::Good, "{:?}", blank(&disk));
        // The signature of a swap area: its version, its last page, its mark.
        let mut page = vec![0; 4096];
        page[4086..].copy_from_slice(b"SWAPSPACE2");
        (page[1024], page[1028]) = (1, 100);
        std::os::unix::fs::FileExt::write_all_at(
            &std::fs::File::options().write(true).open(&disk).unwrap(),
            &page,
            0,
        )
        .unwrap();
        let check = blank(&disk);
        assert!(check.verdict == Verdict::Missing && check.message.contains("swap"), "{check:?}");
        assert_eq!(blank(&directory.path().join("none")).verdict, Verdict::Missing);
    }

    #[test]
    fn a_host_is_ready_unless_something_is_missing() {
        let table = "22 1 0:21 / / rw shared:1 - ext4 x rw\n90 22 0:50 / /srv rw - tmpfs t rw\n";
        assert_eq!(shared(table, Path::new("/run/quoin")).verdict, Verdict::Good);
        assert_eq!(shared(table, Path::new("/srv/quoin")).verdict, Verdict::Missing);
        let good = Check::new("x", Verdict::Good, "y");
        let report = Report { ready: true, checks: vec![good] };
        assert!(report.text().starts_with("good     x ") && report.text().ends_with("its part"));
    }
}
