//! Join tokens: a secret that is valid for one certificate, and the pin of the authority.
//!
//! As text: `quoin-join-1.` and base64url of cluster id (16 bytes), SHA-256 of the authority's
//! certificate (32), secret (24), and 4 bytes of checksum against mistyped tokens. The controller
//! keeps only a hash of the secret.

use std::fmt;
use std::str::FromStr;

use crate::token_parts::{self, SECRET_BYTES, Secret};
use crate::{ClusterId, Error};

const PREFIX: &str = "quoin-join-1.";
const BODY_BYTES: usize = 16 + 32 + SECRET_BYTES;
const PIN_PREFIX: &str = "quoin-authority-1.";
const PIN_BYTES: usize = 16 + 32;

/// A token that a newcomer receives by hand. `Display` writes it whole; `Debug` hides the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    pub cluster: ClusterId,
    /// SHA-256 of the authority's certificate, which authenticates the first contact.
    pub fingerprint: [u8; 32],
    secret: Secret,
}

/// By this a newcomer knows the authority. No secret. As text: `quoin-authority-1.` and
/// base64url of cluster id, SHA-256 of the authority's certificate, and 4 bytes of checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AuthorityPin {
    pub cluster: ClusterId,
    /// SHA-256 of the authority's certificate.
    pub fingerprint: [u8; 32],
}

impl fmt::Display for AuthorityPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = [&self.cluster.0.to_be_bytes()[..], &self.fingerprint].concat();
        write!(f, "{PIN_PREFIX}{}", token_parts::write(body))
    }
}

impl FromStr for AuthorityPin {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let text = text.trim().strip_prefix(PIN_PREFIX);
        let text = text.ok_or(Error::Pin("it begins with quoin-authority-1."))?;
        let body = token_parts::read(text, PIN_BYTES, PIN_BYTES).map_err(Error::Pin)?;
        let (cluster, fingerprint) = body.split_at(16);
        Ok(Self {
            cluster: ClusterId(u128::from_be_bytes(cluster.try_into().expect("16 bytes"))),
            fingerprint: fingerprint.try_into().expect("32 bytes"),
        })
    }
}

impl JoinToken {
    /// Makes a new secret for a cluster whose authority has this fingerprint.
    pub fn generate(cluster: ClusterId, fingerprint: [u8; 32]) -> Self {
        Self { cluster, fingerprint, secret: Secret::generate() }
    }

    /// Returns the hash that the controller stores instead of the secret: 64 hex digits.
    pub fn secret_hash(&self) -> String {
        self.secret.hash()
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut body = Vec::with_capacity(BODY_BYTES);
        body.extend(self.cluster.0.to_be_bytes());
        body.extend(self.fingerprint);
        body.extend(self.secret.0);
        write!(f, "{PREFIX}{}", token_parts::write(body))
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.cluster)
    }
}

impl FromStr for JoinToken {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let text =
            text.strip_prefix(PREFIX).ok_or(Error::Token("a token begins with quoin-join-1."))?;
        let body = token_parts::read(text, BODY_BYTES, BODY_BYTES).map_err(Error::Token)?;
        let part = |from: usize, len: usize| &body[from..from + len];
        Ok(Self {
            cluster: ClusterId(u128::from_be_bytes(part(0, 16).try_into().expect("16 bytes"))),
            fingerprint: part(16, 32).try_into().expect("32 bytes"),
            secret: Secret(part(48, SECRET_BYTES).try_into().expect("24 bytes")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_token_is_parsed_from_its_text_and_hides_its_secret_in_logs() {
        let token = JoinToken::generate(ClusterId(42), [9; 32]);
        let text = token.to_string();
        assert_eq!(text.parse::<JoinToken>().unwrap(), token);
        assert_eq!(format!(" {text}\n").parse::<JoinToken>().unwrap(), token);
        assert_eq!(format!("{token:?}"), format!("JoinToken({})", ClusterId(42)));
        assert_ne!(JoinToken::generate(ClusterId(42), [9; 32]).secret_hash(), token.secret_hash());
    }

    #[test]
    fn a_pin_is_parsed_from_its_text_and_is_no_token() {
        let pin = AuthorityPin { cluster: ClusterId(42), fingerprint: [9; 32] };
        let text = format!("{pin}\n");
        assert_eq!(text.parse::<AuthorityPin>().unwrap(), pin);
        assert!(text.parse::<JoinToken>().is_err());
        let token = JoinToken::generate(ClusterId(42), [9; 32]).to_string();
        assert!(token.parse::<AuthorityPin>().is_err());
        assert!(text.replace('A', "B").parse::<AuthorityPin>().is_err());
    }

    #[test]
    fn every_mistyped_character_is_detected() {
        let text = JoinToken::generate(ClusterId(42), [9; 32]).to_string();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            assert!(String::from_utf8(bytes).unwrap().parse::<JoinToken>().is_err(), "{at}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".*") {
            let _ = format!("{PREFIX}{text}").parse::<JoinToken>();
            let _ = text.parse::<JoinToken>();
        }
    }
}
