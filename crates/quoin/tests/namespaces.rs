//! Several hosts: every part in a network namespace of its own, joined by tokens over real
//! addresses. A cut link, certificates and tokens of every wrong kind, and a port scanner's garbage
//! disturb no IO. Needs root and iproute2.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::nbd::{FUA, Nbd, WRITE};
use common::network::Network;
use common::{Cluster, eventually};
use quoin_identity::{Authority, Expected, Identity, JoinRequest, Lifetimes, Role};
use quoin_types::ids::SessionKey;
use quoin_types::{Epoch, Incarnation};
use quoin_wire::establish::{EstablishError, dial};
use quoin_wire::handshake::ClientSecurity;
use quoin_wire::{Hello, Mode, SupportedProtocol};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

fn client(directory: &Path) -> Arc<rustls::ClientConfig> {
    let identity = Identity::load(directory).unwrap();
    identity.client_config(Expected::Role(Role::Node)).unwrap()
}

/// Continuous IO; it ends at the first error.
struct Io {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<Result<(), String>>,
}

impl Io {
    fn start(mut volume: Nbd) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (stop.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            for round in 0u64.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let (at, byte) = (round * 7919 % 1024 * 4096, round as u8);
                let written = volume.call(WRITE, FUA, at, 4096, &[byte; 4096]);
                written.map_err(|e| e.to_string())?.map_err(|e| format!("error {e}"))?;
                let read = volume.read(at, 4096).map_err(|e| e.to_string())?;
                if read != [byte; 4096] {
                    return Err(format!("round {round} read something else"));
                }
                counted.store(round, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        });
        Self { stop, rounds, thread }
    }

    fn assert_progress(&self, what: &str) {
        let from = self.rounds.load(Ordering::Relaxed);
        eventually(what, || {
            let on = self.rounds.load(Ordering::Relaxed) > from + 20;
            (on || self.thread.is_finished()).then_some(())
        });
        assert!(!self.thread.is_finished(), "{what}: the client got an error");
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap().unwrap();
    }
}

fn in_sync(volume: &serde_json::Value) -> usize {
    let replicas = volume["replicas"].as_array().unwrap();
    replicas.iter().filter(|replica| replica["phase"] == "InSync").count()
}

#[test]
fn separate_hosts_serve_a_volume_undisturbed_by_unauthorized_peers() {
    let Some(network) = Network::new(&["c", "p1", "p2", "p3", "n"]) else { return };
    let mut cluster = Cluster::start("netns", &network.place(0), &[]);
    for (index, name) in [(1, "p1"), (2, "p2"), (3, "p3")] {
        cluster.pool(&network.place(index), name, &[]);
    }
    let nbd = format!("{}:10809", network.place(4).address);
    cluster.node(&network.place(4), "n1", &["--nbd-listen", &nbd], &[]);
    cluster.wait_for_pools(3);

    cluster.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let uri = cluster.ok(&["volume", "attach", "db", "--nbd=tcp"]);
    assert_eq!(uri, "nbds://n1:10809/db");
    let identity = cluster.scratch.0.join("node");
    let io = Io::start(Nbd::connect(&nbd, Some(client(&identity)), "db").unwrap());
    io.assert_progress("the first IO");
    cluster.wait_for_volume("db", "whole", |volume| in_sync(volume) == 3);

    // One host is cut off: IO continues with the others, and it catches up when it is back.
    network.link(3, "down");
    io.assert_progress("with one host cut off");
    cluster.wait_for_volume("db", "degraded", |volume| in_sync(volume) < 3);
    io.assert_progress("degraded");
    network.link(3, "up");
    cluster.wait_for_volume("db", "whole again", |volume| in_sync(volume) == 3);
    io.assert_progress("whole again");

    wrong_tokens(&cluster);
    wrong_certificates(&cluster, &nbd);
    io.assert_progress("after the strangers");
    // Every TCP port that a part of the cluster listens on.
    let pools = cluster.json(&["pool", "list"]);
    let mut ports: Vec<String> = pools
        .as_array()
        .unwrap()
        .iter()
        .map(|pool| pool["address"].as_str().unwrap().to_owned())
        .collect();
    ports.extend([cluster.controller.clone(), nbd.clone()]);
    assert_eq!(ports.len(), 5);
    let before: Vec<_> = cluster.processes.iter().map(|p| descriptors(p.pid())).collect();
    for port in &ports {
        scan(port);
    }
    io.assert_progress("after the scan");
    for (index, before) in before.into_iter().enumerate() {
        let process = &mut cluster.processes[index];
        assert!(process.is_alive(), "{} died of garbage", process.name);
        let (name, pid) = (process.name.clone(), process.pid());
        // Handshakes without an end have deadlines; after them all resources are freed.
        eventually(&format!("{name} keeps no descriptor of a stranger"), || {
            (descriptors(pid) <= before + 4).then_some(())
        });
    }
    cluster.wait_for_volume("db", "whole at the end", |volume| in_sync(volume) == 3);
    io.end();
    let panics = |name: &str| cluster.log(name).contains("panicked");
    for process in &cluster.processes {
        assert!(
            !panics(&process.name),
            "{} panicked:\n{}",
            process.name,
            cluster.log(&process.name)
        );
    }
}

