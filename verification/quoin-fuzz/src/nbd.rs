//! An NBD client that sends anything, in pieces of any length.

use bytes::{Bytes, BytesMut};
use quoin_nbd::protocol::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, OPTION_MAGIC, RequestHeader, option,
};
use quoin_nbd::{Limits, Session, TlsPolicy};
use quoin_types::block::{
    BlockError, DeviceInfo, Frontend, Operation, Payload, Reply, Request, StatusExtent,
};

const SIZE_BYTES: u64 = 1 << 20;
const LIMITS: Limits = Limits { requests_in_flight_max: 16, bytes_in_flight_max: 1 << 20 };
/// Largest answer to one input: each request reads at most the volume, and takes about 28 bytes of
/// the input.
const OUTPUT_BYTES_MAX: usize = 1 << 30;

/// The first byte chooses in which pieces the rest arrives.
pub fn run(input: &[u8]) {
    let Some((piece, rest)) = input.split_first() else { return };
    let device =
        DeviceInfo { name: "v".into(), size_bytes: SIZE_BYTES, block_size: 512, read_only: false };
    let mut session = Session::with_limits(device, TlsPolicy::Plain, LIMITS);
    let (mut buffer, mut requests, mut output) = (BytesMut::new(), Vec::new(), Vec::new());
    let mut said = 0;
    if session.receive(&mut buffer, &mut requests, &mut output).is_err() {
        return;
    }
    for piece in rest.chunks(usize::from(*piece) + 1) {
        buffer.extend_from_slice(piece);
        loop {
            let taken = session.receive(&mut buffer, &mut requests, &mut output);
            assert!(
                requests.len() <= LIMITS.requests_in_flight_max,
                "more requests in flight than the session may have"
            );
            let waited = !session.wants_input();
            for request in requests.drain(..) {
                session.complete(answer(request), &mut output);
            }
            said += output.drain(..).map(|bytes| bytes.len()).sum::<usize>();
            assert!(said < OUTPUT_BYTES_MAX, "answers without end");
            if taken.is_err() {
                return;
            }
            if !waited {
                break;
            }
        }
    }
}

fn answer(request: Request) -> Reply {
    let inside = |offset: u64, length: u64| {
        let end = offset.checked_add(length).expect("the session checks ranges");
        assert!(end <= SIZE_BYTES, "a request beyond the volume's end was submitted");
    };
    let result = match request.operation {
        Operation::Read { offset, length } => {
            inside(offset, u64::from(length));
            if offset.is_multiple_of(1024) {
                Ok(Payload::Data(vec![Bytes::from(vec![0; length as usize])]))
            } else {
                Err(BlockError::Damaged)
            }
        }
        Operation::Write { offset, data, .. } => {
            inside(offset, data.len() as u64);
            Ok(Payload::None)
        }
        Operation::Flush => Ok(Payload::None),
        Operation::Trim { offset, length, .. } | Operation::WriteZeroes { offset, length, .. } => {
            inside(offset, length);
            Err(BlockError::NoSpace)
        }
        Operation::Status { offset, length } => {
            inside(offset, length);
            Ok(Payload::Status(vec![StatusExtent { length, hole: true }]))
        }
    };
    Reply { token: request.token, result }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let option = |code: u32, data: &[u8]| {
        let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
        out.extend_from_slice(&code.to_be_bytes());
        out.extend_from_slice(&(data.len() as u32).to_be_bytes());
        out.extend_from_slice(data);
        out
    };
    let flags = (u32::from(FLAG_FIXED_NEWSTYLE) | u32::from(FLAG_NO_ZEROES)).to_be_bytes();
    // The name's length, the name, no information asked for.
    let go = option(option::GO, &[0, 0, 0, 1, b'v', 0, 0]);
    let structured = option(option::STRUCTURED_REPLY, &[]);
    let context = [&[0, 0, 0, 1, b'v', 0, 0, 0, 1, 0, 0, 0, 15][..], b"base:allocation"].concat();
    let context = option(option::SET_META_CONTEXT, &context);
    let mut requests = Vec::new();
    for command in 0..8u16 {
        let length = if command == 1 { 512 } else { 4096 };
        let header = RequestHeader { flags: 0, command, cookie: command.into(), offset: 0, length };
        requests.extend_from_slice(&header.encode());
        if command == 1 {
            requests.extend_from_slice(&[9; 512]);
        }
    }
    let plain = [&[255][..], &flags, &go, &requests].concat();
    let modern = [&[63][..], &flags, &structured, &context, &go, &requests].concat();
    let list = [&[0][..], &flags, &option(option::LIST, &[]), &option(option::ABORT, &[])].concat();
    let tls = [&[255][..], &flags, &option(option::STARTTLS, &[])].concat();
    vec![plain, modern, list, tls]
}
