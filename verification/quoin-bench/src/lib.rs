//! Quoin beside the floor, measured in one run by one load generator.
//!
//! The **floor** is the same work with no product in it: a relay that takes NBD requests on a unix
//! socket and sends each write to three sinks over loopback TCP; a sink `pwrite`s it to a
//! preallocated file and answers; two answers are needed. It has the same durability classes as the
//! product (see [`Class`]). A figure of Quoin is meaningful only as a ratio to the floor of the
//! same class in the same run: [`compare`] runs the two in turn and takes medians.
//!
//! | module | idea |
//! |---|---|
//! | `load` | the load generator: one NBD connection, a fixed depth, a fixed time |
//! | `relay`, `sink` | the floor, as processes of their own |
//! | `floor` | starts and ends those processes |
//! | `product` | starts a Quoin (`quoin dev`) of its own and makes volumes on it |
//! | `profile` | where the CPU time of Quoin's processes goes, recorded by perf |
//! | `usage` | CPU time and memory of processes, from /proc |
//! | `cases`, `report` | the measured cases, and the output |
//! | `cold` | reads of data that no cache holds, beside the bare device |
//! | `sustained` | writes that go on for longer than a page cache takes them |
//! | `rebuild` | speed of the rebuild of a lost replica |
//! | `security` | cost of encryption of data connections |
//! | `encryption` | cost of the encryption of volumes |
//! | `heal` | many volumes after the loss of a pool |
//! | `making` | volumes that are made beside thousands of others |
//! | `orchestrated` | volumes over CSI: a first mount, a thousand of them, a change of options |
//! | `takeover` | a volume of a lost node on another one |
//! | `clones` | a clone of a full volume beside an empty volume |
//! | `snapshots` | what snapshots cost clients, their deletion, a return to one |
//! | `groups` | the pause of clients while snapshots of ten volumes are made together |
//! | `export` | an export of a snapshot beside a copy of a file |
//! | `mirror` | copies in a second cluster: transfers, changes, lag, roles |
//! | `history` | changed blocks of two snapshots, and rebuilds of volumes with snapshots |
//! | `nodes` | targets of further nodes |
//! | `further` | cases without a floor: idle cost, memory of full caches, cold start |
//! | `absence` | data moved at the return of a replica that was away |

mod absence;
pub mod cases;
pub mod clones;
mod cold;
pub mod compare;
pub mod encryption;
pub mod export;
pub mod floor;
pub mod further;
pub mod groups;
pub mod heal;
pub mod history;
mod interrupt;
pub mod load;
mod making;
pub mod members;
pub mod mirror;
pub mod nbd;
pub mod nodes;
pub mod orchestrated;
mod overwrites;
pub mod product;
mod profile;
pub mod rebuild;
pub mod relay;
pub mod report;
pub mod security;
pub mod sink;
pub mod snapshots;
pub mod sustained;
pub mod takeover;
pub mod usage;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Moment at which the floor (and the volume beside it) acknowledges a write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// In the page cache of two of three.
    Cache,
    /// After `fdatasync` on two of three; one sync serves a whole batch.
    Media,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("{0}")]
    Failed(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}

/// Flags of `quoin bench`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Only the ten short IO cases, within three minutes; with `--only sustained` shorter sustained writes
    #[arg(long)]
    pub quick: bool,
    /// Write the figures as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Only cases whose names contain this text
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    #[command(flatten)]
    pub measure: MeasureOptions,
    #[command(flatten)]
    pub subject: SubjectOptions,
    #[command(flatten)]
    pub further: further::FurtherOptions,
    /// Data of each sustained case, in MiB, over a volume of a third of that [default: 12288, with --quick 1536]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(96..=1 << 20))]
    pub sustained_mib: Option<u64>,
    #[command(flatten)]
    pub rebuild: rebuild::RebuildOptions,
    #[command(flatten)]
    pub heal: heal::HealOptions,
}

/// Measurements of the IO cases.
#[derive(clap::Args, Clone, Debug)]
pub struct MeasureOptions {
    /// Seconds of each measurement [default: 3, with --quick 1.2]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Pairs (floor, Quoin) of each case; medians are shown
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub pairs: usize,
    /// Size of the volumes, in MiB
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    pub size_mib: u64,
    /// Directory for the files of both sides (they must share one disk)
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Record where Quoin's processes spend their CPU time, by perf, to this file (`cargo xtask profile`)
    #[arg(long, value_name = "FILE", hide = true)]
    pub perf_data: Option<PathBuf>,
}

