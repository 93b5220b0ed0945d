//! Pair tokens: what one cluster gives to another, by hand, so that the two trust each other.
//!
//! As text: `quoin-pair-1.` and base64url of cluster id (16 bytes), SHA-256 of the authority's
//! certificate (32), secret (24), the number of addresses (1) and each of them with its length (2,
//! big-endian) before it, and 4 bytes of checksum against mistyped tokens. The inviting side keeps
//! only a hash of the secret.

use std::fmt;
use std::str::FromStr;

use crate::channel::endpoint;
use crate::token_parts::{self, SECRET_BYTES, Secret};
use crate::{ClusterId, Error};

const PREFIX: &str = "quoin-pair-1.";
const ADDRESSES_MAX: usize = 8;
/// A name of 255 bytes, a colon, a port.
const ADDRESS_BYTES_MAX: usize = 261;
const HEAD_BYTES: usize = 16 + 32 + SECRET_BYTES + 1;
const BODY_BYTES_MAX: usize = HEAD_BYTES + ADDRESSES_MAX * (2 + ADDRESS_BYTES_MAX);

/// A token that pairs the cluster that made it with another one. `Display` writes it whole; `Debug`
/// hides the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct PairToken {
    pub cluster: ClusterId,
    /// SHA-256 of the authority's certificate, which authenticates the first contact.
    pub fingerprint: [u8; 32],
    secret: Secret,
    addresses: Vec<String>,
}

impl PairToken {
    /// Makes a new secret for a cluster whose authority has this fingerprint, and whose mirrors
    /// listen at these addresses.
    ///
    /// # Errors
    /// Not 1 to 8 addresses, or one that is not `host:port` in at most 261 bytes.
    pub fn generate(
        cluster: ClusterId,
        fingerprint: [u8; 32],
        addresses: Vec<String>,
    ) -> Result<Self, Error> {
        check_addresses(&addresses)?;
        Ok(Self { cluster, fingerprint, secret: Secret::generate(), addresses })
    }

    /// Returns the hash that is stored instead of the secret: 64 hex digits.
    pub fn secret_hash(&self) -> String {
        self.secret.hash()
    }

    /// Returns where the cluster's mirrors listen: 1 to 8, each `host:port`.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }
}

fn check_addresses(addresses: &[String]) -> Result<(), Error> {
    let refused = |reason: String| Error::PairAddresses {
        addresses_max: ADDRESSES_MAX,
        bytes_max: ADDRESS_BYTES_MAX,
        reason,
    };
    if !(1..=ADDRESSES_MAX).contains(&addresses.len()) {
        return Err(refused(format!("{} are given", addresses.len())));
    }
    for address in addresses {
        if address.len() > ADDRESS_BYTES_MAX {
            return Err(refused(format!("one has {} bytes", address.len())));
        }
        if address.contains(',') {
            return Err(refused("one has a comma: each address is given by itself".to_owned()));
        }
        endpoint(address).map_err(|error| refused(error.to_string()))?;
    }
    Ok(())
}

impl fmt::Display for PairToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut body = Vec::with_capacity(BODY_BYTES_MAX);
        body.extend(self.cluster.0.to_be_bytes());
        body.extend(self.fingerprint);
        body.extend(self.secret.0);
        body.push(u8::try_from(self.addresses.len()).expect("checked when made"));
        for address in &self.addresses {
            let bytes = u16::try_from(address.len()).expect("checked when made");
            body.extend(bytes.to_be_bytes());
            body.extend(address.bytes());
        }
        write!(f, "{PREFIX}{}", token_parts::write(body))
    }
}

impl fmt::Debug for PairToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PairToken({})", self.cluster)
    }
}

impl FromStr for PairToken {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let text = text
            .strip_prefix(PREFIX)
            .ok_or(Error::PairToken("a token begins with quoin-pair-1."))?;
        let body = token_parts::read(text, HEAD_BYTES, BODY_BYTES_MAX).map_err(Error::PairToken)?;
        let mut rest = Rest(&body);
        read_whole(&mut rest)
            .filter(|_| rest.0.is_empty())
            .ok_or(Error::PairToken("its addresses are not whole"))
            .and_then(|token| check_addresses(&token.addresses).map(|()| token))
    }
}

/// Bytes of a body that are not read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const BYTES: usize>(&mut self) -> Option<[u8; BYTES]> {
        self.take(BYTES)?.try_into().ok()
    }
}

