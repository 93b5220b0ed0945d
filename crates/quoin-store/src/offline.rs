//! A pool without the system: what is in it, whether it is sound, a volume as a raw image.
//!
//! The pool is opened as ever, but over [`Untouched`], which keeps what opening writes in memory:
//! the file or device itself is only read.

use std::collections::BTreeMap;
use std::fmt;
use std::io::IoSlice;
use std::sync::Mutex;

use quoin_replication::replica::store::{
    BootCookie, IoFault, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError, StoreState,
};
use quoin_types::message::{Content, ReadView, SnapshotInfo};
use quoin_types::{BLOCK_SIZE, Lsn, PoolId, ReplicaGuid, SnapshotId};

use crate::api::ReplicaPool;
use crate::background::scrub::ScrubAt;
use crate::core::{BadBlock, PoolOptions};
use crate::disk::{Disk, Syncer};
use crate::error::PoolError;
use crate::pool::{Pool, PoolStats, ReplicaStats};

/// A disk whose writes stay in memory.
pub struct Untouched<D> {
    disk: D,
    written: Mutex<BTreeMap<u64, Box<[u8]>>>,
}

impl<D: Disk> Untouched<D> {
    pub fn new(disk: D) -> Self {
        Self { disk, written: Mutex::default() }
    }
}

