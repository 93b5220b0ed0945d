//! Mirrors of other clusters: the authorities and keys by which they are trusted, and connections
//! with them.
//!
//! Each cluster has an authority of its own, and no member but a mirror trusts another cluster's. A
//! peer is accepted if the URI of its certificate names a mirror of a trusted cluster, its chain
//! leads to the authorities of *that* cluster, and its key is in the list that this cluster sent
//! last. So the authority of one cluster cannot speak for another, and a stolen authority alone
//! opens nothing, as its keys are not listed. All three are looked up at each handshake; [`TrustedPeers::still_trusts`] tells
//! which open connections are to be cut after a change.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, CommonState, DigitallySignedStruct, DistinguishedName,
    OtherError, RootCertStore, ServerConfig, SignatureScheme,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use crate::clock::{Validity, warn_of_wrong_time};
use crate::tls::{self, PROVIDER, signatures};
use crate::{ClusterId, Error, Identity, Peer, Role, key_hash_of, peer_of};

const AUTHORITIES_BYTES_MAX: usize = 64 << 10;
/// During a rotation a cluster has two.
const AUTHORITIES_MAX: usize = 4;
const KEYS_MAX: usize = 4096;
const CLUSTERS_MAX: usize = 256;
/// Hex digits of [`key_hash_of`].
const KEY_HASH_DIGITS: usize = 64;

/// Longest time of a TCP connect and a TLS handshake together.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// The other clusters whose mirrors are trusted. Changes count from the next handshake on.
#[derive(Debug, Default)]
pub struct TrustedPeers(RwLock<HashMap<ClusterId, Arc<Trust>>>);

/// The authorities and keys of one cluster.
#[derive(Debug)]
struct Trust {
    cluster: ClusterId,
    authorities: Vec<(CertificateDer<'static>, Validity)>,
    key_hashes: HashSet<String>,
}

impl TrustedPeers {
    /// Returns an empty set, by which no cluster is trusted.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Trusts a cluster by these authorities and keys, and by no former ones. The authorities are
    /// PEM, as [`crate::Authority::authorities_pem`] gives them; the keys are hashes, as
    /// [`key_hash_of`] gives them. An error leaves all as it was.
    ///
    /// # Errors
    /// Names the limit that the authorities or the keys violate.
    pub fn set(
        &self,
        cluster: ClusterId,
        authorities_pem: &str,
        key_hashes: &[String],
    ) -> Result<(), Error> {
        let refused = |reason: String| Error::Trust { cluster, reason };
        let authorities = authorities(authorities_pem).map_err(refused)?;
        let key_hashes = checked(key_hashes).map_err(refused)?;
        let mut trusted = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if trusted.len() >= CLUSTERS_MAX && !trusted.contains_key(&cluster) {
            return Err(refused(format!("{CLUSTERS_MAX} others are, which is the most")));
        }
        trusted.insert(cluster, Arc::new(Trust { cluster, authorities, key_hashes }));
        Ok(())
    }

    /// Ends all trust in a cluster; returns whether there was any.
    pub fn remove(&self, cluster: ClusterId) -> bool {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&cluster).is_some()
    }

    /// Returns the trusted clusters, in the order of their ids.
    #[must_use]
    pub fn clusters(&self) -> Vec<ClusterId> {
        let trusted = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut clusters: Vec<_> = trusted.keys().copied().collect();
        clusters.sort_by_key(|cluster| cluster.0);
        clusters
    }

    /// Returns whether the mirror of an established connection is trusted at this moment; the
    /// connection is cut otherwise. A replacement of authorities alone cuts nothing: the key proves
    /// the holder, and is in the list or not.
    #[must_use]
    pub fn still_trusts(&self, peer: &Peer, key_hash: &str) -> bool {
        self.get(peer.cluster).is_some_and(|trust| trust.check_holder(peer, key_hash).is_ok())
    }

    fn get(&self, cluster: ClusterId) -> Option<Arc<Trust>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&cluster).cloned()
    }
}

/// Reads the authorities of a cluster.
fn authorities(pem: &str) -> Result<Vec<(CertificateDer<'static>, Validity)>, String> {
    if pem.len() > AUTHORITIES_BYTES_MAX {
        return Err(format!(
            "its authorities have {} bytes, more than {AUTHORITIES_BYTES_MAX}",
            pem.len()
        ));
    }
    let unread = |error: &dyn std::fmt::Display| format!("its authorities cannot be read: {error}");
    let list: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| unread(&error))?;
    if !(1..=AUTHORITIES_MAX).contains(&list.len()) {
        return Err(format!(
            "its authorities are {} certificates, and 1 to {AUTHORITIES_MAX} are taken",
            list.len()
        ));
    }
    let authority = |certificate: CertificateDer<'static>| {
        let (_, parsed) =
            x509_parser::parse_x509_certificate(&certificate).map_err(|error| unread(&error))?;
        if !parsed.is_ca() {
            return Err("a certificate among its authorities is not an authority's".to_owned());
        }
        let validity =
            Validity::of(&certificate).ok_or_else(|| unread(&"a time lies before 1970"))?;
        RootCertStore::empty().add(certificate.clone()).map_err(|error| unread(&error))?;
        Ok((certificate, validity))
    };
    list.into_iter().map(authority).collect()
}

