//! Key slots: the data key of a volume, wrapped once for each key of a user.
//!
//! A slot's wrapping key is derived from a passphrase by scrypt, or from a key of 256 bits by HKDF,
//! with a salt of the slot's own. The data key is wrapped by AES-256-GCM, whose tag is the check of
//! the user's key; the derivation and the salt are authenticated with it. The bounds of scrypt's
//! parameters limit what a hostile record can cost.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::constant_time::verify_slices_are_equal;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::key::{DATA_KEY_BYTES, DataKey, KEY_CHECK_BYTES, UserKey, derive};
use crate::written::hex_bytes;
use crate::{Error, VolumeCipher};

/// Most slots of one volume.
pub const SLOTS_MAX: usize = 8;
/// Longest name of a slot.
pub const SLOT_NAME_BYTES_MAX: usize = 64;
/// The only cipher.
const CIPHER: &str = "aes-256-xts";
const SALT_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
const WRAPPED_BYTES: usize = DATA_KEY_BYTES + TAG_BYTES;

/// Function that derives a slot's wrapping key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Derivation {
    Scrypt { log2_n: u8, r: u8, p: u8 },
    Hkdf,
}

/// Parameters of new slots: 64 MiB of memory, and some tenths of a second.
const SCRYPT: Derivation = Derivation::Scrypt { log2_n: 16, r: 8, p: 2 };
const SCRYPT_LOG2_N: std::ops::RangeInclusive<u8> = 14..=18;
const SCRYPT_R: u8 = 8;
const SCRYPT_P_MAX: u8 = 4;
/// Memory of the largest parameters, and a little more.
const SCRYPT_BYTES_MAX: usize = (1024 << 18) + (1 << 20);

/// One slot.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySlot {
    pub(crate) name: String,
    pub(crate) derivation: Derivation,
    #[serde(with = "hex_bytes")]
    pub(crate) salt: Vec<u8>,
    #[serde(with = "hex_bytes")]
    pub(crate) nonce: Vec<u8>,
    #[serde(with = "hex_bytes")]
    pub(crate) wrapped: Vec<u8>,
}

impl fmt::Debug for KeySlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySlot").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Encryption of a volume, as its record has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Encryption {
    pub(crate) cipher: String,
    /// Value by which the data key is recognised.
    #[serde(with = "hex_bytes")]
    pub(crate) key_check: Vec<u8>,
    pub(crate) slots: Vec<KeySlot>,
}

/// A data key, and the slot that gave it.
#[derive(Debug)]
pub struct Unlocked {
    pub key: DataKey,
    pub slot: String,
}

impl Encryption {
    /// Draws a data key for a new volume, with one slot for `user`. Takes some tenths of a second
    /// for a passphrase.
    ///
    /// # Errors
    /// [`Error::SlotName`], [`Error::System`].
    pub fn create(user: &UserKey, slot: &str) -> Result<Self, Error> {
        let key = DataKey::random()?;
        let key_check = key.check_value()?;
        let slots = vec![KeySlot::wrap(&key, user, slot)?];
        Ok(Self { cipher: CIPHER.to_owned(), key_check, slots })
    }

    /// Returns the name of the cipher.
    pub fn cipher(&self) -> &str {
        &self.cipher
    }

    /// Returns the names of the slots.
    pub fn slot_names(&self) -> Vec<String> {
        self.slots.iter().map(|slot| slot.name.clone()).collect()
    }

    /// Checks what a record or a message says: sizes, numbers, names.
    ///
    /// # Errors
    /// [`Error::Form`] or [`Error::SlotName`].
    pub fn check(&self) -> Result<(), Error> {
        if self.cipher != CIPHER {
            return Err(Error::Form("the only cipher is aes-256-xts"));
        }
        if self.key_check.len() != KEY_CHECK_BYTES {
            return Err(Error::Form("a key check has 32 bytes"));
        }
        if !(1..=SLOTS_MAX).contains(&self.slots.len()) {
            return Err(Error::Form("an encrypted volume has 1 to 8 key slots"));
        }
        for (at, slot) in self.slots.iter().enumerate() {
            slot.check()?;
            if self.slots[..at].iter().any(|other| other.name == slot.name) {
                return Err(Error::Form("two key slots have one name"));
            }
        }
        Ok(())
    }

    /// Returns whether `other` is of the same data key.
    pub fn is_of_same_key(&self, other: &Self) -> bool {
        self.cipher == other.cipher && self.key_check == other.key_check
    }