fn descriptors(pid: u32) -> usize {
    // `nsenter` becomes the program, so the pid is the program's own.
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

fn join(
    cluster: &Cluster,
    token: &str,
    role: Role,
    name: &str,
    to: &str,
) -> Result<Identity, String> {
    let request = JoinRequest {
        controller: cluster.controller.clone(),
        token: token.parse().map_err(|e: quoin_identity::Error| e.to_string())?,
        role,
        name: name.into(),
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let directory = cluster.path(to);
    let joined = quoin_identity::load_or_join(Path::new(&directory), Some(&request));
    runtime.block_on(joined).map_err(|e| e.to_string())
}

fn wrong_tokens(cluster: &Cluster) {
    let token = cluster.token("pool");
    // A pool's token makes no node, and the attempt does not use it up.
    let refused = join(cluster, &token, Role::Node, "n9", "as-node").unwrap_err();
    assert!(refused.contains("token") || refused.contains("pool"), "{refused}");
    join(cluster, &token, Role::Pool, "p9", "p9").unwrap();
    let again = join(cluster, &token, Role::Pool, "p10", "p10").unwrap_err();
    assert!(again.contains("used"), "{again}");

    // An expired token: the shortest possible validity is a second.
    let expired = expiring_token(cluster);
    std::thread::sleep(Duration::from_millis(1_500));
    let late = join(cluster, &expired, Role::Pool, "p11", "p11").unwrap_err();
    assert!(late.contains("expired"), "{late}");

    // A token of another cluster names an authority that this controller is not.
    let elsewhere = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let made = runtime
        .block_on(quoin_control::init(elsewhere.path(), Lifetimes::default()))
        .unwrap()
        .join_token
        .to_string();
    assert!(join(cluster, &made, Role::Pool, "p12", "p12").is_err());
}

/// Returns a token that is valid for one second, requested as `quoin token create` does.
fn expiring_token(cluster: &Cluster) -> String {
    use quoin_api::control::CreateJoinTokenRequest;
    use quoin_api::control::cluster_client::ClusterClient;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let channel = quoin_identity::unix_channel(&cluster.scratch.0.join("run/admin.sock"));
        let request =
            CreateJoinTokenRequest { role: "pool".into(), ttl_s: 1, ..Default::default() };
        ClusterClient::new(channel).create_join_token(request).await.unwrap().into_inner().token
    })
}

/// Checks the answer to each wrong certificate at the controller, at a pool and at the NBD port.
fn wrong_certificates(cluster: &Cluster, nbd: &str) {
    let other = tempfile::tempdir().unwrap();
    let stranger = Authority::create(&other.path().join("ca"), Lifetimes::default()).unwrap();
    stranger.issue_identity(&other.path().join("n1"), Role::Node, "n1").unwrap();
    // The authority's own key, with which an expired and a stolen-role certificate are made.
    let theirs = other.path().join("authority");
    std::fs::create_dir(&theirs).unwrap();
    let authority = cluster.scratch.0.join("controller/authority.json");
    std::fs::copy(authority, theirs.join("authority.json")).unwrap();
    let short = Lifetimes { holder: Duration::from_secs(1), ..Lifetimes::default() };
    let brief = Authority::load(&theirs, short).unwrap();
    brief.issue_identity(&other.path().join("expired"), Role::Node, "n1").unwrap();
    std::thread::sleep(Duration::from_millis(2_100));

    for (name, what) in [("n1", "another authority's"), ("expired", "an expired")] {
        let directory = other.path().join(name);
        assert!(
            Nbd::connect(nbd, Some(client(&directory)), "db").is_err(),
            "{what} certificate opened a volume"
        );
        let identity = Identity::load(&directory).unwrap();
        let refused = acquire(cluster, &identity, "n1").unwrap_err();
        assert!(refused.code() != tonic::Code::PermissionDenied, "{what} was accepted: {refused}");
    }
    wrong_certificates_at_a_pool(cluster, other.path());
    // A pool that calls itself a node: its certificate has its true role.
    let pool = Identity::load(&cluster.scratch.0.join("p1")).unwrap();
    let refused = acquire(cluster, &pool, "n1").unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    assert!(refused.message().contains("pool p1"), "{refused}");
    let directory = cluster.scratch.0.join("p1");
    let refused = Nbd::connect(nbd, Some(client(&directory)), "db").err().unwrap();
    assert!(refused.contains("pool p1"), "{refused}");
}

