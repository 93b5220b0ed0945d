//! Opens of a disk that refuses to be read, and kills in the middle of an open.
//!
//! A start either finds what was flushed, or reports damage, or does not open. A loss that it finds
//! stays found, wherever in the open the process dies, once or several times.

use crate::common;
use std::collections::BTreeMap;

use crate::common::{GUID, World, options, repeat};
use bytes::Bytes;
use quoin_replication::replica::store::{BootCookie, ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::{Disk, MemoryDisk, Pool, PoolError, ReplicaPool};
use quoin_types::Lsn;

/// Headers of the log's batches in their order.
fn log_headers(disk: &MemoryDisk) -> Vec<u64> {
    let mut headers = BTreeMap::new();
    for block in disk.written_blocks() {
        let mut head = vec![0; 4096];
        disk.read_at(block * 4096, &mut head).expect("inside the disk");
        if head.starts_with(b"QBAT") && head[18] == 0 {
            headers.insert(u64::from_le_bytes(head[32..40].try_into().expect("8 bytes")), block);
        }
    }
    headers.into_values().collect()
}

/// A log of many batches, each synced and stable before the next, whose replica claims to hold all
/// that it ever applied.
fn flushed_log() -> (World, ReplicaMeta) {
    flushed_log_of(10, 1)
}

fn flushed_log_of(batches: u64, blocks_each: u32) -> (World, ReplicaMeta) {
    let mut world = World::new(5, 32 << 20);
    let claim =
        ReplicaMeta { session_open: true, cookie: world.disk.cookie(), ..ReplicaMeta::default() };
    world.pool().replica(GUID).expect("it").put_meta(claim.clone()).expect("room");
    for lba in 0..batches {
        let before = world.history.last().map_or(Default::default(), |e| (e.chain, e.position()));
        let position =
            quoin_types::Position { epoch: quoin_types::Epoch(1), lsn: before.1.lsn.next() };
        let data = Bytes::from(vec![lba as u8; 4096 * blocks_each as usize]);
        let kind = quoin_types::EntryKind::Write;
        let entry =
            quoin_types::Entry::after(before.0, position, kind, lba, blocks_each, data, false);
        world.history.push(entry.into());
        let last = &world.history[world.history.len() - 1..];
        world.pool.as_mut().expect("open").replica(GUID).expect("it").append(last).expect("room");
        world.model.replica(GUID).expect("it").append(last).expect("it takes it");
        world.begin_sync();
        world.finish_sync();
        world.set_stable_at_the_end();
    }
    world.pool = None;
    (world, claim)
}

/// The sector that ends the log for a reader must not hide the batches behind it: they prove
/// whether all this was durable.
#[test]
fn a_header_that_cannot_be_read_below_what_was_flushed_is_damage_and_no_torn_tail() {
    let (world, _) = flushed_log();
    let (flushed, headers) = (world.history.len() as u64, log_headers(&world.disk));
    assert_eq!(headers.len(), 10);
    // The batch behind the last one but one proves that the one before it was flushed.
    for block in &headers[..headers.len() - 1] {
        let disk = world.disk.fork();
        disk.break_block(*block);
        let mut pool = Pool::open(disk, options()).expect("a pool");
        let replica = pool.replica(GUID).expect("it");
        let position = replica.state().position.lsn.0;
        let damaged = replica.meta().damaged;
        assert!(damaged || position == flushed, "{position} of {flushed} flushed entries are left");
    }
}

/// At the end of a segment as well, where what is behind lies in another one.
#[test]
fn a_rotten_header_anywhere_in_a_log_of_several_segments_hides_no_flushed_batch_behind_it() {
    let (world, _) = flushed_log_of(12, 24);
    let (flushed, headers) = (world.history.len() as u64, log_headers(&world.disk));
    let firsts = headers.windows(2).filter(|pair| pair[1] != pair[0] + 25).count();
    assert!(headers.len() == 12 && firsts > 2, "{headers:?}");
    for block in &headers[..headers.len() - 1] {
        let disk = world.disk.fork();
        disk.rot(block * 4096 + 90, 1);
        let mut pool = Pool::open(disk, options()).expect("a pool");
        let replica = pool.replica(GUID).expect("it");
        let position = replica.state().position.lsn.0;
        let damaged = replica.meta().damaged;
        assert!(damaged || position == flushed, "{position} of {flushed} flushed entries are left");
    }
}

/// A replica that claims to hold all that it ever applied must not have lost the last of it to a
/// bad sector, or to rot with batches of the same process behind it.
#[test]
fn a_log_that_ends_at_a_bad_sector_or_before_its_own_batches_claims_nothing() {
    let (world, claim) = flushed_log();
    let headers = log_headers(&world.disk);
    let last = headers[headers.len() - 1];
    let claims = |disk: MemoryDisk| {
        let mut pool = Pool::open(disk, options()).expect("a pool");
        pool.replica(GUID).expect("it").meta().cookie == claim.cookie
    };
    assert!(claims(world.disk.fork()), "nothing is wrong yet");
    let unreadable = world.disk.fork();
    unreadable.break_block(last);
    assert!(!claims(unreadable), "the last header cannot be read");
    let rotten = world.disk.fork();
    rotten.rot(headers[headers.len() - 2] * 4096 + 90, 1);
    assert!(!claims(rotten), "its own batch follows");
}

/// Findings of an open about the replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Found {
    position: Lsn,
    damaged: bool,
    claims: bool,
}

