//! Encryption in the data path: the one place where clear text becomes entries and what was stored
//! becomes clear text.
//!
//! All behind it (entries, checksums, replicas, rebuilds, comparisons) has ciphertext alone, and
//! needs no key: a volume whose key is not here is opened and tended all the same, and accepts no
//! client. Trims and zeroes of WRITE_ZEROES are holes; they have no content to encrypt.

use quoin_encryption::{DataKey, VolumeCipher};
use quoin_types::block::{BlockError, Operation, Payload};

/// Encryption of one volume as its shard has it.
pub(super) enum Sealing {
    /// The volume is not encrypted.
    Clear,
    /// Its key is not here.
    Locked,
    Unlocked(Box<VolumeCipher>),
}

impl Sealing {
    /// The first state of a volume. A key that is no key leaves it locked.
    pub fn new(is_encrypted: bool, key: Option<&DataKey>) -> Self {
        let mut sealing = if is_encrypted { Self::Locked } else { Self::Clear };
        sealing.update(key);
        sealing
    }

    /// Takes the key that this volume has now, or drops the one that it had.
    pub fn update(&mut self, key: Option<&DataKey>) {
        match key {
            Some(key) if self.is_locked() => match VolumeCipher::new(key) {
                Ok(cipher) => *self = Self::Unlocked(Box::new(cipher)),
                Err(error) => tracing::error!(%error, "a volume stays locked"),
            },
            None if matches!(self, Self::Unlocked(_)) => *self = Self::Locked,
            _ => {}
        }
    }

    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Locked)
    }

    /// Encrypts what a request carries. Returns the offset of a read, which decrypts its answer.
    ///
    /// # Errors
    /// A request that must not reach the volume as it is: clear text of a volume without its key,
    /// or of parts of blocks.
    pub fn seal(&mut self, operation: &mut Operation) -> Result<u64, BlockError> {
        match (&mut *self, &mut *operation) {
            (Self::Locked, _) => Err(BlockError::Stopped),
            (_, Operation::Read { offset, .. }) => Ok(*offset),
            (Self::Unlocked(cipher), Operation::Write { offset, data, .. }) => {
                *data = cipher.encrypt(*offset, data).ok_or(BlockError::Misaligned)?;
                Ok(0)
            }
            _ => Ok(0),
        }
    }

    /// Decrypts the answer to a read of `offset`.
    pub fn open(
        &mut self,
        offset: u64,
        result: Result<Payload, BlockError>,
    ) -> Result<Payload, BlockError> {
        match (self, result) {
            (Self::Unlocked(cipher), Ok(Payload::Data(chunks))) => {
                Ok(Payload::Data(cipher.decrypt(offset, chunks)))
            }
            // The key went while the answer was on its way.
            (Self::Locked, Ok(Payload::Data(_))) => Err(BlockError::Stopped),
            (_, result) => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use quoin_encryption::{Encryption, UserKey};

    use super::*;

    fn key() -> DataKey {
        let user = UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
        Encryption::create(&user, "a").unwrap().unlock(&user).unwrap().key
    }

    fn write(offset: u64, data: &[u8]) -> Operation {
        Operation::Write { offset, data: Bytes::copy_from_slice(data), fua: false }
    }

    #[test]
    fn nothing_goes_in_or_out_in_clear_text_while_an_encrypted_volume_has_no_key() {
        let mut sealing = Sealing::new(true, None);
        let read = || Operation::Read { offset: 0, length: 4096 };
        for mut operation in [write(0, &[1; 4096]), read(), Operation::Flush] {
            assert_eq!(sealing.seal(&mut operation), Err(BlockError::Stopped));
        }
        let stored = Payload::Data(vec![Bytes::from_static(&[9; 4096])]);
        assert_eq!(sealing.open(0, Ok(stored.clone())), Err(BlockError::Stopped));
        sealing.update(Some(&key()));
        assert!(!sealing.is_locked());
        let mut operation = write(4096, &[1; 8192]);
        sealing.seal(&mut operation).unwrap();
        let Operation::Write { data, .. } = operation else { panic!() };
        assert!(data.chunks(4096).all(|block| block != [1; 4096]));
        let read = sealing.open(4096, Ok(Payload::Data(vec![data])));
        assert_eq!(read, Ok(Payload::Data(vec![Bytes::from_static(&[1; 8192])])));
        sealing.update(None);
        assert!(sealing.is_locked());
    }

    #[test]
    fn a_part_of_a_block_of_an_encrypted_volume_is_refused_and_not_passed_on() {
        let mut sealing = Sealing::new(true, Some(&key()));
        for mut operation in [write(512, &[1; 4096]), write(0, &[1; 512])] {
            assert_eq!(sealing.seal(&mut operation), Err(BlockError::Misaligned));
        }
    }

    #[test]
    fn a_volume_that_is_not_encrypted_passes_what_it_is_given() {
        let mut sealing = Sealing::new(false, Some(&key()));
        let mut operation = write(512, &[1; 512]);
        assert_eq!(sealing.seal(&mut operation), Ok(0));
        assert_eq!(operation, write(512, &[1; 512]));
        let stored = Payload::Data(vec![Bytes::from_static(&[9; 512])]);
        assert_eq!(sealing.open(512, Ok(stored.clone())), Ok(stored));
    }
}
