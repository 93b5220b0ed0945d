//! The lives of a pool in one process: it is opened anew from its media each time its disk failed.
//!
//! **After a disk error no replica is continuous.** What the kernel dropped is unknown, the boot
//! cookie is the same as before, and the failing disk may have refused to take the replicas' own
//! word for it. So before a pool whose disk failed answers anything again, every replica's claim
//! is withdrawn on media. Until then the pool has no witness ([`crate::witness`]): a process that
//! ends because its disk failed must not leave the claims to the next one.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_replication::replica::store::StoreError;
use quoin_store::disk::Syncer as SyncDisk;
use quoin_store::{ReplicaPool, give_up_continuity};
use quoin_telemetry::health::Health;
use quoin_telemetry::notices::Severity;
use tokio::sync::watch;

use crate::facts::PoolFacts;
use crate::shard::{Ended, Input, Parts, Shard};
use crate::syncer::Syncer;
use crate::{Error, Opened};

/// Between attempts to open a pool whose disk failed.
const REOPEN: Duration = Duration::from_secs(1);

/// State that the serving thread shares with the others.
pub(crate) struct Watch {
    /// Reason why the pool is not served at this moment; `None`: it is.
    pub trouble: Arc<Mutex<Option<String>>>,
    pub health: Health,
    pub stop: watch::Receiver<bool>,
}

impl Watch {
    fn say(&self, why: Option<String>) {
        self.health.set("disk", why.clone());
        *self.trouble.lock().expect("never held across a panic") = why;
    }
}

/// Runs the shard, and opens the pool anew from its media each time the disk failed.
pub(crate) fn keep_serving<P: ReplicaPool + PoolFacts>(
    first: Opened<P>,
    open: &dyn Fn() -> Result<Opened<P>, Error>,
    mut parts: Parts,
    inputs: &Sender<Input>,
    watch: &Watch,
) -> Result<(), Error> {
    let recognition = parts.recognition;
    let mut opened = Some(first);
    loop {
        let Opened { mut pool, mut syncer, .. } = match opened.take() {
            Some(opened) => opened,
            None if *watch.stop.borrow() => return Ok(()),
            None => match open() {
                Ok(opened) => opened,
                Err(error) => {
                    watch.say(Some(error.to_string()));
                    std::thread::sleep(REOPEN);
                    continue;
                }
            },
        };
        if parts.witness.must_withdraw() {
            if let Err(error) = withdraw_claims(&mut pool, &mut syncer) {
                watch.say(Some(error.to_string()));
                std::thread::sleep(REOPEN);
                continue;
            }
            parts.witness.withdrawn();
        }
        watch.say(None);
        let syncer = Syncer::start(syncer, inputs.clone(), parts.reactor.waker())?;
        match Shard::new(pool, &mut parts, syncer)?.run() {
            Ended::Stopped => return Ok(()),
            Ended::LoopFailed(error) => return Err(error.into()),
            Ended::DiskFailed(error) => {
                parts.recognition = parts.recognition.after_disk_failure(recognition);
                let message = match parts.witness.disk_failed() {
                    Ok(()) => format!("{error}: the pool is opened anew from its media"),
                    Err(refused) => format!(
                        "{error}: the pool is opened anew from its media; do not end its process \
                         before that is done, for the next one would not know that the disk failed ({refused})"
                    ),
                };
                parts.notices.push(Severity::Error, "", "", "DiskFailed", message);
                watch.say(Some(error.to_string()));
                // Results of the failed life must not be taken for the next one's; an assignment
                // comes only once.
                let waiting: Vec<Input> = parts.inputs.try_iter().collect();
                for input in waiting {
                    if !matches!(input, Input::Synced { .. } | Input::Fetched { .. }) {
                        // This thread holds the receiver.
                        let _ = inputs.send(input);
                    }
                }
                parts.reactor.waker().wake();
                std::thread::sleep(REOPEN);
            }
        }
    }
}

/// Writes, durably, that no replica is known to hold everything it ever applied.
fn withdraw_claims<P: ReplicaPool>(pool: &mut P, sync: &mut SyncDisk) -> Result<(), StoreError> {
    let wanted = give_up_continuity(pool)?;
    loop {
        let ticket = pool.sync_wanted().ok_or(StoreError::Rule("a failed pool cannot sync"))?;
        pool.sync_finished(ticket, sync())?;
        if ticket >= wanted {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests;
