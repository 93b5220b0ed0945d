//! Sending an increment: slots of a view above an LSN, by bounded pulls. The folded map of a pull is pinned by
//! its session, so that it stays one state however long the pulls take.

use quoin_replication::replica::store::{PullChunk, StoreError};
use quoin_types::message::{ReadView, Slot};
use quoin_types::{BLOCK_SIZE, Chain, ClientTable, Lsn, SnapshotId, mutant};

use crate::clones::lookup::{self, first_of};
use crate::core::Core;
use crate::disk::Disk;
use crate::format::node::{BlockAt, LEAF_BLOCKS};
use crate::log::history::Head;
use crate::replica::slots::push_slot;
use crate::replica::{Pin, Replica, Source, may_lack};

/// Windows of a leaf, and blocks, that one pull looks at, whatever it finds.
pub const WINDOWS_A_PULL: usize = 256;
pub const BLOCKS_A_PULL: u64 = (WINDOWS_A_PULL * LEAF_BLOCKS) as u64;
/// Cost of a slot beside its data. In a frame it takes less than half of that, so the longest
/// answer that may be requested fits into one frame.
const SLOT_BYTES: usize = 64;
/// Slots of one pull, whatever was asked for.
const SLOTS_A_PULL: usize = 1 << 16;
/// Most blocks of a hole that a window covers.
pub const WINDOW_HOLE_BLOCKS_MAX: u64 = 64 * LEAF_BLOCKS as u64;
/// Leaves that are not in memory which one pull has fetched at the same time.
const LEAVES_AHEAD: u32 = 16;

/// Returns slots of a view that are newer than `from`, from this cursor on: `ReplicaStore::pull`. `None`: the
/// view is gone, or its base was never pinned by this session.
#[allow(clippy::too_many_arguments)]
pub fn pull<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    session: u64,
    view: ReadView,
    from: Lsn,
    cursor: u64,
    bytes_max: u32,
    want_data: bool,
) -> Result<Option<PullChunk>, StoreError> {
    if view == ReadView::Base && cursor == 0 {
        let pin = Pin { root: replica.folded.root, head: replica.folded.head.clone() };
        replica.pins.insert(session, pin);
    }
    let Some((source, size)) = pulled(replica, session, view) else { return Ok(None) };
    let mut chunk = PullChunk::default();
    let (mut at, mut bytes, mut looked) = (cursor, 0, 0);
    // Nodes that later windows lack are fetched at the same time.
    let (mut lacking, mut leaves_lacking) = (Ok(()), 0);
    for window in 0.. {
        let Some((start, end)) = next_window(replica, core, &source, from, at, size)? else {
            lacking?;
            let Some(head) = pulled_head(replica, session, view) else { return Ok(None) };
            if view == ReadView::Base {
                replica.pins.remove(&session);
            }
            chunk.end = Some(Box::new(head.increment_end(replica.snapshots.iter().copied())));
            return Ok(Some(chunk));
        };
        let is_full = bytes >= bytes_max as usize || chunk.slots.len() >= SLOTS_A_PULL;
        if is_full || window == WINDOWS_A_PULL || looked >= BLOCKS_A_PULL {
            lacking?;
            chunk.cursor = Some(start);
            return Ok(Some(chunk));
        }
        let found = replica.find(core, &source, start, (end - start) as u32);
        if let Err(error) = may_lack(found)? {
            (lacking, leaves_lacking, at) = (Err(error), leaves_lacking + 1, end);
            if leaves_lacking == LEAVES_AHEAD {
                return Err(error);
            }
            continue;
        }
        // Takes as many blocks as the rest of the budget pays for, at least one.
        let (blocks, cost) =
            affordable(&core.buffers.found, from, bytes_max as usize - bytes, want_data);
        core.buffers.found.truncate(blocks);
        let end = start + blocks as u64;
        (looked, bytes) = (looked + end - start, bytes + cost);
        let read = match from {
            // Version 0 is "never written": not a change.
            Lsn::ZERO => slots_written(replica, core, view, start, want_data, &mut chunk.slots),
            _ => replica.slots(core, view, start, from, want_data, &mut chunk.slots),
        };
        lacking = lacking.and(may_lack(read)?);
        at = end;
    }
    Ok(None)
}

/// Slots of one window that were ever written.
fn slots_written<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    view: ReadView,
    lba: u64,
    want_data: bool,
    out: &mut Vec<Slot>,
) -> Result<(), StoreError> {
    let first = out.len();
    let mut made = Vec::new();
    replica.slots(core, view, lba, Lsn::ZERO, want_data, &mut made)?;
    made.retain(|s| s.version > Lsn::ZERO);
    for slot in made {
        push_slot(out, slot);
    }
    debug_assert!(out.len() >= first.saturating_sub(1));
    Ok(())
}

