//! Limits of the session at one below them, at them, and at one above; the last block, the last option, the last
//! extent; and what changes below an open session.

use bytes::{Buf, BufMut, Bytes};
use quoin_nbd::protocol::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, PAYLOAD_BYTES_MAX, RequestHeader, SIMPLE_REPLY_MAGIC,
    STRING_BYTES_MAX, STRUCTURED_REPLY_MAGIC, chunk, command, error, export, info, option, reply,
};
use quoin_nbd::{Limits, Session, TlsPolicy};
use quoin_types::block::{
    BlockError, DeviceInfo, Frontend, Operation, Payload, Reply, StatusExtent,
};

use crate::protocol::{Peer, SIZE, an_option, device, go, meta_query};

const BLOCK: u64 = 4096;
/// A volume on which the longest request of the protocol has room.
const LARGE: u64 = 1 << 36;

fn large() -> DeviceInfo {
    DeviceInfo { size_bytes: LARGE, ..device() }
}

/// Returns the error number with which a request is answered at once, or the operation that it becomes.
fn outcome(
    peer: &mut Peer,
    command: u16,
    flags: u16,
    offset: u64,
    length: u32,
) -> Result<Operation, u32> {
    peer.output.clear();
    let header = RequestHeader { flags, command, cookie: 77, offset, length };
    peer.feed(&header.encode()).unwrap();
    if command == command::WRITE {
        peer.feed(&vec![7; length as usize]).unwrap();
    }
    let Some(request) = peer.requests.pop() else {
        let magic = peer.output.get_u32();
        if magic == SIMPLE_REPLY_MAGIC {
            return Err(peer.output.get_u32());
        }
        assert_eq!(magic, STRUCTURED_REPLY_MAGIC);
        peer.output.advance(16);
        return Err(peer.output.get_u32());
    };
    peer.reply(request.token, Err(BlockError::Stopped));
    Ok(request.operation)
}

const COMMANDS: [u16; 7] = [
    command::READ,
    command::WRITE,
    command::FLUSH,
    command::TRIM,
    command::CACHE,
    command::WRITE_ZEROES,
    command::BLOCK_STATUS,
];

fn changes(command: u16) -> bool {
    matches!(command, command::WRITE | command::TRIM | command::WRITE_ZEROES)
}

/// The specification: flags that a command may have.
fn allowed(command: u16) -> u16 {
    let own = match command {
        command::READ => command::FLAG_DF,
        command::WRITE_ZEROES => command::FLAG_NO_HOLE | command::FLAG_FAST_ZERO,
        command::BLOCK_STATUS => command::FLAG_REQ_ONE,
        _ => 0,
    };
    own | command::FLAG_FUA
}

#[test]
fn every_command_takes_its_own_flags_and_refuses_every_other_one() {
    for command in COMMANDS {
        for flags in 0..64_u16 {
            let mut peer = Peer::ready(device(), true);
            let length = if command == command::FLUSH { 0 } else { BLOCK as u32 };
            let found = outcome(&mut peer, command, flags, 0, length);
            let what = format!("command {command} with flags {flags:#x}");
            let both = command::FLAG_NO_HOLE | command::FLAG_FAST_ZERO;
            let expected = match flags {
                _ if flags & !allowed(command) != 0 => Some(error::INVAL),
                _ if command == command::WRITE_ZEROES && flags & both == both => {
                    Some(error::NOTSUP)
                }
                _ => None,
            };
            assert_eq!(found.as_ref().err(), expected.as_ref(), "{what}");
            if let Ok(Operation::WriteZeroes { no_hole, .. }) = found {
                assert_eq!(no_hole, flags & command::FLAG_NO_HOLE != 0, "{what}");
            }
        }
    }
}

