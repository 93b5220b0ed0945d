//! Backups of the records that a controller makes by itself, one file after the other in a directory.
//!
//! The names of the files say when each was made, so that a controller that was started again goes on
//! with the period of before.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use quoin_identity::{make_dir, write_private};
use tokio::sync::watch;

use crate::Error;
use crate::controller::Controller;
use crate::disaster::kept_backups;
use crate::state::events::{Object, Severity};
use crate::time::now_ms;

/// After a backup that failed, the next attempt comes so soon.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Where backups go, how often, and how many are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackupSchedule {
    pub into: PathBuf,
    pub every: Duration,
    pub keep: usize,
}

/// Outcomes of the backups, for `/metrics`.
#[derive(Default)]
pub(crate) struct BackupRecord {
    is_scheduled: AtomicBool,
    /// Since 1970; 0: there is none.
    last_seconds: AtomicI64,
    failures: AtomicU64,
}

impl BackupRecord {
    pub(crate) fn is_scheduled(&self) -> bool {
        self.is_scheduled.load(Ordering::Relaxed)
    }

    pub(crate) fn last_seconds(&self) -> i64 {
        self.last_seconds.load(Ordering::Relaxed)
    }

    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

fn now_seconds() -> i64 {
    i64::try_from(now_ms() / 1000).unwrap_or(i64::MAX)
}

impl BackupSchedule {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.every.is_zero() {
            return Err(Error::invalid("backup every", "a time above 0"));
        }
        if self.keep == 0 {
            return Err(Error::invalid("backups kept", "at least 1"));
        }
        Ok(())
    }

    /// How long to wait where the newest backup is of that time.
    fn wait(&self, newest: Option<i64>, now: i64) -> Duration {
        let age = newest.and_then(|newest| u64::try_from(now - newest).ok());
        // One of the future is by a clock that was wrong, and says nothing.
        let age = age.map_or(self.every, Duration::from_secs);
        self.every.saturating_sub(age)
    }

    /// Makes one backup and deletes those beyond the number that is kept.
    async fn make(&self, controller: &Controller) -> Result<(), Error> {
        make_dir(&self.into)?;
        let file = kept_backups::new_file(&self.into, now_seconds());
        let bytes = controller.disaster.backups.make(true).await?;
        let directory = self.clone();
        let write = move || {
            write_private(&file, &bytes)?;
            kept_backups::rotate(&directory.into, directory.keep).map(drop)
        };
        tokio::task::spawn_blocking(write).await.map_err(|error| Error::File {
            path: self.into.clone(),
            source: std::io::Error::other(error),
        })?
    }

    /// Makes backups until `shutdown`.
    pub(crate) async fn keep(
        self,
        controller: Arc<Controller>,
        record: Arc<BackupRecord>,
        mut shutdown: watch::Receiver<bool>,
    ) {
        record.is_scheduled.store(true, Ordering::Relaxed);
        // A directory that is not there yet has none; one that cannot be read is told below.
        let newest = kept_backups::newest(&self.into).ok().flatten();
        // One of a time that lies ahead would hide for as long that no other is made.
        let last = newest.filter(|newest| *newest <= now_seconds()).unwrap_or(0);
        record.last_seconds.store(last, Ordering::Relaxed);
        let mut wait = self.wait(newest, now_seconds());
        let mut has_failed = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
            wait = AGAIN_AFTER.min(self.every);
            // A copy of records that come from a backup is none before it agrees with the pools.
            if controller.state.check_ruling().is_err() {
                continue;
            }
            let cluster = Object::new("cluster", "", "");
            let into = self.into.display();
            let (severity, reason, message) = match self.make(&controller).await {
                Ok(()) => {
                    record.last_seconds.store(now_seconds(), Ordering::Relaxed);
                    wait = self.every;
                    if !std::mem::take(&mut has_failed) {
                        continue;
                    }
                    let message = format!("{into}: backups of the records are made again");
                    (Severity::Normal, "BackupMade", message)
                }
                Err(error) => {
                    record.failures.fetch_add(1, Ordering::Relaxed);
                    has_failed = true;
                    let message =
                        format!("{into}: no backup of the records could be made: {error}");
                    (Severity::Error, "BackupFailed", message)
                }
            };
            controller.state.events().record(severity, cluster, reason, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(into: PathBuf, every_ms: u64) -> BackupSchedule {
        BackupSchedule { into, every: Duration::from_millis(every_ms), keep: 2 }
    }

    #[test]
    fn the_next_backup_is_due_a_period_after_the_newest_and_at_once_where_there_is_none() {
        let schedule =
            BackupSchedule { every: Duration::from_secs(100), ..schedule("/b".into(), 1) };
        assert_eq!(schedule.wait(None, 1000), Duration::ZERO);
        assert_eq!(schedule.wait(Some(960), 1000), Duration::from_secs(60));
        assert_eq!(schedule.wait(Some(100), 1000), Duration::ZERO);
        assert_eq!(schedule.wait(Some(5000), 1000), Duration::ZERO, "a clock that was wrong");
    }

    #[tokio::test]
    async fn a_failed_backup_is_told_and_counted_and_the_next_one_that_is_made_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("controller");
        crate::init(&dir, quoin_identity::Lifetimes::default()).await.unwrap();
        let controller = Arc::new(crate::open(&crate::Options::new(&dir)).await.unwrap());
        let (record, into) = (Arc::new(BackupRecord::default()), directory.path().join("backups"));
        std::fs::write(&into, "in the way").unwrap();
        let (stop, shutdown) = watch::channel(false);
        let keeping = schedule(into.clone(), 20).keep(controller.clone(), record.clone(), shutdown);
        let keeping = tokio::spawn(keeping);
        let until = async |what: &str, holds: &dyn Fn() -> bool| {
            for _ in 0..3000 {
                if holds() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            panic!("never: {what}");
        };
        until("a failure is counted", &|| record.failures() > 1).await;
        assert!(record.is_scheduled() && record.last_seconds() == 0);
        std::fs::remove_file(&into).unwrap();
        until("a backup is made", &|| record.last_seconds() > 0).await;
        let reasons = || {
            let events = controller.state.events().after(0);
            events.into_iter().map(|event| event.reason).collect::<Vec<_>>()
        };
        until("it is told", &|| reasons().contains(&"BackupMade".to_owned())).await;
        assert!(reasons().contains(&"BackupFailed".to_owned()));
        let file = std::fs::read_dir(&into).unwrap().next().unwrap().unwrap().path();
        let backup = crate::disaster::backup::Backup::parse(&std::fs::read(file).unwrap()).unwrap();
        assert!(backup.has_authority());
        stop.send(true).unwrap();
        keeping.await.unwrap();
    }
}
