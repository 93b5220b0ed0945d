//! Clones beside the model: what they show, through writes, clean-up, deletes in every order,
//! rebuilds and restarts.

use std::collections::BTreeMap;

use quoin_replication::replica::store::{
    CloneSource, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
};
use quoin_store::{Cloned, Disk, MemoryDisk, Pool, ReplicaPool, ScrubAt};
use quoin_types::message::{Content, ReadView};
use quoin_types::{
    BLOCK_SIZE, EntryKind, Epoch, Lsn, Position, ReplicaGuid, ReplicaId, SnapshotId, VolumeId,
};
use rand::Rng;

use crate::common::family::{Family, of};
use crate::common::{BLOCKS, flat, read_all, short_steps, sync};

#[test]
fn a_clone_shows_its_snapshot_and_each_goes_its_own_way_from_there() {
    let mut family = Family::new(1, 32 << 20);
    for _ in 0..60 {
        family.write_some(1);
    }
    let snapshot = family.snapshot(1).expect("room");
    family.write_some(1);
    let used = family.pool().stats().used_bytes;
    let clone = family.clone_of(1, snapshot, 100).expect("room");
    family.check();
    let stats = family.pool().replica_stats(ReplicaGuid(clone)).expect("it");
    assert_eq!((stats.allocated_bytes, stats.live_bytes), (0, 0), "nothing was copied");
    assert!(family.pool().stats().used_bytes <= used + (1 << 20));
    let state = family.pool().replica(ReplicaGuid(clone)).expect("it").state();
    let info = family.model.replica(ReplicaGuid(1)).expect("it").snapshots()[0];
    let begins = Position { epoch: Epoch::ZERO, lsn: info.lsn };
    assert_eq!((state.position, state.stable, state.base), (begins, info.lsn, info.lsn));
    assert_eq!(state.volume_blocks, info.blocks + 100);
    for _ in 0..60 {
        family.write_some(1);
        family.write_some(clone);
    }
    family.work();
    family.check();
    for from in [0, info.lsn.0, info.lsn.0 + 20] {
        family.check_pull(clone, Lsn(from));
    }
    family.restart();
    family.check();
}

#[test]
fn a_clone_is_refused_where_its_snapshot_is_not_and_where_it_would_be_smaller() {
    let mut family = Family::new(2, 16 << 20);
    family.write_some(1);
    let snapshot = family.snapshot(1).expect("room");
    family.work();
    let refused = |family: &mut Family, volume: u128, snapshot, blocks| {
        let source = CloneSource { volume: VolumeId(volume), snapshot };
        let made = family.pool().create_clone(of(9), ReplicaMeta::default(), blocks, &source);
        made.expect_err("refused").to_string()
    };
    let where_it_is = "where its snapshot is";
    assert!(refused(&mut family, 1, SnapshotId(5), BLOCKS).contains(where_it_is));
    assert!(refused(&mut family, 2, snapshot, BLOCKS).contains(where_it_is));
    let clone = family.clone_of(1, snapshot, 0).expect("room");
    assert!(refused(&mut family, 1, snapshot, BLOCKS - 1).contains("the size of its snapshot"));
    let source = CloneSource { volume: VolumeId(1), snapshot };
    let twice = family.pool().create_clone(of(clone), ReplicaMeta::default(), BLOCKS, &source);
    assert_eq!(twice, Err(StoreError::Rule("a GUID is born once")));
    family.delete(clone);
    let again = family.pool().create_clone(of(clone), ReplicaMeta::default(), BLOCKS, &source);
    assert_eq!(again, Err(StoreError::Rule("a GUID is born once")));
}

