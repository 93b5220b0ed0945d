//! The relay of the floor: one client, three sinks, two answers.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};

use crate::sink::{HEADER_LEN, decode_header, encode_header};
use crate::{Error, announce, nbd};

/// Answers that a write or a flush needs.
const NEEDED: usize = 2;

struct Sink {
    stream: TcpStream,
    output: Vec<u8>,
    written: usize,
    input: Vec<u8>,
    have: usize,
    /// Number of writes that it has done.
    done: u64,
    /// Number of flushes that it has done.
    flushed: u64,
    /// Handles of the reads that it has received, in order.
    reads: VecDeque<u64>,
}

/// Runs the relay; prints its socket's path once it accepts connections.
pub fn run(socket: &Path, sinks: &[SocketAddr], size_bytes: u64) -> Result<(), Error> {
    let listener =
        UnixListener::bind(socket).map_err(Error::io(format!("listen on {}", socket.display())))?;
    let mut peers = Vec::new();
    for address in sinks {
        let stream =
            TcpStream::connect(address).map_err(Error::io(format!("connect to {address}")))?;
        stream.set_nodelay(true).map_err(Error::io("socket"))?;
        stream.set_nonblocking(true).map_err(Error::io("socket"))?;
        peers.push(Sink {
            stream,
            output: Vec::new(),
            written: 0,
            input: vec![0; 8 << 20],
            have: 0,
            done: 0,
            flushed: 0,
            reads: VecDeque::new(),
        });
    }
    announce(socket.display())?;
    loop {
        let (mut client, _) = listener.accept().map_err(Error::io("accept"))?;
        // A client that goes away ends its session, not the floor.
        if nbd::accept(&mut client, size_bytes).is_ok() {
            client.set_nonblocking(true).map_err(Error::io("socket"))?;
            serve(&client, &mut peers)?;
        }
    }
}

/// Writes the pending bytes; true if all of them were sent.
fn drain(
    stream: &mut impl Write,
    output: &mut Vec<u8>,
    written: &mut usize,
) -> Result<bool, Error> {
    while *written < output.len() {
        match stream.write(&output[*written..]) {
            Ok(n) => *written += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(e) => return Err(Error::io("write")(e)),
        }
    }
    output.clear();
    *written = 0;
    Ok(true)
}

fn serve(client: &UnixStream, sinks: &mut [Sink]) -> Result<(), Error> {
    let mut input = vec![0u8; 8 << 20];
    let mut have = 0;
    let mut output: Vec<u8> = Vec::new();
    let mut written = 0;
    let mut next_sink = 0;
    // Unanswered writes of this client, in order; `acknowledged` is the number of the first.
    let mut pending: VecDeque<u64> = VecDeque::new();
    let mut acknowledged = sinks[0].done;
    // Unanswered flushes.
    let mut flushes: VecDeque<u64> = VecDeque::new();
    let mut flushed = 0;
    for sink in sinks.iter_mut() {
        // The last session may have ended before the third answer.
        acknowledged = acknowledged.max(sink.done);
        flushed = flushed.max(sink.flushed);
    }
    loop {
        let mut ready = [false; 4];
        {
            let flags = |more: bool| {
                if more { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
            };
            let fd: BorrowedFd<'_> = client.as_fd();
            let mut fds = vec![PollFd::from_borrowed_fd(fd, flags(!output.is_empty()))];
            for sink in sinks.iter() {
                fds.push(PollFd::new(&sink.stream, flags(!sink.output.is_empty())));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("poll")(e.into())),
            }
            for (i, fd) in fds.iter().enumerate() {
                ready[i] = !fd.revents().is_empty();
            }
        }
        if ready[0] {
            match (&*client).read(&mut input[have..]) {
                Ok(0) => return Ok(()),
                Ok(n) => have += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return Ok(()),
            }
            let mut at = 0;
            while have - at >= nbd::REQUEST_LEN {
                let request = nbd::Request::decode(&input[at..])?;
                let length = request.length as usize;
                match request.command {
                    nbd::WRITE => {
                        if have - at < nbd::REQUEST_LEN + length {
                            break;
                        }
                        let from = at + nbd::REQUEST_LEN;
                        let header = encode_header(nbd::WRITE, request.length, request.offset);
                        for sink in sinks.iter_mut() {
                            sink.output.extend_from_slice(&header);
                            sink.output.extend_from_slice(&input[from..from + length]);
                        }
                        pending.push_back(request.handle);
                        at = from + length;
                    }
                    nbd::READ => {
                        let sink = &mut sinks[next_sink];
                        next_sink = (next_sink + 1) % 3;
                        sink.output.extend_from_slice(&encode_header(
                            nbd::READ,
                            request.length,
                            request.offset,
                        ));
                        sink.reads.push_back(request.handle);
                        at += nbd::REQUEST_LEN;
                    }
                    nbd::FLUSH => {
                        for sink in sinks.iter_mut() {
                            sink.output.extend_from_slice(&encode_header(nbd::FLUSH, 0, 0));
                        }
                        flushes.push_back(request.handle);
                        at += nbd::REQUEST_LEN;
                    }
                    _ => return Ok(()),
                }
            }
            input.copy_within(at..have, 0);
            have -= at;
        }
        for (i, sink) in sinks.iter_mut().enumerate() {
            drain(&mut sink.stream, &mut sink.output, &mut sink.written)?;
            if !ready[i + 1] {
                continue;
            }
            match sink.stream.read(&mut sink.input[sink.have..]) {
                Ok(0) => return Err(Error::Failed("a sink went away".into())),
                Ok(n) => sink.have += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) => return Err(Error::io("read from a sink")(e)),
            }
            let mut at = 0;
            while sink.have - at >= HEADER_LEN {
                let (command, length, offset) = decode_header(&sink.input[at..]);
                if command == nbd::WRITE {
                    sink.done = offset;
                    at += HEADER_LEN;
                    continue;
                }
                if command == nbd::FLUSH {
                    sink.flushed += 1;
                    at += HEADER_LEN;
                    continue;
                }
                let length = length as usize;
                if sink.have - at < HEADER_LEN + length {
                    break;
                }
                let handle = sink.reads.pop_front().unwrap_or_default();
                nbd::encode_reply(handle, &mut output);
                let from = at + HEADER_LEN;
                output.extend_from_slice(&sink.input[from..from + length]);
                at = from + length;
            }
            sink.input.copy_within(at..sink.have, 0);
            sink.have -= at;
        }
        let mut done: Vec<u64> = sinks.iter().map(|s| s.done).collect();
        done.sort_unstable();
        let reached = done[done.len() - NEEDED];
        while acknowledged < reached
            && let Some(handle) = pending.pop_front()
        {
            nbd::encode_reply(handle, &mut output);
            acknowledged += 1;
        }
        let mut done: Vec<u64> = sinks.iter().map(|s| s.flushed).collect();
        done.sort_unstable();
        let reached = done[done.len() - NEEDED];
        while flushed < reached
            && let Some(handle) = flushes.pop_front()
        {
            nbd::encode_reply(handle, &mut output);
            flushed += 1;
        }
        let mut stream = client;
        if drain(&mut stream, &mut output, &mut written).is_err() {
            return Ok(());
        }
    }
}
