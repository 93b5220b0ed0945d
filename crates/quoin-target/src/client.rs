//! One client's connection to a volume: bytes of a socket, a front-end session, tokens.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Bytes, BytesMut};
use quoin_reactor::Interest;
use quoin_types::block::{Closed, DeviceInfo, Frontend, Reply, Request};
use quoin_types::{ClientId, VolumeId};
use quoin_wire::frame::WireError;
use quoin_wire::queue::{Filled, ReceiveQueue, SendQueue};

use crate::standing::Holder;

/// Most bytes of replies that a client may leave unread before its requests are not accepted.
const QUEUED_MAX: usize = 32 << 20;
/// Most bytes read from one client before others get their turn.
const READ_TURN_MAX: usize = 4 << 20;

/// Member at the other end of a connection over TLS.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct User {
    pub holder: Holder,
    /// How another node uses the volume that it shares; `None`: its holder opens all volumes.
    pub shares: Option<SharedUse>,
}

/// Use of a volume by another node, as agreed when it connected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedUse {
    pub read_only: bool,
    /// Number of its attachment, if it may change the volume; or 0.
    pub client: u64,
}

pub struct Client {
    socket: OwnedFd,
    pub volume: VolumeId,
    frontend: Box<dyn Frontend>,
    input: ReceiveQueue,
    output: SendQueue,
    pieces: Vec<Bytes>,
    /// Whole requests may wait in `input`: the session accepted no more at the last attempt.
    sated: bool,
    pub interest: Interest,
    /// True if it is to be closed once its output is written.
    pub ending: bool,
    /// Queued for a write.
    pub dirty: bool,
    /// Requests of it were taken, so that what is written to it may be answers.
    pub has_requested: bool,
    /// Bytes that it held at its shard's last count.
    pub counted_bytes: usize,
    /// All clients together hold too much: one request at a time.
    crowded: bool,
    /// Queued for another attempt when that is over.
    pub waits: bool,
    /// `None`: it came by a socket of this host.
    pub user: Option<User>,
    /// Address by which it came over the network.
    pub from: Option<IpAddr>,
    /// The client whose requests are numbered, once that is known, and whether it begins.
    pub numbered: Option<(ClientId, bool)>,
}

/// Result of a turn at the socket.
#[derive(Debug)]
pub enum Turn {
    Goes,
    /// The peer closed; everything it sent before was accepted.
    End,
}

impl Client {
    pub fn new(socket: OwnedFd, volume: VolumeId, frontend: Box<dyn Frontend>) -> Self {
        Client {
            socket,
            volume,
            frontend,
            input: ReceiveQueue::default(),
            output: SendQueue::default(),
            pieces: Vec::new(),
            sated: false,
            interest: Interest::READ,
            ending: false,
            dirty: false,
            counted_bytes: 0,
            has_requested: false,
            crowded: false,
            waits: false,
            user: None,
            from: None,
            numbered: None,
        }
    }

    /// Adds bytes that were read before the client came to this shard.
    pub fn give_input(&mut self, input: BytesMut) {
        self.input.bytes = input;
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the bytes held for it: its requests' data, and its unsent replies.
    pub fn held_bytes(&self) -> usize {
        self.output.bytes() + self.frontend.held_bytes()
    }

    /// Returns the client whose requests are numbered, when it has just become known, and whether it
    /// begins.
    pub fn newly_numbered(&mut self) -> Option<(ClientId, bool)> {
        if self.numbered.is_some() {
            return None;
        }
        self.numbered = self.frontend.client();
        self.numbered
    }

    pub fn set_crowded(&mut self, crowded: bool) {
        if self.crowded != crowded {
            self.crowded = crowded;
            self.frontend.set_held_bytes_max(if crowded { 1 } else { QUEUED_MAX });
        }
    }

    fn may_take(&self) -> bool {
        let held_max = if self.crowded { 1 } else { QUEUED_MAX };
        !self.ending && self.held_bytes() < held_max && self.frontend.wants_input()
    }

    /// Returns the readiness that this client can use now.
    pub fn wanted(&self) -> Interest {
        Interest { read: self.may_take(), write: !self.output.is_empty() && !self.dirty }
    }

    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Reads and passes the bytes to the session; requests are added to `requests`.
    pub fn read(&mut self, requests: &mut Vec<Request>) -> Result<Turn, WireError> {
        let mut taken = 0;
        while self.may_take() && taken < READ_TURN_MAX {
            let before = self.input.bytes.len();
            let filled = self.input.fill(&self.socket, 0)?;
            taken += self.input.bytes.len() - before;
            if matches!(filled, Filled::More | Filled::Drained) {
                self.take(requests);
            }
            match filled {
                Filled::End => return Ok(Turn::End),
                Filled::Drained | Filled::Nothing => break,
                Filled::More => {}
            }
        }
        Ok(Turn::Goes)
    }

    /// Passes the read bytes to the session; also called when replies made space for more.
    pub fn take(&mut self, requests: &mut Vec<Request>) {
        if self.ending {
            return;
        }
        let taken = self.frontend.receive(&mut self.input.bytes, requests, &mut self.pieces);
        self.input.rest();
        self.sated = !self.frontend.wants_input();
        self.queue_pieces();
        if let Err(Closed(why)) = taken {
            tracing::debug!(volume = %self.volume, why, "a client's session ended");
            self.ending = true;
        }
    }

    /// Returns whether input waits that the session could accept now. The rest after it accepted
    /// all it could is the start of an incomplete request.
    pub fn holds_input(&self) -> bool {
        self.sated && !self.input.bytes.is_empty() && self.may_take()
    }

    pub fn complete(&mut self, reply: Reply) {
        self.frontend.complete(reply, &mut self.pieces);
        self.queue_pieces();
    }

    pub fn device_changed(&mut self, info: &DeviceInfo) {
        self.frontend.device_changed(info);
    }

    fn queue_pieces(&mut self) {
        for piece in self.pieces.drain(..) {
            self.output.push(piece);
        }
    }

    /// Writes the output; true once everything is written.
    pub fn flush(&mut self) -> Result<bool, WireError> {
        self.output.write_to(&self.socket)
    }
}
