//! A framed, protected, non-blocking connection, as the shards of both roles hold it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use quoin_types::ids::SessionKey;
use quoin_types::message::{FromReplica, ToReplica};

use crate::decode::{Incoming, decode};
use crate::encode::{self, FrameBuffer};
use crate::frame::{HEADER_LEN, Header, Limits, WireError};
use crate::hello::{Hello, Welcome};
use crate::queue::{Filled, ReceiveQueue, SendQueue};
use crate::security::{Opener, Sealer};

/// Bytes taken from one socket before others get their turn.
const READ_TURN_MAX: usize = 1 << 20;

/// Whether a socket may have more to read now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOutcome {
    /// Drained, or nothing came.
    Drained,
    /// The turn was used up: more is waiting (level-triggered readiness brings it back).
    More,
    /// The peer closed; what came before has been read.
    End,
}

pub struct Connection {
    socket: OwnedFd,
    sealer: Sealer,
    opener: Opener,
    limits: Limits,
    input: ReceiveQueue,
    /// The header of the frame at the start of `input`, once it was checked.
    header: Option<Header>,
    frame: FrameBuffer,
    output: SendQueue,
    features: u64,
}

impl Connection {
    /// Takes a connected, non-blocking socket. Until [`Connection::authenticated`] only frames
    /// of [`Limits::HELLO`] are taken.
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

    /// The peer has proven what it may do: its frames may be as long as a session needs, and of
    /// the kinds that these features bring.
    pub fn authenticated(&mut self, features: u64) {
        self.limits = Limits::SESSION;
        self.features = features;
    }

    /// Whether both sides know a feature of [`crate::hello`].
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads what the socket has, up to a turn's worth.
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

    /// The next whole frame of what was read.
    pub fn next_frame(&mut self) -> Result<Option<Incoming>, WireError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let Some(bytes) = self.input.bytes.first_chunk::<HEADER_LEN>() else {
                    self.input.rest();
                    // Garbage is refused by its first bytes, not after 64 of them came.
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

    /// Writes what is queued; true once all is out (else ask for write readiness).
    pub fn flush(&mut self) -> Result<bool, WireError> {
        self.output.write_to(&self.socket)
    }

    /// Forgets what was read: this connection's frames are not wanted any more.
    pub fn discard_input(&mut self) {
        self.input.bytes.clear();
        self.header = None;
    }

    /// Bytes not yet taken by the kernel.
    pub fn queued_bytes(&self) -> usize {
        self.output.bytes()
    }

    /// Bytes read but not yet taken as frames.
    pub fn buffered_bytes(&self) -> usize {
        self.input.bytes.len()
    }
}
