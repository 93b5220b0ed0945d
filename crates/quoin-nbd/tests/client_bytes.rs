//! The client against a server whose answers the test writes byte by byte.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_nbd::client::{
    Address, Client, ClientOptions, Done, ExportInfo, Link, Register, RequestError,
};
use quoin_nbd::protocol::{
    CHUNK_HEADER_BYTES, FLAG_FIXED_NEWSTYLE, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    REQUEST_HEADER_BYTES, RequestHeader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, error,
    export, info, option, reply,
};
use quoin_types::block::{Operation, Payload};

const SIZE: u64 = 1 << 20;
/// Timeout, far above the time that any step takes.
const SOON: Duration = Duration::from_secs(20);

/// A connection after its negotiation.
struct ScriptedServer(UnixStream);

impl ScriptedServer {
    fn accept(listener: &UnixListener, structured: bool) -> Self {
        let mut server = Self(listener.accept().unwrap().0);
        server.send(&MAGIC.to_be_bytes());
        server.send(&OPTION_MAGIC.to_be_bytes());
        server.send(&FLAG_FIXED_NEWSTYLE.to_be_bytes());
        server.receive(4);
        loop {
            let header = server.receive(16);
            let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let code = number(8);
            server.receive(number(12) as usize);
            match code {
                option::STRUCTURED_REPLY if structured => server.option(code, reply::ACK, &[]),
                option::GO => {
                    let mut body = info::EXPORT.to_be_bytes().to_vec();
                    body.extend(SIZE.to_be_bytes());
                    body.extend(export::HAS_FLAGS.to_be_bytes());
                    server.option(code, reply::INFO, &body);
                    server.option(code, reply::ACK, &[]);
                    return server;
                }
                _ => server.option(code, reply::ERR_UNSUP, &[]),
            }
        }
    }

    /// Sends bytes; a client that has read enough may be gone.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    fn receive(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn option(&mut self, code: u32, kind: u32, body: &[u8]) {
        let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend(body);
        self.send(&bytes);
    }

    fn request(&mut self) -> RequestHeader {
        let bytes = self.receive(REQUEST_HEADER_BYTES);
        RequestHeader::decode(bytes.as_slice().try_into().unwrap()).unwrap()
    }

    fn simple(&mut self, cookie: u64, number: u32, data: &[u8]) {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(number.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(data);
        self.send(&bytes);
    }

    fn chunk(&mut self, cookie: u64, flags: u16, kind: u16, body: &[u8]) {
        let mut bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend((body.len() as u32).to_be_bytes());
        assert_eq!(bytes.len(), CHUNK_HEADER_BYTES);
        bytes.extend(body);
        self.send(&bytes);
    }
}

fn options(path: &Path, reconnect: bool) -> ClientOptions {
    ClientOptions { reconnect, ..ClientOptions::new(Address::Unix(path.to_owned())) }
}

/// Result of a read of 8192 bytes at 4096, for which the server sends `answer`.
fn read(
    structured: bool,
    answer: impl FnOnce(&mut ScriptedServer, u64) + Send + 'static,
) -> Result<Vec<u8>, RequestError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let mut server = ScriptedServer::accept(&listener, structured);
        let header = server.request();
        assert_eq!((header.offset, header.length), (4096, 8192));
        answer(&mut server, header.cookie);
        // The connection stays open until the client is done.
        let _ = server.0.read(&mut [0; 64]);
    });
    let client = Client::connect(options(&path, false)).unwrap();
    let result = client.call(Operation::Read { offset: 4096, length: 8192 });
    client.stop();
    server.join().unwrap();
    result.map(|payload| match payload {
        Payload::Data(pieces) => pieces.concat(),
        other => panic!("a read gave {other:?}"),
    })
}

fn at(offset: u64, data: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes(), data].concat()
}

fn hole(offset: u64, length: u32) -> Vec<u8> {
    at(offset, &length.to_be_bytes())
}

#[test]
fn a_server_without_structured_replies_is_supported() {
    let data = read(false, |server, cookie| server.simple(cookie, 0, &[7; 8192]));
    assert_eq!(data, Ok(vec![7; 8192]));
    let refused = read(false, |server, cookie| server.simple(cookie, error::IO, &[]));
    assert_eq!(refused, Err(RequestError::Refused(error::IO)));
}

#[test]
fn the_chunks_of_a_read_may_be_holes_and_arrive_in_any_order() {
    let data = read(true, |server, cookie| {
        server.chunk(cookie, 0, chunk::OFFSET_HOLE, &hole(8192, 4096));
        server.chunk(cookie, 0, chunk::OFFSET_DATA, &at(4096, &[7; 4096]));
        server.chunk(cookie, chunk::FLAG_DONE, chunk::NONE, &[]);
    });
    assert_eq!(data, Ok([[7; 4096], [0; 4096]].concat()));
    let all = read(true, |server, cookie| {
        server.chunk(cookie, chunk::FLAG_DONE, chunk::OFFSET_HOLE, &hole(4096, 8192));
    });
    assert_eq!(all, Ok(vec![0; 8192]));
}

