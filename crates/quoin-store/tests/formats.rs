//! Whole pools as earlier versions left them: opened, found to hold what they held, and used on.
//! (`src/recorded.rs` has the bytes of each structure.)

use std::fmt::Write as _;
use std::io::IoSlice;

use crate::common::{flat, read_all, some_view, sync};
use bytes::Bytes;
use quoin_recorded::Recorded;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_store::offline;
use quoin_store::{Disk, FormatOptions, MemoryDisk, Pool, PoolError, PoolOptions, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{
    BLOCK_SIZE, Entry, EntryKind, Epoch, Incarnation, Lsn, Member, Membership, PoolId, Position,
    ReplicaGuid, ReplicaId, SnapshotId, VolumeId, crc32c,
};

const RAISE: &str = "FORMAT_VERSION, or an incompat bit, in quoin-store/src/format/superblock.rs";
const CRATE: &str = env!("CARGO_MANIFEST_DIR");
/// The format version of pools, as their superblock has it.
const FORMAT_VERSION: u64 = 2;
const POOL_BYTES: u64 = 12 << 20;
/// A replica with a base, snapshots, a log above it and a cut; one within an increment; one that
/// was deleted.
const LIVED: ReplicaGuid = ReplicaGuid(0xa);
const FED: ReplicaGuid = ReplicaGuid(0xb);
const GONE: ReplicaGuid = ReplicaGuid(0xc);

fn options() -> PoolOptions {
    PoolOptions { cache_bytes: 1 << 20, log_keep_bytes: 0, ..PoolOptions::default() }
}

fn identity(guid: ReplicaGuid) -> ReplicaIdentity {
    ReplicaIdentity {
        volume: VolumeId(0xf01),
        replica: ReplicaId(guid.0 + 0x100),
        guid,
        volume_spec: Bytes::from_static(b"name: db"),
    }
}

fn meta() -> ReplicaMeta {
    let member = |n| Member { id: ReplicaId(n), guid: ReplicaGuid(n) };
    ReplicaMeta {
        promised: Epoch(4),
        promised_incarnation: Incarnation(0x19),
        session_open: true,
        lease_ms: 2000,
        quorum: true,
        membership: Membership {
            version: 4,
            rf: 3,
            cf: 2,
            drf: 3,
            known: (1..4).map(member).collect(),
            retired: vec![GONE],
            formed: true,
        },
        ..ReplicaMeta::default()
    }
}

fn replica<T>(
    pool: &mut Pool<MemoryDisk>,
    guid: ReplicaGuid,
    act: impl FnOnce(&mut dyn ReplicaStore) -> T,
) -> T {
    act(&mut pool.replica(guid).expect("the replica"))
}

/// Appends what follows the replica's history, each entry a batch of its own.
fn append(pool: &mut Pool<MemoryDisk>, epoch: u64, kinds: &[(EntryKind, u64, u32)]) {
    replica(pool, LIVED, |store| {
        for (kind, lba, blocks) in kinds {
            let state = store.state();
            let position = Position { epoch: Epoch(epoch), lsn: state.position.lsn.next() };
            let data = match kind {
                EntryKind::Write => {
                    let fill = |n: u32| vec![(position.lsn.0 * 8 + u64::from(n)) as u8; BLOCK_SIZE];
                    Bytes::from((0..*blocks).flat_map(fill).collect::<Vec<u8>>())
                }
                _ => Bytes::new(),
            };
            let entry =
                Entry::after(state.chain, position, kind.clone(), *lba, *blocks, data, false);
            store.append(&[SharedEntry::from(entry)]).expect("room");
        }
    });
    pool.request_sync();
    sync(pool);
}

/// A pool with everything in it that a pool may have.
fn lived() -> MemoryDisk {
    let disk = MemoryDisk::new(POOL_BYTES);
    let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(0x9001)) };
    Pool::format(&disk, &format).expect("a fit disk");
    let mut pool = Pool::open(disk.clone(), options()).expect("a fresh pool");
    for guid in [LIVED, FED, GONE] {
        pool.create(identity(guid), meta(), 600).expect("room");
    }
    let write = |lba, blocks| (EntryKind::Write, lba, blocks);
    let snapshot = |id, hidden| (EntryKind::Snapshot { id: SnapshotId(id), hidden }, 0, 0);
    let view = EntryKind::View(Box::new(some_view()));
    append(&mut pool, 1, &[(view.clone(), 0, 0), write(0, 3), write(300, 2), snapshot(1, false)]);
    append(
        &mut pool,
        2,
        &[(view, 0, 0), (EntryKind::Trim, 1, 1), write(301, 4), snapshot(2, true)],
    );
    append(
        &mut pool,
        2,
        &[
            (EntryKind::Zero { no_hole: true }, 500, 2),
            (EntryKind::Resize { blocks: 700 }, 0, 0),
            write(690, 1),
        ],
    );
    replica(&mut pool, LIVED, |store| store.set_stable(Lsn(11)));
    pool.settle().expect("folded");
    append(
        &mut pool,
        3,
        &[
            write(2, 2),
            snapshot(3, false),
            write(2, 1),
            (EntryKind::DeleteSnapshot { id: SnapshotId(2) }, 0, 0),
        ],
    );
    append(
        &mut pool,
        3,
        &[(EntryKind::Revert { id: SnapshotId(1) }, 0, 0), write(40, 1), write(41, 1)],
    );
    // Two entries that another history took the place of.
    replica(&mut pool, LIVED, |store| store.truncate(Lsn(16))).expect("above stable");
    append(&mut pool, 4, &[write(42, 1)]);
    pool.describe(LIVED, Bytes::from_static(b"name: db, larger")).expect("room");
    let data = Bytes::from(vec![0x5d; BLOCK_SIZE]);
    let slots = [
        Slot { lba: 0, blocks: 20, version: Lsn(3), content: Content::Hole },
        Slot {
            lba: 20,
            blocks: 1,
            version: Lsn(4),
            content: Content::Data { crc: crc32c(&data), data },
        },
    ];
    replica(&mut pool, FED, |store| {
        store.increment_begin(77, Lsn(0)).expect("a start");
        store.increment_feed(77, &slots, 21).expect("fed");
    });
    pool.delete(GONE).expect("room");
    pool.settle().expect("recorded");
    append(&mut pool, 4, &[write(43, 2)]);
    disk
}

