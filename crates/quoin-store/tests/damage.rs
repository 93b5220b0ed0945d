//! Damage anywhere in a pool: never wrong bytes, never a panic.

use crate::common;
use std::collections::{BTreeMap, BTreeSet};

use crate::common::family::Family;
use crate::common::{BLOCKS, GUID, World, options};
use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError, SyncTicket};
use quoin_store::{Disk, Due, MemoryDisk, Pool, PoolOptions, ReplicaPool, ScrubAt, ScrubStage};
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{EntryKind, Lsn, ReplicaGuid, SnapshotId, crc32c};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A pool with a folded part, a log above it, moved blocks and snapshots.
fn lived_in(seed: u64) -> World {
    lives(World::new(seed, 32 << 20))
}

fn lives(mut world: World) -> World {
    for round in 0..6 {
        for _ in 0..10 {
            world.append();
        }
        world.set_stable_at_the_end();
        if round < 4 {
            world.pool().settle().expect("folded");
        }
    }
    world.begin_sync();
    world.finish_sync();
    // A clean close: the metadata says how far the log must reach.
    let mut replica = world.pool().replica(GUID).expect("it");
    let meta = replica.meta().clone();
    replica.put_meta(meta).expect("closed");
    world.pool().request_sync();
    common::sync(world.pool());
    world
}

/// Bytes that each block of each view may have, by version: the right bytes or none.
fn truth(world: &mut World) -> BTreeMap<(u64, u64), Option<Bytes>> {
    let mut truth = BTreeMap::new();
    let (mut live, mut kept) = (BTreeMap::<u64, (u64, Option<Bytes>)>::new(), BTreeMap::new());
    for entry in &world.history {
        match &entry.kind {
            EntryKind::Snapshot { id, .. } => drop(kept.insert(*id, (entry.lsn.0, live.clone()))),
            EntryKind::Revert { id } => {
                let (since, then) = kept.get(id).expect("it was there");
                for (lba, block) in live.iter_mut().filter(|(_, block)| block.0 > *since) {
                    let data = then.get(lba).and_then(|(_, data)| data.clone());
                    *block = (entry.lsn.0, data.clone());
                    truth.insert((*lba, entry.lsn.0), data);
                }
            }
            _ => {}
        }
        for i in 0..u64::from(entry.blocks) {
            let at = i as usize * 4096;
            let data = (!entry.data.is_empty()).then(|| entry.data.slice(at..at + 4096));
            live.insert(entry.lba + i, (entry.lsn.0, data.clone()));
            truth.insert((entry.lba + i, entry.lsn.0), data);
        }
    }
    truth
}

