//! Proofs of identity before the first frame: by the network, and within a host.

use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::common::{session, through};
use bytes::{Bytes, BytesMut};
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};
use quoin_wire::handshake::{
    ClientSecurity, Established, HandshakeError, ServerSecurity, accept, connect, connect_same_host,
};
use quoin_wire::same_host::{PeerAddress, Stream};
use quoin_wire::security::Mode;
use quoin_wire::{Connection, Frame, Hello, Opener, Sealer, SupportedProtocol, Welcome, WireError};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    certificate: CertificateDer<'static>,
}

fn authority() -> Authority {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap().der().clone();
    Authority { issuer: rcgen::Issuer::new(params, key), certificate }
}

fn identity(by: &Authority) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["quoin".to_string()]).unwrap();
    let certificate = params.signed_by(&key, &by.issuer).unwrap();
    (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
}

fn roots(of: &Authority) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(of.certificate.clone()).unwrap();
    Arc::new(roots)
}

fn client(own: &Authority, trusted: &Authority, mode: Mode) -> ClientSecurity {
    let (chain, key) = identity(own);
    let config = ClientConfig::builder()
        .with_root_certificates(roots(trusted))
        .with_client_auth_cert(chain, key)
        .unwrap();
    ClientSecurity::Tls {
        config: Arc::new(config),
        server_name: ServerName::try_from("quoin").unwrap(),
        mode,
    }
}

fn server(own: &Authority, least: Mode) -> ServerSecurity {
    let verifier = rustls::server::WebPkiClientVerifier::builder(roots(own)).build().unwrap();
    let (chain, key) = identity(own);
    let config = ServerConfig::builder()
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .unwrap();
    ServerSecurity::Tls { config: Arc::new(config), least }
}

type Outcome = Result<Established, HandshakeError>;

fn both(client: &ClientSecurity, server: &ServerSecurity) -> (Outcome, Outcome) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (tcp, from) = listener.accept().unwrap();
            accept(Stream::Tcp(tcp), PeerAddress::Network(from), server)
        });
        let connected = connect(address, client);
        (connected, accepted.join().unwrap())
    })
}

/// Same as [`both`], within the host.
fn both_here(client: &ClientSecurity, server: &ServerSecurity) -> (Outcome, Outcome) {
    let (here, there) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let accepted =
            scope.spawn(|| accept(Stream::SameHost(there), PeerAddress::SameHost, server));
        let connected = connect_same_host(here, client);
        (connected, accepted.join().unwrap())
    })
}

fn connection(e: Established) -> Connection {
    let mut connection = Connection::new(e.socket, e.sealer, e.opener);
    connection.authenticated(0);
    connection
}

#[test]
fn authenticated_peers_exchange_frames_in_the_mode_of_the_client() {
    let authority = authority();
    for mode in [Mode::Authenticate, Mode::Encrypt] {
        let (a, b) =
            both(&client(&authority, &authority, mode), &server(&authority, Mode::Authenticate));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((a.mode, b.mode), (mode, mode));
        assert_eq!((a.peer_certificates.len(), b.peer_certificates.len()), (1, 1));
        let (mut a, mut b) = (connection(a), connection(b));
        let hello = Hello::new(VolumeId(1), ReplicaId(2), ReplicaGuid(3), Bytes::new());
        a.send_hello(session(), &hello).unwrap();
        assert_eq!(through(&mut a, &mut b), [Frame::Hello(hello)]);
        b.send_from_replica(session(), &FromReplica::Closed).unwrap();
        assert_eq!(through(&mut b, &mut a), [Frame::FromReplica(FromReplica::Closed)]);
    }
}

