//! Persistent choices of a `quoin dev` directory: names, ports and sizes, chosen once.

use anyhow::{Context, Result, bail};
use quoin_store::PoolError;
use quoin_types::PoolId;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as unix;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::Layout;

/// Newer directories are refused by name instead of being misread.
const FORMAT: u32 = 1;

/// Enough for three replicas.
const POOLS: usize = 3;
/// Part of the free disk that the pools may grow into; the rest stays the host's.
const POOLS_SHARE_PERCENT: u64 = 80;
const POOL_BYTES_MIN: u64 = 1 << 30;

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Settings {
    pub format: u32,
    pub node: String,
    /// gRPC for pools and nodes.
    pub controller: Endpoint,
    pub pools: Vec<PoolSettings>,
    /// Metrics and health of the target, the node and the controller.
    pub target_http: SocketAddr,
    pub node_http: SocketAddr,
    /// Missing in directories that an earlier Quoin made.
    #[serde(default = "any_port")]
    pub attach_http: SocketAddr,
    /// As `attach_http`: for peers' mirrors, and metrics and health of the mirror.
    #[serde(default = "any_port")]
    pub mirror_listen: SocketAddr,
    #[serde(default = "any_port")]
    pub mirror_http: SocketAddr,
}

/// Port 0: no process has it, so a real one replaces it.
fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Endpoint {
    pub listen: SocketAddr,
    pub http: SocketAddr,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct PoolSettings {
    pub name: String,
    pub capacity_bytes: u64,
    pub listen: SocketAddr,
    pub http: SocketAddr,
}

/// Ports of which some are chosen; above are those of outgoing connections.
const LASTING_PORTS: Range<u16> = 20_000..32_768;
/// Number of ports that one process tries first: more than a cluster of eight pools has.
const PORTS_IN_A_ROW: u32 = 32;

fn first_ephemeral_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range.ok().and_then(|range| range.split_whitespace().next()?.parse().ok());
    first.unwrap_or(LASTING_PORTS.end)
}

