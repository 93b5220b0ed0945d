//! Bytes that wait to be written to a socket, and bytes read from one.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;

use bytes::{Buf, Bytes, BytesMut};
use rustix::io::Errno;

use crate::frame::WireError;

/// Limit of pieces in one vectored write.
const PIECES_MAX: usize = 256;
/// Size above which a buffer is released once it is empty.
const TAIL_KEPT_MAX: usize = 1 << 20;
/// Size below which a piece is copied behind the last one: that is cheaper than one more piece.
const COPY_BELOW: usize = 512;

/// Bytes on their way out: shared pieces by reference, small ones gathered.
///
/// `bytes()` counts the bytes that the kernel has not accepted yet; its owner bounds it by pushing
/// back.
#[derive(Default)]
pub struct SendQueue {
    pieces: VecDeque<Bytes>,
    /// Bytes after all pieces; still growing.
    tail: BytesMut,
    bytes: usize,
}

impl SendQueue {
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn push_copy(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        self.bytes += bytes.len();
    }

    pub fn push(&mut self, piece: Bytes) {
        if piece.len() < COPY_BELOW {
            return self.push_copy(&piece);
        }
        if !self.tail.is_empty() {
            self.pieces.push_back(self.tail.split().freeze());
        }
        self.bytes += piece.len();
        self.pieces.push_back(piece);
    }

    /// The growing end, with room for `additional` bytes; [`SendQueue::added`] must follow.
    pub fn tail(&mut self, additional: usize) -> &mut BytesMut {
        self.tail.reserve(additional);
        &mut self.tail
    }

    pub fn added(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// Writes as much as the socket accepts; returns true once all is written.
    pub fn write_to(&mut self, socket: impl AsFd) -> Result<bool, WireError> {
        while self.bytes > 0 {
            let written = if self.pieces.is_empty() {
                rustix::net::send(&socket, &self.tail, rustix::net::SendFlags::NOSIGNAL)
            } else {
                let mut slices = [IoSlice::new(&[]); PIECES_MAX];
                let mut n = 0;
                for piece in self.pieces.iter().take(PIECES_MAX - 1) {
                    slices[n] = IoSlice::new(piece);
                    n += 1;
                }
                if n == self.pieces.len() && !self.tail.is_empty() {
                    slices[n] = IoSlice::new(&self.tail);
                    n += 1;
                }
                rustix::net::sendmsg(
                    &socket,
                    &slices[..n],
                    &mut Default::default(),
                    rustix::net::SendFlags::NOSIGNAL,
                )
            };
            match written {
                Ok(n) => self.advance(n),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(WireError::Closed),
                Err(errno) => {
                    return Err(WireError::Io { operation: "write", source: errno.into() });
                }
            }
        }
        Ok(true)
    }

    fn advance(&mut self, mut n: usize) {
        self.bytes -= n;
        while n > 0 {
            let Some(first) = self.pieces.front_mut() else {
                self.tail.advance(n);
                break;
            };
            if n < first.len() {
                first.advance(n);
                return;
            }
            n -= first.len();
            self.pieces.pop_front();
        }
        if self.bytes == 0 && self.tail.capacity() > TAIL_KEPT_MAX {
            self.tail = BytesMut::new();
        }
    }

    /// Returns everything queued, in one piece (for tests and blocking writers).
    pub fn into_bytes(mut self) -> Bytes {
        let mut all = BytesMut::with_capacity(self.bytes);
        for piece in self.pieces.drain(..) {
            all.extend_from_slice(&piece);
        }
        all.extend_from_slice(&self.tail);
        all.freeze()
    }
}

/// Size of one allocation for reading: the least, and the most.
const CHUNK_MIN: usize = 128 << 10;
const CHUNK_MAX: usize = 512 << 10;
/// Room below which a new chunk is begun: a read of a few bytes costs as much as a full one.
const ROOM_MIN: usize = 16 << 10;

/// Outcome of one read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filled {
    /// Bytes were read, and the socket may have more.
    More,
    /// Bytes were read, and the socket is (or soon will be) drained.
    Drained,
    /// The socket has nothing now.
    Nothing,
    /// The peer closed its side.
    End,
}

/// Bytes read from a socket and not consumed yet.
///
/// Frames are split off `bytes` without copying, so a chunk lives until its last frame is dropped.
/// A partial frame at the end of a chunk is moved to the next one. Chunks grow with the traffic, so
/// that this is a small part of the bytes read.
pub struct ReceiveQueue {
    pub bytes: BytesMut,
    chunk: usize,
    /// Size of the memory that `bytes` is a part of.
    taken: usize,
}

impl Default for ReceiveQueue {
    fn default() -> Self {
        Self { bytes: BytesMut::new(), chunk: CHUNK_MIN, taken: 0 }
    }
}

