//! Identities over real sockets: accepted and refused peers, and changes while connections run.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use quoin_identity::{
    Authority, Caller, Expected, Identity, IncomingLimits, Lifetimes, PeerStream, Role,
    serve_incoming,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

fn authority(dir: &Path, holder_s: u64) -> Authority {
    let holder = Duration::from_secs(holder_s);
    Authority::create(dir, Lifetimes { holder, ..Lifetimes::default() }).unwrap()
}

/// Makes one connection between two identities, with a byte each way; returns the error of either
/// side.
async fn connect_both(
    server: &Identity,
    client: &Identity,
    expected: Expected,
) -> Result<(), String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(server.server_config().unwrap());
    let serving = tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.unwrap();
        let mut tls = acceptor.accept(tcp).await.map_err(|e| format!("server: {e}"))?;
        let byte = tls.read_u8().await.map_err(|e| format!("server: {e}"))?;
        tls.write_u8(byte + 1).await.map_err(|e| format!("server: {e}"))
    });
    let connector = TlsConnector::from(client.client_config(expected).unwrap());
    let calling = async {
        let tcp = TcpStream::connect(address).await.unwrap();
        let mut tls = connector
            .connect("quoin".try_into().unwrap(), tcp)
            .await
            .map_err(|e| format!("client: {e}"))?;
        tls.write_u8(1).await.map_err(|e| format!("client: {e}"))?;
        tls.flush().await.map_err(|e| format!("client: {e}"))?;
        match tls.read_u8().await {
            Ok(2) => Ok(()),
            other => Err(format!("client: {other:?}")),
        }
    };
    let called: Result<(), String> = calling.await;
    called.and(serving.await.unwrap())
}

#[tokio::test]
async fn members_of_one_cluster_connect_only_to_the_expected_peer() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 3600);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    connect_both(&pool, &node, Expected::Role(Role::Pool)).await.unwrap();
    connect_both(&pool, &node, Expected::Named(Role::Pool, "p1".into())).await.unwrap();
    connect_both(&pool, &node, Expected::Named(Role::Pool, "p2".into())).await.unwrap_err();
    connect_both(&pool, &node, Expected::Role(Role::Controller)).await.unwrap_err();
}

#[tokio::test]
async fn a_member_of_another_cluster_is_refused_as_client_and_as_server() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ours = authority(here.path(), 3600);
    let theirs = authority(there.path(), 3600);
    let ours = ours.issue_identity(&here.path().join("p"), Role::Pool, "p1").unwrap();
    let theirs = theirs.issue_identity(&there.path().join("p"), Role::Pool, "p1").unwrap();
    connect_both(&ours, &theirs, Expected::Role(Role::Pool)).await.unwrap_err();
    connect_both(&theirs, &ours, Expected::Role(Role::Pool)).await.unwrap_err();
}

#[tokio::test]
async fn an_expired_certificate_is_refused_on_either_side() {
    let dir = tempfile::tempdir().unwrap();
    let brief = authority(dir.path(), 1);
    let pool = brief.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let long = Authority::load(dir.path(), Lifetimes::default()).unwrap();
    let node = long.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    while pool.validity().1 + Duration::from_secs(1) > std::time::SystemTime::now() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    connect_both(&pool, &node, Expected::Role(Role::Pool)).await.unwrap_err();
    connect_both(&node, &pool, Expected::Role(Role::Node)).await.unwrap_err();
}

/// Makes the certificate of an identity one that is valid a day from now.
fn make_early(authority: &Authority, identity: &Identity) {
    let tomorrow = std::time::SystemTime::now() + Duration::from_secs(86_400);
    let request = identity.renewal_request().unwrap();
    identity.install(&authority.issue_at(&request, identity.peer(), tomorrow).unwrap()).unwrap();
}

#[tokio::test]
async fn a_certificate_that_is_not_valid_yet_is_refused_on_either_side_and_is_due() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 30 * 86_400);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    assert!(!pool.is_due() && pool.not_valid_yet().is_none());
    make_early(&authority, &pool);
    assert!(pool.is_due() && !pool.has_run_out());
    assert!(pool.not_valid_yet().unwrap().contains("check this host's clock"));
    connect_both(&pool, &node, Expected::Role(Role::Pool)).await.unwrap_err();
    connect_both(&node, &pool, Expected::Role(Role::Node)).await.unwrap_err();
}