/// The protected bytes of a side's first frame.
fn first_frame_of(sealer: Sealer) -> Vec<u8> {
    use std::io::Read;
    let (here, mut there) = UnixStream::pair().unwrap();
    here.set_nonblocking(true).unwrap();
    let mut connection = Connection::new(here.into(), sealer, Opener::plain());
    connection.authenticated(0);
    connection.send_to_replica(session(), &ToReplica::Close).unwrap();
    assert!(connection.flush().unwrap());
    drop(connection);
    let mut bytes = Vec::new();
    there.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn each_direction_of_each_connection_has_a_key_of_its_own_and_a_reflected_frame_fails_its_tag() {
    let authority = authority();
    for mode in [Mode::Authenticate, Mode::Encrypt] {
        let server = server(&authority, Mode::Authenticate);
        let (a, b) = both(&client(&authority, &authority, mode), &server);
        let (c, _) = both(&client(&authority, &authority, mode), &server);
        let (mut a, mut b) = (a.unwrap(), b.unwrap());
        let [of_client, of_server, of_next] =
            [a.sealer, b.sealer, c.unwrap().sealer].map(first_frame_of);
        assert_ne!(of_client, of_server, "{mode:?}: both directions have one key");
        assert_ne!(of_client, of_next, "{mode:?}: two connections have one key");
        let reflected = a.opener.open(BytesMut::from(&of_client[..]));
        assert!(matches!(reflected, Err(WireError::Tag)), "{mode:?}: {reflected:?}");
        let reflected = b.opener.open(BytesMut::from(&of_server[..]));
        assert!(matches!(reflected, Err(WireError::Tag)), "{mode:?}: {reflected:?}");
        // A refused frame has used up its count, so these use a connection of their own.
        let (a, b) = both(&client(&authority, &authority, mode), &server);
        let (mut a, mut b) = (a.unwrap(), b.unwrap());
        b.opener.open(BytesMut::from(&first_frame_of(a.sealer)[..])).unwrap();
        a.opener.open(BytesMut::from(&first_frame_of(b.sealer)[..])).unwrap();
    }
}

#[test]
fn a_silent_peer_is_disconnected_before_a_slow_one() {
    let authority = authority();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _silent = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, from) = listener.accept().unwrap();
    let from = PeerAddress::Network(from);
    let refused = accept(Stream::Tcp(accepted), from, &server(&authority, Mode::Encrypt));
    assert!(matches!(refused, Err(HandshakeError::Silent)), "{:?}", refused.err());
}

#[test]
fn within_a_host_both_sides_are_authenticated_and_frames_are_plain() {
    let (ours, foreign) = (authority(), authority());
    let (a, b) = both_here(&client(&ours, &ours, Mode::Encrypt), &server(&ours, Mode::Encrypt));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_eq!((a.mode, b.mode), (Mode::Plain, Mode::Plain));
    assert_eq!((a.peer_certificates.len(), b.peer_certificates.len()), (1, 1));
    let (mut a, mut b) = (connection(a), connection(b));
    b.send_from_replica(session(), &FromReplica::Closed).unwrap();
    assert_eq!(through(&mut b, &mut a), [Frame::FromReplica(FromReplica::Closed)]);
    let (_, b) = both_here(&client(&foreign, &ours, Mode::Encrypt), &server(&ours, Mode::Encrypt));
    assert!(matches!(b, Err(HandshakeError::Tls(_))));
    let (a, _) = both_here(&client(&ours, &ours, Mode::Encrypt), &server(&foreign, Mode::Encrypt));
    assert!(matches!(a, Err(HandshakeError::Tls(_))));
}

#[test]
fn no_network_connection_is_plain_even_through_a_relay_on_another_host() {
    // One side believes that it is within a host; the other one knows that it is not.
    let authority = authority();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    let (client, server) =
        (client(&authority, &authority, Mode::Encrypt), server(&authority, Mode::Encrypt));
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (tcp, from) = listener.accept().unwrap();
            accept(Stream::Tcp(tcp), PeerAddress::Network(from), &server)
        });
        let tcp = std::net::TcpStream::connect(address).unwrap();
        for (mut from, mut to) in [
            (Stream::SameHost(there.try_clone().unwrap()), Stream::Tcp(tcp.try_clone().unwrap())),
            (Stream::Tcp(tcp), Stream::SameHost(there)),
        ] {
            scope.spawn(move || std::io::copy(&mut from, &mut to));
        }
        assert!(connect_same_host(here, &client).is_err());
        assert!(accepted.join().unwrap().is_err());
    });
}