fn found(disk: &MemoryDisk, cookie: BootCookie) -> Result<Found, PoolError> {
    let mut pool = Pool::open(disk.clone(), options())?;
    let replica = pool.replica(GUID).expect("the replica");
    let (position, meta) = (replica.state().position.lsn, replica.meta());
    Ok(Found { position, damaged: meta.damaged, claims: meta.cookie == cookie })
}

/// The disk fails in the middle of an open, at each of its reads, for good or for some of them.
#[test]
fn a_disk_that_refuses_reads_in_the_middle_of_an_open_hides_nothing_that_was_flushed() {
    let (world, claim) = flushed_log();
    let flushed = Lsn(world.history.len() as u64);
    let whole = Found { position: flushed, damaged: false, claims: true };
    let disk = world.disk.fork();
    disk.refuse_reads(0..0);
    assert_eq!(found(&disk, claim.cookie).expect("a pool"), whole);
    let (mut refused, mut doubted) = (0, 0);
    for first in 0..disk.reads() {
        for count in [1, 2, 5, u64::MAX - first] {
            let disk = world.disk.fork();
            disk.refuse_reads(first..first + count);
            let at = format!("reads {first} to {count} more");
            match found(&disk, claim.cookie) {
                Ok(found) => {
                    let hidden = found.position < flushed && !found.damaged && found.claims;
                    assert!(!hidden, "{at}: {found:?}");
                    assert!(count < 6 || found == whole, "{at}: nothing is decided: {found:?}");
                    doubted += u32::from(found != whole);
                }
                Err(PoolError::Store(StoreError::Io(_))) => {
                    // Nothing was changed by an open that came to nothing.
                    disk.refuse_reads(0..0);
                    assert_eq!(found_again(&disk, claim.cookie), whole, "{at}");
                    refused += 1;
                }
                Err(error) => panic!("{at}: {error}"),
            }
        }
    }
    assert!(refused > 10 && doubted > 1, "{refused} refused, {doubted} doubted");
}

fn found_again(disk: &MemoryDisk, cookie: BootCookie) -> Found {
    found(disk, cookie).expect("a pool that opens once its disk is read again")
}

/// A region of the disk is gone, from some batch to the segment's end: batches behind it would
/// have proved whether all of it was flushed.
#[test]
fn a_log_whose_end_cannot_be_looked_behind_is_damaged() {
    let (world, claim) = flushed_log();
    let headers = log_headers(&world.disk);
    let unit_blocks = u64::from(common::format_options().unit_blocks);
    for header in &headers {
        let disk = world.disk.fork();
        (*header..header + unit_blocks).for_each(|block| disk.break_block(block));
        let found = found(&disk, claim.cookie).expect("the other replicas are served");
        assert!(found.damaged && !found.claims, "from {header}: {found:?}");
    }
}

