//! The server session byte by byte: the specification, and attempts of hostile clients.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use proptest::prelude::*;
use quoin_nbd::protocol::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    PAYLOAD_BYTES_MAX, RequestHeader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command,
    error, export, info, option, reply,
};
use quoin_nbd::{Limits, Session, TlsPolicy};
use quoin_testkit::nbd_server::MemoryVolume;
use quoin_types::block::{
    BlockError, Closed, DeviceInfo, Frontend, Operation, Payload, Reply, Request, StatusExtent,
};

pub const SIZE: u64 = 1 << 20;

pub fn device() -> DeviceInfo {
    DeviceInfo { name: "vol".into(), size_bytes: SIZE, block_size: 4096, read_only: false }
}

/// A session, its output, and its requests.
pub struct Peer {
    pub session: Session,
    pub input: BytesMut,
    pub requests: Vec<Request>,
    pub output: BytesMut,
}

impl Peer {
    pub fn new(device: DeviceInfo) -> Self {
        Self::with(Session::new(device, TlsPolicy::Plain))
    }

    pub fn with(session: Session) -> Self {
        Self { session, input: BytesMut::new(), requests: Vec::new(), output: BytesMut::new() }
    }

    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Closed> {
        self.input.extend_from_slice(bytes);
        let mut output = Vec::new();
        let result = self.session.receive(&mut self.input, &mut self.requests, &mut output);
        output.iter().for_each(|bytes| self.output.extend_from_slice(bytes));
        result
    }

    pub fn reply(&mut self, token: u64, result: Result<Payload, BlockError>) {
        let mut output = Vec::new();
        self.session.complete(Reply { token, result }, &mut output);
        output.iter().for_each(|bytes| self.output.extend_from_slice(bytes));
    }

    pub fn exchange_greeting(&mut self) {
        self.feed(&[]).unwrap();
        assert_eq!(self.output.get_u64(), MAGIC);
        assert_eq!(self.output.get_u64(), OPTION_MAGIC);
        assert_eq!(self.output.get_u16(), FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        self.feed(&3u32.to_be_bytes()).unwrap();
    }

    /// The type and body of the next option reply.
    pub fn option_reply(&mut self, code: u32) -> (u32, Bytes) {
        assert_eq!(self.output.get_u64(), OPTION_REPLY_MAGIC);
        assert_eq!(self.output.get_u32(), code);
        let (kind, length) = (self.output.get_u32(), self.output.get_u32());
        (kind, self.output.split_to(length as usize).freeze())
    }

    pub fn request_option(&mut self, code: u32, data: &[u8]) -> (u32, Bytes) {
        self.feed(&an_option(code, data)).unwrap();
        self.option_reply(code)
    }

    /// A session after the negotiation, with nothing left to read.
    pub fn ready(device: DeviceInfo, structured: bool) -> Self {
        let mut peer = Self::new(device);
        peer.exchange_greeting();
        if structured {
            assert_eq!(peer.request_option(option::STRUCTURED_REPLY, &[]).0, reply::ACK);
            let set = meta_query("vol", &["base:allocation"]);
            assert_eq!(peer.request_option(option::SET_META_CONTEXT, &set).0, reply::META_CONTEXT);
            assert_eq!(peer.option_reply(option::SET_META_CONTEXT).0, reply::ACK);
        }
        peer.feed(&an_option(option::GO, &go("vol", &[]))).unwrap();
        while peer.option_reply(option::GO).0 != reply::ACK {}
        assert!(peer.output.is_empty());
        peer
    }

    pub fn request(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
    ) -> Option<Operation> {
        let header = RequestHeader { flags, command, cookie: 77, offset, length };
        self.feed(&header.encode()).unwrap();
        self.requests.pop().map(|request| request.operation)
    }

    pub fn simple_error(&mut self) -> u32 {
        assert_eq!(self.output.get_u32(), SIMPLE_REPLY_MAGIC);
        let number = self.output.get_u32();
        assert_eq!(self.output.get_u64(), 77);
        number
    }
}

pub fn an_option(code: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.put_u64(OPTION_MAGIC);
    bytes.put_u32(code);
    bytes.put_u32(data.len() as u32);
    bytes.put_slice(data);
    bytes
}

pub fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.put_u32(name.len() as u32);
    bytes.put_slice(name.as_bytes());
    bytes.put_u16(wanted.len() as u16);
    wanted.iter().for_each(|kind| bytes.put_u16(*kind));
    bytes
}

