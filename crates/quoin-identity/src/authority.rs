//! The cluster's certificate authority, which only the controller holds.
//!
//! One file, `authority.json` (mode 0600): the signing key, its certificate and, during a rotation,
//! the former certificate and a *cross certificate*: the new authority signed by the former one.
//! Every certificate that the new authority issues comes with the cross certificate, so a peer that
//! knows the former authority alone still verifies it, and IO continues with no moment at which all
//! must change at once. The former one is dropped when the last certificate that it signed has
//! expired.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use serde::{Deserialize, Serialize};

use crate::{ClusterId, Error, Identity, Peer, Role, files};

const FORMAT: u32 = 1;
/// Largest certificate request.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Lifetimes of certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetimes {
    /// Lifetime of the authority's own certificate.
    pub authority: Duration,
    /// Lifetime of a certificate of a controller, pool, node, admin or mirror; renewed at two thirds.
    pub holder: Duration,
}

impl Default for Lifetimes {
    /// Ten years, and thirty days.
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        Self { authority: DAY * 3650, holder: DAY * 30 }
    }
}

/// A certificate as it is issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The holder's certificate, then its chain to an authority, as PEM.
    pub chain_pem: String,
    /// All trusted authorities, the newest first, as PEM.
    pub authorities_pem: String,
    pub cluster: ClusterId,
}

#[derive(Serialize, Deserialize)]
struct File {
    format: u32,
    cluster_id: String,
    /// Grows with each rotation; makes the authorities' names distinct.
    generation: u64,
    key_pem: String,
    certificate_pem: String,
    former: Option<Former>,
}

#[derive(Serialize, Deserialize, Clone)]
struct Former {
    certificate_pem: String,
    /// The new authority signed by the former one.
    cross_pem: String,
    /// Seconds since 1970; the last certificate of the former authority has expired by then.
    trusted_until_s: u64,
}

/// The authority of one cluster.
pub struct Authority {
    path: PathBuf,
    cluster: ClusterId,
    lifetimes: Lifetimes,
    file: File,
}

impl Authority {
    /// Makes a cluster: its id and its authority, in `dir`. Never overwrites one.
    pub fn create(dir: &Path, lifetimes: Lifetimes) -> Result<Self, Error> {
        files::make_dir(dir)?;
        let path = dir.join("authority.json");
        if files::read(&path)?.is_some() {
            return Err(Error::AuthorityExists { dir: dir.to_owned() });
        }
        let mut id = [0; 16];
        aws_lc_rs::rand::fill(&mut id).expect("the operating system gives random bytes");
        let cluster = ClusterId(u128::from_be_bytes(id));
        let key = KeyPair::generate().map_err(Error::certificate)?;
        let certificate = authority_params(cluster, 1, lifetimes.authority)
            .self_signed(&key)
            .map_err(Error::certificate)?;
        let file = File {
            format: FORMAT,
            cluster_id: cluster.to_string(),
            generation: 1,
            key_pem: key.serialize_pem(),
            certificate_pem: certificate.pem(),
            former: None,
        };
        let authority = Self { path, cluster, lifetimes, file };
        authority.save()?;
        Ok(authority)
    }

    /// Loads the authority that [`Authority::create`] made.
    pub fn load(dir: &Path, lifetimes: Lifetimes) -> Result<Self, Error> {
        let path = dir.join("authority.json");
        let bytes = files::read(&path)?.ok_or_else(|| Error::NotJoined { dir: dir.to_owned() })?;
        Self::read(path, &bytes, lifetimes)
    }

    fn read(path: PathBuf, bytes: &[u8], lifetimes: Lifetimes) -> Result<Self, Error> {
        let damaged = |reason: String| Error::Damaged { path: path.clone(), reason };
        let file: File = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        if file.format != FORMAT {
            return Err(damaged(format!(
                "format {} is of a newer Quoin; this one knows {FORMAT}",
                file.format
            )));
        }
        let cluster = file.cluster_id.parse().map_err(|e: Error| damaged(e.to_string()))?;
        let authority = Self { cluster, lifetimes, file, path: path.clone() };
        authority.issuer().map_err(|e| damaged(e.to_string()))?;
        authority.certificates().map_err(|e| damaged(e.to_string()))?;
        Ok(authority)
    }

    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Returns the SHA-256 of the newest authority's certificate, as join tokens carry it.
    pub fn fingerprint(&self) -> [u8; 32] {
        let der = pem_to_der(&self.file.certificate_pem).expect("checked when loaded");
        fingerprint(&der)
    }

