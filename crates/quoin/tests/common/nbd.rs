//! An NBD client of the tests' own, written from the protocol alone: its proof does not depend on
//! an installed foreign client.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const STARTTLS: u32 = 5;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const SET_META_CONTEXT: u32 = 10;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;
pub const FUA: u16 = 1;

trait Bytes: Read + Write + Send {}
impl<T: Read + Write + Send> Bytes for T {}

/// A connection whose export is open; one request at a time.
pub struct Nbd {
    stream: Box<dyn Bytes>,
    cookie: u64,
    pub size_bytes: u64,
    pub flags: u16,
}

/// Chunks of an answer: their types and bodies.
type Chunks = Vec<(u16, Vec<u8>)>;

/// Answer to an option: the type of the last reply and its text.
pub type Answer = (u32, String);

impl Nbd {
    /// Opens the export, over TLS where a configuration is given; `Err`: the reason of the refusal.
    pub fn connect(
        address: &str,
        tls: Option<Arc<ClientConfig>>,
        export: &str,
    ) -> Result<Self, String> {
        let mut stream = hello(address)?;
        let mut stream: Box<dyn Bytes> = match tls {
            None => Box::new(stream),
            Some(config) => {
                let (kind, text) = ask(&mut stream, STARTTLS, &[])?;
                if kind != 1 {
                    return Err(format!("STARTTLS was answered with {kind:#x} {text}"));
                }
                let name = ServerName::try_from("quoin").unwrap();
                let connection = ClientConnection::new(config, name).map_err(|e| e.to_string())?;
                Box::new(StreamOwned::new(connection, stream))
            }
        };
        let (kind, text) = ask(&mut stream, STRUCTURED, &[])?;
        if kind != 1 {
            return Err(format!("{kind:#x} {text}"));
        }
        let mut named = (export.len() as u32).to_be_bytes().to_vec();
        named.extend(export.as_bytes());
        let mut context = named.clone();
        context.extend(1u32.to_be_bytes());
        context.extend(15u32.to_be_bytes());
        context.extend(b"base:allocation");
        let (kind, text) = ask(&mut stream, SET_META_CONTEXT, &context)?;
        if kind != 1 {
            return Err(format!("{kind:#x} {text}"));
        }
        named.extend([0, 0]);
        let mut info = Vec::new();
        let (kind, text) = ask_with(&mut stream, GO, &named, |kind, body| {
            if kind == 3 && body.starts_with(&[0, 0]) {
                info = body[2..].to_vec();
            }
        })?;
        if kind != 1 {
            return Err(format!("{kind:#x} {text}"));
        }
        let size_bytes = u64::from_be_bytes(info[..8].try_into().unwrap());
        let flags = u16::from_be_bytes(info[8..10].try_into().unwrap());
        Ok(Self { stream, cookie: 0, size_bytes, flags })
    }

    fn request(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> std::io::Result<()> {
        self.cookie += 1;
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes)?;
        self.stream.flush()
    }

    /// Returns the chunks of one answer: their types and bodies; an error as its number.
    fn answer(&mut self) -> std::io::Result<Result<Chunks, u32>> {
        let mut chunks = Vec::new();
        loop {
            let mut magic = [0; 4];
            self.stream.read_exact(&mut magic)?;
            if u32::from_be_bytes(magic) == 0x6744_6698 {
                let mut rest = [0; 12];
                self.stream.read_exact(&mut rest)?;
                assert_eq!(u64::from_be_bytes(rest[4..].try_into().unwrap()), self.cookie);
                return Ok(match u32::from_be_bytes(rest[..4].try_into().unwrap()) {
                    0 => Ok(chunks),
                    error => Err(error),
                });
            }
            assert_eq!(u32::from_be_bytes(magic), 0x668e_33ef);
            let mut header = [0; 16];
            self.stream.read_exact(&mut header)?;
            assert_eq!(u64::from_be_bytes(header[4..12].try_into().unwrap()), self.cookie);
            let flags = u16::from_be_bytes(header[..2].try_into().unwrap());
            let kind = u16::from_be_bytes(header[2..4].try_into().unwrap());
            let mut body = vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize];
            self.stream.read_exact(&mut body)?;
            if kind & 0x8000 != 0 {
                return Ok(Err(u32::from_be_bytes(body[..4].try_into().unwrap())));
            }
            chunks.push((kind, body));
            if flags & 1 != 0 {
                return Ok(Ok(chunks));
            }
        }
    }

    /// Sends a request without data in its answer; `Ok(Err)`: the server's error number.
    pub fn call(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> std::io::Result<Result<(), u32>> {
        self.request(kind, flags, offset, length, data)?;
        Ok(self.answer()?.map(|_| ()))
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let answer = self.call(WRITE, 0, offset, data.len() as u32, data)?;
        answer.map_err(std::io::Error::from_raw_os_error_number)
    }

    pub fn read(&mut self, offset: u64, length: u32) -> std::io::Result<Vec<u8>> {
        self.request(READ, 0, offset, length, &[])?;
        let mut data = vec![0; length as usize];
        let chunks = self.answer()?.map_err(std::io::Error::from_raw_os_error_number)?;
        for (kind, body) in chunks {
            let at = (u64::from_be_bytes(body[..8].try_into().unwrap()) - offset) as usize;
            if kind == 1 {
                data[at..at + body.len() - 8].copy_from_slice(&body[8..]);
            }
        }
        Ok(data)
    }

    /// Returns lengths and state flags of `base:allocation`, from `offset` on.
    pub fn status(&mut self, offset: u64, length: u32) -> std::io::Result<Vec<(u32, u32)>> {
        self.request(BLOCK_STATUS, 0, offset, length, &[])?;
        let chunks = self.answer()?.map_err(std::io::Error::from_raw_os_error_number)?;
        let (_, body) = &chunks[0];
        let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        Ok(body[4..].chunks_exact(8).map(|e| (word(&e[..4]), word(&e[4..]))).collect())
    }
}

/// Errors of the protocol have the values of Linux's errno.
trait FromNumber {
    fn from_raw_os_error_number(number: u32) -> Self;
}
impl FromNumber for std::io::Error {
    fn from_raw_os_error_number(number: u32) -> Self {
        Self::from_raw_os_error(number as i32)
    }
}

/// Returns a connection after the greeting.
pub fn hello(address: &str) -> Result<TcpStream, String> {
    let mut stream = TcpStream::connect(address).map_err(|e| e.to_string())?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).map_err(|e| e.to_string())?;
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    stream.write_all(&3u32.to_be_bytes()).map_err(|e| e.to_string())?;
    Ok(stream)
}

/// Sends an option; returns the type and text of the last answer to it.
pub fn ask(stream: &mut (impl Read + Write), code: u32, data: &[u8]) -> Result<Answer, String> {
    ask_with(stream, code, data, |_, _| {})
}

fn ask_with(
    stream: &mut (impl Read + Write),
    code: u32,
    data: &[u8],
    mut each: impl FnMut(u32, &[u8]),
) -> Result<Answer, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut bytes = OPTION_MAGIC.to_vec();
    bytes.extend(code.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes).map_err(failed)?;
    stream.flush().map_err(failed)?;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).map_err(failed)?;
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(word(8), code);
        let mut body = vec![0; word(16) as usize];
        stream.read_exact(&mut body).map_err(failed)?;
        let kind = word(12);
        if kind == 1 || kind & 0x8000_0000 != 0 {
            return Ok((kind, String::from_utf8_lossy(&body).into_owned()));
        }
        each(kind, &body);
    }
}