pub fn meta_query(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.put_u32(name.len() as u32);
    bytes.put_slice(name.as_bytes());
    bytes.put_u32(queries.len() as u32);
    for query in queries {
        bytes.put_u32(query.len() as u32);
        bytes.put_slice(query.as_bytes());
    }
    bytes
}

#[test]
fn go_answers_size_flags_block_sizes_and_other_requested_information() {
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    peer.feed(&an_option(option::GO, &go("vol", &[info::NAME, info::DESCRIPTION]))).unwrap();
    let (kind, mut body) = peer.option_reply(option::GO);
    assert_eq!((kind, body.get_u16(), body.get_u64()), (reply::INFO, info::EXPORT, SIZE));
    let flags = body.get_u16();
    assert_ne!(flags & export::CAN_MULTI_CONN, 0);
    assert_eq!(flags & (export::READ_ONLY | export::SEND_DF), 0);
    let (_, mut body) = peer.option_reply(option::GO);
    assert_eq!(body.get_u16(), info::BLOCK_SIZE);
    assert_eq!((body.get_u32(), body.get_u32(), body.get_u32()), (4096, 4096, 32 << 20));
    assert_eq!(&peer.option_reply(option::GO).1[2..], b"vol");
    assert_eq!(&peer.option_reply(option::GO).1[2..], b"Quoin volume");
    assert_eq!(peer.option_reply(option::GO).0, reply::ACK);
}

#[test]
fn export_name_opens_the_export_with_and_without_its_zeroes() {
    for (client_flags, length) in [(3u32, 10), (1, 134)] {
        let mut peer = Peer::new(device());
        peer.feed(&client_flags.to_be_bytes()).unwrap();
        peer.output.clear();
        peer.feed(&an_option(option::EXPORT_NAME, b"")).unwrap();
        assert_eq!(peer.output.len(), length);
        assert_eq!(peer.output.get_u64(), SIZE);
        peer.output.clear();
        assert_eq!(peer.request(command::FLUSH, 0, 0, 0), Some(Operation::Flush));
    }
}

#[test]
fn unknown_and_malformed_options_are_refused_and_negotiation_continues() {
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    assert_eq!(peer.request_option(99, b"whatever").0, reply::ERR_UNSUP);
    assert_eq!(peer.request_option(option::LIST, b"x").0, reply::ERR_INVALID);
    assert_eq!(peer.request_option(option::GO, b"").0, reply::ERR_INVALID);
    assert_eq!(peer.request_option(option::GO, &[0xff; 40]).0, reply::ERR_INVALID);
    assert_eq!(peer.request_option(option::INFO, &go("other", &[])).0, reply::ERR_UNKNOWN);
    assert_eq!(peer.request_option(option::STARTTLS, &[]).0, reply::ERR_POLICY);
    let query = meta_query("vol", &["base:allocation"]);
    assert_eq!(peer.request_option(option::SET_META_CONTEXT, &query).0, reply::ERR_INVALID);
    assert_eq!(peer.request_option(option::LIST, &vec![0; 100_000]).0, reply::ERR_TOO_BIG);
    let (kind, body) = peer.request_option(option::LIST, &[]);
    assert_eq!((kind, &body[..]), (reply::SERVER, b"\0\0\0\x03vol".as_slice()));
    assert_eq!(peer.option_reply(option::LIST).0, reply::ACK);
    assert_eq!(peer.request_option(option::STRUCTURED_REPLY, &[]).0, reply::ACK);
    let listed = peer.request_option(option::LIST_META_CONTEXT, &meta_query("vol", &[]));
    assert_eq!(&listed.1[4..], b"base:allocation");
    assert_eq!(peer.option_reply(option::LIST_META_CONTEXT).0, reply::ACK);
    let none = meta_query("vol", &["qemu:dirty-bitmap:x"]);
    assert_eq!(peer.request_option(option::SET_META_CONTEXT, &none).0, reply::ACK);
}

