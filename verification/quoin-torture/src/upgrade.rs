//! Two versions of Quoin in one cluster: each process replaced by itself, under checked clients, in
//! the documented order, back, and in a mistaken order; or forward only.
//!
//! At every mixture a volume is made, used and deleted by commands of either version; in the middle
//! a replica is made anew, so that a rebuild runs from one version to the other.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::client::Clients;
use crate::cluster::{Cluster, POOLS};
use crate::files::Files;
use crate::{FLOW_BUDGET, HEAL_BUDGET, INTERRUPTED, heal};

/// The order of docs/operating.md.
const FORWARD: [&str; 7] =
    ["controller", "pool-a", "pool-b", "pool-c", "target", "attach", "agent"];
/// A mistaken order.
const NODE_FIRST: [&str; 7] =
    ["agent", "target", "attach", "pool-c", "controller", "pool-b", "pool-a"];

struct Version<'a> {
    name: &'a str,
    quoin: &'a Path,
}

pub fn run(
    cluster: &mut Cluster,
    clients: &Clients,
    files: &mut [Files],
    older: &Path,
    newer: &Path,
    forward_only: bool,
) -> Result<()> {
    let older = Version { name: "older", quoin: older };
    let newer = Version { name: "newer", quoin: newer };
    let began = Instant::now();
    let mut back = FORWARD;
    back.reverse();
    let mut roll = |cluster: &mut Cluster, order: &[&'static str], from, to: &Version<'_>| {
        println!("from the {} to the {}: {}", Version::name(from), to.name, order.join(", "));
        for (step, name) in
            order.iter().enumerate().filter(|(_, name)| cluster.has(name)).collect::<Vec<_>>()
        {
            if INTERRUPTED.load(std::sync::atomic::Ordering::SeqCst) {
                return Ok(());
            }
            files.iter_mut().try_for_each(Files::tend)?;
            let at = Instant::now();
            cluster.replace(name, to.quoin)?;
            let mixed = mixture(cluster, clients, from, to, step)
                .with_context(|| format!("{name} is the {} one", to.name))?;
            println!(
                "[{:>6.1} s] {name}: whole after {:.1} s{mixed}; {} IOs checked",
                began.elapsed().as_secs_f64(),
                at.elapsed().as_secs_f64(),
                clients.checked(),
            );
        }
        files.iter_mut().try_for_each(Files::check)
    };
    roll(cluster, &FORWARD, &older, &newer)?;
    if forward_only {
        return Ok(());
    }
    roll(cluster, &back, &newer, &older)?;
    roll(cluster, &NODE_FIRST, &older, &newer)
}

impl Version<'_> {
    fn name(&self) -> &str {
        self.name
    }
}

/// Checks the functions that must work while processes of both versions run.
fn mixture(
    cluster: &mut Cluster,
    clients: &Clients,
    from: &Version<'_>,
    to: &Version<'_>,
    step: usize,
) -> Result<&'static str> {
    clients.flows(FLOW_BUDGET)?;
    for version in [from, to] {
        version.quoin.clone_into(&mut cluster.quoin);
        make_and_delete(cluster)
            .with_context(|| format!("with the {} one's commands", version.name))?;
    }
    heal(cluster, std::slice::from_ref(clients))?;
    // Pools, target and controller of both versions are running.
    if step != 3 {
        return Ok("");
    }
    make_a_replica_anew(cluster)?;
    heal(cluster, std::slice::from_ref(clients))?;
    clients.flows(FLOW_BUDGET)?;
    Ok(", a replica made anew")
}

fn make_and_delete(cluster: &mut Cluster) -> Result<()> {
    const NAME: &str = "passing";
    // The controller, or a pool that makes a replica, may still be starting.
    cluster.wait("a volume made", |c| match c.command(&["volume", "get", NAME]) {
        Ok(_) => Ok(true),
        Err(_) => c
            .command(&["volume", "create", NAME, "--size", "16MiB", "--replicas", "3"])
            .map(|_| true),
    })?;
    cluster.wait("it is deleted", |c| match c.command(&["volume", "delete", NAME, "--yes"]) {
        Ok(_) => Ok(true),
        Err(error) if c.command(&["volume", "list"]).is_ok_and(|all| !all.contains(NAME)) => {
            drop(error);
            Ok(true)
        }
        Err(error) => Err(error),
    })
}

/// Removes one replica and makes another instead: two changes of membership and a rebuild.
fn make_a_replica_anew(cluster: &mut Cluster) -> Result<()> {
    cluster.command(&["replica", "remove", "raw", POOLS[1], "--wait"])?;
    let listed = |c: &Cluster| -> Result<usize> {
        let replicas = c.json(&["replica", "list"])?;
        let all = replicas.as_array().context("a list of replicas")?;
        Ok(all.iter().filter(|r| r["volume"] == "raw").count())
    };
    cluster.wait_for("a replica less", HEAL_BUDGET, |c| Ok(listed(c)? == 2))?;
    cluster.command(&["volume", "scale", "raw", "--replicas", "3", "--wait"])?;
    cluster.wait_for("a replica made anew", HEAL_BUDGET, |c| Ok(listed(c)? == 3))
}