#[test]
fn a_server_set_to_encrypt_refuses_a_client_that_only_authenticates() {
    let authority = authority();
    let (a, b) = both(
        &client(&authority, &authority, Mode::Authenticate),
        &server(&authority, Mode::Encrypt),
    );
    assert!(a.is_err() && b.is_err());
}

#[test]
fn a_certificate_of_another_authority_is_refused_on_either_side() {
    let (ours, foreign) = (authority(), authority());
    let (_, b) = both(&client(&foreign, &ours, Mode::Encrypt), &server(&ours, Mode::Encrypt));
    assert!(matches!(b, Err(HandshakeError::Tls(_))));
    let (a, _) = both(&client(&ours, &ours, Mode::Encrypt), &server(&foreign, Mode::Encrypt));
    assert!(matches!(a, Err(HandshakeError::Tls(_))));
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let authority = authority();
    let config =
        ClientConfig::builder().with_root_certificates(roots(&authority)).with_no_client_auth();
    let anonymous = ClientSecurity::Tls {
        config: Arc::new(config),
        server_name: ServerName::try_from("quoin").unwrap(),
        mode: Mode::Encrypt,
    };
    let (_, b) = both(&anonymous, &server(&authority, Mode::Encrypt));
    assert!(matches!(b, Err(HandshakeError::Tls(_))));
}

#[test]
fn garbage_in_place_of_a_handshake_is_refused_at_once() {
    use std::io::Write;
    let authority = authority();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 600], &[0x16, 3, 1, 0xff, 0xff]] {
        let mut tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcp.write_all(garbage).unwrap();
        let (accepted, from) = listener.accept().unwrap();
        let from = PeerAddress::Network(from);
        let refused = accept(Stream::Tcp(accepted), from, &server(&authority, Mode::Encrypt));
        assert!(matches!(refused, Err(HandshakeError::NotTls)));
    }
}

#[test]
fn plain_connections_are_refused_beyond_the_loopback() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (tcp, _) = listener.accept().unwrap();
    let beyond = PeerAddress::Network("192.0.2.7:900".parse().unwrap());
    let refused = accept(Stream::Tcp(tcp), beyond, &ServerSecurity::PlainLoopback);
    assert!(matches!(refused, Err(HandshakeError::PlainBeyondLoopback(_))));
}

/// Dials a pool with the versions `pool`, as a target whose Hello is `hello`.
fn dial_pool_that_answers(
    hello: &Hello,
    answer_with: impl FnOnce(&Hello) -> Welcome + Send,
) -> (String, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let text = |outcome: Result<(), String>| outcome.err().unwrap_or_default();
    std::thread::scope(|scope| {
        let pool = scope.spawn(move || {
            let (tcp, from) = listener.accept().unwrap();
            let established = accept(
                Stream::Tcp(tcp),
                PeerAddress::Network(from),
                &ServerSecurity::PlainLoopback,
            );
            let mut connection = connection(established.unwrap());
            let hello = loop {
                connection.receive().unwrap();
                if let Some(incoming) = connection.next_frame().unwrap() {
                    let Frame::Hello(hello) = incoming.frame else { panic!("no Hello") };
                    break hello;
                }
            };
            let welcome = answer_with(&hello);
            connection.send_welcome(session(), &welcome).unwrap();
            while !connection.flush().unwrap() {}
            welcome.validate(&hello)
        });
        let target = quoin_wire::establish::dial(
            "pool",
            address,
            &ClientSecurity::PlainLoopback,
            session(),
            hello,
        );
        (text(target.map(drop).map_err(|e| e.to_string())), text(pool.join().unwrap()))
    })
}

