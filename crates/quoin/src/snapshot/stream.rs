//! Content of a snapshot from the target of this host, where it serves the volume: no byte crosses the
//! controller.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use quoin_api::control::{SnapshotPart, SnapshotRange};
use quoin_types::BLOCK_SIZE;
use quoin_wire::WireError;
use quoin_wire::history::{Message, Part, Refused, Wanted};
use tokio::sync::mpsc;

/// Parts that wait for the one who writes them.
const PARTS_AHEAD: usize = 2;
/// Silence after which a target is passed over. It is longer than a target lets a stream wait.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// End of a stream before its last part.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Stream of one snapshot's content, which a thread reads ahead.
pub struct Stream {
    parts: mpsc::Receiver<Result<Part, Ended>>,
    /// Block at which the next part begins.
    next: u64,
}

impl Stream {
    /// # Errors
    /// No target listens on this host.
    pub fn open(socket: &Path, wanted: Wanted) -> std::io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SILENCE_MAX))?;
        let (sender, parts) = mpsc::channel(PARTS_AHEAD);
        let next = wanted.cursor;
        std::thread::Builder::new().name("stream".to_owned()).spawn(move || {
            let ended = read(stream, wanted, &sender);
            if let Err(ended) = ended {
                // The one who reads may have ended first.
                let _ = sender.blocking_send(Err(ended));
            }
        })?;
        Ok(Self { parts, next })
    }

    /// Returns true if the next part begins at this block.
    pub fn is_at(&self, block: u64) -> bool {
        self.next == block
    }

    /// The next part, as the controller would tell it.
    ///
    /// # Errors
    /// The stream ended before its last part.
    pub async fn part(&mut self) -> Result<SnapshotPart, Ended> {
        let part = self.parts.recv().await.unwrap_or(Err(Ended::Wire(WireError::Closed)))?;
        // Nothing is requested behind the last one.
        self.next = part.next.unwrap_or(u64::MAX);
        Ok(told(part))
    }
}

fn read(
    mut stream: UnixStream,
    wanted: Wanted,
    parts: &mpsc::Sender<Result<Part, Ended>>,
) -> Result<(), Ended> {
    Message::Wanted(wanted).write(&mut stream)?;
    let mut cursor = wanted.cursor;
    loop {
        let part = match Message::read(&mut stream)? {
            Some(Message::Part(part)) => part,
            Some(Message::Refused(refused)) => return Err(refused.into()),
            Some(_) => return Err(WireError::Malformed("frame of a stream").into()),
            None => return Err(WireError::Closed.into()),
        };
        part.check().map_err(WireError::from)?;
        let begins_behind = part.ranges.first().is_some_and(|range| range.lba < cursor);
        if begins_behind || part.next.is_some_and(|next| next <= cursor) {
            return Err(WireError::Malformed("part of a stream").into());
        }
        let next = part.next;
        if parts.blocking_send(Ok(part)).is_err() {
            return Ok(());
        }
        match next {
            Some(next) => cursor = next,
            None => return Ok(()),
        }
    }
}

fn told(part: Part) -> SnapshotPart {
    let mut blocks = part.blocks.iter();
    let ranges = part.ranges.iter().map(|range| {
        let count = if range.hole { 0 } else { range.blocks as usize };
        let mut data = Vec::with_capacity(count.min(blocks.len()) * BLOCK_SIZE);
        blocks.by_ref().take(count).for_each(|block| data.extend_from_slice(&block.data));
        SnapshotRange {
            offset: range.lba * BLOCK_SIZE as u64,
            length: range.blocks * BLOCK_SIZE as u64,
            hole: range.hole,
            // Each block was held against its own.
            checksum: 0,
            data,
        }
    });
    SnapshotPart {
        ranges: ranges.collect(),
        next_offset: part.next.map(|next| next * BLOCK_SIZE as u64),
        ..SnapshotPart::default()
    }
}
