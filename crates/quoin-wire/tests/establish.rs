//! Every way in which two sides fail to reach a session, by what the other side sends or omits.

#[allow(dead_code)]
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use crate::common::session;
use bytes::Bytes;
use quoin_types::ids::SessionKey;
use quoin_types::message::{Failure, FromReplica, ToReplica};
use quoin_types::{Epoch, ReplicaGuid, ReplicaId, VolumeId};
use quoin_wire::establish::{EstablishError, Rejection, answer, dial};
use quoin_wire::handshake::{ClientSecurity, HandshakeError, ServerSecurity};
use quoin_wire::same_host::{PeerAddress, Stream};
use quoin_wire::{Connection, Hello, Opener, Sealer, Welcome, WireError};

fn hello() -> Hello {
    Hello::new(VolumeId(1), ReplicaId(2), ReplicaGuid(3), Bytes::new())
}

fn other_session() -> SessionKey {
    SessionKey { nonce: session().nonce + 1, ..session() }
}

/// A plain connection that sends what a row of a table requires.
struct Raw(Connection);

impl Raw {
    fn over(tcp: TcpStream) -> Self {
        tcp.set_nonblocking(true).unwrap();
        let mut connection = Connection::new(tcp.into(), Sealer::plain(), Opener::plain());
        connection.authenticated(u64::MAX);
        Raw(connection)
    }

    fn flush(&mut self) {
        // The other side may have closed after the first byte that it refused.
        while matches!(self.0.flush(), Ok(false)) {}
    }
}

type Script = fn(TcpStream) -> Option<Raw>;
/// Checks for the refusal that belongs to the sent bytes.
type Matches = fn(&EstablishError) -> bool;

fn raw(script: fn(&mut Connection)) -> impl Fn(TcpStream) -> Option<Raw> {
    move |tcp| {
        let mut raw = Raw::over(tcp);
        script(&mut raw.0);
        raw.flush();
        Some(raw)
    }
}

/// The error of a pool for a target that sends this.
fn error_of_pool(script: impl Fn(TcpStream) -> Option<Raw>) -> EstablishError {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (tcp, from) = listener.accept().unwrap();
    let _open = script(target);
    let security = ServerSecurity::PlainLoopback;
    let verify_peer = |_: &[_], _: &SessionKey, _: &Hello| Err("not accepted".to_owned().into());
    answer(Stream::Tcp(tcp), PeerAddress::Network(from), &security, verify_peer).err().unwrap()
}

#[test]
fn a_pool_refuses_every_first_frame_except_a_hello_that_it_accepts() {
    let rows: [(&str, Script, Matches); 6] = [
        (
            "a message of a session",
            |tcp| raw(|c| c.send_to_replica(session(), &ToReplica::Close).unwrap())(tcp),
            |e| matches!(e, EstablishError::Unexpected),
        ),
        (
            "an answer of a pool",
            |tcp| raw(|c| c.send_from_replica(session(), &FromReplica::Closed).unwrap())(tcp),
            |e| matches!(e, EstablishError::Unexpected),
        ),
        (
            "a Hello that is not accepted",
            |tcp| raw(|c| c.send_hello(session(), &hello()).unwrap())(tcp),
            |e| matches!(e, EstablishError::Rejected(why) if why.reason == "not accepted"),
        ),
        (
            "nothing, and the end",
            |tcp| tcp.shutdown(Shutdown::Both).map(|()| None).unwrap(),
            |e| matches!(e, EstablishError::Wire(WireError::Closed)),
        ),
        (
            "half a frame, and the end",
            |mut tcp| {
                tcp.write_all(b"QuoF\x01").unwrap();
                tcp.shutdown(Shutdown::Write).unwrap();
                None
            },
            |e| matches!(e, EstablishError::Wire(WireError::Closed)),
        ),
        (
            "something of another protocol",
            |mut tcp| {
                tcp.write_all(&[b'x'; 64]).unwrap();
                Some(Raw::over(tcp))
            },
            |e| matches!(e, EstablishError::Wire(WireError::Magic)),
        ),
    ];
    for (what, script, matches) in rows {
        let refusal = error_of_pool(script);
        assert!(matches(&refusal), "{what}: {refusal:?}");
    }
}