#[tokio::test]
async fn a_member_is_told_of_the_clocks_where_a_controller_is_not_valid_yet_or_has_expired() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 30 * 86_400);
    let issue =
        |role, name: &str| authority.issue_identity(&dir.path().join(name), role, name).unwrap();
    let (controller, node) = (issue(Role::Controller, "controller"), issue(Role::Node, "n1"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = TlsAcceptor::from(controller.controller_config().unwrap());
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let _ = acceptor.accept(tcp).await;
        }
    });
    let now = std::time::SystemTime::now();
    let month = Duration::from_secs(31 * 86_400);
    for (issued_at, word) in [(now + month, "not valid before"), (now - month, "expired at")] {
        let request = controller.renewal_request().unwrap();
        let issued = authority.issue_at(&request, controller.peer(), issued_at).unwrap();
        controller.install(&issued).unwrap();
        let text = node.connect(&address).await.err().expect("refused").to_string();
        assert!(text.contains(word) && text.contains("check this host's clock"), "{text}");
        let year = |text: &str| text.matches("T").count() >= 2 && text.contains("Z");
        assert!(year(&text) && !text.contains("start it"), "both times, no wrong way out: {text}");
        let renewed = node.renew(&address).await.unwrap_err().to_string();
        assert!(renewed.contains("check this host's clock"), "{renewed}");
    }
}

#[tokio::test]
async fn an_authority_whose_clock_was_ahead_as_it_was_rotated_is_believed_by_a_right_one() {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let dir = tempfile::tempdir().unwrap();
    let mut authority = authority(dir.path(), 3600);
    authority.rotate().unwrap();
    let issued = {
        let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
        authority.issue(&pool.renewal_request().unwrap(), pool.peer()).unwrap()
    };
    use rustls_pki_types::{CertificateDer, pem::PemObject};
    let of_authorities = format!("{}{}", issued.chain_pem, issued.authorities_pem);
    let all = CertificateDer::pem_slice_iter(of_authorities.as_bytes());
    let begins: Vec<i64> = all
        .map(|der| {
            let der = der.unwrap();
            let (_, parsed) = X509Certificate::from_der(&der).unwrap();
            parsed.validity().not_before.timestamp()
        })
        .collect();
    // The member's own, the cross certificate, and both authorities.
    assert_eq!(begins.len(), 4);
    assert!(begins[0] > 0 && begins[1..] == [0, 0, 0], "{begins:?}");
}

#[tokio::test]
async fn during_a_rotation_old_and_new_certificates_connect_in_every_pairing() {
    let dir = tempfile::tempdir().unwrap();
    let mut authority = authority(dir.path(), 3600);
    let old_pool = authority.issue_identity(&dir.path().join("p1"), Role::Pool, "p1").unwrap();
    let old_node = authority.issue_identity(&dir.path().join("n1"), Role::Node, "n1").unwrap();
    let fingerprint = authority.fingerprint();
    authority.rotate().unwrap();
    assert_ne!(fingerprint, authority.fingerprint());
    assert!(authority.rotate().is_err(), "a second rotation must wait for the first");
    let authority = Authority::load(dir.path(), Lifetimes::default()).unwrap();
    let new_pool = authority.issue_identity(&dir.path().join("p2"), Role::Pool, "p2").unwrap();
    let new_node = authority.issue_identity(&dir.path().join("n2"), Role::Node, "n2").unwrap();
    for pool in [&old_pool, &new_pool] {
        for node in [&old_node, &new_node] {
            connect_both(pool, node, Expected::Role(Role::Pool)).await.unwrap();
        }
    }
}

#[tokio::test]
async fn after_an_immediate_replacement_the_former_authority_is_not_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let mut authority = authority(dir.path(), 3600);
    let old_node = authority.issue_identity(&dir.path().join("n1"), Role::Node, "n1").unwrap();
    // Connections succeed in the middle of a rotation as well.
    authority.rotate().unwrap();
    let middle = authority.issue_identity(&dir.path().join("n3"), Role::Node, "n3").unwrap();
    authority.rotate_at_once().unwrap();
    let authority = Authority::load(dir.path(), Lifetimes::default()).unwrap();
    assert_eq!(authority.authorities_pem().matches("BEGIN").count(), 1);
    let pool = authority.issue_identity(&dir.path().join("p2"), Role::Pool, "p2").unwrap();
    let node = authority.issue_identity(&dir.path().join("n2"), Role::Node, "n2").unwrap();
    connect_both(&pool, &old_node, Expected::Role(Role::Pool)).await.unwrap_err();
    connect_both(&pool, &middle, Expected::Role(Role::Pool)).await.unwrap_err();
    connect_both(&pool, &node, Expected::Role(Role::Pool)).await.unwrap();
}

#[tokio::test]
async fn a_former_authority_is_removed_after_its_last_certificate_expired() {
    let dir = tempfile::tempdir().unwrap();
    let mut authority = authority(dir.path(), 1);
    let stale = authority.issue_identity(&dir.path().join("stale"), Role::Node, "n1").unwrap();
    authority.rotate().unwrap();
    assert_eq!(authority.authorities_pem().matches("BEGIN").count(), 2);
    while !authority.forget_former().unwrap() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(authority.authorities_pem().matches("BEGIN").count(), 1);
    authority.rotate().unwrap();
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    connect_both(&pool, &stale, Expected::Role(Role::Pool)).await.unwrap_err();
}

