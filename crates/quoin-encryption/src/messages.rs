//! Encryption in the messages of the control plane.

use quoin_api::control as api;

use crate::Error;
use crate::slots::{Derivation, Encryption, KeySlot};

const SCRYPT: &str = "scrypt";
const HKDF: &str = "hkdf-sha256";

impl From<&Encryption> for api::Encryption {
    fn from(encryption: &Encryption) -> Self {
        Self {
            cipher: encryption.cipher.clone(),
            key_check: encryption.key_check.clone(),
            slots: encryption.slots.iter().map(api::KeySlot::from).collect(),
        }
    }
}

impl From<&KeySlot> for api::KeySlot {
    fn from(slot: &KeySlot) -> Self {
        let (derivation, log2_n, r, p) = match slot.derivation {
            Derivation::Scrypt { log2_n, r, p } => (SCRYPT, log2_n, r, p),
            Derivation::Hkdf => (HKDF, 0, 0, 0),
        };
        Self {
            name: slot.name.clone(),
            derivation: derivation.to_owned(),
            scrypt_log2_n: log2_n.into(),
            scrypt_r: r.into(),
            scrypt_p: p.into(),
            salt: slot.salt.clone(),
            nonce: slot.nonce.clone(),
            wrapped: slot.wrapped.clone(),
        }
    }
}

impl TryFrom<&api::Encryption> for Encryption {
    type Error = Error;

    /// Reads a message; what it says keeps the rules of [`Encryption::check`].
    fn try_from(message: &api::Encryption) -> Result<Self, Error> {
        let slots = message.slots.iter().take(crate::SLOTS_MAX + 1).map(slot);
        let encryption = Self {
            cipher: message.cipher.clone(),
            key_check: message.key_check.clone(),
            slots: slots.collect::<Result<_, _>>()?,
        };
        encryption.check()?;
        Ok(encryption)
    }
}

fn slot(message: &api::KeySlot) -> Result<KeySlot, Error> {
    let byte = |number: u32| {
        u8::try_from(number).map_err(|_| Error::Form("a parameter of scrypt is too large"))
    };
    let derivation = match message.derivation.as_str() {
        SCRYPT => Derivation::Scrypt {
            log2_n: byte(message.scrypt_log2_n)?,
            r: byte(message.scrypt_r)?,
            p: byte(message.scrypt_p)?,
        },
        HKDF => Derivation::Hkdf,
        _ => return Err(Error::Form("a key slot's derivation is scrypt or hkdf-sha256")),
    };
    Ok(KeySlot {
        name: message.name.clone(),
        derivation,
        salt: message.salt.clone(),
        nonce: message.nonce.clone(),
        wrapped: message.wrapped.clone(),
    })
}

#[cfg(test)]
mod tests {
    use crate::UserKey;

    use super::*;

    #[test]
    fn a_message_says_what_the_record_does_and_its_debug_text_has_no_wrapped_key() {
        let text = UserKey::parse(b"correct horse").unwrap();
        let raw = UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
        let mut encryption = Encryption::create(&text, "a").unwrap();
        encryption.add(&text, &raw, "b").unwrap();
        let mut message = api::Encryption::from(&encryption);
        assert_eq!(Encryption::try_from(&message).unwrap(), encryption);
        assert!(!format!("{message:?}").contains("wrapped"), "{message:?}");
        message.slots[0].scrypt_log2_n = 300;
        assert!(Encryption::try_from(&message).is_err());
        message.slots[0].derivation = "md5".into();
        assert!(Encryption::try_from(&message).is_err());
        message.slots = vec![message.slots[1].clone(); 100];
        assert!(Encryption::try_from(&message).is_err());
    }
}