/// Each command over the end of a volume and its blocks, whether its client may write or not.
#[test]
fn the_last_block_is_reached_by_every_command_and_nothing_behind_it() {
    let rows: [(u64, u64, bool); 12] = [
        (0, BLOCK, true),
        (0, SIZE, true),
        (SIZE - BLOCK, BLOCK, true),
        (BLOCK, SIZE - BLOCK, true),
        (0, SIZE + BLOCK, false),
        (BLOCK, SIZE, false),
        (SIZE - BLOCK, 2 * BLOCK, false),
        (SIZE, BLOCK, false),
        (SIZE + BLOCK, BLOCK, false),
        (u64::MAX - BLOCK + 1, BLOCK, false),
        (u64::MAX - 2 * BLOCK + 1, BLOCK, false),
        (1 << 63, BLOCK, false),
    ];
    let misaligned = [
        (0, 0),
        (0, 1),
        (0, BLOCK - 1),
        (0, BLOCK + 1),
        (1, BLOCK),
        (BLOCK - 1, BLOCK),
        (BLOCK + 1, BLOCK),
        (SIZE, 0),
    ];
    for read_only in [false, true] {
        for structured in [false, true] {
            let mut peer = Peer::ready(DeviceInfo { read_only, ..device() }, structured);
            for command in COMMANDS {
                if command == command::FLUSH || command == command::BLOCK_STATUS && !structured {
                    continue;
                }
                let is_refused = read_only && changes(command);
                for (offset, length, is_within) in rows {
                    let found = outcome(&mut peer, command, 0, offset, length as u32);
                    let expected = match is_within {
                        _ if is_refused => Some(error::PERM),
                        true => None,
                        false if changes(command) => Some(error::NOSPC),
                        false => Some(error::INVAL),
                    };
                    let what = format!("command {command} at {offset} for {length}");
                    assert_eq!(found.err(), expected, "{what}");
                }
                for (offset, length) in misaligned {
                    let found = outcome(&mut peer, command, 0, offset, length as u32);
                    let expected = if is_refused { error::PERM } else { error::INVAL };
                    assert_eq!(found.err(), Some(expected), "{command} at {offset} for {length}");
                }
            }
            for (offset, length, number) in
                [(0, 0, None), (1, 0, Some(error::INVAL)), (0, 1, Some(error::INVAL))]
            {
                let found = outcome(&mut peer, command::FLUSH, 0, offset, length);
                assert_eq!(found.err(), number, "flush at {offset} for {length}");
            }
        }
    }
}

#[test]
fn the_longest_payload_is_taken_and_one_block_more_is_refused() {
    let max = PAYLOAD_BYTES_MAX;
    let mut peer = Peer::ready(large(), true);
    for length in [max - BLOCK as u32, max] {
        let read = outcome(&mut peer, command::READ, 0, LARGE - u64::from(length), length);
        assert_eq!(read, Ok(Operation::Read { offset: LARGE - u64::from(length), length }));
        let write = outcome(&mut peer, command::WRITE, 0, 0, length);
        assert!(
            matches!(write, Ok(Operation::Write { data, .. }) if data.len() == length as usize)
        );
    }
    let longer = max + BLOCK as u32;
    assert_eq!(outcome(&mut peer, command::READ, 0, 0, longer), Err(error::INVAL));
    // A hint is shortened instead.
    for length in [max, longer] {
        let hint = outcome(&mut peer, command::CACHE, 0, 0, length);
        assert_eq!(hint, Ok(Operation::Read { offset: 0, length: max }));
    }
    // No payload: lengths of 32 bits.
    let most = u32::MAX - (BLOCK as u32 - 1);
    for command in [command::TRIM, command::WRITE_ZEROES, command::BLOCK_STATUS] {
        let found = outcome(&mut peer, command, 0, 0, most);
        assert!(found.is_ok(), "command {command}: {found:?}");
    }
    let header =
        RequestHeader { flags: 0, command: command::WRITE, cookie: 77, offset: 0, length: longer };
    assert!(peer.feed(&header.encode()).is_err(), "what follows cannot be told from a request");
}

/// An option that is as long as it may be, with data that says nothing.
fn long_option(peer: &mut Peer, code: u32, length: usize) -> Result<u32, ()> {
    peer.output.clear();
    peer.feed(&an_option(code, &vec![0; length])).map_err(|_| ())?;
    Ok(peer.option_reply(code).0)
}