    /// Returns whether this is the volume's data key.
    pub fn is_key(&self, key: &DataKey) -> bool {
        let check = key.check_value();
        check.is_ok_and(|check| verify_slices_are_equal(&check, &self.key_check).is_ok())
    }

    /// Returns the cipher of the volume, where this is its data key.
    ///
    /// # Errors
    /// [`Error::WrongKey`], [`Error::System`].
    pub fn open(&self, key: &DataKey) -> Result<VolumeCipher, Error> {
        if !self.is_key(key) {
            return Err(Error::WrongKey);
        }
        VolumeCipher::new(key)
    }

    /// Unwraps the data key. Takes some tenths of a second for each slot of a passphrase, one
    /// derivation at a time in a process.
    ///
    /// # Errors
    /// [`Error::WrongKey`], [`Error::Form`], [`Error::System`].
    pub fn unlock(&self, user: &UserKey) -> Result<Unlocked, Error> {
        self.unlock_but(user, None)
    }

    fn unlock_but(&self, user: &UserKey, without: Option<&str>) -> Result<Unlocked, Error> {
        self.check()?;
        for slot in self.slots.iter().filter(|slot| Some(slot.name.as_str()) != without) {
            if let Some(key) = slot.open(user)? {
                // A slot of another volume's key opens nothing here.
                if self.is_key(&key) {
                    return Ok(Unlocked { key, slot: slot.name.clone() });
                }
            }
        }
        Err(Error::WrongKey)
    }

    /// Adds a slot for another key.
    ///
    /// # Errors
    /// [`Error::WrongKey`] where `user` opens no slot; [`Error::SlotExists`], [`Error::SlotsFull`],
    /// [`Error::SlotName`].
    pub fn add(&mut self, user: &UserKey, new: &UserKey, name: &str) -> Result<(), Error> {
        let unlocked = self.unlock(user)?;
        if self.slots.iter().any(|slot| slot.name == name) {
            return Err(Error::SlotExists(name.to_owned()));
        }
        if self.slots.len() >= SLOTS_MAX {
            return Err(Error::SlotsFull);
        }
        self.slots.push(KeySlot::wrap(&unlocked.key, new, name)?);
        Ok(())
    }

    /// Returns the slot that `user` opens, for another key of the same data key under that name.
    ///
    /// # Errors
    /// [`Error::WrongKey`] where it is not the volume's data key; [`Error::SlotName`].
    pub fn slot_of(&self, key: &DataKey, user: &UserKey, name: &str) -> Result<KeySlot, Error> {
        if !self.is_key(key) {
            return Err(Error::WrongKey);
        }
        KeySlot::wrap(key, user, name)
    }

    /// Returns these slots with one in place of that of its name, or of the only one; slots of other names stay.
    /// Slots that `new` opens beside it go.
    ///
    /// # Errors
    /// [`Error::WrongKey`] where `new` does not open the volume by the slot; [`Error::SlotsFull`].
    pub fn with_slot(&self, slot: KeySlot, new: &UserKey) -> Result<Self, Error> {
        let mut next = self.clone();
        let is_only_one = next.slots.len() == 1;
        next.slots.retain(|other| other.name != slot.name && !is_only_one);
        while let Ok(opened) = next.unlock(new) {
            next.slots.retain(|other| other.name != opened.slot);
        }
        if next.slots.len() >= SLOTS_MAX {
            return Err(Error::SlotsFull);
        }
        next.slots.push(slot);
        next.unlock(new)?;
        Ok(next)
    }

    /// Removes a slot. `user` must open another one, so that no volume becomes unreadable by it.
    ///
    /// # Errors
    /// [`Error::NoSlot`], [`Error::LastKey`], [`Error::WrongKey`].
    pub fn remove(&mut self, user: &UserKey, name: &str) -> Result<(), Error> {
        let at = self.slots.iter().position(|slot| slot.name == name);
        let at = at.ok_or_else(|| Error::NoSlot(name.to_owned()))?;
        match self.unlock_but(user, Some(name)) {
            Ok(_) => {}
            Err(Error::WrongKey) if self.unlock(user).is_ok() => return Err(Error::LastKey),
            Err(error) => return Err(error),
        }
        self.slots.remove(at);
        Ok(())
    }

