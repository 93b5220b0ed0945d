//! Slots for connections that have not proven anything yet, shared out by source address.
//!
//! A source that holds some slots gets another one only while three times as many are free: the
//! threshold moves with the number of free slots (dynamic threshold, as in shared packet buffers).
//! One source alone gets a quarter of all slots. Several that flood together limit each other, and
//! a source without a slot still finds a free one.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::same_host::PeerAddress;

/// Free slots required for each slot that the same source holds.
const FREE_PER_HELD: usize = 3;

/// Source of a connection, for the sharing of slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    SameHost,
    /// An IPv4 address, or the 64 bits of an IPv6 address that name a network: a host may take any
    /// address within its network.
    Network(u64),
}

impl Source {
    pub fn of(from: PeerAddress) -> Self {
        let PeerAddress::Network(address) = from else { return Source::SameHost };
        match address.ip().to_canonical() {
            IpAddr::V4(ip) => Source::Network(u64::from(ip.to_bits())),
            IpAddr::V6(ip) => Source::Network((ip.to_bits() >> 64) as u64),
        }
    }
}

/// A limited number of slots. Clones share them.
#[derive(Clone, Debug)]
pub struct ConnectionSlots {
    capacity: usize,
    in_use: Arc<Mutex<HashMap<Source, usize>>>,
}

impl ConnectionSlots {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, in_use: Arc::default() }
    }

    /// Takes a slot for this source; `None`: none is available to it now.
    pub fn acquire(&self, from: PeerAddress) -> Option<ConnectionSlot> {
        let source = Source::of(from);
        let mut in_use = self.lock();
        let free = self.capacity.saturating_sub(in_use.values().sum());
        let held = in_use.get(&source).copied().unwrap_or(0);
        if free == 0 || FREE_PER_HELD * held >= free {
            return None;
        }
        in_use.insert(source, held + 1);
        Some(ConnectionSlot { slots: self.clone(), source })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Source, usize>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One in_use slot; free again when it is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    slots: ConnectionSlots,
    source: Source,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut in_use = self.slots.lock();
        if let Some(held) = in_use.get_mut(&self.source) {
            *held -= 1;
            if *held == 0 {
                in_use.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(ip: &str) -> PeerAddress {
        PeerAddress::Network((ip.parse::<IpAddr>().unwrap(), 9).into())
    }

    fn acquire_all(slots: &ConnectionSlots, source: PeerAddress) -> Vec<ConnectionSlot> {
        std::iter::from_fn(|| slots.acquire(source)).collect()
    }

    #[test]
    fn one_source_gets_a_quarter_of_the_slots_and_its_freed_slots_again() {
        let slots = ConnectionSlots::new(64);
        let mut held = acquire_all(&slots, from("192.0.2.1"));
        assert_eq!(held.len(), 16);
        held.truncate(10);
        assert_eq!(acquire_all(&slots, from("192.0.2.1")).len(), 6);
        drop(held);
        assert_eq!(slots.lock().len(), 0, "a source without slots has no entry");
    }

    #[test]
    fn a_source_without_a_slot_gets_one_beside_sources_that_flood() {
        for floods in [1, 4, 16] {
            let slots = ConnectionSlots::new(64);
            let mut held = Vec::new();
            // The sources acquire turns, and each takes every slot that becomes free.
            for _ in 0..64 {
                for n in 0..floods {
                    held.extend(slots.acquire(from(&format!("192.0.2.{n}"))));
                }
            }
            let ours = acquire_all(&slots, from("198.51.100.7"));
            assert!(!ours.is_empty(), "no slot beside {floods} floods, which hold {}", held.len());
        }
    }

    #[test]
    fn no_more_slots_are_acquired_than_exist() {
        let slots = ConnectionSlots::new(8);
        let sources = (0..20).map(|n| from(&format!("192.0.2.{n}")));
        assert_eq!(sources.filter_map(|s| slots.acquire(s)).map(std::mem::forget).count(), 8);
        assert!(slots.acquire(PeerAddress::SameHost).is_none());
    }

    #[test]
    fn addresses_of_one_host_are_one_source_and_other_addresses_are_not() {
        let one = |ip| Source::of(from(ip));
        assert_eq!(one("2001:db8::1"), one("2001:db8::ffff:0:2"));
        assert_ne!(one("2001:db8::1"), one("2001:db8:0:1::1"));
        assert_eq!(one("::ffff:192.0.2.1"), one("192.0.2.1"));
        assert_ne!(one("192.0.2.1"), one("192.0.2.2"));
        assert_ne!(one("127.0.0.1"), Source::of(PeerAddress::SameHost));
    }
}
