//! `quoin demo dr`: a database whose cluster is lost goes on at a second one, and comes back.
//!
//! Every line is a claim that is checked: what a failover loses is compared with what the database knows to
//! have been acknowledged, and at each step every byte with what belongs there. A person tells it by commands
//! (`commands.rs`), an orchestrator by calls of CSI and CSI-Addons (`calls.rs`).

mod calls;
mod commands;

use anyhow::{Result, bail};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Runtime;

use super::cluster::DevCluster;
use super::database::{self, Database, Found, Journal, Volumes};
use super::script::{note, print_timed};
use super::{CLUSTER, interrupt};
use crate::dev::layout::Layout;

const GROUP: &str = "shop";
const LOG: &str = "log";
const TABLE: &str = "data";
/// Processes that are lost with the first cluster; its pools keep what they have.
const LOST: [&str; 3] = ["controller", "target", "mirror"];
const ANSWER_BUDGET: Duration = Duration::from_secs(60);
/// Silence is seen thirty seconds after the last word.
const SILENCE_BUDGET: Duration = Duration::from_secs(180);
const STEP_BUDGET: Duration = Duration::from_secs(60);
/// Between a point and the loss, so that there is something to lose.
const LOST_WORK: Duration = Duration::from_secs(4);
const NEW_WORK: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(200);

/// Two clusters that are paired, one below the other's directory.
struct Pair {
    cluster: DevCluster,
    runtime: Runtime,
}

/// `by_calls`: an orchestrator tells the story, and no command of Quoin.
pub fn run(directory: &Path, by_calls: bool) -> Result<()> {
    print_timed("starting two clusters that are paired, \"first\" and \"second\"");
    let cluster = DevCluster::start_pair(&directory.join(CLUSTER))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let pair = Pair { cluster, runtime };
    match by_calls {
        true => calls::play(&pair, directory)?,
        false => commands::play(&pair)?,
    }
    pair.cluster.stop()
}

impl Pair {
    fn first(&self) -> Layout {
        self.cluster.layout.clone()
    }

    fn second(&self) -> Layout {
        Layout::at(&self.cluster.layout.peer())
    }
}

/// Moves of a user of either kind at one of the two clusters.
trait Hand {
    /// Attaches the log and the table.
    fn open(&self) -> Result<Volumes>;
    fn close(&self, volumes: Volumes) -> Result<()>;
    /// Time of which the other side is told to have everything.
    fn synced_at(&self) -> Result<Option<SystemTime>>;
}

/// The database writes until its cluster is lost. Returns the time that the cluster told last, and what was
/// acknowledged.
fn lose(
    cluster: &DevCluster,
    first: &dyn Hand,
    database: Database,
    told_by: &str,
) -> Result<(SystemTime, Journal)> {
    wait_for_sync(first, database::now() + Duration::from_secs(2))?;
    let since = Instant::now();
    let told = loop {
        database.check()?;
        let Some(told) = first.synced_at()? else {
            bail!("it does not say what is on the other side");
        };
        if since.elapsed() > LOST_WORK {
            break told;
        }
        std::thread::sleep(POLL);
    };
    note(&format!(
        "{told_by} on first: all that was acknowledged before {} is on second",
        clock(told)
    ));
    print_timed(&format!("the first cluster is lost: kill -9 of its {}", LOST.join(", ")));
    cluster.hold(&LOST)?;
    let journal = database.lost()?;
    note(&format!("the database ended; {} records were acknowledged", journal.acknowledged()));
    Ok((told, journal))
}

/// Waits until all that was acknowledged before this time is told to be on the other side. A controller that
/// comes back is waited for as well.
fn wait_for_sync(side: &dyn Hand, wanted: SystemTime) -> Result<()> {
    let began = Instant::now();
    loop {
        let told = side.synced_at();
        if matches!(told, Ok(Some(at)) if at > wanted) {
            return Ok(());
        }
        interrupt::check()?;
        if began.elapsed() > STEP_BUDGET {
            bail!("nothing new is told to be on the other side: {told:?}");
        }
        std::thread::sleep(POLL);
    }
}

/// Each record that was acknowledged before that time has to be there.
fn check_told(told: SystemTime, journal: &Journal, found: Found) -> Result<()> {
    let missing = journal.0.get(found.in_log).and_then(|record| record.logged);
    let not_stored = journal.0.get(found.in_table).and_then(|record| record.stored);
    for (volume, at) in [(LOG, missing), (TABLE, not_stored)] {
        if let Some(at) = at.filter(|at| *at < told) {
            bail!(
                "a record that was acknowledged at {} is not in {volume}, though all before {} was told to \
                 be there",
                clock(at),
                clock(told)
            );
        }
    }
    Ok(())
}

/// Compares the loss that was told with the true one.
fn tell_loss(told: SystemTime, journal: &Journal, found: Found) -> Result<()> {
    let missing = journal.0.get(found.in_log).and_then(|record| record.logged);
    let Some(ended) = journal.0.iter().filter_map(|record| record.logged).next_back() else {
        bail!("no record was acknowledged");
    };
    // A record that is in the log alone is stored again from there.
    let lost = journal.acknowledged().saturating_sub(found.in_log);
    let really = missing.and_then(|at| ended.duration_since(at).ok()).unwrap_or_default();
    note(&format!(
        "told: at most the last {} of acknowledged work are lost; true: the last {}, {lost} records",
        seconds(ended.duration_since(told).unwrap_or_default()),
        seconds(really),
    ));
    note(&format!(
        "the other {} are there, {LOG} and {TABLE} are of one instant, every byte compared",
        found.in_log
    ));
    Ok(())
}

/// The database goes on behind these records at the side that took over.
fn go_on(side: &dyn Hand, journal: &Journal, found: Found, reign: u64) -> Result<Database> {
    let database = Database::start(side.open()?, journal.clone(), found, reign)?;
    work(&database)?;
    Ok(database)
}

/// Has the database work for some seconds.
fn work(database: &Database) -> Result<()> {
    let (began, before) = (Instant::now(), database.journal().acknowledged());
    while began.elapsed() < NEW_WORK {
        interrupt::check()?;
        database.check()?;
        std::thread::sleep(Duration::from_millis(20));
    }
    let count = database.journal().acknowledged() - before;
    if count == 0 {
        bail!("the database makes no progress");
    }
    note(&format!("{count} new records in {}", seconds(began.elapsed())));
    Ok(())
}

/// Time of day to the millisecond, as in the UTC times of `quoin mirror status`.
fn clock(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs() % 86_400;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{:03}Z", seconds % 60, since.subsec_millis())
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_of_day_is_that_of_utc() {
        let at = UNIX_EPOCH + Duration::from_millis(1_796_003_817_042);
        assert_eq!(clock(at), "01:56:57.042Z");
    }
}