/// A header may take several blocks: the last of them is as good as the first to lose it.
#[test]
fn a_log_that_ends_in_the_middle_of_a_header_claims_nothing() {
    let (mut world, claim) = flushed_log();
    world.pool = Some(Pool::open(world.disk.clone(), options()).expect("a pool"));
    let mut entries = Vec::new();
    for lba in 0..200 {
        let last = world.history.last().expect("entries");
        let position = quoin_types::Position { epoch: last.epoch, lsn: last.lsn.next() };
        let kind = quoin_types::EntryKind::Trim;
        let entry =
            quoin_types::Entry::after(last.chain, position, kind, lba, 1, Bytes::new(), false);
        world.history.push(entry.into());
        entries.push(world.history[world.history.len() - 1].clone());
    }
    world.pool().replica(GUID).expect("it").append(&entries).expect("room");
    world.begin_sync();
    world.finish_sync();
    world.pool = None;
    let header = *log_headers(&world.disk).last().expect("batches");
    let whole = found(&world.disk.fork(), claim.cookie).expect("a pool");
    assert!(whole.claims && whole.position == Lsn(world.history.len() as u64));
    world.disk.break_block(header + 1);
    let found = found(&world.disk, claim.cookie).expect("a pool");
    assert!(found.position < whole.position && !found.claims, "{found:?}");
}

/// Opens again after a kill at each event of an open, and of the open after that, and compares.
fn kill_everywhere(disk: &MemoryDisk, cookie: BootCookie, wanted: Found, kills: u32) -> u64 {
    let whole = disk.fork();
    whole.record();
    assert_eq!(found_again(&whole, cookie), wanted, "with {kills} kills to come");
    if kills == 0 {
        return 1;
    }
    let events = whole.events();
    assert!(events.len() > 5);
    let killed_at = |at: usize| {
        let killed = disk.fork();
        repeat(&killed, &events[..at]);
        killed.process_crash(|| true);
        kill_everywhere(&killed, cookie, wanted, kills - 1)
    };
    (0..=events.len()).map(killed_at).sum()
}

/// A loss that an open finds is found again by the next one, though the first has begun to make
/// the log's end clean and was killed.
#[test]
fn a_loss_that_an_open_finds_is_not_hidden_by_kills_in_its_middle() {
    let (world, claim) = flushed_log();
    let headers = log_headers(&world.disk);
    let last = headers[headers.len() - 1];
    let is_found = |what: &str, disk: &MemoryDisk, damaged: bool| {
        let wanted = found_again(&disk.fork(), claim.cookie);
        assert_eq!((wanted.claims, wanted.damaged), (false, damaged), "{what}");
        let opens = kill_everywhere(disk, claim.cookie, wanted, 2);
        assert!(opens > 30, "{what}: {opens} opens");
    };
    let unreadable = world.disk.fork();
    unreadable.break_block(last);
    is_found("an unreadable header", &unreadable, false);

    let flushed = world.disk.fork();
    flushed.rot(headers[headers.len() - 3] * 4096 + 90, 1);
    is_found("rot below what was flushed", &flushed, true);

    let unseen = world.disk.fork();
    (last..last + 32).for_each(|block| unseen.break_block(block));
    is_found("a region that cannot be read", &unseen, true);

    let mut world = world;
    world.pool = Some(Pool::open(world.disk.clone(), options()).expect("a pool"));
    let mut append = || {
        let before = world.history.last().expect("entries").clone();
        let position = quoin_types::Position { epoch: before.epoch, lsn: before.lsn.next() };
        let (kind, data) = (quoin_types::EntryKind::Write, Bytes::from(vec![7; 4096]));
        let entry = quoin_types::Entry::after(before.chain, position, kind, 3, 1, data, false);
        world.history.push(entry.into());
        let entry = &world.history[world.history.len() - 1..];
        let pool = world.pool.as_mut().expect("open");
        pool.replica(GUID).expect("it").append(entry).expect("room");
    };
    append();
    append();
    // Not flushed, but of the life that died: nothing but rot tears the first of them.
    let rotten = world.disk.fork();
    let headers = log_headers(&rotten);
    rotten.rot(headers[headers.len() - 2] * 4096 + 90, 1);
    is_found("rot before batches of the last life", &rotten, false);

    // A sync failed, and the process was killed before it could record that.
    world.disk.fail_syncs();
    assert!(world.disk.sync().is_err());
    world.pool = None;
    world.disk.process_crash(|| true);
    is_found("pages that only the cache has", &world.disk, false);
}