fn checked(key_hashes: &[String]) -> Result<HashSet<String>, String> {
    if key_hashes.len() > KEYS_MAX {
        return Err(format!("it lists {} keys, more than {KEYS_MAX}", key_hashes.len()));
    }
    let is_hash = |hash: &String| {
        hash.len() == KEY_HASH_DIGITS
            && hash.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
    };
    if !key_hashes.iter().all(is_hash) {
        return Err(format!(
            "a key in its list is not a hash of {KEY_HASH_DIGITS} hex digits in lower case"
        ));
    }
    Ok(key_hashes.iter().cloned().collect())
}

impl Trust {
    /// Returns the authorities that have not expired. A certificate that is a root is taken as it is
    /// by the verification of a chain, so its time is checked here. Its beginning protects nothing.
    fn roots(&self, now: UnixTime) -> Result<RootCertStore, rustls::Error> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs());
        let mut roots = RootCertStore::empty();
        for (authority, validity) in &self.authorities {
            if !validity.has_run_out(now) {
                roots.add(authority.clone())?;
            }
        }
        if roots.is_empty() {
            return Err(refused(Error::certificate(format!(
                "every known authority of cluster {} has expired",
                self.cluster
            ))));
        }
        Ok(roots)
    }

    fn check_holder(&self, peer: &Peer, key_hash: &str) -> Result<(), Error> {
        if peer.cluster != self.cluster || peer.role != Role::Mirror {
            return Err(Error::certificate(format!(
                "{peer} of cluster {} is no mirror, and no other role may come from another cluster",
                peer.cluster
            )));
        }
        if !self.key_hashes.contains(key_hash) {
            return Err(Error::certificate(format!(
                "the key of {peer} is not in the list that cluster {} sent last",
                self.cluster
            )));
        }
        Ok(())
    }
}

/// Verifies the other side of a connection between two clusters.
#[derive(Debug)]
struct Foreign {
    own: ClusterId,
    peers: Arc<TrustedPeers>,
    /// The one cluster that a client connects to; a server takes any trusted one.
    expected: Option<ClusterId>,
}

impl Foreign {
    /// Verifies a certificate, whose chain `verify_chain` proves against the authorities of the
    /// cluster that it names.
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        now: UnixTime,
        verify_chain: impl FnOnce(RootCertStore) -> Result<(), rustls::Error>,
    ) -> Result<(), rustls::Error> {
        let peer = peer_of(leaf).map_err(refused)?;
        let trust = self.trust_in(peer.cluster).map_err(refused)?;
        verify_chain(trust.roots(now)?).map_err(|error| match error {
            rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => refused(Error::certificate(format!(
                "no authority that cluster {} sent last signed it. Where that cluster replaced its \
                 authority at once, or was away for longer than its certificates last, pair the \
                 clusters again (`quoin mirror invite` there, `quoin mirror pair` here)",
                peer.cluster
            ))),
            error => error,
        })?;
        let key_hash = key_hash_of(leaf).map_err(refused)?;
        trust.check_holder(&peer, &key_hash).map_err(refused)
    }

    fn trust_in(&self, cluster: ClusterId) -> Result<Arc<Trust>, Error> {
        if cluster == self.own {
            return Err(Error::certificate("it is of this cluster, and not of another one"));
        }
        if let Some(expected) = self.expected.filter(|expected| *expected != cluster) {
            return Err(Error::certificate(format!(
                "it is of cluster {cluster}, and cluster {expected} is expected"
            )));
        }
        self.peers.get(cluster).ok_or_else(|| {
            Error::certificate(format!("cluster {cluster} is not paired with this one"))
        })
    }
}

/// Refuses a certificate with a reason that [`reason`] finds again.
fn refused(error: Error) -> rustls::Error {
    tracing::debug!(%error, "peer of another cluster refused");
    CertificateError::Other(OtherError(Arc::new(error))).into()
}

impl ClientCertVerifier for Foreign {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.verify(leaf, now, |roots| {
            let builder =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), tls::provider());
            let clients = builder.build().map_err(|error| refused(Error::certificate(error)))?;
            let verified = clients.verify_client_cert(leaf, others, now);
            verified.map(drop).inspect_err(warn_of_wrong_time)
        })?;
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}

