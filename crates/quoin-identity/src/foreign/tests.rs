use futures::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::{Authority, Caller, Lifetimes, key_hash_of_request, serve_incoming};

struct Cluster {
    dir: tempfile::TempDir,
    authority: Authority,
}

impl Cluster {
    fn create() -> Self {
        Self::with(Lifetimes::default())
    }

    fn with(lifetimes: Lifetimes) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), lifetimes).unwrap();
        Self { dir, authority }
    }

    fn id(&self) -> ClusterId {
        self.authority.cluster()
    }

    fn member(&self, role: Role, name: &str) -> Identity {
        let home = self.dir.path().join(format!("{role}-{name}"));
        self.authority.issue_identity(&home, role, name).unwrap()
    }

    fn mirror(&self, name: &str) -> Identity {
        self.member(Role::Mirror, name)
    }

    /// A mirror whose certificate names another cluster, signed by the authority of this one.
    fn forged(&self, named: ClusterId, name: &str) -> Identity {
        let home = self.dir.path().join(format!("forged-{name}"));
        let holder = Peer::new(named, Role::Mirror, name).unwrap();
        let request = Identity::request(&home).unwrap();
        let issued = self.authority.issue(&request, &holder).unwrap();
        Identity::establish(&home, &crate::Issued { cluster: named, ..issued }).unwrap();
        Identity::load(&home).unwrap()
    }

    /// Trusts this cluster by its authorities of this moment.
    fn trusted_by(&self, peers: &TrustedPeers, members: &[&Identity]) {
        let keys: Vec<_> = members.iter().map(|member| key_of(member)).collect();
        peers.set(self.id(), &self.authority.authorities_pem(), &keys).unwrap();
    }
}

fn key_of(identity: &Identity) -> String {
    key_hash_of_request(&identity.renewal_request().unwrap()).unwrap()
}

fn chain_of(identity: &Identity) -> Vec<CertificateDer<'static>> {
    identity.shared().get().key.cert.clone()
}

/// Verifier that accepts every certificate, so that the other side alone decides.
#[derive(Debug)]
struct Anyone;

impl ClientCertVerifier for Anyone {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }
    signatures!();
}

impl ServerCertVerifier for Anyone {
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
    signatures!();
}

type Seen = Result<(Peer, String), Error>;

async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Outcome at a mirror to which `subject` connects.
async fn seen_as_client(subject: &Identity, mirror: &Identity, peers: &Arc<TrustedPeers>) -> Seen {
    let (listener, address) = listener().await;
    let server = mirror.foreign_server_config(peers).unwrap();
    let client = Arc::new(tls::client_of(subject.shared(), Arc::new(Anyone)).unwrap());
    let serving = async {
        let (tcp, _) = listener.accept().await.unwrap();
        accept(tcp, server).await.map(|(_, peer, key_hash)| (peer, key_hash))
    };
    tokio::join!(serving, connect(&address, client)).0
}

/// Outcome at a mirror that expects a peer of `cluster` and connects to `subject`.
async fn seen_as_server(
    subject: &Identity,
    mirror: &Identity,
    peers: &Arc<TrustedPeers>,
    cluster: ClusterId,
) -> Seen {
    let (listener, address) = listener().await;
    let server = Arc::new(tls::server_of(subject.shared(), Arc::new(Anyone)).unwrap());
    let client = mirror.foreign_client_config(peers, cluster).unwrap();
    let serving = async {
        let (tcp, _) = listener.accept().await.unwrap();
        accept(tcp, server).await.map(drop)
    };
    let (_, seen) = tokio::join!(serving, connect(&address, client));
    seen.map(|(_, peer, key_hash)| (peer, key_hash))
}

async fn assert_accepted(subject: &Identity, mirror: &Identity, peers: &Arc<TrustedPeers>) {
    let meant = (subject.peer().clone(), key_of(subject));
    assert_eq!(seen_as_client(subject, mirror, peers).await.unwrap(), meant);
    let seen = seen_as_server(subject, mirror, peers, subject.cluster()).await;
    assert_eq!(seen.unwrap(), meant);
}