#[test]
fn a_clone_is_made_of_the_sound_replica_where_a_damaged_one_has_its_snapshot_too() {
    let mut family = Family::new(1, 32 << 20);
    family.write_some(1);
    let snapshot = family.snapshot(1).expect("room");
    let (damaged, sound) = (ReplicaGuid(1), ReplicaGuid(20));
    let pool = family.pool();
    let entries = pool.replica(damaged).expect("it").fetch(Lsn::ZERO, 1 << 20);
    let entries = entries.expect("it reads").expect("its log");
    let identity = ReplicaIdentity { guid: sound, replica: ReplicaId(20), ..of(1) };
    pool.create(identity, ReplicaMeta::default(), BLOCKS).expect("room");
    let mut store = pool.replica(sound).expect("it");
    store.append(&entries).expect("room");
    store.set_stable(entries.last().expect("a snapshot").lsn);
    drop(store);
    let mut store = pool.replica(damaged).expect("it");
    let meta = ReplicaMeta { damaged: true, ..store.meta().clone() };
    store.put_meta(meta).expect("room");
    drop(store);
    let source = CloneSource { volume: VolumeId(1), snapshot };
    let made = (0..50).any(|_| {
        family.work();
        let made = family.pool().create_clone(of(30), ReplicaMeta::default(), BLOCKS, &source);
        made.expect("the other one is sound") == Cloned::Made
    });
    assert!(made, "it was never folded");
    let shown =
        read_all(&mut family.pool().replica(ReplicaGuid(30)).expect("it"), ReadView::Live, BLOCKS);
    let kept = ReadView::Snapshot(snapshot);
    let has = read_all(&mut family.pool().replica(sound).expect("it"), kept, BLOCKS);
    assert_eq!(flat(&shown), flat(&has));
}

#[test]
fn clones_of_clones_are_refused_before_a_look_up_takes_too_many_steps() {
    let mut family = Family::new(3, 32 << 20);
    let mut last = 1;
    for deep in 0.. {
        family.write_some(last);
        let snapshot = family.snapshot(last).expect("room");
        match family.clone_of(last, snapshot, 0) {
            Some(clone) => last = clone,
            None => {
                assert!((8..20).contains(&deep), "{deep}");
                break;
            }
        }
        family.check();
    }
    family.restart();
    family.check();
}

/// The last one gives all space back, in whatever order a source, its snapshot and its clones go.
#[test]
fn a_family_is_deleted_in_any_order_and_gives_all_its_space_back() {
    for seed in 0..24 {
        println!("seed {seed}");
        let mut family = Family::new(100 + seed, 32 << 20);
        for _ in 0..40 {
            family.write_some(1);
        }
        let first = family.snapshot(1).expect("room");
        let clone = family.clone_of(1, first, 0).expect("room");
        for _ in 0..20 {
            family.write_some(clone);
        }
        let second = family.snapshot(clone).expect("room");
        let of_clone = family.clone_of(clone, second, 50).expect("room");
        family.write_some(of_clone);
        let other = family.clone_of(1, first, 0).expect("room");
        family.write_some(other);
        let mut steps = vec![
            (1, Some(first)),
            (clone, Some(second)),
            (1, None),
            (clone, None),
            (of_clone, None),
            (other, None),
        ];
        while !steps.is_empty() {
            let (volume, snapshot) = steps.remove(family.rng.random_range(0..steps.len()));
            match snapshot {
                _ if !family.members.contains(&volume) => {}
                Some(id) => drop(family.append(volume, EntryKind::DeleteSnapshot { id }, 0, 0)),
                None => family.delete(volume),
            }
            if family.rng.random() {
                family.work();
            }
            if family.rng.random() {
                family.restart();
            }
            family.check();
        }
        family.work();
        family.restart();
        family.work();
        assert_eq!(family.pool().stats().used_bytes, 0, "space that nobody has");
    }
}

