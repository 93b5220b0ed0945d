//! A cluster of real processes with real certificates, each in its place: on this host's loopback,
//! or in a network namespace of its own.

#![allow(dead_code, unused_imports)] // Each test binary uses its part.

mod base;
pub mod dev;
pub mod nbd;
pub mod network;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

pub use base::*;

/// Place of a process, and its address for others.
#[derive(Clone, Debug)]
pub struct Place {
    /// Name of the network namespace; `None`: this one.
    pub namespace: Option<String>,
    pub address: String,
}

impl Place {
    pub fn here() -> Self {
        Self { namespace: None, address: "127.0.0.1".into() }
    }

    pub fn command(&self, program: &str) -> Command {
        match &self.namespace {
            None => Command::new(program),
            Some(namespace) => {
                // `ip netns exec` is not used: it copies the mount table too, and keeps the mounts
                // of other tests busy that run at the same time.
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/run/netns/{namespace}")).arg(program);
                command
            }
        }
    }
}

/// One process of the cluster; killed with its test.
pub struct Process {
    pub name: String,
    child: Child,
}

impl Process {
    pub fn start(scratch: &Path, place: &Place, name: &str, arguments: &[String]) -> Self {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(scratch.join(format!("{name}.log")))
            .unwrap();
        let mut command = place.command(env!("CARGO_BIN_EXE_quoin"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // SAFETY: `prctl` with these arguments is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                // A test that is killed takes its processes along.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        Self { name: name.into(), child: command.spawn().unwrap() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the exit status if it has ended.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Sends SIGTERM, and checks a clean end.
    pub fn stop(mut self) {
        signal(self.pid(), "TERM");
        let status = eventually("a clean end", || self.child.try_wait().unwrap());
        assert!(status.success(), "{} ended with {status}", self.name);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The controller of a cluster and the directory of all its files.
pub struct Cluster {
    pub scratch: Scratch,
    pub controller: String,
    pub processes: Vec<Process>,
    user: User,
}

impl Cluster {
    /// Makes the cluster and starts its controller at `place`.
    pub fn start(name: &str, place: &Place, flags: &[&str]) -> Self {
        Self::made_with(name, place, &[], flags)
    }

    /// Makes the cluster as [`Self::start`] does, with flags of its own for `init`.
    pub fn made_with(name: &str, place: &Place, init_flags: &[&str], flags: &[&str]) -> Self {
        let scratch = Scratch::new(name);
        let port = if place.namespace.is_some() { 7400 } else { free_port() };
        let controller = format!("{}:{port}", place.address);
        let admin_socket = scratch.0.join("run/admin.sock");
        let user = User { admin_socket, logs: scratch.0.clone() };
        let mut cluster = Self { scratch, controller, processes: Vec::new(), user };
        let state = cluster.path("controller");
        cluster.ok(&[&["controller", "init", "--state", &state], init_flags].concat());
        let mut arguments = vec![
            "controller".into(),
            "run".into(),
            "--state".into(),
            state,
            "--admin-socket".into(),
            cluster.path("run/admin.sock"),
            "--listen".into(),
            cluster.controller.clone(),
        ];
        arguments.extend(flags.iter().map(ToString::to_string));
        cluster.run(place, "controller", arguments);
        eventually("the controller answers", || {
            cluster.quoin(&["cluster", "info"]).status.success().then_some(())
        });
        cluster
    }

    pub fn path(&self, name: &str) -> String {
        self.scratch.0.join(name).to_str().unwrap().into()
    }

    pub fn run(&mut self, place: &Place, name: &str, arguments: Vec<String>) {
        let process = Process::start(&self.scratch.0, place, name, &arguments);
        self.processes.push(process);
    }

    pub fn token(&self, role: &str) -> String {
        self.ok(&["token", "create", "--role", role])
    }

    /// Starts a pool that joins with a token of its own.
    pub fn pool(&mut self, place: &Place, name: &str, flags: &[&str]) {
        self.pool_by(place, name, &self.token("pool"), flags);
    }

    /// Starts a pool that joins with an existing token.
    pub fn pool_by(&mut self, place: &Place, name: &str, token: &str, flags: &[&str]) {
        let mut arguments: Vec<String> =
            ["pool", "run", "--name", name, "--node", name].into_iter().map(String::from).collect();
        arguments.extend(["--join".into(), token.into()]);
        arguments.extend(["--state".into(), self.path(name)]);
        arguments.extend(["--data".into(), self.path(&format!("{name}-data"))]);
        arguments.extend(["--capacity".into(), "1GiB".into()]);
        if !flags.contains(&"--listen") {
            arguments.extend(["--listen".into(), format!("{}:0", place.address)]);
        }
        arguments.extend(["--controller".into(), self.controller.clone()]);
        arguments.extend(flags.iter().map(ToString::to_string));
        self.run(place, name, arguments);
    }

    /// Starts a node: its identity, its target and, for its reports, its CSI process.
    pub fn node(&mut self, place: &Place, name: &str, target_flags: &[&str], node_flags: &[&str]) {
        let (state, run) = (self.path("node"), self.path("run"));
        let member = |token: Option<String>| {
            let mut arguments: Vec<String> = vec!["--state".into(), state.clone()];
            arguments.extend(["--run".into(), run.clone(), "--name".into(), name.into()]);
            arguments.extend(["--controller".into(), self.controller.clone()]);
            arguments.extend(token.into_iter().flat_map(|token| ["--join".into(), token]));
            arguments
        };
        let mut target = vec!["target".to_string()];
        target.extend(member(Some(self.token("node"))));
        target.extend(target_flags.iter().map(ToString::to_string));
        let mut node = vec!["node".to_string(), "run".into()];
        node.extend(member(None));
        node.extend(["--mode".into(), "controller".into(), "--csi-endpoint".into()]);
        node.push(format!("unix://{}", self.path("csi.sock")));
        node.extend(node_flags.iter().map(ToString::to_string));
        self.run(place, "target", target);
        let identity = self.scratch.0.join("node/cert.pem");
        self.eventually("the target joins", || identity.exists().then_some(()));
        self.run(place, "node", node);
        eventually("the node is online", || {
            let nodes = self.json(&["node", "list"]);
            (nodes.as_array()?.iter().any(|node| node["state"] == "Online")).then_some(())
        });
    }

    /// Returns a process by name.
    pub fn process(&mut self, name: &str) -> &mut Process {
        self.processes.iter_mut().find(|process| process.name == name).unwrap()
    }

    pub fn wait_for_pools(&self, count: usize) {
        eventually("the pools are online", || {
            let pools = self.json(&["pool", "list"]);
            let online = pools.as_array()?.iter().filter(|pool| pool["state"] == "Online").count();
            (online == count).then_some(())
        });
    }
}

impl std::ops::Deref for Cluster {
    type Target = User;

    fn deref(&self) -> &User {
        &self.user
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
        // The processes end before the directory is removed.
        self.processes.clear();
    }
}
