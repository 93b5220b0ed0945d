//! The transmission phase: requests in, replies out.
//!
//! A write's payload is split off the receive buffer and frozen: no byte of it is copied here.
//! Requests that can be refused without the target (by range, alignment, size or mode) are refused
//! here, so that a hostile client costs the volume nothing.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use quoin_types::block::{
    BlockError, Closed, DeviceInfo, Operation, Payload, Reply, Request, StatusExtent,
};
use quoin_types::{ClientId, Origin};

use super::protocol::{
    BASE_ALLOCATION_ID, CHUNK_HEADER_BYTES, NUMBER_BYTES, PAYLOAD_BYTES_MAX, REQUEST_HEADER_BYTES,
    RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO,
    STRUCTURED_REPLY_MAGIC, be64, chunk, command, error, error_number,
};
use super::session::Limits;

/// Limit of extents in a block status answer; further ones are dropped, as the protocol allows.
const STATUS_EXTENTS_MAX: usize = 64 << 10;
/// Limit up to which the receive buffer grows to a whole write at once. Above it the buffer grows
/// by doubling, so that a header alone never makes the session reserve 32 MiB.
const RESERVE_AHEAD_MAX: usize = 1 << 20;
/// Size of the allocations for reply headers.
const HEADER_SLAB_BYTES: usize = 4096;

pub(super) struct Transmission {
    size_bytes: u64,
    block_size: u32,
    read_only: bool,
    structured: bool,
    base_allocation: bool,
    /// The client whose changing requests are numbered.
    client: Option<ClientId>,
    limits: Limits,
    /// Indexed by token.
    in_flight: Vec<Option<InFlight>>,
    free: Vec<usize>,
    bytes_in_flight: usize,
    /// Buffer in which headers of replies are written before they are split off and sent.
    headers: BytesMut,
}

#[derive(Clone, Copy)]
struct InFlight {
    cookie: u64,
    kind: Kind,
    offset: u64,
    /// Bytes counted against the limits: written or to be read.
    payload: usize,
    length: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    /// A read whose data is not sent to the client: it warms the replicas' caches.
    Cache,
    /// Write, trim, write-zeroes.
    Change,
    Flush,
    Status {
        one: bool,
    },
}

impl Transmission {
    pub(super) fn new(
        device: &DeviceInfo,
        limits: Limits,
        structured: bool,
        base_allocation: bool,
        client: Option<ClientId>,
    ) -> Self {
        Self {
            size_bytes: device.size_bytes,
            block_size: device.block_size,
            read_only: device.read_only,
            structured,
            base_allocation,
            client,
            limits,
            in_flight: Vec::new(),
            free: Vec::new(),
            bytes_in_flight: 0,
            headers: BytesMut::new(),
        }
    }

