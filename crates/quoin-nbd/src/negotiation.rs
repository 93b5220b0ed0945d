//! The fixed newstyle negotiation: greeting, client flags, and options, until one of them opens the
//! export.
//!
//! Hostile clients are bounded: an option longer than [`OPTION_BYTES_MAX`] is skipped unread (or
//! the connection closed if it exceeds [`OPTION_SKIP_MAX`]), and a client that negotiates without
//! end is disconnected.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use quoin_types::ClientId;
use quoin_types::block::{Closed, DeviceInfo};

use super::exports::{Exports, Refused};
use super::protocol::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, MAGIC, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, PAYLOAD_BYTES_MAX, PREFERRED_BLOCK_SIZE, STRING_BYTES_MAX, be16, be32,
    be64, export, info, option, reply,
};

/// Limit of an option that is read: a name and a few dozen meta context queries.
const OPTION_BYTES_MAX: usize = 16 << 10;
/// Limit of an option that is skipped with an answer; a longer one closes the connection.
const OPTION_SKIP_MAX: usize = 1 << 20;
/// Limit of options; no client needs more.
const OPTIONS_MAX: usize = 256;
const OPTION_HEADER_BYTES: usize = 16;

/// Next step of the session.
#[derive(Debug)]
pub(super) enum Outcome {
    /// More bytes are needed.
    Continue,
    /// The client requested TLS, and the answer that it may begin is in the output.
    StartTls,
    /// The export is open.
    Transmit {
        device: DeviceInfo,
        structured: bool,
        base_allocation: bool,
        client: Option<(ClientId, bool)>,
    },
}

pub(super) struct Negotiation {
    greeted: bool,
    flags_seen: bool,
    no_zeroes: bool,
    tls: Tls,
    structured: bool,
    /// The export for which block status was requested: the request holds for that one alone.
    base_allocation: Option<String>,
    /// The client whose requests are numbered, and the export that this holds for.
    client: Option<(String, ClientId, bool)>,
    options: usize,
    skip: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tls {
    Never,
    Required,
    Up,
}

impl Negotiation {
    pub(super) fn new(tls_required: bool) -> Self {
        Self {
            greeted: false,
            flags_seen: false,
            no_zeroes: false,
            tls: if tls_required { Tls::Required } else { Tls::Never },
            structured: false,
            base_allocation: None,
            client: None,
            options: 0,
            skip: 0,
        }
    }

    pub(super) fn receive(
        &mut self,
        exports: &dyn Exports,
        input: &mut BytesMut,
        output: &mut Vec<Bytes>,
    ) -> Result<Outcome, Closed> {
        if !self.greeted {
            let mut greeting = BytesMut::with_capacity(18);
            greeting.put_u64(MAGIC);
            greeting.put_u64(OPTION_MAGIC);
            greeting.put_u16(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
            output.push(greeting.freeze());
            self.greeted = true;
        }
        if !self.flags_seen {
            if input.len() < 4 {
                return Ok(Outcome::Continue);
            }
            let flags = input.get_u32();
            if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
                return Err(Closed(format!("client sent unknown handshake flags {flags:#x}")));
            }
            self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
            self.flags_seen = true;
        }
        loop {
            let skipped = self.skip.min(input.len());
            input.advance(skipped);
            self.skip -= skipped;
            if self.skip > 0 || input.len() < OPTION_HEADER_BYTES {
                return Ok(Outcome::Continue);
            }
            if be64(input, 0) != OPTION_MAGIC {
                return Err(Closed("client sent an option without its magic".into()));
            }
            let (code, length) = (be32(input, 8), be32(input, 12) as usize);
            if length > OPTION_BYTES_MAX {
                self.count()?;
                if length > OPTION_SKIP_MAX || code == option::EXPORT_NAME {
                    return Err(Closed(format!("client sent an option of {length} bytes")));
                }
                input.advance(OPTION_HEADER_BYTES);
                self.skip = length;
                refuse(output, code, reply::ERR_TOO_BIG, "the option is too long");
                continue;
            }
            if input.len() < OPTION_HEADER_BYTES + length {
                input.reserve(OPTION_HEADER_BYTES + length - input.len());
                return Ok(Outcome::Continue);
            }
            self.count()?;
            input.advance(OPTION_HEADER_BYTES);
            let data = input.split_to(length);
            match self.option(exports, code, &data, output)? {
                Outcome::Continue => {}
                outcome => return Ok(outcome),
            }
        }
    }

    fn count(&mut self) -> Result<(), Closed> {
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(Closed(format!("client sent more than {OPTIONS_MAX} options")));
        }
        Ok(())
    }

