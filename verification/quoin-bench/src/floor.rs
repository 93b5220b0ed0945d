//! Starts the floor's processes and ends them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::{Class, Error};

pub struct Floor {
    children: Vec<Child>,
    pub socket: PathBuf,
}

impl Floor {
    pub fn start(quoin: &Path, dir: &Path, class: Class, size_bytes: u64) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("create {}", dir.display())))?;
        let mut floor = Self { children: Vec::new(), socket: dir.join("floor.sock") };
        let size = size_bytes.to_string();
        let mut ready = Vec::new();
        for i in 0..3 {
            let mut command = Command::new(quoin);
            command.args(["bench-part", "sink", "--size-bytes"]).arg(&size);
            command.arg("--file").arg(dir.join(format!("sink-{i}")));
            if class == Class::Media {
                command.arg("--sync");
            }
            ready.push(floor.spawn(command)?);
        }
        // The sinks fill their files at the same time.
        let addresses = ready.into_iter().map(wait_for_line).collect::<Result<Vec<_>, _>>()?;
        let mut command = Command::new(quoin);
        command
            .args(["bench-part", "relay", "--size-bytes", &size, "--sinks", &addresses.join(",")])
            .arg("--listen")
            .arg(&floor.socket);
        wait_for_line(floor.spawn(command)?)?;
        Ok(floor)
    }

    fn spawn(&mut self, mut command: Command) -> Result<ChildStdout, Error> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(Error::io("start a process of the floor"))?;
        let output = child.stdout.take();
        self.children.push(child);
        output.ok_or_else(|| Error::Failed("a process of the floor has no output".into()))
    }

    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Both fail only if it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the line that a process of the floor prints once it accepts connections: its address.
fn wait_for_line(output: ChildStdout) -> Result<String, Error> {
    let mut line = String::new();
    let read = BufReader::new(output).read_line(&mut line);
    read.map_err(Error::io("wait for a process of the floor"))?;
    match line.trim() {
        "" => Err(Error::Failed("a process of the floor ended before it was ready".into())),
        line => Ok(line.to_owned()),
    }
}
