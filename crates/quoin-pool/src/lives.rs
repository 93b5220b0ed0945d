//! The lives of a pool in one process: it is opened anew from its media each time its disk failed.
//!
//! **After a disk error no replica is continuous.** What the kernel dropped is unknown, the boot
//! cookie is the same as before, and the failing disk may have refused to take the replicas' own
//! word for it. So before a pool whose disk failed answers anything again, every replica's claim
//! is withdrawn on media. The doubt outlives the process, as a file beside the pool's identity:
//! who restarts a pool because its disk failed must not get the claims back.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_core::replica::store::{BootCookie, ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::ReplicaPool;
use quoin_store::disk::Syncer as SyncDisk;
use quoin_wire::health::Health;
use quoin_wire::notices::Severity;
use tokio::sync::watch;

use crate::facts::PoolFacts;
use crate::shard::{Ended, Input, Parts, Shard};
use crate::syncer::Syncer;
use crate::{Error, Opened};

/// Between attempts to open a pool whose disk failed.
const REOPEN: Duration = Duration::from_secs(1);
/// Exists from a disk failure until every claim was withdrawn.
pub(crate) const DOUBT_FILE: &str = "disk-failed";

/// What the serving thread shares with the others.
pub(crate) struct Watch {
    /// Why the pool is not served at this moment, if so.
    pub trouble: Arc<Mutex<Option<String>>>,
    pub health: Health,
    pub stop: watch::Receiver<bool>,
    /// Path of the doubt file.
    pub doubt: PathBuf,
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
    let mut doubtful = watch.doubt.exists();
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
        if doubtful {
            if let Err(error) = withdraw_claims(&mut pool, &mut syncer) {
                watch.say(Some(error.to_string()));
                std::thread::sleep(REOPEN);
                continue;
            }
            settle_doubt(&watch.doubt);
        }
        watch.say(None);
        let syncer = Syncer::start(syncer, inputs.clone(), parts.reactor.waker())?;
        match Shard::new(pool, &mut parts, syncer)?.run() {
            Ended::Stopped => return Ok(()),
            Ended::LoopFailed(error) => return Err(error.into()),
            Ended::DiskFailed(error) => {
                doubtful = true;
                begin_doubt(&watch.doubt);
                let message = format!("{error}: the pool is opened anew from its media");
                parts.notices.push(Severity::Error, "", "", "DiskFailed", message);
                watch.say(Some(error.to_string()));
                // Results of the failed life must not be taken for the next one's; an assignment
                // comes only once.
                let waiting: Vec<Input> = parts.inputs.try_iter().collect();
                for input in waiting {
                    if !matches!(input, Input::Synced { .. }) {
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
    for guid in pool.replicas() {
        let Some(mut replica) = pool.replica(guid) else { continue };
        let meta = ReplicaMeta {
            cookie: BootCookie::default(),
            closed_continuous: false,
            ..replica.meta().clone()
        };
        replica.put_meta(meta)?;
    }
    let wanted = pool.request_sync();
    loop {
        let ticket = pool.sync_wanted().ok_or(StoreError::Rule("a failed pool cannot sync"))?;
        let result = sync();
        pool.sync_finished(ticket, result);
        result.map_err(StoreError::Io)?;
        if ticket >= wanted {
            return Ok(());
        }
    }
}

/// Remembers, for whatever process comes next, that the disk failed.
pub(crate) fn begin_doubt(path: &Path) {
    if let Err(error) = std::fs::write(path, "") {
        tracing::error!(path = %path.display(), %error, "cannot remember that the disk failed");
    }
}

fn settle_doubt(path: &Path) {
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        // Costs the replicas' claims once more at the next start, nothing else.
        Err(error) => tracing::warn!(path = %path.display(), %error, "cannot be removed"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::sync::mpsc::channel;
    use std::thread::JoinHandle;
    use std::time::Instant;

    use bytes::Bytes;
    use quoin_core::ids::{Epoch, Incarnation, SessionKey};
    use quoin_core::membership::{Member, Membership};
    use quoin_core::message::{FromReplica, OpenAck, ToReplica};
    use quoin_core::replica::store::ReplicaIdentity;
    use quoin_core::{PoolId, ReplicaGuid, ReplicaId, VolumeId};
    use quoin_store::{FormatOptions, MemoryDisk, Pool, PoolOptions};
    use quoin_wire::handshake::{ClientSecurity, ServerSecurity};
    use quoin_wire::notices::Notices;
    use quoin_wire::reactor::{Reactor, Waker};
    use quoin_wire::{Frame, Hello, ReadOutcome};

    use super::*;
    use crate::accept::{Acceptor, Belief};
    use crate::assignment::{Assignment, Phase, Wanted};
    use crate::metrics::Metrics;

    const VOLUME: VolumeId = VolumeId(7);
    const MEMBER: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(101) };

    fn membership() -> Membership {
        Membership {
            version: 1,
            rf: 1,
            cf: 1,
            drf: 1,
            known: vec![MEMBER],
            retired: vec![],
            formed: true,
        }
    }

    fn open(disk: &MemoryDisk) -> Result<Opened<Pool<MemoryDisk>>, Error> {
        let pool = Pool::open(disk.clone(), PoolOptions::default())
            .map_err(|e| Error::Open { path: "memory".into(), reason: e.to_string() })?;
        Ok(Opened { id: pool.id().to_string(), syncer: pool.syncer(), pool })
    }

    fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = found() {
                return found;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A pool's process, as far as its disk is concerned.
    struct Process {
        address: SocketAddr,
        inputs: Sender<Input>,
        waker: Waker,
        stop: watch::Sender<bool>,
        trouble: Arc<Mutex<Option<String>>>,
        thread: JoinHandle<Result<(), Error>>,
    }

    impl Process {
        fn start(disk: &MemoryDisk, doubt: &Path) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let reactor = Reactor::new().unwrap();
            let waker = reactor.waker();
            let (inputs, taken) = channel();
            let metrics = Metrics::new("p");
            let acceptor = Acceptor::new(
                listener,
                Arc::new(Mutex::new(ServerSecurity::PlainLoopback)),
                Belief::Everybody,
                inputs.clone(),
                waker.clone(),
                metrics.clone(),
            )
            .unwrap();
            let notices = Notices::default();
            let parts = Parts { reactor, acceptor, inputs: taken, notices, metrics };
            let (stop, stopped) = watch::channel(false);
            let trouble = Arc::new(Mutex::new(None));
            let watch = Watch {
                trouble: trouble.clone(),
                health: Health::default(),
                stop: stopped,
                doubt: doubt.to_owned(),
            };
            let (disk, sender) = (disk.clone(), inputs.clone());
            let first = open(&disk).unwrap();
            let thread = std::thread::spawn(move || {
                keep_serving(first, &|| open(&disk), parts, &sender, &watch)
            });
            Process { address, inputs, waker, stop, trouble, thread }
        }

        fn send(&self, input: Input) {
            self.inputs.send(input).unwrap();
            self.waker.wake();
        }

        fn create_replica(&self) {
            self.send(Input::Assign(Assignment(vec![Wanted {
                identity: ReplicaIdentity {
                    volume: VOLUME,
                    replica: MEMBER.id,
                    guid: MEMBER.guid,
                    volume_spec: Bytes::new(),
                },
                blocks: 1024,
                phase: Phase::Init,
                membership: Membership { formed: false, ..membership() },
            }])));
            eventually("the replica is created", || {
                let (answer, state) = tokio::sync::oneshot::channel();
                self.send(Input::State(answer));
                let state = state.blocking_recv().unwrap();
                state.replicas.iter().any(|r| r.guid == MEMBER.guid).then_some(())
            });
        }

        /// Opens the replica in `epoch`; `None` if the pool does not let it now.
        fn open_replica(&self, epoch: u64) -> Option<OpenAck> {
            let session = SessionKey {
                epoch: Epoch(epoch),
                incarnation: Incarnation(u128::from(epoch)),
                nonce: 1,
            };
            let hello = Hello::new(VOLUME, MEMBER.id, MEMBER.guid, Bytes::new());
            let security = ClientSecurity::PlainLoopback;
            let mut connection =
                quoin_wire::establish::dial(self.address, &security, session, &hello).ok()?;
            let message = ToReplica::Open {
                volume: VOLUME,
                replica: MEMBER.id,
                guid: MEMBER.guid,
                membership: membership(),
                lease_ms: 500,
            };
            connection.send_to_replica(session, &message).unwrap();
            connection.flush().unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            while Instant::now() < deadline {
                let outcome = connection.receive().ok()?;
                if let Some(incoming) = connection.next_frame().ok()? {
                    return match incoming.frame {
                        Frame::FromReplica(FromReplica::OpenAck(ack)) => Some(*ack),
                        _ => None,
                    };
                }
                if outcome == ReadOutcome::End {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            None
        }

        fn wait_for_trouble(&self) {
            eventually("the failure shows", || self.trouble.lock().unwrap().clone());
        }

        fn stop(self) {
            self.stop.send(true).unwrap();
            self.send(Input::Shutdown);
            self.thread.join().unwrap().unwrap();
        }
    }

    fn new_disk() -> MemoryDisk {
        let disk = MemoryDisk::new(256 << 20);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).unwrap();
        disk
    }

    /// A process whose replica claims to be continuous, and whose disk fails then.
    fn fail(disk: &MemoryDisk, doubt: &Path) -> Process {
        let process = Process::start(disk, doubt);
        process.create_replica();
        assert!(process.open_replica(1).unwrap().continuous);
        disk.fail_after(Some(0));
        assert_eq!(process.open_replica(2), None, "nothing is promised on a failing disk");
        process.wait_for_trouble();
        process
    }

    #[test]
    fn after_a_disk_error_no_replica_of_the_reopened_pool_claims_to_be_continuous() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, doubt) = (new_disk(), dir.path().join(DOUBT_FILE));
        let process = fail(&disk, &doubt);
        disk.fail_after(None);
        let mut epoch = 2;
        let ack = eventually("the mended pool answers", || {
            epoch += 1;
            process.open_replica(epoch)
        });
        assert!(!ack.continuous);
        assert_eq!(*process.trouble.lock().unwrap(), None);
        process.stop();
        // On media, too: the next process asks nothing but that.
        assert!(!doubt.exists());
        let process = Process::start(&disk, &doubt);
        assert!(!process.open_replica(epoch + 1).unwrap().continuous);
        process.stop();
    }

    #[test]
    fn a_process_that_ends_with_its_disk_failed_leaves_the_doubt_to_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, doubt) = (new_disk(), dir.path().join(DOUBT_FILE));
        fail(&disk, &doubt).stop();
        disk.fail_after(None);
        let process = Process::start(&disk, &doubt);
        assert!(!process.open_replica(3).unwrap().continuous);
        process.stop();
        assert!(!doubt.exists());
    }

    #[test]
    fn a_pool_that_is_merely_restarted_stays_continuous() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, doubt) = (new_disk(), dir.path().join(DOUBT_FILE));
        let process = Process::start(&disk, &doubt);
        process.create_replica();
        assert!(process.open_replica(1).unwrap().continuous);
        process.stop();
        let process = Process::start(&disk, &doubt);
        assert!(process.open_replica(2).unwrap().continuous);
        process.stop();
    }
}
