//! The client against the session: pipelining, and IO that survives restarts of its server.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use quoin_nbd::client::{Address, Client, ClientError, ClientOptions, RequestError};
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};
use quoin_types::block::{Operation, Payload, StatusExtent};

const BLOCK: u64 = 4096;

fn options(path: &std::path::Path) -> ClientOptions {
    ClientOptions::new(Address::Unix(path.to_owned()))
}

fn block(fill: u8) -> Bytes {
    Bytes::from(vec![fill; BLOCK as usize])
}

#[test]
fn many_requests_in_flight_come_back_each_with_its_own_data() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let _server = Server::start(&path, volume(4 << 20), ServerOptions::default());
    let client = Client::connect(options(&path)).unwrap();
    assert_eq!(client.info().size_bytes, 4 << 20);
    assert_eq!(client.info().block_size_min, 4096);
    assert!(client.info().structured);
    let (sender, receiver) = mpsc::channel();
    for number in 0..1024u64 {
        let sender = sender.clone();
        client.submit(
            Operation::Write { offset: number * BLOCK, data: block(number as u8), fua: false },
            Box::new(move |result| sender.send(result).unwrap()),
        );
    }
    for _ in 0..1024 {
        assert_eq!(receiver.recv().unwrap(), Ok(Payload::None));
    }
    for number in 0..1024u64 {
        assert_eq!(client.read(number * BLOCK, 4096).unwrap(), block(number as u8));
    }
    client.stop();
}

#[test]
fn a_server_that_does_not_answer_is_told_with_the_way_out_and_no_number_of_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let handshake_timeout = Duration::from_millis(100);
    let connected = Client::connect(ClientOptions { handshake_timeout, ..options(&path) });
    let Err(error) = connected else { panic!("nobody accepts it") };
    let text = error.to_string();
    assert!(text.contains("no answer within 100 ms") && text.contains("try again"), "{text}");
    assert!(!text.contains("os error"), "{text}");
}

#[test]
fn status_distinguishes_data_from_holes_and_errors_have_their_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let _server = Server::start(&path, volume(1 << 20), ServerOptions::default());
    let client = Client::connect(options(&path)).unwrap();
    client.write(BLOCK, block(7), true).unwrap();
    assert_eq!(
        client.call(Operation::Status { offset: 0, length: 1 << 20 }).unwrap(),
        Payload::Status(vec![
            StatusExtent { length: BLOCK, hole: true },
            StatusExtent { length: BLOCK, hole: false },
            StatusExtent { length: (1 << 20) - 2 * BLOCK, hole: true },
        ])
    );
    assert_eq!(client.read(1 << 20, 4096), Err(RequestError::Refused(22)));
    assert_eq!(client.write(1 << 20, block(1), false), Err(RequestError::Refused(28)));
    assert_eq!(client.write(512, block(1), false), Err(RequestError::Refused(22)));
    assert_eq!(client.read(BLOCK, 4096).unwrap(), block(7));
}

/// The answer is longer than the few bytes that a chunk may have beside the requested data.
#[test]
fn a_block_status_of_many_extents_is_accepted_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let memory = volume(8 << 20);
    for number in (0..2048).step_by(2) {
        let write = Operation::Write { offset: number * BLOCK, data: block(1), fua: false };
        memory.lock().unwrap().apply(&write).unwrap();
    }
    let _server = Server::start(&path, memory, ServerOptions::default());
    let client = Client::connect(options(&path)).unwrap();
    let expected = (0..2048).map(|number| StatusExtent { length: BLOCK, hole: number % 2 == 1 });
    assert_eq!(
        client.call(Operation::Status { offset: 0, length: 8 << 20 }).unwrap(),
        Payload::Status(expected.collect())
    );
}

#[test]
fn an_absent_server_is_reported_by_address_with_the_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let error = Client::connect(options(&directory.path().join("none.sock"))).err().unwrap();
    assert!(matches!(error, ClientError::Connect { .. }));
    assert!(error.to_string().contains("none.sock"), "{error}");
}

#[test]
fn an_export_of_another_name_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let _server = Server::start(&path, volume(1 << 20), ServerOptions::default());
    let other = ClientOptions { export: "other".into(), ..options(&path) };
    let error = Client::connect(other).err().unwrap();
    assert!(error.to_string().contains("no export of this name"), "{error}");
}

