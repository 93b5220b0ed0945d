//! Block devices that cannot be made because the attach process of an earlier `quoin dev` is in the
//! way. The start and events report it, and it is polled until it is over.

use std::path::Path;
use std::time::{Duration, Instant};

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{AgentEvent, ListNodesRequest, NodeReport};
use quoin_attach::AttachClient;

use super::keeper::Keeper;
use super::layout::Layout;
use super::{last_line, print_line};
use crate::client;
use crate::host::attacher::Attacher;
use crate::host::loop_devices::Device;

/// A running attach process answers well within this, except while it attaches a volume.
const ANSWER_BUDGET: Duration = Duration::from_secs(2);
/// An attach process that gives no answer for this long after all else is up is reported as in the
/// way.
const READY_BUDGET: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Interval between two checks whether it is over.
const AGAIN_EVERY: Duration = Duration::from_secs(2);

/// Reason why block devices cannot be made.
pub struct Blocked {
    /// In words, with the way out.
    pub why: String,
    /// Volumes of which it holds devices, each with what it holds.
    volumes: Vec<(String, String)>,
}

async fn answers(layout: &Layout) -> bool {
    let client = AttachClient::new(layout.attach_socket());
    let reply = tokio::time::timeout(ANSWER_BUDGET, client.list()).await;
    reply.is_ok_and(|answer| answer.is_ok())
}

/// Waits until block devices can be made; else what hinders it.
pub async fn wait(layout: &Layout, attach: &Keeper) -> Option<Blocked> {
    let began = Instant::now();
    loop {
        if answers(layout).await {
            return None;
        }
        let attacher = Attacher::of(&layout.run());
        let is_hopeless = attacher.is_some_and(|attacher| attacher.is_stuck())
            || attach.cannot_start()
            || attach.has_ended();
        if is_hopeless || began.elapsed() > READY_BUDGET {
            return Some(Blocked::of(layout, attacher));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

impl Blocked {
    fn of(layout: &Layout, attacher: Option<Attacher>) -> Self {
        let why = match attacher {
            Some(attacher) => format!("{attacher}: {}", attacher.way_out()),
            None => {
                let log = layout.log("attach");
                format!("attach does not answer: {}; its log is {}", last_line(&log), log.display())
            }
        };
        let held = |device: &Device| {
            let mounts = device.mounts().unwrap_or_default();
            let on = mounts.iter().map(|mount| format!(", mounted at {}", mount.target.display()));
            format!("{}{}", device.path.display(), on.collect::<String>())
        };
        let devices = Device::over(&layout.run()).unwrap_or_default();
        let volumes = devices.iter().map(|device| (device.volume.clone(), held(device))).collect();
        Self { why, volumes }
    }

    /// Each volume that is in the way, by its name where the controller reports it.
    pub async fn shown(&self, admin_socket: &Path) -> String {
        let mut shown = Vec::new();
        for (id, held) in &self.volumes {
            let name = name_of(admin_socket, id).await;
            shown.push(format!("volume {} is {held}", name.as_deref().unwrap_or(id)));
        }
        shown.join("; ")
    }

    /// Reports it as events: one for each volume that is held, or one for the node where none is.
    pub async fn report(&self, admin_socket: &Path, node: &str) {
        let event = |volume: &str, held: &str| AgentEvent {
            severity: "Warning".into(),
            volume_id: volume.into(),
            replica_id: String::new(),
            reason: "CannotAttach".into(),
            message: match held {
                "" => format!("block devices cannot be made: {}", self.why),
                held => format!("{held}: IO waits, and nothing is attached: {}", self.why),
            },
        };
        let mut events: Vec<_> = self.volumes.iter().map(|(id, held)| event(id, held)).collect();
        if events.is_empty() {
            events.push(event("", ""));
        }
        if report_events(admin_socket, node, events).await.is_none() {
            print_line("the controller cannot be notified; this is the only report");
        }
    }

    /// Returns once block devices can be made.
    pub async fn over(&self, layout: &Layout) {
        while !answers(layout).await {
            tokio::time::sleep(AGAIN_EVERY).await;
        }
    }
}

async fn name_of(admin_socket: &Path, id: &str) -> Option<String> {
    let mut cluster = client::connect(admin_socket).await.ok()?;
    client::get_volume(&mut cluster, id).await.ok()?.spec.map(|spec| spec.name)
}

/// Reports events in the node's name; the node's other properties stay as they are.
async fn report_events(admin_socket: &Path, name: &str, events: Vec<AgentEvent>) -> Option<()> {
    let mut cluster = client::connect(admin_socket).await.ok()?;
    let nodes = cluster.list_nodes(ListNodesRequest {}).await.ok()?.into_inner().nodes;
    let node = nodes.into_iter().find(|node| node.name == name)?;
    let report = NodeReport {
        node: node.name,
        address: node.address,
        topology: node.topology,
        volumes_max: node.volumes_max,
        version: node.version,
        leaving: false,
        events,
        ..NodeReport::default()
    };
    let mut agent = AgentClient::new(quoin_identity::unix_channel(admin_socket));
    agent.report_node(report).await.ok().map(drop)
}
