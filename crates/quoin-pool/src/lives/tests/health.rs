//! How a pool keeps what it holds in order, through its real driver.

use quoin_types::message::BadCopy;

use super::*;
use crate::scrub::ScrubState;

const LBA: u64 = 3;

impl Process {
    fn scrub_state(&self) -> ScrubState {
        let (answer, state) = tokio::sync::oneshot::channel();
        self.send(Input::State { all: true, answer });
        state.blocking_recv().unwrap().scrub
    }

    /// Reads all that it holds; how that ended.
    fn scrub(&self, request: u64) -> ScrubState {
        self.send(Input::Scrub { request });
        eventually("the scrub ends", || {
            let state = self.scrub_state();
            (state.request == request && !state.running).then_some(state)
        })
    }

    fn reasons(&self) -> Vec<String> {
        self.notices.take().into_iter().map(|notice| notice.reason).collect()
    }
}

/// Makes each copy of the block that was written bad on media.
fn rot(disk: &MemoryDisk) {
    let mut block = [0; 4096];
    let mut count = 0;
    for number in disk.written_blocks() {
        disk.read_at(number * 4096, &mut block).unwrap();
        if block == [7; 4096] {
            disk.rot(number * 4096, 0x10);
            count += 1;
        }
    }
    assert!(count > 0, "nothing to rot");
}

fn written(process: &Process) -> Session {
    let (mut session, ack) = process.session(1).unwrap();
    session.feed(&ack);
    let lsn = session.append(&ack, LBA);
    loop {
        match session.next().expect("the session goes on") {
            FromReplica::Applied { durable, .. } if durable >= lsn => return session,
            FromReplica::Applied { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_scrub_that_is_asked_for_reads_what_is_held_once_and_tells_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let disk = new_disk();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replica();
    let _session = written(&process);
    assert_eq!((process.scrub_state().request, process.scrub_state().began_s), (0, 0));
    let state = process.scrub(1);
    assert!(state.read_bytes >= 4096 && state.found == 0 && state.began_s > 0, "{state:?}");
    assert_eq!(process.reasons(), ["ScrubEnded"]);
    // The same request again, in every report to come, asks for nothing.
    assert_eq!(process.scrub(1), state);
    assert_eq!(process.metrics.scrub.runs.get(), 1);
    process.stop();
}

#[test]
fn a_bad_copy_that_a_scrub_finds_is_asked_for_and_told_when_it_is_found_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let disk = new_disk();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replica();
    let mut session = written(&process);
    rot(&disk);
    let state = process.scrub(1);
    assert_eq!(state.found, 1, "{state:?}");
    let told = process.reasons();
    assert!(told.contains(&"BadBlocks".to_owned()), "{told:?}");
    assert!(!told.contains(&"BadBlocksRepaired".to_owned()), "{told:?}");
    assert_eq!(process.metrics.scrub.found.get(), 1);

    let copy: BadCopy = loop {
        match session.next().expect("the session goes on") {
            FromReplica::BadCopy(copy) => break copy,
            FromReplica::Applied { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((copy.lba, copy.blocks), (LBA, 1));
    let data = Bytes::from(vec![7; 4096]);
    let (version, crc) = (copy.version, quoin_types::crc32c(&data));
    session.send(&ToReplica::Repair { lba: LBA, version, crc, data, snapshot: None });
    loop {
        match session.next().expect("the session goes on") {
            FromReplica::Repaired { done, .. } => break assert!(done),
            FromReplica::Applied { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    process.scrub_state();
    assert_eq!(process.reasons(), ["BadBlocksRepaired"]);
    assert_eq!(process.metrics.scrub.repaired.get(), 1);
    assert_eq!(process.scrub(2).found, 0);
    process.stop();
}

/// Overwritten blocks are freed by background work alone.
#[test]
fn a_volume_that_is_overwritten_more_often_than_the_pool_is_large_never_fills_it() {
    const WRITE_BYTES: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let disk = new_disk();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replica();
    let (mut session, ack) = process.session(1).unwrap();
    session.feed(&ack);
    let (mut chain, mut lsn) = (ack.chain, ack.position.lsn);
    let blocks = (WRITE_BYTES / 4096) as u32;
    for round in 0..2 * disk.size() / WRITE_BYTES as u64 {
        lsn = lsn.next();
        let position = Position { epoch: session.key.epoch, lsn };
        let data = Bytes::from(vec![round as u8; WRITE_BYTES]);
        let lba = round % 4 * u64::from(blocks);
        let entry = Entry::after(chain, position, EntryKind::Write, lba, blocks, data, false);
        chain = entry.chain;
        let (entries, sync, ping) = (vec![Arc::new(entry)], round % 8 == 0, Ping(round + 2));
        session.send(&ToReplica::Append { entries, stable: lsn, sync, ping });
        loop {
            match session.next().expect("the session goes on") {
                FromReplica::Applied { applied, .. } if applied >= lsn => break,
                FromReplica::Applied { .. } => {}
                other => panic!("after {round} MiB: {other:?}"),
            }
        }
    }
    process.stop();
}

#[test]
fn a_sync_is_told_to_the_replicas_that_wait_for_it_and_to_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(&new_disk(), &dir.path().join(WITNESS_FILE));
    let resting = (2..20).map(|n| Member { id: ReplicaId(n), guid: ReplicaGuid(100 + n) });
    let wanted = [MEMBER].into_iter().chain(resting).map(|member| Wanted {
        identity: ReplicaIdentity {
            volume: VOLUME,
            replica: member.id,
            guid: member.guid,
            volume_spec: Bytes::new(),
        },
        blocks: 1024,
        phase: Phase::Init,
        source: None,
        flatten: false,
        fence: Default::default(),
        membership: Membership { formed: false, ..membership() },
    });
    process.send(Input::Assign(Assignment(wanted.collect())));
    eventually("the replicas are created", || process.replica_state());
    let _session = written(&process);
    let (told, syncs) =
        (process.metrics.disk.sync_deliveries.get(), process.metrics.disk.syncs.get());
    assert!(told > 0 && told <= syncs, "{syncs} syncs were told of {told} times");
    process.stop();
}
