//! A framed, protected, non-blocking connection, as the shards of both roles use it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use quoin_types::ids::SessionKey;
use quoin_types::message::{FromReplica, ToReplica};

use crate::decode::{Incoming, decode};
use crate::encode::{self, FrameBuffer};
use crate::frame::{HEADER_LEN, Header, Limits, WireError};
use crate::hello::{Hello, Welcome};
use crate::queue::{Filled, ReceiveQueue, SendQueue};
use crate::security::{Opener, Sealer};

/// Limit of bytes read from one socket in one turn.
const READ_TURN_MAX: usize = 1 << 20;

/// Outcome of reading a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOutcome {
    /// The socket is drained, or had nothing.
    Drained,
    /// The turn was used up: more is waiting, and level-triggered readiness reports it again.
    More,
    /// The peer closed; everything before that has been read.
    End,
}

pub struct Connection {
    socket: OwnedFd,
    sealer: Sealer,
    opener: Opener,
    limits: Limits,
    input: ReceiveQueue,
    /// The checked header of the frame at the start of `input`.
    header: Option<Header>,
    frame: FrameBuffer,
    output: SendQueue,
    features: u64,
}

impl Connection {
    /// Wraps a connected, non-blocking socket. Until [`Connection::authenticated`] only frames of
    /// [`Limits::HELLO`] are accepted.
    pub fn new(socket: OwnedFd, sealer: Sealer, opener: Opener) -> Self {
        Connection {
            socket,
            sealer,
            opener,
            limits: Limits::HELLO,
            input: ReceiveQueue::default(),
            header: None,
            frame: FrameBuffer::default(),
            output: SendQueue::default(),
            features: 0,
        }
    }

    /// Raises the limits once the peer has proven its permission: its frames may be as long as a
    /// session needs, and of the kinds that these features bring.
    pub fn authenticated(&mut self, features: u64) {
        self.limits = Limits::SESSION;
        self.features = features;
    }

    /// Returns true if both sides know this feature of [`crate::hello`].
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads from the socket, up to the limit of one turn.
    pub fn receive(&mut self) -> Result<ReadOutcome, WireError> {
        let before = self.input.bytes.len();
        loop {
            let expect = match &self.header {
                Some(header) => (header.frame_len() + self.opener.tag_len())
                    .saturating_sub(self.input.bytes.len()),
                None => 0,
            };
            match self.input.fill(&self.socket, expect)? {
                Filled::Drained | Filled::Nothing => return Ok(ReadOutcome::Drained),
                Filled::End => return Ok(ReadOutcome::End),
                // A frame that is longer than the buffer must be known before more is read.
                Filled::More if self.header.is_none() => return Ok(ReadOutcome::More),
                Filled::More if self.input.bytes.len() - before >= READ_TURN_MAX => {
                    return Ok(ReadOutcome::More);
                }
                Filled::More => {}
            }
        }
    }

    /// Returns the next whole frame of the bytes read.
    pub fn next_frame(&mut self) -> Result<Option<Incoming>, WireError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let Some(bytes) = self.input.bytes.first_chunk::<HEADER_LEN>() else {
                    self.input.rest();
                    // Garbage is refused by its first bytes, before a whole header has arrived.
                    return match self.input.bytes.first_chunk::<4>() {
                        Some(first) if *first != crate::frame::MAGIC && first[0] != 0x15 => {
                            Err(WireError::Magic)
                        }
                        _ => Ok(None),
                    };
                };
                let header = Header::decode(bytes, &self.limits)?;
                self.header = Some(header);
                header
            }
        };
        let length = header.frame_len() + self.opener.tag_len();
        if self.input.bytes.len() < length {
            return Ok(None);
        }
        self.header = None;
        let frame = self.opener.open(self.input.bytes.split_to(length))?;
        decode(&header, frame).map(Some)
    }

    pub fn send_to_replica(
        &mut self,
        session: SessionKey,
        message: &ToReplica,
    ) -> Result<(), WireError> {
        let Connection { sealer, output, frame, .. } = self;
        encode::to_replica(session, message, frame, |frame| sealer.seal(frame, output))
    }

    pub fn send_from_replica(
        &mut self,
        session: SessionKey,
        message: &FromReplica,
    ) -> Result<(), WireError> {
        encode::from_replica(session, message, &mut self.frame)?;
        self.seal_frame();
        Ok(())
    }

    pub fn send_hello(&mut self, session: SessionKey, hello: &Hello) -> Result<(), WireError> {
        encode::hello(session, hello, &mut self.frame)?;
        self.seal_frame();
        Ok(())
    }

    pub fn send_welcome(
        &mut self,
        session: SessionKey,
        welcome: &Welcome,
    ) -> Result<(), WireError> {
        encode::welcome(session, welcome, &mut self.frame)?;
        self.seal_frame();
        Ok(())
    }

    fn seal_frame(&mut self) {
        self.sealer.seal(&self.frame, &mut self.output);
        // The blocks are in the queue now; holding them here would keep their chunks alive.
        self.frame.data.clear();
    }

    /// Writes queued bytes. Returns true once all are written; otherwise the caller waits for write
    /// readiness.
    pub fn flush(&mut self) -> Result<bool, WireError> {
        self.output.write_to(&self.socket)
    }

    /// Discards bytes read: frames of this connection are not wanted any more.
    pub fn discard_input(&mut self) {
        self.input.bytes.clear();
        self.header = None;
    }

    /// Bytes that the kernel has not accepted yet.
    pub fn queued_bytes(&self) -> usize {
        self.output.bytes()
    }

    /// Bytes read that are not part of a returned frame yet.
    pub fn buffered_bytes(&self) -> usize {
        self.input.bytes.len()
    }
}