    /// Returns true if certificates of the authority with this fingerprint are trusted.
    pub fn trusts(&self, named: &[u8; 32]) -> bool {
        let former = self.file.former.as_ref().filter(|former| former.trusted_until_s > now_s());
        let is_it = |former: &Former| {
            let der = pem_to_der(&former.certificate_pem).expect("checked when loaded");
            fingerprint(&der) == *named
        };
        self.fingerprint() == *named || former.is_some_and(is_it)
    }

    /// Returns all trusted authorities, the newest first, as PEM.
    pub fn authorities_pem(&self) -> String {
        match &self.file.former {
            Some(former) if former.trusted_until_s > now_s() => {
                format!("{}{}", self.file.certificate_pem, former.certificate_pem)
            }
            _ => self.file.certificate_pem.clone(),
        }
    }

    /// Signs a request. Only the public key is taken from it: the controller decides the holder and
    /// the lifetime.
    pub fn issue(&self, csr_der: &[u8], holder: &Peer) -> Result<Issued, Error> {
        self.issue_at(csr_der, holder, SystemTime::now())
    }

    /// Signs a request as [`Authority::issue`] does, by a clock that says `now`.
    pub fn issue_at(
        &self,
        csr_der: &[u8],
        holder: &Peer,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        if csr_der.len() > REQUEST_BYTES_MAX {
            return Err(Error::certificate("the request is larger than the limit"));
        }
        let mut request =
            CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(csr_der))
                .map_err(Error::certificate)?;
        request.params = holder_params(holder, self.lifetimes.holder, now)?;
        let certificate = request.signed_by(&self.issuer()?).map_err(Error::certificate)?;
        Ok(self.issued(certificate.pem(), holder.role))
    }

    /// Makes a key and a certificate in `dir` without a join: the controller's own, or that of
    /// processes that are set up beside the controller.
    pub fn issue_identity(&self, dir: &Path, role: Role, name: &str) -> Result<Identity, Error> {
        let holder = Peer::new(self.cluster, role, name)?;
        let request = Identity::request(dir)?;
        Identity::establish(dir, &self.issue(&request, &holder)?)?;
        Identity::load(dir)
    }

    /// Makes a new authority; the former one stays trusted until the last certificate that it
    /// signed has expired.
    pub fn rotate(&mut self) -> Result<(), Error> {
        let next = self.rotated()?;
        self.adopt(next)
    }

    /// Returns the authority that [`Authority::rotate`] would make. Nothing is signed by it before it is
    /// adopted.
    pub fn rotated(&self) -> Result<Self, Error> {
        if let Some(former) = &self.file.former
            && former.trusted_until_s > now_s()
        {
            return Err(Error::RotationUnderWay(former.trusted_until_s.saturating_sub(now_s())));
        }
        let (mut next, params, key) = self.next_generation()?;
        let cross = params.signed_by(&key, &self.issuer()?).map_err(Error::certificate)?;
        next.file.former = Some(Former {
            certificate_pem: self.file.certificate_pem.clone(),
            cross_pem: cross.pem(),
            trusted_until_s: now_s() + self.lifetimes.holder.as_secs() + 1,
        });
        Ok(next)
    }

    /// Makes a new authority at once: no certificate of a former one is trusted any more.
    pub fn rotate_at_once(&mut self) -> Result<(), Error> {
        let next = self.rotated_at_once()?;
        self.adopt(next)
    }

    /// Returns the authority that [`Authority::rotate_at_once`] would make.
    pub fn rotated_at_once(&self) -> Result<Self, Error> {
        Ok(self.next_generation()?.0)
    }

    /// Puts another state of this authority in the place of this one, in its file first.
    pub fn adopt(&mut self, next: Self) -> Result<(), Error> {
        next.save()?;
        *self = next;
        Ok(())
    }

    /// Writes an authority that [`Authority::export`] returned elsewhere into `dir`, whatever is there.
    pub fn import(dir: &Path, exported: &[u8], lifetimes: Lifetimes) -> Result<Self, Error> {
        files::make_dir(dir)?;
        let path = dir.join("authority.json");
        let authority = Self::read(path, exported, lifetimes)?;
        authority.save()?;
        Ok(authority)
    }

    /// Reads an authority that [`Authority::export`] returned, and writes nothing.
    pub fn parse(exported: &[u8], lifetimes: Lifetimes) -> Result<Self, Error> {
        Self::read(PathBuf::from("the exported authority"), exported, lifetimes)
    }

    /// Returns the next generation without a former one, with its parameters and its key.
    fn next_generation(&self) -> Result<(Self, CertificateParams, KeyPair), Error> {
        let generation = self.file.generation + 1;
        let key = KeyPair::generate().map_err(Error::certificate)?;
        let params = authority_params(self.cluster, generation, self.lifetimes.authority);
        let certificate = params.self_signed(&key).map_err(Error::certificate)?;
        let file = File {
            format: FORMAT,
            cluster_id: self.cluster.to_string(),
            generation,
            key_pem: key.serialize_pem(),
            certificate_pem: certificate.pem(),
            former: None,
        };
        let (path, cluster, lifetimes) = (self.path.clone(), self.cluster, self.lifetimes);
        Ok((Self { path, cluster, lifetimes, file }, params, key))
    }

    /// Drops the former authority once its time is over; true if it was dropped.
    pub fn forget_former(&mut self) -> Result<bool, Error> {
        if self.file.former.as_ref().is_none_or(|former| former.trusted_until_s > now_s()) {
            return Ok(false);
        }
        let former = self.file.former.take();
        match self.save() {
            Ok(()) => Ok(true),
            Err(error) => {
                self.file.former = former;
                Err(error)
            }
        }
    }

    fn issued(&self, certificate_pem: String, role: Role) -> Issued {
        let former = self.file.former.as_ref().filter(|f| f.trusted_until_s > now_s());
        let mut chain_pem = certificate_pem;
        if let Some(former) = former {
            chain_pem.push_str(&former.cross_pem);
        }
        if role == Role::Controller {
            // A newcomer has no bundle yet; it finds here the authority that its token pins.
            chain_pem.push_str(&self.file.certificate_pem);
            if let Some(former) = former {
                chain_pem.push_str(&former.certificate_pem);
            }
        }
        Issued { chain_pem, authorities_pem: self.authorities_pem(), cluster: self.cluster }
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, Error> {
        let key = KeyPair::from_pem(&self.file.key_pem).map_err(Error::certificate)?;
        Issuer::from_ca_cert_pem(&self.file.certificate_pem, key).map_err(Error::certificate)
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let former = self.file.former.iter();
        std::iter::once(&self.file.certificate_pem)
            .chain(former.flat_map(|former| [&former.certificate_pem, &former.cross_pem]))
            .map(|pem| pem_to_der(pem))
            .collect()
    }

    /// Returns the whole authority, with its private key, as [`Authority::load`] reads it from its
    /// file.
    pub fn export(&self) -> Result<String, Error> {
        serde_json::to_string_pretty(&self.file)
            .map_err(|error| Error::Damaged { path: self.path.clone(), reason: error.to_string() })
    }

    fn save(&self) -> Result<(), Error> {
        let text = serde_json::to_vec_pretty(&self.file).expect("plain data");
        files::write(&self.path, &text, files::PRIVATE)
    }
}

