//! Epoch grants: what a controller signs, a target shows, and a pool believes.
//!
//! A pool hears `Open` from a target with a node's certificate, which proves who is there but
//! not that the records name this node as the volume's owner. The grant does: it says "this
//! node may open this volume at this epoch as this incarnation", signed with the key of a
//! controller's certificate, which comes with it. So a pool needs no word with the controller,
//! and IO goes on while that one is down.
//!
//! Bytes, little-endian: magic `QGR1`, cluster u128, volume u128, epoch u64, incarnation u128,
//! node (u8 length, bytes), chain (u8 count, each u16 length and DER), signature (u16 length,
//! ECDSA P-256 with SHA-256, ASN.1) over a fixed prefix and everything up to the chain.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use bytes::{Buf, BufMut};
use quoin_core::{Epoch, Incarnation, VolumeId};
use rustls::SignatureScheme;
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;

use crate::tls::Current;
use crate::{ClusterId, Error, Role, check_name};

const MAGIC: &[u8; 4] = b"QGR1";
/// Keeps these signatures apart from any other that the same key makes (TLS handshakes).
const CONTEXT: &[u8] = b"quoin epoch grant, format 1\0";
const GRANT_BYTES_MAX: usize = 16 << 10;
const CHAIN_MAX: usize = 6;

/// Leave for one target to open one volume at one epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    pub volume: VolumeId,
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    /// The name in the certificate of the node on which the target runs.
    pub node: String,
}

impl Grant {
    fn statement(&self, cluster: ClusterId) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        out.put_slice(MAGIC);
        out.put_u128_le(cluster.0);
        out.put_u128_le(self.volume.0);
        out.put_u64_le(self.epoch.0);
        out.put_u128_le(self.incarnation.0);
        out.put_u8(self.node.len() as u8);
        out.put_slice(self.node.as_bytes());
        out
    }

    pub(crate) fn sign(&self, cluster: ClusterId, key: &CertifiedKey) -> Result<Vec<u8>, Error> {
        check_name("node", &self.node)?;
        let mut out = self.statement(cluster);
        let signer = key
            .key
            .choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256])
            .ok_or_else(|| Error::Grant("the controller's key is not ECDSA P-256".into()))?;
        let signature = signer.sign(&[CONTEXT, &out].concat())?;
        out.put_u8(key.cert.len() as u8);
        for certificate in &key.cert {
            out.put_u16_le(certificate.len() as u16);
            out.put_slice(certificate);
        }
        out.put_u16_le(signature.len() as u16);
        out.put_slice(&signature);
        Ok(out)
    }

    pub(crate) fn verify(bytes: &[u8], current: &Current) -> Result<Self, Error> {
        let refused = |reason: &str| Error::Grant(reason.to_owned());
        if bytes.len() > GRANT_BYTES_MAX {
            return Err(refused("it is too long"));
        }
        let parsed = parse(bytes).ok_or_else(|| refused("it is cut off or not a grant"))?;
        if parsed.cluster != current.cluster {
            return Err(refused("it is of another cluster"));
        }
        let signer =
            current.holder_of(&parsed.chain).map_err(|error| Error::Grant(error.to_string()))?;
        if signer.role != Role::Controller {
            return Err(Error::Grant(format!("{signer} signed it, not a controller")));
        }
        let (_, certificate) =
            x509_parser::parse_x509_certificate(&parsed.chain[0]).map_err(Error::certificate)?;
        let key = &certificate.public_key().subject_public_key.data;
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key)
            .verify(&[CONTEXT, parsed.statement].concat(), parsed.signature)
            .map_err(|_| refused("the signature is wrong"))?;
        Ok(parsed.grant)
    }
}

struct Parsed<'a> {
    cluster: ClusterId,
    grant: Grant,
    statement: &'a [u8],
    chain: Vec<CertificateDer<'a>>,
    signature: &'a [u8],
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    Some(head)
}

fn parse(bytes: &[u8]) -> Option<Parsed<'_>> {
    let mut rest = bytes;
    if take(&mut rest, 4)? != MAGIC {
        return None;
    }
    let cluster = ClusterId(rest.try_get_u128_le().ok()?);
    let volume = VolumeId(rest.try_get_u128_le().ok()?);
    let epoch = Epoch(rest.try_get_u64_le().ok()?);
    let incarnation = Incarnation(rest.try_get_u128_le().ok()?);
    let length = rest.try_get_u8().ok()?;
    let node = std::str::from_utf8(take(&mut rest, length.into())?).ok()?.to_owned();
    check_name("node", &node).ok()?;
    let statement = &bytes[..bytes.len() - rest.len()];
    let count = usize::from(rest.try_get_u8().ok()?);
    if count == 0 || count > CHAIN_MAX {
        return None;
    }
    let mut chain = Vec::with_capacity(count);
    for _ in 0..count {
        let length = rest.try_get_u16_le().ok()?;
        chain.push(CertificateDer::from(take(&mut rest, length.into())?));
    }
    let length = rest.try_get_u16_le().ok()?;
    let signature = take(&mut rest, length.into())?;
    let grant = Grant { volume, epoch, incarnation, node };
    rest.is_empty().then_some(Parsed { cluster, grant, statement, chain, signature })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Identity, Lifetimes};
    use proptest::prelude::*;

    fn grant() -> Grant {
        let (volume, epoch) = (VolumeId(5), Epoch(7));
        Grant { volume, epoch, incarnation: Incarnation(9), node: "node-1".into() }
    }

    fn cluster() -> (tempfile::TempDir, Identity, Identity) {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        let identity = |role: Role| {
            authority.issue_identity(&dir.path().join(role.as_str()), role, "a").unwrap()
        };
        let (controller, pool) = (identity(Role::Controller), identity(Role::Pool));
        (dir, controller, pool)
    }

    #[test]
    fn a_pool_believes_what_the_controller_signed_and_reads_it_as_it_was_given() {
        let (_dir, controller, pool) = cluster();
        let bytes = controller.sign_grant(&grant()).unwrap();
        assert_eq!(pool.verify_grant(&bytes).unwrap(), grant());
    }

    #[test]
    fn a_grant_with_any_byte_changed_is_refused() {
        let (_dir, controller, pool) = cluster();
        let bytes = controller.sign_grant(&grant()).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            // A change in an unneeded certificate of the chain alters nothing that counts.
            if let Ok(read) = pool.verify_grant(&changed) {
                assert_eq!(read, grant(), "byte {at} changed what the grant says");
            }
        }
        for at in 0..bytes.len() {
            assert!(pool.verify_grant(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn a_grant_signed_by_a_pool_is_refused_by_name() {
        let (_dir, controller, pool) = cluster();
        let forged = pool.sign_grant(&grant()).unwrap();
        let error = controller.verify_grant(&forged).unwrap_err().to_string();
        assert!(error.contains("pool a signed it"), "{error}");
    }

    #[test]
    fn a_grant_of_another_cluster_is_refused() {
        let (_dir, _, pool) = cluster();
        let (_other_dir, other, _) = cluster();
        assert!(pool.verify_grant(&other.sign_grant(&grant()).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes);
            let _ = parse(&[MAGIC.as_slice(), &bytes].concat());
        }
    }
}
