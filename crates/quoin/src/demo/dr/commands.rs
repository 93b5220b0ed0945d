//! The story as a person tells it, by commands of Quoin.

use anyhow::{Context, Result, bail};
use quoin_api::control::{GetMirrorRequest, Mirror, MirrorRef};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Runtime;

use super::super::database::{self, Database, Found, Journal, VOLUME_BYTES, Volumes};
use super::super::script::{note, print_timed};
use super::super::{cluster, interrupt, print_line, show_bytes};
use super::{
    ANSWER_BUDGET, GROUP, Hand, LOG, LOST, POLL, Pair, SILENCE_BUDGET, STEP_BUDGET, TABLE,
    check_told, go_on, lose, seconds, tell_loss, wait_for_sync, work,
};
use crate::client::{self, refusal};
use crate::dev::layout::Layout;

pub(super) fn play(pair: &Pair) -> Result<()> {
    let side = |name, layout| Side { name, layout, runtime: &pair.runtime };
    let (first, second) = (side("first", pair.first()), side("second", pair.second()));
    Demo { first, second, cluster: &pair.cluster }.play()
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
    cluster: &'a cluster::DevCluster,
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

impl Hand for Side<'_> {
    fn open(&self) -> Result<Volumes> {
        self.attach(LOG, TABLE)
    }

    fn close(&self, volumes: Volumes) -> Result<()> {
        drop(volumes);
        self.detach(LOG, TABLE)
    }

    fn synced_at(&self) -> Result<Option<SystemTime>> {
        Ok(synced_at(&self.mirror()?))
    }
}

impl Demo<'_> {
    fn play(&self) -> Result<()> {
        let database = self.begin()?;
        let told_by = format!("`quoin mirror status {GROUP}`");
        let (told, journal) = lose(self.cluster, &self.first, database, &told_by)?;
        let found = self.fail_over(told, &journal)?;
        print_timed("the database goes on at second");
        let database = go_on(&self.second, &journal, found, 2)?;
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
        let volumes = first.open()?;
        let nothing = Found { in_log: 0, in_table: 0 };
        Database::start(volumes, Journal::default(), nothing, 1)
    }

    /// The second cluster takes over; what is lost is compared with what was told.
    fn fail_over(&self, told: SystemTime, journal: &Journal) -> Result<Found> {
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
        let volumes = second.open()?;
        note(&format!("{printed}; served after {:.1} s", began.elapsed().as_secs_f64()));
        let found = journal.check(&volumes)?;
        for told in [told, told_here] {
            check_told(told, journal, found)?;
        }
        tell_loss(told_here, journal, found)?;
        second.close(volumes)?;
        Ok(found)
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
        let volumes = first.open()?;
        let count = lost.check_whole(&volumes)?;
        note(&format!("first has its own {count} records: neither side overwrites the other one"));
        first.close(volumes)?;

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
        wait_for_sync(second, database::now())?;
        let mirror = second.mirror()?;
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
        let volumes = first.open()?;
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
        let volumes = first.open()?;
        let count = journal.check_whole(&volumes)?;
        first.close(volumes)?;
        print_timed("the database is where it began, and second has the copy");
        print_line(&format!(
            "\n{count} records are on first: all that was acknowledged, less what the failover said to lose\n"
        ));
        Ok(())
    }
}

fn why_split(mirror: &Mirror) -> &str {
    mirror.message.split_once(';').map_or(&*mirror.message, |(words, _)| words)
}

fn synced_at(mirror: &Mirror) -> Option<SystemTime> {
    let at = mirror.synced_at?;
    Some(UNIX_EPOCH + Duration::new(at.seconds.try_into().ok()?, at.nanos.try_into().ok()?))
}
