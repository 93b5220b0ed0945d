//! Reads by io_uring: the thread of a pool begins them and takes their results itself.
//!
//! A read costs no other thread, and so no switch to one and back. All that is begun in one turn of
//! the pool's loop goes to the kernel in one call ([`ReadRing::submit`]); the ring's descriptor is
//! readable once reads have ended. What a read finds is what [`Disk::fetch`](crate::Disk::fetch) finds.
//!
//! Where the kernel has no io_uring or does not let this process use it (the default profile of
//! many container runtimes), there is no ring, and threads read instead.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use io_uring::{IoUring, opcode, types};
use quoin_replication::replica::store::IoFault;
use quoin_types::BLOCK_SIZE;
use quoin_types::key_map::KeyMap;
use rustix::io::Errno;

use crate::disk::Disk;
use crate::disk::aligned_memory::AlignedMemory;
use crate::disk::fetch::{Fetch, UNDER_WAY_MAX};
use crate::disk::file::{FileDisk, fault, lay_over};

/// How soon the kernel is given again the reads for which it had no memory.
const NO_MEMORY_REST: Duration = Duration::from_millis(1);

/// A read that ended.
#[derive(Debug)]
pub struct EndedRead {
    pub id: u64,
    pub result: Result<Bytes, IoFault>,
    pub took: Duration,
}

/// A read under way. The kernel writes to its memory.
struct Read {
    offset: u64,
    is_once: bool,
    memory: AlignedMemory,
    done: usize,
    /// What waited for a sync when the read began: newer than what the disk has.
    held: Vec<(usize, Vec<u8>)>,
    is_direct: bool,
    began: Instant,
}

pub struct ReadRing {
    ring: IoUring,
    disk: FileDisk,
    under_way: KeyMap<Read>,
    /// Reads that the kernel has to be told of.
    is_unsubmitted: bool,
    ended: VecDeque<EndedRead>,
}

impl ReadRing {
    /// Makes a ring for the reads of a disk; the error says why there is none.
    pub(crate) fn new(disk: FileDisk) -> std::io::Result<Self> {
        let entries = UNDER_WAY_MAX as u32;
        // With this flag no running thread is interrupted for a result (Linux 5.19).
        let ring = IoUring::builder().setup_coop_taskrun().build(entries);
        let ring = ring.or_else(|_| IoUring::new(entries))?;
        let (under_way, ended) = (KeyMap::default(), VecDeque::new());
        let mut ring = ReadRing { ring, disk, under_way, is_unsubmitted: false, ended };
        ring.try_out()?;
        Ok(ring)
    }

    /// Begins a read, with the next [`ReadRing::submit`] at the latest.
    pub fn begin(&mut self, fetch: Fetch) {
        // Looked up before the disk is read: what is written meanwhile is in the one or the other.
        let held = self.disk.held_of(fetch.offset, fetch.length);
        let read = Read {
            offset: fetch.offset,
            is_once: fetch.is_once,
            memory: AlignedMemory::of(fetch.length),
            done: 0,
            held,
            is_direct: fetch.is_once && self.disk.direct_descriptor().is_some(),
            began: Instant::now(),
        };
        self.under_way.insert(fetch.id, read);
        self.push(fetch.id);
    }

