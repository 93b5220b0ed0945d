//! Statements that a controller signs: the bytes, then the chain of its certificate (u8 count, each
//! u16 length and DER) and the signature (u16 length, ECDSA P-256 with SHA-256, ASN.1) over a fixed
//! prefix and the statement.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use bytes::{Buf, BufMut};
use rustls::SignatureScheme;
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;

use crate::tls::Current;
use crate::{Error, Role};

/// Most bytes of a statement with its chain.
pub(crate) const SIGNED_BYTES_MAX: usize = 16 << 10;
const CHAIN_MAX: usize = 6;

/// Signs a statement. `context` distinguishes these signatures from any other of the same key.
pub(crate) fn sign(
    context: &[u8],
    mut statement: Vec<u8>,
    key: &CertifiedKey,
) -> Result<Vec<u8>, Error> {
    let signer = key
        .key
        .choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256])
        .ok_or_else(|| Error::Grant("the controller's key is not ECDSA P-256".into()))?;
    let signature = signer.sign(&[context, &statement].concat())?;
    statement.put_u8(key.cert.len() as u8);
    for certificate in &key.cert {
        statement.put_u16_le(certificate.len() as u16);
        statement.put_slice(certificate);
    }
    statement.put_u16_le(signature.len() as u16);
    statement.put_slice(&signature);
    Ok(statement)
}

/// Chain and signature behind a statement.
pub(crate) struct Seal<'a> {
    pub chain: Vec<CertificateDer<'a>>,
    signature: &'a [u8],
}

pub(crate) fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    Some(head)
}

/// Parses a seal. `None`: it is cut off, or bytes follow it.
pub(crate) fn parse_seal(mut rest: &[u8]) -> Option<Seal<'_>> {
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
    rest.is_empty().then_some(Seal { chain, signature })
}

impl Seal<'_> {
    /// Proves that a controller of this cluster signed the statement.
    pub fn verify(&self, context: &[u8], statement: &[u8], current: &Current) -> Result<(), Error> {
        let signer =
            current.holder_of(&self.chain).map_err(|error| Error::Grant(error.to_string()))?;
        if signer.role != Role::Controller {
            return Err(Error::Grant(format!("{signer} signed it, not a controller")));
        }
        let (_, certificate) =
            x509_parser::parse_x509_certificate(&self.chain[0]).map_err(Error::certificate)?;
        let key = &certificate.public_key().subject_public_key.data;
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key)
            .verify(&[context, statement].concat(), self.signature)
            .map_err(|_| Error::Grant("the signature is wrong".into()))
    }
}