    fn option(
        &mut self,
        exports: &dyn Exports,
        code: u32,
        data: &[u8],
        output: &mut Vec<Bytes>,
    ) -> Result<Outcome, Closed> {
        if self.tls == Tls::Required && !matches!(code, option::STARTTLS | option::ABORT) {
            if code == option::EXPORT_NAME {
                return Err(Closed("client asked for an export before TLS".into()));
            }
            refuse(output, code, reply::ERR_TLS_REQD, "start TLS first");
            return Ok(Outcome::Continue);
        }
        match code {
            option::EXPORT_NAME => {
                let device = exports.find(data).map_err(|refused| {
                    Closed(format!("client was refused an export: {}", refused.reason()))
                })?;
                let mut answer = BytesMut::with_capacity(134);
                answer.put_u64(device.size_bytes);
                answer.put_u16(self.export_flags(&device));
                if !self.no_zeroes {
                    answer.put_bytes(0, 124);
                }
                output.push(answer.freeze());
                return Ok(self.transmit(device));
            }
            option::ABORT => {
                answer(output, code, reply::ACK, &[]);
                return Err(Closed("client aborted the negotiation".into()));
            }
            option::LIST if data.is_empty() => match exports.list() {
                Ok(names) => {
                    for name in names {
                        let mut body = BytesMut::with_capacity(4 + name.len());
                        body.put_u32(name.len() as u32);
                        body.put_slice(name.as_bytes());
                        answer(output, code, reply::SERVER, &body);
                    }
                    answer(output, code, reply::ACK, &[]);
                }
                Err(refused) => refuse_export(output, code, &refused),
            },
            option::STARTTLS if data.is_empty() => match self.tls {
                Tls::Never => refuse(output, code, reply::ERR_POLICY, "this socket has no TLS"),
                Tls::Up => refuse(output, code, reply::ERR_INVALID, "TLS is already active"),
                Tls::Required => {
                    answer(output, code, reply::ACK, &[]);
                    // Everything negotiated before TLS is discarded.
                    self.tls = Tls::Up;
                    self.structured = false;
                    self.base_allocation = None;
                    self.client = None;
                    return Ok(Outcome::StartTls);
                }
            },
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                answer(output, code, reply::ACK, &[]);
            }
            option::PROVE_KEY if self.tls == Tls::Up => match data.try_into() {
                Ok(proof) => {
                    exports.prove(proof);
                    answer(output, code, reply::ACK, &[]);
                }
                Err(_) => refuse(output, code, reply::ERR_INVALID, "a proof has 32 bytes"),
            },
            option::LIST | option::STARTTLS | option::STRUCTURED_REPLY => {
                refuse(output, code, reply::ERR_INVALID, "this option carries no data");
            }
            option::INFO | option::GO => return Ok(self.go(exports, code, data, output)),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(exports, code, data, output);
            }
            option::CLIENT => self.number(exports, data, output),
            _ => refuse(output, code, reply::ERR_UNSUP, "this option is unknown"),
        }
        Ok(Outcome::Continue)
    }

    fn go(
        &mut self,
        exports: &dyn Exports,
        code: u32,
        data: &[u8],
        output: &mut Vec<Bytes>,
    ) -> Outcome {
        let Some((name, wanted)) = parse_go(data) else {
            refuse(output, code, reply::ERR_INVALID, "the option's lengths do not add up");
            return Outcome::Continue;
        };
        let device = match exports.find(name) {
            Ok(device) => device,
            Err(refused) => {
                refuse_export(output, code, &refused);
                return Outcome::Continue;
            }
        };
        let mut body = BytesMut::with_capacity(12);
        body.put_u16(info::EXPORT);
        body.put_u64(device.size_bytes);
        body.put_u16(self.export_flags(&device));
        answer(output, code, reply::INFO, &body);
        let mut body = BytesMut::with_capacity(14);
        body.put_u16(info::BLOCK_SIZE);
        body.put_u32(device.block_size);
        body.put_u32(PREFERRED_BLOCK_SIZE.max(device.block_size));
        body.put_u32(PAYLOAD_BYTES_MAX);
        answer(output, code, reply::INFO, &body);
        let description = exports.description();
        for (kind, text) in [(info::NAME, &device.name), (info::DESCRIPTION, &description)] {
            if wanted.chunks_exact(2).any(|pair| be16(pair, 0) == kind) {
                let mut body = BytesMut::with_capacity(2 + text.len());
                body.put_u16(kind);
                body.put_slice(text.as_bytes());
                answer(output, code, reply::INFO, &body);
            }
        }
        answer(output, code, reply::ACK, &[]);
        if code == option::GO { self.transmit(device) } else { Outcome::Continue }
    }

    fn meta_context(
        &mut self,
        exports: &dyn Exports,
        code: u32,
        data: &[u8],
        output: &mut Vec<Bytes>,
    ) {
        let set = code == option::SET_META_CONTEXT;
        if set {
            self.base_allocation = None;
        }
        if !self.structured {
            refuse(output, code, reply::ERR_INVALID, "request structured replies first");
            return;
        }
        let Some((name, queries)) = parse_meta_context(data) else {
            refuse(output, code, reply::ERR_INVALID, "the option's lengths do not add up");
            return;
        };
        let device = match exports.find(name) {
            Ok(device) => device,
            Err(refused) => return refuse_export(output, code, &refused),
        };
        let base = BASE_ALLOCATION.as_bytes();
        let chosen = queries.contains(&base)
            || (!set && (queries.is_empty() || queries.contains(&b"base:".as_slice())));
        if chosen {
            let mut body = BytesMut::with_capacity(4 + base.len());
            body.put_u32(if set { BASE_ALLOCATION_ID } else { 0 });
            body.put_slice(base);
            answer(output, code, reply::META_CONTEXT, &body);
        }
        if set && chosen {
            self.base_allocation = Some(device.name);
        }
        answer(output, code, reply::ACK, &[]);
    }

    /// Agrees on numbers of the changing requests, and on the client that they are of.
    fn number(&mut self, exports: &dyn Exports, data: &[u8], output: &mut Vec<Bytes>) {
        let code = option::CLIENT;
        self.client = None;
        let parsed = parse_string(data).and_then(|(name, id)| Some((name, id.try_into().ok()?)));
        let Some((name, id)) = parsed else {
            return refuse(output, code, reply::ERR_INVALID, "the option's lengths do not add up");
        };
        let shown = ClientId(u128::from_be_bytes(id));
        let device = match exports.find(name) {
            Ok(device) => device,
            // The client tries again: an export that is not here now says nothing of the client.
            Err(refused) => return refuse(output, code, reply::ERR_UNKNOWN, refused.reason()),
        };
        match exports.client(name, shown) {
            Ok(Some((client, begins))) if !device.read_only => {
                answer(output, code, reply::CLIENT, &client.0.to_be_bytes());
                answer(output, code, reply::ACK, &[]);
                self.client = Some((device.name, client, begins));
            }
            Ok(_) => answer(output, code, reply::ACK, &[]),
            Err(refused) => refuse_export(output, code, &refused),
        }
    }

    fn transmit(&self, device: DeviceInfo) -> Outcome {
        let base_allocation = self.base_allocation.as_ref() == Some(&device.name);
        let client = self.client.as_ref().filter(|(name, _, _)| *name == device.name);
        let client = client.map(|(_, client, begins)| (*client, *begins));
        Outcome::Transmit { device, structured: self.structured, base_allocation, client }
    }

    fn export_flags(&self, device: &DeviceInfo) -> u16 {
        let mut flags = export::HAS_FLAGS
            | export::SEND_FLUSH
            | export::SEND_FUA
            | export::CAN_MULTI_CONN
            | export::SEND_CACHE;
        if device.read_only {
            flags |= export::READ_ONLY;
        } else {
            flags |= export::SEND_TRIM | export::SEND_WRITE_ZEROES | export::SEND_FAST_ZERO;
        }
        if self.structured {
            flags |= export::SEND_DF;
        }
        flags
    }
}

