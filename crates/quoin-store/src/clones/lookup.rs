//! Blocks of a clone: its own, and those of its base where it has none.

use quoin_replication::replica::store::StoreError;
use quoin_types::{ReplicaGuid, mutant};

use crate::clones::bases::{BASES_DEEP_MAX, Base};
use crate::core::{Core, NodeIo};
use crate::disk::Disk;
use crate::format::node::{BAD_PLACE, BASE_PLACE, BlockAt, HOLE_PLACE, LOST_PLACE, Root};
use crate::format::relatives::BaseId;
use crate::map::tree::{self, Part};
use crate::replica::may_lack;
use crate::space::logical;

/// Whether the base shows instead of what a map says here.
pub fn shows_base(block: &BlockAt) -> bool {
    block.place == BASE_PLACE || (block.place == 0 && block.version == 0)
}

/// A block of a clone's map over the block of its base.
fn over(own: BlockAt, below: BlockAt) -> BlockAt {
    if own.place != BASE_PLACE {
        return below;
    }
    // The content went back to that of the base, as a change of its own.
    match below.place {
        BAD_PLACE => BlockAt { place: LOST_PLACE, crc: 0, ..own },
        _ => BlockAt { version: own.version, ..below },
    }
}

/// State of `out.len()` blocks from `lba` on in a view of the replica, its base included.
pub fn blocks<D: Disk>(
    io: &mut NodeIo<'_, D>,
    root: Root,
    lba: u64,
    out: &mut [BlockAt],
) -> Result<(), StoreError> {
    let (own, base) = (io.family.guid, io.family.relatives.base);
    blocks_over(io, own, root, base, lba, out, BASES_DEEP_MAX)
}

/// Places that come back are the pool's: logical ones are told from each other by the replica alone.
fn blocks_over<D: Disk>(
    io: &mut NodeIo<'_, D>,
    replica: ReplicaGuid,
    root: Root,
    base: Option<BaseId>,
    lba: u64,
    out: &mut [BlockAt],
    deep: usize,
) -> Result<(), StoreError> {
    let mut lacking = may_lack(tree::blocks(io, root, lba, out))?;
    if lacking.is_ok() {
        lacking = may_lack(logical::resolve(io, replica, out))?;
    }
    let Some(base) = base else {
        // A block that went back to a base that is not shown any more is a hole there.
        let is_hole = |block: &&mut BlockAt| matches!(block.place, BASE_PLACE | HOLE_PLACE);
        out.iter_mut().filter(is_hole).for_each(|block| block.place = 0);
        return lacking;
    };
    if lacking.is_err() || mutant::is("base-not-looked-at") {
        // Which blocks are the base's is not known yet.
        return lacking;
    }
    let mut at = 0;
    while at < out.len() {
        let run = out[at..].iter().take_while(|block| shows_base(block)).count();
        if run > 0 {
            let mut below = vec![BlockAt::default(); run];
            let found = blocks_of(io, base, lba + at as u64, &mut below, deep);
            lacking = lacking.and(may_lack(found)?);
            for (block, below) in out[at..].iter_mut().zip(below) {
                *block = over(*block, below);
            }
        }
        at += run.max(1);
    }
    out.iter_mut().filter(|block| block.place == HOLE_PLACE).for_each(|block| block.place = 0);
    lacking
}

/// State of blocks in a base.
pub(super) fn blocks_of<D: Disk>(
    io: &mut NodeIo<'_, D>,
    id: BaseId,
    lba: u64,
    out: &mut [BlockAt],
    deep: usize,
) -> Result<(), StoreError> {
    let base = io.core.bases.get(id).filter(|_| deep > 0).copied();
    let Some(Base { root, blocks, parent, .. }) = base else {
        out.fill(BlockAt { place: BAD_PLACE, ..BlockAt::default() });
        return Ok(());
    };
    // Behind its end a clone that is larger has nothing of it.
    let within = blocks.saturating_sub(lba).min(out.len() as u64) as usize;
    match within {
        0 => Ok(()),
        within => {
            let out = &mut out[..within];
            blocks_over(io, id.replica, root, parent, lba, out, deep - 1)
        }
    }
}