fn image(disk: &MemoryDisk) -> Vec<u8> {
    let mut image = vec![0; POOL_BYTES as usize];
    disk.read_at(0, &mut image).expect("a read");
    image
}

fn disk_of(image: &[u8]) -> MemoryDisk {
    let disk = MemoryDisk::new(image.len() as u64);
    for (offset, block) in (0u64..).step_by(BLOCK_SIZE).zip(image.chunks(BLOCK_SIZE)) {
        if block.iter().any(|byte| *byte != 0) {
            disk.write_at(offset, &[IoSlice::new(block)]).expect("a write");
        }
    }
    disk.sync().expect("a sync");
    disk
}

/// Everything that a pool holds, in words.
fn facts(pool: &mut Pool<MemoryDisk>) -> String {
    let mut out = String::new();
    let retired = pool.retired();
    writeln!(out, "pool {} retired {retired:?}", pool.id()).expect("a string");
    for guid in pool.replicas() {
        let mut store = pool.replica(guid).expect("listed");
        // All but what is said of this start.
        let meta = ReplicaMeta {
            cookie: quoin_replication::replica::store::BootCookie(0),
            closed_continuous: false,
            ..store.meta().clone()
        };
        let state = store.state();
        let at = (state.position, state.chain, state.stable, &state.last_view, state.volume_blocks);
        writeln!(out, "\n{:?}\n{meta:?}\n{at:?}", store.identity()).expect("a string");
        writeln!(out, "{:?}\n{:?}", store.epoch_table(), store.shadow()).expect("a string");
        let mut views = vec![(ReadView::Live, state.volume_blocks)];
        views.extend(store.snapshots().iter().map(|s| (ReadView::Snapshot(s.id), s.blocks)));
        for (view, blocks) in views {
            writeln!(out, "{view:?} of {blocks}").expect("a string");
            for (lba, version, data) in flat(&read_all(&mut store, view, blocks)) {
                if version > 0 {
                    let data = data.map_or("hole".to_owned(), |d| format!("{:08x}", crc32c(&d)));
                    writeln!(out, "  {lba} {version} {data}").expect("a string");
                }
            }
        }
    }
    out
}

fn open(disk: &MemoryDisk) -> Pool<MemoryDisk> {
    Pool::open(disk.clone(), options()).expect("a pool")
}

#[test]
fn a_life_today_ends_in_the_facts_that_were_recorded_and_its_disk_is_recorded() {
    let recorded = Recorded::current(CRATE, "pool", FORMAT_VERSION, RAISE);
    let disk = lived();
    recorded.holds_text("facts.txt", &facts(&mut open(&disk.fork())));
    // Where blocks lie is this build's own affair, so a disk is recorded once and never compared.
    if recorded.names(".hex").is_empty() {
        recorded.holds("disk", &image(&disk));
    }
}

