//! All crashes of a family of volumes: at each event of the disk every member is left whole, as it
//! was after one of its entries, or not at all.

use std::collections::{BTreeMap, BTreeSet};

use quoin_replication::replica::store::{ReplicaStore, StoreError};
use quoin_store::{Disk, MemoryDisk, Pool, ReplicaPool};
use quoin_types::message::ReadView;
use quoin_types::{EntryKind, Lsn, ReplicaGuid};

use crate::common::family::{Family, State, state_of};
use crate::common::{BLOCKS, begin_increment, pull_all, short_steps, sync};
use crate::crash_enumeration::{Blocks, crash_everywhere, disk_of, image_of};

/// Durable parts of one volume, and the events of the disk since which they are.
#[derive(Default)]
struct Durable {
    /// Events, and the last entry that is on media since.
    entries: Vec<(usize, Lsn)>,
    deleted_from: Option<usize>,
    deleted_by: Option<usize>,
}

/// A family whose disk remembers what is done to it, and what each crash may leave.
struct Enumeration {
    family: Family,
    start: Blocks,
    durable: BTreeMap<u128, Durable>,
    rebuilds: u64,
}

impl Enumeration {
    fn new(mut family: Family) -> Self {
        family.remember();
        family.restart();
        let start = image_of(&family.disk);
        family.disk.record();
        let mut this = Enumeration { family, start, durable: BTreeMap::new(), rebuilds: 0 };
        this.sync();
        this
    }

    /// All that was done is on media.
    fn sync(&mut self) {
        self.family.pool().request_sync();
        sync(self.family.pool());
        let events = self.family.disk.event_count();
        for member in self.family.members.clone() {
            let replica = self.family.pool().replica(ReplicaGuid(member)).expect("it");
            let durable = (events, replica.state().position.lsn);
            self.durable.entry(member).or_default().entries.push(durable);
        }
        for volume in self.durable.values_mut().filter(|volume| volume.deleted_from.is_some()) {
            volume.deleted_by.get_or_insert(events);
        }
    }

    fn write(&mut self, member: u128, times: usize) {
        (0..times).for_each(|_| self.family.write_some(member));
    }

    fn snapshot(&mut self, member: u128) -> quoin_types::SnapshotId {
        self.family.snapshot(member).expect("room")
    }

    fn entry(&mut self, member: u128, kind: EntryKind) {
        assert!(self.family.append(member, kind, 0, 0), "the pool is full");
    }

    /// Overwrites a volume until blocks of others are moved out of the segments that it gives up.
    fn churn(&mut self, member: u128) {
        for round in 0..4 {
            for lba in (round..BLOCKS - 8).step_by(24) {
                self.family.append(member, EntryKind::Write, lba, 8);
            }
            self.family.work();
        }
    }

    fn delete(&mut self, member: u128) {
        let events = self.family.disk.event_count();
        self.durable.entry(member).or_default().deleted_from = Some(events);
        self.family.delete(member);
    }

    /// Half of a member's content comes anew, and then the member is deleted.
    fn delete_in_a_rebuild(&mut self, member: u128) {
        let guid = ReplicaGuid(member);
        let mut model = self.family.model.replica(guid).expect("it");
        let (slots, _) = pull_all(&mut model, ReadView::Live, Lsn::ZERO);
        let mut real = self.family.pool.as_mut().expect("open").replica(guid).expect("it");
        begin_increment(&mut real, 77, Lsn::ZERO);
        real.increment_feed(77, &slots[..slots.len() / 2], BLOCKS).expect("fed");
        self.family.work();
        self.delete(member);
    }

    fn rebuild(&mut self, member: u128) {
        self.rebuilds += 1;
        self.family.rebuild(member, self.rebuilds);
    }

