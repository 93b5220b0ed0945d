//! One connection with many requests in flight, driven by its owner's event loop.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use quoin_types::ClientId;
use quoin_types::block::{Operation, Payload, StatusExtent};
use rustix::io::Errno;

use super::{ClientError, ClientOptions, ExportInfo, RequestError, handshake};
use crate::protocol::{
    CHUNK_HEADER_BYTES, NUMBER_BYTES, RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
    STATE_HOLE, STRUCTURED_REPLY_MAGIC, be16, be32, be64, chunk, command, error,
};

/// Limit of one `read`.
const RECEIVE_BYTES: usize = 256 << 10;
/// Limit of slices in one vectored write.
const SLICES_MAX: usize = 256;

/// A finished request: the token it was submitted with, and its result.
#[derive(Debug, PartialEq, Eq)]
pub struct Done {
    pub token: u64,
    pub result: Result<Payload, RequestError>,
}

/// A connection in its transmission phase.
pub struct Pipe {
    fd: OwnedFd,
    info: ExportInfo,
    output: VecDeque<Bytes>,
    input: BytesMut,
    /// Buffer in which request headers are written before they are split off and sent.
    headers: BytesMut,
    /// Indexed by cookie.
    in_flight: Vec<Option<InFlight>>,
    free: Vec<usize>,
    submitted: u64,
    stopping: bool,
    hold_on_shutdown: bool,
    is_client_over: bool,
}

struct InFlight {
    token: u64,
    /// Order of submission.
    number: u64,
    operation: Operation,
    /// Parts of a structured answer: offset and data.
    parts: Vec<(u64, Bytes)>,
    status: Vec<StatusExtent>,
    failed: Option<u32>,
}

impl Pipe {
    /// Connects and negotiates, blocking for at most the options' time-out.
    pub fn connect(options: &ClientOptions) -> Result<Self, ClientError> {
        Self::negotiate(options, None)
    }

    /// Connects for a client that numbers its requests where the server wants that; 0: one that
    /// begins.
    pub(super) fn negotiate(
        options: &ClientOptions,
        shown: Option<ClientId>,
    ) -> Result<Self, ClientError> {
        let (fd, info) = handshake::connect(options, shown)?;
        Ok(Self {
            fd,
            info,
            output: VecDeque::new(),
            input: BytesMut::new(),
            headers: BytesMut::new(),
            in_flight: Vec::new(),
            free: Vec::new(),
            submitted: 0,
            stopping: false,
            hold_on_shutdown: false,
            is_client_over: false,
        })
    }

    /// Sets whether a request that the server refused because it stops counts as unanswered: it was
    /// not executed, and the next server will execute it.
    pub fn hold_on_shutdown(mut self, hold: bool) -> Self {
        self.hold_on_shutdown = hold;
        self
    }

    /// Returns true if nothing more is sent: by [`Pipe::stop_sending`], or because the server
    /// stops.
    pub fn stopping(&self) -> bool {
        self.stopping
    }

    /// Returns true if the server refused a numbered request, as it knows the client no longer.
    pub(super) fn is_client_over(&self) -> bool {
        self.is_client_over
    }

    pub fn info(&self) -> ExportInfo {
        self.info
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Number of requests without an answer.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len()
    }

    /// Returns true while bytes wait for the socket.
    pub fn wants_write(&self) -> bool {
        !self.output.is_empty() && !self.stopping
    }

    /// Queues a request; [`Pipe::send`] sends it.
    pub fn submit(&mut self, token: u64, operation: Operation) {
        self.submit_numbered(token, operation, None);
    }