#[tokio::test]
async fn a_renewed_certificate_is_used_by_existing_configurations() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 3600);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    let connector = node.client_config(Expected::Role(Role::Pool)).unwrap();
    let acceptor = pool.server_config().unwrap();
    let issued = authority.issue(&pool.renewal_request().unwrap(), pool.peer()).unwrap();
    pool.install(&issued).unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.unwrap();
        let mut tls = TlsAcceptor::from(acceptor).accept(tcp).await.unwrap();
        let _ = tls.read_u8().await;
    });
    let tcp = TcpStream::connect(address).await.unwrap();
    let connected =
        TlsConnector::from(connector).connect("quoin".try_into().unwrap(), tcp).await.unwrap();
    let shown = connected.get_ref().1.peer_certificates().unwrap()[0].clone();
    let on_disk = std::fs::read(dir.path().join("p/cert.pem")).unwrap();
    use rustls_pki_types::{CertificateDer, pem::PemObject};
    assert_eq!(shown, CertificateDer::from_pem_slice(&on_disk).unwrap());
}

#[tokio::test]
async fn a_certificate_is_renewed_at_two_thirds_of_its_lifetime() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 36_000);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let (from, until) = pool.validity();
    let life = until.duration_since(from).unwrap();
    assert!(life >= Duration::from_secs(36_000), "{life:?}");
    let after = pool.renew_at().duration_since(from).unwrap();
    assert_eq!(after * 3, life * 2, "renewed {after:?} into {life:?}");
}

#[tokio::test]
async fn an_identity_refuses_certificates_of_another_name_or_key() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 3600);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    let other_name = authority.issue(&pool.renewal_request().unwrap(), node.peer()).unwrap();
    let other_key = authority.issue(&node.renewal_request().unwrap(), pool.peer()).unwrap();
    let before = std::fs::read(dir.path().join("p/cert.pem")).unwrap();
    pool.install(&other_name).unwrap_err();
    pool.install(&other_key).unwrap_err();
    assert_eq!(before, std::fs::read(dir.path().join("p/cert.pem")).unwrap());
}

#[test]
fn an_incomplete_or_damaged_directory_is_refused_by_file_and_the_key_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 3600);
    let home = dir.path().join("p");
    authority.issue_identity(&home, Role::Pool, "p1").unwrap();
    let mode = std::fs::metadata(home.join("key.pem")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for file in ["cluster.json", "ca.pem", "key.pem", "cert.pem"] {
        let kept = std::fs::read(home.join(file)).unwrap();
        std::fs::write(home.join(file), "nonsense").unwrap();
        let error = Identity::load(&home).unwrap_err().to_string();
        assert!(error.contains(file), "{file}: {error}");
        std::fs::remove_file(home.join(file)).unwrap();
        let error = Identity::load(&home).unwrap_err().to_string();
        assert!(error.contains(file) || error.contains("--join"), "{file}: {error}");
        std::fs::write(home.join(file), kept).unwrap();
    }
    Identity::load(&home).unwrap();
    assert!(Authority::create(dir.path(), Lifetimes::default()).is_err(), "never overwritten");
}

/// Connects without a certificate, as a newcomer does, and trusts any server.
async fn anonymous(address: std::net::SocketAddr) -> std::io::Result<()> {
    let mut tcp = TcpStream::connect(address).await?;
    tcp.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
    let mut answer = Vec::new();
    tcp.read_to_end(&mut answer).await?;
    Ok(())
}

#[tokio::test]
async fn garbage_and_silence_on_the_port_delay_no_member() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 3600);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = IncomingLimits { handshakes_max: 8, handshake_ms: 300, ..Default::default() };
    let mut incoming =
        std::pin::pin!(serve_incoming(listener, pool.server_config().unwrap(), limits));

    let mut silent = Vec::new();
    for _ in 0..32 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    for _ in 0..16 {
        tokio::spawn(anonymous(address));
    }
    let connector = TlsConnector::from(node.client_config(Expected::Role(Role::Pool)).unwrap());
    let calling = tokio::spawn(async move {
        let tcp = TcpStream::connect(address).await.unwrap();
        let mut tls = connector.connect("quoin".try_into().unwrap(), tcp).await.unwrap();
        tls.write_u8(7).await.unwrap();
        tls.flush().await.unwrap();
        tls
    });
    let mut stream = incoming.next().await.unwrap().unwrap();
    let Caller::Member(member) = stream.caller() else { panic!("{:?}", stream.caller()) };
    assert_eq!(&member.peer, node.peer());
    assert_eq!(stream.read_u8().await.unwrap(), 7);
    calling.await.unwrap();
}