/// Result of [`quoin_wire::establish::answer`] for this Hello.
fn dial_accepting_pool(hello: &Hello) -> (Result<(), String>, Result<(), String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let pool = scope.spawn(|| {
            let (tcp, from) = listener.accept().unwrap();
            let from = PeerAddress::Network(from);
            let security = ServerSecurity::PlainLoopback;
            quoin_wire::establish::answer(Stream::Tcp(tcp), from, &security, |_, _, _| Ok(()))
        });
        let target = quoin_wire::establish::dial(
            "pool",
            address,
            &ClientSecurity::PlainLoopback,
            session(),
            hello,
        );
        let text = |error: quoin_wire::establish::EstablishError| error.to_string();
        (target.map(drop).map_err(text), pool.join().unwrap().map(drop).map_err(text))
    })
}

fn newer_hello() -> Hello {
    Hello::new(VolumeId(1), ReplicaId(2), ReplicaGuid(3), Bytes::new())
}

/// The Welcome of [`quoin_wire::establish::answer`] to this Hello.
fn welcome_of(hello: &Hello) -> Welcome {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (tcp, from) = listener.accept().unwrap();
            let (from, security) = (PeerAddress::Network(from), ServerSecurity::PlainLoopback);
            quoin_wire::establish::answer(Stream::Tcp(tcp), from, &security, |_, _, _| Ok(()))
        });
        let mut target = connection(connect(address, &ClientSecurity::PlainLoopback).unwrap());
        target.send_hello(session(), hello).unwrap();
        while !target.flush().unwrap() {}
        loop {
            target.receive().unwrap();
            if let Some(incoming) = target.next_frame().unwrap() {
                let Frame::Welcome(welcome) = incoming.frame else { panic!("no Welcome") };
                break welcome;
            }
        }
    })
}

#[test]
fn a_target_of_a_later_version_opens_a_session_in_this_version() {
    let later = Hello { protocol_max: 9, features_optional: u64::MAX, ..newer_hello() };
    assert_eq!(dial_accepting_pool(&later), (Ok(()), Ok(())));
    let (here, agreed) = (SupportedProtocol::THIS_BUILD, welcome_of(&later));
    assert_eq!((agreed.protocol, agreed.features), (here.newest, here.features));
}

#[test]
fn a_target_that_this_pool_cannot_serve_is_refused_and_both_sides_name_the_update() {
    let only_later = Hello { protocol_min: 7, protocol_max: 9, ..newer_hello() };
    let (target, pool) = dial_accepting_pool(&only_later);
    for error in [target.unwrap_err(), pool.unwrap_err()] {
        assert!(error.contains("7 to 9") && error.ends_with("update the pool"), "{error}");
    }
    let (target, pool) =
        dial_accepting_pool(&Hello { features_required: 1 << 40, ..newer_hello() });
    for error in [target.unwrap_err(), pool.unwrap_err()] {
        assert!(error.contains("0x10000000000") && error.ends_with("update the pool"), "{error}");
    }
}

#[test]
fn a_pool_that_is_too_new_or_answers_with_unknown_features_is_refused_by_name() {
    let later = SupportedProtocol { oldest: 4, newest: 5, features: 0 };
    let (target, pool) = dial_pool_that_answers(&newer_hello(), |hello| hello.negotiate(&later));
    assert!(target.ends_with(&pool) && pool.ends_with("update the target"), "{target} {pool}");
    let (target, _) = dial_pool_that_answers(&newer_hello(), |_| Welcome {
        protocol: 1,
        features: 1 << 9,
        ..Welcome::default()
    });
    assert!(target.contains("did not offer"), "{target}");
    let fits = dial_pool_that_answers(&newer_hello(), |hello| {
        hello.negotiate(&SupportedProtocol { oldest: 1, newest: 5, features: 3 })
    });
    assert_eq!(fits, (String::new(), String::new()));
}
