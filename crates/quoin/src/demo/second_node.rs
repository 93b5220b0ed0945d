//! Second node of the demo: a target, a CSI service and, for mounts, an attach process, on the same
//! host as the first one and in directories of their own.
//!
//! However it ends, its mounts, devices and processes are gone afterwards.

use anyhow::{Context, Result, bail};
use quoin_api::control::ListNodesRequest;
use quoin_attach::AttachClient;
use quoin_identity::Role;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::cluster::DevCluster;
use super::csi::Orchestrator;
use super::{interrupt, print_error};
use crate::client;
use crate::dev::keeper::Process;
use crate::dev::layout::Layout;
use crate::dev::members;
use crate::dev::processes::{self, Attaching};
use crate::dev::settings::Settings;

pub const NAME: &str = "second";
/// Directory of its own below the demo's.
const DIRECTORY: &str = "second";
const START_BUDGET: Duration = Duration::from_secs(60);
/// A process that does not end within this is killed.
const STOP_BUDGET: Duration = Duration::from_secs(10);

pub struct SecondNode {
    pub orchestrator: Orchestrator,
    layout: Layout,
    mounted: bool,
    /// Target and attach process, in the order of their start.
    below: Vec<Child>,
    node: Option<Child>,
}

impl SecondNode {
    /// Has a node join the cluster, and starts its processes.
    pub fn start(
        cluster: &DevCluster,
        admin: &Orchestrator,
        directory: &Path,
        mounted: bool,
    ) -> Result<Self> {
        let settings = cluster.layout.settings();
        let settings = std::fs::read(&settings).with_context(|| settings.display().to_string())?;
        let mut settings: Settings = serde_json::from_slice(&settings)?;
        let any_port = (Ipv4Addr::LOCALHOST, 0).into();
        settings.target_http = any_port;
        settings.node_http = any_port;
        settings.attach_http = any_port;
        let layout = Layout::open(&directory.join(DIRECTORY))?;
        admin.ask(async {
            let mut cluster = client::connect(&cluster.layout.admin_socket()).await?;
            members::join(&mut cluster, &settings, Role::Node, NAME, &layout.node()).await
        })?;
        let places = directory.join("on-second");
        let orchestrator = Orchestrator::new(&layout.csi_socket(), &places, layout.nbd())?;
        let mut this = Self { orchestrator, layout, mounted, below: Vec::new(), node: None };
        this.below.push(this.spawn(&processes::target(&this.layout, &settings))?);
        let attaching = match mounted {
            true => Attaching::Yes,
            false => Attaching::No { reason: String::new() },
        };
        if mounted {
            this.below.push(this.spawn(&processes::attach(&this.layout, &settings))?);
        }
        let edition = quoin_csi::Edition::default();
        let node = processes::node(&this.layout, &settings, &attaching, edition);
        this.node = Some(this.spawn(&node)?);
        // A node that the controller has not heard of gets no volume.
        let began = Instant::now();
        while !is_online(cluster, admin)? {
            interrupt::check()?;
            if began.elapsed() > START_BUDGET {
                bail!("the second node is not online after {} s", START_BUDGET.as_secs());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(this)
    }

    fn spawn(&self, process: &Process) -> Result<Child> {
        let path = self.layout.log(&process.name);
        let log = std::fs::File::create(&path).with_context(|| path.display().to_string())?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&process.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Ctrl-C is for the demo, which ends them in order.
        let child = command.process_group(0).spawn();
        child.with_context(|| format!("start the second {}", process.name))
    }

    /// Removes what an early end left behind: after an orderly one there is no mount and no device.
    fn release(&self) -> Result<()> {
        for place in [self.orchestrator.mount(), self.orchestrator.staging()] {
            // Where nothing is mounted there is nothing to do.
            let _ = unmount(place, UnmountFlags::DETACH);
        }
        let attach = AttachClient::new(self.layout.attach_socket());
        self.orchestrator.ask(async {
            // A process that does not listen yet has attached nothing.
            let Ok(all) = attach.list().await else { return Ok(()) };
            for attached in all {
                attach.detach(&attached.volume).await?;
            }
            Ok(())
        })
    }
}

impl Drop for SecondNode {
    fn drop(&mut self) {
        // A call that is under way may still mount: the node ends first.
        if let Some(node) = self.node.take() {
            end(node);
            if self.mounted
                && let Err(error) = self.release()
            {
                print_error(&format!("releasing the devices of the second node: {error:#}"));
            }
        }
        self.below.drain(..).rev().for_each(end);
    }
}

/// Returns true if the controller hears of the second node.
fn is_online(cluster: &DevCluster, admin: &Orchestrator) -> Result<bool> {
    let nodes = admin.ask(async {
        let mut cluster = client::connect(&cluster.layout.admin_socket()).await?;
        let listed = cluster.list_nodes(ListNodesRequest {}).await;
        Ok(listed.map_err(client::refusal)?.into_inner().nodes)
    })?;
    Ok(nodes.iter().any(|node| node.name == NAME && node.state == "Online"))
}

/// Ends a process by SIGTERM, and by a kill where it takes too long.
fn end(mut process: Child) {
    // The signal fails only if the process has ended already.
    let _ = kill_process(Pid::from_child(&process), Signal::TERM);
    let began = Instant::now();
    while matches!(process.try_wait(), Ok(None)) && began.elapsed() < STOP_BUDGET {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = process.kill();
    let _ = process.wait();
}
