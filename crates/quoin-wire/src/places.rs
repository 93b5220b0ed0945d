//! Places for connections that have not proven anything yet, shared out by source address.
//!
//! A source that holds some places gets another one only while three times as many are free: the
//! threshold moves with the number of free places (dynamic threshold, as in shared packet buffers).
//! One source alone gets a quarter of all places. Several that flood together limit each other, and
//! a source without a place still finds a free one.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::same_host::PeerAddress;

/// Free places required for each place that the same source holds.
const FREE_FOR_EACH: usize = 3;

/// Source of a connection, for the sharing of places.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Source {
    SameHost,
    /// An IPv4 address, or the 64 bits of an IPv6 address that name a network: a host may take any
    /// address within its network.
    Network(u64),
}

impl Source {
    fn of(from: PeerAddress) -> Self {
        let PeerAddress::Network(address) = from else { return Source::SameHost };
        match address.ip().to_canonical() {
            IpAddr::V4(ip) => Source::Network(u64::from(ip.to_bits())),
            IpAddr::V6(ip) => Source::Network((ip.to_bits() >> 64) as u64),
        }
    }
}

/// A limited number of places. Clones share them.
#[derive(Clone, Debug)]
pub struct Places {
    all: usize,
    taken: Arc<Mutex<HashMap<Source, usize>>>,
}

impl Places {
    pub fn new(all: usize) -> Self {
        Self { all, taken: Arc::default() }
    }

    /// Takes a place for this source; `None`: none is available to it now.
    pub fn take(&self, from: PeerAddress) -> Option<Place> {
        let source = Source::of(from);
        let mut taken = self.lock();
        let free = self.all.saturating_sub(taken.values().sum());
        let held = taken.get(&source).copied().unwrap_or(0);
        if free == 0 || FREE_FOR_EACH * held >= free {
            return None;
        }
        taken.insert(source, held + 1);
        Some(Place { places: self.clone(), source })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Source, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One taken place; free again when it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Places,
    source: Source,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        if let Some(held) = taken.get_mut(&self.source) {
            *held -= 1;
            if *held == 0 {
                taken.remove(&self.source);
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

    fn take_all(places: &Places, source: PeerAddress) -> Vec<Place> {
        std::iter::from_fn(|| places.take(source)).collect()
    }

    #[test]
    fn one_source_gets_a_quarter_of_the_places_and_its_freed_places_again() {
        let places = Places::new(64);
        let mut held = take_all(&places, from("192.0.2.1"));
        assert_eq!(held.len(), 16);
        held.truncate(10);
        assert_eq!(take_all(&places, from("192.0.2.1")).len(), 6);
        drop(held);
        assert_eq!(places.lock().len(), 0, "a source that holds nothing is forgotten");
    }

    #[test]
    fn a_source_that_holds_none_finds_a_place_beside_sources_that_flood() {
        for floods in [1, 4, 16] {
            let places = Places::new(64);
            let mut held = Vec::new();
            // The sources take turns, and each takes every place that becomes free.
            for _ in 0..64 {
                for n in 0..floods {
                    held.extend(places.take(from(&format!("192.0.2.{n}"))));
                }
            }
            let ours = take_all(&places, from("198.51.100.7"));
            assert!(!ours.is_empty(), "{floods} floods hold {}", held.len());
        }
    }

    #[test]
    fn no_more_places_are_taken_than_there_are() {
        let places = Places::new(8);
        let sources = (0..20).map(|n| from(&format!("192.0.2.{n}")));
        assert_eq!(sources.filter_map(|s| places.take(s)).map(std::mem::forget).count(), 8);
        assert!(places.take(PeerAddress::SameHost).is_none());
    }

    #[test]
    fn addresses_of_one_host_are_one_source_and_others_are_not() {
        let one = |ip| Source::of(from(ip));
        assert_eq!(one("2001:db8::1"), one("2001:db8::ffff:0:2"));
        assert_ne!(one("2001:db8::1"), one("2001:db8:0:1::1"));
        assert_eq!(one("::ffff:192.0.2.1"), one("192.0.2.1"));
        assert_ne!(one("192.0.2.1"), one("192.0.2.2"));
        assert_ne!(one("127.0.0.1"), Source::of(PeerAddress::SameHost));
    }
}