/// `cluster` is the one that the mirror expects where it connects.
async fn assert_refused(
    subject: &Identity,
    mirror: &Identity,
    peers: &Arc<TrustedPeers>,
    (cluster, word): (ClusterId, &str),
) {
    let as_client = seen_as_client(subject, mirror, peers).await.unwrap_err();
    let as_server = seen_as_server(subject, mirror, peers, cluster).await.unwrap_err();
    for error in [as_client, as_server] {
        assert!(matches!(error, Error::Mirror { .. }), "{error:?}");
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

#[tokio::test]
async fn mirrors_of_clusters_that_trust_each_other_connect_and_see_each_other() {
    let (here, there) = (Cluster::create(), Cluster::create());
    let (ours, theirs) = (here.mirror("m"), there.mirror("m"));
    let (at_ours, at_theirs) = (TrustedPeers::new(), TrustedPeers::new());
    there.trusted_by(&at_ours, &[&theirs]);
    here.trusted_by(&at_theirs, &[&ours]);
    let (listener, address) = listener().await;
    let server = theirs.foreign_server_config(&at_theirs).unwrap();
    let client = ours.foreign_client_config(&at_ours, there.id()).unwrap();
    let serving = async {
        let (tcp, _) = listener.accept().await.unwrap();
        let (mut stream, peer, key_hash) = accept(tcp, server).await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), 7);
        stream.write_u8(8).await.unwrap();
        stream.flush().await.unwrap();
        (peer, key_hash)
    };
    let calling = async {
        let (mut stream, peer, key_hash) = connect(&address, client).await.unwrap();
        stream.write_u8(7).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), 8);
        (peer, key_hash)
    };
    let (client_seen, server_seen) = tokio::join!(serving, calling);
    assert_eq!(client_seen, (ours.peer().clone(), key_of(&ours)));
    assert_eq!(server_seen, (theirs.peer().clone(), key_of(&theirs)));
    assert!(at_theirs.still_trusts(&client_seen.0, &client_seen.1));
    assert!(at_ours.still_trusts(&server_seen.0, &server_seen.1));
}

#[tokio::test]
async fn nobody_but_a_listed_mirror_of_the_cluster_that_its_certificate_names_is_accepted() {
    let (own, a, b, stranger) =
        (Cluster::create(), Cluster::create(), Cluster::create(), Cluster::create());
    let mirror = own.mirror("m");
    let (of_a, of_b, unlisted) = (a.mirror("m"), b.mirror("m"), b.mirror("unlisted"));
    let (of_own, unknown) = (own.mirror("other"), stranger.mirror("m"));
    let roles = [Role::Node, Role::Controller, Role::Pool, Role::Admin];
    let of_roles = roles.map(|role| b.member(role, "m"));
    let (forged, forged_own) = (a.forged(b.id(), "m"), a.forged(own.id(), "n"));
    let peers = TrustedPeers::new();
    a.trusted_by(&peers, &[&of_a]);
    let mut listed: Vec<_> = of_roles.iter().collect();
    listed.extend([&of_b, &forged]);
    b.trusted_by(&peers, &listed);
    assert_accepted(&of_a, &mirror, &peers).await;
    assert_accepted(&of_b, &mirror, &peers).await;

    let refused = async |subject: &Identity, cluster: &Cluster, word: &str| {
        assert_refused(subject, &mirror, &peers, (cluster.id(), word)).await;
    };
    refused(&unknown, &stranger, "is not paired with this one").await;
    for of_role in &of_roles {
        refused(of_role, &b, "no other role may come from another cluster").await;
    }
    refused(&unlisted, &b, "is not in the list").await;
    refused(&forged, &b, "sent last signed it").await;
    let seen = seen_as_server(&of_a, &mirror, &peers, b.id()).await.unwrap_err().to_string();
    assert!(seen.contains(&format!("cluster {} is expected", b.id())), "{seen}");

    // Not even where the own cluster is set by mistake.
    own.trusted_by(&peers, &[&of_own, &forged_own]);
    for own_named in [&of_own, &forged_own, &own.member(Role::Node, "n")] {
        let seen = seen_as_client(own_named, &mirror, &peers).await.unwrap_err().to_string();
        assert!(seen.contains("it is of this cluster"), "{seen}");
        let seen = seen_as_server(own_named, &mirror, &peers, b.id()).await.unwrap_err();
        assert!(seen.to_string().contains("it is of this cluster"), "{seen}");
    }
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused() {
    let (own, other) = (Cluster::create(), Cluster::create());
    let (mirror, peers) = (own.mirror("m"), TrustedPeers::new());
    other.trusted_by(&peers, &[&other.mirror("m")]);
    let (listener, address) = listener().await;
    let client = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone))
        .with_no_client_auth();
    let serving = async {
        let (tcp, _) = listener.accept().await.unwrap();
        accept(tcp, mirror.foreign_server_config(&peers).unwrap()).await.map(drop)
    };
    let (served, _) = tokio::join!(serving, connect(&address, Arc::new(client)));
    let error = served.unwrap_err();
    assert!(matches!(error, Error::Mirror { .. }), "the handshake fails: {error:?}");
    assert!(error.to_string().contains("sent no certificates"), "{error}");
}

