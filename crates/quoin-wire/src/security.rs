//! Protection of frames after the handshake: a tag on each, and encryption where the cluster
//! requires it.
//!
//! The cipher is AES-128-GCM with one key for each direction, both from the TLS exporter, so that
//! only the two proven peers have them. In [`Mode::Authenticate`] a frame's bytes are all
//! additional data (a GMAC tag of 16 bytes follows, nothing is encrypted). In [`Mode::Encrypt`],
//! the default, the header is additional data and the rest is ciphertext. It costs about a sixth
//! more than a tag alone (`examples/frame_cost.rs`), a few µs on 128 KiB both ways. The nonce is a
//! counter of frames, never sent: a frame that is lost, repeated, moved or changed fails its tag.
//! Every 2^28 frames each direction steps to the next key (HKDF of the old one), far below the
//! cipher's limits.
//!
//! The bytes of a frame are gathered into one buffer here. That copy (0.1 µs a block) allows a
//! single AEAD call and a single `write`; a tag over scattered pieces would cost as much in fixed
//! overhead.

use std::path::Path;

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk};
use bytes::{Bytes, BytesMut};

use crate::encode::FrameBuffer;
use crate::frame::{HEADER_LEN, WireError};
use crate::queue::SendQueue;

/// Protection of the frames of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// None: benchmarks, tests, and an explicitly insecure loopback.
    Plain,
    /// Authenticated: every frame is proven to come unchanged from the peer. Others on the network
    /// can read it; for clusters that require this mode.
    Authenticate,
    /// Authenticated and encrypted.
    Encrypt,
}

impl Mode {
    /// Reads the mode that the cluster last required, as stored in an identity directory, so that a
    /// process which starts while the controller is away does not accept less.
    pub fn remembered(identity_dir: &Path) -> Mode {
        std::fs::read_to_string(identity_dir.join(REMEMBERED_FILE))
            .ok()
            .and_then(|name| Mode::from_name(name.trim()))
            .unwrap_or(Mode::Encrypt)
    }

    /// Stores the mode for [`Mode::remembered`]; a directory that cannot be written to is logged.
    pub fn remember(self, identity_dir: &Path) {
        let name = if self == Mode::Encrypt { "encrypt" } else { "authenticate" };
        let path = identity_dir.join(REMEMBERED_FILE);
        if std::fs::read_to_string(&path).is_ok_and(|known| known.trim() == name) {
            return;
        }
        if let Err(error) = std::fs::write(&path, name) {
            tracing::warn!(path = %path.display(), %error, "cannot remember the data security");
        }
    }

    /// Parses the spelling of the control plane (`data_security`).
    pub fn from_name(name: &str) -> Option<Mode> {
        match name {
            "authenticate" => Some(Mode::Authenticate),
            "encrypt" => Some(Mode::Encrypt),
            _ => None,
        }
    }
}

/// File beside an identity, so that each process of a host stores its own.
const REMEMBERED_FILE: &str = "data-security";

/// Bytes of the tag after a protected frame.
pub const TAG_LEN: usize = 16;
const KEY_LEN: usize = 16;
const IV_LEN: usize = 12;
/// Length of the key material of one direction.
pub const SECRET_LEN: usize = KEY_LEN + IV_LEN;
/// Number of frames under one key.
const REKEY_FRAMES: u64 = 1 << 28;

struct SecretLen;
impl KeyType for SecretLen {
    fn len(&self) -> usize {
        SECRET_LEN
    }
}

/// Key of one direction, its counter, and the change of keys.
struct Direction {
    mode: Mode,
    key: Option<LessSafeKey>,
    secret: [u8; SECRET_LEN],
    counter: u64,
    rekey_frames: u64,
}

impl Direction {
    fn new(mode: Mode, secret: [u8; SECRET_LEN]) -> Self {
        let key = (mode != Mode::Plain).then(|| key_of(&secret));
        Direction { mode, key, secret, counter: 0, rekey_frames: REKEY_FRAMES }
    }

