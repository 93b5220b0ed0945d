//! Faults of a cluster, one after the other, each undone before the next.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use rustix::process::Signal;

use crate::cluster::{Cluster, POOLS};

/// Bytes are flipped in one pool only, so that two good copies of each block are left.
const ROTTEN_POOL: &str = "pool-c";
const FLIPS: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Fault {
    KillPool,
    KillTarget,
    KillController,
    KillTwoPools,
    KillAll,
    StopPool,
    StopTarget,
    CutPool,
    CutController,
    CutTwoPools,
    CutNode,
    KillSharer,
    CutSharer,
    FlappingLink,
    DelayedLink,
    FlipBytes,
    FillDisk,
    RestartCleanly,
}

const ALL: [(Fault, u32); 18] = [
    (Fault::KillPool, 4),
    (Fault::KillTarget, 3),
    (Fault::KillController, 2),
    (Fault::KillTwoPools, 2),
    (Fault::KillAll, 1),
    (Fault::StopPool, 3),
    (Fault::StopTarget, 2),
    (Fault::CutPool, 4),
    (Fault::CutController, 1),
    (Fault::CutTwoPools, 2),
    (Fault::CutNode, 1),
    (Fault::KillSharer, 3),
    (Fault::CutSharer, 4),
    (Fault::FlappingLink, 2),
    (Fault::DelayedLink, 2),
    (Fault::FlipBytes, 3),
    (Fault::FillDisk, 2),
    (Fault::RestartCleanly, 1),
];

#[derive(Default)]
pub struct Injected(pub BTreeMap<Fault, u64>);

/// Draws a fault that this machine can do, of `only` if that names any.
pub fn draw(rng: &mut ChaCha8Rng, cluster: &Cluster, only: &[Fault]) -> Result<Fault> {
    use Fault::{CutController, CutNode, CutPool, CutSharer, CutTwoPools, KillSharer};
    use Fault::{DelayedLink, FillDisk, FlappingLink};
    let possible = |fault: Fault| match fault {
        CutPool | CutController | CutTwoPools | CutNode | FlappingLink => cluster.network.is_some(),
        KillSharer | CutSharer => cluster.has("sharer"),
        FillDisk => cluster.small_disk.is_some(),
        DelayedLink => cluster.network.as_ref().is_some_and(|network| network.delays),
        _ => true,
    };
    let wanted = |fault: Fault| only.is_empty() || only.contains(&fault);
    let mut faults = ALL.to_vec();
    faults.retain(|(fault, _)| wanted(*fault) && possible(*fault));
    let chosen = faults.choose_weighted(rng, |(_, weight)| *weight);
    Ok(chosen.context("none of the faults is possible on this machine")?.0)
}

impl Injected {
    /// Injects a fault and undoes it.
    pub fn inject(
        &mut self,
        fault: Fault,
        cluster: &mut Cluster,
        rng: &mut ChaCha8Rng,
    ) -> Result<()> {
        *self.0.entry(fault).or_default() += 1;
        let first = rng.random_range(0..POOLS.len());
        let (pool, other) = (POOLS[first], POOLS[(first + 1) % POOLS.len()]);
        let lasts = Duration::from_millis(rng.random_range(200..6000));
        match fault {
            Fault::KillPool => kill(cluster, &[pool], lasts),
            Fault::KillTarget => kill(cluster, &["target"], Duration::ZERO),
            Fault::KillController => kill(cluster, &["controller"], lasts),
            Fault::KillTwoPools => kill(cluster, &[pool, other], lasts),
            Fault::KillAll => {
                let all = ["controller", "target", "sharer", "pool-a", "pool-b", "pool-c"];
                let all: Vec<&str> = all.into_iter().filter(|name| cluster.has(name)).collect();
                kill(cluster, &all, Duration::ZERO)
            }
            Fault::StopPool => stop(cluster, pool, lasts),
            Fault::StopTarget => stop(cluster, "target", lasts),
            Fault::CutPool => cut(cluster, &[pool], lasts),
            Fault::CutController => cut(cluster, &["control"], lasts),
            Fault::CutTwoPools => cut(cluster, &[pool, other], lasts),
            Fault::CutNode => cut(cluster, &["node"], lasts),
            Fault::KillSharer => kill(cluster, &["sharer"], Duration::ZERO),
            Fault::CutSharer => cut(cluster, &["sharer"], lasts),
            Fault::FlappingLink => {
                for _ in 0..rng.random_range(3..12) {
                    cut(cluster, &[pool], Duration::from_millis(rng.random_range(20..400)))?;
                    std::thread::sleep(Duration::from_millis(rng.random_range(20..400)));
                }
                Ok(())
            }
            Fault::DelayedLink => {
                let network = cluster.network.as_ref().context("a network")?;
                network.delay(pool, rng.random_range(1..200))?;
                std::thread::sleep(lasts);
                network.delay(pool, 0)
            }
            Fault::FlipBytes => flip(cluster, rng),
            Fault::FillDisk => {
                let disk = cluster.small_disk.as_ref().context("a small disk")?;
                disk.fill()?;
                std::thread::sleep(lasts);
                disk.relieve()
            }
            Fault::RestartCleanly => cluster.restart(&[pool, "target"]),
        }
    }
}

fn kill(cluster: &mut Cluster, names: &[&str], down: Duration) -> Result<()> {
    for name in names {
        cluster.signal(name, Signal::KILL)?;
    }
    std::thread::sleep(down);
    cluster.tend()
}

fn stop(cluster: &mut Cluster, name: &str, lasts: Duration) -> Result<()> {
    cluster.signal(name, Signal::STOP)?;
    std::thread::sleep(lasts);
    cluster.signal(name, Signal::CONT)
}

fn cut(cluster: &Cluster, hosts: &[&str], lasts: Duration) -> Result<()> {
    let network = cluster.network.as_ref().context("a network")?;
    for host in hosts {
        network.cut(host)?;
    }
    std::thread::sleep(lasts);
    hosts.iter().try_for_each(|host| network.heal(host))
}

/// Flips bytes anywhere in the written part of the pool.
fn flip(cluster: &Cluster, rng: &mut ChaCha8Rng) -> Result<()> {
    let path = cluster.pool_file(ROTTEN_POOL);
    let file = File::options().read(true).write(true).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    let size = file.metadata()?.len();
    let mut flipped = 0;
    for _ in 0..FLIPS * 20 {
        let from = rng.random_range(0..size);
        // Holes have no bytes to flip.
        let Ok(at) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(from)) else { continue };
        let at = at + rng.random_range(0..(64 << 10).min(size - at));
        let mut byte = [0];
        if file.read_at(&mut byte, at)? == 1 {
            file.write_at(&[byte[0] ^ (1 << rng.random_range(0..8))], at)?;
            flipped += 1;
        }
        if flipped == FLIPS {
            break;
        }
    }
    Ok(())
}
