//! CPU time and memory of processes, from /proc.

use std::collections::BTreeMap;
use std::time::Duration;

/// Returns the CPU time (user and system) that these processes have used so far; those that have
/// ended count 0.
pub fn cpu(pids: &[u32]) -> Duration {
    let ticks: u64 = pids.iter().filter_map(|pid| cpu_ticks(*pid)).sum();
    // SAFETY: sysconf reads a constant and touches no memory of ours.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as f64;
    Duration::from_secs_f64(ticks as f64 / per_second)
}

/// Returns the CPU time that this process has used so far.
pub fn own() -> Duration {
    used(libc::RUSAGE_SELF)
}

/// Returns the CPU time of all commands that this process has started, and that have ended.
pub fn of_ended_children() -> Duration {
    used(libc::RUSAGE_CHILDREN)
}

fn used(of: libc::c_int) -> Duration {
    // SAFETY: all of the structure's fields are numbers, for which zeroes are a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes that structure and nothing else.
    unsafe { libc::getrusage(of, &raw mut usage) };
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Returns the CPU time that these processes have used so far, by what each of them is.
pub fn cpu_by_role(pids: &[u32]) -> BTreeMap<String, Duration> {
    let mut by_role = BTreeMap::new();
    for pid in pids {
        if let Some(role) = role(*pid) {
            *by_role.entry(role).or_default() += cpu(&[*pid]);
        }
    }
    by_role
}

/// Returns the first argument of one of Quoin's processes (`pool`, `target`, …), of one of the floor the second.
pub fn role(pid: u32) -> Option<String> {
    let line = command_line(pid)?;
    let mut arguments = line.split(' ').skip(1).filter(|word| *word != "bench-part");
    arguments.next().filter(|word| !word.is_empty()).map(str::to_owned)
}

fn cpu_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, field 2, may contain anything; fields are counted from its closing parenthesis.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Returns the resident memory in bytes.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    status_bytes(pid, "VmRSS:")
}

/// Returns the peak of resident memory, in bytes.
pub fn peak_bytes(pid: u32) -> Option<u64> {
    status_bytes(pid, "VmHWM:")
}

/// Returns the bytes that a process had written to disks, or to their page caches.
pub fn written_bytes(pid: u32) -> Option<u64> {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let line = io.lines().find(|line| line.starts_with("write_bytes:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn status_bytes(pid: u32, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// Returns a process and all its descendants.
pub fn family(root: u32) -> Vec<u32> {
    let mut parents: Vec<(u32, u32)> = Vec::new();
    if let Ok(entries) = std::fs::read_dir("/proc") {
        for entry in entries.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
                continue;
            };
            let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            let parent = stat
                .rfind(')')
                .and_then(|i| stat[i + 1..].split_whitespace().nth(1))
                .and_then(|p| p.parse().ok());
            if let Some(parent) = parent {
                parents.push((pid, parent));
            }
        }
    }
    let mut family = vec![root];
    let mut at = 0;
    while at < family.len() {
        let of = family[at];
        family.extend(parents.iter().filter(|(_, parent)| *parent == of).map(|(pid, _)| *pid));
        at += 1;
    }
    family
}

/// Returns the command line of a process, its arguments separated by blanks.
pub fn command_line(pid: u32) -> Option<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(String::from_utf8_lossy(&bytes).replace('\0', " "))
}

/// Returns whether the process has not ended. An ended one has no command line, even before its
/// parent has noticed.
pub fn is_alive(pid: u32) -> bool {
    command_line(pid).is_some_and(|line| !line.is_empty())
}

/// Kills them all as `kill -9` does; returns once none of them is left.
pub fn end(pids: &[u32]) {
    for pid in pids {
        if let Some(pid) = i32::try_from(*pid).ok().and_then(rustix::process::Pid::from_raw) {
            // The kill fails only if the process has ended already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    while pids.iter().any(|pid| is_alive(*pid)) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