/// Proves: no view of any member names a free segment, and a clone stays what its
/// snapshot was, beside clean-up in a pool that is nearly full.
#[test]
fn families_equal_the_model_through_clean_up_deletes_rebuilds_and_restarts() {
    let (mut made, mut full) = (0, 0);
    for seed in 0..30 {
        println!("seed {seed}");
        let mut family = Family::new(seed, 12 << 20);
        let mut rebuilds = 0;
        for _ in 0..250 {
            let member = family.any();
            match family.rng.random_range(0..100) {
                0..62 => {
                    for _ in 0..4 {
                        family.write_some(member);
                    }
                }
                62..68 if family.snapshots(member).len() < 3 => drop(family.snapshot(member)),
                68..71 => {
                    if let Some(id) = family.snapshots(member).first().copied() {
                        family.append(member, EntryKind::DeleteSnapshot { id }, 0, 0);
                    }
                }
                71..74 => {
                    if let Some(id) = family.snapshots(member).last().copied() {
                        family.append(member, EntryKind::Revert { id }, 0, 0);
                    }
                }
                74..80 if family.members.len() < 6 => {
                    if let Some(id) = family.snapshots(member).first().copied() {
                        let more = family.rng.random_range(0..3) * 100;
                        family.clone_of(member, id, more);
                    }
                }
                80..83 if family.members.len() > 1 => family.delete(member),
                83..86 => {
                    rebuilds += 1;
                    family.rebuild(member, rebuilds);
                }
                86..87 => drop(family.flatten(member)),
                87..90 => {
                    let from = family.rng.random_range(0..40);
                    family.check_pull(member, Lsn(from));
                }
                90..94 => family.restart(),
                _ => family.work(),
            }
            if family.pool().stats().free_bytes == 0 {
                full += 1;
                family.work();
            }
        }
        family.work();
        family.check();
        family.restart();
        family.check();
        made += family.made;
    }
    assert!(made > 60, "{made} clones: the test is too easy");
    assert!(full > 0, "the pool was never full: the test is too easy");
}

/// Clean-up moves blocks that only a clone shows, and the clone follows.
#[test]
fn blocks_that_only_a_clone_shows_are_moved_and_stay() {
    let mut family = Family::new(7, 16 << 20);
    for lba in (0..BLOCKS).step_by(10) {
        family.append(1, EntryKind::Write, lba, 10);
    }
    let snapshot = family.snapshot(1).expect("room");
    let clone = family.clone_of(1, snapshot, 0).expect("room");
    family.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
    // The source gives all of it up, the clone most of it.
    for lba in (0..BLOCKS).step_by(10) {
        family.append(1, EntryKind::Write, lba, 10);
        family.append(clone, EntryKind::Trim, lba, 1);
    }
    for round in 0..20 {
        for lba in (round..BLOCKS - 1).step_by(7) {
            family.append(1, EntryKind::Write, lba, 1);
        }
        family.work();
    }
    family.check();
    family.delete(1);
    family.work();
    family.check();
    family.restart();
    family.check();
}

/// A base and its snapshot are one view, and the base goes with its last clone.
#[test]
fn what_only_a_deleted_clone_showed_of_its_source_is_counted_as_dead() {
    let mut family = Family::new(11, 32 << 20);
    for lba in (0..600).step_by(20) {
        family.append(1, EntryKind::Write, lba, 20);
    }
    let snapshot = family.snapshot(1).expect("room");
    let clones = [0, 0].map(|more| family.clone_of(1, snapshot, more).expect("room"));
    for lba in (0..200).step_by(20) {
        family.append(1, EntryKind::Write, lba, 20);
    }
    let live_blocks = |family: &mut Family| {
        family.work();
        let stats = family.pool().replica_stats(ReplicaGuid(1)).expect("it");
        stats.live_bytes / BLOCK_SIZE as u64
    };
    let all = 800..806;
    assert!(all.contains(&live_blocks(&mut family)), "600 of the snapshot, 200 since");
    family.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
    assert!(all.contains(&live_blocks(&mut family)), "clones show it");
    family.delete(clones[0]);
    assert!(all.contains(&live_blocks(&mut family)), "a clone shows it");
    family.delete(clones[1]);
    let left = live_blocks(&mut family);
    assert!((600..606).contains(&left), "{left} blocks, none of them overwritten, and nodes");
    family.check();
}