    /// Queues a request with its number and the lowest one without an answer.
    pub(super) fn submit_numbered(
        &mut self,
        token: u64,
        operation: Operation,
        numbers: Option<(u64, u64)>,
    ) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.in_flight.push(None);
            self.in_flight.len() - 1
        });
        let header = header_of(&operation, slot as u64);
        if self.headers.capacity() < header.len() + NUMBER_BYTES {
            self.headers = BytesMut::with_capacity(4096);
        }
        self.headers.put_slice(&header);
        if let Some((number, low)) = numbers {
            self.headers.put_u64(number);
            self.headers.put_u64(low);
        }
        self.output.push_back(self.headers.split().freeze());
        if let Operation::Write { data, .. } = &operation {
            self.output.push_back(data.clone());
        }
        self.submitted += 1;
        self.in_flight[slot] = Some(InFlight {
            token,
            number: self.submitted,
            operation,
            parts: Vec::new(),
            status: Vec::new(),
            failed: None,
        });
    }

    /// Sends as much as the socket accepts now.
    pub fn send(&mut self) -> io::Result<()> {
        while self.wants_write() {
            let slices: Vec<IoSlice<'_>> =
                self.output.iter().take(SLICES_MAX).map(|bytes| IoSlice::new(bytes)).collect();
            let mut written = match rustix::io::writev(&self.fd, &slices) {
                Ok(written) => written,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            while let Some(first) = self.output.front_mut() {
                if first.len() > written {
                    first.advance(written);
                    break;
                }
                written -= first.len();
                self.output.pop_front();
            }
        }
        Ok(())
    }

    /// Reads everything that the socket has now. An error means that the connection has ended.
    pub fn receive(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        loop {
            if self.input.capacity() - self.input.len() < RECEIVE_BYTES / 4 {
                self.input.reserve(RECEIVE_BYTES);
            }
            let spare = self.input.spare_capacity_mut();
            let room = spare.len();
            let read = match rustix::io::read(&self.fd, spare) {
                Ok((bytes, _)) => bytes.len(),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // SAFETY: the system call has initialised exactly `read` bytes of the spare capacity.
            unsafe { self.input.advance_mut(read) };
            self.parse(done)?;
            if read < room {
                return Ok(());
            }
        }
    }

    /// Ends the sending half: the server closes the connection once it has read everything sent.
    pub fn stop_sending(&mut self) {
        if !self.stopping {
            self.stopping = true;
            // A failure means that the connection is gone already, which the next read reports.
            let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
        }
    }

    /// Sends the protocol's disconnect; for a pipe with nothing in flight.
    pub fn disconnect(&mut self) {
        let header = RequestHeader {
            flags: 0,
            command: command::DISCONNECT,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        self.output.push_back(Bytes::copy_from_slice(&header.encode()));
        // A server that is gone needs no disconnect.
        let _ = self.send();
        self.stop_sending();
    }

    /// Returns the unanswered requests, oldest first.
    pub fn into_pending(self) -> Vec<(u64, Operation)> {
        let mut left: Vec<InFlight> = self.in_flight.into_iter().flatten().collect();
        left.sort_by_key(|request| request.number);
        left.into_iter().map(|request| (request.token, request.operation)).collect()
    }

    fn parse(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        loop {
            if self.input.len() < SIMPLE_REPLY_BYTES {
                return Ok(());
            }
            let whole = match be32(&self.input, 0) {
                SIMPLE_REPLY_MAGIC => self.simple(done)?,
                STRUCTURED_REPLY_MAGIC => self.structured(done)?,
                magic => return Err(protocol_violation(format!("a reply with magic {magic:#x}"))),
            };
            if !whole {
                return Ok(());
            }
        }
    }

    fn simple(&mut self, done: &mut Vec<Done>) -> io::Result<bool> {
        let (number, cookie) = (be32(&self.input, 4), be64(&self.input, 8));
        let request = self.request(cookie)?;
        let mut length = 0;
        if number == 0 {
            match &request.operation {
                Operation::Read { length: wanted, .. } => length = *wanted as usize,
                Operation::Status { .. } => {
                    return Err(protocol_violation("a simple reply to a block status request"));
                }
                _ => {}
            }
        }
        if !self.holds(SIMPLE_REPLY_BYTES + length) {
            return Ok(false);
        }
        self.input.advance(SIMPLE_REPLY_BYTES);
        let data = self.input.split_to(length).freeze();
        let result = match number {
            0 if length > 0 => Ok(Payload::Data(vec![data])),
            0 => Ok(Payload::None),
            _ => Err(RequestError::Refused(number)),
        };
        self.finish(cookie, result, done);
        Ok(true)
    }

    fn structured(&mut self, done: &mut Vec<Done>) -> io::Result<bool> {
        if self.input.len() < CHUNK_HEADER_BYTES {
            return Ok(false);
        }
        let (flags, kind) = (be16(&self.input, 4), be16(&self.input, 6));
        let (cookie, length) = (be64(&self.input, 8), be32(&self.input, 16) as usize);
        let base_allocation = self.info.base_allocation;
        let request = self.request(cookie)?;
        // Bounded by the request, plus the few bytes of a chunk's own fields or error text.
        let longest = match &request.operation {
            Operation::Read { length, .. } => *length as usize + 8,
            Operation::Status { .. } => 1 << 20,
            _ => 0,
        };
        if length > longest.max(8 << 10) {
            return Err(protocol_violation(format!("a chunk of {length} bytes")));
        }
        if !self.holds(CHUNK_HEADER_BYTES + length) {
            return Ok(false);
        }
        self.input.advance(CHUNK_HEADER_BYTES);
        let mut body = self.input.split_to(length).freeze();
        let request = self.request(cookie)?;
        match kind {
            chunk::NONE if length == 0 => {}
            chunk::OFFSET_DATA if length > 8 => {
                let offset = body.get_u64();
                request.parts.push((offset, body));
            }
            chunk::OFFSET_HOLE if length == 12 => {
                let (offset, hole) = (body.get_u64(), body.get_u32());
                let Operation::Read { length: wanted, .. } = &request.operation else {
                    return Err(protocol_violation("a hole in a request that is no read"));
                };
                if hole > *wanted {
                    return Err(protocol_violation("a hole longer than the read"));
                }
                request.parts.push((offset, Bytes::from(vec![0; hole as usize])));
            }
            chunk::BLOCK_STATUS if length >= 12 && length % 8 == 4 => {
                if Some(body.get_u32()) == base_allocation {
                    while body.has_remaining() {
                        let (length, state) = (u64::from(body.get_u32()), body.get_u32());
                        let hole = state & STATE_HOLE != 0;
                        request.status.push(StatusExtent { length, hole });
                    }
                }
            }
            chunk::ERROR | chunk::ERROR_OFFSET if length >= 6 => {
                request.failed = Some(body.get_u32());
            }
            _ if kind & 0x8000 != 0 => request.failed = Some(error::IO),
            _ => {
                return Err(protocol_violation(format!(
                    "a chunk of kind {kind} with {length} bytes"
                )));
            }
        }
        if flags & chunk::FLAG_DONE != 0 {
            let result = request.assemble()?;
            self.finish(cookie, result, done);
        }
        Ok(true)
    }

    fn request(&mut self, cookie: u64) -> io::Result<&mut InFlight> {
        usize::try_from(cookie)
            .ok()
            .and_then(|slot| self.in_flight.get_mut(slot))
            .and_then(Option::as_mut)
            .ok_or_else(|| protocol_violation("a reply to a request that was not sent"))
    }

    fn holds(&mut self, bytes: usize) -> bool {
        if self.input.len() >= bytes {
            return true;
        }
        self.input.reserve(bytes - self.input.len());
        false
    }

    fn finish(&mut self, cookie: u64, result: Result<Payload, RequestError>, done: &mut Vec<Done>) {
        let slot = cookie as usize;
        if self.hold_on_shutdown && result == Err(RequestError::Refused(error::SHUTDOWN)) {
            return self.stop_sending();
        }
        if result == Err(RequestError::Refused(error::STALE)) && self.info.client.is_some() {
            // Its owner fails what is in doubt.
            self.is_client_over = true;
            return self.stop_sending();
        }
        if let Some(request) = self.in_flight[slot].take() {
            self.free.push(slot);
            done.push(Done { token: request.token, result });
        }
    }
}

impl InFlight {
    /// Assembles the answer from the parts that arrived.
    fn assemble(&mut self) -> io::Result<Result<Payload, RequestError>> {
        if let Some(number) = self.failed {
            return Ok(Err(RequestError::Refused(number)));
        }
        match &self.operation {
            Operation::Read { offset, length } => {
                self.parts.sort_by_key(|(offset, _)| *offset);
                let mut at = *offset;
                for (offset, bytes) in &self.parts {
                    if *offset != at {
                        return Err(protocol_violation(
                            "chunks of a read that leave a gap or overlap",
                        ));
                    }
                    at += bytes.len() as u64;
                }
                if at != *offset + u64::from(*length) {
                    return Err(protocol_violation("a read with another length than requested"));
                }
                let parts = std::mem::take(&mut self.parts);
                Ok(Ok(Payload::Data(parts.into_iter().map(|(_, bytes)| bytes).collect())))
            }
            Operation::Status { .. } => Ok(Ok(Payload::Status(std::mem::take(&mut self.status)))),
            _ => Ok(Ok(Payload::None)),
        }
    }
}

fn protocol_violation(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server sent {}", text.into()))
}

fn header_of(operation: &Operation, cookie: u64) -> [u8; 28] {
    let fua = |on: bool| if on { command::FLAG_FUA } else { 0 };
    let (command, flags, offset, length) = match operation {
        Operation::Read { offset, length } => (command::READ, 0, *offset, *length),
        Operation::Write { offset, data, fua: on } => {
            (command::WRITE, fua(*on), *offset, data.len() as u32)
        }
        Operation::Flush => (command::FLUSH, 0, 0, 0),
        Operation::Trim { offset, length, fua: on } => {
            (command::TRIM, fua(*on), *offset, *length as u32)
        }
        Operation::WriteZeroes { offset, length, fua: on, no_hole } => {
            let keep = if *no_hole { command::FLAG_NO_HOLE } else { 0 };
            (command::WRITE_ZEROES, fua(*on) | keep, *offset, *length as u32)
        }
        Operation::Status { offset, length } => (command::BLOCK_STATUS, 0, *offset, *length as u32),
    };
    RequestHeader { flags, command, cookie, offset, length }.encode()
}
