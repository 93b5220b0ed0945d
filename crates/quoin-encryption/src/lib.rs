//! Encryption of volumes: keys, key slots, and the cipher of a volume's blocks.
//!
//! * A volume's blocks are encrypted with AES-256-XTS under a random **data key**
//!   ([`DataKey`], [`VolumeCipher`]).
//! * The data key is stored only wrapped, in the **key slots** of the volume's record
//!   ([`Encryption`]): each slot holds it under a key that is derived from one **user key**
//!   ([`UserKey`]). The controller and the pools see the slots and nothing else.
//! * The host that uses the volume unwraps the data key and hands it to its target over a local
//!   socket ([`handing`]).
//!
//! A key is in memory only, is overwritten when it is dropped, and is shown by no `Debug`. A
//! process that holds a data key is not dumped.

mod cipher;
mod content_hash;
mod error;
pub mod handing;
mod key;
mod messages;
mod slots;
pub mod written;

pub use cipher::VolumeCipher;
pub use content_hash::{ContentHash, HASH_BYTES};
pub use error::Error;
pub use key::{DataKey, USER_KEY_RULE, UserKey, forbid_dumps};
pub use slots::{Encryption, KeySlot, SLOT_NAME_BYTES_MAX, SLOTS_MAX, Unlocked};
