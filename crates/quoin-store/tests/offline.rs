//! The offline tools tell the truth and change nothing.

use crate::common;
use crate::common::{BLOCKS, GUID, World, flat, read_all};
use bytes::Bytes;
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::offline::{ExportError, check, export, inspect};
use quoin_store::{MemoryDisk, ReplicaPool};
use quoin_types::message::ReadView;
use quoin_types::{BLOCK_SIZE, Lsn, ReplicaGuid};

fn lived_in() -> (World, MemoryDisk) {
    let mut world = World::new(41, 32 << 20);
    for _ in 0..40 {
        world.append();
    }
    world.pool().replica(GUID).expect("it").set_stable(Lsn(200));
    world.pool().settle().expect("folded");
    let disk = world.disk.fork();
    (world, disk)
}

#[test]
fn an_exported_image_is_the_volume_as_its_client_saw_it() {
    let (mut world, disk) = lived_in();
    let writes = disk.writes();
    let snapshots = world.pool().replica(GUID).expect("it").snapshots();
    let views = snapshots.iter().map(|s| Some(s.id)).chain([None]);
    for snapshot in views {
        let mut image = vec![0u8; BLOCKS as usize * BLOCK_SIZE];
        let report = export(disk.clone(), GUID, snapshot, |offset, data| {
            image[offset as usize..offset as usize + data.len()].copy_from_slice(data);
            Ok(())
        });
        let report = report.expect("an export");
        assert_eq!((report.size_bytes, report.bad.len()), (image.len() as u64, 0));
        let view = snapshot.map_or(ReadView::Live, ReadView::Snapshot);
        let mut replica = world.pool().replica(GUID).expect("it");
        for (lba, _, data) in flat(&read_all(&mut replica, view, BLOCKS)) {
            let at = lba as usize * BLOCK_SIZE;
            let block = &image[at..at + BLOCK_SIZE];
            assert!(data.map_or(block.iter().all(|b| *b == 0), |d| d[..] == *block));
        }
    }
    let other = export(disk.clone(), ReplicaGuid(1), None, |_, _| Ok(()));
    assert!(matches!(other, Err(ExportError::NoReplica(_))));
    assert_eq!(disk.writes(), writes, "a tool that reads must not write");
}

#[test]
fn inspect_and_check_name_what_is_there_and_what_is_wrong() {
    let (mut world, disk) = lived_in();
    let inspection = inspect(disk.clone()).expect("a pool");
    let replica = world.pool().replica(GUID).expect("it");
    assert_eq!(inspection.replicas[0].state.position, replica.state().position);
    assert_eq!(inspection.replicas[0].snapshots, replica.snapshots());
    assert!(inspection.to_string().contains(&format!("replica {GUID}")));
    let starts = world.pool().starts();
    assert_eq!(inspection.stats.starts, starts);

    let mut steps = 0;
    let report = check(disk.clone(), |_| steps += 1).expect("a check");
    assert!(report.is_sound() && steps > 0, "{report:?}");
    let mut found = 0;
    for block in disk.written_blocks() {
        let rotten = disk.fork();
        rotten.rot(block * BLOCK_SIZE as u64 + 3000, 1);
        if let Ok(report) = check(rotten, |_| ()) {
            found += usize::from(!report.is_sound());
        }
    }
    assert!(found > 50, "rot was found in {found} places only");
}

#[test]
fn what_a_replica_keeps_about_its_volume_outlives_restarts_and_the_restatement_of_the_ring() {
    let mut world = World::new(43, 32 << 20);
    let description = |n: u32| Bytes::from(format!("name: test, change {n}"));
    let mut last = 0;
    // Far more than the ring holds between two whole statements.
    for n in 1..=400 {
        world.pool().describe(GUID, description(n)).expect("room for it");
        last = n;
        if n % 100 == 1 {
            let found = inspect(world.disk.fork()).expect("a pool");
            assert_eq!(found.replicas[0].identity.volume_spec, description(n));
        }
    }
    let kept = inspect(world.disk.fork()).expect("a pool").replicas.remove(0).identity;
    assert_eq!(kept.volume_spec, description(last));
    assert_eq!((kept.guid, kept.volume), (GUID, common::identity(GUID).volume));
    assert!(world.pool().describe(ReplicaGuid(1), description(1)).is_err(), "there is none");
    let huge = Bytes::from(vec![7; 64 << 20]);
    assert!(world.pool().describe(GUID, huge).is_err(), "the ring has no room for it");
    let kept = inspect(world.disk.fork()).expect("a pool").replicas.remove(0).identity;
    assert_eq!(kept.volume_spec, description(last), "a refusal changes nothing");
}