/// A clone that took over its base outlives all loss of its source, and gives the base up.
#[test]
fn a_flattened_clone_shares_nothing_and_shows_what_it_showed() {
    let mut family = Family::new(17, 32 << 20);
    for _ in 0..40 {
        family.write_some(1);
    }
    let snapshot = family.snapshot(1).expect("room");
    let clone = family.clone_of(1, snapshot, 100).expect("room");
    for _ in 0..10 {
        family.write_some(clone);
    }
    let kept = family.snapshot(clone).expect("room");
    for _ in 0..10 {
        family.write_some(clone);
    }
    // A Revert notes blocks as the base's.
    family.append(clone, EntryKind::Revert { id: kept }, 0, 0);
    let second = family.clone_of(clone, kept, 0).expect("room");
    family.work();
    assert!(family.pool().is_clone(ReplicaGuid(clone)) && !family.pool().is_clone(ReplicaGuid(1)));
    family.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
    family.delete(1);
    assert!(family.flatten(clone), "it is never done");
    family.check();
    for from in [0, 30, 60] {
        family.check_pull(clone, Lsn(from));
    }
    family.work();
    family.restart();
    family.check();
    assert!(!family.pool().is_clone(ReplicaGuid(clone)));
    let stats = [clone, second].map(|n| family.pool().replica_stats(ReplicaGuid(n)).expect("it"));
    let own: u64 = stats.iter().map(|stats| stats.allocated_bytes).sum();
    assert_eq!(family.pool().stats().used_bytes, own, "its source's blocks are gone");
    assert!(family.flatten(second));
    family.delete(clone);
    family.work();
    family.check();
    family.restart();
    family.check();
}

/// At every crash the clone shows what it did, with its base or without.
#[test]
fn every_crash_of_a_flatten_leaves_what_the_clone_showed() {
    use crate::crash_enumeration::{crash_everywhere, disk_of, image_of};
    let mut family = Family::new(19, 8 << 20);
    for _ in 0..20 {
        family.write_some(1);
    }
    let snapshot = family.snapshot(1).expect("room");
    let clone = family.clone_of(1, snapshot, 0).expect("room");
    for _ in 0..5 {
        family.write_some(clone);
    }
    family.work();
    family.delete(1);
    family.restart();
    family.work();
    let guid = ReplicaGuid(clone);
    let mut model = family.model.replica(guid).expect("it");
    let content = flat(&read_all(&mut model, ReadView::Live, BLOCKS));
    let start = image_of(&family.disk);
    family.disk.record();
    family.pool().flatten(guid);
    for _ in 0..20 {
        family.work();
    }
    assert!(!family.pool().is_clone(guid));
    let mut seen = [0, 0];
    crash_everywhere(&start, &family.disk.events(), |_, image| {
        let disk = disk_of(family.disk.size(), image);
        let mut pool = Pool::open(disk, short_steps()).expect("a pool");
        seen[usize::from(pool.is_clone(guid))] += 1;
        let mut replica = pool.replica(guid).expect("it");
        assert!(!replica.meta().damaged);
        assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
        pool.flatten(guid);
        for _ in 0..60 {
            pool.background(1 << 20).expect("background work");
            sync(&mut pool);
        }
        let mut replica = pool.replica(guid).expect("it");
        assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
    });
    assert!(seen.iter().all(|n| *n > 5), "{seen:?} without and with its base");
}

