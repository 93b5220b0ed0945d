//! The attach process that has a run directory, as the kernel knows it. A stuck one holds its
//! devices, answers no request, and keeps every other from taking its place.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Process that holds the directory of attached volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attacher {
    pub pid: u32,
    /// State as in `/proc`: R, S, D, T, Z …
    state: char,
}

impl Attacher {
    /// Holder of a run directory; `None`: it is free.
    pub fn of(run: &Path) -> Option<Self> {
        let inode = std::fs::metadata(run.join("attach/lock")).ok()?.ino();
        let table = std::fs::read_to_string("/proc/locks").ok()?;
        let pid = holders(&table, inode).find(|pid| is_attach(*pid))?;
        Some(Self { pid, state: state(pid)? })
    }

    /// Returns true if it cannot answer any request before the operator intervenes.
    pub fn is_stuck(&self) -> bool {
        !matches!(self.state, 'R' | 'S' | 'I')
    }

    /// Commands that let it go on, or end it.
    pub fn way_out(&self) -> String {
        let pid = self.pid;
        match self.state {
            'T' | 't' => format!(
                "`kill -CONT {pid}` continues it, `kill -9 {pid}` ends its devices (their IO \
                 fails)"
            ),
            'D' | 'Z' | 'X' => {
                "end the programs that use its devices and unmount those, or restart the host"
                    .to_owned()
            }
            _ => format!("end it with `kill {pid}`"),
        }
    }
}

impl fmt::Display for Attacher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        let state = match self.state {
            'T' | 't' => "was stopped by a signal",
            'D' => "is held by the kernel, in IO that is not answered",
            'Z' | 'X' => "has ended, except for IO that is not answered",
            _ => "runs, and does not answer",
        };
        write!(f, "process {pid} (`quoin attach`) {state}")
    }
}

/// Processes that hold a flock on the file of this inode, by the kernel's table.
fn holders(table: &str, inode: u64) -> impl Iterator<Item = u32> + '_ {
    table.lines().filter_map(move |line| {
        // "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; the line of a waiting process has "->"
        // in it.
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid = words.nth(2)?.parse().ok()?;
        let held = words.next()?.rsplit(':').next()?.parse::<u64>().ok()?;
        (held == inode).then_some(pid)
    })
}

/// Inode numbers are unique in one file system only.
fn is_attach(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // A process that has ended has no command line.
    line.is_empty() || line.split(|byte| *byte == 0).any(|word| word == b"attach")
}

/// The worst state of its threads: one that waits in the kernel blocks the whole process.
fn state(pid: u32) -> Option<char> {
    let own = state_in(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    if own != 'Z' {
        return Some(own);
    }
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let stat = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("stat")).ok();
    let mut states = threads.flatten().filter_map(stat).filter_map(|text| state_in(&text));
    Some(states.find(|state| *state == 'D').unwrap_or(own))
}

fn state_in(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_read_from_the_table_of_the_kernel() {
        let table = "1: POSIX  ADVISORY  WRITE 7 08:01:42 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 1234 08:01:42 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 99 08:01:42 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 55 00:2f:43 0 EOF\n";
        assert_eq!(holders(table, 42).collect::<Vec<_>>(), [1234]);
        assert_eq!(holders(table, 43).collect::<Vec<_>>(), [55]);
        assert_eq!(state_in("12 (a) b) T 1 2"), Some('T'));
    }

    #[test]
    fn each_state_has_its_way_out() {
        let of = |state| Attacher { pid: 12, state };
        assert!(!of('S').is_stuck() && of('D').is_stuck() && of('T').is_stuck());
        assert!(of('T').way_out().contains("kill -CONT 12"));
        assert!(of('D').to_string().contains("held by the kernel"));
        assert!(of('D').way_out().contains("unmount"));
        assert!(of('S').way_out().contains("`kill 12`"));
    }

    #[test]
    fn an_unlocked_directory_and_the_lock_of_another_program_have_no_holder() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Attacher::of(directory.path()), None);
        std::fs::create_dir(directory.path().join("attach")).unwrap();
        let lock = std::fs::File::create(directory.path().join("attach/lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert_eq!(Attacher::of(directory.path()), None, "this test is no attach process");
    }
}
