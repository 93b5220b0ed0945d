//! `quoin status`: one page about the cluster: its parts, the volumes that are not well, changes and drains
//! under way, the clocks and the versions.

use std::collections::BTreeMap;

use anyhow::Result;
use quoin_api::control::{
    ClusterInfo, GetClusterInfoRequest, ListNodesRequest, ListPoolsRequest, Node, Pool,
    RecordsStore, Volume,
};
use serde::Serialize;

use crate::client::{ClientOptions, refusal};
use crate::output::{self, Format};
use crate::volume;

pub const HELP: &str = "Ends with 0 where all is well, 3 where something is not.\n\nExamples:\n  \
    quoin status\n  quoin status -o json | jq '.volumes.notWell[].name'";

/// Exit code where something is not well.
const ILL: i32 = 3;
/// Most lines of one kind that people are shown.
const LINES_MAX: usize = 20;

/// Parts of one kind, and those of them that are not well.
#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
struct Parts {
    count: usize,
    well: usize,
    not_well: Vec<NotWell>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NotWell {
    name: String,
    state: String,
    reason: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StatusView {
    well: bool,
    cluster_id: String,
    term: u64,
    /// Why the records do not rule; empty: they do.
    recovery: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    records: Option<RecordsView>,
    pools: Parts,
    nodes: Parts,
    volumes: Parts,
    /// Changes of replicas and drains that are not done yet.
    under_way: Vec<String>,
    /// Devices on nodes that have the volume no more, or that are dead.
    left_over: Vec<String>,
    clocks: Vec<String>,
    /// Versions of the controller and of the nodes, and how many have each.
    versions: BTreeMap<String, usize>,
}

/// The store of the records.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RecordsView {
    store: String,
    place: String,
    /// Controller that rules by a lease; empty: it is the only one.
    leader: String,
    lease_ms: u64,
    lease_left_ms: u64,
    /// Of the last call that was answered.
    latency_us: u64,
    /// Time since the last answer.
    answered_ago_ms: u64,
    /// Why the last call failed; empty: it was answered.
    failing: String,
}

impl From<RecordsStore> for RecordsView {
    fn from(told: RecordsStore) -> Self {
        Self {
            store: told.engine,
            place: told.place,
            leader: told.leader,
            lease_ms: told.lease_ms,
            lease_left_ms: told.lease_left_ms,
            latency_us: told.latency_us,
            answered_ago_ms: told.answered_ms,
            failing: told.failing,
        }
    }
}

impl RecordsView {
    fn text(&self, term: u64) -> String {
        let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
        let Self { store, place, latency_us, answered_ago_ms, .. } = self;
        let latency = *latency_us as f64 / 1e3;
        let answered = seconds(*answered_ago_ms);
        let mut text =
            format!("records   {store} at {place}, {latency:.1} ms, answered {answered} ago\n");
        let mut lines = vec![match self.leader.as_str() {
            "" => format!("one controller alone, in term {term}"),
            leader => format!(
                "controller {leader} rules in term {term}; its lease of {} ends in {}",
                seconds(self.lease_ms),
                seconds(self.lease_left_ms)
            ),
        }];
        if !self.failing.is_empty() {
            lines.push(format!("not reached now: {}", self.failing));
        }
        text += &indented(&lines);
        text
    }
}

pub async fn run(client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let info = cluster.get_cluster_info(GetClusterInfoRequest {}).await.map_err(refusal)?;
    let pools = cluster.list_pools(ListPoolsRequest {}).await.map_err(refusal)?.into_inner().pools;
    let nodes = cluster.list_nodes(ListNodesRequest {}).await.map_err(refusal)?.into_inner().nodes;
    let volumes = volume::list(&mut cluster, false).await?;
    let view = StatusView::of(info.into_inner(), &pools, &nodes, &volumes);
    output::print_one(format, &view, || view.text())?;
    if !view.well {
        std::process::exit(ILL);
    }
    Ok(())
}

impl Parts {
    fn of(all: impl Iterator<Item = Option<NotWell>>) -> Self {
        let mut parts = Self::default();
        for one in all {
            parts.count += 1;
            match one {
                None => parts.well += 1,
                Some(ill) => parts.not_well.push(ill),
            }
        }
        parts
    }
}

fn of_pool(pool: &Pool) -> Option<NotWell> {
    let reason = [&pool.message, &pool.dying].into_iter().find(|why| !why.is_empty());
    let is_well = pool.state == "Online" && reason.is_none();
    (!is_well).then(|| NotWell {
        name: pool.name.clone(),
        state: pool.state.clone(),
        reason: reason.cloned().unwrap_or_default(),
    })
}

fn of_node(node: &Node) -> Option<NotWell> {
    let is_fenced = !node.fenced_by.is_empty();
    (node.state != "Online" || is_fenced).then(|| NotWell {
        name: node.name.clone(),
        state: node.state.clone(),
        reason: match is_fenced {
            true => format!("it is fenced by block {}, and has no volume", node.fenced_by),
            false => String::new(),
        },
    })
}

fn name_of(volume: &Volume) -> &str {
    volume.spec.as_ref().map_or(&volume.id, |spec| &spec.name)
}

fn of_volume(volume: &Volume) -> Option<NotWell> {
    let worst = volume.conditions.first();
    let is_well = worst.is_none() && matches!(volume.health.as_str(), "Online" | "Opening");
    (!is_well).then(|| NotWell {
        name: name_of(volume).to_owned(),
        state: volume.health.clone(),
        reason: match worst {
            Some(condition) => format!("{}: {}", condition.reason, condition.message),
            None if volume.not_judged.is_empty() => volume.waiting_for.clone(),
            None => volume.not_judged.clone(),
        },
    })
}

fn under_way(pools: &[Pool], nodes: &[Node], volumes: &[Volume]) -> Vec<String> {
    let is_draining = |cordon: &str| cordon == "draining";
    let mut all = Vec::new();
    for volume in volumes.iter().filter(|volume| !volume.changing.is_empty()) {
        all.push(format!("volume {}: {}", name_of(volume), volume.changing));
    }
    for pool in pools.iter().filter(|pool| is_draining(&pool.cordon)) {
        all.push(format!("pool {} is being drained, {} replicas left", pool.name, pool.replicas));
    }
    for node in nodes.iter().filter(|node| is_draining(&node.cordon)) {
        all.push(format!("node {} is being drained", node.name));
    }
    all
}

fn left_over(volumes: &[Volume]) -> Vec<String> {
    let mut all = Vec::new();
    for volume in volumes {
        for device in &volume.devices {
            let is_here = volume.attachments.iter().any(|on| on.node == device.node);
            let why = match (device.dead.as_str(), is_here) {
                ("", true) => continue,
                ("", false) => "it is not attached there any more",
                (dead, _) => dead,
            };
            all.push(format!(
                "{} of volume {} on node {}: {why}",
                device.device,
                name_of(volume),
                device.node
            ));
        }
    }
    all
}

impl StatusView {
    fn of(info: ClusterInfo, pools: &[Pool], nodes: &[Node], volumes: &[Volume]) -> Self {
        let mut versions = BTreeMap::from([(info.version, 1)]);
        for node in nodes.iter().filter(|node| !node.version.is_empty()) {
            *versions.entry(node.version.clone()).or_default() += 1;
        }
        let mut view = Self {
            well: false,
            cluster_id: info.cluster_id,
            term: info.term,
            recovery: info.recovery,
            records: info.records.map(RecordsView::from),
            pools: Parts::of(pools.iter().map(of_pool)),
            nodes: Parts::of(nodes.iter().map(of_node)),
            volumes: Parts::of(volumes.iter().map(of_volume)),
            under_way: under_way(pools, nodes, volumes),
            left_over: left_over(volumes),
            clocks: info.clocks.into_iter().map(|clock| clock.message).collect(),
            versions,
        };
        let parts = [&view.pools, &view.nodes, &view.volumes];
        view.well = parts.iter().all(|parts| parts.not_well.is_empty())
            && view.recovery.is_empty()
            && view.records.as_ref().is_none_or(|records| records.failing.is_empty())
            && view.clocks.is_empty()
            && view.left_over.is_empty();
        view
    }