#[test]
fn pools_of_every_version_are_opened_with_all_they_hold_and_used_on() {
    for version in Recorded::all(CRATE, "pool", RAISE) {
        let disk = disk_of(&version.read("disk"));
        let report = offline::check(disk.clone(), |_| ()).expect("a check");
        assert!(report.is_sound(), "{report:?}");
        let mut pool = open(&disk);
        let held = facts(&mut pool);
        assert_eq!(held, version.read_text("facts.txt"));
        let before = replica(&mut pool, LIVED, |store| store.state().position.lsn);
        append(&mut pool, 5, &[(EntryKind::Write, 44, 3), (EntryKind::Trim, 300, 2)]);
        replica(&mut pool, LIVED, |store| store.set_stable(Lsn(before.0 + 2)));
        pool.settle().expect("folded");
        for _ in 0..100 {
            pool.background(1 << 20).expect("background work");
            sync(&mut pool);
        }
        drop(pool);
        let mut pool = open(&disk);
        let state = replica(&mut pool, LIVED, |store| store.state());
        assert_eq!((state.position.lsn.0, state.base), (before.0 + 2, Lsn(before.0 + 2)));
        drop(pool);
        let report = offline::check(disk, |_| ()).expect("a check");
        assert!(report.is_sound(), "{report:?}");
    }
}

#[test]
fn a_ring_with_a_record_of_a_later_version_is_refused_as_newer_and_left_alone() {
    let disk = lived();
    // The newest record of the ring: of its highest generation the highest index.
    let ring_blocks = 128;
    let mut block = vec![0; BLOCK_SIZE];
    let newest = (2..2 + ring_blocks).max_by_key(|at| {
        disk.read_at(at * BLOCK_SIZE as u64, &mut block).expect("a read");
        let generation = u64::from_le_bytes(block[8..16].try_into().expect("8 bytes"));
        (&block[..4] == b"QRNG").then_some((generation, *at))
    });
    let newest = newest.expect("a ring");
    disk.read_at(newest * BLOCK_SIZE as u64, &mut block).expect("a read");
    assert_eq!(block[22], 3, "a record of one block");
    let mirror = POOL_BYTES / BLOCK_SIZE as u64 - 2 - ring_blocks + (newest - 2);
    block[24] = 200;
    let crc = crc32c(&block[8..]);
    block[4..8].copy_from_slice(&crc.to_le_bytes());
    for at in [newest, mirror] {
        disk.write_at(at * BLOCK_SIZE as u64, &[IoSlice::new(&block)]).expect("a write");
    }
    let before = image(&disk);
    let refused = Pool::open(disk.clone(), options()).map(drop).expect_err("an unknown record");
    assert!(matches!(refused, PoolError::Newer { .. }), "{refused}");
    assert!(before == image(&disk), "it was changed");
}

/// All four copies of the superblock say another format version.
fn of_format(version: u32) -> MemoryDisk {
    let disk = lived();
    let blocks = POOL_BYTES / BLOCK_SIZE as u64;
    let mut block = vec![0; BLOCK_SIZE];
    for at in [0, 1, blocks - 2, blocks - 1] {
        disk.read_at(at * BLOCK_SIZE as u64, &mut block).expect("a read");
        block[8..12].copy_from_slice(&version.to_le_bytes());
        let crc = crc32c(&block[..92]);
        block[92..96].copy_from_slice(&crc.to_le_bytes());
        disk.write_at(at * BLOCK_SIZE as u64, &[IoSlice::new(&block)]).expect("a write");
    }
    disk
}

#[test]
fn a_pool_of_another_format_is_refused_with_both_versions_and_the_way_out_and_left_alone() {
    let here = FORMAT_VERSION as u32;
    for (version, way_out) in [(here - 1, "quoin pool export"), (here + 1, "start the newer one")] {
        let disk = of_format(version);
        let before = image(&disk);
        let open = |disk: MemoryDisk| Pool::open(disk, options()).map(drop);
        let check = |disk: MemoryDisk| offline::check(disk, |_| ()).map(drop);
        let fresh = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(0x9002)) };
        let format = |disk: MemoryDisk| Pool::format(&disk, &fresh);
        for attempt in [&open as &dyn Fn(MemoryDisk) -> Result<(), PoolError>, &check, &format] {
            let refused = attempt(disk.clone()).expect_err("another format").to_string();
            for part in [&format!("format {version}"), &format!("format {here}"), way_out] {
                assert!(refused.contains(part), "{refused}");
            }
        }
        assert!(before == image(&disk), "it was changed");
    }
}