fn damaged_disk(disk: &MemoryDisk, change: impl Fn(&mut [u8]) -> bool) -> MemoryDisk {
    let copy = disk.fork();
    let mut changed = 0;
    for number in disk.written_blocks() {
        let mut bytes = vec![0; BLOCK_SIZE];
        disk.read_at(number * BLOCK_SIZE as u64, &mut bytes).expect("inside the disk");
        if change(&mut bytes) {
            let parts = [std::io::IoSlice::new(&bytes)];
            copy.write_at(number * BLOCK_SIZE as u64, &parts).expect("inside the disk");
            changed += 1;
        }
    }
    assert!(changed > 0, "nothing was damaged");
    copy.sync().expect("a sync");
    copy
}

/// A block that a clone shares is repaired where it lies, for all that show it.
#[test]
fn a_rotten_block_of_a_base_is_bad_in_the_clone_and_repaired_for_all_relatives() {
    let mut family = Family::new(9, 16 << 20);
    family.append(1, EntryKind::Write, 5, 1);
    let snapshot = family.snapshot(1).expect("room");
    let clone = family.clone_of(1, snapshot, 0).expect("room");
    let second = family.clone_of(1, snapshot, 0).expect("room");
    let guid = ReplicaGuid(clone);
    let read = |pool: &mut Pool<MemoryDisk>, guid| {
        let mut replica = pool.replica(guid).expect("it");
        read_all(&mut replica, ReadView::Live, 8)
    };
    let good = read(family.pool(), guid);
    let wanted = good.iter().find(|slot| slot.lba == 5).expect("it").clone();
    let Content::Data { crc, data } = wanted.content.clone() else { panic!("a hole") };
    family.restart();
    family.pool = None;
    let rotten = damaged_disk(&family.disk, |bytes| {
        let is_it = bytes == &data[..];
        if is_it {
            bytes[100] ^= 1;
        }
        is_it
    });
    let mut pool = Pool::open(rotten, short_steps()).expect("a pool");
    let bad = read(&mut pool, guid);
    assert!(bad.iter().any(|slot| slot.lba == 5 && slot.content == Content::Bad));
    let noted = pool.take_bad_blocks();
    assert!(noted.iter().any(|b| (b.replica, b.lba, b.blocks) == (guid, 5, 1)), "{noted:?}");
    let mut replica = pool.replica(guid).expect("it");
    assert_eq!(replica.repair(ReadView::Live, 5, wanted.version, crc, &data), Ok(true));
    for guid in [guid, ReplicaGuid(second), ReplicaGuid(1)] {
        assert_eq!(flat(&read(&mut pool, guid)), flat(&good));
    }
}

/// Nobody else reads what only clones show.
#[test]
fn a_rotten_block_that_only_a_clone_shows_is_found_by_its_scrub() {
    let mut family = Family::new(13, 16 << 20);
    family.append(1, EntryKind::Write, 5, 1);
    family.append(1, EntryKind::Write, 300, 1);
    let snapshot = family.snapshot(1).expect("room");
    let clone = family.clone_of(1, snapshot, 0).expect("room");
    let guid = ReplicaGuid(clone);
    let mut replica = family.pool().replica(guid).expect("it");
    let good = read_all(&mut replica, ReadView::Live, BLOCKS);
    let wanted = good.iter().find(|slot| slot.lba == 300).expect("it").clone();
    let Content::Data { data, .. } = wanted.content.clone() else { panic!("a hole") };
    let scrubbed = |pool: &mut Pool<MemoryDisk>| {
        let mut at = Some(ScrubAt::default());
        while let Some(from) = at {
            at = pool.scrub(guid, from, 1 << 20).expect("a scrub").next;
        }
        pool.take_bad_blocks()
    };
    let flip = |bytes: &mut [u8]| {
        let is_it = bytes == &data[..];
        bytes[9] ^= u8::from(is_it);
        is_it
    };
    for is_deleted in [false, true] {
        if is_deleted {
            family.delete(1);
        }
        family.restart();
        let mut pool = Pool::open(damaged_disk(&family.disk, flip), short_steps()).expect("a pool");
        let found: Vec<u64> = scrubbed(&mut pool).iter().map(|bad| bad.lba).collect();
        // While its source is there, that one's scrub finds it.
        assert_eq!(found, if is_deleted { vec![300] } else { vec![] });
    }
}