    fn text(&self) -> String {
        let verdict = if self.well { "all is well" } else { "something is not well" };
        let mut text = format!("cluster {}: {verdict}\n", self.cluster_id);
        if !self.recovery.is_empty() {
            text += &format!("records do not rule, for {}\n", self.recovery);
        }
        if let Some(records) = &self.records {
            text += &records.text(self.term);
        }
        for (kind, parts) in
            [("pools", &self.pools), ("nodes", &self.nodes), ("volumes", &self.volumes)]
        {
            text += &format!("{kind:<9} {} of {} are well\n", parts.well, parts.count);
            let lines: Vec<_> = parts.not_well.iter().map(NotWell::text).collect();
            text += &indented(&lines);
        }
        for (title, lines) in [
            ("under way", &self.under_way),
            ("left over", &self.left_over),
            ("clocks", &self.clocks),
        ] {
            if !lines.is_empty() {
                text += &format!("{title}\n{}", indented(lines));
            }
        }
        let versions: Vec<_> =
            self.versions.iter().map(|(version, count)| format!("{version} ({count})")).collect();
        text + &format!("versions  {}\n", versions.join(", "))
    }
}

impl NotWell {
    fn text(&self) -> String {
        let Self { name, state, reason } = self;
        match reason.as_str() {
            "" => format!("{name}: {state}"),
            reason => format!("{name}: {state}; {reason}"),
        }
    }
}

/// At most so many lines as a person reads, and how many more there are.
fn indented(lines: &[String]) -> String {
    let shown = lines.iter().take(LINES_MAX);
    let mut text: String = shown.map(|line| format!("  {}\n", output::plain(line))).collect();
    if lines.len() > LINES_MAX {
        text += &format!("  and {} more\n", lines.len() - LINES_MAX);
    }
    text
}

#[cfg(test)]
mod tests {
    use quoin_api::control::{Attachment, ClockDiffers, VolumeDevice, VolumeSpec};

