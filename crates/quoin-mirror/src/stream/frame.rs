//! Frames of a stream. They have the header of a link's frames ([`crate::frame`]) and a limit of their own; one
//! of an unknown kind ends the stream.

use bytes::{BufMut, Bytes, BytesMut};
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::ids::{PointId, VolumeId};
use quoin_wire::history::Taken;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::WRITTEN_WITHIN;
use crate::frame::{FrameError, Raw, kind};

/// Bytes of slots, packed or not, at most.
pub const SLOTS_BYTES_MAX: usize = 2 << 20;
/// Bytes behind the length, at most.
pub const FRAME_BYTES_MAX: usize = SLOTS_BYTES_MAX + 64;
/// Characters of a refusal, at most.
const WORDS_MAX: usize = 400;
const IS_ZSTD: u8 = 1;

/// Claim of the sender: what it has, and for which order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Begin {
    pub group: u128,
    pub volume: VolumeId,
    pub point: PointId,
    /// `None`: everything is sent.
    pub base: Option<PointId>,
    /// That of the receiver's order.
    pub token: u128,
}

/// Slots of a history socket, as one frame of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Packed {
    pub is_zstd: bool,
    /// Length of that frame.
    pub raw_length: u32,
    pub bytes: Bytes,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    Begin(Begin),
    Slots(Packed),
    Taken(Taken),
    /// The reason that ends the stream.
    Refused(String),
}

impl Frame {
    /// The whole frame, with its length.
    ///
    /// # Errors
    /// It is longer than the other side takes.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let mut head = BytesMut::new();
        let mut data: &[u8] = &[];
        let kind = match self {
            Frame::Begin(begin) => {
                head.put_u128_le(begin.group);
                head.put_u128_le(begin.volume.0);
                head.put_u128_le(begin.point.0);
                head.put_flag(begin.base.is_some());
                head.put_u128_le(begin.base.map_or(0, |base| base.0));
                head.put_u128_le(begin.token);
                kind::BEGIN
            }
            Frame::Slots(packed) => {
                head.put_u8(if packed.is_zstd { IS_ZSTD } else { 0 });
                head.put_u32_le(packed.raw_length);
                data = &packed.bytes;
                kind::SLOTS
            }
            Frame::Taken(taken) => {
                head.put_u64_le(taken.to);
                head.put_u64_le(taken.stable_to);
                head.put_flag(taken.is_fed);
                kind::TAKEN
            }
            Frame::Refused(why) => {
                let words: String = why.chars().take(WORDS_MAX).collect();
                head.put_slice(words.as_bytes());
                kind::REFUSED
            }
        };
        Raw::encode(kind, &[&head, data], FRAME_BYTES_MAX)
    }

    /// # Errors
    /// It is no frame of a stream.
    pub fn of(raw: Raw) -> Result<Self, FrameError> {
        let kind = raw.kind;
        let malformed = |Malformed(why)| FrameError::Malformed { kind, why };
        let mut body = Reader::new(raw.body);
        match kind {
            kind::BEGIN => begin(&mut body).map(Frame::Begin),
            kind::SLOTS => slots(&mut body).map(Frame::Slots),
            kind::TAKEN => taken(&mut body).map(Frame::Taken),
            kind::REFUSED => {
                let length = body.remaining().min(4 * WORDS_MAX);
                let words = body.take(length, "words");
                words.map(|words| Frame::Refused(printable(&String::from_utf8_lossy(&words))))
            }
            _ => Err(Malformed("a stream has none of this kind: update the older side")),
        }
        .map_err(malformed)
    }

    /// Reads the next frame.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Self, FrameError> {
        Self::of(Raw::read(stream, FRAME_BYTES_MAX).await?)
    }

    /// Writes the frame.
    pub async fn write(&self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<(), FrameError> {
        write(stream, &self.encode()?).await
    }
}

/// Writes a whole frame, within bounded time.
pub async fn write(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), FrameError> {
    let written = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    let slow = |_| std::io::Error::from(std::io::ErrorKind::TimedOut);
    Ok(timeout(WRITTEN_WITHIN, written).await.map_err(slow)??)
}

/// Words of the other side, which logs and terminals show.
fn printable(words: &str) -> String {
    words.chars().filter(|letter| !letter.is_control()).take(WORDS_MAX).collect()
}

