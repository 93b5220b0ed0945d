//! Reach of pools at the addresses that they tell.
//!
//! A pool may report, and so be alive, and still be out of reach: behind a firewall, or with an
//! address that only its own host understands. Nothing is placed on it and nothing is expected of
//! it before it was reached. The controller dials each pool; a target's word that it has a
//! connection counts as well, since the controller may be the one that a firewall keeps out.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quoin_cluster::records::Concerned;
use quoin_identity::{Expected, Role};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fields::is_address;
use crate::reconcile::lifecycle::Lifecycle;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::state::reach::Turn;

/// A connection and its handshake.
const DIAL_MAX: Duration = Duration::from_secs(4);
/// Pools dialled at a time.
const DIALS_MAX: usize = 16;
/// How often is looked who is due.
const LOOK: Duration = Duration::from_secs(1);

/// The fault of an address by itself: it leads nowhere, or not to the pool from other hosts.
fn misleading(address: &str, has_other_hosts: bool) -> Option<String> {
    let way_out =
        "start the pool with --advertise HOST:PORT, an address that the other hosts reach";
    let ip = address.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']))?;
    let ip: IpAddr = ip.parse().ok()?;
    if ip.is_unspecified() {
        return Some(format!("that stands for every address of its host; {way_out}"));
    }
    (ip.is_loopback() && has_other_hosts)
        .then(|| format!("that is loopback, and the cluster has several hosts; {way_out}"))
}

fn has_several_hosts(is_elsewhere: impl Iterator<Item = bool>) -> bool {
    let (mut elsewhere, mut on_loopback) = (0, 0);
    is_elsewhere.for_each(|is| if is { elsewhere += 1 } else { on_loopback += 1 });
    elsewhere > on_loopback
}

/// Returns true if other hosts may reach something there. What is no address at all, as a member may
/// tell, says nothing of where other members are.
fn is_of_a_host(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    let is_loopback =
        host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified());
    let is_in_a_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    let is_name = host.len() <= 253 && host.bytes().all(is_in_a_name);
    let is_host = is_name || host.parse::<IpAddr>().is_ok();
    !host.is_empty() && is_host && !is_loopback && host != "localhost"
}

/// Dials the pools, each from time to time.
pub(crate) struct Dialler {
    state: Arc<State>,
    lifecycle: Arc<Lifecycle>,
}

impl Dialler {
    pub fn new(state: Arc<State>, lifecycle: Arc<Lifecycle>) -> Self {
        Self { state, lifecycle }
    }

