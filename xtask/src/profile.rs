//! Where CPU time goes: a case of the benchmark under perf, as a table by process and by part.
//!
//! The build has frame pointers, in a directory of its own beside the other builds, so that a stack costs
//! next to nothing to record. Each stack counts for the first of [`PARTS`] that one of its functions names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{packages, run};

#[derive(clap::Args)]
pub struct Options {
    /// A case of `cargo xtask bench`, by its name.
    #[arg(default_value = "write-4k-qd32")]
    case: String,
    /// Seconds that are recorded.
    #[arg(long, default_value_t = 8)]
    seconds: u32,
    /// Also print the functions that use the most themselves, and under which others.
    #[arg(long)]
    functions: bool,
}

/// Parts by what the names of functions contain, in the order in which they are asked for.
///
/// Background work has all that runs below it.
const PARTS: [(&str, &[&str]); 17] = [
    ("background", &["quoin_store::background"]),
    ("allocator", &["mi_", "_mi_", "__rust_alloc", "__rust_dealloc", "__rust_realloc"]),
    ("polling", &["do_epoll_wait", "epoll_wait", "sched_yield"]),
    ("waking", &["eventfd_write", "futex", "Waker::wake"]),
    (
        "sockets",
        &[
            "sys_sendmsg",
            "sys_sendto",
            "sys_recvfrom",
            "sock_read_iter",
            "sock_write_iter",
            "recvmsg",
        ],
    ),
    ("file writes", &["vfs_write", "vfs_writev", "do_pwritev", "pwrite64", "ext4_file_write_iter"]),
    ("write-out", &["sync_file_range"]),
    ("file reads", &["vfs_read", "pread64", "filemap_read"]),
    ("disk syncs", &["do_fsync", "vfs_fsync", "fdatasync", "io_uring"]),
    ("page faults", &["exc_page_fault"]),
    ("system calls", &["entry_SYSCALL_64", "do_syscall_64", "syscall_"]),
    ("memmove", &["memcpy", "memmove", "memset"]),
    ("checksums", &["crc"]),
    ("memtable", &["memtable_tree"]),
    ("clock", &["clock_gettime", "Instant::"]),
    ("store", &["quoin_store"]),
    ("protocol", &["quoin_replication", "quoin_types"]),
];
/// Parts by the crate that a function is of, where none of the others is named.
const CRATES: [(&str, &str); 5] = [
    ("wire", "quoin_wire"),
    ("NBD", "quoin_nbd"),
    ("target", "quoin_target"),
    ("pool", "quoin_pool"),
    ("loop", "quoin_reactor"),
];
/// Processes that use less of the whole are not shown, nor are functions.
const SHOWN: f64 = 0.005;

pub fn run(options: &Options) -> Result<()> {
    packages::provide(&[&packages::PERF])?;
    if !packages::on_path("perf") {
        bail!(
            "perf is missing: `sudo apt-get install linux-perf`, or another package that has it for this kernel; \
             `cargo xtask bench` prints CPU time by process without it"
        );
    }
    let quoin = build()?;
    let scratch = run::target_directory()?.join("profile");
    let data = scratch.join("perf.data");
    let seconds = options.seconds.to_string();
    let mut bench = Command::new(&quoin);
    bench.args([
        "bench",
        "--quick",
        "--pairs",
        "1",
        "--only",
        &options.case,
        "--seconds",
        &seconds,
    ]);
    run::check(bench.arg("--perf-data").arg(&data))?;
    let processes = data.with_extension("processes");
    if !processes.exists() {
        bail!("no case of the benchmark has {} in its name", options.case);
    }
    let roles = roles(&std::fs::read_to_string(&processes).context("read what the processes are")?);
    let stacks = stacks_of(&data)?;
    print!("{}", table(&stacks, &roles));
    if options.functions {
        print!("{}", functions(&stacks, &roles));
    }
    // A later run must not find those of this one.
    std::fs::remove_file(&processes).context("remove what the processes are")
}

/// Builds Quoin as it is released, but with frame pointers, and returns its path.
fn build() -> Result<PathBuf> {
    let directory = run::target_directory()?.join("profile");
    let mut build = run::cargo();
    build.args(["build", "--quiet", "--release", "--package", "quoin", "--target-dir"]);
    build.arg(&directory).env("RUSTFLAGS", "-C force-frame-pointers=yes");
    run::check(build.env("CFLAGS", "-fno-omit-frame-pointer"))?;
    Ok(directory.join("release/quoin"))
}

/// A stack that perf recorded, innermost function first.
struct Stack {
    pid: u32,
    functions: Vec<String>,
}

