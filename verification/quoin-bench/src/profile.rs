//! Where the CPU time of Quoin's processes goes during a case, recorded by perf beside one more run.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::compare::Side;
use crate::load::Load;
use crate::{Error, usage};

/// Stacks a second and thread: no divisor of what runs at round intervals.
const PER_SECOND: &str = "1999";
/// Time in which perf opens its events.
const BEGIN: Duration = Duration::from_millis(500);

/// Records a run to `file`, and which process is what beside it.
pub fn record(side: &mut Side<'_>, load: Load, file: &Path) -> Result<(), Error> {
    let mut processes = String::new();
    for pid in &side.pids {
        if let Some(role) = usage::role(*pid) {
            let _ = writeln!(processes, "{pid} {role}");
        }
    }
    let beside = file.with_extension("processes");
    std::fs::write(&beside, processes).map_err(Error::io(format!("write {}", beside.display())))?;
    let pids: Vec<String> = side.pids.iter().map(u32::to_string).collect();
    let mut perf = Command::new("perf")
        .args(["record", "--quiet", "--event", "cpu-clock", "--call-graph", "fp"])
        .args(["--freq", PER_SECOND, "--pid", &pids.join(","), "--output"])
        .arg(file)
        .stdout(Stdio::null())
        .spawn()
        .map_err(Error::io("start perf"))?;
    std::thread::sleep(BEGIN);
    let ran = side.generator.run(load);
    if let Some(pid) = i32::try_from(perf.id()).ok().and_then(rustix::process::Pid::from_raw) {
        // The signal ends the recording, and fails only if it has ended already.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
    }
    perf.wait().map_err(Error::io("wait for perf"))?;
    ran.map(drop)
}
