//! The part of NBD that a load generator and a floor need: fixed newstyle by export name, simple
//! replies. (Quoin's own server and client support the whole protocol.)

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::Error;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const FLUSH: u16 = 3;
pub const REQUEST_LEN: usize = 28;
pub const REPLY_LEN: usize = 16;

const MAGIC: &[u8; 8] = b"NBDMAGIC";
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_EXPORT_NAME: u32 = 1;
/// Fixed newstyle and no trailing zeroes.
const GLOBAL_FLAGS: u16 = 3;
/// Has flags, can flush, FUA.
const EXPORT_FLAGS: u16 = 1 | 4 | 8;

pub struct Request {
    pub command: u16,
    pub handle: u64,
    pub offset: u64,
    pub length: u32,
}

impl Request {
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out.extend_from_slice(&0u16.to_be_bytes());
        out.extend_from_slice(&self.command.to_be_bytes());
        out.extend_from_slice(&self.handle.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }

    /// Decodes a request; `bytes` holds at least [`REQUEST_LEN`] bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        if bytes[..4] != REQUEST_MAGIC.to_be_bytes() {
            return Err(Error::Failed("the client sent no NBD request".into()));
        }
        Ok(Self {
            command: u16::from_be_bytes([bytes[6], bytes[7]]),
            handle: be64(&bytes[8..]),
            offset: be64(&bytes[16..]),
            length: u32::from_be_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]),
        })
    }
}

fn be64(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_be_bytes(word)
}

pub fn encode_reply(handle: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&0u32.to_be_bytes());
    out.extend_from_slice(&handle.to_be_bytes());
}

/// Returns the handle of a reply without error; `bytes` holds at least [`REPLY_LEN`] bytes.
pub fn decode_reply(bytes: &[u8]) -> Result<u64, Error> {
    if bytes[..4] != REPLY_MAGIC.to_be_bytes() {
        return Err(Error::Failed("the server sent no simple NBD reply".into()));
    }
    if bytes[4..8] != [0; 4] {
        let code = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        return Err(Error::Failed(format!("the server answered with error {code}")));
    }
    Ok(be64(&bytes[8..]))
}

/// Sends one request with its data and waits for its reply; the data of a read follows on the
/// stream.
pub fn ask(stream: &mut UnixStream, request: &Request, data: &[u8]) -> Result<(), Error> {
    let mut out = Vec::with_capacity(REQUEST_LEN + data.len());
    request.encode(&mut out);
    out.extend_from_slice(data);
    stream.write_all(&out).map_err(Error::io("send a request"))?;
    let mut reply = [0; REPLY_LEN];
    stream.read_exact(&mut reply).map_err(Error::io("wait for a reply"))?;
    decode_reply(&reply).map(|_| ())
}

/// Negotiates as the client; returns the size of the export in bytes.
pub fn negotiate(stream: &mut UnixStream) -> Result<u64, Error> {
    let what = "NBD negotiation";
    let mut hello = [0; 18];
    stream.read_exact(&mut hello).map_err(Error::io(what))?;
    if &hello[..8] != MAGIC || &hello[8..16] != OPTION_MAGIC {
        return Err(Error::Failed("the server speaks no newstyle NBD".into()));
    }
    let mut out = Vec::new();
    out.extend_from_slice(&u32::from(GLOBAL_FLAGS).to_be_bytes());
    out.extend_from_slice(OPTION_MAGIC);
    out.extend_from_slice(&OPTION_EXPORT_NAME.to_be_bytes());
    out.extend_from_slice(&0u32.to_be_bytes());
    stream.write_all(&out).map_err(Error::io(what))?;
    let mut export = [0; 10];
    stream.read_exact(&mut export).map_err(Error::io(what))?;
    Ok(be64(&export))
}

/// Negotiates as the server.
pub fn accept(stream: &mut UnixStream, size_bytes: u64) -> Result<(), Error> {
    let what = "NBD negotiation";
    let mut out = Vec::new();
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(OPTION_MAGIC);
    out.extend_from_slice(&GLOBAL_FLAGS.to_be_bytes());
    stream.write_all(&out).map_err(Error::io(what))?;
    let mut option = [0; 20];
    stream.read_exact(&mut option).map_err(Error::io(what))?;
    if &option[4..12] != OPTION_MAGIC || option[12..16] != OPTION_EXPORT_NAME.to_be_bytes() {
        return Err(Error::Failed("the floor knows only NBD_OPT_EXPORT_NAME".into()));
    }
    let name_len = u32::from_be_bytes([option[16], option[17], option[18], option[19]]);
    let mut name = vec![0; name_len.min(4096) as usize];
    stream.read_exact(&mut name).map_err(Error::io(what))?;
    out.clear();
    out.extend_from_slice(&size_bytes.to_be_bytes());
    out.extend_from_slice(&EXPORT_FLAGS.to_be_bytes());
    stream.write_all(&out).map_err(Error::io(what))
}