pub(crate) fn fingerprint(der: &CertificateDer<'_>) -> [u8; 32] {
    digest::digest(&digest::SHA256, der).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

fn pem_to_der(pem: &str) -> Result<CertificateDer<'static>, Error> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(Error::certificate)
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Sets a validity that begins a little in the past, for hosts whose clocks are behind; never by so
/// much that two thirds of a short lifetime would be over already.
fn set_life(params: &mut CertificateParams, life: Duration, now: SystemTime) {
    let now_s = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let early = (life / 20).min(Duration::from_secs(300)).as_secs();
    params.not_before = epoch + Duration::from_secs(now_s.saturating_sub(early));
    params.not_after = epoch + Duration::from_secs(now_s + life.as_secs().max(1));
}

fn serial() -> SerialNumber {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("the operating system gives random bytes");
    // X.509 requires positive serial numbers.
    bytes[0] &= 0x7f;
    SerialNumber::from_slice(&bytes)
}

fn authority_params(cluster: ClusterId, generation: u64, life: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, format!("Quoin authority {generation} of {cluster}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.serial_number = Some(serial());
    set_life(&mut params, life, SystemTime::now());
    // Its beginning protects nothing. One that lay ahead, by a clock that was wrong, could not be made
    // again as a member's can: a cross certificate's signer is gone.
    params.not_before = rcgen::date_time_ymd(1970, 1, 1);
    params
}

fn holder_params(
    holder: &Peer,
    life: Duration,
    now: SystemTime,
) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, holder.to_string());
    let uri = holder.uri().try_into().map_err(Error::certificate)?;
    params.subject_alt_names = vec![SanType::URI(uri)];
    if holder.role == Role::Node {
        // Foreign NBD clients identify a server by its host's name; Quoin does not read this.
        let name = holder.name.as_str().try_into().map_err(Error::certificate)?;
        params.subject_alt_names.push(SanType::DnsName(name));
    }
    params.is_ca = IsCa::ExplicitNoCa;
    // TLS 1.3 needs the signature alone; QEMU refuses certificates without the other.
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    // Every holder is server on some connections and client on others.
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.serial_number = Some(serial());
    set_life(&mut params, life, now);
    Ok(params)
}