/// Checks the same at a pool's data port: only the pool verifies here, as these callers trust any
/// server.
fn wrong_certificates_at_a_pool(cluster: &Cluster, strangers: &Path) {
    let pools = cluster.json(&["pool", "list"]);
    let p1 = pools.as_array().unwrap().iter().find(|pool| pool["name"] == "p1").unwrap();
    let address = p1["address"].as_str().unwrap().parse().unwrap();
    let call = |identity: &Path| {
        let security = ClientSecurity::Tls {
            config: accept_any_certificate(identity),
            server_name: "quoin".try_into().unwrap(),
            mode: Mode::Encrypt,
        };
        let spoken = SupportedProtocol::THIS_BUILD;
        let hello = Hello {
            protocol_min: spoken.oldest,
            protocol_max: spoken.newest,
            features_optional: spoken.features,
            ..Hello::default()
        };
        let session = SessionKey { epoch: Epoch(1), incarnation: Incarnation(1), nonce: 1 };
        dial("p1", address, &security, session, &hello).err().unwrap()
    };
    // A node's own certificate is accepted, and refused for lack of a grant.
    let answer = call(&cluster.scratch.0.join("node"));
    assert!(matches!(answer, EstablishError::Refused(_)), "{answer}");
    for name in ["n1", "expired"] {
        let refused = call(&strangers.join(name));
        assert!(!matches!(refused, EstablishError::Refused(_)), "{name} was accepted: {refused}");
    }
    // Another pool is known here, and opens nothing.
    let refused = call(&cluster.scratch.0.join("p2"));
    assert!(matches!(refused, EstablishError::Refused(_)), "{refused}");
    let words = "pool p2 is not a node";
    eventually("the pool says whom it refused", || cluster.log("p1").contains(words).then_some(()));
}

/// Returns a client with the certificate of this identity, which trusts every server.
fn accept_any_certificate(identity: &Path) -> Arc<rustls::ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chain = CertificateDer::pem_file_iter(identity.join("cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(identity.join("key.pem")).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_client_auth_cert(chain.map(Result::unwrap).collect(), key);
    Arc::new(config.unwrap())
}

#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Requests the volume's epoch, which only the node that owns it may have.
fn acquire(cluster: &Cluster, identity: &Identity, node: &str) -> Result<(), tonic::Status> {
    use quoin_api::control::AcquireEpochRequest;
    use quoin_api::control::agent_client::AgentClient;
    let volume = cluster.json(&["volume", "get", "db"])["id"].as_str().unwrap().to_owned();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let channel = identity.channel(&cluster.controller).unwrap();
        let mut request = tonic::Request::new(AcquireEpochRequest {
            volume_id: volume,
            node: node.into(),
            incarnation: format!("{:032x}", 1),
            at_least: 0,
            ..AcquireEpochRequest::default()
        });
        request.set_timeout(Duration::from_secs(10));
        AgentClient::new(channel).acquire_epoch(request).await.map(drop)
    })
}

/// Sends what a port scanner does: other protocols' greetings, noise, silence, connections cut at
/// once.
fn scan(address: &str) {
    let greetings: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\xff\x04\0\0\0\0\0",
        b"\0\0\0\x03IHAVEOPT\0\0\0\x07\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"",
    ];
    let mut silent = Vec::new();
    let mut noise = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..8 {
        for greeting in greetings {
            let Ok(mut stream) = TcpStream::connect(address) else {
                panic!("{address} does not listen any more")
            };
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            // The other side may close the connection at any moment.
            let _ = stream.write_all(greeting);
            let bytes: Vec<u8> = (0..round * 512)
                .map(|_| {
                    noise ^= noise << 13;
                    noise ^= noise >> 7;
                    noise ^= noise << 17;
                    noise as u8
                })
                .collect();
            let _ = stream.write_all(&bytes);
            let _ = stream.read(&mut [0; 256]);
            if round == 0 {
                silent.push(stream);
            }
        }
    }
    drop(silent);
}
