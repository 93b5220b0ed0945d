//! The key of a user and the key of a volume's data.

use std::fmt;
use std::sync::{Arc, Once};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use zeroize::Zeroizing;

use crate::Error;

/// Rule of a user key, for refusals and help.
pub const USER_KEY_RULE: &str = "a key is a passphrase of 8 to 1024 bytes of text, or 64 hex \
     digits, which are a key of 256 bits";

const PASSPHRASE_BYTES_MIN: usize = 8;
const PASSPHRASE_BYTES_MAX: usize = 1024;
const RAW_BYTES: usize = 32;
pub(crate) const DATA_KEY_BYTES: usize = 64;
pub(crate) const KEY_CHECK_BYTES: usize = 32;

/// Key that a user keeps: a passphrase, from which a slow function derives a key, or 256 random
/// bits, which need none.
#[derive(Clone)]
pub enum UserKey {
    Passphrase(Zeroizing<Vec<u8>>),
    Raw(Zeroizing<Vec<u8>>),
}

impl UserKey {
    /// Reads a key as a file or a secret has it. One line end at the end is not part of it.
    ///
    /// # Errors
    /// [`Error::UserKey`].
    pub fn parse(text: &[u8]) -> Result<Self, Error> {
        forbid_dumps();
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        if text.len() == 2 * RAW_BYTES && text.iter().all(u8::is_ascii_hexdigit) {
            let mut raw = Zeroizing::new(vec![0; RAW_BYTES]);
            hex::decode_to_slice(text, &mut raw).map_err(|_| Error::UserKey)?;
            return Self::raw(raw);
        }
        Self::passphrase(Zeroizing::new(text.to_vec()))
    }

    pub(crate) fn passphrase(text: Zeroizing<Vec<u8>>) -> Result<Self, Error> {
        let is_text = std::str::from_utf8(&text).is_ok() && !text.contains(&0);
        if !is_text || !(PASSPHRASE_BYTES_MIN..=PASSPHRASE_BYTES_MAX).contains(&text.len()) {
            return Err(Error::UserKey);
        }
        Ok(Self::Passphrase(text))
    }

    pub(crate) fn raw(raw: Zeroizing<Vec<u8>>) -> Result<Self, Error> {
        if raw.len() != RAW_BYTES {
            return Err(Error::UserKey);
        }
        Ok(Self::Raw(raw))
    }
}

impl fmt::Debug for UserKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UserKey(..)")
    }
}

/// The key of a volume's data: both keys of AES-256-XTS. Clones share one copy in memory.
#[derive(Clone)]
pub struct DataKey(Arc<Zeroizing<Vec<u8>>>);

impl DataKey {
    /// Draws a key.
    pub(crate) fn random() -> Result<Self, Error> {
        let mut bytes = Zeroizing::new(vec![0; DATA_KEY_BYTES]);
        aws_lc_rs::rand::fill(&mut bytes).map_err(|_| Error::System("random bytes"))?;
        Self::of_bytes(bytes)
    }

    pub(crate) fn of_bytes(bytes: Zeroizing<Vec<u8>>) -> Result<Self, Error> {
        if bytes.len() != DATA_KEY_BYTES {
            return Err(Error::Form("a data key has 64 bytes"));
        }
        let (one, other) = bytes.split_at(DATA_KEY_BYTES / 2);
        if verify_slices_are_equal(one, other).is_ok() {
            return Err(Error::Form("the halves of a data key differ"));
        }
        forbid_dumps();
        Ok(Self(Arc::new(bytes)))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// A value by which a key is recognised and from which it cannot be found.
    pub(crate) fn check_value(&self) -> Result<Vec<u8>, Error> {
        derive(b"quoin data key check 1", self.bytes()).map(|check| check.to_vec())
    }

    /// A value by which the other end of a connection, which has the key too, knows that this one has
    /// it. `secret`: of that connection alone, so that a proof is good for no other one.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn proof(&self, secret: &[u8; 32]) -> Result<[u8; 32], Error> {
        let derived = derive_for(b"quoin data key proof 1", self.bytes(), secret)?;
        derived.as_slice().try_into().map_err(|_| Error::System("the derivation of a key"))
    }