    use super::*;

    fn volume(name: &str, health: &str) -> Volume {
        let spec = Some(VolumeSpec { name: name.into(), ..VolumeSpec::default() });
        Volume { spec, health: health.into(), ..Volume::default() }
    }

    fn node(version: &str) -> Node {
        let (name, state) = ("h1".into(), "Online".into());
        Node { name, state, version: version.into(), ..Node::default() }
    }

    fn pool(state: &str) -> Pool {
        Pool { name: "a".into(), state: state.into(), ..Pool::default() }
    }

    fn info() -> ClusterInfo {
        ClusterInfo { version: "0.1.0".into(), ..ClusterInfo::default() }
    }

    #[test]
    fn a_cluster_in_which_all_is_well_has_a_line_for_each_kind_of_part() {
        let nodes = [node("0.1.0")];
        let view = StatusView::of(info(), &[pool("Online")], &nodes, &[volume("db", "Online")]);
        assert!(view.well);
        let text = view.text();
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(text.contains("pools     1 of 1 are well"), "{text}");
        assert!(text.ends_with("versions  0.1.0 (2)\n"), "{text}");
    }

    #[test]
    fn the_store_of_the_records_is_told_with_who_rules_and_what_fails() {
        let mut store = RecordsStore {
            engine: "etcd".into(),
            place: "http://etcd-1:2379".into(),
            leader: "host-1".into(),
            lease_ms: 15_000,
            lease_left_ms: 12_340,
            latency_us: 3_140,
            answered_ms: 210,
            failing: String::new(),
        };
        let told = |store: &RecordsStore| {
            let info = ClusterInfo { records: Some(store.clone()), term: 4, ..info() };
            let view = StatusView::of(info, &[], &[], &[]);
            (view.well, view.text())
        };
        let (is_well, text) = told(&store);
        for part in [
            "records   etcd at http://etcd-1:2379, 3.1 ms, answered 0.2 s ago",
            "controller host-1 rules in term 4; its lease of 15.0 s ends in 12.3 s",
        ] {
            assert!(is_well && text.contains(part), "{part}: {text}");
        }
        store.failing = "the records cannot be reached: no answer in 2 s".into();
        let (is_well, text) = told(&store);
        assert!(!is_well && text.contains("not reached now: the records"), "{text}");
        let alone = RecordsStore { engine: "embedded".into(), ..RecordsStore::default() };
        assert!(told(&alone).1.contains("one controller alone, in term 4"));
    }

    #[test]
    fn whatever_is_not_well_is_named_with_its_reason() {
        let mut ill = volume("db", "Faulted");
        ill.waiting_for = "2 of 3 replicas".into();
        ill.changing = "a replica moves from a to b".into();
        ill.devices.push(VolumeDevice {
            node: "h2".into(),
            device: "/dev/loop3".into(),
            ..VolumeDevice::default()
        });
        ill.attachments.push(Attachment { node: "h1".into(), ..Attachment::default() });
        let clocks =
            vec![ClockDiffers { message: "pool a is 40 s ahead".into(), ..Default::default() }];
        let info = ClusterInfo { clocks, ..info() };
        let nodes = [node("0.0.9"), node("")];
        let view = StatusView::of(info, &[pool("Offline")], &nodes, &[ill]);
        assert!(!view.well);
        let text = view.text();
        for part in [
            "a: Offline",
            "db: Faulted; 2 of 3 replicas",
            "volume db: a replica moves",
            "/dev/loop3 of volume db on node h2: it is not attached there",
            "pool a is 40 s ahead",
            "versions  0.0.9 (1), 0.1.0 (1)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_long_list_is_cut_for_people_and_says_how_long_it_is() {
        let all: Vec<_> = (0..50).map(|n| volume(&format!("v{n}"), "Degraded")).collect();
        let view = StatusView::of(info(), &[], &[], &all);
        let text = view.text();
        assert!(text.contains("v19:") && !text.contains("v20:") && text.contains("and 30 more"));
        assert_eq!(view.volumes.not_well.len(), 50, "programs get all of them");
    }
}
