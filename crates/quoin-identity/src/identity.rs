//! An identity directory, loaded: configurations, channels, renewal.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use quoin_types::Term;
use quoin_types::term::TermOrder;
use rcgen::KeyPair;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::clock::{self, Validity};
use crate::clock_difference::ClockDifference;
use crate::terms::{self, Terms};
use crate::tls::{self, Current, Expected, Shared};
use crate::{ClusterId, Error, Grant, Issued, JoinToken, Peer, files, peer_of};

const KEY: &str = "key.pem";
const CERTIFICATE: &str = "cert.pem";
const AUTHORITIES: &str = "ca.pem";
const CLUSTER: &str = "cluster.json";

/// Interval at which a member whose certificate has expired checks the disk for another one.
const EXPIRED_CHECK: Duration = Duration::from_secs(10);
/// Interval of checks of the calendar. Timers stop while the machine is suspended, so one long
/// sleep would end after the certificate expired.
pub(crate) const CALENDAR_CHECK: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize)]
struct ClusterFile {
    cluster_id: String,
}

struct Inner {
    dir: PathBuf,
    peer: Peer,
    shared: Arc<Shared>,
    terms: Terms,
    /// As the last call that could measure it found it.
    clock: Mutex<Option<ClockDifference>>,
}

/// This process's identity in its cluster. Cheap to clone; all clones renew together.
#[derive(Clone)]
pub struct Identity(Arc<Inner>);

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.0.peer.uri())
    }
}

impl Identity {
    /// Loads an identity directory; [`Error::NotJoined`] where it holds none (yet).
    pub fn load(dir: &Path) -> Result<Self, Error> {
        let (peer, current) = load(dir)?;
        let shared = Arc::new(Shared::new(current));
        let terms = Terms::load(dir)?;
        Ok(Self(Arc::new(Inner {
            dir: dir.to_owned(),
            peer,
            shared,
            terms,
            clock: Mutex::default(),
        })))
    }

    /// Returns the holder of this identity.
    pub fn peer(&self) -> &Peer {
        &self.0.peer
    }