/// The error of a target for a pool that answers its Hello with this.
fn error_of_target(script: impl Fn(TcpStream) -> Option<Raw> + Send) -> EstablishError {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let pool = scope.spawn(move || {
            let (mut tcp, _) = listener.accept().unwrap();
            // The content of the Hello does not matter.
            let _ = tcp.read(&mut [0; 4096]).unwrap();
            script(tcp)
        });
        let security = ClientSecurity::PlainLoopback;
        let refusal = dial("pool", address, &security, session(), &hello()).err();
        drop(pool.join().unwrap());
        refusal.unwrap()
    })
}

#[test]
fn a_target_accepts_only_a_welcome_to_its_own_session() {
    fn refuse(failure: Failure) -> FromReplica {
        FromReplica::Refuse { promised: Epoch::ZERO, failure }
    }
    let rows: [(&str, Script, Matches); 5] = [
        (
            "a refusal",
            |tcp| raw(|c| c.send_from_replica(session(), &refuse(Failure::Retired)).unwrap())(tcp),
            |e| matches!(e, EstablishError::Refused(Failure::Retired)),
        ),
        (
            "a welcome to another session",
            |tcp| {
                raw(|c| {
                    c.send_welcome(
                        other_session(),
                        &Welcome { protocol: 1, features: 0, ..Welcome::default() },
                    )
                    .unwrap()
                })(tcp)
            },
            |e| matches!(e, EstablishError::Unexpected),
        ),
        (
            "an answer to nothing",
            |tcp| raw(|c| c.send_from_replica(session(), &FromReplica::Closed).unwrap())(tcp),
            |e| matches!(e, EstablishError::Unexpected),
        ),
        (
            "a Hello of its own",
            |tcp| raw(|c| c.send_hello(session(), &hello()).unwrap())(tcp),
            |e| matches!(e, EstablishError::Unexpected),
        ),
        (
            "the end",
            |tcp| tcp.shutdown(Shutdown::Both).map(|()| None).unwrap(),
            |e| matches!(e, EstablishError::Wire(WireError::Closed)),
        ),
    ];
    for (what, script, matches) in rows {
        let refusal = error_of_target(script);
        assert!(matches(&refusal), "{what}: {refusal:?}");
    }
}

#[test]
fn a_target_stops_waiting_for_a_pool_that_accepts_and_sends_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let security = ClientSecurity::PlainLoopback;
    let refusal = dial("pool", address, &security, session(), &hello()).err();
    assert!(matches!(refusal, Some(EstablishError::Deadline)), "{refusal:?}");
    drop(listener);
    let refusal = dial("pool", address, &security, session(), &hello()).err();
    let refused =
        |e: &EstablishError| matches!(e, EstablishError::Handshake(HandshakeError::Connect { .. }));
    assert!(refusal.as_ref().is_some_and(refused), "{refusal:?}");
}

#[test]
fn a_target_with_a_grant_of_a_former_term_gets_the_newer_term() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let refusal = std::thread::scope(|scope| {
        let pool = scope.spawn(|| {
            let (tcp, from) = listener.accept().unwrap();
            let newer = Rejection { reason: "former".into(), term: Bytes::from_static(b"newer") };
            let verify_peer = |_: &[_], _: &SessionKey, _: &Hello| Err(newer);
            let (stream, from) = (Stream::Tcp(tcp), PeerAddress::Network(from));
            answer(stream, from, &ServerSecurity::PlainLoopback, verify_peer).err().unwrap()
        });
        let plain = ClientSecurity::PlainLoopback;
        let refusal = dial("pool", address, &plain, session(), &hello()).err().unwrap();
        assert!(matches!(pool.join().unwrap(), EstablishError::Rejected(_)));
        refusal
    });
    assert!(matches!(&refusal, EstablishError::FormerTerm(term) if &term[..] == b"newer"));
}
