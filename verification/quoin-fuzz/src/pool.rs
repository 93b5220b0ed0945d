//! A pool's file with any content, with corrected checksums where they would hide the damage.

use std::io::IoSlice;
use std::sync::OnceLock;

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_store::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool, offline};
use quoin_types::entry::SharedEntry;
use quoin_types::message::ReadView;
use quoin_types::{
    BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, PoolId, Position, ReplicaGuid, SnapshotId,
    VolumeId, crc32c,
};

const POOL_BYTES: u64 = 8 << 20;
const VOLUME_BLOCKS: u64 = 300;
const GUID: ReplicaGuid = ReplicaGuid(0xf0);
/// An input is patches of a used pool: block (2 bytes), place in it (2), length (1), bytes.
const PATCH_HEAD: usize = 5;
const PATCHES_MAX: usize = 64;
const BACKGROUND_STEPS_MAX: usize = 200;

pub fn run(input: &[u8]) {
    let disk = lived_in().fork();
    let Some((how, mut rest)) = input.split_first() else { return };
    for _ in 0..PATCHES_MAX {
        let Some((head, tail)) = rest.split_at_checked(PATCH_HEAD) else { break };
        let (bytes, tail) = tail.split_at(usize::from(head[4]).min(tail.len()));
        patch(&disk, head, bytes, how & 1 == 0);
        rest = tail;
    }
    let offline = disk.fork();
    if let Ok(pool) = Pool::open(disk, options()) {
        use_pool(pool);
    }
    if how & 2 == 0 {
        // The findings are a report; the test is that it terminates.
        let _ = offline::inspect(offline.fork());
        let _ = offline::check(offline, |_| {});
    }
}

fn options() -> PoolOptions {
    PoolOptions { cache_bytes: 1 << 20, log_keep_bytes: 64 << 10, ..PoolOptions::default() }
}

/// Uses a pool as a driver does, whatever is in it; errors are answers.
fn use_pool(mut pool: Pool<MemoryDisk>) {
    for guid in pool.replicas() {
        let Some(mut replica) = pool.replica(guid) else { continue };
        let state = replica.state();
        let mut views = vec![(ReadView::Live, state.volume_blocks)];
        views.extend(replica.snapshots().iter().map(|s| (ReadView::Snapshot(s.id), s.blocks)));
        for (view, blocks) in views.into_iter().take(8) {
            let mut slots = Vec::new();
            for lba in (0..blocks.min(2 * VOLUME_BLOCKS)).step_by(64) {
                let count = (blocks - lba).min(64) as u32;
                let _ = replica.read(view, lba, count, true, &mut slots);
            }
        }
        let mut after = state.base;
        while let Ok(Some(entries)) = replica.fetch(after, 1 << 20) {
            let Some(last) = entries.last() else { break };
            assert!(last.lsn > after, "a fetch that does not go on");
            after = last.lsn;
        }
        let next = entry(state.position, state.chain, 3);
        let _ = replica.append(&[next]);
        replica.set_stable(state.position.lsn);
    }
    for _ in 0..BACKGROUND_STEPS_MAX {
        if !matches!(pool.background(1 << 20), Ok(true)) {
            break;
        }
        if let Some(ticket) = pool.sync_wanted() {
            let result = pool.disk().sync();
            pool.sync_finished(ticket, result).expect("a sync");
        }
    }
}

fn patch(disk: &MemoryDisk, head: &[u8], bytes: &[u8], reseal: bool) {
    let written = lived_in_blocks();
    let chosen = usize::from(u16::from_le_bytes([head[0], head[1]])) % written.len();
    let offset = written[chosen] * BLOCK_SIZE as u64;
    let mut block = vec![0; BLOCK_SIZE];
    if disk.read_at(offset, &mut block).is_err() {
        return;
    }
    let at = usize::from(u16::from_le_bytes([head[2], head[3]])) % BLOCK_SIZE;
    for (place, byte) in block[at..].iter_mut().zip(bytes) {
        *place = *byte;
    }
    if reseal {
        put_checksums_right(&mut block);
    }
    let _ = disk.write_at(offset, &[IoSlice::new(&block)]);
}