    /// Dials the pools from now on, until `shutdown`.
    pub(crate) async fn keep_dialling(self: Arc<Self>, mut shutdown: watch::Receiver<bool>) {
        let news = {
            let mut observed = self.state.observed();
            observed.reach.dials = true;
            observed.reach.news.clone()
        };
        let mut dials = tokio::task::JoinSet::new();
        let mut waiting = Vec::new();
        loop {
            waiting.append(&mut self.pools_to_dial());
            while dials.len() < DIALS_MAX
                && let Some((pool, address)) = waiting.pop()
            {
                let dialler = self.clone();
                dials.spawn(async move { dialler.dial(&pool, &address).await });
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = news.notified() => {}
                Some(_) = dials.join_next() => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
        }
    }

    fn pools_to_dial(&self) -> Vec<(String, String)> {
        let mut observed = self.state.observed();
        let mut reach = std::mem::take(&mut observed.reach);
        let after = self.state.settings.offline_after;
        let due = reach.due(Instant::now(), |pool| observed.heard_pool(pool, after).is_some());
        observed.reach = reach;
        due
    }

    async fn dial(&self, pool: &str, address: &str) {
        let outcome = match misleading(address, self.has_hosts_beside(pool)) {
            Some(why) => Err(why),
            None if address.is_empty() => Err("it told no address".to_owned()),
            None => {
                let expected = Expected::Named(Role::Pool, pool.to_owned());
                self.state.identity.reaches(address, expected, DIAL_MAX).await
            }
        };
        let (turn, is_news) = {
            let reach = &mut self.state.observed().reach;
            let before = reach.why_not(pool, false).is_none();
            let turn = reach.dialled(pool, address, outcome, Instant::now());
            (turn, before != reach.why_not(pool, false).is_none())
        };
        let known = self.state.pools.get(pool);
        let about = Object::new("pool", known.map_or(String::new(), |p| p.pool_id.clone()), pool);
        let by = format!("pool/{pool}");
        match turn {
            Some(Turn::Reached) => {
                let message = format!("at {address}");
                self.state.events.record_of(&by, Severity::Normal, about, "PoolReached", message);
            }
            Some(Turn::Unreachable(why)) => {
                self.state.events.record_of(&by, Severity::Warning, about, "PoolUnreachable", why);
            }
            None => {}
        }
        // The first time is no event, and lets the pool count.
        self.state.announce(&Concerned::Status);
        if !is_news {
            return;
        }
        let volumes = self.state.volumes_of_pool(pool);
        self.state.look_at(&volumes);
        if let Err(error) = self.lifecycle.reconcile_those(&volumes).await {
            tracing::error!(%error, pool, "not done after a pool was dialled");
        }
    }

    /// Returns true if members are on other hosts than the pool: more of them than of those that are on
    /// loopback too, so that the word of one odd member puts no pool out of reach.
    fn has_hosts_beside(&self, pool: &str) -> bool {
        let Some(own) = self.state.pools.get(pool).map(|pool| pool.node.clone()) else {
            return false;
        };
        let pools = self.state.pools.list();
        let nodes = self.state.nodes.list();
        let of_pools = pools.iter().map(|pool| (pool.node.as_str(), pool.address.as_str()));
        let of_nodes = nodes.iter().map(|node| (node.name.as_str(), node.address.as_str()));
        let others = of_pools
            .chain(of_nodes)
            .filter(|(node, address)| *node != own && !address.is_empty() && is_address(address));
        let mut is_elsewhere: HashMap<&str, bool> = HashMap::new();
        for (node, address) in others {
            *is_elsewhere.entry(node).or_default() |= is_of_a_host(address);
        }
        has_several_hosts(is_elsewhere.values().copied())
    }
}

/// Pools to which a target says that it is connected.
pub(crate) fn pools_are_served<'a>(state: &State, pools: impl Iterator<Item = &'a str>) {
    let pools: HashSet<&str> = pools.collect();
    let turned: Vec<_> = {
        let mut observed = state.observed();
        pools.into_iter().filter(|pool| observed.reach.served(pool)).collect()
    };
    for pool in turned {
        state.look_at(&state.volumes_of_pool(pool));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_odd_member_of_a_cluster_on_loopback_makes_it_none_of_several_hosts() {
        let several = |elsewhere: &[bool]| has_several_hosts(elsewhere.iter().copied());
        assert!(!several(&[]) && !several(&[false, false]));
        assert!(!several(&[true, false]) && !several(&[false, true, false]));
        assert!(several(&[true]) && several(&[true, true, false]));
    }

    #[test]
    fn addresses_that_mislead_are_told_apart_by_whether_there_are_other_hosts() {
        assert!(misleading("0.0.0.0:7401", false).unwrap().contains("--advertise"));
        assert!(misleading("[::]:7401", false).is_some());
        assert!(misleading("127.0.0.1:7401", true).unwrap().contains("--advertise"));
        assert_eq!(misleading("127.0.0.1:7401", false), None);
        assert_eq!(misleading("10.0.0.1:7401", true), None);
        assert_eq!(misleading("h1:7401", true), None);
        assert!(is_of_a_host("10.0.0.1:1") && is_of_a_host("h1:1") && is_of_a_host("10.0.0.1"));
        assert!(!is_of_a_host("127.0.0.1:1") && !is_of_a_host("") && !is_of_a_host("[::1]:9"));
        assert!(is_of_a_host("[2001:db8::1]:9"));
        for told in ["a\x1b[2J", "a b:1", "h1/x:1", "näme:1"] {
            assert!(!is_of_a_host(told), "{told:?} would take every loopback pool out of reach");
        }
    }
}