/// The sides that are measured.
#[derive(clap::Args, Clone, Debug)]
pub struct SubjectOptions {
    /// Measure a Quoin that runs already, through this NBD socket, instead of one of its own
    #[arg(long, value_name = "SOCKET", requires = "pids")]
    pub nbd_socket: Option<PathBuf>,
    /// Process ids of that Quoin, separated by commas
    #[arg(long, value_name = "PIDS", value_delimiter = ',')]
    pub pids: Vec<u32>,
    /// Only the floor
    #[arg(long)]
    pub floor_only: bool,
}

impl SubjectOptions {
    /// A Quoin of the benchmark's own is measured.
    fn is_own(&self) -> bool {
        self.nbd_socket.is_none() && !self.floor_only
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number from 0.1 to 3600 is needed".into()),
    }
}

impl Options {
    /// Returns the duration of each measurement.
    fn time(&self) -> Duration {
        // More pairs rather than longer ones: a disturbance of one of five does not change the
        // median.
        let usual = if self.quick { 1.2 } else { 3.0 };
        Duration::from_secs_f64(self.measure.seconds.unwrap_or(usual))
    }

    /// Returns whether `--only` includes the case.
    fn wants(&self, case: &str) -> bool {
        self.only.as_ref().is_none_or(|text| case.contains(text.as_str()))
    }
}

/// Runs the benchmark; `quoin` is the binary of Quoin's processes and the floor's (the floor by its
/// hidden command `bench-part`).
pub fn run(options: &Options, quoin: &std::path::Path) -> Result<(), Error> {
    let base = options.measure.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch(base.join(format!("quoin-bench-{}", std::process::id())));
    interrupt::clean_up_when_interrupted(scratch.0.clone())?;
    let mut results = cases::run(options, quoin, &scratch.0)?;
    // They take their time, so a quick run has them where they are asked for.
    let is_asked = !options.quick || options.only.is_some();
    if is_asked && options.subject.is_own() {
        results.extend(sustained::run(options, quoin, &scratch.0.join("sustained"))?);
    }
    let whole = !options.quick && options.subject.is_own();
    if whole {
        results.extend(cold::run(options, quoin, &scratch.0.join("cold-reads"))?);
    }
    if whole && options.wants(rebuild::NAME) {
        results.push(rebuild::run(options, quoin, &scratch.0.join("rebuild"))?);
    }
    if whole {
        results.extend(security::run(options, quoin, &scratch.0)?);
    }
    if whole && options.wants(encryption::NAME) {
        results.push(encryption::run(options, quoin, &scratch.0.join("encryption"))?);
    }
    report::print(&results);
    let facts = if whole { further::run(options, quoin, &scratch.0)? } else { Vec::new() };
    report::print_facts(&facts);
    if let Some(only) = options.only.as_ref().filter(|_| results.is_empty() && facts.is_empty()) {
        let rule = if whole {
            ""
        } else {
            "; with --quick and with a Quoin that runs already most are left out"
        };
        return Err(Error::Failed(format!("no case was run whose name contains {only:?}{rule}")));
    }
    if let Some(path) = &options.json {
        report::write_json(&results, &facts, path)?;
    }
    Ok(())
}

/// A directory that is removed with the benchmark.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // The directory is temporary, so a file that cannot be removed does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process of the floor, as the hidden command `bench-part` starts it.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum Part {
    /// Takes requests from the load generator
    Relay {
        /// Unix socket to listen on
        #[arg(long)]
        listen: PathBuf,
        /// Addresses of the three sinks
        #[arg(long, value_delimiter = ',')]
        sinks: Vec<std::net::SocketAddr>,
        #[arg(long)]
        size_bytes: u64,
    },
    /// Writes to a file
    Sink {
        #[arg(long)]
        file: PathBuf,
        #[arg(long)]
        size_bytes: u64,
        /// fdatasync each batch before it is answered
        #[arg(long)]
        sync: bool,
    },
}

pub fn run_part(part: &Part) -> Result<(), Error> {
    // The benchmark's parts end with it in every case.
    let signal = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(signal)
        .map_err(|error| Error::io("ask to end with the benchmark")(error.into()))?;
    match part {
        Part::Relay { listen, sinks, size_bytes } => relay::run(listen, sinks, *size_bytes),
        Part::Sink { file, size_bytes, sync } => sink::run(file, *size_bytes, *sync),
    }
}

/// Reports the address of a part to the benchmark.
fn announce(place: impl std::fmt::Display) -> Result<(), Error> {
    writeln!(std::io::stdout(), "{place}").map_err(Error::io("tell the benchmark"))
}