impl ServerCertVerifier for Foreign {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(leaf, now, |roots| tls::verify_chain(leaf, others, &roots, now))?;
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

impl Identity {
    /// Returns the configuration of a server for mirrors of other clusters: TLS 1.3, and every client
    /// is a mirror of a trusted cluster.
    ///
    /// # Errors
    /// This is not the identity of a mirror.
    pub fn foreign_server_config(
        &self,
        peers: &Arc<TrustedPeers>,
    ) -> Result<Arc<ServerConfig>, Error> {
        let clients = Arc::new(self.foreign(peers, None)?);
        tls::server_of(self.shared(), clients).map(Arc::new)
    }

    /// Returns the configuration of a client of another cluster's mirrors: TLS 1.3, and any mirror of
    /// that cluster is accepted while the cluster is trusted.
    ///
    /// # Errors
    /// This is not the identity of a mirror, or of one of that very cluster.
    pub fn foreign_client_config(
        &self,
        peers: &Arc<TrustedPeers>,
        cluster: ClusterId,
    ) -> Result<Arc<ClientConfig>, Error> {
        let servers = Arc::new(self.foreign(peers, Some(cluster))?);
        tls::client_of(self.shared(), servers).map(Arc::new)
    }

    fn foreign(
        &self,
        peers: &Arc<TrustedPeers>,
        expected: Option<ClusterId>,
    ) -> Result<Foreign, Error> {
        let own = self.peer();
        let cluster = expected.unwrap_or(own.cluster);
        if own.role != Role::Mirror {
            let reason = format!("{own} is no mirror, and no other role trusts another cluster");
            return Err(Error::Trust { cluster, reason });
        }
        if expected == Some(own.cluster) {
            return Err(Error::Trust { cluster, reason: format!("{own} is a member of it") });
        }
        Ok(Foreign { own: own.cluster, peers: peers.clone(), expected })
    }
}

/// Performs the handshake of a connection from another cluster, within 10 s, and returns the mirror
/// and the hash of its key. It limits no number of connections: [`crate::serve_incoming`] takes the
/// same configuration, for a port that strangers reach. The caller notes both, asks [`TrustedPeers::still_trusts`] once more then
/// and after each change, and ends the connection as its certificate expires
/// ([`crate::valid_until`]).
///
/// # Errors
/// Says why there is no connection.
pub async fn accept(
    tcp: TcpStream,
    config: Arc<ServerConfig>,
) -> Result<(server::TlsStream<TcpStream>, Peer, String), Error> {
    let address = tcp.peer_addr().map_or_else(|error| error.to_string(), |from| from.to_string());
    let handshake = async {
        tcp.set_nodelay(true)?;
        TlsAcceptor::from(config).accept(tcp).await
    };
    let stream = within_time(&address, HANDSHAKE_TIME, handshake).await?;
    let (peer, key_hash) = holder_of(stream.get_ref().1)?;
    Ok((stream, peer, key_hash))
}

/// Connects to another cluster's mirror at `host:port`, within 10 s, and returns the mirror and the
/// hash of its key, for which the caller does as after [`accept`]. By TLS 1.3 the other side judges
/// this one's certificate later: where it refuses it, the first read fails.
///
/// # Errors
/// Says why there is no connection.
pub async fn connect(
    address: &str,
    config: Arc<ClientConfig>,
) -> Result<(client::TlsStream<TcpStream>, Peer, String), Error> {
    let handshake = async {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        TlsConnector::from(config).connect(tls::server_name(), tcp).await
    };
    let stream = within_time(address, HANDSHAKE_TIME, handshake).await?;
    let (peer, key_hash) = holder_of(stream.get_ref().1)?;
    Ok((stream, peer, key_hash))
}

/// Returns the holder of the certificate that the other side of an established connection showed,
/// and the hash of its key. The handshake verified it.
///
/// # Errors
/// No certificate was shown, or none that names a member.
pub fn holder_of(connection: &CommonState) -> Result<(Peer, String), Error> {
    let leaf = connection
        .peer_certificates()
        .and_then(|chain| chain.first())
        .ok_or(rustls::Error::NoCertificatesPresented)?;
    Ok((peer_of(leaf)?, key_hash_of(leaf)?))
}

async fn within_time<S>(
    address: &str,
    time: Duration,
    handshake: impl Future<Output = std::io::Result<S>>,
) -> Result<S, Error> {
    let failed = |reason: String| Error::Mirror { address: address.to_owned(), reason };
    match tokio::time::timeout(time, handshake).await {
        Ok(shaken) => shaken.map_err(|error| failed(reason(&error))),
        Err(_) => Err(failed(format!("no answer within {} s", time.as_secs()))),
    }
}

/// Returns why a handshake failed, in words.
fn reason(error: &std::io::Error) -> String {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    if let Some(rustls::Error::InvalidCertificate(CertificateError::Other(refusal))) = tls {
        return refusal.to_string();
    }
    crate::error::wrong_time(error).unwrap_or_else(|| crate::error::root(error))
}

#[cfg(test)]
mod tests;