impl<D: Disk> Disk for Untouched<D> {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.disk.read_at(offset, buffer)?;
        let block = BLOCK_SIZE as u64;
        let written = self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let end = offset + buffer.len() as u64;
        for (number, bytes) in written.range(offset / block..end.div_ceil(block)) {
            let at = (number * block - offset) as usize;
            buffer[at..at + BLOCK_SIZE].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        let bytes: Vec<u8> = parts.iter().flat_map(|p| p.iter().copied()).collect();
        let mut written = self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (number, block) in (offset / BLOCK_SIZE as u64..).zip(bytes.chunks(BLOCK_SIZE)) {
            written.insert(number, block.into());
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), IoFault> {
        Ok(())
    }

    fn syncer(&self) -> Syncer {
        Box::new(|| Ok(()))
    }

    fn write_out(&self, _offset: u64, _length: u64) {}

    fn forget_cached(&self, offset: u64, length: u64) {
        self.disk.forget_cached(offset, length);
    }

    fn discard(&self, _offset: u64, _length: u64) {}

    fn cookie(&self) -> BootCookie {
        self.disk.cookie()
    }
}

/// Contents of a pool.
#[derive(Clone, Debug)]
pub struct Inspection {
    pub pool: PoolId,
    pub stats: PoolStats,
    pub replicas: Vec<ReplicaInspection>,
}

#[derive(Clone, Debug)]
pub struct ReplicaInspection {
    pub identity: ReplicaIdentity,
    pub meta: ReplicaMeta,
    pub state: StoreState,
    pub snapshots: Vec<SnapshotInfo>,
    pub stats: ReplicaStats,
    /// A rebuild that was cut off: its id, its start, the next LBA.
    pub shadow: Option<(u64, Lsn, u64)>,
}

/// Result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// About how many bytes were read and compared.
    pub checked_bytes: u64,
    pub bad: Vec<BadBlock>,
    /// Headers and nodes that are bad on media; no block is lost with them.
    pub bad_headers: u32,
    /// Replicas whose log or map is damaged, and what of it.
    pub damaged: Vec<(ReplicaGuid, &'static str)>,
}

impl CheckReport {
    pub fn is_sound(&self) -> bool {
        self.bad.is_empty() && self.bad_headers == 0 && self.damaged.is_empty()
    }
}

fn open<D: Disk>(disk: D) -> Result<Pool<Untouched<D>>, PoolError> {
    let small = PoolOptions { cache_bytes: 64 << 20, ..PoolOptions::default() };
    Pool::open(Untouched::new(disk), small)
}

/// Lists what a pool holds, without changing it.
pub fn inspect<D: Disk>(disk: D) -> Result<Inspection, PoolError> {
    let mut pool = open(disk)?;
    let mut replicas = Vec::new();
    for guid in pool.replicas() {
        let stats = pool.replica_stats(guid).unwrap_or_default();
        let Some(replica) = pool.replica(guid) else { continue };
        replicas.push(ReplicaInspection {
            identity: replica.identity().clone(),
            meta: replica.meta().clone(),
            state: replica.state(),
            snapshots: replica.snapshots(),
            shadow: replica.shadow(),
            stats,
        });
    }
    // This very opening is not one of the pool's own.
    let stats = PoolStats { starts: pool.starts().saturating_sub(1), ..pool.stats() };
    Ok(Inspection { pool: pool.id(), stats, replicas })
}

/// Reads every block that any view or the log holds and compares it with its checksum.
/// `progress` is told the bytes checked so far.
pub fn check<D: Disk>(disk: D, mut progress: impl FnMut(u64)) -> Result<CheckReport, PoolError> {
    const STEP_BYTES: u64 = 8 << 20;
    let mut pool = open(disk)?;
    let mut report = CheckReport::default();
    for guid in pool.replicas() {
        if pool.replica(guid).is_some_and(|r| r.meta().damaged) {
            report.damaged.push((guid, "the replica is marked as damaged"));
        }
        let mut at = Some(ScrubAt::default());
        while let Some(from) = at.take() {
            match pool.scrub(guid, from, STEP_BYTES) {
                Ok(done) => {
                    at = done.next;
                    report.checked_bytes += done.read_bytes;
                    report.bad_headers += done.headers;
                }
                Err(StoreError::Damaged(what)) => report.damaged.push((guid, what)),
                Err(error) => return Err(error.into()),
            }
            report.bad.append(&mut pool.take_bad_blocks());
            progress(report.checked_bytes);
        }
        let Some(mut replica) = pool.replica(guid) else { continue };
        let mut after = replica.state().base;
        loop {
            match replica.fetch(after, STEP_BYTES as u32) {
                Ok(Some(entries)) if !entries.is_empty() => {
                    report.checked_bytes +=
                        entries.iter().map(|e| e.data.len() as u64).sum::<u64>();
                    after = entries.last().map_or(after, |e| e.lsn);
                    progress(report.checked_bytes);
                }
                Ok(_) => break,
                Err(StoreError::Damaged(what)) => {
                    report.damaged.push((guid, what));
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(report)
}

/// Why a volume could not be written out.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("this pool has no replica {0}; `quoin pool inspect` lists what it has")]
    NoReplica(ReplicaGuid),
    #[error("this replica has no snapshot {0}; `quoin pool inspect` lists what it has")]
    NoSnapshot(SnapshotId),
    #[error("the image cannot be written")]
    Output(#[from] std::io::Error),
}

/// Result of an export.
#[derive(Clone, Debug, Default)]
pub struct ExportReport {
    /// Size of the image.
    pub size_bytes: u64,
    /// Bytes handed to the output; the rest are holes.
    pub data_bytes: u64,
    /// LBAs (4 KiB blocks) whose copy here is bad. They are left as holes: export another
    /// replica, or accept that these blocks are lost.
    pub bad: Vec<u64>,
}

/// Writes a volume, or one of its snapshots, out as a raw image. `output` gets byte offsets and
/// data, in order; what it is not given is a hole and reads as zeroes.
pub fn export<D: Disk>(
    disk: D,
    guid: ReplicaGuid,
    snapshot: Option<SnapshotId>,
    mut output: impl FnMut(u64, &[u8]) -> std::io::Result<()>,
) -> Result<ExportReport, ExportError> {
    const STEP_BLOCKS: u64 = 256;
    let mut pool = open(disk)?;
    let mut replica = pool.replica(guid).ok_or(ExportError::NoReplica(guid))?;
    let (view, blocks) = match snapshot {
        None => (ReadView::Live, replica.state().volume_blocks),
        Some(id) => {
            let infos = replica.snapshots();
            let info = infos.iter().find(|s| s.id == id).ok_or(ExportError::NoSnapshot(id))?;
            (ReadView::Snapshot(id), info.blocks)
        }
    };
    let mut report = ExportReport { size_bytes: blocks * BLOCK_SIZE as u64, ..Default::default() };
    let mut slots = Vec::new();
    for lba in (0..blocks).step_by(STEP_BLOCKS as usize) {
        slots.clear();
        let count = (blocks - lba).min(STEP_BLOCKS) as u32;
        let read = replica.read(view, lba, count, true, &mut slots);
        read.map_err(|e| ExportError::Pool(e.into()))?;
        for slot in &slots {
            match &slot.content {
                Content::Hole => {}
                Content::Bad => report.bad.extend((slot.lba..).take(slot.blocks as usize)),
                Content::Data { data, .. } => {
                    output(slot.lba * BLOCK_SIZE as u64, data)?;
                    report.data_bytes += data.len() as u64;
                }
            }
        }
    }
    Ok(report)
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes >> 20;
        let s = &self.stats;
        writeln!(f, "pool {}", self.pool)?;
        writeln!(
            f,
            "  {} MiB, {} MiB used, {} MiB free, {} MiB in reserve, opened {} times",
            mib(s.size_bytes),
            mib(s.used_bytes),
            mib(s.free_bytes),
            mib(s.reserve_bytes),
            s.starts
        )?;
        for r in &self.replicas {
            writeln!(f, "replica {} of volume {}", r.identity.guid, r.identity.volume)?;
            writeln!(
                f,
                "  {} MiB, about {} MiB of data in {} MiB of segments",
                mib(r.state.volume_blocks * BLOCK_SIZE as u64),
                mib(r.stats.live_bytes),
                mib(r.stats.allocated_bytes)
            )?;
            writeln!(
                f,
                "  position {}.{}, stable {}, folded to {}, promised epoch {}{}{}{}",
                r.state.position.epoch,
                r.state.position.lsn,
                r.state.stable,
                r.state.base,
                r.meta.promised,
                if r.meta.quorum { ", quorum on" } else { ", quorum off" },
                if r.meta.session_open { ", session open" } else { "" },
                if r.meta.damaged { ", DAMAGED" } else { "" }
            )?;
            if let Some((_, from, lba)) = r.shadow {
                writeln!(f, "  a rebuild from {from} was cut off at block {lba}")?;
            }
            for s in &r.snapshots {
                let hidden = if s.hidden { ", hidden" } else { "" };
                writeln!(f, "  snapshot {} at {}, {} blocks{hidden}", s.id, s.lsn, s.blocks)?;
            }
        }
        Ok(())
    }
}