/// The next parts from `cursor` on of a view and of the bases behind it that may hold versions
/// above `from`: of each one at most, those of bases cut to their size.
pub fn next_parts<D: Disk>(
    io: &mut NodeIo<'_, D>,
    root: Root,
    from: u64,
    cursor: u64,
) -> Result<Vec<Part>, StoreError> {
    let mut parts = Vec::new();
    let own = tree::next_part(io, root, from, cursor).map(|part| parts.extend(part));
    // What the bases lack is fetched at the same time.
    let lacking = may_lack(own)?;
    let below = next_of_bases(io, from, cursor).map(|below| parts.extend(below));
    lacking.and(may_lack(below)?)?;
    Ok(parts)
}

/// Parts of the bases alone, as [`next_parts`] gives them.
pub fn next_of_bases<D: Disk>(
    io: &mut NodeIo<'_, D>,
    from: u64,
    cursor: u64,
) -> Result<Vec<Part>, StoreError> {
    let (mut parts, mut lacking) = (Vec::new(), Ok(()));
    for base in bases_of(io.core, io.family.relatives.base) {
        if base.lsn <= from || cursor >= base.blocks {
            continue;
        }
        let mut part = None;
        let looked = tree::next_part(io, base.root, from, cursor).map(|found| part = found);
        lacking = lacking.and(may_lack(looked)?);
        if let Some(Part::Hole { end, .. } | Part::Damaged { end, .. }) = &mut part {
            *end = base.blocks.min(*end);
        }
        parts.extend(part.filter(|part| part.range().0 < base.blocks));
    }
    lacking.map(|()| parts)
}

fn bases_of<D>(core: &Core<D>, base: Option<BaseId>) -> Vec<Base> {
    core.bases.line(base).map(|(_, base)| *base).collect()
}

/// The first stretch that these parts are about from `cursor` on, `None` if there is none: where it
/// begins, and the end up to which it is a hole in all of them, if it is one.
pub fn first_of(parts: &[Part], cursor: u64) -> Option<(u64, Option<u64>)> {
    let start_of = |part: &Part| part.range().0.max(cursor);
    let start = parts.iter().map(start_of).min()?;
    let mut hole_end = u64::MAX;
    for part in parts {
        let (_, end) = part.range();
        hole_end = match part {
            _ if start_of(part) > start => hole_end.min(start_of(part)),
            Part::Hole { .. } => hole_end.min(end),
            Part::Leaf { .. } | Part::Damaged { .. } => return Some((start, None)),
        };
    }
    Some((start, Some(hole_end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::node::{LEAF_BLOCKS, NodeRef};

    #[test]
    fn a_stretch_is_a_hole_as_far_as_all_that_show_it_say_so() {
        let leaf = |start| {
            let node = NodeRef { place: 0, length: 1, crc: 0, newest: 1 };
            Part::Leaf { start, node }
        };
        let hole = |start, end| Part::Hole { start, end, version: 1 };
        let size = LEAF_BLOCKS as u64;
        assert_eq!(first_of(&[], 0), None);
        assert_eq!(first_of(&[leaf(size)], 0), Some((size, None)));
        assert_eq!(first_of(&[hole(0, 9 * size)], 3), Some((3, Some(9 * size))));
        let mixed = [hole(0, 9 * size), leaf(2 * size)];
        assert_eq!(first_of(&mixed, 0), Some((0, Some(2 * size))));
        assert_eq!(first_of(&mixed, 2 * size), Some((2 * size, None)));
        assert_eq!(first_of(&[hole(0, 4 * size), hole(0, 2 * size)], 0), Some((0, Some(2 * size))));
    }

    #[test]
    fn a_block_that_went_back_to_its_base_has_the_bases_content_and_its_own_version() {
        let own = BlockAt { version: 9, place: BASE_PLACE, crc: 0 };
        let below = BlockAt { version: 3, place: 700, crc: 5 };
        assert_eq!(over(own, below), BlockAt { version: 9, place: 700, crc: 5 });
        assert_eq!(over(own, BlockAt::default()), BlockAt { version: 9, place: 0, crc: 0 });
        let bad = BlockAt { version: 3, place: BAD_PLACE, crc: 0 };
        assert_eq!(over(own, bad), BlockAt { version: 9, place: LOST_PLACE, crc: 0 });
        assert_eq!(over(BlockAt::default(), below), below);
    }
}
