//! Frames between two mirrors: length (u32, little-endian, of what follows), version (u8), kind (u8), body.
//!
//! The first frame of a connection decides what it is: a link begins with an introduction, a stream with what
//! it sends ([`crate::stream_frame`]). On a link a frame of an unknown kind is ignored, so that a later mirror
//! may say more. One that is too long, or of another version, ends the connection with a reason.

use bytes::Bytes;
use prost::Message;
use quoin_api::control::PeerIntroduction;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of a message of one controller for another, at most.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Bytes behind the length of a link's frame, at most: the longest message fits.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + GROUP_BYTES + MESSAGE_BYTES_MAX;
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 2;
const GROUP_BYTES: usize = 16;

#[derive(Clone, PartialEq, Debug)]
pub enum Frame {
    /// Statement of the sender's cluster about itself: the first frame, and again after each change.
    Hello(PeerIntroduction),
    Ping,
    /// Message of the sender's controller for the other one, about a group.
    Group {
        group: u128,
        body: Bytes,
    },
    /// Of a kind that this version does not know.
    Other(u8),
}

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {length} bytes, where {limit} is the limit")]
    TooLong { length: usize, limit: usize },
    #[error("a frame without a version and a kind")]
    TooShort,
    #[error(
        "a frame of version {0}, and this mirror knows version {VERSION}: update the older side"
    )]
    Version(u8),
    #[error("an introduction that cannot be read: {0}")]
    Introduction(#[from] prost::DecodeError),
    #[error("a frame of kind {kind} that cannot be read: {why}")]
    Malformed { kind: u8, why: &'static str },
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Kinds of frames.
pub mod kind {
    pub const HELLO: u8 = 1;
    pub const PING: u8 = 2;
    pub const GROUP: u8 = 3;
    pub const BEGIN: u8 = 4;
    pub const SLOTS: u8 = 5;
    pub const TAKEN: u8 = 6;
    pub const REFUSED: u8 = 7;
}

/// Frame of any kind, with its body as it came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Raw {
    pub kind: u8,
    pub body: Bytes,
}

impl Raw {
    /// Reads the next frame, of `limit` bytes behind its length at most. It takes memory for what has come.
    pub async fn read(
        stream: &mut (impl AsyncRead + Unpin),
        limit: usize,
    ) -> Result<Self, FrameError> {
        let length = stream.read_u32_le().await? as usize;
        if length > limit {
            return Err(FrameError::TooLong { length, limit });
        }
        let mut bytes = Vec::new();
        stream.take(length as u64).read_to_end(&mut bytes).await?;
        if bytes.len() < length {
            return Err(FrameError::Io(std::io::ErrorKind::UnexpectedEof.into()));
        }
        Self::decode(bytes.into())
    }

    /// Decodes what follows the length.
    pub fn decode(mut bytes: Bytes) -> Result<Self, FrameError> {
        let [version, kind, ..] = bytes[..] else { return Err(FrameError::TooShort) };
        match version {
            VERSION => Ok(Self { kind, body: bytes.split_off(HEADER_BYTES) }),
            version => Err(FrameError::Version(version)),
        }
    }

    /// The whole frame, with its length, of a body in parts.
    ///
    /// # Errors
    /// It is longer than the other side takes.
    pub fn encode(kind: u8, body: &[&[u8]], limit: usize) -> Result<Vec<u8>, FrameError> {
        let length =
            body.iter().fold(HEADER_BYTES, |length, part| length.saturating_add(part.len()));
        let told = u32::try_from(length).ok().filter(|_| length <= limit);
        let told = told.ok_or(FrameError::TooLong { length, limit })?;
        let mut bytes = Vec::with_capacity(4 + length);
        bytes.extend(told.to_le_bytes());
        bytes.extend([VERSION, kind]);
        body.iter().for_each(|part| bytes.extend_from_slice(part));
        Ok(bytes)
    }
}

impl Frame {
    /// The whole frame, with its length.
    ///
    /// # Errors
    /// It is longer than the other side takes.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let raw = |kind, body: &[&[u8]]| Raw::encode(kind, body, FRAME_BYTES_MAX);
        match self {
            Frame::Hello(introduction) => raw(kind::HELLO, &[&introduction.encode_to_vec()]),
            Frame::Ping => raw(kind::PING, &[]),
            Frame::Group { group, body } => raw(kind::GROUP, &[&group.to_be_bytes(), body]),
            Frame::Other(kind) => raw(*kind, &[]),
        }
    }

    /// Frame of a link.
    ///
    /// # Errors
    /// Its body is none of its kind.
    pub fn of(raw: Raw) -> Result<Self, FrameError> {
        match raw.kind {
            kind::HELLO => Ok(Frame::Hello(PeerIntroduction::decode(raw.body)?)),
            kind::PING => Ok(Frame::Ping),
            kind::GROUP => {
                let why = "it has no group";
                let group = raw.body.first_chunk().map(|group| u128::from_be_bytes(*group));
                let group = group.ok_or(FrameError::Malformed { kind: raw.kind, why })?;
                Ok(Frame::Group { group, body: raw.body.slice(GROUP_BYTES..) })
            }
            kind => Ok(Frame::Other(kind)),
        }
    }

    /// Reads the next frame of a link.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Self, FrameError> {
        Self::of(Raw::read(stream, FRAME_BYTES_MAX).await?)
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
        let longest = Bytes::from(vec![3; MESSAGE_BYTES_MAX]);
        for frame in [
            Frame::Hello(introduction()),
            Frame::Ping,
            Frame::Group { group: 1 << 120, body: Bytes::new() },
            Frame::Group { group: 7, body: longest },
            Frame::Other(77),
        ] {
            assert_eq!(read(&frame.encode().unwrap()).await.unwrap(), frame);
        }
    }

    #[tokio::test]
    async fn frames_that_are_too_long_cut_or_of_another_version_are_refused_with_the_reason() {
        let long = PeerIntroduction { authorities_pem: vec![0; FRAME_BYTES_MAX], ..introduction() };
        assert!(matches!(Frame::Hello(long).encode(), Err(FrameError::TooLong { .. })));
        let claimed = u32::MAX.to_le_bytes();
        assert!(matches!(read(&claimed).await, Err(FrameError::TooLong { .. })));
        let mut other = Frame::Ping.encode().unwrap();
        other[4] = 9;
        assert!(read(&other).await.unwrap_err().to_string().contains("update the older side"));
        let whole = Frame::Hello(introduction()).encode().unwrap();
        for cut in 0..whole.len() {
            read(&whole[..cut]).await.unwrap_err();
        }
        assert!(matches!(read(&[0, 0, 0, 0]).await, Err(FrameError::TooShort)));
        let cut = Raw::encode(kind::GROUP, &[&[0; GROUP_BYTES - 1]], FRAME_BYTES_MAX).unwrap();
        assert!(matches!(read(&cut).await, Err(FrameError::Malformed { .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_peer_make_it_panic(kind in 0u8..9, bytes: Vec<u8>) {
            let _ = Raw::decode(bytes.clone().into()).and_then(Frame::of);
            let _ = Frame::of(Raw { kind, body: bytes.into() });
        }
    }
}