    /// Returns the nonce of the next frame; steps to the next key when it is due.
    fn next_nonce(&mut self) -> Nonce {
        if self.counter > 0 && self.counter.is_multiple_of(self.rekey_frames) {
            let prk = Prk::new_less_safe(HKDF_SHA256, &self.secret);
            let mut next = [0u8; SECRET_LEN];
            // Fails only for lengths that HKDF cannot produce, and this one is constant.
            prk.expand(&[b"quoin data next key"], SecretLen)
                .and_then(|okm| okm.fill(&mut next))
                .expect("28 bytes of HKDF output");
            self.secret = next;
            self.key = Some(key_of(&next));
        }
        let mut nonce = [0u8; IV_LEN];
        nonce.copy_from_slice(&self.secret[KEY_LEN..]);
        for (byte, count) in nonce[4..].iter_mut().zip(self.counter.to_be_bytes()) {
            *byte ^= count;
        }
        self.counter += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

fn key_of(secret: &[u8; SECRET_LEN]) -> LessSafeKey {
    let unbound = UnboundKey::new(&AES_128_GCM, &secret[..KEY_LEN]).expect("16 bytes of key");
    LessSafeKey::new(unbound)
}

/// The sending half of a connection's protection.
pub struct Sealer(Direction);

impl Sealer {
    pub fn plain() -> Self {
        Sealer(Direction::new(Mode::Plain, [0; SECRET_LEN]))
    }

    pub fn new(mode: Mode, secret: [u8; SECRET_LEN]) -> Self {
        Sealer(Direction::new(mode, secret))
    }

    /// Appends the protected frame to the send queue.
    pub fn seal(&mut self, frame: &FrameBuffer, out: &mut SendQueue) {
        if self.0.mode == Mode::Plain {
            out.push_copy(&frame.head);
            for data in &frame.data {
                out.push(data.clone());
            }
            return;
        }
        let nonce = self.0.next_nonce();
        let key = self.0.key.as_ref().expect("protected directions have a key");
        let length = frame.head.len() + frame.data.iter().map(Bytes::len).sum::<usize>();
        let tail = out.tail(length + TAG_LEN);
        let start = tail.len();
        tail.extend_from_slice(&frame.head);
        for data in &frame.data {
            tail.extend_from_slice(data);
        }
        let bytes = &mut tail[start..];
        let sealed = match self.0.mode {
            Mode::Encrypt => {
                let (header, body) = bytes.split_at_mut(HEADER_LEN);
                key.seal_in_place_separate_tag(nonce, Aad::from(&*header), body)
            }
            _ => key.seal_in_place_separate_tag(nonce, Aad::from(&*bytes), &mut []),
        };
        // GCM refuses only inputs of over 64 GiB.
        let tag = sealed.expect("a frame is far below the cipher's limit");
        tail.extend_from_slice(tag.as_ref());
        out.added(length + TAG_LEN);
    }
}

/// The receiving half of a connection's protection.
pub struct Opener(Direction);

impl Opener {
    pub fn plain() -> Self {
        Opener(Direction::new(Mode::Plain, [0; SECRET_LEN]))
    }

    pub fn new(mode: Mode, secret: [u8; SECRET_LEN]) -> Self {
        Opener(Direction::new(mode, secret))
    }

    /// Bytes of the tag after each frame.
    pub fn tag_len(&self) -> usize {
        if self.0.mode == Mode::Plain { 0 } else { TAG_LEN }
    }

    /// Verifies (and decrypts) a frame with its tag; returns it without the tag.
    pub fn open(&mut self, mut frame: BytesMut) -> Result<Bytes, WireError> {
        if self.0.mode == Mode::Plain {
            return Ok(frame.freeze());
        }
        let nonce = self.0.next_nonce();
        let key = self.0.key.as_ref().expect("protected directions have a key");
        let Some(body_len) = frame.len().checked_sub(TAG_LEN) else {
            return Err(WireError::Tag);
        };
        match self.0.mode {
            Mode::Encrypt => {
                let (header, sealed) = frame.split_at_mut(HEADER_LEN.min(body_len));
                key.open_in_place(nonce, Aad::from(&*header), sealed)
                    .map_err(|_| WireError::Tag)?;
            }
            _ => {
                let (bytes, tag) = frame.split_at_mut(body_len);
                key.open_in_place(nonce, Aad::from(&*bytes), tag).map_err(|_| WireError::Tag)?;
            }
        }
        frame.truncate(body_len);
        Ok(frame.freeze())
    }
}

#[cfg(test)]
mod tests {
    use bytes::BufMut;

    use super::*;

    fn frame(data: &'static [u8]) -> FrameBuffer {
        let mut head = BytesMut::new();
        head.put_bytes(7, HEADER_LEN + 20);
        FrameBuffer { head, data: vec![Bytes::from_static(data)] }
    }

    fn sealed(sealer: &mut Sealer, data: &'static [u8]) -> BytesMut {
        let mut queue = SendQueue::default();
        sealer.seal(&frame(data), &mut queue);
        BytesMut::from(&queue.into_bytes()[..])
    }

    fn pair(mode: Mode) -> (Sealer, Opener) {
        (Sealer::new(mode, [3; SECRET_LEN]), Opener::new(mode, [3; SECRET_LEN]))
    }

    #[test]
    fn a_sealed_frame_opens_to_the_original_in_every_mode() {
        for mode in [Mode::Plain, Mode::Authenticate, Mode::Encrypt] {
            let (mut sealer, mut opener) = pair(mode);
            for _ in 0..3 {
                let opened = opener.open(sealed(&mut sealer, b"blocks")).unwrap();
                assert_eq!(&opened[HEADER_LEN + 20..], b"blocks");
            }
        }
    }

    #[test]
    fn encryption_hides_the_data_and_authentication_does_not() {
        let shows = |mode| {
            let bytes = sealed(&mut pair(mode).0, b"a secret in the blocks");
            bytes.windows(8).any(|w| w == b"a secret")
        };
        assert!(!shows(Mode::Encrypt));
        assert!(shows(Mode::Authenticate));
    }

    #[test]
    fn a_changed_frame_fails_its_tag_wherever_the_change_is() {
        for mode in [Mode::Authenticate, Mode::Encrypt] {
            let length = sealed(&mut pair(mode).0, b"blocks").len();
            for at in 0..length {
                let (mut sealer, mut opener) = pair(mode);
                let mut bytes = sealed(&mut sealer, b"blocks");
                bytes[at] ^= 1;
                assert!(matches!(opener.open(bytes), Err(WireError::Tag)), "{mode:?} byte {at}");
            }
        }
    }

    #[test]
    fn a_repeated_or_omitted_frame_fails_its_tag() {
        let (mut sealer, mut opener) = pair(Mode::Authenticate);
        let first = sealed(&mut sealer, b"1");
        opener.open(first.clone()).unwrap();
        assert!(opener.open(first).is_err());
        let (mut sealer, mut opener) = pair(Mode::Encrypt);
        sealed(&mut sealer, b"lost");
        assert!(opener.open(sealed(&mut sealer, b"2")).is_err());
    }

    #[test]
    fn both_directions_switch_to_the_next_key_together() {
        let (mut sealer, mut opener) = pair(Mode::Encrypt);
        sealer.0.rekey_frames = 4;
        opener.0.rekey_frames = 4;
        for _ in 0..20 {
            opener.open(sealed(&mut sealer, b"blocks")).unwrap();
        }
        assert_ne!(sealer.0.secret, [3; SECRET_LEN]);
    }

    #[test]
    fn a_frame_shorter_than_a_tag_is_refused() {
        for mode in [Mode::Authenticate, Mode::Encrypt] {
            assert!(pair(mode).1.open(BytesMut::from(&b"short"[..])).is_err());
        }
    }
}
