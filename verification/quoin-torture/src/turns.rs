//! Time for which a pool's thread served no session: its histogram of turns, from `/metrics`.
//!
//! A killed pool starts its counts anew, so the numbers are read repeatedly.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cluster::{Cluster, POOLS};

const PATIENCE: Duration = Duration::from_secs(2);
const BUCKET: &str = "quoin_pool_turn_seconds_bucket{";
/// Bound of long turns, apart from paused pools.
const LONG_SECONDS: f64 = 0.02;

/// Returns the address of a pool's metrics, on its own host.
pub fn address(index: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 7501 + index).into()
}

/// Histogram of one process of a pool: turns up to each bound, in seconds.
type Histogram = Vec<(f64, u64)>;

/// The longest turn of each pool, over all of its restarts.
#[derive(Default)]
pub struct Turns(BTreeMap<&'static str, Longest>);

#[derive(Clone, Copy, Default)]
struct Longest {
    turns: u64,
    /// Bound of its bucket.
    at_most_seconds: f64,
    /// Number of turns longer than [`LONG_SECONDS`] of the last process that was polled.
    long: u64,
}

impl Turns {
    /// Polls all pools; one that does not answer is polled the next time.
    pub fn look(&mut self, cluster: &Cluster) {
        for (index, pool) in (0..).zip(POOLS) {
            let Ok(histogram) = read(cluster, pool, address(index)) else { continue };
            let Some((_, turns)) = histogram.last().copied() else { continue };
            let longest = self.0.entry(pool).or_default();
            longest.turns = turns;
            longest.at_most_seconds = longest.at_most_seconds.max(bound(&histogram, turns));
            let short = histogram.iter().rfind(|(le, _)| *le <= LONG_SECONDS);
            longest.long = turns - short.map_or(0, |(_, count)| *count);
        }
    }

    pub fn print(&self) {
        for pool in POOLS {
            match self.0.get(pool) {
                None => println!("{pool}: its turns could not be read"),
                Some(longest) => println!(
                    "{pool}: longest turn of its thread within {:.3} s; of the {} turns since its \
                     last start {} were over {LONG_SECONDS} s",
                    longest.at_most_seconds, longest.turns, longest.long,
                ),
            }
        }
    }
}

/// Returns the lowest bound that no turn exceeded.
fn bound(histogram: &Histogram, turns: u64) -> f64 {
    histogram.iter().find(|(_, count)| *count == turns).map_or(0.0, |(le, _)| *le)
}

fn read(cluster: &Cluster, pool: &str, address: SocketAddr) -> Result<Histogram> {
    Ok(parse(&get(cluster, pool, address, "/metrics")?))
}

/// Returns the answer of a process on a host of the cluster, with its head.
pub fn get(cluster: &Cluster, host: &str, address: SocketAddr, path: &str) -> Result<String> {
    let host = cluster.network.as_ref().map(|network| network.namespace(host));
    let request = format!("GET {path} HTTP/1.1\r\nHost: quoin\r\nConnection: close\r\n\r\n");
    // A thread of its own: it enters that host's namespace and does not return.
    let thread = std::thread::spawn(move || -> Result<String> {
        if let Some(host) = host {
            use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
            use std::os::fd::AsFd;
            let namespace = std::fs::File::open(format!("/run/netns/{host}"))?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        }
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    });
    thread.join().ok().context("the thread that reads metrics")?
}

fn parse(text: &str) -> Histogram {
    let bucket = |line: &str| {
        let (labels, count) = line.strip_prefix(BUCKET)?.rsplit_once("} ")?;
        let bound = labels.split(',').find_map(|label| label.strip_prefix("le=\""))?;
        let bound = bound.strip_suffix('"')?;
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? };
        Some((bound, count.trim().parse().ok()?))
    };
    text.lines().filter_map(bucket).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_turn_is_within_the_first_bound_that_none_passed() {
        let text = "HTTP/1.1 200 OK\r\n\r\n# TYPE quoin_pool_turn_seconds histogram\n\
                    quoin_pool_turn_seconds_bucket{pool=\"a\",le=\"0.01\"} 7\n\
                    quoin_pool_turn_seconds_bucket{pool=\"a\",le=\"0.02\"} 9\n\
                    quoin_pool_turn_seconds_bucket{pool=\"a\",le=\"0.05\"} 9\n\
                    quoin_pool_turn_seconds_bucket{pool=\"a\",le=\"+Inf\"} 9\n\
                    quoin_pool_turn_seconds_count{pool=\"a\"} 9\n";
        let histogram = parse(text);
        assert_eq!(histogram.len(), 4);
        assert_eq!(bound(&histogram, 9), 0.02);
        assert_eq!(bound(&parse(""), 0), 0.0);
    }
}
