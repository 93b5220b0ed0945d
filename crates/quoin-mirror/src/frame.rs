//! Frames of a link between two mirrors: length (u32, little-endian, of what follows), version (u8), kind
//! (u8), body.
//!
//! A frame of an unknown kind is ignored, so that a later mirror may say more. One that is too long, or of
//! another version, ends the link with a reason.

use prost::Message;
use quoin_api::control::PeerIntroduction;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes behind the length, at most.
pub const FRAME_BYTES_MAX: usize = 64 << 10;
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 2;

#[derive(Clone, PartialEq, Debug)]
pub enum Frame {
    /// Statement of the sender's cluster about itself: the first frame, and again after each change.
    Hello(PeerIntroduction),
    Ping,
    /// Of a kind that this version does not know.
    Other(u8),
}

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {0} bytes, where {FRAME_BYTES_MAX} is the limit")]
    TooLong(usize),
    #[error("a frame without a version and a kind")]
    TooShort,
    #[error(
        "a frame of version {0}, and this mirror knows version {VERSION}: update the older side"
    )]
    Version(u8),
    #[error("an introduction that cannot be read: {0}")]
    Introduction(#[from] prost::DecodeError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

const HELLO: u8 = 1;
const PING: u8 = 2;

impl Frame {
    /// The whole frame, with its length.
    ///
    /// # Errors
    /// It is longer than the other side takes.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let (kind, body) = match self {
            Frame::Hello(introduction) => (HELLO, introduction.encode_to_vec()),
            Frame::Ping => (PING, Vec::new()),
            Frame::Other(kind) => (*kind, Vec::new()),
        };
        let length = HEADER_BYTES + body.len();
        if length > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let mut bytes = (length as u32).to_le_bytes().to_vec();
        bytes.extend([VERSION, kind]);
        bytes.extend(body);
        Ok(bytes)
    }

    /// Decodes what follows the length.
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let [version, kind, body @ ..] = bytes else { return Err(FrameError::TooShort) };
        match (*version, *kind) {
            (VERSION, HELLO) => Ok(Frame::Hello(PeerIntroduction::decode(body)?)),
            (VERSION, PING) => Ok(Frame::Ping),
            (VERSION, kind) => Ok(Frame::Other(kind)),
            (version, _) => Err(FrameError::Version(version)),
        }
    }

    /// Reads the next frame. It takes memory for what has come, and for no more than the limit.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Self, FrameError> {
        let length = stream.read_u32_le().await? as usize;
        if length > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let mut bytes = Vec::new();
        stream.take(length as u64).read_to_end(&mut bytes).await?;
        if bytes.len() < length {
            return Err(FrameError::Io(std::io::ErrorKind::UnexpectedEof.into()));
        }
        Self::decode(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn introduction() -> PeerIntroduction {
        PeerIntroduction {
            cluster_id: "ab".repeat(16),
            authorities_pem: b"-----BEGIN".to_vec(),
            key_hashes: vec!["0".repeat(64)],
            addresses: vec!["host:10810".into()],
        }
    }

    async fn read(bytes: &[u8]) -> Result<Frame, FrameError> {
        Frame::read(&mut &bytes[..]).await
    }

    #[tokio::test]
    async fn each_frame_is_read_as_it_was_written_and_an_unknown_kind_is_told_as_such() {
        for frame in [Frame::Hello(introduction()), Frame::Ping, Frame::Other(77)] {
            assert_eq!(read(&frame.encode().unwrap()).await.unwrap(), frame);
        }
    }

    #[tokio::test]
    async fn frames_that_are_too_long_cut_or_of_another_version_are_refused_with_the_reason() {
        let long = PeerIntroduction { authorities_pem: vec![0; FRAME_BYTES_MAX], ..introduction() };
        assert!(matches!(Frame::Hello(long).encode(), Err(FrameError::TooLong(_))));
        let claimed = u32::MAX.to_le_bytes();
        assert!(matches!(read(&claimed).await, Err(FrameError::TooLong(_))));
        let mut other = Frame::Ping.encode().unwrap();
        other[4] = 9;
        assert!(read(&other).await.unwrap_err().to_string().contains("update the older side"));
        let whole = Frame::Hello(introduction()).encode().unwrap();
        for cut in 0..whole.len() {
            read(&whole[..cut]).await.unwrap_err();
        }
        assert!(matches!(read(&[0, 0, 0, 0]).await, Err(FrameError::TooShort)));
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_peer_make_it_panic(bytes: Vec<u8>) {
            let _ = Frame::decode(&bytes);
        }
    }
}
