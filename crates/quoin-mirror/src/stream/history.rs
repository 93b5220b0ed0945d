//! The history socket of the target on this host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::BytesMut;
use quoin_cluster::mirror::sending::goes_on;
use quoin_wire::WireError;
use quoin_wire::frame::{HEADER_LEN, Header, Limits};
use quoin_wire::history::{Message, Part, Refused, SOCKET, Wanted};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{SILENT_MAX, WRITTEN_WITHIN};

/// Reason that a target's side of a stream ended.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("it said nothing for {} s", .0.as_secs())]
    Silent(Duration),
}

/// Where a target that runs in that directory listens.
pub fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("nbd").join(SOCKET)
}

/// Reads the next frame. It takes memory for what the header names, within the limits of the socket.
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Message, Failed> {
    let failed = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::UnexpectedEof => WireError::Closed,
        _ => WireError::Io { operation: "read from the target", source },
    };
    let whole = async {
        let mut begin = [0; HEADER_LEN];
        stream.read_exact(&mut begin).await.map_err(failed)?;
        let header = Header::decode(&begin, &Limits::SESSION)?;
        let mut frame = BytesMut::zeroed(header.frame_len());
        frame[..HEADER_LEN].copy_from_slice(&begin);
        stream.read_exact(&mut frame[HEADER_LEN..]).await.map_err(failed)?;
        Message::decode(&header, frame.freeze())
    };
    match timeout(SILENT_MAX, whole).await {
        Ok(message) => Ok(message?),
        Err(_) => Err(Failed::Silent(SILENT_MAX)),
    }
}

/// Writes a whole frame, within bounded time.
pub async fn write(stream: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> Result<(), Failed> {
    let failed = |source| WireError::Io { operation: "write to the target", source };
    match timeout(WRITTEN_WITHIN, stream.write_all(frame)).await {
        Ok(written) => Ok(written.map_err(failed)?),
        Err(_) => Err(Failed::Silent(WRITTEN_WITHIN)),
    }
}

/// Encodes a frame.
///
/// # Errors
/// It is longer than a frame may be.
pub fn encode(message: &Message) -> Result<Vec<u8>, WireError> {
    let mut bytes = Vec::new();
    message.write(&mut bytes)?;
    Ok(bytes)
}

/// Reads parts ahead of the one who takes them, until the last one. Each block was held against its checksum.
pub async fn read_parts(
    mut source: impl AsyncRead + AsyncWrite + Unpin,
    wanted: Wanted,
    parts: mpsc::Sender<Part>,
) -> Result<(), Failed> {
    write(&mut source, &encode(&Message::Wanted(wanted))?).await?;
    let mut cursor = wanted.cursor;
    loop {
        let part = match read(&mut source).await? {
            Message::Part(part) => part,
            Message::Refused(refused) => return Err(refused.into()),
            _ => return Err(WireError::Malformed("frame of a history").into()),
        };
        part.check().map_err(WireError::from)?;
        if !goes_on(&part, cursor) {
            return Err(WireError::Malformed("part of a history").into());
        }
        let next = part.next;
        if parts.send(part).await.is_err() {
            return Ok(());
        }
        match next {
            Some(next) => cursor = next,
            None => return Ok(()),
        }
    }
}
