//! Clients over the network that are let in no more: fences, as the controller orders them.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use quoin_api::control;
use quoin_cluster::records::Block;
use quoin_identity::Role;
use tokio::sync::Notify;

use crate::standing::Holder;

/// Blocks of addresses whose clients are turned away, and nodes that are, by whatever address they come.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Fences(Arc<Inner>);

#[derive(PartialEq, Eq, Default, Debug)]
struct Inner {
    digest: u64,
    blocks: Vec<Block>,
    nodes: HashSet<String>,
}

impl Fences {
    /// Reads the controller's list. A block that this version cannot read covers all addresses.
    pub fn of(told: &control::Fences) -> Self {
        let all = || ["0.0.0.0/0", "::/0"].into_iter().filter_map(|all| all.parse::<Block>().ok());
        let mut blocks: Vec<Block> = Vec::new();
        for text in &told.blocks {
            match text.parse() {
                Ok(block) => blocks.push(block),
                Err(_) => blocks.extend(all()),
            }
        }
        let nodes = told.nodes.iter().cloned().collect();
        Self(Arc::new(Inner { digest: told.digest, blocks, nodes }))
    }

    pub fn digest(&self) -> u64 {
        self.0.digest
    }

    /// Returns true if a client is let in no more. `from`: its address, if it came over the network.
    pub fn cover(&self, from: Option<IpAddr>, holder: Option<&Holder>) -> bool {
        let is_inside = |from| self.0.blocks.iter().any(|block| block.covers(from));
        let is_named =
            |holder: &Holder| holder.role == Role::Node && self.0.nodes.contains(&holder.name);
        from.is_some_and(is_inside) || holder.is_some_and(is_named)
    }
}

/// Digest of the fences that this target has carried out.
#[derive(Default)]
pub struct CarriedOut {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    digest: u64,
    /// Number of the last change that was begun.
    begun: u64,
}

impl CarriedOut {
    pub fn get(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).digest
    }

    /// Begins a change: what was carried out before is not in force any more.
    pub fn begin(&self) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.begun += 1;
        state.begun
    }

    /// Ends a change. One that another has followed says nothing.
    pub fn end(&self, number: u64, digest: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.begun == number {
            state.digest = digest;
            drop(state);
            self.changed.notify_one();
        }
    }

    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(blocks: &[&str], nodes: &[&str]) -> Fences {
        let all = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Fences::of(&control::Fences { digest: 7, blocks: all(blocks), nodes: all(nodes) })
    }

    #[test]
    fn a_client_is_shut_out_by_its_address_and_a_node_by_its_name_too() {
        let fences = told(&["192.0.2.0/24", "2001:db8::7/128"], &["h1"]);
        let holder = |role, name: &str| Holder { role, name: name.into(), key_hash: "k".into() };
        let covers = |from: &str, holder: Option<&Holder>| fences.cover(from.parse().ok(), holder);
        let (admin, node) = (holder(Role::Admin, "h1"), holder(Role::Node, "h1"));
        let other = holder(Role::Node, "h2");
        assert!(covers("192.0.2.7", None) && covers("192.0.2.7", Some(&other)));
        assert!(covers("::ffff:192.0.2.7", Some(&admin)) && covers("2001:db8::7", None));
        assert!(covers("198.51.100.7", Some(&node)) && fences.cover(None, Some(&node)));
        assert!(!covers("198.51.100.7", Some(&other)) && !covers("198.51.100.7", Some(&admin)));
        assert!(!fences.cover(None, None), "a client of this host");
        let unread = told(&["everything/3"], &[]);
        assert!(unread.cover("198.51.100.7".parse().ok(), None));
        assert!(unread.cover("::1".parse().ok(), None));
        assert!(!Fences::default().cover("198.51.100.7".parse().ok(), Some(&node)));
    }

    #[test]
    fn fences_that_others_followed_before_they_were_carried_out_are_not_told() {
        let carried_out = CarriedOut::default();
        let (first, second) = (carried_out.begin(), carried_out.begin());
        carried_out.end(first, 5);
        assert_eq!(carried_out.get(), 0);
        carried_out.end(second, 6);
        assert_eq!(carried_out.get(), 6);
    }
}