/// The snapshot is gone, or a rebuild gave its replica other copies of all: no scrub of that replica comes to
/// what the clone shows.
#[test]
fn a_base_that_its_keeper_has_no_snapshot_of_is_read_by_the_scrub_of_a_clone() {
    for is_rebuilt in [false, true] {
        let mut family = Family::new(14, 16 << 20);
        family.append(1, EntryKind::Write, 300, 1);
        let snapshot = family.snapshot(1).expect("room");
        let guid = ReplicaGuid(family.clone_of(1, snapshot, 0).expect("room"));
        let mut replica = family.pool().replica(guid).expect("it");
        let good = read_all(&mut replica, ReadView::Live, BLOCKS);
        let wanted = good.iter().find(|slot| slot.lba == 300).expect("it").clone();
        let Content::Data { data, .. } = wanted.content else { panic!("a hole") };
        match is_rebuilt {
            true => family.rebuild(1, 5),
            false => assert!(family.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0)),
        }
        family.work();
        family.pool().settle().expect("folded");
        family.restart();
        let flip = |bytes: &mut [u8]| {
            let is_it = bytes == &data[..];
            bytes[9] ^= u8::from(is_it);
            is_it
        };
        let mut pool = Pool::open(damaged_disk(&family.disk, flip), short_steps()).expect("a pool");
        let mut at = Some(ScrubAt::default());
        while let Some(from) = at {
            at = pool.scrub(guid, from, 1 << 20).expect("a scrub").next;
        }
        let found: Vec<u64> = pool.take_bad_blocks().iter().map(|bad| bad.lba).collect();
        assert_eq!(found, [300], "rebuilt: {is_rebuilt}");
    }
}

/// A leaf of the base has blocks that were never written: to say so in the clone's map let the base
/// show again, which is lost.
#[test]
fn a_clone_over_a_lost_leaf_of_its_base_is_mended_at_once_where_nothing_was_written_too() {
    let mut family = Family::new(21, 16 << 20);
    for lba in [5, 300] {
        family.append(1, EntryKind::Write, lba, 1);
    }
    let snapshot = family.snapshot(1).expect("room");
    let guid = ReplicaGuid(family.clone_of(1, snapshot, 0).expect("room"));
    family.work();
    family.pool().settle().expect("folded");
    family.restart();
    let read = |pool: &mut Pool<MemoryDisk>| {
        let mut replica = pool.replica(guid).expect("it");
        read_all(&mut replica, ReadView::Live, BLOCKS)
    };
    let good = read(family.pool());
    let mut mended = 0;
    for block in crate::damage::node_blocks(&family.disk) {
        let disk = family.disk.fork();
        (0..4096).step_by(64).for_each(|within| disk.rot(block * 4096 + within, 1));
        let mut pool = Pool::open(disk, short_steps()).expect("a pool");
        if !read(&mut pool).iter().any(|slot| slot.content == Content::Bad) {
            continue;
        }
        for lba in (0..BLOCKS).step_by(256) {
            let (blocks, mut slots) = ((BLOCKS - lba).min(256) as u32, Vec::new());
            let mut peer = family.pool().replica(guid).expect("it");
            peer.read(ReadView::Live, lba, blocks, true, &mut slots).expect("a read");
            let mut replica = pool.replica(guid).expect("it");
            assert_eq!(replica.mend(ReadView::Live, lba, &slots), Ok(true), "from {lba}");
        }
        assert_eq!(flat(&read(&mut pool)), flat(&good));
        pool.settle().expect("recorded");
        let mut pool = Pool::open(pool.disk().fork(), short_steps()).expect("a pool");
        assert_eq!(flat(&read(&mut pool)), flat(&good), "on media");
        mended += 1;
    }
    assert!(mended > 0, "no node of the base was hit");
}