#[test]
fn an_expired_authority_an_expired_certificate_and_one_that_is_not_valid_yet_are_refused() {
    const HOUR_S: u64 = 3600;
    let brief = Lifetimes { authority: Duration::from_secs(HOUR_S), ..Lifetimes::default() };
    let (own, brief, long) = (Cluster::create(), Cluster::with(brief), Cluster::create());
    let peers = TrustedPeers::new();
    let judged = |cluster: &Cluster, name: &str, after_s: i64| {
        let subject = cluster.mirror(name);
        cluster.trusted_by(&peers, &[&subject]);
        let chain = chain_of(&subject);
        let verifier = Foreign { own: own.id(), peers: peers.clone(), expected: None };
        let now_s = UnixTime::now().as_secs().checked_add_signed(after_s).unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now_s));
        let as_client = verifier.verify_client_cert(&chain[0], &chain[1..], now).map(drop);
        let name = tls::server_name();
        let as_server =
            verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], now).map(drop);
        [as_client, as_server]
    };
    let day_s = 24 * i64::try_from(HOUR_S).unwrap();
    for cluster in [&brief, &long] {
        assert!(judged(cluster, "a", 60).iter().all(Result::is_ok));
    }
    assert!(judged(&long, "a", day_s).iter().all(Result::is_ok));
    let refused = |cluster: &Cluster, name: &str, after_s: i64, word: &str| {
        for judged in judged(cluster, name, after_s) {
            let text = format!("{:?}", judged.unwrap_err());
            assert!(text.contains(word), "{text}");
        }
    };
    refused(&brief, "b", day_s, "every known authority of cluster");
    refused(&long, "b", 31 * day_s, "ExpiredContext");
    refused(&long, "c", -day_s, "NotValidYetContext");
}

#[tokio::test]
async fn a_rotation_with_overlap_needs_nothing_and_one_at_once_a_new_set() {
    let (own, mut other) = (Cluster::create(), Cluster::create());
    let (mirror, peers) = (own.mirror("m"), TrustedPeers::new());
    let of_before = other.mirror("of-before");
    other.trusted_by(&peers, &[&of_before]);
    other.authority.rotate().unwrap();
    let of_after = other.mirror("of-after");
    let keys = [&of_before, &of_after].map(key_of);
    // The new certificate comes with the cross certificate, which leads to the former authority.
    let former = {
        let trust = peers.get(other.id()).unwrap();
        trust.authorities.iter().map(|(authority, _)| authority.clone()).collect::<Vec<_>>()
    };
    assert_eq!(former.len(), 1);
    let both = other.authority.authorities_pem();
    let former_pem = &both[both.rfind("-----BEGIN").unwrap()..];
    peers.set(other.id(), former_pem, &keys).unwrap();
    assert_eq!(peers.get(other.id()).unwrap().authorities[0].0, former[0]);
    assert_accepted(&of_after, &mirror, &peers).await;
    assert_accepted(&of_before, &mirror, &peers).await;
    peers.set(other.id(), &both, &keys).unwrap();
    assert_accepted(&of_after, &mirror, &peers).await;
    assert_accepted(&of_before, &mirror, &peers).await;

    other.authority.rotate_at_once().unwrap();
    let at_once = other.mirror("at-once");
    let keys = [&of_before, &at_once].map(key_of);
    peers.set(other.id(), &both, &keys).unwrap();
    let way_out = (other.id(), "pair the clusters again");
    assert_refused(&at_once, &mirror, &peers, way_out).await;
    peers.set(other.id(), &other.authority.authorities_pem(), &keys).unwrap();
    assert_accepted(&at_once, &mirror, &peers).await;
    assert_refused(&of_before, &mirror, &peers, way_out).await;
}