/// A port whose time limits are far longer than a test, so that only its counts decide.
struct Port {
    _dir: tempfile::TempDir,
    node: Identity,
    address: std::net::SocketAddr,
    incoming: std::pin::Pin<Box<dyn futures::Stream<Item = std::io::Result<PeerStream>> + Send>>,
}

impl Port {
    async fn with(limits: IncomingLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = authority(dir.path(), 3600);
        let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
        let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let incoming = Box::pin(serve_incoming(listener, pool.server_config().unwrap(), limits));
        Self { _dir: dir, node, address, incoming }
    }

    /// Connects from one of the addresses of the loopback.
    async fn dial(&self, from: u8) -> TcpStream {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, from], 0).into()).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    /// Returns the member's connection of both sides; `None`: it was refused.
    async fn member(&mut self, from: u8) -> Option<(TlsStream<TcpStream>, PeerStream)> {
        let config = self.node.client_config(Expected::Role(Role::Pool)).unwrap();
        let tcp = self.dial(from).await;
        let connected = TlsConnector::from(config).connect("quoin".try_into().unwrap(), tcp);
        let both = async { tokio::join!(connected, self.incoming.next()) };
        let (client, server) = tokio::time::timeout(Duration::from_secs(5), both).await.ok()?;
        Some((client.ok()?, server?.ok()?))
    }
}

const LONG_MS: u64 = 600_000;

#[tokio::test]
async fn silent_connections_from_many_addresses_do_not_block_a_member() {
    let limits = IncomingLimits {
        unauthenticated_max: 16,
        first_bytes_ms: LONG_MS,
        handshake_ms: LONG_MS,
        ..Default::default()
    };
    let mut port = Port::with(limits).await;
    let mut silent = Vec::new();
    for from in (2..=60).cycle().take(177) {
        silent.push(port.dial(from).await);
    }
    assert!(port.member(1).await.is_some());
    // A part of a first message is not enough.
    for tcp in &mut silent {
        let _ = tcp.write_all(&[0x16]).await;
    }
    assert!(port.member(1).await.is_some());
}

#[tokio::test]
async fn endless_handshakes_of_one_address_leave_slots_for_other_addresses() {
    let limits = IncomingLimits {
        handshakes_max: 8,
        first_bytes_ms: LONG_MS,
        handshake_ms: LONG_MS,
        ..Default::default()
    };
    let mut port = Port::with(limits).await;
    let config = port.node.client_config(Expected::Role(Role::Pool)).unwrap();
    let mut begun = Vec::new();
    for _ in 0..40 {
        let name = "quoin".try_into().unwrap();
        let mut client = rustls::ClientConnection::new(config.clone(), name).unwrap();
        let mut hello = Vec::new();
        client.write_tls(&mut hello).unwrap();
        let mut tcp = port.dial(2).await;
        tcp.write_all(&hello).await.unwrap();
        begun.push(tcp);
    }
    assert!(port.member(1).await.is_some());
    assert!(port.member(2).await.is_none(), "the share of this address is used up");
    begun.clear();
    assert!(port.member(2).await.is_some());
}

#[tokio::test]
async fn a_member_gets_at_most_its_share_of_the_connections() {
    let limits = IncomingLimits { connections_a_member_max: 3, ..Default::default() };
    let mut port = Port::with(limits).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(port.member(1).await.unwrap());
    }
    assert!(port.member(1).await.is_none());
    held.pop();
    assert!(port.member(1).await.is_some());
}

#[tokio::test]
async fn a_connection_ends_with_the_certificate_that_opened_it() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 2);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let node = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = pool.server_config().unwrap();
    let mut incoming = std::pin::pin!(serve_incoming(listener, config, Default::default()));
    let connector = TlsConnector::from(node.client_config(Expected::Role(Role::Pool)).unwrap());
    let calling = tokio::spawn(async move {
        let tcp = TcpStream::connect(address).await.unwrap();
        connector.connect("quoin".try_into().unwrap(), tcp).await.unwrap()
    });
    let mut stream = incoming.next().await.unwrap().unwrap();
    let _client = calling.await.unwrap();
    let error = stream.read_u8().await.unwrap_err();
    assert!(error.to_string().contains("run out"), "{error}");
}

#[test]
fn server_configurations_give_no_session_tickets() {
    let dir = tempfile::tempdir().unwrap();
    let authority = authority(dir.path(), 3600);
    let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p1").unwrap();
    let config: Arc<rustls::ServerConfig> = pool.server_config().unwrap();
    assert_eq!(config.send_tls13_tickets, 0);
    assert!(!config.session_storage.can_cache());
}
