//! A disk whose reads stand still holds up what needs them, and nothing else.

use std::sync::atomic::{AtomicBool, Ordering};

use quoin_store::FileDisk;
use quoin_store::disk::Reader;
use quoin_testkit::skipped;

use super::*;

const OTHER: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(102) };

/// A disk that, once it is cold, has nothing at hand, and whose reads wait for the gate.
#[derive(Clone)]
struct StallingDisk {
    inner: MemoryDisk,
    cold: Arc<AtomicBool>,
    gate: Arc<Mutex<()>>,
}

impl Disk for StallingDisk {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        if self.cold.load(Ordering::Relaxed) {
            let _open = self.gate.lock().unwrap();
        }
        self.inner.read_at(offset, buffer)
    }
    fn may_lack(&self) -> bool {
        true
    }
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, IoFault> {
        if self.cold.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.inner.read_at(offset, buffer).map(|()| true)
    }
    fn reader(&self) -> Option<Reader> {
        let disk = self.clone();
        Some(Arc::new(move |fetch| disk.fetch(fetch)))
    }
    fn write_at(&self, offset: u64, parts: &[std::io::IoSlice<'_>]) -> Result<(), IoFault> {
        self.inner.write_at(offset, parts)
    }
    fn sync(&self) -> Result<(), IoFault> {
        self.inner.sync()
    }
    fn syncer(&self) -> SyncDisk {
        self.inner.syncer()
    }
    fn write_out(&self, offset: u64, length: u64) {
        self.inner.write_out(offset, length);
    }
    fn discard(&self, offset: u64, length: u64) {
        self.inner.discard(offset, length);
    }
    fn cookie(&self) -> BootCookie {
        self.inner.cookie()
    }
}

/// A session that is fed after `ack`, and the next state after what it writes.
struct Writer {
    session: Session,
    ack: OpenAck,
}

impl Writer {
    fn new(process: &Process, member: Member) -> Self {
        let (mut session, ack) = Process::session_of(process.address, member, 1).unwrap();
        session.feed(&ack);
        Writer { session, ack }
    }

    /// Writes one block and waits until it is durable.
    fn write(&mut self, lba: u64) {
        let position =
            Position { epoch: self.session.key.epoch, lsn: self.ack.position.lsn.next() };
        let data = Bytes::from(vec![7; 4096]);
        let entry = Entry::after(self.ack.chain, position, EntryKind::Write, lba, 1, data, false);
        (self.ack.chain, self.ack.position) = (entry.chain, position);
        let (entries, stable) = (vec![Arc::new(entry)], Lsn(0));
        self.session.send(&ToReplica::Append { entries, stable, sync: true, ping: Ping(5) });
        loop {
            match self.session.next().expect("the session goes on") {
                FromReplica::Applied { durable, .. } if durable >= position.lsn => return,
                FromReplica::Applied { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn read(&mut self, id: u64, lba: u64) {
        let (view, ping, after) = (ReadView::Live, Ping(9), Lsn(0));
        let (blocks, want_data) = (1, true);
        self.session.send(&ToReplica::Read { id, view, lba, blocks, after, want_data, ping });
    }

    /// The next read that is answered with the data that were written.
    fn answered(&mut self) -> u64 {
        loop {
            match self.session.next().expect("the session goes on") {
                FromReplica::Data { id, slots, .. } => {
                    assert!(matches!(slots[0].content, Content::Data { .. }), "{slots:?}");
                    return id;
                }
                FromReplica::Applied { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn while_reads_of_the_disk_stall_writes_of_this_volume_and_of_others_go_on_answering() {
    let dir = tempfile::tempdir().unwrap();
    let (cold, gate) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let disk = StallingDisk { inner: new_disk(), cold: cold.clone(), gate };
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replicas(&[MEMBER, OTHER]);
    let (mut reader, mut other) = (Writer::new(&process, MEMBER), Writer::new(&process, OTHER));
    for lba in 0..40 {
        reader.write(lba);
    }
    cold.store(true, Ordering::Relaxed);
    let gate = disk.gate.lock().unwrap();
    for id in 0..40 {
        reader.read(id, id);
    }
    // All of these would wait for the gate as well, if the pool's thread did.
    for lba in 0..20 {
        other.write(lba);
        reader.write(100 + lba);
    }
    drop(gate);
    let mut ids: Vec<u64> = (0..40).map(|_| reader.answered()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..40).collect::<Vec<_>>());
    assert_eq!(process.metrics.reads.get(), 40);
    let text = process.metrics.render();
    let fetches =
        text.lines().find(|line| line.starts_with("quoin_pool_fetch_duration_seconds_count"));
    assert!(fetches.is_some_and(|line| line.ends_with(" 40")), "{fetches:?}");
    process.stop();
}

#[test]
fn what_no_cache_holds_of_a_pool_file_is_read_by_a_ring_and_answered() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FileDisk::create(&dir.path().join("pool"), 128 << 20, true).unwrap();
    if !disk.may_lack() {
        return skipped("the temporary directory is in memory");
    }
    if let Err(error) = disk.read_ring() {
        return skipped(&format!("no io_uring here: {error}"));
    }
    Pool::format(&disk, &FormatOptions::new(PoolId(1))).unwrap();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replicas(&[MEMBER]);
    let mut client = Writer::new(&process, MEMBER);
    for lba in 0..40 {
        client.write(lba);
    }
    disk.forget_cached(0, disk.size());
    for id in 0..40 {
        client.read(id, id);
    }
    let mut ids: Vec<u64> = (0..40).map(|_| client.answered()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..40).collect::<Vec<_>>());
    let text = process.metrics.render();
    let count = text
        .lines()
        .find(|line| line.starts_with("quoin_pool_fetch_duration_seconds_count"))
        .and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    assert!(count.is_some_and(|count| count > 0), "{count:?} reads of the disk");
    process.stop();
}

#[test]
fn a_session_that_ends_while_its_reads_stall_leaves_the_pool_well() {
    let dir = tempfile::tempdir().unwrap();
    let (cold, gate) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let disk = StallingDisk { inner: new_disk(), cold: cold.clone(), gate };
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replicas(&[MEMBER, OTHER]);
    let mut reader = Writer::new(&process, MEMBER);
    for lba in 0..4 {
        reader.write(lba);
    }
    cold.store(true, Ordering::Relaxed);
    let gate = disk.gate.lock().unwrap();
    for id in 0..4 {
        reader.read(id, id);
    }
    drop(reader);
    let (mut session, ack) =
        eventually("the lease ends", || Process::session_of(process.address, MEMBER, 2));
    session.feed(&ack);
    drop(gate);
    let mut again = Writer { session, ack };
    again.read(9, 2);
    assert_eq!(again.answered(), 9, "nothing of the session before");
    process.stop();
}
