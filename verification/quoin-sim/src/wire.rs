//! Bytes on the connections of the simulator: the real frames of `quoin-wire`.
//!
//! A connection may be cut within a frame and a byte may change on its way: what arrives is
//! taken apart by the same code as in the product, so half a frame is never a message and a
//! changed one ends the connection.

use bytes::{Bytes, BytesMut};
use quoin_types::SessionKey;
use quoin_types::message::{FromReplica, ToReplica};
use quoin_wire::encode::{self, FrameBuffer};
use quoin_wire::frame::{HEADER_LEN, Header};
use quoin_wire::queue::SendQueue;
use quoin_wire::{Frame, Limits, Sealer, WireError, decode};

/// A message that one side may send.
pub trait Payload: Sized {
    fn encode(
        &self,
        session: SessionKey,
        frame: &mut FrameBuffer,
        out: &mut SendQueue,
    ) -> Result<(), WireError>;
    /// `None`: a frame that only the other side may send.
    fn of(frame: Frame) -> Option<Self>;
}

impl Payload for ToReplica {
    fn encode(
        &self,
        session: SessionKey,
        frame: &mut FrameBuffer,
        out: &mut SendQueue,
    ) -> Result<(), WireError> {
        let mut sealer = Sealer::plain();
        encode::to_replica(session, self, frame, |frame| sealer.seal(frame, out))
    }

    fn of(frame: Frame) -> Option<Self> {
        match frame {
            Frame::ToReplica(message) => Some(message),
            _ => None,
        }
    }
}

impl Payload for FromReplica {
    fn encode(
        &self,
        session: SessionKey,
        frame: &mut FrameBuffer,
        out: &mut SendQueue,
    ) -> Result<(), WireError> {
        encode::from_replica(session, self, frame)?;
        Sealer::plain().seal(frame, out);
        Ok(())
    }

    fn of(frame: Frame) -> Option<Self> {
        match frame {
            Frame::FromReplica(message) => Some(message),
            _ => None,
        }
    }
}

/// The frames of one message.
pub fn frames(
    session: SessionKey,
    message: &impl Payload,
    buffer: &mut FrameBuffer,
) -> Result<Bytes, WireError> {
    let mut queue = SendQueue::default();
    message.encode(session, buffer, &mut queue)?;
    Ok(queue.into_bytes())
}

/// The receiving end of one direction: bytes in, messages out.
#[derive(Debug, Default)]
pub struct Receiver {
    /// Received part of an incomplete frame.
    rest: BytesMut,
    /// Why a frame was refused: the connection is over.
    refused: Option<WireError>,
}

impl Receiver {
    /// Returns true if the connection must end because of what came.
    pub fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Why, in words.
    pub fn refusal(&self) -> String {
        self.refused.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    /// Bytes of a frame that is not whole yet.
    pub fn waiting_bytes(&self) -> usize {
        self.rest.len()
    }

    /// Takes bytes and gives every message that they complete.
    pub fn take<M: Payload>(&mut self, bytes: Bytes, mut each: impl FnMut(SessionKey, M)) {
        if self.is_refused() {
            return;
        }
        let mut input = if self.rest.is_empty() {
            bytes
        } else {
            self.rest.extend_from_slice(&bytes);
            std::mem::take(&mut self.rest).freeze()
        };
        loop {
            match next(&mut input) {
                Ok(Some((session, message))) => each(session, message),
                Ok(None) => break,
                Err(error) => {
                    self.refused = Some(error);
                    return;
                }
            }
        }
        self.rest.extend_from_slice(&input);
    }
}

fn next<M: Payload>(input: &mut Bytes) -> Result<Option<(SessionKey, M)>, WireError> {
    let Some(start) = input.first_chunk::<HEADER_LEN>() else { return Ok(None) };
    let header = Header::decode(start, &Limits::SESSION)?;
    if input.len() < header.frame_len() {
        return Ok(None);
    }
    let incoming = decode::decode(&header, input.split_to(header.frame_len()))?;
    match M::of(incoming.frame) {
        Some(message) => Ok(Some((incoming.session, message))),
        None => Err(WireError::Kind(header.kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::message::Ping;
    use quoin_types::{Epoch, Lsn};

    fn sync(n: u64) -> Bytes {
        let session = SessionKey { epoch: Epoch(1), ..SessionKey::default() };
        let message = ToReplica::Sync { lsn: Lsn(n), ping: Ping(n) };
        frames(session, &message, &mut FrameBuffer::default()).unwrap()
    }

    fn drain(receiver: &mut Receiver, bytes: &[u8]) -> Vec<u64> {
        let mut seen = Vec::new();
        receiver.take(Bytes::copy_from_slice(bytes), |_, message| match message {
            ToReplica::Sync { lsn, .. } => seen.push(lsn.0),
            other => panic!("{other:?}"),
        });
        seen
    }

    #[test]
    fn a_frame_that_comes_in_pieces_is_a_message_when_its_last_byte_came() {
        let bytes = [sync(1), sync(2)].concat();
        for cut in 0..=bytes.len() {
            let mut receiver = Receiver::default();
            let mut seen = drain(&mut receiver, &bytes[..cut]);
            assert_eq!(seen.len(), cut / (bytes.len() / 2));
            seen.extend(drain(&mut receiver, &bytes[cut..]));
            assert_eq!((seen, receiver.waiting_bytes()), (vec![1, 2], 0));
        }
    }

    #[test]
    fn a_changed_byte_ends_the_connection_and_is_never_a_message() {
        let bytes = sync(7);
        for at in 0..bytes.len() {
            let mut bad = bytes.to_vec();
            bad[at] ^= 1;
            let mut receiver = Receiver::default();
            let seen = drain(&mut receiver, &bad);
            // A longer length in the header is refused by its checksum as well.
            assert!(seen.is_empty() && receiver.is_refused(), "byte {at}");
            assert!(drain(&mut receiver, &bytes).is_empty(), "nothing is taken after it");
        }
    }
}