/// Where a view's blocks are found, and how many there are.
fn pulled(replica: &mut Replica, session: u64, view: ReadView) -> Option<(Source, u64)> {
    if view == ReadView::Base {
        let pin = replica.pins.get(&session)?;
        return Some((Source::Root(pin.root), pin.head.volume_blocks));
    }
    let size = replica.view_size(view)?;
    Some((replica.source(view)?, size))
}

/// The history's head as of a view. Finding it may read all of the log, so it is requested
/// once.
fn pulled_head(replica: &Replica, session: u64, view: ReadView) -> Option<Head> {
    match view {
        ReadView::Live => Some(replica.head.clone()),
        ReadView::Base => replica.pins.get(&session).map(|pin| pin.head.clone()),
        ReadView::Snapshot(id) => snapshot_head(replica, id),
    }
}

/// The history's head as of a snapshot.
fn snapshot_head(replica: &Replica, id: SnapshotId) -> Option<Head> {
    let info = *replica.snapshots.iter().find(|s| s.id == id)?;
    let Some(kept) = replica.folded.snapshots.iter().find(|s| s.info.id == id) else {
        // Above the folded map the log decides.
        let mut head = replica.folded.head.clone();
        for lsn in replica.log.first_lsn()..=info.lsn.0 {
            let record = replica.log.get(lsn)?;
            let kind = replica.log.kind(lsn, record);
            let part = replica.log.part(lsn);
            head.apply(record.position(lsn), Chain(record.chain), &kind, part);
        }
        return Some(head);
    };
    let mut table = replica.folded.head.epoch_table.clone();
    table.retain(|row| row.first <= info.lsn);
    if let Some(row) = table.last_mut()
        && row.last > info.lsn
    {
        (row.last, row.chain) = (info.lsn, kept.chain);
    }
    Some(Head {
        position: kept.position,
        chain: kept.chain,
        last_view: kept.last_view.clone(),
        volume_blocks: info.blocks,
        epoch_table: table,
        // No increment ends in a snapshot: its boundary's end is made by the target.
        clients: ClientTable::default(),
    })
}

/// The next stretch, within one leaf, that may hold something newer than `from`.
fn next_window<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    source: &Source,
    from: Lsn,
    at: u64,
    size: u64,
) -> Result<Option<(u64, u64)>, StoreError> {
    if at >= size {
        return Ok(None);
    }
    let root = match source {
        Source::Root(root) => *root,
        Source::Live | Source::Frozen(_) => replica.folded.root,
    };
    let folded_from = match source {
        Source::Root(_) => Some(from.0),
        Source::Live => replica.upper.folded_from(from.0),
        Source::Frozen(lsn) => replica.frozen.get(*lsn).and_then(|u| u.folded_from(from.0)),
    };
    let parts = match folded_from {
        Some(from) => lookup::next_parts(&mut replica.io(core), root, from, at)?,
        None => Vec::new(),
    };
    let first = first_of(&parts, at);
    let below = first.map(|(start, _)| start);
    // No further than is used: what is not folded yet may all be older, and is passed over
    // again for each window.
    let upper = match source {
        Source::Root(_) => None,
        Source::Live => Some(&replica.upper),
        Source::Frozen(lsn) => replica.frozen.get(*lsn),
    };
    let until = below.map_or(size, |below| below + WINDOW_HOLE_BLOCKS_MAX);
    let above = upper.and_then(|u| u.next(at, until, from.0));
    let Some(start) = above.into_iter().chain(below).min().map(|s| s.max(at)) else {
        return Ok(None);
    };
    let leaf_end = (start / LEAF_BLOCKS as u64 + 1) * LEAF_BLOCKS as u64;
    // Holes that span many leaves come in longer stretches.
    let end = match first {
        Some((s, Some(end))) if s <= start && above.is_none() => {
            end.min(start + WINDOW_HOLE_BLOCKS_MAX)
        }
        _ => leaf_end,
    };
    Ok((start < size).then_some((start, end.min(size))))
}

/// How many of these blocks an answer has room for that is `bytes_max` away from its end, at
/// least one, and what they take of it.
fn affordable(found: &[BlockAt], from: Lsn, bytes_max: usize, want_data: bool) -> (usize, usize) {
    let mut cost = 0;
    for (i, block) in found.iter().enumerate() {
        if cost >= bytes_max && i > 0 {
            return (i, cost);
        }
        let goes_on = i > 0 && block.place == 0 && found[i - 1] == *block;
        if block.version <= from.0 || goes_on {
            continue;
        }
        let counted = block.place != 0 || !mutant::is("holes-of-a-pull-not-counted");
        cost += if counted { SLOT_BYTES } else { 0 };
        cost += if block.place == 0 || !want_data { 0 } else { BLOCK_SIZE };
    }
    (found.len(), cost)
}