    /// Lists what is left of a read for the kernel.
    fn push(&mut self, id: u64) {
        let Some(read) = self.under_way.get_mut(&id) else { return };
        let descriptor = match self.disk.direct_descriptor() {
            Some(direct) if read.is_direct => direct,
            _ => self.disk.descriptor(),
        };
        let rest = &mut read.memory[read.done..];
        let length = u32::try_from(rest.len()).unwrap_or(u32::MAX);
        let entry = opcode::Read::new(types::Fd(descriptor), rest.as_mut_ptr(), length)
            .offset(read.offset + read.done as u64)
            .build()
            .user_data(id);
        self.is_unsubmitted = true;
        // SAFETY: the memory is on the heap and owned by `under_way`, from which it is taken only
        // with the read's result; the disk keeps the descriptor open; and both outlive the ring,
        // which waits for all reads when it is dropped.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            return;
        }
        self.submit();
        // SAFETY: as above.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The kernel takes none for want of memory, and has not been given this one.
            self.read_plainly(id);
        }
    }

    /// Hands all that was begun to the kernel. What it has no memory for is left for the next time
    /// ([`ReadRing::retry_in`]): no caller waits here.
    pub fn submit(&mut self) {
        while self.is_unsubmitted {
            match self.ring.submit() {
                Ok(_) => self.is_unsubmitted = !self.ring.submission().is_empty(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // No memory for a request, or results that wait to be taken.
                Err(_) => return self.take_results(),
            }
        }
    }

    /// How soon [`ReadRing::next_ended`] or [`ReadRing::submit`] is to be called, whatever ends: the
    /// kernel was not given all reads yet.
    pub fn retry_in(&self) -> Option<Duration> {
        self.is_unsubmitted.then_some(NO_MEMORY_REST)
    }

    /// The next read that ended.
    pub fn next_ended(&mut self) -> Option<EndedRead> {
        if self.ended.is_empty() {
            self.take_results();
            self.submit();
        }
        self.ended.pop_front()
    }

    fn take_results(&mut self) {
        while let Some((id, result)) = self.next_result() {
            self.take_result(id, result);
        }
    }

    fn next_result(&mut self) -> Option<(u64, i32)> {
        let completed = self.ring.completion().next()?;
        Some((completed.user_data(), completed.result()))
    }

    /// Takes the kernel's answer: a count of bytes, or an error as a negative number.
    fn take_result(&mut self, id: u64, result: i32) {
        let Some(read) = self.under_way.get_mut(&id) else { return };
        let at = read.offset + read.done as u64;
        let failed = match usize::try_from(result) {
            // A file that became shorter under us.
            Ok(0) => Some(fault("read", at, Errno::IO)),
            Ok(count) => {
                read.done += count;
                None
            }
            Err(_) => match Errno::from_raw_os_error(-result) {
                Errno::INTR => None,
                // Memory, place or file system that direct IO does not take.
                Errno::INVAL if read.is_direct => {
                    read.is_direct = false;
                    None
                }
                // Of the ring and not of the medium, which a plain read asks.
                Errno::AGAIN
                | Errno::NOMEM
                | Errno::CANCELED
                | Errno::INVAL
                | Errno::NOSYS
                | Errno::OPNOTSUPP => return self.read_plainly(id),
                errno => Some(fault("read", at, errno)),
            },
        };
        if failed.is_none() && read.done < read.memory.len() {
            return self.push(id);
        }
        let Some(mut read) = self.under_way.remove(&id) else { return };
        let result = match failed {
            Some(fault) => Err(fault),
            None => {
                lay_over(&mut read.memory, &read.held);
                Ok(Bytes::from_owner(read.memory))
            }
        };
        self.ended.push_back(EndedRead { id, result, took: read.began.elapsed() });
    }
}

impl ReadRing {
    /// Makes a read that the ring did not make, on the spot.
    fn read_plainly(&mut self, id: u64) {
        let Some(read) = self.under_way.remove(&id) else { return };
        let Read { offset, is_once, memory, began, .. } = read;
        let result = self.disk.fetch(&Fetch { id, offset, length: memory.len(), is_once });
        self.ended.push_back(EndedRead { id, result, took: began.elapsed() });
    }