fn begin(body: &mut Reader) -> Result<Begin, Malformed> {
    let group = body.u128("group")?;
    let volume = VolumeId(body.u128("volume")?);
    let point = PointId(body.u128("point")?);
    let base = match (body.bool("base")?, body.u128("base")?) {
        (true, base) => Some(PointId(base)),
        (false, 0) => None,
        (false, _) => return Err(Malformed("base")),
    };
    let token = body.u128("token")?;
    body.end("begin of a stream")?;
    Ok(Begin { group, volume, point, base, token })
}

fn slots(body: &mut Reader) -> Result<Packed, Malformed> {
    let is_zstd = match body.u8("flags")? {
        0 => false,
        IS_ZSTD => true,
        _ => return Err(Malformed("flags")),
    };
    let raw_length = body.u32("length")?;
    let bytes = body.take(body.remaining(), "slots")?;
    let is_raw = is_zstd || raw_length as usize == bytes.len();
    match is_raw && raw_length as usize <= SLOTS_BYTES_MAX {
        true => Ok(Packed { is_zstd, raw_length, bytes }),
        false => Err(Malformed("length")),
    }
}

fn taken(body: &mut Reader) -> Result<Taken, Malformed> {
    let (to, stable_to) = (body.u64("blocks")?, body.u64("blocks")?);
    let is_fed = body.bool("end of a stream")?;
    body.end("answer of a stream")?;
    Ok(Taken { to, stable_to, is_fed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> Vec<Frame> {
        let begin = Begin {
            group: 1 << 100,
            volume: VolumeId(2),
            point: PointId(3),
            base: Some(PointId(4)),
            token: u128::MAX,
        };
        vec![
            Frame::Begin(begin),
            Frame::Begin(Begin { base: None, ..begin }),
            Frame::Slots(Packed { is_zstd: true, raw_length: 9, bytes: Bytes::from_static(b"ab") }),
            Frame::Slots(Packed {
                is_zstd: false,
                raw_length: SLOTS_BYTES_MAX as u32,
                bytes: Bytes::from(vec![1; SLOTS_BYTES_MAX]),
            }),
            Frame::Taken(Taken { to: 9, stable_to: 4, is_fed: true }),
            Frame::Refused("not here".to_owned()),
        ]
    }

    #[tokio::test]
    async fn each_frame_of_a_stream_is_read_as_it_was_written_and_none_is_read_where_it_is_cut() {
        for frame in frames() {
            let bytes = frame.encode().unwrap();
            assert_eq!(Frame::read(&mut &bytes[..]).await.unwrap(), frame);
            for cut in 0..bytes.len().min(100) {
                Frame::read(&mut &bytes[..cut]).await.unwrap_err();
            }
        }
    }

    #[tokio::test]
    async fn frames_that_say_too_much_or_are_of_another_kind_end_a_stream() {
        let long = Packed {
            is_zstd: false,
            raw_length: FRAME_BYTES_MAX as u32,
            bytes: Bytes::from(vec![1; FRAME_BYTES_MAX]),
        };
        assert!(matches!(Frame::Slots(long).encode(), Err(FrameError::TooLong { .. })));
        let claims = [(true, SLOTS_BYTES_MAX as u32 + 1), (true, u32::MAX), (false, 1), (false, 3)];
        for (is_zstd, raw_length) in claims {
            let bytes = Bytes::from_static(b"ab");
            let wrong = Frame::Slots(Packed { is_zstd, raw_length, bytes }).encode().unwrap();
            Frame::read(&mut &wrong[..]).await.unwrap_err();
        }
        for kind in [kind::HELLO, kind::PING, kind::GROUP, 77] {
            let other = Raw { kind, body: Bytes::new() };
            assert!(Frame::of(other).unwrap_err().to_string().contains("update the older side"));
        }
        let words = Raw { kind: kind::REFUSED, body: Bytes::from(vec![b'\n'; FRAME_BYTES_MAX]) };
        assert_eq!(Frame::of(words).unwrap(), Frame::Refused(String::new()));
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_peer_make_a_stream_panic(kind in 3u8..9, bytes: Vec<u8>) {
            let _ = Frame::of(Raw { kind, body: bytes.into() });
        }
    }
}