/// Corrects the checksums of superblocks, ring blocks and batch headers of one block
/// (docs/store.md).
fn put_checksums_right(block: &mut [u8]) {
    match &block[..4] {
        b"QUOI" => {
            let crc = crc32c(&block[..92]);
            block[92..96].copy_from_slice(&crc.to_le_bytes());
        }
        b"QRNG" => {
            let crc = crc32c(&block[8..]);
            block[4..8].copy_from_slice(&crc.to_le_bytes());
        }
        b"QBAT" => {
            let length = u32::from_le_bytes([block[4], block[5], block[6], block[7]]) as usize;
            if let Some(body) = block.get(16..length) {
                let check = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, body);
                block[8..16].copy_from_slice(&check.to_le_bytes());
            }
        }
        _ => {}
    }
}

fn entry(previous: Position, chain: Chain, number: u64) -> SharedEntry {
    let position = Position { epoch: previous.epoch.max(Epoch(1)), lsn: previous.lsn.next() };
    let (kind, lba, blocks) = match number % 20 {
        7 => (EntryKind::Trim, number % 200, 50),
        11 => (EntryKind::Snapshot { id: SnapshotId(number.into()), hidden: false }, 0, 0),
        13 => (EntryKind::Zero { no_hole: false }, number % 200, 3),
        _ => (EntryKind::Write, number * 7 % 290, 1 + (number % 5) as u32),
    };
    let data = match kind {
        EntryKind::Write => Bytes::from(vec![number as u8; blocks as usize * BLOCK_SIZE]),
        _ => Bytes::new(),
    };
    Entry::after(chain, position, kind, lba, blocks, data, false).into()
}

/// A pool with a base, a log above it, a snapshot and moved blocks.
fn lived_in() -> &'static MemoryDisk {
    static DISK: OnceLock<MemoryDisk> = OnceLock::new();
    DISK.get_or_init(|| {
        let disk = MemoryDisk::new(POOL_BYTES);
        let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(7)) };
        Pool::format(&disk, &format).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), options()).expect("a fresh pool");
        let identity = ReplicaIdentity {
            guid: GUID,
            volume: VolumeId(5),
            volume_spec: Bytes::from_static(b"{}"),
            ..ReplicaIdentity::default()
        };
        pool.create(identity, ReplicaMeta::default(), VOLUME_BLOCKS).expect("room for a replica");
        let (mut position, mut chain) = (Position::default(), Chain(0));
        for number in 0..120 {
            let next = entry(position, chain, number);
            (position, chain) = (Position { epoch: next.epoch, lsn: next.lsn }, next.chain);
            let mut replica = pool.replica(GUID).expect("it was made");
            replica.append(&[next]).expect("room for an entry");
            if number == 60 || number == 90 {
                replica.set_stable(position.lsn);
                sync(&mut pool);
                while pool.background(1 << 20).expect("a good disk") {
                    sync(&mut pool);
                }
            }
        }
        sync(&mut pool);
        disk
    })
}

fn sync(pool: &mut Pool<MemoryDisk>) {
    pool.request_sync();
    while let Some(ticket) = pool.sync_wanted() {
        let result = pool.disk().sync();
        pool.sync_finished(ticket, result).expect("a sync");
    }
}

fn lived_in_blocks() -> &'static [u64] {
    static BLOCKS: OnceLock<Vec<u64>> = OnceLock::new();
    BLOCKS.get_or_init(|| {
        // Data blocks are many and their content has no meaning: blocks with a magic are chosen
        // often.
        let disk = lived_in();
        let all = disk.written_blocks();
        let mut block = vec![0; BLOCK_SIZE];
        let mut chosen: Vec<u64> = all.iter().copied().step_by(16).collect();
        for number in all {
            if disk.read_at(number * BLOCK_SIZE as u64, &mut block).is_ok()
                && [b"QUOI", b"QRNG", b"QBAT"].iter().any(|magic| block.starts_with(*magic))
            {
                chosen.push(number);
            }
        }
        chosen
    })
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![vec![0], vec![1, 0, 0, 0, 0, 1, 9]];
    for block in 0..40u16 {
        for at in [4u16, 16, 20, 24, 40, 56, 72, 80, 104] {
            let mut seed = vec![0];
            seed.extend_from_slice(&block.to_le_bytes());
            seed.extend_from_slice(&at.to_le_bytes());
            seed.extend_from_slice(&[4, 255, 255, 255, 127]);
            seeds.push(seed);
        }
    }
    seeds
}