/// Parses the export's name and the raw list of requested information types.
fn parse_go(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (name, rest) = parse_string(data)?;
    let (count, list) = rest.split_at_checked(2)?;
    (list.len() == usize::from(be16(count, 0)) * 2).then_some((name, list))
}

fn parse_meta_context(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (name, rest) = parse_string(data)?;
    let (count, mut rest) = rest.split_at_checked(4)?;
    let mut queries = Vec::new();
    for _ in 0..be32(count, 0) {
        // A wrong count ends by itself: each query takes at least four of the option's few bytes.
        let (query, after) = parse_string(rest)?;
        queries.push(query);
        rest = after;
    }
    rest.is_empty().then_some((name, queries))
}

fn parse_string(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_at_checked(4)?;
    let length = be32(length, 0) as usize;
    if length > STRING_BYTES_MAX {
        return None;
    }
    rest.split_at_checked(length)
}

fn answer(output: &mut Vec<Bytes>, code: u32, kind: u32, body: &[u8]) {
    let mut bytes = BytesMut::with_capacity(20 + body.len());
    bytes.put_u64(OPTION_REPLY_MAGIC);
    bytes.put_u32(code);
    bytes.put_u32(kind);
    bytes.put_u32(body.len() as u32);
    bytes.put_slice(body);
    output.push(bytes.freeze());
}

fn refuse(output: &mut Vec<Bytes>, code: u32, kind: u32, why: &str) {
    answer(output, code, kind, why.as_bytes());
}

/// Refuses an export to this client, with the reason.
fn refuse_export(output: &mut Vec<Bytes>, code: u32, refused: &Refused) {
    let kind = match refused {
        Refused::Unknown => reply::ERR_UNKNOWN,
        Refused::Forbidden(_) => reply::ERR_POLICY,
    };
    refuse(output, code, kind, refused.reason());
}