impl ReceiveQueue {
    /// Reads once. `expect`: number of bytes that the first frame still lacks.
    pub fn fill(&mut self, socket: impl AsFd, expect: usize) -> Result<Filled, WireError> {
        let bytes = &mut self.bytes;
        if bytes.capacity() - bytes.len() < ROOM_MIN.max(expect) {
            bytes.reserve(self.chunk.max(expect));
            self.taken = bytes.capacity();
        }
        let room = bytes.spare_capacity_mut();
        let room_len = room.len();
        let n = loop {
            match rustix::io::read(&socket, &mut *room) {
                Ok((read, _)) => break read.len(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Filled::Nothing),
                Err(Errno::CONNRESET) => return Ok(Filled::End),
                Err(errno) => {
                    return Err(WireError::Io { operation: "read", source: errno.into() });
                }
            }
        };
        if n == 0 {
            return Ok(Filled::End);
        }
        // SAFETY: `read` initialised the first `n` bytes of the spare capacity.
        unsafe { bytes.set_len(bytes.len() + n) };
        if n == room_len {
            self.chunk = (2 * self.chunk).min(CHUNK_MAX);
            return Ok(Filled::More);
        }
        if n < self.chunk / 16 {
            self.chunk = (self.chunk / 2).max(CHUNK_MIN);
        }
        Ok(Filled::Drained)
    }

    /// Called once everything read was consumed: releases a chunk that large messages made, as each
    /// of hundreds of connections would otherwise keep one. (The allocator reuses it for the next.)
    pub fn rest(&mut self) {
        if self.bytes.is_empty() && self.taken > CHUNK_MIN {
            (self.bytes, self.taken) = (BytesMut::new(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn slices_and_copies_are_sent_in_the_order_they_were_queued() {
        let (writer, mut reader) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        let mut queue = SendQueue::default();
        let mut expected = Vec::new();
        for i in 0..600u32 {
            let piece = vec![i as u8; (i as usize * 37) % 3000];
            expected.extend_from_slice(&piece);
            if i % 3 == 0 { queue.push_copy(&piece) } else { queue.push(Bytes::from(piece)) }
        }
        assert_eq!(queue.bytes(), expected.len());
        let mut received = Vec::new();
        let mut chunk = vec![0; 8192];
        while received.len() < expected.len() {
            queue.write_to(&writer).unwrap();
            let n = reader.read(&mut chunk).unwrap();
            received.extend_from_slice(&chunk[..n]);
        }
        assert!(queue.is_empty());
        assert_eq!(received, expected);
    }

    #[test]
    fn chunks_grow_with_the_traffic_and_shrink_without_it_and_no_byte_is_lost() {
        let (mut writer, reader) = UnixStream::pair().unwrap();
        reader.set_nonblocking(true).unwrap();
        let sent: Vec<u8> = (0..8u32 << 20).map(|i| (i % 251) as u8).collect();
        let copy = sent.clone();
        let thread = std::thread::spawn(move || {
            use std::io::Write;
            writer.write_all(&copy).unwrap();
            writer
        });
        let mut queue = ReceiveQueue::default();
        let (mut received, mut chunk_max) = (Vec::new(), 0);
        while received.len() < sent.len() {
            queue.fill(&reader, 0).unwrap();
            chunk_max = chunk_max.max(queue.chunk);
            // A frame is left unfinished most of the time.
            let whole = queue.bytes.len().saturating_sub(1000);
            received.extend_from_slice(&queue.bytes.split_to(whole));
            if received.len() + queue.bytes.len() == sent.len() {
                received.extend_from_slice(&queue.bytes.split());
            }
        }
        assert!(received == sent);
        assert!(chunk_max > CHUNK_MIN && chunk_max <= CHUNK_MAX);
        let mut writer = thread.join().unwrap();
        queue.rest();
        assert_eq!((queue.taken, queue.bytes.capacity()), (0, 0), "a large chunk is released");
        for _ in 0..200 {
            use std::io::Write;
            writer.write_all(b"little").unwrap();
            assert_eq!(queue.fill(&reader, 0).unwrap(), Filled::Drained);
            queue.bytes.clear();
            queue.rest();
        }
        assert_eq!(
            (queue.chunk, queue.taken),
            (CHUNK_MIN, CHUNK_MIN),
            "a chunk of the smallest size is kept"
        );
    }

    #[test]
    fn a_socket_that_accepts_no_bytes_leaves_the_rest_queued() {
        let (writer, _reader) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        let mut queue = SendQueue::default();
        queue.push(Bytes::from(vec![1; 16 << 20]));
        assert!(!queue.write_to(&writer).unwrap());
        assert!(queue.bytes() > 0 && queue.bytes() < 16 << 20);
    }

    #[test]
    fn a_peer_that_is_gone_is_an_error_and_not_a_signal() {
        let (writer, reader) = UnixStream::pair().unwrap();
        drop(reader);
        let mut queue = SendQueue::default();
        queue.push_copy(b"x");
        assert!(matches!(queue.write_to(&writer), Err(WireError::Closed)));
    }
}