fn read_whole(rest: &mut Rest<'_>) -> Option<PairToken> {
    let cluster = ClusterId(u128::from_be_bytes(rest.array()?));
    let fingerprint = rest.array()?;
    let secret = Secret(rest.array()?);
    let [count] = rest.array()?;
    let mut addresses = Vec::new();
    for _ in 0..count {
        let bytes = u16::from_be_bytes(rest.array()?);
        let address = rest.take(bytes.into())?.to_vec();
        addresses.push(String::from_utf8(address).ok()?);
    }
    Some(PairToken { cluster, fingerprint, secret, addresses })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token(addresses: &[&str]) -> Result<PairToken, Error> {
        let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
        PairToken::generate(ClusterId(42), [9; 32], addresses)
    }

    #[test]
    fn a_token_is_parsed_from_its_text_and_hides_its_secret_in_logs() {
        for addresses in [&["mirror-1:7440"][..], &["10.0.0.1:1", "[2001:db8::1]:65535", "m:0"]] {
            let token = token(addresses).unwrap();
            let text = token.to_string();
            let read: PairToken = text.parse().unwrap();
            assert_eq!(read, token);
            assert_eq!(read.addresses(), addresses);
            assert_eq!(read.secret_hash(), token.secret_hash());
            assert_eq!(format!(" {text}\n").parse::<PairToken>().unwrap(), token);
            assert_eq!(format!("{token:?}"), format!("PairToken({})", ClusterId(42)));
        }
        let hash = || token(&["m:1"]).unwrap().secret_hash();
        assert!(hash() != hash() && hash().len() == 64);
    }

    #[test]
    fn every_mistyped_character_is_detected() {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.";
        for addresses in [&["mirror-1:7440"][..], &["m:17", "mirror:2"], &["m:1", "m:2", "m:3"]] {
            let text = token(addresses).unwrap().to_string().into_bytes();
            for at in 0..text.len() {
                for digit in DIGITS.iter().filter(|digit| **digit != text[at]) {
                    let mut typed = text.clone();
                    typed[at] = *digit;
                    let typed = String::from_utf8(typed).unwrap();
                    assert!(typed.parse::<PairToken>().is_err(), "{typed}");
                }
                let cut = String::from_utf8(text[..at].to_vec()).unwrap();
                assert!(cut.parse::<PairToken>().is_err(), "{cut}");
            }
        }
    }

    #[test]
    fn a_token_has_one_to_eight_addresses_of_at_most_261_bytes() {
        let longest = format!("{}:65535", "a".repeat(255));
        assert_eq!(longest.len(), ADDRESS_BYTES_MAX);
        let whole = token(&[longest.as_str(); ADDRESSES_MAX]).unwrap();
        assert_eq!(whole.to_string().parse::<PairToken>().unwrap(), whole);

        let longer = format!("{}:65535", "a".repeat(256));
        for (addresses, reason) in [
            (&[][..], "0 are given"),
            (&["m:1"; ADDRESSES_MAX + 1], "9 are given"),
            (&["m:1", &longer], "one has 262 bytes"),
            (&["m"], "form host:port"),
            (&[":1"], "form host:port"),
            (&["m:65536"], "form host:port"),
            (&["a b:1"], "form host:port"),
        ] {
            let error = token(addresses).unwrap_err().to_string();
            assert!(error.contains("1 to 8 addresses") && error.contains(reason), "{error}");
        }
    }

    /// A text with a right checksum over these bytes after the secret.
    fn sealed(tail: &[u8]) -> String {
        let mut body = vec![5; HEAD_BYTES - 1];
        body.extend(tail);
        format!("{PREFIX}{}", token_parts::write(body))
    }

    #[test]
    fn a_text_with_a_right_checksum_and_wrong_addresses_is_refused() {
        let refused = |tail: &[u8]| sealed(tail).parse::<PairToken>().unwrap_err().to_string();
        sealed(b"\x01\x00\x03m:1").parse::<PairToken>().unwrap();
        assert!(refused(b"").contains("truncated"));
        assert!(refused(b"\x00").contains("0 are given"));
        assert!(refused(b"\x01\x00\x04m:1").contains("not whole"));
        assert!(refused(b"\x02\x00\x03m:1").contains("not whole"));
        assert!(refused(b"\x01\x00\x03m:1+").contains("not whole"));
        assert!(refused(b"\x01\x00\x03m:\xff").contains("not whole"));
        assert!(refused(b"\x01\x00\x03mmm").contains("form host:port"));
        assert!(refused(&[&[9], &b"\x00\x03m:1".repeat(9)[..]].concat()).contains("9 are given"));
        assert!(refused(&[0; BODY_BYTES_MAX]).contains("too long"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".*") {
            let _ = format!("{PREFIX}{text}").parse::<PairToken>();
            let _ = text.parse::<PairToken>();
        }

        #[test]
        fn a_text_with_a_right_checksum_panics_never_and_is_written_as_it_was_read(
            tail in prop::collection::vec(prop_oneof![0..4u8, b'0'..b'<', any::<u8>()], 0..40),
        ) {
            let text = sealed(&tail);
            if let Ok(token) = text.parse::<PairToken>() {
                prop_assert_eq!(token.to_string(), text);
            }
        }
    }
}