/// Reads everything; what is not bad must be true. Returns the number of bad blocks.
fn check(pool: &mut Pool<MemoryDisk>, truth: &BTreeMap<(u64, u64), Option<Bytes>>) -> usize {
    let mut bad = 0;
    let Some(mut replica) = pool.replica(GUID) else { return 0 };
    let mut views = vec![(ReadView::Live, replica.state().volume_blocks)];
    views.extend(replica.snapshots().iter().map(|s| (ReadView::Snapshot(s.id), s.blocks)));
    for (view, blocks) in views {
        let mut slots = Vec::new();
        for lba in (0..blocks).step_by(50) {
            let count = (blocks - lba).min(50) as u32;
            match replica.read(view, lba, count, true, &mut slots) {
                Ok(()) | Err(StoreError::Damaged(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        for slot in slots {
            for i in 0..u64::from(slot.blocks) {
                let known = truth.get(&(slot.lba + i, slot.version.0));
                match &slot.content {
                    Content::Bad => bad += 1,
                    Content::Hole if slot.version == Lsn::ZERO => {}
                    Content::Hole => assert_eq!(known, Some(&None), "a hole at {}", slot.lba),
                    Content::Data { data, crc } => {
                        assert_eq!(crc32c(data), *crc);
                        assert_eq!(known, Some(&Some(data.clone())), "bytes at {}", slot.lba);
                    }
                }
            }
        }
    }
    let position = replica.state().position.lsn;
    let mut after = replica.state().base;
    while let Ok(Some(entries)) = replica.fetch(after, 1 << 20) {
        let Some(last) = entries.last() else { break };
        assert!(last.lsn <= position && entries.iter().all(|e| e.data_is_good()));
        after = last.lsn;
    }
    bad
}

/// Proves: a corrupted byte anywhere in a pool file is found, never served.
#[test]
fn a_flipped_bit_anywhere_is_never_served_and_never_panics() {
    let mut world = lived_in(11);
    let truth = truth(&mut world);
    world.pool = None;
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (mut opened, mut refused, mut bad, mut damaged) = (0, 0, 0, 0);
    let written = world.disk.written_blocks();
    for _ in 0..1500 {
        let disk = world.disk.fork();
        let block = written[rng.random_range(0..written.len())];
        // Headers are at the front of a block: look there more often.
        let within =
            if rng.random() { rng.random_range(0..128) } else { rng.random_range(0..4096) };
        disk.rot(block * 4096 + within, 1 << rng.random_range(0..8));
        match Pool::open(disk, options()) {
            Err(_) => refused += 1,
            Ok(mut pool) => {
                opened += 1;
                let replica = pool.replica(GUID).expect("the metadata has two copies");
                let lost = replica.state().position.lsn.0 < world.history.len() as u64;
                let known = replica.meta().damaged;
                assert!(known || !lost, "entries below the watermark vanished silently");
                damaged += u32::from(known);
                bad += check(&mut pool, &truth);
                // Work goes on, or stops with an error.
                for _ in 0..20 {
                    if pool.background(8 << 20).is_err() {
                        break;
                    }
                    common::sync(&mut pool);
                }
                check(&mut pool, &truth);
            }
        }
    }
    println!("opened {opened}, refused {refused}, bad blocks {bad}, damaged {damaged}");
    assert!(refused == 0, "one bit never costs a whole pool");
    assert!(bad > 100 && damaged > 5, "the test hit too little: {bad} bad, {damaged} damaged");
}

/// Blocks that hold nodes of the map.
pub fn node_blocks(disk: &MemoryDisk) -> Vec<u64> {
    let nodes_after = |header: u64| {
        let mut head = vec![0; 4096];
        disk.read_at(header * 4096, &mut head).expect("a read");
        let holds_nodes = head.starts_with(b"QBAT") && head[18] == 2;
        let data_blocks = u32::from_le_bytes(head[72..76].try_into().expect("four bytes"));
        let first = header + 1;
        first..first + if holds_nodes { data_blocks.into() } else { 0 }
    };
    disk.written_blocks().into_iter().flat_map(nodes_after).collect()
}

/// Snapshots are deleted and made while a pass is under way.
#[test]
fn a_scrub_reads_all_that_there_is_though_snapshots_come_and_go_meanwhile() {
    let mut family = Family::new(31, 16 << 20);
    let guid = ReplicaGuid(1);
    let snapshot = |family: &mut Family| {
        family.append(1, EntryKind::Write, 5, 1);
        family.snapshot(1).expect("room")
    };
    let mut snapshots: Vec<SnapshotId> = (0..4).map(|_| snapshot(&mut family)).collect();
    family.pool().settle().expect("folded");
    let (mut at, mut seen) = (Some(ScrubAt::default()), BTreeSet::new());
    while let Some(from) = at {
        let is_first = seen.insert(from.stage);
        if is_first && matches!(from.stage, ScrubStage::Snapshot(1..)) && seen.len() == 4 {
            // The one that is being read, and the next.
            for id in snapshots.drain(..2).collect::<Vec<_>>() {
                assert!(family.append(1, EntryKind::DeleteSnapshot { id }, 0, 0));
            }
            snapshots.push(snapshot(&mut family));
            family.pool().settle().expect("folded");
        }
        at = family.pool().scrub(guid, from, 1).expect("a scrub").next;
    }
    let lsns: BTreeSet<ScrubStage> = family
        .pool()
        .replica(guid)
        .expect("it")
        .snapshots()
        .iter()
        .map(|info| ScrubStage::Snapshot(info.lsn.0))
        .collect();
    assert_eq!(lsns.len(), 3);
    assert!(lsns.is_subset(&seen), "{lsns:?} of {seen:?}");
    for stage in [ScrubStage::Log, ScrubStage::Map, ScrubStage::Logical] {
        assert!(seen.contains(&stage), "{stage:?} was passed over");
    }
    assert!(seen.contains(&ScrubStage::Segments));
    let mut numbers: Vec<u64> = seen.iter().map(|stage| stage.number()).collect();
    assert!(seen.iter().all(|stage| ScrubStage::of(stage.number()) == *stage));
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), seen.len());
}

/// A node that still looks like one is the worst: its versions and places would be believed.
#[test]
fn a_flipped_bit_in_a_node_of_the_map_is_found_by_its_parents_checksum() {
    let mut world = lived_in(13);
    let truth = truth(&mut world);
    world.pool = None;
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let nodes = node_blocks(&world.disk);
    let mut bad = 0;
    for _ in 0..1000 {
        let disk = world.disk.fork();
        let block = nodes[rng.random_range(0..nodes.len())];
        disk.rot(block * 4096 + rng.random_range(0..4096), 1 << rng.random_range(0..8));
        let mut pool = Pool::open(disk, options()).expect("a node is needed by no start");
        bad += usize::from(check(&mut pool, &truth) > 0);
    }
    println!("{bad} of 1000 flipped bits in {} blocks were met", nodes.len());
    assert!(bad > 20, "the test hit too little: {bad}");
}

#[test]
fn whole_blocks_of_garbage_are_never_served_and_never_panic() {
    let mut world = lived_in(12);
    let truth = truth(&mut world);
    world.pool = None;
    let written = world.disk.written_blocks();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for _ in 0..300 {
        let disk = world.disk.fork();
        for _ in 0..rng.random_range(1..30) {
            let to = written[rng.random_range(0..written.len())];
            let mut bytes = vec![0; 4096];
            match rng.random_range(0..3) {
                0 => rng.fill(&mut bytes[..]),
                1 => {}
                // Another valid block in the wrong place.
                _ => {
                    let from = written[rng.random_range(0..written.len())];
                    disk.read_at(from * 4096, &mut bytes).expect("a read");
                }
            }
            disk.write_at(to * 4096, &[std::io::IoSlice::new(&bytes)]).expect("a write");
        }
        let Ok(mut pool) = Pool::open(disk, options()) else { continue };
        check(&mut pool, &truth);
        for _ in 0..10 {
            if pool.background(8 << 20).is_err() {
                break;
            }
            common::sync(&mut pool);
        }
        check(&mut pool, &truth);
    }
}

/// Proves: a bad block is found by the scrub and repaired with the same version only.
#[test]
fn the_scrub_finds_rot_and_a_repair_with_the_same_version_mends_it() {
    let mut world = lived_in(13);
    world.pool().settle().expect("folded");
    let truth = truth(&mut world);
    world.pool = None;
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let mut mended = 0;
    let written = world.disk.written_blocks();
    for _ in 0..400 {
        let disk = world.disk.fork();
        let block = written[rng.random_range(0..written.len())];
        disk.rot(block * 4096 + 2000, 0x10);
        let Ok(mut pool) = Pool::open(disk, options()) else { continue };
        let mut at = Some(ScrubAt::default());
        while let Some(from) = at {
            at = pool.scrub(GUID, from, 1 << 20).expect("a scrub").next;
        }
        let bad = pool.take_bad_blocks();
        for found in bad {
            let Some(Some(data)) = truth.get(&(found.lba, found.version.0)) else { continue };
            let crc = crc32c(data);
            let mut replica = pool.replica(GUID).expect("it");
            let mut slots = Vec::new();
            replica.read(ReadView::Live, found.lba, 1, true, &mut slots).expect("a read");
            if slots[0].version != found.version || slots[0].content != Content::Bad {
                continue;
            }
            let other = Lsn(found.version.0 + 1);
            assert_eq!(replica.repair(ReadView::Live, found.lba, other, crc, data), Ok(false));
            assert_eq!(
                replica.repair(ReadView::Live, found.lba, found.version, crc ^ 1, data),
                Ok(false)
            );
            if replica.repair(ReadView::Live, found.lba, found.version, crc, data) == Ok(true) {
                slots.clear();
                replica.read(ReadView::Live, found.lba, 1, true, &mut slots).expect("a read");
                assert_eq!(slots[0].content, Content::Data { crc, data: data.clone() });
                mended += 1;
            }
        }
    }
    assert!(mended > 20, "the test mended only {mended} of {BLOCKS} blocks");
}

/// Proves: a pass misses nothing that was held when it began, whatever is folded in the middle of it.
#[test]
fn a_fold_in_the_middle_of_a_scrub_hides_nothing_from_it() {
    for steps_before_fold in (0..24).step_by(2) {
        let mut world = World::new(31, 64 << 20);
        // Entries are read together, and these are some times as many.
        (0..200).for_each(|_| world.append());
        world.begin_sync();
        world.finish_sync();
        world.set_stable_at_the_end();
        let mut replica = world.pool().replica(GUID).expect("it");
        let volume_blocks = replica.state().volume_blocks;
        let live = common::flat(&common::read_all(&mut replica, ReadView::Live, volume_blocks));
        let held: BTreeMap<Bytes, (u64, u64)> = live
            .into_iter()
            .filter_map(|(lba, version, data)| Some((data?, (lba, version))))
            .filter(|(data, _)| data.iter().any(|byte| *byte != 0))
            .collect();
        assert!(held.len() > 50, "only {} blocks are held", held.len());
        let mut missed = BTreeSet::new();
        for block in world.disk.written_blocks() {
            let mut bytes = vec![0; 4096];
            world.disk.read_at(block * 4096, &mut bytes).expect("a read");
            if let Some(at) = held.get(bytes.as_slice()) {
                world.disk.rot(block * 4096 + 2000, 0x10);
                missed.insert(*at);
            }
        }
        assert_eq!(missed.len(), held.len());

        let (mut at, mut steps) = (Some(ScrubAt::default()), 0);
        while let Some(from) = at {
            if steps == steps_before_fold {
                world.pool().settle().expect("folded");
            }
            at = world.pool().scrub(GUID, from, 1).expect("a scrub").next;
            for bad in world.pool().take_bad_blocks() {
                missed.remove(&(bad.lba, bad.version.0));
            }
            steps += 1;
        }
        assert!(steps > steps_before_fold, "the pass was over after {steps} steps");
        assert_eq!(missed, BTreeSet::new(), "folded after {steps_before_fold} of {steps} steps");
    }
}

/// Proves: after a failed sync nothing is acknowledged until the pool was opened anew.
/// Otherwise the driver waits for ever for the next sync of a pool that is not known to have
/// failed. Found by the simulator: a client had no answer.
#[test]
fn a_sync_after_which_the_pool_cannot_record_what_waited_for_it_has_failed_for_its_driver() {
    for marks in [true, false] {
        let mut world = World::new(22, 32 << 20);
        common::break_a_rule();
        world.append();
        world.set_stable_at_the_end();
        match marks {
            true => world.pool().raise_mark().expect("asked for"),
            false => {
                world.pool().replica(GUID).expect("it").increment_begin(1, Lsn::ZERO).expect("one");
                while world.pool().background_due() > Due::Idle {
                    world.pool().background(1).expect("a state that waits for a sync");
                }
            }
        }
        let ticket = world.pool().sync_wanted().expect("a sync is wanted");
        world.disk.sync().expect("a sync");
        world.disk.fail_after(Some(0));
        assert!(world.pool().sync_finished(ticket, Ok(())).is_err(), "marks: {marks}");
        world.pool().request_sync();
        assert_eq!(world.pool().sync_wanted(), None);
    }
}

#[test]
fn a_failed_sync_ends_the_pool_until_it_is_opened_anew() {
    let mut world = World::new(21, 32 << 20);
    world.append();
    world.begin_sync();
    world.finish_sync();
    let floor = world.history.len();
    world.append();
    world.disk.fail_syncs();
    world.pool().request_sync();
    let ticket = world.pool().sync_wanted().expect("a sync is wanted");
    let result = world.pool().disk().sync();
    assert!(result.is_err());
    assert!(world.pool().sync_finished(ticket, result).is_err());
    assert!(world.pool().failure().is_some());
    let mut replica = world.pool().replica(GUID).expect("it");
    let meta = replica.meta().clone();
    assert!(matches!(replica.put_meta(meta), Err(StoreError::Io(_))));
    replica.request_sync();
    assert_eq!(world.pool().sync_wanted(), None, "a failed sync is never retried for truth");
    assert!(world.pool().background(1 << 20).is_err());
    // A good result is too late, for this sync or for one after it.
    for late in [ticket, SyncTicket(ticket.0 + 1)] {
        assert!(matches!(world.pool().sync_finished(late, Ok(())), Err(StoreError::Io(_))));
        assert_eq!(world.pool().sync_wanted(), None);
    }
    world.power_cut();
    assert!(world.history.len() >= floor);
    world.append();
    world.check();
}

/// Every prefix of the writes of a small workload, as a crash would leave it.
#[test]
fn a_crash_after_any_write_leaves_a_prefix_of_the_history() {
    let reference = {
        let mut world = workload(None);
        world.pool = None;
        world
    };
    let total = reference.disk.writes();
    let first = World::new(31, 32 << 20).disk.writes();
    let mut lengths = std::collections::BTreeSet::new();
    for limit in first..total {
        let world = workload(Some(limit));
        let history = world.history.clone();
        for cut in [false, true] {
            let disk = world.disk.fork();
            if cut {
                disk.power_cut(|| true);
            }
            let Ok(mut pool) = Pool::open(disk, options()) else {
                panic!("a crash after {limit} writes leaves no pool")
            };
            let Some(mut replica) = pool.replica(GUID) else { continue };
            let state = replica.state();
            let at = state.position.lsn.0 as usize;
            assert!(at == 0 || history[at - 1].chain == state.chain, "after {limit} writes");
            assert!(!replica.meta().damaged, "after {limit} writes");
            let mut model = common::model_of(&history[..at]);
            common::assert_same(&mut replica, &mut model.replica(GUID).expect("it"));
            lengths.insert(at);
        }
    }
    assert!(lengths.len() > 20, "crashes at too few places: {lengths:?}");
}

/// A fixed workload whose disk dies after so many writes; its history is all that was tried.
fn workload(limit: Option<u64>) -> World {
    let mut world = World::new(31, 32 << 20);
    let written = world.disk.writes();
    if let Some(limit) = limit {
        world.disk.fail_after(Some(limit.saturating_sub(written)));
    }
    let mut dead = false;
    for round in 0..12 {
        for _ in 0..4 {
            let mut snapshots = Vec::new();
            let entry = std::sync::Arc::new(world.entry(BLOCKS, &mut snapshots));
            world.history.push(entry.clone());
            if !dead {
                let appended = world.pool().replica(GUID).expect("it").append(&[entry]);
                dead = appended.is_err();
            }
        }
        if dead {
            continue;
        }
        let position = world.history.len() as u64;
        world.pool().replica(GUID).expect("it").set_stable(Lsn(position - 2));
        if round % 3 == 2 {
            dead = world.pool().settle().is_err();
        }
    }
    world.pool = None;
    world.disk.fail_after(None);
    world
}

/// Every live block; those that cannot be read are left out.
fn live(pool: &mut Pool<MemoryDisk>, lba: u64, blocks: u32) -> Vec<quoin_types::message::Slot> {
    let mut slots = Vec::new();
    let mut replica = pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, lba, blocks, true, &mut slots).expect("a read");
    slots
}

type Flat = [(u64, u64, Option<Bytes>)];

fn assert_same(at: &str, rotten: u64, got: &Flat, wanted: &Flat) {
    for (got, wanted) in got.iter().zip(wanted) {
        let (lba, is, was) = (got.0, got.1, wanted.1);
        assert!(got == wanted, "{at}, {rotten} rotten: block {lba} has version {is}, not {was}");
    }
}

/// A damaged node of the map costs no more than the blocks under it: folding goes on, no other
/// replica and no other block is touched, and a peer's slots make it whole again.
#[test]
fn a_damaged_node_of_the_map_costs_its_blocks_alone_and_is_mended_from_a_peer() {
    let mut world = lives(World::new(17, 32 << 20));
    let mut peer = Pool::open(world.disk.fork(), options()).expect("whole");
    let size = peer.replica(GUID).expect("it").state().volume_blocks;
    world.pool = None;
    let (mut stretches, mut blocks, mut headers, mut refusals) = (0, 0, 0, 0);
    // All nodes of the map, and some of everything else.
    let written = world.disk.written_blocks();
    let nodes = node_blocks(&world.disk);
    let sample = written.into_iter().filter(|b| *b > 0 && (b % 7 == 0 || nodes.contains(b)));
    for block in sample {
        let disk = world.disk.fork();
        (0..4096).step_by(64).for_each(|within| disk.rot(block * 4096 + within, 1));
        let options = PoolOptions { checkpoint_bytes: 0, log_keep_bytes: 0, ..options() };
        let mut pool = Pool::open(disk, options).expect("the metadata has two copies");
        if pool.replica(GUID).expect("it").meta().damaged {
            // The log that a recovery needs: the replica is rebuilt whole.
            continue;
        }
        let stable = peer.replica(GUID).expect("it").state().position.lsn;
        pool.replica(GUID).expect("it").set_stable(stable);
        for _ in 0..10 {
            pool.background(8 << 20).expect("the damage of one node is not the pool's");
            common::sync(&mut pool);
        }
        assert_eq!(pool.take_damaged(), [], "a node of the map is no reason to rebuild it all");
        assert!(pool.background_due() <= Due::Relaxed, "no work is asked for in vain");
        // Damage that was found while folding is found again by the scrub.
        for _ in 0..3 {
            let mut at = Some(ScrubAt::default());
            while let Some(from) = at {
                let done = pool.scrub(GUID, from, 1 << 20).expect("a scrub");
                at = done.next;
                headers += done.headers;
            }
            for bad in pool.take_bad_blocks() {
                let count = (size - bad.lba).min(bad.blocks.into()) as u32;
                let slots = live(&mut peer, bad.lba, count);
                let mut replica = pool.replica(GUID).expect("it");
                // A peer whose bytes miss their checksums gives nothing that is kept.
                let others = other_bytes(&slots);
                if bad.blocks > 1 {
                    let refused = replica.mend(ReadView::Live, bad.lba, &others);
                    refusals += u32::from(matches!(refused, Err(StoreError::Rule(_))));
                } else if let Content::Data { crc, data } = &others[0].content {
                    let version = others[0].version;
                    let refused = replica.repair(ReadView::Live, bad.lba, version, *crc, data);
                    assert_eq!(refused, Ok(false));
                    let (Content::Data { data, .. }, other) = (&slots[0].content, version.next())
                    else {
                        panic!("its data")
                    };
                    let refused = replica.repair(ReadView::Live, bad.lba, other, *crc, data);
                    assert_eq!(refused, Ok(false), "of another version");
                }
                if bad.blocks > 1 {
                    stretches +=
                        u32::from(replica.mend(ReadView::Live, bad.lba, &slots) == Ok(true));
                } else if let Content::Data { crc, data } = &slots[0].content {
                    let done =
                        replica.repair(ReadView::Live, bad.lba, slots[0].version, *crc, data);
                    blocks += u32::from(done == Ok(true));
                }
            }
            pool.background(8 << 20).expect("it goes on");
            common::sync(&mut pool);
        }
        let whole = common::flat(&live(&mut peer, 0, size as u32));
        assert_same("in memory", block, &common::flat(&live(&mut pool, 0, size as u32)), &whole);
        // And on media.
        pool.settle().expect("recorded");
        let mut again = Pool::open(pool.disk().fork(), PoolOptions::default()).expect("a pool");
        let state = again.replica(GUID).expect("it").state();
        assert_eq!(state.position, peer.replica(GUID).expect("it").state().position, "{block}");
        assert_same("on media", block, &common::flat(&live(&mut again, 0, size as u32)), &whole);
    }
    println!("{stretches} stretches mended, {blocks} blocks repaired, {headers} headers");
    assert!(stretches > 2 && blocks > 5 && refusals > 2, "the test hit too little");
}

/// The same slots with a bit of each block of data changed, under the checksums of before.
fn other_bytes(slots: &[Slot]) -> Vec<Slot> {
    let mut slots = slots.to_vec();
    for slot in &mut slots {
        if let Content::Data { data, .. } = &mut slot.content {
            let mut bytes = data.to_vec();
            bytes[4095] ^= 1;
            *data = bytes.into();
        }
    }
    slots
}

#[test]
fn rot_in_superblock_ring_and_segment_headers_is_written_again_by_the_scrub() {
    let mut world = lived_in(19);
    world.pool().settle().expect("folded");
    let blocks = world.disk.size() / 4096;
    let mut mended = 0;
    let starts = world.pool().starts();
    world.disk.rot((starts % 2) * 4096 + 20, 4);
    assert_eq!(world.pool().scrub_metadata(), Ok(1), "one copy of the superblock");
    for block in [2, blocks - 2 - 8] {
        world.disk.rot(block * 4096 + 30, 1);
        mended += world.pool().scrub_metadata().expect("room");
    }
    assert_eq!(world.pool().scrub_metadata(), Ok(0), "all is whole again ({mended} mended)");
    let mut headers = 0;
    for block in world.disk.written_blocks() {
        let mut bytes = vec![0; 4096];
        world.disk.read_at(block * 4096, &mut bytes).expect("a read");
        if bytes.starts_with(b"QUOINSEG") {
            world.disk.rot(block * 4096 + 50, 1);
            headers += 1;
        }
    }
    let done = world.pool().scrub(GUID, ScrubAt::default(), u64::MAX).expect("a scrub");
    assert!(headers > 0 && done.headers > 0 && done.next.is_none());
    let done = world.pool().scrub(GUID, ScrubAt::default(), u64::MAX).expect("a scrub");
    assert_eq!(done.headers, 0);
}

/// State on the media of two entries after the sync that was to make them durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OnMedia {
    All,
    Nothing,
    /// The kernel wrote all but the second one's data by itself.
    AllButData,
}