    /// Checks that a crash after so many events may leave this of a volume.
    fn allow(&self, volume: u128, at: usize, left: Option<State>) {
        let durable = self.durable.get(&volume);
        let entries = durable.map(|durable| durable.entries.as_slice()).unwrap_or_default();
        let floor = entries.iter().rfind(|(events, _)| *events <= at).map(|(_, lsn)| *lsn);
        let Some(state) = left else {
            let is_deleted = durable.and_then(|d| d.deleted_from).is_some_and(|from| at >= from);
            assert!(floor.is_none() || is_deleted, "the creation of {volume} was durable");
            return;
        };
        let gone_by = durable.and_then(|durable| durable.deleted_by);
        assert!(gone_by.is_none_or(|by| at < by), "the deletion of {volume} was durable");
        assert!(floor.is_none_or(|floor| state.0 >= floor), "{volume} lost what was durable");
        let states = &self.family.states.as_ref().expect("noted")[&volume];
        assert!(states.contains(&state), "{volume} never was as it is at {:?}", state.0);
    }
}

/// The state that is left of each volume.
fn left(pool: &mut Pool<MemoryDisk>, volumes: &BTreeSet<u128>) -> BTreeMap<u128, State> {
    let there = volumes.iter().filter_map(|volume| {
        let mut replica = pool.replica(ReplicaGuid(*volume))?;
        assert!(!replica.meta().damaged);
        Some((*volume, state_of(&mut replica)))
    });
    there.collect()
}

fn work(pool: &mut Pool<MemoryDisk>) {
    for _ in 0..30 {
        match pool.background(1 << 20) {
            Ok(_) | Err(StoreError::Full) => {}
            Err(error) => panic!("{error}"),
        }
        sync(pool);
    }
}

/// Clones made, their source reverted, cleaned up and deleted, members rebuilt while relatives show
/// their old segments, one deleted in the middle of its rebuild, and the last one deleted.
#[test]
fn every_crash_of_a_family_leaves_each_member_whole_or_not_at_all() {
    for seed in 0..2 {
        println!("seed {seed}");
        let mut family = Family::new(400 + seed, 10 << 20);
        (0..30).for_each(|_| family.write_some(1));
        let mut run = Enumeration::new(family);
        let first = run.snapshot(1);
        run.write(1, 5);
        let clone = run.family.clone_of(1, first, 0).expect("room");
        run.sync();
        run.write(clone, 8);
        run.entry(1, EntryKind::Revert { id: first });
        let larger = run.family.clone_of(1, first, 100).expect("room");
        run.write(larger, 4);
        run.sync();
        run.churn(1);
        let of_clone = run.snapshot(clone);
        run.write(clone, 3);
        let grandchild = run.family.clone_of(clone, of_clone, 0).expect("room");
        run.write(grandchild, 6);
        run.sync();
        // The grandchild goes on to show what its source flips away from.
        run.rebuild(clone);
        run.churn(clone);
        run.sync();
        let kept = run.snapshot(larger);
        run.write(larger, 5);
        run.entry(larger, EntryKind::Revert { id: kept });
        run.rebuild(1);
        run.delete(1);
        run.family.work();
        run.sync();
        run.churn(larger);
        run.delete_in_a_rebuild(grandchild);
        run.sync();
        run.entry(larger, EntryKind::DeleteSnapshot { id: kept });
        run.delete(clone);
        run.sync();
        run.family.work();
        run.family.check();
        run.delete(larger);
        run.sync();
        run.family.work();

        let volumes: BTreeSet<u128> = [1, clone, larger, grandchild].into();
        let mut seen = BTreeMap::<Vec<u128>, u32>::new();
        crash_everywhere(&run.start, &run.family.disk.events(), |at, image| {
            let disk = disk_of(run.family.disk.size(), image);
            let mut pool = Pool::open(disk, short_steps()).expect("a pool");
            let after = left(&mut pool, &volumes);
            for volume in &volumes {
                run.allow(*volume, at, after.get(volume).copied());
            }
            // Work after the crash harms none of them.
            work(&mut pool);
            assert!(left(&mut pool, &volumes) == after, "changed by work after the crash");
            assert_eq!((pool.take_damaged(), pool.take_bad_blocks()), (vec![], vec![]));
            for volume in after.keys() {
                assert!(pool.delete(ReplicaGuid(*volume)).expect("room"));
            }
            pool.request_sync();
            work(&mut pool);
            assert_eq!(pool.stats().used_bytes, 0, "space that nobody has");
            *seen.entry(after.into_keys().collect()).or_default() += 1;
        });
        println!("{seen:?}");
        assert!(seen.len() >= 5, "{seen:?}");
    }
}