#[test]
fn options_are_read_up_to_their_limit_skipped_up_to_another_and_end_the_connection_beyond() {
    const UNKNOWN: u32 = 99;
    for (length, kind) in [
        ((16 << 10) - 1, Ok(reply::ERR_UNSUP)),
        (16 << 10, Ok(reply::ERR_UNSUP)),
        ((16 << 10) + 1, Ok(reply::ERR_TOO_BIG)),
        ((1 << 20) - 1, Ok(reply::ERR_TOO_BIG)),
        (1 << 20, Ok(reply::ERR_TOO_BIG)),
        ((1 << 20) + 1, Err(())),
    ] {
        let mut peer = Peer::new(device());
        peer.exchange_greeting();
        assert_eq!(long_option(&mut peer, UNKNOWN, length), kind, "{length} bytes");
        if kind.is_ok() {
            // The next option is found behind it.
            assert_eq!(peer.request_option(option::LIST, &[]).0, reply::SERVER, "{length} bytes");
        }
    }
    // EXPORT_NAME has no answer by which it could be refused.
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    assert!(peer.feed(&an_option(option::EXPORT_NAME, &vec![b'x'; (16 << 10) + 1])).is_err());

    for (options, is_taken) in [(255, true), (256, true), (257, false)] {
        let mut peer = Peer::new(device());
        peer.exchange_greeting();
        let outcome = peer.feed(&an_option(UNKNOWN, &[]).repeat(options));
        assert_eq!(outcome.is_ok(), is_taken, "{options} options");
        // Skipped ones count too.
        let mut peer = Peer::new(device());
        peer.exchange_greeting();
        let long = an_option(UNKNOWN, &vec![0; (16 << 10) + 1]);
        let outcome = (0..options).try_for_each(|_| peer.feed(&long));
        assert_eq!(outcome.is_ok(), is_taken, "{options} options that are skipped");
    }
}

#[test]
fn names_end_at_their_limit_and_lengths_that_do_not_add_up_are_refused() {
    let max = STRING_BYTES_MAX;
    for (length, kind) in
        [(max - 1, reply::ERR_UNKNOWN), (max, reply::ERR_UNKNOWN), (max + 1, reply::ERR_INVALID)]
    {
        let mut peer = Peer::new(device());
        peer.exchange_greeting();
        let name = "x".repeat(length);
        assert_eq!(peer.request_option(option::INFO, &go(&name, &[])).0, kind, "{length} bytes");
        let list = meta_query(&name, &[]);
        assert_eq!(peer.request_option(option::STRUCTURED_REPLY, &[]).0, reply::ACK);
        let found = peer.request_option(option::LIST_META_CONTEXT, &list).0;
        assert_eq!(found, kind, "{length} bytes");
        let query = meta_query("vol", &[&name]);
        let found = peer.request_option(option::LIST_META_CONTEXT, &query).0;
        let expected = if length > max { reply::ERR_INVALID } else { reply::ACK };
        assert_eq!(found, expected, "a query of {length} bytes");
    }
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    peer.request_option(option::STRUCTURED_REPLY, &[]);
    // One byte less and one more than the counts say.
    for (code, whole) in [
        (option::INFO, go("vol", &[info::NAME, info::DESCRIPTION])),
        (option::LIST_META_CONTEXT, meta_query("vol", &["base:allocation", "base:"])),
        (option::SET_META_CONTEXT, meta_query("vol", &["base:allocation"])),
    ] {
        for data in [&whole[..whole.len() - 1], &[&whole[..], b"x"].concat()] {
            assert_eq!(peer.request_option(code, data).0, reply::ERR_INVALID, "option {code}");
        }
    }
    for (code, data) in [
        (option::LIST, &b"x"[..]),
        (option::STARTTLS, b"x"),
        (option::STRUCTURED_REPLY, b"x"),
        (option::CLIENT, b"\0\0\0\x03vol"),
        (option::CLIENT, &[&b"\0\0\0\x03vol"[..], &[0; 15]].concat()),
        (option::CLIENT, &[&b"\0\0\0\x03vol"[..], &[0; 17]].concat()),
    ] {
        assert_eq!(peer.request_option(code, data).0, reply::ERR_INVALID, "option {code}");
    }
    // Without TLS there is nothing to prove.
    assert_eq!(peer.request_option(option::PROVE_KEY, &[0; 32]).0, reply::ERR_UNSUP);
}