    /// Replaces the slot that `user` opens by one of the key `new`; its name stays. Where `new` opens
    /// another slot already, that one stays and the former key's goes. Returns the name of the slot
    /// of `new`; afterwards `user` opens none.
    ///
    /// # Errors
    /// As [`Self::unlock`]; [`Error::SameKey`].
    pub fn rotate(&mut self, user: &UserKey, new: &UserKey) -> Result<String, Error> {
        let unlocked = match self.unlock(user) {
            // A repeat of a rotation that was made.
            Err(Error::WrongKey) => return self.unlock(new).map(|unlocked| unlocked.slot),
            unlocked => unlocked?,
        };
        let of_new = match self.unlock(new) {
            Ok(present) if present.slot == unlocked.slot => return Err(Error::SameKey),
            Ok(present) => present.slot,
            Err(_) => {
                let rotated = KeySlot::wrap(&unlocked.key, new, &unlocked.slot)?;
                for slot in self.slots.iter_mut().filter(|slot| slot.name == unlocked.slot) {
                    *slot = rotated.clone();
                }
                unlocked.slot
            }
        };
        // A key that leaked keeps no slot, whatever its name is.
        while let Ok(former) = self.unlock_but(user, Some(&of_new)) {
            self.slots.retain(|slot| slot.name != former.slot);
        }
        Ok(of_new)
    }
}

impl KeySlot {
    pub(crate) fn wrap(key: &DataKey, user: &UserKey, name: &str) -> Result<Self, Error> {
        let derivation = match user {
            UserKey::Passphrase(_) => SCRYPT,
            UserKey::Raw(_) => Derivation::Hkdf,
        };
        let mut slot = Self {
            name: name.to_owned(),
            derivation,
            salt: vec![0; SALT_BYTES],
            nonce: vec![0; NONCE_LEN],
            wrapped: Vec::new(),
        };
        slot.check_name()?;
        for random in [&mut slot.salt, &mut slot.nonce] {
            aws_lc_rs::rand::fill(random).map_err(|_| Error::System("random bytes"))?;
        }
        let wrapping = slot.wrapping_key(user)?.ok_or(Error::WrongKey)?;
        // Never reallocated while the bare key is in it.
        let mut wrapped = Vec::with_capacity(WRAPPED_BYTES);
        wrapped.extend_from_slice(key.bytes());
        let sealed = wrapping.seal_in_place_append_tag(
            slot.nonce()?,
            Aad::from(slot.authenticated()),
            &mut wrapped,
        );
        sealed.map_err(|_| Error::System("the wrapping of a key"))?;
        slot.wrapped = wrapped;
        Ok(slot)
    }

    /// Returns the data key where this is the slot's user key.
    fn open(&self, user: &UserKey) -> Result<Option<DataKey>, Error> {
        let Some(wrapping) = self.wrapping_key(user)? else { return Ok(None) };
        let mut wrapped = Zeroizing::new(self.wrapped.clone());
        let opened =
            wrapping.open_in_place(self.nonce()?, Aad::from(self.authenticated()), &mut wrapped);
        let Ok(bytes) = opened else { return Ok(None) };
        let bytes = Zeroizing::new(bytes.to_vec());
        DataKey::of_bytes(bytes).map(Some)
    }

    /// `None`: the key is of the other kind than the slot.
    fn wrapping_key(&self, user: &UserKey) -> Result<Option<LessSafeKey>, Error> {
        let derived = match (user, self.derivation) {
            (UserKey::Raw(raw), Derivation::Hkdf) => derive(&self.salt, raw)?,
            (UserKey::Passphrase(text), Derivation::Scrypt { log2_n, r, p }) => {
                scrypt(text, &self.salt, log2_n, r, p)?
            }
            _ => return Ok(None),
        };
        let key = UnboundKey::new(&AES_256_GCM, &derived);
        Ok(Some(LessSafeKey::new(key.map_err(|_| Error::System("a cipher with this key"))?)))
    }

    fn nonce(&self) -> Result<Nonce, Error> {
        Nonce::try_assume_unique_for_key(&self.nonce)
            .map_err(|_| Error::Form("a key slot's nonce has 12 bytes"))
    }

    /// Bytes that the tag protects beside the data key.
    fn authenticated(&self) -> Vec<u8> {
        let derivation = match self.derivation {
            Derivation::Hkdf => [0; 4],
            Derivation::Scrypt { log2_n, r, p } => [1, log2_n, r, p],
        };
        [&b"quoin key slot 1"[..], &derivation, &self.salt].concat()
    }

    fn check_name(&self) -> Result<(), Error> {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_name =
            (1..=SLOT_NAME_BYTES_MAX).contains(&self.name.len()) && self.name.bytes().all(good);
        if is_name { Ok(()) } else { Err(Error::SlotName) }
    }