#[test]
fn abort_is_acknowledged_and_ends_the_session() {
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    assert!(peer.feed(&an_option(option::ABORT, &[])).is_err());
    assert_eq!(peer.option_reply(option::ABORT).0, reply::ACK);
    assert!(peer.feed(&an_option(option::LIST, &[])).is_err());
}

#[test]
fn a_write_takes_its_payload_from_the_receive_buffer_without_copying() {
    let mut peer = Peer::ready(device(), false);
    let header =
        RequestHeader { flags: 1, command: command::WRITE, cookie: 77, offset: 4096, length: 8192 };
    peer.input.reserve(28 + 8192);
    peer.input.put_slice(&header.encode());
    peer.input.put_bytes(0xab, 8192);
    let place = peer.input[28..].as_ptr();
    peer.feed(&[]).unwrap();
    let request = peer.requests.pop().unwrap();
    let Operation::Write { offset: 4096, data, fua: true } = request.operation else {
        panic!("{request:?}")
    };
    assert_eq!((data.as_ptr(), data.len()), (place, 8192));
    peer.reply(request.token, Ok(Payload::None));
    assert_eq!(peer.simple_error(), 0);
}

#[test]
fn a_changing_command_is_durable_first_if_and_only_if_fua_was_requested() {
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        for fua_requested in [false, true] {
            for other in [0, command::FLAG_NO_HOLE] {
                if other != 0 && command != command::WRITE_ZEROES {
                    continue;
                }
                let mut peer = Peer::ready(device(), false);
                let flags = if fua_requested { command::FLAG_FUA | other } else { other };
                let header = RequestHeader { flags, command, cookie: 77, offset: 0, length: 4096 };
                peer.feed(&header.encode()).unwrap();
                if command == command::WRITE {
                    peer.feed(&[7; 4096]).unwrap();
                }
                let operation = peer.requests.pop().map(|request| request.operation);
                let fua = match operation {
                    Some(Operation::Write { fua, .. }) if command == command::WRITE => fua,
                    Some(Operation::Trim { fua, .. }) if command == command::TRIM => fua,
                    Some(Operation::WriteZeroes { fua, .. })
                        if command == command::WRITE_ZEROES =>
                    {
                        fua
                    }
                    other => panic!("command {command} was parsed as {other:?}"),
                };
                assert_eq!(fua, fua_requested, "command {command} with flags {flags}");
            }
        }
    }
}

#[test]
fn a_structured_read_is_one_chunk_and_its_error_is_a_chunk_too() {
    let mut peer = Peer::ready(device(), true);
    peer.request(command::READ, command::FLAG_DF, 8192, 8192).unwrap();
    let parts = vec![Bytes::from(vec![1; 4096]), Bytes::from(vec![2; 4096])];
    peer.reply(0, Ok(Payload::Data(parts)));
    assert_eq!(peer.output.get_u32(), STRUCTURED_REPLY_MAGIC);
    assert_eq!((peer.output.get_u16(), peer.output.get_u16()), (1, chunk::OFFSET_DATA));
    assert_eq!((peer.output.get_u64(), peer.output.get_u32()), (77, 8200));
    assert_eq!(peer.output.get_u64(), 8192);
    assert_eq!(peer.output.split_to(8192)[4095..4097], [1, 2]);
    assert!(peer.output.is_empty());

    peer.request(command::READ, 0, 0, 4096).unwrap();
    peer.reply(0, Err(BlockError::Damaged));
    assert_eq!(peer.output.get_u32(), STRUCTURED_REPLY_MAGIC);
    assert_eq!((peer.output.get_u16(), peer.output.get_u16()), (1, chunk::ERROR));
    assert_eq!((peer.output.get_u64(), peer.output.get_u32()), (77, 6));
    assert_eq!((peer.output.get_u32(), peer.output.get_u16()), (error::IO, 0));
    assert!(peer.output.is_empty());
}