    /// Returns true if the other end of that connection has this key.
    pub fn is_proven_by(&self, secret: &[u8; 32], proof: &[u8; 32]) -> bool {
        self.proof(secret).is_ok_and(|own| verify_slices_are_equal(&own, proof).is_ok())
    }
}

impl PartialEq for DataKey {
    fn eq(&self, other: &Self) -> bool {
        verify_slices_are_equal(self.bytes(), other.bytes()).is_ok()
    }
}

impl Eq for DataKey {}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(..)")
    }
}

/// HKDF-SHA256 of a secret that is random already.
pub(crate) fn derive(salt: &[u8], secret: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
    derive_for(salt, secret, b"quoin")
}

fn derive_for(salt: &[u8], secret: &[u8], info: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
    let mut derived = Zeroizing::new(vec![0; KEY_CHECK_BYTES]);
    let extracted = Salt::new(HKDF_SHA256, salt).extract(secret);
    let info = [info];
    let expanded = extracted.expand(&info, HKDF_SHA256);
    let filled = expanded.and_then(|expanded| expanded.fill(&mut derived));
    filled.map_err(|_| Error::System("the derivation of a key"))?;
    Ok(derived)
}

/// Keeps this process out of core dumps, and other processes of its user out of its memory. It comes about
/// with the first key; a process that waits for keys of others calls it at its start.
pub fn forbid_dumps() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
            tracing::warn!(%error, "a core dump of this process would contain keys");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_key_is_a_passphrase_or_64_hex_digits_and_a_line_end_is_no_part_of_it() {
        for text in ["correct horse", "correct horse\n", "correct horse\r\n"] {
            let Ok(UserKey::Passphrase(key)) = UserKey::parse(text.as_bytes()) else { panic!() };
            assert_eq!(key.as_slice(), b"correct horse");
        }
        let digits = "0F".repeat(32);
        let Ok(UserKey::Raw(key)) = UserKey::parse(digits.as_bytes()) else { panic!() };
        assert_eq!(key.as_slice(), [0x0f; 32]);
        assert!(matches!(UserKey::parse("g".repeat(64).as_bytes()), Ok(UserKey::Passphrase(_))));
    }

    #[test]
    fn a_user_key_that_is_too_short_too_long_or_no_text_is_refused_and_not_repeated() {
        for wrong in [&b""[..], b"hunter2", &[b'x'; 1025], b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe"] {
            let refused = UserKey::parse(wrong).unwrap_err();
            assert_eq!(refused, Error::UserKey);
            assert!(!refused.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn keys_show_nothing_of_themselves_and_their_holder_is_not_dumped() {
        let key = DataKey::random().unwrap();
        assert_eq!(format!("{key:?}"), "DataKey(..)");
        let user = UserKey::parse(b"correct horse").unwrap();
        assert_eq!(format!("{user:?}"), "UserKey(..)");
        let behavior = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(behavior, DumpableBehavior::NotDumpable);
    }

    #[test]
    fn a_key_is_proven_on_one_connection_by_those_alone_who_have_it() {
        let (key, other) = (DataKey::random().unwrap(), DataKey::random().unwrap());
        let proof = key.proof(&[1; 32]).unwrap();
        assert!(key.clone().is_proven_by(&[1; 32], &proof));
        assert!(!key.is_proven_by(&[2; 32], &proof), "a proof of another connection");
        assert!(!key.is_proven_by(&[1; 32], &other.proof(&[1; 32]).unwrap()), "another key");
        assert!(!key.is_proven_by(&[1; 32], &[0; 32]));
        assert_ne!(proof.to_vec(), key.check_value().unwrap(), "the records show that one");
    }

    #[test]
    fn a_data_key_of_another_length_or_with_equal_halves_is_refused() {
        for bytes in [vec![], vec![1; 63], vec![7; 64], vec![1; 65]] {
            assert!(DataKey::of_bytes(Zeroizing::new(bytes)).is_err());
        }
    }
}