/// Writers have many requests in flight while the server is killed and restarted, and closes
/// connections by itself with answers lost.
#[test]
fn no_request_is_lost_or_fails_while_the_server_is_killed_repeatedly() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let memory = volume(1 << 20);
    let cutting = ServerOptions { cut_every: 97, ..Default::default() };
    let mut server = Server::start(&path, memory.clone(), cutting.clone());
    let client = Arc::new(Client::connect(options(&path)).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let rounds_done = Arc::new(AtomicU64::new(0));
    // Each writer owns 32 blocks and writes all of them in flight at once, round after round.
    let writers: Vec<_> = (0..4u64)
        .map(|writer| {
            let (client, stop, rounds_done) = (client.clone(), stop.clone(), rounds_done.clone());
            std::thread::spawn(move || {
                let mut round = 0u8;
                while !stop.load(Ordering::SeqCst) {
                    round = round.wrapping_add(1);
                    let (sender, receiver) = mpsc::channel();
                    for number in 0..32 {
                        let sender = sender.clone();
                        client.submit(
                            Operation::Write {
                                offset: (writer * 32 + number) * BLOCK,
                                data: block(round),
                                fua: false,
                            },
                            Box::new(move |result| sender.send(result).unwrap()),
                        );
                    }
                    for _ in 0..32 {
                        assert_eq!(receiver.recv().unwrap(), Ok(Payload::None));
                    }
                    let at = writer * 32 * BLOCK;
                    let back = client.read(at, 32 * BLOCK as u32).unwrap();
                    assert!(
                        back.iter().all(|byte| *byte == round),
                        "an acknowledged write was lost"
                    );
                    rounds_done.fetch_add(1, Ordering::SeqCst);
                }
                round
            })
        })
        .collect();
    for _ in 0..8 {
        let seen = rounds_done.load(Ordering::SeqCst);
        while rounds_done.load(Ordering::SeqCst) < seen + 40 {
            std::thread::sleep(Duration::from_millis(1));
        }
        server.stop();
        server = Server::start(&path, memory.clone(), cutting.clone());
    }
    stop.store(true, Ordering::SeqCst);
    let rounds: Vec<u8> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
    for (writer, round) in rounds.into_iter().enumerate() {
        let start = writer * 32 * BLOCK as usize;
        let part = &memory.lock().unwrap().bytes()[start..start + 32 * BLOCK as usize].to_vec();
        assert!(part.iter().all(|byte| *byte == round));
    }
    drop(server);
}

#[test]
fn without_reconnection_a_broken_connection_fails_what_was_in_flight() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    // The handshake's answers come in a few batches; the cut comes soon after it.
    let cutting = ServerOptions { cut_every: 10, ..Default::default() };
    let _server = Server::start(&path, volume(1 << 20), cutting);
    let client = Client::connect(ClientOptions { reconnect: false, ..options(&path) }).unwrap();
    let failed = (0..20).map(|_| client.write(0, block(1), false)).find(Result::is_err);
    assert_eq!(failed, Some(Err(RequestError::Disconnected)));
    assert_eq!(client.flush(), Err(RequestError::Disconnected));
}

#[test]
fn io_held_for_a_dead_server_ends_when_the_client_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let server = Server::start(&path, volume(1 << 20), ServerOptions::default());
    let client = Client::connect(options(&path)).unwrap();
    client.write(0, block(1), false).unwrap();
    server.stop();
    let (sender, receiver) = mpsc::channel();
    client.submit(Operation::Flush, Box::new(move |result| sender.send(result).unwrap()));
    assert_eq!(
        receiver.recv_timeout(Duration::from_millis(200)),
        Err(mpsc::RecvTimeoutError::Timeout),
        "the request is held and has not failed"
    );
    client.stop();
    assert_eq!(receiver.recv().unwrap(), Err(RequestError::Stopped));
}

#[test]
fn a_server_that_returns_with_a_smaller_size_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let server = Server::start(&path, volume(2 << 20), ServerOptions::default());
    let client = Client::connect(options(&path)).unwrap();
    server.stop();
    let small = volume(1 << 20);
    let server = Server::start(&path, small.clone(), ServerOptions::default());
    let (sender, receiver) = mpsc::channel();
    let write = Operation::Write { offset: 0, data: block(1), fua: false };
    client.submit(write, Box::new(move |result| sender.send(result).unwrap()));
    assert!(receiver.recv_timeout(Duration::from_millis(200)).is_err());
    assert_eq!(small.lock().unwrap().writes, 0);
    server.stop();
    let _server = Server::start(&path, volume(4 << 20), ServerOptions::default());
    assert_eq!(
        receiver.recv().unwrap(),
        Ok(Payload::None),
        "a server with a larger size is accepted"
    );
}