impl Settings {
    /// Settings of the directory, made at its first start. Ports that another program took in the
    /// meantime are replaced; the notes say so.
    pub fn load_or_create(
        layout: &Layout,
        pools: Option<usize>,
        pool_bytes: Option<u64>,
    ) -> Result<(Self, Vec<String>)> {
        let path = layout.settings();
        let mut notes = Vec::new();
        let settings = match std::fs::read(&path) {
            Ok(bytes) => {
                let mut settings: Self = serde_json::from_slice(&bytes).with_context(|| {
                    format!("{} is damaged: move the directory away to start anew", path.display())
                })?;
                if settings.format > FORMAT {
                    bail!(
                        "{} is of format {}, this Quoin knows {FORMAT}: use the newer Quoin that made it, or another --dir",
                        path.display(),
                        settings.format
                    );
                }
                // An attach process that outlived its supervisor still has its port.
                let attach_goes_on =
                    std::os::unix::net::UnixStream::connect(layout.attach_socket()).is_ok();
                settings.replace_taken_ports(attach_goes_on, &mut notes)?;
                let size = settings.pools.first().map_or(0, |pool| pool.capacity_bytes);
                if pools.is_some_and(|pools| pools != settings.pools.len())
                    || pool_bytes.is_some_and(|bytes| bytes != size)
                {
                    notes.push(format!(
                        "{} pools of up to {} were made here at the first start: --pools and \
                         --pool-size have no effect now; use another --dir for others",
                        settings.pools.len(),
                        crate::size::show_size(size)
                    ));
                }
                settings
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Self::create(layout, pools.unwrap_or(POOLS), pool_bytes, &mut notes)?
            }
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        settings.save(layout)?;
        Ok((settings, notes))
    }

    fn create(
        layout: &Layout,
        pools: usize,
        pool_bytes: Option<u64>,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let filesystem = rustix::fs::statvfs(layout.root()).context("query the free disk space")?;
        let free = filesystem.f_bavail.saturating_mul(filesystem.f_frsize);
        let capacity_bytes = pool_bytes.unwrap_or(default_pool_bytes(free, pools));
        if pool_bytes.is_none() && capacity_bytes < POOL_BYTES_MIN {
            bail!(
                "{} has {} free, too little for {pools} pools of at least {} each: choose another \
                 --dir, fewer --pools, or smaller ones by --pool-size",
                layout.root().display(),
                crate::size::show_size(free),
                crate::size::show_size(POOL_BYTES_MIN)
            );
        }
        // Checked before anything is kept that the next start would use.
        match quoin_store::FormatOptions::new(PoolId(0)).check(capacity_bytes) {
            Err(PoolError::TooSmall { needed_bytes, .. }) => bail!(
                "--pool-size {} is too small: a pool needs at least {needed_bytes} bytes ({})",
                crate::size::show_size(capacity_bytes),
                crate::size::show_size(needed_bytes)
            ),
            checked => checked?,
        }
        quoin_store::FileDisk::rehearse(&layout.root().join("pool"), capacity_bytes, true)
            .with_context(|| {
                format!("--pool-size {} is too large", crate::size::show_size(capacity_bytes))
            })?;
        if capacity_bytes.saturating_mul(pools as u64) > free {
            notes.push(format!(
                "{pools} pools of {} may grow beyond the {} that are free in {}: a full disk stops \
                 them before they are full",
                crate::size::show_size(capacity_bytes),
                crate::size::show_size(free),
                layout.root().display()
            ));
        }
        // All ports are held until all are chosen, so that none is chosen twice.
        let mut ports = Ports::default();
        Ok(Self {
            format: FORMAT,
            node: crate::roles::host_name(),
            controller: Endpoint { listen: ports.next()?, http: ports.next()? },
            pools: (0..pools)
                .map(|index| {
                    let name = format!("pool-{}", char::from(b'a' + index as u8));
                    Ok(PoolSettings {
                        name,
                        capacity_bytes,
                        listen: ports.next()?,
                        http: ports.next()?,
                    })
                })
                .collect::<Result<_>>()?,
            target_http: ports.next()?,
            node_http: ports.next()?,
            attach_http: ports.next()?,
            mirror_listen: ports.next()?,
            mirror_http: ports.next()?,
        })
    }

    fn replace_taken_ports(&mut self, attach_goes_on: bool, notes: &mut Vec<String>) -> Result<()> {
        let mut ports = Ports::default();
        let mut used = vec![
            ("controller", &mut self.controller.listen),
            ("controller's metrics", &mut self.controller.http),
            ("target's metrics", &mut self.target_http),
            ("node's metrics", &mut self.node_http),
            ("attach's metrics", &mut self.attach_http),
            ("mirror", &mut self.mirror_listen),
            ("mirror's metrics", &mut self.mirror_http),
        ];
        for pool in &mut self.pools {
            used.push((pool.name.as_str(), &mut pool.listen));
            used.push((pool.name.as_str(), &mut pool.http));
        }
        for (name, address) in used {
            if name == "attach's metrics" && attach_goes_on {
                continue;
            }
            if address.port() == 0 {
                *address = ports.next()?;
            } else if !ports.keep(*address) {
                let other = ports.next()?;
                notes.push(format!(
                    "port {} is in use by another program: {name} takes {}",
                    address.port(),
                    other.port()
                ));
                *address = other;
            }
        }
        Ok(())
    }

    fn save(&self, layout: &Layout) -> Result<()> {
        let path = layout.settings();
        let beside = path.with_extension("json.new");
        let write = || {
            std::fs::write(&beside, serde_json::to_vec_pretty(self)?)?;
            std::fs::rename(&beside, &path)?;
            anyhow::Ok(())
        };
        write().with_context(|| format!("write {}", path.display()))
    }
}

/// Each pool's part of what is free, down to whole 64 MiB.
fn default_pool_bytes(free_bytes: u64, pools: usize) -> u64 {
    let share = free_bytes / 100 * POOLS_SHARE_PERCENT / pools as u64;
    share - share % (64 << 20)
}

/// A row of ports that one process has to itself for as long as it runs, so that two that start at the same
/// time do not choose the same port while each needs no more than a row.
struct Row {
    number: u32,
    /// An abstract name, which goes with its process and is known where the ports are: in one network
    /// namespace.
    _reserved: Option<unix::UnixListener>,
}

impl Row {
    /// Reserves one of so many rows, this one or the next that no other process has. Where all are reserved
    /// it is this one, and others may choose the same ports.
    fn of(first: u32, rows: u32) -> Row {
        let rows = rows.max(1);
        let reserved = (0..rows).map(|n| first.wrapping_add(n) % rows).find_map(|number| {
            let address = unix::SocketAddr::from_abstract_name(format!("quoin-dev-ports-{number}"));
            let listener = unix::UnixListener::bind_addr(&address.ok()?).ok()?;
            Some(Row { number, _reserved: Some(listener) })
        });
        reserved.unwrap_or(Row { number: first % rows, _reserved: None })
    }
}

/// Listeners that hold the chosen ports while others are chosen.
#[derive(Default)]
struct Ports(Vec<TcpListener>);

impl Ports {
    /// A free port that the kernel does not give to outgoing connections: they would take it while
    /// its process restarts. Between its choice and the start of that process a port looks free to
    /// others, so each process chooses in a row of its own first.
    fn next(&mut self) -> Result<SocketAddr> {
        static NEXT_OFFSET: AtomicU32 = AtomicU32::new(0);
        static ROW: OnceLock<Row> = OnceLock::new();
        let lasting = LASTING_PORTS.start..LASTING_PORTS.end.min(first_ephemeral_port());
        let count = lasting.len() as u32;
        let row = ROW.get_or_init(|| Row::of(std::process::id(), count / PORTS_IN_A_ROW));
        let first = row.number * PORTS_IN_A_ROW;
        let chosen = (0..count)
            .map(|_| first.wrapping_add(NEXT_OFFSET.fetch_add(1, Ordering::Relaxed)) % count)
            .map(|offset| lasting.start + offset as u16)
            // The kernel's choice where none of those is free.
            .chain([0])
            .find_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok());
        let listener = chosen.context("no free port on loopback")?;
        let address = listener.local_addr()?;
        self.0.push(listener);
        Ok(address)
    }