#[test]
fn block_status_merges_neighbours_and_stays_within_the_request() {
    let mut peer = Peer::ready(device(), true);
    let extents = vec![
        StatusExtent { length: 4096, hole: false },
        StatusExtent { length: 4096, hole: false },
        StatusExtent { length: 1 << 40, hole: true },
    ];
    for (flags, expected) in
        [(0, vec![(8192, 0), (8192, 3)]), (command::FLAG_REQ_ONE, vec![(8192, 0)])]
    {
        peer.request(command::BLOCK_STATUS, flags, 0, 16384).unwrap();
        peer.reply(0, Ok(Payload::Status(extents.clone())));
        peer.output.advance(6);
        assert_eq!(peer.output.get_u16(), chunk::BLOCK_STATUS);
        assert_eq!(peer.output.get_u64(), 77);
        assert_eq!(peer.output.get_u32() as usize, 4 + 8 * expected.len());
        assert_eq!(peer.output.get_u32(), 1);
        for pair in expected {
            assert_eq!((peer.output.get_u32(), peer.output.get_u32()), pair);
        }
        assert!(peer.output.is_empty());
    }
}

#[test]
fn invalid_requests_are_refused_with_the_error_numbers_of_the_protocol() {
    let mut peer = Peer::ready(device(), false);
    for (command, flags, offset, length, number) in [
        (command::READ, 0, SIZE, 4096, error::INVAL),
        (command::READ, 0, u64::MAX - 4095, 4096, error::INVAL),
        (command::READ, 0, 0, 0, error::INVAL),
        (command::READ, 0, 512, 4096, error::INVAL),
        (command::READ, 0, 0, 4095, error::INVAL),
        (command::READ, command::FLAG_REQ_ONE, 0, 4096, error::INVAL),
        (command::TRIM, 0, 0, SIZE as u32 + 4096, error::NOSPC),
        (command::WRITE_ZEROES, 0, SIZE - 4096, 8192, error::NOSPC),
        (command::WRITE_ZEROES, 0x12, 0, 4096, error::NOTSUP),
        (command::BLOCK_STATUS, 0, 0, 4096, error::INVAL),
        (command::FLUSH, 0, 4096, 0, error::INVAL),
        (99, 0, 0, 4096, error::INVAL),
    ] {
        assert_eq!(peer.request(command, flags, offset, length), None);
        assert_eq!(peer.simple_error(), number, "{command} {flags} {offset} {length}");
    }
    assert_eq!(
        peer.request(command::WRITE_ZEROES, command::FLAG_FAST_ZERO, 0, 4096),
        Some(Operation::WriteZeroes { offset: 0, length: 4096, fua: false, no_hole: false })
    );
}

#[test]
fn the_payload_of_a_refused_write_is_consumed() {
    let read_only = DeviceInfo { read_only: true, ..device() };
    let mut peer = Peer::ready(read_only, false);
    let header =
        RequestHeader { flags: 0, command: command::WRITE, cookie: 77, offset: 0, length: 4096 };
    peer.feed(&header.encode()).unwrap();
    peer.feed(&[0xff; 4096]).unwrap();
    assert_eq!(peer.simple_error(), error::PERM);
    assert!(peer.requests.is_empty());
    assert!(peer.request(command::READ, 0, 0, 4096).is_some());
}

#[test]
fn every_block_error_has_its_number() {
    let mut peer = Peer::ready(device(), false);
    for (error, number) in [
        (BlockError::OutOfRange, error::NOSPC),
        (BlockError::Misaligned, error::INVAL),
        (BlockError::Damaged, error::IO),
        (BlockError::NoQuorum, error::IO),
        (BlockError::NoSpace, error::NOSPC),
        (BlockError::ReadOnly, error::PERM),
        (BlockError::Stopped, error::SHUTDOWN),
    ] {
        peer.request(command::TRIM, 0, 0, 4096).unwrap();
        peer.reply(0, Err(error));
        assert_eq!(peer.simple_error(), number, "{error}");
    }
}