    fn check(&self) -> Result<(), Error> {
        self.check_name()?;
        if let Derivation::Scrypt { log2_n, r, p } = self.derivation
            && !(SCRYPT_LOG2_N.contains(&log2_n)
                && r == SCRYPT_R
                && (1..=SCRYPT_P_MAX).contains(&p))
        {
            return Err(Error::Form("scrypt takes N of 2^14 to 2^18, r = 8, p of 1 to 4"));
        }
        if self.salt.len() != SALT_BYTES {
            return Err(Error::Form("a key slot's salt has 32 bytes"));
        }
        if self.nonce.len() != NONCE_LEN {
            return Err(Error::Form("a key slot's nonce has 12 bytes"));
        }
        if self.wrapped.len() != WRAPPED_BYTES {
            return Err(Error::Form("a wrapped key has 80 bytes"));
        }
        Ok(())
    }
}

/// scrypt (RFC 7914), one at a time: each takes up to 256 MiB.
fn scrypt(text: &[u8], salt: &[u8], log2_n: u8, r: u8, p: u8) -> Result<Zeroizing<Vec<u8>>, Error> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut derived = Zeroizing::new(vec![0; 32]);
    aws_lc_sys::init();
    // SAFETY: each pointer is of a live slice and is passed with its length; the function writes
    // `derived` alone.
    let done = unsafe {
        aws_lc_sys::EVP_PBE_scrypt(
            text.as_ptr().cast(),
            text.len(),
            salt.as_ptr(),
            salt.len(),
            1 << u32::from(log2_n),
            r.into(),
            p.into(),
            SCRYPT_BYTES_MAX,
            derived.as_mut_ptr(),
            derived.len(),
        )
    };
    if done == 1 { Ok(derived) } else { Err(Error::System("the derivation of a key")) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn raw(fill: u8) -> UserKey {
        UserKey::parse(hex::encode([fill; 32]).as_bytes()).unwrap()
    }

    fn passphrase(text: &str) -> UserKey {
        UserKey::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn scrypt_gives_what_rfc_7914_says() {
        let derived = scrypt(b"pleaseletmein", b"SodiumChloride", 14, 8, 1).unwrap();
        let expected = "7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2";
        assert_eq!(hex::encode(&derived), expected);
    }

    #[test]
    fn a_slot_opens_with_its_own_key_alone_and_the_record_shows_no_key() {
        let (user, other) = (passphrase("correct horse"), passphrase("correct house"));
        let mut encryption = Encryption::create(&user, "first").unwrap();
        encryption.add(&user, &raw(7), "second").unwrap();
        let by_text = encryption.unlock(&user).unwrap();
        let by_raw = encryption.unlock(&raw(7)).unwrap();
        assert_eq!((by_text.slot.as_str(), by_raw.slot.as_str()), ("first", "second"));
        assert!(by_text.key == by_raw.key && encryption.is_key(&by_raw.key));
        for wrong in [&other, &raw(8)] {
            assert_eq!(encryption.unlock(wrong).unwrap_err(), Error::WrongKey);
        }
        let key = hex::encode(by_raw.key.bytes());
        for text in [serde_json::to_string(&encryption).unwrap(), format!("{encryption:?}")] {
            assert!(!text.contains(&key[..32]) && !text.contains("correct horse"), "{text}");
        }
        assert!(!format!("{encryption:?}").contains(&hex::encode(&encryption.slots[0].wrapped)));
    }

    #[test]
    fn a_record_is_read_back_as_it_was_written() {
        let encryption = Encryption::create(&raw(1), "a").unwrap();
        let written = serde_json::to_string(&encryption).unwrap();
        let read: Encryption = serde_json::from_str(&written).unwrap();
        assert_eq!(read, encryption);
        assert!(read.unlock(&raw(1)).is_ok());
    }

    #[test]
    fn the_last_slot_that_a_user_can_open_is_not_removed() {
        let (mine, yours) = (raw(1), raw(2));
        let mut encryption = Encryption::create(&mine, "mine").unwrap();
        assert_eq!(encryption.remove(&mine, "mine").unwrap_err(), Error::LastKey);
        encryption.add(&mine, &yours, "yours").unwrap();
        assert_eq!(encryption.remove(&mine, "mine").unwrap_err(), Error::LastKey);
        assert_eq!(encryption.remove(&raw(3), "mine").unwrap_err(), Error::WrongKey);
        assert_eq!(encryption.remove(&mine, "x").unwrap_err(), Error::NoSlot("x".into()));
        encryption.remove(&yours, "mine").unwrap();
        assert_eq!(encryption.slot_names(), ["yours"]);
        assert_eq!(encryption.unlock(&mine).unwrap_err(), Error::WrongKey);
    }

    #[test]
    fn a_rotated_slot_keeps_its_name_and_the_data_key_and_the_former_key_opens_it_no_more() {
        let mut encryption = Encryption::create(&raw(1), "a").unwrap();
        let before = encryption.unlock(&raw(1)).unwrap().key;
        assert_eq!(encryption.rotate(&raw(1), &raw(2)).unwrap(), "a");
        assert!(encryption.unlock(&raw(2)).unwrap().key == before);
        assert_eq!(encryption.unlock(&raw(1)).unwrap_err(), Error::WrongKey);
        let rotated = encryption.clone();
        // A repeat changes nothing, and a stranger rotates nothing.
        assert_eq!(encryption.rotate(&raw(1), &raw(2)).unwrap(), "a");
        assert_eq!(encryption.rotate(&raw(8), &raw(9)).unwrap_err(), Error::WrongKey);
        assert_eq!(encryption, rotated);
    }

    #[test]
    fn a_rotated_key_opens_nothing_also_where_the_new_one_has_a_slot_already() {
        let mut encryption = Encryption::create(&raw(1), "a").unwrap();
        encryption.add(&raw(1), &raw(2), "second").unwrap();
        encryption.add(&raw(1), &raw(1), "again").unwrap();
        encryption.add(&raw(1), &raw(3), "other").unwrap();
        let before = encryption.unlock(&raw(2)).unwrap().key;
        assert_eq!(encryption.rotate(&raw(1), &raw(2)).unwrap(), "second");
        assert_eq!(encryption.unlock(&raw(1)).unwrap_err(), Error::WrongKey);
        let names: Vec<&str> = encryption.slots.iter().map(|slot| slot.name.as_str()).collect();
        assert_eq!(names, ["second", "other"]);
        assert!(encryption.unlock(&raw(2)).unwrap().key == before);
        // A key that is not new rotates nothing, and says so.
        assert_eq!(encryption.rotate(&raw(2), &raw(2)), Err(Error::SameKey));
        assert_eq!(encryption.slots.len(), 2);
    }

    #[test]
    fn names_and_numbers_of_slots_have_bounds() {
        let user = raw(1);
        let mut encryption = Encryption::create(&user, "s0").unwrap();
        assert_eq!(encryption.add(&user, &raw(2), "s0"), Err(Error::SlotExists("s0".into())));
        for name in ["", "a b", "ü", &"x".repeat(65)] {
            assert_eq!(encryption.add(&user, &raw(2), name), Err(Error::SlotName));
        }
        for n in 1..8u8 {
            encryption.add(&user, &raw(n + 1), &format!("s{n}")).unwrap();
        }
        assert_eq!(encryption.add(&user, &raw(99), "s8"), Err(Error::SlotsFull));
    }

    #[test]
    fn what_a_hostile_record_says_is_refused_before_anything_is_derived() {
        let good = Encryption::create(&raw(1), "a").unwrap();
        let spoilt: [fn(&mut Encryption); 9] = [
            |e| e.cipher = "rot13".into(),
            |e| e.key_check.clear(),
            |e| e.slots.clear(),
            |e| e.slots = vec![e.slots[0].clone(); 9],
            |e| e.slots.push(e.slots[0].clone()),
            |e| e.slots[0].salt.clear(),
            |e| e.slots[0].nonce.push(0),
            |e| e.slots[0].wrapped.truncate(1),
            |e| e.slots[0].derivation = Derivation::Scrypt { log2_n: 40, r: 8, p: 1 },
        ];
        for spoil in spoilt {
            let mut bad = good.clone();
            spoil(&mut bad);
            assert!(matches!(bad.check(), Err(Error::Form(_))), "{bad:?}");
            assert!(bad.unlock(&raw(1)).is_err());
        }
    }

    #[test]
    fn a_slot_of_another_volume_gives_no_key_here() {
        let mut one = Encryption::create(&raw(1), "a").unwrap();
        one.slots = Encryption::create(&raw(1), "a").unwrap().slots;
        assert_eq!(one.unlock(&raw(1)).unwrap_err(), Error::WrongKey);
    }

    proptest! {
        #[test]
        fn a_slot_with_a_changed_bit_opens_no_more(at in 0..124usize, bit in 0..8u8) {
            let mut encryption = Encryption::create(&raw(1), "a").unwrap();
            let slot = &mut encryption.slots[0];
            let mut parts = slot.salt.iter_mut().chain(&mut slot.nonce).chain(&mut slot.wrapped);
            *parts.nth(at).unwrap() ^= 1 << bit;
            prop_assert_eq!(encryption.unlock(&raw(1)).unwrap_err(), Error::WrongKey);
        }
    }
}