fn stacks_of(data: &Path) -> Result<Vec<Stack>> {
    let mut perf = Command::new("perf");
    perf.args(["script", "--no-inline", "--fields", "pid,ip,sym", "--input"]).arg(data);
    let output = perf.output().context("cannot start `perf script`")?;
    if !output.status.success() {
        bail!("`perf script` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(stacks(&String::from_utf8_lossy(&output.stdout)))
}

/// Reads what `perf script` prints: a line with the process, one for each function, and an empty one.
fn stacks(text: &str) -> Vec<Stack> {
    let mut stacks: Vec<Stack> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), stacks.last_mut()) {
            (None, _) => {}
            (Some(first), _) if !line.contains('\t') => {
                let pid = first.parse().unwrap_or_default();
                stacks.push(Stack { pid, functions: Vec::new() });
            }
            (Some(_), Some(stack)) => {
                stack.functions.push(words.collect::<Vec<_>>().join(" "));
            }
            (Some(_), None) => {}
        }
    }
    stacks
}

/// Reads lines of a process and its role.
fn roles(text: &str) -> BTreeMap<u32, String> {
    let role = |line: &str| {
        let (pid, role) = line.split_once(' ')?;
        Some((pid.parse().ok()?, role.to_owned()))
    };
    text.lines().filter_map(role).collect()
}

fn part(stack: &Stack) -> &'static str {
    let names = |word: &str| stack.functions.iter().any(|name| name.contains(word));
    let innermost = |word: &str| stack.functions.first().is_some_and(|name| name.contains(word));
    for (part, words) in &PARTS {
        // These work for all that is above them.
        let is_named = match *part {
            "store" | "protocol" => words.iter().any(|word| innermost(word)),
            "allocator" => {
                words.iter().any(|word| stack.functions.iter().any(|name| name.starts_with(word)))
            }
            _ => words.iter().any(|word| names(word)),
        };
        if is_named {
            return part;
        }
    }
    let of_crate = |name: &String| CRATES.iter().find(|(_, word)| name.contains(word));
    stack.functions.iter().find_map(of_crate).map_or("other", |(part, _)| part)
}

fn table(stacks: &[Stack], roles: &BTreeMap<u32, String>) -> String {
    let mut by_role: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for stack in stacks {
        let role = roles.get(&stack.pid).map_or("another", String::as_str);
        *by_role.entry(role).or_default().entry(part(stack)).or_default() += 1;
    }
    let whole = stacks.len().max(1) as f64;
    let mut text = String::new();
    for (role, parts) in by_role {
        let of_role: usize = parts.values().sum();
        if (of_role as f64) < whole * SHOWN {
            continue;
        }
        let _ = writeln!(
            text,
            "{role}: {:.0} % of the CPU time of all",
            of_role as f64 / whole * 100.0
        );
        let mut parts: Vec<_> = parts.into_iter().collect();
        parts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (part, count) in parts {
            let _ = writeln!(text, "  {part:<16} {:>5.1} %", count as f64 / of_role as f64 * 100.0);
        }
    }
    text
}

/// Functions that use the most themselves, by process.
fn functions(stacks: &[Stack], roles: &BTreeMap<u32, String>) -> String {
    const SHOWN_MAX: usize = 40;
    let mut counts: BTreeMap<(&str, &str, &str, &str), usize> = BTreeMap::new();
    for stack in stacks {
        let role = roles.get(&stack.pid).map_or("another", String::as_str);
        let name = stack.functions.first().map_or("", String::as_str);
        let ours =
            stack.functions.iter().find(|name| name.contains("quoin")).map_or("", String::as_str);
        *counts.entry((role, part(stack), name, ours)).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let whole = stacks.len().max(1) as f64;
    let mut text = String::new();
    for ((role, part, name, ours), count) in counts.into_iter().take(SHOWN_MAX) {
        let share = count as f64 / whole * 100.0;
        let _ = writeln!(text, "{share:>5.1} % {role:<8} {part:<12} {name} < {ours}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = "\
  41 \n\tffffffff81 ext4_file_write_iter\n\tffffffff82 vfs_writev\n\t55aa quoin_store::disk::file::Files::write\n\n\
  41 \n\t55ab _mi_page_malloc\n\t55ac quoin_wire::queue::ReceiveQueue::fill\n\n\
  41 \n\t55ad quoin_store::map::tree::update\n\t55ae quoin_store::background::checkpoint::step\n\n\
  42 \n\t55af core::slice::sort\n\t55b0 quoin_target::shard::Shard::reply\n\n";

    #[test]
    fn a_stack_counts_for_the_part_that_its_functions_name_and_for_its_process() {
        let stacks = stacks(RECORDED);
        let parts: Vec<_> = stacks.iter().map(part).collect();
        assert_eq!(parts, ["file writes", "allocator", "background", "target"]);
        let text = table(&stacks, &roles("41 pool\n42 target\n"));
        assert!(text.starts_with("pool: 75 % of the CPU time of all\n"), "{text}");
        assert!(text.contains("background        33.3 %"), "{text}");
        assert!(
            text.ends_with("target: 25 % of the CPU time of all\n  target           100.0 %\n"),
            "{text}"
        );
    }
}