/// A View and a write are appended, in one batch or in two, and a sync follows. Then the process is
/// killed before it could write down what became of that: the same boot, the pages still in the
/// cache.
fn killed_after_a_sync(held: OnMedia, batches: usize) {
    let mut world = World::new(3, 32 << 20);
    let claim = ReplicaMeta {
        session_open: true,
        cookie: world.disk.cookie(),
        closed_continuous: true,
        ..ReplicaMeta::default()
    };
    world.pool().replica(GUID).expect("it").put_meta(claim.clone()).expect("room");
    while world.history.len() < 20 {
        world.append();
    }
    world.begin_sync();
    world.finish_sync();
    let synced = world.history.len() as u64;
    // Under durability cache, so that the kernel holds everything at once.
    let view = quoin_types::EntryKind::View(Box::new(common::some_view()));
    let last = world.history.last().expect("entries");
    let next = quoin_types::Position { epoch: last.epoch, lsn: Lsn(synced + 1) };
    let view = quoin_types::Entry::after(last.chain, next, view, 0, 0, Bytes::new(), false);
    let data = Bytes::from(vec![7; 8 * 4096]);
    let after = quoin_types::Position { epoch: view.epoch, lsn: Lsn(synced + 2) };
    let kind = quoin_types::EntryKind::Write;
    let write = quoin_types::Entry::after(view.chain, after, kind, 0, 8, data, false);
    let entries = [view.into(), write.into()];
    let mut replica = world.pool().replica(GUID).expect("it");
    for batch in entries.chunks(entries.len() / batches) {
        replica.append(batch).expect("room");
    }
    if held == OnMedia::AllButData {
        world.disk.write_back(|block| *block != [7; 4096]);
    }
    if held != OnMedia::All {
        world.disk.fail_syncs();
        assert!(world.disk.sync().is_err());
    }
    world.pool = None;
    world.disk.process_crash(|| true);
    let mut pool = Pool::open(world.disk.clone(), options()).expect("a pool");
    let replica = pool.replica(GUID).expect("it");
    let (lsn, meta) = (replica.state().position.lsn.0, replica.meta());
    let claims = meta.cookie == claim.cookie && meta.closed_continuous;
    let expected = match held {
        OnMedia::All => synced + 2,
        OnMedia::AllButData => synced + 1,
        OnMedia::Nothing => synced,
    };
    assert_eq!((lsn, claims), (expected, held == OnMedia::All), "{held:?}, {batches}");
    drop(pool);
    let mut again = Pool::open(world.disk.clone(), options()).expect("a pool");
    let replica = again.replica(GUID).expect("it");
    let claims = replica.meta().cookie == claim.cookie;
    assert_eq!(claims, held == OnMedia::All, "and it stays withdrawn");
    assert_eq!(replica.state().position.lsn.0, lsn);
}

