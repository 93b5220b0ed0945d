//! Limits that processes request of the system at their start.

use crate::common;

use common::{Cluster, Place, eventually};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns soft and hard limit of open files, as the kernel shows them.
fn open_files(pid: u32) -> Option<(String, String)> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let mut words = line.split_whitespace().map(String::from);
    Some((words.next()?, words.next()?))
}

/// Systems start processes with a soft limit of 1024, which is some 200 volumes for a target.
#[test]
fn every_role_raises_its_limit_of_open_files_to_the_hard_limit() {
    // Children of this process inherit it.
    let inherited = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, inherited).unwrap();
    let mut cluster = Cluster::start("limits", &Place::here(), &[]);
    cluster.pool(&Place::here(), "p1", &[]);
    cluster.node(&Place::here(), "n1", &[], &[]);
    cluster.wait_for_pools(1);
    let (run, holder) = (cluster.path("run"), "holder");
    let arguments = ["attach-holder", "--run", &run].map(String::from);
    std::fs::create_dir_all(cluster.path("run/attach")).unwrap();
    cluster.run(&Place::here(), holder, arguments.into());
    for name in ["controller", "p1", "target", "node", holder] {
        let pid = cluster.process(name).pid();
        eventually(&format!("{name} has raised its limit"), || {
            let (soft, hard) = open_files(pid)?;
            (soft == hard && soft != "256").then_some(())
        });
    }
}