    /// Reads the first block: a system may have rings and no reads by them, or forbid these.
    fn try_out(&mut self) -> std::io::Result<()> {
        let mut memory = AlignedMemory::of(BLOCK_SIZE);
        let (descriptor, length) = (types::Fd(self.disk.descriptor()), BLOCK_SIZE as u32);
        let entry = opcode::Read::new(descriptor, memory.as_mut_ptr(), length).build();
        // SAFETY: the memory stays until the result is here, or for ever.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(std::io::Error::other)?;
        let result = loop {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    std::mem::forget(memory);
                    return Err(error);
                }
                Ok(_) => {}
            }
            if let Some((_, result)) = self.next_result() {
                break result;
            }
        };
        match result {
            1.. => Ok(()),
            refused => Err(std::io::Error::from_raw_os_error(-refused)),
        }
    }
}

impl AsFd for ReadRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let descriptor: RawFd = self.ring.as_raw_fd();
        // SAFETY: the ring owns the descriptor, and is borrowed for as long.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }
}

impl Drop for ReadRing {
    /// The kernel writes to the memory of what is under way.
    fn drop(&mut self) {
        while !self.under_way.is_empty() {
            self.submit();
            let _ = self.ring.submit_and_wait(1);
            self.take_results();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use quoin_testkit::skipped;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    const BLOCKS: u64 = 2048;

    /// A disk of which the last quarter waits for a sync, and of the rest nothing is cached.
    fn disk(folder: &std::path::Path) -> FileDisk {
        let bytes = BLOCKS * BLOCK_SIZE as u64;
        let disk = FileDisk::create(&folder.join("pool"), bytes, true).expect("a file");
        for block in 0..BLOCKS {
            let content = [(block % 251) as u8; BLOCK_SIZE];
            let (offset, parts) = (block * BLOCK_SIZE as u64, &[IoSlice::new(&content)]);
            if block == BLOCKS / 4 * 3 {
                disk.sync().expect("a sync");
            }
            match block < BLOCKS / 4 * 3 {
                true => disk.write_at(offset, parts).expect("a write"),
                false => disk.write_with_sync(offset, parts, 0).expect("a write"),
            }
        }
        disk.forget_cached(0, bytes);
        disk
    }

    fn next(ring: &mut ReadRing) -> EndedRead {
        loop {
            if let Some(ended) = ring.next_ended() {
                return ended;
            }
            let readable = poll(&mut [PollFd::new(&*ring, PollFlags::IN)], None);
            assert!(readable.is_ok(), "{readable:?}");
        }
    }

    #[test]
    fn a_ring_finds_what_a_reader_finds_with_many_reads_under_way() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = disk(folder.path());
        let reader = disk.reader().expect("it is a file");
        let mut ring = match disk.read_ring() {
            Ok(ring) => ring,
            Err(error) => return skipped(&format!("no io_uring here: {error}")),
        };
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut fetches = Vec::new();
        let (mut open, mut refused) = (0, 0);
        for id in 0..400 {
            let block = random.random_range(0..BLOCKS);
            // Some reach behind the end.
            let length = random.random_range(1..=70) * BLOCK_SIZE;
            let (offset, is_once) = (block * BLOCK_SIZE as u64, random.random_bool(0.5));
            let fetch = Fetch { id, offset, length, is_once };
            fetches.push(fetch);
            ring.begin(fetch);
            open += 1;
            if id % 7 == 0 {
                ring.submit();
            }
            while open == UNDER_WAY_MAX || (id == 399 && open > 0) {
                let ended = next(&mut ring);
                let expected = reader(&fetches[ended.id as usize]);
                match (&ended.result, &expected) {
                    (Ok(found), Ok(expected)) => assert!(found == expected, "{ended:?}"),
                    (Err(_), Err(_)) => refused += 1,
                    _ => panic!("{:?}, by a reader {:?}", ended.result, expected.err()),
                }
                open -= 1;
            }
        }
        assert!(refused > 0 && ring.under_way.is_empty());
        for fetch in &fetches[..UNDER_WAY_MAX] {
            ring.begin(*fetch);
        }
        // It waits for them: the kernel writes to their memory.
        drop(ring);
    }
}
