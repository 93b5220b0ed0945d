//! A sink of the floor: takes blocks from the relay, writes them in place, answers.
//!
//! Frames to a sink are [`HEADER_LEN`] bytes {command, length, offset}, then the data of a
//! write. It answers each batch of writes with one count of all writes done so far, each read with a
//! header and the data, in order, and each flush with a header once all writes before it are synced.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::{Error, announce, nbd};

pub const HEADER_LEN: usize = 16;

pub fn encode_header(command: u16, length: u32, offset: u64) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..2].copy_from_slice(&command.to_le_bytes());
    header[4..8].copy_from_slice(&length.to_le_bytes());
    header[8..].copy_from_slice(&offset.to_le_bytes());
    header
}

pub fn decode_header(bytes: &[u8]) -> (u16, u32, u64) {
    let mut offset = [0; 8];
    offset.copy_from_slice(&bytes[8..16]);
    (
        u16::from_le_bytes([bytes[0], bytes[1]]),
        u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        u64::from_le_bytes(offset),
    )
}

/// Fills the file in blocks of 4 KiB, so that its page cache consists of single pages: larger
/// folios would make each overwrite several times slower.
fn prepare(path: &Path, size_bytes: u64) -> Result<File, Error> {
    let what = format!("prepare {}", path.display());
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(Error::io(&*what))?;
    let block = [0xa5; 4096];
    for offset in (0..size_bytes).step_by(block.len()) {
        file.write_all_at(&block, offset).map_err(Error::io(&*what))?;
    }
    file.sync_data().map_err(Error::io(&*what))?;
    Ok(file)
}

/// Runs the sink; prints its address once it accepts connections.
pub fn run(path: &Path, size_bytes: u64, sync: bool) -> Result<(), Error> {
    let file = prepare(path, size_bytes)?;
    let listen = Error::io("listen on a port of its own");
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(listen)?;
    announce(listener.local_addr().map_err(Error::io("find the own address"))?)?;
    let (mut stream, _) = listener.accept().map_err(Error::io("accept"))?;
    stream.set_nodelay(true).map_err(Error::io("socket"))?;
    let mut input = vec![0u8; 8 << 20];
    let mut output: Vec<u8> = Vec::new();
    let mut have = 0;
    let mut writes = 0u64;
    loop {
        let n = stream.read(&mut input[have..]).map_err(Error::io("read from the relay"))?;
        if n == 0 {
            return Ok(());
        }
        have += n;
        let mut at = 0;
        let (before, mut flushes) = (writes, 0);
        while have - at >= HEADER_LEN {
            let (command, length, offset) = decode_header(&input[at..]);
            let length = length as usize;
            if command == nbd::WRITE {
                if have - at < HEADER_LEN + length {
                    break;
                }
                let data = &input[at + HEADER_LEN..at + HEADER_LEN + length];
                file.write_all_at(data, offset).map_err(Error::io("pwrite"))?;
                writes += 1;
                at += HEADER_LEN + length;
            } else if command == nbd::FLUSH {
                flushes += 1;
                at += HEADER_LEN;
            } else {
                output.extend_from_slice(&encode_header(nbd::READ, length as u32, offset));
                let start = output.len();
                output.resize(start + length, 0);
                file.read_exact_at(&mut output[start..], offset).map_err(Error::io("pread"))?;
                at += HEADER_LEN;
            }
        }
        input.copy_within(at..have, 0);
        have -= at;
        if writes > before {
            if sync && flushes == 0 {
                file.sync_data().map_err(Error::io("fdatasync"))?;
            }
            output.extend_from_slice(&encode_header(nbd::WRITE, 0, writes));
        }
        if flushes > 0 {
            // One sync serves all flushes of a batch.
            file.sync_data().map_err(Error::io("fdatasync"))?;
            for _ in 0..flushes {
                output.extend_from_slice(&encode_header(nbd::FLUSH, 0, 0));
            }
        }
        stream.write_all(&output).map_err(Error::io("answer the relay"))?;
        output.clear();
    }
}