#[test]
fn what_a_failed_sync_left_in_the_cache_is_not_taken_for_held_after_a_kill() {
    for held in [OnMedia::All, OnMedia::Nothing, OnMedia::AllButData] {
        killed_after_a_sync(held, 1);
        killed_after_a_sync(held, 2);
    }
}

/// A log that ends with one large batch and a small one behind it: the small one proves that the
/// large one was flushed.
fn log_with_a_large_batch(volume_blocks: u64, entries: u64) -> (MemoryDisk, Lsn) {
    common::break_a_rule();
    let disk = MemoryDisk::new(512 << 20);
    let format = quoin_store::FormatOptions::new(quoin_types::PoolId(77));
    Pool::format(&disk, &format).expect("a fit disk");
    let mut pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a fresh pool");
    pool.create(common::identity(GUID), ReplicaMeta::default(), volume_blocks).expect("room");
    let (mut chain, mut lsn) = (quoin_types::Chain::default(), Lsn::ZERO);
    for (count, blocks) in [(1, 1), (entries, 256), (1, 1)] {
        let batch: Vec<quoin_types::entry::SharedEntry> = (0..count)
            .map(|i| {
                let position =
                    quoin_types::Position { epoch: quoin_types::Epoch(1), lsn: lsn.next() };
                let data = Bytes::from(vec![i as u8 + 1; blocks * 4096]);
                let (kind, lba) = (quoin_types::EntryKind::Write, i * 256);
                let entry = quoin_types::Entry::after(
                    chain,
                    position,
                    kind,
                    lba,
                    blocks as u32,
                    data,
                    false,
                );
                (chain, lsn) = (entry.chain, entry.lsn);
                entry.into()
            })
            .collect();
        pool.replica(GUID).expect("it").append(&batch).expect("room");
        pool.request_sync();
        common::sync(&mut pool);
        pool.replica(GUID).expect("it").set_stable(lsn);
    }
    (disk, lsn)
}