#[test]
fn a_context_holds_for_the_export_that_it_was_set_for_until_it_is_set_anew() {
    let has_status = |options: &[(u32, Vec<u8>)]| {
        let mut peer = Peer::new(device());
        peer.exchange_greeting();
        for (code, data) in options {
            peer.feed(&an_option(*code, data)).unwrap();
        }
        peer.feed(&an_option(option::GO, &go("", &[]))).unwrap();
        peer.output.clear();
        outcome(&mut peer, command::BLOCK_STATUS, 0, 0, 4096).is_ok()
    };
    let structured = (option::STRUCTURED_REPLY, Vec::new());
    let set = (option::SET_META_CONTEXT, meta_query("vol", &["base:allocation"]));
    let listed = (option::LIST_META_CONTEXT, meta_query("vol", &["base:allocation"]));
    let none = (option::SET_META_CONTEXT, meta_query("vol", &[]));
    let prefix = (option::SET_META_CONTEXT, meta_query("vol", &["base:"]));
    let second = (option::SET_META_CONTEXT, meta_query("vol", &["x:y", "base:allocation"]));
    let other = (option::SET_META_CONTEXT, meta_query("other", &["base:allocation"]));
    let broken = (option::SET_META_CONTEXT, b"\0".to_vec());
    let is = |options: &[&(u32, Vec<u8>)]| {
        has_status(&options.iter().map(|one| (*one).clone()).collect::<Vec<_>>())
    };
    assert!(is(&[&structured, &set]) && is(&[&structured, &second]));
    assert!(is(&[&structured, &none, &set]) && is(&[&structured, &set, &listed]));
    assert!(!is(&[]) && !is(&[&set]) && !is(&[&set, &structured]));
    assert!(!is(&[&structured]) && !is(&[&structured, &listed]) && !is(&[&structured, &prefix]));
    for later in [&none, &prefix, &other, &broken] {
        assert!(!is(&[&structured, &set, later]), "{:?}", later.1);
    }
}

/// Returns the flags of an export, by either way to open it.
fn flags_of(read_only: bool, structured: bool, by_name: bool) -> u16 {
    let mut peer = Peer::new(DeviceInfo { read_only, ..device() });
    peer.exchange_greeting();
    if structured {
        peer.request_option(option::STRUCTURED_REPLY, &[]);
    }
    if by_name {
        peer.feed(&an_option(option::EXPORT_NAME, b"vol")).unwrap();
        assert_eq!(peer.output.get_u64(), SIZE);
        return peer.output.get_u16();
    }
    let (_, mut body) = peer.request_option(option::GO, &go("vol", &[]));
    assert_eq!((body.get_u16(), body.get_u64()), (info::EXPORT, SIZE));
    body.get_u16()
}

#[test]
fn an_export_says_all_that_it_serves_and_nothing_that_it_refuses() {
    let always = export::HAS_FLAGS
        | export::SEND_FLUSH
        | export::SEND_FUA
        | export::CAN_MULTI_CONN
        | export::SEND_CACHE;
    let of_writers = export::SEND_TRIM | export::SEND_WRITE_ZEROES | export::SEND_FAST_ZERO;
    for by_name in [false, true] {
        assert_eq!(flags_of(false, false, by_name), always | of_writers);
        assert_eq!(flags_of(false, true, by_name), always | of_writers | export::SEND_DF);
        assert_eq!(flags_of(true, false, by_name), always | export::READ_ONLY);
        assert_eq!(flags_of(true, true, by_name), always | export::READ_ONLY | export::SEND_DF);
    }
    for (block_size, preferred) in [(512, 4096), (4096, 4096)] {
        let mut peer = Peer::new(DeviceInfo { block_size, ..device() });
        peer.exchange_greeting();
        peer.request_option(option::GO, &go("vol", &[]));
        let (_, mut body) = peer.option_reply(option::GO);
        assert_eq!((body.get_u16(), body.get_u32(), body.get_u32()), (3, block_size, preferred));
    }
}

#[test]
fn handshake_flags_that_no_specification_has_end_the_connection() {
    let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    for flags in (0..32).map(|bit| 1_u32 << bit).chain([0, known]) {
        let mut peer = Peer::new(device());
        assert_eq!(peer.feed(&flags.to_be_bytes()).is_ok(), flags & !known == 0, "{flags:#x}");
    }
}

