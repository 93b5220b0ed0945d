//! `quoin demo dr`: a database whose cluster is lost goes on at a second one, and comes back.
//!
//! Every line is a claim that is checked: what a failover loses is compared with what the database knows to
//! have been acknowledged, and at each step every byte with what belongs there.

use anyhow::{Context, Result, bail};
use quoin_api::control::{GetMirrorRequest, Mirror, MirrorRef};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Runtime;

use super::cluster::{self, DevCluster};
use super::database::{self, Database, Found, Journal, VOLUME_BYTES, Volumes};
use super::script::{note, print_timed};
use super::{CLUSTER, interrupt, print_line, show_bytes};
use crate::client::{self, refusal};
use crate::dev::layout::Layout;

const GROUP: &str = "shop";
const LOG: &str = "log";
const TABLE: &str = "data";
/// Processes that are lost with the first cluster; its pools keep what they have.
const LOST: [&str; 3] = ["controller", "target", "mirror"];
const ANSWER_BUDGET: Duration = Duration::from_secs(30);
/// Silence is seen thirty seconds after the last word.
const SILENCE_BUDGET: Duration = Duration::from_secs(180);
const STEP_BUDGET: Duration = Duration::from_secs(60);
/// Between a point and the loss, so that there is something to lose.
const LOST_WORK: Duration = Duration::from_secs(4);
const NEW_WORK: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(200);

pub fn run(directory: &Path) -> Result<()> {
    print_timed("starting two clusters that are paired, \"first\" and \"second\"");
    let cluster = DevCluster::start_pair(&directory.join(CLUSTER))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let here = cluster.layout.clone();
    let there = Layout::at(&here.peer());
    let side = |name, layout| Side { name, layout, runtime: &runtime };
    let demo = Demo { first: side("first", here), second: side("second", there), cluster };
    demo.play()?;
    demo.cluster.stop()
}

/// One of the two clusters, as a user of it sees it.
struct Side<'a> {
    name: &'static str,
    layout: Layout,
    runtime: &'a Runtime,
}

struct Demo<'a> {
    first: Side<'a>,
    second: Side<'a>,
    cluster: DevCluster,
}

impl Side<'_> {
    /// Runs a command that is shown to the user.
    fn quoin(&self, arguments: &[&str]) -> Result<String> {
        note(&format!("{}$ quoin {}", self.name, arguments.join(" ")));
        self.quietly(arguments)
    }

    fn quietly(&self, arguments: &[&str]) -> Result<String> {
        cluster::command(&self.layout, arguments)
            .with_context(|| format!("on the {} cluster", self.name))
    }

    /// Runs a command that is to be refused with these words.
    fn is_refused(&self, arguments: &[&str], words: &str) -> Result<()> {
        note(&format!("{}$ quoin {}", self.name, arguments.join(" ")));
        match cluster::command(&self.layout, arguments) {
            Ok(printed) => bail!("`quoin {}` is not refused: {printed}", arguments.join(" ")),
            Err(error) if error.to_string().contains(words) => {
                note(&format!("refused: {}", why(&error.to_string())));
                Ok(())
            }
            Err(error) => bail!("the refusal does not say {words:?}: {error}"),
        }
    }

    fn mirror(&self) -> Result<Mirror> {
        interrupt::check()?;
        let asking = async {
            let mut cluster = client::connect(&self.layout.admin_socket()).await?;
            let of = MirrorRef { any: GROUP.to_owned(), ..MirrorRef::default() };
            let answer = cluster.get_mirror(GetMirrorRequest { of: Some(of) }).await;
            Ok(answer.map_err(refusal)?.into_inner())
        };
        let limited = async { tokio::time::timeout(ANSWER_BUDGET, asking).await };
        let answer = self.runtime.block_on(limited);
        answer.with_context(|| format!("the {} cluster does not answer", self.name))?
    }

    /// Waits until what it says of the group is so. A controller that comes back is waited for as well.
    fn wait(&self, words: &str, budget: Duration, is: impl Fn(&Mirror) -> bool) -> Result<Mirror> {
        let began = Instant::now();
        loop {
            let mirror = self.mirror();
            if let Ok(mirror) = &mirror
                && is(mirror)
            {
                return Ok(mirror.clone());
            }
            interrupt::check()?;
            if began.elapsed() > budget {
                let said = match mirror {
                    Ok(mirror) => format!("{}: {}", mirror.role, mirror.message),
                    Err(error) => format!("{error:#}"),
                };
                bail!(
                    "the {} cluster: {words}: not so within {} s ({said})",
                    self.name,
                    budget.as_secs()
                );
            }
            std::thread::sleep(POLL);
        }
    }

    /// Attaches both volumes.
    fn attach(&self, log: &str, table: &str) -> Result<Volumes> {
        let [log, table] = [log, table].map(|volume| self.socket(volume));
        Volumes::connect(&log?, &table?)
    }

    fn socket(&self, volume: &str) -> Result<PathBuf> {
        let began = Instant::now();
        let address = loop {
            // A cluster that is back hears its pools first.
            match self.quietly(&["volume", "attach", volume, "--nbd"]) {
                Err(error) if is_early(&error) && began.elapsed() < STEP_BUDGET => {
                    interrupt::check()?;
                    std::thread::sleep(POLL);
                }
                other => break other?,
            }
        };
        let socket = address.split_once("socket=").context("an address without a socket")?.1;
        Ok(socket.into())
    }

    fn detach(&self, log: &str, table: &str) -> Result<()> {
        self.quietly(&["volume", "detach", log])?;
        self.quietly(&["volume", "detach", table]).map(|_| ())
    }
}

