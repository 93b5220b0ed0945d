//! `quoin pool run`: serves the replicas in one pool.

use anyhow::Result;
use clap::Args;
use quoin_identity::Role;
use quoin_pool::metrics::Metrics;
use quoin_telemetry::Source;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::data_path::Part;
use super::{MemberOptions, RoleOptions};
use crate::host::ports;
use crate::size::{parse_memory, parse_pool_size};

#[derive(Args)]
pub struct PoolOptions {
    /// The pool's identity directory.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// A directory (the pool is a file in it), a file, or a raw block device.
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// Make a sparse pool file that may grow to this size, where there is none yet.
    #[arg(long, value_name = "SIZE", value_parser = parse_pool_size)]
    capacity: Option<u64>,
    /// Take the whole capacity from the disk at once, for good.
    #[arg(long, requires = "capacity")]
    preallocate: bool,
    /// Make a pool on a block device, or in a file that exists, if it is blank.
    #[arg(long)]
    format: bool,
    /// Serve another pool than this identity served before: that one's replicas are taken for
    /// lost and are rebuilt.
    #[arg(long)]
    replace: bool,
    /// The host that the pool is on: replicas spread over hosts never share one.
    #[arg(long, default_value_t = super::host_name())]
    node: String,
    /// Where targets connect. Each pool of a host has a port of its own; port 0 takes any, and the
    /// same one at the next start.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7401")]
    listen: SocketAddr,
    /// `host:port` that targets are told [default: what --listen says; where that is every address
    /// of the host, the one by which it reaches the controller].
    #[arg(long, value_name = "HOST:PORT", value_parser = quoin_pool::check_advertised)]
    advertise: Option<String>,
    /// Meet targets of this host by TCP as well, as those of others, and not by a unix socket.
    #[arg(long)]
    network_only: bool,
    /// Memory for the maps of the replicas.
    #[arg(long, value_name = "SIZE", value_parser = parse_memory, default_value = "128MiB")]
    cache: u64,
    /// How long after one scrub (a reading of all that the pool holds, against its checksums) the
    /// next begins, as in 7d or 12h; `never`: only when asked for.
    #[arg(long, value_name = "TIME", value_parser = parse_period, default_value = "7d")]
    scrub_every: ScrubPeriod,
    #[command(flatten)]
    topology: super::topology::TopologyOptions,
    #[command(flatten)]
    member: MemberOptions,
    #[command(flatten)]
    role: RoleOptions,
}

/// `None`: never by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ScrubPeriod(Option<Duration>);

fn parse_period(text: &str) -> Result<ScrubPeriod, String> {
    const SECONDS: [(char, u64); 4] = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    if text == "never" {
        return Ok(ScrubPeriod(None));
    }
    let wrong = || "write a number and s, m, h or d, as in 7d, or `never`".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let (_, seconds) = SECONDS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    let total = count.checked_mul(*seconds).filter(|s| (1..=10 * 365 * 86_400).contains(s));
    let total = total.ok_or("between 1 second and 10 years are possible, or `never`")?;
    Ok(ScrubPeriod(Some(Duration::from_secs(total))))
}

/// Names the process that has the requested port.
fn in_flags(error: quoin_pool::Error) -> anyhow::Error {
    match &error {
        quoin_pool::Error::Listen { address, source } if source.kind() == ErrorKind::AddrInUse => {
            let who = ports::listener(*address);
            anyhow::anyhow!(
                "{address} is in use by {}: end that, or choose another port with --listen (each \
                 pool of a host has a port of its own)",
                who.as_deref().unwrap_or("another program")
            )
        }
        _ => error.into(),
    }
}

pub fn run(options: PoolOptions) -> Result<()> {
    super::start_logs(options.role.log_json);
    super::data_path::prepare(Part::Other);
    let name = options.member.name_of(&options.state);
    let metrics = Metrics::new(&name);
    let shown = metrics.clone();
    let health = metrics.health.clone();
    let source = Source::new(move || shown.render(), move || health.check());
    super::run(&options.role, source, |shutdown| async move {
        let pool = quoin_pool::Options {
            name,
            node: options.node,
            path: options.data,
            size_bytes: options.capacity,
            sparse: !options.preallocate,
            format: options.format,
            replace: options.replace,
            join: options
                .member
                .request_of_member(Role::Pool, &options.state, shutdown.clone())
                .await?,
            identity: options.state,
            controller: options.member.controller,
            listen: options.listen,
            advertise: options.advertise,
            network_only: options.network_only,
            topology: options.topology.segments()?,
            cache_bytes: options.cache,
            scrub_period: options.scrub_every.0,
            metrics,
        };
        quoin_pool::run(pool, shutdown).await.map_err(in_flags)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_a_number_with_a_unit_or_never() {
        let days = |n: u64| Some(Duration::from_secs(n * 86_400));
        assert_eq!(parse_period("7d"), Ok(ScrubPeriod(days(7))));
        assert_eq!(parse_period("48h"), Ok(ScrubPeriod(days(2))));
        assert_eq!(parse_period("never"), Ok(ScrubPeriod(None)));
        for wrong in ["", "7", "d", "-1d", "7w", "7é", "0s", "99999999999d"] {
            assert!(parse_period(wrong).is_err(), "{wrong}");
        }
        assert!(parse_period("soon").unwrap_err().contains("7d"));
    }
}