#[tokio::test]
async fn trust_ends_under_running_configurations_and_open_connections() {
    let (own, a, b) = (Cluster::create(), Cluster::create(), Cluster::create());
    let (mirror, first, second) = (own.mirror("m"), a.mirror("first"), a.mirror("second"));
    let of_b = b.mirror("m");
    let peers = TrustedPeers::new();
    a.trusted_by(&peers, &[&first, &second]);
    b.trusted_by(&peers, &[&of_b]);
    let mut both = vec![a.id(), b.id()];
    both.sort_by_key(|cluster| cluster.0);
    assert_eq!(peers.clusters(), both);
    let trusts = |identity: &Identity| peers.still_trusts(identity.peer(), &key_of(identity));
    assert!(trusts(&first) && trusts(&second) && trusts(&of_b));
    assert!(!peers.still_trusts(first.peer(), &key_of(&of_b)), "a key of another cluster");
    let node = Peer { role: Role::Node, ..first.peer().clone() };
    assert!(!peers.still_trusts(&node, &key_of(&first)));

    a.trusted_by(&peers, &[&second]);
    assert!(!trusts(&first) && trusts(&second) && trusts(&of_b));
    assert_refused(&first, &mirror, &peers, (a.id(), "is not in the list")).await;

    let (listener, address) = listener().await;
    let server = mirror.foreign_server_config(&peers).unwrap();
    let client = Arc::new(tls::client_of(second.shared(), Arc::new(Anyone)).unwrap());
    let attempt = async || {
        let serving = async {
            let (tcp, _) = listener.accept().await.unwrap();
            accept(tcp, server.clone()).await.map(drop)
        };
        tokio::join!(serving, connect(&address, client.clone())).0
    };
    attempt().await.unwrap();
    assert!(peers.remove(a.id()) && !peers.remove(a.id()));
    assert!(!trusts(&second) && trusts(&of_b));
    let error = attempt().await.unwrap_err().to_string();
    assert!(error.contains("is not paired"), "{error}");
    assert_eq!(peers.clusters(), [b.id()]);
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_by_existing_configurations() {
    let (own, other) = (Cluster::create(), Cluster::create());
    let (mirror, subject, peers) = (own.mirror("m"), other.mirror("m"), TrustedPeers::new());
    other.trusted_by(&peers, &[&subject]);
    let at_subject = TrustedPeers::new();
    own.trusted_by(&at_subject, &[&mirror]);
    let server = subject.foreign_server_config(&at_subject).unwrap();
    let client = mirror.foreign_client_config(&peers, other.id()).unwrap();
    let before = chain_of(&subject);
    let request = subject.renewal_request().unwrap();
    subject.install(&other.authority.issue(&request, subject.peer()).unwrap()).unwrap();
    let (listener, address) = listener().await;
    let serving = async {
        let (tcp, _) = listener.accept().await.unwrap();
        accept(tcp, server).await.unwrap()
    };
    let (_served, connected) = tokio::join!(serving, connect(&address, client));
    let (stream, ..) = connected.unwrap();
    let shown = stream.get_ref().1.peer_certificates().unwrap();
    assert!(shown == chain_of(&subject) && shown != before);
}

#[tokio::test]
async fn a_port_with_limits_takes_mirrors_of_other_clusters_as_members() {
    let (own, other) = (Cluster::create(), Cluster::create());
    let (mirror, subject, peers) = (own.mirror("m"), other.mirror("m"), TrustedPeers::new());
    other.trusted_by(&peers, &[&subject]);
    let (listener, address) = listener().await;
    let server = mirror.foreign_server_config(&peers).unwrap();
    let mut incoming = std::pin::pin!(serve_incoming(listener, server, Default::default()));
    let client = Arc::new(tls::client_of(subject.shared(), Arc::new(Anyone)).unwrap());
    let (incoming, connected) = tokio::join!(incoming.next(), connect(&address, client));
    connected.unwrap();
    let stream = incoming.unwrap().unwrap();
    let Caller::Member(member) = stream.caller() else { panic!("{:?}", stream.caller()) };
    assert_eq!((&member.peer, &member.key_hash), (subject.peer(), &key_of(&subject)));
    assert!(peers.still_trusts(&member.peer, &member.key_hash));
}

#[tokio::test]
async fn a_handshake_that_does_not_end_is_given_up() {
    assert_eq!(HANDSHAKE_TIME, Duration::from_secs(10));
    let silence = std::future::pending::<std::io::Result<()>>();
    let error = within_time("m:7", Duration::from_millis(10), silence).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the mirror at m:7") && text.contains("no answer within"), "{text}");
}

#[test]
fn only_a_mirror_trusts_another_cluster_and_never_its_own_as_one() {
    let (own, other, peers) = (Cluster::create(), Cluster::create(), TrustedPeers::new());
    for role in [Role::Controller, Role::Pool, Role::Node, Role::Admin] {
        let member = own.member(role, "m");
        let server = member.foreign_server_config(&peers).unwrap_err().to_string();
        let client = member.foreign_client_config(&peers, other.id()).unwrap_err().to_string();
        for error in [server, client] {
            assert!(error.contains(&format!("{role} m is no mirror")), "{error}");
        }
    }
    let mirror = own.mirror("m");
    let error = mirror.foreign_client_config(&peers, own.id()).unwrap_err().to_string();
    assert!(error.contains("mirror m is a member of it"), "{error}");
    let server = mirror.foreign_server_config(&peers).unwrap();
    assert!(server.send_tls13_tickets == 0 && !server.session_storage.can_cache());
}

#[test]
fn authorities_and_keys_beyond_their_limits_are_refused_and_change_nothing() {
    let (other, peers) = (Cluster::create(), TrustedPeers::new());
    let subject = other.mirror("m");
    let (pem, key) = (other.authority.authorities_pem(), key_of(&subject));
    let leaf = std::fs::read_to_string(subject.dir().join("cert.pem")).unwrap();
    let set = |pem: &str, keys: &[String]| peers.set(other.id(), pem, keys);
    let no_keys = &[][..];
    for count in 1..=AUTHORITIES_MAX {
        set(&pem.repeat(count), no_keys).unwrap();
    }
    assert!(!peers.still_trusts(subject.peer(), &key));
    let numbers = |count: usize| (0..count).map(|n| format!("{n:064x}")).collect::<Vec<_>>();
    set(&pem, &numbers(KEYS_MAX)).unwrap();
    let filled = |bytes: usize| format!("{pem}{}", "\n".repeat(bytes - pem.len()));
    set(&filled(AUTHORITIES_BYTES_MAX), std::slice::from_ref(&key)).unwrap();

    for (pem, keys, word) in [
        ("", no_keys, "are 0 certificates, and 1 to 4 are taken"),
        (&pem.repeat(5), no_keys, "are 5 certificates"),
        (&filled(AUTHORITIES_BYTES_MAX + 1), no_keys, "65537 bytes, more than 65536"),
        (&leaf, no_keys, "is not an authority's"),
        (&pem.replace("MII", "MIJ"), no_keys, "cannot be read"),
        (&pem.replace("-----END", "-----EN"), no_keys, "authorities"),
        (&pem, &numbers(KEYS_MAX + 1), "lists 4097 keys, more than 4096"),
        (&pem, &[key.to_uppercase()], "64 hex digits in lower case"),
        (&pem, &[key[1..].to_owned()], "64 hex digits in lower case"),
    ] {
        let error = set(pem, keys).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(&other.id().to_string()), "{error}");
        assert!(peers.still_trusts(subject.peer(), &key), "{word}");
    }

    for n in 1..CLUSTERS_MAX {
        peers.set(ClusterId(n as u128), &pem, no_keys).unwrap();
    }
    let error = peers.set(ClusterId(0), &pem, no_keys).unwrap_err().to_string();
    assert!(error.contains("256 others are"), "{error}");
    set(&pem, std::slice::from_ref(&key)).unwrap();
}

proptest::proptest! {
    #[test]
    fn no_text_of_authorities_panics(text in "(-----BEGIN CERTIFICATE-----\n)?[A-Za-z0-9+/=\n -]*") {
        let _ = TrustedPeers::new().set(ClusterId(1), &text, &[]);
    }
}
