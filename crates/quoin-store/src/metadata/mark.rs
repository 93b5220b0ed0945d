//! The mark of a pool: a durable count that moves with what the pool promises and acknowledges.
//!
//! The controller keeps the highest mark that it was told, and so notices a disk that was put back
//! to an older state (`quoin_replication::recognition`, which also says when a mark is raised).
//!
//! A mark is recorded only after a sync of all that was there when it was asked for. So whatever
//! part of the last writes an image of the media has, an image with the mark has all that was
//! acknowledged before it.

use quoin_replication::replica::store::SyncTicket;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rise {
    Rests,
    /// The changes that the next mark covers are on media with this ticket.
    Covers(SyncTicket),
    /// The record of the next mark is on media with this ticket.
    Recorded(SyncTicket),
}

/// How the mark of an open pool stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub on_media: u64,
    rise: Rise,
    /// Something was recorded or appended since the mark was asked for last.
    changed: bool,
}

impl Mark {
    /// Mark of a pool that was just opened. Changes before the open may be behind its last mark.
    pub fn found(on_media: u64) -> Self {
        Mark { on_media, rise: Rise::Rests, changed: true }
    }

    pub fn change(&mut self) {
        self.changed = true;
    }

    pub fn has_changed(&self) -> bool {
        self.changed
    }

    pub fn is_rising(&self) -> bool {
        self.rise != Rise::Rests
    }

    pub fn covers(&mut self, with: SyncTicket) {
        (self.rise, self.changed) = (Rise::Covers(with), false);
    }

    pub fn recorded(&mut self, with: SyncTicket) {
        self.rise = Rise::Recorded(with);
    }

    /// Everything up to this ticket is on media; whether the next mark is to be recorded now.
    pub fn synced(&mut self, ticket: SyncTicket) -> bool {
        match self.rise {
            Rise::Covers(with) => with <= ticket,
            Rise::Recorded(with) if with <= ticket => {
                (self.on_media, self.rise) = (self.on_media + 1, Rise::Rests);
                false
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use quoin_replication::replica::store::ReplicaMeta;
    use quoin_types::PoolId;

    use crate::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    fn open(disk: &MemoryDisk) -> Pool<MemoryDisk> {
        Pool::open(disk.clone(), PoolOptions::default()).expect("a pool")
    }

    fn sync(pool: &mut Pool<MemoryDisk>) {
        let ticket = pool.sync_wanted().expect("something to sync");
        let result = pool.disk().sync();
        // Some of them fail.
        let _ = pool.sync_finished(ticket, result);
    }

    #[test]
    fn a_mark_is_recorded_behind_what_it_covers_and_outlives_starts_and_restatements() {
        let disk = MemoryDisk::new(128 << 20);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a pool");
        let mut pool = open(&disk);
        assert!(pool.mark() == 0 && pool.has_changed_since_mark(), "its former life may have");
        pool.create(Default::default(), ReplicaMeta::default(), 64).expect("room");
        let before = disk.writes();
        pool.raise_mark().expect("it is asked for");
        assert!(pool.is_mark_rising() && !pool.has_changed_since_mark());
        assert_eq!(disk.writes(), before, "an image might have the mark and not what it covers");
        sync(&mut pool);
        assert!(disk.writes() > before && pool.mark() == 0, "recorded, and not on media");
        // Promised between the two syncs: another mark is to cover it.
        pool.describe(Default::default(), b"more"[..].into()).expect("room");
        sync(&mut pool);
        assert!(pool.mark() == 1 && !pool.is_mark_rising() && pool.has_changed_since_mark());
        drop(pool);
        disk.power_cut(|| false);
        let mut pool = open(&disk);
        assert_eq!(pool.mark(), 1);
        pool.core.restate().expect("room");
        assert_eq!(open(&disk).mark(), 1);
        for wanted in 2..5 {
            pool.raise_mark().expect("it is asked for");
            sync(&mut pool);
            sync(&mut pool);
            assert!(pool.mark() == wanted && pool.sync_wanted().is_none());
        }
    }

    #[test]
    fn a_mark_whose_sync_failed_is_never_told() {
        let disk = MemoryDisk::new(128 << 20);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a pool");
        let mut pool = open(&disk);
        pool.raise_mark().expect("it is asked for");
        sync(&mut pool);
        disk.fail_syncs();
        sync(&mut pool);
        assert!(pool.mark() == 0 && pool.raise_mark().is_err());
    }
}
