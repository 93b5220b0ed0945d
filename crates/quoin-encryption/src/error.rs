//! Failures of keys. No message repeats any part of a key.

use crate::key::USER_KEY_RULE;

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The text is no user key.
    #[error("{USER_KEY_RULE}")]
    UserKey,
    /// No slot opens with the key. The message says no more on purpose.
    #[error("the key opens no key slot of this volume")]
    WrongKey,
    /// A name of a slot that breaks its rule.
    #[error("a key slot's name has 1 to 64 letters, digits, '-', '_' and '.'")]
    SlotName,
    #[error("there is no key slot {0:?}")]
    NoSlot(String),
    #[error("there is a key slot {0:?} already")]
    SlotExists(String),
    #[error("a volume has at most 8 key slots; remove one first")]
    SlotsFull,
    #[error("the key opens only the slot that is to be removed, and another one must stay usable")]
    LastKey,
    #[error(
        "the new key is the former one, so nothing would be rotated: give another with --new-key-file"
    )]
    SameKey,
    /// Slots of a record or a message that break a rule.
    #[error("{0}")]
    Form(&'static str),
    /// The system gave no random bytes, or no memory for the derivation of a key.
    #[error("the system refused {0}")]
    System(&'static str),
}