    pub fn cluster(&self) -> ClusterId {
        self.0.peer.cluster
    }

    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// Returns the configuration of a server: TLS 1.3, every client shows a certificate of this
    /// cluster. [`peer_of`] reads the client from `peer_certificates()[0]`.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, Error> {
        tls::server(&self.0.shared, true).map(Arc::new)
    }

    /// Returns the configuration of the controller's gRPC port: as [`Identity::server_config`], but
    /// a newcomer may connect without a certificate (and reach the Join service only).
    pub fn controller_config(&self) -> Result<Arc<ServerConfig>, Error> {
        let mut config = tls::server(&self.0.shared, false)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    /// Returns the configuration of a client: TLS 1.3, and only the expected peer is accepted.
    pub fn client_config(&self, expected: Expected) -> Result<Arc<ClientConfig>, Error> {
        tls::client(&self.0.shared, expected).map(Arc::new)
    }

    /// Returns what handshakes use at each moment.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Verifies a chain (the holder's certificate first) against this cluster's authorities.
    pub fn holder_of(&self, chain: &[CertificateDer<'_>]) -> Result<Peer, Error> {
        Ok(self.0.shared.get().holder_of(chain)?)
    }

    /// Returns true if it trusts certificates of the authority with this fingerprint.
    pub fn trusts(&self, named: &[u8; 32]) -> bool {
        let path = self.0.dir.join(AUTHORITIES);
        let pem = files::read(&path).ok().flatten().unwrap_or_default();
        let all = certificates(&path, &pem).unwrap_or_default();
        all.iter().any(|authority| crate::authority::fingerprint(authority) == *named)
    }

    /// Returns true if a token is of an authority of its cluster that it does not trust: that one took
    /// the place of those that it does trust, and its holder joins again.
    pub fn is_replaced(&self, token: &JoinToken) -> bool {
        token.cluster == self.cluster() && !self.trusts(&token.fingerprint)
    }

    /// Signs a grant; pools accept only a controller's signature.
    pub fn sign_grant(&self, grant: &Grant) -> Result<Vec<u8>, Error> {
        grant.sign(self.cluster(), &self.0.shared.get().key)
    }

    /// Reads a grant and proves that a controller of this cluster signed it.
    pub fn verify_grant(&self, bytes: &[u8]) -> Result<Grant, Error> {
        Grant::verify(bytes, &self.0.shared.get())
    }

    /// Returns the proof of a term; members accept only a controller's signature.
    pub fn sign_term(&self, term: Term) -> Result<Bytes, Error> {
        terms::sign(term, self.cluster(), &self.0.shared.get().key)
    }

    /// Returns the term that these bytes prove; term 0 where there are none.
    pub fn verify_term(&self, proof: &[u8]) -> Result<Term, Error> {
        self.terms().verify(proof, &self.0.shared.get())
    }

    /// Returns the difference of this host's clock from the controller's, as it was measured last.
    #[must_use]
    pub fn clock_difference(&self) -> Option<ClockDifference> {
        *self.0.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn measured(&self, difference: ClockDifference) {
        *self.0.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(difference);
    }

    /// Returns the terms that this member knows.
    pub fn terms(&self) -> &Terms {
        &self.0.terms
    }

    /// Accepts a term by its proof; a higher one is stored on media.
    ///
    /// # Errors
    /// Where it is not proven, or cannot be stored.
    pub fn accept_term(&self, proof: &[u8]) -> Result<TermOrder, Error> {
        let term = self.verify_term(proof)?;
        self.terms().accept(term, proof)
    }

    /// Returns first and last moment of the certificate in use.
    pub fn validity(&self) -> (SystemTime, SystemTime) {
        let Validity { from, until } = self.own_validity();
        (from, until)
    }

    fn own_validity(&self) -> Validity {
        let none = Validity { from: UNIX_EPOCH, until: UNIX_EPOCH };
        Validity::of(&self.0.shared.get().key.cert[0]).unwrap_or(none)
    }

    /// Returns whether the certificate has expired. An expired one cannot be renewed with itself.
    pub fn has_run_out(&self) -> bool {
        self.own_validity().has_run_out(SystemTime::now())
    }

    /// Returns when to renew: at two thirds of the certificate's lifetime.
    pub fn renew_at(&self) -> SystemTime {
        self.own_validity().renew_at()
    }

    /// Returns whether to renew now: the certificate is near its end, or not valid yet, because
    /// it was issued by a clock that was ahead.
    pub fn is_due(&self) -> bool {
        self.own_validity().is_due(SystemTime::now())
    }

    /// Says why the certificate is not valid yet; `None`: it is.
    #[must_use]
    pub fn not_valid_yet(&self) -> Option<String> {
        let (validity, now) = (self.own_validity(), SystemTime::now());
        validity.is_not_yet(now).then(|| clock::not_yet(&validity, now))
    }

    pub(crate) fn has_key(dir: &Path) -> bool {
        dir.join(KEY).exists()
    }

    /// Removes a key for which no certificate was issued.
    pub(crate) fn forget_key(dir: &Path) {
        let _ = std::fs::remove_file(dir.join(KEY));
    }

    /// Returns a request (PKCS #10, DER) for the key in `dir`, which is made where it is missing.
    pub(crate) fn request(dir: &Path) -> Result<Vec<u8>, Error> {
        files::make_dir(dir)?;
        let path = dir.join(KEY);
        let key = match files::read(&path)? {
            Some(pem) => key_pair(&path, &pem)?,
            None => {
                let key = KeyPair::generate().map_err(Error::certificate)?;
                files::write(&path, key.serialize_pem().as_bytes(), files::PRIVATE)?;
                key
            }
        };
        let params = rcgen::CertificateParams::default();
        Ok(params.serialize_request(&key).map_err(Error::certificate)?.der().to_vec())
    }

    /// Returns a request for the key in use.
    pub fn renewal_request(&self) -> Result<Vec<u8>, Error> {
        Self::request(&self.0.dir)
    }

    /// Writes a first certificate; `cert.pem` is written last, so its presence proves that the rest
    /// is there.
    pub(crate) fn establish(dir: &Path, issued: &Issued) -> Result<(), Error> {
        let cluster = ClusterFile { cluster_id: issued.cluster.to_string() };
        let cluster = serde_json::to_vec_pretty(&cluster).expect("plain data");
        files::write(&dir.join(CLUSTER), &cluster, files::PUBLIC)?;
        files::write(&dir.join(AUTHORITIES), issued.authorities_pem.as_bytes(), files::PUBLIC)?;
        files::write(&dir.join(CERTIFICATE), issued.chain_pem.as_bytes(), files::PUBLIC)
    }

    /// Installs a renewed certificate: checked first, then on disk, then in use.
    pub fn install(&self, issued: &Issued) -> Result<(), Error> {
        let key = files::read(&self.0.dir.join(KEY))?.unwrap_or_default();
        let (peer, _) = assemble(
            &self.0.dir,
            issued.cluster,
            &key,
            issued.chain_pem.as_bytes(),
            issued.authorities_pem.as_bytes(),
        )?;
        if peer != self.0.peer {
            return Err(Error::certificate(format!("it is for {peer}, not {}", self.0.peer)));
        }
        Self::establish(&self.0.dir, issued)?;
        self.reload()
    }

    /// Loads the files anew: another process of this host may have renewed them.
    pub fn reload(&self) -> Result<(), Error> {
        let (peer, current) = load(&self.0.dir)?;
        if peer != self.0.peer {
            return Err(Error::certificate(format!(
                "{} now holds the identity of {peer}; restart to use it",
                self.0.dir.display()
            )));
        }
        self.0.shared.set(current);
        Ok(())
    }

    /// Renews with the controller, over a connection of the certificate that expires.
    pub async fn renew(&self, controller_addr: &str) -> Result<(), Error> {
        use quoin_api::control::{RenewRequest, join_client::JoinClient};
        let mut client = JoinClient::new(self.controller(controller_addr)?);
        let csr_der = self.renewal_request()?;
        let mut request = tonic::Request::new(RenewRequest { csr_der });
        request.set_timeout(Duration::from_secs(30));
        let certificate = client.renew(request).await.map_err(crate::join::refused)?.into_inner();
        self.install(&crate::join::issued(certificate)?)
    }

    pub(crate) fn expired_error(&self) -> Error {
        let Peer { role, name, .. } = self.peer();
        let (role, name) = (*role, name.clone());
        Error::RunOut { dir: self.0.dir.clone(), role, name }
    }

    /// Returns the time to sleep before the next check whether to renew. Never long: see
    /// [`CALENDAR_CHECK`].
    fn next_check(&self, is_failing: bool) -> Duration {
        let (validity, now) = (self.own_validity(), SystemTime::now());
        let wait = if is_failing {
            validity.life() / 60
        } else if validity.is_due(now) {
            Duration::ZERO
        } else {
            validity.renew_at().duration_since(now).unwrap_or_default()
        };
        // Files that a new token puts on disk are to work at once for all processes that share
        // them.
        let longest = if self.has_run_out() { EXPIRED_CHECK } else { CALENDAR_CHECK };
        // Minimum, so that a clock that jumped does not make this a busy loop.
        wait.clamp(Duration::from_millis(200), longest)
    }

    /// Keeps the certificate fresh until `shutdown`: renews at two thirds of its lifetime, and
    /// retries while the controller is away. IO does not depend on it.
    pub async fn keep_renewed(&self, controller_addr: String, mut shutdown: watch::Receiver<bool>) {
        let mut failures = 0u32;
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.next_check(failures > 0)) => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
            if failures == 0 && !self.is_due() {
                continue;
            }
            if self.reload().is_ok() && !self.is_due() {
                failures = 0;
                continue;
            }
            match self.renew(&controller_addr).await {
                Ok(()) => {
                    tracing::info!(holder = %self.0.peer, "certificate renewed");
                    // By a clock that is behind the controller's, the next one is no better.
                    match self.not_valid_yet() {
                        None => failures = 0,
                        Some(why) => {
                            failures += 1;
                            tracing::warn!("the certificate is new, and {why}");
                        }
                    }
                }
                Err(_) if self.has_run_out() => {
                    failures += 1;
                    tracing::error!("{}", self.expired_error());
                }
                Err(error) => {
                    failures += 1;
                    let left = self.validity().1.duration_since(SystemTime::now());
                    let left_s = left.unwrap_or_default().as_secs();
                    // Few warnings: the controller may be away for days.
                    if failures.is_power_of_two() {
                        tracing::warn!(%error, left_s, "certificate not renewed; retrying");
                    }
                }
            }
        }
    }
}