/// Answers of a volume with empty parts, in the middle and at the ends.
#[test]
fn empty_parts_of_an_answer_are_passed_over_and_its_last_part_is_not() {
    let bytes = |fill: u8, length: usize| Bytes::from(vec![fill; length]);
    let mut peer = Peer::ready(device(), false);
    let parts = [bytes(0, 0), bytes(1, 4096), bytes(0, 0), bytes(2, 4096), bytes(0, 0)];
    peer.request(command::READ, 0, 0, 8192).unwrap();
    let mut output = Vec::new();
    let reply = Reply { token: 0, result: Ok(Payload::Data(parts.to_vec())) };
    peer.session.complete(reply, &mut output);
    assert!(output.iter().all(|piece| !piece.is_empty()), "{output:?}");
    let whole = output.concat();
    assert_eq!((whole.len(), whole[16], whole[16 + 8191]), (16 + 8192, 1, 2));

    let extent = |length, hole| StatusExtent { length, hole };
    let told = |extents: &[StatusExtent], flags: u16| {
        let mut peer = Peer::ready(device(), true);
        peer.request(command::BLOCK_STATUS, flags, SIZE - 16384, 16384).unwrap();
        peer.reply(0, Ok(Payload::Status(extents.to_vec())));
        peer.output.advance(6);
        let kind = peer.output.get_u16();
        peer.output.advance(8);
        let length = peer.output.get_u32() as usize;
        let mut body = peer.output.split_to(length);
        if kind == chunk::ERROR {
            return Err(body.get_u32());
        }
        assert_eq!((kind, body.get_u32()), (chunk::BLOCK_STATUS, 1));
        let mut found = Vec::new();
        while body.has_remaining() {
            found.push((body.get_u32(), body.get_u32()));
        }
        Ok(found)
    };
    let one = command::FLAG_REQ_ONE;
    for (extents, flags, expected) in [
        (vec![extent(16384, true)], 0, Ok(vec![(16384, 3)])),
        (vec![extent(12288, true), extent(4096, false)], 0, Ok(vec![(12288, 3), (4096, 0)])),
        (vec![extent(12288, true), extent(4096, false)], one, Ok(vec![(12288, 3)])),
        (vec![extent(4096, true), extent(0, false), extent(12288, true)], 0, Ok(vec![(16384, 3)])),
        (vec![extent(0, false), extent(16384, true)], one, Ok(vec![(16384, 3)])),
        (vec![extent(4096, false), extent(12288, false)], one, Ok(vec![(16384, 0)])),
        (vec![extent(16384, false), extent(4096, true)], 0, Ok(vec![(16384, 0)])),
        (vec![extent(1 << 40, false)], 0, Ok(vec![(16384, 0)])),
        (vec![], 0, Err(error::IO)),
        (vec![extent(0, true)], 0, Err(error::IO)),
    ] {
        assert_eq!(told(&extents, flags), expected, "{extents:?}");
    }
}

/// An answer with as many extents as one may have, and with one more.
#[test]
fn a_status_has_as_many_extents_as_are_allowed_and_no_more() {
    const MAX: u64 = 64 << 10;
    for extents in [MAX - 1, MAX, MAX + 1] {
        let mut peer = Peer::ready(large(), true);
        let all = (0..extents).map(|n| StatusExtent { length: BLOCK, hole: n % 2 == 0 });
        peer.request(command::BLOCK_STATUS, 0, 0, (extents * BLOCK) as u32).unwrap();
        peer.reply(0, Ok(Payload::Status(all.collect())));
        peer.output.advance(16);
        let told = (u64::from(peer.output.get_u32()) - 4) / 8;
        assert_eq!(told, extents.min(MAX), "{extents} extents");
    }
}

#[test]
fn every_error_has_the_number_of_its_kind_of_request() {
    let errors = [
        (BlockError::OutOfRange, error::INVAL, error::NOSPC),
        (BlockError::Misaligned, error::INVAL, error::INVAL),
        (BlockError::Damaged, error::IO, error::IO),
        (BlockError::NoQuorum, error::IO, error::IO),
        (BlockError::NoSpace, error::NOSPC, error::NOSPC),
        (BlockError::ReadOnly, error::PERM, error::PERM),
        (BlockError::Stopped, error::SHUTDOWN, error::SHUTDOWN),
        (BlockError::NoClient, error::STALE, error::STALE),
        (BlockError::OutOfWindow, error::STALE, error::STALE),
    ];
    for structured in [false, true] {
        let mut peer = Peer::ready(device(), structured);
        for command in COMMANDS {
            if command == command::BLOCK_STATUS && !structured {
                continue;
            }
            let (length, has_chunks) = match command {
                command::FLUSH => (0, false),
                command::READ | command::BLOCK_STATUS => (4096, structured),
                _ => (4096, false),
            };
            for (reason, of_others, of_changes) in errors {
                peer.output.clear();
                let header = RequestHeader { flags: 0, command, cookie: 77, offset: 0, length };
                peer.feed(&header.encode()).unwrap();
                if command == command::WRITE {
                    peer.feed(&[7; 4096]).unwrap();
                }
                let token = peer.requests.pop().unwrap().token;
                peer.reply(token, Err(reason));
                let number = match has_chunks {
                    true => {
                        assert_eq!(peer.output.get_u32(), STRUCTURED_REPLY_MAGIC);
                        peer.output.advance(16);
                        peer.output.get_u32()
                    }
                    false => {
                        assert_eq!(peer.output.get_u32(), SIMPLE_REPLY_MAGIC);
                        peer.output.get_u32()
                    }
                };
                let expected = if changes(command) { of_changes } else { of_others };
                assert_eq!(number, expected, "command {command}: {reason}");
            }
        }
    }
}