/// Returns the SHA-256 of a public key (SubjectPublicKeyInfo, DER) in hex, which identifies
/// members.
fn key_hash(public_key: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, public_key))
}

/// Returns the hash of the key of a certificate.
pub fn key_hash_of(certificate: &CertificateDer<'_>) -> Result<String, Error> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(certificate).map_err(Error::certificate)?;
    Ok(key_hash(parsed.public_key().raw))
}

/// Returns the hash of the key of a request, so that a repeated request can be told from that of
/// another newcomer. The request's own signature is checked when the certificate is issued.
pub fn key_hash_of_request(csr_der: &[u8]) -> Result<String, Error> {
    use x509_parser::prelude::{FromDer, X509CertificationRequest};
    if csr_der.len() > REQUEST_BYTES_MAX {
        return Err(Error::certificate("the request is larger than the limit"));
    }
    let (_, request) = X509CertificationRequest::from_der(csr_der).map_err(Error::certificate)?;
    Ok(key_hash(request.certification_request_info.subject_pki.raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authority() -> (tempfile::TempDir, Authority) {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        (dir, authority)
    }

    #[test]
    fn a_request_above_the_size_limit_is_refused_before_it_is_parsed() {
        let (_dir, authority) = authority();
        let holder = Peer::new(authority.cluster, Role::Pool, "p1").unwrap();
        let refused = |bytes: usize| {
            let error = authority.issue(&vec![0x30; bytes], &holder).err().unwrap().to_string();
            error.contains("larger than the limit")
        };
        assert!(!refused(0) && !refused(REQUEST_BYTES_MAX));
        assert!(refused(REQUEST_BYTES_MAX + 1) && refused(REQUEST_BYTES_MAX + 2));
    }

    #[test]
    fn a_former_authority_is_trusted_until_its_deadline_and_removed_then() {
        let (_dir, mut authority) = authority();
        assert!(!authority.forget_former().unwrap(), "no former authority exists");
        authority.rotate().unwrap();
        let authorities = |authority: &Authority| {
            authority.authorities_pem().matches("BEGIN CERTIFICATE").count()
        };
        assert_eq!(authorities(&authority), 2);
        assert!(!authority.forget_former().unwrap());
        authority.file.former.as_mut().unwrap().trusted_until_s = now_s();
        assert_eq!(authorities(&authority), 1);
        assert!(authority.forget_former().unwrap() && authority.file.former.is_none());
        assert!(!authority.forget_former().unwrap());
    }
}