/// What is read of all images of a crash around a clone's creation and deletion.
#[test]
fn every_crash_of_making_and_deleting_a_clone_leaves_it_whole_or_not_at_all() {
    use crate::crash_enumeration::{crash_everywhere, disk_of, image_of};
    const FOLD_STEPS: u32 = 9;
    // A snapshot that is above the map has it folded before a clone is made of it.
    let ask_to_fold = |family: &mut Family, snapshot| {
        let source = CloneSource { volume: VolumeId(1), snapshot };
        let made = family.pool().create_clone(of(9), ReplicaMeta::default(), BLOCKS, &source);
        assert_eq!(made, Ok(Cloned::NotYet));
    };
    // Steps of background work that fold its source before the clone is made. After some of them a
    // record of the source is on its way.
    for steps in 0..FOLD_STEPS {
        let mut family = Family::new(11, 8 << 20);
        for _ in 0..20 {
            family.write_some(1);
        }
        let snapshot = family.snapshot(1).expect("room");
        ask_to_fold(&mut family, snapshot);
        family.work();
        family.restart();
        family.work();
        let later = (steps > 0).then(|| {
            for _ in 0..10 {
                family.write_some(1);
            }
            family.snapshot(1).expect("room")
        });
        let expected = |family: &mut Family, volume: u128, view| {
            let mut model = family.model.replica(ReplicaGuid(volume)).expect("it");
            flat(&read_all(&mut model, view, BLOCKS))
        };
        let content = expected(&mut family, 1, ReadView::Snapshot(snapshot));
        let start = image_of(&family.disk);
        family.disk.record();
        if let Some(later) = later {
            ask_to_fold(&mut family, later);
        }
        for _ in 0..steps {
            family.pool().background(1).expect("background work");
        }
        let clone = family.clone_of(1, snapshot, 0).expect("room");
        family.pool().request_sync();
        sync(family.pool());
        let made_by = family.disk.event_count();
        family.work();
        // Its source goes at once, then its own snapshot's clone, then all.
        family.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
        family.delete(1);
        family.pool().request_sync();
        sync(family.pool());
        let source_gone_by = family.disk.event_count();
        family.work();
        let deleted_from = family.disk.event_count();
        family.delete(clone);
        family.pool().request_sync();
        sync(family.pool());
        let deleted_by = family.disk.event_count();
        family.work();
        let mut seen = BTreeMap::<&str, u32>::new();
        crash_everywhere(&start, &family.disk.events(), |at, image| {
            let disk = disk_of(family.disk.size(), image);
            let mut pool = Pool::open(disk.clone(), short_steps()).expect("a pool");
            let is_there = pool.replica(ReplicaGuid(clone)).is_some();
            assert!(!(is_there && pool.is_retired(ReplicaGuid(clone))));
            let source = pool.replica(ReplicaGuid(1)).is_some();
            assert!(!source || at <= source_gone_by, "the deletion was durable");
            if let Some(mut replica) = pool.replica(ReplicaGuid(clone)) {
                assert!(at <= deleted_by, "the deletion was durable");
                assert!(!replica.meta().damaged);
                assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
                *seen.entry(if source { "with" } else { "without" }).or_default() += 1;
            } else {
                assert!(at <= made_by || at >= deleted_from, "the creation was durable");
                *seen.entry("none").or_default() += 1;
            }
            // What is done next goes on from there.
            for _ in 0..30 {
                pool.background(1 << 20).expect("background work");
                sync(&mut pool);
            }
            if let Some(mut replica) = pool.replica(ReplicaGuid(clone)) {
                assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
            }
            if !is_there && !source {
                assert_eq!(pool.stats().used_bytes, 0, "space that nobody has");
            }
        });
        assert!(seen.len() == 3 && seen.values().all(|n| *n > 5), "{seen:?}");
    }
}
