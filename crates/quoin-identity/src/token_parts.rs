//! Parts of the tokens that people carry by hand: a secret, and a text that shows where it was
//! mistyped.
//!
//! The text after a token's prefix is base64url of its body and 4 bytes of checksum.

use aws_lc_rs::digest;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

pub(crate) const SECRET_BYTES: usize = 24;
const CHECKSUM_BYTES: usize = 4;

/// Random bytes that are valid for one use. Their keeper stores a hash alone.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub [u8; SECRET_BYTES]);

impl Secret {
    pub fn generate() -> Self {
        let mut secret = [0; SECRET_BYTES];
        aws_lc_rs::rand::fill(&mut secret).expect("the operating system gives random bytes");
        Self(secret)
    }

    /// Returns 64 hex digits.
    pub fn hash(&self) -> String {
        hex::encode(digest::digest(&digest::SHA256, &self.0))
    }
}

fn checksum(body: &[u8]) -> [u8; CHECKSUM_BYTES] {
    quoin_types::crc32c(body).to_le_bytes()
}

/// Returns a body as text.
pub(crate) fn write(mut body: Vec<u8>) -> String {
    body.extend(checksum(&body));
    URL_SAFE_NO_PAD.encode(body)
}

/// Returns the body of a text, which has `bytes_min` to `bytes_max` bytes.
pub(crate) fn read(
    text: &str,
    bytes_min: usize,
    bytes_max: usize,
) -> Result<Vec<u8>, &'static str> {
    const TOO_LONG: &str = "it is too long";
    // Four characters for three bytes.
    if text.len() > 2 * (bytes_max + CHECKSUM_BYTES) {
        return Err(TOO_LONG);
    }
    let mut body = URL_SAFE_NO_PAD.decode(text).map_err(|_| "it has an invalid character")?;
    let Some(bytes) = body.len().checked_sub(CHECKSUM_BYTES).filter(|bytes| *bytes >= bytes_min)
    else {
        return Err("it is truncated");
    };
    if bytes > bytes_max {
        return Err(TOO_LONG);
    }
    if body[bytes..] != checksum(&body[..bytes]) {
        return Err("its checksum is wrong");
    }
    body.truncate(bytes);
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_read_within_its_bounds_and_no_other() {
        let text = |bytes: usize| write(vec![7; bytes]);
        for bytes in [2, 3, 4] {
            assert_eq!(read(&text(bytes), 2, 4), Ok(vec![7; bytes]));
        }
        assert_eq!(read(&text(1), 2, 4), Err("it is truncated"));
        assert_eq!(read("", 0, 4), Err("it is truncated"));
        assert_eq!(read(&text(5), 2, 4), Err("it is too long"));
        assert_eq!(read(&text(500), 2, 4), Err("it is too long"));
        assert_eq!(read(&URL_SAFE_NO_PAD.encode([7; 8]), 2, 4), Err("its checksum is wrong"));
        assert_eq!(read("%", 2, 4), Err("it has an invalid character"));
    }
}