#[test]
fn a_read_reply_with_gaps_or_overlaps_ends_the_connection() {
    let (data, empty) = (chunk::OFFSET_DATA, chunk::OFFSET_HOLE);
    let wrong = [
        vec![],
        vec![(data, 4096_u64, 4096_u32)],
        vec![(data, 4096, 4096), (data, 4096, 4096)],
        vec![(data, 0, 8192)],
        vec![(empty, 4096, 8193)],
        vec![(empty, 4096, 4096), (data, 12288, 4096)],
    ];
    for parts in wrong {
        let sent = parts.clone();
        let result = read(true, move |server, cookie| {
            for (kind, offset, length) in &sent {
                let body = match *kind == data {
                    true => at(*offset, &vec![1; *length as usize]),
                    false => hole(*offset, *length),
                };
                server.chunk(cookie, 0, *kind, &body);
            }
            server.chunk(cookie, chunk::FLAG_DONE, chunk::NONE, &[]);
        });
        assert_eq!(result, Err(RequestError::Disconnected), "{parts:?}");
    }
}

#[test]
fn a_chunk_of_the_wrong_length_ends_the_connection_and_an_error_fails_its_request() {
    for (kind, length) in [
        (chunk::NONE, 1),
        (chunk::OFFSET_DATA, 8),
        (chunk::OFFSET_HOLE, 11),
        (chunk::OFFSET_HOLE, 13),
        (chunk::BLOCK_STATUS, 4),
        (chunk::BLOCK_STATUS, 13),
        (77, 0),
        (chunk::OFFSET_DATA, 8192 + 9),
    ] {
        let result = read(true, move |server, cookie| {
            server.chunk(cookie, chunk::FLAG_DONE, kind, &vec![0; length]);
        });
        assert_eq!(result, Err(RequestError::Disconnected), "kind {kind}, {length} bytes");
    }
    for (kind, body, number) in [
        (chunk::ERROR, vec![0, 0, 0, 22, 0, 0], 22),
        (chunk::ERROR_OFFSET, vec![0, 0, 0, 28, 0, 0, 9, 9], 28),
        (chunk::ERROR, vec![0, 0, 0, 22], error::IO),
        (0x8077, vec![], error::IO),
    ] {
        let result = read(true, move |server, cookie| {
            server.chunk(cookie, chunk::FLAG_DONE, kind, &body);
        });
        assert_eq!(result, Err(RequestError::Refused(number)), "kind {kind:#x}");
    }
}

fn until(link: &mut Link, done: &mut Vec<Done>, is_so: impl Fn(&Link) -> bool) {
    let start = Instant::now();
    while !is_so(link) {
        assert!(start.elapsed() < SOON, "{:?}", link.deadline());
        link.drive(Instant::now(), done);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the connection, which stays open.
fn refuse_while_stopping(listener: UnixListener) -> JoinHandle<ScriptedServer> {
    std::thread::spawn(move || {
        let mut server = ScriptedServer::accept(&listener, false);
        let cookie = server.request().cookie;
        server.simple(cookie, error::SHUTDOWN, &[]);
        server
    })
}

#[test]
fn a_stopping_server_is_disconnected_and_its_refused_request_is_held() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let server = refuse_while_stopping(UnixListener::bind(&path).unwrap());
    let mut link = Link::connect(options(&path, true)).unwrap();
    let mut done = Vec::new();
    let write = Operation::Write { offset: 0, data: Bytes::from(vec![1; 4096]), fua: false };
    link.submit(7, write);
    until(&mut link, &mut done, |link| !link.connected());
    let mut connection = server.join().unwrap();
    connection.receive(4096);
    assert_eq!(
        connection.0.read(&mut [0]).unwrap(),
        0,
        "no more bytes are sent to the stopping server"
    );

    let leaves = link.deadline().unwrap();
    assert!(
        leaves > Instant::now() + Duration::from_secs(5),
        "the server has time to close the connection"
    );
    link.drive(leaves - Duration::from_millis(1), &mut done);
    assert!(link.fd().is_some() && link.in_flight() == 1);
    link.drive(leaves, &mut done);
    assert!(link.fd().is_none() && link.in_flight() == 1 && done.is_empty());
    assert_eq!(link.stop(), [Done { token: 7, result: Err(RequestError::Stopped) }]);
}

#[test]
fn without_reconnection_a_request_that_a_stopping_server_refused_fails() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let server = refuse_while_stopping(UnixListener::bind(&path).unwrap());
    let mut link = Link::connect(options(&path, false)).unwrap();
    let mut done = Vec::new();
    link.submit(7, Operation::Flush);
    let start = Instant::now();
    while done.is_empty() {
        assert!(start.elapsed() < SOON);
        link.drive(Instant::now(), &mut done);
    }
    assert_eq!(done, [Done { token: 7, result: Err(RequestError::Refused(error::SHUTDOWN)) }]);
    assert!(link.connected(), "the server may still reply to other requests");
    server.join().unwrap();
}

/// A target of a former version does not report the use, and one of today may follow.
#[test]
fn the_epoch_of_a_use_survives_a_server_that_does_not_report_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        drop(ScriptedServer::accept(&listener, false));
        ScriptedServer::accept(&listener, false)
    });
    let known =
        ExportInfo { since_epoch: 5, ..Link::connect(options(&path, true)).unwrap().info() };
    let mut link = Link::resume(options(&path, true), known, Register::of_process());
    until(&mut link, &mut Vec::new(), |link| link.connected());
    assert_eq!((link.info().since_epoch, link.reconnects()), (5, 1));
    server.join().unwrap();
}