fn key_pair(path: &Path, pem: &[u8]) -> Result<KeyPair, Error> {
    let text = std::str::from_utf8(pem).map_err(|e| damaged(path, e))?;
    KeyPair::from_pem(text).map_err(|e| damaged(path, e))
}

fn damaged(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::Damaged { path: path.to_owned(), reason: reason.to_string() }
}

fn load(dir: &Path) -> Result<(Peer, Current), Error> {
    let part = |name: &str| files::read(&dir.join(name));
    let Some(chain) = part(CERTIFICATE)? else {
        return Err(Error::NotJoined { dir: dir.to_owned() });
    };
    let missing = |name: &str| damaged(&dir.join(name), "it is missing");
    let key = part(KEY)?.ok_or_else(|| missing(KEY))?;
    let authorities = part(AUTHORITIES)?.ok_or_else(|| missing(AUTHORITIES))?;
    let cluster = part(CLUSTER)?.ok_or_else(|| missing(CLUSTER))?;
    let cluster: ClusterFile =
        serde_json::from_slice(&cluster).map_err(|e| damaged(&dir.join(CLUSTER), e))?;
    let cluster = cluster.cluster_id.parse().map_err(|e| damaged(&dir.join(CLUSTER), e))?;
    assemble(dir, cluster, &key, &chain, &authorities)
}