    fn keep(&mut self, address: SocketAddr) -> bool {
        TcpListener::bind(address).map(|listener| self.0.push(listener)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_start_keeps_names_sizes_and_ports_and_replaces_occupied_ports() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        let (first, notes) = Settings::load_or_create(&layout, None, None).unwrap();
        assert!(notes.is_empty());
        let taken = TcpListener::bind(first.pools[1].listen).unwrap();
        let (second, notes) = Settings::load_or_create(&layout, None, None).unwrap();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains("pool-b"), "{notes:?}");
        assert_ne!(second.pools[1].listen, first.pools[1].listen);
        assert_eq!(second.controller, first.controller);
        assert_eq!(second.pools[0], first.pools[0]);
        drop(taken);
        // The choice is remembered.
        assert_eq!(Settings::load_or_create(&layout, None, None).unwrap().0, second);
    }

    #[test]
    fn a_row_of_ports_is_of_one_process_until_that_ends() {
        // No other process has that many.
        let first = Row::of(8_000, 9_000);
        let second = Row::of(8_000, 9_000);
        assert!(first.number >= 8_000 && second.number > first.number, "a row was given twice");
        let again = first.number;
        drop(first);
        assert_eq!(Row::of(again, 9_000).number, again, "it is free again");
    }

    #[test]
    fn ports_are_chosen_outside_the_ephemeral_range() {
        if first_ephemeral_port() <= LASTING_PORTS.start {
            return;
        }
        let mut ports = Ports::default();
        let mut chosen: Vec<u16> = (0..50).map(|_| ports.next().unwrap().port()).collect();
        assert!(chosen.iter().all(|port| *port < first_ephemeral_port()), "{chosen:?}");
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen.len(), 50, "one was chosen twice");
    }

    #[test]
    fn by_default_the_pools_may_grow_into_four_fifths_of_the_free_disk_together() {
        let gib = 1 << 30;
        assert_eq!(default_pool_bytes(300 * gib, 3), 80 * gib);
        assert_eq!(default_pool_bytes(300 * gib, 1), 240 * gib);
        for (free, pools) in [(10 * gib + 1, 3), (77 * gib + 12_345, 4), (u64::MAX, 26)] {
            let (each, pools_u64) = (default_pool_bytes(free, pools), pools as u64);
            assert_eq!(each % (64 << 20), 0);
            assert!(each * pools_u64 <= free / 5 * 4, "{pools} of {each} in {free}");
            let given_up = (64 << 20) * pools_u64 + 100;
            assert!(each * pools_u64 + given_up > free / 5 * 4, "{pools} of {each} in {free}");
        }

        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        let (settings, _) = Settings::load_or_create(&layout, None, None).unwrap();
        let filesystem = rustix::fs::statvfs(directory.path()).unwrap();
        let free = filesystem.f_bavail * filesystem.f_frsize;
        let all: u64 = settings.pools.iter().map(|pool| pool.capacity_bytes).sum();
        // Others write to this disk meanwhile.
        assert!((free / 10 * 6..free).contains(&all), "{all} of {free}");
    }

    #[test]
    fn a_new_pool_is_sparse() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        let (settings, _) = Settings::load_or_create(&layout, None, None).unwrap();
        let path = directory.path().join("data");
        let size = settings.pools[0].capacity_bytes;
        let disk = quoin_store::FileDisk::create(&path, size, true).unwrap();
        let format = quoin_store::FormatOptions::new(PoolId(1));
        quoin_store::Pool::format(&disk, &format).unwrap();
        drop(quoin_store::Pool::open(disk, quoin_store::PoolOptions::default()).unwrap());
        let file = std::fs::metadata(&path).unwrap();
        assert_eq!(file.len(), size);
        let taken = file.blocks() * 512;
        assert!(taken <= size / 100, "{taken} of {size}");
    }

    #[test]
    fn impossible_pool_sizes_are_refused_and_large_ones_are_noted() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        for (size, words) in [(64 << 20, "at least 68"), (900 << 40, "is too large")] {
            let error = Settings::load_or_create(&layout, None, Some(size)).unwrap_err();
            assert!(error.to_string().contains(words), "{error:#}");
            assert!(!layout.settings().exists());
        }
        let filesystem = rustix::fs::statvfs(directory.path()).unwrap();
        let free = filesystem.f_bavail * filesystem.f_frsize;
        let (_, notes) = Settings::load_or_create(&layout, Some(2), Some(free * 3 / 4)).unwrap();
        assert!(notes[0].contains("may grow beyond"), "{notes:?}");
        let (_, notes) = Settings::load_or_create(&layout, Some(1), Some(1 << 30)).unwrap();
        assert!(notes[0].contains("2 pools of up to"), "{notes:?}");
    }

    #[test]
    fn settings_of_a_newer_format_and_damaged_ones_are_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        let (mut settings, _) = Settings::load_or_create(&layout, None, None).unwrap();
        settings.format = FORMAT + 1;
        settings.save(&layout).unwrap();
        let message = Settings::load_or_create(&layout, None, None).unwrap_err().to_string();
        assert!(message.contains("newer Quoin"), "{message}");
        std::fs::write(layout.settings(), "{").unwrap();
        let message = Settings::load_or_create(&layout, None, None).unwrap_err().to_string();
        assert!(message.contains("damaged"), "{message}");
    }
}
