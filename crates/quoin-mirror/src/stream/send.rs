//! The sending end of a stream.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};

use quoin_cluster::mirror::sending::{self, BLOCKS_MAX, Heard, IN_FLIGHT_MAX, cut};
use quoin_types::BLOCK_SIZE;
use quoin_wire::history::{Part, Wanted};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

use super::bandwidth::Bucket;
use super::book::Progress;
use super::frame::{Begin, Frame, write};
use super::history::{self, Failed};
use super::orders::Sending;
use super::pack::Packer;
use super::{BEGUN_WITHIN, SILENT_MAX};

/// End of a stream that did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// Everything is on stable media on the other side.
    All,
    /// The stream made room for another one, and nothing of it is on its way.
    Paused,
}

/// Reason why a stream ended.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Ended {
    #[error("the peer's mirror refuses it: {0}")]
    Refused(String),
    #[error("the target of this host does not read the volume: {0}")]
    Source(String),
    #[error("the stream ended: {0}")]
    Lost(String),
}

fn lost(why: impl std::fmt::Display) -> Ended {
    Ended::Lost(why.to_string())
}

/// Transfer, and what its streams share.
pub struct Sender<'a> {
    pub order: &'a Sending,
    pub progress: &'a Progress,
    pub bucket: &'a Bucket,
    /// A frame of the peer came.
    pub heard: &'a (dyn Fn() + Sync),
    /// Another stream waits for the place of this one.
    pub is_to_pause: &'a (dyn Fn() -> bool + Sync),
}

/// Slots that are on their way.
struct Flight {
    window: Semaphore,
    slots: Mutex<sending::Flight>,
}

impl Flight {
    fn slots(&self) -> MutexGuard<'_, sending::Flight> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sender<'_> {
    /// Sends to the mirror at the other end of `peer` what the target reads, which `open` connects to.
    ///
    /// # Errors
    /// The stream is to be gone on with later, or elsewhere.
    pub async fn run<S, F>(
        &self,
        peer: impl AsyncRead + AsyncWrite,
        open: impl FnOnce() -> F,
    ) -> Result<Sent, Ended>
    where
        S: AsyncRead + AsyncWrite + Unpin,
        F: Future<Output = std::io::Result<S>>,
    {
        let (mut reader, mut writer) = tokio::io::split(peer);
        let Sending { group, volume, point, base, token, .. } = *self.order;
        let begin = Begin { group, volume, point, base, token };
        Frame::Begin(begin).write(&mut writer).await.map_err(lost)?;
        let begun = timeout(BEGUN_WITHIN, Frame::read(&mut reader)).await;
        let begun = begun.map_err(|_| lost("the peer's mirror does not answer"))?;
        let taken = match begun.map_err(lost)? {
            Frame::Taken(taken) => taken,
            Frame::Refused(why) => {
                (self.heard)();
                return Err(Ended::Refused(why));
            }
            Frame::Begin(_) | Frame::Slots(_) => return Err(lost("the peer answers out of turn")),
        };
        (self.heard)();
        if taken.is_fed {
            return Ok(Sent::All);
        }
        // Nothing before that is missing there, whatever was recorded of it.
        let cursor = taken.to;
        self.progress.begun(cursor);
        let source = open().await.map_err(|error| Ended::Source(error.to_string()))?;
        let Sending { since, snapshot, .. } = *self.order;
        let wanted = Wanted { volume, from: since, to: snapshot, cursor, want_data: true };
        let (ahead, parts) = mpsc::channel(1);
        let flight = Flight { window: Semaphore::new(IN_FLIGHT_MAX), slots: Mutex::default() };
        tokio::select! {
            // The peer's own words come before those of a connection that it ended.
            biased;
            ended = self.hear(&mut reader, &flight) => ended,
            failed = self.read(source, wanted, ahead) => Err(Ended::Source(failed.to_string())),
            paused = self.feed(&mut writer, parts, cursor, &flight) => paused,
        }
    }

    /// Reads until it fails.
    async fn read(
        &self,
        source: impl AsyncRead + AsyncWrite + Unpin,
        wanted: Wanted,
        parts: mpsc::Sender<Part>,
    ) -> Failed {
        match history::read_parts(source, wanted, parts).await {
            Ok(()) => std::future::pending().await,
            Err(failed) => failed,
        }
    }

    /// Sends slots; returns where it paused.
    async fn feed(
        &self,
        writer: &mut (impl AsyncWrite + Unpin),
        mut parts: mpsc::Receiver<Part>,
        mut place: u64,
        flight: &Flight,
    ) -> Result<Sent, Ended> {
        let mut packer = Packer::default();
        loop {
            if (self.is_to_pause)() {
                // Slots on their way are waited for, so that none is sent again.
                let all = flight.window.acquire_many(IN_FLIGHT_MAX as u32).await;
                return all.map(|_| Sent::Paused).map_err(lost);
            }
            // The end of the parts is told by the one who reads them.
            let Some(part) = parts.recv().await else { return std::future::pending().await };
            for mut slots in cut(part, place, self.blocks_max()) {
                let (content, next) = (slots.part.blocks.len() * BLOCK_SIZE, slots.part.next);
                flight.slots().close(&mut slots);
                let packed = packer.pack(slots, self.order.compress).await;
                let packed = packed.map_err(|error| Ended::Source(error.to_string()))?;
                let frame = Frame::Slots(packed).encode().map_err(lost)?;
                flight.window.acquire().await.map_err(lost)?.forget();
                self.bucket.take(frame.len()).await;
                flight.slots().sent(next);
                write(writer, &frame).await.map_err(lost)?;
                let told = next.unwrap_or(self.order.size_blocks);
                self.progress.sent(told, content as u64, frame.len() as u64);
                match next {
                    Some(next) => place = next,
                    None => return std::future::pending().await,
                }
            }
        }
    }

    /// Blocks of one frame: under a low limit a frame is no longer than a second.
    fn blocks_max(&self) -> usize {
        match usize::try_from(self.bucket.limit()) {
            Ok(0) | Err(_) => BLOCKS_MAX,
            Ok(limit) => (limit / BLOCK_SIZE).clamp(1, BLOCKS_MAX),
        }
    }

    /// Takes the peer's answers until everything was taken.
    async fn hear(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        flight: &Flight,
    ) -> Result<Sent, Ended> {
        loop {
            let frame = timeout(SILENT_MAX, Frame::read(reader)).await;
            let silent = |_| lost(format!("the peer took nothing for {} s", SILENT_MAX.as_secs()));
            let taken = match frame.map_err(silent)?.map_err(lost)? {
                Frame::Taken(taken) => taken,
                Frame::Refused(why) => return Err(Ended::Refused(why)),
                Frame::Begin(_) | Frame::Slots(_) => {
                    return Err(lost("the peer answers out of turn"));
                }
            };
            (self.heard)();
            let heard = flight.slots().taken(taken);
            match heard.map_err(lost)? {
                Heard::All => return Ok(Sent::All),
                Heard::To(block) => self.progress.taken(block),
            }
            flight.window.add_permits(1);
        }
    }
}