/// Loads the parts of an identity and checks that they match each other.
fn assemble(
    dir: &Path,
    cluster: ClusterId,
    key: &[u8],
    chain: &[u8],
    authorities: &[u8],
) -> Result<(Peer, Current), Error> {
    let (key_path, chain_path) = (dir.join(KEY), dir.join(CERTIFICATE));
    let chain = certificates(&chain_path, chain)?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| damaged(&key_path, e))?;
    let peer = peer_of(&chain[0])?;
    if peer.cluster != cluster {
        return Err(damaged(&chain_path, "it is of another cluster than cluster.json says"));
    }
    let key = CertifiedKey::from_der(chain, key, &tls::provider())
        .map_err(|_| damaged(&key_path, "it is not the key of cert.pem"))?;
    let mut roots = RootCertStore::empty();
    for authority in certificates(&dir.join(AUTHORITIES), authorities)? {
        roots.add(authority).map_err(|e| damaged(&dir.join(AUTHORITIES), e))?;
    }
    Ok((peer, Current::new(cluster, key, roots)?))
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let list: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|e| damaged(path, e))?;
    // A chain or bundle of Quoin has at most five.
    if list.is_empty() || list.len() > 8 {
        return Err(damaged(path, format!("{} certificates in it", list.len())));
    }
    Ok(list)
}

/// Returns when a certificate expires; `None` for bytes that are no certificate.
#[must_use]
pub fn valid_until(certificate: &CertificateDer<'_>) -> Option<SystemTime> {
    Validity::of(certificate).map(|validity| validity.until)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Lifetimes, Role};

    /// Otherwise a signature that the controller made for another purpose might be read as a grant.
    #[test]
    fn a_grant_is_signed_with_the_context_of_its_own_format() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        let issue = |role: Role| {
            authority.issue_identity(&dir.path().join(role.as_str()), role, "a").unwrap()
        };
        let (controller, pool) = (issue(Role::Controller), issue(Role::Pool));
        let of = |number: u64| Grant {
            volume: quoin_types::VolumeId(5),
            epoch: quoin_types::Epoch(7),
            incarnation: quoin_types::Incarnation(9),
            node: "node-1".into(),
            writes: true,
            term: Term { number, id: quoin_types::TermId(number.into()) },
        };
        let former = &b"quoin epoch grant, format 1\0"[..];
        let of_term = &b"quoin epoch grant, format 2\0"[..];
        // Magic, cluster, volume, epoch, incarnation, node and whether it writes; the term.
        let statement_bytes = 4 + 16 + 16 + 8 + 16 + 7 + 1;
        for (grant, bytes, context, other) in [
            (of(0), statement_bytes, former, of_term),
            (of(3), statement_bytes + 24, of_term, former),
        ] {
            let statement = controller.sign_grant(&grant).unwrap()[..bytes].to_vec();
            let key = &controller.0.shared.get().key;
            let under = |context: &[u8]| {
                pool.verify_grant(&crate::signed::sign(context, statement.clone(), key).unwrap())
            };
            assert_eq!(under(context).unwrap(), grant);
            assert!(under(other).is_err() && under(b"").is_err() && under(&[0]).is_err());
        }
    }

    #[test]
    fn a_file_of_certificates_has_one_to_eight() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        let one = authority.authorities_pem();
        for count in 0..=10 {
            let read = certificates(dir.path(), one.repeat(count).as_bytes());
            match (1..=8).contains(&count) {
                true => assert_eq!(read.unwrap().len(), count),
                false => assert!(read.unwrap_err().to_string().contains(&format!("{count} cert"))),
            }
        }
    }

    #[test]
    fn the_debug_text_of_an_identity_has_its_name_and_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        let pool = authority.issue_identity(&dir.path().join("pool"), Role::Pool, "p1").unwrap();
        assert_eq!(format!("{pool:?}"), format!("Identity({})", pool.peer().uri()));
    }

    #[test]
    fn a_host_renews_within_a_minute_after_a_suspend() {
        let dir = tempfile::tempdir().unwrap();
        let checks = |life: Duration| {
            let name = format!("{}", life.as_secs());
            let lifetimes = Lifetimes { holder: life, ..Lifetimes::default() };
            let authority = Authority::create(&dir.path().join(&name), lifetimes).unwrap();
            let at = dir.path().join(format!("{name}-pool"));
            let pool = authority.issue_identity(&at, Role::Pool, "p1").unwrap();
            [pool.next_check(false), pool.next_check(true)]
        };
        assert_eq!(checks(Duration::from_secs(30 * 86_400)), [CALENDAR_CHECK; 2]);
        let [next, again] = checks(Duration::from_secs(30));
        assert!(next <= Duration::from_secs(20) && next > Duration::from_secs(10), "{next:?}");
        assert!(again < Duration::from_secs(1), "{again:?}");
    }
}
