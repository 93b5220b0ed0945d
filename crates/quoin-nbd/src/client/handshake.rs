//! Connecting and negotiating: short, blocking, bounded by a time-out.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use quoin_types::ClientId;

use super::{Address, ClientError, ClientOptions};
use crate::exports::Description;
use crate::protocol::{
    BASE_ALLOCATION, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    PAYLOAD_BYTES_MAX, be16, be32, be64, export, info, option, reply,
};

/// Limit of an option reply; no server needs a longer one.
const REPLY_BYTES_MAX: usize = 16 << 10;
/// Limit of replies to one option; no server needs more.
const REPLIES_MAX: usize = 64;

/// The export, as the server described it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    pub size_bytes: u64,
    /// Bits of [`super::super::protocol::export`].
    pub flags: u16,
    pub block_size_min: u32,
    pub block_size_preferred: u32,
    /// Largest read or write that the server accepts.
    pub payload_bytes_max: u32,
    pub structured: bool,
    /// The id that the server uses for allocation.
    pub base_allocation: Option<u32>,
    /// The present use of the volume, named by its first epoch. 0: the server did not report it.
    pub since_epoch: u64,
    /// The client whose changing requests are numbered on this connection.
    pub client: Option<ClientId>,
}

impl ExportInfo {
    /// An export of which only the size is known.
    pub fn of_size(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            flags: 0,
            block_size_min: 1,
            block_size_preferred: 4096,
            payload_bytes_max: PAYLOAD_BYTES_MAX,
            structured: false,
            base_allocation: None,
            since_epoch: 0,
            client: None,
        }
    }

    pub fn read_only(&self) -> bool {
        self.flags & export::READ_ONLY != 0
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Negotiates a connection, which is non-blocking from here on.
///
/// `shown`: requests are to be numbered, for this client; 0: for one that begins.
pub(super) fn connect(
    options: &ClientOptions,
    shown: Option<ClientId>,
) -> Result<(OwnedFd, ExportInfo), ClientError> {
    let address = &options.address;
    let failed = |source| ClientError::Connect { address: address.clone(), source };
    let stream = match address {
        Address::Unix(path) => Stream::Unix(UnixStream::connect(path).map_err(failed)?),
        Address::Tcp(to) => {
            let stream =
                TcpStream::connect_timeout(to, options.handshake_timeout).map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            Stream::Tcp(stream)
        }
    };
    let deadline = Instant::now() + options.handshake_timeout;
    let mut negotiator = Negotiator { stream: &stream, deadline, export: &options.export, shown };
    let negotiation = |reason| ClientError::Negotiation { address: address.clone(), reason };
    let info = negotiator.run().map_err(|reason| match reason {
        Failure::Io(error) if is_timeout(&error) => negotiation(format!(
            "no answer within {} ms: its target is stopped or hangs; once it answers again \
             (`quoin node list`), try again",
            options.handshake_timeout.as_millis()
        )),
        Failure::Io(error) => negotiation(error.to_string()),
        Failure::Protocol(reason) => negotiation(reason),
        Failure::ClientOver(reason) => ClientError::ClientOver { address: address.clone(), reason },
    })?;
    let fd = match stream {
        Stream::Unix(stream) => {
            stream.set_nonblocking(true).map_err(failed)?;
            OwnedFd::from(stream)
        }
        Stream::Tcp(stream) => {
            stream.set_nonblocking(true).map_err(failed)?;
            OwnedFd::from(stream)
        }
    };
    Ok((fd, info))
}

/// Returns true if a socket's own timeout ended the call, whatever name the kernel has for it.
fn is_timeout(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    matches!(error.kind(), TimedOut | WouldBlock)
}

enum Failure {
    Io(std::io::Error),
    Protocol(String),
    ClientOver(String),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

fn protocol(text: impl Into<String>) -> Failure {
    Failure::Protocol(text.into())
}

/// An option that the server refused.
struct OptionRefused {
    /// One of [`reply`].
    kind: u32,
    text: String,
}

impl std::fmt::Display for OptionRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "error {:#x} {}", self.kind & 0x7fff_ffff, self.text)
    }
}

struct Negotiator<'a> {
    stream: &'a Stream,
    deadline: Instant,
    export: &'a str,
    shown: Option<ClientId>,
}

