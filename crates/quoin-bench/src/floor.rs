//! Starts the floor's processes and ends them.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
        let mut addresses = Vec::new();
        for i in 0..3 {
            let address = free_port()?;
            let mut command = Command::new(quoin);
            command
                .args(["bench-part", "sink", "--listen", &address.to_string(), "--size-bytes"])
                .arg(&size)
                .arg("--file")
                .arg(dir.join(format!("sink-{i}")));
            if class == Class::Media {
                command.arg("--sync");
            }
            floor.spawn(command)?;
            addresses.push(address.to_string());
        }
        // The sinks listen once their files are filled; the relay is started when all do.
        let mut command = Command::new(quoin);
        command
            .args(["bench-part", "relay", "--size-bytes", &size, "--sinks", &addresses.join(",")])
            .arg("--socket")
            .arg(&floor.socket);
        for address in &addresses {
            wait_for_listener(address)?;
        }
        floor.spawn(command)?;
        let end = Instant::now() + Duration::from_secs(20);
        while !floor.socket.exists() {
            if Instant::now() > end {
                return Err(Error::Failed("the floor's relay did not come up".into()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(floor)
    }

    fn spawn(&mut self, mut command: Command) -> Result<(), Error> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        self.children.push(command.spawn().map_err(Error::io("start a process of the floor"))?);
        Ok(())
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

fn free_port() -> Result<SocketAddr, Error> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::io("find a free port"))?;
    listener.local_addr().map_err(Error::io("find a free port"))
}

/// Looks for the listener in /proc, since a connection would be taken for the relay's.
fn wait_for_listener(address: &str) -> Result<(), Error> {
    let port = address.rsplit(':').next().and_then(|p| p.parse::<u16>().ok()).unwrap_or(0);
    let wanted = format!("0100007F:{port:04X} 00000000:0000 0A");
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let table = std::fs::read_to_string("/proc/net/tcp").map_err(Error::io("/proc/net/tcp"))?;
        if table.contains(&wanted) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(Error::Failed("a sink of the floor did not come up".into()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