    pub(super) fn device_changed(&mut self, device: &DeviceInfo) {
        self.size_bytes = device.size_bytes;
        self.read_only = device.read_only;
    }

    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.bytes_in_flight
    }

    pub(super) fn wants_input(&self) -> bool {
        self.in_flight.len() - self.free.len() < self.limits.requests_in_flight_max
            && self.bytes_in_flight < self.limits.bytes_in_flight_max
    }

    pub(super) fn receive(
        &mut self,
        input: &mut BytesMut,
        requests: &mut Vec<Request>,
        output: &mut Vec<Bytes>,
    ) -> Result<(), Closed> {
        while self.wants_input() {
            let Some(bytes) = input.first_chunk::<REQUEST_HEADER_BYTES>() else { break };
            let header = RequestHeader::decode(bytes)
                .ok_or_else(|| Closed("client sent a request without its magic".into()))?;
            let payload = if header.command == command::WRITE { header.length as usize } else { 0 };
            if payload > PAYLOAD_BYTES_MAX as usize {
                return Err(Closed(format!("client sent a write of {payload} bytes")));
            }
            let client = self.client.filter(|_| header.changes());
            let numbers = if client.is_some() { NUMBER_BYTES } else { 0 };
            let whole = REQUEST_HEADER_BYTES + numbers + payload;
            if input.len() < whole {
                input.reserve((whole - input.len()).min(RESERVE_AHEAD_MAX));
                break;
            }
            input.advance(REQUEST_HEADER_BYTES);
            if header.command == command::DISCONNECT {
                return Err(Closed("client disconnected".into()));
            }
            let origin = client.map(|client| {
                let (number, low) = (be64(input, 0), be64(input, 8));
                Origin { client, number, low }
            });
            input.advance(numbers);
            if origin.is_some_and(|origin| !origin.is_sound()) {
                return Err(Closed("client sent a request under a number that cannot be".into()));
            }
            let data = input.split_to(payload).freeze();
            match self.validate(&header, data) {
                Ok((kind, operation)) => {
                    let request = Request { origin, ..self.track(&header, kind, operation) };
                    requests.push(request);
                }
                Err(number) => self.refuse(&header, number, output),
            }
        }
        Ok(())
    }

    /// Returns the operation that the request asks for, or the protocol's number for why it is
    /// refused.
    fn validate(&self, header: &RequestHeader, data: Bytes) -> Result<(Kind, Operation), u32> {
        let fua = header.flags & command::FLAG_FUA != 0;
        let allowed = command::FLAG_FUA
            | match header.command {
                command::READ => command::FLAG_DF,
                command::WRITE_ZEROES => command::FLAG_NO_HOLE | command::FLAG_FAST_ZERO,
                command::BLOCK_STATUS => command::FLAG_REQ_ONE,
                _ => 0,
            };
        if header.flags & !allowed != 0 {
            return Err(error::INVAL);
        }
        let (offset, length) = (header.offset, u64::from(header.length));
        match header.command {
            command::READ => {
                self.check(header, false)?;
                if header.length > PAYLOAD_BYTES_MAX {
                    return Err(error::INVAL);
                }
                Ok((Kind::Read, Operation::Read { offset, length: header.length }))
            }
            command::CACHE => {
                self.check(header, false)?;
                let length = header.length.min(PAYLOAD_BYTES_MAX);
                Ok((Kind::Cache, Operation::Read { offset, length }))
            }
            command::WRITE => {
                self.check(header, true)?;
                Ok((Kind::Change, Operation::Write { offset, data, fua }))
            }
            command::TRIM => {
                self.check(header, true)?;
                Ok((Kind::Change, Operation::Trim { offset, length, fua }))
            }
            command::WRITE_ZEROES => {
                self.check(header, true)?;
                let no_hole = header.flags & command::FLAG_NO_HOLE != 0;
                // A hole is one small entry, but keeping the blocks allocated may cost as much as
                // writing them; FAST_ZERO asks to refuse that.
                if no_hole && header.flags & command::FLAG_FAST_ZERO != 0 {
                    return Err(error::NOTSUP);
                }
                Ok((Kind::Change, Operation::WriteZeroes { offset, length, fua, no_hole }))
            }
            command::FLUSH => {
                if header.offset != 0 || header.length != 0 {
                    return Err(error::INVAL);
                }
                Ok((Kind::Flush, Operation::Flush))
            }
            command::BLOCK_STATUS if self.base_allocation => {
                self.check(header, false)?;
                let one = header.flags & command::FLAG_REQ_ONE != 0;
                Ok((Kind::Status { one }, Operation::Status { offset, length }))
            }
            _ => Err(error::INVAL),
        }
    }

    fn check(&self, header: &RequestHeader, changes: bool) -> Result<(), u32> {
        if changes && self.read_only {
            return Err(error_number(BlockError::ReadOnly, changes));
        }
        let block = u64::from(self.block_size);
        let length = u64::from(header.length);
        if length == 0 || !header.offset.is_multiple_of(block) || !length.is_multiple_of(block) {
            return Err(error_number(BlockError::Misaligned, changes));
        }
        match header.offset.checked_add(length) {
            Some(end) if end <= self.size_bytes => Ok(()),
            _ => Err(error_number(BlockError::OutOfRange, changes)),
        }
    }

    fn track(&mut self, header: &RequestHeader, kind: Kind, operation: Operation) -> Request {
        let payload = match &operation {
            Operation::Read { length, .. } => *length as usize,
            Operation::Write { data, .. } => data.len(),
            _ => 0,
        };
        let in_flight = InFlight {
            cookie: header.cookie,
            kind,
            offset: header.offset,
            payload,
            length: u64::from(header.length),
        };
        self.bytes_in_flight += payload;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.in_flight.push(None);
            self.in_flight.len() - 1
        });
        self.in_flight[slot] = Some(in_flight);
        Request { token: slot as u64, operation, origin: None }
    }

    pub(super) fn complete(&mut self, reply: Reply, output: &mut Vec<Bytes>) {
        // A token of no request in flight would be an error of the driver. The session must not
        // panic, and no answer does no harm.
        let Some(slot) = usize::try_from(reply.token).ok().filter(|s| *s < self.in_flight.len())
        else {
            return;
        };
        let Some(request) = self.in_flight[slot].take() else { return };
        self.free.push(slot);
        self.bytes_in_flight -= request.payload;
        match reply.result {
            Ok(payload) => self.succeed(request, payload, output),
            Err(error) => {
                let number = error_number(error, request.kind == Kind::Change);
                self.fail(request.cookie, request.kind, number, output);
            }
        }
    }

    fn succeed(&mut self, request: InFlight, payload: Payload, output: &mut Vec<Bytes>) {
        match (request.kind, payload) {
            (Kind::Read, Payload::Data(chunks)) => {
                let length: usize = chunks.iter().map(Bytes::len).sum();
                if length != request.payload {
                    // Sending them would shift every later reply.
                    return self.fail(request.cookie, request.kind, error::IO, output);
                }
                if self.structured {
                    self.chunk(request.cookie, chunk::OFFSET_DATA, 8 + length, 8);
                    self.headers.put_u64(request.offset);
                    output.push(self.headers.split().freeze());
                } else {
                    output.push(self.simple(request.cookie, 0));
                }
                output.extend(chunks.into_iter().filter(|chunk| !chunk.is_empty()));
            }
            (Kind::Status { one }, Payload::Status(extents)) => {
                match descriptors(&extents, request.length, one) {
                    Some(body) => {
                        self.chunk(request.cookie, chunk::BLOCK_STATUS, 4 + body.len(), 4);
                        self.headers.put_u32(BASE_ALLOCATION_ID);
                        output.push(self.headers.split().freeze());
                        output.push(body);
                    }
                    None => self.fail(request.cookie, request.kind, error::IO, output),
                }
            }
            (Kind::Cache | Kind::Change | Kind::Flush, _) => {
                output.push(self.simple(request.cookie, 0));
            }
            (Kind::Read | Kind::Status { .. }, _) => {
                self.fail(request.cookie, request.kind, error::IO, output);
            }
        }
    }

    fn refuse(&mut self, header: &RequestHeader, number: u32, output: &mut Vec<Bytes>) {
        let kind = match header.command {
            command::READ => Kind::Read,
            command::BLOCK_STATUS => Kind::Status { one: false },
            _ => Kind::Change,
        };
        self.fail(header.cookie, kind, number, output);
    }

    fn fail(&mut self, cookie: u64, kind: Kind, number: u32, output: &mut Vec<Bytes>) {
        if self.structured && matches!(kind, Kind::Read | Kind::Status { .. }) {
            self.chunk(cookie, chunk::ERROR, 6, 6);
            self.headers.put_u32(number);
            self.headers.put_u16(0);
            output.push(self.headers.split().freeze());
        } else {
            output.push(self.simple(cookie, number));
        }
    }

    fn simple(&mut self, cookie: u64, number: u32) -> Bytes {
        self.room(SIMPLE_REPLY_BYTES);
        self.headers.put_u32(SIMPLE_REPLY_MAGIC);
        self.headers.put_u32(number);
        self.headers.put_u64(cookie);
        self.headers.split().freeze()
    }

    /// Writes the header of the only, and so last, chunk of a reply: `body` bytes follow it, and
    /// the caller appends the first `more` of them in the same allocation.
    fn chunk(&mut self, cookie: u64, kind: u16, body: usize, more: usize) {
        self.room(CHUNK_HEADER_BYTES + more);
        self.headers.put_u32(STRUCTURED_REPLY_MAGIC);
        self.headers.put_u16(chunk::FLAG_DONE);
        self.headers.put_u16(kind);
        self.headers.put_u64(cookie);
        self.headers.put_u32(body as u32);
    }

    fn room(&mut self, bytes: usize) {
        if self.headers.capacity() < bytes {
            self.headers = BytesMut::with_capacity(HEADER_SLAB_BYTES);
        }
    }
}

/// Returns the descriptors of a block status answer; `None` if there are none.
///
/// Neighbours of one kind are merged, lengths beyond 32 bits are split, and no extent reaches
/// beyond the requested range.
fn descriptors(extents: &[StatusExtent], requested: u64, one: bool) -> Option<Bytes> {
    let mut merged: Vec<StatusExtent> = Vec::new();
    let mut left = requested;
    for extent in extents {
        let length = extent.length.min(left);
        left -= length;
        match merged.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.hole == extent.hole => last.length += length,
            _ => merged.push(StatusExtent { length, hole: extent.hole }),
        }
    }
    merged.truncate(if one { 1 } else { STATUS_EXTENTS_MAX });
    let mut body = BytesMut::with_capacity(merged.len() * 8);
    for extent in &merged {
        // A request's length has 32 bits, so the sum of its parts has as well.
        body.put_u32(u32::try_from(extent.length).ok()?);
        body.put_u32(if extent.hole { STATE_HOLE | STATE_ZERO } else { 0 });
    }
    (!body.is_empty()).then(|| body.freeze())
}