#[test]
fn a_read_of_the_wrong_length_is_an_error_and_never_shifts_the_stream() {
    let mut peer = Peer::ready(device(), false);
    peer.request(command::READ, 0, 0, 8192).unwrap();
    peer.reply(0, Ok(Payload::Data(vec![Bytes::from(vec![0; 4096])])));
    assert_eq!(peer.simple_error(), error::IO);
    assert!(peer.output.is_empty());
}

#[test]
fn a_grown_volume_takes_requests_beyond_its_old_end_at_once() {
    let mut peer = Peer::ready(device(), false);
    assert!(peer.request(command::READ, 0, SIZE, 4096).is_none());
    peer.session.device_changed(&DeviceInfo { size_bytes: 2 * SIZE, ..device() });
    assert!(peer.request(command::READ, 0, SIZE, 4096).is_some());
}

#[test]
fn a_client_that_may_only_read_goes_on_so_when_the_volume_grows_for_one_that_writes() {
    let reads_only = |read_only| DeviceInfo { read_only, ..device() };
    for (own, others) in [(true, false), (false, true)] {
        let mut peer = Peer::ready(reads_only(own), false);
        peer.session.device_changed(&DeviceInfo { size_bytes: 2 * SIZE, ..reads_only(others) });
        assert_eq!(peer.request(command::TRIM, 0, SIZE, 4096).is_none(), own);
        assert_eq!(peer.session.device().unwrap().read_only, own);
    }
}

#[test]
fn a_session_at_its_limits_accepts_no_more_until_replies_were_sent() {
    let limits = Limits { requests_in_flight_max: 4, bytes_in_flight_max: 64 << 10 };
    let read = |length| {
        RequestHeader { flags: 0, command: command::READ, cookie: 77, offset: 0, length }.encode()
    };
    for (length, expected) in [(4096, 4), (32768, 2), (1 << 20, 1)] {
        let mut peer = Peer::with(Session::with_limits(device(), TlsPolicy::Plain, limits));
        peer.exchange_greeting();
        peer.feed(&an_option(option::GO, &go("", &[]))).unwrap();
        for _ in 0..9 {
            peer.feed(&read(length)).unwrap();
        }
        assert!(!peer.session.wants_input());
        let mut completed = 0;
        while let Some(request) = peer.requests.pop() {
            completed += 1;
            assert!(completed > 1 || peer.requests.len() + 1 == expected);
            peer.reply(request.token, Err(BlockError::Damaged));
            peer.feed(&[]).unwrap();
        }
        assert_eq!(completed, 9);
        assert!(peer.session.wants_input() && peer.input.is_empty());
    }
}

#[test]
fn a_session_counts_the_bytes_of_a_request_until_its_reply() {
    let mut peer = Peer::ready(device(), true);
    assert_eq!(peer.session.held_bytes(), 0);
    assert!(peer.request(command::READ, 0, 0, 8192).is_some());
    assert_eq!(peer.session.held_bytes(), 8192);
    peer.request(command::FLUSH, 0, 0, 0).unwrap();
    assert_eq!(peer.session.held_bytes(), 8192);
    // The first request of a session has this token.
    peer.reply(0, Err(BlockError::Damaged));
    assert_eq!(peer.session.held_bytes(), 0);
}

#[test]
fn absurd_lengths_close_the_connection_instead_of_taking_memory() {
    let mut peer = Peer::ready(device(), false);
    let length = PAYLOAD_BYTES_MAX + 1;
    let header = RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length };
    assert!(peer.feed(&header.encode()).is_err());

    let mut peer = Peer::ready(device(), false);
    let length = PAYLOAD_BYTES_MAX;
    let header = RequestHeader { length, ..header };
    peer.feed(&header.encode()).unwrap();
    assert!(
        peer.input.capacity() < 4 << 20,
        "a header alone reserved {} bytes",
        peer.input.capacity()
    );

    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    let mut oversized = an_option(option::LIST, &[]);
    oversized[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(peer.feed(&oversized).is_err());

    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    let endless = an_option(option::LIST, &[]).repeat(10_000);
    assert!(peer.feed(&endless).is_err());
    assert!(peer.output.len() < 1 << 20);
}

