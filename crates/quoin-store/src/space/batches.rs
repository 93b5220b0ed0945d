//! Batches of a segment, of whatever kind: they are read in order, by their headers. A header that cannot be
//! read, or that is not this segment's, ends the segment for whoever reads it.

use quoin_replication::replica::store::StoreError;
use quoin_types::BLOCK_SIZE;

use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::{Batch, header_blocks};
use crate::format::checkpoint::SegmentState;

/// The batch of which these blocks are the header, if it is one of this segment.
pub fn own_batch<'a>(
    header: &'a [u8],
    segment: &SegmentState,
    guid_hash: u64,
) -> Option<Batch<'a>> {
    let batch = Batch::parse(header)?;
    let header = batch.header;
    let own = (header.sequence, header.guid_hash, header.stream);
    (own == (segment.sequence, guid_hash, segment.stream)).then_some(batch)
}

/// The blocks of the header that starts at `block`, if one does within `room` blocks and can be
/// read.
pub fn read_header<D: Disk>(
    core: &Core<D>,
    block: u64,
    room: u32,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut header = None;
    readable(header_at(core, block, room).map(|found| header = found))?;
    Ok(header)
}

/// Returns the header as `read_header` does, but reports a read that the disk refuses.
pub fn header_at<D: Disk>(
    core: &Core<D>,
    block: u64,
    room: u32,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut bytes = vec![0; BLOCK_SIZE];
    core.read(block, &mut bytes)?;
    let Some(count) = header_blocks(&bytes).filter(|count| *count <= room as usize) else {
        return Ok(None);
    };
    if count > 1 {
        bytes.resize(count * BLOCK_SIZE, 0);
        core.read(block + 1, &mut bytes[BLOCK_SIZE..])?;
    }
    Ok(Some(bytes))
}

/// An unreadable sector is as good as a rotten one. Which error says that it is the sector and not
/// the way to it depends on how it was read: beside the page cache the medium's own is given.
pub fn readable(read: Result<(), StoreError>) -> Result<bool, StoreError> {
    const OF_THE_MEDIUM: [i32; 4] = [libc::EIO, libc::ENODATA, libc::EREMOTEIO, libc::EILSEQ];
    match read {
        Ok(()) => Ok(true),
        Err(StoreError::Io(fault)) if OF_THE_MEDIUM.contains(&fault.errno) => Ok(false),
        Err(error) => Err(error),
    }
}