#[test]
fn a_session_takes_one_more_request_below_its_limits_and_none_at_them() {
    let read = |length: u32| {
        let command = command::READ;
        RequestHeader { flags: 0, command, cookie: 77, offset: 0, length }.encode()
    };
    for bytes_max in [8191, 8192, 8193] {
        let limits = Limits { requests_in_flight_max: 100, bytes_in_flight_max: bytes_max };
        let mut peer = Peer::with(Session::with_limits(device(), TlsPolicy::Plain, limits));
        peer.exchange_greeting();
        peer.feed(&an_option(option::GO, &go("", &[]))).unwrap();
        for _ in 0..4 {
            peer.feed(&read(4096)).unwrap();
        }
        assert_eq!(peer.requests.len(), if bytes_max == 8193 { 3 } else { 2 }, "{bytes_max}");
        // Another limit while it is open: what waits goes on at once, or not before the answers.
        peer.session.set_held_bytes_max(4 * 4096);
        assert!(peer.session.wants_input());
        peer.feed(&[]).unwrap();
        assert_eq!((peer.requests.len(), peer.session.held_bytes()), (4, 4 * 4096));
        assert!(!peer.session.wants_input());
        peer.session.set_held_bytes_max(4096);
        let (first, second) = (peer.requests.remove(0), peer.requests.remove(0));
        peer.reply(first.token, Err(BlockError::Damaged));
        peer.reply(second.token, Err(BlockError::Damaged));
        assert!(!peer.session.wants_input());
    }
}

/// A late answer: the request has one already, or none of this token was asked.
#[test]
fn an_answer_to_no_request_in_flight_says_nothing() {
    let mut peer = Peer::ready(device(), false);
    peer.request(command::FLUSH, 0, 0, 0).unwrap();
    peer.reply(0, Ok(Payload::None));
    peer.output.clear();
    for token in [0, 1, u64::MAX] {
        peer.reply(token, Ok(Payload::None));
        assert!(peer.output.is_empty(), "token {token}");
    }
    assert!(peer.request(command::READ, 0, 0, 4096).is_some());
    assert_eq!(peer.session.held_bytes(), 4096);
    // Of another kind than was asked for.
    peer.reply(0, Ok(Payload::None));
    assert_eq!((peer.output.get_u32(), peer.output.get_u32()), (SIMPLE_REPLY_MAGIC, error::IO));
}

#[test]
fn a_volume_that_grows_below_a_session_keeps_its_last_block_at_the_new_end() {
    let mut peer = Peer::ready(device(), false);
    for size_bytes in [SIZE + BLOCK, 2 * SIZE] {
        peer.session.device_changed(&DeviceInfo { size_bytes, ..device() });
        let last = outcome(&mut peer, command::READ, 0, size_bytes - BLOCK, BLOCK as u32);
        assert!(last.is_ok());
        let behind = outcome(&mut peer, command::READ, 0, size_bytes, BLOCK as u32);
        assert_eq!(behind, Err(error::INVAL));
    }
    // A client that negotiates meanwhile is told the new size.
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    peer.session.device_changed(&DeviceInfo { size_bytes: 2 * SIZE, ..device() });
    let (_, mut body) = peer.request_option(option::GO, &go("vol", &[]));
    assert_eq!((body.get_u16(), body.get_u64()), (info::EXPORT, 2 * SIZE));
    let mut list = Vec::new();
    list.put_u32(3);
    list.put_slice(b"vol");
    let mut peer = Peer::new(device());
    peer.exchange_greeting();
    assert_eq!(peer.request_option(option::LIST, &[]).1[..], list);
}