fn is_early(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("try again")
}

/// The message of a refused command, without the command.
fn why(message: &str) -> &str {
    message.split_once("error: ").map_or(message, |(_, why)| why)
}

impl Demo<'_> {
    fn play(&self) -> Result<()> {
        let database = self.begin()?;
        let (told, journal) = self.lose(database)?;
        let found = self.fail_over(&told, &journal)?;
        let database = self.go_on(&journal, found)?;
        self.come_back(&journal)?;
        self.fail_back(database)
    }

    /// A database on the first cluster, mirrored to the second one.
    fn begin(&self) -> Result<Database> {
        let first = &self.first;
        print_timed(&format!(
            "a database on first: volumes {LOG} and {TABLE} of {}, one group, mirrored to second",
            show_bytes(VOLUME_BYTES as u64)
        ));
        let size = VOLUME_BYTES.to_string();
        for volume in [LOG, TABLE] {
            let create = ["volume", "create", volume, "--size", &size, "--replicas", "1"];
            first.quietly(&create)?;
        }
        first.quoin(&["group", "create", GROUP, LOG, TABLE])?;
        first.quoin(&["mirror", "enable", GROUP, "--to", "second", "--every", "10s", "--wait"])?;
        print_timed(&format!(
            "the database writes: each record to {LOG}, flushed, then to {TABLE}, flushed"
        ));
        let volumes = first.attach(LOG, TABLE)?;
        let nothing = Found { in_log: 0, in_table: 0 };
        Database::start(volumes, Journal::default(), nothing, 1)
    }

    /// The first cluster is lost. Gives the time that it told last, and what was acknowledged.
    fn lose(&self, database: Database) -> Result<(SystemTime, Journal)> {
        let began = database::now();
        let wanted = began + Duration::from_secs(2);
        let is_later = |mirror: &Mirror| synced_at(mirror).is_some_and(|at| at > wanted);
        self.first.wait("a point has records", STEP_BUDGET, is_later)?;
        let since = Instant::now();
        let mut told;
        loop {
            database.check()?;
            let mirror = self.first.mirror()?;
            told = synced_at(&mirror).context("it does not say what is on the other side")?;
            if since.elapsed() > LOST_WORK {
                break;
            }
            std::thread::sleep(POLL);
        }
        note(&format!(
            "`quoin mirror status {GROUP}` on first: all that was acknowledged before {} is on second",
            clock(told)
        ));
        print_timed(&format!("the first cluster is lost: kill -9 of its {}", LOST.join(", ")));
        self.cluster.hold(&LOST)?;
        let journal = database.lost()?;
        note(&format!("the database ended; {} records were acknowledged", journal.acknowledged()));
        Ok((told, journal))
    }

    /// The second cluster takes over; what is lost is compared with what was told.
    fn fail_over(&self, told: &SystemTime, journal: &Journal) -> Result<Found> {
        let second = &self.second;
        print_timed("second waits until first counts as silent, which takes 30 s without a word");
        let is_silent = |mirror: &Mirror| mirror.message.contains("silent");
        let began = Instant::now();
        second.wait("the first one is silent", SILENCE_BUDGET, is_silent)?;
        note(&format!("it is silent after {}", seconds(began.elapsed())));
        // Both sides tell it, by the clock of the first one.
        let told_here = synced_at(&second.mirror()?).context("second does not say what it has")?;
        second.is_refused(&["mirror", "promote", GROUP], "only force")?;
        print_timed("failover: a person says that first is lost, and promotes with force");
        let began = Instant::now();
        let printed = second.quoin(&["mirror", "promote", GROUP, "--force"])?;
        let volumes = second.attach(LOG, TABLE)?;
        note(&format!("{printed}; served after {:.1} s", began.elapsed().as_secs_f64()));
        let found = journal.check(&volumes)?;
        for told in [*told, told_here] {
            self.check_told(told, journal, found)?;
        }
        self.tell_loss(told_here, journal, found)?;
        second.detach_from(volumes)?;
        Ok(found)
    }

    /// Each record that was acknowledged before that time has to be there.
    fn check_told(&self, told: SystemTime, journal: &Journal, found: Found) -> Result<()> {
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
    fn tell_loss(&self, told: SystemTime, journal: &Journal, found: Found) -> Result<()> {
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

    /// The database goes on at the second cluster.
    fn go_on(&self, journal: &Journal, found: Found) -> Result<Database> {
        print_timed("the database goes on at second");
        let volumes = self.second.attach(LOG, TABLE)?;
        let database = Database::start(volumes, journal.clone(), found, 2)?;
        work(&database)?;
        Ok(database)
    }

    /// The first cluster is back: a split brain, which a person ends. `lost`: what was acknowledged there.
    fn come_back(&self, lost: &Journal) -> Result<()> {
        let (first, second) = (&self.first, &self.second);
        print_timed("the first cluster is back, and knows nothing of the failover");
        self.cluster.release(&LOST)?;
        let is_split = |mirror: &Mirror| mirror.message.contains("split brain");
        for side in [first, second] {
            let mirror = side.wait("the split is seen", STEP_BUDGET, is_split)?;
            note(&format!("{}: {}", side.name, why_split(&mirror)));
        }
        let volumes = first.attach(LOG, TABLE)?;
        let count = lost.check_whole(&volumes)?;
        note(&format!("first has its own {count} records: neither side overwrites the other one"));
        first.detach_from(volumes)?;

        print_timed("first is demoted: it has diverged, and discards nothing without force");
        first.quoin(&["mirror", "demote", GROUP])?;
        let is_diverged = |mirror: &Mirror| mirror.role == "diverged";
        let mirror = first.wait("it has diverged", STEP_BUDGET, is_diverged)?;
        note(&format!("first: {}", mirror.message));
        first.is_refused(&["mirror", "promote", GROUP, "--force"], "resync --force")?;
        let printed = first.quoin(&["mirror", "resync", GROUP, "--force"])?;
        let mirror = first.mirror()?;
        note(&format!("{printed}; kept: {}", mirror.lost));
        self.check_lost(&mirror, lost)?;

        print_timed("first follows as a copy of what the database writes at second");
        let now = database::now();
        let is_later = |mirror: &Mirror| synced_at(mirror).is_some_and(|at| at > now);
        let mirror = second.wait("first has a new point", STEP_BUDGET, is_later)?;
        let role = first.mirror()?.role;
        if role != "secondary" {
            bail!("first is {role}, and not a copy");
        }
        let lag = Duration::from_millis(mirror.lag_ms.unwrap_or_default());
        note(&format!("second is primary, first is secondary, {} behind", seconds(lag)));
        Ok(())
    }

    /// Snapshots of the resync have all that it discarded, and are cloned.
    fn check_lost(&self, mirror: &Mirror, lost: &Journal) -> Result<()> {
        let first = &self.first;
        let mut names = Vec::new();
        for member in &mirror.members {
            let ending = format!("-{}", &member.volume_id[..8.min(member.volume_id.len())]);
            let kept = mirror.lost.split(", ").find(|name| name.ends_with(&ending));
            let kept = kept.with_context(|| format!("nothing is kept of {}", member.name))?;
            let name = format!("old-{}", member.name);
            first.quietly(&["volume", "create", &name, "--from-snapshot", kept])?;
            names.push(name);
        }
        let (old_log, old_table) = (format!("old-{LOG}"), format!("old-{TABLE}"));
        let count = lost.check_whole(&first.attach(&old_log, &old_table)?)?;
        first.detach(&old_log, &old_table)?;
        for name in names {
            first.quietly(&["volume", "delete", &name, "--yes"])?;
        }
        note(&format!(
            "clones of what is kept have all {count} records of before, every byte compared"
        ));
        Ok(())
    }

    /// A planned move: the database stops for it, and nothing is lost.
    fn fail_back(&self, database: Database) -> Result<()> {
        let (first, second) = (&self.first, &self.second);
        work(&database)?;
        print_timed("failback, a planned move: the database stops for it");
        let journal = database.finish()?;
        let began = Instant::now();
        second.detach(LOG, TABLE)?;
        second.quoin(&["mirror", "demote", GROUP])?;
        first.quoin(&["mirror", "promote", GROUP])?;
        let volumes = first.attach(LOG, TABLE)?;
        let took = began.elapsed();
        let count = journal.check_whole(&volumes)?;
        note(&format!(
            "all {count} records are on first, none is lost, every byte compared; it stood still for {}",
            seconds(took)
        ));
        let found = Found { in_log: count, in_table: count };
        let database = Database::start(volumes, journal, found, 3)?;
        work(&database)?;
        let journal = database.finish()?;
        let is_copy = |mirror: &Mirror| mirror.role == "secondary";
        second.wait("it is a copy again", STEP_BUDGET, is_copy)?;
        let volumes = first.attach(LOG, TABLE)?;
        let count = journal.check_whole(&volumes)?;
        first.detach_from(volumes)?;
        print_timed("the database is where it began, and second has the copy");
        print_line(&format!(
            "\n{count} records are on first: all that was acknowledged, less what the failover said to lose\n"
        ));
        Ok(())
    }
}

impl Side<'_> {
    fn detach_from(&self, volumes: Volumes) -> Result<()> {
        drop(volumes);
        self.detach(LOG, TABLE)
    }
}

fn why_split(mirror: &Mirror) -> &str {
    mirror.message.split_once(';').map_or(&*mirror.message, |(words, _)| words)
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

fn synced_at(mirror: &Mirror) -> Option<SystemTime> {
    let at = mirror.synced_at?;
    Some(UNIX_EPOCH + Duration::new(at.seconds.try_into().ok()?, at.nanos.try_into().ok()?))
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
