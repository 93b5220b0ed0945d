//! Events of the hosts, one after the other, drawn from a seed.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::site::Site;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Event {
    /// A host is cut off for a while; its volumes wait and continue
    CutHost,
    /// A host is cut off, its volume is moved, and the host comes back
    LoseHost,
    /// All processes of a host are killed; its volumes continue elsewhere or there
    CrashHost,
    /// A volume is unmounted here and mounted there
    MoveVolume,
    KillPool,
    KillTarget,
    KillAttach,
    /// The controller is killed, and its records are restored on another host
    LoseController,
    /// The controller's host is cut off, its records are restored on another host, and it comes
    /// back
    TwoControllers,
}

const ALL: [(Event, u32); 9] = [
    (Event::CutHost, 3),
    (Event::LoseHost, 5),
    (Event::CrashHost, 3),
    (Event::MoveVolume, 2),
    (Event::KillPool, 2),
    (Event::KillTarget, 2),
    (Event::KillAttach, 1),
    (Event::LoseController, 2),
    (Event::TwoControllers, 3),
];

/// Time within which an overtaken controller ends once it is reachable.
const OVERTAKEN_BUDGET: Duration = Duration::from_secs(60);

pub struct Events {
    /// Events that are possible here, with their weights.
    possible: Vec<(Event, u32)>,
    pub happened: BTreeMap<Event, u64>,
}

impl Events {
    /// # Errors
    /// Where none is left.
    pub fn new(only: &[Event], without: &[Event]) -> Result<Self> {
        let is_wanted =
            |event: &Event| (only.is_empty() || only.contains(event)) && !without.contains(event);
        let mut possible = ALL.to_vec();
        possible.retain(|(event, _)| is_wanted(event));
        ensure!(!possible.is_empty(), "--only and --without leave no event");
        Ok(Self { possible, happened: BTreeMap::new() })
    }

    pub fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Event> {
        Ok(self.possible.choose_weighted(rng, |(_, weight)| *weight)?.0)
    }

    /// Runs an event, up to the moment in which all hosts are back.
    pub fn happen(&mut self, event: Event, site: &mut Site, rng: &mut ChaCha8Rng) -> Result<()> {
        *self.happened.entry(event).or_default() += 1;
        let volume = rng.random_range(0..site.volumes.len());
        let at = site.volumes[volume].at;
        let any = rng.random_range(0..site.hosts.len());
        let to = other_than(rng, site, &[at]);
        let pause = Duration::from_millis(rng.random_range(200..6000));
        match event {
            Event::CutHost => {
                site.switch.cut(&site.hosts[any])?;
                std::thread::sleep(pause);
                site.switch.heal(&site.hosts[any])
            }
            Event::LoseHost => lose_host(site, rng, pause),
            Event::CrashHost => {
                let lost = site.crash(at)?;
                if at == site.controller {
                    site.hosts[at].tend()?;
                }
                let is_elsewhere: bool = rng.random();
                if !is_elsewhere {
                    site.hosts[at].tend()?;
                }
                for (volume, left) in lost {
                    let to = if is_elsewhere { to } else { at };
                    site.recover_volume(volume, &left, to)?;
                }
                site.hosts[at].tend()
            }
            Event::MoveVolume => site.move_volume(volume, to),
            Event::KillPool => kill(site, any, "pool", pause),
            Event::KillTarget => kill(site, at, "target", Duration::ZERO),
            Event::KillAttach => kill(site, at, "attach", Duration::ZERO),
            Event::LoseController => {
                let former = site.controller;
                site.hosts[former].kill(&["controller"])?;
                std::thread::sleep(pause / 4);
                site.flows().context("while there is no controller")?;
                site.retire_controller(former)?;
                site.move_controller(other_than(rng, site, &[former]), &[])?;
                site.back_up()
            }
            Event::TwoControllers => two_controllers(site, rng, pause),
        }
    }
}

fn other_than(rng: &mut ChaCha8Rng, site: &Site, these: &[usize]) -> usize {
    let others: Vec<usize> = (0..site.hosts.len()).filter(|host| !these.contains(host)).collect();
    others.choose(rng).copied().unwrap_or(0)
}

fn kill(site: &mut Site, at: usize, role: &str, down: Duration) -> Result<()> {
    site.hosts[at].kill(&[role])?;
    std::thread::sleep(down);
    site.hosts[at].tend()
}

fn volumes_at(site: &Site, at: usize) -> Vec<usize> {
    (0..site.volumes.len()).filter(|volume| site.volumes[*volume].at == at).collect()
}

/// Loses a host other than the controller's, whose loss is another event.
fn lose_host(site: &mut Site, rng: &mut ChaCha8Rng, pause: Duration) -> Result<()> {
    let lost = other_than(rng, site, &[site.controller]);
    site.switch.cut(&site.hosts[lost])?;
    std::thread::sleep(pause);
    let mut stale = Vec::new();
    for volume in volumes_at(site, lost) {
        let to = other_than(rng, site, &[lost]);
        stale.push(site.fail_over(volume, to)?);
    }
    site.flows()?;
    std::thread::sleep(pause);
    site.switch.heal(&site.hosts[lost])?;
    site.flows()?;
    stale.into_iter().try_for_each(|one| site.clear(one))
}

fn two_controllers(site: &mut Site, rng: &mut ChaCha8Rng, pause: Duration) -> Result<()> {
    let former = site.controller;
    site.switch.cut(&site.hosts[former])?;
    std::thread::sleep(pause);
    site.move_controller(other_than(rng, site, &[former]), &[former])?;
    let mut stale = Vec::new();
    for volume in volumes_at(site, former) {
        let to = other_than(rng, site, &[former]);
        stale.push(site.fail_over(volume, to)?);
    }
    site.flows()?;
    site.switch.heal(&site.hosts[former])?;
    // Both run. The former one must notice that it was overtaken, and end permanently.
    let began = std::time::Instant::now();
    while site.hosts[former].is_running("controller")? {
        site.flows().context("while two controllers run")?;
        if began.elapsed() > OVERTAKEN_BUDGET {
            bail!("the overtaken controller still runs {} s later", OVERTAKEN_BUDGET.as_secs());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    site.retire_controller(former)?;
    stale.into_iter().try_for_each(|one| site.clear(one))?;
    // Data that only the pool of that host holds is found now.
    site.recover(&[])?;
    site.back_up()
}