impl Negotiator<'_> {
    fn run(&mut self) -> Result<ExportInfo, Failure> {
        let greeting = self.read::<18>()?;
        if be64(&greeting, 0) != MAGIC || be64(&greeting, 8) != OPTION_MAGIC {
            return Err(protocol("this is not an NBD server of the newstyle protocol"));
        }
        if be16(&greeting, 16) & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(protocol("the server does not speak the fixed newstyle protocol"));
        }
        let flags = be16(&greeting, 16) & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        self.write(&u32::from(flags).to_be_bytes())?;

        let structured = self.request_option(option::STRUCTURED_REPLY, &[], |_, _| Ok(()))?.is_ok();
        let mut base_allocation = None;
        if structured {
            let mut query = self.name();
            query.extend(1u32.to_be_bytes());
            query.extend((BASE_ALLOCATION.len() as u32).to_be_bytes());
            query.extend(BASE_ALLOCATION.as_bytes());
            // A server without contexts refuses this, and is not asked for status.
            let _ = self.request_option(option::SET_META_CONTEXT, &query, |kind, body| {
                if kind == reply::META_CONTEXT && body.len() >= 4 {
                    base_allocation = Some(be32(body, 0));
                }
                Ok(())
            })?;
        }
        let client = self.number()?;
        let (mut found, mut description) = (None, Description::default());
        let (mut minimum, mut preferred, mut maximum) = (1, 4096, PAYLOAD_BYTES_MAX);
        let mut go = self.name();
        go.extend(2u16.to_be_bytes());
        go.extend(info::BLOCK_SIZE.to_be_bytes());
        go.extend(info::DESCRIPTION.to_be_bytes());
        let answer = self.request_option(option::GO, &go, |kind, body| {
            if kind != reply::INFO || body.len() < 2 {
                return Ok(());
            }
            match (be16(body, 0), body.len()) {
                (info::EXPORT, 12) => found = Some((be64(body, 2), be16(body, 10))),
                (info::BLOCK_SIZE, 14) => {
                    (minimum, preferred, maximum) = (be32(body, 2), be32(body, 6), be32(body, 10));
                }
                (info::DESCRIPTION, _) => description = Description::parse(&body[2..]),
                (info::EXPORT | info::BLOCK_SIZE, length) => {
                    return Err(protocol(format!("an information reply of {length} bytes")));
                }
                _ => {}
            }
            Ok(())
        })?;
        answer.map_err(|why| protocol(format!("the server refused the export: {why}")))?;
        let (size_bytes, flags) = found.ok_or_else(|| protocol("the export has no size"))?;
        if !minimum.is_power_of_two() || maximum < minimum {
            return Err(protocol(format!("block sizes {minimum} to {maximum} are invalid")));
        }
        Ok(ExportInfo {
            size_bytes,
            flags,
            block_size_min: minimum,
            block_size_preferred: preferred,
            payload_bytes_max: maximum.min(PAYLOAD_BYTES_MAX),
            structured,
            base_allocation,
            since_epoch: description.since_epoch,
            client,
        })
    }

    /// Agrees on numbers of the requests; `None`: the server does not number them.
    fn number(&mut self) -> Result<Option<ClientId>, Failure> {
        let Some(shown) = self.shown else { return Ok(None) };
        let mut data = self.name();
        data.extend(shown.0.to_be_bytes());
        let mut client = None;
        let answer = self.request_option(option::CLIENT, &data, |kind, body| {
            if let (reply::CLIENT, Ok(id)) = (kind, body.try_into()) {
                client = Some(ClientId(u128::from_be_bytes(id)));
            }
            Ok(())
        })?;
        match answer {
            Err(refused) if refused.kind == reply::ERR_POLICY => {
                Err(Failure::ClientOver(refused.text))
            }
            // The volume is not there now, or the server has not heard of the attachment.
            Err(refused) if refused.kind == reply::ERR_UNKNOWN => {
                Err(protocol(format!("the server refused the export: {refused}")))
            }
            // Other servers do not know the option.
            Err(_) => Ok(None),
            Ok(()) => Ok(client),
        }
    }

    fn name(&self) -> Vec<u8> {
        let mut bytes = (self.export.len() as u32).to_be_bytes().to_vec();
        bytes.extend(self.export.as_bytes());
        bytes
    }

    /// Sends one option and passes its replies to `each` until the last; inner `Err`: refused.
    fn request_option(
        &mut self,
        code: u32,
        data: &[u8],
        mut each: impl FnMut(u32, &[u8]) -> Result<(), Failure>,
    ) -> Result<Result<(), OptionRefused>, Failure> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.write(&bytes)?;
        for _ in 0..REPLIES_MAX {
            let header = self.read::<20>()?;
            if be64(&header, 0) != OPTION_REPLY_MAGIC || be32(&header, 8) != code {
                return Err(protocol("a reply to an option that was not requested"));
            }
            let (kind, length) = (be32(&header, 12), be32(&header, 16) as usize);
            if length > REPLY_BYTES_MAX {
                return Err(protocol(format!("an option reply of {length} bytes")));
            }
            let mut body = vec![0; length];
            self.fill(&mut body)?;
            if kind == reply::ACK {
                return Ok(Ok(()));
            }
            if kind & 0x8000_0000 != 0 {
                let text = String::from_utf8_lossy(&body).into_owned();
                return Ok(Err(OptionRefused { kind, text }));
            }
            each(kind, &body)?;
        }
        Err(protocol("too many replies to one option"))
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N], Failure> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Failure> {
        let mut at = 0;
        while at < bytes.len() {
            let left = self.left()?;
            let read = match self.stream {
                Stream::Unix(stream) => {
                    stream.set_read_timeout(Some(left))?;
                    (&*stream).read(&mut bytes[at..])
                }
                Stream::Tcp(stream) => {
                    stream.set_read_timeout(Some(left))?;
                    (&*stream).read(&mut bytes[at..])
                }
            }?;
            if read == 0 {
                return Err(protocol("the server closed the connection"));
            }
            at += read;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let left = self.left()?;
        match self.stream {
            Stream::Unix(stream) => {
                stream.set_write_timeout(Some(left))?;
                (&*stream).write_all(bytes)?;
            }
            Stream::Tcp(stream) => {
                stream.set_write_timeout(Some(left))?;
                (&*stream).write_all(bytes)?;
            }
        }
        Ok(())
    }

    fn left(&self) -> Result<Duration, Failure> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(protocol("the server did not answer in time"));
        }
        Ok(left)
    }
}
