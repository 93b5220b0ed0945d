//! TLS configurations: 1.3 only, both sides show a certificate, no resumption.
//!
//! A peer is accepted when its chain leads to an authority of `ca.pem` *and* the URI in it is
//! of this cluster. Certificates and authorities are looked up at each handshake, so a renewal
//! or a rotation needs no new configuration. [`crate::foreign`] has the rule for other clusters.

use std::sync::{Arc, LazyLock, RwLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::CryptoProvider;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::authority::fingerprint;
use crate::clock::warn_of_wrong_time;
use crate::{ClusterId, Error, Peer, Role, peer_of};

pub(crate) static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider()));

pub(crate) fn provider() -> Arc<CryptoProvider> {
    PROVIDER.clone()
}

/// The peer that a client expects; any other is refused in the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Any holder of this role.
    Role(Role),
    /// This holder alone.
    Named(Role, String),
}

impl Expected {
    fn admits(&self, peer: &Peer) -> bool {
        match self {
            Expected::Role(role) => peer.role == *role,
            Expected::Named(role, name) => peer.role == *role && peer.name == *name,
        }
    }
}

/// Certificates and keys that handshakes use at this moment.
#[derive(Debug)]
pub(crate) struct Current {
    pub cluster: ClusterId,
    pub key: Arc<CertifiedKey>,
    pub roots: Arc<RootCertStore>,
    pub clients: Arc<dyn ClientCertVerifier>,
}

impl Current {
    pub fn new(cluster: ClusterId, key: CertifiedKey, roots: RootCertStore) -> Result<Self, Error> {
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider())
            .build()
            .map_err(Error::certificate)?;
        Ok(Self { cluster, key: Arc::new(key), roots, clients })
    }

    /// Verifies a chain as a server's and returns its holder.
    pub fn holder_of(&self, chain: &[CertificateDer<'_>]) -> Result<Peer, rustls::Error> {
        let Some((leaf, others)) = chain.split_first() else {
            return Err(rustls::Error::NoCertificatesPresented);
        };
        verify_chain(leaf, others, &self.roots, UnixTime::now())?;
        self.member(leaf)
    }

    fn member(&self, leaf: &CertificateDer<'_>) -> Result<Peer, rustls::Error> {
        let peer = peer_of(leaf).map_err(refused)?;
        if peer.cluster != self.cluster {
            return Err(refused(Error::certificate("it is of another cluster")));
        }
        Ok(peer)
    }
}

/// The current state, replaced while connections run.
#[derive(Debug)]
pub(crate) struct Shared(RwLock<Arc<Current>>);

impl Shared {
    pub fn new(current: Current) -> Self {
        Self(RwLock::new(Arc::new(current)))
    }

    pub fn get(&self) -> Arc<Current> {
        self.0.read().expect("no holder of this lock panics").clone()
    }

    pub fn set(&self, current: Current) {
        *self.0.write().expect("no holder of this lock panics") = Arc::new(current);
    }
}

impl ResolvesServerCert for Shared {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.get().key.clone())
    }
}

impl ResolvesClientCert for Shared {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.get().key.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn refused(error: Error) -> rustls::Error {
    tracing::debug!(%error, "peer refused");
    CertificateError::ApplicationVerificationFailure.into()
}

pub(crate) fn verify_chain(
    leaf: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
    roots: &RootCertStore,
    now: UnixTime,
) -> Result<(), rustls::Error> {
    let algorithms = PROVIDER.signature_verification_algorithms.all;
    let leaf = ParsedCertificate::try_from(leaf)?;
    verify_server_cert_signed_by_trust_anchor(&leaf, roots, others, now, algorithms)
        .inspect_err(warn_of_wrong_time)
}

/// The signature of the handshake itself is checked in one way by every verifier here.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(rustls::PeerIncompatible::Tls12NotOffered.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            let algorithms = &PROVIDER.signature_verification_algorithms;
            rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            PROVIDER.signature_verification_algorithms.supported_schemes()
        }
    };
}
pub(crate) use signatures;

#[derive(Debug)]
struct Clients {
    shared: Arc<Shared>,
    /// False only at the controller, where newcomers connect without a certificate, and members whose
    /// certificate is not valid yet come for another one.
    mandatory: bool,
}

impl ClientCertVerifier for Clients {
    fn client_auth_mandatory(&self) -> bool {
        self.mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let current = self.shared.get();
        let verified = match current.clients.verify_client_cert(leaf, others, now) {
            // Everything but the time is proven as ever. The connection serves for a renewal alone:
            // see `Member::valid_from`.
            Err(rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
                not_before,
                ..
            })) if !self.mandatory => current.clients.verify_client_cert(leaf, others, not_before),
            verified => verified,
        }
        .inspect_err(warn_of_wrong_time)?;
        current.member(leaf)?;
        Ok(verified)
    }

    signatures!();
}

#[derive(Debug)]
struct Servers {
    shared: Arc<Shared>,
    expected: Expected,
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let current = self.shared.get();
        verify_chain(leaf, others, &current.roots, now)?;
        let peer = current.member(leaf)?;
        if !self.expected.admits(&peer) {
            return Err(refused(Error::certificate(format!("{peer} is not the expected peer"))));
        }
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

/// Verifies the controller by the fingerprint in a join token.
#[derive(Debug)]
struct Pinned {
    cluster: ClusterId,
    fingerprint: [u8; 32],
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let pinned = others.iter().find(|other| fingerprint(other) == self.fingerprint);
        let pinned = pinned.ok_or_else(|| {
            refused(Error::certificate(
                "the controller's chain does not have the authority of the token",
            ))
        })?;
        let mut roots = RootCertStore::empty();
        roots.add(pinned.clone().into_owned())?;
        verify_chain(leaf, others, &roots, now)?;
        let peer = peer_of(leaf).map_err(refused)?;
        if peer.cluster != self.cluster || peer.role != Role::Controller {
            return Err(refused(Error::certificate(format!("{peer} is not the controller"))));
        }
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

const VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

pub(crate) fn server(shared: &Arc<Shared>, mandatory: bool) -> Result<ServerConfig, Error> {
    server_of(shared, Arc::new(Clients { shared: shared.clone(), mandatory }))
}

/// Makes the configuration of a server whose clients are verified so.
pub(crate) fn server_of(
    shared: &Arc<Shared>,
    clients: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(shared.clone());
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

pub(crate) fn client(shared: &Arc<Shared>, expected: Expected) -> Result<ClientConfig, Error> {
    client_of(shared, Arc::new(Servers { shared: shared.clone(), expected }))
}

/// Makes the configuration of a client whose servers are verified so.
pub(crate) fn client_of(
    shared: &Arc<Shared>,
    servers: Arc<dyn ServerCertVerifier>,
) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)?
        .dangerous()
        .with_custom_certificate_verifier(servers)
        .with_client_cert_resolver(shared.clone());
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

pub(crate) fn pinned(cluster: ClusterId, fingerprint: [u8; 32]) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { cluster, fingerprint }))
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

/// Returns a fixed name: TLS requires one, but certificates of Quoin carry no host names.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from("quoin").expect("a valid DNS name")
}