/// A whole well-formed session of a client.
fn client_bytes(structured: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    if structured {
        bytes.extend(an_option(option::STRUCTURED_REPLY, &[]));
        bytes.extend(an_option(option::SET_META_CONTEXT, &meta_query("vol", &["base:allocation"])));
    }
    bytes.extend(an_option(option::GO, &go("vol", &[info::BLOCK_SIZE])));
    for number in 0..6u64 {
        for (command, length) in [
            (command::WRITE, 8192),
            (command::READ, 16384),
            (command::FLUSH, 0),
            (command::TRIM, 4096),
            (command::BLOCK_STATUS, 65536),
            (command::WRITE_ZEROES, 12288),
        ] {
            let offset = if length == 0 { 0 } else { number * 40960 };
            let cookie = number << 8 | u64::from(command);
            bytes.extend(RequestHeader { flags: 0, command, cookie, offset, length }.encode());
            if command == command::WRITE {
                bytes.put_bytes(number as u8 + 1, length as usize);
            }
        }
    }
    bytes
}

/// Drives a session with these pieces over a volume in memory. Returns its requests to the volume
/// and the length of its output (refusals overtake other replies, so the order may differ).
fn feed_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Operation>, usize) {
    let mut operations = Vec::new();
    let mut peer = Peer::new(device());
    let mut volume = MemoryVolume::new(SIZE as usize);
    for piece in pieces {
        let mut result = peer.feed(piece);
        loop {
            let idle = peer.requests.is_empty();
            for request in std::mem::take(&mut peer.requests) {
                let answer = volume.apply(&request.operation);
                peer.reply(request.token, answer);
                operations.push(request.operation);
            }
            if result.is_err() || idle {
                break;
            }
            result = peer.feed(&[]);
        }
        if result.is_err() {
            break;
        }
        let bound = PAYLOAD_BYTES_MAX as usize + 28 + piece.len();
        assert!(peer.input.len() <= bound, "the session keeps more input than one request");
    }
    (operations, peer.output.len())
}

fn split<'a>(mut bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    for length in lengths.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        let (piece, rest) = bytes.split_at((*length).min(bytes.len()));
        pieces.push(piece);
        bytes = rest;
    }
    pieces
}

proptest! {
    #[test]
    fn the_split_of_the_input_into_pieces_has_no_effect(
        structured: bool,
        lengths in proptest::collection::vec(1usize..5000, 1..20),
    ) {
        let bytes = client_bytes(structured);
        let whole = feed_pieces([&bytes[..]]);
        prop_assert!(whole.0.len() >= 30 && whole.1 > 98_000);
        prop_assert_eq!(feed_pieces(split(&bytes, &lengths)), whole);
    }

    #[test]
    fn no_bytes_make_it_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..2000),
        lengths in proptest::collection::vec(1usize..300, 1..5),
    ) {
        feed_pieces(split(&bytes, &lengths));
        let mut after_greeting = 3u32.to_be_bytes().to_vec();
        after_greeting.extend(&bytes);
        feed_pieces(split(&after_greeting, &lengths));
    }

    #[test]
    fn no_changed_conversation_makes_it_panic(
        structured: bool,
        changes in proptest::collection::vec((0usize..60_000, any::<u8>()), 1..12),
        removed in 0usize..200,
        lengths in proptest::collection::vec(1usize..3000, 1..5),
    ) {
        let mut bytes = client_bytes(structured);
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.drain(removed..removed * 2);
        feed_pieces(split(&bytes, &lengths));
    }

    /// The important bytes are few and early: those are changed more often.
    #[test]
    fn no_changed_negotiation_makes_it_panic(
        structured: bool,
        changes in proptest::collection::vec((0usize..160, any::<u8>()), 1..6),
    ) {
        let mut bytes = client_bytes(structured);
        for (at, value) in changes {
            bytes[at] = value;
        }
        feed_pieces([&bytes[..]]);
    }
}