/// First blocks of the log's batches that have so many data blocks or more.
fn large_headers(disk: &MemoryDisk, data_blocks: u32) -> Vec<u64> {
    let is_large = |block: &u64| {
        let mut head = vec![0; 4096];
        disk.read_at(block * 4096, &mut head).expect("a read");
        let blocks = u32::from_le_bytes(head[72..76].try_into().expect("four bytes"));
        head.starts_with(b"QBAT") && head[18] == 0 && blocks >= data_blocks
    };
    disk.written_blocks().into_iter().filter(is_large).collect()
}

/// However many blocks of data are between it and the batch that proves that it was flushed.
#[test]
fn a_rotten_header_of_a_batch_of_any_size_is_damage_and_no_torn_tail() {
    let large = 1 << 22;
    for (volume_blocks, entries) in [(2048, 1), (2048, 2), (2048, 3), (large, 6), (large, 30)] {
        let (disk, flushed) = log_with_a_large_batch(volume_blocks, entries);
        let headers = large_headers(&disk, 256);
        assert!(!headers.is_empty(), "a batch of {entries} entries");
        for header in headers {
            let disk = disk.fork();
            disk.rot(header * 4096 + 90, 1);
            let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
            let replica = pool.replica(GUID).expect("it");
            let position = replica.state().position.lsn;
            assert!(position < flushed, "the header at {header} is not read");
            let damaged = replica.meta().damaged;
            assert!(damaged, "{position} of {flushed} entries are left of {entries} in a batch");
        }
    }
}

#[test]
fn entries_of_many_small_segments_in_one_call_are_taken_by_a_volume_of_large_ones() {
    let (disk, all) = log_with_a_large_batch(1 << 22, 30);
    let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    assert_eq!(pool.replica(GUID).expect("it").state().position.lsn, all);
}
