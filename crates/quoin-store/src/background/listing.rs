//! List of what a segment holds that is to be emptied.
//!
//! The segment's headers are read one after the other: each says where the next one is. What they
//! name is listed as they come, so that a segment of any size is looked through ahead of the step
//! that begins to empty it, with little of it in memory. Nothing is added to such a segment any
//! more, so the list stays right.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::StoreError;
use quoin_types::BLOCK_SIZE;

use crate::background::cleaner::Candidate;
use crate::background::segment_data::SegmentData;
use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::{Batch, Stream, header_blocks};
use crate::format::checkpoint::SegmentState;
use crate::map::tree::{Change, Edit};
use crate::space::batches::{own_batch, readable};
use crate::space::logical::is_logical;
use crate::space::segments::Family;

pub struct Listing {
    segment: SegmentState,
    guid_hash: u64,
    /// The first block of the pool that is the segment's.
    start: u64,
    /// The logical place of its first block, if its blocks have some of their own.
    logical: Option<u64>,
    /// The next header, counted in blocks from the start.
    at: u32,
    /// Blocks of the headers that were read.
    pub header_blocks: u64,
    pub blocks: Vec<Candidate>,
    pub nodes: Vec<Edit>,
    pub data: SegmentData,
}

impl Listing {
    /// An empty list.
    pub fn of<D>(core: &Core<D>, family: &Family, segment: SegmentState) -> Self {
        let start = core.superblock.unit_start(segment.unit);
        let logical = core.logical.get(&family.guid);
        let logical = logical.and_then(|logical| logical.place(&segment, 0));
        // Such a log was written past the cache.
        let is_cached = !(family.log_waits && segment.stream == Stream::Log);
        let range = start..start + u64::from(segment.used_blocks);
        let data = SegmentData::of(core, range, is_cached);
        let (guid_hash, at, blocks, nodes) = (family.guid_hash, 1, Vec::new(), Vec::new());
        let header_blocks = 0;
        Listing { segment, guid_hash, start, logical, at, header_blocks, blocks, nodes, data }
    }

    /// Returns true if the list is of this segment.
    pub fn is_of(&self, segment: &SegmentState) -> bool {
        let key = |segment: &SegmentState| (segment.sequence, segment.used_blocks, segment.logical);
        key(&self.segment) == key(segment)
    }

    /// Returns true if the list is of this segment, whatever was added to the segment since.
    pub fn is_of_former(&self, segment: &SegmentState) -> bool {
        self.segment.sequence == segment.sequence
    }

    /// How far the segment was looked through, in blocks.
    pub fn reached(&self) -> u32 {
        self.at
    }

    /// Logical places of the segment's own blocks.
    pub fn own(&self) -> Range<u64> {
        self.logical.map_or(0..0, |first| first..first + u64::from(self.segment.used_blocks))
    }

    /// Goes on to the end of the segment. `Ok(false)`: one of its headers is bad, or cannot be read, or
    /// its batch ends behind the segment. A call that may wait goes as far as its headers are at hand,
    /// and on from there when it is made again.
    pub fn go_on<D: Disk>(&mut self, core: &mut Core<D>) -> Result<bool, StoreError> {
        while self.at < self.segment.used_blocks {
            let Some(mut header) = self.header(core)? else { return Ok(false) };
            if own_batch(&header, &self.segment, self.guid_hash).is_none() {
                // What was read ahead is a hint: only the disk says that it is bad.
                let Some(again) = self.header_again(core)? else { return Ok(false) };
                header = again;
            }
            let Some(batch) = own_batch(&header, &self.segment, self.guid_hash) else {
                return Ok(false);
            };
            // A record may say anything of where the segment ends.
            if batch.blocks() > self.segment.used_blocks - self.at {
                return Ok(false);
            }
            self.add(&batch);
            self.at += batch.blocks();
            if self.at == self.segment.used_blocks {
                // Blocks are moved in the order of their names, and of a log with logical places that is
                // the order in which they lie.
                self.data.end_of_headers(self.logical.is_some());
            }
        }
        Ok(true)
    }

    /// The next header; `None`: there is none, or it cannot be read.
    fn header<D: Disk>(&mut self, core: &mut Core<D>) -> Result<Option<Bytes>, StoreError> {
        let start = self.start + u64::from(self.at);
        let Some(first) = self.block(core, start, start)? else { return Ok(None) };
        let room = self.segment.used_blocks - self.at;
        let Some(blocks) = header_blocks(&first).filter(|blocks| *blocks <= room as usize) else {
            return Ok(None);
        };
        if blocks == 1 {
            return Ok(Some(first));
        }
        let mut header = BytesMut::from(&first[..]);
        for place in (start..).take(blocks).skip(1) {
            let Some(block) = self.block(core, start, place)? else { return Ok(None) };
            header.extend_from_slice(&block);
        }
        Ok(Some(header.freeze()))
    }

    /// The same from the disk, whatever was read before.
    fn header_again<D: Disk>(&self, core: &Core<D>) -> Result<Option<Bytes>, StoreError> {
        let (first, mut header) = (self.start + u64::from(self.at), BytesMut::zeroed(BLOCK_SIZE));
        let mut is_read = readable(core.read(first, &mut header))?;
        let room = (self.segment.used_blocks - self.at) as usize;
        let blocks = header_blocks(&header).filter(|blocks| *blocks <= room && is_read);
        let Some(blocks) = blocks else { return Ok(None) };
        header.resize(blocks * BLOCK_SIZE, 0);
        if blocks > 1 {
            is_read = readable(core.read(first + 1, &mut header[BLOCK_SIZE..]))?;
        }
        Ok(is_read.then(|| header.freeze()))
    }

    fn block<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        start: u64,
        place: u64,
    ) -> Result<Option<Bytes>, StoreError> {
        let mut read = Ok(());
        if core.fetches.is_open() {
            read = self.data.look_ahead_of_header(core, start, place);
        }
        let read = read.and_then(|()| self.data.header(core, place));
        let mut block = None;
        readable(read.map(|read| block = Some(read)))?;
        Ok(block)
    }

    fn add(&mut self, batch: &Batch<'_>) {
        let header = self.at + batch.header_blocks;
        self.header_blocks += u64::from(batch.header_blocks);
        let mut place = self.start + u64::from(header);
        for entry in batch.entries() {
            if self.segment.stream == Stream::Nodes {
                let (place, level, newest) = (entry.epoch, entry.kind, entry.lsn);
                let change = Change::Renew { place, level, newest };
                self.nodes.push(Edit { lba: entry.lba, blocks: 1, change });
                continue;
            }
            for (i, crc) in entry.crcs().enumerate() {
                let (lba, version) = (entry.lba + i as u64, entry.lsn);
                let name = match self.segment.stream {
                    Stream::Log => self.logical.map(|first| first + (place - self.start)),
                    _ => Some(entry.epoch).filter(|name| is_logical(*name)),
                };
                let name = name.unwrap_or(place);
                self.blocks.push(Candidate { lba, version, place, name, crc });
                place += 1;
            }
        }
    }
}
